"""How a model's weights are laid out for what reads them: column blocks for a CPU, and shares of several devices.

Owns the copies that are made of a module built of `layers`; knows neither meshes nor checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import Split
from jaxspec.models.layers import BLOCK, Linear, Shared, Transformer
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised
from jaxspec.models.sharded import BY_XLA, SPLIT, SUMS

_Module = TypeVar("_Module", bound=nnx.Module)


def column_blocks(module: _Module, width: int = BLOCK, *, keep_flat: bool = False) -> _Module:
    """A copy whose linear maps are stored in column blocks, for XLA's CPU backend.

    A product of a few rows reads a flat kernel in short pieces, far apart, which takes twice the time of contiguous
    blocks; one of many rows is twice as fast with a flat kernel. Blocks give the bits of a flat product of 64 rows or
    more, whatever the number of rows (measured: docs/notes.md). A tied lm_head becomes a kernel of its own. Maps whose
    width is no multiple of `width` stay as they are; a target's output layer gets columns of zeros up to the next one,
    which `output_logits` leaves out.

    Args:
      keep_flat: layers keep their flat kernels too, output layers excepted: prompts need those for one row.
    """
    graph, state = nnx.split(module)
    copy = nnx.merge(graph, state)

    def blocked(kernel: jax.Array) -> nnx.Param:
        d_in, d_out = kernel.shape
        padded = jnp.pad(kernel, ((0, 0), (0, -d_out % width)))
        return nnx.Param(padded.reshape(d_in, -1, width).transpose(1, 0, 2))

    for _, node in nnx.iter_graph(copy):
        if isinstance(node, Linear) and isinstance(node.kernel[...], Quantised):
            node.kernel = nnx.Param(node.kernel[...].blocked())
        elif isinstance(node, Linear) and node.kernel[...].ndim == 2:
            flat, output = node.kernel[...], node is getattr(copy, "lm_head", None)
            if flat.shape[1] % width and not (output and isinstance(copy, Transformer)):
                continue
            node.kernel = blocked(flat)
            if keep_flat and not output:
                node.flat = nnx.data(nnx.Param(flat))
    embedding, tied = getattr(copy, "embedding", None), getattr(copy, "lm_head", 0) is None
    if embedding is not None and tied and (embedding.shape[0] % width == 0 or isinstance(copy, Transformer)):
        head = Linear(1, 1, dtype=embedding[...].dtype, rngs=None)
        head.kernel = blocked(embedding[...].T)
        copy.lm_head = nnx.data(head)  # pyright: ignore[reportAttributeAccessIssue]
    return copy


def tensor_parallel(module: _Module, shards: int, sums: str = BY_XLA, *, lent: bool = False) -> _Module:
    """A copy laid out for `shards` devices: fused columns grouped by shard, and each split parameter marked (SPLIT).

    The columns of qkv become [q_0 k_0 v_0 | q_1 k_1 v_1 | ...] and those of gate_up [gate_0 up_0 | ...], so that a
    device's part of q, k, v, gate and up lies in its own columns and nothing moves between devices inside a layer
    (Shoeybi et al. 2019, Megatron-LM): qkv and gate_up are split by columns, out and down (and an EAGLE head's fc) by
    rows, embeddings and lm_head over the vocabulary. Modules of other kinds say in a method `splits(shards)` what they
    split. Parts whose heads or widths `shards` does not divide stay whole, on every device. A module that devices
    share already is returned as it is.

    Args:
      sums: by what the devices' parts of a product are summed (`sharded.summed`).
      lent: only the tables that a draft head has of its target (Shared) are split, as the target's are, which they
        then still are; its own weights stay whole.
    """
    if is_laid_out(module):
        return module
    graph, state = nnx.split(module)
    # With variables of its own: what is done to the copy in place, the module shall not have.
    copy = nnx.merge(graph, jax.tree.map(lambda x: x, state))
    for split in lent_tables(copy, shards) if lent else divided(copy, shards):
        value = getattr(split.owner, split.name)[...]
        if split.widths:
            starts = [sum(split.widths[:i]) for i in range(1, len(split.widths))]

            by_shard = functools.partial(_by_shard, starts=tuple(starts), shards=shards)
            few = isinstance(value, Quantised | Mxfp4)
            value = value.along_outputs(by_shard) if few else by_shard(value)
        setattr(split.owner, split.name, marked := nnx.Param(value))
        mark(marked, split.axis, sums)
    return copy


@functools.partial(jax.jit, static_argnames=("starts", "shards"))
def _by_shard(whole: jax.Array, starts: tuple[int, ...], shards: int) -> jax.Array:
    """Groups of columns that begin at 0 and at `starts`, each cut into shards: one shard's parts after another's."""
    parts = [x.reshape(*x.shape[:-1], shards, -1) for x in jnp.split(whole, starts, axis=-1)]
    return jnp.concatenate(parts, axis=-1).reshape(whole.shape)


def divided(module: nnx.Module, shards: int) -> Iterator[Split]:
    """What `shards` devices split of a module; tells its parts that they do."""
    for _, node in list(nnx.iter_graph(module)):
        if isinstance(node, nnx.Module):
            own = getattr(node, "splits", None)
            for split in _table_splits(node) if own is None else own(shards):
                param = getattr(split.owner, split.name)
                if param is not None and _size(param[...], split.axis) % shards == 0:
                    yield split


def _size(value: jax.Array | Quantised | Mxfp4, axis: int) -> int:
    """Of what devices share, which no column blocks are."""
    return (value.values if isinstance(value, Quantised) else value).shape[axis]


def lent_tables(module: nnx.Module, shards: int) -> Iterator[Split]:
    """What `shards` devices split of a module if they do so with its target's tables alone."""
    for _, node in list(nnx.iter_graph(module)):
        for split in _table_splits(node) if isinstance(node, nnx.Module) else ():
            param = getattr(split.owner, split.name)
            if isinstance(param, Shared) and param[...].shape[split.axis] % shards == 0:
                yield split


def mark(param: nnx.Variable, axis: int, sums: str) -> None:
    """Notes how devices share a parameter (`sharded`)."""
    param.set_metadata(SPLIT, axis)
    param.set_metadata(SUMS, sums)


def is_laid_out(module: nnx.Module) -> bool:
    """Whether devices share a module already: it came from `tensor_parallel`, or was loaded so."""
    params = jax.tree.leaves(nnx.state(module), is_leaf=lambda x: isinstance(x, nnx.Variable))
    return any(isinstance(x, nnx.Variable) and x.has_metadata(SPLIT) for x in params)


def _table_splits(node: nnx.Module) -> Iterator[Split]:
    """The tables that models and draft heads have, under the names that they have in common."""
    for name in ("embedding", "lm_head", "fc"):
        part = getattr(node, name, None)
        if isinstance(part, Linear):
            yield from part.columns() if name == "lm_head" else part.rows()
        elif isinstance(part, nnx.Param | Shared):
            yield Split(node, name, 0)
