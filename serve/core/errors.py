"""How the server says no: one exception that is a gRPC status, whatever protocol it leaves by.

Must not know the engine, jobs or any servicer.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


class StatusError(Exception):
    """A request that ends with a status other than OK.

    Attributes:
      code: what clients and gateways act upon. RESOURCE_EXHAUSTED, UNAVAILABLE and DEADLINE_EXCEEDED invite a retry,
        so a permanent error is never one of them.
      message: for people; names the field and both values where a value was at fault.
      retry_seconds: when to try again (google.rpc.RetryInfo); None says nothing about it.
      reason: the cause in a word of a fixed set, for metrics.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_seconds: float | None = None, *, reason: str = ""):
        super().__init__(f"{code.name}: {message}")
        self.code, self.message, self.retry_seconds = code, message, retry_seconds
        self.reason = reason or code.name.lower()

    def again(self) -> StatusError:
        """The same, to be raised once more: an exception that many raise collects all their tracebacks."""
        return StatusError(self.code, self.message, self.retry_seconds, reason=self.reason)

    def status(self) -> grpc.Status:
        """For `context.abort_with_status`; carries RetryInfo where `retry_seconds` is given."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        if self.retry_seconds is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(round(self.retry_seconds * 1e9))
            detail = any_pb2.Any()
            detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
            status.details.append(detail)
        return rpc_status.to_status(status)


def invalid(message: str) -> StatusError:
    """The request can never be honoured as it is."""
    return StatusError(grpc.StatusCode.INVALID_ARGUMENT, message, reason="invalid")


def deadline_passed(message: str) -> StatusError:
    """The time that the client gave is over."""
    return StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, message, reason="deadline")


def unavailable(message: str, reason: str) -> StatusError:
    """This server cannot serve the request now; another one may."""
    return StatusError(grpc.StatusCode.UNAVAILABLE, message, reason=reason)
