"""The TPU kernel on the CPU: against the definition in float64, with everything that no query sees poisoned.

Two interpreters run it. `interpret=True` is quick and catches wrong masks; TPU interpret mode
also keeps copies back until they are awaited, fills fresh memory with NaN and looks for races.
Neither says anything about hardware.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention import tpu, tpu_plan
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

STRICT = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
GARBAGE = np.asarray([2**31 - 1, -(2**31), -1, 10**6])


def tree(rng: np.random.Generator, b: int, n: int, prior: int) -> np.ndarray:
    """Ancestor masks of random trees whose roots hang on random paths of `prior` earlier entries, [B, N, T]."""
    mask = np.zeros((b, n, prior + n), bool)
    mask[:, :, :prior] = rng.random((b, 1, prior)) < 0.4
    for i in range(b):
        for node in range(n):
            if node:
                mask[i, node] |= mask[i, rng.integers(0, node)]
            mask[i, node, prior + node] = True
    return mask


def chunk(rng: np.random.Generator, b: int, n: int, prior: int) -> np.ndarray:
    """The causal mask, one for the whole batch, [1, N, T]."""
    return np.tril(np.ones((1, n, prior + n), bool), prior)


def draw(lengths, n, heads, groups, c, page, *, mask=tree, prior=0, spare=1, width=None, seed=0):
    """Ragged requests over a shuffled pool.

    Every place of the pool that no request owns is NaN, lanes behind 2C too, and table entries
    behind the lengths are far out of range.
    """
    rng = np.random.default_rng(seed)
    b, columns = len(lengths), max(-(-max(lengths) // page), 1) + spare
    num_pages = sum(-(-x // page) for x in lengths) + 2
    pages = np.full((num_pages, groups, page, width or 2 * c), np.nan, np.float32)
    table = rng.choice(GARBAGE, (b, columns)).astype(np.int32)
    order = iter(rng.permutation(num_pages))
    for i, tokens in enumerate(lengths):
        for p in range(-(-tokens // page)):
            table[i, p] = next(order)
            used = min(page, tokens - p * page)
            pages[table[i, p], :, :used, : 2 * c] = rng.normal(size=(groups, used, 2 * c))
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    q = normal(b, n, heads, c)
    k, v = normal(b, prior + n, groups, c), normal(b, prior + n, groups, c)
    return q, pages, table, np.asarray(lengths, np.int32), k, v, mask(rng, b, n, prior)


def sinks(heads: int) -> np.ndarray:
    """One far below the scores, one far above them, the others among them."""
    return np.asarray([-40.0, 30.0, *np.linspace(-1, 4, heads - 2)], np.float32)


def definition(
    q, pages, table, length, k, v, mask, *, scale=None, window=None, offset_BN=None, soft_cap=None, sinks_H=None
):
    """Dense softmax in float64 over what each query sees, and over nothing else."""
    q, pages, k, v = (np.asarray(x, np.float64) for x in (q, pages, k, v))
    (b, n, h, c), page = q.shape, pages.shape[2]
    mask = np.broadcast_to(mask, (b, *mask.shape[1:]))
    offset = mask.sum(-1) - 1 if offset_BN is None else offset_BN
    out = np.zeros((b, n, h, c))
    for i in range(b):
        used = pages[table[i, : -(-length[i] // page)]].transpose(1, 0, 2, 3).reshape(k.shape[2], -1, pages.shape[3])
        used = used[:, : length[i]]  # [G, length, W]
        for j in range(n):
            first = 0 if window is None else max(0, length[i] + offset[i, j] - window + 1)
            keys = np.concatenate([used[:, first:, :c], k[i, mask[i, j]].transpose(1, 0, 2)], axis=1)
            values = np.concatenate([used[:, first:, c : 2 * c], v[i, mask[i, j]].transpose(1, 0, 2)], axis=1)
            rows = q[i, j].reshape(k.shape[2], -1, c)
            s = rows @ keys.transpose(0, 2, 1) * (c**-0.5 if scale is None else scale)
            s = s if soft_cap is None else soft_cap * np.tanh(s / soft_cap)
            if sinks_H is not None:
                s = np.concatenate([s, sinks_H.astype(np.float64).reshape(*s.shape[:2], 1)], axis=2)
                values = np.pad(values, ((0, 0), (0, 1), (0, 0)))
            p = np.exp(s - s.max(-1, keepdims=True))
            out[i, j] = (p / p.sum(-1, keepdims=True) @ values).reshape(h, c)
    return out


def attend(*arrays, interpret: bool | pltpu.InterpretParams = True, cores: int = 1, **options) -> jax.Array:
    return tpu.tree_attention(TreeAttentionArgs(*arrays, **options), cores=cores, interpret=interpret)


def jit(interpret: bool | pltpu.InterpretParams = True, **options):
    """The kernel, compiled quickly: nearly all of these tests' time is XLA's."""
    call = functools.partial(attend, interpret=interpret, **options)
    return jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})


def run(args, interpret: bool | pltpu.InterpretParams = True, **options) -> np.ndarray:
    return np.asarray(jit(interpret, **options)(*args)).astype(np.float32)


def in_dtype(args, dtype: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The arguments in a dtype, and what they are then in float32."""
    cast = [x.astype(jnp.dtype(dtype)) if x.dtype == np.float32 else x for x in args]
    return cast, [x.astype(np.float32) if x.dtype == dtype else x for x in cast]


