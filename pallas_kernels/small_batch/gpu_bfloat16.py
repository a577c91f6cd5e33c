"""Products by weights of bfloat16 on Mosaic GPU: they stream through a ring of shared memory into wgmma.

A program owns 64 columns of the weights, or several times 64, and up to 128 rows. One warpgroup brings both, step by
step; one or two multiply. The weights are the first operand of wgmma, which wants 64 rows, and the rows the second,
which may have 8: so a row's sums are the same arithmetic whatever the number of rows beside it. Where gate and up or
the output layer have more tiles of columns than there are multiprocessors, a program goes on with another, its ring
never empty. Where there are at most half as many, two programs of a cluster share a tile: each has half of the inputs,
or half of a head, and then sends the other what it found of half the rows, so that each makes an end of the rest; of 8
and 24 rows the first makes an end of all. Inputs are halved by the weights' shape alone.

What comes before and after a product in a decoder layer is done on the way: the norm's division after the product (its
gain has been multiplied in by whoever wrote the stream), biases, norms of heads, rotary embedding, SwiGLU, the residual
sum with the squares of its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.small_batch import mosaic, pairs, unpack
from pallas_kernels.small_batch.bfloat16_launch import MOST_ROWS, Kind, Launch, Sizes
from pallas_kernels.small_batch.mosaic import F32, SUMS, along_columns, along_rows, flipped, load
from pallas_kernels.small_batch.reference import TILE

#: `SUMS` in vectors of one value: float32 cannot be transposed in longer ones.
_SINGLE = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)  # fmt: skip
#: A value for each thread.
_LINE = plgpu.Layout.WG_STRIDED((MOST_ROWS,), 1)


class Kernel(Launch):
    """One launch's code."""

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """See mosaic.Kernel; the last of the interpreter's results is where pairs exchange sums."""
        s, program, team = self.sizes, lax.axis_index("program"), lax.axis_index("team")
        if self.kind == "heads":
            ins = mosaic.with_tables(ins, 2 if self.eps is None else 3)  # behind rows, weights and a norm's squares
        member = lax.axis_index("member") if s.members == 2 else 0
        *outs, inbox = outs if s.members == 2 and self.interpret else (*outs, None)
        inbox = None if inbox is None else inbox.at[program]
        turns = lax.div(s.tiles - program + s.programs - 1, s.programs) if s.programs < s.tiles else 1
        if s.members == 2:
            pairs.begin(team, True if s.halves == 2 else member == 0, self.ended, shared, self.interpret)

        @pl.when(team == s.teams)
        def _() -> None:
            self.bring(ins, shared, program, member, turns)
            if s.members == 2:
                pairs.wait(self.interpret)

        @pl.when(team < s.teams)
        def _() -> None:
            self.multiply(ins, outs, shared, (program, member, team), turns, inbox)

    # The warpgroup that copies.

    def bring(self, ins: Sequence[Any], shared: dict[str, Any], program: Any, member: Any, turns: Any) -> None:
        """Weights and rows, each step as soon as its slot is free."""
        s, (x_MK, w_KN, *_) = self.sizes, ins
        rows, several = self.rows(program, 0, s.rows), s.programs < s.tiles
        begin = member * s.steps if self.shared else 0

        def inputs(at: Any) -> Any:
            step = at if isinstance(at, int) or not several else lax.rem(at, s.steps)
            return pl.ds((begin + step) * s.depth, s.depth)

        def copy_weights(at: Any, slot: Any) -> None:
            tile = program if isinstance(at, int) or not several else program + lax.div(at, s.steps) * s.programs
            for part in range(s.teams * s.parts):
                own = pl.ds(self.column(tile, member, part), TILE)
                source = w_KN.at[inputs(at), own] if self.flip else w_KN.at[own, inputs(at)]
                plgpu.copy_gmem_to_smem(source, shared["w"].at[slot, part], shared["full"].at[slot])

        def copy_rows(at: Any, slot: Any) -> None:
            plgpu.copy_gmem_to_smem(x_MK.at[rows, inputs(at)], shared["x"].at[slot], shared["full"].at[slot])

        # Behind a kernel that lets it begin early weights come first; else tables do: what follows fills the ring, and
        # the queue to memory with it.
        early, first = overlap.overlaps(self.interpret), range(self.stages - 1)
        if early:
            for step in first:
                copy_weights(step, step)
        overlap.wait(self.interpret)
        tables = functools.partial(self.copy_tables, ins, shared, program, member)
        if not self.many:  # which the others add up meanwhile
            tables()
        for step in first:
            if not early:
                copy_weights(step, step)
            copy_rows(step, step)
        if self.many:
            tables()
        if self.many and self.eps is not None:  # while the others multiply what has come
            mosaic.write(shared["inverse"], self.inverse_rms(ins[2], vector=_LINE, several=32))
            plgpu.barrier_arrive(shared["normed"])

        def later(at: Any, _: Any) -> tuple[()]:
            slot = lax.rem(at, self.stages)
            plgpu.barrier_wait(shared["free"].at[slot])
            copy_weights(at, slot)
            copy_rows(at, slot)
            return ()

        lax.fori_loop(self.stages - 1, turns * s.steps, later, ())
        overlap.begin(self.interpret)  # earlier, the next kernel's weights would come among these

    def rows(self, program: Any, first: Any, count: int) -> Any:
        """A slice of rows, and of so many more as the copy engine fills with zeros."""
        # A dynamic begin: of a static one JAX would say that it leaves the array.
        return pl.ds(program * 0 + first, count) if self.sizes.rows != self.shape[0] else pl.ds(first, count)

    def copy_tables(self, ins: Sequence[Any], shared: dict[str, Any], tile: Any, member: Any) -> None:
        """What the end needs besides the sums; kinds whose tables are a tile's own have one tile for a program."""
        begin, names, beside = self.column(tile, 0, 0), self.tables(None), ins[2:]
        rows = self.rows(tile, member * self.ended if self.sizes.halves == 2 else 0, self.ended)
        bring = lambda ref, name: plgpu.copy_gmem_to_smem(ref, shared[name], shared["ready"].at[0])

        def all_kept() -> None:
            for name, ref in zip(names, beside, strict=False):
                if name not in self.kept(None):
                    continue
                if name in ("squares", "cos", "sin"):
                    ref = ref.at[:, rows]
                elif name == "h":
                    ref = ref.at[rows, pl.ds(begin, TILE)]
                elif name == "gain":
                    ref = ref.at[pl.ds(begin, TILE)]
                elif name == "bias":
                    ref = ref.at[pl.ds(begin, 2 * TILE)]
                elif name == "gains":  # the last, of queries and of keys; values are not normed
                    queries, keys = ref, beside[len(names)]
                    pl.when(tile < self.counts[0])(functools.partial(bring, queries, name))
                    pl.when(tile >= self.counts[0])(functools.partial(bring, keys, name))
                    continue
                bring(ref, name)

        # Of two with all the rows between them, the first has the end to itself.
        pl.when(member == 0)(all_kept) if self.sizes.members > self.sizes.halves else all_kept()

    # Those that multiply.

    def multiply(
        self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any], own: tuple[Any, Any, Any], turns: Any,
        inbox: Any,
    ) -> None:  # fmt: skip
        """A warpgroup's columns of all of a program's tiles."""
        s, (program, member, team) = self.sizes, own
        overlap.wait(self.interpret)
        inverse = self.norm(shared, member)

        def free(_: Any, slot: Any) -> None:
            plgpu.barrier_arrive(shared["free"].at[slot])

        def turn(i: Any, _: Any = None) -> tuple[()]:
            run = functools.partial(
                mosaic.walk, shared=shared, steps=s.steps, copy=free, begin=i * s.steps, all_steps=turns * s.steps,
                flip=self.flip, first=team * s.parts,
            )  # fmt: skip
            accumulators = [plgpu.WGMMAAccumulatorRef((TILE, s.rows), F32)] * s.parts
            sums = pl.run_scoped(lambda *totals: run(totals), *accumulators)
            if s.programs < s.tiles:  # results of the turn before
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if "normed" in shared:
                first_turn = lambda: plgpu.barrier_wait(shared["normed"])
                pl.when(i == 0)(first_turn) if s.programs < s.tiles else first_turn()
            place, rope = (program + i * s.programs, member, team), self.rope(ins, shared, member)
            end = lambda sums: self.end(sums, inverse, rope, place, outs, shared)
            self.join(sums[0], member, shared, inbox, end) if s.members == 2 else end(sums)
            return ()

        if s.programs < s.tiles:
            lax.fori_loop(0, turns, turn, ())
        else:
            turn(0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def inverse_rms(self, squares: Any, **how: Any) -> jax.Array:
        assert self.eps is not None
        return mosaic.inverse_rms(squares, self.shape[1], self.eps, **how)

    def norm(self, shared: dict[str, Any], member: Any) -> Callable[[], jax.Array]:
        """What gives one over the root mean square of each row that a program makes an end of."""

        def here() -> jax.Array:
            plgpu.barrier_wait(shared["ready"].at[0])
            return self.inverse_rms(shared["squares"], vector=SUMS.reduce(0))

        def there() -> jax.Array:
            first = member * self.ended if self.sizes.halves == 2 else 0
            return load(shared["inverse"].at[pl.ds(first, self.ended)], SUMS.reduce(0))

        if self.many:
            return there
        if self.eps is None or self.sizes.members > self.sizes.halves:  # the first program's business alone
            return here
        found = here()
        return lambda: found

    def rope(self, ins: Sequence[Any], shared: dict[str, Any], member: Any) -> list[Callable[[], jax.Array]]:
        """What gives cosines and sines; those in memory are on their way while sums are exchanged."""
        if self.kind != "heads":
            return []
        refs = [shared.get(name, ref) for name, ref in zip(self.tables(None), ins[2:], strict=False)]
        names = list(self.tables(None))
        first = member * self.ended if self.many and self.sizes.halves == 2 else 0
        reads = [
            functools.partial(load, refs[names.index(name)].at[:, pl.ds(first, self.ended)], SUMS)
            for name in ("cos", "sin")
        ]
        if self.many and self.sizes.members == 2:
            return [functools.partial(lambda x: x, read()) for read in reads]
        return reads

    def join(
        self, y: jax.Array, member: Any, shared: dict[str, Any], inbox: Any, end: Callable[[Sequence[jax.Array]], None]
    ) -> None:
        """Has each of two programs make an end of half the rows, or the first of all."""
        pairs.wait(self.interpret)
        if self.sizes.halves == 1:
            pl.when(member == 1)(lambda: pairs.send(y, member, shared, inbox))
            pairs.meet(shared, inbox)
            pl.when(member == 0)(lambda: end([y + pairs.received(y, member, shared, inbox)]))
            return
        own, others = (pairs.half(y, which, self.interpret) for which in (member, 1 - member))
        pairs.send(others, member, shared, inbox)
        pairs.meet(shared, inbox)
        other = pairs.received(own, member, shared, inbox)
        if self.kind == "heads":
            end([jnp.where(member == 0, own, other), jnp.where(member == 0, other, own)])
        else:
            end([own + other])

    def end(
        self, sums: Sequence[jax.Array], inverse: Callable[[], jax.Array], rope: Sequence[Callable[[], jax.Array]],
        place: tuple[Any, Any, Any], outs: Sequence[Any], shared: dict[str, Any],
    ) -> None:  # fmt: skip
        """What is done with a tile's sums."""
        if "ready" in shared and (self.many or self.eps is None):
            plgpu.barrier_wait(shared["ready"].at[0])
        if self.eps is not None:
            scale = along_rows(inverse())
            sums = [total * scale for total in sums]
        # As XLA does: products are rounded to the stream's dtype, and what follows is computed in float32.
        dtype = F32 if self.kind == "logits" else outs[0].dtype
        sums = [y.astype(dtype).astype(F32) for y in sums]
        end = functools.partial(self._heads, rope) if self.kind == "heads" else getattr(self, f"_{self.kind}")
        end(place, sums, outs, shared, dtype)

    def written(self, member: Any) -> int | mosaic.Rows:
        """Rows of results."""
        m, half = self.shape[0], self.ended
        return m if self.sizes.halves == 1 else mosaic.Rows(((0, min(m, half)), (half, m - half)), member)

    def times(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return unpack.times(a, b, SUMS, self.interpret)

    def store(self, shared: Any, y: jax.Array, ref: Any, tile: Any, member: Any, number: Any = 0) -> None:
        mosaic.store(shared["out"].at[number], y, ref, tile * TILE, self.written(member))

    def _project(self, place: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        tile, member, _ = place
        self.store(shared, sums[0].astype(dtype), outs[0], tile, member)

    def _logits(self, place: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, _: Any) -> None:
        tile, member, _ = place
        mosaic.write(shared["wide"], sums[0])
        self.store(shared, load(shared["wide"], _SINGLE), outs[0], tile, member)

    def _swiglu(self, place: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        (tile, member, team), (gate, up) = place, sums
        y = (gate * lax.logistic(gate) * up).astype(dtype)
        self.store(shared, y, outs[0], tile * self.sizes.teams + team, member, team)

    def _add(self, place: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        tile, member, _ = place
        mosaic.add_and_store(tile, sums[0], outs, shared, self.written(member), self.times)

    def _heads(
        self, rope: Sequence[Callable[[], jax.Array]], place: Any, sums: Sequence[jax.Array], outs: Sequence[Any],
        shared: Any, dtype: Any,
    ) -> None:  # fmt: skip
        tile, member, _ = place
        rounded = lambda y: y.astype(dtype).astype(F32)
        half = lambda name, i: along_columns(
            load(shared[name].at[pl.ds(i * TILE, TILE)], SUMS.reduce(1)).astype(F32), self.ended
        )
        turns = jnp.where(tile < self.counts[0] + self.counts[1], 1.0, 0.0)  # values stay as they are
        if self.biased:
            sums = [rounded(y + half("bias", i)) for i, y in enumerate(sums)]
        if self.head_eps is not None:
            squares = sum(jnp.sum(self.times(y, y), axis=0) for y in sums)
            scale = lax.rsqrt(squares * (0.5 / TILE) + self.head_eps) * turns + (1.0 - turns)
            gains = [half("gains", i) * turns + (1.0 - turns) for i in range(2)]
            sums = [rounded(rounded(y * along_rows(scale)) * gain) for y, gain in zip(sums, gains, strict=True)]
        lo, hi = sums
        cos, sin = (read() for read in rope)
        cos, sin = cos * turns + (1.0 - turns), sin * turns
        turned = self.times(lo, cos) - self.times(hi, sin), self.times(hi, cos) + self.times(lo, sin)
        for i, y in enumerate(turned):
            mosaic.write(flipped(shared["out"].at[i]), y.astype(dtype))
        plgpu.commit_smem()
        begin = 0
        for ref, count in zip(outs, self.counts, strict=True):

            @pl.when((tile >= begin) & (tile < begin + count))
            def _(ref: Any = ref, begin: int = begin) -> None:
                for i in range(2):
                    at = ((tile - begin) * 2 + i) * TILE
                    mosaic.copy_out(shared["out"].at[i], ref, at, self.written(member))

            begin += count


def run(
    kind: Kind, x: jax.Array, w: jax.Array, outs: Sequence[jax.ShapeDtypeStruct], *beside: jax.Array, interpret: Any,
    flip: bool = True, **extra: Any,
) -> Any:  # fmt: skip
    """A launch.

    Raises:
      ValueError: for a number of rows that it does not serve.
    """
    (m, k), columns = x.shape, w.shape[1 if flip else 0]
    mosaic.check_rows(m)
    if m > MOST_ROWS:
        raise ValueError(f"at most {MOST_ROWS} rows are served, got {m}")
    sizes = Sizes.of(kind, m, k, columns)
    kernel = Kernel(kind, sizes, (m, k), flip=flip, interpret=interpret is not None, **extra)
    more = [pairs.inboxes(sizes.tiles, kernel.ended)] if sizes.members == 2 and kernel.interpret else []
    found = mosaic.launch(
        kernel, (*outs, *more), x, w, *beside, interpret=interpret, members=sizes.members, summing=kernel.summing
    )
    return found[: len(outs)]
