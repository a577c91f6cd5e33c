"""What both clients say and hear: requests from Python values, small dataclasses from messages, typed errors.

Must not know channels or how a call is made. Ranges are the server's to check: what it refuses comes back as a
ServerError that names the field.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.rpc import error_details_pb2, status_pb2

from serve.client import names
from serve.proto import generation_pb2 as pb

#: A text, token ids, or the messages of a conversation ({"role": ..., "content": ...}).
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class ChatOptions(TypedDict, total=False):
    """How the chat template renders a conversation; `variables` reach it."""

    add_generation_prompt: bool
    variables: Mapping[str, Any]


class Options(ChatOptions, total=False):
    """What a request may say besides its prompt; serve/proto/generation.proto gives meanings, ranges and defaults.

    `json_schema` may be a mapping, `stop` one string. At most one of json_schema, json_object, regex, lark, choice.
    `speculation` False decodes token by token.
    """

    request_id: str
    model: str
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    logprobs: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    speculation: bool
    max_depth: int
    json_schema: str | Mapping[str, Any]
    json_object: bool
    regex: str
    lark: str
    choice: Sequence[str]
    priority: int
    route: str
    tpot_ms: float
    ttft_ms: float


class ServerError(Exception):
    """A call that the server, or the way to it, refused.

    Attributes:
      code: the gRPC status.
      message: what it says.
      retry_after: seconds after which another try makes sense; None: the server named none.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code, self.message, self.retry_after = code, message, retry_after

    @property
    def may_retry(self) -> bool:
        """The server is full for now, and said when to come back."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and self.retry_after is not None

    @property
    def unreachable(self) -> bool:
        """No connection came about: nobody listens there, or the network is in the way."""
        message = self.message.lower()
        return self.code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in message and "tls" not in message


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability; rank is 1 for the likeliest, None where it was not computed."""

    token_id: int
    logprob: float
    rank: int | None


@dataclasses.dataclass(frozen=True)
class PromptInfo:
    """First event of a stream. `seed` reproduces the output, also where the server chose it."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Delta:
    """What a message added to completion `index`. Of logprobs, a tuple a token: the chosen one, then the likeliest."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]


@dataclasses.dataclass(frozen=True)
class Finished:
    """The end of completion `index`.

    Attributes:
      reason: "stop" or "length".
      stop_reason: the request's own stop string or stop token that ended it; None for any other end.
      usage: tokens and seconds (Usage in serve/proto/generation.proto).
      speculation: what drafting did (SpeculationStats there).
    """

    index: int
    reason: str
    stop_reason: str | int | None
    usage: pb.Usage
    speculation: pb.SpeculationStats


Event = PromptInfo | Delta | Finished


@dataclasses.dataclass(frozen=True)
class Completion:
    """One whole completion; see Delta and Finished."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    finished: Finished

    @property
    def finish_reason(self) -> str:
        """ "stop" or "length"."""
        return self.finished.reason


@dataclasses.dataclass(frozen=True)
class Result:
    """All completions of a prompt, by index."""

    prompt: PromptInfo
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """Of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first completion."""
        return self.completions[0].token_ids


_PROMPT = "a prompt is a text, a list of token ids or a list of messages"
_UINT32 = f"from 0 to {2**32 - 1}"
#: What fields of the wire take, by type; what the server does not take of it, it refuses itself.
_ONE = {
    FieldDescriptor.TYPE_UINT32: f"an integer {_UINT32}",
    FieldDescriptor.TYPE_INT32: f"an integer from {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "a text",
}
#: And options that are more than one value.
_SEVERAL = {
    "json_schema": "a JSON schema, as a text or a mapping",
    "stop": "a text or a list of texts",
    "choice": "a list of texts",
    "stop_token_ids": f"a list of integers {_UINT32}",
    "allowed_token_ids": f"a list of at least one integer {_UINT32}",
    "logit_bias": f"numbers by token id, which are integers {_UINT32}",
}
_GRAMMAR = ("json_schema", "json_object", "regex", "lark", "choice")
#: Where options lie that are no fields of GenerateRequest itself.
_PATHS = {
    **{field.name: f"sampling.{field.name}" for field in pb.Sampling.DESCRIPTOR.fields},
    **{name: f"grammar.{name}" for name in _GRAMMAR},
    "choice": "grammar.choice.options",
    "speculation": "speculation.enabled",
    "max_depth": "speculation.max_depth",
    "tpot_ms": "slo.tpot_ms",
    "ttft_ms": "slo.ttft_ms",
}


def build_request(prompt: Prompt, options: Options | None = None) -> pb.GenerateRequest:
    """The message of a prompt and its options.

    Raises:
      ValueError: an unknown option, one of the wrong type, or two grammars.
    """
    given: dict[str, Any] = {name: value for name, value in (options or {}).items() if value is not None}
    unknown = sorted(set(given) - set(Options.__annotations__))
    if unknown:
        known = sorted(Options.__annotations__)
        raise ValueError(f"unknown options {unknown}{names.hints(unknown, known, names.ELSEWHERE)}; known are {known}")
    request = pb.GenerateRequest()
    chat = {name: given.pop(name) for name in ("add_generation_prompt", "variables") if name in given}
    fill_prompt(request, prompt, **chat)
    for name, value in given.items():
        _set(request, name, value)
    return request


def fill_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest,
    prompt: Prompt,
    *,
    add_generation_prompt: bool | None = None,
    variables: Mapping[str, Any] | None = None,
) -> None:
    """Puts a prompt into a message.

    Raises:
      ValueError: none of the forms of Prompt, or what is for conversations with another form.
    """
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
        raise ValueError(f"{_PROMPT}, got {prompt!r}")
    items: list[Any] = [] if isinstance(prompt, str) else list(prompt)
    conversation = bool(items) and isinstance(items[0], Mapping)
    if not conversation and (add_generation_prompt is not None or variables is not None):
        raise ValueError("add_generation_prompt and variables are for conversations, and the prompt is none")
    try:
        if isinstance(prompt, str):
            request.text = prompt
        elif conversation:
            for message in items:
                unknown = sorted(set(message) - {"role", "content"})
                if unknown:
                    raise ValueError(f"a message has 'role' and 'content', got {unknown} too")
                request.chat.messages.add(**{**message, "content": _content(message.get("content", ""))})
            if add_generation_prompt is not None:
                request.chat.add_generation_prompt = add_generation_prompt
            if variables is not None:
                request.chat.variables_json = json.dumps(variables)
        elif isinstance(request, pb.GenerateRequest):
            request.tokens.SetInParent()
            try:
                request.tokens.ids.extend(items)
            except ValueError as e:
                raise ValueError(f"a prompt's token ids must be integers {_UINT32}: {e}") from e
        else:
            raise ValueError("only texts and conversations can be tokenized")
    except (TypeError, UnicodeEncodeError) as e:
        raise ValueError(f"{_PROMPT}: {e}") from e


def _content(content: Any) -> Any:
    """A message's text, of OpenAI's list of parts too: a line for each, as the server's own templates have it."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a message's content must be a text or a list of text parts, got {content!r}")
    return "\n".join(texts)


