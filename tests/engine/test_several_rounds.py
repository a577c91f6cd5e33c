"""Several rounds of one dispatch give the tokens, ends and counts of as many dispatches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import quick

from jaxspec import LLM
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.config import SpeculationConfig
from jaxspec.request import FinishReason, SamplingParams
from jaxspec.tier import PLAIN, Tier

ROUNDS = 3
OTHERS = pytest.mark.exhaustive("every drafter with several rounds a dispatch; tests/speculation has the rounds")
#: Drafters that learn from what they proposed, so that two engines may draft differently.
LEARNING = ("suffix", "hybrid")
KINDS = ["eagle3", *(
    pytest.param(kind, marks=OTHERS) for kind in
    ("ngram", "draft_model", "eagle1", "mtp", "medusa", "peagle", "dflash", "dspark", "dflash2", *LEARNING)
)]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(bench: Any, tools: Any, kind: str) -> Iterator[Any]:
    """As the session's engine of the drafter, with few executables."""
    tiers = (PLAIN, Tier(3)) if not bench.exhaustive else tools.tiers[kind]
    cost, more = CostTable({(tier, 4): 1e-3 for tier in tiers}), tools.speculation.get(kind, {})
    few = dict(batch_buckets=(4,), variants=("sampled",), num_pages=30)
    return bench.build(kind, SpeculationConfig(tiers=tiers, **more), cost, rounds_per_dispatch=ROUNDS, **few)


def counted(engine: Any, run: Any) -> tuple[Any, int, int]:
    """(what `run` returns, rounds, dispatches)."""
    before = engine.stats
    found = run()
    after = engine.stats
    assert after.compilations_after_warmup == before.compilations_after_warmup
    return found, after.rounds - before.rounds, after.dispatches - before.dispatches


@pytest.mark.covers("repeats")
def test_tokens_are_those_of_plain_decoding(bench: Any, tools: Any, engine: Any):
    """Tiers that change between and within dispatches, rows that come, end, and lose their pages."""
    work = tools.workload() + tools.long_requests()
    expected = bench.expected(work)
    tiers = engine.controller.policy.tiers
    script = tools.script(*(tier for tier in tiers for _ in range(2 * ROUNDS + 1)))
    engine.use_policy(script)
    queued = []

    def look(step: int, ids: list[str]) -> None:
        stats = engine.stats
        queued.append((stats.waiting > 0, stats.rounds - stats.dispatches))

    drive = lambda: tools.drive(engine, work, join=lambda i: 3 * i, on_step=look)
    outputs, rounds, dispatches = counted(engine, drive)
    gained = [after - before for (_, before), (waiting, after) in itertools.pairwise(queued) if waiting]
    assert gained.count(ROUNDS - 1) > 5, "while others wait, too"
    tools.same(outputs, expected)
    assert engine.stats.preemptions > 0 and rounds > dispatches + 10
    # The policy is asked once for each dispatch, and hears of all its rounds together.
    said, heard = iter(script.selected), list(script.heard)
    while heard:
        together, heard = heard[: heard[0].dispatched], heard[heard[0].dispatched :]
        assert len({(stats.tier, stats.dispatched) for stats in together}) == 1 and together[0].tier in said
    assert len(script.selected) <= dispatches + 4
    assert {stats.dispatched for stats in script.heard} == {1, ROUNDS}
    for output in outputs:
        m = output.metrics
        assert m.rounds == sum(m.acceptance_histogram) == sum(m.tier_rounds.values())
        assert m.accepted + m.rounds + 1 + m.preemptions >= m.output_tokens


