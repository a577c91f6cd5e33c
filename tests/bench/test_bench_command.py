"""The command line: defaults, parsing and errors. Nothing is loaded or compiled here."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxspec.bench.__main__ import main
from jaxspec.bench.offline import command, engines
from jaxspec.bench.offline.measure import Mode
from jaxspec.bench.offline.metrics import Completion, Round, Run
from jaxspec.bench.studies import report as studies
from jaxspec.models.tiny import tiny_target
from jaxspec.tier import PLAIN, Tier


def options(*argv: str):
    return command.options_of(command.parse(argv))


def test_defaults_are_the_demo_on_three_workloads():
    plan = options().plan
    assert plan.batch_sizes == (1, 4, 16) and plan.workloads == ("code", "prose", "switch")
    assert (plan.max_tokens, plan.repeats, plan.temperature) == (96, 3, 0.0)
    assert options().model == "demo" and options().tiers is None


def test_quick_is_smaller_and_gives_way_to_explicit_options():
    plan = options("--quick", "--repeats", "2", "--batch-sizes", "8,2").plan
    assert plan.batch_sizes == (2, 8) and plan.repeats == 2 and plan.max_tokens == 48
    assert plan.waves_of(8) == 1 and options("--quick", "--waves", "3").plan.waves_of(8) == 3


def test_queues_are_as_long_as_a_steady_state_needs_within_reason():
    # 96 tokens are some 24 rounds a request, and three repeats want 25 each: 24 - 1 of the first request alone.
    sizes = {size: options().plan.waves_of(size) for size in (1, 4, 16, 64)}
    assert sizes == {1: 2, 4: 2, 16: 6, 64: 6}
    longer = options("--max-tokens", "512").plan
    assert [longer.waves_of(size) for size in (1, 16, 64)] == [2, 2, 2]


def test_a_prompts_file_is_a_workload_of_its_own():
    assert options("--prompts", "x.jsonl").plan.workloads == ("file",)
    assert options("--prompts", "x.jsonl", "--workloads", "file,code").plan.workloads == ("file", "code")


def test_tune_measures_the_pure_workloads():
    args = command.parse(["tune", "--out", "adaptive.json"])
    assert command.options_of(args).plan.workloads == ("code", "prose") and args.reach == 0.05


def test_a_benchmark_that_is_none_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]):
    assert main(["tuen", "--out", "x"]) == 2
    assert capsys.readouterr().err == (
        "error: no benchmark 'tuen'; there are adaptive, grow, overheads, profile, report, serve, simulate, tune\n"
    )


def test_engines_are_batch_invariant_where_asked(monkeypatch: pytest.MonkeyPatch):
    """Here they are refused, which says that they were asked for."""
    monkeypatch.setattr(engines.hf, "load_model", lambda *args, **options: tiny_target())
    assert not options().batch_invariant
    parts = engines.Parts(options("--drafter", "ngram", "--batch-invariant"))
    with pytest.raises(ValueError, match="batch_invariant=True needs the kernels for few rows"):
        parts.engine(32)


def test_engines_are_hybrids_where_asked(monkeypatch: pytest.MonkeyPatch):
    """With a drafter that looks up by itself they are refused, which says that they were asked for."""
    monkeypatch.setattr(engines.hf, "load_model", lambda *args, **options: tiny_target())
    with pytest.raises(ValueError, match="hybrid joins suffix matches with a drafter of another kind"):
        engines.Parts(options("--drafter", "ngram", "--hybrid")).engine(32)
    with pytest.raises(ValueError, match="simulate-accept-length 2.0 and hybrid exclude each other"):
        engines.Parts(options("--drafter", "eagle3", "--simulate-accept-length", "2", "--hybrid"))


def test_engines_know_the_name_of_their_drafter(monkeypatch: pytest.MonkeyPatch):
    """Reports name it by the engine's facts."""
    monkeypatch.setattr(engines.hf, "load_model", lambda *args, **options: tiny_target())
    monkeypatch.setattr(engines, "assemble", lambda *args, drafter, **options: drafter)
    drafting: Any = engines.Parts(options("--drafter", "ngram")).engine(32)
    assert drafting.name == "ngram"


