"""Whole rounds with weights of few bits and with mixtures of experts, for `python -m pallas_kernels.aot`.

Beside `aot`, whose sizes these have too: the command reaches them by name, and they compile nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxspec.models import few_rows
from jaxspec.models.base import Experts, ModelConfig, TargetModel
from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.layers import Linear
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.mxfp4 import BLOCK, Mxfp4
from jaxspec.models.quantised import Quantised
from jaxspec.models.sharded import TENSOR_AXIS
from jaxspec.runtime.aot import BUCKET, CHAIN, DTYPE, GEOMETRY, LLAMA_8B, device_bytes, head_config
from jaxspec.runtime.sharding import abstract_core, abstract_round
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import HeadCore
from jaxspec.speculation.drafters.eagle3_head import Eagle3Head
from jaxspec.speculation.state import Geometry
from jaxspec.tier import PLAIN
from pallas_kernels.aot.programs import Program
from pallas_kernels.aot.targets import Target
from pallas_kernels.sizes import EXPANDED
from pallas_kernels.small_batch import gpu as small_batch
from pallas_kernels.small_batch.packed import FLOAT4

#: Of a scale's inputs, in the formats whose rounds are compiled; None: all of a linear map's.
QUANTISED: dict[str, tuple[Any, int | None]] = {
    "int8": (jnp.int8, None), "fp8-block128": (jnp.float8_e4m3fn, 128), "int4-g128": (jnp.int4, 128),
    "nvfp4": (jnp.float4_e2m1fn, 16),
}  # fmt: skip


def _quantised(
    model: Any, kind: Any, group: int | None, *, output: bool = False, zeros: bool = False, order: bool = False
) -> Any:
    """The model with kernels of a format in its layers, as `checkpointing.quantised` makes them.

    Args:
      output: in its output layer, too.
      zeros: with zero points.
      order: with inputs in another order.
    """
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Linear) and (output or "lm_head" not in path):
            d_in, d_out = node.kernel[...].shape
            scale = jnp.zeros((1 if group is None else d_in // group, d_out), jnp.float32)
            zero = jnp.zeros(scale.shape, jnp.int8) if zeros else None
            own = jnp.zeros((d_in,), jnp.int32) if order else None
            node.kernel = nnx.Param(Quantised(jnp.zeros((d_in, d_out), kind), scale, zero, own))
    return model


def _kernel(kind: Any, bucket: int) -> str:
    """What a round's layers are multiplied by, among others."""
    if bucket > 32:
        return "many"
    if not jnp.issubdtype(kind, jnp.integer) or bucket > 4:
        return "heads"
    return "heads_integers" if bucket == 1 else "swiglu_integers"


