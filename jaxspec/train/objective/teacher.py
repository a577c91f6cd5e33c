"""The frozen target's hidden states: computed in the step, or kept on disk.

Owns the cache's files, their size and their fingerprint. Must not know who learns from the states.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec.models.base import TargetModel
from jaxspec.train.data.batch import Batch, PackedRows
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.objective.attention import packed_attention
from jaxspec.train.run import mesh as meshes

#: Rows of a file of the cache.
CHUNK = 64
_META = "cache.json"
#: Left free on the disk, in bytes.
_RESERVE = 256 << 20
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def target_states(target: TargetModel, batch: Batch, aux_layers: Sequence[int]) -> TargetStates:
    """The target on packed rows, each text by itself; no gradient passes."""
    hidden_BTE, aux_BTA = target(
        batch.tokens_BT, batch.positions_BT, packed_attention(batch.segments_BT), tuple(aux_layers)
    )
    return jax.lax.stop_gradient(TargetStates(aux_BTA, hidden_BTE))


def fingerprint(directory: Path, rows: PackedRows, aux_layers: Sequence[int], dtype: str) -> dict[str, str]:
    """What the states depend on: the target's configuration, its weights and the rows (SHA-256 each), and the rest.

    Of weights their files' names and sizes, headers and a MiB in the middle count: enough to tell two checkpoints apart
    without reading them whole. Times of files do not count.
    """
    return {
        "target config": hashlib.sha256((directory / "config.json").read_bytes()).hexdigest(),
        "target weights": weights_digest(directory),
        "rows": rows_digest(rows),
        "aux_layers": str(list(aux_layers)),
        "dtype": dtype,
    }


def weights_digest(directory: Path) -> str:
    """SHA-256 of what `fingerprint` counts of a directory's safetensors."""
    weights = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        weights.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as f:
            weights.update(f.read(1 << 20))
            f.seek(size // 2)
            weights.update(f.read(1 << 20))
    return weights.hexdigest()


def rows_digest(rows: PackedRows) -> str:
    """SHA-256 of packed rows."""
    digest = hashlib.sha256()
    for array in (rows.tokens, rows.segments, rows.positions, rows.learn):
        digest.update(f"{array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class HiddenCache:
    """States of every row in a directory of chunks; `states(index)` reads those of some rows.

    Attributes:
      widths: channels of the auxiliary states (0: none) and of the hidden states, side by side in the files.
    """

    directory: Path
    widths: tuple[int, int]
    length: int
    rows: int
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of all chunks."""
        return self.rows * self.length * sum(self.widths) * _DTYPES[self.dtype].itemsize

    def _path(self, chunk: int) -> Path:
        return self.directory / f"states-{chunk:06d}.bin"

    def _shape(self, chunk: int) -> tuple[int, int, int]:
        return min(CHUNK, self.rows - chunk * CHUNK), self.length, sum(self.widths)

    def _map(self, chunk: int) -> np.ndarray:
        # NumPy cannot map bfloat16 files: their bits are read as integers.
        shape, dtype = self._shape(chunk), _DTYPES[self.dtype]
        bits = np.memmap(self._path(chunk), f"u{dtype.itemsize}", "r", shape=shape)
        return np.asarray(bits).view(dtype)

    def states(self, index: np.ndarray) -> TargetStates:
        """Of the rows of an index array [B]."""
        both = np.stack([self._map(int(i) // CHUNK)[int(i) % CHUNK] for i in index])
        aux, hidden = np.split(both, [self.widths[0]], axis=-1)
        return TargetStates(jnp.asarray(aux) if self.widths[0] else None, jnp.asarray(hidden))

    def describe(self) -> str:
        """The size, and what a million tokens take."""
        million = 1e6 * sum(self.widths) * _DTYPES[self.dtype].itemsize
        return (
            f"{self.rows:,} rows x {self.length:,} tokens x {sum(self.widths):,} channels x "
            f"{_DTYPES[self.dtype].itemsize} bytes = {self.bytes / 1e9:,.3f} GB ({million / 1e9:,.2f} GB per 1M tokens)"
        )


def cached_states(
    directory: Path, target_dir: Path, target: TargetModel, rows: PackedRows, aux_layers: Sequence[int], batch: int,
    mesh: Mesh | None = None,
) -> HiddenCache:  # fmt: skip
    """The cache of `rows` under `directory`, computed where chunks are missing; prints its size before it starts.

    Raises:
      ValueError: the directory holds states of another target, other rows or another dtype (names both fingerprints);
        the disk has too little room (names both sizes).
    """
    cfg = target.config
    dtype = jnp.dtype(target.embedding[...].dtype).name
    widths = (len(aux_layers) * cfg.hidden_size, cfg.hidden_size)
    cache = HiddenCache(directory, widths, rows.length, len(rows), dtype)
    own = fingerprint(target_dir, rows, aux_layers, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    meta = directory / _META
    if meta.exists():
        found = json.loads(meta.read_text())
        if found != own:
            other = [name for name in own if found.get(name) != own[name]]
            theirs, ours = ({name: side.get(name) for name in other} for side in (found, own))
            raise ValueError(
                f"--hidden-cache {directory} is stale: its {', '.join(other)} differ. It has {theirs}, this run {ours};"
                " delete it or name another"
            )
    chunks = range(-(-len(rows) // CHUNK))
    size = lambda chunk: int(np.prod(cache._shape(chunk))) * _DTYPES[dtype].itemsize
    whole = lambda chunk: cache._path(chunk).exists() and cache._path(chunk).stat().st_size == size(chunk)
    missing = [chunk for chunk in chunks if not whole(chunk)]
    needed, free = sum(size(chunk) for chunk in missing), shutil.disk_usage(directory).free
    print(f"hidden states on disk: {cache.describe()}; {needed / 1e9:,.3f} GB to write, {free / 1e9:,.1f} GB free")
    if needed + _RESERVE > free:
        raise ValueError(
            f"--hidden-cache {directory} needs {needed / 1e9:.3f} GB (and {_RESERVE / 1e9:.2f} GB of reserve), "
            f"free are {free / 1e9:.3f} GB; leave it out to compute states online"
        )
    if not meta.exists():
        meta.write_text(json.dumps(own, indent=1) + "\n")
    if missing:
        _write(cache, target, rows, aux_layers, batch, mesh, missing)
    return cache


def _write(
    cache: HiddenCache, target: TargetModel, rows: PackedRows, aux_layers: Sequence[int], batch: int, mesh: Mesh | None,
    missing: list[int],
) -> None:  # fmt: skip
    forward = states_fn(target, aux_layers, mesh)
    began = time.monotonic()
    for done, chunk in enumerate(missing, start=1):
        index = np.arange(chunk * CHUNK, min((chunk + 1) * CHUNK, len(rows)))
        parts = []
        for start in range(0, len(index), batch):
            wanted = index[start : start + batch]
            padded = np.resize(wanted, batch)  # a last batch repeats rows, so that one executable serves all
            found = jax.device_get(forward(rows.batch(padded)))
            both = [x for x in (found.aux_BTA, found.hidden_BTE) if x is not None]
            parts.append(np.concatenate(both, axis=-1)[: len(wanted)])
        path = cache._path(chunk)
        staging = path.with_suffix(".tmp")
        try:
            np.concatenate(parts).tofile(staging)
            staging.replace(path)
        except OSError as e:
            staging.unlink(missing_ok=True)
            raise OSError(f"cannot write {path}: {e}; chunks written so far stay usable") from e
        if done % 16 == 0 or done == len(missing):
            rate = done * CHUNK * rows.length / (time.monotonic() - began)
            print(f"hidden states: chunk {done}/{len(missing)}, {rate:,.0f} tokens/s", flush=True)


def states_fn(target: TargetModel, aux_layers: Sequence[int], mesh: Mesh | None = None) -> Callable[[Batch], Any]:
    """A jitted Batch -> TargetStates."""
    graph, state = nnx.split(target)
    state = meshes.place(mesh, state)
    jitted = jax.jit(lambda state, batch: target_states(nnx.merge(graph, state), batch, aux_layers))
    return lambda batch: jitted(state, meshes.place_batch(mesh, batch))
