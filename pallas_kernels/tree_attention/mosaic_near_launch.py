"""Sizes of a launch whose clusters own KV heads, and how their members send each other sums (`mosaic_near`).

Thread by thread, for Pallas has no stores to a neighbour's memory. Its interpreter knows no such memory: members have
inboxes in global memory there, and meet at a barrier of the cluster.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import clusters
from pallas_kernels.sizes import round_up
from pallas_kernels.tree_attention import mosaic_rows
from pallas_kernels.tree_attention.mosaic_few import ROW, Few
from pallas_kernels.tree_attention.mosaic_launch import LANES, MAX_STAGES, ROOM, SHARED, SUMS
from pallas_kernels.tree_attention.mosaic_merge import Sums
from pallas_kernels.tree_attention.mosaic_plan import BLOCK, GROUP
from pallas_kernels.tree_attention.mosaic_rows import ROWS, div, rem
from pallas_kernels.tree_attention.mosaic_sums import LINE, line

#: Pieces whose sums a warpgroup keeps, and blocks of its ring that must have room besides.
_MOST_HELD, _LEAST_STAGES = 4, 2
#: Bytes to whose multiples every allocation of shared memory is rounded up.
_ALIGNED = 1024
_F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class NearLaunch(Few):
    """One launch; `programs` is not read. members: of a cluster."""

    members: int = 8

    @classmethod
    def of(cls, kernel: Few, members: int) -> Self:
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
        return (SHARED - taken) // (self.teams * 4 * BLOCK * self.channels)

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
            found["met"] = clusters.barrier()
            found |= {f"inbox{i}": plgpu.SMEM(shape, _F32) for i, shape in enumerate(self.inbox())}
        return found

    def begin(self, shared: dict[str, Any]) -> None:
        """A barrier for what the member is sent; others may send once they have waited for all members' begin."""
        if self.interpret:
            return
        pl.when(lax.axis_index("team") == 0)(functools.partial(clusters.make, shared["met"]))
        clusters.arrive()

    def wait_for_members(self) -> None:
        """Until all have begun. Every warpgroup waits once."""
        if not self.interpret:
            clusters.wait()

    def wait_for_sums(self, shared: dict[str, Any]) -> None:
        """Until a member has been sent all that is `expected`; for each warpgroup that sends."""
        if self.interpret:
            plgpu.barrier_arrive(shared["met"])
            plgpu.barrier_wait(shared["met"])
        else:
            clusters.receive(shared["met"])

    def expect(self, count: Any, member: Any, shared: dict[str, Any]) -> None:
        """Says how many pieces a member is sent its part of; for one warpgroup."""
        if self.interpret:
            return
        row = lambda at: div(at, self.head_dim)
        rows = row((member + 1) * self.values - 1) - row(member * self.values) + 1
        clusters.expect(shared["met"], count * (4 * self.values + 8 * rows))

    def send(self, inbox: Sequence[Any], shared: dict[str, Any], sums: Sequence[jax.Array], number: Any) -> None:
        """A piece's sums to all members, each its part, with its number counted from the request's first."""
        if self.interpret:
            acc, top, total = (x[self.places] for x in sums)
            inbox[0].at[:, number][...] = acc[: self.rows].reshape(self.members, self.values)
            both = jnp.stack([top, total], axis=1)
            inbox[1].at[:, number][...] = jnp.broadcast_to(both, (self.members, *both.shape))
            return

        def run(_: Any, values: Any, stats: Any, met: Any, acc: Any, top: Any, total: Any, number: Any) -> None:
            c = clusters.constant
            number, thread = number.registers.item(), arith.remui(utils.thread_idx(), c(LANES))
            lane = arith.remui(thread, c(32))
            row = arith.addi(arith.muli(arith.divui(thread, c(32)), c(8)), arith.divui(lane, c(4)))
            quarter = arith.remui(lane, c(4))

            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, c(self.rows))):
                begin = arith.muli(row, c(self.head_dim))
                own = arith.addi(begin, arith.muli(quarter, c(2)))
                for j, two in enumerate(acc.registers.reshape(-1, 2)[:, 0]):
                    flat = arith.addi(own, c(8 * j))
                    whose, at = arith.divui(flat, c(self.values)), arith.remui(flat, c(self.values))
                    two = [vector.extract(two, [], [i]) for i in range(2)]
                    clusters.store(values, arith.addi(arith.muli(number, c(self.values)), at), met, whose, two)
                # A row's maximum and weight go to all who add up its channels, by its four threads in turn.
                both = [vector.extract(x.registers.reshape(-1)[0], [], [0]) for x in (top, total)]
                first = arith.divui(begin, c(self.values))
                last = arith.divui(arith.addi(begin, c(self.head_dim - 1)), c(self.values))
                at = arith.muli(arith.addi(arith.muli(number, c(self.height)), row), c(2))
                for i in range(0, min(self.members, -(-self.head_dim // self.values) + 1), 4):
                    whose = arith.addi(arith.addi(first, quarter), c(i))
                    with utils.when(arith.cmpi(arith.CmpIPredicate.ule, whose, last)):
                        clusters.store(stats, at, met, whose, both)

        types = *[plgpu.RefType()] * 3, SUMS, ROW, ROW, clusters.SCALAR
        plgpu.inline_mgpu(arg_types=types)(run)(*inbox, shared["met"], *sums, number)

    def received(self, inbox: Sequence[Any], unit: Any, own: Sequence[Any]) -> Callable[[Any], Sums]:
        """What reads a thread's channels of a piece by its number; own: the member and its part."""
        wanted = (plgpu.ShapeDtypeStruct((LANES,), _F32, layout=LINE),) * (self.across + 2)

        def pretended(number: Any) -> Sums:
            row, at = self._places(*own)
            values, stats = (x[unit, own[0], number] for x in inbox)
            return *(values[at + i] for i in range(self.across)), stats[row, 0], stats[row, 1]

        def run(_: Any, values: Any, stats: Any, number: Any, *own: Any) -> Any:
            c, f32 = clusters.constant, ir.F32Type.get()
            number, (row, _, at, _) = number.registers.item(), self._own(*own)

            def read(ref: Any, at: Any, width: int) -> list[Any]:
                place = utils.getelementptr(utils.memref_ptr(ref), [at], f32)
                found = llvm.load(ir.VectorType.get((width,), f32), place, alignment=4 * width)
                one = ir.VectorType.get((1,), f32)
                return [vector.from_elements(one, [vector.extract(found, [], [i])]) for i in range(width)]

            found = read(values, arith.addi(arith.muli(number, c(self.values)), at), self.across)
            at = arith.muli(arith.addi(arith.muli(number, c(self.height)), row), c(2))
            return tuple(map(line, found + read(stats, at, 2)))

        def compiled(number: Any) -> Sums:
            types = (*[plgpu.RefType()] * 2, *[clusters.SCALAR] * 3)
            return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(*inbox, number, *own)

        return pretended if self.interpret else compiled

    def sink(self, sinks: Any, head: Any, own: Sequence[Any]) -> jax.Array:
        """Of each thread its query head's."""
        if self.interpret:
            row, _ = self._places(*own)
            return sinks[...][head * self.group + rem(row, self.group)]
        wanted = plgpu.ShapeDtypeStruct((LANES,), _F32, layout=LINE)

        def run(_: Any, sinks: Any, head: Any, *own: Any) -> Any:
            c, f32 = clusters.constant, ir.F32Type.get()
            row, *_ = self._own(*own)
            at = arith.addi(arith.muli(head.registers.item(), c(self.group)), arith.remui(row, c(self.group)))
            place = utils.getelementptr(utils.memref_ptr(sinks), [at], f32)
            return line(llvm.load(ir.VectorType.get((1,), f32), place, alignment=4))

        types = plgpu.RefType(), *[clusters.SCALAR] * 3
        return plgpu.inline_mgpu(arg_types=types, return_type=wanted)(run)(sinks, head, *own)

    def deliver(self, out: Any, values: Sequence[jax.Array], unit: Any, own: Sequence[Any]) -> None:
        """A part of the result [B, N, H, C]; of the interpreter's [units, members, parts, 128 * across]."""
        if self.interpret:
            out.at[unit, *own][...] = jnp.stack(values, axis=1).reshape(-1).astype(out.dtype)
            return

        def run(_: Any, out: Any, unit: Any, member: Any, part: Any, *values: Any) -> None:
            c, width, kind = clusters.constant, self.across, ir.MemRefType(out.type).element_type
            row, column, _, active = self._own(member, part)
            unit = unit.registers.item()
            b, head = arith.divui(unit, c(self.kv_heads)), arith.remui(unit, c(self.kv_heads))
            node, of = arith.divui(row, c(self.group)), arith.remui(row, c(self.group))
            at = arith.addi(arith.muli(b, c(self.nodes)), node)
            at = arith.addi(arith.muli(at, c(self.heads)), arith.addi(arith.muli(head, c(self.group)), of))
            at = arith.addi(arith.muli(at, c(self.channels)), arith.subi(column, c(self.lead)))
            shown = arith.andi(active, arith.cmpi(arith.CmpIPredicate.uge, column, c(self.lead)))
            own = [vector.extract(x.registers.item(), [], [0]) for x in values]
            several = vector.from_elements(ir.VectorType.get((width,), ir.F32Type.get()), own)
            rounded = arith.truncf(ir.VectorType.get((width,), kind), several)
            with utils.when(shown if self.lead else active):
                place = utils.getelementptr(utils.memref_ptr(out), [at], kind)
                llvm.store(rounded, place, alignment=2 * width)

        types = (plgpu.RefType(), *[clusters.SCALAR] * 3, *[LINE] * len(values))
        plgpu.inline_mgpu(arg_types=types)(run)(out, unit, *own, *values)

    def _places(self, member: Any, part: Any) -> tuple[jax.Array, jax.Array]:
        """Rows of a part's threads, and their first values among the member's, for the interpreter."""
        first = (part * LANES + jnp.arange(LANES)) * self.across
        at = jnp.minimum(first, self.values - self.across)
        return (member * self.values + at) // self.head_dim, at

    def _own(self, member: Any, part: Any) -> tuple[Any, Any, Any, Any]:
        """A thread's row and first channel, its first value among the member's, and whether it has any."""
        c, (member, part) = clusters.constant, (x.registers.item() for x in (member, part))
        first = arith.addi(arith.muli(part, c(LANES)), arith.remui(utils.thread_idx(), c(LANES)))
        first = arith.muli(first, c(self.across))
        active = arith.cmpi(arith.CmpIPredicate.ult, first, c(self.values))
        first = arith.select(active, first, c(0))
        at = arith.addi(arith.muli(member, c(self.values)), first)
        return arith.divui(at, c(self.head_dim)), arith.remui(at, c(self.head_dim)), first, active
