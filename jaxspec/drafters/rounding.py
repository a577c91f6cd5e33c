"""Drafters in few bits: their maps are rounded when they are loaded, whatever their checkpoints hold.

What a drafter says changes no text, only how often it is right, so this needs nobody's leave but the user's. Owns which
of its maps; how they are rounded, models.rounding does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jaxspec.drafters.kind import DrafterKind
from jaxspec.models import few_rows_fit
from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.layers import BLOCK, Linear, Shared
from jaxspec.models.quantised import Quantised, stored_bytes
from jaxspec.models.rounding import FORMATS, rounded

_log = logging.getLogger(__name__)


def check_weights(kind: DrafterKind[Any], name: str | None) -> None:
    """Refuses to round drafters of a kind without weights.

    Args:
      name: of FORMATS; others ask for nothing of a kind.

    Raises:
      ValueError: names both.
    """
    if name in FORMATS and not kind.layouts:
        raise ValueError(f"draft_quantization {name!r} is for drafters that have weights, got drafter {kind.name!r}")


def round_drafter(module: Any, name: str) -> Any:
    """A copy of a drafter whose linear maps, output layer included, are in few bits: it drafts otherwise, no more.

    An output layer that is its target's becomes one of the drafter's own, in the few bits that it has, if so: GPUs
    lay those out for their kernels, which they do not do with what others read. Norms, embeddings, biases, routers,
    stacked experts and maps of fewer than BLOCK outputs stay; so do maps that are in few bits, in 4 bits those that
    groups do not divide, and on CPUs those that column blocks do not, by which products would expand the whole
    (`quantised`).

    Args:
      name: of FORMATS.

    Raises:
      ValueError: nothing of it can be rounded.
    """
    graph, state = nnx.split(module)
    copy = nnx.merge(graph, state)
    group, before, after = FORMATS[name][2], 0, 0
    embedding = getattr(copy, "embedding", None)
    tied = getattr(copy, "lm_head", 0) is None
    if embedding is not None and tied and _served(embedding.shape[1], embedding.shape[0], group):
        own = Linear(1, 1, dtype=embedding[...].dtype, rngs=None)
        own.kernel = Shared(embedding[...].T)  # pyright: ignore[reportAttributeAccessIssue]
        copy.lm_head = nnx.data(own)
    for linear in _maps(copy, group):
        kernel = linear.kernel[...]
        few = rounded(kernel, name)
        before, after = before + stored_bytes(kernel), after + few.nbytes
        linear.kernel = nnx.Param(few)
    last = getattr(copy, "lm_head", None)
    if isinstance(last, Linear) and isinstance(last.kernel, Shared) and isinstance(last.kernel[...], Quantised):
        last.kernel = nnx.Param(last.kernel[...])
    if not after:
        raise ValueError(f"draft_quantization {name!r} finds no weights to round in this {type(module).__name__}")
    _log.info("drafter in %s: its linear maps take %.1f MB instead of %.1f", name, after / 1e6, before / 1e6)
    return copy


def gains_by_int8(module: Any) -> bool:
    """Whether int8 halves what each drafted token reads, and nothing else: all maps are the drafter's own, none is in
    few bits yet, and few rows by each of them have a kernel on Hopper.

    What it borrows of its target would be there twice.
    """
    linears = [node for _, node in nnx.iter_graph(module) if isinstance(node, Linear)]
    tied = getattr(module, "lm_head", 0) is None and isinstance(getattr(module, "embedding", None), Shared)
    if tied or any(isinstance(x.kernel, Shared) or isinstance(x.kernel[...], Quantised) for x in linears):
        return False
    own = list(_maps(module, None))
    return bool(own) and few_rows_fit.rounded_refusal(module, own) is None


def _served(d_in: int, d_out: int, group: int | None) -> bool:
    """Whether a map of such widths is worth rounding, with a scale for each group of inputs, or for all (None)."""
    blocks = jax.default_backend() != "cpu" or d_out % BLOCK == 0
    return d_out >= BLOCK and blocks and (group is None or d_in % group == 0)


def _maps(module: Any, group: int | None) -> Iterator[Linear]:
    """A module's maps that are worth rounding and not in few bits."""
    nodes = [node for _, node in nnx.iter_graph(module)]
    mixtures = [node for node in nodes if isinstance(node, MixtureOfExperts)]
    kept = {id(part) for mixture in mixtures for part in (mixture.router, mixture.shared_gate)}
    for node in nodes:
        if isinstance(node, Linear) and id(node) not in kept:
            kernel = node.kernel[...]
            if isinstance(kernel, jax.Array) and kernel.ndim == 2 and _served(kernel.shape[0], kernel.shape[1], group):
                yield node
