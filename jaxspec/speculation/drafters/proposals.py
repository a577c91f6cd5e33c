"""From distributions, level by level, to drafts: chains, EAGLE-2's dynamic tree, and the best tree there is.

Owns which candidates a draft holds and how sampled rows rank and draw them. Must not know where the distributions come
from: a drafter whose network runs token by token offers them as `Levels`, one that drafts in one pass as an array, for
then they do not depend on the path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.speculation.sampling import SamplingState, unpack_bits
from jaxspec.speculation.state import Rows
from jaxspec.speculation.tree import DraftTree, ancestors
from jaxspec.tier import Tier
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise, gumbel_noise_at
from pallas_kernels.rejection_sampling.reference import NEG_INF, filter_logits


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The drafted nodes that are to be continued.

    Attributes:
      tokens_BW: their tokens, in the target's vocabulary.
      seen_BWT: which of all drafted nodes so far, frontier after frontier, each one sees; itself included.
      origin_BW: which node of the frontier before each continues; None where that had one node.
    """

    tokens_BW: jax.Array
    seen_BWT: jax.Array
    origin_BW: jax.Array | None


#: levels(depth, frontier) -> logits over the draft vocabulary of the tokens at `depth` (from 1), float32 [B, W, Vd]
#: after each node of the frontier. The frontier is None at depth 1, whose parent is the root; depths come in order,
#: each once.
Levels = Callable[[int, Frontier | None], jax.Array]
#: children(depth, frontier) -> log-probabilities and tokens of the topk best after each node of the frontier, [B, W, k]
#: both, best first, or [B, 1, k] where they do not depend on the path; see Levels.
Children = Callable[[int, Frontier | None], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Ranking:
    """How a batch's rows turn logits into candidates.

    Attributes:
      sampling: None where every row ranks by the draft's own logits.
      noise_BDV: the target's Gumbel noise at each drafted position, where it is known already.
      vocab_size: the target's.
      target_ids_V: the target's id of each draft id; None where the vocabularies are equal.
    """

    rows: Rows
    sampling: SamplingState | None
    noise_BDV: jax.Array | None
    vocab_size: int
    target_ids_V: jax.Array | None = None

    def to_target(self, ids: jax.Array, depth: int) -> jax.Array:
        """Indices of a depth's logits in the target's vocabulary."""
        ids = ids.astype(jnp.int32)
        return ids if self.target_ids_V is None else jnp.take(self.target_ids_V, ids, mode="clip")

    def _allowed(self, logits_BWV: jax.Array, depth: int) -> jax.Array:
        """Logits without the tokens that the rows' grammars refuse at this depth."""
        if self.rows.allowed_BDW is None:
            return logits_BWV
        allowed_BV = unpack_bits(self.rows.allowed_BDW[:, depth - 1], self.vocab_size)
        if self.target_ids_V is not None:
            allowed_BV = jnp.take(allowed_BV, self.target_ids_V, axis=1, mode="clip")
        # A draft vocabulary may lack all of them: then the distribution stays as it is, which draws depend on.
        allowed_BV = allowed_BV | ~jnp.any(allowed_BV, axis=1, keepdims=True)
        return jnp.where(allowed_BV[:, None, :], logits_BWV, NEG_INF)

    def scores(self, logits_BWV: jax.Array, depth: int) -> jax.Array:
        """Ranking scores: logits, or for sampled rows tempered logits plus the target's own noise."""
        sampling, table = self.sampling, self.target_ids_V
        logits_BWV = self._allowed(logits_BWV, depth)
        if sampling is None:
            return logits_BWV
        position_B = self.rows.length_B + depth
        if self.noise_BDV is not None:
            noise = self.noise_BDV[:, depth - 1]
            noise = noise if table is None else jnp.take(noise, table, axis=1, mode="clip")
        elif table is None:
            noise = gumbel_noise(sampling.seed_S, position_B[:, None], self.vocab_size, Purpose.TARGET)[:, 0]
        else:
            noise = gumbel_noise_at(sampling.seed_S, position_B, table, Purpose.TARGET)
        greedy = (sampling.temperature_S == 0)[:, None, None]
        temperature = jnp.where(greedy, 1.0, sampling.temperature_S[:, None, None])
        return jnp.where(greedy, logits_BWV, logits_BWV / temperature + noise[:, None, :])

    def draw(self, logits_BV: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
        """A token from the tempered and filtered draft distribution, and that distribution over V."""
        sampling, table = self.sampling, self.target_ids_V
        assert sampling is not None
        b, v = logits_BV.shape[0], self.vocab_size
        wide = self._allowed(logits_BV[:, None], depth)[:, 0]
        if table is not None:
            wide = jnp.full((b, v), NEG_INF, jnp.float32).at[:, table].set(wide)
        kept = filter_logits(wide[:, None], *sampling.draws[:4])[:, 0]
        noise = gumbel_noise(sampling.seed_S, (self.rows.length_B + depth)[:, None], v, Purpose.DRAFT)[:, 0]
        greedy = (sampling.temperature_S == 0)[:, None]
        token = jnp.argmax(jnp.where(greedy, wide, kept + noise), axis=-1).astype(jnp.int32)
        return token, jax.nn.softmax(kept, axis=-1)


def propose(levels: Levels, ranking: Ranking, tier: Tier, *, sample: bool, best_first: bool = False) -> DraftTree:
    """A draft of the tier's shape.

    Args:
      sample: draw a chain from the draft distributions and return them (rejection verification).
      best_first: trees have the likeliest nodes that there are, not EAGLE-2's: where a node more costs next to nothing.
    """
    if tier.is_chain:
        return _chain(levels, ranking, tier, sample)
    assert not sample, "trees are proposed deterministically"

    def children(depth: int, frontier: Frontier | None) -> tuple[jax.Array, jax.Array]:
        value, ids = _ranked(ranking.scores(levels(depth, frontier), depth), tier.topk)
        return value, ranking.to_target(ids, depth)

    return _tree(children, ranking, tier, beam=tier.num_nodes if best_first else tier.topk)


def propose_block(logits_BDV: jax.Array, ranking: Ranking, tier: Tier, *, sample: bool) -> DraftTree:
    """A draft of the tier's shape from distributions that one pass gave for all its depths, [B, depth, Vd].

    Its trees have the likeliest nodes that topk candidates a depth allow (DDTree, arXiv 2604.12989; JetSpec, arXiv
    2606.18394): a node more costs no pass, so none has to be given up before all are compared.

    Args:
      sample: see `propose`.
    """
    if tier.is_chain:
        return _chain(lambda depth, frontier: logits_BDV[:, depth - 1 : depth], ranking, tier, sample)
    assert not sample, "trees are proposed deterministically"
    scores = [ranking.scores(logits_BDV[:, depth - 1 : depth], depth) for depth in range(1, tier.depth + 1)]
    # One search for the best of every depth: the vocabulary is what it costs.
    value_BDK, ids_BDK = _ranked(jnp.concatenate(scores, axis=1), tier.topk)

    def children(depth: int, frontier: Frontier | None) -> tuple[jax.Array, jax.Array]:
        return value_BDK[:, depth - 1 : depth], ranking.to_target(ids_BDK[:, depth - 1 : depth], depth)

    return _tree(children, ranking, tier, beam=tier.num_nodes)


def _with_root(confidence_BM: jax.Array) -> jax.Array:
    return jnp.pad(confidence_BM, ((0, 0), (1, 0)), constant_values=1.0)


def _chain(levels: Levels, ranking: Ranking, tier: Tier, sample: bool) -> DraftTree:
    tokens, probs, confidences = [ranking.rows.root_B], [], []
    frontier = None
    for depth in range(1, tier.depth + 1):
        logits = levels(depth, frontier)
        if sample:
            token, prob_BV = ranking.draw(logits[:, 0], depth)
            probs.append(prob_BV)
        else:
            scores_BV = ranking.scores(logits, depth)[:, 0]
            token = ranking.to_target(jnp.argmax(scores_BV, axis=-1), depth)
            # Of the scores, as trees rank: where the noise is shared it decides, too, whether the target agrees.
            confidences.append(jnp.exp(scores_BV.max(axis=-1) - jax.nn.logsumexp(scores_BV, axis=-1)))
        tokens.append(token)
        frontier = Frontier(token[:, None], jnp.ones((token.shape[0], 1, depth), bool), None)
    tokens_BN = jnp.stack(tokens, axis=1)
    if sample:
        return DraftTree.chain(tokens_BN, jnp.stack(probs, axis=1))
    return DraftTree.chain(tokens_BN, confidence_BN=_with_root(jnp.stack(confidences, axis=1)))


def _ranked(scores_BWV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and draft ids of the k best candidates after each node, [B, W, k] both."""
    b, _, v = scores_BWV.shape
    logprobs = jax.nn.log_softmax(scores_BWV, axis=-1)
    # top_k ranks NaN first, and a node so chosen would come without its parents.
    ranked = jnp.where(jnp.isnan(logprobs), NEG_INF, logprobs)
    # As a matrix: only there does XLA rank a vocabulary that lies on several devices in parts.
    value, ids = (y.reshape(b, -1, k) for y in jax.lax.top_k(ranked.reshape(-1, v), k))
    return value, ids


def _tree(children: Children, ranking: Ranking, tier: Tier, beam: int) -> DraftTree:
    """Expands the best `beam` nodes a level, and keeps the best of all candidates.

    With a beam of k this is EAGLE-2's tree (Li et al. 2024). With one as wide as the tree it is the tree that is
    expected to bring most tokens, if its probabilities are right: paths exclude one another, so what is expected is the
    sum over the nodes, and no node has more than its parent. The best nodes are therefore closed under parents; of a
    level there are at most num_nodes - depth among them, for each level above has one, and their parents are among the
    best of theirs.
    """
    k, b, n = tier.topk, ranking.rows.root_B.shape[0], tier.num_nodes
    score, at = jnp.zeros((b, 1), jnp.float32), jnp.full((b, 1), -1, jnp.int32)
    frontier, depths = None, []
    pool: list[tuple[jax.Array, ...]] = []  # of each level score, token, own log-probability, parent's place
    for depth in range(1, tier.depth + 1):
        value, ids = children(depth, frontier)
        w = score.shape[1]
        flat = lambda x, w=w: jnp.broadcast_to(x, (b, w, k)).reshape(b, w * k)
        of_pick = lambda x, pick: jnp.take_along_axis(x, pick, axis=1)
        room = min(w * k, max(k, n - depth))
        score, pick = jax.lax.top_k(flat(score[:, :, None] + value), room)
        pick = pick.astype(jnp.int32)
        token, origin = of_pick(flat(ids), pick), pick // k
        pool.append((score, token, of_pick(flat(value), pick), of_pick(at, origin)))
        at = jnp.broadcast_to(len(depths) + jnp.arange(room, dtype=jnp.int32)[None], (b, room))
        depths += [depth] * room
        score, at, token, origin = (x[:, :beam] for x in (score, at, token, origin))
        own = jnp.broadcast_to(jnp.eye(token.shape[1], dtype=bool)[None], (b, *2 * token.shape[1:]))
        if frontier is not None:
            seen = jnp.take_along_axis(frontier.seen_BWT, origin[:, :, None], axis=1)
            own = jnp.concatenate([seen, own], axis=2)
        frontier = Frontier(token, own, None if frontier is None else origin)

    score_BM, token_BM, value_BM, parent_BM = (jnp.concatenate(x, axis=1) for x in zip(*pool, strict=True))
    # A child never scores above its parent and comes after it, so the best set is closed under parents.
    _, chosen = jax.lax.top_k(score_BM, n - 1)
    chosen = jnp.sort(chosen.astype(jnp.int32), axis=1)
    parent = jnp.take_along_axis(parent_BM, chosen, axis=1)
    node_of = jnp.argmax(chosen[:, None, :] == parent[:, :, None], axis=2).astype(jnp.int32) + 1
    root = jnp.zeros((b, 1), jnp.int32)
    parents_BN = jnp.concatenate([root, jnp.where(parent < 0, 0, node_of)], axis=1)
    depth_BN = jnp.concatenate([root, jnp.take(jnp.asarray(depths, jnp.int32), chosen)], axis=1)
    tokens_BN = jnp.concatenate([ranking.rows.root_B[:, None], jnp.take_along_axis(token_BM, chosen, axis=1)], axis=1)
    own = jnp.take_along_axis(value_BM, chosen, axis=1)
    return DraftTree(
        tokens_BN, parents_BN, depth_BN, ancestors(parents_BN, tier.depth), confidence_BN=_with_root(jnp.exp(own))
    )
