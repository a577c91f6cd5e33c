"""Tree rejection sampling for Hopper GPUs: Pallas for Mosaic GPU, a cluster of programs a request.

The members of a request's cluster own a stretch of the vocabulary each, keep it in shared memory (`mosaic_rows`), and
walk the tree together; they exchange through each other's shared memory (`mosaic_lanes`). A cluster is
resident as a whole or not at all, so that no batch is too large to wait for one another.

Where the device has room for all nodes of all requests at once, each has a cluster of its own, and a second launch
follows the path; else a cluster walks it, and reads the rows on the path only.

Coupled and greedy calls; rejection against draft probabilities is left to the kernel on Triton.
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

from pallas_kernels.rejection_sampling.mosaic_filters import Filters, Scratch, threshold
from pallas_kernels.rejection_sampling.mosaic_lanes import Cluster, gather, lane_ids, once, spread, where, words_of
from pallas_kernels.rejection_sampling.mosaic_rows import GROUP, NONE, WORD, Row
from pallas_kernels.rejection_sampling.noise import TILE
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs, Verdict
from pallas_kernels.sizes import round_up

_i32, _u32, _f32 = jnp.int32, jnp.uint32, jnp.float32
#: Clusters may have 8 programs on every device.
_MOST_MEMBERS = 8
#: Programs up to which every node has a cluster: 512 were faster than 128 that walk, 2,048 slower.
_MOST_PROGRAMS = 528
#: Rows of 128 logits that fit into a program's shared memory beside its tables.
_MOST_ROWS = {4: 384, 2: 768}


@dataclasses.dataclass(frozen=True)
class Launch:
    """Sizes of a launch; results do not depend on them.

    Attributes:
      members: programs of a cluster. rows: of 128 tokens that each owns, an even number.
      walk: whether a cluster walks a request's tree, or each node has its own.
    """

    members: int
    rows: int
    walk: bool


def launch_for(batch: int, nodes: int, vocab: int) -> Launch:
    """Sizes for a call; measured on an H200 (docs/benchmarks.md)."""
    tiles = -(-vocab // TILE)
    members = _MOST_MEMBERS
    while members > 1 and tiles < members * GROUP:
        members //= 2
    rows = round_up(-(-tiles // members), GROUP)
    return Launch(members, rows, walk=nodes == 1 or batch * nodes * members > _MOST_PROGRAMS)


@functools.cache
def unsupported() -> str | None:
    """Why this JAX or device cannot run the kernel, or None."""
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
        return f"it needs JAX 0.11 or newer, this is {jax.__version__}"
    if jax.default_backend() != "gpu":
        return f"it needs a GPU, the backend is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return None if capability.startswith("9.") else f"it needs compute capability 9, this device has {capability}"


def faster(args: RejectionSamplingArgs) -> bool:
    """Whether the kernel is measured to take less time than the one on Triton, on an H200 (docs/benchmarks.md).

    With filters it is, for sampled calls, without them it is not; which it will be is unknown when a call is compiled.
    """
    return args.greedy and args.logits_BNV.shape[1] > 1


def refusal(args: RejectionSamplingArgs) -> str | None:
    """Why the kernel cannot serve these arguments, or None."""
    logits, n = args.logits_BNV, args.logits_BNV.shape[1]
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits must be float32 or bfloat16, got {logits.dtype}"
    if args.drafts is not None:
        return "it has no rejection against draft probabilities"
    if n > 2 * TILE:
        return f"at most {2 * TILE} nodes, got {n}"
    most = _MOST_ROWS[logits.dtype.itemsize] * TILE * _MOST_MEMBERS
    if logits.shape[2] > most:
        return f"a vocabulary of at most {most} {logits.dtype} logits, got {logits.shape[2]}"
    return None


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One launch. shape: B, N and V."""

    shape: tuple[int, int, int]
    launch: Launch
    depth: int
    chain: bool
    greedy: bool
    interpret: bool

    def scratch(self, dtype: Any) -> dict[str, Any]:
        words = words_of(self.launch.rows)
        out: dict[str, Any] = {
            "x": plgpu.SMEM((words * WORD, TILE), dtype),
            "words": plgpu.SMEM((words, TILE), _u32),
            "arrived": plgpu.Barrier(num_barriers=words),
        }
        if not self.greedy:
            out |= Scratch.shapes()
        if self.launch.members > 1 and self.interpret:
            out["met"] = plgpu.ClusterBarrier(collective_axes=("member",))
        elif self.launch.members > 1:
            out["board"] = plgpu.SMEM(Cluster.board_shape(False, 0, 0), _i32)
        return out

    def body(self, ins: Any, outs: Any, shared: dict[str, Any], board: Any) -> None:
        logits, tokens, parents, depths, position, temperature, top_k, top_p, min_p, seed = ins
        nodes, vocab = self.shape[1:]
        program = lax.axis_index("request")
        request = program if self.launch.walk else lax.div(program, _i32(nodes))
        cluster = Cluster(board, shared.get("met"), program, self.launch.members, self.interpret)
        sampler: tuple[jax.Array, Filters] | None = None
        inverse = None
        if not self.greedy:
            sampled = temperature[request] > 0
            inverse = 1.0 / jnp.where(sampled, temperature[request], 1.0)
            sampler = sampled, Filters(top_k[request], top_p[request], min_p[request])
        row = Row(logits, shared["x"], shared["words"], shared["arrived"], cluster, vocab, self.launch.rows, inverse)

        def visit(node: jax.Array, depth: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """(the target's own token at a node, whether its logits are usable, exchanges so far)."""
            row.fetch(request * nodes + node)
            best, step = row.survey(request * nodes + node, step)
            token, fine = best.token, (best.top < jnp.inf) & (best.top > -jnp.inf)
            if sampler is not None:
                sampled, filters = sampler
                key = seed[request], (position[request] + depth).astype(_u32)

                def draw(token: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
                    tables = Scratch(*(shared[name] for name in Scratch.shapes()))
                    kept = lambda _, step: threshold(row, tables, filters, best.lanes, best.top, step)
                    cut, step = once(filters.active, kept, (best.top * 0.0 - jnp.inf, step))
                    return row.race(key, cut, best, step)

                token, step = once(sampled & fine, draw, (token, step))
            return jnp.clip(token, 0, vocab - 1), jnp.where(fine, 1, 0), step

        if self.launch.walk:
            self.walk(visit, request, cluster, tokens, parents, outs)
        else:
            node = lax.rem(program, _i32(nodes))
            token, fine = visit(node, depths[program], _i32(0))[:2]

            @pl.when(cluster.member == 0)
            def _() -> None:
                outs[0][program], outs[1][program] = token, fine

        cluster.meet()  # nobody leaves while another may read its shared memory

    def follow(self, ins: Any, outs: Any) -> None:
        """Walks where every node's token is known."""
        choice, fine, tokens, parents = ins
        request = lax.axis_index("request")
        known = lambda node, _, step: (*(ref[request * self.shape[1] + node] for ref in (choice, fine)), step)
        self.walk(known, request, Cluster(None, None, request, 1, self.interpret), tokens, parents, outs)

    def walk(self, visit: Any, request: jax.Array, cluster: Cluster, tokens: Any, parents: Any, outs: Any) -> None:
        """The path of a request."""
        path_ref, accepted_ref, token_ref, fine_ref = outs
        nodes, levels, lane = self.shape[1], self.depth + 1, lane_ids()
        tree: list[tuple[jax.Array, jax.Array, jax.Array]] = []
        for begin in range(0, nodes if self.depth else 0, TILE):
            index = begin + lane
            here = request * nodes + jnp.minimum(index, nodes - 1)
            load = lambda ref, here=here: gather(ref, here, self.interpret)
            tree.append((where(index < nodes, index, NONE), load(tokens), load(parents)))

        def child(node: jax.Array, token: jax.Array) -> jax.Array:
            found = spread(NONE, _i32)
            for index, own, parent in tree:
                match = (index == node + 1) if self.chain else (parent == node) & (index > 0)
                found = jnp.minimum(found, where(match & (own == token), index, NONE))
            return jnp.min(found)

        def put(level: jax.Array, node: jax.Array) -> None:
            @pl.when(cluster.member == 0)
            def _() -> None:
                path_ref[request * levels + level] = node

        lax.fori_loop(0, levels, lambda d, _: (put(d, d if self.chain else d * 0), ())[1], ())

        def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            following, _, accepted, _, fine, exchanges = carry
            token, usable, exchanges = visit(following, accepted, exchanges)
            node = following
            following = jnp.where(accepted < self.depth, child(node, token), NONE) if tree else node * 0 + NONE
            moved = following < NONE
            accepted = accepted + jnp.where(moved, 1, 0)
            pl.when(moved)(lambda: put(accepted, following))
            return following, node, accepted, token, fine * usable, exchanges

        zero = request * 0
        start = (zero, zero, zero, zero, zero + 1, zero)
        accepted, token, fine = lax.while_loop(lambda c: c[0] < NONE, step, start)[2:5]

        @pl.when(cluster.member == 0)
        def _() -> None:
            accepted_ref[request], token_ref[request], fine_ref[request] = accepted, token, fine > 0


@functools.partial(jax.jit, static_argnums=0, static_argnames="interpret")
def _launch(kernel: _Kernel, *ins: jax.Array, interpret: Any = None) -> Any:
    (b, n, v), launch = kernel.shape, kernel.launch
    logits, *small = ins
    # The copy engine takes 256 entries along an axis; a vocabulary of whole tiles is read as rows of these.
    logits = logits.reshape(b * n, v // TILE, TILE) if v % TILE == 0 else logits.reshape(b * n, v)
    small = [x.reshape(-1) for x in small]
    of = jax.ShapeDtypeStruct
    verdict = (of((b * (kernel.depth + 1),), _i32), of((b,), _i32), of((b,), _i32), of((b,), jnp.bool_))
    many = b if launch.walk else b * n
    outs = verdict if launch.walk else (of((many,), _i32), of((many,), _i32))
    told = len(outs)
    if kernel.interpret and launch.members > 1:
        outs = (*outs, of(Cluster.board_shape(True, many, launch.members), _i32))
    scratch = kernel.scratch(logits.dtype)

    def rejection_sampling_mosaic(*refs: Any) -> None:
        ins, rest = refs[: 1 + len(small)], refs[1 + len(small) :]
        shared = dict(zip(scratch, rest[len(outs) :], strict=True))
        board = rest[told] if len(outs) > told else shared.get("board")
        kernel.body(ins, rest[:told], shared, board)

    def rejection_sampling_mosaic_follow(*refs: Any) -> None:
        kernel.follow(refs[:4], refs[4:])

    # Every allocation is rounded up to 1 KiB; three programs of Llama 3's vocabulary just fit into a multiprocessor.
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=512
    )
    extra: dict[str, Any] = {"grid_names": ("request",), "compiler_params": params}
    extra |= {} if interpret is None else {"interpret": interpret}
    found = plgpu.kernel(
        rejection_sampling_mosaic, out_type=outs, scratch_types=tuple(scratch.values()), grid=(many,),
        cluster=(launch.members,), cluster_names=("member",), **extra,
    )(logits, *small)[:told]  # fmt: skip
    if not launch.walk:
        found = plgpu.kernel(rejection_sampling_mosaic_follow, out_type=verdict, grid=(b,), **extra)(*found, *small[:2])
    path, accepted, token, fine = found
    return Verdict(path.reshape(b, -1), accepted, token, fine)


def rejection_sampling(args: RejectionSamplingArgs, *, launch: Launch | None = None, interpret: Any = None) -> Verdict:
    """See api.rejection_sampling.

    Args:
      launch: sizes; by `launch_for`.
      interpret: plgpu.InterpretGPUParams, on any backend.
    """
    b, n, v = args.logits_BNV.shape
    launch = launch_for(b, n, v) if launch is None else launch
    kernel = _Kernel((b, n, v), launch, args.depth, args.chain, args.greedy, interpret is not None)
    small = (args.tokens_BN, args.parents_BN, args.depths_BN, args.position_B, *args.sampling)
    return _launch(kernel, args.logits_BNV, *small, interpret=interpret)
