"""From messages of jaxspec.v1 to jobs: every field is checked here, and refused by name, value and what is allowed.

Sizes come first, while a message is only bytes: what is converted on the event loop must be small. What needs the
tokenizer or the vocabulary is the generator's to check. What other protocols ask alike is checked by the same
functions. Must not know how a job runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
import uuid
from collections.abc import Iterable, Sized
from typing import Any, NoReturn

import grpc

from jaxspec.request import MAX_CHOICES, MAX_PRIORITY, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams
from jaxspec.text import grammar as grammars
from jaxspec.text.grammar import GrammarKind, GrammarSpec
from serve.core.errors import StatusError, invalid
from serve.core.jobs import Chat, Job, Prompt
from serve.proto import generation_pb2 as pb

MAX_REQUEST_ID = 128
#: Every token is compared with the tails of the stop strings, so their length is paid for by everybody.
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
#: Ids of one Abort.
MAX_ABORTED = 4096
#: Characters of a chat's variables, which are parsed on the event loop.
MAX_VARIABLES = 2**20
#: Bytes that an answer may take for each token (its id and text), and for each of its logprobs in jaxspec.v1.
_TOKEN_BYTES, LOGPROB_BYTES = 16, 20
_ROUTE = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID}}}")
INT32_MAX = 2**31 - 1
#: Errors quote what was given, but not all of a megabyte.
_QUOTED = 80


@dataclasses.dataclass(frozen=True)
class Limits:
    """What no message can exceed, whatever else it says.

    Attributes:
      tokens: of prompt and output together.
      characters: of a text: `tokens` of the tokenizer's longest token.
      default_tokens: of the output, where a request names no max_tokens.
      answer_bytes: of one message of an answer.
    """

    tokens: int
    characters: int
    default_tokens: int
    answer_bytes: int


def to_job(request: pb.GenerateRequest, model: str, limits: Limits, *, deadline: float | None, stream: bool) -> Job:
    """What a client asks for.

    Args:
      model: the served name.
      deadline: on time.monotonic's clock, or None.
      stream: whether the answer is a stream.

    Raises:
      StatusError: INVALID_ARGUMENT, or NOT_FOUND for another model.
    """
    check_model(request, model)
    params, fill_context = _params(request)
    grammar = _grammar(request.grammar) if request.HasField("grammar") else None
    check_min_tokens("sampling.min_tokens", params, grammar)
    if not stream:
        check_answer(params, fill_context, limits, params.n, LOGPROB_BYTES, "call GenerateStream")
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise invalid(f"priority must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {request.priority}")
    return Job(
        request_id=request_id_of(request.request_id if request.HasField("request_id") else None, "gen"),
        prompt=_prompt(request, limits),
        params=params,
        fill_context=fill_context,
        priority=request.priority,
        max_depth=_max_depth(request.speculation),
        grammar=grammar,
        route=_route(request.route),
        deadline=deadline,
        stream=stream,
        tpot_ms=_milliseconds(request.slo, "tpot_ms"),
        ttft_ms=_milliseconds(request.slo, "ttft_ms"),
    )


def check_model(request: Any, model: str) -> None:
    """Refuses with NOT_FOUND a request that names another model."""
    if request.HasField("model") and request.model != model:
        raise StatusError(grpc.StatusCode.NOT_FOUND, f"model must be {model!r} or absent, got {_quoted(request.model)}")


def deadline_of(context: Any) -> float | None:
    """The call's deadline on time.monotonic's clock; None: the client set none."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


# What every protocol asks alike. `name` is the field's in its messages, for errors, which are all StatusErrors.


def check_count(name: str, entries: Sized, limit: int) -> None:
    """Refuses a repeated field that is too long, before it is copied."""
    if len(entries) > limit:
        raise invalid(f"{name} may have at most {limit} entries, got {len(entries)}")


