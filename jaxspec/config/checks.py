"""Checks of settings; every message names the field, the value given and the values allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def integer(owner: str, name: str, value: Any, low: int, high: int | None = None) -> None:
    bounds = f"an int of at least {low}" if high is None else f"an int in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{owner}.{name} must be {bounds}, got {value!r}")


def fraction(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{owner}.{name} must be a number in (0, 1], got {value!r}")


def budget(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{owner}.{name} must be a positive number of tokens a request, got {value!r}")


def items(owner: str, name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{owner}.{name} must be a tuple or list, got {value!r}")
    return tuple(value)
