"""jaxspec.v1.GenerationService: messages in, jobs out; events in, messages out.

Must not know the engine, admission or time limits: the generator does, and says so by StatusErrors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxspec.events import Delta, Finished
from jaxspec.request import FinishReason, Logprob
from serve.api.calls import answering, counting_refusals, end_together, limits_of, made
from serve.api.requests import MAX_ABORTED, Limits, chat_of, check_count, deadline_of, prompt_text, to_job
from serve.config import ServerConfig
from serve.core.completion import Completion
from serve.core.engine_client import EngineClient
from serve.core.errors import invalid
from serve.core.generator import Generator
from serve.core.jobs import Chat
from serve.core.observers import Metrics
from serve.proto import generation_pb2 as pb

_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


class GenerationServicer:
    """Generate, GenerateStream, Abort, Tokenize, Detokenize.

    Args:
      generator: runs the jobs.
      engine: the one behind it, for the longest context.
      metrics: counts what is refused before it is a job.
    """

    def __init__(self, generator: Generator, engine: EngineClient, metrics: Metrics, config: ServerConfig) -> None:
        self._generator, self._engine, self._metrics, self._config = generator, engine, metrics, config

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        async with answering(context):
            generation = await self._start(request, context, stream=False)
            try:
                ends = [event async for event in generation if isinstance(event, Finished)]
            finally:
                generation.close()
            return await made(sum(map(_size, ends)), lambda: self._whole(ends, generation))

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async with answering(context):
            generation = await self._start(request, context, stream=True)
            try:
                yield pb.GenerateStreamResponse(prompt=self._prompt_info(generation))
                async for event in generation:
                    if isinstance(event, Finished):
                        yield pb.GenerateStreamResponse(finished=_finished(event))
                    else:
                        delta = await made(_size(event), lambda event=event: _delta(event))
                        yield pb.GenerateStreamResponse(delta=delta)
            finally:
                # Whatever ended the call: its end, a cancel, or a write that will never be taken (GeneratorExit).
                generation.close()

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        async with answering(context):
            with counting_refusals(self._metrics):
                check_count("request_ids", request.request_ids, MAX_ABORTED)
            return pb.AbortResponse(aborted=await self._generator.abort(list(request.request_ids)))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        async with answering(context):
            with counting_refusals(self._metrics):
                limits = limits_of(self._engine, self._config)
                prompt = _tokenize_prompt(request, limits)
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await self._generator.tokenize(prompt, add_special_tokens=special)
            return pb.TokenizeResponse(ids=ids, max_tokens=limits.tokens)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        async with answering(context):
            with counting_refusals(self._metrics):
                check_count("ids", request.ids, limits_of(self._engine, self._config).tokens)
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await self._generator.detokenize(list(request.ids), skip_special_tokens=skip)
            return pb.DetokenizeResponse(text=text)

    async def _start(self, request: pb.GenerateRequest, context: Any, *, stream: bool) -> Completion:
        """The job under way; it ends with the call, whoever ends that."""
        with counting_refusals(self._metrics):
            limits = limits_of(self._engine, self._config)
            job = to_job(request, self._config.served_name, limits, deadline=deadline_of(context), stream=stream)
        generation = await self._generator.start(job)
        end_together(context, generation)
        return generation

    def _prompt_info(self, generation: Completion) -> pb.PromptInfo:
        return pb.PromptInfo(
            request_id=generation.job.request_id,
            model=self._config.served_name,
            prompt_tokens=len(generation.prompt_token_ids),
            seed=generation.seed,
        )

    def _whole(self, ends: Sequence[Finished], generation: Completion) -> pb.GenerateResponse:
        """The answer of a call that is not streamed; StatusError where it is too large for a message after all."""
        answer = pb.GenerateResponse(
            prompt=self._prompt_info(generation),
            completions=[_completion(end) for end in sorted(ends, key=lambda end: end.index)],
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


def _size(event: Delta | Finished) -> int:
    """How much there is to convert."""
    part = event if isinstance(event, Delta) else event.output.outputs[0]
    return len(part.token_ids) + sum(map(len, part.logprobs or ()))


def _logprobs(entries: Sequence[dict[int, Logprob]] | None) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            entries=[pb.TokenLogprob(token_id=e.token_id, logprob=e.logprob, rank=e.rank or 0) for e in entry.values()]
        )
        for entry in entries or ()
    ]


def _delta(delta: Delta) -> pb.Delta:
    return pb.Delta(index=delta.index, text=delta.text, token_ids=delta.token_ids, logprobs=_logprobs(delta.logprobs))


def _completion(end: Finished) -> pb.Completion:
    (completion,) = end.output.outputs
    return pb.Completion(
        index=end.index,
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=_logprobs(completion.logprobs),
        finished=_finished(end),
    )


def _finished(end: Finished) -> pb.Finished:
    m, (completion,) = end.output.metrics, end.output.outputs
    first, ended = m.first_token_time, m.finished_time
    finished = pb.Finished(
        index=end.index,
        reason=_REASONS[end.reason],
        usage=pb.Usage(
            prompt_tokens=len(end.output.prompt_token_ids),
            completion_tokens=len(completion.token_ids),
            cached_prompt_tokens=m.cached_prompt_tokens,
            queue_seconds=0.0 if m.first_scheduled_time is None else m.first_scheduled_time - m.arrival_time,
            ttft_seconds=m.ttft or 0.0,
            decode_seconds=0.0 if first is None or ended is None else ended - first,
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
    if isinstance(completion.stop_reason, str):
        finished.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        finished.stop_token_id = completion.stop_reason
    return finished
