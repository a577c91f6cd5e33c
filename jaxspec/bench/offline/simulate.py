"""Simulated acceptance: drafts that are right at a chosen rate, whatever the drafter can do.

Owns a drafter around another one. The inner drafter runs in full, so a round costs what it
costs; its chain is then replaced, position by position, by the text that plain decoding wrote
(with the chosen probability) or by a token that is surely wrong. Verification is the real one,
so the output stays exact. For models with random weights; results must be labelled as simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.tier import Tier
from pallas_kernels.rejection_sampling.noise import Purpose, uniform_noise


def rate_for(length: float, depth: int) -> float:
    """The acceptance of each position at which a chain of `depth` gains `length` tokens a round, bonus included.

    Raises:
      ValueError: a length that no rate reaches.
    """
    if not 1 <= length <= depth + 1:
        raise ValueError(
            f"simulate-accept-length must lie in [1, {depth + 1}] for the deepest tier, chain-{depth}, got {length!r}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if sum(rate**i for i in range(depth + 1)) < length:
            low = rate
        else:
            high = rate
    return (low + high) / 2


class SimulatedDrafter:
    """Chains whose tokens agree with known texts at a given rate, independently at each position.

    Args:
      inner: the drafter whose cost is paid.
      rate: probability that a drafted token is the right one.
      vocab_size: the target's.
    """

    supports_trees = False
    max_topk = 1

    def __init__(self, inner: Drafter, rate: float, vocab_size: int):
        self.inner, self.rate, self.vocab_size = inner, rate, vocab_size
        self.aux_layers, self.lookahead, self.lags = inner.aux_layers, inner.lookahead, inner.lags
        self.extends_by_params, self.stepwise = inner.extends_by_params, inner.stepwise
        self.window, self.catch_up_tokens = inner.window, inner.catch_up_tokens

    def params(self, inner: Any, texts: Sequence[Sequence[int]]) -> Any:
        """The wrapper's parameters: the inner drafter's, and prompts with their completions, padded [R, L]."""
        table = np.full((len(texts), max(map(len, texts))), self.vocab_size, np.int32)
        for row, text in zip(table, texts, strict=True):
            row[: len(text)] = text
        return inner, jnp.asarray(table)

    def init_state(self, geo: Geometry) -> Any:
        return self.inner.init_state(geo), jnp.zeros((geo.slots,), jnp.int32)

    def admit(self, draft: Any, slot_B: jax.Array, cached_B: jax.Array) -> Any:
        return self.inner.admit(draft[0], slot_B, cached_B), draft[1]

    def prefill(self, params: Any, draft: Any, text: Ragged, tokens_1T: jax.Array, aux_1TA: jax.Array | None) -> Any:
        """Finds the texts that begin as the prompts do."""
        (inner, texts_RL), rows = params, text.rows
        text_BRN = jnp.swapaxes(jnp.take(texts_RL, text.index_BN, axis=1, mode="clip"), 0, 1)
        tokens_BN = text.rectangle(tokens_1T)
        same_BR = jnp.all((text_BRN == tokens_BN[:, None, :]) | ~text.real_BN[:, None, :], axis=2)
        before_B = jnp.take(draft[1], rows.slot_B, mode="clip")
        # A later chunk keeps the row of the chunks before it where both agree.
        stay_BR = (jnp.arange(texts_RL.shape[0])[None, :] == before_B[:, None]) & (rows.length_B > 0)[:, None]
        row_B = jnp.argmax(2 * same_BR.astype(jnp.int32) + stay_BR.astype(jnp.int32), axis=1).astype(jnp.int32)
        state = self.inner.prefill(inner, draft[0], text, tokens_1T, aux_1TA)
        return state, draft[1].at[rows.slot_B].set(row_B, mode="drop")

    def draft(
        self, params: Any, draft: Any, rows: Rows, tokens_SL: jax.Array, tier: Tier, sampling: SamplingState | None,
        noise_BDV: jax.Array | None, sample: bool,
    ) -> tuple[DraftTree, Any]:  # fmt: skip
        inner, texts_RL = params
        tree, state = self.inner.draft(inner, draft[0], rows, tokens_SL, tier, sampling, noise_BDV, sample)
        row_B = jnp.take(draft[1], rows.slot_B, mode="clip")
        at_BD = rows.length_B[:, None] + jnp.arange(1, tier.depth + 1)[None, :]
        right_BD = texts_RL.at[row_B[:, None], at_BD].get(mode="clip")
        coin_BD = uniform_noise(row_B.astype(jnp.uint32), at_BD, Purpose.DRAFT)
        own_BD = tree.tokens_BN[:, 1:]
        wrong_BD = jnp.where(own_BD == right_BD, (right_BD + 1) % self.vocab_size, own_BD)
        drafted_BD = jnp.where(coin_BD < self.rate, right_BD, wrong_BD)
        tokens_BN = jnp.concatenate([tree.tokens_BN[:, :1], drafted_BD], axis=1)
        return dataclasses.replace(tree, tokens_BN=tokens_BN, draft_probs_BDV=None), (state, draft[1])

    def catch_up(self, params: Any, draft: Any, rows: Rows, tokens_SL: jax.Array) -> Any:
        return self.inner.catch_up(params[0], draft[0], rows, tokens_SL), draft[1]

    def extend(self, params: Any, draft: Any, rows: Rows, aux_BDA: jax.Array | None, count_B: jax.Array) -> Any:
        inner = params[0] if self.extends_by_params else ()
        return self.inner.extend(inner, draft[0], rows, aux_BDA, count_B), draft[1]
