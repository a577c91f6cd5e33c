"""How both clients reach a server: credentials, call metadata, limits, and when another try makes sense.

Must not know what is said over the channel.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc

from serve.client.messages import read_error


@dataclasses.dataclass(frozen=True)
class Connection:
    """Where and how to connect.

    Attributes:
      target: "host:port", or any target that gRPC understands.
      token: sent as `authorization: Bearer <token>`.
      tls: encrypt, and check the server's certificate against the system's authorities.
      tls_ca: PEM file of the authorities to check it against instead; implies `tls`.
      tls_cert, tls_key: PEM files of the client's certificate and key, where the server asks for one; imply `tls`.
      server_name: the name in the server's certificate, where the target is another one.
      retries: further tries of a call that the server refused as full, each after the delay that it named.
      max_message_mib: largest message either way, in MiB.

    Raises:
      ValueError: a file that cannot be read, or half a pair.
    """

    target: str
    token: str | None = None
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    server_name: str | None = None
    retries: int = 0
    max_message_mib: int = 16

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(
                f"tls_cert and tls_key must be given together, got tls_cert {self.tls_cert!r}, tls_key {self.tls_key!r}"
            )
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0, got {self.retries}")

    def channel(self, kind: ModuleType) -> Any:
        """A channel of `grpc` or `grpc.aio`, whichever is given."""
        credentials = self._credentials()
        if credentials is None:
            return kind.insecure_channel(self.target, options=self._options)
        return kind.secure_channel(self.target, credentials, options=self._options)

    @property
    def _options(self) -> list[tuple[str, Any]]:
        size = self.max_message_mib * 2**20
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", size),
            ("grpc.max_send_message_length", size),
            ("grpc.keepalive_time_ms", 30_000),
        ]
        if self.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return options

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """Sent with every call."""
        return [] if self.token is None else [("authorization", f"Bearer {self.token}")]

    def _credentials(self) -> grpc.ChannelCredentials | None:
        """None: plain text."""
        if not (self.tls or self.tls_ca or self.tls_cert):
            return None
        ca, key, chain = (_read(path) for path in (self.tls_ca, self.tls_key, self.tls_cert))
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=chain)


class Tries:
    """The tries of one call: how long they may take together, and whether there is another one.

    Args:
      timeout: seconds for all tries and the waits between them; None: no end.
    """

    def __init__(self, connection: Connection, timeout: float | None) -> None:
        self._left, self._metadata = connection.retries, connection.metadata
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def options(self) -> dict[str, Any]:
        """Of the next try."""
        return {"timeout": self._seconds_left(), "metadata": self._metadata}

    def pause(self, failed: grpc.RpcError, *, begun: bool = False) -> float:
        """Seconds to wait before another try.

        Args:
          begun: an answer has begun, which no other try can continue.

        Raises:
          ServerError: there is none.
        """
        error, left = read_error(failed), self._seconds_left()
        wait = error.retry_after
        if begun or self._left == 0 or not error.may_retry or wait is None or (left is not None and wait >= left):
            raise error from None
        self._left -= 1
        return wait

    def _seconds_left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from e