#: float32 sums in another order; or in bfloat16 the weights' and the result's rounding, scores and sums being float32.
TOLERANCE = {"float32": dict(rtol=3e-5, atol=5e-6), "bfloat16": dict(rtol=2**-7, atol=2**-7)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix blocks of 64 tokens, so that short lengths cross several."""
    monkeypatch.setattr(tpu_plan, "_BLOCK_TOKENS", (32, 64))


#: A page's edges and a block's, for pages of 16; empty requests first, between and last.
EDGES = (0, 1, 15, 0, 16, 17, 64, 130, 0)

CASES = {
    "d64 tree": dict(args=draw(EDGES, 5, 4, 2, 64, 16)),
    "d64 one query": dict(args=draw([0, 1, 7, 8, 9, 72], 1, 8, 2, 64, 8)),
    "d80": dict(args=draw([0, 17, 95, 48], 3, 4, 2, 80, 24)),
    "d80 in whole tiles": dict(args=draw([0, 17, 95, 48], 3, 4, 2, 80, 24, width=256)),
    "d96": dict(args=draw([33, 1, 0, 64], 8, 2, 2, 96, 32)),
    "d96 in whole tiles": dict(args=draw([33, 1, 0, 64], 8, 2, 2, 96, 32, width=256)),
    "d128": dict(args=draw([65, 16, 0, 128], 9, 4, 2, 128, 16)),
    "d256": dict(args=draw([0, 130, 65], 4, 2, 1, 256, 64)),
    "d16": dict(args=draw([9, 0, 8], 4, 2, 1, 16, 8)),
    "seven query heads a group": dict(args=draw([0, 31, 40], 3, 7, 1, 64, 16)),
    "eleven groups of heads": dict(args=draw([60, 0, 130], 3, 11, 11, 64, 32)),
    "page beyond a block": dict(args=draw([255, 0, 256], 2, 2, 1, 64, 128)),
    "full tables": dict(args=draw([64, 64, 32], 4, 2, 2, 64, 32, spare=0)),
    "nothing committed": dict(args=draw([0, 0], 7, 2, 1, 64, 16)),
    "earlier levels": dict(args=draw([21, 0, 16], 6, 4, 2, 64, 16, prior=150)),
    "64 nodes": dict(args=draw([70, 5], 64, 4, 1, 64, 16)),
    "33 nodes": dict(args=draw([7, 129], 33, 6, 2, 64, 16)),
    "chunk": dict(args=draw([40, 0], 300, 4, 1, 64, 16, mask=chunk)),
    "chunk in tiles and blocks": dict(args=draw([24], 1024, 2, 1, 64, 16, mask=chunk, prior=76)),
    "scale": dict(args=draw([20, 3], 3, 2, 1, 64, 16), scale=0.7),
    "soft cap": dict(args=draw([70, 0, 3], 3, 2, 1, 64, 16), scale=1.0, soft_cap=2.5),
    "window": dict(args=draw([0, 150, 15, 65, 200], 5, 4, 2, 64, 16), window=37),
    "window, one query": dict(args=draw([0, 150, 15, 65, 130], 1, 4, 2, 64, 16), window=65),
    "window wider than all": dict(args=draw([90, 0, 16], 4, 2, 1, 64, 16), window=5000),
    "window in a chunk": dict(args=draw([150, 45], 200, 8, 1, 64, 16, mask=chunk), window=64),
    "window of the tree alone": dict(args=draw([130, 16], 4, 2, 1, 64, 16), window=1),
    "window by offsets": dict(
        args=draw([150, 33, 0], 3, 2, 1, 64, 16),
        window=20,
        offset_BN=np.asarray([[0, 5, 19], [0, 40, 1], [2, 0, 0]], np.int32),
    ),
    "sinks": dict(args=draw([0, 70, 3], 3, 6, 2, 64, 16), sinks_H=sinks(6)),
    "sinks in a chunk": dict(args=draw([150, 45], 200, 8, 1, 64, 16, mask=chunk), window=64, sinks_H=sinks(8)),
    "window and soft cap": dict(args=draw([0, 130, 77], 8, 2, 1, 128, 32), window=50, soft_cap=4.0),
}


#: Cases beside others that take the same way through the kernel.
ALIKE = {"d96", "d96 in whole tiles", "d16", "full tables", "64 nodes", "window wider than all", "window and soft cap"}
SIZES = pytest.mark.exhaustive("sizes alike")


@pytest.mark.parametrize("name", [pytest.param(name, marks=SIZES if name in ALIKE else ()) for name in CASES])
def test_follows_the_definition(name: str):
    case = dict(CASES[name])
    args = case.pop("args")
    np.testing.assert_allclose(run(args, **case), definition(*args, **case), **TOLERANCE["float32"])


@pytest.mark.parametrize(
    "name", ["d80", "d96 in whole tiles", "d256", pytest.param("33 nodes", marks=SIZES), "window and soft cap"]
)
def test_bfloat16_is_as_close_as_its_roundings(name: str):
    case = dict(CASES[name])
    args, exact = in_dtype(case.pop("args"), "bfloat16")
    out = jit(**case)(*args)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), definition(*exact, **case), **TOLERANCE["bfloat16"])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("d64 tree", "bfloat16"),
        ("d80 in whole tiles", "float32"),
        pytest.param("d128", "float32", marks=SIZES),
        ("eleven groups of heads", "bfloat16"),
        pytest.param("64 nodes", "bfloat16", marks=SIZES),
        ("nothing committed", "float32"),
        pytest.param("window", "float32", marks=SIZES),
        ("window by offsets", "float32"),
        ("sinks", "bfloat16"),
        ("window in a chunk", "bfloat16"),
    ],
)
def test_waits_for_its_copies_and_has_no_races(name: str, dtype: str, capfd: pytest.CaptureFixture[str]):
    case = dict(CASES[name])
    args, exact = in_dtype(case.pop("args"), dtype)
    out = run(args, STRICT, **case)
    assert "RACE" not in capfd.readouterr().out
    np.testing.assert_allclose(out, definition(*exact, **case), **TOLERANCE[dtype])


def test_masked_entries_reach_nobody_and_seen_ones_are_not_hidden():
    """NaN and infinity in one tree entry's key or value: NaN for the rows that see it, the same bits for all others."""
    q, pages, table, length, k, v, mask = draw([40, 70, 0], 6, 4, 2, 64, 16)
    run_once = jit()
    clean = np.asarray(run_once(q, pages, table, length, k, v, mask))
    for which, value in (("k", np.nan), ("v", np.nan), ("v", np.inf), ("k", np.inf)):
        for entry in (0, 3):
            bad = {"k": k.copy(), "v": v.copy()}
            bad[which][:, entry, :, 5] = value
            out = np.asarray(run_once(q, pages, table, length, bad["k"], bad["v"], mask))
            sees = mask[:, :, entry]
            np.testing.assert_array_equal(out[~sees], clean[~sees])
            if not (which == "k" and np.isinf(value)):  # an infinite key may well lose against the others
                assert np.isnan(out[sees]).any(axis=-1).all()


def test_a_committed_nan_stays_with_its_request():
    q, pages, table, length, k, v, mask = draw([40, 70, 17], 3, 4, 2, 64, 16)
    run_once = jit()
    clean = np.asarray(run_once(q, pages, table, length, k, v, mask))
    pages[table[1, 3], :, 2] = np.nan
    out = np.asarray(run_once(q, pages, table, length, k, v, mask))
    np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])
    assert np.isnan(out[1]).all()


