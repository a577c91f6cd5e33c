"""Tree attention on TPUs: arguments in the layouts of the kernel (`tpu_kernel`), in sizes that fit (`tpu_plan`).

Knows nothing of the engine, of devices or of the other implementations: dispatch chooses,
this module runs or refuses.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sizes import round_up
from pallas_kernels.tree_attention import tpu_plan
from pallas_kernels.tree_attention.reference import TreeAttentionArgs
from pallas_kernels.tree_attention.tpu_kernel import call
from pallas_kernels.tree_attention.tpu_plan import LANES, Plan, plan_for

_MAX_CHANNELS = 256
_MAX_TREE = 32 * LANES  # one bit of an int32 a tile of lanes


def refusal(args: TreeAttentionArgs, *, cores: int = 1) -> str | None:
    """Why this kernel cannot serve arguments that fit each other, or None; arrays or their abstract shapes."""
    if args.value_channels is not None:
        return f"values are the first {args.value_channels} channels of their keys, which it does not read"
    c, m, t = args.q_BNHC.shape[3], args.table_BM.shape[1], args.tree_k_BTGC.shape[1]
    _, g, page, width = args.pages.shape
    dtypes = [str(x.dtype) for x in (args.q_BNHC, args.pages, args.tree_k_BTGC, args.tree_v_BTGC)]
    integers = [str(x.dtype) for x in (args.table_BM, args.length_B)]
    if dtypes not in (["bfloat16"] * 4, ["float32"] * 4):
        return f"q, pages, tree_k and tree_v must all be bfloat16 or all float32, got {', '.join(dtypes)}"
    mask = jnp.dtype(bool) if args.tree_mask_BNT is None else args.tree_mask_BNT.dtype
    if integers != ["int32"] * 2 or mask != jnp.bool_:
        return f"table and length must be int32 and tree_mask bool, got {', '.join(integers)}, {mask}"
    if c % 8 or c > _MAX_CHANNELS:
        return f"head dimension must be a multiple of 8 and at most {_MAX_CHANNELS}, got {c}"
    if width not in (2 * c, round_up(2 * c, LANES)):
        return f"pages must have {2 * c} or {round_up(2 * c, LANES)} lanes for head dimension {c}, got {width}"
    if page % 8:
        return f"page size must be a multiple of 8, got {page}"
    q, k = args.q_BNHC.shape, args.tree_k_BTGC.shape
    if min(*q, *k, m) < 1:
        return f"no axis may be empty, got q {q}, tree_k {k} and table {args.table_BM.shape}"
    if t > _MAX_TREE:
        return f"tree entries must be at most {_MAX_TREE}, got {t}"
    if not 1 <= cores <= g:
        return f"cores must be from 1 to the {g} key-value heads, got {cores}"
    plan = plan_for(args, cores)
    if plan.vmem > tpu_plan.VMEM_BYTES:
        return (
            f"a grid step must fit into {tpu_plan.VMEM_BYTES} bytes of VMEM, but one key-value head with "
            f"{plan.parts * plan.rows} query rows and pages of {page} tokens takes {plan.vmem}"
        )
    if plan.scalars > tpu_plan.SCALARS:
        most = tpu_plan.SCALARS - plan.scalars + m
        return f"the page table of a request must have at most {most} entries (SMEM), got {m}"
    return None


def tree_attention(
    args: TreeAttentionArgs, *, cores: int = 1, interpret: bool | pltpu.InterpretParams = False
) -> jax.Array:
    """See api.tree_attention.

    The running softmax over blocks is FlashAttention's (Dao et al. 2022), the paged prefix
    vLLM's (Kwon et al. 2023, section 4).

    Args:
      args: a value of the tree that is not finite makes every row that sees its entry NaN, and no other.
      cores: TensorCores that share the call (2 on v4 and v5p): KV heads form at least as many groups.
      interpret: as `pallas_call` takes it.

    Raises:
      ValueError: what `refusal` gives as the reason.
    """
    if (reason := refusal(args, cores=cores)) is not None:
        raise ValueError(reason)
    args = args.placed()
    b, n, h, _ = args.q_BNHC.shape
    g, length_B = args.pages.shape[1], args.length_B
    plan = plan_for(args, cores)

    low_BN = None
    if args.window is not None:
        offset_BN = jnp.broadcast_to(args.offsets, (b, n))
        low_BN = jnp.maximum(length_B[:, None] + offset_BN - (args.window - 1), 0)
    q = _rows_of_queries(plan, args.q_BNHC, g)
    tree = _rows_of_tree(plan, args.tree_k_BTGC, args.tree_v_BTGC)
    facts, lows = _facts(plan, args.mask, low_BN, h // g)
    sinks = () if args.sinks_H is None else (_rows_of_sinks(plan, args.sinks_H, n),)
    # More page table than SMEM holds goes in several calls.
    batch = min(b, tpu_plan.SCALARS // plan.scalars)
    outs = []
    for i in range(0, b, batch):
        part = slice(i, min(i + batch, b))
        part_plan = dataclasses.replace(plan, steps=(part.stop - i) * plan.blocks)
        steps = _steps(part_plan, length_B[part], None if lows is None else lows[part])
        own_facts = facts if facts.shape[0] == 1 else facts[part]
        operands = (length_B[part], args.table_BM[part], steps, q[part], tree[part], own_facts, *sinks)
        outs.append(call(part_plan, args, operands, interpret))
    return _heads_of_rows(plan, outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=0), args.q_BNHC.shape)


def _rows_of_queries(plan: Plan, q_BNHC: jax.Array, g: int) -> jax.Array:
    """[B, Q, G * parts, rows, query lanes]."""
    b, n, h, c = q_BNHC.shape
    if plan.joint:
        q = q_BNHC.reshape(b, n, g, h // g, c).transpose(0, 2, 3, 1, 4).reshape(b, 1, g, -1, c)
        return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, plan.queries - q.shape[3]), (0, plan.query_lanes - c)))
    q = jnp.pad(q_BNHC, ((0, 0), (0, -n % plan.queries), (0, 0), (0, plan.query_lanes - c)))
    q = q.reshape(b, plan.blocks, plan.queries, h, plan.query_lanes).transpose(0, 1, 3, 2, 4)
    return q.reshape(b, plan.blocks, g * plan.parts, plan.rows, plan.query_lanes)


def _rows_of_tree(plan: Plan, k_BTGC: jax.Array, v_BTGC: jax.Array) -> jax.Array:
    """[B, G, T rounded up to tiles, W].

    A NaN value would cross the mask as 0 * NaN. Its key takes its place: a masked score is replaced, not multiplied.
    """
    finite = jnp.isfinite(v_BTGC)
    k = jnp.where(finite, k_BTGC, jnp.full_like(k_BTGC, jnp.nan))
    v = jnp.where(finite, v_BTGC, jnp.zeros_like(v_BTGC))
    tree = jnp.concatenate([k, v], axis=3).transpose(0, 2, 1, 3)
    return jnp.pad(tree, ((0, 0), (0, 0), (0, -tree.shape[2] % plan.tile), (0, plan.width - tree.shape[3])))


def _rows_of_sinks(plan: Plan, sinks_H: jax.Array, n: int) -> jax.Array:
    """[G * parts, rows, 128], each head's as often as it has rows in a unit."""
    sinks = jnp.asarray(sinks_H, jnp.float32)
    if plan.joint:
        rows = jnp.repeat(sinks.reshape(plan.groups * plan.heads, -1), n, axis=1)
        rows = jnp.pad(rows, ((0, 0), (0, plan.rows - rows.shape[1])))
    else:
        rows = jnp.repeat(sinks.reshape(-1, plan.repeats), plan.queries, axis=1)
    return jnp.broadcast_to(rows[:, :, None], (*rows.shape, LANES))


