"""Calls as messages: what one process writes another reads, for all that executables are called with."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxspec.runtime import following


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int32).reshape(3, 4), np.float32([[1.5], [-0.0]]), np.zeros((1, 5000), np.float32),
        np.full((2, 4000), -1, np.int32), np.arange(3000, dtype=np.float32), np.bool_([True, False]), np.int32(7),
        np.zeros((0, 3), np.int32), np.arange(4).astype(ml_dtypes.bfloat16), np.full(3000, np.nan, np.float32),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)  # fmt: skip
def test_arrays(array: np.ndarray):
    written = b"".join(following._written(np.asarray(array)))
    read, end = following._read(bytearray(b"before" + written + b"behind"), len(b"before"))
    assert end == len(b"before") + len(written)
    assert read.dtype == array.dtype and read.shape == array.shape and read.tobytes() == np.asarray(array).tobytes()


def test_what_is_one_value_throughout_is_one_value_on_its_way():
    """A bias of zeros over a large vocabulary goes with every request."""
    assert len(b"".join(following._written(np.zeros((1, 200_000), np.float32)))) < 100
