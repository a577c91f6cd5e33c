"""Tree attention on TPUs (Mosaic): a double-buffered walk over the pages of one request at a time.

Owns the kernel, its layouts and the choice of its block sizes. Knows nothing of the engine,
of devices or of the other implementations: dispatch chooses, this module runs or refuses.

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
    pages  [P, G, page, W]             HBM; buffer [2, pages of a block, heads, page, W]

W is 2C, or 2C rounded up to whole tiles of 128 lanes. Where 2C is no multiple of 128 (C = 80,
96) XLA's own layout for [P, G, page, 2C] is not row-major, and the whole pool is copied for
the kernel: give the pool the rounded W (no more memory than the tiles take anyway), or fix
its layout with jax.experimental.layout.Format on every executable that takes it.

The partition of the prefix depends on the pool's shape only, and every row of a product is
summed alone: what a token gets does not depend on the batch, and not on the number of rows.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention.masks import offsets

_MASKED = -1e30
_LANES = 128
_MAX_CHANNELS = 256
_MAX_TREE = 32 * _LANES  # one bit of an int32 a tile of lanes
_MAX_TILE = 512
_MAX_ROWS = 1024  # of a KV head in a grid step
_UNIT_ROWS = 256
_UNROLLED_ROWS = 256
_MAX_HEADS = 8
_BLOCK_BYTES = 1 << 20  # of all heads' part of a prefix block, within these tokens:
_BLOCK_TOKENS = (128, 512)
_SCALARS = 224 * 1024  # int32 of the 1 MiB of SMEM
_VMEM_BYTES = 14 << 20  # of the 16 MiB that v4, v5e and v5p grant a kernel by default


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static numbers of one call.

    Attributes:
      channels, width: C and W.
      page, per_block: tokens a page, pages a block of the prefix.
      columns: page table entries a request.
      groups, heads: head groups (the outermost grid axis) and KV heads of each.
      parts: units of rows a KV head.
      repeats: how often the facts' rows repeat in a unit.
      queries: rows of the facts in a grid step.
      joint: the rows of all R heads are padded together and the facts hold every one of them.
      blocks: query blocks a request.
      tile: tree entries of a grid step.
      steps: requests times query blocks: how many walks over a prefix follow each other.
      windowed: whether rows see the prefix from a position of their own on.
    """

    channels: int
    width: int
    page: int
    per_block: int
    columns: int
    groups: int
    heads: int
    parts: int
    repeats: int
    queries: int
    joint: bool
    blocks: int
    tile: int
    itemsize: int
    windowed: bool
    steps: int = 0

    @property
    def span(self) -> int:
        """Tokens of a prefix block."""
        return self.page * self.per_block

    @property
    def rows(self) -> int:
        """Rows of a unit."""
        return self.queries * self.repeats

    @property
    def units(self) -> int:
        """Units of a grid step."""
        return self.heads * self.parts

    @property
    def scalars(self) -> int:
        """int32 in SMEM for each request: its page table, its length, the facts of its steps."""
        return self.columns + 1 + self.blocks * (3 if self.windowed else 1)

    @property
    def unrolled(self) -> int:
        """Units that one iteration works on side by side: small ones hide each other's latency."""
        return max(
            i for i in range(1, self.units + 1) if self.units % i == 0 and (i * self.rows <= _UNROLLED_ROWS or i == 1)
        )

    @property
    def vmem(self) -> int:
        """Bytes of a grid step: windows and the page buffer twice, scratch, and the scores in flight."""
        lanes = lambda x: _round_up(x, _LANES)
        rows, values = self.units * self.rows, lanes(_value_lanes(self.channels, self.width))
        windows = rows * (lanes(_query_lanes(self.channels)) + values) + self.heads * self.tile * lanes(self.width)
        windows = windows * self.itemsize + 4 * self.queries * _LANES * (2 if self.windowed else 1)
        scratch = 4 * rows * (values + 2 * _LANES) + 2 * self.heads * self.span * lanes(self.width) * self.itemsize
        tokens = max(self.span, self.tile)
        scores = 16 * self.rows * tokens + 4 * self.rows * values
        split = 8 * tokens * lanes(self.width) if self.itemsize == 4 else 0  # exact products are sums of bfloat16 ones
        return 2 * windows + scratch + scores * self.unrolled + split


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _div(x: jax.Array, y: int) -> jax.Array:
    """x // y of int32 that are not negative; `//` would take their signs, which costs scalar work."""
    return x if y == 1 else lax.div(x, jnp.int32(y))


