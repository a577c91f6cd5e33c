"""P-EAGLE: every position of a draft from one pass of the head.

Owns the slots of the tokens to come: the root is followed by placeholders, each with the mask token
and a learned feature, at rotary positions counting up. A slot sees the text and the slots before
it, and its logits are those of its own position, whatever the slots before it will hold; so one
wide step drafts, and trees take the same distribution for every path. What is committed lies in
`draft_cache`; slots get no entries.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxspec.speculation.drafters.draft_cache import CachedDrafter, DraftCache, DraftCore, Inputs
from jaxspec.speculation.drafters.proposals import Ranking, propose_block
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.tier import Tier


class MaskedCore(DraftCore, Protocol):
    """A network that was trained to predict from placeholders."""

    #: The token that a placeholder holds; None: this network knows no placeholders.
    mask_token_id: int | None

    def mask_feature(self, net: Any) -> jax.Array:
        """The feature that it comes with, [E]."""
        ...


class ParallelDrafter(CachedDrafter):
    """Chains and trees from one pass a round.

    Raises:
      ValueError: a network without placeholders.
    """

    stepwise = False

    def __init__(self, core: MaskedCore, geo: Geometry):
        if core.mask_token_id is None:
            raise ValueError("a head that drafts in parallel needs a mask_token_id, got None")
        super().__init__(core, geo)
        self.core, self.mask_token = core, core.mask_token_id

    def draft(
        self, params: Any, draft: DraftCache, rows: Rows, tokens_SL: jax.Array, tier: Tier,
        sampling: SamplingState | None, noise_BDV: jax.Array | None, sample: bool,
    ) -> tuple[DraftTree, DraftCache]:  # fmt: skip
        core, text = self.core, self.text
        net = core.bind(params)
        committed = text.committed(net, draft, rows, tokens_SL, 1 - text.window, 1)
        inputs = self._with_slots(net, rows, committed, tier.depth - 1)
        real_BN = (inputs.index_BN >= 0) & (inputs.index_BN <= rows.length_B[:, None])
        done = text.consume(net, draft, rows, inputs, real_BN, asked=tier.depth)
        logits_BDV = core.logits(net, done.hidden_BNE)
        ranking = Ranking(rows, sampling, noise_BDV, core.vocab_size, core.target_ids(net))
        tree = propose_block(logits_BDV, ranking, tier, sample=sample)
        return tree, text.write(draft, rows, done, ready_B=tree.tokens_BN[:, -1] >= 0)

    def _with_slots(self, net: Any, rows: Rows, inputs: Inputs, count: int) -> Inputs:
        """The inputs followed by `count` placeholders."""
        feature_BNE = inputs.feature_BNE
        assert feature_BNE is not None
        b, _, e = feature_BNE.shape
        tokens_BD = jnp.full((b, count), self.mask_token, inputs.tokens_BN.dtype)
        mask_BDE = jnp.broadcast_to(self.core.mask_feature(net)[None, None, :], (b, count, e))
        index_BD = rows.length_B[:, None] + 1 + jnp.arange(count)[None, :]
        return Inputs(
            jnp.concatenate([inputs.tokens_BN, tokens_BD], axis=1),
            jnp.concatenate([feature_BNE, mask_BDE.astype(feature_BNE.dtype)], axis=1),
            jnp.concatenate([inputs.index_BN, index_BD], axis=1),
            slots=count,
        )
