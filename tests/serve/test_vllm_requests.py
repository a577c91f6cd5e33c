"""Requests of vLLM's protocol: what the gateway sends means what it says, or is refused by name."""

from __future__ import annotations

import time
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway import PLAIN, request
from smg_grpc_proto import vllm_engine_pb2 as pb

from jaxspec.request import SamplingParams
from jaxspec.text.grammar import GrammarSpec
from serve.api.requests import Limits
from serve.core.errors import StatusError
from serve.vllm.messages import to_job as job_within

LIMITS = Limits(tokens=4096, characters=4096 * 8, default_tokens=4096, answer_bytes=2**24)


def to_job(message: Any, limits: Limits = LIMITS) -> Any:
    return job_within(message, limits)


def test_a_plain_request_of_the_gateway_means_the_usual_defaults() -> None:
    job = to_job(request(**PLAIN))
    assert job.params == SamplingParams(max_tokens=None) and job.fill_context
    assert (job.prompt, job.request_id, job.stream, job.grammar) == ((1, 2, 3), "r", True, None)


def test_unset_scalars_are_defaults_and_set_ones_are_not() -> None:
    unset = to_job(request(False)).params
    assert (unset.temperature, unset.top_p, unset.repetition_penalty, unset.n, unset.seed) == (1.0, 1.0, 1.0, 1, None)
    assert not unset.skip_special_tokens  # a plain bool: false is what the sender said
    zero = to_job(request(temperature=0.0, seed=0, max_tokens=7)).params
    assert (zero.temperature, zero.seed, zero.max_tokens) == (0.0, 0, 7)
    assert not to_job(request(max_tokens=7)).fill_context


