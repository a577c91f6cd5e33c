"""What devices that share a model's weights do by themselves, and what they exchange.

XLA partitions most of a round as it should, given where weights lie. Here is what it does not at every batch size:
one row of a table that is split made it gather the table, and one row of a product lost the form that a library
multiplies (docs/notes.md). Each device computes with its own part, and one sum of activations follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.models.quantised import Quantised, stored_bytes
from pallas_kernels.device_sum import gpu as device_sum
from pallas_kernels.small_batch.packed import Packed

#: The mesh axis of tensor parallelism.
TENSOR_AXIS = "tensor"
#: Metadata of a parameter that tensor parallelism splits: along which axis, and by what its devices' parts are summed.
SPLIT = "split_axis"
SUMS = "sums"
#: What sums parts: XLA's all-reduce, by whatever library its options name, or pallas_kernels.device_sum on GPUs.
BY_XLA, BY_KERNEL = "xla", "kernel"
#: From here on bandwidth counts, of which a sum that every device makes whole takes more.
_FEW_BYTES = 512 << 10


def shards() -> int:
    """Devices that the ambient mesh shares weights over; 1 without one."""
    return int(jax.sharding.get_abstract_mesh().shape.get(TENSOR_AXIS, 1))


def alone() -> bool:
    """Whether what is traced runs by one device: without others, or as what each does by itself."""
    return shards() == 1 or TENSOR_AXIS in jax.sharding.get_abstract_mesh().manual_axes


def part_of(axis: int | None, leaf: Any, count: int) -> PartitionSpec:
    """How an array of a parameter lies over `count` devices, if the parameter is split along `axis`.

    A quantised kernel has arrays besides its values, such as one row of scales, that may not divide: they stay whole.
    """
    if axis is None or axis >= leaf.ndim or leaf.shape[axis] % count:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, TENSOR_AXIS)


def parts_of(axis: int | None, value: Any, count: int) -> Any:
    """`part_of` of each array of a parameter; packed values lie [..., out, in], their scales [..., groups, out]."""
    if axis is not None and isinstance(value, Packed):
        other = 2 * value.values.ndim - 3 - axis
        values, *rest = jax.tree.leaves(value)
        parts = [part_of(other, values, count), *(part_of(axis, leaf, count) for leaf in rest)]
        return jax.tree.unflatten(jax.tree.structure(value), parts)
    return jax.tree.map(lambda leaf: part_of(axis, leaf, count), value)


def share_bytes(axis: int | None, value: Any, count: int) -> int:
    """Bytes of memory that a parameter takes on each of so many devices."""
    specs = jax.tree.leaves(parts_of(axis, value, count), is_leaf=lambda x: isinstance(x, PartitionSpec))
    leaves = [leaf for leaf in jax.tree.leaves(value) if hasattr(leaf, "dtype")]
    shares = (count if TENSOR_AXIS in spec else 1 for spec in specs)
    return sum(stored_bytes(leaf) // share for leaf, share in zip(leaves, shares, strict=True))


def laid_anew(param: nnx.Variable, change: Callable[..., Any], *static: Any) -> Any:
    """`change` of a parameter's value and of what is static, each device's part where its own was."""
    value, axis = param[...], param.get_metadata(SPLIT, None)
    lies, places = getattr(jax.tree.leaves(value)[0], "sharding", None), None
    if axis is not None and isinstance(lies, NamedSharding):
        made = jax.eval_shape(lambda value: change(value, *static), value)
        specs = parts_of(axis, made, lies.mesh.shape[TENSOR_AXIS])
        places = jax.tree.map(functools.partial(NamedSharding, lies.mesh), specs)
    numbers = tuple(range(1, 1 + len(static)))
    return jax.jit(change, static_argnums=numbers, out_shardings=places)(value, *static)


def split_axis(param: nnx.Variable) -> int | None:
    """The axis along which the ambient mesh splits a parameter, or None."""
    axis = param.get_metadata(SPLIT, None)
    return axis if axis is not None and shards() > 1 else None


def split_product(
    x: jax.Array, param: nnx.Variable, product: Callable[[jax.Array, Any], jax.Array]
) -> jax.Array | None:
    """x [..., in] times a kernel [in, out] of which each device multiplies by its own part; None where XLA splits it.

    Those are kernels split by their inputs, and packed ones split by their outputs.

    Args:
      product: of a device's inputs and its part of the kernel.
    """
    kernel, axis = param[...], split_axis(param)
    if axis is None or (axis == 1 and not isinstance(kernel, Packed)):
        return None
    if isinstance(kernel, Quantised):
        # Inputs in another order, or rounded by what is largest in a row, are not a device's own.
        own = kernel.values.ndim == 2 and kernel.order is None and not kernel.int8_activations
        if not own or (kernel.groups % shards() and kernel.groups > 1):
            return None
    by, whole = param.get_metadata(SUMS, BY_XLA), PartitionSpec()
    along = PartitionSpec(*[None] * (x.ndim - 1), TENSOR_AXIS)

    def own_part(x: jax.Array, kernel: Any) -> jax.Array:
        y = product(x, kernel)
        return summed(y, by) if axis == 0 else y

    specs = along if axis == 0 else whole, parts_of(axis, kernel, shards())
    out = whole if axis == 0 else along
    return jax.shard_map(own_part, in_specs=specs, out_specs=out, check_vma=False)(x, kernel)


def everywhere(tree: Any) -> Any:
    """A tree of arrays that every device shall have whole, where XLA would split them as it splits what reads them."""
    return tree if shards() == 1 else jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def summed(part: jax.Array, by: str) -> jax.Array:
    """The sum of what devices have, on every device, by BY_KERNEL or BY_XLA, which takes over where rows are many."""
    if by == BY_KERNEL and part.size * part.dtype.itemsize <= _FEW_BYTES and device_sum.refusal(part) is None:
        return device_sum.device_sum(part, TENSOR_AXIS)
    return jax.lax.psum(part, TENSOR_AXIS)


def take_rows(table: nnx.Variable, index: jax.Array) -> jax.Array:
    """Rows of a table [V, E] at index [...], clipped to [0, V): [..., E].

    Of a table that is split over its rows each device looks its own ones up, and takes zeros for the others': a sum of
    as many bytes as the rows have, and the very rows.
    """
    table_VE = table[...]
    if split_axis(table) != 0:
        return jnp.take(table_VE, index, axis=0, mode="clip")
    index = jnp.clip(index, 0, table_VE.shape[0] - 1)

    def own_rows(part_VE: jax.Array, index: jax.Array) -> jax.Array:
        size = part_VE.shape[0]
        at = index - jax.lax.axis_index(TENSOR_AXIS) * size
        rows = jnp.take(part_VE, at, axis=0, mode="clip")
        mine = ((at >= 0) & (at < size))[..., None]
        return jax.lax.psum(jnp.where(mine, rows, jnp.zeros((), rows.dtype)), TENSOR_AXIS)

    specs = (PartitionSpec(TENSOR_AXIS), PartitionSpec())
    return jax.shard_map(own_rows, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(table_VE, index)
