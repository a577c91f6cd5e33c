"""Sampling parameters are checked where they enter; metrics count what their names say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxspec.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)

NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0, True, "1", None])
def test_numbers_must_be_finite_and_in_range(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"^{name} must be a finite number in .*got {value!r}$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [-2, True, 1.0, "1", 2**70])
def test_integers_must_be_integers_and_in_range(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"^{name} must be an integer from .*got {value!r}$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be an integer from 1 to 64, got 0"),
        ({"n": 65}, "n must be an integer from 1 to 64, got 65"),
        ({"top_p": 0.0}, r"top_p must be a finite number in \(0, 1\], got 0.0"),
        ({"min_p": 1.5}, r"min_p must be a finite number in \[0, 1\], got 1.5"),
        ({"seed": 2**32}, "seed must be an integer from 0 to 4294967295, got 4294967296"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1 to .*got 0"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens = 16, got 17"),
        ({"logprobs": 21}, "logprobs must be an integer from 0 to 20, got 21"),
        ({"stop": ""}, "stop must hold non-empty strings, got ''"),
        ({"stop": ["a", 3]}, "stop must hold non-empty strings, got 3"),
        ({"stop": b"a"}, "stop must be a sequence of at most 64 entries, got b'a'"),
        ({"stop": ["a"] * 65}, "stop may have at most 64 entries, got 65"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be an integer from 0 to .*got -1"),
        ({"stop_token_ids": range(33)}, "stop_token_ids may have at most 32 entries, got 33"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a sequence of at most 32 entries, got 3"),
        ({"logit_bias": [1]}, r"logit_bias must map token ids to numbers in \[-100, 100\], got \[1\]"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must hold at least one token id, or be None, got none"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be an integer from 0 to .*got -1"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias token id must be an integer from 0 to .*got '1'"),
        ({"logit_bias": {1: 101}}, r"logit_bias\[1\] must be a finite number in \[-100, 100\], got 101"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] must be a finite number in \[-100, 100\], got nan"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"max_token": 5}, r".*for 'max_token' say 'max_tokens'; it has \['allowed_tok.*"),
        (
            {"max_new_tokens": 5, "zzz": 1},
            r".*\['max_new_tokens', 'zzz'\]; for 'max_new_tokens' say 'max_tokens'; it.*",
        ),
        ({"structured_outputs": {}}, r".*say 'generate\(..., grammar=\)'; it has.*"),
        ({"guided_json": "{}"}, r""".*say "generate\(..., grammar={'json_schema': ...}\)"; it has.*"""),
        ({"best_of": 2}, r".*\['best_of'\]; 'best_of': leave it out, ask for n completions and keep .*; it has.*"),
    ],
)
def test_refusals_name_field_value_and_range(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{message}$"):
        SamplingParams(**fields)


def test_values_are_normalised():
    params = SamplingParams(temperature=1, stop="end", stop_token_ids=[3, 4], logit_bias={5: 1})
    assert params.stop == ("end",) and params.stop_token_ids == (3, 4) and params.logit_bias == {5: 1.0}
    assert type(params.temperature) is float
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()  # pyright: ignore[reportArgumentType]
    assert SamplingParams(top_k=-1).top_k == -1 and SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(seed=2**32 - 1).seed == 2**32 - 1
    assert hash(params) == hash(SamplingParams(stop=["end"], stop_token_ids=(3, 4), logit_bias={5: 1.0}))


def test_the_callers_bias_is_copied():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 99.0
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("fields", "greedy", "plain"),
    [
        ({}, False, False),
        ({"temperature": 0.0}, True, True),
        ({"temperature": 9e-6}, True, True),
        ({"temperature": 1e-5}, False, False),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3, "stop": "x", "logit_bias": {}}, True, True),
        ({"temperature": 0.0, "presence_penalty": 0.1}, True, False),
        ({"temperature": 0.0, "frequency_penalty": -0.1}, True, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, True, False),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, True, False),
        ({"temperature": 0.0, "logprobs": 0}, True, False),
        ({"temperature": 0.0, "min_tokens": 1}, True, False),
        ({"temperature": 0.0, "min_tokens": 1, "ignore_eos": True}, True, True),
        ({"temperature": 0.0, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [1]}, True, False),
    ],
)
def test_which_rows_may_run_greedily(fields: dict[str, Any], greedy: bool, plain: bool):
    params = SamplingParams(**fields)
    assert (params.greedy, params.plain_greedy) == (greedy, plain)


def test_token_ids_are_checked_against_the_vocabulary():
    SamplingParams(stop_token_ids=[12], logit_bias={12: 1.0}).check_vocabulary(13)
    with pytest.raises(ValueError, match="stop_token_ids must be below the vocabulary size 13, got 13"):
        SamplingParams(stop_token_ids=[13]).check_vocabulary(13)
    with pytest.raises(ValueError, match="logit_bias must be below the vocabulary size 13, got 14"):
        SamplingParams(logit_bias={14: 1.0}).check_vocabulary(13)


def test_metrics_of_rounds():
    metrics = RequestMetrics()
    assert metrics.mean_accepted_length == metrics.acceptance_rate == 0.0
    for name, drafted, by_accepted in [("chain-3", 3, [0, 0, 0, 1]), ("chain-3", 3, [0, 1, 0, 0]), ("off", 0, [1])]:
        metrics.record_rounds(name, drafted, by_accepted)
    assert metrics.acceptance_histogram == [1, 1, 0, 1]
    assert metrics.tier_rounds == {"chain-3": 2, "off": 1}
    assert metrics.mean_accepted_length == pytest.approx(7 / 3)
    assert metrics.acceptance_rate == pytest.approx(4 / 6)


def test_metrics_of_time():
    metrics = RequestMetrics(arrival_time=1.0)
    assert metrics.ttft is None and metrics.tpot is None
    metrics.first_token_time, metrics.finished_time, metrics.output_tokens = 1.5, 3.5, 5
    assert metrics.ttft == 0.5 and metrics.tpot == 0.5
    metrics.output_tokens = 1
    assert metrics.tpot is None


def test_request():
    request = Request("a", [1, 2], SamplingParams(), seed=7, arrival_time=2.0)
    request.output_token_ids.append(3)
    assert request.token_ids == [1, 2, 3] and request.num_tokens == 3
    assert request.metrics.arrival_time == 2.0 and not request.finished
    assert request != Request("a", [1, 2], SamplingParams(), seed=7), "compared by identity"
    with pytest.raises(ValueError, match="seed must be an integer from 0 to 4294967295, got -1"):
        Request("a", [1], SamplingParams(), seed=-1)


def test_output_shows_its_first_completion():
    outputs = [CompletionOutput(0, [4], "x", FinishReason.STOP), CompletionOutput(1, [5], "y")]
    output = RequestOutput("a", "p", [1], outputs, RequestMetrics())
    assert (output.token_ids, output.text, output.finish_reason) == ([4], "x", "stop")
    assert not output.finished
    outputs[1].finish_reason = FinishReason.LENGTH
    assert output.finished
