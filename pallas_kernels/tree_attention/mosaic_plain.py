"""Tree attention on Mosaic GPU for Hopper of everything that the other kernels leave: float32, heads of any width.

A program owns a token's query head, up to 128 channels of its values, and one of S stretches of the keys. 64 keys are
multiplied at a time, each by its own threads and in float32; the softmax runs along 64 streams of keys, of which the
program makes one at its end. Nothing is shared with other query heads but the caches: it is right for every shape, and
not quick where there are many rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sizes import MULTIPROCESSORS, device_kind
from pallas_kernels.tree_attention import mosaic_plain_rows
from pallas_kernels.tree_attention.mosaic_rows import MASKED, div, rem
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

#: Keys of a step; channels of keys, and of values, that a program holds at once.
KEYS, _MOST_KEY, _MOST_VALUE = 64, 64, 128
#: Query rows of a KV head up to which it was measured: each reads all keys by itself.
MOST_ROWS = 16
#: Programs of a multiprocessor that stretches are to bring about.
_PER_MULTIPROCESSOR = 4
_LOG2E = math.log2(math.e)
_F32, _I32 = jnp.float32, jnp.int32
_TILE = plgpu.Layout.WGMMA
_KEY, _CHANNEL = _TILE.reduce(1), _TILE.reduce(0)


def refusal(args: TreeAttentionArgs) -> str | None:
    """Why this kernel cannot serve these arguments, or None."""
    q, values = args.q_BNHC, args.value_channels or args.q_BNHC.shape[3]
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"dtype must be bfloat16, float16 or float32, got {q.dtype}"
    dtypes = [x.dtype for x in (q, args.pages, args.tree_k_BTGC, args.tree_v_BTGC)]
    if any(dtype != q.dtype for dtype in dtypes):
        return f"q, pages, tree_k and tree_v must share a dtype, got {', '.join(map(str, dtypes[:3]))}"
    if q.shape[3] % 8 or values % 8:
        return f"head dimension must be a multiple of 8, got {q.shape[3]} with values of {values}"
    return None


def slower(args: TreeAttentionArgs) -> str | None:
    """Where Triton's kernel takes much less time, or None."""
    if args.rows > MOST_ROWS:
        return f"it is for at most {MOST_ROWS} query rows of a KV head, got {args.rows}"
    return None if args.q_BNHC.dtype == jnp.float32 else f"it is for float32, got {args.q_BNHC.dtype}"


