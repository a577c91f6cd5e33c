"""What drafters propose: EAGLE-2's tree against a plain search, the trees of blocks against all that there are, chains,
and prompt look-up against a scan of the text.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.speculation.drafters.proposals import Frontier, Ranking, propose, propose_block
from jaxspec.speculation.drafters.suffix import prompt_lookup
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree, ancestors
from jaxspec.speculation.verifier import verify
from jaxspec.tier import Tier
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise

V = 7
SLOTS = 12


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def eagle2(scores: Callable[[int, int], np.ndarray], root: int, tier: Tier) -> list[tuple[int, ...]]:
    """The paths of the tree's nodes (root excluded): expand the best k a level, keep the best of all candidates.

    scores(token, level): log-probabilities of the tokens after `token`, drafted at depth `level`.
    """
    children = lambda token, level: np.argsort(-scores(token, level), kind="stable")[: tier.topk]
    every: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for level in range(1, tier.depth + 1):
        made = []
        for total, path in frontier:
            last = path[-1] if path else root
            made += [(total + scores(last, level)[t], (*path, int(t))) for t in children(last, level)]
        every += made
        frontier = sorted(made, key=lambda c: -c[0])[: tier.topk]
    return [path for _, path in sorted(every, key=lambda c: -c[0])[: tier.num_nodes - 1]]


def paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The path of every node but the root; checks the tree's own invariants on the way."""
    tokens, parents, depths, lineage = (
        np.asarray(x)[row] for x in (tree.tokens_BN, tree.parents_BN, tree.depths_BN, tree.ancestors_BNN)
    )
    found: list[tuple[int, ...]] = [()]
    assert parents[0] == depths[0] == 0
    for node in range(1, len(tokens)):
        assert parents[node] < node, "parents precede children"
        assert depths[node] == depths[parents[node]] + 1
        found.append((*found[parents[node]], int(tokens[node])))
        up = {node}
        while node:
            node = parents[node]
            up.add(node)
        assert set(np.flatnonzero(lineage[len(found) - 1])) == up
    assert len(set(found)) == len(found), "siblings hold distinct tokens"
    return found[1:]


def agree(tree: DraftTree, row: int, scores: Callable[[int, int], np.ndarray]) -> None:
    """A node's confidence is its probability after its parent, under the scores that chose it."""
    assert tree.confidence_BN is not None
    tokens, parents, depths, confidence = (
        np.asarray(x)[row] for x in (tree.tokens_BN, tree.parents_BN, tree.depths_BN, tree.confidence_BN)
    )
    exact = [np.exp(scores(tokens[parents[n]], depths[n])[tokens[n]]) for n in range(1, len(tokens))]
    np.testing.assert_allclose(confidence, [1, *exact], rtol=1e-4)


def draft_tree(rounds: Any, tier: Tier, state: Any, noise: Any = None) -> DraftTree:
    drafter, rows = rounds._drafter("draft"), Rows.gather(state, jnp.arange(SLOTS), rounds.geo)
    sampling = None if noise is None else state.sampling.rows(rows.slot_B)
    tree, _ = jax.jit(
        lambda draft, noise: drafter.draft(
            rounds.core.params, draft, rows, state.tokens_SL, tier, sampling, noise, False
        )
    )(state.draft, noise)
    return tree


@pytest.mark.parametrize("tier", [Tier(1, 4, 4), Tier(2, 2, 5), Tier(3, 2, 7), Tier(4, 3, 31), Tier(3, 7, 40)], ids=str)
def test_dynamic_trees_are_eagle_2s(markov: Callable[[int], Any], tier: Tier):
    """Greedy rows rank by the draft's log-probabilities; sampled rows by the tempered ones plus the target's noise."""
    rounds = markov(SLOTS)
    temperature = np.where(np.arange(SLOTS) % 2, 0.0, 1.4)
    state = rounds.state(temperature_S=temperature)
    roots = np.arange(SLOTS) % V
    tokens = state.tokens_SL.at[:, 5].set(jnp.asarray(roots))
    state = dataclasses.replace(state, tokens_SL=tokens)
    position = jnp.broadcast_to(6 + jnp.arange(tier.depth)[None], (SLOTS, tier.depth))
    noise = gumbel_noise(state.sampling.seed_S, position, V, Purpose.TARGET)
    tree = draft_tree(rounds, tier, state, noise)
    for row in range(SLOTS):

        def scores(token: int, level: int, row: int = row) -> np.ndarray:
            x = rounds.draft[token]
            if temperature[row]:
                x = x / temperature[row] + np.asarray(noise)[row, level - 1]
            return log_softmax(x)

        assert sorted(paths(tree, row)) == sorted(eagle2(scores, int(roots[row]), tier)), row
        agree(tree, row, scores)


