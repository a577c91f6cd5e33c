"""A block in one pass, and then token by token what the token before changes.

Owns short lists and the walk along a draft. Must not know how the block is computed or what the cache holds (that is
DFlash's), nor what a token changes.

What the token before adds to a candidate is a product with the candidate's row of a table, so the whole vocabulary at
every step would read that table as often as a draft is deep. Where it is large the walk therefore reads the rows of a
short list alone, the best of each place before the walk; sampled rows' best are those of their own noise. A draft from
a short list is a draft from another distribution, and whatever the draft is, the output is the target's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.speculation.drafters.dflash import BlockDrafter, ContextCache
from jaxspec.speculation.drafters.proposals import Frontier, Levels, Ranking, propose
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.tier import Tier
from pallas_kernels.rejection_sampling.reference import NEG_INF


class Steps(Protocol):
    """The module that a walk goes by (nnx.Module).

    Attributes:
      after: [Vd, r] rows of the candidates.
    """

    after: nnx.Param

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Rows [.., r] of the tokens before."""
        ...

    def step(self, hidden: jax.Array, row: jax.Array, state: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """(what candidates' rows are multiplied with [.., r], a state that goes along) of one place.

        Args:
          hidden: [.., E]. row: of the token before, [.., r]. state: after the place before; None at the first.
        """
        ...


#: (hidden states [.., E], rows of the tokens before [.., r]) -> logits of the probability of acceptance, float32 [..].
Sure = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortlist(Ranking):
    """Ranks a few candidates of each depth, whose logits are what is to be added to those that they were listed for.

    Attributes:
      ids_BDK: their draft ids. listed_BDK: what they were listed for: scores, or logits where drafts are drawn.
      drafted: tokens of the draft vocabulary.
    """

    ids_BDK: jax.Array
    listed_BDK: jax.Array
    drafted: int

    @classmethod
    def of(cls, ranking: Ranking, logits_BDV: jax.Array, count: int, *, sample: bool) -> Shortlist:
        """The best `count` of each depth.

        Args:
          sample: drafts are drawn: then the list must not depend on noise.
        """
        b, depths, v = logits_BDV.shape
        rank = ranking._allowed if sample else ranking.scores
        listed = [rank(logits_BDV[:, d : d + 1], d + 1) for d in range(depths)]
        # As a matrix: only there does XLA rank a vocabulary that lies on several devices in parts.
        best, ids = jax.lax.top_k(jnp.concatenate(listed, axis=1).reshape(-1, v), min(count, v))
        own = {f.name: getattr(ranking, f.name) for f in dataclasses.fields(Ranking)}
        return cls(**own, ids_BDK=ids.reshape(b, depths, -1), listed_BDK=best.reshape(b, depths, -1), drafted=v)

    def to_target(self, ids: jax.Array, depth: int) -> jax.Array:
        b = ids.shape[0]
        drafted = jnp.take_along_axis(self.ids_BDK[:, depth - 1], ids.reshape(b, -1), axis=1).reshape(ids.shape)
        return super().to_target(drafted, depth)

    def scores(self, logits_BWV: jax.Array, depth: int) -> jax.Array:
        if self.sampling is not None:
            t_B = self.sampling.temperature_S
            logits_BWV = logits_BWV / jnp.where(t_B == 0, 1.0, t_B)[:, None, None]
        return self.listed_BDK[:, depth - 1][:, None] + logits_BWV

    def draw(self, logits_BV: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
        wide_BV = jnp.full((logits_BV.shape[0], self.drafted), NEG_INF, jnp.float32)
        put = jax.vmap(lambda wide, ids, own: wide.at[ids].set(own))
        return super().draw(put(wide_BV, self.ids_BDK[:, depth - 1], self.listed_BDK[:, depth - 1] + logits_BV), depth)


class Walk:
    """What the token before adds to the candidates on the short lists, or to all, as `proposals.Levels`.

    Args:
      ids_BDK: the draft ids on the lists; None: all are candidates.

    Attributes:
      sure_B1: logits of acceptance at each depth of a chain so far; empty where nothing says them.
    """

    def __init__(
        self, steps: Steps, root_B: jax.Array, hidden_BDE: jax.Array, ids_BDK: jax.Array | None, sure: Sure | None
    ):  # fmt: skip
        self.steps, self.root_B, self.hidden_BDE, self.sure = steps, root_B, hidden_BDE, sure
        listed = ids_BDK is not None
        self.rows_BDKr = jnp.take(steps.after[...], ids_BDK, axis=0, mode="clip") if listed else None
        self.state_BWr: jax.Array | None = None
        self.sure_B1: list[jax.Array] = []

    def __call__(self, depth: int, frontier: Frontier | None) -> jax.Array:
        state = self.state_BWr
        tokens_BW = self.root_B[:, None] if frontier is None else frontier.tokens_BW
        spread = lambda x_B1X: jnp.broadcast_to(x_B1X, (*tokens_BW.shape, x_B1X.shape[-1]))
        if frontier is not None and state is not None:
            origin_BW = frontier.origin_BW
            state = spread(state) if origin_BW is None else jnp.take_along_axis(state, origin_BW[:, :, None], axis=1)
        hidden_BWE, row_BWr = spread(self.hidden_BDE[:, depth - 1 : depth]), self.steps.embed(tokens_BW)
        features_BWr, self.state_BWr = self.steps.step(hidden_BWE, row_BWr, state)
        if self.sure is not None:
            self.sure_B1.append(self.sure(hidden_BWE, row_BWr)[:, :1])
        if self.rows_BDKr is None:
            return jnp.einsum("bwr,vr->bwv", features_BWr, self.steps.after[...], preferred_element_type=jnp.float32)
        rows_BKr = self.rows_BDKr[:, depth - 1]
        return jnp.einsum("bwr,bkr->bwk", features_BWr, rows_BKr, preferred_element_type=jnp.float32)


class WalkingHead(Protocol):
    """A DflashHead (nnx.Module) whose places are walked.

    Attributes:
      listed: candidates of a place; None: all that can be drafted.
    """

    @property
    def listed(self) -> int | None: ...

    def walk(self) -> tuple[Steps, Sure | None]:
        """What its walk goes by."""
        ...


def walked(
    head: WalkingHead, root_B: jax.Array, hidden_BDE: jax.Array, logits_BDV: jax.Array, ranking: Ranking, tier: Tier,
    *, sample: bool = False, temperature: jax.Array | None = None,
) -> tuple[DraftTree, Walk]:  # fmt: skip
    """A draft of the tier's shape; trees are best-first, since a node more costs a step, not a pass.

    Args:
      hidden_BDE, logits_BDV: of the places, and what each says by itself.
      sample: see `propose`.
      temperature: that of logits which have it, and noise, in them already, with a ranking that asks for neither.
    """
    steps, sure = head.walk()
    cooled = lambda added: added if temperature is None else added / temperature
    if head.listed is None:
        walk = Walk(steps, root_B, hidden_BDE, None, sure)
        whole: Levels = lambda depth, frontier: logits_BDV[:, depth - 1 : depth] + cooled(walk(depth, frontier))
        return propose(whole, ranking, tier, sample=sample, best_first=True), walk
    short = Shortlist.of(ranking, logits_BDV, max(head.listed, tier.topk), sample=sample)
    walk = Walk(steps, root_B, hidden_BDE, short.ids_BDK, sure)
    levels: Levels = lambda depth, frontier: cooled(walk(depth, frontier))
    return propose(levels, short, tier, sample=sample, best_first=True), walk


class WalkingDrafter(BlockDrafter):
    """Chains and trees from a block and a walk; trees that branch more than places have candidates have as many.

    Chains say what the head's `sure` does, where it has one. Nodes of trees, of which several follow the same token,
    and chains without it say their share of the draft's distribution, as other drafters' do.
    """

    def draft(
        self, params: Any, draft: ContextCache, rows: Rows, tokens_SL: jax.Array, tier: Tier,
        sampling: SamplingState | None, noise_BDV: jax.Array | None, sample: bool,
    ) -> tuple[DraftTree, ContextCache]:  # fmt: skip
        net: Any = self._bind(params)
        hidden_BDE = self._predicting(net, draft, rows)[:, : tier.depth]
        ids_V = None if self.full_vocabulary else net.target_ids[...]
        ranking = Ranking(rows, sampling, noise_BDV, self.config.vocab_size, ids_V)
        tree, walk = walked(net, rows.root_B, hidden_BDE, net.logits(hidden_BDE), ranking, tier, sample=sample)
        if walk.sure_B1 and tier.is_chain and tree.confidence_BN is not None:
            sure_BD = jax.nn.sigmoid(jnp.concatenate(walk.sure_B1, axis=1))
            tree = dataclasses.replace(tree, confidence_BN=tree.confidence_BN.at[:, 1:].set(sure_BD))
        return tree, draft
