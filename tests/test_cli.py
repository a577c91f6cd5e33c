"""What the command lines share: Ctrl-C, and errors that say what was meant."""

from __future__ import annotations

import argparse
import ast
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxspec import batch, cli, generate, quantize
from jaxspec.bench.offline import command as bench
from jaxspec.bench.online import command as serving
from jaxspec.names import nearest
from jaxspec.train import __main__ as training
from serve import learn
from serve.__main__ import main as serve_main
from serve.openai import main as openai_main

ROOT = Path(__file__).resolve().parent.parent


def interrupted(body: str) -> tuple[int, str, float]:
    """(exit status, standard error, seconds) of a command that is interrupted while it runs `body`."""
    code = f"from jaxspec import cli\ndef main():\n{textwrap.indent(body, '    ')}\n    return 0\ncli.run(main)"
    ready = "import sys; print('ready', flush=True)\n"
    command = [sys.executable, "-c", code.replace("def main():\n", f"def main():\n    {ready}")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=600)
    return process.returncode, error, time.monotonic() - began


@pytest.mark.parametrize(
    "body",
    [
        "import time; time.sleep(500)",
        # Minutes in which Python takes no signal.
        "import hashlib\nwith cli.quick_interrupts(): hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
        "import threading, time; threading.Thread(target=time.sleep, args=(500,), name='warm-up-0').start(); "
        "threading.Event().wait()",
        # What is imported may take an exception for its own.
        "import time\nwith cli.starting('__main__'):\n  try: time.sleep(500)\n  except BaseException: time.sleep(500)",
    ],
    ids=["python", "one long call", "a warm-up beside it", "imports"],
)
def test_an_interrupt_is_quiet_and_quick(body: str):
    status, error, seconds = interrupted(body)
    assert (status, error) == (cli.INTERRUPTED, "interrupted\n")
    assert seconds < 100  # not the minutes that are left


def test_the_handlers_of_others_come_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), cli.quick_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    entered: list[bool] = []

    def elsewhere() -> None:
        with cli.quick_interrupts():
            entered.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert entered == [True]


def test_commands_end_with_what_they_return(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: 3)
    assert ended.value.code == 3