def check_sampling(name: str, sampling: Any) -> None:
    """Refuses what is too large in a message with vLLM's names, before it is copied."""
    check_count(f"{name}.logit_bias", sampling.logit_bias, MAX_LOGIT_BIAS)
    check_count(f"{name}.stop", sampling.stop, MAX_STOP_STRINGS)
    check_count(f"{name}.stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS)
    for string in sampling.stop:
        if len(string) > MAX_STOP_LENGTH:
            raise invalid(f"{name}.stop may hold strings of {MAX_STOP_LENGTH} characters, got {_quoted(string)}")


def sampling_params(name: str, n: int, fields: dict[str, Any]) -> SamplingParams:
    """Parameters, whose other errors are found here.

    Args:
      name: of the message that holds all but n.
    """
    n_name = "n" if name == "sampling" else f"{name}.n"
    if not 1 <= n <= MAX_CHOICES:
        raise invalid(f"{n_name} must be an integer from 1 to {MAX_CHOICES}, got {n}")
    try:
        return SamplingParams(n=n, **fields)
    except ValueError as e:
        raise invalid(f"{name}.{e}") from e


def check_min_tokens(name: str, params: SamplingParams, grammar: GrammarSpec | None) -> None:
    """Refuses min_tokens beside a grammar."""
    if grammar is not None and params.min_tokens:
        raise invalid(
            f"{name} must be 0 or absent where a grammar is given, got {params.min_tokens}: "
            "the grammar alone decides where the output may end"
        )


def check_answer(
    params: SamplingParams, fill_context: bool, limits: Limits, completions: int, logprob_bytes: int, advice: str
) -> None:
    """Refuses what could not be answered in one message, before anything is generated for it.

    Args:
      completions: that share the message.
      logprob_bytes: what one of them takes in it.
      advice: how to ask instead.
    """
    tokens = limits.default_tokens if fill_context else min(params.max_tokens or limits.tokens, limits.tokens)
    entries = 0 if params.logprobs is None else params.logprobs + 1
    size = completions * tokens * (_TOKEN_BYTES + entries * logprob_bytes)
    if size > limits.answer_bytes:
        raise invalid(
            f"n x max_tokens x (logprobs + 1) = {completions} x {tokens} x {entries or 1} must fit into a message of "
            f"{limits.answer_bytes} bytes, got about {size} bytes: {advice}, or ask for less"
        )


def prompt_tokens(name: str, ids: Any, limits: Limits) -> tuple[int, ...]:
    """A prompt of token ids."""
    if len(ids) >= limits.tokens:
        raise invalid(f"{name} must be shorter than {limits.tokens} tokens, got {len(ids)}")
    if not ids:
        raise invalid(f"{name} must hold at least 1 token, got 0")
    return tuple(ids)


def prompt_text(name: str, text: str, limits: Limits) -> str:
    """A prompt of text."""
    if not text:
        raise invalid(f"{name} must hold at least 1 token, got ''")
    if len(text) > limits.characters:
        raise invalid(
            f"{name} must be at most {limits.characters} characters, which {limits.tokens} tokens may hold at most, "
            f"got {len(text)}"
        )
    return text


def request_id_of(given: str | None, prefix: str) -> str:
    """The id that a client gave, or else a new one."""
    if given is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if _REQUEST_ID.fullmatch(given) is None:
        raise invalid(
            f"request_id must be 1 to {MAX_REQUEST_ID} printable ASCII characters without spaces, got {_quoted(given)}"
        )
    return given


def grammar_of(name: str, kind: GrammarKind, value: str | bool | Iterable[str]) -> GrammarSpec:
    """A grammar.

    Args:
      kind: GrammarSpec's.
      value: its text; the options of a choice; of json_object, whether it is wanted.
    """
    try:
        if kind == "json_object":
            if not value:
                raise invalid(f"{name} must be true, got false; leave it out instead")
            return GrammarSpec(kind)
        if isinstance(value, str):
            if not value.strip():
                raise invalid(f"{name} must not be empty, got {_quoted(value)}")
            return GrammarSpec(kind, value)
        assert not isinstance(value, bool)
        return GrammarSpec(kind, tuple(value))
    except ValueError as e:
        raise invalid(f"{name}: {e}") from e


def choice_options(name: str, options: Any) -> tuple[str, ...]:
    """The options of a choice."""
    check_count(name, options, grammars.MAX_CHOICES)
    if not options:
        raise invalid(f"{name} must hold at least 1 text, got 0")
    return tuple(options)


# Parts of jaxspec.v1's messages.


def chat_of(chat: pb.Chat, name: str, limits: Limits) -> Chat:
    """A conversation.

    Args:
      name: of the field, for errors.
    """
    if not chat.messages:
        raise invalid(f"{name}.messages must hold at least 1 message, got 0")
    check_count(f"{name}.messages", chat.messages, limits.tokens)
    for position, message in enumerate(chat.messages):
        if not message.role:
            raise invalid(f"{name}.messages[{position}].role must not be empty, got ''")
    variables = _variables(chat.variables_json, f"{name}.variables_json") if chat.HasField("variables_json") else {}
    try:
        return Chat(
            messages=tuple({"role": message.role, "content": message.content} for message in chat.messages),
            add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
            variables=variables,
        )
    except ValueError as e:
        raise invalid(f"{name}: {e}") from e


def _quoted(value: str) -> str:
    return repr(value) if len(value) <= _QUOTED else f"{value[:_QUOTED]!r}... ({len(value)} characters)"


def _route(route: str) -> str:
    if _ROUTE.fullmatch(route) is None:
        raise invalid(f"route must be at most 64 characters of [A-Za-z0-9_.-], got {_quoted(route)}")
    return route


def _prompt(request: pb.GenerateRequest, limits: Limits) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            return prompt_text("text", request.text, limits)
        case "tokens":
            return prompt_tokens("tokens.ids", request.tokens.ids, limits)
        case "chat":
            return chat_of(request.chat, "chat", limits)
        case _:
            raise invalid("input must be exactly one of text, tokens and chat, got none")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _variables(text: str, name: str) -> dict[str, Any]:
    if len(text) > MAX_VARIABLES:
        raise invalid(f"{name} must be at most {MAX_VARIABLES} characters, got {len(text)}")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise invalid(f"{name} must be a JSON object: {e}") from e
    if not isinstance(value, dict):
        raise invalid(f"{name} must be a JSON object, got {_quoted(text)}")
    return value


def _params(request: pb.GenerateRequest) -> tuple[SamplingParams, bool]:
    """(parameters, whether max_tokens was left to the server)."""
    sampling = request.sampling
    check_sampling("sampling", sampling)
    check_count("sampling.allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
    fields: dict[str, Any] = {"max_tokens": None}
    for field, value in sampling.ListFields():
        if field.name == "logit_bias":
            value = dict(value)
        elif field.name in ("stop", "stop_token_ids", "allowed_token_ids"):
            value = tuple(value)
        fields[field.name] = value
    params = sampling_params("sampling", request.n if request.HasField("n") else 1, fields)
    return params, not sampling.HasField("max_tokens")


def _max_depth(speculation: pb.Speculation) -> int | None:
    depth = speculation.max_depth if speculation.HasField("max_depth") else None
    if depth is not None and depth > INT32_MAX:
        raise invalid(f"speculation.max_depth must be an integer from 0 to {INT32_MAX}, got {depth}")
    if speculation.HasField("enabled") and not speculation.enabled:
        if depth:
            raise invalid(f"speculation.max_depth must be 0 or absent where speculation.enabled is false, got {depth}")
        return 0
    return depth


def _milliseconds(slo: pb.Slo, name: str) -> float | None:
    if not slo.HasField(name):
        return None
    value = getattr(slo, name)
    if not 0 < value < math.inf:
        raise invalid(f"slo.{name} must be a finite number above 0, got {value!r}")
    return value


def _grammar(grammar: pb.Grammar) -> GrammarSpec:
    form = grammar.WhichOneof("form")
    if form is None:
        raise invalid("grammar must hold exactly one of json_schema, regex, lark, choice and json_object, got none")
    if form == "choice":
        return grammar_of("grammar.choice", form, choice_options("grammar.choice.options", grammar.choice.options))
    return grammar_of(f"grammar.{form}", form, getattr(grammar, form))
