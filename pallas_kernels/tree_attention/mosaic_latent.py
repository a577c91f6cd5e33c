"""Latent attention on Mosaic GPU for Hopper: all heads share one vector a token, whose first channels are its value.

A program owns a request, 64 query rows (node-major, so that the heads of a node lie side by side) and one of S
stretches of the keys; it brings each block of keys once, for scores and for values. Of its two warpgroups both score
all 64 rows, and each adds up one half of the values' channels: sums of 512 would not fit one's registers, and what is
scored twice needs no exchange between them. One of them asks for keys besides: a third would take registers that they
lack (see gpu_mosaic). The order of blocks, the masks and the merge are `mosaic_wide`'s. FlashMLA
(github.com/deepseek-ai/FlashMLA) shares the channels out in the same way, but scores once and passes weights through
shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sizes import MULTIPROCESSORS, device_kind
from pallas_kernels.tree_attention import mosaic_rows, mosaic_wide
from pallas_kernels.tree_attention.mosaic_rows import MASKED, ROWS, div, params, rem
from pallas_kernels.tree_attention.mosaic_walk import Walk
from pallas_kernels.tree_attention.mosaic_wide import Blocks
from pallas_kernels.tree_attention.mosaic_wide_launch import PART, ROW, SUMS
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

#: Warpgroups.
_TEAMS = 2
_SHARED, _ROOM = 232448, 3072
_F32 = jnp.float32


def refusal(args: TreeAttentionArgs) -> str | None:
    """Why this kernel cannot serve these arguments, or None."""
    q, c, page, values = args.q_BNHC, args.q_BNHC.shape[3], args.pages.shape[2], args.value_channels
    if values is None:
        return "values are not part of their keys"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype must be bfloat16 or float16, got {q.dtype}"
    dtypes = [x.dtype for x in (q, args.pages, args.tree_k_BTGC)]
    if any(dtype != q.dtype for dtype in dtypes):
        return f"q, pages and tree_k must share a dtype, got {', '.join(map(str, dtypes))}"
    if values not in (128, 256, 512):
        return f"values inside keys must be 128, 256 or 512 channels, got {values}"
    if c % 64 or c > 576:
        return f"keys with values inside must be a multiple of 64 channels up to 576, got {c}"
    if page & (page - 1) or page < 8:
        return f"page size must be a power of two of at least 8, got {page}"
    if args.tree_k_BTGC.shape[2] != 1:
        return f"there must be one KV head, got {args.tree_k_BTGC.shape[2]}"
    if args.factor <= 0:
        return f"scale must be positive, got {args.factor}"
    found = {"a window": args.window, "a soft cap": args.soft_cap, "sinks": args.sinks_H}
    return next((f"{name} with values inside keys" for name, value in found.items() if value is not None), None)


def slower(args: TreeAttentionArgs) -> str | None:
    """Always None: Triton takes 1 us less for short requests of one token, and 9 for one of 32k with 16 heads."""
    return None


@dataclasses.dataclass(frozen=True)
class Kernel(mosaic_wide.Kernel):
    """One launch; `teams` is 1, as all warpgroups of a program have the same query rows.

    Attributes:
      values: channels of values.
    """

    values: int

    @property
    def half(self) -> int:
        """Channels of values of a warpgroup."""
        return self.values // _TEAMS

    @property
    def results(self) -> mosaic_wide.Kernel:
        """Results and partial sums as of two KV heads, each a half of the values' channels."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(mosaic_wide.Kernel)}
        heads: dict[str, Any] = dict(nodes=self.rows, heads=_TEAMS, kv_heads=_TEAMS, head_dim=self.half)
        return mosaic_wide.Kernel(**fields | heads)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        shape = lambda *rows: plgpu.SMEM((*rows, self.head_dim), dtype, transforms=mosaic_rows.tiled())
        barrier = lambda count, arrivals: plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)
        return {
            "q": shape(ROWS), "k": shape(self.stages, self.keys), "q_full": barrier(1, 1),
            "k_full": barrier(self.stages, self.pieces), "k_empty": barrier(self.stages, _TEAMS),
            "scored": barrier(1, _TEAMS), "clean": barrier(1, 1),
        }  # fmt: skip

    def body(self, ins: dict[str, Any], outs: tuple[Any, ...], shared: dict[str, Any]) -> None:
        """A warpgroup of a program: the first one brings queries and keys, too."""
        p, team = lax.axis_index("program"), lax.axis_index("team")
        b, rest = rem(p, self.batch), div(p, self.batch)
        block, split = self.blocks - 1 - div(rest, self.splits), rem(rest, self.splits)
        walk = Walk.of(self, ins["length"][b], jnp.int32(0), jnp.int32(0), block, split)

        @pl.when(team == 0)
        def _() -> None:
            self.ask(ins["q"], b, block, shared)
            for i in range(self.stages):
                step = walk.begin + i
                bring = functools.partial(self.bring_keys, walk, b, ins, shared, step, self.numbers(walk, step, b, ins))
                pl.when(step < walk.end)(bring)

        self.attend(walk, b, block, split, team, ins, outs, shared)
        for slot in range(self.stages if self.interpret else 0):  # it wants each end of a wait to be seen
            used = (team == 0) & (walk.begin + slot < walk.end)
            pl.when(used)(functools.partial(plgpu.barrier_wait, shared["k_empty"].at[slot]))

    def ask(self, ref: Any, b: Any, block: Any, shared: dict[str, Any]) -> None:
        """A tile of [B, rows, C] to shared memory; behind the last row the copy engine finds zeros."""
        if not self.interpret:
            plgpu.copy_gmem_to_smem(ref.at[b, pl.ds(block * ROWS, ROWS)], shared["q"], shared["q_full"])
            return
        at = block * ROWS + jnp.arange(ROWS)
        shared["q"][...] = jnp.where((at < self.rows)[:, None], ref[b][jnp.clip(at, 0, self.rows - 1)], 0)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared["q_full"])

    def bring_keys(
        self, walk: Walk, b: Any, ins: dict[str, Any], shared: dict[str, Any], step: Any, numbers: tuple[Any, ...]
    ) -> None:
        """A step's keys to the ring, whose slot is free."""
        slot = rem(step - walk.begin, self.stages)
        prefix, block = walk.place(step)
        full = shared["k_full"].at[slot]
        piece = lambda i: shared["k"].at[slot, pl.ds(i * self.piece, self.piece)]

        @pl.when(prefix)
        def _() -> None:
            for i, number in enumerate(numbers):
                row = rem(block * self.keys, self.page) if self.page > self.keys else 0
                source = ins["pages"].at[number, 0, pl.ds(row, self.piece), pl.ds(0, self.head_dim)]
                plgpu.copy_gmem_to_smem(source, piece(i), full)

        @pl.when(jnp.logical_not(prefix))
        def _() -> None:
            for i in range(self.pieces):
                self.bring_new(ins["k"], b, block * self.keys + i * self.piece, 0, piece(i), full)

    def clean_keys(self, walk: Walk, shared: dict[str, Any], step: Any) -> None:
        """What a mask hides weighs 0, but 0 * NaN is NaN: it is cleaned between scores, which broken keys must reach,
        and values."""
        slot, (prefix, block) = rem(step - walk.begin, self.stages), walk.place(step)
        plgpu.barrier_wait(shared["scored"])
        high = jnp.where(prefix, walk.length, self.entries) - block * self.keys
        for i in range(self.keys // ROWS):
            self.clean(shared["k"].at[slot, pl.ds(i * ROWS, ROWS)], (-i * ROWS, high - i * ROWS))
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared["clean"])

    def attend(
        self, walk: Walk, b: Any, block: Any, split: Any, team: Any, ins: dict[str, Any], outs: tuple[Any, ...],
        shared: dict[str, Any],
    ) -> None:  # fmt: skip
        """Attention of a program's rows to its keys, of one half of the values' channels."""
        full = lambda shape, value, layout: self.cast(jnp.full(shape, value, _F32), layout)
        nothing = full((ROWS, self.half), 0.0, SUMS), full((ROWS,), MASKED, ROW), full((ROWS,), 0.0, ROW)
        ahead = self.numbers(walk, walk.begin + self.stages, b, ins)
        plgpu.barrier_wait(shared["q_full"])
        step = functools.partial(self.add_step, walk, b, block, team, ins, shared)
        whole = jnp.clip(walk.whole, walk.begin, walk.end)
        carry = lax.fori_loop(walk.begin, whole, functools.partial(step, False), (ahead, *nothing))
        _, acc, top, total = lax.fori_loop(whole, walk.end, functools.partial(step, True), carry)
        results, total = self.results, self.settle(total)
        if self.splits == 1:
            out = (acc * self.along(1.0 / total, self.half)).astype(outs[0].dtype)
            results.put(outs[0], out, b, team, block)
        else:
            at = ((split * self.batch + b) * _TEAMS + team) * self.tiles + block
            results.spill(outs, (acc, top, total), at, block)

    def add_step(
        self, walk: Walk, b: Any, block: Any, team: Any, ins: dict[str, Any], shared: dict[str, Any], masked: bool,
        step: Any, carry: tuple[Any, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Adds a step's keys, and asks for those that its slot has next, whose pages are known."""
        slot = rem(step - walk.begin, self.stages)
        k = shared["k"].at[slot]
        seen = self.seen(walk, b, block, ins, step) if masked else ()
        plgpu.barrier_wait(shared["k_full"].at[slot])
        s = self.scores(shared["q"], k, lambda: None)
        if masked:
            if self.interpret:  # its reads are not wgmma's
                plgpu.commit_smem()
            plgpu.barrier_arrive(shared["scored"])
            pl.when(team == 0)(functools.partial(self.clean_keys, walk, shared, step))
            s = self.hide(s, seen)
        numbers, acc, top, total = carry
        p, acc, top, total = self.weights(s, acc, top, total, self.scale, k.dtype)
        if not self.interpret:  # exponentials are not to wait for what follows
            acc, top, total, p = lax.optimization_barrier((acc, top, total, p))
        if masked:
            plgpu.barrier_wait(shared["clean"])
        acc = self.weighted(acc, p, shared["k"].at[slot, :, pl.ds(team * self.half, self.half)])
        self.done("k", slot, shared)
        ahead = step + self.stages

        @pl.when((team == 0) & (ahead < walk.end))
        def _() -> None:
            plgpu.barrier_wait(shared["k_empty"].at[slot])
            self.bring_keys(walk, b, ins, shared, ahead, numbers)

        return self.numbers(walk, ahead + 1, b, ins), acc, top, total


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("interpret",))
def _attend(kernel: Kernel, ins: dict[str, jax.Array], *, interpret: Any = None) -> jax.Array:
    """Results [B, rows, 2, half of the values' channels], by one launch or two."""
    names, dtype, scratch, half = list(ins), ins["q"].dtype, kernel.scratch(ins["q"].dtype), kernel.half
    whole = jax.ShapeDtypeStruct((kernel.batch, kernel.rows, _TEAMS, half), dtype)
    items = kernel.splits * kernel.batch * _TEAMS * kernel.tiles
    parts = [jax.ShapeDtypeStruct((items, ROWS, *more), _F32) for more in ((half,), (), ())]
    outs = [whole] if kernel.splits == 1 else parts
    extra = {} if interpret is None else {"interpret": interpret}

    def tree_attention(*refs: Any) -> None:
        of_outs = refs[len(names) : len(names) + len(outs)]
        shared = dict(zip(scratch, refs[len(names) + len(outs) :], strict=True))
        kernel.body(dict(zip(names, refs[: len(names)], strict=True)), of_outs, shared)

    found = plgpu.kernel(
        tree_attention, out_type=outs, scratch_types=tuple(scratch.values()), grid=(kernel.clusters,),
        grid_names=("program",), num_threads=_TEAMS, thread_name="team", compiler_params=params(), **extra,
    )(*ins.values())  # fmt: skip
    if kernel.splits == 1:
        return found[0]

    def tree_attention_merge(*refs: Any) -> None:
        kernel.results.merge(refs[:3], refs[3])

    return plgpu.kernel(
        tree_attention_merge, out_type=whole, grid=(items // kernel.splits * (half // PART),),
        grid_names=("program",), compiler_params=params(), **extra,
    )(*found)  # fmt: skip


def tree_attention(args: TreeAttentionArgs, *, blocks: Blocks | None = None, interpret: Any = None) -> jax.Array:
    """See api.tree_attention.

    Args:
      blocks: sizes; by the shapes and the device at hand where None. `teams` is not read.
      interpret: parameters of Pallas' interpreter for GPUs.
    """
    blocks = blocks or Blocks()
    (b, n, h, c), t, page = args.q_BNHC.shape, args.tree_k_BTGC.shape[1], args.pages.shape[2]
    assert args.value_channels is not None
    keys, programs = blocks.keys or ROWS, b * -(-n * h // ROWS)
    stages = blocks.stages or (_SHARED - _ROOM - 2 * ROWS * c) // (2 * keys * c)
    splits = blocks.splits
    if splits is None:
        kind = device_kind().lower()
        count = next((count for name, count in MULTIPROCESSORS.items() if name in kind), 132)
        splits = max(1, min(count // programs, args.table_BM.shape[1] * page // (2 * keys)))
    kernel = Kernel(
        b, n, t, h, 1, c, c, page, args.tree_mask_BNT is None, False, args.factor, None, False, splits, keys, 1, 1,
        stages, interpret is not None, args.value_channels,
    )  # fmt: skip
    rows = jnp.pad(args.q_BNHC.reshape(b, n * h, c), ((0, 0), (0, -(n * h) % 8), (0, 0)))
    ins = {
        "q": rows, "k": mosaic_wide.whole_tiles(args.tree_k_BTGC), "pages": args.pages, "table": args.placed().table_BM,
        "length": args.length_B,
    }  # fmt: skip
    if args.tree_mask_BNT is not None:
        ins["mask"] = mosaic_wide.whole_words(args.tree_mask_BNT)
    return _attend(kernel, ins, interpret=interpret).reshape(b, n, h, args.value_channels)
