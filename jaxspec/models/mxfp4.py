"""MXFP4: weights of 4 bits in blocks of 32 inputs, each with a power of two for a scale (OCP Microscaling 1.0).

Bytes stay on the device as a checkpoint has them, two values in each; a product expands one kernel (of one expert, say)
and forgets it. Values and scales are exact in bfloat16 and float32, so that is the product by the same weights
unquantised. XLA alone, on every backend.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

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

    def along_outputs(self, change: Callable[[jax.Array], jax.Array]) -> Mxfp4:
        """See Quantised.along_outputs."""
        return Mxfp4(change(self.codes), change(self.scale))

    def dequantised(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The kernels [..., in, out], expanded."""
        return jnp.stack(self.halves(dtype), axis=-2).reshape(self.shape)

    def halves(self, dtype: DTypeLike = jnp.float32) -> tuple[jax.Array, jax.Array]:
        """The rows of even inputs [..., in / 2, out] and those of odd ones, expanded."""
        *lead, pairs, d_out = self.codes.shape
        # Both have all values, scales and their products.
        exact = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
        scale = powers(self.scale).astype(exact)[..., None, :]

        def expanded(codes: jax.Array) -> jax.Array:
            codes = codes.astype(jnp.int32)
            exponent, mantissa = (codes >> 1) & 3, codes & 1
            doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
            values = jnp.where(codes >= 8, -doubled, doubled).astype(exact) * jnp.asarray(0.5, exact)
            blocks = values.reshape(*lead, 2 * pairs // BLOCK, BLOCK // 2, d_out) * scale
            return blocks.reshape(self.codes.shape).astype(dtype)

        return expanded(self.codes & 15), expanded(self.codes >> 4)


def powers(scale: jax.Array) -> jax.Array:
    """The scales, exactly: a float32 with this exponent and no mantissa is the power of two."""
    return jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)


def small_values(codes: jax.Array) -> jax.Array:
    """What codes of 4 bits stand for, times UNIT, in float32: few operations, since their bits are a float16's."""
    codes = codes.astype(jnp.uint16)
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def product(x_ME: jax.Array, weight: Mxfp4, dtype: jnp.dtype | None = None) -> jax.Array:
    """Rows [M, in] times one kernel: [M, out] in x's type, or in `dtype`; sums are float32.

    In two products, of even and of odd inputs: to put both halves of the bytes in order TPUs write the kernel out in
    int32, several times (312 MiB for an expert of gpt-oss-20b's on v5e).
    """
    contract = (((1,), (0,)), ((), ()))
    parts = [
        jax.lax.dot_general(x_ME[:, odd::2], half, contract, preferred_element_type=jnp.float32)
        for odd, half in enumerate(weight.halves(x_ME.dtype))
    ]
    return (parts[0] + parts[1]).astype(x_ME.dtype if dtype is None else dtype)
