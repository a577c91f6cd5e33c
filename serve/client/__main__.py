"""python -m serve.client "prompt": streams a completion from a server to standard output."""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import grpc

from serve.client import Client, Delta, Finished, Options, Prompt, PromptInfo, ServerError, misfits, names

#: What a shell expects of a command that Ctrl-C ended.
_INTERRUPTED = 130
_MAX_PORT = 65535
#: Seconds between two looks at a server that is starting.
_LOOK_SECONDS = 0.5
#: How long nobody may answer: a server's process takes a few seconds before it listens.
_LISTEN_SECONDS = 10.0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m serve.client", description=__doc__)
    p.add_argument("prompt", help="the text to complete; - reads standard input")
    server = p.add_argument_group("server")
    server.add_argument("--target", default="localhost:50051", metavar="HOST:PORT", help="default: %(default)s")
    server.add_argument("--token-file", metavar="FILE", help="send the first line of this file as bearer token")
    server.add_argument("--tls", action="store_true", help="encrypt, checked against the system's authorities")
    server.add_argument("--tls-ca", metavar="PEM", help="encrypt, checked against these authorities")
    server.add_argument("--tls-cert", metavar="PEM", help="the client's own certificate; needs --tls-key")
    server.add_argument("--tls-key", metavar="PEM", help="its private key")
    server.add_argument("--timeout", type=float, metavar="SECONDS", help="deadline of the request (default: none)")
    server.add_argument("--retries", type=int, default=0, metavar="N", help="tries after 'full' (default: %(default)s)")
    server.add_argument(
        "--no-wait", action="store_true", help="an error, where no server listens or it is still starting"
    )
    how = p.add_argument_group("request", "what shows no default here is left to the server, when left out")
    how.add_argument("--chat", action="store_true", help="the prompt is a user's message of a conversation")
    how.add_argument("--system", metavar="TEXT", help="with --chat: the system's message before it")
    how.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="most tokens to generate (default: %(default)s)"
    )
    how.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest (default: 0)")
    how.add_argument("--top-p", type=float, metavar="P", help="mass of the nucleus, (0, 1]")
    how.add_argument("--top-k", type=int, metavar="K", help="candidates kept; 0: all")
    how.add_argument("--seed", type=int, metavar="N", help="same seed, same output")
    how.add_argument("--stop", action="append", metavar="TEXT", help="ends the text; may be repeated")
    how.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end of sequence")
    how.add_argument("--priority", type=int, metavar="N", help="lower runs first, by default -5 to 5")
    how.add_argument("--route", metavar="LABEL", help="label for the server's metrics")
    how.add_argument(
        "--no-speculation", dest="speculation", action="store_false", default=None, help="decode token by token"
    )
    how.add_argument("--max-depth", type=int, metavar="N", help="most draft tokens accepted in a round")
    form = how.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="JSON", help="the output fits this schema, or the one in this file")
    form.add_argument(
        "--json", dest="json_object", action="store_true", default=None, help="the output is a JSON object"
    )
    form.add_argument("--regex", metavar="REGEX", help="the output matches it")
    form.add_argument("--choice", action="append", metavar="TEXT", help="the output is one of them; repeat it")
    p.add_argument("--stats", action="store_true", help="tokens, times and accepted length, on standard error")
    return p


def _request(args: argparse.Namespace) -> tuple[Prompt, Options]:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    given = {name: value for name, value in vars(args).items() if name in Options.__annotations__ and value is not None}
    schema = given.get("json_schema", "{")
    if not schema.lstrip().startswith("{"):
        given["json_schema"] = _text(schema.removeprefix("@"))
    options = cast(Options, given)
    if not args.chat:
        return text, options
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}], options


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from e


def summary(info: PromptInfo, end: Finished) -> str:
    """Tokens, times and what drafting did, on one line."""
    usage, drafts = end.usage, end.speculation
    line = (
        f"{info.request_id}: {usage.prompt_tokens} + {usage.completion_tokens} tokens "
        f"({usage.cached_prompt_tokens} cached), {end.reason}, first after {usage.ttft_seconds * 1e3:.0f} ms"
    )
    if usage.completion_tokens > 1:
        line += f", then {usage.decode_seconds * 1e3 / (usage.completion_tokens - 1):.1f} ms a token"
    if drafts.num_spec_steps:
        tiers = ", ".join(f"{name} {count}" for name, count in sorted(drafts.tier_rounds.items(), key=lambda t: -t[1]))
        line += f"; {drafts.mean_acceptance_length:.2f} tokens a round; rounds by tier: {tiers}"
    return f"{line}; seed {info.seed}"


