"""What the studies' commands share: their parser, a device's rates, and the file of --json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec import cli


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A study's parser, with --json FILE, described by the first paragraph of its module's docstring."""
    line = (doc or "").split("\n\n")[0]
    p = argparse.ArgumentParser(
        prog=f"python -m jaxspec.bench.studies.{name}", description=line, formatter_class=cli.Help
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write conditions and rows there (default: nowhere)")
    return p


def parse(p: argparse.ArgumentParser, argv: Sequence[str] | None, *, gpu: bool = False) -> argparse.Namespace:
    """A study's arguments; exits with status 2, in a line, where they or this device do not do.

    Args:
      gpu: it measures kernels that only NVIDIA GPUs run.
    """
    args = cli.parse(p, argv)
    refuse = lambda text: p.exit(2, f"{p.prog}: error: {text}\n")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        refuse(f"--json {args.json}: its directory does not exist")
    if gpu and (backend := jax.default_backend()) != "gpu":
        refuse(f"it measures kernels of NVIDIA GPUs, and this is a {backend.upper()}")
    if (shards := getattr(args, "tensor_parallel", 1)) > jax.device_count():
        refuse(f"--tensor-parallel must be at most the {jax.device_count()} devices at hand, got {shards}")
    return args


def rate(known: Mapping[str, float], given: float | None) -> float | None:
    """What this device does a second: 1e12 times what the user says, else by the data sheet; None: unknown."""
    if given:
        return given * 1e12
    kind = jax.devices()[0].device_kind
    return next((rate for name, rate in known.items() if name in kind), None)


def cell(value: float | None, form: str) -> str:
    """A figure of a table, "-" where this device has none.

    Args:
      form: width and precision of a float, such as "10.1f".
    """
    return f"{'-':>{form.partition('.')[0]}}" if value is None else format(value, form)


def write(args: argparse.Namespace, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows under a name, with the conditions beside them, where --json asks for it."""
    if args.json is None:
        return
    conditions = {key: value for key, value in vars(args).items() if key != "json"}
    conditions |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    args.json.write_text(json.dumps({"conditions": conditions, name: rows}, indent=1, default=str) + "\n")
