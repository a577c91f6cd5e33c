"""vllm.grpc.engine.VllmEngine over a real channel: what the gateway sends is honoured or refused, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import random
import time
import types
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc
from smg_grpc_proto.generated import common_pb2

from jaxspec.request import SamplingParams
from jaxspec.scheduling.pages import PageAllocator
from jaxspec.scheduling.prefix_cache import PrefixCache
from jaxspec.text.grammar import GrammarSpec
from serve.api.requests import Limits
from serve.core.errors import StatusError
from serve.vllm import servicer as vllm
from serve.vllm.kv_events import CacheView, batched, cached_pages
from serve.vllm.messages import to_job as job_within

#: What smg 1.13 sends for a completion of which the client said nothing but prompt and model.
PLAIN = dict(top_p=1.0, repetition_penalty=1.0, skip_special_tokens=True, spaces_between_special_tokens=True, n=1)
GREEDY = dict(PLAIN, temperature=0.0, ignore_eos=True)
LONG = dict(GREEDY, max_tokens=100)


LIMITS = Limits(tokens=4096, characters=4096 * 8, default_tokens=4096, answer_bytes=2**24)


def to_job(message: Any, limits: Limits = LIMITS) -> Any:
    return job_within(message, limits)


def request(stream: bool = True, ids: tuple[int, ...] = (1, 2, 3), name: str = "r", **sampling: Any) -> Any:
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
    )


# Requests.


def test_a_plain_request_of_the_gateway_means_the_usual_defaults() -> None:
    job = to_job(request(**PLAIN))
    assert job.params == SamplingParams(max_tokens=None) and job.fill_context
    assert (job.prompt, job.request_id, job.stream, job.grammar) == ((1, 2, 3), "r", True, None)


def test_unset_scalars_are_defaults_and_set_ones_are_not() -> None:
    unset = to_job(request(False)).params
    assert (unset.temperature, unset.top_p, unset.repetition_penalty, unset.n, unset.seed) == (1.0, 1.0, 1.0, 1, None)
    assert not unset.skip_special_tokens  # a plain bool: false is what the sender said
    zero = to_job(request(temperature=0.0, seed=0, max_tokens=7)).params
    assert (zero.temperature, zero.seed, zero.max_tokens) == (0.0, 0, 7)
    assert not to_job(request(max_tokens=7)).fill_context


def test_every_supported_parameter_arrives() -> None:
    job = to_job(
        request(
            temperature=0.5, top_p=0.75, top_k=5, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
            repetition_penalty=1.5, max_tokens=9, min_tokens=2, stop=["ab"], stop_token_ids=[4], ignore_eos=True,
            skip_special_tokens=True, n=3, logprobs=2, seed=-1, include_stop_str_in_output=True, logit_bias={3: 1.5},
        )
    )  # fmt: skip
    assert job.params == SamplingParams(
        temperature=0.5, top_p=0.75, top_k=5, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=1.5, max_tokens=9, min_tokens=2, stop=("ab",), stop_token_ids=(4,), ignore_eos=True,
        n=3, logprobs=2, seed=2**32 - 1, include_stop_str_in_output=True, logit_bias={3: 1.5},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (dict(json_schema='{"type": "object"}'), GrammarSpec("json_schema", '{"type": "object"}')),
        (dict(regex="a+"), GrammarSpec("regex", "a+")),
        (dict(grammar='start: "a"'), GrammarSpec("lark", 'start: "a"')),
        (dict(json_object=True), GrammarSpec("json_object")),
        (dict(choice=pb.ChoiceConstraint(choices=["a", "b"])), GrammarSpec("choice", ("a", "b"))),
        (dict(regex="a", grammar_from_first_token=True), GrammarSpec("regex", "a")),
    ],
)
def test_constraints_become_grammars(sampling: dict[str, Any], expected: GrammarSpec) -> None:
    assert to_job(request(**PLAIN, **sampling)).grammar == expected


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("structural_tag", dict(structural_tag="{}")),
        ("json_object", dict(json_object=False)),
        ("choice", dict(choice=pb.ChoiceConstraint())),
        ("regex", dict(regex="")),
        ("min_tokens", dict(regex="a", min_tokens=3)),
        ("prompt_logprobs", dict(prompt_logprobs=0)),
        ("truncate_prompt_tokens", dict(truncate_prompt_tokens=-1)),
        ("n", dict(n=10**6)),
        ("temperature", dict(temperature=float("nan"))),
        ("temperature", dict(temperature=-1.0)),
        ("top_p", dict(top_p=1.5)),
        ("top_k", dict(top_k=2**32 - 1)),
        ("max_tokens", dict(max_tokens=0)),
        ("logprobs", dict(logprobs=-1)),
        ("logprobs", dict(logprobs=1000)),
        ("stop", dict(stop=[""])),
        ("stop", dict(stop=["a"] * 1000)),
        ("stop", dict(stop=["a" * 10_000])),
        ("logit_bias", dict(logit_bias={-1: 1.0})),
        ("repetition_penalty", dict(repetition_penalty=float("inf"))),
    ],
)
def test_sampling_parameters_that_cannot_be_honoured_are_refused_by_name(field: str, sampling: dict[str, Any]) -> None:
    with pytest.raises(StatusError, match=rf"sampling_params\.{field}") as refused:
        to_job(request(**{"max_tokens": 8, **sampling}))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("mm_inputs", dict(mm_inputs=pb.MultimodalInputs())),
        ("extra_mm_inputs", dict(extra_mm_inputs=[pb.MultimodalInputs()])),
        ("media_refs", dict(media_refs=pb.MediaRefs())),
        ("kv_transfer_params", dict(kv_transfer_params=pb.KvTransferParams())),
        ("kv_transfer_params_json", dict(kv_transfer_params_json='{"do_remote_prefill": true}')),
        ("data_parallel_rank", dict(data_parallel_rank=1)),
        ("tokenized", dict(tokenized=pb.TokenizedInput())),
        ("text", dict(text="")),
        ("request_id", dict(request_id="a b")),
        ("request_id", dict(request_id="a" * 1000)),
    ],
)
def test_requests_that_cannot_be_honoured_are_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    whole = request()
    whole.MergeFrom(pb.GenerateRequest(**fields))
    if field == "tokenized":
        whole.ClearField("tokenized")
        whole.tokenized.SetInParent()
    with pytest.raises(StatusError, match=field) as refused:
        to_job(whole)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_sizes_have_bounds() -> None:
    small = Limits(tokens=100, characters=800, default_tokens=50, answer_bytes=50_000)
    many = 1_000_000
    biased = request()
    biased.sampling_params.logit_bias.update(dict.fromkeys(range(many // 4), 1.0))
    for message, refused_as in (
        (request(ids=(1,) * 100), "tokenized.input_ids must be shorter than 100 tokens, got 100"),
        (pb.GenerateRequest(text="x" * 801), "text must be at most 800 characters, .* got 801"),
        (request(ids=(1,) * many), "tokenized.input_ids must be shorter than 100 tokens, got 1000000"),
        (request(stop=["x"] * many), "sampling_params.stop may have at most 64 entries, got 1000000"),
        (request(stop_token_ids=[1] * many), "sampling_params.stop_token_ids may have at most 32 entries, got 1000000"),
        (biased, "sampling_params.logit_bias may have at most 1024 entries, got 250000"),
        (
            request(choice=pb.ChoiceConstraint(choices=["x"] * many)),
            "sampling_params.choice.choices may have at most 4096 entries, got 1000000",
        ),
        (request(False, max_tokens=99, logprobs=20, n=1, stop=["x"] * 65), "stop may have"),
    ):
        began = time.thread_time()
        with pytest.raises(StatusError, match=refused_as) as refused:
            to_job(message, small)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert time.thread_time() - began < 0.02  # before anything is converted
    fits = to_job(request(ids=(1,) * 99, stop=["x"] * 64, stop_token_ids=[1] * 32), small)
    assert len(fits.prompt) == 99 and len(fits.params.stop) == 64
    large = dict(max_tokens=99, logprobs=20)
    tight = Limits(tokens=100, characters=800, default_tokens=50, answer_bytes=20_000)
    with pytest.raises(StatusError, match="n x max_tokens x .* = 1 x 99 x 21 must fit .*: set stream"):
        to_job(request(False, **large), tight)
    to_job(request(True, **large), tight)
    to_job(request(False, max_tokens=99, n=64), tight)  # a message each


def test_harmless_defaults_of_what_is_not_supported_are_accepted() -> None:
    job = to_job(pb.GenerateRequest(text="abc", data_parallel_rank=0, kv_transfer_params_json=""))
    assert job.prompt == "abc" and job.request_id
    with pytest.raises(StatusError, match="input"):
        to_job(pb.GenerateRequest(request_id="r"))


# The service.


@contextlib.asynccontextmanager
async def service(kit: Any, **config: Any) -> AsyncIterator[tuple[Any, Any]]:
    """(stack, stub) over TCP."""
    async with kit.serving(**config) as stack:
        stack.engine.meter = types.SimpleNamespace(tokens_per_second=12.5)
        server = grpc.aio.server()
        vllm.add_to(
            server,
            vllm.VllmServicer(stack.generator, stack.lifecycle, stack.config, stack.engine, stack.metrics),
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield stack, rpc.VllmEngineStub(channel)
        await server.stop(None)


async def collect(call: Any) -> tuple[list[Any], list[Any]]:
    """(chunks, completions) of a call, in order."""
    chunks, completions = [], []
    async for message in call:
        if message.HasField("chunk"):  # those of one completion may follow another's end
            assert message.chunk.index not in [complete.index for complete in completions]
        (chunks if message.HasField("chunk") else completions).append(getattr(message, message.WhichOneof("response")))
    return chunks, completions


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """How a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (collect(call) if hasattr(call, "__aiter__") else call)
    return error.value


