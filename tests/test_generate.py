"""`python -m jaxspec.generate`: what it refuses, before anything is built, and what it asks an engine for."""

from __future__ import annotations

import argparse
import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from jaxspec import generate
from jaxspec.events import Delta, Finished
from jaxspec.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SamplingParams

LONG = "word " * 3000


class Told:
    """In the place of LLM: keeps what it is told, and answers every prompt with the same text."""

    def __init__(self, *args: Any, **options: Any):
        self.args, self.options, self.calls = args, options, list[tuple[str, SamplingParams, Any]]()
        self.compiling = True
        self.stats, self.told = SimpleNamespace(executables=20, executables_ready=12), list[str]()

    def stream(self, prompt: str, params: SamplingParams, grammar: Any) -> Iterator[tuple[int, Delta | Finished]]:
        self.calls.append((prompt, params, grammar))
        yield 0, Delta("r", 0, [5], '{"a": ')
        yield 0, Delta("r", 0, [6], "1}")
        output = CompletionOutput(0, [5, 6], '{"a": 1}', FinishReason.STOP)
        yield 0, Finished("r", 0, FinishReason.STOP, RequestOutput("r", prompt, [1], [output], RequestMetrics()))

    def finish_warmup(self) -> None:
        self.told.append("finish")
        if self.calls[-1][0] == "impatient":
            raise KeyboardInterrupt

    def close(self) -> None:
        self.told.append("close")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """Engines that a command has built."""
    made: list[Told] = []

    def build(*args: Any, **options: Any) -> Told:
        made.append(Told(*args, **options))
        return made[-1]

    monkeypatch.setattr(generate, "LLM", build)
    return made


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--json-schema", '{"type": "strin'], "the json_schema is not valid: "),
        (["--json-schema", '{"type": "sort"}'], "the json_schema "),
        (["--json-schema", "/nowhere.json"], "--json-schema must be a JSON object or a file, got '/nowhere.json'"),
        (["--regex", "(("], "the regex cannot be compiled: "),
        (["--choice", ""], "GrammarSpec.value must hold non-empty strings"),
        ([""], "a prompt must hold at least 1 token, got an empty text"),
        ([LONG], "a prompt must be shorter than the context of 2048 tokens, got "),
        (["--max-seq-len", "3"], "a prompt must be shorter than the context of 3 tokens, got "),
        (["--max-seq-len", "9999"], "max_seq_len must be at most the model's context of 2048 tokens, got 9999"),
        (["--policy", "adaptiv"], "policy must be one of ('adaptive', 'static', 'off', 'heuristic', 'schedule', "),
        (["--policy", "adaptiv"], ") or the path of a JSON file, got 'adaptiv'; did you mean 'adaptive'?"),
        (["--policy", "zzz"], "or the path of a JSON file, got 'zzz'\n"),
        (["--policy", "absent.json"], "adaptive configuration 'absent.json' cannot be read: "),
        (["--drafter", "eagl3"], "a directory or a hub id, got 'eagl3'"),
        (["--drafter", "/no/head"], "drafter '/no/head': no such directory"),
        (["--drafter", "ngram", "--depth", "3", "--topk", "2", "--num-nodes", "6"],
         "this drafter proposes chains only (topk 1), got topk 2"),
        (["--depth", "2", "--policy", "adaptive"], "got policy 'adaptive'; use candidate_steps"),
        (["--depth", "2", "--candidate-steps", "0,2"], "give one of the two"),
        (["--temperature", "-1"], "temperature must "),
        (["--model", "/nowhere"], "a hub id ('organisation/model'), and '/nowhere' is none"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_before_anything_is_built(
    argv: list[str], message: str, built: list[Told], capsys: pytest.CaptureFixture[str]
):
    assert generate.main(["In the beginning", *argv]) == 2
    out, error = capsys.readouterr()
    assert message in error and error.startswith("error: ") and error.count("\n") == 1, error
    assert not built and not out


def test_standard_input_is_read_and_checked_before_anything_is_built(
    built: list[Told], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert generate.main(["first", "-"]) == 2 and not built
    assert "got an empty text" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["prompt", "--demo"], ["prompt", "--chat"], ["--demo", "--chat"]])
