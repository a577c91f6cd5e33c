"""Nothing but the load generator needs the server's packages: they are blocked in processes of their own.

Each imports JAX, which takes seconds, so that one runs all that may be asked without a package.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import quick

ROOT = Path(__file__).resolve().parent.parent.parent
#: protobuf is orbax's as well, which training imports.
SERVER = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "prometheus_client")
PROTOBUF = "google.protobuf"
#: Runs what it reads, [[code, argv], ...], one after the other, and writes what each printed and its exit status.
DRIVER = """
import contextlib, io, json, sys, traceback
told = []
for code, argv in json.load(sys.stdin):
    sys.argv[1:] = argv
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(code, {"__name__": "step"})
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            status = 1
            traceback.print_exc()
    told.append([status, out.getvalue(), err.getvalue()])
json.dump(told, sys.stdout)
"""
MAIN = "import sys; from jaxspec.bench.__main__ import main; sys.exit(main())"
#: Module, arguments, and a word of what they print.
HELPS = [
    ("jaxspec.bench", ("--help",), "--batch-sizes"),
    ("jaxspec.bench", ("tune", "--help"), "--reach"),
    ("jaxspec.bench", ("grow", "--help"), "Llama 3.1 8B"),
    ("jaxspec.generate", ("--help",), "--max-tokens"),
]


@dataclasses.dataclass(frozen=True)
class Told:
    """What a step printed, and how it ended."""

    status: int
    out: str
    err: str


def without(names: tuple[str, ...], steps: list[tuple[str, list[str]]]) -> list[Told]:
    block = f"import sys; sys.modules |= dict.fromkeys({names!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", block + DRIVER], cwd=ROOT, env=os.environ | quick.QUICKLY, input=json.dumps(steps),
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Told(*told) for told in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Told], Path]:
    """Without all of it: each help, the imports, a benchmark; and the file that the last one writes."""
    run = "import runpy; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
    studies = [f"studies.{name}" for name in ("overheads", "rounds", "layouts", "peers", "peer_engines", "products")]
    parts = [f"offline.{name}" for name in ("command", "grow", "tune", "engines", "report", "plots")]
    parts += [f"{room}.command" for room in ("evidence", "simulate", "page")]
    modules = ", ".join(f"jaxspec.bench.{name}" for name in (*studies, *parts))
    imports = f"import sys, jaxspec, jaxspec.generate, jaxspec.bench.__main__, {modules}\njaxspec.LLM\n"
    imports += "print([m for m in sys.modules if m.split('.')[0] == 'serve'])"
    written = tmp_path_factory.mktemp("imports") / "bench.json"
    options = ["--drafter", "ngram", "--batch-sizes", "1", "--tiers", "2", "--workloads", "code", "--max-tokens", "4"]
    steps = [(run.format(module), list(argv)) for module, argv, _ in HELPS]
    steps += [(imports, []), (MAIN, [*options, "--repeats", "1", "--json", str(written)])]
    return without((*SERVER, PROTOBUF), steps), written


def test_the_package_and_its_offline_commands_import_without_the_server(offline: tuple[list[Told], Path]):
    done = offline[0][len(HELPS)]
    assert (done.status, done.out.strip()) == (0, "[]"), done.err


@pytest.mark.parametrize("which", range(len(HELPS)))
def test_commands_help_without_the_server(which: int, offline: tuple[list[Told], Path]):
    done, words = offline[0][which], HELPS[which][2]
    assert done.status == 0 and words in done.out, done.err


@pytest.mark.slow
def test_the_benchmark_runs_without_the_server(offline: tuple[list[Told], Path]):
    done, written = offline[0][-1], offline[1]
    assert done.status == 0 and "completions equal plain decoding's" in done.out, done.err
    assert written.exists()


def test_training_needs_protobuf_alone_and_the_load_generator_says_what_it_lacks():
    training, load = without(SERVER, [("import jaxspec.bench.studies.training", []), (MAIN, ["serve", "--help"])])
    assert training.status == 0, training.err
    assert load.status == 2 and load.err.startswith("error: `serve` needs 'grpc'"), load.err
    assert "pip install grpcio" in load.err and "Traceback" not in load.err
