"""python -m jaxspec.bench.online.host SETTINGS: the server whose engine `jaxspec.bench.online.overhead` measures twice.

Serves as `python -m serve` does, and obeys lines of JSON on standard input: one sets the policy and empties the prefix
cache, one steps the engine offline, where it is stepped for the server too, one tells the processor's time. Owns that
protocol; not meant to be started by hand.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from typing import Any

from jaxspec.bench.online.overhead import MARK, prepare, spent, step_offline
from jaxspec.bench.online.stub import Stub
from serve.api.admin import described
from serve.app import Server, load_engine
from serve.config import ServerConfig
from serve.core.engine_client import ThreadLink
from serve.core.engine_process import ProcessLink
from serve.core.errors import StatusError

#: An offline wave is one long step to whoever watches the engine's thread.
_WATCHDOG_SECONDS = 3600.0


async def obey(server: Server, command: dict[str, Any]) -> dict[str, Any]:
    """The answer to one command."""
    engine = server.engine
    match command.pop("do"):
        case "prepare":
            await engine.call(functools.partial(prepare, mode=command["mode"]))
            return {}
        case "spent":
            seconds, rounds = await engine.call(spent)
            return {"engine": seconds, "server": time.process_time(), "rounds": rounds}
        case "offline":
            run = functools.partial(step_offline, waves=command["waves"], max_tokens=command["max_tokens"])
            tpots, seconds = await engine.call(run)
            return {"tpots": tpots, "seconds": seconds}
        case other:
            raise ValueError(f"do must be 'prepare', 'spent' or 'offline', got {other!r}")


async def host(config: ServerConfig, stub: dict[str, Any] | None, same_process: bool) -> None:
    """Serves and obeys until standard input ends.

    Args:
      stub: fields of a Stub that is served in place of a model.
      same_process: the engine runs on a thread of this process.
    """
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    build = functools.partial(load_engine, config) if stub is None else Stub(**stub).build
    link = (ThreadLink if same_process else ProcessLink)(build, described)
    async with Server(config, link=link) as server:
        _answer({"port": server.port})
        while line := await lines.readline():
            try:
                _answer(await obey(server, json.loads(line)))
            except (ValueError, RuntimeError, StatusError) as error:
                _answer({"error": str(error)})


def _answer(value: dict[str, Any]) -> None:
    print(MARK + json.dumps(value), flush=True)


def main() -> None:
    """Reads the settings: plain data of a ServerConfig, and what `host` takes beside it."""
    settings = {"host": "127.0.0.1", "port": 0, "metrics_port": 0, "watchdog_seconds": _WATCHDOG_SECONDS}
    given = json.loads(sys.argv[1])
    stub, same_process = given.pop("stub", None), given.pop("same_process")
    asyncio.run(host(ServerConfig.of({**settings, **given}), stub, same_process))


if __name__ == "__main__":
    main()
