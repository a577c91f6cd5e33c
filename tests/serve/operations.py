"""Calls that nobody thought of, by both protocols, and what a client may hear: strategies for test_fuzz.py."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import grpc
import hypothesis.strategies as st
from google.protobuf import message_factory
from google.protobuf.message import DecodeError
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2

from serve.proto import admin_pb2
from serve.proto import generation_pb2 as pb

#: Requests that are sent at once.
BATCH = 50
Code = grpc.StatusCode
#: What a client may hear, whatever it sends.
EXPLAINED = frozenset({
    Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED, Code.CANCELLED,
})  # fmt: skip
#: What the gateway hears where it must not try again.
LASTING = EXPLAINED | {Code.ABORTED, Code.FAILED_PRECONDITION}
NEVER = frozenset({Code.UNIMPLEMENTED})


@dataclasses.dataclass(frozen=True)
class Operation:
    """A call.

    Attributes:
      service: "generation", "admin", "vllm", or "bytes": then the method is a path and the request's bytes are sent.
      timeout: seconds, or None.
      reads: messages after which the client leaves; None: it stays.
      allowed: the statuses that it may end with.
    """

    service: str
    method: str
    request: Any
    timeout: float | None = None
    reads: int | None = None
    allowed: frozenset[Code] = EXPLAINED


ANY_FLOAT = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0])
ANY_UINT = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 13, 64, 65, 2**31, 2**32 - 1])
ANY_INT = st.integers(-(2**31), 2**31 - 1) | st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1])
TOKEN = st.integers(0, 95)
WORD = st.text('abcdefghijkl{}[]": 0123', min_size=1, max_size=40)
TEXT = st.text(max_size=30) | WORD
ID = st.text(max_size=6) | st.sampled_from(["a", "b", "c", "x" * 129, "with space"])
PATIENCE = st.none() | st.sampled_from([0.001, 0.02, 5.0])


def mostly(valid: st.SearchStrategy[Any], anything: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Valid values but for one in twenty-four: of twenty fields most messages should get somewhere."""
    return st.integers(0, 23).flatmap(lambda i: anything if i == 0 else valid)


