"""python -m jaxspec.bench.studies: the studies that there are, one line each; they are part of a checkout alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec import cli

_HERE = "jaxspec.bench.studies"
STUDIES = tuple(f"{_HERE}.{path.stem}" for path in sorted(Path(__file__).parent.glob("[!_]*.py")))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    return cli.tell_commands(_HERE, STUDIES, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
