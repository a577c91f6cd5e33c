"""What is said of an argument that nobody has: which one was meant.

Standard library only; every other part of jaxspec may import this.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

#: How alike two names are at least of which one was meant: below it, they share little more than an ending.
_ALIKE = 0.7
#: Letters from which on the beginning of a name means it.
_BEGINNING = 3


#: What engines compute in.
DTYPES = ("float32", "bfloat16")
_DTYPES_ELSEWHERE = {
    **dict.fromkeys(("float16", "half", "fp16", "f16"), "'bfloat16', which takes as much memory, or 'float32'"),
    "bf16": "'bfloat16'", "float": "'float32'", "fp32": "'float32'", "f32": "'float32'",
    "auto": "nothing: that is the default, by the device",
}  # fmt: skip


class Advice(str):
    """What to do about a setting of other projects for which there is no name here, as the end of a sentence."""

    __slots__ = ()


def hints(unknown: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]) -> str:
    """What was probably meant, as the end of a message; "" where nothing is alike.

    Args:
      elsewhere: what other projects' names are called here; Advice where there is no such thing, "" where there is
        nothing to say about it. Others are told what is spelt alike.
    """
    meant = {name: elsewhere[name] if name in elsewhere else nearest(name, known) for name in unknown}
    told = lambda name, here: f"; {name!r}: {here}" if isinstance(here, Advice) else f"; for {name!r} say {here!r}"
    return "".join(told(name, here) for name, here in meant.items() if here)


def nearest(name: str, known: Iterable[str]) -> str:
    """The name that is spelt most alike, of equals the one that begins most alike; "" where none is.

    Where none is spelt alike it is one that begins with all of `name`. A flag's dashes count for nothing.
    """
    dashes = name[: len(name) - len(name.lstrip("-"))]
    bare, name = [one.removeprefix(dashes) for one in known], name.removeprefix(dashes)
    close = get_close_matches(name, bare, 3, _ALIKE)
    close = close or [one for one in bare if len(name) >= _BEGINNING and one.startswith(name)]
    alike = lambda one: sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, one, strict=False))
    )
    best = max(close, key=lambda one: (SequenceMatcher(None, name, one).ratio(), alike(one)), default="")
    return best and dashes + best


def refuse_dtype(owner: str, given: object, *, none: bool = False) -> None:
    """Nothing where it is one of DTYPES, or None and that is one too.

    Raises:
      ValueError: names what there is, and what stands for what others compute in.
    """
    known = [*DTYPES, *([None] if none else [])]
    if given in known:
        return
    # A dtype of torch or NumPy is written behind its library.
    name = str(getattr(given, "__name__", given)).lower().rpartition(".")[2]
    here = repr(name) if name in DTYPES else _DTYPES_ELSEWHERE.get(name)
    hint = f"; say {here}" if here else ""
    raise ValueError(f"{owner} must be one of {known}, got {given!r}{hint}")


def refuse_unknown(owner: str, given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]) -> None:
    """Nothing where all that is given is known.

    Args:
      owner: what they are given to, and whose the known ones are.
      elsewhere: see `hints`.

    Raises:
      ValueError: names what is not known, what was probably meant, and what there is.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        hint = hints(unknown, known, elsewhere)
        raise ValueError(f"{owner} got unknown arguments {unknown}{hint}; it has {sorted(known)}")


def tells_arguments(elsewhere: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a method refuse arguments that it does not have as `refuse_unknown` does.

    Args:
      elsewhere: see `hints`. An argument called the same there is told with the value that was given.
    """

    def decorate(called: Callable[P, T]) -> Callable[P, T]:
        _, *known = inspect.signature(called).parameters

        @functools.wraps(called)
        def call(*args: P.args, **named: P.kwargs) -> T:
            if not named.keys() <= set(known):
                same = {name: here.replace(f"{name}=...", f"{name}={named[name]!r}")
                        for name, here in elsewhere.items() if name in named and f"{name}=..." in here}  # fmt: skip
                refuse_unknown(called.__qualname__, named, known, {**elsewhere, **same})
            return called(*args, **named)

        return call

    return decorate


def tells_names(elsewhere: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Makes a dataclass refuse arguments that it does not have as `refuse_unknown` does."""

    def decorate(cls: type[T]) -> type[T]:
        made: Callable[..., None] = cls.__init__
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # pyright: ignore[reportArgumentType]

        @functools.wraps(made)
        def init(self: T, *args: Any, **named: Any) -> None:
            if not named.keys() <= set(known):
                refuse_unknown(cls.__name__, named, known, elsewhere)
            made(self, *args, **named)

        cls.__init__ = init  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate
