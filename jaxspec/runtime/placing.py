"""Whether devices that share a target share its drafter, too, or each has it whole: the seconds of both, measured.

Shared, each reads a part of the drafter's weights and waits for the others after every product that adds up; whole,
each reads all and waits for nobody. A small head gains little from being shared, one of several layers may.
Must not know how drafters are loaded, nor what an engine does with the answer.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.runtime.sharding import abstract, parameter_shardings, put, state_shardings
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.tier import Tier
from pallas_kernels import compilers

_log = logging.getLogger(__name__)

#: Drafts in one executable, each from what the one before has drafted: the host's part of a call is many drafts long.
DRAFTS = 16
#: Tokens of each text that is drafted for, the batch size near which is timed, and the depth: the step over the text
#: and one over a drafted token.
CONTEXT, ROWS, DEPTH = 256, 8, 2
#: How much quicker a shared drafter must be: what is measured varies by some percent from start to start, and of two
#: that take about as long the whole one is the steadier, as it waits for nobody.
CLEARLY = 0.1
#: (drafter, its parameters) for sizes.
Bind = Callable[[Geometry], tuple[Drafter[Any, Any] | None, Any]]


def representative(tiers: Collection[Tier], buckets: Collection[int]) -> tuple[Tier, int]:
    """The tier and the padded batch size whose drafts are timed."""
    drafted = [tier for tier in tiers if tier.depth and not tier.lookup]
    bucket = max((b for b in buckets if b <= ROWS), default=min(buckets))
    return min(drafted, key=lambda tier: (abs(tier.depth - DEPTH), tier.num_nodes)), bucket


def seconds(
    bind: Bind, geo: Geometry, mesh: Mesh, tier: Tier, rows: int, options: tuple[tuple[str, Any], ...] = ()
) -> float:
    """Seconds of one draft for so many greedy rows, placed as `geo` says.

    Args:
      options: XLA's, for what the devices run.
    """
    context = min(CONTEXT, geo.max_seq_len)
    pages = geo.pages_for(context)
    sized = dataclasses.replace(
        geo, slots=rows, num_pages=rows * pages, pages_per_seq=pages, max_seq_len=context, prefill_chunk=context,
        max_num_batched_tokens=context, ring=0,
    )  # fmt: skip
    drafter, params = bind(sized)
    assert drafter is not None
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = put(params, parameter_shardings(mesh, params))
    lies = state_shardings(mesh, jax.eval_shape(lambda: drafter.init_state(sized)), whole=geo.whole_drafter)
    slots, full = np.arange(rows, dtype=np.int32), np.full(rows, context, np.int32)
    begin = lambda: drafter.admit(drafter.init_state(sized), jnp.asarray(slots), jnp.asarray(full))
    state = jax.jit(begin, out_shardings=lies)()
    table = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    batch = Rows(*put((slots, np.ones(rows, bool), table, full, np.zeros(rows, np.int32)), everywhere))
    tokens = put(np.zeros((rows, sized.tokens_per_seq), np.int32), everywhere)

    def drafts(params: Any, state: Any, batch: Rows, tokens_SL: jax.Array) -> tuple[Any, jax.Array]:
        def one(_: jax.Array, carried: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            state, root_B = carried
            own = dataclasses.replace(batch, root_B=root_B)
            tree, state = drafter.draft(params, state, own, tokens_SL, tier, None, None, False)
            return state, tree.tokens_BN[:, -1]

        return jax.lax.fori_loop(0, DRAFTS, one, (state, batch.root_B))

    jitted = jax.jit(drafts, donate_argnums=1, out_shardings=(lies, everywhere))
    with jax.set_mesh(mesh):
        lowered = jitted.lower(params, abstract(state, lies), batch, tokens)
    device = mesh.devices.flat[0]
    run = lowered.compile(compiler_options=compilers.options(device.platform, device.device_kind) | dict(options))
    took = []
    for _ in range(4):
        began = time.perf_counter()
        state, drafted = run(params, state, batch, tokens)
        jax.block_until_ready(drafted)
        took.append((time.perf_counter() - began) / DRAFTS)
    return min(took[1:])


def whole_is_better(
    bind: Bind, geo: Geometry, mesh: Mesh, tier: Tier, rows: int, options: tuple[tuple[str, Any], ...] = (),
    least: Callable[[int], int] = lambda own: own,
) -> bool:  # fmt: skip
    """Whether drafts take at most as long, or hardly longer, where each device has the drafter whole; logged.

    Args:
      least: of a number that each of several processes has measured, so that all decide alike.
    """
    timed = lambda whole: seconds(bind, dataclasses.replace(geo, whole_drafter=whole), mesh, tier, rows, options)
    took = {whole: least(round(1e9 * timed(whole))) for whole in (True, False)}
    whole = took[False] > (1 - CLEARLY) * took[True]
    _log.info(
        "the drafter lies %s (us a draft of %s for %d rows: whole on each device %.0f, over all %d %.0f; shared it has "
        "to be quicker by %.0f%%)",
        "whole on each device" if whole else f"over all {mesh.size} devices", tier.name, rows, took[True] / 1e3,
        mesh.size, took[False] / 1e3, 100 * CLEARLY,
    )  # fmt: skip
    return whole
