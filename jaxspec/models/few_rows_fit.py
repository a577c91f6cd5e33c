"""Which models, draft heads, layers and weights the kernels for few rows serve, and why not others.

Owns the refusals. Must not know how rounds run by the kernels, nor how weights are laid out for them (`few_rows`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.base import ModelConfig
from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.layers import MLP, Attention, Linear, Shared, Transformer
from jaxspec.models.quantised import Quantised
from jaxspec.models.sharded import SPLIT
from pallas_kernels.small_batch import experts, packed, packed_launch
from pallas_kernels.small_batch.bfloat16_launch import MOST_ROWS
from pallas_kernels.small_batch.packed import Packed
from pallas_kernels.small_batch.reference import FEW_ROWS, TILE

#: What the kernels' order of operations leaves no room for, as `ModelConfig` names it: defaults only.
_PLAIN = (
    "output_bias", "mlp_bias", "qk_norm_wide", "pre_norms", "post_norms", "norm_gain", "hidden_act",
    "residual_scale", "partial_rotary_factor", "rope_interleaved", "no_rope_layers", "local_rope_theta", "latent",
)  # fmt: skip
#: Width of a head whose halves are one tile each, so that a product can rotate it; and inputs up to which one in few
#: bits norms it, too.
ROTATED, _NORMED_WIDTH = 2 * TILE, 8192
#: Width of rows up to which there is room for those of a slot of packed experts.
_PICKED_WIDTH = 8192
#: Features of a row whose squares one copy brings.
_WIDEST = 256 * TILE


def is_head(model: Any) -> bool:
    """Whether a module that these kernels run is a draft head, not a model."""
    return type(model) is not Transformer


def blocks(model: Any) -> Sequence[Any]:
    """Decoder layers: a model's, or what a draft head names so; none of a class that these kernels do not know."""
    return getattr(model, "blocks", ()) if is_head(model) else model.layers


def refusal(model: Any, devices: int = 1) -> str | None:
    """Why a model's or a draft head's layers cannot run by these kernels, or None.

    Args:
      devices: that share it, or have a head whole each.
    """
    if not blocks(model):
        return f"its class is {type(model).__name__}"
    if is_head(model) and devices > 1:
        return f"it is a draft head, for {devices} devices"
    cfg = model.config.layer if is_head(model) else model.config
    default = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    if asked := [f"{name}={getattr(cfg, name)}" for name in _PLAIN if getattr(cfg, name) != default[name]]:
        return f"its layers have {', '.join(asked)}"
    if model.embedding.dtype != jnp.bfloat16:
        return f"its activations are {model.embedding.dtype}, not bfloat16"
    served = MLP if is_head(model) else MLP | MixtureOfExperts
    for layer in blocks(model):
        if not isinstance(layer.mlp, served):
            return f"its layers have a {type(layer.mlp).__name__}"
        if isinstance(layer.mlp, MLP) and layer.attn.shards != layer.mlp.shards:
            return f"devices share its attention {layer.attn.shards} ways and its MLP {layer.mlp.shards} ways"
    normed = not norms_apart(model) and any(layer.attn.q_norm is not None for layer in blocks(model))
    for kind, linear in maps(model):
        if why := unserved(linear, blocks(model)[0].attn.shards, kind, normed=normed):
            return why
    last = model.lm_head if is_head(model) else None  # a model's may be XLA's, and what a head has of its target's is
    few = last is not None and isinstance(last.kernel[...], Quantised | Packed)
    if last is None or not few or isinstance(last.kernel, Shared) or unserved(last, 1) is not None:
        return None
    return unserved(last, 1, "logits")


def most_rows(model: Any) -> int:
    """Rows up to which the kernels are faster than XLA's products and what it does around them (docs/kernels.md).

    Args:
      model: that these kernels run.
    """
    plain = all(isinstance(layer.mlp, MLP) for layer in blocks(model))
    plain = plain and not any(isinstance(linear.kernel[...], Packed | Quantised) for _, linear in maps(model))
    return MOST_ROWS if plain else FEW_ROWS