def best_first(scores: Callable[[int, int], np.ndarray], root: int, tier: Tier) -> list[tuple[int, ...]]:
    """The definition (DDTree): take the likeliest node whose parent is there. scores: see `eagle2`."""
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    taken: list[tuple[int, ...]] = []
    while len(taken) < tier.num_nodes:
        total, path = heapq.heappop(heap)
        taken.append(path)
        if len(path) < tier.depth:
            logprobs_V = scores(path[-1] if path else root, len(path) + 1)
            for token in np.argsort(-logprobs_V, kind="stable")[: tier.topk]:
                heapq.heappush(heap, (total - float(logprobs_V[token]), (*path, int(token))))
    return taken[1:]


def expected(found: list[tuple[int, ...]], logprobs_DV: np.ndarray) -> float:
    """Drafts of a tree that are accepted on average: of each depth at most one is."""
    return sum(math.exp(sum(logprobs_DV[i, token] for i, token in enumerate(path))) for path in found)


def block_trees(markov: Callable[[int], Any], tier: Tier, spread: float) -> tuple[DraftTree, np.ndarray]:
    """Trees over random distributions, and these, [B, D, V]: of greedy and of sampled rows, with ids of their own."""
    rng, rounds = np.random.default_rng(tier.num_nodes), markov(SLOTS)
    temperature = np.where(np.arange(SLOTS) % 2, 0.0, 1.4)
    state = rounds.state(temperature_S=temperature)
    rows = Rows.gather(state, jnp.arange(SLOTS), rounds.geo)
    logits = spread * rng.normal(size=(SLOTS, tier.depth, V)).astype(np.float32)
    ids = rng.permutation(V)
    ranking = Ranking(rows, state.sampling.rows(rows.slot_B), None, V, jnp.asarray(ids))
    tree = jax.jit(lambda x: propose_block(x, ranking, tier, sample=False))(logits)
    position = jnp.broadcast_to(6 + jnp.arange(tier.depth)[None], (SLOTS, tier.depth))
    noise = np.asarray(gumbel_noise(state.sampling.seed_S, position, V, Purpose.TARGET))
    scores = np.empty((SLOTS, tier.depth, V))
    for row, depth in itertools.product(range(SLOTS), range(tier.depth)):
        x = logits[row, depth]
        if temperature[row]:
            x = x / temperature[row] + noise[row, depth, ids]
        scores[row, depth, ids] = log_softmax(x)
    return tree, scores


@pytest.mark.parametrize("tier", [Tier(7, 4, 16), Tier(5, 2, 18), Tier(6, 5, 40)], ids=str)
def test_blocks_give_the_likeliest_nodes(markov: Callable[[int], Any], tier: Tier):
    """Node for node those of a best-first search, whatever the width that EAGLE-2 would have kept."""
    narrower = 0
    for spread in (0.3, 2.0):
        tree, scores = block_trees(markov, tier, spread)
        for row in range(SLOTS):
            known = scores[row]
            after = lambda token, level, known=known: known[level - 1]
            best = best_first(after, 1, tier)
            assert sorted(paths(tree, row)) == sorted(best), row
            agree(tree, row, after)
            gains = expected(best, known)
            chain = [tuple(int(t) for t in known.argmax(axis=1)[: i + 1]) for i in range(tier.depth)]
            assert gains >= expected(chain, known) - 1e-6
            narrower += expected(eagle2(after, 1, tier), known) < gains - 1e-6
    assert narrower or tier.num_nodes <= 4 * tier.topk, "a beam of topk never loses: no need to be as wide as it is"


