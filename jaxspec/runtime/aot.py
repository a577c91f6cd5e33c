"""What the engine adds to `python -m pallas_kernels.aot`: the commit, and whole rounds at a real model's size.

Owns the sizes. The command reaches these functions by name, so the kernels' library knows
nothing of the engine; they describe programs, and compile nothing themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.cache import commit, init_pages
from jaxspec.models.base import ModelConfig, RopeScaling
from jaxspec.models.layers import Linear, Shared
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.sharded import TENSOR_AXIS
from jaxspec.runtime.sharding import abstract_core, abstract_round
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import HeadCore
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import PLAIN, Tier
from pallas_kernels.aot.programs import Program, lowering
from pallas_kernels.aot.targets import Target

SHARDS = 4
BUCKET = 16
ROUNDS = 4
CHAIN, TREE = Tier(3), Tier(3, 4, 12)
#: Of packed rounds: two drafts a row.
TOKENS = 3 * BUCKET
DTYPE = jnp.dtype(jnp.bfloat16)
GEOMETRY = Geometry(slots=BUCKET, num_pages=2048, page_size=64, pages_per_seq=129, max_depth=CHAIN.depth)
#: For texts of 131,072 tokens: pages of one such text and of fifteen of a thousand tokens.
LONG = dataclasses.replace(GEOMETRY, num_pages=2304, pages_per_seq=2049, max_seq_len=131072)

#: Llama 3.1 8B and Llama 3.2 1B.
LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    max_position_embeddings=131072,
)  # fmt: skip
LLAMA_1B = dataclasses.replace(
    LLAMA_8B, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, tie_word_embeddings=True,
    rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
)  # fmt: skip
#: For the gate: a quarter of the layers, which compile in a third of the time, and four times the pages of each.
LLAMA_1B_SHORT = dataclasses.replace(LLAMA_1B, num_layers=4)
#: And an eighth, for what the length of page tables changes, which it does in each layer alike.
LLAMA_8B_SHORT = dataclasses.replace(LLAMA_8B, num_layers=4)


def head_config(cfg: ModelConfig) -> Eagle3Config:
    """A head as wide as its target, with the draft vocabulary of the published EAGLE-3 heads."""
    edge = cfg.num_layers // 4
    return Eagle3Config(
        hidden_size=cfg.hidden_size, target_hidden_size=cfg.hidden_size, intermediate_size=cfg.intermediate_size,
        num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim, vocab_size=cfg.vocab_size,
        draft_vocab_size=32000, aux_layer_ids=(min(2, edge), 2 * edge, cfg.num_layers - min(3, edge)),
        rope_theta=cfg.rope_theta,
    )  # fmt: skip


def device_bytes(tree: Any) -> int:
    """Bytes of sharded shapes on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _layer_bytes(cfg: ModelConfig, state: DecodeState, shards: int) -> int:
    """Bytes of one layer's weights on a device, or of its part of the pool where that is less."""
    projections = cfg.hidden_size * cfg.head_dim * 2 * (cfg.num_heads + cfg.num_kv_heads)
    weights = (projections + 3 * cfg.hidden_size * cfg.intermediate_size) * DTYPE.itemsize // shards
    return min(weights, device_bytes(state.pages) // cfg.num_layers)


def engine_round(target: Target) -> Iterator[Program]:
    """Rounds of a batch of 16 with a chain of 3 from an EAGLE-3 head, the state donated: 8B over 4 devices, 1B on one.

    And of 1B several in one executable, and packed ones, of a chain and of a tree; of 8B one whose page tables reach
    131,072 tokens. The gate's are 1B with a quarter of its layers and that one with an eighth, with as large pools.

    Neither the pool nor the weights may be copied: a round gets less for its intermediate
    values than one layer's weights take, or one layer's part of the pool; where rows sample,
    the adjusted logits, the noise and two more of their size besides. Where the vocabulary is
    split over devices, each one verifies its own part, in plain XLA (speculation.verifier).
    """
    both = ("tree_attention", "rejection_sampling")
    short = dataclasses.replace(GEOMETRY, num_pages=4 * GEOMETRY.num_pages)
    short_long = dataclasses.replace(LONG, num_pages=8 * LONG.num_pages)
    for size, cfg, shards, kernels, sizes in (
        ("8b", LLAMA_8B, SHARDS, both[:1], GEOMETRY), ("8b-128k", LLAMA_8B, SHARDS, both[:1], LONG),
        ("8b-128k-short", LLAMA_8B_SHORT, SHARDS, both[:1], short_long),
        ("1b", LLAMA_1B, 1, both, GEOMETRY), ("1b-short", LLAMA_1B_SHORT, 1, both, short),
    ):  # fmt: skip
        mesh = target.mesh(shards, TENSOR_AXIS)
        geo = dataclasses.replace(sizes, kernels=target.kind)
        head = head_config(cfg)
        core = abstract_core(lambda head=head, n=shards: HeadCore(tensor_parallel(Eagle3Head(head, dtype=DTYPE), n)))
        described = abstract_round(
            cfg, geo, mesh, BUCKET, dtype=DTYPE, drafter=AutoregressiveDrafter(core, geo), draft_params=core.params
        )
        state = described.arguments[2]
        layer = _layer_bytes(cfg, state, shards)
        logits = BUCKET * CHAIN.num_nodes * cfg.vocab_size * 4 // shards
        whole = ((CHAIN, False, 1, None), *([] if "128k" in size else [(CHAIN, True, 1, None)]))
        # Larger rounds are longer than the host's part of one.
        more = ((CHAIN, False, ROUNDS, None), (CHAIN, False, 1, TOKENS), (TREE, False, 1, TOKENS))
        for tier, sampled, rounds, tokens in (*whole, *(more if size == "1b" else ())):
            variant = ("sampled" if sampled else "greedy") + (f"-x{rounds}" if rounds > 1 else "")
            variant += "" if tokens is None else f"-packed{tokens}"
            shape = f"chain{tier.depth}" if tier.is_chain else f"tree{tier.depth}x{tier.topk}of{tier.num_nodes}"
            yield Program(
                op="round",
                name=f"{size}-tp{shards}-b{BUCKET}-{shape}-{variant}",
                lower=functools.partial(
                    described.lower, tier, sampled=sampled, rounds=rounds, tokens=tokens, platforms=(target.platform,)
                ),
                max_temp_bytes=layer + (4 * logits if sampled else 0),
                limit="one layer's weights or pool" + (", logits four times" if sampled else ""),
                in_place_bytes=device_bytes(state),
                kernels=kernels,
                quick=not sampled and size not in ("8b-128k", "1b"),
            )


def sharded_round(target: Target) -> Iterator[Program]:
    """Plain rounds of one layer over two devices, for every usual bucket: they exchange activations and a few words.

    Three sums a layer and embedding of [B, E], and three words a row and device at the end. At one row XLA took the
    whole table of embeddings, and all logits.
    """
    cfg, shards = dataclasses.replace(LLAMA_1B, num_layers=1), 2
    mesh = target.mesh(shards, TENSOR_AXIS)
    for bucket in (1, 2, 8, 16, 32):
        geo = dataclasses.replace(GEOMETRY, slots=bucket, num_pages=16 * GEOMETRY.num_pages, kernels=target.kind)
        described = abstract_round(cfg, geo, mesh, bucket, dtype=DTYPE)
        rows = max(2, bucket)  # a single one is padded
        yield Program(
            op="sharded_round",
            name=f"1b-tp{shards}-b{bucket}-plain",
            lower=functools.partial(described.lower, PLAIN, platforms=(target.platform,)),
            max_temp_bytes=64 << 20,
            limit="a quarter of the table of embeddings",
            max_collective_bytes=rows * (3 * cfg.hidden_size * DTYPE.itemsize + 16 * shards),
            in_place_bytes=device_bytes(described.arguments[2]),
            kernels=("tree_attention",),
            quick=bucket == 1 and target.kind == "gpu",
        )


def placed_round(target: Target) -> Iterator[Program]:
    """Rounds of a chain of 3 over two devices, whose drafter both share or each has whole; two layers of 8B.

    Whole, an EAGLE-3 head exchanges nothing: what travels are the target's own five sums a round and the words of its
    verdict. An MTP module, which has its target's tables, then sums the rows of its embedding and words of each shard's
    best token. Shared, each adds three sums to every step, and one to the first.
    """
    cfg, shards = dataclasses.replace(LLAMA_8B, num_layers=2), 2
    head = dataclasses.replace(head_config(cfg), aux_layer_ids=(0, 1, 2))
    layer = dataclasses.replace(cfg, num_layers=1)
    mesh = target.mesh(shards, TENSOR_AXIS)

    def eagle3() -> Eagle3Head:
        return Eagle3Head(head, dtype=DTYPE)

    def mtp() -> MtpHead:
        tables = [Shared(jnp.zeros(shape, DTYPE)) for shape in ((cfg.vocab_size, cfg.hidden_size),) * 2]
        output = Linear(1, 1, dtype=DTYPE, rngs=None)
        output.kernel = Shared(tables[1][...].T)  # pyright: ignore[reportAttributeAccessIssue]
        return MtpHead(MtpConfig(layer, cfg.num_layers), tables[0], output, dtype=DTYPE)

    # Sums of the window's tokens, of each token that is drafted after it, and words of the likeliest of each.
    for name, build, whole, window, step, words in (
        ("own-tables", eagle3, True, 0, 0, 0), ("own-tables", eagle3, False, 4, 3, 1),
        ("lent-tables", mtp, True, 1, 1, 1),
    ):  # fmt: skip
        for bucket in (1, BUCKET):
            geo = dataclasses.replace(
                GEOMETRY, slots=bucket, num_pages=8 * GEOMETRY.num_pages, kernels=target.kind, whole_drafter=whole
            )
            core = abstract_core(
                lambda build=build, whole=whole: HeadCore(tensor_parallel(build(), shards, lent=whole))
            )
            described = abstract_round(
                cfg, geo, mesh, bucket, dtype=DTYPE, drafter=AutoregressiveDrafter(core, geo), draft_params=core.params
            )
            rows = max(2, bucket)  # a single one is padded
            nodes = bucket * CHAIN.num_nodes
            summed = (5 + window) * nodes + step * rows * (CHAIN.depth - 1)
            yield Program(
                op="placed_round",
                name=f"8b-tp{shards}-b{bucket}-chain{CHAIN.depth}-{name}-{'whole' if whole else 'shared'}",
                lower=functools.partial(described.lower, CHAIN, platforms=(target.platform,)),
                max_temp_bytes=_layer_bytes(cfg, described.arguments[2], shards),
                limit="one layer's weights or pool",
                max_collective_bytes=summed * cfg.hidden_size * DTYPE.itemsize + (4 << 10),
                # Of the likeliest token TPUs exchange score and number apart.
                max_collectives=5 + 1 + window + step * (CHAIN.depth - 1) + 2 * words * CHAIN.depth,
                in_place_bytes=device_bytes(described.arguments[2]),
                kernels=("tree_attention",),
            )  # fmt: skip


#: What rounds take along on accelerators (jaxspec.defaults).
ALONG = PrefillShape(128, 4, 128)


def mixed_round(target: Target) -> Iterator[Program]:
    """Rounds of 16 rows that take chunks of prompts along, plain and of a chain from an EAGLE-3 head; two layers of 8B.

    On one device and on two, which exchange sums of activations and a few words: the target's five of all tokens, four
    of the chunks' for the head, and for its own drafts four of the window and three more a token. XLA used to split
    the head's features and the counts of tokens, and to gather them: 35 MB a round.
    """
    cfg = dataclasses.replace(LLAMA_8B, num_layers=2)
    geo = dataclasses.replace(GEOMETRY, num_pages=6 * GEOMETRY.num_pages, prefill_chunk=1024, kernels=target.kind)
    head = dataclasses.replace(head_config(cfg), aux_layer_ids=(0, 1, 2))
    for shards in (1, 2):
        mesh = target.mesh(shards, TENSOR_AXIS)
        core = abstract_core(lambda n=shards: HeadCore(tensor_parallel(Eagle3Head(head, dtype=DTYPE), n)))
        described = abstract_round(
            cfg, geo, mesh, BUCKET, dtype=DTYPE, drafter=AutoregressiveDrafter(core, geo), draft_params=core.params
        )
        for tier in (PLAIN, CHAIN):
            nodes = BUCKET * tier.num_nodes
            summed = 5 * (ALONG.size + nodes) + 4 * ALONG.size
            if tier is not PLAIN:
                summed += 4 * nodes + 3 * BUCKET * (tier.depth - 1)
            yield Program(
                op="mixed_round",
                name=f"8b-tp{shards}-b{BUCKET}-{'plain' if tier is PLAIN else f'chain{tier.depth}'}-with{ALONG.size}",
                lower=functools.partial(
                    described.lower, tier, sampled=True, chunks=ALONG, platforms=(target.platform,)
                ),
                max_temp_bytes=_layer_bytes(cfg, described.arguments[2], shards)
                + 4 * (nodes + ALONG.rows) * cfg.vocab_size * 4 // shards,
                limit="one layer's weights or pool, logits four times",
                max_collective_bytes=summed * cfg.hidden_size * DTYPE.itemsize + (32 << 10),
                in_place_bytes=device_bytes(described.arguments[2]),
                kernels=("tree_attention",),
                quick=shards > 1 and tier is PLAIN and target.kind == "gpu",
            )  # fmt: skip


def kv_commit(target: Target) -> Iterator[Program]:
    """The scatter of new keys and values into the donated pool of Llama 3.1 8B, on one device and over 4.

    The new tokens may be rearranged and padded on their way; the pool may not move.
    """
    cfg, geo = LLAMA_8B, GEOMETRY
    for shards in (1, SHARDS):
        mesh = target.mesh(shards, TENSOR_AXIS)
        split = lambda axis, mesh=mesh: NamedSharding(mesh, PartitionSpec(*[None] * axis, TENSOR_AXIS))
        # As many bytes on every device: a quarter of the pages where nothing is split.
        num_pages = geo.num_pages * shards // SHARDS
        pool = functools.partial(
            init_pages, cfg.num_layers, num_pages, cfg.num_kv_heads, geo.page_size, cfg.kv_width, DTYPE
        )
        empty = jax.eval_shape(pool)
        pages = jax.ShapeDtypeStruct(empty.shape, empty.dtype, sharding=split(1))
        for name, rows, tokens in (("chain3", BUCKET, 4), ("tree-path7", BUCKET, 8), ("prefill512", 1, 512)):
            whole = NamedSharding(mesh, PartitionSpec())
            make = lambda *shape, dtype=jnp.int32, at=whole: jax.ShapeDtypeStruct(shape, dtype, sharding=at)
            new = make(cfg.num_layers, rows, tokens, cfg.num_kv_heads, cfg.kv_width, dtype=DTYPE, at=split(3))
            arguments = (
                pages, new, make(rows, geo.pages_per_seq), make(rows, tokens), make(rows, tokens, dtype=jnp.bool_),
                make(rows, dtype=jnp.bool_),
            )  # fmt: skip
            function = lambda pages, new, table, position, write, ready, num_pages=num_pages: commit(
                pages, new, table, position, write, num_pages, ready_B=ready
            )
            yield Program(
                op="kv_commit",
                name=f"8b-tp{shards}-b{rows}-{name}",
                lower=lowering(
                    function, arguments, target, mesh, donate_argnums=0, out_shardings=pages.sharding
                ),
                max_temp_bytes=2 * device_bytes(new) + (1 << 20),
                limit="the new tokens, rearranged and padded",
                in_place_bytes=device_bytes(pages),
                quick=name == "chain3",
            )  # fmt: skip
