"""Tree rejection sampling as one Mosaic launch.

Eight requests walk in lockstep, one sublane each, a level of the tree at a time. Only the rows
on their paths are copied from HBM, whole, into VMEM; everything else is sweeps over VMEM
(`tpu_rows`). Coupled mode draws at every level. Rejection mode tries the children of a level
one by one, and draws once, at the end, over the rows that are still in VMEM.

The noise costs more than the copy, so a chunk is drawn only where its best token could still
win: Gumbel noise of 32 bits is bounded, and each chunk's maximum is known.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rejection_sampling import tpu_rows
from pallas_kernels.rejection_sampling.noise import GUMBEL_MIN, TILE
from pallas_kernels.rejection_sampling.reference import NO_RESIDUAL, RejectionSamplingArgs, Verdict
from pallas_kernels.rejection_sampling.tpu_rows import GROUP, Plan, Rows, any_of, take_lane

MAX_NODES = TILE
MAX_DEPTH = TILE - 4  # lanes of the result besides the path
VMEM_LIMIT = 56 << 20  # of the smallest chip's 64 MiB

#: Lanes of the result behind the path.
_FINE, _ACCEPTED, _TOKEN = TILE - 3, TILE - 2, TILE - 1

_i32, _f32 = jnp.int32, jnp.float32


def refusal(args: RejectionSamplingArgs) -> str | None:
    """Why the kernel cannot serve these arguments, or None."""
    logits, drafts, depth = args.logits_BNV, args.draft_probs_BXV, args.depth
    b, n, v = logits.shape
    if n > MAX_NODES:
        return f"at most {MAX_NODES} nodes, got {n}"
    if depth > MAX_DEPTH:
        return f"depth at most {MAX_DEPTH}, got {depth}"
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits must be float32 or bfloat16, got {logits.dtype}"
    if logits.dtype == jnp.bfloat16 and b % 2 and n % 2:
        return f"bfloat16 logits must have an even number of requests or of nodes, got {b} and {n}"
    if drafts is not None and drafts.dtype != jnp.float32:
        return f"draft_probs must be float32, got {drafts.dtype}"
    need = Plan.of(args).vmem_bytes
    if need > VMEM_LIMIT:
        return f"a vocabulary that fits {VMEM_LIMIT} bytes of VMEM, got {v} tokens that take {need}"
    return None


def _kernel(plan: Plan, small_ref: Any, logits: Any, *refs: Any) -> None:
    drafts, refs = (refs[0], refs[1:]) if plan.drafts else (None, refs)
    out_ref, *buffers, sem = refs
    small = small_ref[...]
    first = pl.program_id(0) * GROUP
    rows = Rows(plan, first, small[:, :TILE], logits, drafts, dict(zip(plan.buffers(), buffers, strict=True)), sem)
    walk = _rejection if plan.drafts else _coupled
    present = first + lax.broadcasted_iota(_i32, (GROUP, 1), 0) < plan.batch
    path, accepted, token, fine = walk(rows, small[:, TILE : 2 * TILE], small[:, 2 * TILE :], present.astype(_i32))
    out = jnp.where(rows.lane == _FINE, fine, path)
    out = jnp.where(rows.lane == _ACCEPTED, accepted, out)
    out_ref[...] = jnp.where(rows.lane == _TOKEN, token, out)


_Walked = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # path [8, 128]; accepted, token, fine [8, 1]


def _coupled(rows: Rows, tokens: jax.Array, parents: jax.Array, present: jax.Array) -> _Walked:
    """The target's own token at every node of the path."""
    lane, depth = rows.lane, rows.plan.depth

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d, walking, node, path, accepted, token, fine = carry
        rows.load(node, walking)
        top, best, usable, peaks = rows.prepare(node)
        choice = best
        if not rows.plan.greedy:
            drawing = walking * usable * (1 - rows.greedy)

            def draw() -> jax.Array:
                cut = rows.threshold(top, drawing)
                return rows.race(drawing, rows.position + d, cut, best, peaks, top + GUMBEL_MIN, lambda x: x)

            choice = jnp.where(drawing > 0, lax.cond(any_of(drawing), draw, lambda: best), best)
        token = jnp.where(walking > 0, choice, token)
        fine = jnp.where(walking > 0, fine * usable, fine)
        matches = (parents == node) & (tokens == choice) & (lane > 0)
        child = jnp.min(jnp.where(matches, lane, TILE), axis=1, keepdims=True)
        walking = jnp.where((child < TILE) & (d < depth), walking, 0)
        node = jnp.where(walking > 0, child, node)
        accepted = accepted + walking
        path = jnp.where((walking > 0) & (lane == accepted), node, path)
        return d + 1, walking, node, path, accepted, token, fine

    zero = jnp.zeros((GROUP, 1), _i32)
    start = (_i32(0), present, zero, jnp.zeros((GROUP, TILE), _i32), zero, zero, zero + 1)
    _, _, _, path, accepted, token, fine = lax.while_loop(lambda c: any_of(c[1]), step, start)
    return path, accepted, token, fine


