"""Where a training step's arrays lie on a mesh of data and tensor axes.

Owns the rule from a parameter's name to its split axis. The partitioning itself is XLA's (GSPMD): fused columns keep
their plain order, so results are those of one device. Must not know modules or losses.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA, TENSOR = "data", "tensor"
#: Linear maps that are split by columns (of [in, out]) and by rows (Shoeybi et al. 2019).
_COLUMNS, _ROWS = {"qkv", "gate_up", "lm_head"}, {"out", "down", "fc"}


def make_mesh(text: str) -> Mesh:
    """A mesh from "data=4,tensor=2"; an axis that is not named has size 1.

    Raises:
      ValueError: an unknown or repeated axis, a size below 1, or more devices than there are.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in (DATA, TENSOR) or name in sizes or not size.isdigit() or int(size) < 1:
            raise ValueError(f"mesh must look like 'data=4,tensor=2' (each axis once, at least 1), got {text!r}")
        sizes[name] = int(size)
    shape = (sizes.get(DATA, 1), sizes.get(TENSOR, 1))
    devices = jax.devices()
    if math.prod(shape) > len(devices):
        raise ValueError(f"mesh {text!r} needs {math.prod(shape)} devices, there are {len(devices)}")
    if jax.process_count() > 1 and math.prod(shape) < len(devices):
        raise ValueError(
            f"mesh {text!r} has {math.prod(shape)} devices; {jax.process_count()} processes must use all their "
            f"{len(devices)}"
        )
    grid = np.asarray(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto, AxisType.Auto))


def _axis(names: list[str]) -> int | None:
    """The axis that a parameter of this path is split along."""
    for name in reversed(names):
        if name in _COLUMNS:
            return -1
        if name in _ROWS or name.endswith("embedding"):
            return 0
    return None


def parameter_shardings(mesh: Mesh, tree: Any) -> Any:
    """A NamedSharding for each array of parameters, or of an optimiser's state over them.

    Kernels of qkv, gate_up and lm_head are split over their outputs, those of out, down and fc over their inputs,
    embeddings over the vocabulary; vectors, and whatever the axis does not divide, lie whole on every device.
    """
    shards = mesh.shape[TENSOR]

    def of(path: tuple[Any, ...], x: Any) -> NamedSharding:
        axis = _axis([str(getattr(key, "key", getattr(key, "name", key))) for key in path])
        if axis is None or x.ndim != 2 or x.shape[axis] % shards:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, PartitionSpec(*((TENSOR, None) if axis == 0 else (None, TENSOR))))

    return jax.tree_util.tree_map_with_path(of, tree)


def place(mesh: Mesh | None, tree: Any) -> Any:
    """Parameters on the mesh (on the default device without one); an array that occurs twice is placed once."""
    if mesh is None:
        return tree
    placed: dict[tuple[int, NamedSharding], jax.Array] = {}

    def put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        key = (id(x), sharding)
        if key not in placed:
            placed[key] = _put(x, sharding)
        return placed[key]

    return jax.tree.map(put, tree, parameter_shardings(mesh, tree))


def place_batch(mesh: Mesh | None, batch: Any, accumulate: int = 1) -> Any:
    """A batch on the mesh, its rows over the data axis.

    Raises:
      ValueError: rows that `accumulate` micro-batches over the data axis do not divide.
    """
    parts = accumulate * (1 if mesh is None else mesh.shape[DATA])
    for x in jax.tree.leaves(batch):
        if x.shape[0] % parts:
            axis = "" if mesh is None else f" x {mesh.shape[DATA]} (mesh axis data)"
            raise ValueError(f"batch must be a multiple of {accumulate} (accumulate){axis}, got {x.shape[0]} rows")
    if mesh is None:
        return batch
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    return jax.tree.map(lambda x: _put(x, rows), batch)


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has whole on the mesh: each puts its own devices' parts.

    `device_put` to devices of other processes would have them compare what they put.
    """
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def whole(mesh: Mesh | None, tree: Any) -> Any:
    """Arrays of the host: what the devices of all processes have of them. All processes call it together."""
    if mesh is not None and any(not x.is_fully_addressable for x in jax.tree.leaves(tree)):
        tree = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.device_get(tree)
