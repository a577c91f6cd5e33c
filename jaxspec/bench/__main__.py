"""python -m jaxspec.bench: plain decoding, every static tier and the adaptive policy, in one run.

python -m jaxspec.bench                              demo models, a few minutes on two cores
python -m jaxspec.bench --quick                      a first look in about a minute
python -m jaxspec.bench tune --out tuned.json        candidate steps for each batch size, from measurements
python -m jaxspec.bench profile --out profile.json   what rounds cost on this device, for EngineConfig.profile
python -m jaxspec.bench serve --concurrency 16       load for a server; see jaxspec.bench.online.command
python -m jaxspec.bench adaptive --json a.json       every policy and fixed tier under loads that change
python -m jaxspec.bench simulate --json sim.json     every policy on a clock of its own: no device, no JAX
python -m jaxspec.bench report sim.json --out x.html a page of it, with a calculator of when speculation pays
python -m jaxspec.bench grow 8b DIR                  the demo at a larger model's cost, to be served
python -m jaxspec.bench overheads                    the host's microseconds by part, and the device's idle share
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from jaxspec import cli

#: Modules of commands that need less, or other things, than an engine.
_APART = {
    "serve": "jaxspec.bench.online.command",
    "simulate": "jaxspec.bench.simulate.command",
    "report": "jaxspec.bench.page.command",
    "adaptive": "jaxspec.bench.evidence.command",
}
_OFFLINE = "jaxspec.bench.offline.command"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status (2 for options that do not fit, 130 after Ctrl-C)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    apart = argv[0] if argv and argv[0] in _APART else None
    try:
        with cli.starting(__name__):
            command = importlib.import_module(_OFFLINE if apart is None else _APART[apart])
    except ModuleNotFoundError as error:
        # The load generator's client and server need gRPC, which nothing else here does.
        if apart != "serve" or error.name is None or error.name.partition(".")[0] in ("jaxspec", "serve"):
            raise
        needed = "grpcio, grpcio-health-checking, grpcio-reflection, grpcio-status, protobuf, prometheus-client"
        print(f"error: `serve` needs {error.name!r}, which is not installed; pip install {needed}", file=sys.stderr)
        return 2
    if apart is None and argv and not argv[0].startswith("-") and argv[0] not in (there := command.subcommands()):
        print(f"error: no benchmark {argv[0]!r}; there are {', '.join(sorted({*there, *_APART}))}", file=sys.stderr)
        return 2
    return int(command.main(argv if apart is None else argv[1:]))


if __name__ == "__main__":
    cli.leave(main())
