"""What drafters have in common that read committed tokens alone: no features of the target, no cache, no network."""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.state import Geometry, Rows


class Featureless:
    """The parts of a `Drafter` beside `draft`, for chains; no state unless overridden."""

    aux_layers: tuple[int, ...] = ()
    lookahead = 0
    lags = False
    extends_by_params = False
    stepwise = False
    supports_trees = False
    max_topk = 1
    window = 0
    catch_up_tokens = 0

    def init_state(self, geo: Geometry) -> Any:
        return ()

    def admit(self, draft: Any, slot_B: jax.Array, cached_B: jax.Array) -> Any:
        return draft

    def prefill(self, params: Any, draft: Any, text: Ragged, tokens_1T: jax.Array, aux_1TA: jax.Array | None) -> Any:
        return draft

    def catch_up(self, params: Any, draft: Any, rows: Rows, tokens_SL: jax.Array) -> Any:
        return draft

    def extend(self, params: Any, draft: Any, rows: Rows, aux_BDA: jax.Array | None, count_B: jax.Array) -> Any:
        return draft
