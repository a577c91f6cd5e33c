"""Roundings and facts about devices that kernels choose their sizes by."""

from __future__ import annotations

import jax

#: Streaming multiprocessors by the chip's name within jax's device_kind.
MULTIPROCESSORS = {"gb200": 148, "b200": 148, "h200": 132, "h100": 132, "a100": 108, "l4": 58}

#: Most bytes that weights of few bits are expanded to at a time.
EXPANDED = 256 << 20
#: The same on TPUs, in whose vector memory as much stays: none of it is written to HBM and read again.
EXPANDED_TPU = 16 << 20


def round_up(x: int, multiple: int) -> int:
    """The least multiple that is at least x."""
    return -(-x // multiple) * multiple


def power_of_two(x: int) -> int:
    """The least power of two that is at least x."""
    return 1 << (x - 1).bit_length()


def expanded_shares(d_in: int, d_out: int, itemsize: int, *, tpu: bool = False) -> int:
    """How many equal shares of a kernel's outputs are expanded one after the other: EXPANDED bytes, or EXPANDED_TPU.

    One where outputs do not divide into about as many.
    """
    least = -(-d_in * d_out * itemsize // (EXPANDED_TPU if tpu else EXPANDED))
    return next((n for n in range(least, min(4 * least, d_out) + 1) if d_out % n == 0), 1)


def device_kind() -> str:
    """jax's name of the accelerator at hand; "" on a CPU."""
    return "" if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
