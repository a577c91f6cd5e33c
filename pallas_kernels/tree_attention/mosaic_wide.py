"""Tree attention on Mosaic GPU for Hopper where a KV head has many query rows: chunks of prompts and wide trees.

A program owns a request, a KV head, 64 query rows for each of its computing warpgroups (node-major, so that the heads
of a group lie side by side) and one of S stretches of the keys; another warpgroup brings it blocks of keys through a
ring in shared memory. Two programs of neighbouring rows are a cluster, and each brings half of a block to both. Steps
come in this order: blocks of the prefix and of the new tokens that every row sees whole, then those that are masked
somewhere (the prefix's last, those at a window's edge, the new tokens at the diagonal or under a tree's bits). Without
a mask a program stops at its last row's diagonal, and those with the most to do are launched first. A second kernel
merges the stretches' sums where there are several.

The computing warpgroups take turns: while one keeps the tensor cores busy the other takes exponentials. Arithmetic
bounds these calls, so their bits follow what is computed together (`gpu_mosaic` has the kernel whose bits do not).
The structure is FlashAttention-3's (Shah et al., 2024, sections 3.1 and 3.2).
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
from pallas_kernels.tree_attention import mosaic_heads
from pallas_kernels.tree_attention.mosaic_rows import MASKED, ROWS, div, params, rem
from pallas_kernels.tree_attention.mosaic_walk import Walk
from pallas_kernels.tree_attention.mosaic_wide_launch import AHEAD, PART, ROW, SUMS, Launch
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

#: Registers of a thread that computes, and of one that brings keys, by the number of computing warpgroups.
_REGISTERS = {1: (232, 56), 2: (232, 40)}
_SHARED, _ROOM = 232448, 3072
#: Bytes of a ring beyond which programs that read the same keys drift apart, where two warpgroups compute.
_RING = 128 << 10
#: Requests times KV heads of few rows that have a multiprocessor each.
MOST_FEW = 132
_LOG2E = math.log2(math.e)
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
    if (why := mosaic_heads.refusal(c, 64, 128, 256)) is not None:
        return why
    if page & (page - 1) or page < 8:
        return f"page size must be a power of two of at least 8, got {page}"
    if args.factor <= 0:
        return f"scale must be positive, got {args.factor}"
    return None


def slower(args: TreeAttentionArgs) -> str | None:
    """Where Triton's kernel takes less time, or None."""
    channels = args.q_BNHC.shape[3]
    if args.rows > ROWS:
        return None
    if not mosaic_heads.fills(channels):
        return f"few rows of heads of {channels} channels are padded and cut around it"
    if args.units <= MOST_FEW or channels > 128:
        return None
    return f"of few rows it is for at most {MOST_FEW} requests times KV heads of 128 channels or less, got {args.units}"


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of a launch.

    Attributes:
      keys: of a step, 64 or 128; None: as many as registers hold.
      teams: computing warpgroups of a program, 64 query rows each; None: two, but one for 64 rows or fewer.
      stages: blocks of a ring; None: what fits, but no more than pay where two warpgroups compute.
      splits: stretches of the keys; None: by the programs.
      members: programs of a cluster; None: two, if their number is even.
    """

    keys: int | None = None
    teams: int | None = None
    stages: int | None = None
    splits: int | None = None
    members: int | None = None


@dataclasses.dataclass(frozen=True)
class Kernel(Launch):
    """What the programs of a launch do."""

    def body(self, ins: dict[str, Any], outs: tuple[Any, ...], shared: dict[str, Any]) -> None:
        """A warpgroup of a program: the first ones compute, the last one brings keys."""
        p, thread = lax.axis_index("program"), lax.axis_index("team")
        head, b = rem(p, self.kv_heads), rem(div(p, self.kv_heads), self.batch)
        rest = div(p, self.kv_heads * self.batch)
        block, split = self.blocks - 1 - div(rest, self.splits), rem(rest, self.splits)
        length = ins["length"][b]
        first, last = (ins["edges"][i, b, block] if self.window else jnp.int32(0) for i in range(2))

        def walk() -> Walk:
            found = Walk.of(self, length, first, last, block, split)
            return dataclasses.replace(found, begin=self.uniform(found.begin), end=self.uniform(found.end))

        @pl.when(thread < self.teams)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[self.teams][0], action="increase")
            member = lax.axis_index("member") if self.members > 1 else 0
            tile = (block * self.members + member) * self.teams + thread
            for slot in range(self.stages):
                plgpu.barrier_arrive(shared["k_empty"].at[slot])
                plgpu.barrier_arrive(shared["v_empty"].at[slot])
            self.fill(shared["q"].at[thread], ins["q"], b, head, tile)
            self.compute(walk(), b, head, tile, split, thread, ins, outs, shared)

        @pl.when(thread == self.teams)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[self.teams][1], action="decrease")
            self.prefetch(ins["table"], b)
            steps = walk()
            bring = functools.partial(self.bring, steps, b, head, ins, shared)
            lax.fori_loop(steps.begin, steps.end, bring, (jnp.int32(0), *self.numbers(steps, steps.begin, b, ins)))
            for slot in range(self.stages):
                plgpu.barrier_wait(shared["k_empty"].at[slot])
                plgpu.barrier_wait(shared["v_empty"].at[slot])

    # The warpgroup that brings keys.

    def numbers(self, walk: Walk, step: Any, b: Any, ins: dict[str, Any]) -> tuple[Any, ...]:
        """Of the pages that hold a step's keys, or any where they hold none."""
        prefix, block = walk.place(jnp.minimum(step, walk.end - 1))
        found = []
        for i in range(self.pieces):
            at = block * self.keys + i * self.piece
            held = prefix & (at < walk.length)
            number = ins["table"][b, jnp.where(held, div(at, self.page), 0)]
            found.append(jnp.where(held, number, 0))
        return tuple(found)

    def bring(
        self, walk: Walk, b: Any, head: Any, ins: dict[str, Any], shared: dict[str, Any], step: Any,
        carry: tuple[Any, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """A step's keys and values to the ring; the next step's slot and pages."""
        (slot, *numbers), later = carry, self.numbers(walk, step + 1, b, ins)
        prefix, block = walk.place(step)
        masked = step >= walk.whole
        for name, begin in (("k", 0), ("v", 2 * self.channels - self.head_dim)):
            to, full = shared[name], shared[f"{name}_full"]
            plgpu.barrier_wait(shared[f"{name}_empty"].at[slot])
            # What a mask hides weighs 0, but 0 * NaN is NaN: such values go through a barrier of their own and are
            # cleaned. One for each slot: a cluster's other member may have brought its half of the next step already.
            barrier = full.at[slot if name == "k" else jnp.where(masked, self.stages + slot, slot)]

            @pl.when(prefix)
            def _(to: Any = to, begin: int = begin, barrier: Any = barrier) -> None:
                for i, number in enumerate(numbers):
                    row = rem(block * self.keys, self.page) if self.page > self.keys else 0
                    source = ins["pages"].at[number, head, pl.ds(row, self.piece), pl.ds(begin, self.head_dim)]
                    target = to.at[slot, pl.ds(i * self.piece, self.piece)]
                    self.copy(source, target, barrier)

            @pl.when(jnp.logical_not(prefix))
            def _(to: Any = to, name: str = name, barrier: Any = barrier) -> None:
                for i in range(self.pieces):
                    self.bring_new(
                        ins[name], b, block * self.keys + i * self.piece, head,
                        to.at[slot, pl.ds(i * self.piece, self.piece)], barrier,
                    )  # fmt: skip

        @pl.when(masked)
        def _() -> None:
            plgpu.barrier_wait(shared["v_full"].at[self.stages + slot])
            low = jnp.where(prefix, walk.lowest - block * self.keys, 0)
            high = jnp.where(prefix, walk.length, self.entries) - block * self.keys
            for i in range(self.keys // ROWS):
                self.clean(shared["v"].at[slot, pl.ds(i * ROWS, ROWS)], (low - i * ROWS, high - i * ROWS))
            plgpu.commit_smem()
            for _ in range(self.pieces):
                plgpu.barrier_arrive(shared["v_full"].at[slot])

        return self.next(slot), *later

    # The warpgroups that compute.

    def compute(
        self, walk: Walk, b: Any, head: Any, tile: Any, split: Any, team: Any, ins: dict[str, Any],
        outs: tuple[Any, ...], shared: dict[str, Any],
    ) -> None:  # fmt: skip
        """Attention of 64 rows, whose queries have been filled in, to a program's keys."""
        q = shared["q"].at[team]
        plgpu.commit_smem()
        full = lambda shape, value, layout: self.cast(jnp.full(shape, value, _F32), layout)
        top, total = full((ROWS,), MASKED, ROW), full((ROWS,), 0.0, ROW)
        if self.sinks:
            # A sink is the first entry of the first stretch: a score, and no value.
            first = jnp.where(split == 0, 1.0, 0.0)
            sink = self.vector(ins["sinks"].at[head, tile])
            top, total = sink * first + top * (1.0 - first), total + self.begun(first)
        if self.turns:
            pl.when(team == 1)(lambda: self.take_turn(team, shared))
        step = functools.partial(self.step, walk, b, tile, team, ins, shared, q)
        start = jnp.int32(0), full((ROWS, self.head_dim), 0.0, SUMS), top, total
        whole = self.uniform(jnp.clip(walk.whole, walk.begin, walk.end))
        carry = lax.fori_loop(walk.begin, whole, functools.partial(step, False), start)
        _, *sums = lax.fori_loop(whole, walk.end, functools.partial(step, True), carry)
        if self.turns:
            pl.when(team == 0)(lambda: self.pass_turn(team, shared))
        acc, top, total = sums
        total = self.settle(total)
        if self.splits == 1:
            out = (acc * self.along(1.0 / total, self.head_dim)).astype(outs[0].dtype)
            self.drain(q, outs[0], out, b, head, tile)
        else:
            at = ((split * self.batch + b) * self.kv_heads + head) * self.tiles + tile
            self.spill(outs, (acc, top, total), at, tile)

    def step(
        self, walk: Walk, b: Any, tile: Any, team: Any, ins: dict[str, Any], shared: dict[str, Any], q: Any,
        masked: bool, step: Any, carry: tuple[Any, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Adds a step's keys, which a slot of the ring has, to the sums; the next step's slot comes with them."""
        slot, acc, top, total = carry
        k, v = shared["k"].at[slot], shared["v"].at[slot]
        seen = self.seen(walk, b, tile, ins, step) if masked else ()
        plgpu.barrier_wait(shared["k_full"].at[slot])
        s = self.scores(q, k, lambda: self.pass_turn(team, shared))
        self.done("k", slot, shared)
        if self.soft_cap is not None:
            # cap * tanh(s / cap): the hardware's tanh is off by up to 2 ** -11, which is too much of a large cap.
            power = jnp.exp2(s * (2 * _LOG2E * self.factor / self.soft_cap))
            s = self.soft_cap - (2 * self.soft_cap) / (1.0 + power)
        if masked:
            s = self.hide(s, seen)
        p, acc, top, total = self.weights(s, acc, top, total, self.scale, v.dtype)
        if self.turns and not self.interpret:
            acc, top, total, p = lax.optimization_barrier((acc, top, total, p))
        plgpu.barrier_wait(shared["v_full"].at[slot])
        self.take_turn(team, shared)
        acc = self.weighted(acc, p, v)
        self.done("v", slot, shared)
        return self.next(slot), acc, top, total

    def done(self, name: str, slot: Any, shared: dict[str, Any]) -> None:
        """Says that a block of keys or values may be written over."""
        if self.interpret:  # its reads are not wgmma's
            plgpu.commit_smem()
        plgpu.barrier_arrive(shared[f"{name}_empty"].at[slot])

    @property
    def scale(self) -> float:
        """What makes powers of two of scores."""
        return _LOG2E * (self.factor if self.soft_cap is None else 1.0)

    def seen(self, walk: Walk, b: Any, tile: Any, ins: dict[str, Any], step: Any) -> tuple[jax.Array, ...]:
        """Which keys of a step a tile's rows see: a bit for each, 32 in a word, each uint32 [64]."""
        prefix, block = walk.place(step)
        begin, one, words = block * self.keys, prefix.astype(_I32), self.keys // 32
        if self.causal:
            node = div(tile * ROWS + self.row_numbers(), self.group)
            end = node * (1 - one) + 1 + (walk.length - 1) * one - begin
            found = [_below(end - 32 * w) for w in range(words)]
        else:
            own = self.bits(ins["mask"], b, tile, jnp.where(prefix, 0, begin), words)
            end = (walk.length - begin) * one
            found = [_below(end - 32 * w) | word * (1 - one).astype(jnp.uint32) for w, word in enumerate(own)]
        if self.window:
            # The new tokens that a window hides are the mask's business.
            low = self.vector(ins["lowest"].at[b, tile]) * one - begin
            found = [word & ~_below(low - 32 * w) for w, word in enumerate(found)]
        return tuple(found)

    def merge(self, ins: tuple[Any, ...], out: Any) -> None:
        """The stretches' sums of a few channels of a tile as one result; those to come are read meanwhile."""
        each = self.batch * self.kv_heads * self.tiles
        program = lax.axis_index("program")
        p, part = div(program, self.head_dim // PART), rem(program, self.head_dim // PART)
        tile, head, b = rem(p, self.tiles), rem(div(p, self.tiles), self.kv_heads), div(p, self.tiles * self.kv_heads)

        def fetch(split: Any) -> tuple[Any, ...]:
            return self.fetch(ins, jnp.minimum(split, self.splits - 1) * each + p, tile, part)

        def add(split: Any, carry: Any) -> Any:
            (acc, top, total), (acc_j, top_j, total_j), *later = carry
            then = fetch(split + AHEAD)
            new = jnp.maximum(top, top_j)
            keep, weight = jnp.exp2(top - new), jnp.exp2(top_j - new)
            acc = acc * self.along(keep, PART) + acc_j * self.along(weight, PART)
            return (acc, new, total * keep + total_j * weight), *later, then

        begin = tuple(fetch(jnp.int32(i)) for i in range(AHEAD + 1))
        (acc, _, total), *_ = lax.fori_loop(1, self.splits, add, begin)
        self.put(out, (acc * self.along(1.0 / total, PART)).astype(out.dtype), b, head, tile, part)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("interpret",))
def _attend(kernel: Kernel, ins: dict[str, jax.Array], *, interpret: Any = None) -> jax.Array:
    """Results like q, by one launch or two."""
    names, q, scratch = list(ins), ins["q"], kernel.scratch(ins["q"].dtype)
    whole = jax.ShapeDtypeStruct(q.shape, q.dtype)
    items = kernel.splits * kernel.batch * kernel.kv_heads * kernel.tiles
    parts = [jax.ShapeDtypeStruct((items, ROWS, *more), _F32) for more in ((kernel.head_dim,), (), ())]
    outs = [whole] if kernel.splits == 1 else parts
    extra = {} if interpret is None else {"interpret": interpret}

    def tree_attention(*refs: Any) -> None:
        of_outs = refs[len(names) : len(names) + len(outs)]
        shared = dict(zip(scratch, refs[len(names) + len(outs) :], strict=True))
        kernel.body(dict(zip(names, refs[: len(names)], strict=True)), of_outs, shared)

    cluster = {"cluster": (kernel.members,), "cluster_names": ("member",)} if kernel.members > 1 else {}
    found = plgpu.kernel(
        tree_attention, out_type=outs, scratch_types=tuple(scratch.values()), grid=(kernel.clusters,),
        grid_names=("program",), num_threads=kernel.teams + 1, thread_name="team", compiler_params=params(), **cluster,
        **extra,
    )(*ins.values())  # fmt: skip
    if kernel.splits == 1:
        return found[0]

    def tree_attention_merge(*refs: Any) -> None:
        kernel.merge(refs[:3], refs[3])

    return plgpu.kernel(
        tree_attention_merge, out_type=whole, grid=(items // kernel.splits * (kernel.head_dim // PART),),
        grid_names=("program",), compiler_params=params(), **extra,
    )(*found)  # fmt: skip


def kernel_of(args: TreeAttentionArgs, blocks: Blocks | None = None, *, interpret: bool = False) -> Kernel:
    """The launch for these arguments."""
    blocks = blocks or Blocks()
    (b, n, h, channels), (t, g) = args.q_BNHC.shape, args.tree_k_BTGC.shape[1:3]
    c = mosaic_heads.whole(channels)
    page, keys = args.pages.shape[2], blocks.keys or (64 if c > 128 else 128)
    if keys not in (64, 128):
        raise ValueError(f"keys of a step must be 64 or 128, got {keys}")
    teams = blocks.teams or (1 if n * (h // g) <= ROWS else 2)
    each = -(-n * (h // g) // (ROWS * teams))
    members = blocks.members or (1 if each % 2 else 2)
    room = _SHARED - _ROOM - 2 * teams * ROWS * c
    stages = blocks.stages or (min(room, _RING) if teams == 2 else room) // (4 * keys * c)
    programs = b * g * -(-each // members) * members
    splits = blocks.splits
    if splits is None:
        kind = device_kind().lower()
        count = next((count for name, count in MULTIPROCESSORS.items() if name in kind), 132)
        splits = max(1, min(count // programs, args.table_BM.shape[1] * page // (2 * keys)))
    return Kernel(
        b, n, t, h, g, c, channels, page, args.tree_mask_BNT is None, args.window is not None, args.factor,
        args.soft_cap, args.sinks_H is not None, splits, keys, teams, members, stages, interpret,
    )  # fmt: skip


def tree_attention(args: TreeAttentionArgs, *, blocks: Blocks | None = None, interpret: Any = None) -> jax.Array:
    """See api.tree_attention.

    Args:
      blocks: sizes; by the shapes and the device at hand where None.
      interpret: parameters of Pallas' interpreter for GPUs.
    """
    kernel = kernel_of(args, blocks, interpret=interpret is not None)
    args = mosaic_heads.widened(args)
    ins = {
        "q": args.q_BNHC, "k": whole_tiles(args.tree_k_BTGC), "v": whole_tiles(args.tree_v_BTGC), "pages": args.pages,
        "table": args.placed().table_BM, "length": args.length_B,
    }  # fmt: skip
    if args.tree_mask_BNT is not None:
        ins["mask"] = whole_words(args.tree_mask_BNT)
    if args.sinks_H is not None:
        sinks = (args.sinks_H.astype(_F32) * _LOG2E).reshape(kernel.kv_heads, 1, kernel.group)
        sinks = jnp.broadcast_to(sinks, (kernel.kv_heads, kernel.nodes, kernel.group))
        ins["sinks"] = _tiles(sinks.reshape(kernel.kv_heads, kernel.rows), kernel)
    if args.window is not None:
        lowest = jnp.maximum(args.length_B[:, None] + args.offsets - (args.window - 1), 0).astype(_I32)
        ins["lowest"] = _tiles(jnp.repeat(lowest, kernel.group, axis=1), kernel)
        of_blocks = ins["lowest"].reshape(kernel.batch, kernel.blocks, -1)
        ins["edges"] = jnp.stack([of_blocks.min(axis=2), of_blocks.max(axis=2)])
    return mosaic_heads.narrowed(_attend(kernel, ins, interpret=interpret), kernel.channels)


def _below(count: Any) -> Any:
    """The first `count` bits of a word, none of a negative count and all from 32 on."""
    ones = jnp.full_like(count, -1).astype(jnp.uint32)
    return jnp.where(count > 0, lax.shift_right_logical(ones, jnp.clip(32 - count, 0, 31).astype(jnp.uint32)), 0)


def whole_words(mask_BNT: jax.Array) -> jax.Array:
    """A mask whose entries are whole words of 4 bytes; nobody sees those that come to it."""
    return jnp.pad(mask_BNT.astype(jnp.bool_), ((0, 0), (0, 0), (0, -mask_BNT.shape[2] % 4)))


def whole_tiles(x_BTGC: jax.Array) -> jax.Array:
    """New tokens as whole tiles of 8 rows for each request: the copy engine begins at no other row."""
    return jnp.pad(x_BTGC, ((0, 0), (0, -x_BTGC.shape[1] % 8), (0, 0), (0, 0)))


def _tiles(x: jax.Array, kernel: Kernel) -> jax.Array:
    """Values of a KV head's rows [..., rows] as [..., tiles, 64]; those behind the last are like it."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, kernel.tiles * ROWS - kernel.rows)]
    return jnp.pad(x, padding, mode="edge").reshape(*x.shape[:-1], kernel.tiles, ROWS)
