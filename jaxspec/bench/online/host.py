"""python -m jaxspec.bench.online.host SETTINGS: the server whose engine `jaxspec.bench.online.overhead` measures twice.

Serves as `python -m serve` does, and obeys lines of JSON on standard input: one sets the policy and empties the prefix
cache, one steps the engine offline, on the engine's own thread, one tells the processor's time. Owns that protocol;
not meant to be started by hand.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from jaxspec.adaptive.policy import TierPolicy
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.bench.online.overhead import MARK, step_offline
from jaxspec.bench.online.sender import ADAPTIVE
from jaxspec.engine import Engine
from serve.app import Server
from serve.config import ServerConfig
from serve.core.errors import StatusError

#: An offline wave is one long step to whoever watches the engine's thread.
_WATCHDOG_SECONDS = 3600.0


def policy_of(engine: Engine, mode: str) -> TierPolicy:
    """A fresh one: adaptive, or a tier by its name.

    Raises:
      ValueError: a tier that the engine has not compiled.
    """
    if mode == ADAPTIVE:
        return engine.new_policy()
    tiers = {tier.name: tier for tier in engine.runner.states}
    if mode not in tiers:
        raise ValueError(f"mode must be {ADAPTIVE!r} or one of {sorted(tiers)}, got {mode!r}")
    return StaticPolicy(tiers[mode])


def prepare(engine: Engine, mode: str) -> None:
    """A fresh policy and no cached prefixes."""
    engine.use_policy(policy_of(engine, mode))
    engine.flush_prefix_cache()


async def obey(server: Server, command: dict[str, Any]) -> dict[str, Any]:
    """The answer to one command."""
    match command.pop("do"):
        case "prepare":
            await server.engine.call(lambda engine: prepare(engine, command["mode"]))
            return {"cpu": time.process_time()}
        case "cpu":
            return {"cpu": time.process_time()}
        case "offline":
            waves, max_tokens = command["waves"], command["max_tokens"]
            tpots, seconds = await server.engine.call(lambda engine: step_offline(engine, waves, max_tokens))
            return {"tpots": tpots, "seconds": seconds}
        case other:
            raise ValueError(f"do must be 'prepare', 'cpu' or 'offline', got {other!r}")


async def host(config: ServerConfig) -> None:
    """Serves and obeys until standard input ends."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with Server(config) as server:
        _answer({"port": server.port})
        while line := await lines.readline():
            try:
                _answer(await obey(server, json.loads(line)))
            except (ValueError, RuntimeError, StatusError) as error:
                _answer({"error": str(error)})


def _answer(value: dict[str, Any]) -> None:
    print(MARK + json.dumps(value), flush=True)


def main() -> None:
    """Reads the settings: plain data of a ServerConfig."""
    settings = {"host": "127.0.0.1", "port": 0, "metrics_port": 0, "watchdog_seconds": _WATCHDOG_SECONDS}
    asyncio.run(host(ServerConfig.of({**settings, **json.loads(sys.argv[1])})))


if __name__ == "__main__":
    main()
