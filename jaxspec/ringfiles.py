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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

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
        with self.file(len(about), features.shape[1], features.dtype, about.shape[1]) as add:
            add(features, about)

    @contextlib.contextmanager
    def file(
        self, count: int, width: int, dtype: DTypeLike, columns: int
    ) -> Iterator[Callable[[np.ndarray, np.ndarray], None]]:
        """Gives what adds rows (features, about), `count` of them in all, to a file that is there in the end.

        Args:
          width, dtype: of `features`. columns: of `about`.

        Raises:
          OSError: a full disk or the like; then there is no file.
        """
        header: dict[str, Any] = {"__metadata__": self._metadata}
        starts, end = [], 0
        for name, kind, size in (("about", np.dtype(np.int32), columns), ("features", np.dtype(dtype), width)):
            starts.append(end)
            end += count * size * kind.itemsize
            header[name] = {"dtype": _NAMES[kind], "shape": [count, size], "data_offsets": [starts[-1], end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = self.directory / f"{PREFIX}{time.time_ns():020d}-{os.getpid()}{SUFFIX}"
        staging = path.with_suffix(".tmp")
        fd = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        at = [8 + len(text) + start for start in starts]

        def add(features: np.ndarray, about: np.ndarray) -> None:
            for i, array in enumerate((about, features)):
                at[i] += _write(fd, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, at[i])

        try:
            try:
                _write(fd, len(text).to_bytes(8, "little") + text, 0)
                yield add
            finally:
                os.close(fd)
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)
        self._evict()

    def _evict(self) -> None:
        sizes = {}
        for path in ring_files(self.directory):
            with contextlib.suppress(FileNotFoundError):  # whoever learns may have moved it
                sizes[path] = path.stat().st_size
        total = sum(sizes.values())
        for path in list(sizes)[:-1]:
            if total <= self._limit:
                return
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            total -= sizes[path]


def _write(fd: int, data: bytes | memoryview, at: int) -> int:
    """Writes everything at a place of a file; returns how many bytes that were."""
    left = memoryview(data)
    while left:
        done = os.pwrite(fd, left, at)
        left, at = left[done:], at + done
    return len(data)


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