def _facts(plan: Plan, mask_BNT: jax.Array, low_BN: jax.Array | None, r: int) -> tuple[jax.Array, jax.Array | None]:
    """What each row sees, [B or 1, Q, queries, 128 or 256], and of the prefix from where on, [B, Q, queries]."""
    words = jnp.pad(mask_BNT, ((0, 0), (0, 0), (0, -mask_BNT.shape[2] % LANES))).astype(jnp.int32)
    words = words.reshape(*words.shape[:2], -1, LANES)
    words = jnp.sum(words << lax.broadcasted_iota(jnp.int32, words.shape, 2), axis=2, dtype=jnp.int32)

    def by_row(x_BNx: jax.Array) -> jax.Array:
        x = jnp.tile(x_BNx, (1, r, 1)) if plan.joint else x_BNx
        x = jnp.pad(x, ((0, 0), (0, plan.blocks * plan.queries - x.shape[1]), (0, 0)), mode="edge")
        return x.reshape(x.shape[0], plan.blocks, plan.queries, x.shape[2])

    facts = by_row(words)
    if low_BN is None:
        return facts, None
    lows = by_row(low_BN[:, :, None])
    wide = jnp.broadcast_to(lows, (*lows.shape[:3], LANES))
    return jnp.concatenate([jnp.broadcast_to(facts, wide.shape), wide], axis=3), lows[..., 0]


def _steps(plan: Plan, length_B: jax.Array, low_BQn: jax.Array | None) -> jax.Array:
    """What the kernel must know ahead, in SMEM: the next step with a prefix, and the ends of its rows' windows."""
    length = jnp.repeat(length_B, plan.blocks)
    ends = []
    nonempty = length > 0
    if low_BQn is not None:
        ends = [low_BQn.min(axis=2).reshape(-1), low_BQn.max(axis=2).reshape(-1)]
        nonempty = length > ends[0] // plan.span * plan.span
    following = jnp.where(nonempty, jnp.arange(plan.steps, dtype=jnp.int32), plan.steps)
    following = lax.cummin(following, axis=0, reverse=True)
    return jnp.concatenate([following, jnp.full((1,), plan.steps, jnp.int32), *ends])


def _heads_of_rows(plan: Plan, out: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The kernel's results, [B, Q, G * parts, rows, value lanes], as [B, N, H, C]."""
    b, n, h, c = shape
    if c % LANES:
        out = out[..., c : 2 * c]
    if plan.joint:
        g = plan.groups * plan.heads
        out = out[:, 0, :, : n * (h // g)].reshape(b, g, h // g, n, c).transpose(0, 3, 1, 2, 4)
    else:
        out = out.reshape(b, plan.blocks, h, plan.queries, c).transpose(0, 1, 3, 2, 4).reshape(b, -1, h, c)[:, :n]
    return out.reshape(b, n, h, c)