def test_what_is_counted_is_that_of_single_rounds(bench: Any, tools: Any, engine: Any, kind: str):
    """Rounds and accepted drafts of each request, the last one's overshoot among them; logits that are not finite."""
    work = [
        (
            prompt,
            SamplingParams(temperature=t, seed=i, max_tokens=24 + 3 * i, stop_token_ids=[2, 3, 5, 7] if i % 2 else []),
        )
        for i, (prompt, t) in enumerate(([1, 2, 3, i % 5], (i % 3) / 2) for i in range(6))
    ]
    single = bench.engine(kind)
    found = []
    for each in (single, engine):
        each.use_policy(StaticPolicy(Tier(3)))
        each.scheduler.prefix_cache.reset()
        clean = each.runner.target
        poisoned = jax.tree.map(lambda x: x, clean)
        row = np.asarray(poisoned["embedding"][...]).copy()
        row[9] = np.nan
        outputs, rounds, dispatches = counted(each, lambda each=each: tools.drive(each, work))
        assert (rounds > 1.5 * dispatches) == (each is engine)
        try:
            poisoned["embedding"].set_value(jax.numpy.asarray(row))
            each.runner.target = poisoned
            outputs += tools.drive(each, work)
        finally:
            each.runner.target = clean
        found.append(outputs)
    # Not even failures are alike where drafts are not: one that holds the poisoned token may fail its round.
    for one, other in list(zip(*found, strict=True))[: 6 if kind in LEARNING else None]:
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.outputs[0].error == other.outputs[0].error
        if kind not in LEARNING:
            assert one.metrics.acceptance_histogram == other.metrics.acceptance_histogram
            assert one.metrics.drafted == other.metrics.drafted
    reasons = [output.finish_reason for output in found[1]]
    assert {FinishReason.STOP, FinishReason.LENGTH} <= {*reasons[:6]} and FinishReason.ERROR in reasons[6:]
    failed = [output for output in found[1] if output.finish_reason is FinishReason.ERROR]
    assert any(len(output.token_ids) > 1 for output in failed), "tokens of the rounds before are kept"


def test_aborts_between_dispatches(bench: Any, tools: Any, engine: Any):
    work = tools.long_requests(4)
    expected = bench.expected(work)
    engine.use_policy(StaticPolicy(Tier(3)))
    for moment in (3, 5):
        engine.scheduler.prefix_cache.reset()
        ids = [engine.add(*request) for request in work]
        for _ in range(moment):
            engine.step()
        for victim in ids[::2]:
            said = engine.abort(victim).output.token_ids
            assert said == expected[ids.index(victim)].token_ids[: len(said)]
        done = {e.request_id: e.output for e in iter_events(engine) if hasattr(e, "output")}
        tools.same([done[i] for i in ids[1::2]], expected[1::2])
        tools.at_baseline(engine)


def iter_events(engine: Any) -> Iterator[Any]:
    while engine.has_work:
        yield from engine.step()


@pytest.mark.covers("stop strings", "repeats", kind="ngram")
def test_what_runs_past_a_stop_string_is_cut(tiny_directory: Path, tiny_llm: LLM, kept_executables: Path):
    """The device does not know them: text, tokens and counts end where those of single rounds do."""
    prompts = ["abc", "fgh", "kl", "dead"]
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = [output.text for output in tiny_llm.generate(prompts, long)]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[text[at : at + 2]], min_tokens=at % 3)
        for at, text in zip((5, 8, 13, 21), texts, strict=True)
    ]
    with quick.prompts_alone():
        several = LLM(
            str(tiny_directory), "ngram", {"depth": 3}, max_batch_size=2, max_seq_len=64, seed=5, progress=False,
            page_size=8, prefill_chunk=16, variants=("sampled",), batch_buckets=(2,), compile_cache=kept_executables,
            warmup="eager", rounds_per_dispatch=ROUNDS,
        )  # fmt: skip
    with several as llm:
        for one, other in zip(tiny_llm.generate(prompts, params), llm.generate(prompts, params), strict=True):
            assert (one.text, one.token_ids) == (other.text, other.token_ids)
            assert one.outputs[0].stop_reason == other.outputs[0].stop_reason is not None
            assert one.metrics.acceptance_histogram == other.metrics.acceptance_histogram
        assert llm.stats.rounds > 1.5 * llm.stats.dispatches
