"""A row as digits, and what threads do with them, register by register, on a CPU: see lanes."""

from __future__ import annotations

import dataclasses
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


def lying(group: Warpgroup, ref: Any, step: digits.Step, block: int, row: int = 0) -> np.ndarray:
    """A block's digits [DIGITS, BLOCK] in shared memory, from the order that weights of its format have."""
    number, place = step.place(block, row)
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


def several(rows: int, blocks: int) -> np.ndarray:
    """The blocks of one row after another's."""
    return np.concatenate([np.roll(row(blocks), 3 * i, axis=0) for i in range(rows)])


def weights_image(stored: np.ndarray, four: bool, paired: bool) -> np.ndarray:
    """Bytes of a tile [parts, 32, inputs] in tiles of 8 columns."""
    if four:
        nibbles = stored.view(np.uint8).reshape(*stored.shape[:-1], -1, 2) & 15
        stored = nibbles[..., 0] | nibbles[..., 1] << 4
    width = 64 if four and not paired else 128
    parts, columns, size = stored.shape
    tiles = stored.view(np.uint8).reshape(parts, columns // 8, 8, size // width, width).transpose(0, 1, 3, 2, 4)
    return tiles if four else swizzled(tiles)


def make_all(x_ref: Any, digits_ref: Any, factors_ref: Any, step: digits.Step, share: digits.Share) -> None:
    """All turns of a share: of one row one by one, of several read first."""
    turns, number = share.turns(x_ref.type.shape[0] // step.rows), scalar(share.number)
    refs = digits_ref, factors_ref
    if step.rows == 1:
        for turn in range(turns):
            digit_products._make(None, x_ref, *refs, number, scalar(turn), step=step, share=share)
        return
    found = digit_products._read(None, x_ref, number, step=step, share=share, turns=turns)
    words = SimpleNamespace(registers=found)
    digit_products._make_all(None, x_ref, words, *refs, number, step=step, share=share, turns=turns)


@pytest.mark.parametrize(
    ("blocks", "of", "each", "rows"),
    [
        (16, 4, 4, 1), (6, 4, 2, 1), (40, 4, 8, 1), (112, 4, 4, 1), (20, 2, 8, 1),
        (16, 4, 4, 2), (6, 4, 2, 3), (16, 4, 4, 4), (20, 2, 8, 4),
    ],
)  # fmt: skip
def test_warpgroups_write_the_digits_of_their_own_blocks_alone(
    blocks: int, of: int, each: int, rows: int, monkeypatch: pytest.MonkeyPatch
):
    """Whose inputs they have waited for; and all together those of each block once."""
    step, x = digits.Step("int8", 1, 2, 0, paired=False, rows=rows), several(rows, blocks)
    groups, written = step.groups(blocks), np.zeros((rows, blocks), int)
    for number in range(of):
        share, group = digits.Share(number, of, each, rows=rows), Warpgroup(1 << 17)
        x_ref = group.put(x, x.shape, "bf16")
        digits_ref = group.put(np.full((groups, 4, 3, BLOCK), 99, np.int8), (groups, 4, 3, BLOCK), "i8")
        factors_ref = group.put(np.zeros(groups * 4, np.float32), (groups, 4), "f32")
        with monkeypatch.context() as patch:
            for module in (threads, digit_products):
                group.install(patch, module)
            make_all(x_ref, digits_ref, factors_ref, step, share)
        factors = group.memory[factors_ref.at :][: groups * 16].view(np.float32).reshape(groups, 4)
        turns = [dataclasses.replace(share, turn=turn) for turn in range(share.turns(blocks))]
        each_own = np.zeros((len(turns), rows, blocks), bool)
        for i, row, block in np.ndindex(each_own.shape):
            each_own[i, row, block] = turns[i].has(block, row)
        own = each_own.sum(axis=0)
        assert (own <= 1).all()
        for row, block in np.ndindex(rows, blocks):
            assert own[row, block] == (factors[step.place(block, row)] != 0)
            assert own[row, block] == (lying(group, digits_ref, step, block, row) != 99).any()
        assert np.count_nonzero(factors) == own.sum()
        written += own
    assert (written == 1).all()


@pytest.mark.parametrize("parts", [2, 1])
@pytest.mark.parametrize(
    ("name", "depth", "rows"),
    [
        *((name, 4, rows) for name in sorted(FORMATS) for rows in (1, 4)),
        ("int4", 1, 1), ("int4", 2, 1), ("int8", 1, 1), ("int8", 2, 1), ("int4", 2, 3), ("int8", 1, 2),
    ],
)  # fmt: skip
def test_products_by_digits_have_the_bits_that_they_should(
    name: str, parts: int, depth: int, rows: int, monkeypatch: pytest.MonkeyPatch
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
    step = digits.Step(weight.kind, depth, parts, pieces, paired=depth > 1 and dtype == jnp.int4, rows=rows)
    stored = np.asarray(weight.values).reshape(parts, 32, -1)[..., before * BLOCK :]
    stored = np.ascontiguousarray(stored.astype(np.int8))
    scales = np.asarray(weight.scale).reshape(-1, parts, 32).transpose(1, 0, 2)
    x, blocks = several(rows, before + count), before + count
    x[2], x[3, 5] = 1e-36, np.inf  # before the step, blocks that are no numbers, or next to nothing
    start = rng.normal(size=(64, 1)).astype(np.float32) * np.ones((1, digits.TOGETHER), np.float32)

    group = Warpgroup(1 << 17)
    w_ref = group.put(weights_image(stored, step.four, step.paired), (parts, 32, count * BLOCK), "i8")
    x_ref = group.put(x, x.shape, "bf16")
    groups = step.groups(blocks)
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
            make_all(x_ref, digits_ref, factors_ref, step, digits.Share(number, 2, 4, rows=rows))
        total: Any = SimpleNamespace(registers=registers, layout=None)
        found = digit_products._products(
            None, total, w_ref, digits_ref, factors_ref, scale_ref, scalar(skipped), step=step
        )
    made, by = (np.asarray(part) for part in split(x))
    places = {i: step.place(i % blocks, i // blocks) for i in range(len(x))}
    factors = group.memory[factors_ref.at :][: groups * 16].view(np.float32).reshape(groups, 4)
    for i, place in places.items():
        if np.isfinite(x[i].astype(np.float32)).all():
            lies = lying(group, digits_ref, step, i % blocks, i // blocks)
            np.testing.assert_array_equal(lies, made[i])
        np.testing.assert_array_equal(factors[place], by[i] * step.unit)
    got = np.stack([value[0] for value in found]).reshape(2, 4, 8, 4).transpose(1, 0, 2, 3).reshape(64, 4)

    own_digits, own_factors = np.zeros(shapes[0], np.int8), np.zeros(shapes[1], np.float32)
    for i, place in places.items():
        own_digits[place], own_factors[place] = made[i], by[i] * step.unit
    # Not as one program: cases share those of its operations, of which it has hundreds.
    given = (jnp.asarray(x) for x in (start, stored, own_digits, own_factors, scales))
    want, used = digits.pretended(step, *given, first=skipped), slice(None if rows == 1 else rows)
    np.testing.assert_array_equal(got[:, used], np.asarray(want)[:, used])
