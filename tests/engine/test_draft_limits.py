"""A request's own limit on drafts changes how many tokens a round gives it, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec.adaptive.policy import RoundStats
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.events import Finished
from jaxspec.request import RequestOutput, SamplingParams
from jaxspec.tier import PLAIN, Tier

LIMITS = (0, 1, None, 2, 0, None, 40)
OTHERS = [
    pytest.param(kind, marks=pytest.mark.exhaustive("a limit is the round's, and the same for every drafter"))
    for kind in ("eagle1", "mtp", "medusa", "peagle", "dflash", "dspark", "dflash2", "suffix", "hybrid")
]


def run(engine: Any, work: list[Any], limits: tuple[int | None, ...]) -> list[RequestOutput]:
    ids = [
        engine.add(*request, max_depth=limits[i % len(limits)], request_id=f"r{i}") for i, request in enumerate(work)
    ]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {e.request_id: e.output for e in engine.step() if isinstance(e, Finished)}
    return [outputs[name] for name in ids]


@pytest.mark.covers("limits")
@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle3", *OTHERS])
def test_tokens_are_those_of_plain_decoding_in_batches_of_mixed_limits(bench: Any, tools: Any, kind: str):
    engine, work = bench.engine(kind), tools.workload()
    for tier in tools.tiers[kind]:
        engine.use_policy(StaticPolicy(tier))
        outputs = run(engine, work, LIMITS)
        tools.same(outputs, bench.expected(work))
        tools.at_baseline(engine)
        for i, output in enumerate(outputs):
            limit, histogram = LIMITS[i % len(LIMITS)], output.metrics.acceptance_histogram
            assert limit is None or len(histogram) <= limit + 1, (tier, i)
            if limit == 0:
                assert output.metrics.rounds == len(output.token_ids) - 1 and output.metrics.drafted == 0
    engine.use_policy(engine.new_policy())


def test_a_limit_is_reached_where_every_draft_is_right(bench: Any, tools: Any):
    """A chain of 3 that the target always accepts gives 2 + 1 tokens a round under a limit of 2, and 3 + 1 without."""
    engine = bench.engine("draft_model")
    params, engine.runner.draft_params = engine.runner.draft_params, bench.target_as_draft(engine)
    engine.use_policy(StaticPolicy(Tier(3)))
    work = [([1, 2, 3], SamplingParams(temperature=t, seed=5, max_tokens=25, ignore_eos=True)) for t in (0, 1.0)]
    try:
        for limit, rounds in ((None, 6), (2, 8), (1, 12), (0, 24)):
            for output in run(engine, work, (limit,)):
                assert output.metrics.rounds == rounds
    finally:
        engine.runner.draft_params = params
        engine.use_policy(engine.new_policy())


def test_the_round_drafts_no_deeper_than_its_rows_accept(bench: Any, tools: Any):
    """The policy asks for the deepest tier; where no row accepts that much, the deepest useful one runs."""
    engine, work = bench.engine("ngram"), tools.workload()[:2]
    deep = tools.script(Tier(5), PLAIN, Tier(3))
    deep.select = lambda view: Tier(5)
    heard: list[RoundStats] = []
    for limits, expected in (((0,), PLAIN), ((4, 0), Tier(3)), ((3, None), Tier(5)), ((2,), PLAIN)):
        engine.use_policy(deep)
        engine.on_round, deep.heard = heard.append, []
        heard.clear()
        run(engine, work, limits)
        both = [stats for stats in heard if stats.batch_size == 2]
        assert {stats.tier for stats in both} == {expected}, limits
        whole = sum(limit is None or limit >= expected.depth for limit in (limits * 2)[:2])
        assert deep.heard == heard and {len(stats.num_accepted) for stats in both} == {whole}
    engine.on_round = None
    engine.use_policy(engine.new_policy())


def test_a_policy_may_change_while_requests_run(bench: Any, tools: Any):
    """The round in flight was chosen by the policy before: the new one hears of it only if it knows the tier."""
    engine, work = bench.engine("draft_model"), tools.workload()
    first, second = tools.script(Tier(3)), tools.script(PLAIN)
    engine.use_policy(first)
    ids = [engine.add(*request) for request in work]
    outputs: dict[str, RequestOutput] = {}
    for step in range(10_000):
        if step == 12:
            engine.use_policy(second)
        outputs |= {e.request_id: e.output for e in engine.step() if isinstance(e, Finished)}
        if not engine.has_work:
            break
    tools.same([outputs[name] for name in ids], bench.expected(work))
    assert first.heard and {stats.tier for stats in second.heard} == {PLAIN}
    engine.use_policy(engine.new_policy())


@pytest.mark.parametrize("limit", [-1, 1.5, True, "2"])
def test_a_limit_that_is_none_is_refused(bench: Any, limit: Any):
    with pytest.raises(ValueError, match="max_depth must be an integer"):
        bench.engine("ngram").add([1, 2], SamplingParams(), max_depth=limit)


@pytest.mark.parametrize("priority", [-101, 101, 0.5])
def test_a_priority_out_of_range_is_refused(bench: Any, priority: Any):
    with pytest.raises(ValueError, match="priority must be an integer from -100 to 100"):
        bench.engine("ngram").add([1, 2], SamplingParams(), priority=priority)


def test_flushing_frees_idle_pages_and_spares_live_requests(bench: Any, tools: Any):
    engine = bench.engine("ngram")
    prompt, params = list(range(12)) * 3, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (expected,) = run(engine, [(prompt, params)], (None,))
    idle = engine.stats.cached_pages
    assert idle > 0
    live = engine.add(prompt, params)
    for _ in range(4):
        engine.step()
    held = engine.stats.cached_pages
    assert engine.flush_prefix_cache() == held and engine.stats.cached_pages == 0
    outputs = [d.output for _ in range(200) for d in engine.step() if d.request_id == live and isinstance(d, Finished)]
    tools.same(outputs, [expected])
    assert outputs[0].metrics.cached_prompt_tokens > 0
    tools.at_baseline(engine)
