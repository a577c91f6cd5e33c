"""Suffix matches against scans of the texts: lengths, the corpus, votes, what came of proposals, and the choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SpeculationConfig
from jaxspec.hybrids import depths, joined
from jaxspec.speculation.drafters import hybrid, suffix_history
from jaxspec.speculation.drafters.featureless import Featureless
from jaxspec.speculation.drafters.hybrid import HybridDrafter
from jaxspec.speculation.drafters.suffix import CELLS, Matches, SuffixDrafter, SuffixMatcher
from jaxspec.speculation.drafters.suffix_corpus import PLACES, Corpus
from jaxspec.speculation.drafters.track_record import NOTHING, Proposal, TrackRecord, departure
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree, ancestors
from jaxspec.tier import Tier

V, LONGEST = 7, 6


def common_suffix(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return count


def rows_of(tokens: Any, root: list[int]) -> Rows:
    slot = jnp.arange(len(tokens))
    last = jnp.asarray(root, jnp.int32)
    return Rows(slot, slot >= 0, slot[:, None], last, jnp.asarray(tokens)[slot, last])


def test_lengths_of_matches_are_those_of_a_scan():
    """Texts of a token, of fewer than are looked at, that repeat themselves, and as long as there is room."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (5, 40)).astype(np.int32)
    tokens[1, :30] = np.tile([1, 2, 0, 1, 1], 6)

    @jax.jit
    def lengths(root: jax.Array) -> jax.Array:
        return suffix_history.lengths(tokens, root, suffix_history.tail(jnp.asarray(tokens), root, LONGEST))

    for root in ([0, 3, 9, 12, 1], [0, 4, 14, 30, 2], [7, 38, 15, 39, 20]):
        run = np.asarray(lengths(jnp.asarray(root, jnp.int32)))
        for row, last in enumerate(root):
            text = tokens[row].tolist()
            want = [min(LONGEST, common_suffix(text[: i + 1], text[: last + 1])) for i in range(last)]
            assert run[row].tolist() == want + [0] * (40 - last), (row, last)


@pytest.mark.parametrize("count", [1, 4])
def test_the_longest_and_latest_matches_come_first(count: int):
    run = jnp.asarray([[1, 3, 0, 3, 2, 1], [0, 0, 1, 1, 0, 0]], jnp.int32)
    length, at = suffix_history.best(run, count, 2)
    assert np.asarray(at)[0].tolist() == [3, 1, 4, 5][:count] and np.asarray(length)[0].tolist() == [3, 3, 2, 0][:count]
    assert not np.asarray(length)[1].any()


