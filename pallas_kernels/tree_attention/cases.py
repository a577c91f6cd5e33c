"""The shapes that tests, compile proofs and benchmarks of tree attention share."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Mask = Literal["chain", "tree"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      name: unique.
      batch, nodes: B and N. prior: tree entries before the nodes (T = prior + nodes).
      heads, kv_heads, head_dim: H, G and C. page: tokens a page.
      context: longest prefix in tokens; the table has room for it.
      mask: "chain" (causal) or "tree" (random parents).
      lengths: "full": every request has `context` tokens; "ragged": 0, 1, page edges and random ones.
      pool: pages of the pool; None: just enough.
    """

    name: str
    batch: int
    nodes: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 64
    context: int = 8192
    mask: Mask = "tree"
    lengths: Literal["full", "ragged"] = "full"
    dtype: str = "bfloat16"
    prior: int = 0
    window: int | None = None
    soft_cap: float | None = None
    pool: int | None = None

    @property
    def columns(self) -> int:
        """Entries of a page table."""
        return -(-self.context // self.page)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.pool or self.batch * self.columns + 1

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arguments without values, by name and in order."""
        dtype, b, n, t = jnp.dtype(self.dtype), self.batch, self.nodes, self.prior + self.nodes
        new = (b, t, self.kv_heads, self.head_dim)
        shape = {
            "q": ((b, n, self.heads, self.head_dim), dtype),
            "pages": ((self.num_pages, self.kv_heads, self.page, 2 * self.head_dim), dtype),
            "table": ((b, self.columns), jnp.int32),
            "length": ((b,), jnp.int32),
            "tree_k": (new, dtype),
            "tree_v": (new, dtype),
            "tree_mask": ((b, n, t), jnp.bool_),
        }
        return {name: jax.ShapeDtypeStruct(*s) for name, s in shape.items()}

    @property
    def options(self) -> dict[str, int | float | None]:
        """The keyword arguments."""
        return {"window": self.window, "soft_cap": self.soft_cap}

    def draw_lengths(self, rng: np.random.Generator) -> np.ndarray:
        """Prefix lengths, [B] int32."""
        if self.lengths == "full":
            return np.full((self.batch,), self.context, np.int32)
        edges = [0, self.context, 1, self.page, self.page - 1, self.page + 1]
        random = rng.integers(0, self.context + 1, self.batch)
        return np.asarray([*edges, *random][: self.batch], np.int32).clip(0, self.context)

    def draw_mask(self, rng: np.random.Generator) -> np.ndarray:
        """Visible tree entries, [B, N, T] bool."""
        b, n, prior = self.batch, self.nodes, self.prior
        own = np.zeros((b, n, n), bool)
        for i in range(b):
            for node in range(n):
                if node:
                    own[i, node] = own[i, node - 1 if self.mask == "chain" else rng.integers(0, node)]
                own[i, node, node] = True
        before = np.broadcast_to(rng.random((b, 1, prior)) < 0.8, (b, n, prior))
        return np.concatenate([before, own], axis=2)

    def draw(self, seed: int = 0, *, poison: bool = False) -> dict[str, jax.Array]:
        """Random arguments, made on the device where large.

        Args:
          poison: fill what no length reaches with NaN, and table entries behind the lengths with garbage.
        """
        rng = np.random.default_rng(seed)
        length = self.draw_lengths(rng)
        table = rng.permutation(self.num_pages)[: self.batch * self.columns].reshape(self.batch, self.columns)
        shapes = self.shapes()
        keys = iter(jax.random.split(jax.random.key(seed), 4))
        normal = jax.jit(
            lambda key, like: jax.random.normal(key, like.shape, jnp.float32).astype(like.dtype), static_argnums=1
        )
        out = {name: normal(next(keys), shapes[name]) for name in ("q", "pages", "tree_k", "tree_v")}
        if poison:
            used = np.zeros((self.num_pages, self.page), bool)
            for i in range(self.batch):
                position = np.arange(length[i])
                used[table[i, position // self.page], position % self.page] = True
            live = jnp.asarray(used)[:, None, :, None]
            out["pages"] = jnp.where(live, out["pages"], jnp.asarray(jnp.nan, out["pages"].dtype))
            behind = np.arange(self.columns)[None, :] >= -(-length[:, None] // self.page)
            garbage = rng.choice([self.num_pages, -1, 2**30, -(2**30)], table.shape)
            table = np.where(behind, garbage, table)
        out |= {"table": jnp.asarray(table, jnp.int32), "length": jnp.asarray(length)}
        out["tree_mask"] = jnp.asarray(self.draw_mask(rng))
        return {name: out[name] for name in shapes}

    def min_bytes(self, lengths: jax.Array) -> int:
        """Fewest bytes a call must move: the prefixes' keys and values, the tree's, queries and results."""
        size = jnp.dtype(self.dtype).itemsize
        seen = np.minimum(np.asarray(lengths), self.window or self.context).sum()
        new = self.batch * (self.prior + self.nodes)
        rows = 2 * self.batch * self.nodes * self.heads * self.head_dim
        return size * (int(seen + new) * 2 * self.kv_heads * self.head_dim + rows)


#: What serving looks like: Llama-3.1-8B's heads, whole and as one of 4 tensor-parallel shards.
SERVING = (
    Case("decode-b1-32k", 1, 1, context=32768),
    Case("verify8-b1-32k", 1, 8, context=32768),
    Case("decode-b8-8k", 8, 1),
    Case("verify8-b8-8k", 8, 8),
    Case("verify8-b8-8k-p128", 8, 8, page=128),
    Case("verify8-b32-8k", 32, 8),
    Case("decode-b64-8k", 64, 1),
    Case("verify8-b64-8k", 64, 8),
    Case("verify8-b64-8k-p128", 64, 8, page=128),
    Case("tree64-b8-8k", 8, 64),
    Case("verify8-b64-2k-ragged", 64, 8, context=2048, lengths="ragged"),
    Case("prefill256-4k", 1, 256, context=4096, mask="chain"),
    Case("prefill512-4k", 1, 512, context=4096, mask="chain"),
    Case("tp4-verify8-b16-8k", 16, 8, heads=8, kv_heads=2),
)

#: What else the kernels promise to serve.
COVERAGE = (
    Case("d64", 4, 8, 16, 8, 64, context=2048, lengths="ragged"),
    Case("d80", 4, 8, 16, 8, 80, context=2048, lengths="ragged"),
    Case("d96", 4, 8, 16, 8, 96, context=2048, lengths="ragged"),
    Case("d256", 4, 8, 8, 4, 256, context=2048, lengths="ragged"),
    Case("d256-tree64", 4, 64, 8, 4, 256, context=2048, lengths="ragged"),
    Case("f32", 4, 8, 8, 4, 128, context=1024, lengths="ragged", dtype="float32"),
    Case("f32-d256", 2, 8, 8, 4, 256, context=1024, lengths="ragged", dtype="float32"),
    Case("one-kv-head", 4, 64, 8, 1, 128, context=2048, lengths="ragged"),
    Case("group7", 4, 5, 28, 4, 128, context=2048, lengths="ragged"),
    Case("page16", 4, 16, 8, 4, 128, page=16, context=2048, lengths="ragged"),
    Case("page256", 4, 16, 8, 4, 128, page=256, context=2048, lengths="ragged"),
    Case("window", 4, 8, 8, 4, 128, context=4096, lengths="ragged", window=1024),
    Case("soft-cap", 4, 8, 8, 4, 256, context=2048, lengths="ragged", soft_cap=50.0),
    Case("prior-levels", 4, 8, 16, 8, 128, context=2048, lengths="ragged", prior=47),
    Case("long-128k", 1, 8, context=131072),
    Case("table-64x2048", 64, 8, context=131072, pool=4096),
)

#: Small ones for interpreters.
SMALL = (
    Case("small-tree", 7, 5, 4, 2, 64, 8, 24, lengths="ragged", dtype="float32"),
    Case("small-decode", 7, 1, 4, 1, 64, 8, 24, lengths="ragged", dtype="float32"),
    Case("small-chain-d80", 6, 3, 6, 2, 80, 16, 48, mask="chain", lengths="ragged", dtype="float32"),
    Case("small-d96", 6, 4, 2, 2, 96, 16, 48, lengths="ragged", dtype="float32"),
    Case("small-d128", 6, 9, 4, 2, 128, 16, 48, lengths="ragged", dtype="float32"),
    Case("small-d256", 6, 4, 4, 2, 256, 16, 32, lengths="ragged", dtype="float32"),
    Case("small-bf16", 6, 8, 8, 2, 128, 16, 48, lengths="ragged"),
    Case("small-prior", 6, 4, 4, 2, 64, 16, 48, lengths="ragged", dtype="float32", prior=33),
    Case("small-window", 6, 4, 4, 2, 64, 16, 64, lengths="ragged", dtype="float32", window=21),
    Case("small-soft-cap", 6, 4, 4, 2, 64, 16, 48, lengths="ragged", dtype="float32", soft_cap=3.0),
    Case("small-prefill", 1, 70, 4, 2, 64, 16, 48, mask="chain", dtype="float32"),
    Case("small-group7", 6, 3, 7, 1, 64, 16, 48, lengths="ragged", dtype="float32"),
)

CASES = {case.name: case for case in (*SERVING, *COVERAGE, *SMALL)}
