"""python -m jaxspec.train COMMAND ...: each command's module owns its arguments."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from jaxspec.drafters import registry

#: Exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130

#: A trainer of several kinds is named after the first.
_TRAINERS = {kind.trainer: kind.name for kind in reversed(registry.kinds()) if kind.trainer}
COMMANDS = {
    "corpus": "jaxspec.train.data.corpus",
    "target": "jaxspec.train.target",
    "regenerate": "jaxspec.train.data.regenerate",
    **{name: module for module, name in reversed(_TRAINERS.items())},
    "evaluate": "jaxspec.train.run.evaluate",
}


def main(argv: Sequence[str] | None = None) -> Any:
    """Runs one command and returns what its module's main returns."""
    parser = argparse.ArgumentParser(prog="python -m jaxspec.train", description=__doc__)
    sub = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        importlib.import_module(module).add_arguments(sub.add_parser(name))
    args = parser.parse_args(argv)
    return importlib.import_module(COMMANDS[args.command]).main(args)


def run(argv: Sequence[str] | None = None) -> int:
    """One command; what is wrong with its data, files or options becomes one line and exit status 2."""
    try:
        main(argv)
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(run())
