"""Kernels of all experts in one array, [X, in, out], whole or in few bits, and how GPUs read them in few launches.

Owns two readings: each pair of a row and an expert by itself, gathered and expanded inside the sums that use it; and
several experts expanded together, a bounded share of all; and how they are packed for a kernel. Must not know routers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.models import mxfp4
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised
from pallas_kernels import sizes
from pallas_kernels.small_batch import packed, packed_experts
from pallas_kernels.small_batch.packed import Packed

#: Most inputs that the first stage of a sum takes together.
_PIECE = 256
#: What inner widths of packed experts are multiples of.
_WIDTH = 64


def in_few_bits(kernel: Any) -> bool:
    """Whether it is quantised."""
    return isinstance(kernel, Quantised | Mxfp4 | Packed)


def shape_of(kernel: Any) -> tuple[int, int, int]:
    """[X, in, out]."""
    if isinstance(kernel, Packed):
        return kernel.values.shape[0], *kernel.shape
    count, d_in, d_out = kernel.values.shape if isinstance(kernel, Quantised) else kernel.shape
    return count, d_in, d_out


def gathers(kernel: Any) -> bool:
    """Whether `pair_products` and `expanded` read it: not where inputs are in another order, or rounded as well."""
    return not isinstance(kernel, Quantised) or (kernel.order is None and not kernel.int8_activations)


def divides(kernel: Any, axis: int, count: int) -> bool:
    """Whether so many devices can split it along its inputs (1) or outputs (2), each with the scales of its own."""
    if not in_few_bits(kernel):
        return True
    if isinstance(kernel, Packed) or not gathers(kernel):
        return False
    alone = isinstance(kernel, Quantised) and kernel.groups == 1  # scales of outputs, which all have
    return axis == 2 or alone or kernel.scale.shape[1] % count == 0


def pair_products(x_PE: jax.Array, kernel: Any, experts_P: jax.Array) -> jax.Array:
    """Each row times its own expert's kernel: float32 [P, out].

    Sums over inputs, into which the compiler fuses the gathering and what expands few bits. In two stages: XLA gives a
    long sum too few threads of a GPU (163 against 33 us a layer at 30B-A3B's shapes).
    """
    (rows, inputs), outputs = x_PE.shape, shape_of(kernel)[2]
    group = inputs // kernel.scale.shape[1] if in_few_bits(kernel) else inputs
    size = _piece(inputs, group)
    pieces, scales = inputs // size, max(1, size // group)
    each_1Q = jnp.arange(pieces, dtype=experts_P.dtype)[None]
    places_R = (experts_P[:, None] * pieces + each_1Q).reshape(-1)
    gathered = lambda x, at_R, *shape: jnp.take(x.reshape(-1, *shape), at_R, axis=0, mode="clip")
    x_RC = x_PE.astype(jnp.float32).reshape(rows * pieces, size)
    if not in_few_bits(kernel):
        kernel_RCF = gathered(kernel, places_R, size, outputs).astype(jnp.float32)
        return _over_pieces(jnp.sum(x_RC[:, :, None] * kernel_RCF, axis=1), rows)

    # A piece has whole groups, or lies in one.
    shared = max(1, group // size)
    groups_R = (experts_P[:, None] * (pieces // shared) + each_1Q // shared).reshape(-1)
    by_group = lambda x: gathered(x, groups_R, scales, 1, outputs)
    x_RSg = x_RC.reshape(rows * pieces, scales, size // scales)
    if isinstance(kernel, Mxfp4):
        codes_RSbF = gathered(kernel.codes, places_R, size // 2, outputs)
        codes_RSbF = codes_RSbF.reshape(rows * pieces, scales, size // scales // 2, outputs)
        even, odd = (x_RSg[:, :, start::2, None] / mxfp4.UNIT for start in (0, 1))
        terms = even * mxfp4.small_values(codes_RSbF & 15) + odd * mxfp4.small_values(codes_RSbF >> 4)
        scale_RS1F = mxfp4.powers(by_group(kernel.scale))
    else:
        values_RSgF = gathered(kernel.values, places_R, size, outputs).astype(jnp.float32)
        values_RSgF = values_RSgF.reshape(rows * pieces, scales, size // scales, outputs)
        if kernel.zero is not None:
            values_RSgF = values_RSgF - by_group(kernel.zero).astype(jnp.float32)
        terms, scale_RS1F = x_RSg[..., None] * values_RSgF, by_group(kernel.scale).astype(jnp.float32)
    if scales == 1:
        return _over_pieces(jnp.sum(terms[:, 0], axis=1) * scale_RS1F[:, 0, 0], rows)
    return _over_pieces(jnp.sum(terms * scale_RS1F, axis=(1, 2)), rows)


def _over_pieces(parts_RF: jax.Array, rows: int) -> jax.Array:
    return jnp.sum(parts_RF.reshape(rows, -1, parts_RF.shape[1]), axis=1)


def _piece(inputs: int, group: int) -> int:
    """How many inputs the first stage takes together: the most that divides them, in whole groups or parts of one."""
    fits = lambda size: inputs % size == 0 and (size % group == 0 or group % size == 0)
    return max(size for size in range(1, min(inputs, _PIECE) + 1) if fits(size))


def expanded(kernel: Any, dtype: DTypeLike) -> jax.Array:
    """The kernels [X, in, out] in `dtype`."""
    if isinstance(kernel, Mxfp4):
        return kernel.dequantised(dtype)
    if isinstance(kernel, Quantised):
        return jax.vmap(lambda own: own.dequantised())(kernel).astype(dtype)
    return kernel


def times_all(x_ME: jax.Array, kernel: Any) -> jax.Array:
    """Rows times every kernel, expanded: [X, M, out]."""
    return jnp.einsum("me,xef->xmf", x_ME, expanded(kernel, x_ME.dtype))


def times_own(x_XMF: jax.Array, kernel: Any) -> jax.Array:
    """Each kernel, expanded, times rows of its own, and the sum over all: float32 [M, out]."""
    wide_XFE = expanded(kernel, x_XMF.dtype)
    return jnp.einsum("xmf,xfe->me", x_XMF, wide_XFE, preferred_element_type=jnp.float32)


def packing_refusal(kernel: Any, axis: int, count: int) -> str | None:
    """Why a kernel cannot be packed (`pallas_kernels.small_batch.packed_experts`), or None; by its shapes and types.

    Args:
      axis, count: that so many devices split, see `divides`.
    """
    if not gathers(kernel):
        return "they have an order of inputs or quantised activations"
    zero = kernel.zero if isinstance(kernel, Quantised) else None
    if zero is not None and (why := packed.zero_refusal(kernel.values.dtype, zero.dtype)):
        return why
    kernel = jax.eval_shape(
        lambda kernel: _filled(jax.tree.map(lambda x: x[0], _parts(kernel, axis, count)), axis), kernel
    )
    if isinstance(kernel, Mxfp4):
        return packed_experts.refusal(packed.FLOAT4, *shape_of(kernel)[1:], kernel.scale.shape[1])
    if not isinstance(kernel, Quantised):
        return f"they are {getattr(kernel, 'dtype', type(kernel).__name__)}, not of few bits"
    if kernel.values.dtype == jnp.float4_e2m1fn:  # the kernel's are MXFP4: codes, and scales that are powers of two
        return "they are NVFP4"
    return packed_experts.refusal(kernel.values.dtype.name, *shape_of(kernel)[1:], kernel.groups)


def scale_refusal(kernel: Any) -> str | None:
    """Why a kernel's own values cannot be packed exactly, or None: MXFP4's scales may lie too far from 1."""
    if not isinstance(kernel, Mxfp4):
        return None
    least, most = map(int, _ends(kernel))
    if least >= packed.LEAST_SCALE and most <= packed.MOST_SCALE:
        return None
    served = f"2 ** {packed.LEAST_SCALE - 127} to 2 ** {packed.MOST_SCALE - 127}"
    return f"scales must be {served}, got 2 ** {least - 127} to 2 ** {most - 127}"


@jax.jit
def _ends(kernel: Mxfp4) -> tuple[jax.Array, jax.Array]:
    scale = _used_scales(kernel)
    return jnp.min(scale), jnp.max(scale)


def _used_scales(kernel: Mxfp4) -> jax.Array:
    """Its scales, 1 where all values are zeros."""
    blocks = kernel.codes.reshape(*kernel.scale.shape[:-1], mxfp4.BLOCK // 2, kernel.scale.shape[-1])
    return jnp.where(jnp.any(blocks & 0x77, axis=-2), kernel.scale, 127).astype(jnp.uint8)


def pack(kernel: Any, axis: int = 1, count: int = 1) -> Packed:
    """The kernel as the kernel of few rows reads it, which neither `packing_refusal` nor `scale_refusal` refuses.

    Args:
      axis, count: that so many devices split, whose parts are packed each by itself, their inner widths (gates and
        ups of axis 2, inputs of axis 1) filled up with zeros to what the kernel reads.
    """
    parts = jax.vmap(lambda part: _packed(_filled(part, axis)))(_parts(kernel, axis, count))
    joined = lambda x, axis: jnp.moveaxis(x, 0, axis).reshape(*x.shape[1 : axis + 1], -1, *x.shape[axis + 2 :])
    alone = axis == 1 and parts.groups == 1 and isinstance(kernel, Quantised) and kernel.groups == 1
    scale = parts.scale[0] if alone else joined(parts.scale, axis)
    return dataclasses.replace(parts, values=joined(parts.values, 3 - axis), scale=scale)


def _packed(kernel: Any) -> Packed:
    if isinstance(kernel, Mxfp4):
        return packed_experts.pack_float4(kernel.codes, _used_scales(kernel))
    return packed_experts.pack(kernel.values, kernel.scale, kernel.zero)


def filled_halves(x: jax.Array, count: int = 1) -> jax.Array:
    """The last axis, of each of so many devices gates and as many ups, as `pack` has it."""
    *lead, size = x.shape
    halves = x.reshape(*lead, 2 * count, -1)
    more = -halves.shape[-1] % _WIDTH
    return jnp.pad(halves, [(0, 0)] * (len(lead) + 1) + [(0, more)]).reshape(*lead, size + 2 * count * more)


def _filled(kernel: Any, axis: int) -> Any:
    """A device's part of a kernel with its inner width filled up; groups of several blocks stay as they are."""
    if axis == 2:
        return jax.tree.map(filled_halves, kernel)
    more = -shape_of(kernel)[1] % _WIDTH
    inputs = lambda x, more: jnp.pad(x, ((0, 0), (0, more), (0, 0)))
    if isinstance(kernel, Mxfp4):
        return Mxfp4(inputs(kernel.codes, more // 2), inputs(kernel.scale, more // mxfp4.BLOCK))
    if isinstance(kernel, Quantised) and kernel.groups == 1:
        return dataclasses.replace(kernel, values=inputs(kernel.values, more))
    return kernel


def _parts(kernel: Any, axis: int, count: int) -> Any:
    """What each of so many devices has of a kernel that they split, one after the other along a first axis."""

    def part(x: jax.Array) -> jax.Array:
        if x.shape[axis] % count:  # scales of outputs
            return jnp.broadcast_to(x[None], (count, *x.shape))
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :]), axis, 0)

    return jax.tree.map(part, kernel)


def together(count: int, numbers: int, dtype: DTypeLike) -> int:
    """How many of so many experts are expanded at a time, each of so many numbers: a divisor of their count."""
    most = max(1, sizes.EXPANDED // (numbers * jnp.dtype(dtype).itemsize))
    return max(size for size in range(1, min(most, count) + 1) if count % size == 0)
