"""Several rounds in one executable, for models whose rounds are shorter than the host's part of one.

Rows that end in one of them are idle in those after it (`Rows.gather`). So the tokens are those of single rounds; only
what the host alone can tell, a stop string, lets a row run on, and the host cuts that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxspec.speculation.layouts import Batch
from jaxspec.speculation.round import grow_tables
from jaxspec.speculation.state import DecodeState


def several_fn(fn: Callable[..., Any], rounds: int) -> Callable[..., tuple[DecodeState, jax.Array, None]]:
    """The traced function of so many rounds, one after the other.

    Args:
      fn: of one round, without masks: what `round_fn` or `packed_fn` returns.

    It takes what `fn` takes; the pages granted with the batch are for all rounds. It returns the DecodeState and what
    `fn` emits of each round, [rounds, B, X]; of the logits nothing is kept.
    """

    def run(target: Any, draft_params: Any, state: DecodeState, batch_BX: jax.Array, *rest: Any) -> Any:
        # A loop on the device: compiled once, its carry updated in place.
        granted = Batch.without_grants(batch_BX)

        def again(state: DecodeState, _: None) -> tuple[DecodeState, jax.Array]:
            state, packed, _ = fn(target, draft_params, state, granted, *rest)
            return state, packed

        state = grow_tables(state, Batch(batch_BX))
        state, packed_RBX = jax.lax.scan(again, state, None, length=rounds)
        return state, packed_RBX, None

    return run
