"""jaxspec.v1.GenerationService over a real socket: the offline engine's outputs, statuses, and pages that come back."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import re
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxspec.request import SamplingParams
from serve.api import generation, requests
from serve.api.generation import GenerationServicer
from serve.app import Server
from serve.checks import PortError
from serve.client import AsyncClient, Delta, Event, Finished, Options, PromptInfo, ServerError, build_request
from serve.config import ServerConfig
from serve.proto import generation_pb2 as pb
from serve.proto.services import GENERATION, Stub

BASE: dict[str, Any] = dict(host="127.0.0.1", port=0, metrics_port=None, withdrawal_seconds=0.0)
GREEDY: Options = {"temperature": 0.0, "max_tokens": 12}
FITS: Options = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
LONG: Options = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}


@contextlib.asynccontextmanager
async def served(kit: Any, facade: Any = None, **config: Any) -> AsyncIterator[tuple[Server, AsyncClient]]:
    """A server and a client of it; pages are back at the baseline when it ends."""
    facade = facade or kit.clean()
    async with Server(ServerConfig(**{**BASE, **config}), build=lambda: facade) as server:
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            yield server, client
        await at_baseline(kit, server)


async def at_baseline(kit: Any, server: Server) -> None:
    """Returns when the engine has nothing left, and all of its pages."""
    await kit.eventually(lambda: server.generator.in_engine == 0 and server.generator.live == 0)
    stats = await server.engine.call(lambda engine: engine.stats)
    assert stats.running == stats.waiting == 0
    assert stats.free_pages + stats.cached_pages == kit.engine.facts.sizes.num_pages


async def collected(events: AsyncIterator[Event]) -> tuple[PromptInfo, dict[int, list[Delta]], dict[int, Finished]]:
    """A stream in its parts; checks the order of its messages."""
    listed = [event async for event in events]
    info = listed[0]
    assert isinstance(info, PromptInfo)
    deltas: dict[int, list[Delta]] = {}
    ends: dict[int, Finished] = {}
    for event in listed[1:]:
        assert not isinstance(event, PromptInfo) and event.index not in ends
        if isinstance(event, Delta):
            assert event.token_ids or event.text
            deltas.setdefault(event.index, []).append(event)
        else:
            ends[event.index] = event
    return info, deltas, ends


async def failure(call: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await call
    return caught.value


CASES: dict[str, tuple[Any, Options]] = {
    "greedy": ("abcab", GREEDY),
    "tokens": ([3, 1, 4, 1, 5], GREEDY),
    "seeded": ("hgf", {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 8, "seed": 11, "max_tokens": 20}),
    "choices": ("lk", {"temperature": 1.1, "seed": 2**32 - 1, "n": 3, "max_tokens": 9}),
    "logprobs": ("cab", {"temperature": 0.0, "logprobs": 3, "max_tokens": 6}),
    "stop string": ("abcab", {"temperature": 0.9, "seed": 3, "stop": ["b", "le"], "max_tokens": 60}),
    "kept stop": ("a", {"temperature": 0.9, "seed": 3, "stop": "b", "include_stop_str_in_output": True}),
    "stop token": ("abc", {"temperature": 1.0, "seed": 5, "stop_token_ids": [1, 7], "max_tokens": 60}),
    "penalties": ("aaaa", {"temperature": 0.3, "seed": 1, "presence_penalty": 0.4, "repetition_penalty": 1.3}),
    "bias": ("aaaa", {"temperature": 0.0, "logit_bias": {2: 1.7}, "min_tokens": 4, "max_tokens": 8}),
    "plain": ("abcab", {**GREEDY, "speculation": False}),
    "shallow": ("abcab", {**GREEDY, "max_depth": 1}),
}
_NOT_SAMPLING = ("speculation", "max_depth")


def test_what_comes_over_the_wire_is_what_the_engine_makes_offline(kit: Any):
    def with_room(prompt: Any, options: Options) -> SamplingParams:
        kept = {name: value for name, value in options.items() if name not in _NOT_SAMPLING}
        return SamplingParams(**{"max_tokens": 120 - len(prompt), **kept})  # type: ignore[arg-type]

    encode = kit.engine.facts.tokenizer.encode
    prompts = {name: encode(p) if isinstance(p, str) else p for name, (p, _) in CASES.items()}
    wanted = kit.offline([(prompts[name], with_room(prompts[name], options)) for name, (_, options) in CASES.items()])

    async def story() -> None:
        async with served(kit) as (_, client):
            for (name, (prompt, options)), outputs in zip(CASES.items(), wanted, strict=True):
                result = await client.generate(prompt, **options)
                info, deltas, ends = await collected(client.stream(prompt, **options))
                assert result.prompt.prompt_tokens == info.prompt_tokens == len(prompts[name])
                assert len(result.completions) == len(ends) == len(outputs)
                for index, output in enumerate(outputs):
                    want, got, end = output.outputs[0], result.completions[index], ends[index]
                    parts = deltas.get(index, [])
                    assert got.index == index and list(got.token_ids) == want.token_ids, name
                    assert got.text == want.text == "".join(part.text for part in parts), name
                    assert [t for part in parts for t in part.token_ids] == want.token_ids, name
                    for finished in (got.finished, end):
                        assert finished.reason == got.finish_reason == str(want.finish_reason), name
                        assert finished.stop_reason == want.stop_reason, name
                        assert finished.usage.completion_tokens == len(want.token_ids)
                    streamed = tuple(entries for part in parts for entries in part.logprobs)
                    assert same_logprobs(got.logprobs, want.logprobs) and same_logprobs(streamed, want.logprobs), name

    kit.run(story())


def same_logprobs(got: Any, want: Any) -> bool:
    """The same tokens and ranks; the last bits of a logarithm depend on the tiers that ran."""
    pairs = [(a, list(b.values())) for a, b in zip(got, want or (), strict=True)]
    return all(
        len(a) == len(b)
        and all(
            (x.token_id, x.rank) == (y.token_id, y.rank) and x.logprob == pytest.approx(y.logprob, abs=1e-5)
            for x, y in zip(a, b, strict=True)
        )
        for a, b in pairs
    )


def test_a_conversation_goes_through_the_template(kit: Any):
    async def story() -> None:
        async with served(kit) as (_, client):
            messages = [{"role": "user", "content": "bcd"}]
            ids = await client.tokenize(messages)
            assert ids == [1, 2, 3, 0]  # the template opens the answer with "a"
            assert await client.tokenize(messages, add_generation_prompt=False) == [1, 2, 3]
            chat = await client.generate(messages, **GREEDY)
            assert chat.token_ids == (await client.generate(ids, **GREEDY)).token_ids
            assert chat.prompt.prompt_tokens == 4

    kit.run(story())


def test_a_grammar_shapes_the_output(kit: Any):
    async def story() -> None:
        async with served(kit) as (_, client):
            for options, pattern in (({"regex": "[ab]{3}c"}, "[ab]{3}c"), ({"choice": ["fed", "cab"]}, "fed|cab")):
                result = await client.generate("abc", **GREEDY, **options)
                assert re.fullmatch(pattern, result.text) and result.completions[0].finish_reason == "stop"

    kit.run(story())


def test_the_seed_that_is_told_reproduces_the_output(kit: Any):
    async def story() -> None:
        async with served(kit) as (_, client):
            first = await client.generate("abc", n=2, max_tokens=15)
            again = await client.generate("abc", n=2, max_tokens=15, seed=first.prompt.seed)
            assert [c.token_ids for c in again.completions] == [c.token_ids for c in first.completions]
            assert again.prompt.seed == first.prompt.seed
            other = await client.generate("abc", max_tokens=15)
            assert other.prompt.seed != first.prompt.seed

    kit.run(story())


def test_ids_are_echoed_or_chosen_and_usage_is_told(kit: Any):
    async def story() -> None:
        async with served(kit, served_model_name="tiny") as (_, client):
            result = await client.generate("abc" * 8, request_id="mine", model="tiny", **FITS)
            assert (result.prompt.request_id, result.prompt.model) == ("mine", "tiny")
            ids = {(await client.generate("abc", **GREEDY)).prompt.request_id for _ in range(5)}
            assert len(ids) == 5 and all(ids)
            usage, stats = result.completions[0].finished.usage, result.completions[0].finished.speculation
            assert (usage.prompt_tokens, usage.completion_tokens) == (24, 60)
            assert 0 <= usage.queue_seconds <= usage.ttft_seconds and usage.decode_seconds > 0
            assert sum(stats.acceptance_histogram) == stats.num_spec_steps == sum(stats.tier_rounds.values())
            assert stats.num_accepted_draft_tokens + stats.num_spec_steps == pytest.approx(
                stats.mean_acceptance_length * stats.num_spec_steps
            )
            again = await client.generate("abc" * 8, **FITS)
            assert again.completions[0].finished.usage.cached_prompt_tokens > 0

    kit.run(story())


def test_max_tokens_is_what_is_left_or_what_the_server_says(kit: Any):
    async def story() -> None:
        async with served(kit) as (_, client):
            filled = await client.generate("abc", temperature=0.0, ignore_eos=True)
            assert len(filled.token_ids) == kit.engine.facts.sizes.max_seq_len - 3
            assert filled.completions[0].finish_reason == "length"
            more = await client.generate("abc", temperature=0.0, ignore_eos=True, max_tokens=200)
            assert more.token_ids == filled.token_ids and more.completions[0].finish_reason == "length"
        async with served(kit, max_output_tokens=5) as (_, client):
            assert len((await client.generate("abc", temperature=0.0, ignore_eos=True)).token_ids) == 5
            asked = await client.generate("abc", temperature=0.0, ignore_eos=True, max_tokens=7)
            assert len(asked.token_ids) == 7

    kit.run(story())


def test_what_can_never_be_honoured_is_invalid(kit: Any):
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([1] * 120, {}, "tokens.ids must be shorter than 120 tokens, got 120"),
        ([99], {}, r"token ids must lie in \[0, 13\), got 99"),
        ("abc", {"stop_token_ids": [13]}, "stop_token_ids must be below the vocabulary size 13, got 13"),
        ("abc", {"logit_bias": {13: 1.0}}, "logit_bias must be below the vocabulary size 13, got 13"),
        ("abc", {"n": 10**6}, "n must be an integer from 1 to 64, got 1000000"),
        ("abc", {"temperature": float("nan")}, "sampling.temperature must be"),
        ("abc", {"regex": "("}, ""),
        ("abc", {"json_schema": '{"type": 5}'}, ""),
        ("", {}, "text must hold at least 1 token"),
    ]

    async def story() -> None:
        async with served(kit) as (server, client):
            for prompt, options, message in cases:
                for call in (client.generate(prompt, **options), collected(client.stream(prompt, **options))):
                    error = await failure(call)
                    assert error.code is grpc.StatusCode.INVALID_ARGUMENT, (options, error)
                    assert re.search(message, error.message), error
                    assert error.retry_after is None
            error = await failure(client.generate("abc", model="gpt"))
            assert error.code is grpc.StatusCode.NOT_FOUND
            assert scraped(server, "jaxspec:refused_requests_total", code="NOT_FOUND", reason="not_found") == 1
            assert scraped(server, "jaxspec:refused_requests_total", code="INVALID_ARGUMENT", reason="invalid") == 18

    kit.run(story())


def scraped(server: Server, name: str, **labels: str) -> float | None:
    return server.metrics.registry.get_sample_value(
        name, {"model_name": server.config.served_name, "engine": "0", **labels}
    )


def test_the_same_id_twice(kit: Any):
    async def story() -> None:
        facade = kit.clean()
        async with served(kit, facade) as (_, client):
            facade.idle = True
            stream = client.stream("abc", request_id="one", **LONG)
            assert isinstance(await anext(stream), PromptInfo)
            error = await failure(client.generate("abc", request_id="one", **GREEDY))
            assert error.code is grpc.StatusCode.ALREADY_EXISTS
            await stream.aclose()  # type: ignore[attr-defined]
            await kit.eventually(lambda: not facade.has_work)
            facade.idle = False
            await client.generate("abc", request_id="one", **GREEDY)

    kit.run(story())


def test_a_full_queue_says_when_to_come_back(kit: Any):
    async def story() -> None:
        facade = kit.clean()
        async with served(kit, facade, max_waiting=1) as (_, client):
            facade.idle = True
            streams = [client.stream("abc", **LONG) for _ in range(5)]
            for stream in streams:
                await anext(stream)
            error = await failure(client.generate("abc", **GREEDY))
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.may_retry
            assert error.retry_after is not None and error.retry_after > 0
            for stream in streams:
                await stream.aclose()  # type: ignore[attr-defined]

    kit.run(story())


def test_abort_ends_a_stream_and_may_come_again(kit: Any):
    async def story() -> None:
        facade = kit.clean()
        async with served(kit, facade) as (_, client):
            facade.idle = True
            stream = client.stream("abc", request_id="one", **LONG)
            assert isinstance(await anext(stream), PromptInfo)
            assert await client.abort("one", "nobody") == 1
            assert await client.abort("one") == 0
            with pytest.raises(ServerError) as ended:
                async for _ in stream:
                    pass
            assert ended.value.code is grpc.StatusCode.CANCELLED

    kit.run(story())


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
@pytest.mark.parametrize("kind", ["stream", "unary"])
def test_a_client_that_leaves_frees_its_pages(kit: Any, how: str, kind: str):
    async def story() -> None:
        facade = kit.clean()
        async with served(kit, facade) as (server, _):
            facade.hook = lambda: time.sleep(0.05)
            client = AsyncClient(f"127.0.0.1:{server.port}")
            timeout = 0.3 if how == "deadline" else None
            if kind == "stream":
                call = asyncio.ensure_future(collected(client.stream("abc", timeout=timeout, **LONG)))
            else:
                call = asyncio.ensure_future(client.generate("abc", timeout=timeout, **LONG))  # type: ignore[arg-type]
            if how != "deadline":  # that one may pass before
                await kit.eventually(lambda: server.generator.in_engine == 1)
            if how == "cancel":
                call.cancel()
            elif how == "disconnect":
                await client.close()
            with pytest.raises((ServerError, asyncio.CancelledError)) as ended:
                await call
            if how == "deadline":
                assert isinstance(ended.value, ServerError)
                assert ended.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await at_baseline(kit, server)
            await client.close()

    kit.run(story())


def test_a_reader_that_stalls_is_cancelled(kit: Any):
    """gRPC buffers what nobody reads until flow control stops the writer, so the output has to be large."""

    async def story() -> None:
        facade = kit.clean()
        async with served(kit, facade, stall_seconds=0.5) as (server, _):
            options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
                request = build_request("abc", {**LONG, "n": 64, "logprobs": 12, "temperature": 1.0})
                call = Stub(GENERATION, channel).GenerateStream(request)
                await call.read()
                labels = dict(code="CANCELLED", reason="stalled_reader")
                await kit.eventually(lambda: scraped(server, "jaxspec:refused_requests_total", **labels) == 1)
                await at_baseline(kit, server)
                with contextlib.suppress(grpc.RpcError):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                assert await call.code() is grpc.StatusCode.CANCELLED

    kit.run(story())


def test_an_engine_that_dies(kit: Any, caplog: pytest.LogCaptureFixture):
    async def story() -> None:
        facade = kit.clean()
        server = Server(ServerConfig(**BASE), build=lambda: facade)
        await server.start()
        await server.ready()
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            stream = client.stream("abc", **LONG)
            await anext(stream)
            facade.error = RuntimeError("out of luck")
            with pytest.raises(ServerError) as ended:
                async for _ in stream:
                    pass
            assert ended.value.code is grpc.StatusCode.UNAVAILABLE
            await server.wait()
            assert str(server.error) == "out of luck"
            assert (await failure(client.generate("abc", **GREEDY))).code is grpc.StatusCode.UNAVAILABLE
        await server.stop()

    with caplog.at_level(logging.CRITICAL, "serve"):
        kit.run(story())
    assert "the engine died" in caplog.text


def test_a_failure_inside_is_internal_and_says_nothing(kit: Any, monkeypatch: pytest.MonkeyPatch):
    async def story() -> None:
        async with served(kit) as (server, client):

            async def broken(*_: Any, **__: Any) -> Any:
                raise KeyError("secret")

            with monkeypatch.context() as patch:
                patch.setattr(server.generator, "start", broken)
                patch.setattr(server.generator, "tokenize", broken)
                patch.setattr(server.generator, "detokenize", broken)
                for call in (
                    client.generate("abc"), collected(client.stream("abc")), client.tokenize("abc"),
                    client.detokenize([1]),
                ):  # fmt: skip
                    error = await failure(call)
                    assert error.code is grpc.StatusCode.INTERNAL and error.message == "internal error"
            await client.generate("abc", **GREEDY)

    kit.run(story())


def test_bytes_that_are_no_message(kit: Any):
    async def story() -> None:
        async with served(kit, max_message_mib=1) as (server, client):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                for method, kind in (("Generate", channel.unary_unary), ("GenerateStream", channel.unary_stream)):
                    call = kind(f"/jaxspec.v1.GenerationService/{method}")(b"\xff\xff\xff")
                    with pytest.raises(grpc.RpcError):
                        if method == "Generate":
                            await call
                        else:
                            await call.read()
                    assert await call.code() is grpc.StatusCode.UNKNOWN
            assert scraped(server, "jaxspec:refused_requests_total", code="UNKNOWN", reason="undecodable") == 2
            error = await failure(client.generate("a" * (2**20 + 10)))
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not error.may_retry
            await client.generate("abc", **GREEDY)

    kit.run(story())


def test_tokenize_and_detokenize(kit: Any):
    async def story() -> None:
        async with served(kit) as (server, client):
            assert await client.tokenize("abl") == [0, 1, 11]
            assert await client.detokenize([0, 1, 11, 12]) == "abl"
            assert await client.detokenize([0, 12], skip_special_tokens=False) == "a<eos>"
            assert await client.detokenize([]) == ""
            for call in (
                client.detokenize([13]),
                client.tokenize([{"role": "user", "content": "a"}], add_special_tokens=True),
            ):
                assert (await failure(call)).code is grpc.StatusCode.INVALID_ARGUMENT
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                stub = Stub(GENERATION, channel)
                answer = await stub.Tokenize(pb.TokenizeRequest(text="ab", add_special_tokens=False))
                assert answer.max_tokens == kit.engine.facts.sizes.max_seq_len
                with pytest.raises(grpc.RpcError, match="input must be exactly one of text and chat"):
                    await stub.Tokenize(pb.TokenizeRequest())

    kit.run(story())


def test_text_and_ids_that_cannot_fit_are_refused(kit: Any, monkeypatch: pytest.MonkeyPatch):
    longest = 120 * len("<eos>")

    async def story() -> None:
        async with served(kit) as (server, client):
            for name in ("start", "tokenize", "detokenize", "abort"):  # refused before any work begins
                monkeypatch.setattr(server.generator, name, None)
            for call in (
                client.tokenize("a" * (longest + 1)),
                client.generate("a" * (longest + 1)),
                client.detokenize([0] * 121),
                client.tokenize([{"role": "user", "content": ""}] * 121),
                client.abort(*[str(i) for i in range(4097)]),
            ):
                error = await failure(call)
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT, error
                assert re.search(r"must be at most 600 characters.*got 601|may have at most \d+ entries", error.message)
            assert scraped(server, "jaxspec:refused_requests_total", code="INVALID_ARGUMENT", reason="invalid") == 5
            monkeypatch.undo()
            assert len(await client.tokenize("a" * longest)) == longest
            assert await client.detokenize([0] * 120) == "a" * 120
            assert await client.abort(*[str(i) for i in range(4096)]) == 0
            # What a template makes of a conversation is only known when it is rendered.
            error = await failure(client.generate([{"role": "user", "content": "a" * (longest + 1)}]))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT and "got 602" in error.message

    kit.run(story())


def test_large_answers_are_made_off_the_event_loop(kit: Any, monkeypatch: pytest.MonkeyPatch):
    threads: list[bool] = []
    loop = threading.get_ident()
    whole, delta = GenerationServicer._whole, generation._delta

    def spied(make: Any) -> Any:
        def call(*args: Any) -> Any:
            threads.append(threading.get_ident() == loop)
            return make(*args)

        return call

    monkeypatch.setattr(GenerationServicer, "_whole", spied(whole))
    monkeypatch.setattr(generation, "_delta", spied(delta))
    large: Options = {**FITS, "logprobs": 12, "n": 2}

    async def story() -> None:
        async with served(kit) as (_, client):
            await client.generate("abc", **GREEDY)
            assert threads == [True]
            result = await client.generate("abc", **large)
            assert threads == [True, False] and len(result.completions[1].logprobs) == 60
            threads.clear()
            await collected(client.stream("abc", **GREEDY))
            assert threads and all(threads)

    kit.run(story())


def test_an_answer_too_large_for_a_message_is_refused_beforehand(kit: Any, monkeypatch: pytest.MonkeyPatch):
    huge: Options = {"n": 64, "max_tokens": 110, "logprobs": 12, "temperature": 1.0, "ignore_eos": True}

    async def story() -> None:
        async with served(kit, max_message_mib=1) as (server, client):
            steps = server.engine.snapshot
            error = await failure(client.generate("abc", **huge))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT and "call GenerateStream" in error.message
            assert server.generator.live == 0 and server.engine.snapshot == steps  # nothing ran for it
            # Texts may turn out longer than a token usually is.
            monkeypatch.setattr(requests, "_TOKEN_BYTES", 0)
            object.__setattr__(server.config, "max_message_mib", 20 / 2**20)
            error = await failure(client.generate("abc", **FITS))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert re.search(r"the answer takes \d+ bytes, .* at most 20.0: call GenerateStream", error.message)

    kit.run(story())


def test_health_follows_the_engine(kit: Any):
    async def story() -> None:
        facade = kit.clean()
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def build() -> Any:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)
            return facade

        server = Server(ServerConfig(**BASE), build=build)
        await server.start()
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            AsyncClient(f"127.0.0.1:{server.port}") as client,
        ):
            stub = health_pb2_grpc.HealthStub(channel)

            async def statuses() -> set[int]:
                names = ["", "jaxspec.v1.GenerationService", "jaxspec.v1.AdminService"]
                if importlib.util.find_spec("smg_grpc_proto") is not None:
                    names.append("vllm.grpc.engine.VllmEngine")
                return {(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names}

            async def liveness() -> int:
                return (await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))).status

            serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
            assert await statuses() == {not_serving} and await liveness() == serving
            assert (await failure(client.generate("abc"))).code is grpc.StatusCode.UNAVAILABLE
            assert (await failure(client.tokenize("abc"))).code is grpc.StatusCode.UNAVAILABLE
            gate.set()
            await server.ready()
            await client.generate("abc", **GREEDY)
            assert await statuses() == {serving} and await liveness() == serving
            facade.hook = lambda: time.sleep(0.02)
            stream = client.stream("abc", **LONG)
            await anext(stream)
            draining = asyncio.ensure_future(server.drain(20.0))
            await kit.eventually(lambda: server.lifecycle.state == "draining")
            assert await statuses() == {not_serving} and await liveness() == serving
            await kit.eventually(lambda: server.generator._refusal is not None)
            assert (await failure(client.generate("abc"))).code is grpc.StatusCode.UNAVAILABLE
            ends = [event async for event in stream if isinstance(event, Finished)]
            assert len(ends) == 1  # what ran was allowed to finish
            await draining
            await server.wait()

    kit.run(story())


def test_liveness_is_lost_by_a_hang_that_lasts_and_by_death(kit: Any):
    async def story() -> None:
        facade = kit.clean()
        async with (
            Server(ServerConfig(**BASE, watchdog_seconds=0.3), build=lambda: facade) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            AsyncClient(f"127.0.0.1:{server.port}") as client,
        ):
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "liveness")]
            read = lambda watch: asyncio.wait_for(watch.read(), 30)
            serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
            ready, live = watches
            assert [(await read(watch)).status for watch in watches] == [serving] * 2
            facade.hold()
            lost = asyncio.ensure_future(failure(client.generate("abc", **LONG)))
            assert (await read(ready)).status == not_serving
            assert (await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == serving
            assert (await read(live)).status == not_serving
            assert (await lost).code is grpc.StatusCode.UNAVAILABLE
            facade.release()
            assert [(await read(watch)).status for watch in watches] == [serving] * 2
            facade.error = RuntimeError("the device is lost")
            lost = asyncio.ensure_future(failure(client.generate("abc", **LONG)))
            assert [(await read(watch)).status for watch in watches] == [not_serving] * 2
            await lost
            await server.wait()

    kit.run(story())


def test_a_port_in_use_is_an_error(kit: Any):
    async def story() -> None:
        async with served(kit) as (server, _):
            second = Server(ServerConfig(**{**BASE, "port": server.port}), build=kit.clean)
            with pytest.raises(PortError, match=f"port: cannot listen on 127.0.0.1:{server.port}"):
                await second.start()
            async with served(kit, metrics_port=0) as (first, _):
                assert first.metrics_port
                third = Server(ServerConfig(**{**BASE, "metrics_port": first.metrics_port}), build=kit.clean)
                with pytest.raises(PortError, match="metrics_port: cannot listen"):
                    await third.start()

    kit.run(story())


def test_deltas_that_say_nothing_are_not_sent(kit: Any):
    """Neither by jaxspec.v1 nor by vLLM's protocol; a token whose text has not settled is something to say."""
    kit.clean()
    facade = kit.chatty_facade(kit.engine)

    async def story() -> None:
        async with served(kit, facade, stream_interval_ms=0) as (_, client):
            stub = Stub(GENERATION, client._channel)
            call = stub.GenerateStream(build_request("abc", FITS))
            kinds = [(m.WhichOneof("event"), len(m.delta.token_ids), bool(m.delta.text)) async for m in call]
            assert facade.said > 5 and ("delta", 0, False) not in kinds
            assert sum(count for _, count, _ in kinds) == 60
            if importlib.util.find_spec("smg_grpc_proto") is None:
                return
            from smg_grpc_proto import vllm_engine_pb2 as vllm
            from smg_grpc_proto import vllm_engine_pb2_grpc as rpc

            said = facade.said
            sampling = vllm.SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
            tokens = vllm.TokenizedInput(input_ids=[1, 2, 3])
            message = vllm.GenerateRequest(tokenized=tokens, sampling_params=sampling, stream=True)
            answers = [answer async for answer in rpc.VllmEngineStub(client._channel).Generate(message)]
            chunks = [len(answer.chunk.token_ids) for answer in answers if answer.HasField("chunk")]
            assert facade.said > said + 5 and all(chunks) and sum(chunks) == 60

    kit.run(story())
