"""Tree rejection sampling for NVIDIA GPUs: Pallas on Triton, one launch, a team of programs a request.

The S members of a request's team own a stretch of the vocabulary each and walk the tree
together (`gpu_rows` has the sweeps). Only rows on the path are read:

    logits [B, N, V]      a node's row = chunk | chunk | chunk | ... ; a member sweeps its chunks
    table  [B, 2, words]  where members leave partial results for each other, a few KB a request

How members exchange. A value travels as two words, each 16 bits of it and a 16-bit tag: the
number of the exchange. A reader spins until every word bears the tag, so that a word validates
itself; no fence, flag or counter orders it against another. Slots alternate with the parity
of the exchange: who overwrites a slot has read all words of the exchange between, and their
writers wrote them after they had read the slot. A word left from earlier bears another tag:
they repeat after 65,535 exchanges, and `refusal` keeps walks shorter.

Why spinning ends. All programs are resident at once: `ctas_per_sm` a multiprocessor are
launched at most, which fit whatever registers they take (8 warps of 255 a thread are 65,280 of
65,536). Even where something else holds multiprocessors for good, programs start in order,
a team's members next to each other, so that a team needs room for itself only.

Must not know the engine. Traps of Pallas on Triton: loop bounds are int32, blocks are powers of
two, branches must not return literals, a scalar select of two literals is taken for bool,
masked-out indices are never clamped, and a while loop must not carry loaded tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import on_triton
from pallas_kernels.dispatch import triton as plgpu
from pallas_kernels.rejection_sampling.gpu_filters import Filters, survey, threshold, weigh
from pallas_kernels.rejection_sampling.gpu_rows import NONE, Pair, Program, Race, Team, elect, highest, table_words
from pallas_kernels.rejection_sampling.noise import GUMBEL_MAX, GUMBEL_MIN, PAIR, Purpose, threefry2x32, to_uniform
from pallas_kernels.rejection_sampling.reference import NO_RESIDUAL, RejectionSamplingArgs, Verdict
from pallas_kernels.sizes import MULTIPROCESSORS, device_kind, power_of_two

_i32, _u32, _f32 = jnp.int32, jnp.uint32, jnp.float32


@dataclasses.dataclass(frozen=True)
class Launch:
    """Sizes of a launch. Results depend on `chunk` and `warps` in the last bits of sums, on nothing else.

    Attributes:
      chunk: tokens that a member sweeps at once; a power of two, at least 256.
      warps: of a program.
      ctas_per_sm: programs that a multiprocessor is trusted to hold; at most 8 warps in all.
      num_sms: multiprocessors of the device.
      members: programs a request; None fills the device.
    """

    chunk: int = 2048
    warps: int = 4
    ctas_per_sm: int = 2
    num_sms: int = 132
    members: int | None = None

    def __post_init__(self) -> None:
        if self.chunk & (self.chunk - 1) or self.chunk < PAIR:
            raise ValueError(f"chunk must be a power of two of at least {PAIR}, got {self.chunk}")
        if not 1 <= self.warps * self.ctas_per_sm <= 8:
            raise ValueError(
                f"warps * ctas_per_sm must be at most 8, so that all programs are resident at once, "
                f"got {self.warps} * {self.ctas_per_sm}"
            )

    def split(self, batch: int, vocab: int) -> tuple[int, int]:
        """(members a request, chunks a member)."""
        chunks = -(-vocab // self.chunk)
        most = max(1, self.ctas_per_sm * self.num_sms // batch)
        members = min(chunks, most if self.members is None else self.members)
        if members > most:
            raise ValueError(f"members must be at most {most} for a batch of {batch}, got {self.members}")
        each = -(-chunks // members)
        return -(-chunks // each), each


def launch_for(device: str, greedy: bool = False) -> Launch:
    """The table of sizes; measured on an H200 (docs/kernels.md).

    Args:
      device: jax's device_kind, or "" for an unknown one, which is taken to be small.
      greedy: rows that draw no noise have registers for larger chunks.
    """
    count = next((n for chip, n in MULTIPROCESSORS.items() if re.search(rf"\b{chip}\b", device.lower())), 32)
    return Launch(chunk=4096 if greedy else 2048, num_sms=count)


def _launch_here(greedy: bool) -> Launch:
    launch = launch_for(kind := device_kind(), greedy)
    count = getattr(jax.devices()[0], "core_count", launch.num_sms)
    return dataclasses.replace(launch, num_sms=count) if kind else launch


def refusal(args: RejectionSamplingArgs) -> str | None:
    """Why the kernel cannot serve these arguments, or None."""
    logits, drafts, n = args.logits_BNV, args.draft_probs_BXV, args.logits_BNV.shape[1]
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits must be float32 or bfloat16, got {logits.dtype}"
    if drafts is not None and drafts.dtype != jnp.float32:
        return f"draft_probs must be float32, got {drafts.dtype}"
    if n > 256 or args.depth > 255:  # also bounds the exchanges of a walk
        return f"at most 256 nodes and a depth of at most 255, got {n} and {args.depth}"
    return None


@dataclasses.dataclass(frozen=True)
class _Tree:
    """A request's draft tree."""

    tokens_ref: Any
    parents_ref: Any
    request: jax.Array
    chain: bool

    @property
    def nodes(self) -> int:
        return self.tokens_ref.shape[1]

    def child(self, node: jax.Array, after: jax.Array, token: jax.Array | None = None) -> jax.Array:
        """The first child of `node` with an index above `after` (that holds `token`), or NONE."""
        n = self.nodes
        if self.chain:
            child = jnp.minimum(node + 1, n - 1)
            here = (child > node) & (child > after)
            if token is not None:
                here = here & (self.tokens_ref[self.request, child] == token)
            return jnp.where(here, child, NONE)
        node_N = jnp.arange(max(2, power_of_two(n)), dtype=_i32)
        load = lambda ref: plgpu.load(ref.at[self.request, node_N], mask=node_N < n, other=_i32(-1))
        match_N = (load(self.parents_ref) == node) & (node_N > jnp.maximum(after, 0))
        if token is not None:
            match_N = match_N & (load(self.tokens_ref) == token)
        return jnp.where(match_N, node_N, NONE).min()


