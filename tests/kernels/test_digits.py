"""A row as digits, and what threads do with them, register by register, on a CPU: see lanes."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.small_batch import digit_products, digits, packed, threads, unpack
from pallas_kernels.small_batch.packed import BLOCK
from tests.kernels.lanes import Warpgroup
from tests.kernels.test_unpack_registers import scalar, swizzled

#: Types, scales of a block, or none of its own, and whether there are zero points.
FORMATS = {
    "int8": (jnp.int8, 0, False), "int8 of 32": (jnp.int8, 4, False), "int4": (jnp.int4, 1, False),
    "int4 of 64": (jnp.int4, 2, False), "int4, zeros": (jnp.int4, 1, True), "int4 of 32, zeros": (jnp.int4, 4, True),
}  # fmt: skip


split = jax.jit(digits.split)


@functools.cache
def normals(blocks: int) -> np.ndarray:
    return np.asarray(jax.random.normal(jax.random.key(4), (blocks, BLOCK)))


def row(blocks: int) -> np.ndarray:
    """Values of any size, the first block of them all 0."""
    size = np.exp2((np.arange(blocks) % 5).astype(np.float32) * 20 - 40)
    x = normals(blocks) * size[:, None]
    x[0], x[1, 0] = 0, 1e4
    return x.astype(jnp.bfloat16)


def lying(group: Warpgroup, ref: Any, step: digits.Step, block: int) -> np.ndarray:
    """A block's digits [DIGITS, BLOCK] in shared memory, from the order that weights of its format have."""
    number, place = step.place(block)
    found = []
    for digit in range(digits.DIGITS):
        line = 2 * place + digit % 2
        begin = ref.at + number * 1536 + (line * 128 if digit < 2 else 1024 + place * 128)
        bytes_ = group.memory[begin : begin + 128].view(np.int8).reshape(8, 16)[np.arange(8) ^ line].reshape(4, -1)
        if step.four:  # every 32 of them
            found.append(bytes_.reshape(4, 2, 4, 2, 2).transpose(0, 4, 1, 2, 3).reshape(BLOCK))
        else:
            found.append(bytes_.reshape(4, 2, 4, 2, 2).transpose(0, 1, 4, 2, 3).reshape(BLOCK))
    return np.stack(found)


def test_digits_are_the_row_but_for_what_lies_far_below_a_block_s_largest():
    x = row(5)
    found, factors = (np.asarray(part) for part in split(x))
    numbers = sum(found[:, i].astype(np.float32) * np.float32(256.0**i) for i in range(digits.DIGITS))
    got, want = numbers * factors[:, None], x.astype(np.float32)
    largest = np.abs(want).max(axis=-1, keepdims=True)
    near = np.abs(want) >= largest * 2.0**-13
    np.testing.assert_array_equal(got[near], want[near])
    assert (np.abs(got - want) <= largest * 2.0**-22).all() and not near.all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_makes_sums_none(bad: float):
    x = row(2)
    x[1, 3] = bad
    found, factors = (np.asarray(part) for part in split(x))
    assert np.isfinite(factors[0]) and np.isnan(factors[1]) and found.dtype == jnp.int8