@pytest.mark.parametrize("tier", [Tier(5, 4, 16), Tier(4, 3, 31), Tier(6, 2, 20)], ids=str)
def test_walks_give_the_likeliest_nodes(markov: Callable[[int], Any], tier: Tier):
    """Where each token changes what may follow it (DSpark, DFlash 2), too: the best of all paths, not of each level."""
    rng, rounds = np.random.default_rng(tier.num_nodes), markov(SLOTS)
    state = rounds.state()
    roots = jnp.arange(SLOTS, dtype=state.tokens_SL.dtype) % V
    state = dataclasses.replace(state, tokens_SL=state.tokens_SL.at[:, 5].set(roots))
    rows = Rows.gather(state, jnp.arange(SLOTS), rounds.geo)
    logits_DVV = (1.5 * rng.normal(size=(tier.depth, V, V))).astype(np.float32)

    def levels(depth: int, frontier: Frontier | None) -> jax.Array:
        before = rows.root_B[:, None] if frontier is None else frontier.tokens_BW
        return jnp.asarray(logits_DVV)[depth - 1][before]

    ranking = Ranking(rows, None, None, V)
    tree = jax.jit(lambda: propose(levels, ranking, tier, sample=False, best_first=True))()
    narrower = 0
    for row in range(SLOTS):
        after = lambda token, level: log_softmax(logits_DVV[level - 1, token])
        root = int(rows.root_B[row])
        best = best_first(after, root, tier)
        assert sorted(paths(tree, row)) == sorted(best), row
        agree(tree, row, after)
        narrower += sorted(best) != sorted(eagle2(after, root, tier))
    assert narrower, "EAGLE-2's beam would have been wide enough"


def closed_sets(tier: Tier) -> list[frozenset[tuple[int, ...]]]:
    """Every set of so many nodes that holds the parents of its nodes, which are the ranks along their paths."""
    found = {frozenset([()])}
    for _ in range(tier.num_nodes - 1):
        found = {
            nodes | {(*node, rank)}
            for nodes in found
            for node in nodes
            if len(node) < tier.depth
            for rank in range(tier.topk)
            if (*node, rank) not in nodes
        }
    return sorted(found, key=sorted)


@pytest.mark.parametrize("tier", [Tier(2, 3, 6), Tier(3, 2, 7), Tier(4, 2, 6)], ids=str)
def test_no_tree_of_a_block_is_expected_to_bring_more(markov: Callable[[int], Any], tier: Tier):
    """Against every tree of so many nodes that the candidates allow."""
    every = [tuple(r) for d in range(1, tier.depth + 1) for r in itertools.product(range(tier.topk), repeat=d)]
    holds = np.array([[node in nodes for node in every] for nodes in closed_sets(tier)], float)
    tree, scores = block_trees(markov, tier, 1.0)
    for row in range(SLOTS):
        ranked = -np.sort(-scores[row], axis=1)
        p = np.exp([sum(ranked[i, rank] for i, rank in enumerate(path)) for path in every])
        assert expected(paths(tree, row), scores[row]) == pytest.approx((holds @ p).max(), rel=1e-5)


def test_distributions_that_are_no_numbers_give_trees_all_the_same(markov: Callable[[int], Any]):
    rounds, tier = markov(SLOTS), Tier(3, 2, 9)
    rows = Rows.gather(rounds.state(), jnp.arange(SLOTS), rounds.geo)
    logits = np.random.default_rng(0).normal(size=(SLOTS, tier.depth, V)).astype(np.float32)
    logits[::2, 1], logits[1::4], logits[3, 0, :5] = np.nan, np.nan, -np.inf
    tree = jax.jit(lambda x: propose_block(x, Ranking(rows, None, None, V), tier, sample=False))(logits)
    for row in range(SLOTS):
        assert len(paths(tree, row)) == tier.num_nodes - 1  # which checks what a tree is


def test_chains_follow_the_drafts_best_tokens(markov: Callable[[int], Any]):
    rounds = markov(SLOTS)
    tree = draft_tree(rounds, Tier(3), rounds.state(temperature_S=0.0))
    agree(tree, 0, lambda token, depth: log_softmax(rounds.draft[token]))
    expected = [1]
    for _ in range(3):
        expected.append(int(rounds.draft[expected[-1]].argmax()))
    assert np.asarray(tree.tokens_BN).tolist() == [expected] * SLOTS
    assert [len(p) for p in paths(tree, 0)] == [1, 2, 3]


def test_ancestors_of_random_trees():
    rng = np.random.default_rng(0)
    parents = np.stack([[0] + [int(rng.integers(0, i)) for i in range(1, 9)] for _ in range(20)])
    out = np.asarray(ancestors(jnp.asarray(parents), 8))
    for row in range(20):
        for node in range(9):
            up, at = {node, 0}, node
            while at:
                at = int(parents[row, at])
                up.add(at)
            assert set(np.flatnonzero(out[row, node])) == up


