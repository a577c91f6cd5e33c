"""What a generation server must survive of load and of clients that leave, over a real socket.

After each: the engine lives, pages and tables are back at their baseline, and what ran beside it is unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from wires import EXHAUSTED, Code, Wire, ask, served, survives

from serve.proto import generation_pb2 as pb
from serve.proto.services import GENERATION, Stub


def test_a_full_queue_says_when_to_try_again(kit: Any, expected: Any):
    async def story() -> None:
        async with served(kit, max_waiting=3) as wire:
            wire.facade.hold()
            requests = [asyncio.create_task(wire.read(ask("abc"[i % 3] * 3))) for i in range(4 + 3)]
            # Live alone may still be read by the threads for text, and then the next request takes its place.
            await kit.eventually(lambda: wire.generator.in_engine == 7)
            for attempt in (wire.generation.Generate(ask()), wire.read(ask())):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await attempt
                assert caught.value.code() is EXHAUSTED
                status = rpc_status.from_call(caught.value)
                info = error_details_pb2.RetryInfo()
                assert status is not None and status.details[0].Unpack(info)
                assert 0.1 <= info.retry_delay.ToTimedelta().total_seconds() <= 30
            assert await wire.serving(), "a full queue is no failure"
            wire.facade.release()
            for i, task in enumerate(requests):
                assert await task == tokens[i % 3]
            await wire.idle()

    tokens = [expected(letter * 3) for letter in "abc"]
    kit.run(story())


def test_deadlines_before_and_in_the_queue_cost_no_prefill(kit: Any, expected: Any):
    async def story() -> None:
        async with served(kit) as wire:
            wire.facade.hold()
            running = [asyncio.create_task(wire.read(ask("abc"))) for _ in range(4)]
            await kit.eventually(lambda: wire.generator.in_engine == 4)
            for prompt, timeout in (("lll", 1e-4), ("kkkkk", 0.2)):
                assert (await wire.status(ask(prompt), timeout=timeout)).code() is Code.DEADLINE_EXCEEDED
            await wire.live(4)  # the clients knew before the server
            wire.facade.release()
            for task in running:
                assert await task == tokens
            await wire.idle()
            assert not any(11 in prompt or 10 in prompt for prompt in prefilled)

    tokens = expected("abc")
    prefilled: list[list[int]] = []
    runner = kit.engine.runner
    prefill = runner.prefill
    runner.prefill = lambda work: (
        prefilled.extend(list(chunk.request.prompt_token_ids) for chunk in work.chunks) or prefill(work)
    )
    try:
        kit.run(story())
    finally:
        del runner.prefill


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
@pytest.mark.parametrize("how", ["cancel", "disconnect", "abort"])
def test_whoever_leaves_frees_the_pages_within_two_steps(kit: Any, expected: Any, where: str, how: str):
    """One step may be under way, and in the next nothing of them is left; nor do they come to their 70 tokens."""

    async def harm(wire: Wire) -> None:
        generator, engine, scheduler = wire.generator, kit.engine, kit.engine.scheduler
        names = [f"leaver-{i}" for i in range(8 if where == "queue" else 2)]

        def there() -> bool:
            if generator.in_engine < 1 + len(names):
                return False
            prefilling = scheduler._prefilling
            if where == "queue":
                return engine.stats.waiting >= 5
            if where == "prefill":
                return any(0 < request.num_computed < 48 for request in prefilling)
            return not prefilling and len(scheduler._running) == 3 and all(r.output_token_ids for r in live())

        live = lambda: list(scheduler._by_id.values())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{wire.server.port}") as channel:
            stub = Stub(GENERATION, channel)
            requests = [ask("abcd" * 12, max_tokens=70) for _ in names]
            for name, request in zip(names, requests, strict=True):
                request.request_id = name
            calls = [stub.GenerateStream(request) for request in requests]
            readers = [asyncio.create_task(_tokens(call)) for call in calls]
            await kit.eventually(lambda: generator.in_engine == 1 + len(names))
            while not there():
                await wire.advance(1)
            if how == "cancel":
                for call in calls:
                    call.cancel()
            elif how == "disconnect":
                await channel.close()
            else:
                answer = await wire.generation.Abort(pb.AbortRequest(request_ids=names))
                assert answer.aborted == len(names)
            await wire.live(1)
            ends = await asyncio.gather(*readers, return_exceptions=True)
        for end in ends:
            assert isinstance(end, asyncio.CancelledError | grpc.aio.AioRpcError), end
            if how == "abort":
                assert isinstance(end, grpc.aio.AioRpcError)
                assert end.code() is Code.CANCELLED and "aborted" in str(end.details())
        assert there() and generator.in_engine == 1 + len(names), "no step was done meanwhile"
        await wire.advance(2)
        assert generator.in_engine == 1
        stats = engine.stats
        assert (stats.running, stats.waiting) == (1, 0)
        pages = wire.server.engine.facts.sizes.pages_for(6 + 100)
        assert engine.facts.sizes.num_pages - stats.free_pages - stats.cached_pages <= pages
        assert sorted((name, reason) for name, reason, _ in wire.ends) == [(name, "abort") for name in names]
        assert all(count < 70 for _, _, count in wire.ends)
        assert where != "decode" or all(count > 0 for _, _, count in wire.ends)

    survives(kit, expected, harm, held=True)


async def _tokens(call: Any) -> list[int]:
    tokens: list[int] = []
    async for message in call:
        tokens += message.delta.token_ids
    return tokens


def test_abort_storms_are_idempotent(kit: Any, expected: Any):
    """Every request is aborted once, however often and from wherever it is asked for, and its name is free at once."""

    async def harm(wire: Wire) -> None:
        requests = [ask("abc", max_tokens=80) for _ in range(20)]
        for i, request in enumerate(requests):
            request.request_id = f"storm-{i}"
        calls = [asyncio.create_task(wire.read(request)) for request in requests]
        await kit.eventually(lambda: wire.generator.in_engine == 21)
        await wire.advance(6)  # some run, some wait
        assert kit.engine.stats.waiting > 0
        ids = [request.request_id for request in requests]
        storm = pb.AbortRequest(request_ids=[*ids, "never-seen", *ids])
        answers = await asyncio.gather(*(wire.generation.Abort(storm) for _ in range(50)))
        assert sum(answer.aborted for answer in answers) == 20
        vllm = vllm_engine_pb2_grpc.VllmEngineStub(wire.channel)
        await asyncio.gather(*(vllm.Abort(vllm_engine_pb2.AbortRequest(request_ids=ids)) for _ in range(50)))
        for end in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(end, grpc.aio.AioRpcError) and end.code() is Code.CANCELLED
        assert (await wire.generation.Abort(storm)).aborted == 0
        again = asyncio.create_task(wire.read(requests[0]))
        await wire.live(2)
        await wire.advance(2)
        assert sorted((name, reason) for name, reason, _ in wire.ends) == sorted((name, "abort") for name in ids)
        assert all(count < 80 for _, _, count in wire.ends)
        wire.facade.release()
        assert await again == tokens

    tokens = expected("abc", max_tokens=80)
    survives(kit, expected, harm, held=True)


def test_a_reader_that_stalls_is_ended_and_delays_nobody(kit: Any, expected: Any):
    """The output is large, and the client's window small: what it does not read stays with the server."""

    async def harm(wire: Wire) -> None:
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{wire.server.port}", options=options) as channel:
            request = ask("abc", n=64, max_tokens=100, logprobs=12, temperature=1.0)
            call = Stub(GENERATION, channel).GenerateStream(request)
            await call.read()
            first = ask("cab")
            first.priority = -5
            assert await wire.read(first) == other
            await wire.live(0)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() is Code.CANCELLED
        # The caller may hear of it before the engine does; if nothing was left to end, this does not come.
        await kit.eventually(lambda: any(reason == "abort" for _, reason, _ in wire.ends))

    other = expected("cab")
    survives(kit, expected, harm, stall_seconds=1.0)


def test_when_pages_run_out_requests_wait_and_say_the_same(kit: Any, expected: Any):
    """Four requests of 15 pages each in a pool of 30."""

    async def story() -> None:
        async with served(kit) as wire:
            wire.facade.hold()
            reading = [asyncio.create_task(wire.read(ask(p, max_tokens=90))) for p in prompts]
            await kit.eventually(lambda: wire.generator.in_engine == len(prompts))
            wire.facade.release()
            assert await asyncio.gather(*reading) == tokens
            await wire.idle()
            assert kit.engine.stats.preemptions > before

    prompts = ["abcdabcdabcd", "bcdebcdebcde", "cdefcdefcdefcdef", "defgdefgdefg"]
    tokens = [expected(prompt, max_tokens=90) for prompt in prompts]
    before = kit.engine.stats.preemptions
    kit.run(story())
