"""Whether a port can be listened on, which is found out before anything is loaded."""

from __future__ import annotations

import errno
import socket


class PortError(Exception):
    """A port that cannot be listened on."""


def check_port(name: str, host: str, port: int, host_name: str = "--host") -> None:
    """Whether a port is free at every address of a host.

    gRPC is content with one of several: where one of "localhost" is taken it would listen at the other, and clients
    would reach whichever they try first.

    Args:
      name, host_name: of both settings, for errors.
      port: 0 is always free.

    Raises:
      PortError: taken, or not allowed, or a name of no address.
    """
    try:
        addresses = _addresses(host, port)
    except (OSError, UnicodeError) as e:  # the latter of what can be no name
        why = getattr(e, "strerror", None) or e
        raise PortError(
            f"{host_name}: the name {host!r} cannot be resolved: {why}; it takes an address or name of this machine, "
            "such as 127.0.0.1, or 0.0.0.0 for all of them"
        ) from e
    for family, address in addresses if port else ():
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except PermissionError as e:
                raise PortError(f"{name}: cannot listen on {host}:{port}, which is not allowed: {e.strerror}") from e
            except OSError as e:
                if e.errno == errno.EADDRINUSE:
                    raise PortError(f"{name}: cannot listen on {host}:{port}, which is in use") from e
                # Of an address that this machine lacks whoever listens has the last word.


def _addresses(host: str, port: int) -> set[tuple[socket.AddressFamily, str]]:
    """Where a server that listens on a host would: gRPC takes both loopback addresses for "localhost".

    Raises:
      OSError, UnicodeError: a name of no address.
    """
    found: set[tuple[socket.AddressFamily, str]] = set()
    for name in ("127.0.0.1", "::1") if host == "localhost" else (host.strip("[]"),):
        try:
            infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError:
            if host == "localhost":  # not every machine has both
                continue
            raise
        found |= {(info[0], str(info[4][0])) for info in infos}
    return {(family, address) for family, address in found if family in (socket.AF_INET, socket.AF_INET6)}
