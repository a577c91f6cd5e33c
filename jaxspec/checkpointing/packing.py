"""Integers of 4 or 8 bits in words of 32, as checkpoints pack them; NumPy alone."""

from __future__ import annotations

import numpy as np

#: Where AWQ's GEMM layout has the eight logical columns of a word: by nibble, the lowest first.
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] int32 to [R, C * 32 / bits] uint8, the lowest bits first."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    both = np.empty((*octets.shape, 2), np.uint8)
    np.bitwise_and(octets, 15, out=both[..., 0])
    np.right_shift(octets, 4, out=both[..., 1])
    return both.reshape(len(words), -1)


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpacked`: [R, C] of unsigned integers to [R, ceil(C * bits / 32)] int32, padded with zeros."""
    each = 32 // bits
    padded = np.pad(values.astype(np.uint8), ((0, 0), (0, -values.shape[1] % each)))
    octets = padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << 4
    return np.ascontiguousarray(octets).view("<i4")


def words(stored: np.ndarray, places: tuple[int, ...]) -> np.ndarray:
    """Words [R, C] of nibbles to [R, 8 C] uint8 in logical order; `places` says which nibble each logical one is in."""
    nibbles = unpacked(stored, 4).reshape(len(stored), -1, 8)
    return nibbles[:, :, list(places)].reshape(len(stored), -1)
