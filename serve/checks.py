"""What is found out before a port is opened or anything is loaded: a model, a drafter or a policy that cannot be, a
port that is taken, and a server that anybody may call.

Reads names, configurations, tokenizers and headers of files, no weights. Must not know services.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.checkpointing import hf
from jaxspec.checkpointing.tensors import read_tensors
from jaxspec.choosing import check_choice
from jaxspec.drafters import registry
from jaxspec.fitting import longest_text
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.runtime.sharding import check_divides
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.traffic import TrafficLog
from serve.config import ServerConfig

_log = logging.getLogger("serve")


class PortError(Exception):
    """A port that cannot be listened on."""


def check_model(config: ServerConfig) -> None:
    """Whether the model, its drafter and the policy can be had, as far as that shows without loading or compiling.

    Raises:
      ValueError: names what was given and what is allowed.
    """
    speculation, engine = config.speculation, config.engine
    directory = resolve_model(config.model)
    model = hf.load_config(directory)
    kind = registry.find(resolve_drafter(config.drafter, directory)[0])
    # Whatever the device's depths are: this process leaves the device to the engine's.
    check_choice(kind, speculation, engine, default_steps=(0, 1))
    check_divides(model, engine.tensor_parallel)
    longest_text(engine, model.max_position_embeddings)
    with read_tensors(directory):  # opens every file, which shows what is absent, truncated or a pickle
        pass
    if Tokenizer.is_in(directory) and not engine.skip_tokenizer_init:
        Tokenizer.from_directory(directory)
    if engine.profile is not None:
        CostProfile.load(engine.profile)
    if engine.traffic_log is not None:
        TrafficLog(engine.traffic_log).close()


def check_port(name: str, host: str, port: int) -> None:
    """Whether a port is free at every address of a host.

    gRPC is content with one of several: where one of "localhost" is taken it would listen at the other, and clients
    would reach whichever they try first.

    Args:
      name: of the field, for errors.
      port: 0 is always free.

    Raises:
      PortError: taken, or not allowed, or a name of no address.
    """
    addresses = _addresses(host, port)
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
      PortError: a name of no address.
    """
    found: set[tuple[socket.AddressFamily, str]] = set()
    for name in ("127.0.0.1", "::1") if host == "localhost" else (host.strip("[]"),):
        try:
            infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as e:  # the latter of what can be no name
            if host == "localhost":
                continue
            why = getattr(e, "strerror", None) or e
            raise PortError(
                f"host: the name {host!r} cannot be resolved: {why}; --host takes an address or name of this machine, "
                "such as 127.0.0.1, or 0.0.0.0 for all of them"
            ) from e
        found |= {(info[0], str(info[4][0])) for info in infos}
    return {(family, address) for family, address in found if family in (socket.AF_INET, socket.AF_INET6)}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name, which may be anything


def warn_of_open_door(config: ServerConfig, port: int) -> None:
    """Logs a warning where whoever reaches the machine may use the model, and nothing asks who that is."""
    if is_loopback(config.host) or config.auth_token_file is not None or config.tls_client_ca is not None:
        return
    _log.warning(
        "ANYBODY who reaches %s:%d may use this server: it listens beyond this machine and asks for no token and no "
        "client certificate. Give --auth-token-file (with --tls-cert and --tls-key) or --tls-client-ca, or listen on "
        "loopback: --host 127.0.0.1", config.host, port,
    )  # fmt: skip
