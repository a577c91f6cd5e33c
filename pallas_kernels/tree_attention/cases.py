"""The shapes that tests, compile proofs and benchmarks of tree attention share."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import registry
from pallas_kernels.registry import Alternative, Device, Proof
from pallas_kernels.sizes import round_up
from pallas_kernels.tree_attention import gpu
from pallas_kernels.tree_attention.api import OPERATION
from pallas_kernels.tree_attention.reference import TreeAttentionArgs
from pallas_kernels.tree_attention.tpu_plan import LANES

#: Bytes of the pools that are compiled for: as large as a whole model's, whose layers lie in one array. A copy of one
#: stands out (a TPU hides a small one in its VMEM), and GPU kernels address it with 64 bits.
POOL_BYTES = 6 << 30
#: Partial sums of a prefix that is split so as to fill the device: 2 programs for each of 148 multiprocessors,
#: 64 rows of 128 float32 channels, and a margin.
PARTIAL_BYTES = 16 << 20


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.random.normal(key, like.shape, jnp.float32).astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class Case(registry.Case[TreeAttentionArgs, jax.Array]):
    """One call.

    Attributes:
      batch, nodes: B and N. prior: tree entries before the nodes (T = prior + nodes).
      heads, kv_heads, head_dim: H, G and C. page: tokens a page.
      context: longest prefix in tokens; the table has room for it.
      mask: "causal" (none is given), "chain" (the same by bits) or "tree" (random parents).
      lengths: "full": every request has `context` tokens; "ragged": 0, 1, page edges and random ones; "long": the
        first one has them, and the others a sixteenth.
      sinks: whether heads have them.
      values: channels of values that are their keys' first ones; None: values of their own, as wide.
      pool: pages of the pool; None: just enough.
    """

    batch: int
    nodes: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 64
    context: int = 8192
    mask: Literal["causal", "chain", "tree"] = "tree"
    lengths: Literal["full", "ragged", "long"] = "full"
    dtype: str = "bfloat16"
    prior: int = 0
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    pool: int | None = None
    values: int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """See registry.Case: TPUs read values inside keys by the reference."""
        return ("tpu", "gpu") if self.values is None else ("gpu",)

    @property
    def wide(self) -> int:
        """Numbers of a token and head in the pool."""
        return 2 * self.head_dim if self.values is None else self.head_dim

    @property
    def columns(self) -> int:
        """Entries of a page table."""
        return -(-self.context // self.page)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.pool or self.batch * self.columns + 1

    def shapes(self) -> TreeAttentionArgs:
        """The argument record without values."""
        dtype, b, n, t = jnp.dtype(self.dtype), self.batch, self.nodes, self.prior + self.nodes
        of: Any = jax.ShapeDtypeStruct
        new, value = (of((b, t, self.kv_heads, c), dtype) for c in (self.head_dim, self.values or self.head_dim))
        pages = of((self.num_pages, self.kv_heads, self.page, self.wide), dtype)
        return TreeAttentionArgs(
            of((b, n, self.heads, self.head_dim), dtype), pages, of((b, self.columns), jnp.int32), of((b,), jnp.int32),
            new, value, None if self.mask == "causal" else of((b, n, t), jnp.bool_),
            sinks_H=of((self.heads,), jnp.float32) if self.sinks else None, window=self.window, soft_cap=self.soft_cap,
            value_channels=self.values,
        )  # fmt: skip

    def draw_lengths(self, rng: np.random.Generator) -> np.ndarray:
        """Prefix lengths, [B] int32."""
        if self.lengths != "ragged":
            others = self.context // (16 if self.lengths == "long" else 1)
            return np.asarray([self.context] + [others] * (self.batch - 1), np.int32)
        edges = [0, self.context, 1, self.page, self.page - 1, self.page + 1]
        random = rng.integers(0, self.context + 1, self.batch)
        return np.asarray([*edges, *random][: self.batch], np.int32).clip(0, self.context)

    def lowest(self, length: int) -> int:
        """The first position of a prefix that some query may see."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def draw_mask(self, rng: np.random.Generator) -> np.ndarray | None:
        """Visible tree entries, [B, N, T] bool."""
        if self.mask == "causal":
            return None
        b, n, prior = self.batch, self.nodes, self.prior
        own = np.zeros((b, n, n), bool)
        for i in range(b):
            for node in range(n):
                if node:
                    own[i, node] = own[i, node - 1 if self.mask == "chain" else rng.integers(0, node)]
                own[i, node, node] = True
        before = np.broadcast_to(rng.random((b, 1, prior)) < 0.8, (b, n, prior))
        return np.concatenate([before, own], axis=2)

    def draw(self, seed: int = 0, *, poison: bool = False) -> TreeAttentionArgs:
        """Random arguments, made on the device where large.

        Args:
          poison: fill what no length reaches, or every window hides, with NaN, and table entries behind the lengths
            with garbage.
        """
        rng = np.random.default_rng(seed)
        length = self.draw_lengths(rng)
        table = rng.permutation(self.num_pages)[: self.batch * self.columns].reshape(self.batch, self.columns)
        shapes = self.shapes()
        keys = iter(jax.random.split(jax.random.key(seed), 4))
        q, pages, k, v = (
            _normal(next(keys), like) for like in (shapes.q_BNHC, shapes.pages, shapes.tree_k_BTGC, shapes.tree_v_BTGC)
        )
        v = v if self.values is None else k[..., : self.values]
        if poison:
            used = np.zeros((self.num_pages, self.page), bool)
            for i in range(self.batch):
                position = np.arange(self.lowest(length[i]), length[i])
                used[table[i, position // self.page], position % self.page] = True
            pages = jnp.where(jnp.asarray(used)[:, None, :, None], pages, jnp.asarray(jnp.nan, pages.dtype))
            behind = np.arange(self.columns)[None, :] >= -(-length[:, None] // self.page)
            garbage = rng.choice([self.num_pages, -1, 2**30, -(2**30)], table.shape)
            table = np.where(behind, garbage, table)
        table, length, mask = jnp.asarray(table, jnp.int32), jnp.asarray(length), self.draw_mask(rng)
        mask = None if mask is None else jnp.asarray(mask)
        sinks = jnp.asarray(rng.normal(1.0, 2.0, self.heads), jnp.float32) if self.sinks else None
        return TreeAttentionArgs(
            q, pages, table, length, k, v, mask, sinks_H=sinks, window=self.window, soft_cap=self.soft_cap,
            value_channels=self.values,
        )  # fmt: skip

    def defined(self, args: TreeAttentionArgs) -> np.ndarray:
        """The result by the definition, float64: softmax over the prefix that a query sees and its visible entries."""
        floats = (args.q_BNHC, args.pages, args.tree_k_BTGC, args.tree_v_BTGC)
        q, pages, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in floats)
        table, length, mask = (np.asarray(x) for x in (args.table_BM, args.length_B, args.mask))
        h, c = q.shape[2:]
        group = h // k.shape[2]
        out, first = np.zeros((*q.shape[:3], v.shape[3])), c if self.values is None else 0
        for i in range(len(length)):
            position = np.arange(self.lowest(length[i]), length[i])
            prefix = pages[table[i, position // self.page], :, position % self.page]  # [L, G, 2C]
            keys = np.repeat(np.concatenate([prefix[..., :c], k[i]]), group, axis=1)
            values = np.repeat(np.concatenate([prefix[..., first : first + v.shape[3]], v[i]]), group, axis=1)
            at = length[i] + mask[i].sum(axis=1) - 1
            seen = position[None, :] > at[:, None] - (self.window or 2**40)
            seen = np.concatenate([seen, mask[i]], axis=1)
            s = np.einsum("nhc,lhc->hnl", q[i], keys) * c**-0.5
            if self.soft_cap is not None:
                s = self.soft_cap * np.tanh(s / self.soft_cap)
            s = np.where(seen[None], s, -np.inf)
            if args.sinks_H is not None:
                sink = np.broadcast_to(np.asarray(args.sinks_H, np.float64)[:, None, None], (h, s.shape[1], 1))
                s = np.concatenate([s, sink], axis=2)
                keys, values = (np.pad(x, ((0, 1), (0, 0), (0, 0))) for x in (keys, values))
            p = np.exp(s - s.max(axis=-1, keepdims=True))
            out[i] = np.einsum("hnl,lhc->nhc", p / p.sum(axis=-1, keepdims=True), values)
        return out

    def min_bytes(self, args: TreeAttentionArgs) -> int:
        """The prefixes' keys and values, the tree's, queries and results."""
        size = jnp.dtype(self.dtype).itemsize
        seen = np.minimum(np.asarray(args.length_B), self.window or self.context).sum()
        new = self.batch * (self.prior + self.nodes)
        rows = self.batch * self.nodes * self.heads * (self.head_dim + (self.values or self.head_dim))
        return size * (int(seen + new) * self.kv_heads * self.wide + rows)

    def alternatives(self, torch: ModuleType) -> dict[str, Alternative]:
        """PyTorch's attention, which has contiguous keys and no mask."""
        attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
        sdpa = functools.partial(_contiguous, torch), attend
        return {"torch sdpa, contiguous, unmasked": sdpa} if self.lengths == "full" and self.values is None else {}

    def proof(self, kind: Literal["tpu", "gpu"], device: Device) -> Proof[TreeAttentionArgs]:
        """Over a large pool in the layout that the kernel asks for.

        On a TPU that means whole tiles of lanes: where 2C is no multiple of 128, XLA copies a narrower pool.
        """
        itemsize = jnp.dtype(self.dtype).itemsize
        page_bytes = self.kv_heads * self.page * self.wide * itemsize
        args = dataclasses.replace(self, pool=max(self.num_pages, POOL_BYTES // page_bytes)).shapes()
        if kind == "gpu":
            group_rows = self.nodes * self.heads // self.kv_heads
            causal = self.mask == "causal"
            blocks = gpu.blocks_for(self.head_dim, jnp.dtype(self.dtype), group_rows, device.device_kind, causal=causal)
            options: dict[str, Any] = {"blocks": blocks}
        else:
            *pool, width = args.pages.shape
            pages: Any = jax.ShapeDtypeStruct((*pool, round_up(width, LANES)), args.pages.dtype)
            args = dataclasses.replace(args, pages=pages)
            options = {"cores": min(device.num_cores, self.kv_heads)}
        rows = self.batch * round_up(self.nodes, 8) * self.heads
        entries = self.batch * round_up(self.prior + self.nodes, LANES) * self.kv_heads
        return Proof(
            args,
            max_temp_bytes=2 * itemsize * round_up(self.head_dim, LANES) * (rows + entries) + PARTIAL_BYTES,
            limit="queries, results and the tree in the kernel's layout, and partial sums",
            options=options,
        )


def _contiguous(torch: ModuleType, args: TreeAttentionArgs) -> tuple[Any, ...]:
    """Queries, and the pages gathered into contiguous keys and values, as PyTorch tensors [B, heads, L, C]."""
    c = args.q_BNHC.shape[-1]
    kv = jnp.take(args.pages, args.table_BM, axis=0).transpose(0, 2, 1, 3, 4)  # [B, G, M, page, 2C]
    kv = kv.reshape(*kv.shape[:2], -1, 2 * c)
    k = jnp.concatenate([kv[..., :c], args.tree_k_BTGC.transpose(0, 2, 1, 3)], axis=2)
    v = jnp.concatenate([kv[..., c:], args.tree_v_BTGC.transpose(0, 2, 1, 3)], axis=2)
    return tuple(torch.from_dlpack(x).contiguous() for x in (args.q_BNHC.transpose(0, 2, 1, 3), k, v))


#: What serving looks like: Llama-3.1-8B's heads, whole and as one of 4 tensor-parallel shards.
SERVING = (
    Case("decode-b1-32k", 1, 1, context=32768),
    Case("verify8-b1-32k", 1, 8, context=32768),
    Case("decode-b8-8k", 8, 1),
    Case("verify8-b8-8k", 8, 8, quick=True),
    Case("verify8-b8-8k-p128", 8, 8, page=128),
    Case("verify8-b32-8k", 32, 8),
    Case("decode-b64-8k", 64, 1),
    Case("verify8-b64-8k", 64, 8),
    Case("verify8-b64-8k-p128", 64, 8, page=128),
    Case("tree64-b8-8k", 8, 64),
    Case("verify8-b64-2k-ragged", 64, 8, context=2048, lengths="ragged"),
    Case("prefill256-4k", 1, 256, context=4096, mask="causal"),
    Case("prefill512-4k", 1, 512, context=4096, mask="causal"),
    Case("prefill1024-7k", 1, 1024, context=7168, mask="causal"),
    Case("prefill64-b16", 16, 64, context=1024, mask="causal", lengths="ragged"),
    Case("tp4-verify8-b16-8k", 16, 8, heads=8, kv_heads=2),
)

#: What else the kernels promise to serve.
COVERAGE = (
    Case("d64", 4, 8, 16, 8, 64, context=2048, lengths="ragged"),
    Case("d80", 4, 8, 16, 8, 80, context=2048, lengths="ragged"),
    Case("d96", 4, 8, 16, 8, 96, context=2048, lengths="ragged"),
    Case("d96-prefill256", 1, 256, 32, 32, 96, context=1024, mask="causal"),
    Case("d256", 4, 8, 8, 4, 256, context=2048, lengths="ragged", quick=True),
    Case("d256-tree64", 4, 64, 8, 4, 256, context=2048, lengths="ragged"),
    Case("f32", 4, 8, 8, 4, 128, context=1024, lengths="ragged", dtype="float32"),
    Case("f32-d256", 2, 8, 8, 4, 256, context=1024, lengths="ragged", dtype="float32"),
    Case("one-kv-head", 4, 64, 8, 1, 128, context=2048, lengths="ragged"),
    Case("group7", 4, 5, 28, 4, 128, context=2048, lengths="ragged"),
    Case("page16", 4, 16, 8, 4, 128, page=16, context=2048, lengths="ragged"),
    Case("page256", 4, 16, 8, 4, 128, page=256, context=2048, lengths="ragged"),
    Case("window", 4, 8, 8, 4, 128, context=4096, lengths="ragged", window=1024),
    Case("soft-cap", 4, 8, 8, 4, 256, context=2048, lengths="ragged", soft_cap=50.0),
    Case("sinks", 4, 8, 64, 8, 64, context=4096, lengths="ragged", window=128, sinks=True, quick=True),
    Case("prior-levels", 4, 8, 16, 8, 128, context=2048, lengths="ragged", prior=47, quick=True),
    Case("long-128k", 1, 8, context=131072),
    Case("latent-h16", 8, 4, 16, 1, 576, values=512),
    Case("latent-h128", 8, 4, 128, 1, 576, values=512),
    Case("latent-h128-b1-32k", 1, 1, 128, 1, 576, context=32768, values=512),
    Case("latent-prefill256", 1, 256, 16, 1, 576, context=4096, mask="causal", values=512),
    Case("latent-f32", 2, 4, 16, 1, 576, context=1024, lengths="ragged", dtype="float32", values=512),
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
    Case("small-sinks", 6, 4, 6, 2, 64, 16, 48, lengths="ragged", dtype="float32", sinks=True),
    Case("small-latent", 6, 4, 6, 1, 40, 16, 48, lengths="ragged", dtype="float32", values=24),
    Case("small-latent-causal", 5, 21, 4, 1, 40, 16, 48, mask="causal", lengths="ragged", dtype="float32", values=32),
    Case("small-prefill", 1, 70, 4, 2, 64, 16, 48, mask="chain", dtype="float32"),
    Case("small-causal", 5, 70, 4, 2, 64, 16, 48, mask="causal", lengths="ragged", dtype="float32"),
    Case("small-group7", 6, 3, 7, 1, 64, 16, 48, lengths="ragged", dtype="float32"),
)

CASES = {case.name: case for case in (*SERVING, *COVERAGE, *SMALL)}
SUITE = registry.Suite(OPERATION, SERVING, COVERAGE, SMALL)