def invariant_rows(model: Transformer) -> int:
    """Rows up to which each product of a round is these kernels', as `batch_invariant` needs.

    Args:
      model: that these kernels run, its weights not yet laid out for them.
    """
    # Of more than a few rows, bits were compared of heads that their product rotates (docs/benchmarks/kernels.md).
    plain = model.layers[0].attn.head_dim == ROTATED and not output_of_few_bits(model)
    return most_rows(model) if plain else FEW_ROWS


def mixture_refusal(mlp: MixtureOfExperts) -> str | None:
    """Why a layer's experts, packed if they are in few bits, do not run by kernels on one device, or None."""
    return picks_refusal(mlp) if mlp.in_few_bits else whole_mixture_refusal(mlp)


def whole_mixture_refusal(mlp: MixtureOfExperts) -> str | None:
    """Why a layer's experts run as they always do, behind attention by these kernels, or None."""
    if mlp.shards != 1:
        return f"{mlp.shards} devices share them"
    if any(
        not isinstance(kernel[...], jax.Array) or kernel.dtype != jnp.bfloat16 for kernel in (mlp.gate_up, mlp.down)
    ):
        return "their weights are not bfloat16"
    return _choice_refusal(mlp)


def _choice_refusal(mlp: MixtureOfExperts) -> str | None:
    """Why the kernels do not choose a layer's experts, or do not have all that belongs to these, or None."""
    has, router = mlp.experts, mlp.router.kernel[...]
    if has.bias or has.shared_inner or has.hidden_act != "silu":
        return "they have biases, a shared expert or other gates"
    if has.scores == "sigmoid" or has.groups > 1 or has.scale != 1.0:
        return "they are chosen by sigmoids or in groups, or weighed by a scale"
    if not isinstance(router, jax.Array) or router.dtype != jnp.bfloat16:
        return "their router's weights are not bfloat16"
    return experts.refusal(router.shape[0], has.inner, has.count)


def picks_refusal(mlp: MixtureOfExperts) -> str | None:
    """The same of packed experts."""
    if (per_token := mlp.experts.per_token) > experts.MOST_PICKED:
        return f"a row has {per_token} of them, more than {experts.MOST_PICKED}"
    if (width := mlp.router.kernel.shape[0]) > _PICKED_WIDTH:
        return f"rows have {width} features, more than {_PICKED_WIDTH}"
    return _choice_refusal(mlp)


def maps(model: Any) -> Iterator[tuple[packed_launch.Kind, Linear]]:
    """Layers' maps, and by which kernel each is multiplied."""
    for layer in blocks(model):
        yield "heads", layer.attn.qkv
        yield "add", layer.attn.out
        if isinstance(layer.mlp, MLP):
            yield "swiglu", layer.mlp.gate_up
            yield "add", layer.mlp.down


def output_of_few_bits(model: Any) -> bool:
    """Whether the output layer has quantised weights that these kernels multiply by."""
    last = model.lm_head
    if not isinstance(last, Linear) or not isinstance(last.kernel[...], Quantised):
        return False
    if last.kernel.get_metadata(SPLIT, None) is not None:  # as it may be where attention is whole on each device
        return False
    return unserved(last, blocks(model)[0].attn.shards, "logits") is None


