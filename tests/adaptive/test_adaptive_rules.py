"""Policies of other systems that fit tiers: Hugging Face's heuristic, and vLLM's schedule by batch size."""

from __future__ import annotations

import pytest

from jaxspec.adaptive.heuristic import HeuristicPolicy
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.adaptive.schedule import SchedulePolicy, checked
from jaxspec.config import SpeculationConfig
from jaxspec.tier import PLAIN, Tier

CHAINS = [Tier(d) for d in (0, 1, 2, 4, 6)]


def test_heuristic_adds_two_after_a_round_that_accepted_all_and_takes_one_after_any_other():
    policy = HeuristicPolicy(CHAINS)
    view, depths = BatchView(2, 2), []
    for accepted in [(6, 5), (4, 4), (3, 4), (4, 0), (0, 0), (2, 2), (0, 0), (0, 0), (0, 0), (0, 0), (1, 1)]:
        tier = policy.select(view)
        depths.append(tier.depth)
        policy.observe(RoundStats(tier, 2, 2, tuple(min(a, tier.depth) for a in accepted)))
    # The number: 6 5 6 5 4 3 5 4 3 2 1 3.
    assert depths == [6, 4, 6, 4, 4, 2, 4, 4, 2, 2, 1]
    assert policy.number == 3
    policy.observe(RoundStats(PLAIN, 2, 2, (0, 0)))
    policy.observe(RoundStats(Tier(2), 0, 2, ()))
    assert policy.number == 3


def test_heuristic_needs_a_tier_that_drafts():
    assert HeuristicPolicy(CHAINS).buckets_for(PLAIN, (1, 2)) == ()
    with pytest.raises(ValueError, match=r"got \['off'\]"):
        HeuristicPolicy([PLAIN])
    with pytest.raises(ValueError, match=r"always drafts, got candidate_steps \(0,\)"):
        SpeculationConfig(policy="heuristic", candidate_steps=(0,))


def schedule(entries: list[list[int]], buckets: tuple[int, ...] = (1, 4, 8, 16)) -> SchedulePolicy:
    return SchedulePolicy(checked(entries), {d: Tier(d) for _, _, d in entries}, buckets)


def test_schedule_runs_the_entry_of_the_batch_size_and_gaps_inherit():
    policy = schedule([[1, 2, 5], [3, 6, 2], [9, 12, 0]])
    chosen = [policy.select(BatchView(n, 16)).depth for n in range(1, 17)]
    assert chosen == [5, 5, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0]
    assert policy.tiers == (PLAIN, Tier(2), Tier(5))
    # Only what a batch of that padded size selects is compiled.
    reached = {tier.depth: policy.buckets_for(tier, (1, 4, 8, 16)) for tier in policy.tiers}
    assert reached == {5: (1, 4), 2: (4, 8), 0: (16,)}
    assert schedule([[1, 2, 5], [3, 6, 2], [9, 12, 0]], (1, 2)).tiers == (Tier(5),)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "got"),
        ("115", "got '115'"),
        ([[1, 4]], r"got \[1, 4\]"),
        ([[1, 4, True]], "True"),
        ([[2, 4, 1]], r"\[2, 4, 1\] after batch size 0"),
        ([[1, 4, 1], [4, 8, 0]], r"\[4, 8, 0\] after batch size 4"),
        ([[1, 4, 1], [8, 5, 0]], r"\[8, 5, 0\] after"),
        ([[1, 4, -1]], r"\[1, 4, -1\]"),
        ([[1, 4, 33]], r"at most 32 draft tokens, got \[1, 4, 33\]"),
    ],
)
def test_malformed_schedules(entries, words):
    with pytest.raises(ValueError, match=f"num_speculative_tokens_per_batch_size must hold .*{words}"):
        checked(entries)


def test_a_schedule_is_a_setting_of_its_policy_alone():
    field = "num_speculative_tokens_per_batch_size"
    config = SpeculationConfig.of({"policy": "schedule", field: [[1, 2, 3], [3, 4, 0]]})
    assert config.num_speculative_tokens_per_batch_size == ((1, 2, 3), (3, 4, 0)) and hash(config)
    with pytest.raises(ValueError, match=f"needs {field}, such as"):
        SpeculationConfig(policy="schedule")
    with pytest.raises(ValueError, match=f"{field} belongs to the schedule policy, got policy 'adaptive'"):
        SpeculationConfig.of({field: [[1, 2, 3]]})
    with pytest.raises(ValueError, match=f"{field} must hold"):
        SpeculationConfig.of({"policy": "schedule", field: [[1, 2]]})