def weights_image(stored: np.ndarray, four: bool, paired: bool) -> np.ndarray:
    """Bytes of a tile [parts, 32, inputs] in tiles of 8 columns."""
    if four:
        nibbles = stored.view(np.uint8).reshape(*stored.shape[:-1], -1, 2) & 15
        stored = nibbles[..., 0] | nibbles[..., 1] << 4
    width = 64 if four and not paired else 128
    parts, columns, size = stored.shape
    tiles = stored.view(np.uint8).reshape(parts, columns // 8, 8, size // width, width).transpose(0, 1, 3, 2, 4)
    return tiles if four else swizzled(tiles)


@pytest.mark.parametrize(("blocks", "of", "each"), [(16, 4, 4), (6, 4, 2), (40, 4, 8), (112, 4, 4), (20, 2, 8)])
def test_warpgroups_write_the_digits_of_their_own_blocks_alone(
    blocks: int, of: int, each: int, monkeypatch: pytest.MonkeyPatch
):
    """Whose inputs they have waited for; and all together those of each block once."""
    step, x = digits.Step("int8", 1, 2, 0, paired=False), row(blocks)
    groups, written = step.groups(blocks), np.zeros(blocks, int)
    for number in range(of):
        for turn in range(digits.Share(number, of, each).turns(blocks)):
            share, group = digits.Share(number, of, each, turn), Warpgroup(1 << 17)
            x_ref = group.put(x, x.shape, "bf16")
            digits_ref = group.put(np.full((groups, 4, 3, BLOCK), 99, np.int8), (groups, 4, 3, BLOCK), "i8")
            factors_ref = group.put(np.zeros(groups * 4, np.float32), (groups, 4), "f32")
            with monkeypatch.context() as patch:
                for module in (threads, digit_products):
                    group.install(patch, module)
                digit_products._make(
                    None, x_ref, digits_ref, factors_ref, scalar(number), scalar(turn), step=step, share=share
                )
            factors = group.memory[factors_ref.at :][: groups * 16].view(np.float32).reshape(groups, 4)
            own = [bool(share.has(block)) for block in range(blocks)]
            assert own == [factors[step.place(block)] != 0 for block in range(blocks)]
            assert np.count_nonzero(factors) == sum(own)
            assert own == [bool((lying(group, digits_ref, step, block) != 99).any()) for block in range(blocks)]
            written += own
    assert (written == 1).all()


@pytest.mark.parametrize("parts", [2, 1])
@pytest.mark.parametrize(
    ("name", "depth"), [*((name, 4) for name in sorted(FORMATS)), ("int4", 1), ("int4", 2), ("int8", 1), ("int8", 2)]
)
def test_products_by_digits_have_the_bits_that_they_should(
    name: str, parts: int, depth: int, monkeypatch: pytest.MonkeyPatch
):
    """Digits as threads make them and mma multiplies them, against whole numbers and float32."""
    dtype, pieces, zeros = FORMATS[name]
    skipped = 4  # blocks of a warp's, before the step
    count, before = depth * (2 // parts), skipped * (2 // parts)
    inputs, columns = (before + count) * BLOCK, parts * 32
    rng, limits = np.random.default_rng(3), jnp.iinfo(dtype)
    values = rng.integers(limits.min, limits.max + 1, (inputs, columns), np.int8).astype(dtype)
    scale = rng.uniform(0.5, 1.5, (inputs // BLOCK * (pieces or 1), columns)).astype(np.float32)
    zero = rng.integers(-8, 120, scale.shape, np.int8) if zeros else None
    weight = jax.jit(packed.pack)(values, scale, zero)
    step = digits.Step(weight.kind, depth, parts, pieces, paired=depth > 1 and dtype == jnp.int4)
    stored = np.asarray(weight.values).reshape(parts, 32, -1)[..., before * BLOCK :]
    stored = np.ascontiguousarray(stored.astype(np.int8))
    scales = np.asarray(weight.scale).reshape(-1, parts, 32).transpose(1, 0, 2)
    x = row(before + count)  # before the step blocks that are no numbers, or next to nothing
    x[2], x[3, 5] = 1e-36, np.inf
    start = rng.normal(size=(64, 1)).astype(np.float32) * np.ones((1, digits.TOGETHER), np.float32)

    group = Warpgroup(1 << 17)
    w_ref = group.put(weights_image(stored, step.four, step.paired), (parts, 32, count * BLOCK), "i8")
    x_ref = group.put(x, x.shape, "bf16")
    groups = step.groups(len(x))
    shapes = (groups, digits.TOGETHER, digits.DIGITS, BLOCK), (groups, digits.TOGETHER)
    digits_ref = group.put(np.full(shapes[0], 99, np.int8), shapes[0], "i8")
    factors_ref = group.put(np.full(shapes[1], np.nan, np.float32), shapes[1], "f32")
    scale_ref = group.put(scales, scales.shape, "i32" if zeros else "f32")
    fragment = start.reshape(4, 2, 8, 4).transpose(1, 0, 2, 3).reshape(2, 128)  # a column and one 8 farther
    registers = np.empty(2, object)
    registers[:] = [[row] for row in fragment]
    with monkeypatch.context() as patch:
        for module in (unpack, threads, digit_products):
            group.install(patch, module)
        for number in range(2):
            share = digits.Share(number, 2, 4)
            for turn in range(share.turns(len(x))):
                args = scalar(number), scalar(turn)
                digit_products._make(None, x_ref, digits_ref, factors_ref, *args, step=step, share=share)
        total: Any = SimpleNamespace(registers=registers, layout=None)
        found = digit_products._products(
            None, total, w_ref, digits_ref, factors_ref, scale_ref, scalar(skipped), step=step
        )
    made, by = (np.asarray(part) for part in split(x))
    for block in range(len(x)):
        place = step.place(block)
        if np.isfinite(x[block].astype(np.float32)).all():
            np.testing.assert_array_equal(lying(group, digits_ref, step, block), made[block])
        factors = group.memory[factors_ref.at :][: groups * 16].view(np.float32).reshape(groups, 4)
        np.testing.assert_array_equal(factors[place], by[block] * step.unit)
    got = np.stack([value[0] for value in found]).reshape(2, 4, 8, 4).transpose(1, 0, 2, 3).reshape(64, 4)

    own_digits, own_factors = np.zeros(shapes[0], np.int8), np.zeros(shapes[1], np.float32)
    for block in range(len(x)):
        own_digits[step.place(block)], own_factors[step.place(block)] = made[block], by[block] * step.unit
    given = (jnp.asarray(x) for x in (start, stored, own_digits, own_factors, scales))
    # Not as one program: cases share those of its operations, of which it has hundreds.
    np.testing.assert_array_equal(got, np.asarray(digits.pretended(step, *given, skipped)))