#: What both protocols have under the same name and in the same type.
SHARED = {
    "temperature": mostly(st.sampled_from([0.0, 0.75, 1.0, 2.0]), ANY_FLOAT),
    "top_p": mostly(st.sampled_from([0.5, 0.875, 1.0]), ANY_FLOAT),
    "min_p": mostly(st.sampled_from([0.0, 0.125]), ANY_FLOAT),
    "min_tokens": mostly(st.just(0) | st.just(1), ANY_UINT),
    "stop": mostly(st.lists(st.text("abc", min_size=1, max_size=3), max_size=3), st.lists(TEXT, max_size=70)),
    "stop_token_ids": mostly(st.lists(TOKEN, max_size=4), st.lists(ANY_UINT, max_size=40)),
    "ignore_eos": st.booleans(),
    "presence_penalty": mostly(st.sampled_from([-1.0, 0.0, 1.5]), ANY_FLOAT),
    "frequency_penalty": mostly(st.sampled_from([-1.0, 0.0, 1.5]), ANY_FLOAT),
    "repetition_penalty": mostly(st.sampled_from([0.75, 1.0, 1.25]), ANY_FLOAT),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
}
BIAS = st.sampled_from([-100.0, 0.5, 100.0])
MAX_TOKENS = mostly(st.integers(1, 12), ANY_UINT)
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": MAX_TOKENS},
    optional={
        **SHARED,
        "top_k": mostly(st.sampled_from([-1, 0, 1, 20]), ANY_INT),
        "seed": ANY_UINT,
        "allowed_token_ids": mostly(st.lists(TOKEN, min_size=1, max_size=6), st.lists(ANY_UINT, max_size=6)),
        "logit_bias": mostly(
            st.dictionaries(TOKEN, BIAS, max_size=3), st.dictionaries(ANY_UINT, ANY_FLOAT, max_size=3)
        ),
        "logprobs": mostly(st.integers(0, 20), ANY_UINT),
    },
).map(lambda fields: pb.Sampling(**fields))
VARIABLES = st.sampled_from([
    "{}", '{"x": 1}', '{"enable_thinking": false, "tools": [{"a": [1, 2]}]}', '{"messages": []}', "[]", "", "{", "NaN",
    '{"x": NaN}', '{"x": 1e999}', '{"add_generation_prompt": 3}', '{"x": ' + "[" * 3000 + "]" * 3000 + "}",
    '{"messages": 1, "messages": 2}', '{"\\u0000": "\\ud800"}', '{"self": {"__class__": 1}}',
])  # fmt: skip
CHAT = st.builds(
    lambda messages, more: pb.Chat(messages=messages, **more),
    st.lists(st.builds(pb.Message, role=st.sampled_from(["user", "assistant", "", "x"]), content=TEXT), max_size=3),
    st.fixed_dictionaries(
        {}, optional={"add_generation_prompt": st.booleans(), "variables_json": VARIABLES | TEXT}
    ),
)  # fmt: skip
INPUT = mostly(
    st.one_of(
        WORD.map(lambda text: {"text": text}),
        st.lists(TOKEN, min_size=1, max_size=50).map(lambda ids: {"tokens": pb.TokenIds(ids=ids)}),
        CHAT.map(lambda chat: {"chat": chat}),
    ),
    TEXT.map(lambda text: {"text": text})
    | st.lists(ANY_UINT, max_size=300).map(lambda ids: {"tokens": pb.TokenIds(ids=ids)})
    | st.just({}),
)
#: (kind of a GrammarSpec, value). Few enough different ones that most are compiled once.
CONSTRAINT = st.one_of(
    st.tuples(st.just("regex"), st.sampled_from(["[a-c]+", "(ab|cd){1,4}", "a(", "", "(a*)*b", "[^a-z]{2}", "a{999}"])),
    st.tuples(
        st.just("json_schema"),
        st.sampled_from([
            '{"type": "string", "maxLength": 5}', '{"type": "integer", "minimum": 3, "maximum": 4000}', "{", "true",
            "false", "[]", '{"$ref": "#"}', '{"enum": ["ab", "abc", 1, null]}', '{"type": "nothing"}', "NaN", '"a"',
            '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}', '{"$ref": "http://a.test/b"}',
            '{"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"const": 5}}}',
            '{"type": "string", "pattern": "(?=a)b"}', '{"type": "number", "multipleOf": 0}',
        ]),
    ),
    st.tuples(
        st.just("lark"),
        st.sampled_from([
            'start: "a" | "b" start', "start: start", 'start: x\nx: "a" y?\ny: /[0-9]{2}/', "start:", "start: nothing",
            'start: "(" start ")" |', 'start: e\ne: e "+" e | /[0-9]/', "%json {}", 'start: %json {"type": "null"}',
        ]),
    ),
    st.tuples(
        st.just("choice"), st.sampled_from([["a"], ["ab", "abc", "x"], [""], [], ["a"] * 4097, ["é", "\0", "日本"]])
    ),
    st.just(("json_object", True)),
    st.just(("json_object", False)),
)  # fmt: skip


def as_grammar(constraint: tuple[str, Any]) -> pb.Grammar:
    kind, value = constraint
    return pb.Grammar(**{kind: pb.Choice(options=value) if kind == "choice" else value})


def as_constraint(constraint: tuple[str, Any]) -> dict[str, Any]:
    kind, value = constraint
    if kind == "choice":
        return {"choice": vllm.ChoiceConstraint(choices=value)}
    return {"grammar" if kind == "lark" else kind: value}


