"""Thousands of requests, random, malformed and hostile, over a socket: each status is one that is documented.

The same 2,000 in every run; 10,000 others in each run with --exhaustive, which prints the --hypothesis-seed that makes
them again. Both protocols. Never an engine death, never INTERNAL, UNKNOWN for undecodable bytes and nothing else;
afterwards pages and tables are at rest.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import random
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import grpc
import hypothesis.strategies as st
import pytest
from google.protobuf import message_factory
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from smg_grpc_proto.generated import common_pb2

from serve.app import Server
from serve.config import ServerConfig
from serve.proto import admin_pb2
from serve.proto import generation_pb2 as pb
from serve.proto.services import ADMIN, GENERATION, Stub

#: Examples of BATCH requests that are sent at once: with --exhaustive, and without.
EXAMPLES, FIXED_EXAMPLES, BATCH = 200, 40, 50
#: Hostile grammars (see conftest) that are sent, likewise: each takes as long as the server lets it.
HOSTILE_SENT, FEW_HOSTILE_SENT = 30, 6
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


class Target:
    """A server with its clients on a loop of its own, so that examples can come one by one.

    Attributes:
      codes: how often each status was heard.
      generated: output tokens that clients got.
    """

    def __init__(self, facade: Any):
        self.facade = facade
        self.compilations = facade.stats.compilations_after_warmup
        self.codes: collections.Counter[Code] = collections.Counter()
        self.by_service: collections.Counter[str] = collections.Counter()
        self.generated = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fuzzed server")
        self._thread.start()
        self.run(self._start())

    def run(self, story: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(story, self._loop).result(120)

    async def _start(self) -> None:
        config = ServerConfig(
            host="127.0.0.1", port=0, metrics_port=0, withdrawal_seconds=0.0, max_waiting=40, log_level="error",
            kv_events=True,
        )  # fmt: skip
        self.server = Server(config, build=lambda: self.facade)
        await self.server.start()
        await self.server.ready()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")
        self.admin = Stub(ADMIN, self.channel)
        self._stubs = {
            "generation": Stub(GENERATION, self.channel),
            "admin": self.admin,
            "vllm": vllm_grpc.VllmEngineStub(self.channel),
        }
        self.tasks = len(asyncio.all_tasks())

    def close(self) -> None:
        async def end() -> None:
            await self.channel.close()
            await self.server.stop()

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def send(self, operation: Operation) -> Code:
        """The status of an operation."""
        code = await self._send(operation)
        self.codes[code] += 1
        self.by_service[operation.service] += 1
        return code

    async def _send(self, operation: Operation) -> Code:
        if operation.service == "bytes":
            make = self.channel.unary_stream if operation.method in STREAMS else self.channel.unary_unary
            call = make(operation.method)(operation.request, timeout=operation.timeout)
        else:
            method = getattr(self._stubs[operation.service], operation.method)
            call = method(operation.request, timeout=operation.timeout)
        try:
            if not isinstance(call, grpc.aio.UnaryStreamCall):
                self._count(await call)
                return Code.OK
            received = 0
            while operation.reads is None or received < operation.reads:
                message = await call.read()
                if message is grpc.aio.EOF:
                    return await call.code()
                self._count(message)
                received += 1
            call.cancel()
            return Code.CANCELLED
        except grpc.aio.AioRpcError as e:
            assert e.details(), (e.code(), operation)
            return e.code()

    def _count(self, message: Any) -> None:
        match message:
            case pb.GenerateStreamResponse():
                self.generated += len(message.delta.token_ids)
            case pb.GenerateResponse():
                self.generated += sum(len(c.token_ids) for c in message.completions)
            case vllm.GenerateResponse():
                self.generated += len(message.chunk.token_ids)

    async def at_rest(self) -> None:
        """Waits until nothing of the requests is left."""
        async with asyncio.timeout(30):
            while True:
                loads = await self.admin.GetLoads(admin_pb2.GetLoadsRequest())
                info = await self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
                memory = info.memory
                idle = loads.running_requests == loads.waiting_requests == 0
                if idle and memory.free_pages + memory.cached_pages == memory.pages:
                    break
                await asyncio.sleep(0.02)
        assert info.compilations_after_warmup == self.compilations
        generator, live = self.server.generator, self.server.engine._live
        assert generator.live == generator.in_engine == 0 and not generator._by_id
        assert not (live._live or live._holding or live._submitted)
        async with asyncio.timeout(10):  # calls that were left end a little later
            while len(asyncio.all_tasks()) > self.tasks + 2:
                await asyncio.sleep(0.02)

    async def attack(self, operations: list[Operation]) -> None:
        """Sends all of them at once, and checks what comes back."""
        codes = await asyncio.gather(*(self.send(operation) for operation in operations))
        wrong = [(code, op) for code, op in zip(codes, operations, strict=True) if code not in op.allowed]
        assert not wrong, f"{len(wrong)} of {len(codes)}, such as {wrong[:2]}"
        assert self.server.lifecycle.state == "serving"


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
#: What came before may matter, so nothing is shrunk; `attack` shows what went wrong.
COMMON: dict[str, Any] = dict(
    deadline=None, database=None, phases=(Phase.generate,), verbosity=Verbosity.quiet,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip


@pytest.fixture(scope="module")
def target(writing_engine: Any) -> Iterator[Target]:
    target = Target(writing_engine)
    yield target
    target.close()


def test_thousands_of_requests_get_statuses_that_are_explained(target: Target, request: pytest.FixtureRequest):
    examples, number = FIXED_EXAMPLES, 0
    if request.config.getoption("--exhaustive"):
        given_seed = request.config.getoption("--hypothesis-seed")
        examples, number = EXAMPLES, random.randrange(2**32) if given_seed is None else int(given_seed)
        print(f"--exhaustive --hypothesis-seed={number}")

    @seed(number)
    @settings(max_examples=examples, **COMMON)
    @given(operations=OPERATIONS)
    def attack(operations: list[Operation]) -> None:
        target.run(target.attack(operations))

    attack()
    sent = sum(target.codes.values())
    assert sent >= examples * BATCH
    for code in (Code.OK, Code.INVALID_ARGUMENT, Code.CANCELLED, Code.UNKNOWN, Code.UNIMPLEMENTED):
        assert target.codes[code] > sent / 200, target.codes
    assert target.by_service["generation"] > sent / 4 and target.by_service["vllm"] > sent / 8, target.by_service
    assert target.generated > sent / 8  # half of what a quiet machine gives: clients leave, and deadlines pass
    target.run(target.at_rest())


@pytest.mark.slow
def test_hostile_grammars_in_between_are_served_or_refused(
    target: Target, writing_kit: Any, request: pytest.FixtureRequest
):
    """By both protocols, all at once, among ordinary requests: their clients wait as long as it takes."""
    sent = HOSTILE_SENT if request.config.getoption("--exhaustive") else FEW_HOSTILE_SENT
    grammars = [next(iter(grammar.items())) for grammar in writing_kit.hostile_grammars().values()]
    operations: list[Operation] = []
    for i in range(sent):
        constraint = grammars[i % len(grammars)]
        if i % 2:
            message: Any = pb.GenerateRequest(
                text="ab", sampling=pb.Sampling(temperature=0.0, max_tokens=8), grammar=as_grammar(constraint)
            )
            operations.append(Operation("generation", "Generate", message))
        else:
            params = vllm.SamplingParams(temperature=0.0, max_tokens=8, **as_constraint(constraint))
            message = vllm.GenerateRequest(text="ab", sampling_params=params)
            operations.append(Operation("vllm", "Generate", message, allowed=LASTING))
        ordinary = pb.GenerateRequest(text="abc", sampling=pb.Sampling(max_tokens=8))
        operations.append(Operation("generation", "GenerateStream", ordinary, 10.0, None, frozenset({Code.OK})))
    target.run(target.attack(operations))
    target.run(target.at_rest())
