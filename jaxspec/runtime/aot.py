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
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.cache import commit, init_pages
from jaxspec.models import few_rows
from jaxspec.models.base import Experts, ModelConfig, RopeScaling, TargetModel
from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.layers import Linear, Shared
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.mxfp4 import BLOCK, Mxfp4
from jaxspec.models.quantised import Quantised
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
from pallas_kernels.small_batch import gpu as small_batch
from pallas_kernels.small_batch.packed import FLOAT4

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


def _head(cfg: ModelConfig) -> Eagle3Config:
    """A head as wide as its target, with the draft vocabulary of the published EAGLE-3 heads."""
    edge = cfg.num_layers // 4
    return Eagle3Config(
        hidden_size=cfg.hidden_size, target_hidden_size=cfg.hidden_size, intermediate_size=cfg.intermediate_size,
        num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim, vocab_size=cfg.vocab_size,
        draft_vocab_size=32000, aux_layer_ids=(min(2, edge), 2 * edge, cfg.num_layers - min(3, edge)),
        rope_theta=cfg.rope_theta,
    )  # fmt: skip


def _device_bytes(tree: Any) -> int:
    """Bytes of sharded shapes on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _layer_bytes(cfg: ModelConfig, state: DecodeState, shards: int) -> int:
    """Bytes of one layer's weights on a device, or of its part of the pool where that is less."""
    projections = cfg.hidden_size * cfg.head_dim * 2 * (cfg.num_heads + cfg.num_kv_heads)
    weights = (projections + 3 * cfg.hidden_size * cfg.intermediate_size) * DTYPE.itemsize // shards
    return min(weights, _device_bytes(state.pages) // cfg.num_layers)


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
        head = _head(cfg)
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
                in_place_bytes=_device_bytes(state),
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
            in_place_bytes=_device_bytes(described.arguments[2]),
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
    head = dataclasses.replace(_head(cfg), aux_layer_ids=(0, 1, 2))
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
                in_place_bytes=_device_bytes(described.arguments[2]),
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
    head = dataclasses.replace(_head(cfg), aux_layer_ids=(0, 1, 2))
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
                in_place_bytes=_device_bytes(described.arguments[2]),
                kernels=("tree_attention",),
            )  # fmt: skip


#: Of a scale's inputs, in the formats whose rounds are compiled; None: all of a linear map's.
QUANTISED = {"int8": (jnp.int8, None), "fp8-block128": (jnp.float8_e4m3fn, 128), "int4-g128": (jnp.int4, 128)}


