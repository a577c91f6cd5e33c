"""Who may call: TLS and mutual TLS of the listening port, bearer tokens, and who may change how the server runs.

Knows gRPC, names of methods and files of secrets, no servicer and no engine. Secrets never reach a message or a log.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from serve.config import ServerConfig

#: Probes bring no secrets.
_EXEMPT = "/grpc.health.v1.Health/"
#: What ends or changes the service for everybody: all of AdminService that is no look, and what others call the same.
_ADMIN = "/jaxspec.v1.AdminService/"
_LOOKS = frozenset({_ADMIN + "GetServerInfo", _ADMIN + "GetLoads"})
_ADMIN_ELSEWHERE = frozenset({"/vllm.grpc.engine.VllmEngine/FlushCache"})


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise ValueError(f"{field}: cannot read {path}: {e.strerror}") from e


def _pem(field: str, path: str, what: str) -> bytes:
    data = _read(field, path)
    if b"-----BEGIN " not in data or what.encode() not in data:
        raise ValueError(f"{field}: {path} must be a PEM file with a {what}, and holds none")
    return data


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """TLS of the listening port; None: plain text. With a client CA every client must show a certificate.

    Raises:
      ValueError: a file that cannot be read or is no PEM file; names the field and the file.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    key = _pem("tls_key", config.tls_key, "PRIVATE KEY")
    chain = _pem("tls_cert", config.tls_cert, "CERTIFICATE")
    ca = None if config.tls_client_ca is None else _pem("tls_client_ca", config.tls_client_ca, "CERTIFICATE")
    return grpc.ssl_server_credentials([(key, chain)], root_certificates=ca, require_client_auth=ca is not None)


def read_tokens(path: str, field: str = "auth_token_file") -> list[str]:
    """The tokens of a file, one a line; empty lines do not count.

    Args:
      field: of the configuration, for errors.

    Raises:
      ValueError: unreadable, without a token, or a token with spaces or characters beyond ASCII (which metadata
        cannot carry); names the file and the line, never the token.
    """
    try:
        lines = _read(field, path).decode().splitlines()
    except UnicodeDecodeError as e:
        raise ValueError(f"{field}: {path} is not text: {e.reason}") from e
    tokens = []
    for number, line in enumerate(lines, start=1):
        token = line.strip()
        if any(not 33 <= ord(character) <= 126 for character in token):
            raise ValueError(
                f"{field}: {path}, line {number}: a token must be printable ASCII without spaces, and is not"
            )
        if token:
            tokens.append(token)
    if not tokens:
        raise ValueError(f"{field}: {path} must hold at least one token, a line each, and holds none")
    return tokens


class Tokens:
    """Known tokens. Hashes are compared, all each time and in constant time, so that the time taken tells nothing."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    def among(self, metadata: Any) -> bool:
        """Whether the metadata, pairs of key and value, carry one as `authorization: Bearer <token>`."""
        found = False
        for key, value in metadata or ():
            if key.lower() != "authorization" or not isinstance(value, str):
                continue
            scheme, _, token = value.partition(" ")
            digest = hashlib.sha256(token.strip().encode()).digest()
            known = sum(hmac.compare_digest(digest, mine) for mine in self._digests) > 0
            found |= known and scheme.lower() == "bearer"
        return found


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls pass that carry one of the tokens as `authorization: Bearer <token>`; health passes always.

    Args:
      tokens: at least one.
      on_refused: called for every call that is turned away.
    """

    def __init__(self, tokens: Sequence[str], on_refused: Callable[[], None]) -> None:
        assert tokens
        self._tokens, self._on_refused = Tokens(tokens), on_refused

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        details: Any = handler_call_details
        if details.method.startswith(_EXEMPT) or self._tokens.among(details.invocation_metadata):
            return await continuation(handler_call_details)
        self._on_refused()
        return _REFUSAL


async def _refuse(_: Any, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "this call needs the metadata 'authorization: Bearer <token>' with a known token",
    )


#: On the wire a stream is what a unary call is too, so one handler answers every kind of call, known or not.
_REFUSAL = grpc.stream_stream_rpc_method_handler(_refuse)


class AdminInterceptor(grpc.aio.ServerInterceptor):
    """Keeps what changes the server for everybody (all of AdminService that is no look) to those who run it.

    Without tokens these are peers on this host: loopback addresses and Unix sockets. With tokens it is whoever shows
    one, from wherever, and nobody else: behind a proxy on this host, such as a service mesh's, every peer is local.
    Neither a client's certificate nor an ordinary token makes an administrator: all clients have those.

    Args:
      tokens: of administrators; empty: there are none.
      on_refused: called for every call that is turned away.
    """

    def __init__(self, tokens: Sequence[str], on_refused: Callable[[], None]) -> None:
        self._tokens, self._on_refused = Tokens(tokens) if tokens else None, on_refused

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        details: Any = handler_call_details
        handler = await continuation(handler_call_details)
        method = details.method
        guarded = (method.startswith(_ADMIN) and method not in _LOOKS) or method in _ADMIN_ELSEWHERE
        if handler is None or not guarded:
            return handler
        behavior = handler.unary_unary
        assert behavior is not None, f"{method} changes the server, and is no unary call"

        async def call(request: Any, context: Any) -> Any:
            if self._tokens is None:
                allowed = is_local(context.peer())
                how = "from the server's own host, unless it is started with an admin_token_file"
            else:
                allowed = self._tokens.among(details.invocation_metadata)
                how = "with 'authorization: Bearer <token>' and a token of the server's admin_token_file"
            if not allowed:
                self._on_refused()
                message = f"{method.rpartition('/')[2]} changes the server for everybody; it can only be called {how}"
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)
            return await behavior(request, context)

        return handler._replace(unary_unary=call)


def is_local(peer: str) -> bool:
    """Whether a peer, as gRPC writes it ("ipv4:127.0.0.1:5", "ipv6:%5B::1%5D:5", "unix:..."), is on this host."""
    scheme, _, rest = peer.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if scheme not in ("ipv4", "ipv6"):
        return False
    host = urllib.parse.unquote(rest).rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