def test_tiers_are_depths_or_names():
    assert command.parse_tiers("1,3, chain-5,tree-4x3/16,3") == (Tier(1), Tier(3), Tier(5), Tier(4, 3, 16))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-sizes", "1,x"], "batch-sizes must be integers from 1 to 1024, got 'x'"),
        (["--batch-sizes", "0"], "batch-sizes must be integers from 1 to 1024, got '0'"),
        (["--tiers", "3,deep"], "a tier must be a depth, or a name .* got 'deep'"),
        (["--tiers", "0"], "tiers must have a depth of at least 1 .* got '0'"),
        (["--tiers", "tree-2x2/99"], "num_nodes must lie between depth [+] 1 = 3 and 7 for topk 2, got 99"),
        (["--workloads", "code,poems"], "workloads must be among .* got 'poems'"),
        (["--workloads", "file"], "got 'file' [(]give --prompts FILE[)]"),
        (["--max-tokens", "1"], "max-tokens must be at least 2 .* got 1"),
        (["--repeats", "0"], "repeats must be at least 1, got 0"),
        (["--waves", "0"], "waves must be at least 1, got 0"),
        (["--temperature", "nan"], r"temperature must lie in \[0, 100\], got nan"),
        (["--json", "/absent/bench.json"], "--json '/absent/bench.json': its directory does not exist"),
        (["tune", "--out", "a.json", "--reach", "2"], r"reach must lie in \[0, 1\), got 2.0"),
        (["--model", "absent"], r"a Hugging Face directory or a hub id \('organisation/model'\), and 'absent' is none"),
        (["--grow", "experts"], "grow must be one of .* or LAYERSxHIDDENxEXPERTSaUSED .* got 'experts'"),
        (["--grow", "1x8"], "grow '1x8': num_layers 1 must be at least the model's"),
        (["--grow-head"], "grow-head is for EAGLE-3 heads of grown targets, got eagle3 and grow None"),
        (["--prompts", "absent.jsonl"], "absent.jsonl"),
        (["--drafter", "eagle4"], "got 'eagle4'; did you mean 'eagle3'"),
        (["grow", "experts", "absent"], "grow must be one of .* got 'experts'"),
        (["profile", "--out", "x.json", "--drafter", "eagle4"], "got 'eagle4'; did you mean 'eagle3'"),
    ],
)
def test_errors_name_the_option_and_end_with_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture):
    assert command.main(argv) == 2
    out, error = capsys.readouterr()
    assert out == "", "nothing is said to be loading"
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--drafter", "ngram", "--tiers", "tree-3x2/9"],
            "drafter 'ngram' drafts chains only, got tiers ['tree-3x2/9']",
        ),
        (["--drafter", "absent"], "drafter must be one of"),
        (["--drafter", "eagle3"], "drafter 'eagle3': no checkpoint in"),
        (["--drafter", "none", "--tiers", "3"], "tiers ['chain-3'] need a drafter, got drafter 'none'"),
        (
            ["--drafter", "none", "--simulate-accept-length", "2"],
            "simulate-accept-length 2.0 needs a drafter, got drafter 'none'",
        ),
        (
            ["--drafter", "ngram", "--tiers", "1,3", "--simulate-accept-length", "4.5"],
            "must lie in [1, 4] for the deepest tier, chain-3, got 4.5",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert command.main(["--model", str(tmp_path), *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_bad_prompts_file_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "p.jsonl"
    path.write_text("{}\n")
    assert command.main(["--prompts", str(path)]) == 2
    assert "line 1: must have 'prompt' or 'turns'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--absent"], ["tune"], ["--dtype", "int8"]])
def test_unknown_options_exit(argv: list[str]):
    with pytest.raises(SystemExit, match="2"):
        command.parse(argv)


CONDITIONS: dict[str, Any] = {
    "device": "cpu", "platform": "cpu", "devices": 1, "cpu_cores": 2, "jax": "0", "model": "demo", "parameters": 1,
    "dtype": "float32", "drafter": "ngram", "grow": None, "geometry": None, "simulated_accept_length": None,
    "temperature": 0.0, "max_tokens": 4, "repeats": 1, "prompts": None, "skipped_prompts": 0, "warmup_seconds": 1.0,
    "executables": 3, "queues": {"1": {"code": 1}},
}  # fmt: skip


