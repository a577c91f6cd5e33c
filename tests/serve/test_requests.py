"""From messages to jobs: what is taken, and how each wrong field is refused."""

from __future__ import annotations

import math
import time
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb

from jaxspec.request import SamplingParams
from jaxspec.speculation.sampling import SamplingState
from serve.api.requests import INT32_MAX, Limits, chat_of, deadline_of, to_job
from serve.client import build_request
from serve.core.errors import StatusError
from serve.core.jobs import Chat, Job
from serve.proto import generation_pb2 as pb
from serve.vllm.messages import to_job as vllm_to_job

LIMITS = Limits(tokens=4096, characters=4096 * 8, default_tokens=4096, answer_bytes=2**24)


def job_of(prompt: Any = "abc", **options: Any) -> Job:
    """By way of the wire."""
    data = build_request(prompt, options).SerializeToString()  # type: ignore[arg-type]
    return to_job(pb.GenerateRequest.FromString(data), "demo", LIMITS, deadline=None, stream=True)


def test_what_is_left_out_is_the_default():
    job = job_of()
    assert job.prompt == "abc" and job.fill_context and job.stream and job.add_special_tokens
    assert job.params == SamplingParams(max_tokens=None)
    assert (job.priority, job.max_depth, job.grammar, job.route) == (0, None, None, "")
    assert (job.tpot_ms, job.ttft_ms, job.deadline) == (None, None, None)
    assert job.request_id.startswith("gen-") and job.request_id != job_of().request_id


def test_every_option_arrives():
    sampling = dict(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=2**32 - 1, max_tokens=7, min_tokens=2, stop=["x", "yz"],
        stop_token_ids=[3, 4], ignore_eos=True, presence_penalty=-0.3, frequency_penalty=0.2, repetition_penalty=1.1,
        logit_bias={3: -1.7, 5: 2.0}, logprobs=4, include_stop_str_in_output=True, skip_special_tokens=False,
        allowed_token_ids=[3, 5, 9],
    )  # fmt: skip
    job = job_of(
        [1, 2, 3], **sampling, n=3, request_id="mine", model="demo", max_depth=2, priority=-7, route="code",
        tpot_ms=12.5, ttft_ms=0.1,
    )  # fmt: skip
    assert job.params == SamplingParams(n=3, **sampling)  # type: ignore[arg-type]
    assert (job.prompt, job.request_id, job.max_depth, job.priority) == ((1, 2, 3), "mine", 2, -7)
    assert (job.route, job.tpot_ms, job.ttft_ms, job.fill_context) == ("code", 12.5, 0.1, False)


@pytest.mark.parametrize("value", [0.1, 0.7, 1e-4, 1 / 3, 1.0, 0.0])
def test_numbers_are_the_same_as_offline(value: float):
    assert job_of(temperature=value, min_p=value).params == SamplingParams(
        temperature=value, min_p=value, max_tokens=None
    )


def test_zero_is_not_absent():
    params = job_of(temperature=0.0, top_k=0, logprobs=0, seed=0).params
    assert (params.temperature, params.logprobs, params.seed) == (0.0, 0, 0)
    assert job_of(max_depth=0).max_depth == 0
    assert job_of(speculation=False).max_depth == 0
    assert job_of(speculation=True).max_depth is None
    assert job_of(speculation=True, max_depth=3).max_depth == 3


def test_a_conversation():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": ""}]
    job = job_of(messages, add_generation_prompt=False, variables={"tools": [1, {"a": None}]})
    assert job.prompt == Chat(tuple(messages), False, {"tools": [1, {"a": None}]})


@pytest.mark.parametrize(
    ("options", "kind", "value"),
    [
        ({"json_schema": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"lark": "start: /a/"}, "lark", "start: /a/"),
        ({"choice": ["yes", "no"]}, "choice", ("yes", "no")),
    ],
)
def test_grammars(options: dict[str, Any], kind: str, value: Any):
    grammar = job_of(**options).grammar
    assert grammar is not None and (grammar.kind, grammar.value) == (kind, value)