def test_streamed_and_whole_answers_are_the_offline_engine_s(kit: Any) -> None:
    offline = kit.offline([((1, 2, 3), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))])[0][0]

    async def story() -> None:
        async with service(kit) as (stack, stub):
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
            call = stub.Generate(request(False, **LONG))
            headers = asyncio.create_task(call.initial_metadata())
            await kit.eventually(lambda: stack.generator.in_engine == 1)
            stack.facade.hold()
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
            monkeypatch.setattr(stack.engine, "snapshot", None)
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


def test_what_is_served_and_how_it_fares(kit: Any) -> None:
    async def story() -> None:
        async with service(kit, served_model_name="tiny") as (stack, stub):
            model = await stub.GetModelInfo(pb.GetModelInfoRequest())
            assert (model.served_model_name, model.model_path, model.is_generation) == ("tiny", "tiny", True)
            assert (model.max_context_length, model.vocab_size) == (120, kit.vocab)
            assert kit.eos in model.eos_token_ids and not Path(model.tokenizer_path).exists()
            server = await stub.GetServerInfo(pb.GetServerInfoRequest())
            assert (server.server_type, server.block_size, server.max_num_seqs) == ("vllm-grpc", 8, 4)
            assert server.active_requests == 0 and server.data_parallel_size == 1
            stack.facade.hook = lambda: time.sleep(0.05)
            calls = [stub.Generate(request(name=f"r{i}", ids=(1,) * 20, **LONG)) for i in range(6)]
            reading = [asyncio.create_task(collect(call)) for call in calls]
            await kit.eventually(lambda: stack.engine.snapshot.running > 0)
            loads = await stub.GetLoads(pb.GetLoadsRequest(include=["core", "memory"]))
            (load,) = loads.loads
            assert load.num_total_reqs == load.num_running_reqs + load.num_waiting_reqs
            assert 0 < load.token_usage <= 1 and load.num_used_tokens <= load.max_total_num_tokens == 240
            assert (load.max_running_requests, load.gen_throughput) == (4, 12.5)
            await kit.eventually(lambda: stack.engine.snapshot.waiting == 2)
            (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
            assert (load.num_waiting_reqs, load.num_waiting_uncached_tokens) == (2, 40)
            stack.facade.hook = None
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


# Cache events.


class Mirror:
    """What a gateway makes of the events."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, events: Any) -> None:
        for event in events:
            match event.WhichOneof("data"):
                case "cleared":
                    self.blocks.clear()
                case "removed":
                    for block_hash in event.removed.block_hashes:
                        del self.blocks[block_hash]
                case "stored":
                    parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                    for block in event.stored.blocks:
                        assert parent is None or parent in self.blocks
                        assert block.block_hash not in self.blocks
                        self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
                        parent = block.block_hash

    @property
    def prefixes(self) -> set[tuple[int, ...]]:
        """Every known prefix, whole."""

        def whole(block_hash: int | None) -> tuple[int, ...]:
            if block_hash is None:
                return ()
            parent, tokens = self.blocks[block_hash]
            return whole(parent) + tokens

        return {whole(block_hash) for block_hash in self.blocks}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_events_mirror_the_cache_through_any_history(lookahead: int) -> None:
    size, rng = 2, random.Random(0)
    pages = PageAllocator(24)
    cache = PrefixCache(pages, size, lookahead)
    engine: Any = types.SimpleNamespace(scheduler=types.SimpleNamespace(prefix_cache=cache))
    view, mirror = CacheView(size), Mirror()
    held: list[list[int]] = []
    largest = 0
    for step in range(400):
        for _ in range(rng.randrange(3)):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(3, 12))]
            full = (len(tokens) - lookahead) // size
            table = cache.match(tokens)
            pages.share(table)
            while pages.free_count < full - len(table) and pages.idle_count:
                cache.evict()
            known = len(table)
            if pages.free_count >= full - known:
                table = table + pages.allocate(full - known)
                cache.register(tokens, table, known, full)
            held.append(table)
        while len(held) > 3:
            pages.release(held.pop(rng.randrange(len(held))))
        if rng.random() < 0.02:
            cache.reset()
        mirror.apply([part for group in batched(view.advance(cached_pages(engine))) for part in group])
        assert len(mirror.blocks) == len(cache) == len(view), step
        largest = max(largest, len(cache))
    assert largest > 5
    assert mirror.prefixes and all(len(prefix) % size == 0 for prefix in mirror.prefixes)


def test_long_events_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.vllm.kv_events.BLOCKS_A_BATCH", 3)
    chain = {i: (i - 1, (i, i)) for i in range(8)}
    view, mirror = CacheView(2), Mirror()
    groups = batched(view.advance(chain))
    assert [sum(len(event.stored.blocks) for event in group) for group in groups] == [3, 3, 2]
    for group in groups:
        mirror.apply(group)
    assert max(mirror.prefixes, key=len) == tuple(i for i in range(8) for _ in range(2))
    groups = batched(view.advance({0: chain[0]}))
    assert [len(event.removed.block_hashes) for group in groups for event in group] == [3, 3, 1]
    for group in groups:
        mirror.apply(group)
    assert mirror.prefixes == {(0, 0)}


def test_a_subscriber_learns_the_cache_its_changes_and_the_load(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.vllm.kv_events.LOOK_SECONDS", 0.01)
    prompt = tuple(i % 5 for i in range(33))

    async def story() -> None:
        async with service(kit, kv_events=True) as (_, stub):
            mirror, sequences, snapshots, loads = Mirror(), [0], [], []

            async def follow() -> None:
                async for batch in stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()):
                    if batch.load.load_only:
                        assert not batch.events and batch.sequence_number == sequences[-1]
                    else:
                        assert batch.sequence_number == sequences[-1] + 1
                        sequences.append(batch.sequence_number)
                    if batch.HasField("snapshot"):
                        snapshots.append(batch.snapshot)
                        assert batch.events[0].HasField("cleared") or batch.snapshot.index
                    mirror.apply(batch.events)
                    loads.append(batch.load)

            await collect(stub.Generate(request(ids=prompt, **dict(GREEDY, max_tokens=4))))
            following = asyncio.create_task(follow())
            await kit.eventually(lambda: prompt[:32] in mirror.prefixes)
            assert [(chunk.index, chunk.count, chunk.unknown_before) for chunk in snapshots] == [(0, 1, 0)]
            other = (7, *prompt)
            await collect(stub.Generate(request(ids=other, **dict(GREEDY, max_tokens=4))))
            await kit.eventually(lambda: other[:32] in mirror.prefixes and prompt[:32] in mirror.prefixes)
            answer = await stub.FlushCache(common_pb2.FlushCacheRequest())
            assert answer.success
            await kit.eventually(lambda: not mirror.prefixes)
            assert loads[-1].max_running_requests == 4 and loads[-1].gen_throughput == 12.5
            assert [load.sample for load in loads] == list(range(1, len(loads) + 1))
            following.cancel()
            with pytest.raises(asyncio.CancelledError):
                await following

    kit.run(story())


def test_subscriptions_begin_anew_and_their_headers_come_at_once(kit: Any) -> None:
    async def story() -> None:
        async with service(kit, kv_events=True) as (stack, stub):
            stale = await refused(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=9)))
            assert stale.code() is grpc.StatusCode.OUT_OF_RANGE
            stack.facade.hold()
            call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
            await asyncio.wait_for(call.initial_metadata(), 30)
            stack.facade.release()
            assert (await call.read()).sequence_number == 1
            draining = asyncio.create_task(stack.lifecycle.drain(5.0))
            with pytest.raises(grpc.aio.AioRpcError, match="draining"):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            await draining

    kit.run(story())
