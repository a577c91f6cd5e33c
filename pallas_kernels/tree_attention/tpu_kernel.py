"""The Mosaic kernel of tree attention: a double-buffered walk over the pages of one request at a time.

One grid step takes a group of KV heads of one request, a block of its query rows and a tile
of its tree entries. The rows of a KV head are those of its R query heads, in the order
(r, n); they are worked on in units of some hundred rows. Tiles of the tree arrive through
BlockSpecs; after the last one the step walks the prefix. The pages stay in HBM and the page
table in SMEM: the kernel copies whole blocks of pages into one half of a buffer while it
computes on the other half, and the last block of a step starts the copy of the next step's
first block, also across requests. Nothing is copied from pages beyond the length, nor from
pages wholly before every window.

    q      [B, Q, G * parts, rows, C]  VMEM window [units, rows, C]
    tree   [B, G, T, W]                VMEM window [heads, tile, W]       K | V
    facts  [B, Q, queries, 128]        VMEM window [queries, 128]         int32 a row: bit k of lane l says
                                       whether it sees tree entry 128 k + l; with a window 128 more lanes
                                       hold the first prefix position that it sees
    sinks  [G * parts, rows, 128]      VMEM window [units, rows, 128]     float32, where heads have them
    pages  [P, G, page, W]             HBM; buffer [2, pages of a block, heads, page, W]

W is 2C, or 2C rounded up to whole tiles of 128 lanes. Where 2C is no multiple of 128 (C = 80,
96) XLA's own layout for [P, G, page, 2C] is not row-major, and the whole pool is copied for
the kernel: give the pool the rounded W (no more memory than the tiles take anyway), or fix
its layout with jax.experimental.layout.Format on every executable that takes it.

The partition of the prefix depends on the pool's shape only, and every row of a product is
summed alone: what a token gets does not depend on the batch, and not on the number of rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention.reference import TreeAttentionArgs
from pallas_kernels.tree_attention.tpu_plan import LANES, Plan

_MASKED = -1e30


def _div(x: jax.Array, y: int) -> jax.Array:
    """x // y of int32 that are not negative; `//` would take their signs, which costs scalar work."""
    return x if y == 1 else lax.div(x, jnp.int32(y))


