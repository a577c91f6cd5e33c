"""Weights of few bits, laid out for the kernels of few rows, and their products in plain XLA.

A kernel's tile of weights goes from shared memory through registers into wgmma, whose first operand wants each thread's
inputs in a certain order. So values lie [out, in], and the inputs of every 128 are reordered such that a thread's lie
side by side, and such that the pairs that one instruction expands are bits apart, not bytes. XLA, which multiplies many
rows, reorders the rows it multiplies by instead.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.sizes import expanded_shares

#: Inputs that are reordered among themselves. Groups that have a scale of their own are several of these, or a half or
#: a quarter of one.
BLOCK, PIECES = 128, (1, 2, 4)
#: MXFP4's values by name: a sign, two bits of exponent and one of mantissa. `Packed` has their bits as int4.
FLOAT4 = "float4_e2m1fn"
#: A scale of MXFP4, 2 ** (s - 127), is kept as s + 94, in bfloat16 2 ** (s - 33): times a value's bits in bfloat16's
#: places, which stand for 2 ** -126 of it, no weight comes near an end of the range. Sums are 2 ** EXPONENT too small.
EXPONENT = 32
_KEPT = 94
#: Scales of MXFP4 that this is exact for, as checkpoints have them: 2 ** (s - 127) of s from the first to the last.
LEAST_SCALE, MOST_SCALE = 33, 160
#: Behind a type's name: values that have zero points, see `Packed.scale`.
ZEROS = "_zeros"
#: Of such a word the scale, the upper bits of a float32; the zero point is the signed byte that is left.
SCALE = ~0xFF
#: The axes of 128 inputs as wgmma has them, steps of 16 being [half, thread, pair], and their order in memory.
_EIGHT = (8, 2, 4, 2), (2, 0, 3, 1)
_FOUR = (4, 2, 2, 4, 2), (3, 0, 4, 1, 2)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scale", "order"], meta_fields=["zeros", "invariant"]
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A kernel [in, out], w = values * scale, or (values - zero) * scale.

    Attributes:
      values: [out, in] int8, int4 or float8_e4m3fn, inputs reordered (see the module).
      scale: [G, out] float32: one for all inputs, or one for every BLOCK of them, its halves or its quarters. Of MXFP4
        int32: the words of four exponents, each of 32 inputs of a BLOCK, the first in the low byte. With zero points
        int32, of every BLOCK or part of one: a zero in the low byte, and above it a float32 less its last 8 bits, so
        scales of 16 bits are exact and others rounded, by 2 ** -16 of them at most.
      order: [in] int32: the input that each of `values`' (before they were reordered) is for, where that is another.
        Kernels do not read it: their rows are gathered by it before.
      zeros: whether there are zero points.
      invariant: whether up to 32 rows shall have the bits that one has, which then is not multiplied as integers
        (`digits`).
    """

    values: jax.Array
    scale: jax.Array
    order: jax.Array | None = None
    zeros: bool = False
    invariant: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out)."""
        return self.values.shape[-1], self.values.shape[-2]

    @property
    def groups(self) -> int:
        return self.scale.shape[-2]

    @property
    def kind(self) -> str:
        """What the values are: their type, with ZEROS behind it, or FLOAT4."""
        if self.zeros:
            return self.values.dtype.name + ZEROS
        return FLOAT4 if self.scale.dtype == jnp.int32 else self.values.dtype.name

    def rows(self, x_MK: jax.Array) -> jax.Array:
        """Rows with their inputs in the order of `values`."""
        return x_MK if self.order is None else jnp.take(x_MK, self.order, axis=1, mode="clip")

    def __getitem__(self, key: object) -> Packed:
        """Whole, as variables of modules ask."""
        assert key is Ellipsis, key
        return self


def refusal(dtype: jnp.dtype, shape: tuple[int, int], groups: int) -> str | None:
    """Why a kernel [in, out] of such values and groups of inputs cannot be packed, or None."""
    if dtype not in (jnp.int8, jnp.int4, jnp.float8_e4m3fn):
        return f"values must be int8, int4 or float8_e4m3fn, got {dtype}"
    if shape[0] % (2 * BLOCK) or shape[1] % 64:
        return f"in and out must be multiples of {2 * BLOCK} and 64, got {shape}"
    if shape[0] // BLOCK % groups and groups * BLOCK not in [shape[0] * n for n in PIECES]:
        parts = " or ".join(str(BLOCK // n) for n in PIECES[:0:-1])
        return f"scales must be for all inputs, {parts} or whole times {BLOCK} of them, got {groups} for {shape[0]}"
    return None


def pieces(inputs: int, groups: int) -> int:
    """Scales of a BLOCK, or 1 where one is for several."""
    return max(1, groups * BLOCK // inputs)


def packed_groups(inputs: int, groups: int, *, zeros: bool) -> int:
    """Groups of scales that `pack` makes of so many."""
    return 1 if groups == 1 and not zeros else max(groups, inputs // BLOCK)


def reordered(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The last axis, of inputs, in the order that values of a type have in memory."""
    natural, order = _FOUR if dtype == jnp.int4 else _EIGHT
    return _moved(x, natural, order)