def _set(request: pb.GenerateRequest, name: str, value: Any) -> None:
    if name in _GRAMMAR and request.HasField("grammar"):
        raise ValueError(f"at most one of {', '.join(_GRAMMAR)} can be given")
    if name == "json_schema" and isinstance(value, Mapping):
        value = json.dumps(value)
    if name in ("stop", "choice") and isinstance(value, str):
        value = [value]
    *parts, field = _PATHS.get(name, name).split(".")
    message: Any = functools.reduce(getattr, parts, request)
    takes = _SEVERAL.get(name) or _ONE[message.DESCRIPTOR.fields_by_name[field].type]
    try:
        if isinstance(value, bool) and takes.startswith("an integer"):
            raise TypeError("protobuf would take it")
        if name == "allowed_token_ids" and not (isinstance(value, Sequence) and value):
            raise TypeError("none would stand for all")
        if name == "logit_bias":
            message.logit_bias.update(value)
        elif name in ("stop", "stop_token_ids", "allowed_token_ids", "choice"):
            getattr(message, field).extend(value)
            if name == "choice":
                message.SetInParent()
        else:
            setattr(message, field, value)
    except (TypeError, ValueError, AttributeError) as e:
        raise ValueError(f"{name} must be {takes}, got {value!r}") from e


def read_event(message: pb.GenerateStreamResponse) -> Event:
    """One message of a stream."""
    match message.WhichOneof("event"):
        case "prompt":
            return _prompt(message.prompt)
        case "finished":
            return _finished(message.finished)
        case _:
            delta = message.delta
            return Delta(delta.index, delta.text, tuple(delta.token_ids), _logprobs(delta.logprobs))


def read_result(message: pb.GenerateResponse) -> Result:
    """A whole answer."""
    return Result(
        _prompt(message.prompt),
        tuple(
            Completion(c.index, c.text, tuple(c.token_ids), _logprobs(c.logprobs), _finished(c.finished))
            for c in message.completions
        ),
    )


def _prompt(info: pb.PromptInfo) -> PromptInfo:
    return PromptInfo(info.request_id, info.model, info.prompt_tokens, info.seed)


def _finished(finished: pb.Finished) -> Finished:
    by = finished.WhichOneof("stopped_by")
    return Finished(
        finished.index,
        pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower(),
        None if by is None else getattr(finished, by),
        finished.usage,
        finished.speculation,
    )


def _logprobs(tokens: Sequence[pb.TokenLogprobs]) -> tuple[tuple[TokenLogprob, ...], ...]:
    return tuple(
        tuple(TokenLogprob(entry.token_id, entry.logprob, entry.rank or None) for entry in token.entries)
        for token in tokens
    )


def read_error(error: grpc.RpcError) -> ServerError:
    """The typed error of a failed call.

    gRPC ends what a stopping server has not taken in yet as CANCELLED, in no other words; nobody cancelled it, and for
    who asked the server is away.
    """
    failed: Any = error
    if failed.code() is grpc.StatusCode.CANCELLED and failed.details() == grpc.StatusCode.CANCELLED.name:
        return ServerError(grpc.StatusCode.UNAVAILABLE, "the server stopped before it took the call in")
    retry_after = None
    for key, value in failed.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            for detail in status.details:
                info = error_details_pb2.RetryInfo()
                if detail.Unpack(info):
                    retry_after = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return ServerError(failed.code(), failed.details() or "", retry_after)
