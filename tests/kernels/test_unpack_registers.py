"""What threads do with packed weights, register by register, on a CPU: see lanes."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.small_batch import lines, packed, unpack
from pallas_kernels.small_batch.packed import BLOCK
from tests.kernels.lanes import Ref, Warpgroup

#: Blocks of a step, and those before it.
BLOCKS, SKIPPED = 2, 1
FORMATS = {
    "int4": (jnp.int4, 1), "int4 of 64": (jnp.int4, 2), "int4 of 32": (jnp.int4, 4), "int8": (jnp.int8, 1),
    "int8 of 32": (jnp.int8, 4), "float8": (jnp.float8_e4m3fn, 1), "int4, zeros": (jnp.int4, 1),
    "int4 of 64, zeros": (jnp.int4, 2), "int4 of 32, zeros": (jnp.int4, 4), "int8, zeros": (jnp.int8, 1),
    "int8 of 64, zeros": (jnp.int8, 2), "float4": (packed.FLOAT4, 1),
}  # fmt: skip


def scalar(value: int) -> Any:
    """One that all threads have."""
    return SimpleNamespace(registers=SimpleNamespace(item=lambda: np.full(128, value, np.uint32)))


def swizzled(rows: np.ndarray) -> np.ndarray:
    """Bytes [.., 8, 128]: 16 of them change places by their row."""
    lines = rows.reshape(*rows.shape[:-1], 8, 16)
    return np.stack([lines[..., row, np.arange(8) ^ row, :] for row in range(8)], axis=-3).reshape(rows.shape)


def weights_image(values: np.ndarray, four: bool) -> np.ndarray:
    """Bytes of a tile [parts, 32, inputs] in tiles of 8 columns and 128 inputs."""
    if four:
        nibbles = values.view(np.uint8).reshape(*values.shape[:-1], -1, 2) & 15
        return _tiles(nibbles[..., 0] | nibbles[..., 1] << 4, 64)
    return swizzled(_tiles(values.view(np.uint8), 128))


def rows_image(x: np.ndarray) -> np.ndarray:
    """Bytes of rows [rows, inputs] in tiles of 8 rows and 64 inputs."""
    return swizzled(_tiles(np.ascontiguousarray(x).view(np.uint8)[None], 128)[0])


def _tiles(x: np.ndarray, width: int) -> np.ndarray:
    parts, rows, columns = x.shape
    return x.reshape(parts, rows // 8, 8, columns // width, width).transpose(0, 1, 3, 2, 4)


@functools.cache
def tile(name: str, parts: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """A kernel in memory's order whose tile is its last blocks: [parts, 32, inputs], what they stand for, and scales
    [parts, G, 32]."""
    dtype, pieces = FORMATS[name]
    inputs = (SKIPPED + BLOCKS) * BLOCK * (2 // parts)
    columns, groups = parts * 32, inputs // BLOCK * pieces
    rng = np.random.default_rng(3)
    if dtype == packed.FLOAT4:
        codes = rng.integers(0, 16, (inputs, columns), np.uint8)
        exponents = rng.integers(120, 128, (inputs // 32, columns), np.uint8)
        weight = jax.jit(packed.pack_float4)(codes, exponents)
        powers = np.exp2(np.repeat(exponents.astype(np.float32), 32, axis=0) - 127 - packed.EXPONENT)
        wide = np.asarray(jax.jit(packed.float4)(codes)) * powers
    else:
        limits = (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype)
        values = rng.uniform(float(limits.min), float(limits.max), (inputs, columns)).astype(np.float32)
        values = (np.round(values) if jnp.issubdtype(dtype, jnp.integer) else values / 8).astype(dtype)
        scale, zero = rng.uniform(0.5, 1.5, (groups, columns)).astype(np.float32), None
        if "zeros" in name:
            least, most = (-8, 9) if dtype == jnp.int4 else (-128, 128)
            zero = rng.integers(least, most, scale.shape, np.int8)
        weight, wide = jax.jit(packed.pack)(values, scale, zero), values.astype(np.float32)
        if zero is not None:
            wide = wide - np.repeat(zero, inputs // groups, axis=0).astype(np.float32)
    by_parts = lambda x: np.asarray(x).reshape(x.shape[0], parts, 32).transpose(1, 0, 2)
    return weight, by_parts(wide).transpose(0, 2, 1), by_parts(weight.scale)


@pytest.mark.parametrize("parts", [2, 1])
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_products_are_of_each_piece_of_each_block(name: str, m: int, parts: int, monkeypatch: pytest.MonkeyPatch):
    """And scales are found for them."""
    pieces, alone = FORMATS[name][1], m == 1
    weight, wide, scales = tile(name, parts)
    inputs, skipped = BLOCKS * BLOCK * (2 // parts), SKIPPED * BLOCK * (2 // parts)
    x = np.random.default_rng(4).normal(size=(m, skipped + inputs)).astype(jnp.bfloat16)
    four = unpack.stored(weight.kind) == jnp.int4
    stored = np.asarray(weight.values).reshape(parts, 32, -1)[..., skipped:]
    stored = np.ascontiguousarray(stored.astype(np.int8) if four else stored)

    group = Warpgroup(1 << 17)
    w_ref = group.put(weights_image(stored, four), (parts, 32, inputs), "i8")
    x_ref = group.put(x if alone else rows_image(x[:, skipped:]), (m, inputs), "bf16")
    words = unpack.has_words(weight.kind)
    scale_ref = group.put(scales, scales.shape, "i32" if scales.dtype == np.int32 else "f32")
    begin = scalar(SKIPPED)
    rows = 8 if alone else m
    with monkeypatch.context() as patch:
        group.install(patch, unpack)
        found, found_scales = [], []
        for block in range(BLOCKS):
            found += unpack._products(
                None, w_ref, x_ref, begin if alone or words else None, scale_ref if words else None, kind=weight.kind,
                block=block, blocks=BLOCKS, rows=rows, parts=parts, alone=alone, pieces=pieces,
            )  # fmt: skip
            if weight.kind != packed.FLOAT4:
                at = scalar(SKIPPED + block)
                found_scales += [
                    unpack._row_scales(None, scale_ref, at, piece=piece, pieces=pieces, arrive=False)
                    for piece in range(pieces)
                ]
    factors = None
    if weight.kind != packed.FLOAT4:
        factors = np.asarray(packed.word_scales(jnp.asarray(scales))) if words else scales
    wide_x, size = x.astype(np.float32), BLOCK // pieces
    for i, registers in enumerate(found):
        block, piece = divmod(i, pieces)
        want, want_scales = [], []
        for half in range(2):
            number = SKIPPED + block if parts == 2 else 2 * (SKIPPED + block) + half
            own = slice(number * BLOCK + piece * size, number * BLOCK + (piece + 1) * size)
            want.append(wide[half % parts, :, own] @ wide_x[:, own].T)
            want_scales.append(None if factors is None else factors[half % parts, number * pieces + piece])
        got = _whole(registers.reshape(rows // 8, 2), rows)
        want = np.concatenate(want)
        np.testing.assert_allclose(got[:, :m] if not alone else got, np.broadcast_to(want, got.shape), rtol=1e-5,
                                   atol=1e-5 * np.abs(want).max())  # fmt: skip
        if factors is not None:
            both = np.stack([np.ravel(value) for value in found_scales[i].flat])  # [half of 16 columns, thread]
            lanes = both.reshape(2, 4, 8, 4)
            assert (lanes == lanes[..., :1]).all()
            np.testing.assert_array_equal(lanes[..., 0].transpose(1, 0, 2).reshape(64), np.concatenate(want_scales))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_pieces_are_expanded_as_wgmma_wants_them(name: str, monkeypatch: pytest.MonkeyPatch):
    pieces = FORMATS[name][1]
    weight, wide, scales = tile(name, 2)
    four, skipped = unpack.stored(weight.kind) == jnp.int4, SKIPPED * BLOCK
    stored = np.asarray(weight.values).reshape(2, 32, -1)[..., skipped:]
    stored = np.ascontiguousarray(stored.astype(np.int8) if four else stored)
    group = Warpgroup(1 << 17)
    w_ref = group.put(weights_image(stored, four), (2, 32, BLOCKS * BLOCK), "i8")
    scale_ref = group.put(scales, scales.shape, "i32" if scales.dtype == np.int32 else "f32")
    words, size = unpack.has_words(weight.kind), BLOCK // pieces
    for block in range(BLOCKS):
        number = scalar(SKIPPED + block)
        for piece in range(pieces):
            with monkeypatch.context() as patch:
                group.install(patch, unpack)
                found = unpack._expanded(
                    None, w_ref, scale_ref if words else None, number if words else None, kind=weight.kind, block=block,
                    blocks=BLOCKS, piece=piece, pieces=pieces,
                )  # fmt: skip
            pairs = np.stack([np.asarray(word) for word in found.reshape(size // 8, 2).flat])
            values = np.ascontiguousarray(pairs).view(jnp.bfloat16).reshape(size // 8, 2, 4, 8, 4, 2)
            got = values.transpose(2, 1, 3, 0, 4, 5).reshape(64, size).astype(np.float32)
            begin = skipped + block * BLOCK + piece * size
            np.testing.assert_array_equal(got, wide[:, :, begin : begin + size].reshape(64, size))


@pytest.mark.parametrize(
    ("shape", "element", "pitch", "of"),
    [((112, 32), "f32", 4096, 4), ((32, 32), "i32", 6144, 1), ((1, 32), "f32", 256, 2), ((27, 128), "bf16", 128, 4),
     ((128, 24), "f32", 24, 3)],
)  # fmt: skip
def test_shares_of_lines_are_the_whole(
    shape: tuple[int, int], element: str, pitch: int, of: int, monkeypatch: pytest.MonkeyPatch
):
    group, size = Warpgroup(0), 2 if element == "bf16" else 4
    group.install(monkeypatch, lines)
    for number in range(of):
        lines._copy(None, Ref(shape, element, 512, pitch), Ref(shape, element, 1024), scalar(number), of=of)
    across = shape[1] * size // 16
    shares = [
        (1024 + 16 * (row * across + i), 512 + row * pitch * size + 16 * i)
        for row in range(shape[0])
        for i in range(across)
    ]
    assert sorted(group.copied) == shares
    if shape[0] < of:
        return
    for number in range(of):  # whole rows at a time
        group.copied, each = [], 3 * across
        source, target = Ref(shape, element, 512, pitch), Ref(shape, element, 1024)
        lines._copy(None, source, target, scalar(number), of=of, each=each)
        assert sorted(group.copied) == [x for i, x in enumerate(shares) if i // each % of == number]


@pytest.mark.parametrize(("rows", "width"), [(4, 512), (3, 128), (8, 1024)])
def test_rows_lie_as_mma_reads_them(rows: int, width: int, monkeypatch: pytest.MonkeyPatch):
    group, pitch = Warpgroup(0), 4096
    group.install(monkeypatch, lines)
    lines._copy_rows(None, Ref((rows, width), "bf16", 512, pitch), Ref((8, width), "bf16", 2048))
    image = swizzled(
        np.arange(8 * width, dtype=np.uint16).reshape(8, width // 64, 64).transpose(1, 0, 2).view(np.uint8)
    )
    first = image.reshape(-1, 16)[:, :2].copy().view(np.uint16)[:, 0]  # which value a line begins with
    want = [
        (2048 + 16 * i, 512 + value // width * pitch * 2 + value % width * 2)
        for i, value in enumerate(first.tolist())
        if value < rows * width
    ]
    assert sorted(group.copied) == want


def _whole(registers: np.ndarray, rows: int) -> np.ndarray:
    """[64, rows] of what threads have of it: [8 rows, half of 16 columns] of two values."""
    found = np.zeros((64, rows), np.float32)
    lane = np.arange(128)
    for tile_of_rows in range(rows // 8):
        for half in range(2):
            for j in range(2):
                column = lane // 32 * 16 + half * 8 + lane % 32 // 4
                found[column, tile_of_rows * 8 + lane % 4 * 2 + j] = registers[tile_of_rows, half][j]
    return found
