"""A StatusError is a gRPC status, with the details that clients act upon."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2, status_pb2

from serve.core.errors import StatusError, invalid, unavailable


def details(error: StatusError) -> status_pb2.Status:
    """The rich status that travels in the trailers."""
    trailers = dict(error.status().trailing_metadata)
    return status_pb2.Status.FromString(trailers["grpc-status-details-bin"])


def test_a_status_carries_code_message_and_when_to_retry() -> None:
    error = StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", 2.25, reason="queue_full")
    status, rich = error.status(), details(error)
    assert (status.code, status.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    assert (rich.code, rich.message, len(rich.details)) == (8, "the queue is full", 1)
    retry = error_details_pb2.RetryInfo()
    assert rich.details[0].Unpack(retry)
    assert retry.retry_delay.ToNanoseconds() == 2_250_000_000


def test_no_retry_is_promised_unless_asked_for() -> None:
    for error in (invalid("n must be at most 64, got 65"), unavailable("the engine died", "dead")):
        assert not details(error).details
    assert invalid("x").code is grpc.StatusCode.INVALID_ARGUMENT and invalid("x").reason == "invalid"
    assert unavailable("x", "dead").code is grpc.StatusCode.UNAVAILABLE and unavailable("x", "dead").reason == "dead"
    assert StatusError(grpc.StatusCode.NOT_FOUND, "model").reason == "not_found"


def test_the_same_error_raised_again_is_a_new_exception() -> None:
    error = StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", 0.5, reason="queue_full")
    other = error.again()
    assert other is not error and str(other) == str(error) == "RESOURCE_EXHAUSTED: full"
    assert vars(other) == vars(error)