def quantised_round(target: Target) -> Iterator[Program]:
    """Plain rounds of two layers at 8B shapes with quantised kernels, at 1 and 16 rows, on one device.

    No kernel may be expanded in memory: a round gets less for its intermediate values than the smallest of a layer's
    four would take in bfloat16, besides the sums of groups before they are added up; of NVFP4's groups GPUs expand a
    bounded share of the columns at a time. TPUs may fetch the largest kernel into VMEM as it is, while they still
    compute something else. On Hopper also with packed kernels at 1 and 64 rows, which need no such sums, of int4 at 4
    with its output layer, and with zero points, of groups of 128 and 32, at 1 in activation order, too. And a chain of
    3 of an EAGLE-3 head in int8 for a target in bfloat16, its output layer included.
    """
    cfg = dataclasses.replace(LLAMA_8B, num_layers=2)
    mesh = target.mesh(1, TENSOR_AXIS)
    geo = dataclasses.replace(GEOMETRY, num_pages=2 * GEOMETRY.num_pages, kernels=target.kind)
    one = _out_bytes(cfg)
    for name, (kind, group) in QUANTISED.items():
        own = target.name in ("h100", "h200") and small_batch.too_old() is None and kind is not jnp.float4_e2m1fn
        sizes = (1, 1), (1, 4 * BUCKET), (2, 4 * BUCKET), (2, BUCKET), *([(1, 4)] if kind is jnp.int4 else [])
        for shards, bucket in sizes if own else ():
            last = bucket == 4  # also the output layer, of several rows as integers

            def change(
                model: TargetModel, kind: Any = kind, group: Any = group, shards: int = shards, last: bool = last
            ) -> TargetModel:
                model = _quantised(model, kind=kind, group=group, output=last)
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
                in_place_bytes=device_bytes(described.arguments[2]),
                kernels=(
                    "tree_attention", f"small_batch_{jnp.dtype(kind).name}_{_kernel(kind, bucket)}",
                    *(["small_batch_int4_logits_integers"] if last else []),
                ),
            )  # fmt: skip
        if name == "int8":
            yield _quantised_head(target, cfg, geo, own=own)
        asymmetric = [
            (128, 1, False),
            (128, 1, True),
            (128, 4 * BUCKET, False),
            (32, 1, False),
            (32, 4 * BUCKET, False),
        ]
        for each, bucket, order in asymmetric if own and kind is jnp.int4 else ():
            zeros = lambda model, each=each, order=order: few_rows.prepare(
                _quantised(model, jnp.int4, each, zeros=True, order=order)
            )
            described = abstract_round(cfg, geo, mesh, bucket, dtype=DTYPE, change=zeros)
            yield Program(
                op="quantised_round",
                name=f"8b-int4-g{each}-zeros{'-order' if order else ''}-b{bucket}-packed",
                lower=functools.partial(described.lower, PLAIN, platforms=(target.platform,)),
                max_temp_bytes=one + 4 * bucket * cfg.vocab_size,
                limit="a layer's smallest kernel in bfloat16, and logits",
                in_place_bytes=device_bytes(described.arguments[2]),
                kernels=("tree_attention", f"small_batch_int4_zeros_{_kernel(jnp.int4, bucket)}"),
            )
        bits = 4 if kind in (jnp.int4, jnp.float4_e2m1fn) else 8
        # On a TPU also with more rows than have sums of groups: what is expanded before may not leave vector memory.
        more = (4 * BUCKET,) if group is not None and target.kind == "tpu" else ()
        for bucket in (1, BUCKET, *more):
            # A single row is padded to two.
            sums = 0 if group is None else 8 * max(2, bucket) * cfg.hidden_size // group * cfg.intermediate_size
            sums = 4 * bucket * cfg.vocab_size if bucket in more else sums
            # Of small groups weights are expanded instead, a share of the columns at a time.
            small, besides = name == "nvfp4" and bucket not in more, "logits" if bucket in more else "sums of groups"
            described = abstract_round(
                cfg, geo, mesh, bucket, dtype=DTYPE, change=functools.partial(_quantised, kind=kind, group=group)
            )
            yield Program(
                op="quantised_round",
                name=f"8b-{name}-b{bucket}",
                lower=functools.partial(described.lower, PLAIN, platforms=(target.platform,)),
                max_temp_bytes=EXPANDED if small else one + sums,
                limit="what is expanded at a time"
                if small
                else f"a layer's smallest kernel in bfloat16, and {besides}",
                max_vmem_bytes=2 * cfg.hidden_size * cfg.intermediate_size * bits // 8,
                in_place_bytes=device_bytes(described.arguments[2]),
                kernels=("tree_attention",),
            )


def _out_bytes(cfg: ModelConfig) -> int:
    """The smallest of a layer's kernels, in DTYPE."""
    return cfg.hidden_size * cfg.num_heads * cfg.head_dim * DTYPE.itemsize


def _quantised_head(target: Target, cfg: ModelConfig, geo: Geometry, *, own: bool) -> Program:
    """A round of `quantised_round` whose drafter is in int8, packed and by kernels where there are any (`own`)."""

    def build() -> HeadCore:
        sizes = dataclasses.replace(head_config(cfg), aux_layer_ids=(0, 1, 2))
        head = _quantised(Eagle3Head(sizes, dtype=DTYPE), jnp.int8, None, output=True)
        return HeadCore(few_rows.prepare(head) if own else head)

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
        in_place_bytes=device_bytes(described.arguments[2]),
        # Of few rows, and in the step over what was committed of many.
        kernels=("tree_attention", *(("small_batch_int8_heads", "small_batch_int8_many") if own else ())),
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
                in_place_bytes=device_bytes(described.arguments[2]),
                kernels=("tree_attention", *kernels),
            )
