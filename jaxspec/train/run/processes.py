"""Training over several processes, one a host as a rule: how they meet, and what one of them does for all.

Every process runs the same command on the same files, computes its devices' part of every step, and knows every row.
The first one writes and prints. Must not know what is trained.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

import jax

#: Seconds that the others wait at the end for the first one, which saves and plots.
_SAVING = 3600
AUTO = "auto"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Where a process is among others."""
    add = p.add_argument_group("several processes").add_argument
    add("--coordinator", metavar="HOST:PORT", help="a free port of the first process's host; the same in all. 'auto' "
        "takes all three from SLURM, Open MPI or a TPU pod (default: one process)")  # fmt: skip
    add("--num-processes", type=int, metavar="N", help="processes that train together (default: one)")
    add("--process-id", type=int, metavar="I", help="which of them this is, from 0 (default: the first)")


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[None]:
    """Around a command: it runs together with those of the other processes, where it says that there are such.

    A process that fails ends at once, with status 2: at the usual end it would wait for the others, and they for it.

    Raises:
      ValueError: half of what is needed to meet.
    """
    place = [getattr(args, name, None) for name in ("coordinator", "num_processes", "process_id")]
    coordinator, count, own = place
    if coordinator is None:
        if count is not None or own is not None:
            raise ValueError(f"--num-processes and --process-id need --coordinator, got {count} and {own}")
        yield
        return
    if coordinator == AUTO:
        if count is not None or own is not None:
            raise ValueError(f"--coordinator auto finds its number of processes and its own, got {count} and {own}")
        jax.distributed.initialize(shutdown_timeout_seconds=_SAVING)
    else:
        if count is None or own is None or not 0 <= own < count:
            raise ValueError(
                f"--coordinator needs --num-processes and a --process-id below that, got {count} and {own}"
            )
        jax.distributed.initialize(
            coordinator, count, own, cluster_detection_method="deactivate", shutdown_timeout_seconds=_SAVING
        )
    with contextlib.ExitStack() as quiet:
        if not leads():
            quiet.enter_context(contextlib.redirect_stdout(quiet.enter_context(open(os.devnull, "w"))))
        try:
            yield
        except BaseException as error:
            if isinstance(error, ValueError | OSError | FloatingPointError | ImportError):
                print(f"error: process {jax.process_index()}: {error}", file=sys.stderr)
            else:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)
    jax.distributed.shutdown()


def leads() -> bool:
    """Whether this process writes: it is the first, or alone."""
    return jax.process_index() == 0


def refuse(args: argparse.Namespace) -> None:
    """What one process alone can do, where there are several.

    Raises:
      ValueError: names the option and both values.
    """
    count = jax.process_count()
    if count == 1:
        return
    asked = {"--regenerate": args.regenerate, "--hidden-cache": args.hidden_cache, "--gate": args.gate}
    asked["--data ring:"] = next((path for path in args.data if str(path).startswith("ring:")), None)
    for name, value in asked.items():
        if value:
            raise ValueError(f"{name} {value} is for one process, got {count}; let one do it beforehand")
    if not args.mesh:
        raise ValueError(f"{count} processes need --mesh over all their devices, e.g. data={jax.device_count()}")
