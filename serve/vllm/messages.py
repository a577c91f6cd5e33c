"""Between the messages of vllm.grpc.engine.VllmEngine and jobs, events and errors of this server.

Requests are checked here, and refused by field, value and what is allowed; what needs the tokenizer, the vocabulary or
the context length is the generator's to check. Needs the extra "smg". Must not know how a job runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb

from jaxspec.events import Delta, Finished
from jaxspec.request import Logprob, SamplingParams
from jaxspec.text.grammar import GrammarSpec
from serve.api.requests import (
    Limits,
    check_answer,
    check_min_tokens,
    check_sampling,
    choice_options,
    grammar_of,
    prompt_text,
    prompt_tokens,
    request_id_of,
    sampling_params,
)
from serve.core.errors import StatusError, invalid
from serve.core.jobs import Job

_SAMPLING_FLAGS = ("skip_special_tokens", "ignore_eos", "include_stop_str_in_output")
_SAMPLING_NUMBERS = ("min_p", "frequency_penalty", "presence_penalty", "top_k", "min_tokens")
#: Bytes that a message may take for each logprob: a float and a token id, packed.
_LOGPROB_BYTES = 10


def to_job(request: pb.GenerateRequest, limits: Limits, deadline: float | None = None) -> Job:
    """What a gateway asks for.

    Where the protocol has a plain scalar, zero means that it was not set: top_p and repetition_penalty are then 1, and
    so is n. A seed is an int32 there and counts modulo 2**32.

    Raises:
      StatusError: INVALID_ARGUMENT for everything that this server does not do.
    """
    _refuse_unsupported(request)
    params, fill_context = _params(request.sampling_params)
    grammar = _grammar(request.sampling_params)
    check_min_tokens("sampling_params.min_tokens", params, grammar)
    if not request.stream:
        # Each completion is a message of its own.
        check_answer(params, fill_context, limits, 1, _LOGPROB_BYTES, "set stream")
    match request.WhichOneof("input"):
        case "tokenized":
            prompt: str | tuple[int, ...] = prompt_tokens("tokenized.input_ids", request.tokenized.input_ids, limits)
        case "text":
            prompt = prompt_text("text", request.text, limits)
        case _:
            raise invalid("input must be one of tokenized and text, got none")
    return Job(
        request_id=request_id_of(request.request_id or None, "vllm"),
        prompt=prompt,
        params=params,
        fill_context=fill_context,
        grammar=grammar,
        deadline=deadline,
        stream=request.stream,
    )


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    for name in ("mm_inputs", "media_refs", "kv_transfer_params"):
        if request.HasField(name):
            raise invalid(f"{name} must be absent: this server takes text only and keeps its cache to itself")
    if request.extra_mm_inputs:
        raise invalid(f"extra_mm_inputs must be empty: this server takes text only, got {len(request.extra_mm_inputs)}")
    if request.kv_transfer_params_json:
        raise invalid("kv_transfer_params_json must be absent: this server keeps its cache to itself")
    if request.data_parallel_rank:
        raise invalid(f"data_parallel_rank must be 0 or absent, got {request.data_parallel_rank}")
    sampling = request.sampling_params
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if sampling.HasField(name):
            raise invalid(f"sampling_params.{name} must be absent, got {getattr(sampling, name)}: it is not supported")


def _params(sampling: pb.SamplingParams) -> tuple[SamplingParams, bool]:
    """(parameters, whether max_tokens was left to the server)."""
    check_sampling("sampling_params", sampling)
    fields = dict(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p or 1.0,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        seed=sampling.seed % 2**32 if sampling.HasField("seed") else None,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        logit_bias=dict(sampling.logit_bias) or None,
        **{name: getattr(sampling, name) for name in (*_SAMPLING_FLAGS, *_SAMPLING_NUMBERS)},
    )
    return sampling_params("sampling_params", sampling.n or 1, fields), not sampling.HasField("max_tokens")


def _grammar(sampling: pb.SamplingParams) -> GrammarSpec | None:
    form = sampling.WhichOneof("constraint")
    name = f"sampling_params.{form}"
    match form:
        case None:
            return None
        case "choice":
            return grammar_of(name, form, choice_options(f"{name}.choices", sampling.choice.choices))
        case "json_schema" | "regex" | "json_object":
            return grammar_of(name, form, getattr(sampling, form))
        case "grammar":
            return grammar_of(name, "lark", sampling.grammar)
        case _:
            raise invalid(f"{name} is not supported; use json_schema, regex, grammar or choice")


def size_of(event: Delta | Finished, job: Job) -> int:
    """How many tokens and logprobs `answer` converts."""
    part = event if isinstance(event, Delta) else event.output.outputs[0]
    logprobs = part.logprobs if isinstance(event, Delta) or not job.stream else None
    return len(part.token_ids) + sum(map(len, logprobs or ()))


def answer(event: Delta | Finished, job: Job, prompt_tokens: int) -> pb.GenerateResponse:
    """What an event of a job says.

    The end of a job that is streamed brings no log-probabilities: its deltas did.

    Args:
      prompt_tokens: how many there are.
    """
    top = job.params.logprobs
    if isinstance(event, Delta):
        # completion_tokens counts this chunk alone: the gateway adds them up.
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                index=event.index,
                token_ids=event.token_ids,
                prompt_tokens=prompt_tokens,
                completion_tokens=len(event.token_ids),
                output_logprobs=_logprobs(event.token_ids, event.logprobs, top),
            )
        )
    (completion,), metrics = event.output.outputs, event.output.metrics
    complete = pb.GenerateComplete(
        index=event.index,
        output_ids=completion.token_ids,
        finish_reason=event.reason.value,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(completion.token_ids),
        cached_tokens=metrics.cached_prompt_tokens,
        spec_accepted_tokens=metrics.accepted,
        spec_draft_tokens=metrics.drafted,
        output_logprobs=None if job.stream else _logprobs(completion.token_ids, completion.logprobs, top),
    )
    if isinstance(completion.stop_reason, int):
        complete.matched_token_id = completion.stop_reason
    elif completion.stop_reason is not None:
        complete.matched_stop_str = completion.stop_reason
    return pb.GenerateResponse(complete=complete)


def _logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None, top: int | None
) -> pb.OutputLogProbs | None:
    if top is None or not logprobs:
        return None
    result = pb.OutputLogProbs(token_ids=token_ids)
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        result.token_logprobs.append(entries[token_id].logprob)
        likeliest = sorted(entries.values(), key=lambda entry: -entry.logprob)[:top]
        result.top_logprobs.append(
            pb.TopLogProbs(
                values=[entry.logprob for entry in likeliest], token_ids=[entry.token_id for entry in likeliest]
            )
        )
    return result


def lasting(error: StatusError) -> StatusError:
    """An error of a request that had started, under a code that no gateway repeats unless that may help.

    What took too long would again, and whoever aborts a request does not want it back; the gateway would repeat
    DEADLINE_EXCEEDED and CANCELLED four times.
    """
    if error.reason == "run_seconds":
        return StatusError(grpc.StatusCode.FAILED_PRECONDITION, error.message, reason=error.reason)
    if error.code is grpc.StatusCode.CANCELLED:
        return StatusError(grpc.StatusCode.ABORTED, error.message, reason=error.reason)
    return error
