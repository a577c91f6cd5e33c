"""Budgets for trees: what labels of trees say, and the default policy on batches whose rows are unlike each other."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from array import array

import numpy as np
import pytest
from mixed import Crowd, Fixed, Table, h200, mixed

from jaxspec.adaptive.arms import Arm, packed_tokens
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.goodput import GoodputPolicy
from jaxspec.adaptive.kind import Room
from jaxspec.adaptive.policy import DraftLabels, RoundStats
from jaxspec.adaptive.yields import Yields, guess
from jaxspec.config import SpeculationConfig
from jaxspec.tier import PLAIN, Choice, Tier

TREE, BUDGETS = Tier(4, 2, 14), (1.5, 4.0)
TIERS = (PLAIN, Tier(2), Tier(4), TREE)


class Lattice(Table):
    """The room of batches for drafters of one pass: two candidates a position, and the likeliest nodes of those."""

    def _round(self, choice: Choice, crowd: Crowd) -> tuple[RoundStats, float]:
        tier, rows = choice.tier, len(crowd.rates)
        if tier.is_chain:
            return super()._round(choice, crowd)
        first, said = crowd.draft(self._chance, tier.depth)
        part = self._chance.uniform(0.2, 0.7, first.shape)
        p, c = np.stack([first, (1 - first) * part]), np.stack([said, (1 - said) * part])
        rank = np.where(self._chance.random(first.shape) < first, 0, 1)
        rank[(rank == 1) & (self._chance.random(first.shape) > part)] = 2  # neither
        fits = [*choice.calibration, *[(1.0, 0.0)] * tier.depth]
        trees = [likeliest(c[:, row], tier) for row in range(rows)]
        chance = [[along(c[:, row], node, fits) for node in tree] for row, tree in enumerate(trees)]
        order = sorted((-x, len(trees[row][i]), row, i) for row, xs in enumerate(chance) for i, x in enumerate(xs))
        left = len(order) if choice.tokens is None else choice.tokens - self._bucket
        verified = {(row, i) for *_, row, i in order[:left]}
        gained, accepted, labels = float(rows), [], []
        for row, tree in enumerate(trees):
            length, at = 0, {(): 0} | {node: i + 1 for i, node in enumerate(tree)}
            for i, node in enumerate(tree):
                above, taken = at[node[:-1]], (row, i) in verified
                known = node[:-1] == tuple(rank[row, : len(node) - 1]) and (not above or (row, above - 1) in verified)
                right = known and node[-1] == rank[row, len(node) - 1]
                gained += along(p[:, row], node) * taken
                length += right and taken
                labels.append((c[node[-1], row, len(node) - 1], len(node), taken, known, right, above))
            accepted.append(length)
        seconds = self._cost(tier, self._bucket, choice.tokens)
        timed = 0.0 if self._noise is None else seconds * math.exp(self._chance.normal(0, self._noise))
        told = None if choice.tokens is None else drafts_of(labels, tier.num_nodes - 1)
        stats = RoundStats(tier, rows, self._bucket, tuple(accepted), timed, tokens=choice.tokens, drafts=told)
        return stats, gained


def likeliest(c_KD: np.ndarray, tier: Tier) -> list[tuple[int, ...]]:
    """The nodes of a tree, best first, each as the ranks along its path."""
    heap, taken = [(-1.0, ())], []
    while len(taken) < tier.num_nodes:
        total, node = heapq.heappop(heap)
        taken.append(node)
        if len(node) < tier.depth:
            for rank in range(tier.topk):
                heapq.heappush(heap, (total * c_KD[rank, len(node)], (*node, rank)))
    return taken[1:]


def along(p_KD: np.ndarray, node: tuple[int, ...], fits: list[tuple[float, float]] | None = None) -> float:
    """The product along a path, of calibrated numbers where there are fits."""
    out = 1.0
    for depth, rank in enumerate(node):
        x = float(p_KD[rank, depth])
        if fits is not None:
            inside = min(1 - 1e-4, max(1e-4, x))
            a, b = fits[depth]
            x = 1 / (1 + math.exp(-(a * math.log(inside / (1 - inside)) + b)))
        out *= x
    return out


def drafts_of(nodes: list[tuple[float, int, bool, bool, bool, int]], count: int) -> DraftLabels:
    """Of (confidence, depth, verified, known, right, parent)."""
    depth, verified, known, right = (bytes(map(int, (node[i] for node in nodes))) for i in (1, 2, 3, 4))
    confidence, parent = array("f", [node[0] for node in nodes]), array("H", [node[5] for node in nodes])
    return DraftLabels(count, confidence, depth, verified, known, right, parent)


def policy(bucket: int) -> GoodputPolicy:
    rounds = {(tier, bucket): h200(tier, bucket) for tier in TIERS}
    arms = [Arm(TREE, budget) for budget in BUDGETS]
    packed = {(TREE, bucket, t): h200(TREE, bucket, t) for arm in arms if (t := arm.tokens(bucket)) is not None}
    return GoodputPolicy(TIERS, CostTable(rounds | packed), packed=arms)


def test_labels_of_trees_are_summed_along_their_paths():
    """A root with two children, the first of which has two more and the second one; their confidences are believed."""
    tree, arms = Tier(2, 2, 6), [Arm(Tier(2, 2, 6), 2.0), Arm(Tier(2), 1.0)]
    yields = Yields(arms, [1])
    node = lambda c, depth, parent, verified, known, right: (c, depth, verified, known, right, parent)
    told = drafts_of(
        [
            node(0.5, 1, 0, True, True, True), node(0.4, 1, 0, False, True, False), node(0.5, 2, 1, True, True, False),
            node(0.4, 2, 1, False, True, True), node(0.5, 2, 2, False, False, False),
        ], 5,
    )  # fmt: skip
    # The target goes on with the first child, and then with the second of its own, which nobody verified.
    assert yields.observe(told, tree.depth, 1) == [1.0, 1.0, 1.0]
    survivals = [0.5, 0.4, 0.25, 0.2, 0.2]
    assert yields.share(0, 1) == pytest.approx(sum(survivals[:2]) / sum(survivals))
    assert yields.share(1, 1) is None, "a tree's round tells nothing of chains"
    unseen = [node(*x, False, False, False) for x in ((0.9, 1, 0), (0.8, 1, 0), (0.9, 2, 1), (0.8, 2, 1), (0.9, 2, 2))]
    # Siblings exclude one another, whatever is said of them.
    assert Yields(arms, [1]).observe(drafts_of(unseen, 5), tree.depth, 1) == [1.0, 1.0, 1.0]


def test_budgets_of_trees_are_used_where_rows_are_unlike():
    """Near the best of all that could have been chosen for good, which is a packed tree."""
    bucket, crowd = 32, mixed(32, good=0.85, poor=0.2)
    arms = [*(Choice(t) for t in TIERS), *(Choice(TREE, packed_tokens(TREE, bucket, b)) for b in BUDGETS)]
    fixed = {arm: Lattice(bucket).play(Fixed(arm), crowd, 40).goodput() for arm in arms}
    best = max(fixed, key=lambda arm: fixed[arm])
    assert best.tokens is not None and fixed[best] > 1.02 * max(fixed[arm] for arm in arms if arm.tokens is None)
    one, heard = policy(bucket), []
    observe = one.observe
    one.observe = lambda stats: (heard.append(stats), observe(stats))[1]
    run = Lattice(bucket, noise=0.02).play(one, crowd, 160)
    assert run.goodput(60) >= 0.97 * fixed[best]
    assert sum(choice.tokens is not None for choice in run.choices[60:]) > 80
    # What is believed of a packed tree is what it brings.
    packed = [stats for stats in heard[60:] if stats.tokens is not None]
    tokens = [1 + sum(stats.num_accepted) / len(stats.num_accepted) for stats in packed]
    believed = one.expected_tokens(TREE, bucket, packed[-1].tokens)
    assert believed == pytest.approx(np.mean(tokens), rel=0.1)


def test_confidences_of_trees_that_tell_nothing_cost_little():
    crowd, best = mixed(32, good=0.85, poor=0.2), 0.0
    for tier in TIERS:
        best = max(best, Lattice(32).play(Fixed(Choice(tier)), crowd, 30).goodput())
    one = policy(32)
    observe = one.observe

    def spoil(stats: RoundStats) -> None:
        if stats.drafts is not None:
            wrong = array("f", [math.nan] * len(stats.drafts.confidence))
            stats = dataclasses.replace(stats, drafts=dataclasses.replace(stats.drafts, confidence=wrong))
        observe(stats)

    one.observe = spoil
    assert Lattice(32, noise=0.02).play(one, crowd, 200).goodput(80) >= 0.95 * best


def test_a_trees_share_is_guessed_by_levels():
    """Before any packed round: a budget of half the nodes is half the levels."""
    one, tree = policy(32), TREE
    alive = [one.expected_tokens(Tier(d), 32) for d in (2, 4)]
    assert alive[0] < alive[1]
    for budget, tokens in ((b, packed_tokens(tree, 32, b)) for b in BUDGETS):
        whole, part = one.expected_tokens(tree, 32), one.expected_tokens(tree, 32, tokens)
        assert 1 < part < whole
        assert (part - 1) / (whole - 1) >= budget / (tree.num_nodes - 1) - 1e-9
    assert guess([0.5, 0.25], 1.0, 0.0) == pytest.approx(2 / 3)


def test_which_trees_are_packed():
    def packed(**fields: object) -> set[tuple[Tier, int]]:
        config = SpeculationConfig.of(fields)
        return {*config.policy_kind.budgets(config, Room((1, 8), (0, 1, 3), (1.0, 2.0)))}

    assert packed(topk=2) == {(Tier(3, 2, 4), 8)}
    assert packed(tiers=[Tier(3), Tier(3, 2, 7)]) == {(Tier(3, 2, 7), 8)}
    assert packed(tiers=[Tier(4), Tier(3, 2, 7)]) == {(Tier(4), 8)}
    assert packed(tiers=[Tier(1)]) == packed(tiers=[Tier(3, 2, 7)], candidate_budgets=[6]) == set()
    assert packed(tiers=[Tier(3, 2, 7)], candidate_budgets=[5]) == {(Tier(3, 2, 7), b) for b in (1, 8)}
    with pytest.raises(ValueError, match="a packed arm drafts as one of"):
        GoodputPolicy([TREE], CostTable({}), buckets=(1,), packed=[Arm(Tier(3, 2, 7), 1.0)])


def test_every_node_of_a_lattice_is_found_once():
    """The room itself: trees are closed under parents."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        c = np.sort(rng.dirichlet([1, 1, 1], TREE.depth), axis=1)[:, ::-1].T[:2]
        tree = likeliest(c, TREE)
        assert len({*tree}) == TREE.num_nodes - 1 and all(len(n) == 1 or n[:-1] in tree for n in tree)
        chances = [along(c, node) for node in tree]
        assert all(a >= b for a, b in itertools.pairwise(chances))
