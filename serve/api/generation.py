"""jaxspec.v1.GenerationService: messages in, jobs out; chunks in, messages out.

Must not know the engine, admission or time limits: the generator does, and says so by StatusErrors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxspec.request import FinishReason, Logprob
from serve.api.calls import Answering, counting_refusals, end_together, limits_of, made
from serve.api.requests import MAX_ABORTED, Limits, chat_of, check_count, deadline_of, prompt_text, to_job
from serve.config import ServerConfig
from serve.core.engine_thread import EngineThread
from serve.core.errors import invalid
from serve.core.generator import Chunk, Finish, Generator
from serve.core.jobs import Chat, Running
from serve.core.tickets import Metrics
from serve.proto import generation_pb2 as pb
from serve.proto import generation_pb2_grpc

_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Generate, GenerateStream, Abort, Tokenize, Detokenize.

    Args:
      generator: runs the jobs.
      engine: the one behind it, for the longest context.
      metrics: counts what is refused before it is a job.
    """

    def __init__(self, generator: Generator, engine: EngineThread, metrics: Metrics, config: ServerConfig) -> None:
        self._generator, self._engine, self._metrics, self._config = generator, engine, metrics, config

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        async with Answering(context):
            generation = await self._start(request, context, stream=False)
            try:
                chunks = [chunk async for chunk in generation]
            finally:
                generation.close()
            return await made(sum(map(_size, chunks)), lambda: self._whole(chunks, generation))

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async with Answering(context):
            generation = await self._start(request, context, stream=True)
            try:
                yield pb.GenerateStreamResponse(prompt=self._prompt_info(generation))
                async for chunk in generation:
                    if chunk.token_ids or chunk.text:
                        delta = await made(_size(chunk), lambda chunk=chunk: _delta(chunk))
                        yield pb.GenerateStreamResponse(delta=delta)
                    if chunk.finish is not None:
                        yield pb.GenerateStreamResponse(finished=_finished(chunk.index, chunk.finish, generation))
            finally:
                # Whatever ended the call: its end, a cancel, or a write that will never be taken (GeneratorExit).
                generation.close()

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        async with Answering(context):
            with counting_refusals(self._metrics):
                check_count("request_ids", request.request_ids, MAX_ABORTED)
            return pb.AbortResponse(aborted=await self._generator.abort(list(request.request_ids)))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        async with Answering(context):
            with counting_refusals(self._metrics):
                limits = limits_of(self._engine, self._config)
                prompt = _tokenize_prompt(request, limits)
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await self._generator.tokenize(prompt, add_special_tokens=special)
            return pb.TokenizeResponse(ids=ids, max_tokens=limits.tokens)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        async with Answering(context):
            with counting_refusals(self._metrics):
                check_count("ids", request.ids, limits_of(self._engine, self._config).tokens)
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await self._generator.detokenize(list(request.ids), skip_special_tokens=skip)
            return pb.DetokenizeResponse(text=text)

    async def _start(self, request: pb.GenerateRequest, context: Any, *, stream: bool) -> Running:
        """The job under way; it ends with the call, whoever ends that."""
        with counting_refusals(self._metrics):
            limits = limits_of(self._engine, self._config)
            job = to_job(request, self._config.served_name, limits, deadline=deadline_of(context), stream=stream)
        generation = await self._generator.start(job)
        end_together(context, generation)
        return generation

    def _prompt_info(self, generation: Running) -> pb.PromptInfo:
        return pb.PromptInfo(
            request_id=generation.job.request_id,
            model=self._config.served_name,
            prompt_tokens=len(generation.prompt_token_ids),
            seed=generation.seed,
        )

    def _whole(self, chunks: Sequence[Chunk], generation: Running) -> pb.GenerateResponse:
        """The answer of a call that is not streamed; StatusError where it is too large for a message after all."""
        parts: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            parts.setdefault(chunk.index, []).append(chunk)
        answer = pb.GenerateResponse(
            prompt=self._prompt_info(generation),
            completions=[_completion(own, generation) for _, own in sorted(parts.items())],
        )
        size, limit = answer.ByteSize(), self._config.max_message_mib * 2**20
        if size > limit:
            raise invalid(f"the answer takes {size} bytes, and a message at most {limit}: call GenerateStream")
        return answer


def _tokenize_prompt(request: pb.TokenizeRequest, limits: Limits) -> str | Chat:
    match request.WhichOneof("input"):
        case "text":
            return prompt_text("text", request.text, limits)
        case "chat":
            if request.add_special_tokens:
                raise invalid(
                    "add_special_tokens must be absent or false for a chat, got true: its template writes them"
                )
            return chat_of(request.chat, "chat", limits)
        case _:
            raise invalid("input must be exactly one of text and chat, got none")


def _size(chunk: Chunk) -> int:
    """How much there is to convert."""
    return len(chunk.token_ids) + sum(map(len, chunk.logprobs or ()))


def _logprobs(entries: Sequence[dict[int, Logprob]] | None) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            entries=[pb.TokenLogprob(token_id=e.token_id, logprob=e.logprob, rank=e.rank or 0) for e in entry.values()]
        )
        for entry in entries or ()
    ]


def _delta(chunk: Chunk) -> pb.Delta:
    return pb.Delta(index=chunk.index, text=chunk.text, token_ids=chunk.token_ids, logprobs=_logprobs(chunk.logprobs))


def _completion(parts: Sequence[Chunk], generation: Running) -> pb.Completion:
    last = parts[-1]
    assert last.finish is not None
    return pb.Completion(
        index=last.index,
        text=last.finish.text,
        token_ids=last.finish.output_token_ids,
        logprobs=[tokens for part in parts for tokens in _logprobs(part.logprobs)],
        finished=_finished(last.index, last.finish, generation),
    )


def _finished(index: int, finish: Finish, generation: Running) -> pb.Finished:
    m = finish.metrics
    first, end = m.first_token_time, m.finished_time
    finished = pb.Finished(
        index=index,
        reason=_REASONS[finish.reason],
        usage=pb.Usage(
            prompt_tokens=len(generation.prompt_token_ids),
            completion_tokens=len(finish.output_token_ids),
            cached_prompt_tokens=m.cached_prompt_tokens,
            queue_seconds=0.0 if m.first_scheduled_time is None else m.first_scheduled_time - m.arrival_time,
            ttft_seconds=m.ttft or 0.0,
            decode_seconds=0.0 if first is None or end is None else end - first,
        ),
        speculation=pb.SpeculationStats(
            mean_acceptance_length=m.mean_accepted_length,
            draft_acceptance_rate=m.acceptance_rate,
            acceptance_histogram=m.acceptance_histogram,
            num_spec_steps=m.rounds,
            num_draft_tokens=m.drafted,
            num_accepted_draft_tokens=m.accepted,
            tier_rounds=m.tier_rounds,
        ),
    )
    if isinstance(finish.stop_reason, str):
        finished.stop_string = finish.stop_reason
    elif finish.stop_reason is not None:
        finished.stop_token_id = finish.stop_reason
    return finished