class _Turn(NamedTuple):
    """What a node's visit leaves.

    Attributes:
      child: the accepted one, or NONE.
      token: drawn at the node; unspecified where that is left to the end.
      fine: whether the row is usable.
      a, log_total, cut: the residual at the node; 0 where nothing was rejected.
      step: exchanges so far.
    """

    child: jax.Array
    token: jax.Array
    fine: jax.Array
    a: jax.Array
    log_total: jax.Array
    cut: jax.Array
    step: jax.Array


def _draw(
    program: Program, tree: _Tree, node: jax.Array, step: jax.Array, ended: jax.Array,
    sampler: tuple[Filters, tuple[jax.Array, jax.Array]] | None = None
) -> _Turn:  # fmt: skip
    """The target's own token at a node; the child that holds it is accepted.

    Args:
      ended: whether the node is as deep as the tree.
      sampler: filters and the noise's key; None in a row that is known to be greedy.
    """
    if sampler is None:
        best, token = highest(program, node)
    else:
        filters, key = sampler
        assert program.sampled is not None
        tops_L = jnp.full(program.lane_L.shape, jnp.inf, _f32)

        def filtered() -> tuple[jax.Array, jax.Array, jax.Array]:
            tops_L, top, total, after = survey(program, node, step)
            cut, after = threshold(program, filters, node, after, tops_L, top, total)
            return jnp.where(program.live_L, tops_L, -jnp.inf), cut, after

        active = filters.active & program.sampled
        tops_L, cut, step = lax.cond(active, filtered, lambda: (tops_L, filters.top_p * 0.0 - jnp.inf, step))
        # Noise spans less than this: further under the maximum nothing wins.
        low = jnp.maximum(cut, jnp.where(active, tops_L.max() - (GUMBEL_MAX - GUMBEL_MIN), cut))
        above = program.above(tops_L, low)
        reach = lambda chunk: lax.cond(active, lambda: above(chunk).astype(_i32), lambda: chunk * 0 + 1) > 0
        race = lambda: Race(program, key, node, cut).run(reach)[:2]
        best, token = lax.cond(program.sampled, race, lambda: highest(program, node))
    token, fine, step = elect(program, step, best, token)
    child = jnp.where(ended, NONE, tree.child(node, node, token))
    zero = best * 0.0
    return _Turn(child, token, fine, zero, zero, zero, step)


