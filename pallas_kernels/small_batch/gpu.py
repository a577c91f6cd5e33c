"""Products of few rows on Mosaic GPU: weights stream through a ring of shared memory into a warpgroup's products.

A program owns 64 columns of the weights (or two times 64: gate and up, the two halves of a head) and walks along all of
their rows, so that a row's sums are the same arithmetic whatever the number of rows beside it; where there are more
tiles of columns than multiprocessors, it goes on with another, its ring never empty. The weights are the first operand
of wgmma, which wants 64 rows, and the few rows the second, which may have 8. What comes before and after a product in a
decoder layer is done on the way: the norm's division after the product (its gain has been multiplied in by whoever
wrote the stream), biases, norms of heads, rotary embedding, SwiGLU, the residual sum with the squares of its result.

Weights are bfloat16 here; `gpu_packed` has the same for those of 8 and 4 bits, and these functions take either.
Measured on an H200 in docs/benchmarks.md. Hopper only: wgmma and the copy engine.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import gpu_packed, mosaic, unpack
from pallas_kernels.small_batch.mosaic import F32, SUMS, along_columns, along_rows, flipped, load
from pallas_kernels.small_batch.packed import Packed
from pallas_kernels.small_batch.reference import TILE, Stream

Kind = Literal["project", "logits", "heads", "swiglu", "add"]

_MAX_STAGES = 11
#: `SUMS` in vectors of one value: float32 cannot be transposed in longer ones.
_SINGLE = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """How a kernel walks.

    Attributes:
      rows: a multiple of 8. parts: tiles of 64 columns that a program owns at a time. depth: rows of weights in a step.
      steps: of a walk. tiles: of all programs. programs: each has every so manieth tile.
    """

    rows: int
    parts: int
    depth: int
    steps: int
    tiles: int
    programs: int

    @classmethod
    def of(cls, kind: Kind, m: int, k: int, columns: int) -> _Sizes:
        rows, parts = round_up(m, 8), 2 if kind in ("heads", "swiglu") else 1
        depth = 64 if kind == "swiglu" or k % 128 else 128
        tiles = columns // (parts * TILE)
        turns = -(-tiles // mosaic.MULTIPROCESSORS) if kind in ("swiglu", "logits") else 1
        return cls(rows, parts, depth, k // depth, tiles, -(-tiles // turns))


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One launch.

    Attributes:
      kind: what is done around the product. sizes: how it walks. shape: (M, K) of the rows.
      eps: of the norm before, over `squares` tiles; None where there is none.
      counts: query, key and value heads, of "heads". head_eps: of the norms of queries and keys, if any.
      biased: whether columns have a bias ("heads"). flip: whether weights lie [in, out], not [out, in].
      interpret: whether registers are pretended.
    """

    kind: Kind
    sizes: _Sizes
    shape: tuple[int, int]
    eps: float | None = None
    squares: int = 0
    counts: tuple[int, ...] = ()
    head_eps: float | None = None
    biased: bool = False
    flip: bool = True
    interpret: bool = False

    teams = 1

    @property
    def name(self) -> str:
        return self.kind

    @property
    def programs(self) -> int:
        return self.sizes.programs

    def tables(self, dtype: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of what is read besides rows and weights, in the order of the arguments."""
        rows, kinds = self.sizes.rows, {}
        if self.eps is not None:
            kinds["squares"] = (self.squares, rows), F32
        if self.kind == "heads":
            kinds["cos"] = kinds["sin"] = (TILE, rows), F32
        if self.biased:
            kinds["bias"] = (2 * TILE,), dtype
        if self.head_eps is not None:
            kinds["gains"] = (2 * TILE,), dtype
        if self.kind == "add":
            kinds["h"], kinds["gain"] = ((rows, TILE), dtype), ((TILE,), dtype)
        return kinds

    @functools.cached_property
    def stages(self) -> int:
        """Of the ring: as many as there is room for."""
        s = self.sizes
        fit = mosaic.room(self.beside(jnp.bfloat16)) // (s.depth * (s.parts * TILE + s.rows) * 2)
        return max(2, min(_MAX_STAGES, fit, s.steps))

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See mosaic.Kernel."""
        s = self.sizes
        tile, lanes = ((s.depth, TILE), TILE) if self.flip else ((TILE, s.depth), s.depth)
        return {
            "x": plgpu.SMEM((self.stages, s.rows, s.depth), dtype, transforms=mosaic.tiled(s.depth)),
            "w": plgpu.SMEM((self.stages, s.parts, *tile), dtype, transforms=mosaic.tiled(lanes)),
            "full": plgpu.Barrier(num_barriers=self.stages, num_arrivals=s.parts + 1),
            **self.beside(dtype),
        }

    def beside(self, dtype: Any) -> dict[str, Any]:
        """What is there besides the ring."""
        s = self.sizes
        wide = F32 if self.kind == "logits" else dtype
        out: dict[str, Any] = {"out": plgpu.SMEM((s.rows, TILE * (2 if self.kind == "heads" else 1)), wide)}
        if self.kind == "logits":
            out["wide"] = plgpu.SMEM((TILE, s.rows), F32)
        if self.kind == "add":
            out |= mosaic.added(s.rows, dtype)
        tables = self.tables(dtype)
        out |= {name: plgpu.SMEM(shape, kind) for name, (shape, kind) in tables.items()}
        if tables:
            out["ready"] = plgpu.Barrier(num_barriers=1, num_arrivals=len(tables))
        return out

    def columns(self, tile: Any) -> tuple[Any, ...]:
        """Where a tile's parts begin among the weights' columns."""
        if self.kind == "swiglu":
            return tile * TILE, (self.sizes.tiles + tile) * TILE
        return tuple((tile * self.sizes.parts + part) * TILE for part in range(self.sizes.parts))

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """See mosaic.Kernel."""
        s, program = self.sizes, lax.axis_index("program")
        x_MK, w_KN, *beside = ins
        rows = mosaic.all_rows(program, self.shape[0], s.rows)
        several = s.programs < s.tiles
        turns = lax.div(s.tiles - program + s.programs - 1, s.programs) if several else 1

        def copy_weights(at: Any, slot: Any) -> None:
            first = isinstance(at, int) or not several
            tile = program if first else program + lax.div(at, s.steps) * s.programs
            step = pl.ds((at if first else lax.rem(at, s.steps)) * s.depth, s.depth)
            for part, begin in enumerate(self.columns(tile)):
                own = pl.ds(begin, TILE)
                source = w_KN.at[step, own] if self.flip else w_KN.at[own, step]
                plgpu.copy_gmem_to_smem(source, shared["w"].at[slot, part], shared["full"].at[slot])

        def copy_rows(at: Any, slot: Any) -> None:
            step = at if isinstance(at, int) or not several else lax.rem(at, s.steps)
            source = x_MK.at[rows, pl.ds(step * s.depth, s.depth)]
            plgpu.copy_gmem_to_smem(source, shared["x"].at[slot], shared["full"].at[slot])

        def copy(at: Any, slot: Any) -> None:
            copy_weights(at, slot)
            copy_rows(at, slot)

        def fill() -> None:
            for step in range(self.stages - 1):
                copy_weights(step, step)

        # Behind a kernel that lets it begin early, as attention does, weights come first; else tables do: what follows
        # fills the ring, and the queue to memory with it. Nobody may begin early behind it: it keeps memory busy.
        early = overlap.overlaps(self.interpret)
        if early:
            fill()
        overlap.wait(self.interpret)
        self.copy_tables(program, beside, rows, shared)
        if not early:
            fill()
        for step in range(self.stages - 1):
            copy_rows(step, step)
        if "ready" in shared:
            plgpu.barrier_wait(shared["ready"].at[0])
        inverse = None
        if self.eps is not None:
            inverse = mosaic.inverse_rms(shared["squares"], self.shape[1], self.eps, SUMS.reduce(0))

        def turn(i: Any, _: Any = None) -> tuple[()]:
            run = functools.partial(
                mosaic.walk, shared=shared, steps=s.steps, copy=copy, begin=i * s.steps, all_steps=turns * s.steps,
                flip=self.flip,
            )  # fmt: skip
            accumulators = [plgpu.WGMMAAccumulatorRef((TILE, s.rows), F32)] * s.parts
            sums = pl.run_scoped(lambda *totals: run(totals), *accumulators)
            if inverse is not None:
                sums = [total * along_rows(inverse) for total in sums]
            if several:  # results of the turn before
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            # As XLA does: products are rounded to the stream's dtype, and what follows is computed in float32.
            dtype = F32 if self.kind == "logits" else x_MK.dtype
            sums = [y.astype(dtype).astype(F32) for y in sums]
            getattr(self, f"_{self.kind}")(program + i * s.programs, sums, outs, shared, dtype)
            return ()

        if several:
            lax.fori_loop(0, turns, turn, ())
        else:
            turn(0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy_tables(self, tile: Any, beside: Sequence[Any], rows: Any, shared: dict[str, Any]) -> None:
        """What the end needs besides the sums; kinds whose tables are a tile's own have one tile for a program."""
        begin = self.columns(tile)[0]
        bring = lambda ref, name: plgpu.copy_gmem_to_smem(ref, shared[name], shared["ready"].at[0])
        for name, ref in zip(self.tables(None), beside, strict=False):
            if name == "h":
                ref = ref.at[rows, pl.ds(begin, TILE)]
            elif name == "gain":
                ref = ref.at[pl.ds(begin, TILE)]
            elif name == "bias":
                ref = ref.at[pl.ds(begin, 2 * TILE)]
            elif name == "gains":  # the last, of queries and of keys; values are not normed
                queries, keys = ref, beside[len(self.tables(None))]
                pl.when(tile < self.counts[0])(functools.partial(bring, queries, name))
                pl.when(tile >= self.counts[0])(functools.partial(bring, keys, name))
                continue
            bring(ref, name)

    def times(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return unpack.times(a, b, SUMS, self.interpret)

    def store(self, shared: Any, y: jax.Array, ref: Any, tile: Any) -> None:
        mosaic.store(shared["out"], y, ref, tile * TILE, self.shape[0])

    def _project(self, tile: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        self.store(shared, sums[0].astype(dtype), outs[0], tile)

    def _logits(self, tile: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, _: Any) -> None:
        mosaic.write(shared["wide"], sums[0])
        self.store(shared, load(shared["wide"], _SINGLE), outs[0], tile)

    def _swiglu(self, tile: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        gate, up = sums
        self.store(shared, (gate * lax.logistic(gate) * up).astype(dtype), outs[0], tile)

    def _heads(self, tile: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        rows = self.sizes.rows
        rounded = lambda y: y.astype(dtype).astype(F32)
        half = lambda name, i: along_columns(
            load(shared[name].at[pl.ds(i * TILE, TILE)], SUMS.reduce(1)).astype(F32), rows
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
        cos = load(shared["cos"], SUMS) * turns + (1.0 - turns)
        sin = load(shared["sin"], SUMS) * turns
        out = shared["out"]
        mosaic.write(flipped(out.at[:, pl.ds(0, TILE)]), (self.times(lo, cos) - self.times(hi, sin)).astype(dtype))
        mosaic.write(flipped(out.at[:, pl.ds(TILE, TILE)]), (self.times(hi, cos) + self.times(lo, sin)).astype(dtype))
        plgpu.commit_smem()
        begin = 0
        for ref, count in zip(outs, self.counts, strict=True):

            @pl.when((tile >= begin) & (tile < begin + count))
            def _(ref: Any = ref, begin: int = begin) -> None:
                target = ref.at[:, pl.ds((tile - begin) * 2 * TILE, 2 * TILE)]
                plgpu.copy_smem_to_gmem(out.at[pl.ds(0, self.shape[0])], target)

            begin += count

    def _add(self, tile: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        mosaic.add_and_store(tile, sums[0], outs, shared, self.shape[0], self.times)


def _run(
    kind: Kind, x: jax.Array, w: jax.Array, outs: Sequence[jax.ShapeDtypeStruct], *beside: jax.Array, interpret: Any,
    flip: bool = True, **extra: Any,
) -> Any:  # fmt: skip
    """A launch."""
    (m, k), columns = x.shape, w.shape[1 if flip else 0]
    mosaic.check_rows(m)
    sizes = _Sizes.of(kind, m, k, columns)
    kernel = _Kernel(kind, sizes, (m, k), flip=flip, interpret=interpret is not None, **extra)
    return mosaic.launch(kernel, tuple(outs), x, w, *beside, interpret=interpret)


def _normed(stream: Stream, eps: float) -> dict[str, Any]:
    return dict(eps=eps, squares=stream.squares_TR.shape[0])


def _like(x: jax.Array, columns: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype)


def project(stream: Stream, kernel: jax.Array | Packed, eps: float, *, interpret: Any = None) -> Any:
    """See reference.project."""
    if isinstance(kernel, Packed):
        return gpu_packed.project(stream, kernel, eps, interpret=interpret)
    x, outs = stream.scaled_ME, [_like(stream.h_ME, kernel.shape[1])]
    extra = _normed(stream, eps)
    return _run("project", x, kernel, outs, stream.squares_TR, interpret=interpret, **extra)[0]


def multiply(x_MK: jax.Array, kernel: jax.Array | Packed, *, interpret: Any = None) -> jax.Array:
    """See reference.multiply."""
    if isinstance(kernel, Packed):
        return gpu_packed.multiply(x_MK, kernel, interpret=interpret)
    return _run("project", x_MK, kernel, [_like(x_MK, kernel.shape[1])], interpret=interpret)[0]


def logits(x_MK: jax.Array, kernel: jax.Array | Packed, *, flip: bool = True, interpret: Any = None) -> jax.Array:
    """See reference.logits."""
    if isinstance(kernel, Packed):
        return gpu_packed.logits(x_MK, kernel, interpret=interpret)
    out = jax.ShapeDtypeStruct((x_MK.shape[0], kernel.shape[1 if flip else 0]), F32)
    return _run("logits", x_MK, kernel, [out], flip=flip, interpret=interpret)[0]


def heads(
    stream: Stream, kernel: jax.Array | Packed, rope: tuple[jax.Array, jax.Array], counts: Sequence[int], eps: float, *,
    bias: jax.Array | None = None, gains: tuple[jax.Array, jax.Array] | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """See reference.heads."""
    if isinstance(kernel, Packed):
        return gpu_packed.heads(stream, kernel, rope, counts, eps, bias=bias, gains=gains, interpret=interpret)
    extra: dict[str, Any] = _normed(stream, eps) | dict(counts=tuple(counts), biased=bias is not None)
    beside = [stream.squares_TR, *rope, *(() if bias is None else (bias,))]
    if gains is not None:
        extra["head_eps"] = eps
        beside += gains
    outs = [_like(stream.h_ME, count * 2 * TILE) for count in counts]
    return tuple(_run("heads", stream.scaled_ME, kernel, outs, *beside, interpret=interpret, **extra))


def swiglu(stream: Stream, kernel: jax.Array | Packed, eps: float, *, interpret: Any = None) -> Any:
    """See reference.swiglu."""
    if isinstance(kernel, Packed):
        return gpu_packed.swiglu(stream, kernel, eps, interpret=interpret)
    x, outs = stream.scaled_ME, [_like(stream.h_ME, kernel.shape[1] // 2)]
    extra = _normed(stream, eps)
    return _run("swiglu", x, kernel, outs, stream.squares_TR, interpret=interpret, **extra)[0]


def add(
    x_MK: jax.Array, kernel: jax.Array | Packed, h_ME: jax.Array, gain_E: jax.Array, *,
    interpret: Any = None,
) -> Stream:  # fmt: skip
    """See reference.add."""
    if isinstance(kernel, Packed):
        return gpu_packed.add(x_MK, kernel, h_ME, gain_E, interpret=interpret)
    same = jax.ShapeDtypeStruct(h_ME.shape, h_ME.dtype)
    squares = jax.ShapeDtypeStruct((kernel.shape[1] // TILE, round_up(h_ME.shape[0], 8)), F32)
    return Stream(*_run("add", x_MK, kernel, [same, same, squares], h_ME, gain_E, interpret=interpret))


@functools.cache
def too_old() -> str | None:
    """Why this JAX cannot compile these kernels, or None."""
    old = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
    return f"they need JAX 0.11 or newer, this is {jax.__version__}" if old else None


def supported() -> str | None:
    """Why this JAX or device cannot run these kernels, or None."""
    if (why := too_old()) is not None:
        return why
    if jax.default_backend() != "gpu":
        return f"they need a GPU, the backend is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return None if capability.startswith("9.") else f"they need compute capability 9, this device has {capability}"


#: By name, for callers that choose.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "project": project, "multiply": multiply, "logits": logits, "heads": heads, "swiglu": swiglu, "add": add,
}  # fmt: skip
