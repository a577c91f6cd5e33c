"""Products of few rows by packed weights of 8 or 4 bits, on Mosaic GPU: `gpu`'s four kernels over `packed.Packed`.

Owns what stands around a product, and the calls; `packed_launch` has a launch's sizes, `packed_walk` how warpgroups
walk along inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import digit_products, lines, mosaic, packed, unpack
from pallas_kernels.small_batch.mosaic import F32, flipped, load
from pallas_kernels.small_batch.packed import BLOCK, Packed
from pallas_kernels.small_batch.packed_launch import Kind, Launch
from pallas_kernels.small_batch.packed_walk import COLUMNS, HALF
from pallas_kernels.small_batch.reference import FEW_ROWS, Stream


class Kernel(Launch):
    """One launch's code."""

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """A warpgroup of a program."""
        team, program = lax.axis_index("team"), lax.axis_index("program")
        own, turn_of = team // self.split, lax.rem(team, self.split)  # which tile of the program's, and of its team
        tile = program * self.tiles + own
        x_MK, w_ABK, scale_GN, *beside = ins
        rows = mosaic.all_rows(program, self.shape[0], self.rows)
        mine, laps = self.steps if self.goes_on else self.turns(turn_of), self.laps_of(program)
        after = lambda lap: tile + lap * (self.programs * self.tiles)  # the warpgroup's next tiles

        def copy_rows(turn: Any, slot: Any) -> None:
            if not self.alone:
                source = x_MK.at[rows, self.stretch(turn, turn_of)]
                plgpu.copy_gmem_to_smem(source, shared["x"].at[slot], shared["full"].at[slot])

        def copy_weights(turn: Any, slot: Any) -> None:
            which, turn = (after(turn // mine), lax.rem(turn, mine)) if self.goes_on else (tile, turn)
            source = w_ABK.at[*self.own(which), self.stretch(turn, turn_of)]
            plgpu.copy_gmem_to_smem(source, shared["w"].at[slot], shared["full"].at[slot])

        def copy(turn: Any, slot: Any) -> None:
            """Of a turn; what lies in the second-level cache first."""
            copy_rows(turn, slot)
            copy_weights(turn, slot)

        norm, beside = (None, beside) if self.eps is None else (beside[0], beside[1:])
        if self.kind == "heads":
            beside = mosaic.with_tables(beside, 0)
        # Some weights are asked for while the kernel before still runs, then what it writes, and the ring is filled
        # once that has come.
        self.bring_scales(scale_GN, self.begins(tile), own, (turn_of, self.split), shared)
        lines.commit(self.interpret)
        self.fill(team, mine * laps, copy_weights, end=self.early)
        overlap.wait(self.interpret)
        overlap.begin(self.interpret)
        words = self.read_rows(x_MK, team)
        if self.alone and not self.several:
            self.bring_row(x_MK, shared["x"], team)
        if norm is not None:
            self.bring(norm, shared["squares"], team)
        self.bring_rows(x_MK, team, mine, turn_of, shared)
        self.fill(team, mine * laps, copy_rows, begin=self.ahead, end=self.early)
        vectors = self.vectors(tile, program, beside)  # in registers before they are needed
        pl.when(turn_of == 1 % self.split)(lambda: self.copy_tables(tile, own, beside, rows, shared))
        if self.own_row:  # others' scales, but no more of the row than its own
            lines.commit(self.interpret)
            lines.wait(self.interpret, committed=True)
            plgpu.barrier_arrive(shared["there"].at[0])
        lines.wait(self.interpret)
        self.rows_came(team, mine, shared)
        self.fill(team, mine * laps, copy_weights, begin=self.early, end=self.ahead)
        self.fill(team, mine * laps, copy, begin=max(self.early, self.ahead))
        if not self.own_row:
            plgpu.barrier_arrive(shared["there"].at[0])
        elif norm is not None:
            plgpu.barrier_arrive(shared["squared"].at[0])
        self.make_digits(team, x_MK, words, shared)
        plgpu.barrier_wait(shared["there"].at[0])
        if "squared" in shared:
            plgpu.barrier_wait(shared["squared"].at[0])
        self.add_squares(team, shared)
        self.wait_digits(shared)
        if not self.goes_on:
            total = self.total(team, mine, copy, shared)
            finish = lambda: self.finish(tile, own, outs, shared, self.as_floats(program, vectors), x_MK.dtype)
            self.join(team, total, shared, finish)
            return

        def one(lap: Any, _: Any) -> tuple[()]:
            """A tile, while the next one's scales come."""
            of = lambda lap: shared | {"scale": shared["scale"].at[pl.ds(lax.rem(lap, 2) * self.tiles, self.tiles)]}
            lines.wait(self.interpret)
            digit_products.meet(self.interpret)

            @pl.when(lap + 1 < laps)
            def _() -> None:
                self.bring_scales(scale_GN, self.begins(after(lap + 1)), own, (turn_of, self.split), of(lap + 1))

            total = self.total(team, mine, copy, of(lap), lap, laps)
            finish = lambda: self.finish(after(lap), own, outs, of(lap), [], x_MK.dtype)
            self.join(team, total, of(lap), finish)
            return ()

        lax.fori_loop(0, laps, one, ())

    def vectors(self, tile: Any, program: Any, beside: Sequence[Any]) -> list[jax.Array]:
        """What the end needs along columns and the copy engine does not bring, for it is too few bytes: of "add" a
        gain; of heads biases of a program's tiles and, of those that are normed, gains of these."""
        bring = lambda ref, begin: load(ref.at[pl.ds(begin, COLUMNS)], HALF.reduce(1))
        if self.kind == "add":
            return [bring(beside[-1], tile * COLUMNS)]
        if self.kind != "heads":
            return []
        _, _, *refs = beside
        tiles = [tile] if self.head_eps is None else [2 * program, 2 * program + 1]
        found = [bring(refs[0], begin) for each in tiles for begin in self.begins(each)] if self.biased else []
        if self.head_eps is not None:
            parts = (0, 2 * COLUMNS, COLUMNS, 3 * COLUMNS)
            found += [bring(ref, begin) for begin in parts for ref in refs[-2:]]
        return found

    def as_floats(self, program: Any, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """`vectors` in float32, of two gains the one of a program's head: computed from when they are there."""
        found = [x.astype(F32) for x in vectors]
        if self.head_eps is None:
            return found
        isquery = jnp.where(program < self.counts[0], 1.0, 0.0)
        pairs = zip(found[-8::2], found[-7::2], strict=True)
        return found[:-8] + [queries * isquery + keys * (1.0 - isquery) for queries, keys in pairs]

    def copy_tables(self, tile: Any, own: Any, beside: Any, rows: Any, shared: Any) -> None:
        """What a tile needs, besides weights, their scales and rows."""
        bring = lambda source, target: plgpu.copy_gmem_to_smem(source, target, shared["ready"].at[own])
        names = [name for name in ("cos", "sin", "h") if name in shared]
        for name, ref in zip(names, beside, strict=False):
            if name == "h":
                ref = ref.at[rows, pl.ds(tile * COLUMNS, COLUMNS)]
            else:
                ref = ref.at[pl.ds(lax.rem(tile, 2) * COLUMNS, COLUMNS)]
            bring(ref, shared[name] if name == "h" else shared[name].at[own])

    def along_rows(self, v: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(v, (COLUMNS, self.rows), (1,)), self.layout)

    def along_columns(self, v: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(v, (COLUMNS, self.rows), (0,)), self.layout)

    def finish(
        self, tile: Any, own: Any, outs: Sequence[Any], shared: Any, vectors: Sequence[jax.Array], dtype: Any
    ) -> None:
        """From the sums of a tile's warpgroups to the results; `own` is the number of the tile in its program."""
        self.wait_norm(shared)
        if "ready" in shared:
            plgpu.barrier_wait(shared["ready"].at[own])
        if self.head_eps is None:
            parts, shared_own = self.ended(own, shared, dtype), shared | {"out": shared["out"].at[own]}
            if self.kind == "add":
                self._add(tile, parts[0], vectors[0], outs, shared_own, dtype)
            elif self.kind == "heads":
                self._heads(tile, own, self.with_bias(parts, vectors, dtype), outs, shared_own, dtype)
            else:
                getattr(self, f"_{self.kind}")(tile, parts, outs, shared_own, dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return

        # One warpgroup ends both tiles of a head: sums across a warpgroup's columns have one place in shared memory.
        pl.when(own == 1)(lambda: plgpu.barrier_arrive(shared["other"].at[0]))

        @pl.when(own == 0)
        def _() -> None:
            plgpu.barrier_wait(shared["other"].at[0])
            self._normed_heads(tile, vectors, outs, shared, dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def ended(self, own: Any, shared: Any, dtype: Any) -> list[jax.Array]:
        """The results of a tile's products."""
        parts = self.totals(own, shared, self.layout)
        if not self.pairs:
            parts = [parts[0] + parts[1]]
        if self.once:
            scales = [load(shared["scale"].at[own, i, 0], self.layout.reduce(1)) for i in range(len(parts))]
            parts = [y * self.along_columns(scale) for y, scale in zip(parts, scales, strict=True)]
        if self.eps is not None:
            inverse = self.along_rows(self.inverse_rms(shared))
            parts = [y * inverse for y in parts]
        # As XLA does: products are rounded to the stream's dtype, and what follows is computed in float32.
        return parts if self.kind == "logits" else [y.astype(dtype).astype(F32) for y in parts]

    def with_bias(self, parts: Sequence[jax.Array], vectors: Sequence[jax.Array], dtype: Any) -> list[jax.Array]:
        """Both parts of a tile with the first of `vectors` added, if columns have a bias."""
        if not self.biased:
            return list(parts)
        biases = map(self.along_columns, vectors)
        return [(y + bias).astype(dtype).astype(F32) for y, bias in zip(parts, biases, strict=False)]

    def store(self, shared: Any, y: jax.Array, ref: Any, begin: Any) -> None:
        """[32, rows] by way of shared memory to the M rows of 32 columns."""
        mosaic.write(flipped(shared), y)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared.at[pl.ds(0, self.shape[0])], ref.at[:, pl.ds(begin, COLUMNS)])

    def _logits(self, tile: Any, parts: Sequence[jax.Array], outs: Sequence[Any], shared: Any, _: Any) -> None:
        self.store(shared["out"].at[0], parts[0], outs[0], tile * COLUMNS)

    def _project(self, tile: Any, parts: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        self.store(shared["out"].at[0], parts[0].astype(dtype), outs[0], tile * COLUMNS)

    def _swiglu(self, tile: Any, parts: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        gate, up = parts
        y = (gate * lax.logistic(gate) * up).astype(dtype)
        self.store(shared["out"].at[0], y, outs[0], self.column(tile))

    def turned(self, head: Any) -> jax.Array:
        """1 of queries and keys, 0 of values, which stay as they are."""
        return jnp.where(head < self.counts[0] + self.counts[1], 1.0, 0.0)

    def times(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return unpack.times(a, b, HALF, self.interpret)

    def _normed_heads(
        self, tile: Any, vectors: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any
    ) -> None:
        """Both tiles of a head, of which `tile` is the first."""
        assert self.head_eps is not None
        rounded, turns = lambda y: y.astype(dtype).astype(F32), self.turned(tile // 2)
        *biases, a, b, c, d = vectors
        both = [self.with_bias(self.ended(i, shared, dtype), biases[2 * i :], dtype) for i in range(2)]
        squares = [jnp.sum(self.times(lo, lo) + self.times(hi, hi), axis=0) for lo, hi in both]
        scale = lax.rsqrt((squares[0] + squares[1]) * (0.25 / COLUMNS) + self.head_eps) * turns + (1.0 - turns)
        for i, (parts, gains) in enumerate(zip(both, ((a, b), (c, d)), strict=True)):
            own = shared | {"out": shared["out"].at[i]}
            gains = [gain * turns + (1.0 - turns) for gain in gains]
            normed = [
                rounded(rounded(y * self.along_rows(scale)) * self.along_columns(gain))
                for y, gain in zip(parts, gains, strict=True)
            ]
            self._heads(tile + i, i, normed, outs, own, dtype)

    def _heads(
        self, tile: Any, own: Any, parts: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any
    ) -> None:
        lo, hi = parts
        head, begin = tile // 2, lax.rem(tile, 2) * COLUMNS
        turns, times = self.turned(head), self.times
        cos = load(shared["cos"].at[own], self.layout) * turns + (1.0 - turns)
        sin = load(shared["sin"].at[own], self.layout) * turns
        mosaic.write(flipped(shared["out"].at[0]), (times(lo, cos) - times(hi, sin)).astype(dtype))
        mosaic.write(flipped(shared["out"].at[1]), (times(hi, cos) + times(lo, sin)).astype(dtype))
        plgpu.commit_smem()
        first = 0
        for ref, count in zip(outs, self.counts, strict=True):

            @pl.when((head >= first) & (head < first + count))
            def _(ref: Any = ref, first: int = first) -> None:
                at = (head - first) * 4 * COLUMNS + begin
                for part in range(2):
                    source = shared["out"].at[part, pl.ds(0, self.shape[0])]
                    plgpu.copy_smem_to_gmem(source, ref.at[:, pl.ds(at + part * 2 * COLUMNS, COLUMNS)])

            first += count

    def _add(self, tile: Any, y: jax.Array, gain: jax.Array, outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        h = load(flipped(shared["h"]), HALF).astype(F32) + y
        h = h.astype(dtype).astype(F32)
        self.store(shared["h"], h.astype(dtype), outs[0], tile * COLUMNS)
        self.store(shared["out"].at[0], (h * self.along_columns(gain)).astype(dtype), outs[1], tile * COLUMNS)
        mosaic.write(shared["total"], jnp.sum(h * h, axis=0))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared["total"], outs[2].at[tile])


def _run(
    kind: Kind, x: jax.Array, weight: Packed, outs: Sequence[jax.ShapeDtypeStruct], *beside: jax.Array,
    interpret: Any, **extra: Any,
) -> Any:  # fmt: skip
    m, k = x.shape
    mosaic.check_rows(m)
    if m > FEW_ROWS:
        raise ValueError(f"at most {FEW_ROWS} rows are served, got {m}")
    if why := packed.refusal(weight.values.dtype, weight.shape, weight.groups):
        raise ValueError(why)
    kernel = Kernel(
        kind=kind, dtype=weight.kind, shape=(m, k), columns=weight.shape[1], groups=weight.groups,
        interpret=interpret is not None, **extra,
    )  # fmt: skip
    if not weight.invariant and kernel.takes_integers:
        kernel = dataclasses.replace(kernel, integers=True)
    values, x = kernel.viewed(weight.values), weight.rows(x)
    x = x.reshape(-1, BLOCK) if kernel.alone else x
    return mosaic.launch(kernel, tuple(outs), x, values, weight.scale, *beside, interpret=interpret)


def _normed(stream: Stream, eps: float) -> dict[str, Any]:
    return dict(eps=eps, squares=stream.squares_TR.shape[0], width=stream.h_ME.shape[1])


def _like(x: jax.Array, columns: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype if dtype is None else dtype)


def logits(x_MK: jax.Array, kernel: Packed, *, interpret: Any = None) -> jax.Array:
    """See reference.logits."""
    return _run("logits", x_MK, kernel, [_like(x_MK, kernel.shape[1], F32)], interpret=interpret)[0]


def multiply(x_MK: jax.Array, kernel: Packed, *, interpret: Any = None) -> jax.Array:
    """See reference.multiply."""
    return _run("project", x_MK, kernel, [_like(x_MK, kernel.shape[1])], interpret=interpret)[0]


def project(stream: Stream, kernel: Packed, eps: float, *, interpret: Any = None) -> jax.Array:
    """See reference.project."""
    x, extra = stream.scaled_ME, _normed(stream, eps)
    return _run("project", x, kernel, [_like(x, kernel.shape[1])], stream.squares_TR, interpret=interpret, **extra)[0]


def heads(
    stream: Stream | jax.Array, kernel: Packed, rope_2CR: jax.Array, counts: Sequence[int], eps: float, *,
    bias: jax.Array | None = None, gains: tuple[jax.Array, jax.Array] | None = None, interpret: Any = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """See reference.heads."""
    normed = isinstance(stream, Stream)
    x, before = (stream.scaled_ME, _normed(stream, eps)) if normed else (stream, {})
    extra: dict[str, Any] = before | dict(counts=tuple(counts), biased=bias is not None)
    if gains is not None:
        extra["head_eps"] = eps
    outs = [_like(x, count * 4 * COLUMNS) for count in counts]
    first = (stream.squares_TR,) if normed else ()
    beside = *first, rope_2CR, *(() if bias is None else (bias,)), *(gains or ())
    return tuple(_run("heads", x, kernel, outs, *beside, interpret=interpret, **extra))


def swiglu(stream: Stream, kernel: Packed, eps: float, *, interpret: Any = None) -> jax.Array:
    """See reference.swiglu."""
    x, outs = stream.scaled_ME, [_like(stream.scaled_ME, kernel.shape[1] // 2)]
    return _run("swiglu", x, kernel, outs, stream.squares_TR, interpret=interpret, **_normed(stream, eps))[0]


def add(x_MK: jax.Array, kernel: Packed, h_ME: jax.Array, gain_E: jax.Array, *, interpret: Any = None) -> Stream:
    """See reference.add."""
    same = jax.ShapeDtypeStruct(h_ME.shape, h_ME.dtype)
    squares = jax.ShapeDtypeStruct((kernel.shape[1] // COLUMNS, round_up(h_ME.shape[0], 8)), F32)
    return Stream(*_run("add", x_MK, kernel, [same, same, squares], h_ME, gain_E, interpret=interpret))