def _part(channels: int, most: int) -> int:
    """The most channels that divide them all."""
    return next(x for x in range(most, 0, -8) if channels % x == 0)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
      batch, nodes, entries, heads, kv_heads, channels, values: B, N, T, H, G, C and the values' C.
      first: channel of a page's row where values begin. columns: of the page table.
      causal: without a mask. window: whether there is one. splits: stretches of the keys.
      interpret: whether registers are pretended.
    """

    batch: int
    nodes: int
    entries: int
    heads: int
    kv_heads: int
    channels: int
    values: int
    first: int
    causal: bool
    window: bool
    factor: float
    soft_cap: float | None
    sinks: bool
    splits: int
    interpret: bool

    @property
    def key_part(self) -> int:
        return _part(self.channels, _MOST_KEY)

    @property
    def value_part(self) -> int:
        return _part(self.values, _MOST_VALUE)

    @property
    def programs(self) -> int:
        return self.batch * self.nodes * self.heads * (self.values // self.value_part) * self.splits

    def body(self, ins: dict[str, Any], outs: tuple[Any, ...]) -> None:
        p = lax.axis_index("program")
        h, p = rem(p, self.heads), div(p, self.heads)
        part, p = rem(p, self.values // self.value_part), div(p, self.values // self.value_part)
        split, p = rem(p, self.splits), div(p, self.splits)
        n, b = rem(p, self.nodes), div(p, self.nodes)
        length, begin = ins["length"][b], part * self.value_part
        lowest = ins["lowest"][b, n] if self.window else jnp.int32(0)
        first = div(lowest, KEYS)
        prefix = jnp.maximum(div(length + KEYS - 1, KEYS) - first, 0)
        last = n + 1 if self.causal else jnp.int32(self.entries)
        total = prefix + div(last + KEYS - 1, KEYS)
        per = div(total + self.splits - 1, self.splits)
        low = jnp.minimum(split * per, total)
        high = jnp.minimum(low + per, total)
        head = div(h, self.heads // self.kv_heads)
        full = lambda shape, value, layout: self.cast(jnp.full(shape, value, _F32), layout)
        sums = (
            full((KEYS, self.value_part), 0.0, _TILE), full((KEYS,), MASKED, _KEY), full((KEYS,), 0.0, _KEY),
        )  # fmt: skip

        def attend(keys: Any, values: Any, seen: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            """Adds 64 keys, of which `keys` and `values` give channels."""
            s = full((KEYS,), 0.0, _KEY)
            for i in range(self.channels // self.key_part):
                q = self.vector(ins["q"], (b, n, h), i * self.key_part, self.key_part, _CHANNEL)
                q = lax.broadcast_in_dim(q.astype(_F32), (KEYS, self.key_part), (1,))
                s = s + jnp.sum(keys(i * self.key_part, self.key_part) * q, axis=1)
            if self.soft_cap is None:
                s = s * (self.factor * _LOG2E)
            else:
                power = jnp.exp2(s * (2 * _LOG2E * self.factor / self.soft_cap))
                s = (self.soft_cap - (2 * self.soft_cap) / (1.0 + power)) * _LOG2E
            s = jnp.where(seen, s, -jnp.inf)
            acc, top, total = sums
            new = jnp.maximum(top, s)
            keep, weight = jnp.exp2(top - new), jnp.exp2(s - new)
            v = values(begin, self.value_part)
            return acc * self.along(keep) + v * self.along(weight), new, total * keep + weight

        def of_prefix(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            start = (first + i) * KEYS
            load = functools.partial(
                mosaic_plain_rows.load, ins["pages"], ins["table"], b, head, start, lowest, length,
                pretend=self.interpret,
            )  # fmt: skip
            key = start + self.iota()
            values = lambda column, width: load(column + self.first, width)
            return attend(load, values, (key >= lowest) & (key < length), sums)

        def of_new(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            start = (i - prefix) * KEYS
            load = lambda ref, finite: functools.partial(
                mosaic_plain_rows.load, ref, None, b, head, start, 0, last, finite=finite, pretend=self.interpret
            )
            seen = start + self.iota() < last
            if not self.causal:
                seen = self.vector(ins["mask"], (b, n), start, KEYS, _KEY) != 0
            return attend(load(ins["k"], False), load(ins["v"], True), seen, sums)

        sums = lax.fori_loop(low, jnp.minimum(high, prefix), of_prefix, sums)
        acc, top, total = lax.fori_loop(jnp.maximum(low, prefix), high, of_new, sums)
        # One softmax of 64.
        best = jnp.max(top, axis=0)
        weight = jnp.exp2(top - best)
        acc, total = jnp.sum(acc * self.along(weight), axis=0), jnp.sum(total * weight, axis=0)
        best, total = (full((self.value_part,), x, _CHANNEL) for x in (best, total))
        if self.splits > 1:
            for out, value in zip(outs, (acc, best, total), strict=True):
                self.write(out, (split, b, n, h), begin, value)
            return
        if self.sinks:
            sink = full((self.value_part,), ins["sinks"][h], _CHANNEL)
            new = jnp.maximum(best, sink)
            keep = jnp.exp2(best - new)
            acc, total = acc * keep, total * keep + jnp.exp2(sink - new)
        self.write(outs[0], (b, n, h), begin, (acc / total).astype(outs[0].dtype))

    def cast(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def iota(self) -> jax.Array:
        """Numbers of the keys of a step."""
        if self.interpret:
            return jnp.arange(KEYS, dtype=_I32)
        return plgpu.broadcasted_iota(_I32, (KEYS,), 0, layout=_KEY)

    def along(self, x: jax.Array) -> jax.Array:
        """Keys' values, the same for each of a part's channels."""
        return lax.broadcast_in_dim(x, (KEYS, self.value_part), (0,))

    def vector(self, ref: Any, at: tuple[Any, ...], begin: Any, width: int, layout: Any) -> jax.Array:
        """Some of the last axis."""
        source = ref.at[*at, pl.ds(begin, width)]
        return source[...] if self.interpret else plgpu.load(source, layout=layout, optimized=False)  # pyright: ignore

    def write(self, ref: Any, at: tuple[Any, ...], begin: Any, value: jax.Array) -> None:
        """A part's channels of a row."""
        if self.interpret:
            ref.at[*at, pl.ds(begin, self.value_part)][...] = value
            return
        base = jnp.int32(0)
        for size, i in zip(ref.shape[:-1], at, strict=True):
            base = base * size + i
        mosaic_plain_rows.write(ref, value, base, begin)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("interpret",))
