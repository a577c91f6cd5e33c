"""Products of few rows on Mosaic GPU: weights stream through a ring of shared memory into a warpgroup's products.

A program owns 64 columns of the weights (or two times 64: gate and up, the two halves of a head) and walks along all
of their rows, so that a row's sums are the same arithmetic whatever the number of rows beside it. The weights are the
first operand of wgmma, which wants 64 rows, and the few rows the second, which may have 8. What comes before and after
a product in a decoder layer is done on the way: the norm's division after the product (its gain has been multiplied in
by whoever wrote the stream), rotary embedding, SwiGLU, the residual sum with the squares of its result.

Weights are bfloat16 here; `gpu_packed` has the same for those of 8 and 4 bits, and these functions take either.
Measured on an H200 in docs/kernels.md. Hopper only: wgmma and the copy engine.
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

from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import gpu_packed, unpack
from pallas_kernels.small_batch.packed import Packed
from pallas_kernels.small_batch.reference import TILE, Stream

Kind = Literal["project", "heads", "swiglu", "add"]

#: Bytes of shared memory that a program may have on Hopper, and what is left for tables and results beside the ring.
_SHARED, _ROOM = 232448, 8192
_MAX_STAGES = 11
_F32 = jnp.float32
#: The layout of wgmma's sums [64, rows]; vectors along either axis are its reductions.
_SUMS = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """How a kernel walks.

    Attributes:
      rows: a multiple of 8. parts: tiles of 64 columns that a program owns. depth: rows of weights in a step.
      steps: of a walk. stages: of the ring.
    """

    rows: int
    parts: int
    depth: int
    steps: int
    stages: int

    @classmethod
    def of(cls, kind: Kind, m: int, k: int) -> _Sizes:
        rows, parts = round_up(m, 8), 2 if kind in ("heads", "swiglu") else 1
        # Gate and up are so many columns that programs take turns on a multiprocessor: two at once hide each other's
        # beginning and end, so their rings are small. The other products have one program or less for each.
        depth = 64 if kind == "swiglu" or k % 128 else 128
        stage = depth * (parts * TILE + rows) * 2
        tables = 4 * rows * (k // TILE + 2 * TILE)
        stages = 6 if kind == "swiglu" else (_SHARED - _ROOM - tables) // stage
        return cls(rows, parts, depth, k // depth, max(2, min(_MAX_STAGES, stages, k // depth)))


def _tiled(lanes: int) -> tuple[Any, ...]:
    """How wgmma's operands lie in shared memory: bfloat16 tiles of 8 rows, swizzled."""
    swizzle = plgpu.find_swizzle(lanes * 16)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def _flipped(ref: Any) -> Any:
    return ref.transpose((1, 0))


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]: JAX 0.10's signature


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One launch.

    Attributes:
      kind: what is done around the product. sizes: how it walks. tiles: programs. shape: (M, K) of the rows.
      eps: of the norm before, over `squares` tiles; None where there is none. counts: query, key and value heads, of
        "heads". interpret: whether registers are pretended.
    """

    kind: Kind
    sizes: _Sizes
    tiles: int
    shape: tuple[int, int]
    eps: float | None = None
    squares: int = 0
    counts: tuple[int, ...] = ()
    interpret: bool = False

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        s = self.sizes
        out: dict[str, Any] = {
            "x": plgpu.SMEM((s.stages, s.rows, s.depth), dtype, transforms=_tiled(s.depth)),
            "w": plgpu.SMEM((s.stages, s.parts, s.depth, TILE), dtype, transforms=_tiled(TILE)),
            "full": plgpu.Barrier(num_barriers=s.stages, num_arrivals=s.parts + 1),
            "out": plgpu.SMEM((s.rows, TILE * (2 if self.kind == "heads" else 1)), dtype),
        }
        beside = 0
        if self.eps is not None:
            out["squares"], beside = plgpu.SMEM((self.squares, s.rows), _F32), 1
        if self.kind == "heads":
            out["cos"], out["sin"] = plgpu.SMEM((TILE, s.rows), _F32), plgpu.SMEM((TILE, s.rows), _F32)
            beside += 2
        if self.kind == "add":
            out["h"], out["gain"] = plgpu.SMEM((s.rows, TILE), dtype), plgpu.SMEM((TILE,), dtype)
            out["sums"] = plgpu.SMEM((s.rows,), _F32)
            beside += 2
        if beside:
            out["ready"] = plgpu.Barrier(num_barriers=1, num_arrivals=beside)
        return out

    def columns(self, tile: Any) -> tuple[Any, ...]:
        """Where a program's tiles begin among the weights' columns."""
        if self.kind == "swiglu":
            return tile * TILE, (self.tiles + tile) * TILE
        return tuple((tile * self.sizes.parts + part) * TILE for part in range(self.sizes.parts))

    def body(self, ins: Sequence[Any], outs: Sequence[Any], shared: dict[str, Any]) -> None:
        """A program."""
        s, tile = self.sizes, lax.axis_index("tile")
        x_MK, w_KN, *beside = ins
        begins = self.columns(tile)
        # A dynamic begin: rows beyond M lie outside of the array, where the copy engine reads zeros.
        rows = pl.ds(tile * 0, s.rows) if self.shape[0] % 8 else pl.ds(0, s.rows)

        def copy_weights(step: Any, slot: Any) -> None:
            for part, begin in enumerate(begins):
                source = w_KN.at[pl.ds(step * s.depth, s.depth), pl.ds(begin, TILE)]
                plgpu.copy_gmem_to_smem(source, shared["w"].at[slot, part], shared["full"].at[slot])

        def copy_rows(step: Any, slot: Any) -> None:
            source = x_MK.at[rows, pl.ds(step * s.depth, s.depth)]
            plgpu.copy_gmem_to_smem(source, shared["x"].at[slot], shared["full"].at[slot])

        for step in range(s.stages - 1):
            copy_weights(step, step)
        for step in range(s.stages - 1):
            copy_rows(step, step)
        tables = [name for name in ("squares", "cos", "sin", "h", "gain") if name in shared]
        own = pl.ds(begins[0], TILE)
        for name, ref in zip(tables, beside, strict=True):
            source = ref.at[rows, own] if name == "h" else ref.at[own] if name == "gain" else ref
            plgpu.copy_gmem_to_smem(source, shared[name], shared["ready"].at[0])

        def walk(*sums: Any) -> list[jax.Array]:
            def one(step: Any, _: Any) -> tuple[()]:
                slot = lax.rem(step, s.stages)
                plgpu.barrier_wait(shared["full"].at[slot])
                for part, total in enumerate(sums):
                    plgpu.wgmma(total, _flipped(shared["w"].at[slot, part]), _flipped(shared["x"].at[slot]))
                plgpu.wgmma_wait(len(sums))  # the step before is done, and its slot free
                ahead = step + s.stages - 1

                @pl.when(ahead < s.steps)
                def _() -> None:
                    copy_weights(ahead, lax.rem(ahead, s.stages))
                    copy_rows(ahead, lax.rem(ahead, s.stages))

                return ()

            lax.fori_loop(0, s.steps, one, ())
            return [total[...] for total in sums]

        sums = pl.run_scoped(walk, *[plgpu.WGMMAAccumulatorRef((TILE, s.rows), _F32)] * s.parts)
        if "ready" in shared:
            plgpu.barrier_wait(shared["ready"].at[0])
        if self.eps is not None:
            sums = [total * self.along_rows(self.inverse_rms(shared["squares"])) for total in sums]
        # As XLA does: products are rounded to the stream's dtype, and what follows is computed in float32.
        dtype = x_MK.dtype
        getattr(self, f"_{self.kind}")(tile, [y.astype(dtype).astype(_F32) for y in sums], outs, shared, dtype)
        plgpu.wait_smem_to_gmem(0)

    def times(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return unpack.times(a, b, _SUMS, self.interpret)

    def along_rows(self, v: jax.Array) -> jax.Array:
        """[rows] as [64, rows]."""
        return lax.broadcast_in_dim(v, (TILE, self.sizes.rows), (1,))

    def inverse_rms(self, squares: Any) -> jax.Array:
        """1 / root mean square of each row, [rows]; the sums of tiles are added in their order."""
        vector = _SUMS.reduce(0)
        total = _load(squares.at[0], vector)
        for t in range(1, self.squares):
            total = total + _load(squares.at[t], vector)
        assert self.eps is not None
        return lax.rsqrt(total * (1.0 / self.shape[1]) + self.eps)

    def store(self, shared: Any, y: jax.Array, ref: Any, begin: Any) -> None:
        """[64, rows] by way of shared memory to the M rows of 64 columns."""
        _flipped(shared.at[:, :])[...] = y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared.at[pl.ds(0, self.shape[0])], ref.at[:, pl.ds(begin, TILE)])

    def _project(self, tile: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        self.store(shared["out"], sums[0].astype(dtype), outs[0], tile * TILE)

    def _swiglu(self, tile: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        gate, up = sums
        self.store(shared["out"], (gate * lax.logistic(gate) * up).astype(dtype), outs[0], tile * TILE)

    def _heads(self, tile: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        lo, hi = sums
        turns = jnp.where(tile < self.counts[0] + self.counts[1], 1.0, 0.0)  # values stay as they are
        cos = _load(shared["cos"], _SUMS) * turns + (1.0 - turns)
        sin = _load(shared["sin"], _SUMS) * turns
        out = shared["out"]
        _flipped(out.at[:, pl.ds(0, TILE)])[...] = (self.times(lo, cos) - self.times(hi, sin)).astype(dtype)
        _flipped(out.at[:, pl.ds(TILE, TILE)])[...] = (self.times(hi, cos) + self.times(lo, sin)).astype(dtype)
        plgpu.commit_smem()
        begin = 0
        for ref, count in zip(outs, self.counts, strict=True):

            @pl.when((tile >= begin) & (tile < begin + count))
            def _(ref: Any = ref, begin: int = begin) -> None:
                target = ref.at[:, pl.ds((tile - begin) * 2 * TILE, 2 * TILE)]
                plgpu.copy_smem_to_gmem(out.at[pl.ds(0, self.shape[0])], target)

            begin += count

    def _add(self, tile: Any, sums: Sequence[jax.Array], outs: Sequence[Any], shared: Any, dtype: Any) -> None:
        h = _load(_flipped(shared["h"].at[:, :]), _SUMS).astype(_F32) + sums[0]
        h = h.astype(dtype).astype(_F32)
        gain = _load(shared["gain"], _SUMS.reduce(1)).astype(_F32)
        scaled = h * lax.broadcast_in_dim(gain, (TILE, self.sizes.rows), (0,))
        self.store(shared["h"], h.astype(dtype), outs[0], tile * TILE)
        self.store(shared["out"], scaled.astype(dtype), outs[1], tile * TILE)
        shared["sums"][...] = jnp.sum(self.times(h, h), axis=0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared["sums"], outs[2].at[tile])


# Jitted: a model's layers share one trace and one lowering of a kernel, which take Python a second.
@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("interpret",))
def _launch(kernel: _Kernel, outs: tuple[jax.ShapeDtypeStruct, ...], *ins: jax.Array, interpret: Any = None) -> Any:
    scratch = kernel.scratch(ins[0].dtype)
    names = list(scratch)

    def small_batch(*refs: Any) -> None:
        shared = dict(zip(names, refs[len(ins) + len(outs) :], strict=True))
        kernel.body(refs[: len(ins)], refs[len(ins) : len(ins) + len(outs)], shared)

    small_batch.__name__ = f"small_batch_{kernel.kind}"
    extra = {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(
        small_batch, out_type=outs, scratch_types=tuple(scratch.values()), grid=(kernel.tiles,),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane), **extra,
    )(*ins)  # fmt: skip


def _kernel(kind: Kind, x: jax.Array, w: jax.Array, **extra: Any) -> _Kernel:
    m, k = x.shape
    if m > 8 and m % 8:
        raise ValueError(f"rows must be at most 8 or a multiple of 8, got {m}")
    sizes = _Sizes.of(kind, m, k)
    return _Kernel(kind, sizes, w.shape[1] // (TILE * sizes.parts), (m, k), **extra)


def project(stream: Stream, kernel: jax.Array | Packed, eps: float, *, interpret: Any = None) -> jax.Array:
    """See api.project."""
    if isinstance(kernel, Packed):
        return gpu_packed.project(stream, kernel, eps, interpret=interpret)
    launch = _kernel("project", stream.scaled_ME, kernel, eps=eps, squares=stream.squares_TR.shape[0])
    out = jax.ShapeDtypeStruct((stream.h_ME.shape[0], kernel.shape[1]), stream.h_ME.dtype)
    return _launch(launch, (out,), stream.scaled_ME, kernel, stream.squares_TR, interpret=interpret)[0]


def multiply(x_MK: jax.Array, kernel: jax.Array, *, interpret: Any = None) -> jax.Array:
    """See reference.multiply."""
    launch = _kernel("project", x_MK, kernel)
    out = jax.ShapeDtypeStruct((x_MK.shape[0], kernel.shape[1]), x_MK.dtype)
    return _launch(launch, (out,), x_MK, kernel, interpret=interpret)[0]


def heads(
    stream: Stream, kernel: jax.Array | Packed, rope: tuple[jax.Array, jax.Array], counts: Sequence[int], eps: float, *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """See api.heads."""
    if isinstance(kernel, Packed):
        return gpu_packed.heads(stream, kernel, rope, counts, eps, interpret=interpret)
    extra = dict(eps=eps, squares=stream.squares_TR.shape[0], interpret=interpret is not None)
    launch = _kernel("heads", stream.scaled_ME, kernel, counts=tuple(counts), **extra)
    m = stream.h_ME.shape[0]
    outs = tuple(jax.ShapeDtypeStruct((m, count * 2 * TILE), stream.h_ME.dtype) for count in counts)
    return tuple(_launch(launch, outs, stream.scaled_ME, kernel, stream.squares_TR, *rope, interpret=interpret))


def swiglu(stream: Stream, kernel: jax.Array | Packed, eps: float, *, interpret: Any = None) -> jax.Array:
    """See api.swiglu."""
    if isinstance(kernel, Packed):
        return gpu_packed.swiglu(stream, kernel, eps, interpret=interpret)
    launch = _kernel("swiglu", stream.scaled_ME, kernel, eps=eps, squares=stream.squares_TR.shape[0])
    out = jax.ShapeDtypeStruct((stream.h_ME.shape[0], kernel.shape[1] // 2), stream.h_ME.dtype)
    return _launch(launch, (out,), stream.scaled_ME, kernel, stream.squares_TR, interpret=interpret)[0]


def add(
    x_MK: jax.Array, kernel: jax.Array | Packed, h_ME: jax.Array, gain_E: jax.Array, *, interpret: Any = None
) -> Stream:
    """See api.add."""
    if isinstance(kernel, Packed):
        return gpu_packed.add(x_MK, kernel, h_ME, gain_E, interpret=interpret)
    launch = _kernel("add", x_MK, kernel, interpret=interpret is not None)
    same = jax.ShapeDtypeStruct(h_ME.shape, h_ME.dtype)
    squares = jax.ShapeDtypeStruct((launch.tiles, launch.sizes.rows), _F32)
    return Stream(*_launch(launch, (same, same, squares), x_MK, kernel, h_ME, gain_E, interpret=interpret))


@functools.cache
def supported() -> str | None:
    """Why this JAX or device cannot run these kernels, or None."""
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
        return f"they need JAX 0.11 or newer, this is {jax.__version__}"
    if jax.default_backend() != "gpu":
        return f"they need a GPU, the backend is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return None if capability.startswith("9.") else f"they need compute capability 9, this device has {capability}"


#: By name, for callers that choose.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "project": project, "multiply": multiply, "heads": heads, "swiglu": swiglu, "add": add,
}  # fmt: skip