def natural(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `reordered` undoes."""
    sizes, order = _FOUR if dtype == jnp.int4 else _EIGHT
    inverse = tuple(order.index(i) for i in range(len(order)))
    return _moved(x, tuple(sizes[i] for i in order), inverse)


def _moved(x: jax.Array, sizes: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    lead = x.shape[:-1]
    split = x.reshape(*lead, -1, *sizes)
    axes = (*range(len(lead) + 1), *(len(lead) + 1 + i for i in order))
    return split.transpose(axes).reshape(*lead, math.prod(x.shape[-1:]))


def zero_refusal(dtype: jnp.dtype, zero_dtype: jnp.dtype) -> str | None:
    """Why values of a type with such zero points cannot be packed, or None."""
    if dtype not in (jnp.int8, jnp.int4):
        return f"values with zero points must be int8 or int4, got {dtype}"
    return None if zero_dtype == jnp.int8 else f"zero points must be int8, got {zero_dtype}"


def pack(
    values_KN: jax.Array, scale_GN: jax.Array, zero_GN: jax.Array | None = None, order_K: jax.Array | None = None
) -> Packed:
    """From values [in, out] in their own order; `refusal` and `zero_refusal` say for which.

    Scales of several BLOCKs are repeated for each; those of all inputs stay alone, if there are no zero points.

    Args:
      order_K: see Packed.
      zero_GN: int8, of int4 from -8 to 119, whose checkpoints have -8 to 8.
    """
    kind, scale = values_KN.dtype, scale_GN.astype(jnp.float32)
    wide = values_KN.astype(jnp.int8) if kind == jnp.int4 else values_KN  # transposed as whole bytes
    values = reordered(wide.T, kind).astype(kind)
    each = max(1, values_KN.shape[0] // (BLOCK * len(scale)))  # BLOCKs of a group
    if zero_GN is None:
        return Packed(values, scale if len(scale) == 1 else jnp.repeat(scale, each, axis=0), order_K)
    bits_GN = jax.lax.bitcast_convert_type(scale, jnp.int32)
    even_GN = (bits_GN >> 8) & 1
    words_GN = ((bits_GN + 127 + even_GN) & SCALE) | (zero_GN.astype(jnp.int32) & 255)
    return Packed(values, jnp.repeat(words_GN, each, axis=0), order_K, zeros=True)


def pack_float4(codes_KN: jax.Array, scale_GN: jax.Array) -> Packed:
    """From MXFP4's codes of four bits [in, out], one a byte, and scales of every 32 inputs, both uint8.

    Scales must be LEAST_SCALE to MOST_SCALE; the caller checks it.
    """
    signed = (codes_KN.astype(jnp.int8) ^ 8) - 8
    bytes_GbN = (scale_GN.astype(jnp.int32) + _KEPT).reshape(-1, 4, scale_GN.shape[1])
    words_GN = functools.reduce(jnp.bitwise_or, [bytes_GbN[:, i] << (8 * i) for i in range(4)])
    return Packed(reordered(signed.T, jnp.dtype(jnp.int4)).astype(jnp.int4), words_GN)


def float4(values: jax.Array) -> jax.Array:
    """What the bits of four stand for, float32."""
    codes = values.astype(jnp.int32) & 15
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(codes >= 8, -doubled, doubled).astype(jnp.float32) * 0.5


def powers(words_GN: jax.Array) -> jax.Array:
    """MXFP4's scales of every 32 inputs, float32 [4 G, out], 2 ** EXPONENT too small."""
    kept = jnp.stack([(words_GN >> (8 * i)) & 255 for i in range(4)], axis=1)
    return jnp.exp2((kept - (_KEPT + 127 + EXPONENT)).astype(jnp.float32)).reshape(-1, words_GN.shape[1])


def word_scales(words: jax.Array) -> jax.Array:
    """The scales of words that have a zero point each, float32; also in kernels."""
    return jax.lax.bitcast_convert_type(words & SCALE, jnp.float32)


def word_zeros(words: jax.Array) -> jax.Array:
    """Their zero points, float32."""
    return ((words << 24) >> 24).astype(jnp.float32)


def dequantised(weight: Packed) -> jax.Array:
    """Float32 [in, out], expanded."""
    k, n = weight.shape
    if weight.kind == FLOAT4:
        values = natural(float4(weight.values), jnp.dtype(jnp.int4)).T
        scale = powers(weight.scale) * 2.0**EXPONENT
        return (values.reshape(scale.shape[0], -1, n) * scale[:, None]).reshape(k, n)
    values = natural(weight.values.astype(jnp.float32), weight.values.dtype).T
    grouped = values.reshape(weight.groups, k // weight.groups, n)
    if weight.zeros:
        grouped = grouped - word_zeros(weight.scale)[:, None]
    kernel = (grouped * _scales(weight)[:, None]).reshape(k, n)
    return kernel if weight.order is None else jnp.zeros_like(kernel).at[weight.order].set(kernel)


def _scales(weight: Packed) -> jax.Array:
    """Float32 [G, out], but of MXFP4."""
    return word_scales(weight.scale) if weight.zeros else weight.scale.astype(jnp.float32)


def product(x_MK: jax.Array, weight: Packed, *, cut: bool = True) -> jax.Array:
    """Float32 [M, N]: rows of bfloat16 or float32 times a packed kernel.

    In groups, few rows by the sums of each, scaled; where these took more memory than the weights expanded to the rows'
    type, by those, a bounded share of the outputs at a time.

    Args:
      cut: whether a share is cut out; not where devices have a part of the outputs each, which XLA would gather.
    """
    (m, k), (n, groups), scale = x_MK.shape, (weight.shape[1], weight.groups), _scales(weight)
    zero = word_zeros(weight.scale) if weight.zeros else None
    # Values of up to 8 bits are exact in bfloat16; converted right before the product, compilers fuse that.
    x, values = reordered(weight.rows(x_MK), weight.values.dtype), weight.values.astype(x_MK.dtype)
    dot = lambda values: jax.lax.dot_general(x, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if groups == 1 and zero is None:
        return dot(values) * scale
    # Inputs of a part of a BLOCK are in four places of it: each of the threads of `reordered` has some of them.
    parts = pieces(k, groups)
    threads = 4 if parts > 1 else 1
    places = groups // parts, threads, parts, k // (groups * threads)
    if 4 * m * groups <= k * x.dtype.itemsize:
        x_MBfpi, values_NBfpi = x.reshape(m, *places), values.reshape(-1, *places)
        dims = ((2, 4), (2, 4)), ((1, 3), (1, 3))
        sums = jax.lax.dot_general(x_MBfpi, values_NBfpi, dims, preferred_element_type=jnp.float32)
        sums_GMN = sums.reshape(groups, m, -1)
        if zero is not None:
            inputs_MG = jnp.sum(x_MBfpi, axis=(2, 4), dtype=jnp.float32).reshape(m, groups)
            sums_GMN = sums_GMN - inputs_MG.T[:, :, None] * zero[:, None]
        return jnp.sum(sums_GMN * scale[:, None], axis=0)
    shares = expanded_shares(k, n, x.dtype.itemsize) if cut else 1

    def times(values_NK: jax.Array, scale_GN: jax.Array, zero_GN: jax.Array | None) -> jax.Array:
        values = values_NK.astype(jnp.float32).reshape(n // shares, *places)
        along = lambda v_GN: v_GN.T.reshape(n // shares, groups // parts, 1, parts, 1)
        if zero_GN is not None:
            values = values - along(zero_GN)
        return dot((values * along(scale_GN)).reshape(-1, k).astype(x.dtype))

    if shares == 1:
        return times(weight.values, scale, zero)
    share = lambda x, start, axis: jax.lax.dynamic_slice_in_dim(x, start, n // shares, axis)
    starts = jnp.arange(shares, dtype=jnp.int32) * (n // shares)

    def some(start: jax.Array) -> jax.Array:
        own = None if zero is None else share(zero, start, 1)
        return times(share(weight.values, start, 0), share(scale, start, 1), own)

    return jax.lax.map(some, starts).transpose(1, 0, 2).reshape(m, n)
