"""Tree attention on Mosaic GPU for Hopper: the same bits for a token however it is computed.

The prefix is cut at absolute positions, into blocks of 64 tokens and groups of 1,024 (`mosaic_plan`); a warpgroup owns
(item, KV head, 64 query rows) at a time. The items' sums are added in their order by a second kernel, or where there
are many requests by who brings a request's last item. Each program walks along a list of those that hold tokens; a
warpgroup asks for its own pages, through a ring in shared memory and across
the boundaries of items, so that memory never rests. One that only copied would need registers that the others lack:
where XLA has kernels linked, as JAX 0.12 does, they cannot be handed over (docs/notes.md, 2026-11-28). Rows are
wgmma's first operand, of which 64 are computed whatever the number in use.

Without a mask (plain decoding, chains, chunks of prompts) new tokens stand where they will lie once committed: the
last blocks of a request are put together in shared memory from the page's tokens and the new ones. So a token of a
verified chain has the bits that plain decoding gives it one or more tokens later. Nodes of a tree share positions and
take blocks of their own behind the prefix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.sizes import MULTIPROCESSORS, device_kind
from pallas_kernels.tree_attention import mosaic_heads, mosaic_near
from pallas_kernels.tree_attention.mosaic_few import LOG2E, READ, ROW, Few
from pallas_kernels.tree_attention.mosaic_launch import Launch
from pallas_kernels.tree_attention.mosaic_merge import merge
from pallas_kernels.tree_attention.mosaic_plan import BLOCK, FEW, GROUP, Sizes, plan
from pallas_kernels.tree_attention.mosaic_rows import ROWS, div, params, rem
from pallas_kernels.tree_attention.mosaic_sums import arrive
from pallas_kernels.tree_attention.reference import Shared, TreeAttentionArgs

#: Query rows of a KV head that are few: beyond, arithmetic counts.
MOST_ROWS = ROWS
#: Requests times KV heads up to which wide trees are the other kernel's.
MOST_UNITS = 132
#: Entries of a tree up to which a word's bits are put together one by one.
_SIDE_BY_SIDE = 16
_F32, _I32 = jnp.float32, jnp.int32


def refusal(args: TreeAttentionArgs) -> str | None:
    """Why this kernel cannot serve these arguments, or None."""
    if args.value_channels is not None:
        return f"values are the first {args.value_channels} channels of their keys"
    q, c, page = args.q_BNHC, args.q_BNHC.shape[3], args.pages.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype must be bfloat16 or float16, got {q.dtype}"
    dtypes = [x.dtype for x in (q, args.pages, args.tree_k_BTGC, args.tree_v_BTGC)]
    if any(dtype != q.dtype for dtype in dtypes):
        return f"q, pages, tree_k and tree_v must share a dtype, got {', '.join(map(str, dtypes[:3]))}"
    if (why := mosaic_heads.refusal(c, 64, 128)) is not None:
        return why
    if page % BLOCK:
        return f"page size must be a multiple of {BLOCK}, got {page}"
    if q.shape[2] % (each := 128 // mosaic_heads.whole(c)):
        return f"query heads must be a multiple of {each}, got {q.shape[2]}"
    if args.factor <= 0:
        return f"scale must be positive, got {args.factor}"
    return None


def slower(args: TreeAttentionArgs) -> str | None:
    """Why another kernel is to be taken, which mostly takes less time, or None."""
    units, rows = args.units, args.rows
    if rows > MOST_ROWS:
        return f"it is for at most {MOST_ROWS} query rows of a KV head, got {rows}"
    wide = rows >= ROWS // 2 and units <= MOST_UNITS and mosaic_heads.fills(args.q_BNHC.shape[3])
    if args.tree_mask_BNT is not None and wide:
        return f"trees of {ROWS // 2} rows or more are the other kernel's, got {rows}"
    return None


@dataclasses.dataclass(frozen=True)
class _Turns:
    """A warpgroup's turns.

    Attributes:
      unit: a turn's KV head, tile and item, and what that is: its request, first block, end of the blocks (one at
        least), the prefix's length, how many other items the request has. Read before it is known whether there is
        such a turn. mine: how many there are.
    """

    unit: Callable[[Any], tuple[Any, ...]]
    mine: Any

    def source(self, turn: Any) -> tuple[Any, ...]:
        """Of a turn the KV head, request, first block, end of the blocks and the prefix's length."""
        head, _, _, *rest, _ = self.unit(turn)
        return head, *rest


