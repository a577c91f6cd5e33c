"""Suffix decoding: what followed the earlier places that end as the text does now, by votes.

On the device, so that a round needs no host round-trip, and without parameters. Places are looked for in the text
itself (`suffix_history`) and, where there is one, in a corpus of other texts (`suffix_corpus`). Those of the longest
match vote token by token, and so do wider circles of shorter matches; the circle that promises most tokens drafts.
What a length of match and a share of the votes are worth is learnt from the texts themselves (`track_record`).
Prompt lookup is the setting of one place and short matches. (Sources: Saxena's prompt lookup, with vLLM's [min, max]
rule; SuffixDecoding, arXiv 2411.04975, for frequencies and the score; vLLM's votes.)
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.speculation.drafters import suffix_history
from jaxspec.speculation.drafters.featureless import Featureless
from jaxspec.speculation.drafters.suffix_corpus import Corpus
from jaxspec.speculation.drafters.track_record import NOTHING, Proposal, TrackRecord, departure
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.tier import Tier

#: Lengths of match from which a kind of proposal begins; further kinds are told by how the votes fell, and where.
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 32)
_ALONE, _UNANIMOUS, _MOST, _SOME, _VOTES = 0, 1, 2, 3, 4
#: Kinds of proposals that a suffix drafter makes.
CELLS = len(_LENGTHS) * _VOTES * 2
#: A chance that is no estimate: the only token that a grammar allows.
_FORCED = 0.99


class Matches(NamedTuple):
    """Earlier places that end as a text does.

    Attributes:
      run_BC: how many tokens are equal; 0: no place.
      tokens_BCD: what followed there; the vocabulary's size from where nothing did.
      shared_BC: whether it lies in the corpus, not in the text itself.
    """

    run_BC: jax.Array
    tokens_BCD: jax.Array
    shared_BC: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SuffixState:
    """Attributes:
    record: of what was proposed. corpus: other texts; None: none.
    """

    record: TrackRecord
    corpus: Corpus | None


@dataclasses.dataclass(frozen=True)
class SuffixMatcher:
    """Proposes continuations; keeps everything but the record of what came of them.

    Attributes:
      vocab_size: the token that means "no proposal".
      shortest, longest: matches to look for, in tokens; longer ones count as the longest.
      places: of the text itself that vote.
      corpus_tokens: room for other texts; 0: none.
    """

    vocab_size: int
    shortest: int = 1
    longest: int = 32
    places: int = 8
    corpus_tokens: int = 0

    def init_state(self, geo: Geometry, cells: int = CELLS, sources: int = 1) -> SuffixState:
        """Of no text, with a record of so many cells and sources of proposals."""
        corpus = Corpus.empty(self.corpus_tokens) if self.corpus_tokens else None
        return SuffixState(TrackRecord.empty(geo, cells, sources), corpus)

    def admit(self, state: SuffixState, slot_B: jax.Array) -> SuffixState:
        """Requests take these slots."""
        return dataclasses.replace(state, record=state.record.admit(slot_B))

    def remember(self, state: SuffixState, tokens_L: jax.Array, count: jax.Array) -> SuffixState:
        """With a text of `count` tokens in the corpus."""
        assert state.corpus is not None
        return dataclasses.replace(state, corpus=state.corpus.remember(tokens_L, count))

    def forget(self, state: SuffixState) -> SuffixState:
        """With an empty corpus."""
        assert state.corpus is not None
        return dataclasses.replace(state, corpus=state.corpus.emptied())

    def propose(self, state: SuffixState, rows: Rows, tokens_SL: jax.Array, depth: int) -> Proposal:
        """What the rows' texts may go on with."""
        proposal = self._vote(state.record, self._matches(state, rows, tokens_SL, depth), depth)
        return proposal if rows.allowed_BDW is None else self._within(proposal, rows.allowed_BDW)

    def _matches(self, state: SuffixState, rows: Rows, tokens_SL: jax.Array, depth: int) -> Matches:
        tokens_BL = jnp.take(tokens_SL, rows.slot_B, axis=0, mode="clip")
        tail_BK = suffix_history.tail(tokens_BL, rows.length_B, self.longest)
        run_BL = suffix_history.lengths(tokens_BL, rows.length_B, tail_BK)
        run_BC, at_BC = suffix_history.best(run_BL, min(self.places, run_BL.shape[1]), self.shortest)
        own = Matches(
            run_BC, suffix_history.continuations(tokens_BL, at_BC, rows.length_B, depth), jnp.zeros(run_BC.shape, bool)
        )
        if state.corpus is None:
            return own
        run_BC, at_BC = state.corpus.look_up(tail_BK)
        run_BC = jnp.where(run_BC >= self.shortest, run_BC, 0)
        tokens_BCD = state.corpus.continuations(at_BC, depth, self.vocab_size)
        shared = Matches(run_BC, tokens_BCD, jnp.ones(run_BC.shape, bool))
        return Matches(*(jnp.concatenate(both, axis=1) for both in zip(own, shared, strict=True)))

    def _vote(self, record: TrackRecord, matches: Matches, depth: int) -> Proposal:
        """The circle of places that promises most tokens; of equal ones that of the longer matches.

        In each circle the token with most votes wins, those who voted for it go on, and so token by token. Here all
        tokens are voted on at once, in few reductions: a place that is still in at some token has company of exactly
        those that repeat it so far, whoever won.
        """
        run_BC, places = matches.run_BC, matches.run_BC.shape[1]
        most_B = run_BC.max(axis=1)
        least = [most_B]
        if places > 1:
            least += [(most_B + 1) // 2, jnp.minimum(most_B, 2), jnp.minimum(most_B, 1)]
        least_BQ = jnp.stack(least, axis=1)
        in_BQC = (run_BC[:, None, :] >= least_BQ[:, :, None]) & (run_BC > 0)[:, None, :]
        # A circle is as good as its shortest match.
        run_BQ = jnp.where(in_BQC, run_BC[:, None, :], self.longest).min(axis=2)
        goes_on_BCD = _cumulative(matches.tokens_BCD < self.vocab_size)
        same_BCCD = _cumulative(matches.tokens_BCD[:, :, None, :] == matches.tokens_BCD[:, None, :, :])
        before_BCCD = jnp.pad(same_BCCD[..., :-1], ((0, 0),) * 3 + ((1, 0),), constant_values=True)
        voter_BQCD = in_BQC[..., None] & goes_on_BCD[:, None]
        # What each place finds at a token if it is still in: votes for its own, and voters.
        among = lambda who_BCCD: (voter_BQCD[:, :, None] & who_BCCD[:, None]).sum(axis=3, dtype=jnp.int32)
        votes_BQCD, voters_BQCD = among(same_BCCD), among(before_BCCD)
        # Ties go to the longer match, then to the text itself and its later places.
        key_BQCD = votes_BQCD * (self.longest + 1) + run_BC[:, None, :, None]
        last_C = 2 * jnp.arange(places - 1, -1, -1, dtype=jnp.int32)
        last_BC = last_C[None] + matches.shared_BC.astype(jnp.int32)
        key_BQCD = jnp.where(voter_BQCD, 2 * places * key_BQCD + last_BC[:, None, :, None], -1)
        # Places with the same token at a step share its best key; at the first at which two differ the better one wins.
        key_BQCD = jnp.where(same_BCCD[:, None], key_BQCD[:, :, None], -1).max(axis=3)
        parted_BCCD = before_BCCD & ~same_BCCD
        worse_BQCCD = parted_BCCD[:, None] & (key_BQCD[:, :, :, None] < key_BQCD[:, :, None])
        won_BQC1 = (in_BQC & ~jnp.any(worse_BQCCD & in_BQC[:, :, None, :, None], axis=(3, 4)))[..., None]
        of_winner = lambda x_BQCD: jnp.where(won_BQC1, x_BQCD, -1).max(axis=2)
        votes_BQD, voters_BQD, key_BQD, token_BQD = map(
            of_winner, (votes_BQCD, voters_BQCD, key_BQCD, matches.tokens_BCD[:, None])
        )
        some_BQD = voters_BQD > 0
        tokens_BQD = jnp.where(some_BQD, token_BQD, self.vocab_size)
        step_D = jnp.arange(depth, dtype=jnp.int32)
        cells_BQD, prior_BQD = self._judge(run_BQ[:, :, None] + step_D[None, None], votes_BQD, voters_BQD, key_BQD % 2)
        chance_BQD = jnp.where(some_BQD, record.chance(cells_BQD, prior_BQD), 0.0)
        score_BQ = _expected(chance_BQD)
        best, chosen = score_BQ[:, 0], [x[:, 0] for x in (tokens_BQD, cells_BQD, chance_BQD)]
        for circle in range(1, len(least)):
            better_B = score_BQ[:, circle] > best
            best = jnp.where(better_B, score_BQ[:, circle], best)
            chosen = [
                jnp.where(better_B[:, None], x[:, circle], old)
                for x, old in zip((tokens_BQD, cells_BQD, chance_BQD), chosen, strict=True)
            ]
        return Proposal(*chosen)

    def _judge(
        self, run: jax.Array, votes: jax.Array, voters: jax.Array, shared: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The kind of a proposal, NOTHING of none, and what to think of it before anything is known of its kind.

        Args:
          run: tokens that the match is long, those of the proposal before this one included.
          shared: 1 where the corpus says so, else 0.
        """
        split = jnp.where(2 * votes > voters, _MOST, _SOME)
        fell = jnp.where(voters == 1, _ALONE, jnp.where(votes == voters, _UNANIMOUS, split))
        length = sum((run >= edge).astype(jnp.int32) for edge in _LENGTHS[1:])
        cell = (length * _VOTES + fell) * 2 + shared
        # A guess, and a low one: a source that is not chosen is judged all the same, so it need not be tried.
        # A token that is right makes the match longer by one.
        run_f, votes_f, voters_f = (x.astype(jnp.float32) for x in (run, votes, voters))
        prior = votes_f / jnp.maximum(voters_f, 1) * (run_f / (run_f + 1)) ** 2
        return jnp.where(voters > 0, cell, NOTHING), jnp.where(voters > 0, prior, 0.0)

    def _within(self, proposal: Proposal, allowed_BDW: jax.Array) -> Proposal:
        """With the only token that is allowed, where there is but one, and none where it is refused."""
        tokens_BD, cells_BD, chance_BD = proposal
        word_BD = jnp.argmax(allowed_BDW != 0, axis=2).astype(jnp.int32)
        bits_BD = jnp.take_along_axis(allowed_BDW, word_BD[:, :, None], axis=2)[:, :, 0]
        forced_BD = jax.lax.population_count(allowed_BDW).sum(axis=2) == 1
        only_BD = 32 * word_BD + 31 - jax.lax.clz(bits_BD.astype(jnp.uint32)).astype(jnp.int32)
        inside_BD = jnp.minimum(tokens_BD, self.vocab_size - 1)
        bits_BD = jnp.take_along_axis(allowed_BDW, (inside_BD // 32)[:, :, None], axis=2)[:, :, 0]
        refused_BD = (bits_BD >> (inside_BD % 32)) & 1 == 0
        cells_BD = jnp.where(forced_BD | refused_BD, NOTHING, cells_BD)
        chance_BD = jnp.where(forced_BD, _FORCED, jnp.where(refused_BD, 0.0, chance_BD))
        tokens_BD = jnp.where(forced_BD, only_BD, jnp.where(refused_BD, self.vocab_size, tokens_BD))
        return Proposal(tokens_BD, cells_BD, chance_BD)


def _cumulative(x: jax.Array) -> jax.Array:
    """Whether it holds up to each index of the last axis, which is short."""
    parts = [x[..., 0]]
    for step in range(1, x.shape[-1]):
        parts.append(parts[-1] & x[..., step])
    return jnp.stack(parts, axis=-1)


def _expected(chance: jax.Array) -> jax.Array:
    """How many tokens of chains come true, by the chances of each given those before it on the last axis."""
    survival, total = chance[..., 0], chance[..., 0]
    for step in range(1, chance.shape[-1]):
        survival = survival * chance[..., step]
        total = total + survival
    return total


def chain_of(rows: Rows, proposal: Proposal, departure_B: jax.Array) -> DraftTree:
    """A proposal as a draft, its chances as sure as the row's record makes them."""
    chance_BD = jnp.clip(proposal.chance_BD * departure_B[:, None], 0.0, 1.0)
    return DraftTree.chain(
        jnp.concatenate([rows.root_B[:, None], proposal.tokens_BD], axis=1),
        confidence_BN=jnp.pad(chance_BD, ((0, 0), (1, 0)), constant_values=1.0),
    )


class SuffixDrafter(Featureless):
    """Drafts chains of what a `SuffixMatcher` proposes; has no parameters."""

    def __init__(self, matcher: SuffixMatcher):
        self.matcher = matcher

    @property
    def corpus_tokens(self) -> int:
        return self.matcher.corpus_tokens

    def init_state(self, geo: Geometry) -> SuffixState:
        return self.matcher.init_state(geo)

    def admit(self, draft: SuffixState, slot_B: jax.Array, cached_B: jax.Array) -> SuffixState:
        return self.matcher.admit(draft, slot_B)

    def remember(self, draft: SuffixState, tokens_L: jax.Array, count: jax.Array) -> SuffixState:
        return self.matcher.remember(draft, tokens_L, count)

    def forget(self, draft: SuffixState) -> SuffixState:
        return self.matcher.forget(draft)

    def draft(
        self, params: Any, draft: SuffixState, rows: Rows, tokens_SL: jax.Array, tier: Tier,
        sampling: SamplingState | None, noise_BDV: jax.Array | None, sample: bool,
    ) -> tuple[DraftTree, SuffixState]:  # fmt: skip
        record, sums_BA2 = draft.record.judged(rows, tokens_SL)
        proposal = self.matcher.propose(dataclasses.replace(draft, record=record), rows, tokens_SL, tier.depth)
        tree = chain_of(rows, proposal, departure(sums_BA2, 0))
        return tree, dataclasses.replace(draft, record=record.proposed(rows, sums_BA2, [proposal]))


def prompt_lookup(vocab_size: int, shortest: int = 1, longest: int = 4) -> SuffixDrafter:
    """The latest of the longest matches in the text itself, of `shortest` to `longest` tokens, and no vote."""
    return SuffixDrafter(SuffixMatcher(vocab_size, shortest, longest, places=1))