def test_pages_before_the_window_are_not_read():
    q, pages, table, length, k, v, mask = draw([150, 90], 3, 4, 2, 64, 16)
    exact = definition(q, pages, table, length, k, v, mask, window=40)
    for i in range(2):
        passed = (length[i] - 40 + 1) // 16  # the root's window reaches furthest back
        pages[table[i, :passed]] = np.nan
        table[i, :passed] = GARBAGE[i]
    out = run((q, pages, table, length, k, v, mask), STRICT, window=40)
    np.testing.assert_allclose(out, exact, **TOLERANCE["float32"])


def test_requests_do_not_see_each_other():
    """The same bits at another place of the batch, beside others, and with more columns in the table."""
    q, pages, table, length, k, v, mask = draw(EDGES, 5, 4, 2, 64, 16)
    together = run((q, pages, table, length, k, v, mask))
    turn = np.roll(np.arange(len(length)), 4)
    wider = np.concatenate([table, np.full((len(length), 40), -5, np.int32)], axis=1)
    rolled = run((q[turn], pages, wider[turn], length[turn], k[turn], v[turn], mask[turn]))
    np.testing.assert_array_equal(rolled, together[turn])
    for i in (1, 7):
        one = slice(i, i + 1)
        alone = run((q[one], pages, table[one], length[one], k[one], v[one], mask[one]))
        np.testing.assert_array_equal(alone, together[one])


