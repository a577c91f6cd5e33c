"""The server's configuration: one frozen object, from flags and one YAML or JSON file, and back to YAML.

A field and its line in the docstring are all that a flag needs: type, default, bounds and place in `--help` stand with
the field, and the command line, the keys of a file, the checks and the help text are made from the two. What a model or
an engine can do is checked by SpeculationConfig and EngineConfig, and when they are built: nothing of it is repeated
here. Must not import JAX.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from jaxspec.config import ENGINE_ELSEWHERE, SHORT_FLAGS, SPECULATION_FLAGS, EngineConfig, SpeculationConfig
from jaxspec.names import Advice, hints
from jaxspec.request import MAX_PRIORITY
from jaxspec.tier import Tier, parse_tier

#: Fields of ServerConfig that hold a configuration of the engine, and the prefix of its keys in a file.
PARTS: dict[str, type[Any]] = {"speculation": SpeculationConfig, "engine": EngineConfig}
#: Where a server's defaults are not those of the classes: clients may send grammars unasked, and restarts are frequent.
PART_DEFAULTS: dict[str, dict[str, Any]] = {
    "speculation": {}, "engine": {"structured_output": True, "keep_learnt": True},
}  # fmt: skip
_GATEWAYS = Advice("leave it out, chats and tools are the gateway's: `python -m serve.openai`, and its --gateway-args")
#: What vLLM's server and SGLang's call these settings.
ELSEWHERE = {
    **ENGINE_ELSEWHERE, **SPECULATION_FLAGS, "speculative_config": "speculation", "api_key": "auth_token_file",
    "ssl_certfile": "tls_cert", "ssl_keyfile": "tls_key", "model_path": "model", "tp": "tensor_parallel",
    "dist_init_addr": "coordinator", "nnodes": "num_processes", "node_rank": "process_id",
    "master_addr": "coordinator", "grpc_port": "port", "enable_metrics": "metrics_port",
    "chat_template": Advice("leave it out, it is the checkpoint's own; `python -m serve.openai` takes another"),
    "tool_call_parser": _GATEWAYS, "reasoning_parser": _GATEWAYS, "enable_auto_tool_choice": _GATEWAYS,
}  # fmt: skip
#: The same where all are flags; in a file what speculation has stands below its key.
FLAGS_ELSEWHERE = {**ELSEWHERE, **SPECULATION_FLAGS, **SHORT_FLAGS}
#: A coordinator that JAX finds by itself.
AUTO = "auto"
#: A message larger than this cannot be told to gRPC, whose limits are int32 bytes.
_MAX_MIB = 2047
#: Titles of --help, in its order.
GROUPS = SERVED, WHERE, HOSTS, LIMITS, HEALTH, CALLERS, TOLD = (
    "what is served", "where", "several processes", "limits of requests", "health and shutdown", "who may call",
    "what is told",
)  # fmt: skip


def _flag(default: Any, group: str, low: float | None = None, high: float | None = None) -> Any:
    """A field that is a flag of its name: where --help lists it, and the least and the largest value of a number."""
    bounds = None if low is None else (low, high)
    return dataclasses.field(default=default, metadata={"group": group, "bounds": bounds})


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Everything a server is started with.

    Attributes:
      model: "demo", a Hugging Face directory or a hub id.
      served_model_name: the name that clients and metrics see; None: the last part of `model`.
      host: address to listen on; the default is reached from this machine alone, 0.0.0.0 and :: from everywhere.
      port: of gRPC; 0 picks a free one.
      metrics_port: of HTTP (GET /metrics for Prometheus, /health and /ready for probes); 0 picks a free one, None
        serves none.
      coordinator: "host:port" of the first of several processes that share one engine, the same in all of them; "auto":
        as JAX finds it (SLURM, TPU pods, Open MPI), with the two fields below. The first process takes the requests.
      num_processes: how many they are, one a host as a rule; tensor_parallel counts the devices of all.
      process_id: which of them this is; 0 is the first.
      drafter: a kind's name (see jaxspec.drafters.registry), or the directory of a drafter's checkpoint; None: an
        EAGLE-3 head where one lies beside the model, else prompt look-up.
      speculation: a SpeculationConfig.
      engine: an EngineConfig; one that is made from a file or from flags has structured_output and keep_learnt on
        unless they say else.
      max_waiting: requests that may queue; the next one is refused with RESOURCE_EXHAUSTED.
      max_waiting_pages: KV pages that queued requests may come to need, one without max_tokens for its prompt alone;
        None: so many that max_waiting requests of a quarter of the context pass (with the default pool) and longer
        ones are refused earlier, but never less than four times the pool.
      queue_seconds: longest wait for a slot, in seconds.
      run_seconds: longest life of a request, its wait included, in seconds.
      max_priority: requests may ask for priorities from its negative (sooner) to it (later); others are refused. A step
        is worth 10 seconds of waiting, so an ordinary request waits at most 10 * max_priority seconds longer for all
        that ask to be sooner; above queue_seconds it could time out for them.
      stall_seconds: how long a client may leave output unread, in seconds.
      watchdog_seconds: a step of the engine longer than this turns health to NOT_SERVING until it ends, in seconds; one
        three times as long turns the health service "liveness" to NOT_SERVING too.
      withdrawal_seconds: how long a draining server still accepts requests, so that load balancers notice, in seconds.
      drain_seconds: how long a draining server lets requests finish, in seconds.
      max_output_tokens: max_tokens of requests that name none; None: what the context leaves.
      stream_interval_ms: least time between two messages of a stream, in milliseconds; 0: a message a round; None: the
        same until all streams together would make more than 3,000 a second, which then share those.
      max_message_mib: largest message either way, in MiB.
      tls_cert: PEM file with the server's certificate chain; needs tls_key.
      tls_key: PEM file with its private key.
      tls_client_ca: PEM file with the authorities of clients; given, every client must show a certificate.
      auth_token_file: file with one token a line; given, calls need "authorization: Bearer <token>", health excepted.
      admin_token_file: file with one token a line; given, calls that change the server (Drain, FlushCache,
        SetSpeculation, UpdateDrafter) need one of them (which stands for one of auth_token_file too) wherever they come
        from; else they are taken from this host alone.
      reflection: serve grpc.reflection, so that tools can list the services.
      kv_events: tell subscribers what the prefix cache holds (SubscribeKvEvents), for cache-aware routing; every client
        that may call can then read the token ids of all cached prompts.
      log_level: "debug", "info", "warning" or "error".
      log_format: "json" (a JSON object a line) or "text".
      log_prompts: write prompts and outputs into the log. They are your users' text.
      otlp_endpoint: OpenTelemetry collector (gRPC, e.g. "http://localhost:4317") that receives a span a request; needs
        the extra "otel".

    Raises:
      ValueError: names the field, what was given and what is allowed.
    """

    model: str = _flag("demo", SERVED)
    served_model_name: str | None = _flag(None, SERVED)
    host: str = _flag("127.0.0.1", WHERE)
    port: int = _flag(50051, WHERE, 0, 65535)
    metrics_port: int | None = _flag(9400, WHERE, 0, 65535)
    coordinator: str | None = _flag(None, HOSTS)
    num_processes: int | None = _flag(None, HOSTS, 1, 2**16 - 1)
    process_id: int | None = _flag(None, HOSTS, 0, 2**16 - 1)
    drafter: str | None = _flag(None, SERVED)
    speculation: SpeculationConfig = dataclasses.field(default_factory=SpeculationConfig)
    engine: EngineConfig = dataclasses.field(default_factory=lambda: EngineConfig(**PART_DEFAULTS["engine"]))
    max_waiting: int = _flag(256, LIMITS, 1, 2**20)
    max_waiting_pages: int | None = _flag(None, LIMITS, 1, 2**31)
    queue_seconds: float = _flag(60.0, LIMITS, 0.001, 1e9)
    run_seconds: float = _flag(600.0, LIMITS, 0.001, 1e9)
    max_priority: int = _flag(5, LIMITS, 0, MAX_PRIORITY)
    stall_seconds: float = _flag(60.0, LIMITS, 0.001, 1e9)
    watchdog_seconds: float = _flag(60.0, HEALTH, 0.001, 1e9)
    withdrawal_seconds: float = _flag(5.0, HEALTH, 0, 1e9)
    drain_seconds: float = _flag(60.0, HEALTH, 0, 1e9)
    max_output_tokens: int | None = _flag(None, LIMITS, 1, 2**31 - 1)
    stream_interval_ms: float | None = _flag(None, LIMITS, 0, 60_000)
    max_message_mib: int = _flag(16, WHERE, 1, _MAX_MIB)
    tls_cert: str | None = _flag(None, CALLERS)
    tls_key: str | None = _flag(None, CALLERS)
    tls_client_ca: str | None = _flag(None, CALLERS)
    auth_token_file: str | None = _flag(None, CALLERS)
    admin_token_file: str | None = _flag(None, CALLERS)
    reflection: bool = _flag(False, WHERE)
    kv_events: bool = _flag(False, WHERE)
    log_level: Literal["debug", "info", "warning", "error"] = _flag("info", TOLD)
    log_format: Literal["json", "text"] = _flag("json", TOLD)
    log_prompts: bool = _flag(False, TOLD)
    otlp_endpoint: str | None = _flag(None, TOLD)

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():
            value = getattr(self, name)
            if name in PARTS:
                if not isinstance(value, PARTS[name]):
                    raise ValueError(f"{name} must be a {PARTS[name].__name__}, got {value!r}")
                continue
            object.__setattr__(self, name, _checked(name, str(value) if isinstance(value, Path) else value, kind))
        if self.otlp_endpoint is not None and not re.match(r"https?://[^/]", self.otlp_endpoint):
            raise ValueError(f"otlp_endpoint must begin with http:// or https://, got {self.otlp_endpoint!r}")
        for field in dataclasses.fields(self):
            value, bounds = getattr(self, field.name), field.metadata.get("bounds")
            if value == "":
                hint = "; leave it out instead" if field.default is None else ""
                raise ValueError(f"{field.name} must not be empty{hint}, got ''")
            if bounds is not None and value is not None and not bounds[0] <= value <= bounds[1]:
                raise ValueError(f"{field.name} must lie in [{bounds[0]:g}, {bounds[1]:g}], got {value!r}")
        check_host("host", "port", self.host)
        if self.port and self.port == self.metrics_port:
            raise ValueError(f"port and metrics_port must differ, got {self.port} for both")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(
                f"tls_cert and tls_key must be given together, got tls_cert {self.tls_cert!r}, tls_key {self.tls_key!r}"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(f"tls_client_ca {self.tls_client_ca!r} needs tls_cert and tls_key, got neither")

        self._check_processes()

    def _check_processes(self) -> None:
        given = f"coordinator {self.coordinator!r}, num_processes {self.num_processes}, process_id {self.process_id}"
        if self.coordinator in (None, AUTO):
            if self.num_processes is not None or self.process_id is not None:
                raise ValueError(f"num_processes and process_id need a coordinator 'host:port', got {given}")
            return
        if self.num_processes is None or self.process_id is None or self.process_id >= self.num_processes:
            raise ValueError(f"coordinator needs num_processes and a process_id below that, got {given}")
        if not re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]]+):\d+", self.coordinator):
            raise ValueError(f"coordinator must be 'host:port' or 'auto', got {self.coordinator!r}")
        if self.engine.tensor_parallel % self.num_processes:
            raise ValueError(
                f"num_processes must divide tensor_parallel {self.engine.tensor_parallel}, got {self.num_processes}"
            )

    @property
    def served_name(self) -> str:
        """The model's name as clients and metrics see it."""
        return self.served_model_name or Path(self.model).name or self.model

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ServerConfig:
        """From plain data, as a file holds it: `speculation` and `engine` are mappings, lists stand for tuples, and
        tiers are written by name ("off", "chain-3", "tree-4x3/16").

        Raises:
          ValueError: an unknown key or a wrong value, by its full name ("engine.page_size").
        """
        known = {f.name for f in dataclasses.fields(cls)}
        _refuse_unknown("", values, known)
        built = dict(values)
        for name, part in PARTS.items():
            if name in built and not isinstance(built[name], part):
                built[name] = _part(name, part, built[name], PART_DEFAULTS[name])
        return cls(**built)

    def to_yaml(self) -> str:
        """Every field with its resolved value, as `read_file` reads it back."""
        return yaml.dump(_plain(self), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_file(path: str | Path) -> dict[str, Any]:
    """The plain data of a configuration file: JSON where the name ends in .json, else YAML.

    Raises:
      ValueError: unreadable, not a mapping, or a key given twice; names the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"cannot read the configuration file {path}: {e}") from e
    try:
        if Path(path).suffix == ".json":
            values = json.loads(text, object_pairs_hook=_distinct)
        else:
            values = yaml.load(text, _Loader)  # a SafeLoader
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as e:
        raise ValueError(f"{path}: {' '.join(str(e).split())}") from e
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of fields to values, got {type(values).__name__}")
    return values


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of a file with `over` on top; `speculation` and `engine` are merged field by field."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        if name in PARTS and isinstance(below, Mapping) and isinstance(value, Mapping):
            value = {**below, **value}
        result[name] = value
    return result


def descriptions(owner: type[Any]) -> dict[str, str]:
    """What each field of a configuration means, from the Attributes section of its docstring."""
    section = re.search(r"Attributes:\n(.*?)(?:\n\s*\n|\Z)", owner.__doc__ or "", re.DOTALL)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.group(1).splitlines() if section else ():
        entry = re.match(r" {6}(\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry.group(1).split(", ")
            found |= dict.fromkeys(names, entry.group(2).strip())
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def field_types(owner: type[Any]) -> dict[str, Any]:
    """The resolved type of each field of a configuration."""
    hints = typing.get_type_hints(owner)
    return {f.name: hints[f.name] for f in dataclasses.fields(owner)}


class _Loader(yaml.SafeLoader):
    """YAML whose words, numbers and dates are those of version 1.2, as JSON's are, and keys are given once.

    In 1.1 `policy: off` is no word, 1:30 is 90 and 1e3 no number. What begins with a zero that counts for nothing is a
    text, as the versions take 010000 for different numbers.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        return _distinct(
            [(self.construct_object(k, deep=True), self.construct_object(v, deep=True)) for k, v in node.value]
        )


class _Dumper(yaml.SafeDumper):
    """Quotes what either version would take for something else than a text."""


#: Texts that are no texts, by their tags and the characters that they begin with.
_PLAIN = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
_OTHERS = {"tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _OTHERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, (_pattern, _firsts) in _PLAIN.items():
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_firsts))


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice: {found[key]!r} and {value!r}")
        found[key] = value
    return found


