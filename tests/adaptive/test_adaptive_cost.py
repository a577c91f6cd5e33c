"""Cost tables, and which candidates they leave."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.adaptive import DEFAULT_CONFIG, AdaptiveSpeculativeParams, CostTable, payable
from jaxspec.tier import PLAIN, Tier


def table(rows: dict[int, list[float]]) -> CostTable:
    """Chains: `rows[bucket][depth]` seconds."""
    return CostTable({(Tier(d), b): s for b, row in rows.items() for d, s in enumerate(row)})


def test_look_ups():
    cost = table({1: [1.0, 1.5], 8: [1.0, 2.0]})
    assert cost.seconds(Tier(1), 8) == 2.0
    assert cost.tiers == (PLAIN, Tier(1))
    assert cost.buckets == (1, 8)
    assert (len(cost), (Tier(1), 8) in cost, (Tier(1), 4) in cost) == (4, True, False)


def test_pays_only_if_full_acceptance_beats_plain_decoding():
    cost = table({1: [2.0, 3.9], 2: [2.0, 4.0], 3: [2.0, 4.1]})
    assert [cost.pays(Tier(1), b) for b in (1, 2, 3)] == [True, False, False]
    assert not cost.pays(PLAIN, 1)
    assert cost.best_speedup(Tier(1), 3) == pytest.approx(2 * 2.0 / 4.1)


def test_missing_cost_is_named():
    cost = table({1: [1.0, 1.5], 8: [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"chain-1 in bucket 4, only in buckets \[1, 8\]"):
        cost.seconds(Tier(1), 4)
    with pytest.raises(ValueError, match=r"chain-3 in bucket 1, only for \['off', 'chain-1'\]"):
        cost.pays(Tier(3), 1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_malformed_seconds(seconds):
    with pytest.raises(ValueError, match="chain-1 in bucket 4 must be a positive finite") as error:
        CostTable({(Tier(1), 4): seconds})
    assert repr(seconds) in str(error.value)


@pytest.mark.parametrize("key", [(1, 4), (Tier(1), 0), (Tier(1), True), (Tier(1), "4")])
def test_malformed_key(key):
    with pytest.raises(ValueError, match="keyed by"):
        CostTable({key: 1.0})


def test_medians_of_samples():
    one = CostTable.from_samples({(8, (PLAIN, 1, None)): [9.0, 1.0, 2.0]})
    assert one.seconds(PLAIN, 1) == 2.0 and (one.context, one.growth) == (8, 0)
    with pytest.raises(ValueError, match="off in bucket 1, context 8, needs at least 1 sample, got 0"):
        CostTable.from_samples({(8, (PLAIN, 1, None)): []})


def test_samples_at_two_contexts_give_a_line():
    line = lambda depth, bucket, context: 1e-3 * (4 + depth + 0.01 * bucket * context)
    keys = [(Tier(d), b, None) for d in (0, 2) for b in (1, 8)]
    samples = {(c, key): [line(key[0].depth, key[1], c)] * 3 for c in (100, 300) for key in keys}
    samples[300, keys[2]] = [1.0] * 3  # disturbed; it hardly tells of context, which is little in a batch of 1
    cost = CostTable.from_samples(samples)
    assert cost.context == 200 and cost.seconds(Tier(2), 8) == pytest.approx(line(2, 8, 200))
    assert cost.growth * cost.seconds(PLAIN, 1) == pytest.approx(1e-5)
    falling = {(c, key): [2.0 - c / 1000] for c in (100, 300) for key in keys}
    assert CostTable.from_samples(falling).growth == 0  # noise: texts do not get cheaper by their length
    for wrong in ({"context": -1.0}, {"growth": math.inf}, {"growth": True}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a finite number of at least 0"):
            CostTable({}, **wrong)


@given(st.dictionaries(
    st.tuples(st.sampled_from([PLAIN, Tier(1), Tier(5), Tier(3, 4, 16)]), st.integers(1, 512)),
    st.floats(1e-9, 1e3), max_size=12,
))  # fmt: skip
def test_json_round_trip(seconds):
    cost = CostTable(seconds)
    assert CostTable.from_json(cost.to_json()) == cost


@pytest.mark.parametrize("text", ["[{}]", "[1]", "3", '[{"tier": 1, "bucket": 1, "seconds": 1}]', "{", "[[]]"])
def test_malformed_json(text):
    with pytest.raises(ValueError):
        CostTable.from_json(text)


# ------------------------------------------------------------------ payable


def test_payable_drops_what_cannot_pay_anywhere_in_the_slot_and_adds_zero():
    # Full acceptance at depth 1/3/5/7 is worth 2/4/6/8 plain rounds.
    seconds = {
        1: {0: 1.0, 1: 1.9, 3: 4.1, 5: 5.9, 7: 9.0},
        4: {0: 1.0, 1: 2.1, 3: 3.9, 5: 6.1, 7: 8.0},
        8: {0: 1.0, 1: 2.0, 3: 4.0},
        32: {0: 1.0, 1: 1.5},
    }
    cost = CostTable({(Tier(k), b): s for b, row in seconds.items() for k, s in row.items()})
    config = payable(None, cost, [1, 4, 8, 32])
    steps = {key: slot["candidate_steps"] for key, slot in config.items()}
    assert steps == {"1": [0, 1, 3, 5], "8": [0], "32": [0, 1], "64": [0]}
    assert config["1"]["down_hysteresis"] == -0.25
    assert DEFAULT_CONFIG["1"]["candidate_steps"] == [1, 3, 5, 7]
    assert json.loads(json.dumps(config)) == config
    assert AdaptiveSpeculativeParams(config, buckets=[1, 4, 8, 32]).candidate_steps == (0, 1, 3, 5)


def test_payable_routes_buckets_below_the_first_slot_to_it():
    config = payable({"8": {"candidate_steps": [1]}, "ema_alpha": 0.5}, table({4: [1.0, 1.5], 16: [1.0, 3.0]}), [4, 16])
    assert config == {"8": {"candidate_steps": [0, 1]}, "ema_alpha": 0.5}


def test_payable_looks_up_trees():
    tree = Tier(3, 2, 8)
    cost = CostTable({(PLAIN, 1): 1.0, (tree, 1): 3.9})
    assert payable({"1": {"candidate_steps": [3]}}, cost, [1], {3: tree})["1"]["candidate_steps"] == [0, 3]
    with pytest.raises(ValueError, match=r"candidate step 3, only for \[1\]"):
        payable({"1": {"candidate_steps": [3]}}, cost, [1], {1: Tier(1)})


def test_payable_refuses_gaps_and_malformed_configurations():
    cost = table({1: [1.0, 1.5], 2: [1.0]})
    with pytest.raises(ValueError, match="chain-1 in bucket 2"):
        payable({"1": {"candidate_steps": [1]}}, cost, [1, 2])
    with pytest.raises(ValueError, match="candidate_steps"):
        payable({"1": {}}, cost, [1])