NAN, INF = math.nan, math.inf
#: A field, what is wrong with it, and what the message says besides the field's name.
WRONG: list[tuple[dict[str, Any], str]] = [
    *[({"temperature": value}, f"sampling.temperature must be .* got {value}") for value in (NAN, INF, -INF, -0.5)],
    *[({"top_p": value}, r"sampling.top_p must be a finite number in \(0, 1\]") for value in (NAN, INF, 0.0, 1.1)],
    *[({"min_p": value}, r"sampling.min_p must be a finite number in \[0, 1\]") for value in (NAN, -0.1, 2.0)],
    ({"top_k": -2}, "sampling.top_k must be an integer from -1 to 2147483647, got -2"),
    ({"max_tokens": 0}, "sampling.max_tokens must be an integer from 1 to 2147483647, got 0"),
    ({"max_tokens": 2**32 - 1}, "sampling.max_tokens must be an integer from 1"),
    ({"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens must be at most max_tokens = 4, got 5"),
    ({"stop": [""]}, "sampling.stop must hold non-empty strings, got ''"),
    ({"stop": ["x"] * 65}, "sampling.stop may have at most 64 entries, got 65"),
    ({"stop": ["y" * 1025]}, "sampling.stop may hold strings of 1024 characters, got 'y+'... .1025 characters."),
    ({"stop_token_ids": [1] * 33}, "sampling.stop_token_ids may have at most 32 entries, got 33"),
    ({"stop_token_ids": [2**31]}, "sampling.stop_token_ids must be an integer from 0"),
    ({"allowed_token_ids": [1] * 4097}, "sampling.allowed_token_ids may have at most 4096 entries, got 4097"),
    ({"allowed_token_ids": [2**31]}, "sampling.allowed_token_ids must be an integer from 0"),
    *[
        ({name: value}, rf"sampling.{name} must be a finite number in \[-2, 2\]")
        for name in ("presence_penalty", "frequency_penalty")
        for value in (NAN, 2.5)
    ],
    ({"repetition_penalty": 0.0}, r"sampling.repetition_penalty must be a finite number in \[0.001, 1000\], got 0.0"),
    ({"logit_bias": {1: NAN}}, r"sampling.logit_bias\[1\] must be a finite number in \[-100, 100\], got nan"),
    ({"logit_bias": {2**32 - 1: 1.0}}, "sampling.logit_bias token id must be an integer from 0"),
    ({"logprobs": 21}, "sampling.logprobs must be an integer from 0 to 20, got 21"),
    ({"logprobs": 2**32 - 1}, "sampling.logprobs must be an integer from 0 to 20, got 4294967295"),
    ({"n": 0}, "n must be an integer from 1 to 64, got 0"),
    ({"n": 10**6}, "n must be an integer from 1 to 64, got 1000000"),
    ({"priority": 101}, "priority must be an integer from -100 to 100, got 101"),
    ({"priority": -(2**31)}, "priority must be an integer from -100 to 100"),
    ({"max_depth": 2**32 - 1}, "speculation.max_depth must be an integer from 0 to 2147483647"),
    ({"max_depth": 1, "speculation": False}, "speculation.max_depth must be 0 or absent where .* false, got 1"),
    ({"route": "a b"}, "route must be at most 64 characters of .A-Za-z0-9_.-., got 'a b'"),
    ({"route": "ü"}, "route must be"),
    ({"route": "x\n"}, "route must be"),
    ({"route": "x" * 65}, "route must be"),
    ({"request_id": ""}, "request_id must be 1 to 128 printable ASCII characters without spaces, got ''"),
    ({"request_id": "x" * 129}, "request_id must be 1 to 128 .* got 'x+'... .129 characters."),
    ({"request_id": "a\n"}, "request_id must be"),
    ({"request_id": "é"}, "request_id must be"),
    *[({"tpot_ms": value}, "slo.tpot_ms must be a finite number above 0") for value in (NAN, INF, 0.0, -1.0)],
    ({"ttft_ms": -1.0}, "slo.ttft_ms must be a finite number above 0, got -1.0"),
    ({"regex": ""}, "grammar.regex must not be empty"),
    ({"json_schema": " "}, "grammar.json_schema must not be empty"),
    ({"json_object": False}, "grammar.json_object must be true, got false"),
    ({"choice": []}, "grammar.choice.options must hold at least 1 text, got 0"),
    ({"choice": [""]}, "grammar.choice: .*non-empty strings"),
    ({"choice": ["x"] * 5000}, "grammar.choice.options may have at most 4096 entries, got 5000"),
    ({"regex": "x" * 300_000}, "grammar.regex: .* may take 262144 bytes, got 300000"),
    ({"regex": "a", "min_tokens": 1}, "sampling.min_tokens must be 0 or absent where a grammar is given, got 1"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: None)
def test_wrong_fields_are_named_with_value_and_bounds(options: dict[str, Any], message: str):
    with pytest.raises(StatusError, match=message) as refused:
        job_of(**options)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.GenerateRequest(), "input must be exactly one of text, tokens and chat, got none"),
        (pb.GenerateRequest(text=""), "text must hold at least 1 token, got ''"),
        (pb.GenerateRequest(tokens=pb.TokenIds()), "tokens.ids must hold at least 1 token, got 0"),
        (pb.GenerateRequest(chat=pb.Chat()), "chat.messages must hold at least 1 message, got 0"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message()])), r"chat.messages\[0\].role must not be empty"),
        (
            pb.GenerateRequest(text="a", grammar=pb.Grammar()),
            "grammar must hold exactly one of json_schema, .* got none",
        ),
        *[
            (
                pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="user")], variables_json=text)),
                f"chat.*{message}",
            )
            for text, message in (
                ("[1]", "variables_json must be a JSON object, got '.1.'"),
                ("{", "variables_json must be a JSON object: "),
                ('{"a": NaN}', "NaN is no JSON"),
                ("[" * 100_000, "variables_json must be a JSON object"),
                ('{"messages": 1}', r"must not be named \['messages'\]"),
                ('{"self": 1}', r"must not be named \['self'\]"),
            )
        ],
    ],
    ids=lambda value: None,
)
def test_wrong_inputs(request_: pb.GenerateRequest, message: str):
    with pytest.raises(StatusError, match=message) as refused:
        to_job(request_, "demo", LIMITS, deadline=None, stream=False)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_another_model_is_not_found():
    with pytest.raises(StatusError, match="model must be 'demo' or absent, got 'gpt'") as refused:
        job_of(model="gpt")
    assert refused.value.code is grpc.StatusCode.NOT_FOUND


