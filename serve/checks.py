"""What is found out before a port is opened or anything is loaded: a model, a drafter or a policy that cannot be, and a
server that anybody may call. Of ports see `ports`.

Reads names, configurations, tokenizers and headers of files, no weights. Must not know services.
"""

from __future__ import annotations

import ipaddress
import logging

from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.checkpointing import hf
from jaxspec.checkpointing.tensors import read_tensors
from jaxspec.choosing import check_choice
from jaxspec.drafters import registry
from jaxspec.fitting import longest_text
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.runtime.compile import check_named
from jaxspec.runtime.sharding import check_divides
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.traffic import TrafficLog
from serve.config import ServerConfig

_log = logging.getLogger("serve")


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
        why = Tokenizer.from_directory(directory).broken_chat_template()
        if why is not None:
            _log.warning("conversations will be refused, %s", why)
    if engine.profile is not None:
        CostProfile.load(engine.profile)
    check_named(engine.compile_cache)
    if engine.traffic_log is not None:
        TrafficLog(engine.traffic_log).close()


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