class _Ahead(NamedTuple):
    """What a warpgroup asks for next.

    Attributes:
      turn: whose blocks these are. block: the next one. source, later: of that turn and of the one after it.
      now, then: pages of a few blocks, of which that block is one, and of the few that come after them.
    """

    turn: Any
    block: Any
    source: tuple[Any, ...]
    later: tuple[Any, ...]
    now: tuple[Any, ...]
    then: tuple[Any, ...]


class _Kernel(Few):
    """One launch's code."""

    def body(self, ins: dict[str, Any], outs: tuple[Any, ...], shared: dict[str, Any]) -> None:
        """A warpgroup of a program."""
        overlap.begin(self.interpret)
        if not self.settled:
            overlap.wait(self.interpret)
        team, ins = lax.axis_index("team"), ins | {"first": ins["first"][0]}
        own, many = team * self.programs + lax.axis_index("program"), self.teams * self.programs
        per_item, most = self.kv_heads * self.tiles, ins["items"].shape[1]

        whole = ins["count"][1] != 0 if self.mixed else self.direct

        def place(turn: Any) -> Any:
            """To and fro, where the longest come first."""
            return jnp.where(rem(turn, 2) == 1, many - 1 - own, own) if self.direct or self.mixed else own

        def unit(turn: Any) -> tuple[Any, ...]:
            at = turn * many + place(turn)
            item = jnp.minimum(div(at, per_item), most - 1)
            what = (ins["items"][i, item] for i in range(5))
            if self.straight:  # what is known without a look at the items can be read before them
                _, _, *rest = what
                what = item, jnp.int32(0), *rest
            return rem(div(at, self.tiles), self.kv_heads), rem(at, self.tiles), item, *what

        units = jnp.int32(most * per_item) if self.straight else ins["count"][0] * per_item
        all_turns = div(units, many)
        mine = all_turns + jnp.where(place(all_turns) < rem(units, many), 1, 0)
        turns = _Turns(unit, mine)

        def ask(step: Any, ahead: _Ahead) -> _Ahead:
            return self.ask(team, step, ahead, turns, ins, shared)

        ahead = lax.fori_loop(0, self.stages, ask, self.first(turns, ins))
        if self.settled:
            overlap.wait(self.interpret)
        self.clear_queries(shared["q"].at[team])

        def walk(direct: bool) -> None:
            def one(turn: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                step, before, *now = carry
                later, now = unit(turn + 1), tuple(now)  # read long before it is used
                report = functools.partial(self.report, before, outs, ins)
                step = self.compute(own, team, step, now, ask, ins, outs, shared, direct=direct, report=report)
                head, _, _, b, *_, others = now
                return step, (before if direct else (b, head, others)), *later

            begin = (jnp.int32(0), ahead), (jnp.int32(0), jnp.int32(0), jnp.int32(-1)), *unit(jnp.int32(0))
            _, before, *_ = lax.fori_loop(0, mine, one, begin)
            if not direct:
                self.report(before, outs, ins)

        if self.mixed:
            lax.cond(whole, lambda: walk(True), lambda: walk(False))
        else:
            walk(self.direct)

    def first(self, turns: _Turns, ins: dict[str, Any]) -> _Ahead:
        """Before anything was asked for."""
        source, later = (turns.source(jnp.int32(turn)) for turn in range(2))
        _, b, block, _, _ = source
        now = self.numbers(lambda i: i, b, block, ins)
        return _Ahead(jnp.int32(0), block, source, later, now, self.pages_after(source, later, block, ins))

    def pages_after(self, source: tuple[Any, ...], later: tuple[Any, ...], begin: Any, ins: dict[str, Any]) -> Any:
        """Of the few blocks that are asked for after those from `begin` on."""
        _, b, _, end, _ = source
        pages = lambda b, begin: self.numbers(lambda i: i, b, begin, ins)
        return lax.cond(begin + READ < end, lambda: pages(b, begin + READ), lambda: pages(later[1], later[2]))

    def ask(
        self, team: Any, step: Any, ahead: _Ahead, turns: _Turns, ins: dict[str, Any], shared: dict[str, Any]
    ) -> _Ahead:  # fmt: skip
        """Brings the next block, if there is one, to a step's slot; what comes after it."""
        (head, _, first, end, length), j = ahead.source, ahead.block
        k, last = rem(j - first, READ), j + 1 == end
        bring = functools.partial(self.bring_block, team, step, j, head, length, ahead.now, k, ins, shared)
        pl.when(ahead.turn < turns.mine)(bring)

        def turned() -> _Ahead:
            source, later, turn = ahead.later, turns.source(ahead.turn + 2), ahead.turn + 1
            then = self.pages_after(source, later, source[2], ins)
            return _Ahead(turn, source[2], source, later, ahead.then, then)

        def went_on() -> _Ahead:
            def read() -> tuple[Any, ...]:
                return ahead.then, self.pages_after(ahead.source, ahead.later, j + 1, ins)

            now, then = lax.cond(k == READ - 1, read, lambda: (ahead.now, ahead.then))
            return ahead._replace(block=j + 1, now=now, then=then)

        return lax.cond(last, turned, went_on)

    def compute(
        self, own: Any, team: Any, step: Any, unit: tuple[Any, ...], ask: Callable[[Any, Any], Any],
        ins: dict[str, Any], outs: tuple[Any, ...], shared: dict[str, Any], *, direct: bool,
        report: Callable[[], None],
    ) -> Any:  # fmt: skip
        """Attention of a turn's rows to what its item holds; where the ring is then.

        Args:
          direct: whether that is a whole request. report: what the turn before has left to do.
        """
        unit = unit[:-1]
        head, tile, item, b, first, end, _ = unit
        q, (sums_of_items, sums_of_groups, out) = shared["q"].at[team], (outs[:3], outs[3:6], outs[6:])
        base = self.first_row(b, head)
        self.put([q], [ins["q"]], self.queries, base, (b, head), -tile * ROWS, self.rows, spread=self.spread)
        plgpu.commit_smem()
        at = self.first_new(b, head)
        loaded = self.load([ins["k"], ins["v"]], self.news, at, self.entries) if self.early else None
        block = functools.partial(self.block, unit, team, ins, shared, q, loaded, ask)
        place = (item * self.kv_heads + head) * self.tiles + tile
        begin, stop, few = div(first, FEW), div(end + FEW - 1, FEW), GROUP // FEW
        group = functools.partial(self.grouped, block, first, end)

        def close(sums: tuple[Any, ...]) -> None:
            if direct:
                self.finish(sums, out[0], base, (b, head), ins.get("sinks"))
            else:
                report()
                self.spill(sums_of_items, sums, place, tile)

        if self.spread and direct and self.causal:
            low, high = div(begin, few), div(stop + few - 1, few)
            step, *sums = lax.fori_loop(low, high, functools.partial(self.behind, group, low), (step, *self.nothing))
            close(tuple(sums))
            return step
        if self.spread and not direct:  # an item is a group at most
            step, *sums = group(div(begin, few), step)
            close(tuple(sums))
            return step

        def add_to(refs: tuple[Any, ...], at: Any) -> Any:
            return lambda sums: self.add(self.fetch(refs, at, tile), sums)

        def one(i: Any, step: Any) -> Any:
            """A few blocks; registers do not hold sums of a group and of those before besides, which wait in memory."""
            step, *sums = self.some(block, first, end, i, step)
            inside = (rem(i, few) > 0) & (i > begin)
            sums = lax.cond(inside, add_to(sums_of_groups, own), lambda x: x, tuple(sums))
            last = (rem(i, few) == few - 1) | (i == stop - 1)

            @pl.when(last)
            def _() -> None:
                behind = div(i, few) > div(begin, few)
                whole = lax.cond(behind, add_to(sums_of_items, place), lambda x: x, sums)
                pl.when(i < stop - 1)(lambda: self.spill(sums_of_items, whole, place, tile))
                pl.when(i == stop - 1)(lambda: close(whole))

            pl.when(jnp.logical_not(last))(lambda: self.spill(sums_of_groups, sums, own, tile))
            return step

        return lax.fori_loop(begin, stop, one, step)

    def report(self, at: tuple[Any, Any, Any], outs: tuple[Any, ...], ins: dict[str, Any]) -> None:
        """Says that a piece's sums are in memory; whoever says it last for a request's KV head makes the result.

        It is said a turn later, when they have long been written.

        Args:
          at: of the piece the request, the KV head, and how many others that has; less than 0 for no piece.
        """
        if not self.mixed or self.interpret:  # which has no such words: a second kernel follows
            return
        b, head, others = at

        @pl.when(others >= 0)
        def _() -> None:
            last = arrive(ins["arrived"], b * self.kv_heads + head, others)
            pl.when(last != 0)(lambda: self.gather_pieces(b, head, outs, ins))

    def gather_pieces(self, b: Any, head: Any, outs: tuple[Any, ...], ins: dict[str, Any]) -> None:
        """A result from pieces that are all there, added up in the order of `merge`."""
        first, end, long, last, per = (ins["ends"][i, b] for i in range(5))
        in_group, tile = lax.div(jnp.int32(GROUP), per), jnp.int32(0)

        def piece(i: Any) -> tuple[Any, ...]:
            item = jnp.where(i >= end - 1, last, long + i - first)
            return self.fetch(outs[:3], item * self.kv_heads + head, tile)

        def one(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            """Few blocks to a group, and groups one after the other. Two more pieces are on their way meanwhile."""
            sums, group, now, then = (carry[3 * k : 3 * k + 3] for k in range(4))
            later, group = piece(i + 2), self.add(group, now)
            closes = (lax.rem(i, in_group) == in_group - 1) | (i == end - 1)
            close = lambda sums, group: (*self.add(sums, group), *self.nothing)
            found = lax.cond(closes & (i >= first), close, lambda sums, group: (*sums, *group), sums, group)
            return *found, *then, *later

        sums = lax.fori_loop(first - 2, end, one, self.nothing * 4)[:3]
        base = self.first_row(b, head)
        self.finish(sums, outs[6], base, (b, head), ins.get("sinks"))

    def finish(self, sums: tuple[Any, ...], out: Any, base: Any, at: tuple[Any, Any], sinks: Any) -> None:
        """A request's result, as `merge` makes it."""
        acc, top, total = sums
        along = lambda x: lax.broadcast_in_dim(x, (ROWS, self.head_dim), (0,))
        if sinks is not None:
            sink = plgpu.load(sinks.at[at[1]], layout=ROW, optimized=False)  # pyright: ignore[reportCallIssue]
            new = jnp.maximum(top, sink)
            keep = jnp.exp2(top - new)
            one = self.cast(jnp.ones((ROWS,), _F32), ROW)
            acc, total = acc * along(keep), self.fused(one, jnp.exp2(sink - new), total, keep, ROW)
        self.store(out, (acc / along(total)).astype(out.dtype), base, at)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("interpret",))
def _attend(kernel: _Kernel, most: int, ins: dict[str, jax.Array], *, interpret: Any = None) -> Any:
    """Sums, maxima and weights of at most so many items, and the result where requests are items or may be."""
    names, scratch = list(ins), kernel.scratch(ins["q"].dtype)
    sums = lambda count: [
        jax.ShapeDtypeStruct((count, kernel.height, *more), _F32) for more in ((kernel.head_dim,), (), ())
    ]
    outs = [*sums(most * kernel.kv_heads * kernel.tiles), *sums(kernel.teams * kernel.programs)]
    if kernel.direct or kernel.mixed:
        outs.append(jax.ShapeDtypeStruct(ins["q"].shape, ins["q"].dtype))

    def tree_attention(*refs: Any) -> None:
        count, end = len(names), len(names) + len(outs)
        shared = dict(zip(scratch, refs[end:], strict=True))
        kernel.body(dict(zip(names, refs[:count], strict=True)), tuple(refs[count:end]), shared)

    extra = {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(
        tree_attention, out_type=outs, scratch_types=tuple(scratch.values()), grid=(kernel.programs,),
        grid_names=("program",), num_threads=kernel.teams, thread_name="team", compiler_params=params(), **extra,
    )(*ins.values())  # fmt: skip


def tree_attention(
    args: TreeAttentionArgs,
    *,
    programs: int | None = None,
    teams: int = 2,
    whole: bool | None = None,
    members: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See api.tree_attention.

    Args:
      programs, teams: see _Kernel; programs are by default one for each multiprocessor of the device at hand.
      whole: whether a request is one item; by the shapes, or the lengths, where None. members: of a cluster that has
        a KV head of a request to itself (`mosaic_near`), 0 for the other form; by the shapes where None. Results depend
        on neither.
      interpret: parameters of Pallas' interpreter for GPUs.
    """
    q = args.q_BNHC
    (b, n, h, c), (t, g) = q.shape, args.tree_k_BTGC.shape[1:3]
    causal, page = args.tree_mask_BNT is None, args.pages.shape[2]
    if programs is None:
        kind = device_kind().lower()
        programs = next((count for name, count in MULTIPROCESSORS.items() if name in kind), 132)
    apart = args.window is not None and not (causal and args.offset_BN is None)
    scores: dict[str, Any] = dict(soft_cap=args.soft_cap, apart=apart)
    shape = b, n, t, h, g, c, page, causal, args.window, args.factor, programs, teams, interpret is not None
    capacity = args.table_BM.shape[1] * page
    # Beside the table, not added to it: layers share what is read before the kernel before has ended.
    ins = {"q": args.q_BNHC, "k": args.tree_k_BTGC, "v": args.tree_v_BTGC, "pages": args.pages, "table": args.table_BM}
    ins["first"] = jnp.full((1,), args.first_page, _I32)
    if args.tree_mask_BNT is not None:
        ins["words"] = _words(args.tree_mask_BNT, Launch(*shape))
    if args.window is not None and apart:
        lowest_BN = jnp.maximum(args.length_B[:, None] + args.offsets - (args.window - 1), 0).astype(_I32)
        ins["lowest"] = _rows(jnp.repeat(lowest_BN, h // g, axis=1), Launch(*shape))
        ins["latest"] = lowest_BN.max(axis=1)
    sinks = None if args.sinks_H is None else args.sinks_H.astype(_F32) * LOG2E
    if members is None:
        members = 0 if whole is not None else mosaic_near.members(Few(*shape, **scores), capacity)
    shared = args.shared or Shared()
    if members:
        few, shared.read = Few(*shape, settled=shared.read, **scores), True
        mosaic_near.check(few, capacity, members)
        ins["length"] = args.length_B
        if sinks is not None:
            ins["sinks"] = sinks
        return mosaic_near.attend(mosaic_near.Near.of(few, members), ins, interpret=interpret)
    sizes = Sizes.of(Launch(*shape), capacity, whole)
    direct = sizes.whole and Launch(*shape).tiles == 1
    key = t, sizes, args.window, causal
    form = dict(direct=direct, straight=sizes.straight, mixed=sizes.mixed, settled=key in shared.plans)
    kernel = _Kernel(*shape, **form, **scores)
    if key not in shared.plans:
        shared.plans[key] = *plan(args.length_B, t, sizes, args.window, causal), _arrived(args.length_B, kernel)
    items, count, ends, arrived = shared.plans[key]
    ins |= {"items": items, "count": count}
    if kernel.mixed:
        ins |= {"ends": ends, "arrived": arrived}
    if sinks is not None and (direct or kernel.mixed):
        ins["sinks"] = _rows(jnp.tile(sinks.reshape(g, h // g), (1, n)), kernel).reshape(g, ROWS)
    acc, top, total, _, _, _, *results = _attend(kernel, sizes.items(b), ins, interpret=interpret)
    if direct or (kernel.mixed and not kernel.interpret):
        return results[0]
    ins = {"ends": ends, "acc": acc, "top": top, "total": total}
    if sinks is not None:
        ins["sinks"] = sinks
    out = merge(kernel, q.dtype, sinks is not None, ins, interpret=interpret).reshape(q.shape)
    if kernel.mixed:
        out = jnp.where(count[1] != 0, results[0], out)
    return out


def _arrived(length_B: jax.Array, kernel: Launch) -> jax.Array:
    """Zeros, a word for each request's KV head. A launch counts there, and leaves zeros.

    So all layers may have the same, though XLA takes it for something that is only read. They are made of lengths, for
    it may put what it knows to be zeros where others read them.
    """
    zeros_B = jnp.minimum(length_B.astype(_I32), 0)
    return jnp.repeat(zeros_B, kernel.kv_heads)


def _words(mask_BNT: jax.Array, kernel: Launch) -> jax.Array:
    """Bit t % 32 of word t // 32 says whether a row sees tree entry t: uint32 [B, T / 32, tiles of rows, 64]."""
    b, n, t = mask_BNT.shape
    if t <= _SIDE_BY_SIDE:  # no sum, so XLA makes words and rows of them by one kernel
        bits = (mask_BNT[:, None, :, i].astype(jnp.uint32) << i for i in range(t))
        return _rows(jnp.repeat(functools.reduce(jnp.bitwise_or, bits), kernel.group, axis=2), kernel)
    words = -(-t // 32)
    bits = jnp.pad(mask_BNT, ((0, 0), (0, 0), (0, 32 * words - t))).reshape(b, n, words, 32).astype(jnp.uint32)
    packed = (
        (bits << jnp.arange(32, dtype=jnp.uint32)[None, None, None]).sum(axis=-1, dtype=jnp.uint32).transpose(0, 2, 1)
    )
    return _rows(jnp.repeat(packed, kernel.group, axis=2), kernel)


def _rows(x: jax.Array, kernel: Launch) -> jax.Array:
    """[..., rows of a KV head] as they stand in tiles: [..., tiles, 64]."""
    *outer, rows = x.shape
    x = jnp.pad(x, [(0, 0)] * len(outer) + [(0, kernel.tiles * (ROWS // (1 + kernel.spread)) - rows)])
    if kernel.spread:
        x = jnp.pad(x.reshape(*outer, 4, 8), [(0, 0)] * (len(outer) + 1) + [(0, 8)])
    return x.reshape(*outer, kernel.tiles, ROWS)
