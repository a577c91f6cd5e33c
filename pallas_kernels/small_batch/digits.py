"""Products of one to four rows by packed weights, multiplied as integers, on Hopper.

With few rows, `unpack` keeps a multiprocessor busy with making bfloat16 of weights. Here weights stay integers: a mask
makes four bytes of four nibbles, where two of bfloat16 take three instructions. Of every 128 inputs (a block) all
become integers of 23 bits that have one power of two in common, and these three digits of 8 bits. Integer mma
multiplies weights by digits, exactly. Then sums are put together and scaled in float32, block by block. What is lost
are bits of an input that lie more than 21 binary places below the largest of its block: as if a block's sum were
rounded to float32 a little early.

mma multiplies 16 columns by 8 rows: of one row the two low digits of four blocks, and again the high ones; of up to
four rows those of one block. A thread of it has the sums of both low digits, or of the high one, of the block or row
whose number is the thread's among the four that share a column. A row's sums are put together, scaled and added in the
same order, so it has the same bits alone and among four, where these are multiplied so, too. Each multiprocessor makes
the digits anew, of all rows: more than four would take longer than they save.

Owns what digits are, where they lie and who makes which; `digit_products` makes and multiplies them. Must not know who
walks along the inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.small_batch import packed, unpack
from pallas_kernels.small_batch.packed import BLOCK, ZEROS

#: Blocks of one row, or rows of one block, that are multiplied together; and digits of an input.
TOGETHER, DIGITS = 4, 3
#: Formats that are served.
KINDS = "int8", "int4", "int4" + ZEROS
#: Bits of an integer besides its sign; a block's exponent is at least so large, below which all is rounded to 0.
BITS, LEAST = 22, 32
#: Blocks of a row that a warpgroup makes digits of at once.
AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Step:
    """What a warpgroup multiplies at once, of a tile of two stretches of 32 columns or of one.

    Blocks of one stretch are two of a warpgroup's warps', or the other two's, by turns; where a line of weights is two
    blocks of 4 bits, two of them at a turn.

    Attributes:
      kind: see `Packed.kind`.
      depth: blocks that a warp has of a step. parts: stretches of columns. pieces: of a block, that have scales of
        their own, or 0 where one scale is for all inputs. paired: whether lines of weights are two blocks.
      rows: up to `TOGETHER`.
    """

    kind: str
    depth: int
    parts: int
    pieces: int
    paired: bool
    rows: int = 1

    @property
    def four(self) -> bool:
        return unpack.stored(self.kind) == jnp.int4

    @property
    def unit(self) -> float:
        """What weights' integers of 1 stand for."""
        return 1 / 16 if self.kind == "int4" else 1.0

    @property
    def blocks(self) -> int:
        """Of both stretches' warps."""
        return self.depth * (2 // self.parts)

    @property
    def share(self) -> int:
        """Blocks that are multiplied together."""
        return min(TOGETHER, self.depth) if self.rows == 1 else 1

    def groups(self, blocks: int) -> int:
        """Groups of digits that so many blocks take."""
        if self.rows > 1:
            return blocks
        return -(-blocks // (TOGETHER * 2 // self.parts)) * (2 // self.parts)

    def block(self, i: Any, second: Any) -> Any:
        """Of a step the i-th of a warp's."""
        if self.parts == 2:
            return i
        return i // 2 * 4 + second * 2 + i % 2 if self.paired else 2 * i + second

    def place(self, block: Any, row: Any = 0) -> tuple[Any, Any]:
        """Group and number in it of a row's digits of a block."""
        if self.rows > 1:
            return block, row
        if self.parts == 2:
            return block // TOGETHER, block % TOGETHER
        second, own = (block // 2 % 2, block // 4 * 2 + block % 2) if self.paired else (block % 2, block // 2)
        return own // TOGETHER * 2 + second, own % TOGETHER


def scratch(step: Step, blocks: int) -> dict[str, Any]:
    """The shared memory of digits of so many blocks."""
    groups = step.groups(blocks)
    return {
        "digits": plgpu.SMEM((groups, TOGETHER, DIGITS, BLOCK), jnp.int8),
        "factors": plgpu.SMEM((groups, TOGETHER), jnp.float32),
    }


def transforms(kind: str, paired: bool) -> tuple[Any, ...]:
    """How a tile of weights lies in shared memory: pieces of 8 columns of 128 bytes, or where only one block of 4 bits
    is there of 64. The copy engine is slower where lines are shorter."""
    if unpack.stored(kind) == jnp.int4 and paired:
        return (plgpu.TilingTransform((8, 2 * BLOCK)),)
    return unpack.transforms(unpack.stored(kind))


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks [.., BLOCK] as digits int8 [.., DIGITS, BLOCK], the low ones first, and the float32 [..] that their
    numbers are to be multiplied by."""
    bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32) & 0x7FFF
    exponent = jnp.maximum(jnp.max(bits, axis=-1) >> 7, LEAST)
    power = lambda e: lax.bitcast_convert_type(e << 23, jnp.float32)
    scaled = x.astype(jnp.float32) * power(253 + BITS - exponent)[..., None]
    finite = jnp.where(jnp.isfinite(scaled), scaled, 0.0)
    whole = jnp.round(finite).astype(jnp.int32) + 0x8080
    digits = jnp.stack([(whole & 255) - 128, (whole >> 8 & 255) - 128, whole >> 16], axis=-2)
    return digits.astype(jnp.int8), jnp.where(exponent < 255, power(exponent + 1 - BITS), jnp.nan)


def joined(weights: jax.Array, digits: jax.Array) -> jax.Array:
    """Weights [columns, inputs] times digits [DIGITS, inputs], put together: float32 [columns]."""
    dot = functools.partial(lax.dot_general, preferred_element_type=jnp.int32)
    low, middle, high = (dot(weights.astype(jnp.int8), digits[i], (((1,), (0,)), ((), ()))) for i in range(DIGITS))
    return high.astype(jnp.float32) * 65536 + (middle * 256 + low).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Share:
    """The blocks whose digits a warpgroup makes, some of them at a turn.

    Attributes:
      number: of the share, of so many. each: blocks that are one share's before the next one's come.
      turn: which of the share's turns. rows: that a block has digits of.
    """

    number: Any
    of: int
    each: int
    turn: Any = 0
    rows: int = 1

    def turns(self, blocks: int) -> int:
        """Of each share, of so many blocks."""
        own = -(-blocks // (self.of * self.each)) * self.each
        return -(-own * self.rows // AT_ONCE)

    def has(self, block: int, row: int = 0) -> Any:
        """Whether the turn makes this row's of a block."""
        chunk, rest = divmod(block, self.each)
        own = (chunk // self.of * self.each + rest) * self.rows + row
        return (self.number == chunk % self.of) & (self.turn == own // AT_ONCE)


def pretended(step: Step, total: jax.Array, tile: Any, digits: Any, factors: Any, scales: Any, first: Any) -> jax.Array:
    """What `digit_products.products` gives, without a thread."""
    values = packed.natural(tile[...], unpack.stored(step.kind)).astype(jnp.int32) * int(1 / step.unit)
    scales, pieces, halves = scales[...], max(1, step.pieces), []
    size = BLOCK // pieces
    for half in range(2):
        part, sums = half % step.parts, total[32 * half : 32 * half + 32]
        for i, row in itertools.product(range(step.depth), range(step.rows)):
            block = step.block(i, half)
            number = block + first * (2 // step.parts)
            place = step.place(number, row)
            own, by = digits[place], factors[place]
            for piece in range(pieces):
                begin = block * BLOCK + piece * size
                w, by_columns = values[part, :, begin : begin + size], jnp.ones((32,))
                if step.pieces:
                    by_columns = scales[part, number * pieces + piece]
                if step.kind.endswith(ZEROS):
                    w = w - packed.word_zeros(by_columns).astype(jnp.int32)[:, None]
                    by_columns = packed.word_scales(by_columns)
                found = joined(w, own[:, piece * size : (piece + 1) * size]) * (by_columns * by)
                mine = (jnp.arange(TOGETHER) == row) | (step.rows == 1)
                sums = jnp.where(mine, sums + found[:, None], sums)
        halves.append(sums)
    return jnp.concatenate(halves)