def unserved(
    linear: Linear, shards: int, kind: packed_launch.Kind | None = None, *, normed: bool = False
) -> str | None:  # fmt: skip
    """Why this kernel of few rows, or that for many, does not multiply by these weights, or None."""
    kernel, axis = linear.kernel[...], linear.kernel.get_metadata(SPLIT, None)
    own = tuple(size // (shards if i == axis else 1) for i, size in enumerate(kernel.shape))
    if isinstance(kernel, Packed):
        if kind is None:
            return None
        groups = kernel.groups // (shards if axis == 0 and kernel.groups > 1 else 1)
        return packed_launch.room_refusal(kind, kernel.kind, own, groups, normed=normed and kind == "heads")
    if isinstance(kernel, Quantised):
        if kernel.values.ndim != 2:
            return "its quantised weights lie in column blocks"
        if kernel.order is not None and axis == 0 and shards > 1:
            return f"{shards} devices share inputs that its quantised weights have in another order"
        if kernel.int8_activations:
            return "its activations are quantised"
        if kernel.zero is not None and (why := packed.zero_refusal(kernel.values.dtype, kernel.zero.dtype)):
            return why
        count = shards if axis == 0 and kernel.groups > 1 else 1
        if kernel.groups % count:
            return f"its {kernel.groups} groups of scales do not divide among {count} devices"
        groups, zeros = kernel.groups // count, packed.ZEROS if kernel.zero is not None else ""
        if (why := packed.refusal(kernel.values.dtype, own, groups)) is not None or kind is None:
            return why
        groups = packed.packed_groups(own[0], groups, zeros=bool(zeros))
        stored = f"{kernel.values.dtype}{zeros}"
        return packed_launch.room_refusal(kind, stored, own, groups, normed=normed and kind == "heads")
    if kernel.dtype != jnp.bfloat16 or kernel.ndim != 2:
        return f"its weights are {kernel.dtype} of {kernel.ndim} axes, not bfloat16 of 2"
    if kind in ("heads", "swiglu") and own[0] > _WIDEST:
        return f"rows have {own[0]} features, more than {_WIDEST}"
    if any(size % TILE for size in own):
        return f"its weights of {own} on a device are no multiples of {TILE}"
    return None


def rounded_refusal(model: Any, linears: Iterable[Linear]) -> str | None:
    """Why a model's maps, each with a scale per output in int8, would lose the kernels for few rows, or not have them.

    Args:
      linears: those that are to be rounded.
    """
    layers = refusal(model) is None
    normed = layers and not norms_apart(model) and any(layer.attn.q_norm is not None for layer in blocks(model))
    kinds: dict[int, packed_launch.Kind] = {id(linear): kind for kind, linear in maps(model)} if layers else {}
    for linear in linears:
        shape, kind = linear.kernel[...].shape, kinds.get(id(linear))
        why = packed.refusal(jnp.int8, shape, 1)
        if why is None and kind is not None:
            why = packed_launch.room_refusal(kind, "int8", shape, 1, normed=normed and kind == "heads")
        if why is not None:
            return why
    return None


def output_refusal(model: Transformer) -> str | None:
    """Why the output layer of a model whose layers these kernels run cannot run by one, or None."""
    if output_weights(model)[0] is not None or output_of_few_bits(model):
        return None
    return "its output layer is not whole, in bfloat16 and of whole tiles"


def norms_apart(model: Any) -> bool:
    """Whether queries and keys are normed by XLA after the kernel's product (`FewRows`), not by it."""
    normed = (layer.attn for layer in blocks(model) if layer.attn.q_norm is not None)
    return any(attn.head_dim != ROTATED or too_wide(attn) for attn in normed)


def too_wide(attn: Attention) -> bool:
    """Whether a program of whole heads in few bits would have no room for its rings."""
    kernel = attn.qkv.kernel[...]
    return isinstance(kernel, Quantised | Packed) and kernel.shape[0] > _NORMED_WIDTH


def output_weights(model: Any) -> tuple[jax.Array | Packed | None, bool]:
    """The output layer's weights if a kernel reads them, and whether they lie [E, V], not [V, E]."""
    param, flip = (model.embedding, False) if model.lm_head is None else (model.lm_head.kernel, True)
    kernel = param[...]
    if isinstance(kernel, Packed):
        return kernel, flip
    plain = isinstance(kernel, jax.Array) and kernel.ndim == 2 and kernel.dtype == jnp.bfloat16
    if not plain or param.get_metadata(SPLIT, None) is not None or any(size % TILE for size in kernel.shape):
        return None, flip
    return kernel, flip


__all__ = [
    "FEW_ROWS", "MOST_ROWS", "ROTATED", "blocks", "invariant_rows", "is_head", "maps", "mixture_refusal", "most_rows",
    "norms_apart", "output_of_few_bits", "output_refusal", "output_weights", "picks_refusal", "refusal", "too_wide",
    "unserved", "whole_mixture_refusal",
]  # fmt: skip