def test_a_corpus_finds_what_a_scan_of_its_texts_finds():
    """A ring of 128 tokens through which twice as many pass: what is found is there, and most that is recent is found.

    A bucket has a place for each of eight texts, so grams of one text may take it from one another.
    """
    rng = np.random.default_rng(1)
    remember = jax.jit(lambda corpus, text, count: corpus.remember(text, count))
    corpus, texts, found, missed = Corpus.empty(128), [], 0, 0
    tail = jax.jit(lambda corpus, tail: (*corpus.look_up(tail), corpus.continuations(corpus.look_up(tail)[1], 4, 99)))
    for _ in range(12):
        text = rng.integers(0, 90, rng.integers(1, 32)).tolist()
        padded = np.full(33, 5, np.int32)
        padded[: len(text)] = text
        corpus = remember(corpus, padded, len(text))
        texts.append(text)
        for query in (text[: len(text) // 2], texts[-2][:9] if len(texts) > 1 else text, rng.integers(0, 90, 9)):
            query = list(query)
            if len(query) < 2:
                continue
            ends = np.full((1, LONGEST), -2, np.int32)
            ends[0, : min(LONGEST, len(query))] = query[: -LONGEST - 1 : -1]
            run, _, following = (np.asarray(x)[0] for x in tail(corpus, ends))
            longest = 0
            for old in texts[-3:]:
                for end in range(1, len(old) + 1):
                    longest = max(longest, min(LONGEST, common_suffix(old[:end], query)))
            if longest >= 2:
                found, missed = found + (run.max() >= longest), missed + (run.max() < longest)
            for length, tokens in zip(run.tolist(), following.tolist(), strict=True):
                if length:  # some text goes on like this, and says so only up to its end
                    want = query[-length:] + [t for t in tokens if t != 99]
                    assert any(want == old[i : i + len(want)] for old in texts for i in range(len(old))), want
    assert found > 2 * missed > 0
    before = corpus
    after = remember(corpus, np.zeros(33, np.int32), 0)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert int(corpus.texts) == 12 and run.shape == (PLACES,)


def naive_vote(runs: list[int], following: list[list[int]], depth: int) -> list[int]:
    """The circle with the most expected tokens, by the priors alone."""
    best, chosen = -1.0, [V] * depth
    most = max(runs)
    for least in (most, (most + 1) // 2, min(most, 2), min(most, 1)):
        alive = [i for i, run in enumerate(runs) if run >= least and run]
        run = min((runs[i] for i in alive), default=LONGEST)
        score, survival, tokens = 0.0, 1.0, []
        for step in range(depth):
            alive = [i for i in alive if following[i][step] != V]
            votes = {t: sum(following[i][step] == t for i in alive) for t in (following[i][step] for i in alive)}
            if not votes:
                tokens += [V] * (depth - step)
                break
            winner = max(alive, key=lambda i: (votes[following[i][step]], runs[i], -i))
            token = following[winner][step]
            length = run + step
            survival *= np.float32(votes[token] / len(alive)) * np.float32((length / (length + 1)) ** 2)
            score, tokens = score + survival, [*tokens, token]
            alive = [i for i in alive if following[i][step] == token]
        if score > best + 1e-6:
            best, chosen = score, tokens
    return chosen


def test_votes_are_those_of_a_count():
    rng = np.random.default_rng(2)
    runs = rng.integers(0, 5, (64, 6))
    runs[0] = 0
    following = rng.integers(0, 3, (64, 6, 4))
    following[rng.random((64, 6)) < 0.2, 2:] = V  # texts that end
    geo = Geometry(64, 1, 1, 8, 4)
    matcher, record = SuffixMatcher(V, longest=LONGEST), TrackRecord.empty(geo, CELLS, 1)
    matches = Matches(jnp.asarray(runs, jnp.int32), jnp.asarray(following, jnp.int32), jnp.zeros((64, 6), bool))
    found = jax.jit(lambda matches: matcher._vote(record, matches, 4))(matches)
    for row in range(64):
        want = naive_vote(runs[row].tolist(), following[row].tolist(), 4)
        assert np.asarray(found.tokens_BD)[row].tolist() == want, row
    cells, chance = np.asarray(found.cells_BD), np.asarray(found.chance_BD)
    none = np.asarray(found.tokens_BD) == V
    assert none[0].all() and (cells[none] == NOTHING).all() and (chance[none] == 0).all()
    assert (cells[~none] < CELLS).all() and (chance[~none] > 0).all()


def test_proposals_are_judged_by_the_text_that_came():
    """Up to the first that was wrong, and as far as there is text; chosen or not, verified or not."""
    geo = Geometry(3, 1, 1, 15, 3)
    tokens = jnp.tile(jnp.arange(16, dtype=jnp.int32), (3, 1))
    record = TrackRecord.empty(geo, 8, 2)
    rows = rows_of(tokens, [4, 4, 4])
    first = Proposal(
        jnp.asarray([[5, 6, 7], [5, 0, 7], [0, 6, 7]]), jnp.asarray([[0, 1, 2]] * 3), jnp.full((3, 3), 0.5)
    )
    second = Proposal(
        jnp.asarray([[5, 6], [5, 6], [V, 6]]), jnp.asarray([[3, NOTHING], [3, 4], [NOTHING, 4]]), jnp.full((3, 2), 1.0)
    )
    record = record.proposed(rows, jnp.zeros((3, 2, 2), jnp.int32), [first, second])
    at = rows_of(tokens, [9, 6, 6])
    judged, sums = record.judged(at, tokens)
    assert np.asarray(judged.counts_X2).tolist() == [[3, 2], [2, 1], [1, 1], [2, 2], [1, 1], *[[0, 0]] * 3]
    # Eight labels of prior: 3 right of 1.5 expected, 1 of 1, none of 0.5.
    np.testing.assert_allclose(departure(sums, 0), [11 / 9.5, 9 / 9, 8 / 8.5], rtol=1e-6)
    np.testing.assert_allclose(judged.chance(jnp.asarray([0, 1, 7]), jnp.asarray([0.5, 0.5, 0.25])), [4 / 7, 0.5, 0.25])
    # The sums stay where nothing is proposed, but for a slot that another request takes; padding writes nothing.
    nothing = [Proposal(jnp.full((3, 3), V), jnp.full((3, 3), NOTHING), jnp.zeros((3, 3)))] * 2
    padded = dataclasses.replace(at, valid_B=jnp.asarray([True, True, False]))
    later = judged.proposed(padded, sums, nothing).admit(jnp.asarray([0, 3]))
    after, sums = later.judged(rows_of(tokens, [12, 12, 6]), tokens)
    assert (np.asarray(after.counts_X2) - np.asarray(judged.counts_X2)).tolist() == [[1, 0], *[[0, 0]] * 7]
    np.testing.assert_allclose(departure(sums, 0), [1, 9 / 9, 8 / 8.5], rtol=1e-6)
    far, _ = record.judged(rows_of(tokens, [4, 4, 4]), tokens)  # nothing came yet
    assert not np.asarray(far.counts_X2).any()


class Fixed(Featureless):
    """A model whose tree or chain and tokens are given, and whose parameters are its confidences."""

    supports_trees = True

    def draft(self, params: Any, draft: Any, rows: Rows, *rest: Any) -> Any:
        b = rows.root_B.shape[0]
        wide = lambda values, dtype: jnp.broadcast_to(jnp.asarray(values, dtype)[None], (b, len(values)))
        tokens = jnp.concatenate([rows.root_B[:, None], wide((5, 4, 5, 5), jnp.int32)], axis=1)
        said = jnp.broadcast_to(jnp.pad(params, (1, 0), constant_values=1.0)[None], (b, 5))
        if rest[1].is_chain:
            return DraftTree.chain(tokens[:, :4], confidence_BN=said[:, :4]), draft
        parents, depths = wide((0, 0, 0, 1, 3), jnp.int32), wide((0, 1, 1, 2, 3), jnp.int32)
        return DraftTree(tokens, parents, depths, ancestors(parents, 3), None, said), draft


@pytest.mark.parametrize("tier", [Tier(3), Tier(3, 2, 5)], ids=str)
def test_each_row_keeps_the_drafts_that_promise_more(tier: Tier):
    """A text that repeats itself beside one that never did; a model that is sure, and one that is not a number."""
    tokens = np.zeros((2, 32), np.int32)
    tokens[0, :12] = np.tile([0, 1, 2, 3], 3)
    tokens[1, :6] = [6, 5, 4, 3, 2, 1]
    rows = rows_of(tokens, [11, 5])
    geo = Geometry(2, 1, 1, 31, 3)
    drafter, text = HybridDrafter(Fixed(), SuffixMatcher(V)), jnp.asarray(tokens)
    run = jax.jit(lambda params, state: drafter.draft(params, state, rows, text, tier, None, None, False))
    # A tree has room for the match, 0 1 2, and for the best of the model's nodes.
    match = ([3, 0, 1, 2], [0, 0, 1, 2], [0, 1, 2, 3]) if tier.is_chain else (
        [3, 5, 0, 1, 2], [0, 0, 0, 2, 3], [0, 1, 1, 2, 3]
    )  # fmt: skip
    model = ([3, 5, 4, 5], [0, 0, 1, 2], [0, 1, 2, 3]) if tier.is_chain else (
        [3, 5, 4, 5, 5], [0, 0, 0, 1, 3], [0, 1, 1, 2, 3]
    )  # fmt: skip
    for confidence, repeats in (((0.1,) * 4, True), ((0.99, 0.97, 0.99, 0.99), False), ((float("nan"),) * 4, True)):
        tree, state = run(jnp.asarray(confidence, jnp.float32), drafter.init_state(geo))
        found = [np.asarray(x) for x in (tree.tokens_BN, tree.parents_BN, tree.depths_BN)]
        assert tuple(x[0].tolist() for x in found) == (match if repeats else model)
        # Where nothing promises anything, the model's.
        assert tuple(x[1].tolist() for x in found) == ([1, *model[0][1:]], *model[1:])
        np.testing.assert_array_equal(tree.ancestors_BNN, ancestors(tree.parents_BN, 3))
        # Both were put on record: 0 1 2, and the model's likeliest path.
        latest = np.asarray(state.suffix.record.latest_SADF)
        kept = latest[0, :, :, 0].tolist()
        assert kept == [[0, 1, 2], [5, 4, 5] if tier.is_chain else [5, 5, 5]]
        assert (latest[0, 1, :, 1] >= CELLS).all() and (latest[..., 1] < hybrid._CELLS).sum() == 3 + 3 + 3


@pytest.mark.parametrize("tier", [Tier(3), Tier(3, 2, 5)], ids=str)
def test_a_model_may_stop_where_matches_go_on(tier: Tier):
    """It is asked for one level, and what it cannot fill proposes nothing."""

    class Shallow(Fixed):
        def draft(self, params: Any, draft: Any, rows: Rows, *rest: Any) -> Any:
            own = rest[1]
            assert own == (Tier(1) if tier.is_chain else Tier(1, 2, 3))
            tree, draft = super().draft(params, draft, rows, *rest)
            cut = lambda x: x[:, : own.num_nodes]
            return dataclasses.replace(
                tree, tokens_BN=cut(tree.tokens_BN), parents_BN=cut(tree.parents_BN), depths_BN=cut(tree.depths_BN),
                ancestors_BNN=cut(tree.ancestors_BNN)[..., : own.num_nodes], confidence_BN=cut(tree.confidence_BN),
            ), draft  # fmt: skip

    tokens = np.zeros((2, 32), np.int32)
    tokens[0, :12] = np.tile([0, 1, 2, 3], 3)
    tokens[1, :6] = [6, 5, 4, 3, 2, 1]
    rows, geo = rows_of(tokens, [11, 5]), Geometry(2, 1, 1, 31, 3)
    drafter = HybridDrafter(Shallow(), SuffixMatcher(V), 1, 1)
    run = jax.jit(lambda state: drafter.draft(
        jnp.full(4, 0.3), state, rows, jnp.asarray(tokens), tier, None, None, False
    ))  # fmt: skip
    tree, state = run(drafter.init_state(geo))
    match, model = ([3, 0, 1, 2], [1, 5, V, V]) if tier.is_chain else ([3, 5, 0, 1, 2], [1, 5, 4, V, V])
    assert np.asarray(tree.tokens_BN).tolist() == [match, model]
    np.testing.assert_array_equal(tree.ancestors_BNN, ancestors(tree.parents_BN, 3))
    assert tree.confidence_BN is not None and not tree.confidence_BN[1, -2:].any()
    assert state.suffix.record.latest_SADF[0, :, :, 0].tolist() == [[0, 1, 2], [5, -1, -1]]


@pytest.mark.parametrize(
    ("stepwise", "said", "chains", "trees", "name"),
    [
        (True, None, None, 3, ", 3 deep in trees"), (False, None, None, None, ""),
        (True, 8, 8, 8, ", 8 deep"), (False, 2, 2, 2, ", 2 deep"),
    ],
)  # fmt: skip
def test_how_deep_a_model_drafts_where_nobody_says(
    stepwise: bool, said: int | None, chains: int | None, trees: int | None, name: str
):
    """Three deep in trees, if each token takes it a pass; what is said holds for chains too, and shows in the name."""
    model = Fixed()
    model.stepwise = stepwise
    drafter = joined(model, V, SpeculationConfig(hybrid=True, hybrid_depth=said))
    assert isinstance(drafter, HybridDrafter) and drafter.stepwise is stepwise
    assert (drafter.chain_depth, drafter.tree_depth, depths(drafter)) == (chains, trees, name)
    assert depths(model) == depths(None) == ""


def test_a_graft_is_the_best_tree_of_both_drafts():
    """Against all sets of nodes that are closed under parents, told apart by the paths that they stand for."""
    rng, tier, b = np.random.default_rng(0), Tier(3, 2, 5), 24
    parents = np.array([0, 0, 0, 1, 3])
    tokens = np.array([9, 1, 2, 1, 2])[None].repeat(b, 0)
    followed = rng.integers(1, 4, (b, 4))  # one in three repeats the tree's first node, one in nine its second too
    said, sure = rng.random((b, 5)).astype(np.float32), rng.random((b, 4)).astype(np.float32)
    said[:, 0] = sure[:, 0] = 1
    wide = lambda x: jnp.asarray(x[None].repeat(b, 0), jnp.int32)
    drafted = DraftTree(
        jnp.asarray(tokens, jnp.int32), wide(parents), wide(np.array([0, 1, 1, 2, 3])),
        ancestors(wide(parents), 3), None, jnp.asarray(said),
    )  # fmt: skip
    chain = DraftTree.chain(jnp.asarray(followed, jnp.int32), confidence_BN=jnp.asarray(sure))
    tree = jax.jit(lambda *drafts: hybrid._grafted(*drafts, tier))(chain, drafted)
    for row in range(b):
        chance: dict[tuple[int, ...], float] = {}  # of each path's last token, given those before it
        path = {0: ()}
        for node in range(1, 5):
            path[node] = (*path[parents[node]], int(tokens[row, node]))
            chance[path[node]] = float(said[row, node])
        for depth in range(1, 4):
            along = tuple(followed[row, 1 : depth + 1].tolist())
            chance[along] = max(chance.get(along, 0.0), float(sure[row, depth]) / hybrid._MARGIN)
        worth = lambda path, chance=chance: float(np.prod([chance[path[:i]] for i in range(1, len(path) + 1)]))
        best = sorted((worth(path) for path in chance), reverse=True)[:4]
        mine = {0: ()}
        for node in range(1, 5):
            parent, token = int(tree.parents_BN[row, node]), int(tree.tokens_BN[row, node])
            mine[node] = (*mine[parent], token)
            assert parent < node and len(mine[node]) == int(tree.depths_BN[row, node])
        assert len(set(mine.values())) == 5
        np.testing.assert_allclose(sorted((worth(mine[n]) for n in range(1, 5)), reverse=True), best, rtol=1e-5)


def test_a_tier_that_only_looks_up_asks_no_model():
    class Deaf(Fixed):
        def draft(self, *_: Any) -> Any:
            raise AssertionError("the model was asked")

    tokens = np.zeros((1, 32), np.int32)
    tokens[0, :12] = np.tile([0, 1, 2, 3], 3)
    drafter, geo = HybridDrafter(Deaf(), SuffixMatcher(V)), Geometry(1, 1, 1, 31, 5)
    args = rows_of(tokens, [11]), jnp.asarray(tokens), Tier(5, lookup=True), None, None, False
    tree, _ = jax.jit(lambda state: drafter.draft((), state, *args))(drafter.init_state(geo))
    assert np.asarray(tree.tokens_BN).tolist() == [[3, 0, 1, 2, 3, 0]]


def test_what_is_learnt_replaces_the_guess():
    """A match of one token is taken to come true one time in four; in random text of seven tokens one in seven does."""
    geo, drafter = Geometry(1, 1, 1, 255, 2), SuffixDrafter(SuffixMatcher(V))
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, V, (1, 256)), jnp.int32)

    @jax.jit
    def step(state: Any, root: jax.Array) -> Any:
        rows = dataclasses.replace(rows_of(tokens, [0]), length_B=root[None], root_B=tokens[:, root])
        tree, state = drafter.draft((), state, rows, tokens, Tier(2), None, None, False)
        assert tree.confidence_BN is not None
        return tree.confidence_BN[0, 1], state

    state, said = drafter.init_state(geo), []
    for root in range(1, 250):
        confidence, state = step(state, jnp.int32(root))
        said.append(float(confidence))
    first = next(c for c in said if c)
    assert first == pytest.approx(0.25) and 0.05 < np.mean(said[-40:]) < 0.28
