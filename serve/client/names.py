"""What is said of an option that a request, or the command, does not have: which one was meant.

Standard library only: a client needs no engine, and knows no names of its (jaxspec.names is the engine's own).
"""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

#: What vLLM, SGLang, transformers and llama.cpp call the options of a request.
ELSEWHERE = {
    "max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "n_predict": "max_tokens",
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "lark",
    "grammar": "lark", "schema": "json_schema", "response_format": "json_schema", "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty", "num_return_sequences": "n", "do_sample": "temperature",
    "best_of": "leave it out, ask for n completions and keep the one that you like best", "top_n_tokens": "logprobs",
    "bad_words": "leave it out, logit_bias makes tokens unlikely",
    "prompt_logprobs": "leave it out, log-probabilities are of generated tokens alone",
}  # fmt: skip
#: The same of flags, with those that say where the server is.
FLAGS_ELSEWHERE = {
    **ELSEWHERE, "host": "target", "port": "target", "url": "target", "server": "target", "address": "target",
    "base_url": "target", "api_key": "token_file", "system_prompt": "system", "max_retries": "retries",
    "prompt": "leave the flag out, the prompt is given as it is",
    "stream": "leave it out, texts are streamed as they come",
    "best_of": "",
}  # fmt: skip
#: How alike two names are at least of which one was meant.
_ALIKE = 0.7


def hints(unknown: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]) -> str:
    """What was probably meant, as the end of a message; "" where nothing is alike.

    Args:
      elsewhere: what other projects' names are called here, of which those count that are known; or what to do, in
        several words.
    """
    said = ""
    for name in unknown:
        here = elsewhere.get(name, "")
        if " " in here:
            said += f"; {name!r}: {here}"
        elif here := here if here in known else _nearest(name, known):
            said += f"; for {name!r} say {here!r}"
    return said


def _nearest(name: str, known: Iterable[str]) -> str:
    bare, name = {one.lstrip("-"): one for one in known}, name.lstrip("-")
    close = difflib.get_close_matches(name, bare, 1, _ALIKE) or [one for one in bare if one.startswith(name)]
    return bare[close[0]] if close else ""


def parse(
    p: argparse.ArgumentParser, argv: Sequence[str] | None, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> argparse.Namespace:
    """As `p.parse_args`, with flags in full, and what is wrong in one line, by `p.error` from then on too.

    Args:
      elsewhere: see `hints`, as names of arguments.
    """
    p.allow_abbrev = False
    p.error = functools.partial(_refuse, p)
    args, left = p.parse_known_args(argv)
    if left:
        known = [flag for action in p._actions for flag in action.option_strings]
        flags = {_flag(name): here if " " in here else _flag(here) for name, here in elsewhere.items()}
        hint = hints([word.partition("=")[0] for word in left if word.startswith("--")], known, flags)
        if not left[0].startswith("-") and "prompt" in args:
            hint += "; a prompt of several words needs quotes"
        p.error(f"unrecognized arguments: {' '.join(left)}{hint}")
    return args


def _refuse(p: argparse.ArgumentParser, message: str) -> NoReturn:
    p.exit(2, f"{p.prog}: error: {message} (see --help)\n")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