SMALL = Limits(tokens=100, characters=800, default_tokens=50, answer_bytes=100_000)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * 100, {}, "tokens.ids must be shorter than 100 tokens, got 100"),
        ("x" * 801, {}, "text must be at most 800 characters, which 100 tokens may hold at most, got 801"),
        ([{"role": "user", "content": ""}] * 101, {}, "chat.messages may have at most 100 entries, got 101"),
        (
            "a",
            {"logit_bias": dict.fromkeys(range(1025), 0.0)},
            "sampling.logit_bias may have .* 1024 .* got 1025",
        ),
        ("a", {"stop": ["x"] * 65}, "sampling.stop may have at most 64 entries, got 65"),
        ("a", {"stop_token_ids": [1] * 33}, "sampling.stop_token_ids may have at most 32 entries, got 33"),
    ],
    ids=lambda value: None,
)
def test_sizes_have_bounds(prompt: Any, options: Any, message: str):
    request = build_request(prompt, options)
    with pytest.raises(StatusError, match=message) as refused:
        to_job(request, "demo", SMALL, deadline=None, stream=True)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    fits = {name: dict(list(v.items())[:-1]) if isinstance(v, dict) else v[:-1] for name, v in options.items()}
    less = prompt if options else prompt[:-1]
    to_job(build_request(less, fits), "demo", SMALL, deadline=None, stream=True)


