"""A line in the log for every request, when it ends. Must not know messages of any protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from serve.core.jobs import Chat, Job
from serve.core.observers import Record
from serve.telemetry.logs import event

_log = logging.getLogger("serve")


def request_log(log_prompts: bool) -> Callable[[Job], Callable[[Record], None]]:
    """An observer of requests (see serve.core.observers).

    Args:
      log_prompts: write prompts, outputs and messages too.
    """

    def write(record: Record) -> None:
        job, error, total = record.job, record.error, record.total
        ms = lambda seconds: None if seconds is None else round(seconds * 1e3, 3)
        shown: dict[str, object] = {}
        if log_prompts:
            prompt = job.prompt.messages if isinstance(job.prompt, Chat) else job.prompt
            text = "\n".join(output.text for output in record.outputs)
            shown = {"prompt": prompt, "output": text, "message": None if error is None else error.message}
        bad = record.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        event(
            _log,
            logging.ERROR if bad else logging.INFO,
            "request",
            request_id=job.request_id,
            route=job.route or None,
            status=record.code.name,
            reason=None if error is None else error.reason,
            finish=record.reasons or None,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=total.cached_prompt_tokens,
            output_tokens=record.output_tokens,
            ttft_ms=ms(record.ttft),
            tpot_ms=ms(record.tpot),
            total_ms=ms(record.seconds),
            accepted_length=round(total.mean_accepted_length, 3) if total.rounds else None,
            **shown,
        )

    return lambda job: write