def test_one_thing_at_a_time(argv: list[str], built: list[Told], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        generate.main(argv)
    assert ended.value.code == 2 and not built
    assert "give one of: prompts, --demo, --chat" in capsys.readouterr().err


def test_quiet_prints_what_a_schema_asks_for_and_nothing_else(built: list[Told], capsys: pytest.CaptureFixture[str]):
    assert generate.main(["An object:", "--quiet", "--json-schema", '{"type": "object"}']) == 0
    out, error = capsys.readouterr()
    assert json.loads(out) == {"a": 1} and not error
    assert built[0].options["structured_output"] and not built[0].options["progress"]


def test_max_tokens_beyond_the_context_are_the_engines_to_cut(built: list[Told], capsys: pytest.CaptureFixture[str]):
    assert generate.main(["In the beginning", "x", "--max-seq-len", "20", "--max-tokens", "100"]) == 0
    assert [(prompt, params.max_tokens) for prompt, params, _ in built[0].calls] == [
        ("In the beginning", 100),
        ("x", 100),
    ]
    out, error = capsys.readouterr()
    assert (
        "In the beginning" in out
        and error.count("rounds by tier: none | compiling: 12 of 20 executables (--warmup eager waits for all)\n") == 2
    )


def test_the_next_run_begins_with_what_this_one_has_found_out(built: list[Told], capsys: pytest.CaptureFixture[str]):
    """And who does not wait for that has all the same got what was asked for."""
    said = "finishing what is being compiled, for the next run; Ctrl-C leaves at once\n"
    for prompt, flags, told in ("x", [], said), ("impatient", [], said), ("x", ["--quiet"], ""):
        assert generate.main([prompt, *flags]) == 0
        assert capsys.readouterr().err.endswith(told) and built[-1].told == ["finish", "close"]
        assert built[-1].options["keep_learnt"] is True


def test_an_interrupt_while_the_engine_is_built_is_taken_and_the_handler_comes_back(monkeypatch: pytest.MonkeyPatch):
    before, during = signal.getsignal(signal.SIGINT), list[Any]()

    def building(*args: Any, **options: Any) -> None:
        during.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generate, "LLM", building)
    with pytest.raises(KeyboardInterrupt):
        generate.main(["x"])
    assert during != [before] and signal.getsignal(signal.SIGINT) is before


def test_candidate_steps_reach_the_engine(built: list[Told], capsys: pytest.CaptureFixture[str]):
    assert generate.main(["x", "--policy", "adaptive", "--candidate-steps", "4,2"]) == 0
    assert built[0].args[2].candidate_steps == (2, 4)
    with pytest.raises(SystemExit):
        generate.main(["x", "--candidate-steps", "deep"])
    assert "must be integers separated by commas, got 'deep'" in capsys.readouterr().err


def test_type_and_devices_reach_the_engine(built: list[Told]):
    assert generate.main(["x", "--dtype", "bfloat16", "--tensor-parallel", "2", "--warmup", "eager"]) == 0
    told = [built[0].options[name] for name in ("dtype", "tensor_parallel", "warmup")]
    assert told == ["bfloat16", 2, "eager"]


def test_a_platform_without_devices_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Of a wrong name JAX says what it knows; of one that it knows and has no plugin for, nothing."""
    for error, words in (RuntimeError("'wild' is unknown"), "'wild' is unknown"), (AssertionError(), "no such device"):
        with monkeypatch.context() as patch:
            patch.setattr(generate.check_devices.__globals__["jax"], "devices", Mock(side_effect=error))
            assert generate.main(["x"]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: JAX_PLATFORMS=") and words in told and told.count("\n") == 1


def test_a_conversation_needs_a_chat_template(
    built: list[Told], tiny_directory: Path, capsys: pytest.CaptureFixture[str]
):
    assert generate.main(["--chat", "--model", str(tiny_directory)]) == 2 and not built
    assert "error: this checkpoint has no chat template" in capsys.readouterr().err


def test_the_demo_writes_to_the_end_of_its_tokens(
    built: list[Told], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[SamplingParams] = []
    demo: Callable[[Any, SamplingParams], int] = lambda llm, params: asked.append(params) or 0
    monkeypatch.setattr(generate, "demo", demo)
    assert generate.main(["--demo", "--max-seq-len", "40", "--max-tokens", "100"]) == 0
    assert asked[0].max_tokens == 100 and asked[0].ignore_eos
    assert generate.main(["--demo", "--regex", "a"]) == 2
    assert "--demo compares free texts" in capsys.readouterr().err


def test_arguments_are_checked_by_what_the_engine_would_say(tiny_directory: Path):
    """A namespace is enough: no terminal, no engine."""
    args: argparse.Namespace = generate.parser().parse_args(["abc", "--model", str(tiny_directory), "--depth", "2"])
    job = generate.check(args)
    assert job.prompts == ["abc"] and job.speculation.resolved_policy == "static"