class RecordedSession:
    """A session that needs no engine: its runs are given, and an exception may end them."""

    def __init__(self, runs: list[Run], end: type[BaseException] | None = None):
        self.given, self.end, self.runs, self.num_runs, self.estimate = runs, end, [], 4, 1.0
        self.modes = [Mode("plain", PLAIN), Mode("chain-3", Tier(3))]
        self.engine = SimpleNamespace(stats=SimpleNamespace(compilations_after_warmup=0))

    def warm_up(self) -> None:
        pass

    def measure(self) -> Iterator[Run]:
        for run in self.given:
            self.runs.append(run)
            yield run
        if self.end is not None:
            raise self.end


def recorded(mode: str, seconds: float, token: int = 5) -> Run:
    depth = 3 if mode == "chain-3" else 0
    rounds = (Round(mode, depth, 1, "code", seconds, depth + 1, (depth,)),)
    return Run(
        "code",
        1,
        mode,
        0,
        8.0 / (depth + 1) * seconds,
        rounds,
        (Completion(("code", 0), 0.1, ((seconds, 1),), (1, token)),),
    )


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def give(*runs: Run, end: type[BaseException] | None = None) -> None:
        session = RecordedSession(list(runs), end)
        monkeypatch.setattr(command, "prepare", lambda parts, adaptive: (session, CONDITIONS))

    return give


def test_equal_tokens_end_with_status_0(given: Callable[..., None], capsys: pytest.CaptureFixture):
    given(recorded("plain", 1.0), recorded("chain-3", 2.0))
    assert command.main([]) == 0
    assert "2.00x" in capsys.readouterr().out


def test_other_tokens_end_with_status_1(given: Callable[..., None], capsys: pytest.CaptureFixture, tmp_path: Path):
    given(recorded("plain", 1.0), recorded("chain-3", 2.0, token=6))
    out = tmp_path / "adaptive.json"
    assert command.main(["tune", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "ERROR: code, batch 1, chain-3, repeat 0: prompt code 0 diverges at generated token 1" in printed
    assert not out.exists() and f"{out} was not written" in printed


def test_ctrl_c_leaves_what_was_measured(given: Callable[..., None], capsys: pytest.CaptureFixture, tmp_path: Path):
    given(recorded("plain", 1.0), recorded("chain-3", 2.0), end=KeyboardInterrupt)
    path = tmp_path / "bench.json"
    assert command.main(["--json", str(path), "--plot", str(tmp_path / "bench.png")]) == 130
    printed = capsys.readouterr().out
    assert "2.00x" in printed and "INTERRUPTED" in printed
    read = json.loads(path.read_text())
    assert read["interrupted"] is True and [run["mode"] for run in read["runs"]] == ["plain", "chain-3"]
    assert (tmp_path / "bench.png").exists()


def test_ctrl_c_while_it_compiles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def compiling(options: Any, adaptive: bool) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "prepare", compiling)
    before = signal.getsignal(signal.SIGINT)
    assert command.main([]) == 130 and signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().err == "interrupted before anything was measured\n"


def test_ctrl_c_before_the_first_run(given: Callable[..., None], capsys: pytest.CaptureFixture, tmp_path: Path):
    given(end=KeyboardInterrupt)
    assert command.main(["--plot", str(tmp_path / "bench.png")]) == 130
    assert "nothing was measured" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_tune_writes_what_was_chosen(given: Callable[..., None], tmp_path: Path):
    given(recorded("plain", 1.0), recorded("chain-3", 2.0))
    path = tmp_path / "adaptive.json"
    assert command.main(["tune", "--out", str(path)]) == 0
    assert json.loads(path.read_text()) == {"1": {"candidate_steps": [3]}}


@pytest.mark.parametrize(
    ("argv", "options", "message"),
    [
        ([], {"gpu": True}, "error: it measures kernels of NVIDIA GPUs, and this is a CPU"),
        (["--tensor-parallel", "99"], {}, "error: --tensor-parallel must be at most the"),
        (["--json", "nowhere/x.json"], {}, "error: --json nowhere/x.json: its directory does not exist"),
    ],
)
def test_studies_say_in_a_line_what_this_device_lacks(
    argv: list[str], options: dict[str, bool], message: str, capsys: pytest.CaptureFixture[str]
):
    parser = studies.parser("x", "What it measures.")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="devices")
    with pytest.raises(SystemExit) as end:
        studies.parse(parser, argv, **options)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_what_a_device_lacks_is_no_nought():
    assert studies.cell(None, "6.1f") == "     -" and studies.cell(0.0, "6.1f") == "   0.0"
    assert studies.rate({"no such device": 1.0}, None) is None and studies.rate({}, 2.0) == 2e12
