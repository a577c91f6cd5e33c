"""What the command lines share: how they end, help that shows defaults, and flags that are none.

Standard library only. Must not know what a command does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType
from typing import NoReturn

from jaxspec.names import Advice, hints, nearest, refuse_dtype

#: Exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130
#: Seconds that Python has to take a Ctrl-C before the process is ended from beside it.
PATIENCE = 1.0
#: How argparse says that something is too much, and that something lacks.
_UNKNOWN, _REQUIRED = "unrecognized arguments", "the following arguments are required"


class Help(argparse.HelpFormatter):
    """Help in which every flag shows its default. One whose default is None says in its text what that means."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        optional = bool(action.option_strings) and not action.required
        if not optional or "default" in text or default is None or default is argparse.SUPPRESS:
            return text
        if default is False:
            shown = "off"
        elif isinstance(default, list | tuple):
            shown = " ".join(map(str, default)) or "none"
        else:
            shown = "%(default)s"
        return f"{text} (default: {shown})"


def parse(
    p: argparse.ArgumentParser, argv: Sequence[str] | None, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> argparse.Namespace:
    """As `p.parse_args`, but who gives a flag that is none is told the one that was probably meant.

    What is wrong is told in one line, by `p.error` from then on too, instead of behind all that there is. A flag is
    given whole: what other projects call a setting may be the beginning of a flag for something else.

    Args:
      elsewhere: what other projects' settings are called here, as names of arguments, separated by commas; short flags
        with their dash.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    for each in (p, *_commands(p).values()):
        each.allow_abbrev = False
        tell_in_a_line(each, given, elsewhere)
    args, left = p.parse_known_args(given)
    if left:
        own = next((sub for name, sub in _commands(p).items() if name in vars(args).values()), p)
        lone = not left[0].startswith("-") and "--model" in own._option_string_actions
        own.error(f"{_UNKNOWN}: {' '.join(left)}" + "; a model is given as '--model'" * lone)
    return args


def tell_in_a_line(
    p: argparse.ArgumentParser, given: Sequence[str] = (), elsewhere: Mapping[str, str] = MappingProxyType({})
) -> None:
    """From then on `p.error` says what is wrong in one line, and ends with status 2."""
    p.error = functools.partial(_refuse, p, given, elsewhere)


def _refuse(p: argparse.ArgumentParser, given: Sequence[str], elsewhere: Mapping[str, str], message: str) -> NoReturn:
    """What lacks, or is too much, may have been given by another name."""
    if message.startswith((_UNKNOWN, _REQUIRED)):
        known = p._option_string_actions
        words = [word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", given)]
        unknown = dict.fromkeys(word for word in words if word.startswith("-") and word not in known)
        names = {_flag(name): here for name, here in elsewhere.items()}
        flags = {name: [_flag(one) for one in here.split(",")] for name, here in names.items()}
        meant = {name: ", ".join(here) for name, here in flags.items() if {*here} <= {*known}}
        meant |= {name: here for name, here in names.items() if isinstance(here, Advice) or not here}
        message += hints([word for word in unknown if word.startswith("--") or word in meant], sorted(known), meant)
    p.exit(2, f"{p.prog}: error: {message} (see --help)\n")


def dtype(text: str) -> str:
    """The type of an argument that is one of DTYPES."""
    try:
        refuse_dtype("it", text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return text


def tell_commands(name: str, modules: Sequence[str], argv: Sequence[str]) -> int:
    """For a module that runs nothing itself: prints its commands, or refuses arguments; returns the exit status.

    What a command does is what the first line of its file says. Nothing is imported for it; modules that are no
    commands, or not installed, are left out.
    """
    lines = {module: line for module in modules if (line := _first_line(module))}
    if argv and argv[0] not in ("-h", "--help"):
        meant = f"{name}.{nearest(argv[0], [module.removeprefix(f'{name}.') for module in lines])}"
        hint = f"say python -m {meant}" if meant in lines else "without arguments it lists commands"
        print(f"python -m {name}: error: it runs none itself, got {argv[0]!r}; {hint}", file=sys.stderr)
        return 2
    width = max(map(len, lines))
    print("\n".join(f"python -m {module:<{width}}  {line}" for module, line in lines.items()))
    return 0


def _first_line(module: str) -> str:
    """What the file of a command says first, behind the command; "" where there is none."""
    package, _, rest = module.partition(".")
    found = importlib.util.find_spec(package)
    for root in (found and found.submodule_search_locations) or ():
        path = Path(root, *rest.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py"):
            if file.is_file():
                command, _, line = file.read_text(encoding="utf-8").partition("\n")[0].partition(": ")
                return line.rstrip('".') if command.startswith(f'"""python -m {module}') else ""
    return ""


def _commands(p: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's own commands, by name."""
    found = [action.choices for action in p._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def _flag(name: str) -> str:
    return name if name.startswith("-") else "--" + name.strip().replace("_", "-")


@contextlib.contextmanager
def quick_interrupts() -> Iterator[None]:
    """Within it Ctrl-C ends the process within a second or two, whatever the main thread does.

    Python takes a signal between two of the main thread's own instructions, and a compilation is a single call of
    minutes. Where it has not taken it after PATIENCE, another thread says so in a line and ends the process. For what
    leaves nothing to be cleared up, such as building an engine.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    taken = threading.Event()

    def take(signum: int, frame: FrameType | None) -> None:
        taken.set()
        raise KeyboardInterrupt

    def watch() -> None:
        with reader:
            while number := reader.recv(1):
                if number[0] == signal.SIGINT and not taken.wait(PATIENCE):
                    say_interrupted()
                    os._exit(INTERRUPTED)

    handler = signal.signal(signal.SIGINT, take)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="interrupts", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, handler)
        writer.close()


@contextlib.contextmanager
def starting(module: str) -> Iterator[None]:
    """Around a command's imports, and what else comes before anything has to be cleared up: Ctrl-C ends it at once.

    From then on one line says so where JAX finds no device, instead of a traceback.

    Args:
      module: whose they are, by its `__name__`; nothing happens where it is not the command.
    """
    if module != "__main__":
        yield
        return
    sys.excepthook = _say_uncaught
    handler = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _say_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    frames = traceback.extract_tb(trace)
    # Where JAX looks for devices: of what it is told to use it found none, which it says by several exceptions.
    if issubclass(kind, Exception) and frames and frames[-1].filename.endswith("xla_bridge.py"):
        why = str(error) or "no such device, or no plugin for it, is installed"
        print(f"error: JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')!r}: {why}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    # An exception would pass through whatever is half imported, and be told as something else or not at all.
    say_interrupted()
    os._exit(INTERRUPTED)


def say_interrupted(what: str = "interrupted") -> None:
    """One line on standard error, below the ^C of a terminal."""
    print(f"\n{what}" if sys.stderr.isatty() else what, file=sys.stderr, flush=True)


def run(main: Callable[[], int], *, at_once: bool = False) -> NoReturn:
    """Ends the process with what `main` returns, or quietly and soon after Ctrl-C.

    Args:
      at_once: see `leave`.
    """
    try:
        status = main()
    except KeyboardInterrupt:
        say_interrupted()
        status = INTERRUPTED
    leave(status, at_once=at_once)


def leave(status: int, *, at_once: bool = False) -> NoReturn:
    """Ends the process, at once where executables are still being compiled: nobody waits for them.

    Args:
      at_once: anyhow: nothing is left to be written, and Python and JAX would clear up for most of a second.
    """
    if status == INTERRUPTED:  # the key pressed again changes nothing
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    if at_once or any(thread.name.startswith("warm-up") for thread in threading.enumerate()):
        os._exit(status)
    sys.exit(status)
