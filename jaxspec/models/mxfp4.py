"""MXFP4: weights of 4 bits in blocks of 32 inputs, each with a power of two for a scale (OCP Microscaling 1.0).

Bytes stay on the device as a checkpoint has them, two values in each; a product expands one kernel (of one expert, say)
and forgets it. Values and scales are exact in bfloat16 and float32, so that is the product by the same weights
unquantised. XLA alone, on every backend.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

#: Inputs that share a scale.
BLOCK = 32
#: What `small_values` are multiples of, as float16 has these codes' bits.
UNIT = 2.0**-14


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """A kernel [in, out], or several along leading axes.

    Attributes:
      codes: uint8 [..., in / 2, out], the even input in the low four bits: a sign, two of exponent, one of mantissa.
      scale: uint8 [..., in / 32, out], exponents with a bias of 127; 255 stands for NaN, and is not served.
    """

    codes: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, pairs, d_out = self.codes.shape
        return (*lead, 2 * pairs, d_out)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return math.prod(self.codes.shape) + math.prod(self.scale.shape)

    def __getitem__(self, key: object) -> Mxfp4:
        """Whole, as `nnx.Variable[...]` asks."""
        assert key is Ellipsis, key
        return self

    def dequantised(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The kernels [..., in, out], expanded."""
        codes = jnp.stack([self.codes & 15, self.codes >> 4], axis=-2)  # [..., in / 2, 2, out]
        codes = codes.reshape(self.shape).astype(jnp.int32)
        exponent, mantissa = (codes >> 1) & 3, codes & 1
        halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
        values = jnp.where(codes >= 8, -halves, halves).astype(jnp.float32) * 0.5
        *lead, d_in, d_out = self.shape
        blocks = values.reshape(*lead, d_in // BLOCK, BLOCK, d_out) * powers(self.scale)[..., None, :]
        return blocks.reshape(self.shape).astype(dtype)


def powers(scale: jax.Array) -> jax.Array:
    """The scales, exactly: a float32 with this exponent and no mantissa is the power of two."""
    return jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)


def small_values(codes: jax.Array) -> jax.Array:
    """What codes of 4 bits stand for, times UNIT, in float32: few operations, since their bits are a float16's."""
    codes = codes.astype(jnp.uint16)
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def product(x_ME: jax.Array, weight: Mxfp4, dtype: jnp.dtype | None = None) -> jax.Array:
    """Rows [M, in] times one kernel: [M, out] in x's type, or in `dtype`; sums are float32."""
    contract = (((1,), (0,)), ((), ()))
    kernel_EF = weight.dequantised(x_ME.dtype)
    y_MF = jax.lax.dot_general(x_ME, kernel_EF, contract, preferred_element_type=jnp.float32)
    return y_MF.astype(x_ME.dtype if dtype is None else dtype)
