"""In which order attention with equal bits adds up, seen in the result's first digits, by values that cancel.

Another order of additions changes the last bits of a float32, which rounding to bfloat16 hides. Here a block's large
values come again with the opposite sign in a later block, under the same keys. What is left of them is what rounding
left, which is another with every order, and as large as the values beside that do not cancel.

Compared only on a Hopper GPU (`pytest --noconftest tests/kernels/test_tree_attention_order.py`): XLA on a CPU contracts
products and sums as it pleases, so that forms differ in the interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.small_batch.gpu import supported
from pallas_kernels.tree_attention import gpu_mosaic, mosaic_near, mosaic_plan
from pallas_kernels.tree_attention.cases import Case
from pallas_kernels.tree_attention.mosaic_few import LOG2E, Few
from pallas_kernels.tree_attention.mosaic_plan import BLOCK, FEW, GROUP
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

on_hopper = pytest.mark.skipif(supported() is not None, reason=str(supported()))

#: Pieces of clusters are blocks, a few or groups by the case and the members, and so are items of the other form.
CASES = (
    Case("b1", 1, 1, 8, 2, context=2040, mask="causal"),
    Case("b1-chain", 1, 4, 8, 2, context=4090, mask="causal"),
    Case("b1-longer", 1, 4, 4, 1, context=4600, mask="causal"),
    Case("b1-window", 1, 4, 8, 2, context=4000, mask="causal", window=2900),
    Case("b2", 2, 1, 32, 8, context=2600, mask="causal"),
    Case("b2-chain-window", 2, 4, 8, 2, context=3900, mask="causal", window=2400),
    Case("b2-tree-d64", 2, 4, 8, 2, 64, context=3000),
    Case("b8", 8, 1, 32, 8, context=5000, mask="causal"),
    Case("b8-chain", 8, 4, 16, 4, context=2500, mask="causal"),
)
#: Blocks from large values to their opposites: more than a group.
APART = 17
#: Sizes of large values and of the others.
LARGE, SMALL = 2.0**12, 2.0**-6

#: Weighted values [R, C], maxima [R] and weights [R] of a block, float32.
Sums = tuple[np.ndarray, np.ndarray, np.ndarray]


def lengths(case: Case) -> np.ndarray:
    """Of prefixes: no two are equal."""
    return case.context - 70 * np.arange(case.batch, dtype=np.int32)


def whole_blocks(case: Case, length: int) -> tuple[int, int]:
    """The first and the end of a prefix's blocks of which every query sees all."""
    low = 0 if case.window is None else max(0, length + case.nodes - case.window)
    return -(-low // BLOCK), length // BLOCK


def cancelling(case: Case) -> TreeAttentionArgs:
    """Arguments whose large values have opposites, and small ones beside them."""
    args, rng, c = case.draw(0), np.random.default_rng(1), case.head_dim
    length = lengths(case)
    pages, table = np.array(args.pages.astype(jnp.float32)), np.asarray(args.table_BM)
    keys, values = pages[..., :c], pages[..., c:]
    values *= SMALL
    for b in range(case.batch):
        low, high = whole_blocks(case, length[b])
        for i in range(low, high - APART):
            if (i - low) % (2 * APART) < APART:
                one, other = table[b, i], table[b, i + APART]
                keys[other] = keys[one]
                values[one, :, : BLOCK // 2] = LARGE * rng.normal(size=values[one, :, : BLOCK // 2].shape)
                values[other, :, : BLOCK // 2] = -values[one, :, : BLOCK // 2]
    new = (SMALL * args.tree_v_BTGC.astype(jnp.float32)).astype(args.tree_v_BTGC.dtype)
    pages = jnp.asarray(pages).astype(args.pages.dtype)
    return dataclasses.replace(args, pages=pages, length_B=jnp.asarray(length), tree_v_BTGC=new)


def of_blocks(case: Case, args: TreeAttentionArgs, head: int) -> dict[int, Sums]:
    """By its number, what each block of the first request gives the rows of a KV head."""
    c, n, group = case.head_dim, case.nodes, case.heads // case.kv_heads
    wide = lambda x: np.asarray(x.astype(jnp.float32))
    length, table, mask = int(args.length_B[0]), np.asarray(args.table_BM[0]), np.asarray(args.mask[0])
    place = length if case.mask == "causal" else -(-length // BLOCK) * BLOCK  # a tree's nodes have blocks of their own
    end = -(-(place + n) // BLOCK)
    kv = np.zeros((end * BLOCK, 2 * c), np.float32)
    kv[:length] = wide(args.pages[:, head])[table].reshape(-1, 2 * c)[:length]
    kv[place : place + n] = np.concatenate([wide(x[0, :, head]) for x in (args.tree_k_BTGC, args.tree_v_BTGC)], axis=1)
    at, own = np.arange(end * BLOCK)[None], length + mask.sum(axis=1)[:, None] - 1
    seen = (at < length) & (at > own - (case.window or 2**30))
    seen[:, place : place + n] = mask
    seen = np.repeat(seen, group, axis=0)
    q = wide(args.q_BNHC[0, :, head * group : (head + 1) * group]).reshape(-1, c)
    found = {}
    for j in np.flatnonzero(seen.any(axis=0).reshape(end, BLOCK).any(axis=1)):
        here = slice(j * BLOCK, (j + 1) * BLOCK)
        s = np.where(seen[:, here], (q @ kv[here, :c].T) * np.float32(args.factor * LOG2E), np.float32(-np.inf))
        top = np.maximum(s.max(axis=1), np.float32(-1e30))
        p = np.exp2(s - top[:, None])
        acc = np.asarray(jnp.asarray(p).astype(jnp.bfloat16), np.float64) @ kv[here, c:]
        found[int(j)] = acc.astype(np.float32), top, p.sum(axis=1)
    return found


def add(sums: Sums, more: Sums) -> Sums:
    """The sums over more keys, with the roundings of the kernels: a product, then a product and a sum at once."""
    (acc, top, total), (acc_j, top_j, total_j) = sums, more
    new = np.maximum(top, top_j)
    keep, weight = np.exp2(top - new), np.exp2(top_j - new)
    fused = lambda a, b, c, d: (a.astype(np.float64) * b + (c * d)).astype(np.float32)
    return fused(acc_j, weight[:, None], acc, keep[:, None]), new, fused(total_j, weight, total, keep)


def nested(items: dict[int, Sums], *sizes: int) -> Sums:
    """Items one after the other, so many of which are added up first, and so many of these."""
    if sizes:
        size, *more = sizes
        held: dict[int, dict[int, Sums]] = {}
        for j, sums in items.items():
            held.setdefault(j // size, {})[j] = sums
        return nested({i: nested(few) for i, few in held.items()}, *more)
    return functools.reduce(add, items.values())


def rounded(sums: Sums) -> np.ndarray:
    return np.asarray(jnp.asarray(sums[0] / sums[2][:, None]).astype(jnp.bfloat16).astype(jnp.float32))


WRONG: dict[str, Callable[[dict[int, Sums]], Sums]] = {
    "blocks one by one": lambda items: nested(items),
    "fews taken as groups": lambda items: nested(items, FEW),
    "groups without fews": lambda items: nested(items, GROUP),
    "fews of two": lambda items: nested(items, 2, GROUP // 2),
    "groups of two fews": lambda items: nested(items, FEW, 2),
    "groups that begin a few later": lambda items: nested({j + FEW: x for j, x in items.items()}, FEW, GROUP // FEW),
    "from the end": lambda items: nested(dict(reversed(items.items())), FEW, GROUP // FEW),
    "a member's blocks first": lambda items: nested(dict(sorted(items.items(), key=lambda item: item[0] % 8))),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_orders_are_seen_in_most_values(case: Case):
    """Of one request, on any device."""
    case = dataclasses.replace(case, batch=1)
    blocks = of_blocks(case, cancelling(case), case.kv_heads - 1)
    want = rounded(nested(blocks, FEW, GROUP // FEW))
    assert np.isfinite(want).all() and np.abs(want).max() < LARGE / 2**12
    seen = {name: float((rounded(order(blocks)) != want).mean()) for name, order in WRONG.items()}
    assert min(seen.values()) > 0.5, seen


def test_what_stands_for_the_kernels_computes_attention():
    for case in (dataclasses.replace(case, batch=1) for case in (CASES[1], CASES[3], CASES[6])):
        args = case.draw(0)
        own = case.heads // case.kv_heads * (case.kv_heads - 1)
        want = case.defined(args)[0, :, own:].reshape(-1, case.head_dim)
        got = rounded(nested(of_blocks(case, args, case.kv_heads - 1), FEW, GROUP // FEW))
        assert np.linalg.norm(got - want) < 4e-3 * np.linalg.norm(want)


def test_pieces_and_items_are_blocks_fews_and_groups():
    pieces, items = set(), set()
    for case in CASES:
        heads, causal = (case.heads, case.kv_heads, case.head_dim), case.mask == "causal"
        few = Few(case.batch, case.nodes, case.nodes, *heads, case.page, causal, case.window, 0.1, 132, 2, True)
        length = jnp.asarray(lengths(case))
        for members in (2, 4, 8):
            mosaic_near.check(few, case.context, members)
            found = mosaic_near.Pieces.of(mosaic_near.Near.of(few, members), length[0], jnp.int32(0))
            pieces.add((members, 1 << int(found.shift)))
        sizes = mosaic_plan.Sizes.of(few, case.context, False)
        items.add(int(mosaic_plan.plan(length, case.nodes, sizes, case.window, causal)[2][4, 0]))
    assert pieces == {(2, FEW), (2, GROUP), (4, 1), (4, FEW), (8, 1), (8, FEW)}
    assert items == {1, FEW, GROUP}


@on_hopper
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_forms_add_up_in_one_order(case: Case):
    """A request by one warpgroup, by items that a second kernel merges, and by clusters."""
    args = cancelling(case)
    forms = {"whole": dict(whole=True, members=0), "items": dict(whole=False, members=0)}
    forms |= {f"{members} members": dict(members=members) for members in (2, 4, 8)}
    run = {name: jax.jit(functools.partial(gpu_mosaic.tree_attention, **options)) for name, options in forms.items()}
    outs = {name: call(args) for name, call in run.items()}  # all alive: a result could take another's memory
    found = {name: np.asarray(out.astype(jnp.float32)) for name, out in outs.items()}
    assert np.isfinite(found["whole"]).all() and np.abs(found["whole"]).max() < LARGE / 2**12
    share = {name: float((out != found["whole"]).mean()) for name, out in found.items()}
    assert set(share.values()) == {0.0}, share

    # The same blocks in another order give other bits, by the kernels too.
    table = np.array(args.table_BM)
    for b, length in enumerate(np.asarray(args.length_B)):
        low, high = whole_blocks(case, int(length))
        table[b, low:high] = table[b, low:high][::-1]
    other = run["items"](dataclasses.replace(args, table_BM=jnp.asarray(table)))
    assert (np.asarray(other.astype(jnp.float32)) != found["items"]).mean() > 0.5