def run(
    client: Client, prompt: Prompt, options: Options, *, timeout: float | None, stats: bool, out: TextIO,
    begun: threading.Event,
) -> None:  # fmt: skip
    """Streams the completion to `out`.

    Args:
      begun: is set before anything is written.
    """
    info: PromptInfo | None = None
    for event in client.stream(prompt, timeout=timeout, **options):
        match event:
            case PromptInfo():
                info = event
            case Delta(text=text):
                begun.set()
                out.write(text)
                out.flush()
            case Finished():
                out.write("\n")
                out.flush()
                if stats and info is not None:
                    print(summary(info, event), file=sys.stderr)


def wait_until_started(client: Client, target: str, timeout: float | None) -> bool:
    """Tells on standard error how far a server is that is starting, until it is not; whether it has started.

    Args:
      timeout: most seconds to wait; None: as long as it takes, of which _LISTEN_SECONDS for somebody to listen.
    """
    began, told, waiting = time.monotonic(), "", True
    while waiting and (timeout is None or time.monotonic() < began + timeout):
        try:
            info = client.server_info(timeout=10.0)
        except ServerError as e:
            if not e.unreachable or time.monotonic() > began + _LISTEN_SECONDS:
                break  # it is gone, or does not tell
            line = f"nobody answers at {target} yet"
        else:
            waiting = info.state == "starting"
            line = "the server is starting"
            if info.executables:
                count = f"{info.executables_ready} of {info.executables}"
                line += f": {count} executables, the first few of which it waits for"
        if waiting and line != told:
            print(line, file=sys.stderr, flush=True)
            told = line
        if waiting:
            time.sleep(_LOOK_SECONDS)
    return bool(told) and not waiting


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 what the server refused, 2 a wrong command line, 130 Ctrl-C."""
    p = parser()
    args = names.parse(p, argv, names.FLAGS_ELSEWHERE)
    if args.system is not None and not args.chat:
        p.error("--system needs --chat")
    _, colon, port = args.target.rpartition(":")
    wrong = not colon or not port or (port.isdecimal() and int(port) > _MAX_PORT)
    if wrong or args.target.startswith(("http://", "https://")):
        p.error(f"--target must be HOST:PORT, such as {p.get_default('target')}, got {args.target!r}")
    if args.timeout is not None and not args.timeout > 0:
        p.error(f"--timeout must be more than 0 seconds, got {args.timeout:g}")
    begun = threading.Event()
    try:
        connection: dict[str, Any] = {name: getattr(args, name) for name in ("tls", "tls_ca", "tls_cert", "tls_key")}
        if args.token_file is not None:
            connection["token"] = _text(args.token_file).split("\n", 1)[0].strip()
        prompt, options = _request(args)
        with Client(args.target, retries=args.retries, **connection) as client:
            send = functools.partial(run, client, prompt, options, timeout=args.timeout, stats=args.stats,
                                     begun=begun)  # fmt: skip
            try:
                send(out=sys.stdout)
            except ServerError as e:
                # What is written cannot be taken back.
                refused = e.code is grpc.StatusCode.UNAVAILABLE and not begun.is_set()
                encrypts = bool(args.tls or args.tls_ca or args.tls_cert)
                if refused and (misfit := misfits.told(e, args.target, encrypts)):
                    raise ServerError(e.code, misfit) from None
                if not refused or args.no_wait or not wait_until_started(client, args.target, args.timeout):
                    raise
                send(out=sys.stdout)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except ServerError as e:
        hint = "" if e.retry_after is None else f" (try again in {e.retry_after:g} s)"
        if e.unreachable:
            hint = f" (nobody answers at {args.target}; python -m serve starts a server)"
        elif e.code is grpc.StatusCode.UNAVAILABLE and begun.is_set():
            hint = " (the server is gone, and the text breaks off)"
        elif e.code is grpc.StatusCode.UNAVAILABLE and "tls handshake" in e.message.lower():
            hint = " (no TLS there, or a certificate of others; see --tls-ca)"
        elif e.code is grpc.StatusCode.DEADLINE_EXCEEDED and args.timeout is not None:
            hint = f" (--timeout {args.timeout:g} s)"
        # In a terminal the text stands in the same line.
        print("\n" * (begun.is_set() and sys.stderr.isatty()) + f"error: {e}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