def _query_lanes(c: int) -> int:
    """Lanes of a query: 2C where K and V share one tile of lanes (zeros meet V), so that no lane needs a mask."""
    return 2 * c if c % _LANES and 2 * c % _LANES == 0 else c


def _value_lanes(c: int, width: int) -> int:
    """Lanes of a weighted sum: where V does not start at a tile of lanes, all are summed, and V's are cut out later."""
    return width if c % _LANES else c


def _kernel(
    length_ref,  # SMEM [B]
    table_ref,  # SMEM [B * M]
    steps_ref,  # SMEM [S + 1] next step with a prefix; with a window also [S] least and [S] greatest first positions
    q_ref,  # [1, 1, units, rows, query lanes]
    tree_ref,  # [1, heads, tile, W]
    facts_ref,  # [1, 1, queries, 128 or 256]
    pages_ref,  # HBM [P, G, page, W]
    out_ref,  # [1, 1, units, rows, value lanes]
    buffer,  # [2, per_block, heads, page, W]
    acc,  # [units, rows, value lanes] float32
    top,  # [units, rows, 128] float32, the running maximum in every lane
    total,  # [units, rows, 128] float32, the running sum in every lane
    slot_ref,  # SMEM [1], the half of the buffer that the next block is in
    sem,  # [2]
    *,
    plan: _Plan,
    scale: float,
    soft_cap: float | None,
):
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
        keys = kv[:, : _query_lanes(c)]
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
        values = kv if c % _LANES else kv[:, c:]
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
        total[...] = jnp.zeros_like(total)
        top[...] = jnp.full_like(top, _MASKED)

    # The tree comes first: every query sees something of it, so the maximum is finite from here on.
    words = facts_ref[0, 0, :, :_LANES]
    chunks = -(-plan.tile // _LANES)
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
                    lows = jnp.concatenate([facts_ref[0, 0, :, _LANES : _LANES + 1]] * plan.repeats, axis=0)
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


def _plan(q_BNHC: jax.Array, pages: jax.Array, columns: int, tree: int, windowed: bool, cores: int) -> _Plan:
    """The largest steps that VMEM holds, or the smallest steps if it holds none.

    A tree's rows stay in one block wherever they fit: every block of rows reads the prefix again.
    """
    _, n, h, c = q_BNHC.shape
    _, g, page, width = pages.shape
    r, itemsize = h // g, jnp.dtype(pages.dtype).itemsize
    least, most = _BLOCK_TOKENS
    tokens = max(least, min(most, _BLOCK_BYTES // (min(g, _MAX_HEADS) * 2 * c * itemsize)))
    tiles = -(-tree // _MAX_TILE)
    common = _Plan(
        channels=c, width=width, page=page, per_block=max(1, tokens // page), columns=columns,
        groups=g, heads=1, parts=1, repeats=1, queries=_round_up(n * r, 8), joint=True, blocks=1,
        tile=_round_up(-(-tree // tiles), 16 if tiles == 1 else _LANES), itemsize=itemsize, windowed=windowed,
    )  # fmt: skip

    def by_head(queries: int) -> _Plan:
        repeats = max(i for i in range(1, r + 1) if r % i == 0 and (i * queries <= _UNIT_ROWS or i == 1))
        return dataclasses.replace(
            common, joint=False, queries=queries, repeats=repeats, parts=r // repeats, blocks=-(-n // queries)
        )

    queries = _round_up(n, 8)
    choices = [common] if n % 8 and n * r <= _UNIT_ROWS else []
    choices += [by_head(queries)] if queries <= 64 or queries * r <= _MAX_ROWS else []
    choices += [by_head(x) for x in (512, 256, 128, 64, 32, 16, 8) if x < queries and (x == 8 or x * r <= _MAX_ROWS)]
    heads = [x for x in range(min(_MAX_HEADS, g // cores), 0, -1) if g % x == 0]
    plans = [dataclasses.replace(choice, heads=x, groups=g // x) for choice in choices for x in heads]
    return next((plan for plan in plans if plan.vmem <= _VMEM_BYTES), plans[-1])


def refusal(
    q_BNHC: jax.Array,
    pages: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    tree_k_BTGC: jax.Array,
    tree_v_BTGC: jax.Array,
    tree_mask_BNT: jax.Array,
    *,
    window: int | None = None,
    cores: int = 1,
) -> str | None:
    """Why this kernel cannot serve arguments that fit each other, or None; arrays or their abstract shapes."""
    c, m, t = q_BNHC.shape[3], table_BM.shape[1], tree_k_BTGC.shape[1]
    _, g, page, width = pages.shape
    dtypes = [str(x.dtype) for x in (q_BNHC, pages, tree_k_BTGC, tree_v_BTGC)]
    integers = [str(x.dtype) for x in (table_BM, length_B)]
    if dtypes not in (["bfloat16"] * 4, ["float32"] * 4):
        return f"q, pages, tree_k and tree_v must all be bfloat16 or all float32, got {', '.join(dtypes)}"
    if integers != ["int32"] * 2 or tree_mask_BNT.dtype != jnp.bool_:
        return f"table and length must be int32 and tree_mask bool, got {', '.join(integers)}, {tree_mask_BNT.dtype}"
    if c % 8 or c > _MAX_CHANNELS:
        return f"head dimension must be a multiple of 8 and at most {_MAX_CHANNELS}, got {c}"
    if width not in (2 * c, _round_up(2 * c, _LANES)):
        return f"pages must have {2 * c} or {_round_up(2 * c, _LANES)} lanes for head dimension {c}, got {width}"
    if page % 8:
        return f"page size must be a multiple of 8, got {page}"
    if min(*q_BNHC.shape, *tree_k_BTGC.shape, m) < 1:
        return f"no axis may be empty, got q {q_BNHC.shape}, tree_k {tree_k_BTGC.shape} and table {table_BM.shape}"
    if t > _MAX_TREE:
        return f"tree entries must be at most {_MAX_TREE}, got {t}"
    if not 1 <= cores <= g:
        return f"cores must be from 1 to the {g} key-value heads, got {cores}"
    plan = _plan(q_BNHC, pages, m, t, window is not None, cores)
    if plan.vmem > _VMEM_BYTES:
        return (
            f"a grid step must fit into {_VMEM_BYTES} bytes of VMEM, but one key-value head with "
            f"{plan.parts * plan.rows} query rows and pages of {page} tokens takes {plan.vmem}"
        )
    if plan.scalars > _SCALARS:
        return f"the page table of a request must have at most {_SCALARS - plan.scalars + m} entries (SMEM), got {m}"
    return None


def tree_attention(
    q_BNHC: jax.Array,
    pages: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    tree_k_BTGC: jax.Array,
    tree_v_BTGC: jax.Array,
    tree_mask_BNT: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    offset_BN: jax.Array | None = None,
    soft_cap: float | None = None,
    cores: int = 1,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Attention of N tree tokens over a paged prefix and over the tree's own keys and values.

    The running softmax over blocks is FlashAttention's (Dao et al. 2022), the paged prefix
    vLLM's (Kwon et al. 2023, section 4).

    Args:
      q_BNHC: queries, rotary embedding applied; bfloat16 or float32.
      pages: [P, G, page, W] keys and values side by side, in q's dtype, as are the tree's.
        W is 2C, or 2C rounded up to a multiple of 128, the lanes behind 2C unused.
      table_BM: int32 page numbers; entries beyond the length may hold anything.
      length_B: int32, committed tokens a request, at most M * page.
      tree_k_BTGC, tree_v_BTGC: the tree's keys and values. A value that is not finite makes
        every row that sees its entry NaN, and no other.
      tree_mask_BNT: bool, whether query n sees tree entry t; [1, N, T] serves all requests.
        Every query must see at least one entry.
      scale: of the scores; 1/sqrt(C) by default.
      window: a query at position length + offset sees prefix positions above length + offset - window.
      offset_BN: int32 query positions relative to the length; by default the entries a query sees, less one.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap).
      cores: TensorCores that share the call (2 on v4 and v5p): KV heads form at least as many groups.
      interpret: as `pallas_call` takes it.

    Returns:
      [B, N, H, C] in q's dtype; scores and sums are float32.

    Raises:
      ValueError: what `refusal` gives as the reason.
    """
    args = (q_BNHC, pages, table_BM, length_B, tree_k_BTGC, tree_v_BTGC, tree_mask_BNT)
    reason = refusal(*args, window=window, cores=cores)
    if reason is not None:
        raise ValueError(reason)
    b, n, h, c = q_BNHC.shape
    g, m, t = pages.shape[1], table_BM.shape[1], tree_k_BTGC.shape[1]
    r = h // g
    plan = _plan(q_BNHC, pages, m, t, window is not None, cores)

    low_BN = None
    if window is not None:
        if offset_BN is None:
            offset_BN = jnp.broadcast_to(offsets(tree_mask_BNT), (b, n))
        low_BN = jnp.maximum(length_B[:, None] + offset_BN - (window - 1), 0)
    q = _rows_of_queries(plan, q_BNHC, g)
    tree = _rows_of_tree(plan, tree_k_BTGC, tree_v_BTGC)
    facts, lows = _facts(plan, tree_mask_BNT, low_BN, r)
    # More page table than SMEM holds goes in several calls.
    batch = min(b, _SCALARS // plan.scalars)
    outs = []
    for i in range(0, b, batch):
        part = slice(i, min(i + batch, b))
        part_plan = dataclasses.replace(plan, steps=(part.stop - i) * plan.blocks)
        call = functools.partial(
            _call, part_plan, scale=c**-0.5 if scale is None else scale, soft_cap=soft_cap, interpret=interpret
        )
        steps = _steps(part_plan, length_B[part], None if lows is None else lows[part])
        own_facts = facts if facts.shape[0] == 1 else facts[part]
        outs.append(call(length_B[part], table_BM[part], steps, q[part], tree[part], own_facts, pages))
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=0)

    if c % _LANES:
        out = out[..., c : 2 * c]
    if plan.joint:
        out = out[:, 0, :, : n * r].reshape(b, g, r, n, c).transpose(0, 3, 1, 2, 4)
    else:
        out = out.reshape(b, plan.blocks, h, plan.queries, c).transpose(0, 1, 3, 2, 4).reshape(b, -1, h, c)[:, :n]
    return out.reshape(b, n, h, c)


def _rows_of_queries(plan: _Plan, q_BNHC: jax.Array, g: int) -> jax.Array:
    """[B, Q, G * parts, rows, query lanes]."""
    b, n, h, c = q_BNHC.shape
    lanes = _query_lanes(c)
    if plan.joint:
        q = q_BNHC.reshape(b, n, g, h // g, c).transpose(0, 2, 3, 1, 4).reshape(b, 1, g, -1, c)
        return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, plan.queries - q.shape[3]), (0, lanes - c)))
    q = jnp.pad(q_BNHC, ((0, 0), (0, -n % plan.queries), (0, 0), (0, lanes - c)))
    q = q.reshape(b, plan.blocks, plan.queries, h, lanes).transpose(0, 1, 3, 2, 4)
    return q.reshape(b, plan.blocks, g * plan.parts, plan.rows, lanes)


def _rows_of_tree(plan: _Plan, k_BTGC: jax.Array, v_BTGC: jax.Array) -> jax.Array:
    """[B, G, T rounded up to tiles, W].

    A NaN value would cross the mask as 0 * NaN. Its key takes its place: a masked score is replaced, not multiplied.
    """
    finite = jnp.isfinite(v_BTGC)
    k = jnp.where(finite, k_BTGC, jnp.full_like(k_BTGC, jnp.nan))
    v = jnp.where(finite, v_BTGC, jnp.zeros_like(v_BTGC))
    tree = jnp.concatenate([k, v], axis=3).transpose(0, 2, 1, 3)
    return jnp.pad(tree, ((0, 0), (0, 0), (0, -tree.shape[2] % plan.tile), (0, plan.width - tree.shape[3])))


def _facts(plan: _Plan, mask_BNT: jax.Array, low_BN: jax.Array | None, r: int) -> tuple[jax.Array, jax.Array | None]:
    """What each row sees, [B or 1, Q, queries, 128 or 256], and of the prefix from where on, [B, Q, queries]."""
    words = jnp.pad(mask_BNT, ((0, 0), (0, 0), (0, -mask_BNT.shape[2] % _LANES))).astype(jnp.int32)
    words = words.reshape(*words.shape[:2], -1, _LANES)
    words = jnp.sum(words << lax.broadcasted_iota(jnp.int32, words.shape, 2), axis=2, dtype=jnp.int32)

    def by_row(x_BNx: jax.Array) -> jax.Array:
        x = jnp.tile(x_BNx, (1, r, 1)) if plan.joint else x_BNx
        x = jnp.pad(x, ((0, 0), (0, plan.blocks * plan.queries - x.shape[1]), (0, 0)), mode="edge")
        return x.reshape(x.shape[0], plan.blocks, plan.queries, x.shape[2])

    facts = by_row(words)
    if low_BN is None:
        return facts, None
    lows = by_row(low_BN[:, :, None])
    wide = jnp.broadcast_to(lows, (*lows.shape[:3], _LANES))
    return jnp.concatenate([jnp.broadcast_to(facts, wide.shape), wide], axis=3), lows[..., 0]


def _steps(plan: _Plan, length_B: jax.Array, low_BQn: jax.Array | None) -> jax.Array:
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


def _call(
    plan: _Plan,
    length_B: jax.Array,
    table_BM: jax.Array,
    steps: jax.Array,
    q: jax.Array,
    tree: jax.Array,
    facts: jax.Array,
    pages: jax.Array,
    *,
    scale: float,
    soft_cap: float | None,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """The kernel over one batch: [B, Q, G * parts, rows, value lanes]."""
    values = _value_lanes(plan.channels, plan.width)
    own = facts.shape[0] > 1

    def by_block(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, plan.units, plan.rows, lanes), lambda g, b, i, t, *_: (b, i, g, 0, 0))

    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, scale=scale, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(plan.groups, length_B.shape[0], plan.blocks, tree.shape[2] // plan.tile),
            in_specs=[
                by_block(q.shape[4]),
                pl.BlockSpec((1, plan.heads, plan.tile, plan.width), lambda g, b, i, t, *_: (b, g, t, 0)),
                pl.BlockSpec((1, 1, plan.queries, facts.shape[3]), lambda g, b, i, t, *_: (b if own else 0, i, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=by_block(values),
            scratch_shapes=[
                pltpu.VMEM((2, plan.per_block, plan.heads, plan.page, plan.width), pages.dtype),
                pltpu.VMEM((plan.units, plan.rows, values), jnp.float32),
                pltpu.VMEM((plan.units, plan.rows, _LANES), jnp.float32),
                pltpu.VMEM((plan.units, plan.rows, _LANES), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:4], values), q.dtype),
        # Copies run ahead from step to step, so only head groups may go to different cores.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="tree_attention",
    )(length_B, table_BM.reshape(-1), steps, q, tree, facts, pages)
