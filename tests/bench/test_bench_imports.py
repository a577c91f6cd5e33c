"""Nothing but the load generator needs the server's packages: they are blocked in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
#: protobuf is orbax's as well, which training imports.
SERVER = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "prometheus_client")
PROTOBUF = "google.protobuf"


def without(names: tuple[str, ...], code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    block = f"import sys; sys.modules |= dict.fromkeys({names!r}); sys.argv[1:] = {list(argv)!r}\n"
    return subprocess.run(
        [sys.executable, "-c", block + code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


def test_the_package_and_its_offline_commands_import_without_the_server():
    studies = [f"studies.{name}" for name in ("overheads", "rounds", "layouts", "peers", "products")]
    offline = [f"offline.{name}" for name in ("grow", "tune", "engines", "report", "plots")]
    modules = ", ".join(f"jaxspec.bench.{name}" for name in (*studies, *offline))
    code = f"import jaxspec, jaxspec.generate, jaxspec.bench.__main__, {modules}\njaxspec.LLM\n"
    code += "print([m for m in sys.modules if m.split('.')[0] == 'serve'])"
    done = without((*SERVER, PROTOBUF), code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    assert without(SERVER, "import jaxspec.bench.studies.training").returncode == 0


@pytest.mark.parametrize(
    ("module", "argv", "words"),
    [
        ("jaxspec.bench", ("--help",), "--batch-sizes"),
        ("jaxspec.bench", ("tune", "--help"), "--reach"),
        ("jaxspec.bench", ("grow", "--help"), "Llama 3.1 8B"),
        ("jaxspec.generate", ("--help",), "--max-tokens"),
    ],
)
def test_commands_help_without_the_server(module: str, argv: tuple[str, ...], words: str):
    run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = without((*SERVER, PROTOBUF), run, *argv)
    assert done.returncode == 0 and words in done.stdout, done.stderr


def test_the_load_generator_says_what_it_lacks():
    done = without(SERVER, "from jaxspec.bench.__main__ import main; sys.exit(main())", "serve", "--help")
    assert done.returncode == 2 and done.stderr.startswith("error: `serve` needs 'grpc'"), done.stderr
    assert "pip install grpcio" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_benchmark_runs_without_the_server(tmp_path: Path):
    run = "from jaxspec.bench.__main__ import main; sys.exit(main())"
    options = ("--drafter", "ngram", "--batch-sizes", "1", "--tiers", "2", "--workloads", "code", "--max-tokens", "4")
    done = without((*SERVER, PROTOBUF), run, *options, "--repeats", "1", "--json", str(tmp_path / "bench.json"))
    assert done.returncode == 0 and "completions equal plain decoding's" in done.stdout, done.stderr
    assert (tmp_path / "bench.json").exists()
