"""The shapes that tests, compile proofs and benchmarks of rejection sampling share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import registry
from pallas_kernels.registry import Device, Proof
from pallas_kernels.rejection_sampling import gpu, reference
from pallas_kernels.rejection_sampling.api import OPERATION
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs, SamplingRows, Verdict

#: (temperature, top_k, top_p, min_p) of a row.
FILTERS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "cool": (0.7, 0, 1.0, 0.0),
    "top-k": (1.0, 40, 1.0, 0.0),
    "top-p": (1.1, 0, 0.9, 0.0),
    "min-p": (1.3, 0, 1.0, 0.05),
    "all": (0.8, 50, 0.95, 0.02),
}
#: Logits of a node's best tokens above those of all others, which are normal: about 5% of the mass is in the tail.
_PEAKS = (16.0, 15.0, 13.5, 12.0, 11.0, 10.5, 10.0)


@dataclasses.dataclass(frozen=True)
class Case(registry.Case[RejectionSamplingArgs, Verdict]):
    """One call.

    Attributes:
      batch, nodes, vocab: B, N and V. depth: of the tree; a chain has depth + 1 nodes.
      mode: "coupled" or "rejection".
      rows: names in FILTERS that the batch's rows take in turn; ("greedy",) compiles no noise.
      acceptance: chance that the target's own token is among a node's children (coupled mode).
    """

    batch: int
    nodes: int
    vocab: int
    depth: int
    chain: bool = False
    mode: Literal["coupled", "rejection"] = "coupled"
    rows: tuple[str, ...] = ("plain",)
    dtype: str = "float32"
    acceptance: float = 0.8

    @property
    def draft_rows(self) -> int:
        """Rows of draft_probs: X. The last node never has children."""
        return self.nodes - 1

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are no arrays."""
        return {"depth": self.depth, "chain": self.chain, "greedy": self.rows == ("greedy",)}

    def shapes(self) -> RejectionSamplingArgs:
        """The argument record without values."""
        b, n, v = self.batch, self.nodes, self.vocab
        of: Any = jax.ShapeDtypeStruct
        nodes, real, whole = of((b, n), jnp.int32), of((b,), jnp.float32), of((b,), jnp.int32)
        sampling = SamplingRows(real, whole, real, real, of((b,), jnp.uint32))
        drafts = of((b, self.draft_rows, v), jnp.float32) if self.mode == "rejection" else None
        logits = of((b, n, v), jnp.dtype(self.dtype))
        return RejectionSamplingArgs(logits, nodes, nodes, nodes, sampling, whole, drafts, **self.options)

    def sampling(self, rng: np.random.Generator) -> SamplingRows:
        """How the rows sample."""
        row = np.asarray([FILTERS[self.rows[i % len(self.rows)]] for i in range(self.batch)])
        real = lambda column: jnp.asarray(row[:, column], jnp.float32)
        seed = jnp.asarray(rng.integers(0, 2**32, self.batch, dtype=np.uint32))
        return SamplingRows(real(0), jnp.asarray(row[:, 1], jnp.int32), real(2), real(3), seed)

    def draw_trees(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(parents, depths), [B, N] int32 each: a path to the full depth, the other nodes anywhere, level by level."""
        parents = np.zeros((self.batch, self.nodes), np.int32)
        depths = np.zeros_like(parents)
        for i in range(self.batch):
            parent, depth = [0], [0]
            for node in range(1, self.nodes):
                open_ = [m for m in range(node) if depth[m] < self.depth]
                parent.append(node - 1 if node <= self.depth else int(rng.choice(open_)))
                depth.append(depth[parent[-1]] + 1)
            order = np.argsort(depth, kind="stable")
            parents[i] = np.argsort(order)[np.asarray(parent)[order]]
            depths[i] = np.asarray(depth)[order]
        return parents, depths

    def draw(self, seed: int = 0) -> RejectionSamplingArgs:
        """Random arguments: peaked logits, drafts of which several are accepted; made on the device where large."""
        rng = np.random.default_rng(seed)
        b, n, v = self.batch, self.nodes, self.vocab
        key = jax.random.key(seed)
        logits = _cut(_peaked_logits(key, *_roomy(b, n, v), v), b, n, v).astype(self.dtype)
        trees = self.draw_trees(rng)
        parents, depths = map(jnp.asarray, trees)
        sampling = self.sampling(rng)
        position = jnp.asarray(rng.integers(0, 4096, b), jnp.int32)
        draft_probs = None
        if self.mode == "rejection":
            draft_probs, tokens = _sampled_drafts(key, *_padded(logits, sampling, parents))
            draft_probs, tokens = _cut(draft_probs, b, n - 1, v), jnp.asarray(np.asarray(tokens)[:b, :n])
        else:
            own = np.asarray(_own_tokens(*_padded(logits, sampling, position[:, None] + depths)))[:b, :n]
            tokens = jnp.asarray(self._distinct_children(rng, own, trees[0]))
        return RejectionSamplingArgs(logits, tokens, parents, depths, sampling, position, draft_probs, **self.options)

    def _distinct_children(self, rng: np.random.Generator, own_BN: np.ndarray, parents_BN: np.ndarray) -> np.ndarray:
        """Tokens of which siblings are distinct and, by `acceptance`, one is the parent's own draw."""
        tokens = np.zeros((self.batch, self.nodes), np.int32)
        for i in range(self.batch):
            for node in range(self.nodes):
                children = np.flatnonzero((parents_BN[i] == node) & (np.arange(self.nodes) > 0))
                own = own_BN[i, node]
                offset = 1 + rng.choice(self.vocab - 1, children.size, replace=False)
                tokens[i, children] = (own + offset) % self.vocab
                if children.size and rng.random() < self.acceptance:
                    tokens[i, rng.choice(children)] = own
        return tokens

    def specified(self, result: Verdict) -> Verdict:
        """The path up to its last accepted node."""
        inside = jnp.arange(self.depth + 1)[None, :] <= result.num_accepted_B[:, None]
        return result._replace(path_BD=jnp.where(inside, result.path_BD, 0))

    def min_bytes(self, args: RejectionSamplingArgs) -> float:
        """The rows on the paths, once.

        A draft's row is needed where a child is tried, so not at a path's last node if that is a leaf;
        counted here is one for each accepted child.
        """
        accepted = float(jax.jit(reference.rejection_sampling)(args).num_accepted_B.mean())
        rows = (accepted + 1) * jnp.dtype(self.dtype).itemsize + (accepted * 4 if self.mode == "rejection" else 0)
        return self.batch * self.vocab * rows

    def proof(self, kind: Literal["tpu", "gpu"], device: Device) -> Proof[RejectionSamplingArgs]:
        """Logits are results of products, and XLA lays those out on a TPU as their reader wants them; so here."""
        options = {"launch": gpu.launch_for(device.device_kind, self.rows == ("greedy",))} if kind == "gpu" else {}
        return Proof(
            self.shapes(),
            max_temp_bytes=1 << 20,
            limit="nothing of the vocabulary's size",
            options=options,
            free=("logits_BNV", "draft_probs_BXV"),
        )


#: Small calls are drawn in one shape, whatever theirs is: compiling takes longer than all else about them.
_ROOM = (10, 12, 1024)


def _roomy(*shape: int) -> tuple[int, ...]:
    return _ROOM if all(a <= b for a, b in zip(shape, _ROOM, strict=True)) else shape


def _cut(x: jax.Array, b: int, n: int, v: int) -> jax.Array:
    return x if x.shape == (b, n, v) else jnp.asarray(np.asarray(x)[:b, :n, :v])


def _padded(
    logits_BNV: jax.Array, sampling: SamplingRows, index_BN: jax.Array
) -> tuple[jax.Array, SamplingRows, jax.Array]:
    """Arguments in the shape that small calls are drawn in; tokens behind the vocabulary have no chance."""
    shape = logits_BNV.shape
    if (room := _roomy(*shape)) == shape:
        return logits_BNV, sampling, index_BN
    more = [(0, a - b) for a, b in zip(room, shape, strict=True)]
    logits = np.pad(np.asarray(logits_BNV.astype(jnp.float32)), more, constant_values=-np.inf)
    logits[shape[0] :], logits[:, shape[1] :] = 0, 0
    pad = lambda x: jnp.asarray(np.pad(np.asarray(x), more[: x.ndim]))
    return jnp.asarray(logits), SamplingRows(*map(pad, sampling)), pad(index_BN)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _peaked_logits(key: jax.Array, b: int, n: int, v: int, vocab: int | jax.Array) -> jax.Array:
    noise, ids = jax.random.split(key)
    x = jax.random.normal(noise, (b, n, v), jnp.float32)
    best = jax.random.randint(ids, (b, n, len(_PEAKS)), 0, vocab)
    at = jnp.arange(b)[:, None, None], jnp.arange(n)[None, :, None]
    return x.at[(*at, best)].add(jnp.asarray(_PEAKS)[None, None, :])


@jax.jit
def _own_tokens(logits_BNV: jax.Array, sampling: SamplingRows, position_BN: jax.Array) -> jax.Array:
    noise = gumbel_noise(sampling.seed_B, position_BN, logits_BNV.shape[-1], Purpose.TARGET)
    return reference.choose(logits_BNV, sampling, noise)


@jax.jit
def _sampled_drafts(
    key: jax.Array, logits_BNV: jax.Array, sampling: SamplingRows, parents_BN: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A draft model that resembles the target, under the same filters: its rows, and i.i.d. children of every node."""
    near, drawn = jax.random.split(jax.random.fold_in(key, 1))
    x = logits_BNV[:, :-1].astype(jnp.float32)
    x = x + 0.7 * jax.random.normal(near, x.shape, jnp.float32)
    kept = reference.filter_logits(x, *sampling[:4])
    probs = jax.nn.softmax(kept, axis=-1)
    race = jnp.where((sampling.temperature_B == 0)[:, None, None], x, kept)
    rows = jnp.take_along_axis(race, parents_BN[:, :, None], axis=1)
    gumbel = jax.random.gumbel(drawn, rows.shape, jnp.float32)
    gumbel = jnp.where((sampling.temperature_B == 0)[:, None, None], 0.0, gumbel)
    return probs, jnp.argmax(rows + gumbel, axis=-1).astype(jnp.int32).at[:, 0].set(0)


_MIXED = tuple(FILTERS)
_LLAMA, _QWEN, _GEMMA = 128_256, 151_936, 262_144

#: What serving looks like: a tree of 16 nodes for 16 requests, Llama 3's vocabulary.
SERVING = (
    Case("coupled-b16-n16", 16, 16, _LLAMA, 5, quick=True),
    Case("greedy-b16-n16", 16, 16, _LLAMA, 5, rows=("greedy",)),
    Case("rejection-b16-n16", 16, 16, _LLAMA, 5, mode="rejection"),
    Case("coupled-b16-n16-top-k", 16, 16, _LLAMA, 5, rows=("top-k",)),
    Case("coupled-b16-n16-top-p", 16, 16, _LLAMA, 5, rows=("top-p",)),
    Case("rejection-b16-n16-all", 16, 16, _LLAMA, 5, mode="rejection", rows=("all",)),
    Case("coupled-b16-n16-bf16", 16, 16, _LLAMA, 5, dtype="bfloat16"),
    Case("chain3-b1", 1, 4, _LLAMA, 3, chain=True),
    Case("chain3-b1-greedy", 1, 4, _LLAMA, 3, chain=True, rows=("greedy",), quick=True),
    Case("chain4-b16-rejection", 16, 5, _LLAMA, 4, chain=True, mode="rejection", quick=True),
    Case("plain-b64", 64, 1, _LLAMA, 0, chain=True),
)

#: What else the kernels promise to serve.
COVERAGE = (
    Case("qwen-b8-n8-mixed", 8, 8, _QWEN, 4, rows=_MIXED),
    Case("gemma-b8-n8-rejection", 8, 8, _GEMMA, 4, mode="rejection", rows=_MIXED),
    Case("v32000-b64-n64", 64, 64, 32_000, 8),
    Case("v32000-b64-n64-rejection", 64, 64, 32_000, 8, mode="rejection", rows=_MIXED),
    Case("v50257-b4-n8-mixed", 4, 8, 50_257, 3, rows=_MIXED),
    Case("v50257-b4-n8-rejection", 4, 8, 50_257, 3, mode="rejection", rows=_MIXED),
    Case("chain7-b3-bf16", 3, 8, _LLAMA, 7, chain=True, dtype="bfloat16", rows=_MIXED),
)

#: Small ones for interpreters.
SMALL = (
    Case("small-tree", 9, 8, 512, 3, rows=_MIXED),
    Case("small-tree-odd", 5, 11, 1000, 4, rows=_MIXED),
    Case("small-chain", 8, 4, 257, 3, chain=True, rows=_MIXED),
    Case("small-chain-bf16", 8, 4, 640, 3, chain=True, rows=_MIXED, dtype="bfloat16"),
    Case("small-greedy", 5, 7, 300, 3, rows=("greedy",)),
    Case("small-rejection", 9, 12, 512, 3, mode="rejection", rows=_MIXED),
    Case("small-rejection-chain", 8, 4, 1000, 3, chain=True, mode="rejection", rows=_MIXED),
    Case("small-wide", 3, 6, 32_000, 2, mode="rejection", rows=("plain", "all", "top-p")),
    Case("small-plain", 8, 1, 130, 0, chain=True, rows=_MIXED),
)

CASES = {case.name: case for case in (*SERVING, *COVERAGE, *SMALL)}
SUITE = registry.Suite(OPERATION, SERVING, COVERAGE, SMALL)