def test_a_command_without_a_device_says_so_in_a_line(capsys: pytest.CaptureFixture[str]):
    """Whatever asks JAX first; other errors keep their tracebacks."""
    for name, quiet in (("jax/_src/xla_bridge.py", True), ("jax/_src/other.py", False)):
        try:
            exec(compile("raise RuntimeError('no backend')", name, "exec"))
        except RuntimeError as e:
            cli._say_uncaught(RuntimeError, e, e.__traceback__)
        told = capsys.readouterr().err
        assert "no backend" in told and (told.count("\n") == 1) == quiet


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Subcommands by name."""
    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(commands.choices)


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (generate.main, ["hi", "--max-new-tokens", "5"], "for '--max-new-tokens' say '--max-tokens'"),
        (generate.main, ["hi", "--max-model-len=5"], "for '--max-model-len' say '--max-seq-len'"),
        (generate.main, ["hi", "--tensor-parallel-size", "2"], "say '--tensor-parallel'"),
        (generate.main, ["hi", "--zzz"], "unrecognized arguments: --zzz (see --help)\n"),
        (generate.main, ["hi", "--num-speculative-tokens", "3"], "say '--depth'"),
        # No beginning of --num-speculative-tokens-per-batch-size.
        (serve_main, ["--num-speculative-tokens", "3"], "for '--num-speculative-tokens' say '--depth'"),
        (serve_main, ["--speculative-config", "{}"], "say '--drafter, --depth'"),
        (training.main, ["mtp", "--data", "x", "--target", "x", "--out", "x", "--batch-size", "1"], "say '--batch'"),
        (bench.parse, ["tune", "--out", "x", "--batch-size", "1"], "for '--batch-size' say '--batch-sizes'"),
        (serve_main, ["--api-key", "x"], "for '--api-key' say '--auth-token-file'"),
        (serve_main, ["--gpu-memory-utilization", ".9"], "for '--gpu-memory-utilization' say '--memory-fraction'"),
        (serve_main, ["--speculation", "eagle3"], "for '--speculation' say '--drafter, --policy, --depth'"),
        (
            serve_main,
            ["--enforce-eager"],
            "--enforce-eager; '--enforce-eager': leave it out, rounds are always compiled",
        ),
        (serve_main, ["--quantization", "fp8"], "; '--quantization': leave it out, a checkpoint says how it is quant"),
        (
            serve_main,
            ["--tool-call-parser", "hermes"],
            "; '--tool-call-parser': leave it out, chats and tools are the gate",
        ),
        (serve_main, ["--grpc-port", "9"], "for '--grpc-port' say '--port'"),
        (serve_main, ["--ctx-size", "9"], "for '--ctx-size' say '--max-seq-len'"),
        (generate.main, ["hi", "--guided-json", "{}"], "for '--guided-json' say '--json-schema'"),
        (generate.main, ["hi", "--best-of", "2"], "--best-of 2; '--best-of': leave it out, ask for n completions"),
        (generate.main, ["--prompt", "hi"], "--prompt; '--prompt': leave the flag out, prompts are given as they are"),
        (generate.main, ["hi", "--temp", "1"], "for '--temp' say '--temperature'"),
        (serve_main, ["Qwen/Qwen3-0.6B"], "Qwen/Qwen3-0.6B; a model is given as '--model'"),
    ],
)
def test_a_flag_that_is_none_is_answered_with_the_one_that_was_meant(
    command: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        command(words)
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (generate.main, ["hi", "--dtype", "float16"], "argument --dtype: it must be one of ['float32', 'bfloat16'], "
            "got 'float16'; say 'bfloat16', which takes as much memory, or 'float32' (see --help)\n"),
        (bench.parse, ["profile", "--out", "x", "--dtype", "half"], "got 'half'; say 'bfloat16', which"),
        (generate.main, [], "give one of: prompts, --demo, --chat (see --help)\n"),
        (training.main, ["eagle3", "--model", "x", "--data", "y"], "error: the following arguments are required: "
            "--target, --out; for '--model' say '--target' (see --help)\n"),
        (quantize.main, ["--out", "y", "--bits", "8"], "required: --format; '--out': leave the flag out, "
            "MODEL comes first and OUT second; for '--bits' say '--format' (see --help)\n"),
        (batch.main, ["-i", "x", "-o", "y"], "required: --out; '-i': leave the flag out, files of prompts are given as "
            "they are; for '-o' say '--out' (see --help)\n"),
        (serving.main, ["--num-prompts", "9"], "for '--num-prompts' say '--requests' (see --help)\n"),
        (bench.parse, ["--output-len", "9"], "for '--output-len' say '--max-tokens' (see --help)\n"),
        (openai_main, ["--http-host", "0.0.0.0:80"], "; say --http-host 0.0.0.0 and --http-port 80 (see"),
        (openai_main, ["--http-port", "99999"], "--http-port must be from 0 to 65535, got 99999 (see --help)\n"),
        (learn.main, ["--out", "x", "--trial", "3"], "required: --target, --drafter, --ring, --trainer (see --help)\n"),
        (serve_main, ["-tp", "2", "-x"], "arguments: -tp 2 -x; for '-tp' say '--tensor-parallel' (see --help)\n"),
        (serve_main, ["--port", "x"], "argument --port: must be an integer, got 'x' (see --help)\n"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(
    command: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        command(words)
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and error.count("\n") == 1 and " error: " in error


def test_of_names_alike_the_one_that_begins_alike_is_meant():
    assert nearest("eagle4", ["eagle1", "peagle"]) == "eagle1"
    assert nearest("eagl3", ["eagle1", "eagle3", "peagle"]) == "eagle3" and nearest("zzz", ["eagle3"]) == ""
    assert nearest("--speculation", ["--verification"]) == "", "an ending is no likeness"
    assert nearest("--temp", ["--temperature", "--template", "-t"]) == "--template", (
        "a beginning is, and the least of it"
    )
    assert nearest("--te", ["--temperature"]) == ""


def test_the_commands_of_training_say_what_they_do():
    shown = " ".join(training.parser().format_help().split())
    commands = commands_of(training.parser())
    assert commands.keys() == training.COMMANDS.keys()
    for name, parser in commands.items():
        description = parser.description or ""
        assert len(description) > 20 and description.endswith("."), (name, description)
        assert f"{name} {' '.join(description.split())}" in shown, name


@pytest.mark.parametrize(
    "path", ["jaxspec/generate.py", "jaxspec/bench/__main__.py", "jaxspec/train/__main__.py", "serve/__main__.py"]
)
def test_commands_import_what_takes_time_where_an_interrupt_is_quiet(path: str):
    at_once = []
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ImportFrom) and ast.unparse(node) != "from jaxspec import cli":
            at_once.append(node.module)
        elif isinstance(node, ast.Import):
            at_once += [alias.name for alias in node.names]
    assert {str(name).partition(".")[0] for name in at_once} <= set(sys.stdlib_module_names)
    assert "with cli.starting(__name__):\n" in (ROOT / path).read_text()


def test_a_library_leaves_signals_alone():
    before = signal.getsignal(signal.SIGINT)
    with cli.starting("jaxspec.generate"):
        assert signal.getsignal(signal.SIGINT) is before
