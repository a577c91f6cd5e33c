"""python -m serve: the gRPC generation server of a model, with adaptive speculative decoding."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import types
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args, get_origin

from jaxspec import cli

with cli.starting(__name__):
    import asyncio

    from jaxspec.adaptive import registry as policies
    from jaxspec.drafters import registry
    from jaxspec.tier import Tier
    from serve.config import (
        FLAGS_ELSEWHERE,
        GROUPS,
        PART_DEFAULTS,
        PARTS,
        ServerConfig,
        descriptions,
        field_types,
        merged,
        read_file,
    )

if TYPE_CHECKING:
    from serve.core.engine_process import Child

#: Exit codes: a wrong command line or configuration; anything else that went wrong.
BAD_CONFIG, FAILED = 2, 1
#: Seconds after drain_seconds in which a process that was told to end has ended, also where something hangs.
_LAST_SECONDS = 15.0
#: Names of threads that may still be at work when the server has stopped.
_BUSY = frozenset({"text", "grammar", "grammar-compile"})


def parser() -> argparse.ArgumentParser:
    """Every field of ServerConfig, SpeculationConfig and EngineConfig as a flag of its name."""
    p = argparse.ArgumentParser(prog="python -m serve", description=__doc__, argument_default=argparse.SUPPRESS)
    p.add_argument("--config", metavar="FILE", help="YAML or JSON file with the same fields; flags win over it")
    p.add_argument("--print-config", action="store_true", help="print the resolved configuration as YAML, and exit")
    groups = {title: p.add_argument_group(title) for title in GROUPS}
    for part, owner in {"": ServerConfig, **PARTS}.items():
        own = p.add_argument_group(part, f"in a file: below the key '{part}'") if part else None
        kinds, texts, defaults = field_types(owner), descriptions(owner), PART_DEFAULTS.get(part, {})
        for field in dataclasses.fields(owner):
            if field.name not in PARTS:
                dest = f"{part}.{field.name}" if part else field.name
                default, text = defaults.get(field.name, field.default), texts[field.name]
                for known in (registry, policies):
                    text = text.replace(f"see {known.__name__}", ", ".join(known.names()))
                _add(own or groups[field.metadata["group"]], dest, kinds[field.name], text, default)
    return p


def _add(group: Any, dest: str, kind: Any, text: str, default: Any) -> None:
    flag = "--" + dest.rpartition(".")[2].replace("_", "-")
    shown = "not set" if default is None else ",".join(default) or "none" if isinstance(default, tuple) else default
    text = text.rstrip(".").replace("%", "%%")
    if kind is bool:
        word = "on" if default else "off"
        group.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, help=f"{text} (default: {word})")
    else:
        metavar, read = _reader(kind)
        group.add_argument(flag, dest=dest, metavar=metavar, type=read, help=f"{text} (default: {shown})")


def _reader(kind: Any) -> tuple[str, Callable[[str], Any]]:
    """(what --help calls the value, how it is read) of a field's type."""
    options = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    optional = type(None) in options
    main = next(option for option in options if option is not type(None))
    if bool in options:  # compile_cache
        return "true|false|DIR", lambda text: {"true": True, "false": False}.get(text, text)
    if {int, str} == {*options}:  # rounds_per_dispatch
        return "auto|N", lambda text: int(text) if text.isdecimal() else text
    if get_origin(main) is typing.Literal:
        return "|".join(get_args(main)), str
    if get_origin(main) is tuple:
        item = get_args(main)[0]
        if get_origin(item) is tuple:  # vLLM's schedule
            return "[[N,N,N],...]", _or_none(_lists, optional)
        one = {int: _number(int, "an integer"), float: _number(float, "a number")}.get(item, str)
        metavar = {int: "N,N", float: "X,X", Tier: "TIER,TIER"}.get(item, "NAME,NAME")
        return metavar, _or_none(lambda text: [one(part) for part in _parts(text)], optional)
    if main in (int, float):
        read = _number(main, "an integer" if main is int else "a number")
        return "N" if main is int else "X", _or_none(read, optional)
    return "TEXT", str


def _parts(text: str) -> list[str]:
    """What stands between commas, of which nothing, () and [] have none."""
    inner = text.strip().removeprefix("(").removesuffix(")").removeprefix("[").removesuffix("]")
    return [part.strip() for part in inner.split(",")] if inner.strip() else []