def _attend(kernel: Kernel, ins: dict[str, jax.Array], *, interpret: Any = None) -> jax.Array:
    """[B, N, H, values]; stretches are merged by XLA."""
    names, shape = list(ins), (kernel.batch, kernel.nodes, kernel.heads, kernel.values)
    whole, part = jax.ShapeDtypeStruct(shape, ins["q"].dtype), jax.ShapeDtypeStruct((kernel.splits, *shape), _F32)
    extra = {} if interpret is None else {"interpret": interpret}

    def tree_attention(*refs: Any) -> None:
        kernel.body(dict(zip(names, refs[: len(names)], strict=True)), refs[len(names) :])

    found = plgpu.kernel(
        tree_attention, out_type=[whole] if kernel.splits == 1 else [part] * 3, grid=(kernel.programs,),
        grid_names=("program",), **extra,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*ins.values())  # fmt: skip
    if kernel.splits == 1:
        return found[0]
    acc, top, total = found
    best = top.max(axis=0)
    sinks = ins["sinks"][None, None, :, None] if kernel.sinks else None
    if sinks is not None:
        best = jnp.maximum(best, sinks)
    weight = jnp.exp2(top - best[None])
    total = (total * weight).sum(axis=0)
    if sinks is not None:
        total = total + jnp.exp2(sinks - best)
    return ((acc * weight).sum(axis=0) / total).astype(ins["q"].dtype)


def tree_attention(args: TreeAttentionArgs, *, splits: int | None = None, interpret: Any = None) -> jax.Array:
    """See api.tree_attention.

    Args:
      splits: stretches of the keys; by the shapes and the device at hand where None.
      interpret: parameters of Pallas' interpreter for GPUs.
    """
    (b, n, h, c), (t, g) = args.q_BNHC.shape, args.tree_k_BTGC.shape[1:3]
    values, first = (c, c) if args.value_channels is None else (args.value_channels, 0)
    shape = b, n, t, h, g, c, values, first, args.tree_mask_BNT is None, args.window is not None, args.factor
    kernel = Kernel(*shape, args.soft_cap, args.sinks_H is not None, 1, interpret is not None)
    if splits is None:
        kind = device_kind().lower()
        count = next((count for name, count in MULTIPROCESSORS.items() if name in kind), 132)
        capacity = args.table_BM.shape[1] * args.pages.shape[2]
        splits = max(1, min(_PER_MULTIPROCESSOR * count // kernel.programs, capacity // (4 * KEYS)))
    ins = {
        "q": args.q_BNHC, "k": args.tree_k_BTGC, "v": args.tree_v_BTGC, "pages": args.pages,
        "table": args.placed().table_BM, "length": args.length_B,
    }  # fmt: skip
    if args.tree_mask_BNT is not None:
        ins["mask"] = jnp.pad(args.tree_mask_BNT, ((0, 0), (0, 0), (0, -t % KEYS))).astype(_I32)
    if args.window is not None:
        lowest = args.length_B[:, None] + args.offsets - (args.window - 1)
        ins["lowest"] = jnp.maximum(lowest, 0).astype(_I32)
    if args.sinks_H is not None:
        ins["sinks"] = args.sinks_H.astype(_F32) * _LOG2E
    return _attend(dataclasses.replace(kernel, splits=splits), ins, interpret=interpret)
