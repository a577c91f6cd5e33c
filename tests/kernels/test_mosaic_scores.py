"""What wide attention's threads do with scores, register by register, on a CPU: see lanes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention import mosaic_scores
from pallas_kernels.tree_attention.mosaic_rows import MASKED, ROWS
from tests.kernels.lanes import THREADS, Warpgroup

#: Of each thread: its row in the first half, and its pair among eight columns.
ROW, PAIR = (THREADS // 32 * 16 + THREADS % 32 // 4).astype(int), (THREADS % 4 * 2).astype(int)
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


class Pair(list):
    """A vector of two values."""

    type = None


class If:
    """Both branches are computed; warps take theirs."""

    def __init__(self, taken: np.ndarray, *_: Any, **__: Any) -> None:
        of_warps = taken.reshape(4, 32)
        assert (of_warps == of_warps[:, :1]).all()
        self.taken, self.then_block, self.else_block = taken, [], []

    @property
    def results(self) -> list[Any]:
        choose = lambda a, b: [*map(choose, a, b)] if isinstance(a, list) else np.where(self.taken, a, b)
        return [choose(a, b) for a, b in zip(self.then_block[0], self.else_block[0], strict=True)]


def exchanged(_: Any, x: np.ndarray, other: np.ndarray, __: Any, kind: str) -> np.ndarray:
    lane = THREADS % 32 ^ other if kind == "bfly" else other
    assert (lane < 32).all()
    return x[THREADS // 32 * 32 + lane]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Warpgroup:
    group, signed = Warpgroup(1 << 20), lambda compare: lambda a, b: compare(a.view(np.int32), b.view(np.int32))
    group.install(monkeypatch, mosaic_scores)
    ir, arith, blocks = mosaic_scores.ir, mosaic_scores.arith, []

    class Within:
        def __init__(self, block: list[Any]) -> None:
            self.block = block

        def __enter__(self) -> None:
            blocks.append(self.block)

        def __exit__(self, *_: Any) -> None:
            blocks.pop()

    more: dict[str, Any] = dict(
        subi=np.subtract, minsi=signed(np.minimum), ori=np.bitwise_or, addf=np.add, subf=np.subtract, mulf=np.multiply,
        maximumf=np.maximum, negf=np.negative, cmpf=lambda compare, a, b: compare(a, b),
        CmpFPredicate=SimpleNamespace(OGT=np.greater),
        CmpIPredicate=SimpleNamespace(ne=np.not_equal, slt=signed(np.less)),
        truncf=lambda kind, pair: [x.astype(DTYPES[kind[1]]) for x in pair],
    )  # fmt: skip
    vars(arith).update(more)
    vars(ir).update(
        F16Type=SimpleNamespace(get=lambda: "f16"), FloatAttr=SimpleNamespace(get=lambda _, value: value),
        InsertionPoint=Within,
    )  # fmt: skip
    array = lambda _registers, **_: SimpleNamespace(registers=_registers, layout=None)
    of_scalar = lambda x: SimpleNamespace(registers=SimpleNamespace(item=lambda: np.full(128, int(x), np.uint32)))
    given = lambda x: of_scalar(x) if isinstance(x, jax.Array) else x
    stands_in: dict[str, Any] = dict(
        scf=SimpleNamespace(IfOp=If, yield_=lambda values: blocks[-1].append(values)),
        nvvm=SimpleNamespace(shfl_sync=exchanged, ShflKind=SimpleNamespace(bfly="bfly", idx="idx")),
        mgpu=SimpleNamespace(FragmentedArray=array), part=lambda x, i: x[i],
        vector=SimpleNamespace(from_elements=lambda _, values: list(values)),
        plgpu=SimpleNamespace(
            inline_mgpu=lambda **_: lambda run: lambda *args: run(None, *map(given, args)), Layout=plgpu.Layout,
            ShapeDtypeStruct=lambda *_, **__: None, RefType=lambda: None,
        ),
    )  # fmt: skip
    for name, value in stands_in.items():
        monkeypatch.setattr(mosaic_scores, name, value)
    # Types of values, which arrays have not.
    monkeypatch.setattr(mosaic_scores, "_pair", lambda a, b: Pair((a, b)))
    monkeypatch.setattr(mosaic_scores, "_vectors", vectors)
    return group


def vectors(values: list[np.ndarray]) -> np.ndarray:
    """Each of them as a vector of one."""
    found = np.empty(len(values), object)
    found[:] = [[value] for value in values]
    return found


def tile(x: np.ndarray) -> Any:
    """[64, columns] as wgmma's sums lie."""
    found = np.empty((x.shape[1] // 8, 2), object)
    for j, half in np.ndindex(found.shape):
        found[j, half] = Pair(x[ROW + 8 * half, 8 * j + PAIR + i].astype(np.float32) for i in range(2))
    return SimpleNamespace(registers=found, layout=None, shape=x.shape, dtype=np.float32)


def of_tile(found: Any) -> np.ndarray:
    registers = found.registers.reshape(-1, 2)
    x = np.zeros((ROWS, 8 * len(registers)), np.float32)
    for j, half in np.ndindex(registers.shape):
        for i in range(2):
            x[ROW + 8 * half, 8 * j + PAIR + i] = registers[j, half][i]
    return x


def rows(x: np.ndarray) -> Any:
    """[64], in each of a row's threads."""
    return SimpleNamespace(registers=vectors([x[ROW + 8 * half] for half in range(2)]), layout=None)


def of_rows(found: Any) -> np.ndarray:
    x = np.zeros(ROWS, found.registers.flat[0][0].dtype)
    for half, (value,) in enumerate(found.registers.flat):
        assert np.array_equal(value, value[THREADS // 4 * 4], equal_nan=value.dtype.kind == "f")
        x[ROW + 8 * half] = value
    return x


def in_words(seen: np.ndarray) -> list[np.ndarray]:
    words = (seen.reshape(ROWS, -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=2)
    return list(words.astype(np.uint32).T)


@pytest.mark.parametrize("columns", [64, 128])
def test_scores_are_hidden_by_their_bits(columns: int, group: Warpgroup):
    rng = np.random.default_rng(columns)
    s, seen = rng.standard_normal((ROWS, columns)).astype(np.float32), rng.random((ROWS, columns)) < 0.5
    got = of_tile(mosaic_scores.hide(tile(s), [rows(word) for word in in_words(seen)]))  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(got, np.where(seen, s, -np.inf))


@pytest.mark.parametrize(
    ("nodes", "entries", "heads"), [(36, 96, 4), (9, 60, 7), (40, 40, 2), (3, 4, 4), (70, 72, 1), (2, 132, 128)]
)
@pytest.mark.parametrize("count", [2, 4])
def test_a_masks_bits_are_read_within_it(nodes: int, entries: int, heads: int, count: int, group: Warpgroup):
    mask = np.random.default_rng(entries).random((2, nodes, entries)) < 0.5
    ref: Any = group.put(mask, mask.shape, "i8")
    ref.shape, group.used = mask.shape, mask.size  # nothing lies behind it
    for b, number, begin in np.ndindex(2, -(-nodes * heads // ROWS), -(-entries // (32 * count))):
        begin *= 32 * count
        got = mosaic_scores.bits(ref, b, number, heads, begin, count)
        node = np.minimum((number * ROWS + np.arange(ROWS)) // heads, nodes - 1)
        at = begin + np.arange(32 * count)
        seen = mask[b][node][:, np.minimum(at, entries - 1)] & (at < entries)
        np.testing.assert_array_equal([of_rows(word) for word in got], in_words(seen))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # early weights by a maximum that is passed: not used
@pytest.mark.parametrize("slope", [0.0, 5.0, -5.0, 100.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_weights_add_up_to_a_softmax_row_by_row(dtype: Any, slope: float, group: Warpgroup):
    rng = np.random.default_rng(0)
    steps = [rng.standard_normal((ROWS, 64)) * 3 + slope * (i + rng.random((ROWS, 1))) for i in range(6)]
    for s in steps[:2]:
        s[5] = -np.inf  # sees nothing yet
    values = [rng.standard_normal((64, 16)).astype(np.float32) for _ in steps]
    scale = 1.5

    def run(steps: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        acc, top, total = np.zeros((ROWS, 16), np.float32), np.full(ROWS, MASKED, np.float32), rows(np.zeros(ROWS))
        for s, v in zip(steps, values, strict=True):
            given = tile(s), tile(acc), rows(top), total
            p, kept, new, total = mosaic_scores.weights(*given, scale, dtype)  # pyright: ignore[reportArgumentType]
            assert of_tile(p).max() <= 1.01 * 2**mosaic_scores.SLACK
            acc, top = of_tile(kept) + of_tile(p) @ v, of_rows(new)
        return acc, top, of_rows(mosaic_scores.settle(total))  # pyright: ignore[reportArgumentType]

    acc, top, total = run(steps)
    s = np.concatenate(steps, axis=1) * scale
    p = np.exp2(s - s.max(axis=1, keepdims=True))
    want = p @ np.concatenate(values) / p.sum(axis=1, keepdims=True)
    assert np.linalg.norm(acc / total[:, None] - want) / np.linalg.norm(want) < 4e-3
    assert (top <= s.max(axis=1) + 1e-3).all()

    others = [np.where(np.arange(ROWS)[:, None] % 2, 20 * s, s) for s in steps]
    for one, other in zip((acc, top, total), run(others), strict=True):
        np.testing.assert_array_equal(one[::2], other[::2])