def _lists(text: str) -> list[Any]:
    try:
        rows = json.loads(text)
    except ValueError:
        rows = None
    if not isinstance(rows, list):
        raise argparse.ArgumentTypeError(f"must be lists in JSON, such as [[1,4,5],[5,16,2]], got {text!r}")
    return rows


def _number(kind: type[int] | type[float], what: str) -> Callable[[str], int | float]:
    def read(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}") from None

    return read


def _or_none(read: Callable[[str], Any], optional: bool) -> Callable[[str], Any]:
    """Also takes "none", where a field may be left open: so a flag can take a file's value back."""
    return lambda text: None if optional and text.lower() == "none" else read(text)


def resolve(given: dict[str, Any]) -> ServerConfig:
    """The configuration of parsed flags, over the file that they name.

    Raises:
      ValueError: names the field, what was given and what is allowed.
    """
    path = given.pop("config", None)
    flags: dict[str, Any] = {name: {} for name in PARTS}
    for dest, value in given.items():
        part, dot, field = dest.partition(".")
        (flags[part] if dot else flags)[field if dot else dest] = value
    flags = {name: value for name, value in flags.items() if name not in PARTS or value}
    if path is None:
        return ServerConfig.of(flags)
    try:
        return ServerConfig.of(merged(read_file(path), flags))
    except ValueError as e:
        raise ValueError(str(e) if str(path) in str(e) else f"{path}: {e}") from e


async def serve(config: ServerConfig, child: Child | None = None) -> int:
    """Runs a server until it is told to end; returns the exit code.

    Args:
      child: see Server.
    """
    from serve.app import Server
    from serve.core.errors import StatusError
    from serve.ports import PortError

    server = Server(config, child=child)
    began = time.monotonic()
    try:
        await server.start()
    except (ValueError, PortError) as e:
        return _fail(str(e), BAD_CONFIG if isinstance(e, ValueError) else FAILED)
    signals: list[int] = []
    # Whatever may hang on the way: an orchestrator would send SIGKILL, and count a failure.
    last = threading.Timer(config.drain_seconds + _LAST_SECONDS, lambda: os._exit(128 + signals[0]))
    last.daemon = True

    def on_signal(number: int) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(128 + number)
        last.start()
        server.begin_drain()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    metrics = "" if server.metrics_port is None else f", metrics on {config.host}:{server.metrics_port}"
    print(f"listening on {config.host}:{server.port}{metrics}", flush=True)
    try:
        try:
            await server.ready()
            print(f"serving {config.served_name} after {time.monotonic() - began:.1f} s", flush=True)
        except StatusError:
            pass  # dead, or told to end before it was ready: `wait` and `error` say which
        await server.wait()
    finally:
        last.cancel()
    if server.error is not None:
        what = "the model could not be loaded" if server.engine.facts is None else "the engine died"
        return _fail(f"{what}: {server.error}", FAILED)
    return 0


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    p = parser()
    given = vars(cli.parse(p, argv, FLAGS_ELSEWHERE))
    print_config = given.pop("print_config", False)
    try:
        config = resolve(given)
    except ValueError as e:
        return _fail(str(e), BAD_CONFIG)
    if print_config:
        print(config.to_yaml(), end="")
        return 0
    with cli.starting(__name__):
        from serve.core.engine_process import Child
        from serve.ports import PortError, check_port
        from serve.telemetry import logs

        logs.configure(config.log_level, config.log_format, log_prompts=config.log_prompts)
        if config.coordinator is not None:
            from serve.app import place_of

            try:
                place = place_of(config)
            except ValueError as e:
                return _fail(str(e), BAD_CONFIG)
            if place is not None and place.process_id:
                from serve.follower import follow

                code = follow(config, place)
                sys.stdout.flush()
                logging.shutdown()
                os._exit(code)  # what it lost may still hold threads of XLA and of JAX's own service
        try:  # as the server does, which takes seconds to import
            check_port("port", config.host, config.port)
        except PortError as e:
            return _fail(str(e), FAILED)
        child = Child("serve.app")  # what takes it long to import takes this process as long
        try:
            importlib.import_module("serve.app")  # within the event loop Ctrl-C would wait for it
            # It listens to signals itself from when there is something to drain.
            return asyncio.run(serve(config, child))
        finally:
            child.end()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if any(thread.name in _BUSY for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(code)  # it still compiles or tokenizes, and would be torn down under its feet
    sys.exit(code)
