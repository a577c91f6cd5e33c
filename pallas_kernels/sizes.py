"""Roundings and facts about devices that kernels choose their sizes by."""

from __future__ import annotations

import jax

#: Streaming multiprocessors by the chip's name within jax's device_kind.
MULTIPROCESSORS = {"gb200": 148, "b200": 148, "h200": 132, "h100": 132, "a100": 108, "l4": 58}

#: Most bytes that weights of few bits are expanded to at a time.
EXPANDED = 256 << 20


def round_up(x: int, multiple: int) -> int:
    """The least multiple that is at least x."""
    return -(-x // multiple) * multiple


def power_of_two(x: int) -> int:
    """The least power of two that is at least x."""
    return 1 << (x - 1).bit_length()


def expanded_shares(d_in: int, d_out: int, itemsize: int) -> int:
    """The least number of equal shares of a kernel's outputs that take at most EXPANDED bytes each."""
    return next(n for n in range(1, d_out + 1) if d_out % n == 0 and d_in * d_out * itemsize <= n * EXPANDED)


def device_kind() -> str:
    """jax's name of the accelerator at hand; "" on a CPU."""
    return "" if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
