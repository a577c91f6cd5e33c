"""Attention with equal bits in one launch, for few requests: a cluster of programs owns a request's KV head.

Where requests are few, the sums of a layer's items take almost as long to be written, waited for and read by a second
kernel as to be made. So the programs of a cluster share out the blocks of one KV head. Each is sent its part of the
channels of all sums, to its own shared memory, and adds them up once they have arrived, in the order of the other form
(`mosaic_plan`): the bits are the same. A piece is what an item is there, a block, a few or a group. Sums are sent and
not fetched: nobody waits for a store to a neighbour's memory, and loads from there took longer than all the rest. A
barrier counts the bytes that arrive, for a barrier of the whole cluster waits for everything that memory was asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.tree_attention import mosaic_rows
from pallas_kernels.tree_attention.mosaic_few import READ, Few
from pallas_kernels.tree_attention.mosaic_launch import LANES
from pallas_kernels.tree_attention.mosaic_merge import Sums, add_sums, nothing, with_sink
from pallas_kernels.tree_attention.mosaic_near_launch import NearLaunch
from pallas_kernels.tree_attention.mosaic_plan import BLOCK, FEW, GROUP
from pallas_kernels.tree_attention.mosaic_rows import div, params, rem

#: Programs of a cluster by requests times KV heads up to which all clusters run at once on 132 multiprocessors.
MEMBERS = {8: 8, 30: 4, 64: 2}
#: Blocks of a warpgroup beyond which requests of unequal lengths may wait for the longest (one alone waits for none),
#: and clusters that fill less than a third of the device read more slowly than all of it would.
MOST_BLOCKS = 9
#: A piece's blocks as powers of two.
_SHIFTS = 0, FEW.bit_length() - 1, GROUP.bit_length() - 1
_F32, _I32 = jnp.float32, jnp.int32


def members(kernel: Few, capacity: int) -> int:
    """Programs of a cluster that takes less time than two launches, or 0 where none does.

    Args:
      capacity: tokens of a request at most.
    """
    units = kernel.batch * kernel.kv_heads
    count = next((count for most, count in MEMBERS.items() if units <= most), 0)
    if not kernel.spread or not 0 < units * count <= kernel.programs:
        return 0
    near = Near.of(kernel, count)
    blocks = _seen(kernel, capacity)
    bounded = kernel.batch > 1 or 3 * units * count < kernel.programs
    most = min(near.most, MOST_BLOCKS * near.workers) if bounded else near.most
    return count if blocks <= most else 0


def _seen(kernel: Few, capacity: int) -> int:
    """Most blocks that a request of so many tokens has; a window begins anywhere in a group."""
    seen = capacity if kernel.window is None else min(capacity, kernel.window + GROUP * BLOCK)
    return -(-seen // BLOCK) + -(-kernel.entries // BLOCK)


def check(kernel: Few, capacity: int, members: int) -> None:
    """Raises ValueError where clusters of so many programs have no room for a launch."""
    if members not in (2, 4, 8) or not kernel.spread:
        raise ValueError(f"clusters are of 2, 4 or 8 programs for at most 32 rows, got {members} and {kernel.rows}")
    if (blocks := _seen(kernel, capacity)) > (most := Near.of(kernel, members).most):
        raise ValueError(f"clusters of {members} have room for {most} blocks of a request, got {blocks}")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How a request's blocks are shared out.

    Attributes:
      length: of the prefix. low, stop: its blocks that are seen. shift: blocks of a piece as a power of two.
      first, end: pieces. own: the warpgroup's number, its first piece counted from `first`; mine: of its pieces.
    """

    workers: int
    length: Any
    low: Any
    stop: Any
    shift: Any
    first: Any
    end: Any
    own: Any
    mine: Any

    @classmethod
    def of(cls, kernel: NearLaunch, length: Any, own: Any) -> Pieces:
        low = jnp.int32(0)
        if kernel.window is not None:
            low = div(jnp.maximum(length - kernel.window + 1, 0), BLOCK)
        stop = div(length + BLOCK - 1, BLOCK) + -(-kernel.entries // BLOCK)
        if kernel.causal:
            stop = div(length + (kernel.entries + BLOCK - 1), BLOCK)
        room, count = kernel.workers * kernel.held, lambda shift: _up(stop, shift) - (low >> shift)
        one, few, group = _SHIFTS
        shift = jnp.where(count(one) <= room, one, jnp.where(count(few) <= room, few, group)).astype(_I32)
        first, end = low >> shift, _up(stop, shift)
        mine = div(jnp.maximum(end - first - own + (kernel.workers - 1), 0), kernel.workers)
        return cls(kernel.workers, length, low, stop, shift, first, end, own, mine)

    @property
    def begin(self) -> Any:
        """The place of the warpgroup's first block; places before it are of a piece that is not seen as a whole."""
        return jnp.maximum(self.low - ((self.first + self.own) << self.shift), 0)

    def seen(self, i: Any) -> Any:
        """Whether a place from `begin` on holds a block."""
        return (i < (self.mine << self.shift)) & (self.block(i) < self.stop)

    def block(self, i: Any) -> Any:
        """The block of a place."""
        piece = self.first + self.own + (i >> self.shift) * self.workers
        return (piece << self.shift) + (i & ((1 << self.shift) - 1))

    def blocks(self, turn: Any) -> tuple[Any, Any]:
        """The first block of a piece of the warpgroup's, and the end."""
        piece = self.first + self.own + turn * self.workers
        return jnp.maximum(piece << self.shift, self.low), jnp.minimum((piece + 1) << self.shift, self.stop)


def _up(x: Any, shift: Any) -> Any:
    return (x + ((1 << shift) - 1)) >> shift


class Near(NearLaunch):
    """One launch's code."""

    def body(self, ins: dict[str, Any], out: Any, shared: dict[str, Any], inbox: Sequence[Any]) -> None:
        """A warpgroup of a member."""
        overlap.begin(self.interpret)
        self.begin(shared)
        if not self.settled:
            overlap.wait(self.interpret)
        team, unit, member = (lax.axis_index(name) for name in ("team", "unit", "member"))
        at = b, head = div(unit, self.kv_heads), rem(unit, self.kv_heads)
        own = member + self.members * team
        length, ins = ins["length"][b], ins | {"first": ins["first"][0]}
        guess = self.numbers(lambda i: own + i * self.workers, b, 0, ins)  # asked for beside the length
        pieces = Pieces.of(self, length if self.interpret else mosaic_rows.uniform(length), own)
        ahead = self.ahead(pieces, b, guess, ins)
        # The first block is asked for while the kernel before still runs, if it may be; queries once that has ended.
        self.bring(pieces, team, at, jnp.int32(0), ahead, ins, shared)
        if self.settled:
            overlap.wait(self.interpret)
        pl.when(team == 0)(lambda: self.put_queries(at, member, pieces, ins, shared))

        def ask(step: Any, ahead: tuple[Any, ...]) -> tuple[Any, ...]:
            self.bring(pieces, team, at, step, ahead, ins, shared)
            return self.next(pieces, b, ahead, ins)

        ahead = lax.fori_loop(1, self.stages, ask, self.next(pieces, b, ahead, ins))
        mine = [x.at[unit] for x in inbox] if self.interpret else inbox
        self.compute(pieces, team, at, ask, ahead, ins, mine, shared)
        self.wait_for_sums(shared)
        for part in range(0, self.parts, self.teams):
            join = functools.partial(self.join, pieces, ins, out, inbox, (unit, head, member, part + team))
            pl.when(part + team < self.parts)(join)

    def ahead(self, pieces: Pieces, b: Any, guess: tuple[Any, ...], ins: dict[str, Any]) -> tuple[Any, ...]:
        """What a warpgroup asks for first: a block's place, pages of a few places about it, and of the few after them.

        Args:
          guess: the first pages, if all is seen and a piece is a block.
        """
        begin = pieces.begin
        about = begin - rem(begin, READ)
        guessed = (pieces.shift == 0) & (pieces.first == 0)
        now = lax.cond(guessed, lambda: guess, lambda: self.numbers(pieces.block, b, about, ins))
        return begin, now, self.numbers(pieces.block, b, about + READ, ins)

    def bring(
        self, pieces: Pieces, team: Any, at: tuple[Any, Any], step: Any, ahead: tuple[Any, ...], ins: dict[str, Any],
        shared: dict[str, Any],
    ) -> None:  # fmt: skip
        """Brings the block of the next place, if there is one, to a step's slot."""
        (_, head), (i, now, _) = at, ahead
        bring = functools.partial(
            self.bring_block, team, step, pieces.block(i), head, pieces.length, now, rem(i, READ), ins, shared
        )  # fmt: skip
        pl.when(pieces.seen(i))(bring)

    def next(self, pieces: Pieces, b: Any, ahead: tuple[Any, ...], ins: dict[str, Any]) -> tuple[Any, ...]:
        """What comes after that block."""
        i, now, then = ahead
        read = lambda: (then, self.numbers(pieces.block, b, i + 1 + READ, ins))
        return i + 1, *lax.cond(rem(i, READ) == READ - 1, read, lambda: (now, then))

    def put_queries(
        self, at: tuple[Any, Any], member: Any, pieces: Pieces, ins: dict[str, Any], shared: dict[str, Any]
    ) -> None:
        """Queries to shared memory, and what the member is sent is said; by one warpgroup."""
        b, head = at
        base, q = self.first_row(b, head), shared["q"].at[0]
        self.clear_queries(q)
        self.put([q], [ins["q"]], self.queries, base, at, jnp.int32(0), self.rows, spread=True)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared["asked"])
        self.expect(pieces.end - pieces.first, member, shared)

    def compute(
        self, pieces: Pieces, team: Any, at: tuple[Any, Any], ask: Callable[[Any, Any], Any], ahead: Any,
        ins: dict[str, Any], inbox: Sequence[Any], shared: dict[str, Any],
    ) -> None:  # fmt: skip
        """Sums of a warpgroup's pieces, to all members' inboxes."""
        b, head = at
        q = shared["q"].at[0]
        new = self.first_new(b, head)
        loaded = self.load([ins["k"], ins["v"]], self.news, new, self.entries) if self.early else None
        unit = head, jnp.int32(0), None, b, None, None, pieces.length
        block = functools.partial(self.block, unit, team, ins, shared, q, loaded, ask)
        plgpu.barrier_wait(shared["asked"])
        self.wait_for_members()

        def one(turn: Any, step: Any) -> Any:
            first, end = pieces.blocks(turn)
            step, *sums = self.grouped(block, first, end, div(first, GROUP), step)
            self.send(inbox, shared, sums, pieces.own + turn * self.workers)
            return step

        lax.fori_loop(0, pieces.mine, one, (jnp.int32(0), ahead))

    def join(
        self, pieces: Pieces, ins: dict[str, Any], out: Any, inbox: Sequence[Any], at: tuple[Any, ...]
    ) -> None:  # fmt: skip
        """A part of a member's values of the result, from what it was sent."""
        unit, head, *own = at
        sums = self.joined(pieces, self.received(inbox, unit, own))
        if "sinks" in ins:
            sums = with_sink(self, sums, self.sink(ins["sinks"], head, own))
        *acc, _, total = sums
        self.deliver(out, [x / total for x in acc], unit, own)

    def joined(self, pieces: Pieces, gather: Callable[[Any], Sums]) -> Sums:
        """All pieces' sums in the order of `in_order`, but what need not wait for each other side by side.

        Args:
          gather: reads a piece's by its number.
        """
        start, add = nothing(self, self.across), functools.partial(add_sums, self)
        single, groups = pieces.shift == _SHIFTS[0], pieces.shift == _SHIFTS[2]
        own = lambda at: gather(at - pieces.first)
        choose = lambda which, yes, no: tuple(jnp.where(which, x, y) for x, y in zip(yes, no, strict=True))

        def held(at: Any) -> Sums:
            there = (at >= pieces.first) & (at < pieces.end)
            return choose(there, own(jnp.clip(at, pieces.first, pieces.end - 1)), start)

        def few(i: Any, read: Callable[[Any], Sums]) -> Sums:
            return functools.reduce(add, [read(i * FEW + k) for k in range(FEW)])

        def whole_group(i: Any, sums: Sums) -> Sums:
            """So many pieces as a group has blocks."""
            several = [few(i * (GROUP // FEW) + k, own) for k in range(GROUP // FEW)]
            together = lambda: add(sums, functools.reduce(add, several))
            return lax.cond(single, together, lambda: functools.reduce(add, several, sums))

        def part(i: Any, sums: Sums) -> Sums:
            """Those of them that there are."""

            def one(i: Any, carry: tuple[Sums, Sums]) -> tuple[Sums, Sums]:
                (sums, group), more = carry, few(i, held)
                return choose(single, sums, add(sums, more)), choose(single, add(group, more), group)

            low, high = jnp.maximum(div(pieces.first, FEW), i * (GROUP // FEW)), (i + 1) * (GROUP // FEW)
            high = jnp.minimum(div(pieces.end + FEW - 1, FEW), high)
            return add(*lax.fori_loop(low, high, one, (sums, start)))

        def several(i: Any, sums: Sums) -> Sums:
            whole = (i * GROUP >= pieces.first) & ((i + 1) * GROUP <= pieces.end)
            return lax.cond(whole, whole_group, part, i, sums)

        def by_fews() -> Sums:
            begin, end = div(pieces.first, GROUP), div(pieces.end + GROUP - 1, GROUP)
            return lax.fori_loop(begin, end, several, start)

        one_by_one = lambda: lax.fori_loop(pieces.first, pieces.end, lambda at, sums: add(sums, own(at)), start)
        return lax.cond(groups, one_by_one, by_fews)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("interpret",))
def attend(kernel: Near, ins: dict[str, jax.Array], *, interpret: Any = None) -> jax.Array:
    """The result [B, N, H, C] of q, k, v, pages, table, length, words of a mask and sinks, by name."""
    names, q, units = list(ins), ins["q"], kernel.batch * kernel.kv_heads
    scratch = kernel.scratch(q.dtype)
    outs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if kernel.interpret:  # it knows no memory of neighbours, so members exchange through global memory
        outs = [jax.ShapeDtypeStruct((units, kernel.members, kernel.parts, LANES * kernel.across), q.dtype)]
        outs += [jax.ShapeDtypeStruct((units, kernel.members, *shape), _F32) for shape in kernel.inbox()]

    def tree_attention(*refs: Any) -> None:
        count, end = len(names), len(names) + len(outs)
        shared = dict(zip(scratch, refs[end:], strict=True))
        inbox = refs[count + 1 : end] if kernel.interpret else [shared[f"inbox{i}"] for i in range(2)]
        kernel.body(dict(zip(names, refs[:count], strict=True)), refs[count], shared, inbox)

    extra = {} if interpret is None else {"interpret": interpret}
    found = plgpu.kernel(
        tree_attention, out_type=outs, scratch_types=tuple(scratch.values()), grid=(units,), grid_names=("unit",),
        cluster=(kernel.members,), cluster_names=("member",), num_threads=kernel.teams, thread_name="team",
        compiler_params=params(), **extra,
    )(*ins.values())[0]  # fmt: skip
    if not kernel.interpret:
        return found
    b, n, g = kernel.batch, kernel.nodes, kernel.kv_heads
    found = found.reshape(units, kernel.members, -1)[:, :, : kernel.values]
    found = found.reshape(b, g, n, kernel.group, kernel.head_dim)[..., kernel.lead :]
    return found.transpose(0, 2, 1, 3, 4).reshape(q.shape)
