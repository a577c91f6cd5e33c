"""What the command lines share: flags are given whole, and what is wrong with one is told in a line.

Standard library only.
"""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A command's arguments; its flags' help says what each is by default.

    Args:
      name: of the module, below this package.
      doc: the module's docstring, whose first line describes the command.
    """

    def __init__(self, name: str, doc: str | None) -> None:
        line = (doc or "").partition("\n")[0]
        super().__init__(
            prog=f"python -m pallas_kernels.{name}", description=line.partition(": ")[2] or line, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2, without the usage."""
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")
