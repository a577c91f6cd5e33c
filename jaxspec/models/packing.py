"""Experts in few bits, laid out for the kernel that reads those in use once: of which models, and what that takes.

Rounds and prompts read the one layout (`experts`), so the other is not kept. Must not know how a kernel reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models import few_rows_fit
from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.layers import Transformer
from pallas_kernels.small_batch import gpu

_log = logging.getLogger(__name__)


def pack_experts(model: Any, shards: int = 1) -> None:
    """Lays experts in few bits out anew in the model itself, one layer after the other; says which are not, and why.

    Args:
      shards: devices that share the model, which is laid out for them; experts that they do not split stay as they are
        stored.
    """
    stay: dict[str, list[str]] = {}
    count = 0
    for name, mixture in _in_few_bits(model):
        why = _refusal(model, mixture, shards) or mixture.scale_refusal()
        if why is not None:
            stay.setdefault(why, []).append(name)
            continue
        mixture.pack()
        # Arrays as they are stored go before the next layer's are made.
        jax.block_until_ready(nnx.state(mixture))
        count += 1
    if count:
        _log.info("experts of %d layers are packed for the kernel of few rows", count)
    for why, names in stay.items():
        _log.warning("experts stay as they are stored, since %s: %s", why, ", ".join(names))


def added_bytes(model: Any, shards: int = 1) -> int:
    """Bytes of a device's memory that `pack_experts` will take besides the model's: scales grow, and widths to whole
    blocks.

    Layers whose values it will refuse count as others.
    """
    if gpu.supported() is not None:
        return 0
    mixtures = [mixture for _, mixture in _in_few_bits(model) if _refusal(model, mixture, shards) is None]
    return sum(mixture.added_bytes() for mixture in mixtures)


def varies_by_rows(model: Transformer) -> str | None:
    """Why a row's bits after a mixture may depend on the rows beside it, even if they are few; or None.

    Args:
      model: for one device, not laid out yet.
    """
    for mixture in (layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts)):
        if mixture.in_few_bits and not mixture.packed:
            why = _refusal(model, mixture, 1) or mixture.scale_refusal()
            if why is not None:
                return f"these stay as they are stored, since {why}"
        if (why := few_rows_fit.mixture_refusal(mixture)) is not None:
            return why
    return None


def _in_few_bits(model: Any) -> Iterator[tuple[str, MixtureOfExperts]]:
    """A model's mixtures that are quantised and not packed, and where they are."""
    found = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, MixtureOfExperts)]
    for path, node in sorted(found, key=lambda pair: [(isinstance(part, str), part) for part in pair[0]]):
        if node.in_few_bits and not node.packed:
            yield ".".join(map(str, path)), node


def _refusal(model: Any, mixture: MixtureOfExperts, shards: int) -> str | None:
    """Why a mixture is not packed whatever its values are, or None."""
    if not isinstance(model, Transformer):
        return f"they are in a {type(model).__name__}"
    if model.embedding.dtype != jnp.bfloat16:
        return f"activations are {model.embedding.dtype}, not bfloat16"
    if mixture.shards != shards:
        return f"{shards} devices share the model, and have them whole"
    return mixture.packing_refusal()


__all__ = ["added_bytes", "pack_experts", "varies_by_rows"]
