"""python -m jaxspec: the commands that there are, one line each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxspec import cli

COMMANDS = (
    "jaxspec.generate", "jaxspec.batch", "serve", "serve.client", "serve.openai", "serve.learn", "jaxspec.train",
    "jaxspec.quantize", "jaxspec.bench", "jaxspec.bench.studies", "pallas_kernels.bench", "pallas_kernels.aot",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    return cli.tell_commands("jaxspec", COMMANDS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