def walk(tokens: np.ndarray, parents: np.ndarray, choice: np.ndarray) -> tuple[list[int], int]:
    """The definition: from the root, step to the child that holds the target's token."""
    path = [0]
    while True:
        step = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == choice[path[-1]]]
        if not step:
            return path, int(choice[path[-1]])
        path.append(step[0])


@pytest.mark.parametrize("chain", [False, True])
def test_coupled_verification_walks_the_tree(chain: bool):
    rng = np.random.default_rng(4)
    b, n, depth = 200, 8, 7
    parents = np.zeros((b, n), int)
    tokens = rng.integers(0, 3, (b, n))
    for row in range(b):
        for node in range(1, n):
            parents[row, node] = node - 1 if chain else rng.integers(0, node)
            siblings = [m for m in range(1, node) if parents[row, m] == parents[row, node]]
            while tokens[row, node] in tokens[row, siblings]:
                tokens[row, node] += 1
    tokens[::5, -2:] = V  # no proposal
    lineage = np.asarray(ancestors(jnp.asarray(parents), depth))
    tree = DraftTree(
        *(jnp.asarray(x, jnp.int32) for x in (tokens, parents, lineage.sum(axis=2) - 1)), jnp.asarray(lineage)
    )
    choice = rng.integers(0, 4, (b, n)).astype(np.int32)
    tier = Tier(depth) if chain else Tier(depth, 2, n)
    logits = jax.nn.one_hot(choice, V + 4)
    verdict = jax.jit(lambda tree, logits: verify(tree, logits, None, jnp.ones((b,), jnp.int32), tier))(tree, logits)
    assert verdict.finite_B.all()
    accepted = np.asarray(verdict.num_accepted_B)
    assert accepted.max() >= 4
    for row in range(b):
        path, following = walk(tokens[row], parents[row], choice[row])
        assert accepted[row] == len(path) - 1
        assert np.asarray(verdict.path_BD)[row, : len(path)].tolist() == path
        assert int(verdict.next_token_B[row]) == following


def look_up(text: list[int], depth: int, n_min: int, n_max: int) -> list[int]:
    """Longest suffix (n_max to n_min) that ended earlier; its most recent end; the continuation, period by period."""
    for n in range(n_max, n_min - 1, -1):
        ends = [e for e in range(n - 1, len(text) - 1) if len(text) >= n and text[e - n + 1 : e + 1] == text[-n:]]
        if ends:
            tail = text[ends[-1] + 1 :]
            return [tail[i % len(tail)] for i in range(depth)]
    return [V] * depth


@pytest.mark.parametrize(("n_min", "n_max"), [(1, 4), (2, 3), (3, 3), (1, 1)])
def test_prompt_look_up_scans_the_text(n_min: int, n_max: int):
    """Texts of up to 1,300 tokens (three blocks of the search), short and repetitive ones among them."""
    rng = np.random.default_rng(n_min)
    length = 1300
    texts = [rng.integers(0, V, n).tolist() for n in (1, 2, 3, 5, 9, 40, 511, 512, 513, 1024, 1299)]
    texts += [[2] * 7, [1, 2, 3] * 4, [0, 1] * 260 + [3], [5, *[6] * 600, 5], [4] * 1300]
    tokens = np.zeros((len(texts), length), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        tokens[row, len(text) :] = text[-1]  # bait behind the text's end
    last = jnp.asarray([len(t) - 1 for t in texts])
    geo = Geometry(len(texts), 1, 1, length - 1, 4)
    slot = jnp.arange(len(texts))
    rows = Rows(slot, slot < geo.slots, slot[:, None], last, jnp.asarray([t[-1] for t in texts]))
    drafter = prompt_lookup(V, n_min, n_max)
    tree, _ = jax.jit(lambda t: drafter.draft((), drafter.init_state(geo), rows, t, Tier(4), None, None, False))(
        jnp.asarray(tokens)
    )
    for row, text in enumerate(texts):
        expected = [text[-1], *look_up(text, 4, n_min, n_max)]
        assert np.asarray(tree.tokens_BN)[row].tolist() == expected, (row, len(text))
        confidence = np.asarray(tree.confidence_BN)[row]
        assert confidence[0] == 1 and (confidence[1:] > 0).all() == (expected[1] != V)
    # The text of 1 2 3, over and over, matches in n_max tokens, then in one more with each that is right.
    run = n_max + np.arange(4)
    np.testing.assert_allclose(
        np.asarray(tree.confidence_BN)[texts.index([1, 2, 3] * 4), 1:], (run / (run + 1)) ** 2, rtol=1e-5
    )
