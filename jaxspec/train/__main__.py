"""python -m jaxspec.train COMMAND ...: makes data, trains drafters on it, and measures them.

Each command's module owns its arguments.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec import cli

with cli.starting(__name__):
    from jaxspec.drafters import registry
    from jaxspec.resolve import resolve_model
    from jaxspec.train.run import processes
#: A trainer of several kinds is named after the first.
_TRAINERS = {kind.trainer: kind.name for kind in reversed(registry.kinds()) if kind.trainer}
COMMANDS = {
    "corpus": "jaxspec.train.data.corpus",
    "target": "jaxspec.train.target",
    "regenerate": "jaxspec.train.data.regenerate",
    **{name: module for module, name in reversed(_TRAINERS.items())},
    "evaluate": "jaxspec.train.run.evaluate",
}
#: What trainers elsewhere (transformers, speculators, SpecForge) call these flags.
ELSEWHERE = {
    "learning_rate": "lr", "batch_size": "batch", "per_device_train_batch_size": "batch", "output_dir": "out",
    "gradient_accumulation_steps": "accumulate", "max_grad_norm": "clip", "max_length": "length", "max_steps": "steps",
    "lr_scheduler_type": "schedule", "warmup_steps": "warmup", "model": "target", "verifier": "target",
    "target_model_path": "target", "train_data_path": "data", "train_file": "data", "optim": "optimizer",
    "ttt_length": "ttt_steps", "max_new_tokens": "max_tokens", "num_train_epochs": "epochs", "num_epochs": "epochs",
    "resume": "run_dir", "resume_from_checkpoint": "run_dir",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line, every command described by its module's first line."""
    top = argparse.ArgumentParser(prog="python -m jaxspec.train", description=(__doc__ or "").splitlines()[0],
                                  formatter_class=cli.Help)  # fmt: skip
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        line = (module.__doc__ or "").splitlines()[0].partition("`: ")[2].replace("%", "%%")
        module.add_arguments(commands.add_parser(name, help=line, description=line, formatter_class=cli.Help))
    return top


def main(argv: Sequence[str] | None = None) -> Any:
    """Runs one command and returns what its module's main returns.

    Raises:
      ValueError: a --target that is neither "demo" nor a directory, and whatever the command refuses.
    """
    args = cli.parse(parser(), argv, ELSEWHERE)
    with processes.joined(args):
        return _run(args)


def _run(args: argparse.Namespace) -> Any:
    if isinstance(getattr(args, "target", None), Path):  # `evaluate` takes names itself, and records them
        args.target = resolve_model(args.target)
    return importlib.import_module(COMMANDS[args.command]).main(args)


def run(argv: Sequence[str] | None = None) -> int:
    """One command; what is wrong with its data, files or options becomes one line and exit status 2."""
    try:
        main(argv)
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        cli.say_interrupted("interrupted; the same command goes on from the last checkpoint")
        return cli.INTERRUPTED
    return 0


if __name__ == "__main__":
    cli.leave(run())