def _rejection(rows: Rows, tokens: jax.Array, parents: jax.Array, present: jax.Array) -> _Walked:
    """Children in order against the residual; one race at the end, over rows that are still in VMEM."""
    lane, depth = rows.lane, rows.plan.depth
    zero, one = jnp.zeros((GROUP, 1), _f32), jnp.ones((GROUP, 1), _f32)
    none = jnp.zeros((GROUP, 1), _i32)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        d, walking, node, path, accepted, fine, (_, _, _, cut, log_total, a, z, peak) = carry
        rows.load(node, walking)
        top, best, usable, peaks = rows.prepare(node)
        fine = jnp.where(walking > 0, fine * usable, fine)
        drawing = walking * usable * (1 - rows.greedy)

        def weigh() -> tuple[jax.Array, jax.Array]:
            fresh = rows.threshold(top, drawing)
            total = rows.log_total(top, fresh)
            return jnp.where(drawing > 0, fresh, cut), jnp.where(drawing > 0, total, log_total)

        cut, log_total = lax.cond(any_of(drawing), weigh, lambda: (cut, log_total))
        coins = rows.coins(rows.position + d)

        def attempt(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ordinal, trying, last, taken, a, z, peak = carry
            child = jnp.min(jnp.where((parents == node) & (lane > last), lane, TILE), axis=1, keepdims=True)
            trying = jnp.where(child < TILE, trying, 0)
            token = jnp.where(child < TILE, take_lane(tokens, child), -1)
            inside = jnp.maximum(token, 0)
            x, q = rows.pick(rows.x, inside), rows.pick(rows.draft, inside)
            p = jnp.where(x >= cut, jnp.exp(x - log_total), 0.0)
            equal, lucky = (token == best).astype(_i32), (p - a * q > take_lane(coins, ordinal) * z * q).astype(_i32)
            fits = rows.greedy * equal + (1 - rows.greedy) * lucky
            proposed = trying * (token >= 0).astype(_i32)
            passes, fails = proposed * fits > 0, proposed * (1 - fits) * (1 - rows.greedy) > 0
            a = jnp.where(fails, a + z, a)
            left, high = lax.cond(
                any_of(fails.astype(_i32)), lambda: rows.residual_mass(cut, log_total, a), lambda: (z, peak)
            )
            z, peak = jnp.where(fails, left, z), jnp.where(fails, high, peak)
            taken = jnp.where(passes, child, taken)
            return ordinal + 1, jnp.where(passes, 0, trying), child, taken, a, z, peak

        # Every row that walks starts its level with nothing rejected.
        a, z = jnp.where(walking > 0, 0.0, a), jnp.where(walking > 0, 1.0, z)
        tries = (_i32(0), jnp.where(d < depth, walking, 0), none, none, a, z, peak)
        _, _, _, taken, a, z, peak = lax.while_loop(lambda c: any_of(c[1]), attempt, tries)
        walking = jnp.where(taken > 0, walking, 0)
        node = jnp.where(walking > 0, taken, node)
        accepted = accepted + walking
        path = jnp.where((walking > 0) & (lane == accepted), node, path)
        return d + 1, walking, node, path, accepted, fine, (top, best, peaks, cut, log_total, a, z, peak)

    tile = jnp.zeros((GROUP, TILE), _f32)
    path = jnp.zeros((GROUP, TILE), _i32)
    level = (zero, none, tile, zero, zero, zero, one, one)
    start = (_i32(0), present, none, path, none, none + 1, level)
    _, _, _, path, accepted, fine, level = lax.while_loop(lambda c: any_of(c[1]), step, start)
    return path, accepted, _last_token(rows, level, accepted, present, fine), fine


def _last_token(
    rows: Rows, level: tuple[jax.Array, ...], accepted: jax.Array, present: jax.Array, fine: jax.Array
) -> jax.Array:
    """One race over each row's last node, as `_rejection` left it."""
    top, best, peaks, cut, log_total, a, z, peak = level
    a = jnp.where(z <= NO_RESIDUAL, 0.0, a)
    bound = jnp.where(a == 0, top, jnp.log(peak) + log_total) + GUMBEL_MIN
    drawing = present * fine * (1 - rows.greedy)

    def score(x: jax.Array, draft: jax.Array) -> jax.Array:
        left = jnp.log(rows.residual(x, draft, cut, log_total, a))
        return jnp.where(jnp.broadcast_to(a, x.shape) == 0, x, left)

    def draw() -> jax.Array:
        return rows.race(drawing, rows.position + accepted, cut, best, peaks, bound, score, "draft")

    return jnp.where(drawing > 0, lax.cond(any_of(drawing), draw, lambda: best), best)


def _small(args: RejectionSamplingArgs) -> jax.Array:
    """Everything but the large arrays, [B rounded up, 3 * 128] int32: a request's numbers, tokens, parents."""
    (b, n), vocab, sampling = args.tokens_BN.shape, args.logits_BNV.shape[2], args.sampling
    inverse = 1.0 / jnp.where(sampling.temperature_B == 0, 1.0, sampling.temperature_B)
    bits = lambda x: lax.bitcast_convert_type(x, _i32)
    numbers = {
        tpu_rows.TOP_K: jnp.where(sampling.top_k_B < vocab, sampling.top_k_B, 0),
        tpu_rows.SEED: bits(sampling.seed_B),
        tpu_rows.POSITION: args.position_B,
        tpu_rows.TEMPERATURE: bits(sampling.temperature_B),
        tpu_rows.INVERSE: bits(inverse),
        tpu_rows.TOP_P: bits(sampling.top_p_B),
        tpu_rows.LOG_MIN_P: bits(jnp.log(sampling.min_p_B)),
    }
    index = jnp.arange(n, dtype=_i32)[None, :]
    parents = jnp.broadcast_to(index - 1, (b, n)) if args.chain else jnp.where(index > 0, args.parents_BN, -1)
    tokens = jnp.where((args.tokens_BN >= 0) & (args.tokens_BN < vocab), args.tokens_BN, -1)
    fill = lambda x: jnp.pad(x, ((0, -b % GROUP), (0, TILE - x.shape[1])), constant_values=-1)
    first = jnp.stack([numbers[i] for i in range(len(numbers))], axis=1)
    return jnp.concatenate([fill(first), fill(tokens), fill(parents)], axis=1)


def rejection_sampling(args: RejectionSamplingArgs, *, interpret: bool | pltpu.InterpretParams = False) -> Verdict:
    """See api.rejection_sampling.

    Args:
      interpret: True, or pltpu.InterpretParams, runs on any backend.
    """
    b, plan = args.logits_BNV.shape[0], Plan.of(args)
    groups = -(-b // GROUP)
    order = lambda x, nodes_first: jnp.transpose(x, (1, 0, 2)) if nodes_first else x
    large = [order(args.logits_BNV, plan.nodes_first)]
    if args.drafts is not None:
        large.append(order(args.drafts, plan.drafts_first))
    if not interpret and isinstance(args.logits_BNV, Tracer):
        # Rows are fetched as the walk needs them: XLA must not bring all of them into VMEM first, as on tpu7x it would.
        large = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in large]
    block = lambda lanes: pl.BlockSpec((GROUP, lanes), lambda i: (i, 0))
    out = pl.pallas_call(
        lambda *refs: _kernel(plan, *refs),
        grid=(groups,),
        in_specs=[block(3 * TILE), *(pl.BlockSpec(memory_space=pl.ANY) for _ in large)],
        out_specs=block(TILE),
        out_shape=jax.ShapeDtypeStruct((groups * GROUP, TILE), _i32),
        scratch_shapes=[*(pltpu.VMEM(s.shape, s.dtype) for s in plan.buffers().values()), pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=max(plan.vmem_bytes, 16 << 20)
        ),
        interpret=interpret,
        name="rejection_sampling",
    )(_small(args), *large)[:b]
    return Verdict(out[:, : args.depth + 1], out[:, _ACCEPTED], out[:, _TOKEN], out[:, _FINE] > 0)
