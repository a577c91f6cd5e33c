"""The files of a feature ring: what a serving engine leaves for training, the oldest making room for the newest.

A file is in the safetensors format: `features` [N, F], in the engine's type, and `about` int32 [N, 5] (number of the
text, position, token, length of its prompt, bits of the temperature), with the engine's mark and the ring's layers in
its metadata. It holds what users wrote and what the model answered: keep and share it accordingly. Must not know
engines or training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

PREFIX, SUFFIX = "ring-", ".safetensors"
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "I32": np.dtype(np.int32)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class RingDirectory:
    """Writes files into a directory that only its owner can read, and keeps their total size.

    Args:
      directory: made where it is missing.
      limit_bytes: of all files; the oldest are deleted.
      metadata: of every file.

    Raises:
      ValueError: nothing can be written there.
    """

    def __init__(self, directory: str | Path, limit_bytes: int, metadata: Mapping[str, str]):
        self.directory, self._limit, self._metadata = Path(directory), limit_bytes, dict(metadata)
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = self.directory / f".{os.getpid()}.probe"
            probe.touch()
            probe.unlink()
        except OSError as e:
            raise ValueError(f"feature_ring {str(directory)!r} cannot be written: {e}") from e

    def write(self, features: np.ndarray, about: np.ndarray) -> None:
        """Adds a file, whole or not at all.

        Raises:
          OSError: a full disk or the like.
        """
        arrays: dict[str, np.ndarray] = {
            "about": np.ascontiguousarray(about),
            "features": np.ascontiguousarray(features),
        }
        header: dict[str, Any] = {"__metadata__": self._metadata}
        start = 0
        for name, array in arrays.items():
            end = start + array.nbytes
            header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = self.directory / f"{PREFIX}{time.time_ns():020d}-{os.getpid()}{SUFFIX}"
        staging = path.with_suffix(".tmp")
        fd = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                for part in (len(text).to_bytes(8, "little"), text, *arrays.values()):
                    left = (
                        memoryview(part).cast("B") if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data
                    )
                    while left:
                        left = left[file.write(left) :]
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)
        self._evict()

    def _evict(self) -> None:
        sizes = {path: path.stat().st_size for path in ring_files(self.directory)}
        total = sum(sizes.values())
        for path in list(sizes)[:-1]:
            if total <= self._limit:
                return
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            total -= sizes[path]


def ring_files(directory: Path) -> list[Path]:
    """A ring's files, the oldest first."""
    return sorted(directory.glob(f"{PREFIX}*{SUFFIX}"))


@dataclasses.dataclass(frozen=True)
class RingFile:
    """What a file holds; arrays are mapped, and stay readable when the file is deleted."""

    metadata: dict[str, str]
    features: np.ndarray
    about: np.ndarray

    @classmethod
    def read(cls, path: Path) -> RingFile:
        """Raises ValueError where the file is no ring's, or truncated; FileNotFoundError where it is gone."""
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            arrays = {}
            for name in ("about", "features"):
                entry = header[name]
                dtype, (first, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
                # NumPy cannot map bfloat16 files: their bits are read as integers.
                bits = np.memmap(path, f"u{dtype.itemsize}", "r", 8 + size + first, tuple(entry["shape"]))
                assert bits.nbytes == end - first
                arrays[name] = np.asarray(bits).view(dtype)
            return cls(header.get("__metadata__", {}), arrays["features"], arrays["about"])
        except FileNotFoundError:
            raise
        except Exception as e:  # whatever else a broken file brings
            raise ValueError(f"{path} is no whole file of a feature ring: {e}") from e
