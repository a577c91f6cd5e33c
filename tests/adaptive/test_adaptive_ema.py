"""SGLang's EMA policy: every expected number is worked by hand from the rules, none is read off the code."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.adaptive import (
    DEFAULT_CONFIG,
    PRESETS,
    AdaptiveSpeculativeParams,
    BatchView,
    EmaPolicy,
    RoundStats,
)
from jaxspec.tier import PLAIN, Tier


def eager(steps: list[int], initial: int, **tuning: float) -> AdaptiveSpeculativeParams:
    """One slot that decides at every batch on the last batch alone."""
    slot = {"candidate_steps": steps, "ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1, **tuning}
    return AdaptiveSpeculativeParams({"1": slot}, initial_steps=initial)


# ------------------------------------------------------------------ start and cadence


def test_default_slots_start_in_the_middle_with_an_average_one_below():
    params = AdaptiveSpeculativeParams()
    assert [params.steps_for(b) for b in (1, 8, 32, 64)] == [5, 1, 1, 0]
    assert [params.ema_for(b) for b in (1, 8, 32, 64)] == [4.0, 0.0, 0.0, -1.0]
    assert params.candidate_steps == (0, 1, 3, 5, 7)


def test_initial_steps_start_only_the_slots_that_have_them():
    params = AdaptiveSpeculativeParams(initial_steps=3)
    assert [params.steps_for(b) for b in (1, 8, 32, 64)] == [3, 3, 1, 0]
    assert params.ema_for(8) == 2.0


def test_first_decision_with_defaults_is_at_the_fifteenth_batch():
    params = AdaptiveSpeculativeParams()
    changed = [params.update([0, 0], 1) for _ in range(15)]
    assert changed == [False] * 14 + [True]
    # 4 * 0.8**15 = 0.1407: below 3 - 0.5 - 0.25 and below 1 - 0.5 - 0.25, so from 5 over 3 to 1 at once.
    assert params.ema_for(1) == pytest.approx(4 * 0.8**15)
    assert params.steps_for(1) == 1


def test_decisions_come_every_interval_after_the_warmup():
    config = {"warmup_batches": 2, "update_interval": 3, "ema_alpha": 1.0, "1": {"candidate_steps": [1, 3, 5, 7]}}
    params = AdaptiveSpeculativeParams(config, initial_steps=1)
    changed = []
    for _ in range(11):
        changed.append(params.update([params.steps_for(1)], 1))
    assert [n + 1 for n, was in enumerate(changed) if was] == [5, 8, 11]


def test_empty_round_counts_for_nothing():
    params = AdaptiveSpeculativeParams({"1": {"candidate_steps": [1, 3], "warmup_batches": 1, "update_interval": 1}})
    assert [params.update([], 1) for _ in range(5)] == [False] * 5
    assert params.ema_for(1) == 2.0
    assert not params.update([0], 1)  # still the warm-up
    assert params.ema_for(1) == pytest.approx(1.6)


def test_average_is_over_the_requests_of_a_batch():
    params = eager([1, 3, 7], 3, ema_alpha=0.5)
    params.update([0, 1, 2], 1)
    assert params.ema_for(1) == pytest.approx(0.5 * 2.0 + 0.5 * 1.0)


# ------------------------------------------------------------------ moves


def test_down_and_up_cross_several_tiers_in_one_decision():
    params = eager([1, 3, 5, 7], 7)
    assert params.update([0], 1)
    assert params.steps_for(1) == 1
    assert params.update([7], 1)  # 7 > 0.5, > 2.5, > 4.5
    assert params.steps_for(1) == 7


@pytest.mark.parametrize(
    ("accepted", "tuning", "expected"),
    [
        ([2, 3], {}, 3),  # 2.5 is not above 3 - 0.5
        ([3, 3], {}, 7),
        ([3, 3], {"up_hysteresis": 0.75}, 3),  # 3 is not above 3 - 0.5 + 0.75
        ([0, 1], {"down_hysteresis": 0.0}, 1),  # 0.5 is at 1 - 0.5
        ([0, 1], {}, 3),  # 0.5 is above 1 - 0.5 - 0.25
        ([0, 0, 0, 1], {}, 1),  # 0.25 is at 1 - 0.5 - 0.25
    ],
)
def test_thresholds_from_three(accepted, tuning, expected):
    params = eager([1, 3, 7], 3, **tuning)
    assert params.update(accepted, 1) == (expected != 3)
    assert params.steps_for(1) == expected


def test_no_up_move_after_a_down_move():
    # 2.0 <= 5 - 0.5 - 2.5 moves 7 to 5; 2.0 > 3 - 0.5 - 2.5 stops there; 2.0 > 5 - 0.5 - 3 would climb back.
    params = eager([1, 3, 5, 7], 7, down_hysteresis=-2.5, up_hysteresis=-3.0)
    assert params.update([2], 1)
    assert params.steps_for(1) == 5


def test_step_zero_is_left_for_the_next_candidate_with_the_average_frozen():
    params = eager([0, 3, 5], 3, down_hysteresis=0.0, up_hysteresis=10.0, ceiling_coeff=0.1)
    assert params.update([0, 1], 1)  # 0.5 is at 0.5
    assert (params.steps_for(1), params.ema_for(1)) == (0, 0.5)
    assert params.update([9], 1)  # hysteresis and ceiling are not asked, the lengths are not read
    assert (params.steps_for(1), params.ema_for(1)) == (3, 0.5)


def test_slot_that_starts_at_zero_gets_a_neutral_average_on_its_first_move():
    params = eager([0, 3], 0)
    assert params.ema_for(1) == -1.0
    assert params.update([0], 1)
    assert (params.steps_for(1), params.ema_for(1)) == (3, 2.0)


def test_slot_with_zero_alone_stays_there():
    params = eager([0], 0)
    assert [params.update([0, 0], 1) for _ in range(20)] == [False] * 20
    assert (params.steps_for(1), params.ema_for(1)) == (0, -1.0)


def test_weak_drafts_alternate_between_zero_and_one_every_interval():
    params = AdaptiveSpeculativeParams()
    steps = []
    for _ in range(40):
        params.update([0] * 8, 8)
        steps.append(params.steps_for(8))
    assert steps == [1] * 14 + [0] * 5 + [1] * 5 + [0] * 5 + [1] * 5 + [0] * 5 + [1]


def test_ceiling_lowers():
    # 2.0 > 1.25 keeps 3; ceil(2.0 * 0.75) = 2 < 3, so down to the first candidate that is not above it.
    params = eager([1, 2, 3], 3, ceiling_coeff=0.75)
    assert params.update([2], 1)
    assert params.steps_for(1) == 2


def test_ceiling_never_blocks_the_way_up_and_so_ping_pongs():
    # At 3: ceil(1 * 1.67) = 2 < 3, down to 1. At 1: 1 > 0.5, up to 3, whatever the ceiling.
    params = eager([1, 3], 3, ceiling_coeff=1.67)
    steps = []
    for _ in range(6):
        assert params.update([1], 1)
        steps.append(params.steps_for(1))
    assert steps == [1, 3, 1, 3, 1, 3]


# ------------------------------------------------------------------ routing


def test_batches_are_padded_to_a_bucket_and_then_routed_down():
    same_slot = {5: 8, 7: 8, 17: 32, 31: 32, 33: 32, 100: 64, 0: 1, 3: 1}
    params = AdaptiveSpeculativeParams(
        {"1": {"candidate_steps": [1]}, "8": {"candidate_steps": [8]}, "32": {"candidate_steps": [32]},
         "64": {"candidate_steps": [64]}},
        buckets=[16, 4, 8, 32, 8],
    )  # fmt: skip
    assert {b: params.steps_for(b) for b in same_slot} == same_slot
    assert params.buckets == (4, 8, 16, 32)


def test_without_buckets_batches_are_not_padded():
    params = AdaptiveSpeculativeParams({"2": {"candidate_steps": [2]}, "8": {"candidate_steps": [8]}})
    assert [params.steps_for(b) for b in (1, 2, 7, 8, 1000)] == [2, 2, 2, 8, 8]
    assert params.buckets_for_step(2) == ()


def test_buckets_for_step_prunes_unreachable_pairs():
    params = AdaptiveSpeculativeParams(buckets=[4, 8, 16, 32, 64])
    assert params.buckets_for_step(1) == (4, 8, 16, 32)
    assert params.buckets_for_step(3) == (4, 8, 16)
    assert params.buckets_for_step(7) == (4,)
    assert params.buckets_for_step(0) == (8, 16, 32, 64)
    assert params.buckets_for_step(2) == ()


def test_slots_keep_their_own_average_and_count():
    params = AdaptiveSpeculativeParams()
    for _ in range(14):
        params.update([0], 1)
    for _ in range(14):
        params.update([1] * 8, 8)
    assert params.ema_for(1) == pytest.approx(4 * 0.8**14)
    assert params.update([1] * 8, 8)  # the slot's own fifteenth batch: 1 - 0.8**15 > 0.5, up
    assert (params.steps_for(8), params.steps_for(1)) == (3, 5)
    assert params.update([0], 1)


def test_slot_keys_win_over_top_level_ones():
    config = {"ema_alpha": 0.5, "1": {"candidate_steps": [3]}, "8": {"candidate_steps": [3], "ema_alpha": 0.25}}
    params = AdaptiveSpeculativeParams(config)
    params.update([0], 1)
    params.update([0], 8)
    assert (params.ema_for(1), params.ema_for(8)) == (1.0, 1.5)


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_load_from_a_file_as_from_a_dict(name, tmp_path):
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps(PRESETS[name]))
    slots = {int(key): tuple(slot["candidate_steps"]) for key, slot in PRESETS[name].items() if key.isdigit()}
    for config in (PRESETS[name], path, str(path)):
        params = AdaptiveSpeculativeParams(config)
        assert {size: params.candidates_for(size) for size in slots} == slots
    assert AdaptiveSpeculativeParams(PRESETS["aggressive"]).candidates_for(128) == (1, 3)


def test_configuration_is_copied():
    config = copy.deepcopy(DEFAULT_CONFIG)
    params = AdaptiveSpeculativeParams(config)
    config["1"]["candidate_steps"].append(9)
    assert params.candidates_for(1) == (1, 3, 5, 7)


def test_candidates_are_deduplicated_and_sorted():
    assert AdaptiveSpeculativeParams({"1": {"candidate_steps": [7, 1, 1, 3]}}).candidate_steps == (1, 3, 7)


ONE = {"candidate_steps": [1]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["at least one integer-string", "[]"]),
        ({"ema_alpha": 0.5}, ["at least one integer-string", "ema_alpha"]),
        ({"1": [1, 3]}, ["slot '1'", "[1, 3]"]),
        ({"1": None}, ["slot '1'", "None"]),
        ({"1": {}}, ["candidate_steps", "None", "at least 0"]),
        ({"1": {"candidate_steps": []}}, ["candidate_steps", "[]"]),
        ({"1": {"candidate_steps": "13"}}, ["candidate_steps", "'13'"]),
        ({"1": {"candidate_steps": [1, -3]}}, ["candidate_steps", "[1, -3]"]),
        ({"1": {"candidate_steps": [True]}}, ["candidate_steps", "[True]"]),
        ({"1": {"candidate_steps": [1.0]}}, ["candidate_steps", "[1.0]"]),
        ({"1": {**ONE, "steps": 3}}, ["unknown key 'steps'", "candidate_steps"]),
        ({"1": ONE, "alpha": 0.1}, ["unknown key 'alpha'", "ema_alpha"]),
        ({"1": ONE, "-8": ONE}, ["unknown key '-8'"]),
        ({"1": ONE, "candidate_steps": [1]}, ["unknown key 'candidate_steps'"]),
        ({1: ONE}, ["unknown key 1"]),
        ({"1": ONE, "01": ONE}, ["'1'", "'01'"]),
        ({"1" * 5000: ONE}, ["9 digits", "5000"]),
        ({"1": ONE, "ema_alpha": 0}, ["ema_alpha", "(0, 1]", "0"]),
        ({"1": {**ONE, "ema_alpha": 1.5}}, ["slot '1'", "ema_alpha", "(0, 1]", "1.5"]),
        ({"1": ONE, "ema_alpha": True}, ["ema_alpha", "True"]),
        ({"1": ONE, "ema_alpha": float("nan")}, ["ema_alpha", "nan"]),
        ({"1": ONE, "update_interval": 0}, ["update_interval", "at least 1", "0"]),
        ({"1": ONE, "update_interval": 2.5}, ["update_interval", "2.5"]),
        ({"1": ONE, "warmup_batches": -1}, ["warmup_batches", "at least 0", "-1"]),
        ({"1": ONE, "warmup_batches": True}, ["warmup_batches", "True"]),
        ({"1": ONE, "up_hysteresis": "0.5"}, ["up_hysteresis", "'0.5'"]),
        ({"1": ONE, "down_hysteresis": float("inf")}, ["down_hysteresis", "inf"]),
        ({"1": ONE, "ceiling_coeff": None}, ["ceiling_coeff", "None"]),
        ([1, 3], ["must be a JSON object", "list"]),
        (3, ["must be a JSON object", "int"]),
    ],
)
def test_malformed_configuration_names_what_was_given_and_what_is_allowed(config, words):
    with pytest.raises(ValueError) as error:
        AdaptiveSpeculativeParams(config)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "cannot be read"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "list"),
        (b'{"1": {"candidate_steps": [' + b"9" * 5000 + b"]}}", "not valid JSON"),
        (b'{"1": {"candidate_steps": [-1]}}', "[-1]"),
        (b'{"1": {"candidate_steps": [1], "ema_alpha": NaN}}', "nan"),
    ],
)
def test_broken_file_is_named(content, word, tmp_path):
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        AdaptiveSpeculativeParams(path)
    assert str(path) in str(error.value)
    assert word in str(error.value)


def test_directory_instead_of_a_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be read") as error:
        AdaptiveSpeculativeParams(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("initial", [2, -1, True, 1.0, "1"])
def test_initial_steps_outside_the_candidates(initial):
    with pytest.raises(ValueError, match=r"initial_steps.*\[0, 1, 3, 5, 7\]") as error:
        AdaptiveSpeculativeParams(initial_steps=initial)
    assert repr(initial) in str(error.value)


@pytest.mark.parametrize("buckets", [[], [0], [1, -4], [True], [2.0]])
def test_malformed_buckets(buckets):
    with pytest.raises(ValueError, match="buckets must be") as error:
        AdaptiveSpeculativeParams(buckets=buckets)
    assert repr(buckets) in str(error.value)


# ------------------------------------------------------------------ properties


@given(
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    tuning=st.fixed_dictionaries(
        {},
        optional={
            "ema_alpha": st.floats(0.01, 1.0),
            "update_interval": st.integers(1, 4),
            "warmup_batches": st.integers(0, 4),
            "down_hysteresis": st.floats(-2, 2),
            "up_hysteresis": st.floats(-2, 2),
            "ceiling_coeff": st.floats(0, 4),
        },
    ),
    rounds=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=60),
)
def test_step_is_always_a_candidate_and_the_return_value_tells_of_every_change(steps, tuning, rounds):
    params = AdaptiveSpeculativeParams({"1": {"candidate_steps": steps}, **tuning})
    for accepted in rounds:
        before = params.steps_for(1)
        ema = params.ema_for(1)
        changed = params.update(accepted, 1)
        assert params.steps_for(1) in steps
        assert changed == (params.steps_for(1) != before)
        if before == 0 and params.ema_for(1) != ema:
            assert changed and ema == -1.0


# ------------------------------------------------------------------ EmaPolicy


def stats(tier: Tier, accepted: list[int], bucket: int = 1) -> RoundStats:
    return RoundStats(tier, len(accepted), bucket, tuple(accepted))


def test_policy_runs_chains_and_credits_the_tier_that_ran():
    policy = EmaPolicy(eager([1, 3, 7], 3))
    assert policy.tiers == (Tier(1), Tier(3), Tier(7))
    view = BatchView(1, 1)
    assert policy.select(view) == Tier(3)
    policy.observe(stats(Tier(3), [3]))
    assert policy.select(view) == Tier(7)
    # A round of tier 3 that was still in flight: 3 of 3 at tier 3 must not read as 3 of 7.
    policy.observe(stats(Tier(3), [0]))
    assert policy.params.ema_for(1) == 3.0
    policy.observe(stats(Tier(7), [0]))
    assert policy.select(view) == Tier(1)


def test_policy_counts_plain_rounds_whether_or_not_they_report_zeros():
    for accepted in ([0], []):
        policy = EmaPolicy(eager([0, 1], 0))
        policy.observe(RoundStats(PLAIN, 1, 1, tuple(accepted)))
        assert policy.select(BatchView(1, 1)) == Tier(1)


def test_policy_routes_by_the_bucket_that_runs():
    policy = EmaPolicy(AdaptiveSpeculativeParams())
    assert policy.select(BatchView(5, 8)) == Tier(1)
    assert policy.buckets_for(Tier(3), (4, 8, 16, 32)) == (4, 8, 16)
    assert policy.buckets_for(Tier(2), (4, 8)) == ()
    assert policy.buckets_for(Tier(3, 2, 8), (4, 8)) == ()
    params = AdaptiveSpeculativeParams(buckets=[4, 8, 16, 32])
    for step in params.candidate_steps:
        assert EmaPolicy(params).buckets_for(Tier(step), params.buckets) == params.buckets_for_step(step)


def test_policy_runs_trees():
    trees = {1: Tier(1, 4, 5), 3: Tier(3, 4, 16)}
    policy = EmaPolicy(eager([1, 3], 1), trees)
    assert policy.select(BatchView(1, 1)) == trees[1]
    policy.observe(stats(Tier(1), [1]))  # the chain of that depth is another tier
    assert policy.select(BatchView(1, 1)) == trees[1]
    policy.observe(stats(trees[1], [1]))
    assert policy.select(BatchView(1, 1)) == trees[3]


def test_policy_refuses_missing_or_misfitting_tiers():
    with pytest.raises(ValueError, match=r"\[3\].*\[1\]"):
        EmaPolicy(eager([1, 3], 1), {1: Tier(1)})
    with pytest.raises(ValueError, match=r"tiers\[3\] must have depth 3, got chain-2"):
        EmaPolicy(eager([1, 3], 1), {1: Tier(1), 3: Tier(2)})


def test_policy_offers_only_steps_that_a_bucket_reaches():
    """A configuration for larger batches than the engine has must not ask for what is not compiled."""
    config = {"1": {"candidate_steps": [2, 4]}, "4": {"candidate_steps": [1, 2]}}
    assert EmaPolicy(AdaptiveSpeculativeParams(config, buckets=(1, 2))).tiers == (Tier(2), Tier(4))
    assert EmaPolicy(AdaptiveSpeculativeParams(config)).tiers == (Tier(1), Tier(2), Tier(4))