def test_the_partition_of_the_prefix_knows_neither_rows_nor_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()

    def span(b: int, n: int, t: int, window: int | None = None, cores: int = 1) -> int:
        args = TreeAttentionArgs(*shapes(b=b, n=n, h=32, g=8, t=t, m=128), window=window)
        return tpu_plan.plan_for(args, cores).span

    spans = {span(b, n, n + 9, w) for b in (1, 64) for n in (1, 8, 64, 512) for w in (None, 64)}
    assert spans | {span(4, 8, 8, cores=2)} == {256}


def test_a_table_beyond_scalar_memory_goes_in_several_calls(monkeypatch: pytest.MonkeyPatch):
    args = draw(EDGES, 5, 4, 2, 64, 16)
    whole = run(args, window=30)
    columns = args[2].shape[1]
    monkeypatch.setattr(tpu_plan, "SCALARS", 4 * (columns + 4) + 3)  # four requests a call
    jaxpr = jax.make_jaxpr(functools.partial(attend, window=30))(*args)
    assert str(jaxpr).count("name=tree_attention") == 3
    np.testing.assert_array_equal(run(args, window=30), whole)
    monkeypatch.setattr(tpu_plan, "SCALARS", columns)
    with pytest.raises(ValueError, match=rf"at most {columns - 4} entries \(SMEM\), got {columns}"):
        run(args, window=30)


def test_two_cores_take_a_group_of_heads_each():
    args = draw(EDGES, 5, 4, 2, 64, 16)
    np.testing.assert_array_equal(run(args, cores=2), run(args))


def shapes(**changes) -> list[Any]:
    s = dict(b=2, n=4, h=8, g=4, c=128, page=64, width=256, m=16, t=4, dtype=jnp.bfloat16, kv=jnp.bfloat16) | changes
    struct = jax.ShapeDtypeStruct
    new = struct((s["b"], s["t"], s["g"], s["c"]), s["dtype"])
    return [
        struct((s["b"], s["n"], s["h"], s["c"]), s["dtype"]),
        struct((64, s["g"], s["page"], s["width"]), s["kv"]),
        struct((s["b"], s["m"]), jnp.int32),
        struct((s["b"],), jnp.int32),
        new,
        new,
        struct((s["b"], s["n"], s["t"]), jnp.bool_),
    ]


REFUSED = {
    "dtype": (dict(dtype=jnp.float16, kv=jnp.float16), "bfloat16 or all float32, got float16"),
    "mixed": (dict(kv=jnp.float32), "bfloat16 or all float32, got bfloat16, float32"),
    "head of 300": (dict(c=304, width=608), "at most 256, got 304"),
    "odd head": (dict(c=100, width=200), "multiple of 8 and at most 256, got 100"),
    "width": (dict(width=512), "256 or 256 lanes for head dimension 128, got 512"),
    "page": (dict(page=20), "multiple of 8, got 20"),
    "tree": (dict(t=5000), "at most 4096, got 5000"),
    "table": (dict(m=300000), r"at most 229374 entries \(SMEM\), got 300000"),
    "empty": (dict(n=0), "no axis may be empty"),
    "vmem": (dict(page=16384), r"must fit into 14680064 bytes of VMEM, .* takes \d{8}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_the_constraint_and_both_values(name: str):
    changes, message = REFUSED[name]
    args = TreeAttentionArgs(*shapes(**changes))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tpu.tree_attention, args)
    assert tpu.refusal(TreeAttentionArgs(*shapes())) is None


def test_refuses_more_cores_than_heads():
    assert "from 1 to the 4 key-value heads, got 5" in str(tpu.refusal(TreeAttentionArgs(*shapes()), cores=5))


def test_a_window_counts_in_what_is_refused():
    """Its rows' first positions lie in SMEM too: None must fall back there, not fail."""
    args = TreeAttentionArgs(*shapes(m=229374))
    assert tpu.refusal(args) is None
    assert "at most 229372 entries (SMEM), got 229374" in str(tpu.refusal(dataclasses.replace(args, window=64)))
