"""Quantised kernels: weights that stay in their few bits on the device, and the products that read them so.

Every format of a checkpoint becomes one record, `Quantised` (`checkpointing.quantised` makes them): integers or float8
with a scale for each output or for groups of inputs. `product` is the only place that multiplies by one, and XLA's
path here is the reference: a kernel of a backend's own is to be chosen there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxspec.models import depths
from pallas_kernels.sizes import expanded_shares

#: Columns of a block in which XLA's CPU backend multiplies: a block of float32 stays in the cache.
BLOCK = 64
#: Inputs of a group from which on sums of groups are no more than products by themselves.
_SMALL = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """The kernel [in, out] of a linear map: w = (values - zero) * scale, each group of in / G inputs with its own.

    Column blocks (`blocked`) have [out / w, in, w] and [out / w, G, w] instead; on CPUs these are quick.

    Attributes:
      values: [in, out] int8, int4, float8_e4m3fn or float4_e2m1fn.
      scale: [G, out]; one group is a scale per output.
      zero: [G, out] integers, or None where that is 0 everywhere.
      order: [in] int32: the input that each row of `values` is for, where a checkpoint sorted them (act-order).
      int8_activations: inputs are rounded to int8, too, each row with a scale of its own, where values are int8 with
        one group and no zero: faster on some backends, and another result.
    """

    values: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None
    order: jax.Array | None = None
    int8_activations: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out)."""
        *blocks, d_in, width = self.values.shape
        return d_in, math.prod(blocks) * width

    @property
    def groups(self) -> int:
        return self.scale.shape[-2]

    @property
    def multiplies_integers(self) -> bool:
        """Whether `int8_activations` is for it."""
        return self.groups == 1 and self.zero is None and self.values.dtype == jnp.int8

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(stored_bytes(leaf) for leaf in jax.tree.leaves(self))

    def __getitem__(self, key: object) -> Quantised:
        """Whole, as `nnx.Variable[...]` asks."""
        assert key is Ellipsis, key
        return self

    def blocked(self, width: int = BLOCK) -> Quantised:
        """In column blocks; the same where the width does not divide the outputs."""
        if self.values.ndim == 3 or self.shape[1] % width:
            return self
        return self.along_outputs(lambda x: x.reshape(x.shape[0], -1, width).transpose(1, 0, 2))

    def along_outputs(self, change: Callable[[jax.Array], jax.Array]) -> Quantised:
        """What `change` makes of every array that has the outputs as its last axis."""
        zero = None if self.zero is None else change(self.zero)
        return dataclasses.replace(self, values=change(self.values), scale=change(self.scale), zero=zero)

    def dequantised(self) -> jax.Array:
        """The kernel in float32 [in, out], expanded: for references, and for few of its columns."""
        if self.values.ndim == 3:
            kernel = jax.vmap(_expanded)(self.values, self.scale, self.zero)
            kernel = kernel.transpose(1, 0, 2).reshape(self.shape)
        else:
            kernel = _expanded(self.values, self.scale, self.zero)
        return kernel if self.order is None else jnp.zeros_like(kernel).at[self.order].set(kernel)


