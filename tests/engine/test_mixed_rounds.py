"""A round that takes chunks of prompts along gives the tokens of a round and a prefill."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.config import SpeculationConfig
from jaxspec.request import SamplingParams
from jaxspec.tier import PLAIN, Tier

MIXED = 12
OTHERS = pytest.mark.exhaustive("every drafter beside prompts; what a drafter keeps of either is tested with each")
KINDS = ["eagle3", *(
    pytest.param(kind, marks=OTHERS) for kind in
    ("ngram", "draft_model", "eagle1", "mtp", "medusa", "peagle", "dflash", "dspark", "dflash2", "suffix", "hybrid")
)]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(bench: Any, tools: Any, kind: str) -> Any:
    """Of the shapes of the session's engine of the drafter, whose other executables it finds."""
    tiers = (PLAIN, Tier(3)) if not bench.exhaustive else tools.tiers[kind]
    cost, more = CostTable({(tier, 4): 1e-3 for tier in tiers}), tools.speculation.get(kind, {})
    few = dict(batch_buckets=(4,), variants=("sampled",), num_pages=30)
    return bench.build(kind, SpeculationConfig(tiers=tiers, **more), cost, mixed_chunk=MIXED, **few)


@pytest.mark.covers("mixed")
def test_tokens_are_those_of_plain_decoding(bench: Any, tools: Any, engine: Any):
    """Tiers that change, rows that come, end and lose their pages; prompts in pieces, and of shared beginnings."""
    start = list(range(3, 12)) * 2
    shared = [([*start, i], SamplingParams(temperature=i % 2, seed=i, max_tokens=9, logprobs=2)) for i in range(5)]
    work = tools.workload() + tools.long_requests(4) + shared
    expected = bench.expected(work)
    script = tools.script(*engine.controller.policy.tiers)
    engine.use_policy(script)
    before = engine.stats
    tools.same(tools.drive(engine, work, join=lambda i: 3 * i), expected)
    stats = engine.stats
    assert stats.mixed_rounds > before.mixed_rounds + 15
    assert stats.preemptions > before.preemptions and stats.prefix_hits > before.prefix_hits
    assert stats.compilations_after_warmup == before.compilations_after_warmup
    assert {heard.tier for heard in script.heard} == {*script.tiers}


def test_what_goes_along_and_what_follows(bench: Any, engine: Any):
    """Of a step's chunks as much as fits goes along; the round is not timed then, the one after it is."""
    calls: list[Any] = []
    own, runner = engine.runner._call, engine.runner

    def call(key: Any, *args: Any) -> Any:
        calls.append(type(key).__name__)
        return own(key, *args)

    def steps(*lengths: int) -> list[str]:
        for length in lengths:
            engine.add([1 + (length + at) % 9 for at in range(length)], params)
        calls.clear()
        engine.step()
        return [name for name in calls if name != "LogprobsKey"]

    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    heard: list[Any] = []
    engine.use_policy(StaticPolicy(PLAIN))
    engine.scheduler.prefix_cache.reset()
    runner._call, engine.on_round = call, heard.append
    try:
        assert steps(7) == ["PrefillKey"], "nobody decodes"
        assert steps() == ["RoundKey"]
        assert steps(5, 16) == ["MixedKey"], "little: 12 tokens of it"
        assert steps() == ["MixedKey"] and steps() == ["RoundKey"], "and the other 9"
        assert steps(6) == ["MixedKey"]
        assert steps() == steps() == ["RoundKey"]
        for name in list(engine._live)[:2]:
            engine.abort(name)
        assert steps(5, 60) == ["MixedKey", "PrefillKey"], "much: 5 and a whole chunk of 16"
        assert steps() == ["MixedKey"]
        engine.mixes = False
        assert steps() == ["RoundKey", "PrefillKey"]
    finally:
        engine.mixes, engine.on_round = True, None
        del runner._call
    while engine.has_work:
        engine.step()
    # A mixed round's seconds are a prompt's as well; those after it are its own, unless a prompt came between.
    timed = [stats.seconds > 0 for stats in heard[:9]]
    assert timed == [False, False, False, True, False, True, True, False, False]


def test_a_rounds_budget_and_the_smallest_batches_go_without(bench: Any, engine: Any):
    can = engine.runner._can
    assert can.mixed_keys(PLAIN, 4) and not can.mixed_keys(PLAIN, 2)