def _refuse_unknown(prefix: str, values: Mapping[str, Any], known: set[str]) -> None:
    for name, value in values.items():
        if name not in known:
            # A flag has no part in front: what it says stands one level deeper in a file.
            parts = {} if prefix else {f.name: part for part in PARTS for f in dataclasses.fields(PARTS[part])}
            here = ELSEWHERE.get(name, name)
            below = {name: f"{parts[here]}: {{{here}: ...}}"} if here in parts else ELSEWHERE
            hint = hints([str(name)], {*known, *parts}, below)
            raise ValueError(f"unknown key {prefix}{name} (with the value {value!r}){hint}; known are {sorted(known)}")


def _part(name: str, owner: type[Any], values: Any, defaults: Mapping[str, Any]) -> Any:
    """A SpeculationConfig or EngineConfig from a mapping, over the server's defaults."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} must be a mapping with fields of {owner.__name__}, got {values!r}")
    _refuse_unknown(f"{name}.", values, {f.name for f in dataclasses.fields(owner)})
    values = {**defaults, **values}
    built = {field: tuple(value) if isinstance(value, list) else value for field, value in values.items()}
    if isinstance(built.get("tiers"), tuple):
        built["tiers"] = tuple(t if isinstance(t, Tier) else parse_tier(str(t)) for t in built["tiers"])
    try:
        return owner(**built)
    except (ValueError, TypeError) as e:
        raise ValueError(f"{name}: {e}") from e


def check_host(name: str, port: str, host: str) -> None:
    """Refuses an address with what does not belong to it.

    Args:
      name: of the setting. port: of the one that the port goes to.

    Raises:
      ValueError: a port stands behind it, or a scheme before.
    """
    found = re.fullmatch(r"(?:\w+://)?(\[[^\[\]]*\]|[^:\[\]/]*)(?::(\d*))?/?", host)
    if found is not None and found[1] != host:
        told = f"{name} {found[1] or '0.0.0.0'}" + (f" and {port} {found[2]}" if found[2] else "")
        raise ValueError(f"{name} must be an address alone, as the port is {port}'s, got {host!r}; say {told}")


def _checked(name: str, value: Any, kind: Any) -> Any:
    """A value of the type that a field of ServerConfig declares; an int stands for a float."""
    if typing.get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise ValueError(f"{name} must be one of {get_args(kind)}, got {value!r}")
        return value
    optional = isinstance(kind, types.UnionType)
    if value is None and optional:
        return None
    wanted = get_args(kind)[0] if optional else kind
    if wanted is float:
        right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    else:
        right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if not right:
        words = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
        raise ValueError(f"{name} must be {words[wanted]}{' or null' if optional else ''}, got {value!r}")
    return float(value or 0) if wanted is float else value


def _plain(value: Any) -> Any:
    """A configuration as YAML and JSON can hold it."""
    if isinstance(value, Tier | Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value
