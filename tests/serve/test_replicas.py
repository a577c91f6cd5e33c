"""Two servers: one after the other is restarted under load, and no request is lost.

They have the session's two engines, of a model each, so that no other is built; which one answers shows in the text.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from jaxspec import SamplingParams
from serve.app import Server
from serve.client import AsyncClient, ServerError
from serve.config import ServerConfig
from serve.openai import free_port

PROMPTS = ["abc", "hgfh", "abcabcabc", "lkl"]
LENGTH = 40


def test_a_rolling_restart_loses_no_request(kit: Any, writing_kit: Any):
    """Requests under way are finished; a new one that is refused goes to the other server, as the gateway sends it."""
    kits = [kit, writing_kit]
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    expected = []
    for of in kits:
        asked = [(of.engine.facts.tokenizer.encode(prompt), params) for prompt in PROMPTS]
        expected.append([outputs[0].text for outputs in of.offline(asked)])
    ports, served, refused = [free_port(), free_port()], [0, 0], [0, 0]

    async def started(which: int) -> Server:
        facade = kits[which].clean()
        config = ServerConfig(port=ports[which], metrics_port=None, withdrawal_seconds=0.05)
        server = Server(config, build=lambda: facade)
        await server.start()
        await server.ready()
        return server

    async def until_both_serve() -> None:
        before = list(served)
        await kit.eventually(lambda: all(now > then for now, then in zip(served, before, strict=True)))

    async def ask(clients: list[AsyncClient], number: int, over: asyncio.Event) -> None:
        for attempt in itertools.count(number):
            if over.is_set():
                return
            prompt = attempt % len(PROMPTS)
            for which in itertools.cycle([attempt % 2, 1 - attempt % 2]):
                options: dict[str, Any] = dict(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, timeout=100)
                try:
                    result = await clients[which].generate(PROMPTS[prompt], **options)
                except ServerError as e:
                    assert e.code.name == "UNAVAILABLE", e
                    refused[which] += 1
                    await asyncio.sleep(0.01)
                    continue
                assert result.text == expected[which][prompt]
                served[which] += 1
                break

    async def story() -> None:
        servers, over = [await started(0), await started(1)], asyncio.Event()
        clients = [AsyncClient(f"127.0.0.1:{port}") for port in ports]
        asking = [asyncio.ensure_future(ask(clients, number, over)) for number in range(4)]
        try:
            for which in (0, 1):
                before = list(served)
                await kit.eventually(
                    lambda before=before: all(now > then for now, then in zip(served, before, strict=True))
                )
                await servers[which].drain()
                assert servers[which].error is None
                await kit.eventually(lambda which=which: refused[which] > 0)
                servers[which] = await started(which)
            await until_both_serve()
            over.set()
            await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            for client in clients:
                await client.close()
            for server in servers:
                await server.stop()

    kit.run(story())
