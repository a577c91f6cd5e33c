"""Attention with equal bits in one launch, for a request or two: a cluster of programs owns a request's KV head.

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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import overlap
from pallas_kernels.sizes import round_up
from pallas_kernels.tree_attention import mosaic_rows
from pallas_kernels.tree_attention.mosaic_few import REGISTERS, ROW, Few
from pallas_kernels.tree_attention.mosaic_launch import LANES, MAX_STAGES, ROOM, SHARED, SUMS
from pallas_kernels.tree_attention.mosaic_merge import Sums, in_order, nothing, with_sink
from pallas_kernels.tree_attention.mosaic_plan import BLOCK, FEW, GROUP
from pallas_kernels.tree_attention.mosaic_rows import LINE, ROWS, div, params, rem

#: Programs of a cluster by requests times KV heads up to which all clusters run at once on 132 multiprocessors.
MEMBERS = {8: 8, 16: 4, 64: 2}
#: Blocks of a warpgroup beyond which requests of unequal lengths may wait for the longest; one alone waits for none.
MOST_BLOCKS = 16
#: Pieces whose sums a warpgroup keeps, and blocks of its ring that must have room besides.
_MOST_HELD, _LEAST_STAGES = 4, 2
#: Bytes to whose multiples every allocation of shared memory is rounded up.
_ALIGNED = 1024
#: Entries of a page table that are read at a time.
_READ = 4
#: A piece's blocks as powers of two.
_SHIFTS = 0, FEW.bit_length() - 1, GROUP.bit_length() - 1
_F32, _I32 = jnp.float32, jnp.int32
_SCALAR = plgpu.Layout.WG_SPLAT(())


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
    blocks = -(-capacity // BLOCK) + -(-kernel.entries // BLOCK)
    most = near.most if kernel.batch == 1 else min(near.most, MOST_BLOCKS * near.workers)
    return count if blocks <= most else 0


@dataclasses.dataclass(frozen=True)
class Near(Few):
    """One launch; `programs` is not read. members: of a cluster."""

    members: int = 8

    @classmethod
    def of(cls, kernel: Few, members: int) -> Near:
        """The same launch in this form."""
        fields = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)}
        return cls(**fields, members=members)

    @property
    def workers(self) -> int:
        """Warpgroups that compute for a KV head."""
        return self.members * self.teams

    @property
    def held(self) -> int:
        """Pieces of a warpgroup whose sums have room."""
        return next((x for x in range(_MOST_HELD, 1, -1) if self._blocks(x) >= _LEAST_STAGES), 1)

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, self._blocks(self.held))

    def _blocks(self, held: int) -> int:
        """Of a ring, for which there is room beside the sums of so many pieces of each warpgroup."""
        sums = (4 * held * self.workers * size for size in (self.values, 2 * self.height))
        taken = ROOM + 2 * ROWS * self.head_dim + sum(round_up(x, _ALIGNED) for x in (*sums, 1))
        return (SHARED - taken) // (self.teams * 4 * BLOCK * self.head_dim)

    @property
    def most(self) -> int:
        """Blocks of a request for whose sums there is room."""
        return self.workers * self.held * GROUP

    @property
    def values(self) -> int:
        """Of the result, that a member adds up."""
        return self.rows * self.head_dim // self.members

    @property
    def across(self) -> int:
        """Neighbouring ones that a thread adds up at once."""
        return next((x for x in (1, 2) if self.values <= x * LANES * self.teams), 4)

    @property
    def parts(self) -> int:
        """Of a member's values, each for a warpgroup at a time."""
        return -(-self.values // (self.across * LANES))

    def inbox(self) -> list[tuple[int, ...]]:
        """Shapes of what a member is sent of each piece: its part of the sums; and of all rows maximum and weight."""
        count = self.workers * self.held
        return [(count, self.values), (count, self.height, 2)]

    def scratch(self, dtype: Any) -> dict[str, Any]:
        found = super().scratch(dtype)
        found["q"] = plgpu.SMEM((1, ROWS, self.head_dim), dtype, transforms=mosaic_rows.tiled())
        found["asked"] = plgpu.Barrier()
        if self.interpret:
            found["met"] = plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=self.teams)
        else:
            found["met"] = plgpu.SMEM((2,), jnp.uint32)  # a barrier of its own, for others must know where it is
            found |= {f"inbox{i}": plgpu.SMEM(shape, _F32) for i, shape in enumerate(self.inbox())}
        return found

    def body(self, ins: dict[str, Any], out: Any, shared: dict[str, Any], inbox: Sequence[Any]) -> None:
        """A warpgroup of a member: the first ones compute, the others bring pages to one of them."""
        overlap.begin(self.interpret)
        thread, unit, member = (lax.axis_index(name) for name in ("team", "unit", "member"))
        if not self.interpret:
            begin = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_begin)
            pl.when(thread == 0)(functools.partial(begin, shared["met"]))
            plgpu.inline_mgpu()(_arrive)()
        overlap.wait(self.interpret)
        team, b, head = rem(thread, self.teams), div(unit, self.kv_heads), rem(unit, self.kv_heads)
        own = member + self.members * team
        length = ins["length"][b]
        guess = self.numbers(lambda i: own + i * self.workers, b, 0, ins)  # asked for beside the length
        pieces = Pieces.of(self, length if self.interpret else mosaic_rows.uniform(length), own)

        @pl.when(thread < self.teams)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            if not self.interpret:
                pl.when(team == 0)(lambda: self.expect(pieces, member, shared["met"]))
            mine = [x.at[unit] for x in inbox] if self.interpret else [*inbox, shared["met"]]
            self.compute(pieces, team, (b, head), ins, mine, shared)
            if self.interpret:
                plgpu.barrier_arrive(shared["met"])
                plgpu.barrier_wait(shared["met"])
            else:
                plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_await)(shared["met"])
            for part in range(0, self.parts, self.teams):
                join = functools.partial(self.join, pieces, ins, out, inbox, (unit, head, member, part + team))
                pl.when(part + team < self.parts)(join)

        @pl.when(thread >= self.teams)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            self.bring(pieces, team, (b, head), guess, ins, shared)
            if not self.interpret:
                plgpu.inline_mgpu()(_wait)()

    def expect(self, pieces: Pieces, member: Any, met: Any) -> None:
        """Says how many bytes a member is sent."""
        own = lambda at: div(at, self.head_dim)
        rows = own((member + 1) * self.values - 1) - own(member * self.values) + 1

        def run(_: Any, met: Any, count: Any) -> None:
            with utils.when(_first()):
                _ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", _place(met), count.registers.item())

        count = (pieces.end - pieces.first) * (4 * self.values + 8 * rows)
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))(run)(met, count)

    def numbers(self, block: Callable[[Any], Any], b: Any, begin: Any, ins: dict[str, Any]) -> tuple[Any, ...]:
        """Pages of a few of a warpgroup's blocks from the one `begin` on, or anything where it has none."""
        last = ins["table"].shape[1] - 1
        columns = (jnp.clip(div(block(begin + k) * BLOCK, self.page), 0, last) for k in range(_READ))
        return tuple(ins["table"][b, column] for column in columns)

    def bring(
        self, pieces: Pieces, team: Any, at: tuple[Any, Any], guess: tuple[Any, ...], ins: dict[str, Any],
        shared: dict[str, Any],
    ) -> None:  # fmt: skip
        """A warpgroup's blocks to its ring."""
        b, head = at
        for slot in range(self.stages):
            plgpu.barrier_arrive(shared["empty"].at[team * self.stages + slot])

        def several(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            step, *now = carry
            then = ()
            for k, number in enumerate(now):
                if k == _READ - 1:  # whoever reads waits here: a ring's other blocks are on their way by then
                    then = self.numbers(pieces.block, b, (i + 1) * _READ, ins)
                j = pieces.block(i * _READ + k)
                there = (i * _READ + k < pieces.turns) & (j >= pieces.low) & (j < pieces.stop)
                held = j * BLOCK < pieces.length
                pl.when(there)(functools.partial(self.bring_block, team, step, j, head, held, number, ins, shared))
                step = step + jnp.where(there, 1, 0)
            return step, *then

        guessed = (pieces.shift == 0) & (pieces.first == 0)
        first = lax.cond(guessed, lambda: guess, lambda: self.numbers(pieces.block, b, jnp.int32(0), ins))
        lax.fori_loop(0, div(pieces.turns + _READ - 1, _READ), several, (jnp.int32(0), *first))
        for slot in range(self.stages):
            plgpu.barrier_wait(shared["empty"].at[team * self.stages + slot])

    def compute(
        self, pieces: Pieces, team: Any, at: tuple[Any, Any], ins: dict[str, Any], inbox: Sequence[Any],
        shared: dict[str, Any],
    ) -> None:  # fmt: skip
        """Sums of a warpgroup's pieces, to all members' inboxes."""
        b, head = at
        q = shared["q"].at[0]

        @pl.when(team == 0)
        def _() -> None:
            base = (b * (self.nodes * self.heads) + head * self.group) * self.head_dim
            self.put([q], [ins["q"]], self.queries, base, (b, head), jnp.int32(0), self.rows, spread=True)
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared["asked"])

        new = (b * (self.entries * self.kv_heads) + head) * self.head_dim
        loaded = self.load([ins["k"], ins["v"]], self.news, new, self.entries) if self.early else None
        unit = head, jnp.int32(0), None, b, None, None, pieces.length
        block = functools.partial(self.block, unit, team, ins, shared, q, loaded)
        plgpu.barrier_wait(shared["asked"])
        if not self.interpret:
            plgpu.inline_mgpu()(_wait)()

        def one(turn: Any, step: Any) -> Any:
            first, end = pieces.blocks(turn)
            step, *sums = self.grouped(block, first, end, div(first, GROUP), step)
            self.send(inbox, tuple(sums), pieces.own + turn * self.workers)
            return step

        lax.fori_loop(0, pieces.mine, one, jnp.int32(0))

    def join(
        self, pieces: Pieces, ins: dict[str, Any], out: Any, inbox: Sequence[Any], at: tuple[Any, ...]
    ) -> None:  # fmt: skip
        """A part of a member's values of the result, from what it was sent."""
        unit, head, *own = at
        sums = self.joined(pieces, self.gather(inbox, unit, own))
        if "sinks" in ins:
            sums = with_sink(self, sums, self.sink(ins["sinks"], head, own))
        *acc, _, total = sums
        self.write(out, [x / total for x in acc], unit, own)

    def joined(self, pieces: Pieces, gather: Callable[[Any], Sums]) -> Sums:
        """All pieces' sums; `gather` reads one's."""
        start = nothing(self, self.across)

        def load(i: Any) -> list[Sums]:
            places = (i * FEW + k for k in range(FEW))
            return [gather(jnp.clip(at, pieces.first, pieces.end - 1) - pieces.first) for at in places]

        def held(i: Any, items: list[Sums]) -> list[Sums]:
            there = [(i * FEW + k >= pieces.first) & (i * FEW + k < pieces.end) for k in range(FEW)]
            choose = lambda there, item: tuple(jnp.where(there, x, y) for x, y in zip(item, start, strict=True))
            return list(map(choose, there, items))

        single, groups = pieces.shift == _SHIFTS[0], pieces.shift == _SHIFTS[2]
        bottom, stop = div(pieces.first, FEW), div(pieces.end + FEW - 1, FEW)
        return in_order(self, load, held, single, groups, bottom, stop, start)

    def send(self, inbox: Sequence[Any], sums: tuple[jax.Array, ...], number: Any) -> None:
        """A piece's sums to all members, each its part, with its number counted from the request's first."""
        if self.interpret:
            acc, top, total = (x[self.places] for x in sums)
            inbox[0].at[:, number][...] = acc[: self.rows].reshape(self.members, self.values)
            both = jnp.stack([top, total], axis=1)
            inbox[1].at[:, number][...] = jnp.broadcast_to(both, (self.members, *both.shape))
            return

        def run(_: Any, values: Any, stats: Any, met: Any, acc: Any, top: Any, total: Any, number: Any) -> None:
            c, f32, i32 = _constant, ir.F32Type.get(), ir.IntegerType.get_signless(32)
            number, thread = number.registers.item(), arith.remui(utils.thread_idx(), c(LANES))
            lane = arith.remui(thread, c(32))
            row = arith.addi(arith.muli(arith.divui(thread, c(32)), c(8)), arith.divui(lane, c(4)))
            quarter = arith.remui(lane, c(4))

            def store(ref: Any, at: Any, whose: Any, two: Sequence[Any]) -> None:
                place = utils.getelementptr(utils.memref_ptr(ref), [at], f32)
                theirs = (utils.get_cluster_ptr(x, whose, generic=False) for x in (place, utils.memref_ptr(met)))
                place, counts = (llvm.ptrtoint(i32, x) for x in theirs)
                code = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$0], {$2, $3}, [$1];"
                _ptx(code, place, counts, *two)

            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, c(self.rows))):
                begin = arith.muli(row, c(self.head_dim))
                own = arith.addi(begin, arith.muli(quarter, c(2)))
                for j, two in enumerate(acc.registers.reshape(-1, 2)[:, 0]):
                    flat = arith.addi(own, c(8 * j))
                    whose, at = arith.divui(flat, c(self.values)), arith.remui(flat, c(self.values))
                    two = [vector.extract(two, [], [i]) for i in range(2)]
                    store(values, arith.addi(arith.muli(number, c(self.values)), at), whose, two)
                # A row's maximum and weight go to all who add up its channels, by its four threads in turn.
                both = [vector.extract(x.registers.reshape(-1)[0], [], [0]) for x in (top, total)]
                first = arith.divui(begin, c(self.values))
                last = arith.divui(arith.addi(begin, c(self.head_dim - 1)), c(self.values))
                at = arith.muli(arith.addi(arith.muli(number, c(self.height)), row), c(2))
                for i in range(0, min(self.members, -(-self.head_dim // self.values) + 1), 4):
                    whose = arith.addi(arith.addi(first, quarter), c(i))
                    with utils.when(arith.cmpi(arith.CmpIPredicate.ule, whose, last)):
                        store(stats, at, whose, both)

        types = *[plgpu.RefType()] * 3, SUMS, ROW, ROW, _SCALAR
        plgpu.inline_mgpu(arg_types=types)(run)(*inbox, *sums, number)

    def gather(self, inbox: Sequence[Any], unit: Any, own: Sequence[Any]) -> Callable[[Any], Sums]:
        """What reads a thread's channels of a piece by its number; own: the member and its part."""
        wanted = (plgpu.ShapeDtypeStruct((LANES,), _F32, layout=LINE),) * (self.across + 2)

        def pretended(number: Any) -> Sums:
            row, at = self._places(*own)
            values, stats = (x[unit, own[0], number] for x in inbox)
            return *(values[at + i] for i in range(self.across)), stats[row, 0], stats[row, 1]

        def run(_: Any, values: Any, stats: Any, number: Any, *own: Any) -> Any:
            c, f32 = _constant, ir.F32Type.get()
            number, (row, _, at, _) = number.registers.item(), self._own(*own)

            def read(ref: Any, at: Any, width: int) -> list[Any]:
                place = utils.getelementptr(utils.memref_ptr(ref), [at], f32)
                found = llvm.load(ir.VectorType.get((width,), f32), place, alignment=4 * width)
                one = ir.VectorType.get((1,), f32)
                return [vector.from_elements(one, [vector.extract(found, [], [i])]) for i in range(width)]

            found = read(values, arith.addi(arith.muli(number, c(self.values)), at), self.across)
            at = arith.muli(arith.addi(arith.muli(number, c(self.height)), row), c(2))
            return tuple(map(_line, found + read(stats, at, 2)))

        def compiled(number: Any) -> Sums:
            types = (*[plgpu.RefType()] * 2, *[_SCALAR] * 3)
            return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(*inbox, number, *own)

        return pretended if self.interpret else compiled

    def sink(self, sinks: Any, head: Any, own: Sequence[Any]) -> jax.Array:
        """Of each thread its query head's."""
        if self.interpret:
            row, _ = self._places(*own)
            return sinks[...][head * self.group + rem(row, self.group)]
        wanted = plgpu.ShapeDtypeStruct((LANES,), _F32, layout=LINE)

        def run(_: Any, sinks: Any, head: Any, *own: Any) -> Any:
            c, f32 = _constant, ir.F32Type.get()
            row, *_ = self._own(*own)
            at = arith.addi(arith.muli(head.registers.item(), c(self.group)), arith.remui(row, c(self.group)))
            place = utils.getelementptr(utils.memref_ptr(sinks), [at], f32)
            return _line(llvm.load(ir.VectorType.get((1,), f32), place, alignment=4))

        types = plgpu.RefType(), *[_SCALAR] * 3
        return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(sinks, head, *own)

    def write(self, out: Any, values: Sequence[jax.Array], unit: Any, own: Sequence[Any]) -> None:
        """A part of the result [B, N, H, C]; of the interpreter's [units, members, parts, 128 * across]."""
        if self.interpret:
            out.at[unit, *own][...] = jnp.stack(values, axis=1).reshape(-1).astype(out.dtype)
            return

        def run(_: Any, out: Any, unit: Any, member: Any, part: Any, *values: Any) -> None:
            c, width, kind = _constant, self.across, ir.MemRefType(out.type).element_type
            row, column, _, active = self._own(member, part)
            unit = unit.registers.item()
            b, head = arith.divui(unit, c(self.kv_heads)), arith.remui(unit, c(self.kv_heads))
            node, of = arith.divui(row, c(self.group)), arith.remui(row, c(self.group))
            at = arith.addi(arith.muli(b, c(self.nodes)), node)
            at = arith.addi(arith.muli(at, c(self.heads)), arith.addi(arith.muli(head, c(self.group)), of))
            at = arith.addi(arith.muli(at, c(self.head_dim)), column)
            own = [vector.extract(x.registers.item(), [], [0]) for x in values]
            several = vector.from_elements(ir.VectorType.get((width,), ir.F32Type.get()), own)
            rounded = arith.truncf(ir.VectorType.get((width,), kind), several)
            with utils.when(active):
                place = utils.getelementptr(utils.memref_ptr(out), [at], kind)
                llvm.store(rounded, place, alignment=2 * width)

        types = (plgpu.RefType(), *[_SCALAR] * 3, *[LINE] * len(values))
        plgpu.inline_mgpu(arg_types=types)(run)(out, unit, *own, *values)

    def _places(self, member: Any, part: Any) -> tuple[jax.Array, jax.Array]:
        """Rows of a part's threads, and their first values among the member's, for the interpreter."""
        first = (part * LANES + jnp.arange(LANES)) * self.across
        at = jnp.minimum(first, self.values - self.across)
        return (member * self.values + at) // self.head_dim, at

    def _own(self, member: Any, part: Any) -> tuple[Any, Any, Any, Any]:
        """A thread's row and first channel, its first value among the member's, and whether it has any."""
        c, (member, part) = _constant, (x.registers.item() for x in (member, part))
        first = arith.addi(arith.muli(part, c(LANES)), arith.remui(utils.thread_idx(), c(LANES)))
        first = arith.muli(first, c(self.across))
        active = arith.cmpi(arith.CmpIPredicate.ult, first, c(self.values))
        first = arith.select(active, first, c(0))
        at = arith.addi(arith.muli(member, c(self.values)), first)
        return arith.divui(at, c(self.head_dim)), arith.remui(at, c(self.head_dim)), first, active


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
    def of(cls, kernel: Near, length: Any, own: Any) -> Pieces:
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
    def turns(self) -> Any:
        """Places of the warpgroup's blocks, those at the ends included that are not seen."""
        return self.mine << self.shift

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


def _constant(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _line(value: Any) -> Any:
    registers = np.empty((1,), dtype=object)
    registers[0] = value
    return mgpu.FragmentedArray(_registers=registers, _layout=LINE.to_mgpu(), _is_signed=None)


def _ptx(code: str, *operands: Any) -> None:
    """An instruction of integers and floats."""
    kinds = ["f" if isinstance(x.type, ir.F32Type) else "r" for x in operands]
    constraints = ",".join([*kinds, "~{memory}"])
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [*operands], code, constraints, has_side_effects=True)


def _first() -> Any:
    """Whether a thread is its warpgroup's first."""
    return arith.cmpi(arith.CmpIPredicate.eq, arith.remui(utils.thread_idx(), _constant(LANES)), _constant(0))


def _place(ref: Any) -> Any:
    """Where it is in shared memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _begin(_: Any, met: Any) -> None:
    """The barrier, as all members see it once they have waited for each other's arrival."""
    with utils.when(_first()):
        _ptx("mbarrier.init.shared::cta.b64 [$0], $1;", _place(met), _constant(1))
        _ptx("fence.mbarrier_init.release.cluster;")


def _arrive(_: Any) -> None:
    _ptx("bar.warp.sync -1;")  # "aligned": all threads of a warp at once
    _ptx("barrier.cluster.arrive.relaxed.aligned;")


def _wait(_: Any) -> None:
    _ptx("bar.warp.sync -1;")
    _ptx("barrier.cluster.wait.acquire.aligned;")


def _await(_: Any, met: Any) -> None:
    """Waits for all that a member is sent."""
    code = "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], 0; @!done bra again; }"
    _ptx(code, _place(met))


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
        cluster=(kernel.members,), cluster_names=("member",), num_threads=2 * kernel.teams, thread_name="team",
        compiler_params=params(), **extra,
    )(*ins.values())[0]  # fmt: skip
    if not kernel.interpret:
        return found
    b, n, g = kernel.batch, kernel.nodes, kernel.kv_heads
    found = found.reshape(units, kernel.members, -1)[:, :, : kernel.values]
    return found.reshape(b, g, n, kernel.group, kernel.head_dim).transpose(0, 2, 1, 3, 4).reshape(q.shape)
