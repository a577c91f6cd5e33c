"""What fits: texts into a context, pages and the ring of features into a device's memory.

Owns the sums. Must not know names, directories or engines.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxspec.config import EngineConfig
from jaxspec.models import few_rows, packing
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.quantised import stored_bytes
from jaxspec.models.sharded import SPLIT, share_bytes
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.ring import empty_ring, ring_bytes
from jaxspec.speculation.state import DecodeState, Geometry

_DEFAULT_CONTEXT = 2048
#: Of a device's memory, for weights and pages where nobody says: vLLM's and SGLang's.
_USUAL_FRACTION = 0.9
_log = logging.getLogger(__name__)


def longest_text(config: EngineConfig, context: int) -> int:
    """Tokens of the longest prompt plus output, for a model of this context.

    Raises:
      ValueError: a max_seq_len beyond it.
    """
    longest = config.max_seq_len or min(context, _DEFAULT_CONTEXT)
    if longest > context:
        raise ValueError(f"max_seq_len must be at most the model's context of {context} tokens, got {longest}")
    return longest


def doubling(cfg: ModelConfig) -> float | None:
    """Tokens of text at which attention costs a token as much as the layers' products; None: it sees windows only."""
    full = cfg.num_layers - len(cfg.sliding_layers)
    if not full:
        return None
    heads, latent = cfg.num_heads, cfg.latent
    attention, seen = cfg.hidden_size * cfg.head_dim * 2 * (heads + cfg.num_kv_heads), 2 * cfg.head_dim
    if latent is not None:
        queries = heads * (latent.key + latent.rotary)
        down, up = latent.query_rank or queries, (latent.query_rank or 0) * queries
        by_heads = heads * (latent.rank * (latent.key + latent.value) + latent.value * cfg.hidden_size)
        attention = cfg.hidden_size * (down + cfg.head_dim) + up + by_heads
        seen = cfg.head_dim + latent.rank
    inner, own = cfg.num_layers * cfg.intermediate_size, cfg.experts
    if own is not None:
        inner += len(own.layers) * (own.per_token * own.inner + own.shared_inner - cfg.intermediate_size)
    weights = cfg.num_layers * attention + 3 * cfg.hidden_size * inner
    return weights / (full * heads * seen)


def fitted(
    geo: Geometry, fraction: float | None, target: TargetModel, drafter: Drafter | None, params: Any, shards: int
) -> Geometry:
    """The sizes with the pages that a fraction of the device's memory holds beside the weights.

    All of them where a fraction was asked for: what requests do not need, the prefix cache has. Else, and on a host
    always, no more than `geo` has, which all slots could fill.

    Args:
      fraction: None: the usual one.

    Raises:
      ValueError: not even one sequence fits.
    """

    def state(pages: int) -> DecodeState:
        sized = dataclasses.replace(geo, num_pages=pages)
        draft = jax.eval_shape(lambda: () if drafter is None else drafter.init_state(sized))
        dtype, layers = target.embedding[...].dtype, () if drafter is None else drafter.aux_layers
        ring = jax.eval_shape(lambda: empty_ring(target.config, sized, layers))
        return jax.eval_shape(lambda: DecodeState.empty(target.config, sized, dtype, draft, ring))

    def grows(one: Any, two: Any, shards: int) -> int:
        """Bytes that a page more takes on a device: of pools, which are split over their heads where that goes."""
        pairs = [(stored(b) - stored(a), b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)]
        return sum(more // (1 if pool.shape[1] % shards else shards) for more, pool in pairs if more)

    share = _USUAL_FRACTION if fraction is None else fraction
    stats = jax.local_devices()[0].memory_stats() or {}
    # A device that does not say is the host. A drafter is on none yet, and may be whole on each.
    memory = stats.get("bytes_limit") or host_bytes()
    weights = max(stored_share(target, shards) + stored(params), stats.get("bytes_in_use", 0))
    # Laid out anew when the pool's size is settled.
    weights += _added_bytes(target, shards)
    one, two = state(1), state(2)
    page = grows(dataclasses.replace(one, draft=()), dataclasses.replace(two, draft=()), shards)
    page += grows(one.draft, two.draft, 1 if geo.whole_drafter else shards)
    pages = int(share * memory - weights - (2 * stored(one) - stored(two))) // page
    if pages < geo.pages_per_seq:
        raise ValueError(
            f"memory_fraction {share} of {memory} bytes holds {max(pages, 0)} pages of {page} bytes beside "
            f"{weights} bytes of weights, and one sequence of max_seq_len = {geo.max_seq_len} tokens needs "
            f"{geo.pages_per_seq}: give more memory or a shorter max_seq_len"
        )
    if fraction is None or not stats:
        pages = min(pages, geo.num_pages)
    if fraction is not None or pages < geo.num_pages:
        _log.info(
            "memory_fraction %g: %d pages of %d bytes beside %d bytes of weights, %.1f requests of max_seq_len = %d "
            "tokens at once",
            share, pages, page, weights, pages / geo.pages_per_seq, geo.max_seq_len,
        )  # fmt: skip
    return geo if pages == geo.num_pages else dataclasses.replace(geo, num_pages=pages)


def host_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of memory that this process may use: the machine's, or fewer where its control group has a limit.

    Args:
      groups: where control groups are mounted (Linux, both versions). own: the file that names the process's.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return memory
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
        inner = root / path.lstrip("/")
        # A container sees its own group as the root, whatever the file says; a limit above it counts as well.
        for place in {root, inner, *(p for p in inner.parents if root in p.parents)}:
            try:
                said = (place / name).read_text().strip()
            except OSError:
                continue
            memory = min(memory, int(said)) if said.isdigit() else memory
    return memory


def ring_rows(config: EngineConfig, geo: Geometry, target: TargetModel, drafter: Drafter | None) -> int:
    """Rows of each of the two buffers that a ring takes turns with.

    Raises:
      ValueError: no drafter that reads the target's states, or too little memory for a step's.
    """
    config.check_ring(drafter is not None, drafter is not None and bool(drafter.aux_layers))
    assert drafter is not None
    width = ring_bytes(target.config, drafter.aux_layers)
    rows = (config.feature_ring_mib << 20) // (2 * width)
    needed = 2 * geo.most_features
    if rows < needed:
        raise ValueError(
            f"feature_ring_mib must be at least {-(-needed * 2 * width >> 20)}: a position takes {width} bytes, and "
            f"twice {needed} of them have to fit; got {config.feature_ring_mib}"
        )
    return rows


def stored(tree: Any) -> int:
    """Bytes of a tree's arrays, as they lie in memory."""
    return sum(stored_bytes(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def stored_share(module: nnx.Module, shards: int) -> int:
    """Bytes of a module's weights on each of the devices that share it: what cannot be split lies whole on all."""
    if shards == 1:
        return stored(nnx.state(module))
    split = nnx.state(nnx.eval_shape(lambda: tensor_parallel(module, shards)))
    share = lambda param: share_bytes(param.get_metadata(SPLIT, None), param.get_value(), shards)
    return sum(map(share, jax.tree.leaves(split, is_leaf=lambda x: isinstance(x, nnx.Variable))))


def _added_bytes(target: TargetModel, shards: int) -> int:
    """Bytes that a target takes on each device once it is laid out for kernels, besides its own."""
    found = []

    def count() -> None:
        laid_out = tensor_parallel(target, shards) if shards > 1 else target
        found.append(few_rows.added_bytes(laid_out, shards) + packing.added_bytes(laid_out, shards))

    nnx.eval_shape(count)
    return found[0]