def _attempt(
    program: Program, filters: Filters, tree: _Tree, key: tuple[jax.Array, jax.Array], node: jax.Array,
    step: jax.Array, ended: jax.Array
) -> _Turn:  # fmt: skip
    """Offers the node's children in turn to rejection sampling."""
    drafts = program.draft_ref.shape[1]
    first = jnp.where(ended | (node >= drafts), NONE, tree.child(node, node))
    zero = filters.top_p * 0.0

    def surveyed() -> tuple[jax.Array, ...]:
        tops_L, top, total, after = survey(program, node, step)

        def filtered() -> tuple[jax.Array, jax.Array, jax.Array]:
            cut, last = threshold(program, filters, node, after, tops_L, top, total)
            return cut, *weigh(program, node, last, tops_L, top, cut)

        cut, total, after = lax.cond(filters.active, filtered, lambda: (zero - jnp.inf, total, after))
        return top + jnp.log(total), cut, ((top < jnp.inf) & (top > -jnp.inf)).astype(_i32), after

    # A leaf without filters needs no sums: its token is a plain race.
    skipped = lambda: (zero, zero - jnp.inf, (zero == 0).astype(_i32), step)
    log_total, cut, fine, step = lax.cond((first < NONE) | filters.active, surveyed, skipped)

    def offer(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        child, ordinal, a, mass, taken, step = carry
        token = tree.tokens_ref[program.request, child]
        proposed = (token >= 0) & (token < program.vocab)
        token = jnp.clip(token, 0, program.vocab - 1)
        x = program.tempered(program.logits_ref[program.request, node, token])
        p = jnp.where(x >= cut, jnp.exp(x - log_total), 0.0)
        q = program.draft_ref[program.request, node, token]
        u = to_uniform(threefry2x32(*key, ordinal.astype(_u32), _u32(Purpose.ACCEPT))[0])
        passes = proposed & (p - a * q > u * mass * q)
        fails = proposed & ~passes
        a = jnp.where(fails, a + mass, a)
        following = tree.child(node, child)
        race = Race(program, key, node, cut, a, log_total)
        mass, step = lax.cond(
            fails & (following < NONE), lambda: _residual_sum(program, race, step), lambda: (mass, step)
        )
        taken = jnp.where(passes, child, taken)
        return jnp.where(passes, NONE, following), ordinal + 1, a, mass, taken, step

    init = (first, _i32(0), zero, zero + 1.0, jnp.maximum(first, NONE), step)
    _, _, a, _, taken, step = lax.while_loop(lambda c: c[0] < NONE, offer, init)
    return _Turn(taken, step * 0, fine > 0, a, log_total, cut, step)


def _residual_sum(program: Program, race: Race, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of the residual, exchanges so far)."""

    def body(chunk: jax.Array, x: Pair, sums_L: jax.Array) -> jax.Array:
        first, second = (race.residual(*pair) for pair in zip(x, program.tokens(chunk), strict=True))
        return jnp.where(program.lane_L == chunk, (first + second).sum(), sums_L)

    sums_L = program.sweep(race.node, body, jnp.zeros(program.lane_L.shape, _f32))
    return program.sum_by_chunk(step, sums_L)


def _last_token(
    program: Program, key: tuple[jax.Array, jax.Array], node: jax.Array, turn: _Turn
) -> tuple[jax.Array, jax.Array]:
    """(token, whether the row is usable) of the race over the residual, or over p where nothing is left."""

    def body(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        a, _, _, _, step = carry
        best, token, sums_L = Race(program, key, node, turn.cut, a, turn.log_total).run()
        token, fine, step = elect(program, step, best, token)
        total, step = lax.cond(a > 0, lambda: program.sum_by_chunk(step, sums_L), lambda: (a + 1.0, step))
        empty = ~(total > NO_RESIDUAL)
        return jnp.where(empty, 0.0, a), token, fine.astype(_i32), empty.astype(_i32), step

    init = (turn.a, turn.token, _i32(0), _i32(1), turn.step)
    _, token, fine, _, _ = lax.while_loop(lambda c: c[3] > 0, body, init)
    return token, fine > 0


def _kernel(
    *refs: Any, members: int, each: int, launch: Launch, depth: int, chain: bool, greedy: bool, drafts: bool
) -> None:
    logits_ref, tokens_ref, parents_ref, position_ref = refs[:4]
    temperature_ref, top_k_ref, top_p_ref, min_p_ref, seed_ref = refs[4:9]
    draft_ref = refs[9] if drafts else None
    path_ref, accepted_ref, token_ref, fine_ref, *table = refs[9 + drafts + (members > 1) :]
    member, request = pl.program_id(0), pl.program_id(1)
    team = Team(table[0] if table else None, request, member, members, launch.warps)
    tree = _Tree(tokens_ref, parents_ref, request, chain)
    filters = None if greedy else Filters(top_k_ref[request], top_p_ref[request], min_p_ref[request])
    program = Program(logits_ref, draft_ref, team, launch.chunk, each, None if greedy else temperature_ref[request])
    level_D = jnp.arange(max(2, power_of_two(depth + 1)), dtype=_i32)

    def key_at(accepted: jax.Array) -> tuple[jax.Array, jax.Array]:
        return seed_ref[request], (position_ref[request] + accepted).astype(_u32)

    def visit(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        _, accepted, path_D, fine, turn = carry
        node = turn.child
        ended = accepted >= depth
        step = turn.step
        if filters is None:
            turn = _draw(program, tree, node, step, ended)
        elif drafts:
            attempt = functools.partial(_attempt, program, filters, tree, key_at(accepted), node, step, ended)
            turn = lax.cond(program.sampled, attempt, lambda: _draw(program, tree, node, step, ended))
        else:
            turn = _draw(program, tree, node, step, ended, (filters, key_at(accepted)))
        moved = turn.child < NONE
        accepted = accepted + moved.astype(_i32)
        path_D = jnp.where(moved & (level_D == accepted), turn.child, path_D)
        return node, accepted, path_D, fine & turn.fine, turn

    zero = jnp.zeros((), _f32)
    start = _Turn(_i32(0), _i32(0), jnp.ones((), bool), zero, zero, zero, _i32(0))
    init = (_i32(0), _i32(0), jnp.zeros(level_D.shape, _i32), jnp.ones((), bool), start)
    node, accepted, path_D, fine, turn = lax.while_loop(lambda c: c[4].child < NONE, visit, init)
    token = turn.token
    if drafts:
        last = lambda: _last_token(program, key_at(accepted), node, turn)
        token, usable = lax.cond(program.sampled, last, lambda: (token, fine))
        fine = fine & usable

    @pl.when(member == 0)
    def _() -> None:
        plgpu.store(path_ref.at[request, level_D], path_D, mask=level_D <= depth)
        accepted_ref[request] = accepted
        token_ref[request] = token
        fine_ref[request] = fine


def rejection_sampling(
    args: RejectionSamplingArgs, *, launch: Launch | None = None, interpret: bool = False
) -> Verdict:
    """See api.rejection_sampling.

    Args:
      launch: sizes; by `launch_for` for the device at hand.
      interpret: run in Pallas' interpreter, on any backend; one member a request.
    """
    on_triton()
    (b, _, v), depth, drafts = args.logits_BNV.shape, args.depth, args.drafts
    if launch is None:
        launch = _launch_here(args.greedy)
    if interpret:
        launch = dataclasses.replace(launch, members=1)
    members, each = launch.split(b, v)
    inputs = [args.logits_BNV, args.tokens_BN, args.parents_BN, args.position_B, *args.sampling]
    if drafts is not None:
        inputs.append(drafts)
    shapes = [jax.ShapeDtypeStruct((b, depth + 1), _i32)]
    shapes += [jax.ShapeDtypeStruct((b,), dtype) for dtype in (_i32, _i32, jnp.bool_)]
    aliases = {}
    if members > 1:
        table = (b, 2, table_words(v, launch.chunk, members))
        inputs.append(jnp.zeros(table, _u32))  # an earlier launch's tags must not be taken for this one's
        shapes.append(jax.ShapeDtypeStruct(table, _u32))
        aliases = {len(inputs) - 1: len(shapes) - 1}
    kernel = functools.partial(
        _kernel, members=members, each=each, launch=launch, depth=depth, chain=args.chain, greedy=args.greedy,
        drafts=drafts is not None
    )  # fmt: skip
    out = pl.pallas_call(
        kernel,
        grid=(members, b),
        out_shape=shapes,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=1),
        interpret=interpret,
        name="rejection_sampling",
    )(*inputs)
    return Verdict(*out[:4])
