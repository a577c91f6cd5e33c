"""What LLM takes as arguments, and what those of other projects stand for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxspec import LLM, AsyncLLM, EngineConfig, SpeculationConfig, llm
from jaxspec.arguments import engine_config
from jaxspec.drafters import registry


class BuiltError(Exception):
    """What LLM would build."""


def built(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> tuple[Any, SpeculationConfig, EngineConfig]:
    """(drafter, speculation, engine) that LLM asks for, of which nothing is loaded."""

    def build(model: Any, drafter: Any, speculation: Any, config: EngineConfig, *, progress: bool) -> None:
        raise BuiltError(drafter, SpeculationConfig.of(speculation), config)

    monkeypatch.setattr(llm, "build_engine", build)
    with pytest.raises(BuiltError) as asked:
        LLM(**arguments)
    return asked.value.args  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("given", "drafter", "speculation"),
    [
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, "ngram", dict(depth=5, ngram_max=4)),
        ({"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_min": 6}, "ngram", dict(ngram_min=6)),
        ({"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}, "org/head", dict(depth=3, topk=1)),
        ({"method": "eagle", "model": "org/head", "quantization": "fp8"}, "org/head", dict(depth=None)),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, "mtp", dict(depth=1)),
        ({"method": "suffix"}, "suffix", dict(depth=None, policy=None)),
        ('{"method": "ngram", "num_speculative_tokens": 2}', "ngram", dict(depth=2)),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 8, 3]]},
            "ngram",
            dict(policy="schedule", depth=None, num_speculative_tokens_per_batch_size=((1, 8, 3),)),
        ),
        (None, registry.NONE, {}),
    ],
)
def test_what_is_said_of_vllms_speculative_config_works_as_it_is_said(
    given: Any, drafter: str, speculation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ValueError) as refused:
        LLM(speculative_config=given)
    found = re.search(
        r"; 'speculative_config': say (.*?)( \(and leave out \['quantization'\]\))?; it has", str(refused.value)
    )
    assert found is not None and bool(found[2]) == ("quantization" in (given or ())), refused.value
    asked, config, _ = built(monkeypatch, eval(f"dict({found[1]})"))
    assert asked == drafter and speculation.items() <= vars(config).items()


def test_devices_of_a_drafter_are_an_argument_of_their_own():
    with pytest.raises(ValueError, match=r"say drafter='mtp', draft_tensor_parallel=1; it has"):
        engine_config({"speculative_config": {"method": "mtp", "draft_tensor_parallel_size": 1}})


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("depth", r"say \"speculation={'depth': ...}\""),
        ("num_speculative_tokens", r"say \"speculation={'depth': ...}\""),
        ("speculative_model", "say 'drafter'"),
        ("model_path", "say 'model'"),
        ("temperature", r"say 'SamplingParams\(temperature=...\)'"),
        ("n_ctx", "say 'max_seq_len'"),
    ],
)
def test_arguments_that_stand_elsewhere(argument: str, said: str):
    with pytest.raises(ValueError, match=rf"^LLM got unknown arguments \['{argument}'\]; for '{argument}' {said}; it"):
        engine_config({argument: 3})


def test_arguments_reach_the_engine(monkeypatch: pytest.MonkeyPatch):
    _, _, config = built(monkeypatch, dict(max_batch_size=3, seed=4, page_size=8))
    assert config == EngineConfig(max_batch_size=3, seed=4, page_size=8)


@pytest.mark.parametrize("method", [LLM.generate, LLM.stream, LLM.chat, AsyncLLM.generate])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_tokens": 3}, "for 'max_tokens' say 'SamplingParams(max_tokens=3)'; it has"),
        ({"stop": ["x"]}, "for 'stop' say \"SamplingParams(stop=['x'])\"; it has"),
        ({"max_new_tokens": 3}, "for 'max_new_tokens' say 'SamplingParams(max_tokens=...)'; it has"),
        ({"guided_regex": "a+"}, "for 'guided_regex' say \"grammar={'regex': ...}\"; it has"),
        ({"best_of": 3}, "'best_of': leave it out, ask for n completions and"),
        ({"params": 3}, "for 'params' say 'sampling_params'; it has"),
        ({"zzz": 3}, "unknown arguments ['zzz']; it has"),
    ],
)
def test_calls_say_where_their_parameters_go(method: Any, arguments: dict[str, Any], said: str):
    """Before anything is asked of an engine: there is none."""
    with pytest.raises(ValueError) as refused:
        method(None, "hi", **arguments)
    assert str(refused.value).startswith(f"{method.__qualname__} got unknown") and said in str(refused.value)