def test_huge_fields_are_refused_before_they_are_copied():
    """Converting them would hold up every stream for seconds; counting them takes no time."""
    many, text = 1_000_000, pb.GenerateRequest(text="a")
    chat = pb.GenerateRequest.FromString(b"\x2a" + _varint(2 * many) + b"\x0a\x00" * many)
    stops, biased = pb.GenerateRequest(), pb.GenerateRequest()
    stops.MergeFrom(text)
    stops.sampling.stop.extend(["x"] * many)
    biased.MergeFrom(text)
    biased.sampling.logit_bias.update(dict.fromkeys(range(many // 4), 1.0))
    choice = pb.GenerateRequest(text="a", grammar=pb.Grammar(choice=pb.Choice(options=["x"] * many)))
    assert len(chat.chat.messages) == many
    for request in (chat, stops, biased, choice):
        seconds: list[float] = []
        for _ in range(3):  # the garbage of others is collected in one of them at most
            began = time.thread_time()
            with pytest.raises(StatusError, match="may have at most .* entries, got"):
                to_job(request, "demo", LIMITS, deadline=None, stream=True)
            seconds.append(time.thread_time() - began)
        assert min(seconds) < 0.02


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def test_a_chat_s_variables_are_bounded():
    chat = pb.Chat(messages=[pb.Message(role="user")], variables_json='{"a": "' + "x" * 2**20 + '"}')
    with pytest.raises(StatusError, match="chat.variables_json must be at most 1048576 characters, got 1048585"):
        chat_of(chat, "chat", LIMITS)


@pytest.mark.parametrize(
    ("options", "stream", "refused"),
    [
        ({"n": 64, "max_tokens": 90}, False, False),
        ({"n": 64, "max_tokens": 99}, False, True),
        ({"n": 64, "max_tokens": 99}, True, False),
        ({"n": 2, "max_tokens": 99, "logprobs": 20}, False, False),
        ({"n": 3, "max_tokens": 99, "logprobs": 20}, False, True),
        ({"n": 64}, False, False),  # the server's own limit of 50 tokens
        ({"n": 4, "logprobs": 20}, False, False),
        ({"n": 5, "logprobs": 20}, False, True),
        ({"max_tokens": INT32_MAX}, False, False),  # cut to what the context leaves
    ],
)
def test_an_answer_must_fit_a_message(options: Any, stream: bool, refused: bool):
    request = build_request("a", options)
    if not refused:
        to_job(request, "demo", SMALL, deadline=None, stream=stream)
        return
    with pytest.raises(StatusError, match="n x max_tokens x .* must fit .* 100000 bytes, got .*: call GenerateStream"):
        to_job(request, "demo", SMALL, deadline=None, stream=stream)


def test_deadlines():
    class Context:
        def __init__(self, remaining: float | None) -> None:
            self.time_remaining = lambda: remaining

    assert deadline_of(Context(None)) is None
    began = time.monotonic()
    deadline = deadline_of(Context(5.0))
    assert deadline is not None and began + 5.0 <= deadline <= time.monotonic() + 5.0


#: Numbers that rows are sampled by, with a value that is taken and one that is not.
NUMBERS = {
    "temperature": (0.5, -1.0), "top_k": (3, -2), "top_p": (0.5, 1.5), "min_p": (0.5, 2.0), "seed": (7, None),
    "presence_penalty": (0.5, 2.5), "frequency_penalty": (0.5, -2.5), "repetition_penalty": (1.5, 1e4),
}  # fmt: skip


def by_vllm(**fields: Any) -> Job:
    prompt = vllm_pb.TokenizedInput(input_ids=(1, 2, 3))
    sampling = vllm_pb.SamplingParams(**fields)
    return vllm_to_job(vllm_pb.GenerateRequest(request_id="r", tokenized=prompt, sampling_params=sampling), LIMITS)


def test_every_number_of_a_row_comes_over_the_wire():
    derived = {"prompt_len", "ban_until", "ends_at", "eos_ends", "num_stops"}  # of the prompt and of other parameters
    assert {number.name for number in SamplingState.numbers().values()} - derived == set(NUMBERS)
    for name, (good, bad) in NUMBERS.items():
        for form, take in (("sampling", job_of), ("sampling_params", by_vllm)):
            assert getattr(take(**{name: good}).params, name) == pytest.approx(good)
            bad = 2**31 if name == "top_k" and take is by_vllm else bad  # unsigned there
            if bad is not None:
                with pytest.raises(StatusError, match=rf"{form}\.{name} must be") as caught:
                    take(**{name: bad})
                assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
