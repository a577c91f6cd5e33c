"""The forms in which prompts and their parameters are given, brought into one.

Must not know tokenizers or engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.names import Advice
from jaxspec.request import SAMPLING_ELSEWHERE, SamplingParams

#: A text, token ids, or vLLM's dictionary of either; ids may have their text beside them, which is only reported.
Prompt = str | Sequence[int] | Mapping[str, Any]
#: Messages, each {"role": ..., "content": ...}.
Conversation = Sequence[Mapping[str, Any]]
_PROMPT_KEYS = ("prompt", "prompt_token_ids")
_inside = "SamplingParams({}=...)".format
_FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
#: Arguments of generate, stream and chat that are called otherwise, or are SamplingParams' own.
CALL_ELSEWHERE = {
    **{name: here if isinstance(here, Advice) else _inside(here) if here in _FIELDS else
       here.removeprefix("generate(..., ").removesuffix(")") for name, here in SAMPLING_ELSEWHERE.items()},
    **{name: _inside(name) for name in _FIELDS},
    "chat_template": Advice("leave it out, the template is the checkpoint's own (chat_template.jinja beside it)"),
    "continue_final_message": Advice("leave it out, generate continues the text of a template applied by hand"),
    "lora_request": Advice("leave it out, adapters are not served; merge them into the checkpoint"),
    "num_speculative_tokens": "max_depth", "max_draft_tokens": "max_depth",
    "params": "sampling_params", "prompt_token_ids": "prompts", "inputs": "prompts", "conversation": "messages",
}  # fmt: skip


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One or many prompts as a list of texts and lists of token ids."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise ValueError(f"prompts must be a text, token ids, or a list of either, got {type(prompts).__name__}")
    many: list[Any] = [item.tolist() if isinstance(item, np.ndarray) else item for item in prompts]
    is_prompt = [isinstance(item, Sequence | Mapping) and not isinstance(item, bytes | bytearray) for item in many]
    if many and not any(is_prompt):
        return [many]
    if not all(is_prompt):
        odd = many[is_prompt.index(False)]
        raise ValueError(f"prompts must all be texts or lists of token ids, got {odd!r} among them")
    return many


def text_and_ids(prompt: Prompt, position: int) -> tuple[str | None, list[int] | None]:
    """What one prompt of a call says: its text, its token ids, or both.

    Raises:
      ValueError: a dictionary with other keys or values, or nothing in it.
    """
    where = f"at position {position}"
    if not isinstance(prompt, Mapping):
        given: dict[str, Any] = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    else:
        given = {key: value for key, value in prompt.items() if value is not None}
        if unknown := [key for key in given if key not in _PROMPT_KEYS]:
            hint = "; conversations go to LLM.chat" if "role" in unknown else ""
            raise ValueError(f"a prompt's keys must be of {list(_PROMPT_KEYS)}, got {unknown} {where}{hint}")
        if not given:
            raise ValueError(f"a prompt must have one of the keys {list(_PROMPT_KEYS)}, got {dict(prompt)!r} {where}")
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if text is not None and not isinstance(text, str):
        raise ValueError(f"a prompt's text must be a string, got {type(text).__name__} {where}")
    if ids is not None and (not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray)):
        raise ValueError(f"prompt_token_ids must be a list of token ids, got {type(ids).__name__} {where}")
    if not (text if ids is None else ids):
        raise ValueError(f"prompt must hold at least 1 token, got {prompt!r} {where}")
    return text, None if ids is None else list(ids)


def params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Parameters for each prompt, of one for all or one each.

    Raises:
      ValueError: something else, or another number of them.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, Sequence):
        raise ValueError(
            f"sampling_params must be one SamplingParams or one for each prompt, got {type(params).__name__}"
        )
    each = list(params)
    if len(each) != len(prompts):
        raise ValueError(
            f"sampling_params must be one SamplingParams or one for each prompt: got {len(each)} for {len(prompts)}"
        )
    for p in each:
        if not isinstance(p, SamplingParams):
            raise ValueError(f"sampling_params must hold SamplingParams, got {type(p).__name__}")
    return each
