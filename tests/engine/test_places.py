"""No two numbers of a commit go to the same place, which XLA is told and nothing else would notice on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import cache
from jaxspec.adaptive.cost import CostTable
from jaxspec.config import SpeculationConfig
from jaxspec.speculation import prefill, round
from jaxspec.speculation.drafters import dflash, draft_cache
from jaxspec.tier import PLAIN, Tier

TREE = Tier(2, 2, 5)
OTHERS = pytest.mark.exhaustive("every drafter's places; EAGLE-3 has pools of its own, a ring, chains and trees")
KINDS = ["eagle3", *(pytest.param(kind, marks=OTHERS) for kind in ("mtp", "peagle", "dflash", "dspark", "suffix"))]


class Watched:
    """`cache.commit` and a draft cache's ring, each with a look at where it writes."""

    def __init__(self) -> None:
        self.counts = {"pool": 0, "ring": 0}
        self.twice: list[tuple[str, np.ndarray]] = []
        self._commit, self._remember = cache.commit, draft_cache.CachedText._remember

    def look(self, name: str, places: np.ndarray, written: np.ndarray) -> None:
        places = places.reshape(-1, 2)[written.reshape(-1)]
        self.counts[name] += 1
        if len(np.unique(places, axis=0)) != len(places):
            self.twice.append((name, places))

    def commit(
        self, pages: jax.Array, kv: jax.Array, table_BM: jax.Array, position_BN: jax.Array, write_BN: jax.Array,
        num_pages: int, **more: Any,
    ) -> jax.Array:  # fmt: skip
        page = pages.shape[2]
        column = position_BN // page
        inside = (column >= 0) & (column < table_BM.shape[1])
        number = jnp.take_along_axis(table_BM, jnp.where(inside, column, 0), axis=1)
        written = write_BN & inside & (number < num_pages)
        places = jnp.stack([number, position_BN % page], axis=-1)
        jax.debug.callback(lambda places, written: self.look("pool", places, written), places, written)
        return self._commit(pages, kv, table_BM, position_BN, write_BN, num_pages, **more)

    def remember(self, text: Any, draft: Any, slot: jax.Array, position: jax.Array, aux: Any, keep: jax.Array) -> Any:
        places = jnp.stack([jnp.broadcast_to(slot, keep.shape), position % text.ring], axis=-1)
        written = keep & (places[..., 0] < text.geo.slots)
        jax.debug.callback(lambda places, written: self.look("ring", places, written), places, written)
        return self._remember(text, draft, slot, position, aux, keep)


@pytest.mark.parametrize("kind", KINDS)
def test_no_place_is_written_twice_at_once(bench: Any, tools: Any, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Chains and trees, with prompts beside rounds, rows that come, end and lose their pages, shared beginnings."""
    watched = Watched()
    for module in (prefill, round, dflash, draft_cache):
        monkeypatch.setattr(module, "commit", watched.commit)
    monkeypatch.setattr(draft_cache.CachedText, "_remember", lambda text, *given: watched.remember(text, *given))
    tiers = (PLAIN, TREE) if kind not in ("dflash", "suffix") else (PLAIN, Tier(3))
    few = dict(batch_buckets=(4,), variants=("sampled",), num_pages=30, compile_cache=False)
    speculation = SpeculationConfig(tiers=tiers, **tools.speculation.get(kind, {}))
    cost = CostTable({(tier, 4): 1e-3 for tier in tiers})
    engine = bench.build(kind, speculation, cost, mixed_chunk=12, **few)
    engine.use_policy(tools.script(*tiers))
    start = list(range(3, 12)) * 2
    work = tools.workload() + tools.long_requests(4) + [([*start, i], tools.workload()[0][1]) for i in range(3)]
    outputs = tools.drive(engine, work, join=lambda i: 3 * i)
    jax.effects_barrier()
    assert not watched.twice and watched.counts["pool"] > 100 and len(outputs) == len(work)
    assert bool(watched.counts["ring"]) == (kind in ("eagle3", "mtp", "peagle"))
    assert engine.stats.preemptions and engine.stats.prefix_hits and engine.stats.mixed_rounds