#: One request in eight carries one.
MAYBE_CONSTRAINT = st.integers(0, 7).flatmap(lambda i: CONSTRAINT if i == 0 else st.none())
GENERATE = st.builds(
    lambda prompt, fields, constraint: pb.GenerateRequest(
        **prompt, **fields, grammar=None if constraint is None else as_grammar(constraint)
    ),
    INPUT,
    st.fixed_dictionaries(
        {"sampling": SAMPLING},
        optional={
            "request_id": ID,
            "model": mostly(st.just("demo"), TEXT),
            "n": mostly(st.integers(1, 3), ANY_UINT),
            "priority": mostly(st.integers(-5, 5), ANY_INT),
            "route": mostly(st.sampled_from(["code", "chat.v1", ""]), TEXT),
            "speculation": st.builds(pb.Speculation, enabled=st.booleans(), max_depth=ANY_UINT),
            "slo": st.builds(pb.Slo, tpot_ms=mostly(st.just(5.0), ANY_FLOAT), ttft_ms=mostly(st.just(50.0), ANY_FLOAT)),
        },
    ),
    MAYBE_CONSTRAINT,
)
VLLM_SAMPLING = st.builds(
    lambda fields, constraint: vllm.SamplingParams(
        **fields, **({} if constraint is None else as_constraint(constraint))
    ),
    st.fixed_dictionaries(
        {"max_tokens": MAX_TOKENS},
        optional={
            **SHARED,
            "top_k": mostly(st.sampled_from([0, 1, 20]), ANY_UINT),
            "seed": ANY_INT,
            "n": mostly(st.integers(0, 3), ANY_UINT),
            "logit_bias": mostly(
                st.dictionaries(TOKEN, BIAS, max_size=3), st.dictionaries(ANY_INT, ANY_FLOAT, max_size=3)
            ),
            "logprobs": mostly(st.integers(0, 20), ANY_INT),
            "spaces_between_special_tokens": st.booleans(),
            "grammar_from_first_token": st.booleans(),
        },
    ),
    MAYBE_CONSTRAINT,
)
#: Fields of the protocol that this server refuses, now and then.
UNSUPPORTED = st.sampled_from([
    {"data_parallel_rank": 1}, {"kv_transfer_params_json": "{}"}, {"kv_transfer_params": vllm.KvTransferParams()},
    {"mm_inputs": vllm.MultimodalInputs()}, {"media_refs": vllm.MediaRefs()},
    {"extra_mm_inputs": [vllm.MultimodalInputs()]},
])  # fmt: skip
VLLM_GENERATE = st.builds(
    lambda prompt, sampling, name, stream, more: vllm.GenerateRequest(
        **prompt, sampling_params=sampling, request_id=name, stream=stream, **more
    ),
    mostly(
        st.lists(TOKEN, min_size=1, max_size=50).map(lambda ids: {"tokenized": vllm.TokenizedInput(input_ids=ids)})
        | WORD.map(lambda text: {"text": text}),
        st.lists(ANY_UINT, max_size=300).map(lambda ids: {"tokenized": vllm.TokenizedInput(input_ids=ids)})
        | TEXT.map(lambda text: {"text": text})
        | st.just({}),
    ),
    VLLM_SAMPLING,
    ID,
    st.booleans(),
    mostly(st.just({}), UNSUPPORTED),
)
IDS = st.lists(ID, max_size=4)


def calls(service: str, *requests: tuple[str, Any], **more: Any) -> st.SearchStrategy[Operation]:
    """One of these (method, request)."""
    return st.sampled_from([Operation(service, method, request, **more) for method, request in requests])


