"""vllm.grpc.engine.VllmEngine over a real channel: answers, statuses and what is told of the server; nothing leaks."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway import GREEDY, LONG, PLAIN, collect, refused, request, service
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.request import SamplingParams
from jaxspec.tier import Tier
from serve.vllm import servicer as vllm


def test_streamed_and_whole_answers_are_the_offline_engine_s(kit: Any) -> None:
    offline = kit.offline([((1, 2, 3), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))])[0][0]

    async def story() -> None:
        async with service(kit) as (stack, stub):
            # What rounds take on a busy machine shall not decide whether it drafts.
            await stack.engine.call(lambda engine: engine.use_policy(StaticPolicy(Tier(3))))
            chunks, (complete,) = await collect(stub.Generate(request(**dict(GREEDY, max_tokens=30))))
            assert [token for chunk in chunks for token in chunk.token_ids] == offline.token_ids
            assert list(complete.output_ids) == offline.token_ids and complete.finish_reason == "length"
            assert sum(chunk.completion_tokens for chunk in chunks) == complete.completion_tokens == 30
            assert complete.prompt_tokens == 3 and all(chunk.prompt_tokens == 3 for chunk in chunks)
            assert 0 < complete.spec_accepted_tokens <= complete.spec_draft_tokens
            assert complete.WhichOneof("matched_stop") is None
            none, (whole,) = await collect(stub.Generate(request(False, **dict(GREEDY, max_tokens=30))))
            assert none == [] and whole.output_ids == complete.output_ids
            await stack.settled()

    kit.run(story())


def test_text_is_encoded_here(kit: Any) -> None:
    async def story() -> None:
        async with service(kit) as (_, stub):
            params = pb.SamplingParams(**dict(GREEDY, max_tokens=8))
            (a,), (b,) = [
                (await collect(stub.Generate(pb.GenerateRequest(sampling_params=params, **prompt))))[1]
                for prompt in (dict(text="bcd"), dict(tokenized=pb.TokenizedInput(input_ids=(1, 2, 3))))
            ]
            assert a.output_ids == b.output_ids and a.prompt_tokens == 3

    kit.run(story())


def test_several_completions_differ_and_their_seed_reproduces_them(kit: Any) -> None:
    sampled = dict(PLAIN, temperature=1.0, n=3, seed=-7, max_tokens=12, ignore_eos=True)

    async def story() -> None:
        async with service(kit) as (_, stub):
            _, streamed = await collect(stub.Generate(request(**sampled)))
            _, whole = await collect(stub.Generate(request(False, **sampled)))
            by_index = [{c.index: tuple(c.output_ids) for c in answer} for answer in (streamed, whole)]
            assert by_index[0] == by_index[1] and set(by_index[0]) == {0, 1, 2}
            assert len(set(by_index[0].values())) == 3

    kit.run(story())


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_come_with_their_tokens(kit: Any, stream: bool) -> None:
    async def story() -> None:
        async with service(kit) as (_, stub):
            sampling = dict(GREEDY, max_tokens=10, logprobs=2)
            chunks, (complete,) = await collect(stub.Generate(request(stream, **sampling)))
            parts = [chunk.output_logprobs for chunk in chunks] if stream else [complete.output_logprobs]
            assert [t for part in parts for t in part.token_ids] == list(complete.output_ids)
            for part in parts:
                assert len(part.token_logprobs) == len(part.token_ids) == len(part.top_logprobs)
                for token, logprob, top in zip(part.token_ids, part.token_logprobs, part.top_logprobs, strict=True):
                    assert len(top.token_ids) == 2 and top.values[0] >= top.values[1]
                    assert (top.token_ids[0], top.values[0]) == (token, logprob)  # greedy
            without, (bare,) = await collect(stub.Generate(request(stream, **dict(sampling, logprobs=0))))
            parts = [chunk.output_logprobs for chunk in without] if stream else [bare.output_logprobs]
            assert all(not top.values for part in parts for top in part.top_logprobs)
            assert sum(len(part.token_logprobs) for part in parts) == 10

    kit.run(story())


def test_what_ended_a_completion_is_named(kit: Any) -> None:
    tokens = kit.offline([((1, 2, 3), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))])[0][0].token_ids
    stop = kit.text_of(tokens[4:7])

    async def story() -> None:
        async with service(kit) as (_, stub):
            _, (by_text,) = await collect(stub.Generate(request(**LONG, stop=[stop])))
            assert (by_text.finish_reason, by_text.matched_stop_str) == ("stop", stop)
            assert kit.text_of(by_text.output_ids).endswith(stop)
            _, (by_token,) = await collect(stub.Generate(request(**LONG, stop_token_ids=[tokens[5]])))
            assert (by_token.finish_reason, by_token.matched_token_id) == ("stop", tokens[5])
            assert list(by_token.output_ids) == tokens[: tokens.index(tokens[5]) + 1]

    kit.run(story())


def test_abort_frees_everything_and_is_idempotent(kit: Any) -> None:
    async def story() -> None:
        async with service(kit) as (stack, stub):
            for stream in (True, False):
                stack.facade.hold()
                call = stub.Generate(request(stream, **LONG))
                reading = asyncio.create_task(refused(call))
                await kit.eventually(lambda: stack.generator.in_engine == 1)
                await stub.Abort(pb.AbortRequest(request_ids=["r", "unknown"]))
                await stub.Abort(pb.AbortRequest(request_ids=["r"]))
                stack.facade.release()
                # Not CANCELLED, which a gateway takes for a failure of the worker and repeats.
                assert (await reading).code() is grpc.StatusCode.ABORTED
                await stack.settled()

    kit.run(story())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_everything(kit: Any, stream: bool) -> None:
    async def story() -> None:
        async with service(kit) as (stack, stub):
            stack.facade.hold()
            call = stub.Generate(request(stream, **dict(LONG, n=2)))
            reading = asyncio.create_task(collect(call))
            await kit.eventually(lambda: stack.generator.in_engine == 2)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            stack.facade.release()
            await kit.eventually(lambda: stack.generator.live == 0)
            await stack.settled()

    kit.run(story())


def test_an_unstreamed_answer_sends_nothing_before_it_is_whole(kit: Any, clock: Any) -> None:
    async def story() -> None:
        async with service(kit, run_seconds=300.0, watchdog_seconds=1e6) as (stack, stub):
            _, (first,) = await collect(stub.Generate(request(False, **dict(LONG, max_tokens=4))))
            assert first.completion_tokens == 4
            stack.facade.hold(2)
            call = stub.Generate(request(False, **LONG))
            headers = asyncio.create_task(call.initial_metadata())
            await kit.eventually(stack.facade.held.is_set)
            assert not headers.done()
            clock.ahead += 300
            stack.facade.release()
            error = await refused(call)
            # It would take too long again: no code that a gateway repeats.
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and "run_seconds" in error.details()
            headers.cancel()
            await stack.settled()

    kit.run(story())


def test_refusals_are_statuses(kit: Any) -> None:
    async def story() -> None:
        async with service(kit, max_waiting=1) as (stack, stub):
            for sampling, ids, word in (
                (dict(GREEDY, max_tokens=5), (1, 99), "99"),
                (dict(GREEDY, max_tokens=5), (1,) * 120, "120"),
                (dict(GREEDY, stop_token_ids=[400]), (1,), "stop_token_ids"),
                (dict(GREEDY, structural_tag="x"), (1,), "structural_tag"),
            ):
                error = await refused(stub.Generate(request(ids=ids, **sampling)))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and word in error.details()
            # Each once, whether the message was refused or the job that it made.
            assert stack.metrics.refused == [("INVALID_ARGUMENT", "invalid")] * 4
            stack.facade.hold()
            running = [stub.Generate(request(name=f"r{i}", **LONG)) for i in range(5)]
            reading = [asyncio.create_task(collect(call)) for call in running]
            await kit.eventually(lambda: stack.generator.in_engine == 5)
            again = await refused(stub.Generate(request(name="r0", **LONG)))
            assert again.code() is grpc.StatusCode.ALREADY_EXISTS
            full = await refused(stub.Generate(request(name="more", **LONG)))
            assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert stack.metrics.refused[4:] == [
                ("ALREADY_EXISTS", "already_exists"),
                ("RESOURCE_EXHAUSTED", "queue_full"),
            ]
            assert any(key == "grpc-status-details-bin" for key, _ in full.trailing_metadata())  # RetryInfo
            stack.facade.release()
            assert [done[1][0].completion_tokens for done in await asyncio.gather(*reading)] == [100] * 5
            await stack.settled()

    kit.run(story())


def test_a_failure_inside_is_internal_and_says_nothing(
    kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("secret")

    async def story() -> None:
        async with service(kit) as (stack, stub):
            with monkeypatch.context() as patch:
                for owner, name in (
                    (stack.generator, "start"), (stack.generator, "abort"), (vllm, "tokenizer_archive"),
                    (vllm, "checkpoint_facts"), (stack.engine, "call"), (vllm.VllmServicer, "_load"),
                ):  # fmt: skip
                    patch.setattr(owner, name, broken)
                for call in (
                    stub.Generate(request(**LONG)),
                    stub.Abort(pb.AbortRequest(request_ids=["r"])),
                    stub.GetTokenizer(common_pb2.GetTokenizerRequest()),
                    stub.GetModelInfo(pb.GetModelInfoRequest()),
                    stub.GetLoads(pb.GetLoadsRequest()),
                    stub.FlushCache(common_pb2.FlushCacheRequest()),
                ):
                    error = await refused(call)
                    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
                records = [record for record in caplog.records if record.message == "a call failed"]
                assert len(records) == 6 and all(record.exc_info for record in records)
            # Also in the middle of an answer, whose pages come back.
            monkeypatch.setattr(vllm, "answer", broken)
            error = await refused(stub.Generate(request(**LONG)))
            assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
            await stack.settled()

    kit.run(story())


def test_counters_may_come_after_facts(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with service(kit) as (stack, stub):
            # As long as none has come: the engine goes on telling, ten times a second.
            never = property(lambda _: None, lambda _, stats: None)
            monkeypatch.setattr(type(stack.engine), "snapshot", never, raising=False)
            error = await refused(stub.GetLoads(pb.GetLoadsRequest()))
            assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the engine is starting")

    kit.run(story())


def test_too_many_ids_to_abort(kit: Any) -> None:
    async def story() -> None:
        async with service(kit) as (_, stub):
            error = await refused(stub.Abort(pb.AbortRequest(request_ids=["r"] * 4097)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == "request_ids may have at most 4096 entries, got 4097"
            await stub.Abort(pb.AbortRequest(request_ids=["r"] * 4096))

    kit.run(story())


def test_what_this_server_does_not_do_is_unimplemented(kit: Any) -> None:
    async def story() -> None:
        async with service(kit) as (_, stub):
            for call in (
                stub.Embed(pb.EmbedRequest(request_id="e")),
                stub.StartProfile(common_pb2.StartProfileRequest()),
                stub.StopProfile(common_pb2.StopProfileRequest()),
            ):
                assert (await refused(call)).code() is grpc.StatusCode.UNIMPLEMENTED

    kit.run(story())


def test_what_is_served_and_how_it_fares(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.core.engine_core.SNAPSHOT_SECONDS", 0.0)

    async def story() -> None:
        async with service(kit, served_model_name="tiny") as (stack, stub):
            model = await stub.GetModelInfo(pb.GetModelInfoRequest())
            assert (model.served_model_name, model.model_path, model.is_generation) == ("tiny", "tiny", True)
            assert (model.max_context_length, model.vocab_size) == (120, kit.vocab)
            assert kit.eos in model.eos_token_ids and not Path(model.tokenizer_path).exists()
            server = await stub.GetServerInfo(pb.GetServerInfoRequest())
            assert (server.server_type, server.block_size, server.max_num_seqs) == ("vllm-grpc", 8, 4)
            assert server.active_requests == 0 and server.data_parallel_size == 1
            stack.facade.hold()
            calls = [stub.Generate(request(name=f"r{i}", ids=(1,) * 20, **LONG)) for i in range(6)]
            reading = [asyncio.create_task(collect(call)) for call in calls]
            await kit.eventually(lambda: stack.generator.in_engine == 6 and stack.facade.held.is_set())
            stack.facade.advance(8)
            # The loop hears right behind the engine who has a slot.
            await kit.eventually(
                lambda: (stack.engine.snapshot.waiting, stack.generator.waiting_prompt_tokens) == (2, 40)
            )
            loads = await stub.GetLoads(pb.GetLoadsRequest(include=["core", "memory"]))
            (load,) = loads.loads
            assert load.num_total_reqs == load.num_running_reqs + load.num_waiting_reqs
            assert 0 < load.token_usage <= 1 and load.num_used_tokens <= load.max_total_num_tokens == 240
            assert (load.max_running_requests, load.gen_throughput) == (4, 12.5)
            (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
            assert (load.num_waiting_reqs, load.num_waiting_uncached_tokens) == (2, 40)
            stack.facade.release()
            await asyncio.gather(*reading)
            wrong = await refused(stub.GetLoads(pb.GetLoadsRequest(dp_rank=3)))
            assert wrong.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
            draining = asyncio.create_task(stack.lifecycle.drain(0.0))
            await kit.eventually(lambda: stack.lifecycle.state == "draining")
            health = await stub.HealthCheck(pb.HealthCheckRequest())
            assert (health.healthy, health.message) == (False, "draining")
            await draining

    kit.run(story())


def test_before_the_engine_is_built_there_is_nothing_to_tell(kit: Any) -> None:
    async def story() -> None:
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()
        facade = kit.clean()

        def build() -> Any:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            return facade

        async with service(kit, build=build, wait=False, kv_events=True) as (stack, stub):
            for call in (
                stub.GetModelInfo(pb.GetModelInfoRequest()),
                stub.GetServerInfo(pb.GetServerInfoRequest()),
                stub.GetLoads(pb.GetLoadsRequest()),
                stub.FlushCache(common_pb2.FlushCacheRequest()),
                stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
                stub.Generate(request(**GREEDY)),
            ):
                assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE
            assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
            gate.set()
            await stack.engine.ready()
            assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy

    kit.run(story())


def test_the_tokenizer_comes_as_an_archive_with_its_fingerprint(kit: Any, tmp_path: Path) -> None:
    files = {
        "tokenizer.json": json.dumps({"padding": "x" * 3_000_000}),
        "config.json": json.dumps({"model_type": "llama", "architectures": ["A"], "eos_token_id": [5, 6]}),
        "chat_template.jinja": "{{ messages }}",
        "model.safetensors": "weights",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    async def story() -> None:
        async with service(kit, model=str(tmp_path)) as (_, stub):
            answers = []
            for _ in range(2):
                chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
                assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
                answers.append((b"".join(chunk.data for chunk in chunks), chunks[-1].sha256))
            assert answers[0] == answers[1]
            data, fingerprint = answers[0]
            assert hashlib.sha256(data).hexdigest() == fingerprint
            archive = zipfile.ZipFile(io.BytesIO(data))
            assert {name: archive.read(name).decode() for name in archive.namelist()} == {
                name: text for name, text in files.items() if name != "model.safetensors"
            }
            model = await stub.GetModelInfo(pb.GetModelInfoRequest())
            assert (model.model_type, list(model.architectures)) == ("llama", ["A"])
            assert set(model.eos_token_ids) == {5, 6, kit.eos} and str(tmp_path) not in str(model)
            # Read once, whatever happens to the files.
            (tmp_path / "tokenizer.json").unlink()
            chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
            assert chunks[-1].sha256 == fingerprint
        async with service(kit, model=str(tmp_path), served_model_name="tiny") as (_, stub):
            error = await refused(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert "the model 'tiny' has no tokenizer;" in error.details() and str(tmp_path) not in error.details()

    kit.run(story())
