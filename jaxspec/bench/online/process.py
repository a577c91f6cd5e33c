"""A server of one's own, as a child process.

Owns the way from flags to a port that answers, and the end. Must not know loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence

#: Seconds for loading and compiling, and for a drain.
_START_SECONDS, _STOP_SECONDS = 900.0, 30.0


@contextlib.asynccontextmanager
async def own_server(flags: Sequence[str]) -> AsyncIterator[str]:
    """`python -m serve` with these flags on free ports of this machine; yields its target once it serves.

    Its log goes to this process's standard error. It is drained at the end, and killed if that takes long.

    Raises:
      ValueError: it ended before it served.
    """
    command = [
        sys.executable, "-m", "serve", "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0",
        "--log-level", "warning", "--withdrawal-seconds", "0", "--warmup", "eager", *flags,
    ]  # fmt: skip
    # A session of its own: Ctrl-C is for the load, which still wants its last numbers.
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=2**20
    )
    try:
        yield await asyncio.wait_for(_serving(process), _START_SECONDS)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.communicate(), _STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _serving(process: asyncio.subprocess.Process) -> str:
    """The target, once the engine is warm: the server says both on standard output."""
    assert process.stdout is not None
    target = ""
    while line := await process.stdout.readline():
        text = line.decode(errors="replace")
        if match := re.match(r"listening on (\S+:\d+)", text):
            target = match[1].rstrip(",")
        if target and text.startswith("serving "):
            return target
    raise ValueError(f"the server ended with status {await process.wait()} before it served")