def test_every_supported_parameter_arrives() -> None:
    job = to_job(
        request(
            temperature=0.5, top_p=0.75, top_k=5, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
            repetition_penalty=1.5, max_tokens=9, min_tokens=2, stop=["ab"], stop_token_ids=[4], ignore_eos=True,
            skip_special_tokens=True, n=3, logprobs=2, seed=-1, include_stop_str_in_output=True, logit_bias={3: 1.5},
        )
    )  # fmt: skip
    assert job.params == SamplingParams(
        temperature=0.5, top_p=0.75, top_k=5, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=1.5, max_tokens=9, min_tokens=2, stop=("ab",), stop_token_ids=(4,), ignore_eos=True,
        n=3, logprobs=2, seed=2**32 - 1, include_stop_str_in_output=True, logit_bias={3: 1.5},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (dict(json_schema='{"type": "object"}'), GrammarSpec("json_schema", '{"type": "object"}')),
        (dict(regex="a+"), GrammarSpec("regex", "a+")),
        (dict(grammar='start: "a"'), GrammarSpec("lark", 'start: "a"')),
        (dict(json_object=True), GrammarSpec("json_object")),
        (dict(choice=pb.ChoiceConstraint(choices=["a", "b"])), GrammarSpec("choice", ("a", "b"))),
        (dict(regex="a", grammar_from_first_token=True), GrammarSpec("regex", "a")),
    ],
)
def test_constraints_become_grammars(sampling: dict[str, Any], expected: GrammarSpec) -> None:
    assert to_job(request(**PLAIN, **sampling)).grammar == expected


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("structural_tag", dict(structural_tag="{}")),
        ("json_object", dict(json_object=False)),
        ("choice", dict(choice=pb.ChoiceConstraint())),
        ("regex", dict(regex="")),
        ("min_tokens", dict(regex="a", min_tokens=3)),
        ("prompt_logprobs", dict(prompt_logprobs=0)),
        ("truncate_prompt_tokens", dict(truncate_prompt_tokens=-1)),
        ("n", dict(n=10**6)),
        ("temperature", dict(temperature=float("nan"))),
        ("temperature", dict(temperature=-1.0)),
        ("top_p", dict(top_p=1.5)),
        ("top_k", dict(top_k=2**32 - 1)),
        ("max_tokens", dict(max_tokens=0)),
        ("logprobs", dict(logprobs=-1)),
        ("logprobs", dict(logprobs=1000)),
        ("stop", dict(stop=[""])),
        ("stop", dict(stop=["a"] * 1000)),
        ("stop", dict(stop=["a" * 10_000])),
        ("logit_bias", dict(logit_bias={-1: 1.0})),
        ("repetition_penalty", dict(repetition_penalty=float("inf"))),
    ],
)
def test_sampling_parameters_that_cannot_be_honoured_are_refused_by_name(field: str, sampling: dict[str, Any]) -> None:
    with pytest.raises(StatusError, match=rf"sampling_params\.{field}") as refused:
        to_job(request(**{"max_tokens": 8, **sampling}))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("mm_inputs", dict(mm_inputs=pb.MultimodalInputs())),
        ("extra_mm_inputs", dict(extra_mm_inputs=[pb.MultimodalInputs()])),
        ("media_refs", dict(media_refs=pb.MediaRefs())),
        ("kv_transfer_params", dict(kv_transfer_params=pb.KvTransferParams())),
        ("kv_transfer_params_json", dict(kv_transfer_params_json='{"do_remote_prefill": true}')),
        ("data_parallel_rank", dict(data_parallel_rank=1)),
        ("tokenized", dict(tokenized=pb.TokenizedInput())),
        ("text", dict(text="")),
        ("request_id", dict(request_id="a b")),
        ("request_id", dict(request_id="a" * 1000)),
    ],
)
def test_requests_that_cannot_be_honoured_are_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    whole = request()
    whole.MergeFrom(pb.GenerateRequest(**fields))
    if field == "tokenized":
        whole.ClearField("tokenized")
        whole.tokenized.SetInParent()
    with pytest.raises(StatusError, match=field) as refused:
        to_job(whole)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_sizes_have_bounds() -> None:
    small = Limits(tokens=100, characters=800, default_tokens=50, answer_bytes=50_000)
    many = 1_000_000
    biased = request()
    biased.sampling_params.logit_bias.update(dict.fromkeys(range(many // 4), 1.0))
    for message, refused_as in (
        (request(ids=(1,) * 100), "tokenized.input_ids must be shorter than 100 tokens, got 100"),
        (pb.GenerateRequest(text="x" * 801), "text must be at most 800 characters, .* got 801"),
        (request(ids=(1,) * many), "tokenized.input_ids must be shorter than 100 tokens, got 1000000"),
        (request(stop=["x"] * many), "sampling_params.stop may have at most 64 entries, got 1000000"),
        (request(stop_token_ids=[1] * many), "sampling_params.stop_token_ids may have at most 32 entries, got 1000000"),
        (biased, "sampling_params.logit_bias may have at most 1024 entries, got 250000"),
        (
            request(choice=pb.ChoiceConstraint(choices=["x"] * many)),
            "sampling_params.choice.choices may have at most 4096 entries, got 1000000",
        ),
        (request(False, max_tokens=99, logprobs=20, n=1, stop=["x"] * 65), "stop may have"),
    ):
        seconds: list[float] = []
        for _ in range(3):  # the garbage of others is collected in one of them at most
            began = time.thread_time()
            with pytest.raises(StatusError, match=refused_as) as refused:
                to_job(message, small)
            seconds.append(time.thread_time() - began)
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert min(seconds) < 0.02  # before anything is converted
    fits = to_job(request(ids=(1,) * 99, stop=["x"] * 64, stop_token_ids=[1] * 32), small)
    assert len(fits.prompt) == 99 and len(fits.params.stop) == 64
    large = dict(max_tokens=99, logprobs=20)
    tight = Limits(tokens=100, characters=800, default_tokens=50, answer_bytes=20_000)
    with pytest.raises(StatusError, match="n x max_tokens x .* = 1 x 99 x 21 must fit .*: set stream"):
        to_job(request(False, **large), tight)
    to_job(request(True, **large), tight)
    to_job(request(False, max_tokens=99, n=64), tight)  # a message each


def test_harmless_defaults_of_what_is_not_supported_are_accepted() -> None:
    job = to_job(pb.GenerateRequest(text="abc", data_parallel_rank=0, kv_transfer_params_json=""))
    assert job.prompt == "abc" and job.request_id
    with pytest.raises(StatusError, match="input"):
        to_job(pb.GenerateRequest(request_id="r"))
