"""Two versions of a drafter take turns: which one stays, when, and when they are tried again."""

from __future__ import annotations

import random

import pytest

from jaxspec.adaptive import versions as module
from jaxspec.adaptive.versions import FALL, LEAST, MOST, RETRY, TURN, Versions


def play(versions: Versions, chances: dict[int, float], rounds: int, *, rows: int = 4, depth: int = 3) -> list[int]:
    """Rounds of chains whose drafts are accepted with a version's chance; the versions that ran."""
    noise, ran = random.Random(sum(chances) + rounds), []
    for number in range(rounds):
        version = versions.next(1)
        ran.append(version)
        # The policy drafts more in some rounds than in others, of whichever version.
        tier = depth if number % 3 else 1
        accepted = []
        for _ in range(rows):
            count = 0
            while count < tier and noise.random() < chances[version]:
                count += 1
            accepted.append(count)
        versions.observe(version, tier, accepted)
        if versions.other is not None and not versions.trying:
            return ran
    return ran


def test_turns_are_even_and_what_is_better_stays():
    versions = Versions()
    assert versions.introduce() == 2 and versions.trying and versions.served == 1
    ran = play(versions, {1: 0.5, 2: 0.7}, 1000)
    turns = [ran[at : at + TURN] for at in range(0, len(ran), TURN)]
    assert all(len(set(turn)) == 1 for turn in turns) and len({turns[0][0], turns[1][0]}) == 2
    assert (versions.served, versions.other, versions.trying, versions.rollbacks) == (2, 1, False, 0)
    assert LEAST * 2 <= 4 * len(ran) < MOST


@pytest.mark.parametrize(("chance", "served"), [(0.3, 1), (0.49, 2), (0.5, 2)])
def test_what_is_worse_is_rolled_back_and_what_is_as_good_stays(chance: float, served: int):
    versions = Versions()
    versions.introduce()
    play(versions, {1: 0.5, 2: chance}, 8000)
    assert (versions.served, versions.rollbacks) == (served, int(served == 1)) and not versions.trying
    assert set(versions) == {1, 2}, "the other one is kept"


def test_a_policy_that_drafts_more_with_one_does_not_decide_for_it():
    """As good at every depth, but one was drafted with more deeply: the sums differ, the comparison does not."""
    versions = Versions()
    versions.introduce()
    for _ in range(8000):
        version = versions.next(1)
        for tier, accepted in ((1, [1, 0]), (4, [3, 3])):
            for _ in range(3 if (tier == 4) == (version == 2) else 1):
                versions.observe(version, tier, accepted)
        if not versions.trying:
            break
    assert (versions.served, versions.trying) == (2, False)


def test_the_next_one_replaces_what_is_on_trial():
    versions = Versions()
    assert [versions.introduce(), versions.introduce()] == [2, 3]
    assert set(versions) == {1, 3} and versions.trying
    versions.observe(2, 3, [3, 3])  # a round that was in flight
    play(versions, {1: 0.2, 3: 0.8}, 1000)
    assert versions.introduce(trial=False) == 4
    assert (versions.served, versions.other, versions.trying) == (4, 3, False)
    assert (versions.updates, versions.rollbacks) == (3, 0)


def test_what_was_kept_comes_back_when_the_traffic_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "RETRY", 2 * MOST)
    versions = Versions()
    versions.introduce()
    play(versions, {1: 0.3, 2: 0.8}, 1000)
    assert versions.served == 2
    for _ in range(3 * MOST):  # as good as it was: nothing is tried again
        versions.observe(2, 3, [3, 1, 3, 2])
    assert not versions.trying
    for _ in range(2 * MOST):
        versions.observe(2, 3, [1, 0, 0, 1])
        if versions.trying:
            break
    assert versions.trying and versions.next(1) in (1, 2)
    play(versions, {1: 0.8, 2: 0.3}, 1000)
    assert (versions.served, versions.other) == (1, 2)
    assert RETRY > MOST and 0 < FALL < 1
