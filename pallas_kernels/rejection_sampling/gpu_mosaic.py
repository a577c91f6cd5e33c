"""Tree rejection sampling for Hopper GPUs: Pallas for Mosaic GPU, a cluster of programs a request.

The members of a request's cluster own a stretch of the vocabulary each, keep it in shared memory (`mosaic_rows`), and
walk the tree together; they exchange through each other's shared memory (`mosaic_cluster`). A cluster is
resident as a whole or not at all, so that no batch is too large to wait for one another.

Where the device has room for all nodes of all requests at once, each has a cluster of its own, and a second launch
follows the path; else a cluster walks it, and reads the rows on the path only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.rejection_sampling.mosaic_cluster import Cluster
from pallas_kernels.rejection_sampling.mosaic_filters import Filters, Scratch
from pallas_kernels.rejection_sampling.mosaic_lanes import words_of
from pallas_kernels.rejection_sampling.mosaic_rejection import Drafts, attempt
from pallas_kernels.rejection_sampling.mosaic_rows import GROUP, WORD, Buffers, Launch, Row
from pallas_kernels.rejection_sampling.mosaic_walk import Sampler, Tree, Turn, own_token, walk
from pallas_kernels.rejection_sampling.noise import TILE
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs, SamplingRows, Verdict
from pallas_kernels.sizes import round_up

_i32, _u32, _f32 = jnp.int32, jnp.uint32, jnp.float32
#: Programs of a cluster; more than the 8 that every device with clusters has, but Hopper has 16.
_MOST_MEMBERS = 16
#: Nodes up to which each has a cluster of its own.
_MOST_CLUSTERS = 64
#: Bytes of a program's shared memory for logits and draft probabilities, beside its tables.
_ROW_BYTES = 192 << 10


def launch_for(batch: int, nodes: int, vocab: int, drafts: bool = False) -> Launch:
    """Sizes for a call; measured on an H200 (docs/benchmarks.md).

    Args:
      drafts: whether it reads draft probabilities.
    """
    walk = nodes == 1 or drafts or batch * nodes > _MOST_CLUSTERS
    tiles, members = -(-vocab // TILE), _MOST_MEMBERS
    while members > 1 and tiles <= members * (WORD - GROUP):
        members //= 2
    return sizes(members, vocab, walk)


def _most_tokens(dtype: Any, drafts: bool) -> int:
    """The largest vocabulary that a cluster's shared memory holds."""
    row = TILE * (jnp.dtype(dtype).itemsize + (4 if drafts else 0))
    return _MOST_MEMBERS * (_ROW_BYTES // row // WORD * WORD) * TILE


def sizes(members: int, vocab: int, walk: bool) -> Launch:
    """A launch whose members share the vocabulary evenly."""
    return Launch(members, round_up(-(-vocab // (TILE * members)), GROUP), walk)


@functools.cache
def unsupported() -> str | None:
    """Why this JAX or device cannot run the kernel, or None."""
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
        return f"it needs JAX 0.11 or newer, this is {jax.__version__}"
    if jax.default_backend() != "gpu":
        return f"it needs a GPU, the backend is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return None if capability.startswith("9.") else f"it needs compute capability 9, this device has {capability}"


def refusal(args: RejectionSamplingArgs) -> str | None:
    """Why the kernel cannot serve these arguments, or None."""
    logits, n = args.logits_BNV, args.logits_BNV.shape[1]
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits must be float32 or bfloat16, got {logits.dtype}"
    if (drafts := args.drafts) is not None and drafts.dtype != jnp.float32:
        return f"draft_probs must be float32, got {drafts.dtype}"
    if n > 2 * TILE:
        return f"at most {2 * TILE} nodes, got {n}"
    if logits.shape[2] > (most := _most_tokens(logits.dtype, args.drafts is not None)):
        return f"a vocabulary of at most {most} {logits.dtype} logits, got {logits.shape[2]}"
    return None


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One launch. shape: B, N and V. draft_rows: of draft probabilities, X; 0 in coupled mode."""

    shape: tuple[int, int, int]
    launch: Launch
    depth: int
    chain: bool
    greedy: bool
    draft_rows: int
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
        if self.draft_rows:
            out |= {"q": plgpu.SMEM((words * WORD, TILE), _f32), "drafted": plgpu.Barrier(num_barriers=words)}
            out["offers"] = plgpu.SMEM((3 * round_up(self.shape[1], TILE),), _f32)
        if self.launch.members > 1 and self.interpret:
            out["met"] = plgpu.ClusterBarrier(collective_axes=("member",))
        elif not self.interpret:
            out["board"] = plgpu.SMEM(Cluster.board_shape(False, 0, 0), _i32)
        return out

    @property
    def reads(self) -> tuple[str, ...]:
        """Which arrays of trees and rows: what is there to be passed alone XLA writes to memory, a kernel for each."""
        tree = (("tokens", True), ("parents", not self.chain)) if self.depth else ()
        rows = () if self.greedy else ("position", *SamplingRows._fields, *(() if self.launch.walk else ("depths",)))
        return *(name for name, read in tree if read), *rows

    def body(self, ins: dict[str, Any], outs: Any, shared: dict[str, Any], board: Any) -> None:
        logits, (nodes, vocab) = ins["logits"], self.shape[1:]
        program = lax.axis_index("request")
        request = program if self.launch.walk else lax.div(program, _i32(nodes))
        cluster = Cluster(board, shared.get("met"), program, self.launch.members, self.interpret)
        sampler: Sampler | None = None
        inverse: jax.Array | None = None
        if not self.greedy:
            temperature, top_k, top_p, min_p, seed = (ins[name][request] for name in SamplingRows._fields)
            sampled = temperature > 0
            inverse = 1.0 / jnp.where(sampled, temperature, 1.0)
            tables = Scratch(*(shared[name] for name in Scratch.shapes()))
            sampler = Sampler(sampled, Filters(top_k, top_p, min_p), tables, seed, ins["position"][request])
        buffers = Buffers(*(shared[name] for name in Buffers._fields))
        row = Row(logits, buffers, cluster, vocab, self.launch, inverse)
        if not self.launch.walk:
            depth = _i32(0) if sampler is None else ins["depths"][program]
            token, fine = own_token(row, sampler, program, depth, _i32(0))[:2]

            @pl.when(cluster.member == 0)
            def _() -> None:
                outs[0][program], outs[1][program] = jnp.clip(token, 0, vocab - 1), fine
        else:
            tree = self.tree(ins, request)

            def coupled(node: jax.Array, depth: jax.Array, step: jax.Array) -> Turn:
                token, fine, step = own_token(row, sampler, request * nodes + node, depth, step)
                token = jnp.clip(token, 0, vocab - 1)
                return Turn(tree.holding(node, depth, token), token, fine, step)

            visit: Callable[[jax.Array, jax.Array, jax.Array], Turn] = coupled
            if sampler is not None and self.draft_rows:
                drafts = Drafts(ins["drafts"], self.draft_rows, shared["q"], shared["drafted"], shared["offers"], row)

                def rejection(node: jax.Array, depth: jax.Array, step: jax.Array) -> Turn:
                    at, number = request * nodes + node, request * self.draft_rows + node
                    turn = attempt(row, drafts, sampler, tree, node, depth, at, number, step)
                    return turn._replace(token=jnp.clip(turn.token, 0, vocab - 1))

                visit = rejection
            walk(tree, visit, request, cluster.member == 0, outs)
        cluster.meet()  # nobody leaves while another may read its shared memory

    def tree(self, ins: dict[str, Any], request: jax.Array) -> Tree:
        refs = ins.get("tokens"), ins.get("parents")
        return Tree(*refs, request, self.shape[1], self.depth, self.chain, self.interpret)

    def follow(self, ins: dict[str, Any], outs: Any) -> None:
        """Walks where every node's token is known."""
        choice, fine, request = ins["choice"], ins["fine"], lax.axis_index("request")
        tree = self.tree(ins, request)

        def known(node: jax.Array, depth: jax.Array, step: jax.Array) -> Turn:
            token, usable = (ref[request * self.shape[1] + node] for ref in (choice, fine))
            return Turn(tree.holding(node, depth, token), token, usable, step)

        walk(tree, known, request, request >= 0, outs)


@functools.partial(jax.jit, static_argnums=0, static_argnames="interpret")
def _launch(kernel: _Kernel, ins: dict[str, jax.Array], *, interpret: Any = None) -> Any:
    (b, n, v), launch = kernel.shape, kernel.launch
    # The copy engine takes 256 entries along an axis; a vocabulary of whole tiles is read as rows of these.
    tiled = lambda x: x.reshape(-1, v // TILE, TILE) if v % TILE == 0 else x.reshape(-1, v)
    ins = {name: tiled(x) if x.ndim == 3 else x.reshape(-1) for name, x in ins.items()}
    names = list(ins)
    of = jax.ShapeDtypeStruct
    verdict = (of((b * (kernel.depth + 1),), _i32), of((b,), _i32), of((b,), _i32), of((b,), jnp.bool_))
    many = b if launch.walk else b * n
    outs = verdict if launch.walk else (of((many,), _i32), of((many,), _i32))
    told = len(outs)
    if kernel.interpret and launch.members > 1:
        outs = (*outs, of(Cluster.board_shape(True, many, launch.members), _i32))
    scratch = kernel.scratch(ins["logits"].dtype)

    def rejection_sampling_mosaic(*refs: Any) -> None:
        ins, rest = dict(zip(names, refs[: len(names)], strict=True)), refs[len(names) :]
        shared = dict(zip(scratch, rest[len(outs) :], strict=True))
        overlap.begin(interpret)
        overlap.wait(interpret)
        board = rest[told] if len(outs) > told else shared.get("board")
        kernel.body(ins, rest[:told], shared, board)

    trees = {name: ins[name] for name in ("tokens", "parents") if name in ins}
    known = ("choice", "fine", *trees)

    def rejection_sampling_mosaic_follow(*refs: Any) -> None:
        overlap.begin(interpret)
        overlap.wait(interpret)
        kernel.follow(dict(zip(known, refs[: len(known)], strict=True)), refs[len(known) :])

    # Every allocation is rounded up to 1 KiB; three programs of Llama 3's vocabulary just fit into a multiprocessor.
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=512
    )
    extra: dict[str, Any] = {"grid_names": ("request",), "compiler_params": params}
    extra |= {} if interpret is None else {"interpret": interpret}
    found = plgpu.kernel(
        rejection_sampling_mosaic, out_type=outs, scratch_types=tuple(scratch.values()), grid=(many,),
        cluster=(launch.members,), cluster_names=("member",), **extra,
    )(*ins.values())[:told]  # fmt: skip
    if not launch.walk:
        follow = plgpu.kernel(rejection_sampling_mosaic_follow, out_type=verdict, grid=(b,), **extra)
        found = follow(*found, *trees.values())
    path, accepted, token, fine = found
    return Verdict(path.reshape(b, -1), accepted, token, fine)


def rejection_sampling(args: RejectionSamplingArgs, *, launch: Launch | None = None, interpret: Any = None) -> Verdict:
    """See api.rejection_sampling.

    Args:
      launch: sizes; by `launch_for`.
      interpret: plgpu.InterpretGPUParams, on any backend.
    """
    b, n, v = args.logits_BNV.shape
    drafts = args.drafts
    if launch is None:
        launch = launch_for(b, n, v, drafts is not None)
    if drafts is not None and not launch.walk:
        raise ValueError(f"rejection sampling walks its trees, got {launch}")
    rows = 0 if drafts is None else drafts.shape[1]
    kernel = _Kernel((b, n, v), launch, args.depth, args.chain, args.greedy, rows, interpret is not None)
    ins = {"tokens": args.tokens_BN, "parents": args.parents_BN, "depths": args.depths_BN, "position": args.position_B}
    ins |= args.sampling._asdict()
    ins = {"logits": args.logits_BNV} | {name: ins[name] for name in kernel.reads}
    return _launch(kernel, ins if drafts is None else ins | {"drafts": drafts}, interpret=interpret)