def _kernel(
    length_ref,  # SMEM [B]
    table_ref,  # SMEM [B * M]
    steps_ref,  # SMEM [S + 1] next step with a prefix; with a window also [S] least and [S] greatest first positions
    q_ref,  # [1, 1, units, rows, query lanes]
    tree_ref,  # [1, heads, tile, W]
    facts_ref,  # [1, 1, queries, 128 or 256]
    pages_ref,  # HBM [P, G, page, W]
    *refs,  # with sinks [units, rows, 128], and those below
    plan: Plan,
    scale: float,
    soft_cap: float | None,
):
    sinks_ref, *refs = refs if plan.sinks else (None, *refs)
    (
        out_ref,  # [1, 1, units, rows, value lanes]
        buffer,  # [2, per_block, heads, page, W]
        acc,  # [units, rows, value lanes] float32
        top,  # [units, rows, 128] float32, the running maximum in every lane
        total,  # [units, rows, 128] float32, the running sum in every lane
        slot_ref,  # SMEM [1], the half of the buffer that the next block is in
        sem,  # [2]
    ) = refs
    group, b, tile = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    step = b * plan.blocks + pl.program_id(2)
    c, span = plan.channels, plan.span
    exact = lax.Precision.HIGHEST if buffer.dtype == jnp.float32 else lax.Precision.DEFAULT

    def low(step, which: int):
        """The least (0) or greatest (1) position that the windows of a step's rows begin at."""
        return steps_ref[(1 + which) * plan.steps + 1 + step]

    def first_block(step):
        return _div(low(step, 0), span) if plan.windowed else 0

    def copies(step, i, slot, wait: bool) -> None:
        """Starts, or awaits, the copies of block i of a step's prefix."""
        row = _div(step, plan.blocks)
        begin = jnp.maximum(_div(low(step, 0), plan.page) - i * plan.per_block, 0) if plan.windowed else 0
        end = jnp.minimum(_div(length_ref[row] + (plan.page - 1), plan.page) - i * plan.per_block, plan.per_block)

        def one(j, _):
            source = pages_ref.at[table_ref[row * plan.columns + i * plan.per_block + j]]
            if plan.groups > 1:
                source = source.at[pl.ds(group * plan.heads, plan.heads)]
            copy = pltpu.make_async_copy(source, buffer.at[slot, j], sem.at[slot])
            if wait:
                copy.wait()
            else:
                copy.start()
            return 0

        lax.fori_loop(begin, end, one, 0)

    def for_units(body) -> None:
        """Calls body(unit, its KV head within the group)."""

        def some(i, _):
            for j in range(plan.unrolled):
                unit = i * plan.unrolled + j
                body(unit, unit // plan.parts if isinstance(unit, int) else _div(unit, plan.parts))
            return 0

        if plan.unrolled == plan.units:
            some(0, 0)
        else:
            lax.fori_loop(0, plan.units // plan.unrolled, some, 0)

    def update(unit, kv, seen) -> None:
        """Takes keys and values [n, W] into a unit's running softmax; `seen` [rows, n], or None for all."""
        keys = kv[:, : plan.query_lanes]
        s = lax.dot_general(
            q_ref[0, 0, unit], keys, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
        )
        s = s * scale
        if soft_cap is not None:
            s = jnp.tanh(s * (1.0 / soft_cap)) * soft_cap
        if seen is not None:
            # A row that has seen nothing yet gets weights of 1 here; its first real score multiplies them by 0.
            s = jnp.where(seen, s, _MASKED)
        old = top[unit][:, :1]
        new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
        keep = jnp.exp(old - new)
        p = jnp.exp(s - new)
        sums = keep * total[unit][:, :1] + jnp.sum(p, axis=1, keepdims=True)
        total[unit] = jnp.broadcast_to(sums, total.shape[1:])
        top[unit] = jnp.broadcast_to(new, top.shape[1:])
        values = kv if c % LANES else kv[:, c:]
        added = jnp.dot(p.astype(kv.dtype), values, precision=exact, preferred_element_type=jnp.float32)
        acc[unit] = keep * acc[unit] + added

    @pl.when((step == 0) & (tile == 0))
    def _():
        slot_ref[0] = 0

        @pl.when(steps_ref[0] < plan.steps)
        def _():
            copies(steps_ref[0], first_block(steps_ref[0]), 0, wait=False)

    @pl.when(tile == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)
        # A sink is the first entry that a row sees: a score, and no value.
        total[...] = jnp.zeros_like(total) if sinks_ref is None else jnp.ones_like(total)
        top[...] = jnp.full_like(top, _MASKED) if sinks_ref is None else sinks_ref[...]

    # The tree comes first: every query sees something of it, so the maximum is finite from here on.
    words = facts_ref[0, 0, :, :LANES]
    chunks = -(-plan.tile // LANES)
    bits = [lax.shift_right_logical(words, jnp.full_like(words, tile * chunks + j)) & 1 for j in range(chunks)]
    bits = jnp.concatenate(bits, axis=1)[:, : plan.tile]
    seen_tree = jnp.concatenate([bits] * plan.repeats, axis=0) != 0
    for_units(lambda unit, head: update(unit, tree_ref[0, head], seen_tree))

    @pl.when(tile == pl.num_programs(3) - 1)
    def _():
        length = length_ref[b]
        stop = _div(length + (span - 1), span)

        def take(i, slot, edge: bool) -> None:
            seen = kept = None
            if edge:
                column = i * span + lax.broadcasted_iota(jnp.int32, (plan.rows, span), 1)
                position = i * span + lax.broadcasted_iota(jnp.int32, (span, plan.width), 0)
                seen, kept = column < length, position < length
                if plan.windowed:
                    lows = jnp.concatenate([facts_ref[0, 0, :, LANES : LANES + 1]] * plan.repeats, axis=0)
                    seen, kept = seen & (column >= lows), kept & (position >= low(step, 0))

            def unit(unit, head) -> None:
                kv = buffer[slot, :, head].reshape(span, plan.width)
                if kept is not None:
                    # Rows that were not copied are stale and may be NaN, and 0 * NaN would reach the sum.
                    kv = jnp.where(kept, kv, jnp.zeros_like(kv))
                update(unit, kv, seen)

            for_units(unit)

        def walk(i, _):
            slot = slot_ref[0]
            last = i + 1 == stop
            ahead = jnp.where(last, steps_ref[step + 1], step)

            @pl.when(ahead < plan.steps)
            def _():
                copies(ahead, jnp.where(last, first_block(ahead), i + 1), 1 - slot, wait=False)

            copies(step, i, slot, wait=True)
            slot_ref[0] = 1 - slot
            whole = (i + 1) * span <= length
            if plan.windowed:
                whole &= i * span >= low(step, 1)
            pl.when(whole)(lambda: take(i, slot, edge=False))
            pl.when(~whole)(lambda: take(i, slot, edge=True))
            return 0

        lax.fori_loop(first_block(step), stop, walk, 0)

        def finish(unit, _) -> None:
            out_ref[0, 0, unit] = (acc[unit] / total[unit][:, :1]).astype(out_ref.dtype)

        for_units(finish)


def call(
    plan: Plan, args: TreeAttentionArgs, operands: tuple[jax.Array, ...], interpret: bool | pltpu.InterpretParams
) -> jax.Array:
    """The kernel over some of the requests of `args`: [B, Q, G * parts, rows, value lanes].

    Args:
      operands: length_B, table_BM, steps, q, tree and facts of these requests, and the sinks where heads have them.
    """
    length_B, table_BM, steps, q, tree, facts, *sinks = operands
    own = facts.shape[0] > 1

    def by_block(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, plan.units, plan.rows, lanes), lambda g, b, i, t, *_: (b, i, g, 0, 0))

    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, scale=args.factor, soft_cap=args.soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(plan.groups, length_B.shape[0], plan.blocks, tree.shape[2] // plan.tile),
            in_specs=[
                by_block(q.shape[4]),
                pl.BlockSpec((1, plan.heads, plan.tile, plan.width), lambda g, b, i, t, *_: (b, g, t, 0)),
                pl.BlockSpec((1, 1, plan.queries, facts.shape[3]), lambda g, b, i, t, *_: (b if own else 0, i, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                *(pl.BlockSpec((plan.units, plan.rows, LANES), lambda g, *_: (g, 0, 0)) for _ in sinks),
            ],
            out_specs=by_block(plan.value_lanes),
            scratch_shapes=[
                pltpu.VMEM((2, plan.per_block, plan.heads, plan.page, plan.width), args.pages.dtype),
                pltpu.VMEM((plan.units, plan.rows, plan.value_lanes), jnp.float32),
                pltpu.VMEM((plan.units, plan.rows, LANES), jnp.float32),
                pltpu.VMEM((plan.units, plan.rows, LANES), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:4], plan.value_lanes), q.dtype),
        # Copies run ahead from step to step, so only head groups may go to different cores.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="tree_attention",
    )(length_B, table_BM.reshape(-1), steps, q, tree, facts, args.pages, *sinks)
