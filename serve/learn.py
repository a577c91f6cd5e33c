"""python -m serve.learn: trains the drafter of a running server on what that gathers, and hands over what is better.

A cycle waits until the server's feature ring has grown, trains on from the head that is served (`python -m
jaxspec.train KIND --data ring:DIR`, a process of its own), which writes a head only if it passes the gate, has the
server take it by UpdateDrafter, and waits for the end of its trial. It runs on the server's host, at the lowest
priority; where training would slow the server's device down, run it where another device is (JAX_PLATFORMS=cpu).
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from serve.client import Client, ServerError, names

#: Seconds between two looks at the ring and the server.
_LOOK_SECONDS = 2.0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m serve.learn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="What follows -- goes to the trainer: -- --steps 300 --lr 3e-4",
    )  # fmt: skip
    p.add_argument("--target", required=True, metavar="DIR", help="the served model's directory")
    p.add_argument("--drafter", required=True, type=Path, metavar="DIR", help="the head that is served at the start")
    p.add_argument("--ring", required=True, type=Path, metavar="DIR", help="the server's --feature-ring")
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory for heads, one of its own each")
    p.add_argument("--server", default="localhost:50051", metavar="HOST:PORT", help="default: %(default)s")
    p.add_argument("--token-file", type=Path, metavar="FILE", help="an administrator's token, in its first line")
    p.add_argument("--grown-mib", type=float, default=256.0, help="new in the ring for a cycle (default: %(default)s)")
    p.add_argument("--margin", type=float, default=0.02, help="of the gate (default: %(default)s)")
    p.add_argument("--trainer", required=True, metavar="KIND", help="command of jaxspec.train, of the head's kind")
    p.add_argument("--cycles", type=int, metavar="N", help="end after so many (default: never)")
    p.add_argument(
        "--trial-seconds", type=float, default=3600.0, help="most to wait for a trial (default: %(default)s)"
    )
    p.add_argument("options", nargs="*", help=argparse.SUPPRESS)
    return p


def grown(ring: Path, since: str) -> tuple[float, str]:
    """(MiB of the files that came after the one named `since`, the newest one's name)."""
    sizes: dict[str, int] = {}
    for path in ring.glob("ring-*.safetensors"):
        try:
            sizes[path.name] = path.stat().st_size
        except FileNotFoundError:  # its place was needed
            continue
    return sum(size for name, size in sizes.items() if name > since) / 2**20, max(sizes, default=since)


class Loop:
    """The cycles of one server.

    Args:
      train: runs a trainer's command line; raises CalledProcessError where it fails.

    Attributes:
      head: what is served.
    """

    def __init__(
        self, args: argparse.Namespace, client: Client, train: Callable[[Sequence[str]], None],
        sleep: Callable[[float], None] = time.sleep,
    ):  # fmt: skip
        self._args, self._client, self._train, self._sleep = args, client, train, sleep
        self.head: Path = args.drafter
        self._seen, self._number = "", 0

    def cycle(self) -> str:
        """One cycle; what came of it, on a line."""
        args = self._args
        told = False
        while (new := grown(args.ring, self._seen))[0] < args.grown_mib:
            if not told:
                print(f"{new[0]:.1f} of {args.grown_mib:g} MiB are gathered: waiting", file=sys.stderr, flush=True)
                told = True
            self._sleep(_LOOK_SECONDS)
        self._seen = new[1]
        self._number += 1
        while (out := args.out / f"head-{self._number:04d}").exists() or out.with_name(out.name + ".run").exists():
            self._number += 1
        self._train([
            args.trainer, "--target", args.target, "--data", f"ring:{args.ring}", "--init-from", str(self.head),
            "--gate", str(self.head), "--gate-margin", str(args.margin), "--out", str(out), *args.options,
        ])  # fmt: skip
        if not (out / "config.json").exists():
            return f"{out.name}: not better than {self.head}"
        version = self._client.update_drafter(str(out.absolute()))
        end = time.monotonic() + args.trial_seconds
        while (info := self._client.server_info()).drafter_trial or info.drafter_updates < version - 1:
            if time.monotonic() > end:
                return f"{out.name}: version {version} is still on trial"
            self._sleep(_LOOK_SECONDS)
        if info.drafter_version != version:
            return f"{out.name}: version {version} was rolled back to {info.drafter_version}"
        self.head = out
        return f"{out.name}: version {version} is served"


def _run_trainer(command: Sequence[str]) -> None:
    nice = getattr(os, "nice", None)
    subprocess.run(
        [sys.executable, "-m", "jaxspec.train", *command], check=True,
        preexec_fn=None if nice is None else lambda: nice(19),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 what the server or the trainer refused, 2 a file, 130 Ctrl-C."""
    args = names.parse(parser(), argv)
    try:
        file: Path | None = args.token_file
        token = None if file is None else file.read_text(encoding="utf-8").split("\n", 1)[0].strip()
        if not args.ring.is_dir():
            raise ValueError(f"--ring {args.ring} is no directory: it is the server's --feature-ring, on this host")
        with Client(args.server, token=token) as client:
            client.server_info()  # before anything is waited for
            loop, done = Loop(args, client, _run_trainer), 0
            while args.cycles is None or done < args.cycles:
                print(loop.cycle(), flush=True)
                done += 1
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except ServerError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as e:  # whose error stands above
        print(f"error: the trainer ended with status {e.returncode}: {shlex.join(map(str, e.cmd))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