def stored_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of an array in a device's memory, where two values of 4 bits share one."""
    bits = 4 if array.dtype in (jnp.int4, jnp.uint4, jnp.float4_e2m1fn) else 8 * array.dtype.itemsize
    return -(-array.size * bits // 8)


def joined(parts: Sequence[Quantised]) -> Quantised:
    """Kernels that read the same inputs, side by side; alike but for their columns and whether they have zeros."""
    zeros = None
    if any(part.zero is not None for part in parts):
        kind = next(part.zero.dtype for part in parts if part.zero is not None)
        zeros = [jnp.zeros(p.scale.shape, kind) if p.zero is None else p.zero for p in parts]
        zeros = jnp.concatenate(zeros, axis=-1)
    values, scale = (jnp.concatenate([getattr(p, name) for p in parts], axis=-1) for name in ("values", "scale"))
    return dataclasses.replace(parts[0], values=values, scale=scale, zero=zeros)


def product(x_ME: jax.Array, weight: Quantised, dtype: jnp.dtype | None = None, *, cut: bool = True) -> jax.Array:
    """Rows [M, in] times a kernel: [M, out] in x's type, or in `dtype`; sums are float32.

    Args:
      cut: whether some of the outputs may be cut out; not where devices have a part each, which XLA would gather.
    """
    if weight.order is not None:
        x_ME = jnp.take(x_ME, weight.order, axis=1)
    if weight.int8_activations and weight.multiplies_integers:
        y_MF = _integers(x_ME, weight)
    elif weight.values.ndim == 3:
        y_MF = _blocks(x_ME, weight)
    elif weight.groups == 1:
        y_MF = _channels(x_ME, weight)
    else:
        y_MF = _groups(x_ME, weight, cut)
    return y_MF.astype(x_ME.dtype if dtype is None else dtype)


def _expanded(values_EF: jax.Array, scale_GF: jax.Array, zero_GF: jax.Array | None) -> jax.Array:
    (d_in, d_out), groups = values_EF.shape, scale_GF.shape[0]
    kernel = values_EF.astype(jnp.float32).reshape(groups, d_in // groups, d_out)
    if zero_GF is not None:
        kernel = kernel - zero_GF.astype(jnp.float32)[:, None]
    return (kernel * scale_GF.astype(jnp.float32)[:, None]).reshape(d_in, d_out)


def _blocks(x_ME: jax.Array, weight: Quantised) -> jax.Array:
    """One block of columns after the other: expanded where the cache holds it, multiplied, forgotten.

    A product of the whole as one operation would have XLA's CPU backend write all of it to memory as float32 first,
    ten times as slow (docs/notes.md). A row's bits do not depend on the other rows.
    """
    x_ME = x_ME.astype(jnp.float32)
    one_scale = weight.groups == 1 and weight.zero is None

    def step(_: None, block: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[None, jax.Array]:
        values_EW, scale_GW, zero_GW = block
        if one_scale:
            y_MW = depths.multiply(x_ME, values_EW.astype(jnp.float32))
            return None, y_MW * scale_GW.astype(jnp.float32)
        return None, depths.multiply(x_ME, _expanded(values_EW, scale_GW, zero_GW))

    _, y_KMW = jax.lax.scan(step, None, (weight.values, weight.scale, weight.zero))
    return y_KMW.transpose(1, 0, 2).reshape(x_ME.shape[0], weight.shape[1])


def _dot(x_ME: jax.Array, values_EF: jax.Array) -> jax.Array:
    """Values of up to 8 bits are exact in bfloat16; converted right before the product, compilers fuse that."""
    contract = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(x_ME, values_EF.astype(x_ME.dtype), contract, preferred_element_type=jnp.float32)


def _channels(x_ME: jax.Array, weight: Quantised) -> jax.Array:
    y_MF = _dot(x_ME, weight.values)
    if weight.zero is not None:
        y_MF = y_MF - jnp.sum(x_ME, axis=1, keepdims=True, dtype=jnp.float32) * weight.zero.astype(jnp.float32)
    return y_MF * weight.scale.astype(jnp.float32)


def _groups(x_ME: jax.Array, weight: Quantised, cut: bool) -> jax.Array:
    """Of few rows the sums of each group, scaled; many multiply weights that are expanded to their type.

    Sums of groups are G * M * out numbers, which may take no more memory than the expanded weights, on TPUs than the
    weights. Adding them up one group after the other takes up to 14 times as long (docs/benchmarks/rounds.md).
    """
    (rows, d_in), d_out = x_ME.shape, weight.shape[1]
    size, expanded = 4 * rows * weight.groups * d_out, d_in * d_out * x_ME.dtype.itemsize
    if d_in // weight.groups < _SMALL:  # GPUs would expand weights as well as add up
        expanded = 0

    def by(most: int, tpu: bool) -> Callable[[jax.Array, Quantised], jax.Array]:
        return _sums if size <= most else lambda x_ME, weight: _columns(x_ME, weight, cut, tpu=tpu)

    tpu, default = by(stored_bytes(weight.values), True), by(expanded, False)
    return _sums(x_ME, weight) if tpu is default else jax.lax.platform_dependent(x_ME, weight, tpu=tpu, default=default)


def _sums(x_ME: jax.Array, weight: Quantised) -> jax.Array:
    (rows, d_in), groups, d_out = x_ME.shape, weight.groups, weight.shape[1]
    x_GMg = x_ME.reshape(rows, groups, d_in // groups).transpose(1, 0, 2)
    values_GgF = weight.values.reshape(groups, d_in // groups, d_out)

    def scaled(x_Mg: jax.Array, values_gF: jax.Array, scale_F: jax.Array, zero_F: jax.Array | None) -> jax.Array:
        return _channels(x_Mg, Quantised(values_gF, scale_F[None], None if zero_F is None else zero_F[None]))

    return jnp.sum(jax.vmap(scaled)(x_GMg, values_GgF, weight.scale, weight.zero), axis=0)


def _columns(x_ME: jax.Array, weight: Quantised, cut: bool, *, tpu: bool) -> jax.Array:
    """Weights expanded to x's type before they are multiplied, a bounded share of the columns at a time."""
    d_in, d_out = weight.shape
    shares = expanded_shares(d_in, d_out, x_ME.dtype.itemsize, tpu=tpu) if cut else 1

    def times(part: Quantised) -> jax.Array:
        kernel = _expanded(part.values, part.scale, part.zero).astype(x_ME.dtype)
        return jnp.dot(x_ME, kernel, preferred_element_type=jnp.float32)

    if shares == 1:
        return times(weight)
    share = lambda start: lambda x: jax.lax.dynamic_slice_in_dim(x, start, d_out // shares, axis=-1)
    starts = jnp.arange(shares, dtype=jnp.int32) * (d_out // shares)
    y_SMW = jax.lax.map(lambda start: times(weight.along_outputs(share(start))), starts)
    return y_SMW.transpose(1, 0, 2).reshape(x_ME.shape[0], d_out)


def _integers(x_ME: jax.Array, weight: Quantised) -> jax.Array:
    """int8 by int8 with exact sums in int32: compressed-tensors' dynamic symmetric activations, a scale per token."""
    x_ME = x_ME.astype(jnp.float32)
    step_M1 = jnp.maximum(jnp.max(jnp.abs(x_ME), axis=1, keepdims=True), 1e-30) / 127
    q_ME = jnp.round(x_ME / step_M1).astype(jnp.int8)
    scale = weight.scale.astype(jnp.float32)
    if weight.values.ndim == 2:
        y = jax.lax.dot_general(q_ME, weight.values, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        return y.astype(jnp.float32) * step_M1 * scale
    spread = jnp.broadcast_to(q_ME[None], (weight.values.shape[0], *q_ME.shape))
    y_KMW = jax.lax.dot_general(
        spread, weight.values, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.int32
    )  # fmt: skip
    y_KMW = y_KMW.astype(jnp.float32) * step_M1[None] * scale
    return y_KMW.transpose(1, 0, 2).reshape(x_ME.shape[0], weight.shape[1])