SPECULATION = admin_pb2.SetSpeculationRequest
GENERATION_CALLS = st.one_of(
    *[st.builds(Operation, st.just("generation"), st.just("GenerateStream"), GENERATE, PATIENCE)] * 3,
    *[st.builds(Operation, st.just("generation"), st.just("Generate"), GENERATE, PATIENCE)] * 2,
    st.builds(
        Operation, st.just("generation"), st.just("GenerateStream"), GENERATE, st.none(), reads=st.integers(0, 4)
    ),
    st.builds(Operation, st.just("generation"), st.just("Abort"), st.builds(pb.AbortRequest, request_ids=IDS)),
    st.builds(
        Operation,
        st.just("generation"),
        st.just("Tokenize"),
        st.builds(
            lambda form, more: pb.TokenizeRequest(**form, **more),
            TEXT.map(lambda t: {"text": t}) | CHAT.map(lambda c: {"chat": c}) | st.just({}),
            st.fixed_dictionaries({}, optional={"add_special_tokens": st.booleans()}),
        ),
    ),
    st.builds(
        Operation,
        st.just("generation"),
        st.just("Detokenize"),
        st.lists(mostly(TOKEN, ANY_UINT), max_size=8).map(lambda i: pb.DetokenizeRequest(ids=i)),
    ),
)
ADMIN_CALLS = calls(
    "admin",
    ("GetServerInfo", admin_pb2.GetServerInfoRequest()),
    ("GetLoads", admin_pb2.GetLoadsRequest()),
    ("FlushCache", admin_pb2.FlushCacheRequest()),
    ("SetSpeculation", SPECULATION(policy="off")),
    ("SetSpeculation", SPECULATION(policy="static", depth=3)),
    ("SetSpeculation", SPECULATION(policy="static", depth=2**32 - 1)),
    ("SetSpeculation", SPECULATION(policy="static")),
    ("SetSpeculation", SPECULATION(policy="adaptive")),
    ("SetSpeculation", SPECULATION(policy="nonsense")),
    ("UpdateDrafter", admin_pb2.UpdateDrafterRequest(directory="nowhere")),
    ("UpdateDrafter", admin_pb2.UpdateDrafterRequest(trial=False)),
    ("Drain", admin_pb2.DrainRequest(grace_seconds=math.nan)),
    ("Drain", admin_pb2.DrainRequest(grace_seconds=-1.0)),
)
VLLM_CALLS = st.one_of(
    *[
        st.builds(
            Operation, st.just("vllm"), st.just("Generate"), VLLM_GENERATE, PATIENCE, st.none(), st.just(LASTING)
        )
    ] * 3,
    st.builds(
        Operation, st.just("vllm"), st.just("Generate"), VLLM_GENERATE, st.none(), st.integers(0, 4), st.just(LASTING)
    ),
    st.builds(Operation, st.just("vllm"), st.just("Abort"), st.builds(vllm.AbortRequest, request_ids=IDS)),
    calls(
        "vllm",
        ("HealthCheck", vllm.HealthCheckRequest()),
        ("GetModelInfo", vllm.GetModelInfoRequest()),
        ("GetServerInfo", vllm.GetServerInfoRequest()),
        ("GetLoads", vllm.GetLoadsRequest()),
        ("GetLoads", vllm.GetLoadsRequest(dp_rank=5)),
        ("FlushCache", common_pb2.FlushCacheRequest(timeout_s=math.nan)),
        ("FlushCache", common_pb2.FlushCacheRequest(timeout_s=1e30)),
        ("GetTokenizer", common_pb2.GetTokenizerRequest()),
    ),
    calls("vllm", ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()), timeout=0.05, reads=2),
    calls(
        "vllm",
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest(start_sequence_number=7)),
        allowed=frozenset({Code.OUT_OF_RANGE}),
    ),
    calls(
        "vllm",
        ("Embed", vllm.EmbedRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        allowed=NEVER,
    ),
)  # fmt: skip
#: Paths of the methods, with the messages that they take. Drain is left out: bytes may happen to be one.
TAKES = {
    f"/{service.full_name}/{method.name}": message_factory.GetMessageClass(method.input_type)
    for services in (pb, vllm)
    for service in services.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
STREAMS = {
    f"/{service.full_name}/{method.name}"
    for services in (pb, vllm)
    for service in services.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.server_streaming
}


def sent_bytes(path: str, data: bytes) -> Operation:
    """UNKNOWN where they are no message, and never where they are."""
    try:
        TAKES[path].FromString(data)
    except DecodeError:
        return Operation("bytes", path, data, allowed=frozenset({Code.UNKNOWN}))
    return Operation("bytes", path, data, 1.0, allowed=LASTING | NEVER | {Code.OUT_OF_RANGE})


def spoilt(message: Any, at: int, byte: int) -> bytes:
    """A message with one byte changed."""
    data = bytearray(message.SerializeToString())
    if data:
        data[at % len(data)] = byte
    return bytes(data)


BYTES = st.one_of(
    st.builds(sent_bytes, st.sampled_from(sorted(TAKES)), st.binary(max_size=60)),
    st.builds(
        lambda message, at, byte: sent_bytes("/jaxspec.v1.GenerationService/Generate", spoilt(message, at, byte)),
        GENERATE, st.integers(0, 10**6), st.integers(0, 255),
    ),
    st.builds(
        lambda message, at, byte: sent_bytes("/vllm.grpc.engine.VllmEngine/Generate", spoilt(message, at, byte)),
        VLLM_GENERATE, st.integers(0, 10**6), st.integers(0, 255),
    ),
)  # fmt: skip
OPERATION = st.integers(0, 15).flatmap(
    lambda i: GENERATION_CALLS if i < 8 else VLLM_CALLS if i < 13 else BYTES if i < 15 else ADMIN_CALLS
)


class Batch(list[Operation]):
    """Operations that are sent at once; Hypothesis does not print all of them."""

    def __repr__(self) -> str:
        return f"{len(self)} operations"


OPERATIONS = st.lists(OPERATION, min_size=BATCH, max_size=BATCH).map(Batch)
