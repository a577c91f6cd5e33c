"""vllm.grpc.engine.VllmEngine, the protocol that the smg gateway speaks to its workers, over a Generator.

Messages in, messages out. The gateway tokenizes and detokenizes by itself, trims stop strings from the text, and asks
for the tokenizer's files; so this service deals in token ids. Needs the extra "smg". Must not know jaxspec.v1's
messages or how a job runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import math
import operator
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc
from smg_grpc_proto.generated import common_pb2

import jaxspec
from jaxspec.events import Delta
from jaxspec.facts import EngineFacts
from jaxspec.resolve import resolve_model
from jaxspec.stats import EngineStats
from serve.api.calls import answering, breaking_off, counting_refusals, end_together, limits_of, made
from serve.api.requests import MAX_ABORTED, check_count, deadline_of
from serve.config import ServerConfig
from serve.core.engine_client import EngineClient
from serve.core.errors import StatusError, invalid, unavailable
from serve.core.generator import Generator
from serve.core.lifecycle import Lifecycle
from serve.core.observers import Metrics
from serve.vllm.checkpoint_files import CheckpointFacts, checkpoint_facts, tokenizer_archive
from serve.vllm.kv_events import KvEvents
from serve.vllm.messages import answer, lasting, size_of, to_job

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
#: No path and no repository name: the gateway has to ask this server for the files.
TOKENIZER_SOURCE = "worker:tokenizer"
#: Bytes of the tokenizer's archive a message.
_ARCHIVE_CHUNK = 2**20


class VllmServicer(rpc.VllmEngineServicer):
    """The service.

    Args:
      engine: the one behind `generator`.
      metrics: counts what is refused before it is a job.
    """

    def __init__(
        self,
        generator: Generator,
        lifecycle: Lifecycle,
        config: ServerConfig,
        engine: EngineClient,
        metrics: Metrics,
    ) -> None:
        self._generator, self._lifecycle, self._config, self._engine = generator, lifecycle, config, engine
        self._metrics = metrics
        self._started_at = time.monotonic()
        self._received_at = 0.0
        self._files = asyncio.Lock()
        self._checkpoint: CheckpointFacts | None = None
        self._archive: tuple[bytes, str] | None = None
        self._kv_events = KvEvents(engine, self._load, lambda: lifecycle.state == "serving", config.stall_seconds)

    # Generation.

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Chunks with new tokens where `stream` is set, and a completion for each of the n outputs."""
        self._received_at = time.time()
        async with answering(context, lasting):
            with counting_refusals(self._metrics):
                job = to_job(request, limits_of(self._engine, self._config), deadline_of(context))
            generation = await self._generator.start(job)
            end_together(context, generation, lasting)
            try:
                prompt_tokens = len(generation.prompt_token_ids)
                # A gateway repeats what fails after its first message, so an unstreamed answer leaves as a whole.
                held: list[pb.GenerateResponse] = []
                async for event in generation:
                    if isinstance(event, Delta) and not event.token_ids:
                        continue
                    make = functools.partial(answer, event, job, prompt_tokens)
                    message = await made(size_of(event, job), make)
                    if request.stream:
                        yield message
                    else:
                        held.append(message)
                for message in held:
                    yield message
            finally:
                generation.close()

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends requests by id; unknown and finished ones are no error."""
        async with answering(context):
            with counting_refusals(self._metrics):
                check_count("request_ids", request.request_ids, MAX_ABORTED)
            await self._generator.abort(list(request.request_ids))
            return pb.AbortResponse()

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """UNIMPLEMENTED."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server generates text; it computes no embeddings")

    # What is served, and how it fares.

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Healthy while it takes requests and finishes them."""
        state = self._lifecycle.state
        return pb.HealthCheckResponse(healthy=state == "serving", message=state)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Names, limits and special tokens; no path of this machine.

        UNAVAILABLE before the engine is built.
        """
        async with answering(context):
            facts, _ = self._known()
            async with self._files:
                if self._checkpoint is None:
                    self._checkpoint = await asyncio.to_thread(_checkpoint_facts, self._config.model)
            known = self._checkpoint
            ends = facts.tokenizer.eos_token_ids if facts.tokenizer is not None else ()
            return pb.GetModelInfoResponse(
                model_path=self._config.served_name,
                served_model_name=self._config.served_name,
                tokenizer_path=TOKENIZER_SOURCE,
                is_generation=True,
                max_context_length=facts.sizes.max_seq_len,
                max_req_input_len=facts.sizes.max_seq_len - 1,
                vocab_size=facts.vocab_size,
                model_type=known.model_type,
                architectures=known.architectures,
                eos_token_ids=sorted({*ends, *known.eos_token_ids}),
                pad_token_id=known.pad_token_id,
                bos_token_id=known.bos_token_id,
            )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Load, age and what routing depends on. UNAVAILABLE before the engine is built."""
        async with answering(context):
            facts, _ = self._known()
            return pb.GetServerInfoResponse(
                active_requests=self._generator.live,
                is_paused=self._lifecycle.state == "draining",
                last_receive_timestamp=self._received_at,
                uptime_seconds=time.monotonic() - self._started_at,
                server_type="vllm-grpc",
                data_parallel_size=1,
                block_size=facts.sizes.page_size,
                max_num_seqs=facts.sizes.slots,
                constrained_decoding_start="first_token" if facts.grammars is not None else "",
            )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """The scheduler's load; there is one rank, and sections other than "core" do not exist here."""
        async with answering(context):
            if request.dp_rank:
                raise invalid(f"dp_rank must be 0 or absent, got {request.dp_rank}")
            facts, stats = self._known()
            load = self._load(stats)
            return pb.GetLoadsResponse(
                timestamp=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                version=jaxspec.__version__,
                dp_rank_count=1,
                loads=[
                    pb.SchedulerLoad(
                        num_running_reqs=load.running_requests,
                        num_waiting_reqs=load.waiting_requests,
                        num_total_reqs=load.running_requests + load.waiting_requests,
                        num_used_tokens=load.num_used_tokens,
                        max_total_num_tokens=load.max_total_num_tokens,
                        token_usage=load.token_usage,
                        gen_throughput=load.gen_throughput,
                        cache_hit_rate=load.cache_hit_rate,
                        utilization=load.running_requests / facts.sizes.slots,
                        max_running_requests=facts.sizes.slots,
                        num_waiting_uncached_tokens=load.waiting_uncached_tokens,
                    )
                ],
            )

    def _load(self, stats: EngineStats) -> common_pb2.EngineLoad:
        """The record that goes out with cache events, from the engine's counters."""
        sizes = self._engine.known().sizes
        held = sizes.num_pages - stats.free_pages - stats.cached_pages
        return common_pb2.EngineLoad(
            running_requests=stats.running,
            waiting_requests=stats.waiting,
            # At most: nobody looks prompts up in the cache before they run.
            waiting_uncached_tokens=self._generator.waiting_prompt_tokens,
            token_usage=held / sizes.num_pages,
            gen_throughput=self._engine.meter.tokens_per_second,
            max_running_requests=sizes.slots,
            num_used_tokens=held * sizes.page_size,
            max_total_num_tokens=sizes.num_pages * sizes.page_size,
            cache_hit_rate=stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
        )

    def _known(self) -> tuple[EngineFacts, EngineStats]:
        """What the engine is, and its counters; StatusError UNAVAILABLE before it has told both."""
        facts, stats = self._engine.known(), self._engine.snapshot
        if stats is None:
            raise unavailable("the engine is starting", "starting")
        return facts, stats

    # Tokenizer and cache.

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as one zip archive in pieces, its SHA-256 with the last one.

        They are read at the first call: a server's checkpoint does not change.
        """
        async with answering(context):
            async with self._files:
                if self._archive is None:
                    self._archive = await asyncio.to_thread(_archive, self._config.model)
                archive = self._archive
            if archive is None:
                message = (
                    f"the model {self._config.served_name!r} has no tokenizer; send token ids, and decode them yourself"
                )
                raise StatusError(grpc.StatusCode.NOT_FOUND, message)
            data, fingerprint = archive
            for start in range(0, len(data), _ARCHIVE_CHUNK):
                last = start + _ARCHIVE_CHUNK >= len(data)
                yield common_pb2.GetTokenizerChunk(
                    data=data[start : start + _ARCHIVE_CHUNK], sha256=fingerprint if last else ""
                )

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """What the prefix cache holds, then how that changes, with the load. OUT_OF_RANGE for a cursor.

        UNIMPLEMENTED unless ServerConfig.kv_events is set: the events show every client the tokens of all prompts.
        """
        async with answering(context):
            if not self._config.kv_events:
                raise StatusError(grpc.StatusCode.UNIMPLEMENTED, "this server was started without kv_events")
            if request.start_sequence_number:
                message = (
                    f"start_sequence_number must be 0, got {request.start_sequence_number}: no history is kept; "
                    "subscribe anew for a snapshot"
                )
                raise StatusError(grpc.StatusCode.OUT_OF_RANGE, message)
            self._known()
            # The gateway gives up after 2 s without headers, and an idle engine has nothing to send.
            await context.send_initial_metadata(())
            async with contextlib.aclosing(self._kv_events.subscribe(breaking_off(context))) as batches:
                async for batch in batches:
                    yield batch
            raise unavailable(f"the server is {self._lifecycle.state}", self._lifecycle.state)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Forgets cached prefixes at once, whatever runs: live requests keep their pages, so nobody has to wait."""
        async with answering(context):
            if not 0 <= request.timeout_s < math.inf:
                raise invalid(f"timeout_s must be finite and at least 0, got {request.timeout_s}")
            freed = await self._engine.call(operator.methodcaller("forget_texts"))
            return common_pb2.FlushCacheResponse(success=True, message=f"freed {freed} pages")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """UNIMPLEMENTED."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server takes no profiles")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        """UNIMPLEMENTED."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server takes no profiles")


def _checkpoint_facts(model: str) -> CheckpointFacts:
    """Nothing of a model that is built without a checkpoint."""
    try:
        return checkpoint_facts(resolve_model(model))
    except ValueError:
        return CheckpointFacts()


def _archive(model: str) -> tuple[bytes, str] | None:
    """None of a model without a tokenizer, or without a checkpoint."""
    try:
        return tokenizer_archive(resolve_model(model))
    except ValueError:
        return None


def add_to(server: grpc.aio.Server, servicer: VllmServicer) -> None:
    """Registers the service."""
    rpc.add_VllmEngineServicer_to_server(servicer, server)
