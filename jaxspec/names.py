"""What is said of an argument that nobody has: which one was meant.

Standard library only; every other part of jaxspec may import this.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")


def hints(unknown: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]) -> str:
    """What was probably meant, as the end of a message; "" where nothing is alike.

    Args:
      elsewhere: what other projects' names are called here, "" where there is no such thing; others are told what is
        spelt alike.
    """
    meant = {name: elsewhere[name] if name in elsewhere else nearest(name, known) for name in unknown}
    return "".join(f"; for {name!r} say {here!r}" for name, here in meant.items() if here)


def nearest(name: str, known: Iterable[str]) -> str:
    """The name that is spelt most alike, of equals the one that begins most alike; "" where none is."""
    close = get_close_matches(name, list(known), 3)
    alike = lambda one: sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, one, strict=False))
    )
    return max(close, key=lambda one: (SequenceMatcher(None, name, one).ratio(), alike(one)), default="")


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