def _quantised(model: Any, kind: Any, group: int | None, *, output: bool = False) -> Any:
    """The model with kernels of a format in its layers, as `checkpointing.quantised` makes them.

    Args:
      output: in its output layer, too.
    """
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Linear) and (output or "lm_head" not in path):
            d_in, d_out = node.kernel[...].shape
            scale = jnp.zeros((1 if group is None else d_in // group, d_out), jnp.float32)
            node.kernel = nnx.Param(Quantised(jnp.zeros((d_in, d_out), kind), scale))
    return model


def quantised_round(target: Target) -> Iterator[Program]:
    """Plain rounds of two layers at 8B shapes with quantised kernels, at 1 and 16 rows, on one device.

    No kernel may be expanded in memory: a round gets less for its intermediate values than the smallest of a layer's
    four would take in bfloat16, besides the sums of groups before they are added up. TPUs may fetch the largest kernel
    into VMEM as it is, while they still compute something else. On Hopper also with packed kernels at 64 rows, which
    need no such sums. And a chain of 3 of an EAGLE-3 head in int8 for a target in bfloat16, its output layer included.
    """
    cfg = dataclasses.replace(LLAMA_8B, num_layers=2)
    mesh = target.mesh(1, TENSOR_AXIS)
    geo = dataclasses.replace(GEOMETRY, num_pages=2 * GEOMETRY.num_pages, kernels=target.kind)
    one = _out_bytes(cfg)
    for name, (kind, group) in QUANTISED.items():
        own = target.name in ("h100", "h200") and small_batch.too_old() is None
        for shards, bucket in ((1, 4 * BUCKET), (2, 4 * BUCKET), (2, BUCKET)) if own else ():

            def change(model: TargetModel, kind: Any = kind, group: Any = group, shards: int = shards) -> TargetModel:
                model = _quantised(model, kind=kind, group=group)
                return few_rows.prepare(tensor_parallel(model, shards) if shards > 1 else model)

            described = abstract_round(cfg, geo, target.mesh(shards, TENSOR_AXIS), bucket, dtype=DTYPE, change=change)
            # Two sums a layer, the embeddings', which counts twice where something else is computed meanwhile, and the
            # best logits.
            summed = bucket * ((2 * cfg.num_layers + 2) * cfg.hidden_size * DTYPE.itemsize + 16 * shards)
            yield Program(
                op="quantised_round",
                name=f"8b-{name}{f'-tp{shards}' if shards > 1 else ''}-b{bucket}-packed",
                lower=functools.partial(described.lower, PLAIN, platforms=(target.platform,)),
                max_temp_bytes=one + 4 * bucket * cfg.vocab_size,
                limit="a layer's smallest kernel in bfloat16, and logits",
                max_collective_bytes=summed if shards > 1 else None,
                in_place_bytes=_device_bytes(described.arguments[2]),
                kernels=("tree_attention", f"small_batch_{jnp.dtype(kind).name}_{'many' if bucket > 32 else 'heads'}"),
            )
        if name == "int8":
            yield _quantised_head(target, cfg, geo, own=own)
        bits = 4 if kind is jnp.int4 else 8
        for bucket in (1, BUCKET):
            # A single row is padded to two.
            sums = 0 if group is None else 8 * max(2, bucket) * cfg.hidden_size // group * cfg.intermediate_size
            described = abstract_round(
                cfg, geo, mesh, bucket, dtype=DTYPE, change=functools.partial(_quantised, kind=kind, group=group)
            )
            yield Program(
                op="quantised_round",
                name=f"8b-{name}-b{bucket}",
                lower=functools.partial(described.lower, PLAIN, platforms=(target.platform,)),
                max_temp_bytes=one + sums,
                limit="a layer's smallest kernel in bfloat16, and sums of groups",
                max_vmem_bytes=2 * cfg.hidden_size * cfg.intermediate_size * bits // 8,
                in_place_bytes=_device_bytes(described.arguments[2]),
                kernels=("tree_attention",),
            )


def _out_bytes(cfg: ModelConfig) -> int:
    """The smallest of a layer's kernels, in DTYPE."""
    return cfg.hidden_size * cfg.num_heads * cfg.head_dim * DTYPE.itemsize


def _quantised_head(target: Target, cfg: ModelConfig, geo: Geometry, *, own: bool) -> Program:
    """A round of `quantised_round` whose drafter is in int8, packed where there are kernels for that (`own`)."""

    def build() -> HeadCore:
        sizes = dataclasses.replace(_head(cfg), aux_layer_ids=(0, 1, 2))
        head = _quantised(Eagle3Head(sizes, dtype=DTYPE), jnp.int8, None, output=True)
        return HeadCore(few_rows.pack_maps(head) if own else head)

    core = abstract_core(build)
    described = abstract_round(
        cfg, geo, target.mesh(1, TENSOR_AXIS), BUCKET, dtype=DTYPE, drafter=AutoregressiveDrafter(core, geo),
        draft_params=core.params,
    )  # fmt: skip
    return Program(
        op="quantised_round",
        name=f"8b-bf16-b{BUCKET}-chain{CHAIN.depth}-int8-head{'-packed' if own else ''}",
        lower=functools.partial(described.lower, CHAIN, platforms=(target.platform,)),
        max_temp_bytes=4 * BUCKET * CHAIN.num_nodes * cfg.vocab_size + _out_bytes(cfg),
        limit="logits, and the head's smallest kernel in bfloat16",
        max_vmem_bytes=2 * cfg.hidden_size * cfg.intermediate_size,
        in_place_bytes=_device_bytes(described.arguments[2]),
        kernels=("tree_attention", *(("small_batch_int8_many",) if own else ())),
    )


#: Qwen3-30B-A3B's and gpt-oss-20b's first two layers.
QWEN3_30B = ModelConfig(
    family="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=2, num_heads=32,
    num_kv_heads=4, head_dim=128, rope_theta=1e6, qk_norm=True, experts=Experts(128, 8, 768, (0, 1)),
    max_position_embeddings=40960,
)  # fmt: skip
GPT_OSS_20B = ModelConfig(
    family="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_layers=2, num_heads=64,
    num_kv_heads=8, head_dim=64, rope_theta=150000.0, attention_bias=True, output_bias=True, attention_sinks=True,
    norm_gain="float32", sliding_window=128, sliding_layers=(0,), max_position_embeddings=131072,
    experts=Experts(32, 4, 2880, (0, 1), scores="top_k", bias=True, hidden_act="clamped_swiglu"),
)  # fmt: skip


def _experts_for(model: TargetModel, backend: str, form: str | None, packed: bool, shards: int) -> TargetModel:
    """The model with experts that a backend reads, in few bits by `form` (a key of QUANTISED, or "mxfp4").

    Packed, as engines on Hopper have it: with the kernels of few rows for what else they serve.
    """
    for _, node in nnx.iter_graph(model):
        if not isinstance(node, MixtureOfExperts):
            continue
        node.backend = backend
        if form is None:
            continue
        for name in ("gate_up", "down"):
            count, d_in, d_out = getattr(node, name)[...].shape
            if form == "mxfp4":
                codes = jnp.zeros((count, d_in // 2, d_out), jnp.uint8)
                few: Any = Mxfp4(codes, jnp.zeros((count, d_in // BLOCK, d_out), jnp.uint8))
            else:
                kind, group = QUANTISED[form]
                scale = jnp.zeros((count, 1 if group is None else d_in // group, d_out), jnp.float32)
                few = Quantised(jnp.zeros((count, d_in, d_out), kind), scale)
            setattr(node, name, nnx.Param(few))
    if not packed:
        return model
    model = tensor_parallel(model, shards) if shards > 1 else model
    for _, node in nnx.iter_graph(model):
        if isinstance(node, MixtureOfExperts):
            node.pack()
    return few_rows.prepare(model)


def experts_round(target: Target) -> Iterator[Program]:
    """Plain rounds of two layers of mixtures of experts, in bfloat16 and in few bits, at 1 and 16 rows, on one device;
    packed ones on two as well. On Hopper also at 128 rows, by the kernel for many.

    Experts that no token uses may not be copied, nor those in few bits be expanded all at once: a round gets less for
    its intermediate values than a sixteenth of what a layer's experts take in bfloat16, of many rows besides logits.
    Of TPUs one row alone.
    """
    geo = dataclasses.replace(GEOMETRY, num_pages=6 * GEOMETRY.num_pages, kernels=target.kind)
    forms = [
        ("30b-a3b", QWEN3_30B, None), ("30b-a3b-fp8", QWEN3_30B, "fp8-block128"), ("gpt-oss-20b", GPT_OSS_20B, "mxfp4"),
    ]  # fmt: skip
    # As on Hopper, by kernels that older JAX cannot write.
    packed = target.name in ("h100", "h200") and small_batch.too_old() is None
    hopper = [("30b-a3b-int4-packed", QWEN3_30B, "int4-g128"), ("gpt-oss-20b-packed", GPT_OSS_20B, "mxfp4")]
    for name, cfg, form in [*forms, *(hopper if packed else [])]:
        own = name.endswith("-packed")
        of = "bfloat16" if form is None else "int4" if cfg is QWEN3_30B else FLOAT4
        assert cfg.experts is not None
        whole = 3 * cfg.experts.count * cfg.hidden_size * cfg.experts.inner * DTYPE.itemsize
        buckets = (1, 8, BUCKET) if own else (1, BUCKET) if target.kind == "gpu" else (1,)
        shared = [(2, BUCKET), (2, 8 * BUCKET)] if own else []
        if packed and (own or form is None):
            buckets = *buckets, 8 * BUCKET
        for shards, bucket in [*((1, bucket) for bucket in buckets), *shared]:
            # Sums of attention and, in float32, of experts a layer, the embeddings', and the best logits. All but the
            # experts' may count twice, as above.
            summed = bucket * ((cfg.num_layers * (2 + 2) + 2) * cfg.hidden_size * DTYPE.itemsize + 16 * shards)
            many = bucket > BUCKET
            kind = f"small_batch_{of}_experts_{'many_' if many else ''}"
            kernels = (f"{kind}up", f"{kind}down") if own or many else ()
            backend = "hopper" if packed else target.kind
            change = functools.partial(_experts_for, backend=backend, form=form, packed=own, shards=shards)
            described = abstract_round(cfg, geo, target.mesh(shards, TENSOR_AXIS), bucket, dtype=DTYPE, change=change)
            yield Program(
                op="experts_round",
                name=f"{name}{f'-tp{shards}' if shards > 1 else ''}-b{bucket}",
                lower=functools.partial(described.lower, PLAIN, platforms=(target.platform,)),
                max_temp_bytes=whole // 16 + (4 * bucket * cfg.vocab_size if many else 0),
                limit=f"a sixteenth of a layer's experts in bfloat16{', and logits' if many else ''}",
                max_collective_bytes=summed if shards > 1 else None,
                in_place_bytes=_device_bytes(described.arguments[2]),
                kernels=("tree_attention", *kernels),
            )


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
                max_temp_bytes=2 * _device_bytes(new) + (1 << 20),
                limit="the new tokens, rearranged and padded",
                in_place_bytes=_device_bytes(pages),
                quick=name == "chain3",
            )  # fmt: skip
