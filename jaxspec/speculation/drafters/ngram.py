"""Prompt lookup: the continuation of the longest earlier match of the text's own suffix.

On the device, so that a round needs no host round-trip. The search runs over blocks of
the tokens in use; the longest match wins, then the most recent (source: Saxena's prompt
lookup; vLLM's n-gram proposer for the [min, max] rule).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.tier import Tier

_BLOCK = 512


class NgramDrafter:
    """Drafts chains from the request's own tokens; has neither parameters nor state.

    Args:
      vocab_size: the token that means "no proposal".
      n_min, n_max: shortest and longest suffix to match.
    """

    aux_layers: tuple[int, ...] = ()
    lookahead = 0
    lags = False
    extends_by_params = False
    supports_trees = False
    max_topk = 1
    window = 0
    catch_up_tokens = 0

    def __init__(self, vocab_size: int, n_min: int = 1, n_max: int = 4):
        self.vocab_size, self.n_min, self.n_max = vocab_size, n_min, n_max

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

    def draft(
        self,
        params: Any,
        draft: Any,
        rows: Rows,
        tokens_SL: jax.Array,
        tier: Tier,
        sampling: SamplingState | None,
        noise_BDV: jax.Array | None,
        sample: bool,
    ) -> tuple[DraftTree, Any]:
        last_B = rows.length_B  # index of the root, the last token of the text
        suffix = [rows.tokens_at(tokens_SL, (last_B - i)[:, None]) for i in range(self.n_max)]  # each [B, 1]

        def body(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            block, best_B, at_B = carry
            end_L = block * _BLOCK + jnp.arange(_BLOCK)  # candidate ends of a match
            run = jnp.zeros((last_B.shape[0], _BLOCK), jnp.int32)
            alive = (end_L[None, :] < last_B[:, None]) & jnp.ones_like(run, bool)
            for i in range(self.n_max):
                index = jnp.broadcast_to((end_L - i)[None, :], run.shape)
                alive = alive & (index >= 0) & (rows.tokens_at(tokens_SL, index) == suffix[i])
                run = run + alive.astype(jnp.int32)
            score = jnp.where(run >= self.n_min, run, 0)
            # The most recent of the longest: the last maximum within the block.
            flipped = jnp.argmax(score[:, ::-1], axis=1)
            here = (_BLOCK - 1 - flipped).astype(jnp.int32)
            top = jnp.take_along_axis(score, here[:, None], axis=1)[:, 0]
            better = (top > 0) & (top >= best_B)
            return block + 1, jnp.where(better, top, best_B), jnp.where(better, block * _BLOCK + here, at_B)

        blocks = jnp.max(last_B) // _BLOCK + 1
        zero = jnp.zeros_like(last_B)
        _, best_B, at_B = jax.lax.while_loop(lambda c: c[0] < blocks, body, (jnp.zeros((), blocks.dtype), zero, zero))
        # A match that ends close to the text's end continues into itself, period after period.
        step = jnp.arange(tier.depth)[None, :]
        period = jnp.maximum(last_B - at_B, 1)[:, None]
        tokens = rows.tokens_at(tokens_SL, at_B[:, None] + 1 + step % period)
        tokens = jnp.where((best_B > 0)[:, None], tokens, self.vocab_size)
        if rows.allowed_BDW is not None:
            tokens = self._within(tokens, rows.allowed_BDW)
        # A guess: a match of m tokens is right m times in m + 1. A token that is right makes it longer by one.
        run = (best_B[:, None] + step).astype(jnp.float32)
        confidence = jnp.where(tokens < self.vocab_size, run / (run + 1), 0.0)
        tree = DraftTree.chain(
            jnp.concatenate([rows.root_B[:, None], tokens], axis=1),
            confidence_BN=jnp.pad(confidence, ((0, 0), (1, 0)), constant_values=1.0),
        )
        return tree, draft

    def _within(self, tokens_BD: jax.Array, allowed_BDW: jax.Array) -> jax.Array:
        """The chain with the only token that is allowed, where there is but one, and none where it is refused."""
        word_BD = jnp.argmax(allowed_BDW != 0, axis=2).astype(jnp.int32)
        bits_BD = jnp.take_along_axis(allowed_BDW, word_BD[:, :, None], axis=2)[:, :, 0]
        forced_BD = jax.lax.population_count(allowed_BDW).sum(axis=2) == 1
        only_BD = 32 * word_BD + 31 - jax.lax.clz(bits_BD)
        inside_BD = jnp.minimum(tokens_BD, self.vocab_size - 1)
        bits_BD = jnp.take_along_axis(allowed_BDW, (inside_BD // 32)[:, :, None], axis=2)[:, :, 0]
        refused_BD = (bits_BD >> (inside_BD % 32)) & 1 == 0
        return jnp.where(forced_BD, only_BD, jnp.where(refused_BD, self.vocab_size, tokens_BD))
