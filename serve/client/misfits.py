"""Why a client and who answers it do not understand each other, in the words of the command's flags.

gRPC says it in the words of its libraries, and of a server that speaks TLS only that the connection was closed.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

import grpc

from serve.client.messages import ServerError

#: Seconds that who is asked for TLS may take.
_PROBE_SECONDS = 2.0
#: By a part of what gRPC says.
_TOLD = {
    "WRONG_VERSION_NUMBER": "who listens at {} speaks no TLS: leave --tls, --tls-ca and --tls-cert out",
    "CERTIFICATE_VERIFY_FAILED": "the certificate of {} is of an authority that is not known here: name its file with "
    "--tls-ca",
    "Hostname Verification": "the certificate of {} is for another name: give that in --target",
    "Failed parsing HTTP/2": "who listens at {} speaks no gRPC; is it a port for HTTP?",
    "errors resolving": "the name in {} cannot be resolved",
}
_CLOSED = "Socket closed"
_WANTS_TLS = "speaks TLS: give --tls, or --tls-ca with the file of its authority"
_WANTS_CERTIFICATE = "asks for a client's certificate of an authority that it knows: give --tls-cert and --tls-key"


def told(error: ServerError, target: str, encrypts: bool) -> str | None:
    """What keeps a call from being understood; None where nothing shows that anything does.

    Args:
      target: "host:port". encrypts: the client speaks TLS.
    """
    if error.code is not grpc.StatusCode.UNAVAILABLE:
        return None
    if error.unreachable and _CLOSED in error.message and _speaks_tls(target):
        return f"who listens at {target} {_WANTS_CERTIFICATE if encrypts else _WANTS_TLS}"
    return next((words.format(target) for part, words in _TOLD.items() if part in error.message), None)


def _speaks_tls(target: str) -> bool:
    host, _, port = target.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is told it
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(OSError, ValueError):
        plain = socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS)
        with plain, context.wrap_socket(plain):
            return True
    return False
