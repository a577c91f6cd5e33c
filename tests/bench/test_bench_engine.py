"""End to end on 13 tokens: what is recorded adds up, growth keeps acceptance, simulation meets its length."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxspec.adaptive import StaticPolicy
from jaxspec.assemble import assemble
from jaxspec.bench.evidence import drive, loads
from jaxspec.bench.offline import grow, metrics
from jaxspec.bench.offline.measure import Experiment, FixedRequest, Mode, Sweep, modes_of, run_queue
from jaxspec.bench.offline.simulate import SimulatedDrafter, rate_for
from jaxspec.bench.offline.workloads import Passage
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.loading import Drafting
from jaxspec.models.base import Experts
from jaxspec.models.layers import Transformer
from jaxspec.models.tiny import tiny_target
from jaxspec.request import SamplingParams
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import HeadCore
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.suffix import prompt_lookup
from jaxspec.tier import PLAIN, Tier

pytestmark = pytest.mark.slow
TOKENS = 12


def prompts(count: int) -> tuple[dict[str, list[Passage]], dict[tuple[str, int], tuple[int, ...]]]:
    rng = np.random.default_rng(0)
    library = {kind: [Passage(kind, i, "") for i in range(count)] for kind in ("code", "prose")}
    ids = {(p.kind, p.index): tuple(rng.integers(0, 13, 5).tolist()) for many in library.values() for p in many}
    return library, ids


def build(
    target: Transformer, tiers: Sequence[Tier], drafter: Callable[[Any], Any], sizes: tuple[int, ...] = (1,),
    **speculation: Any,
) -> Engine:  # fmt: skip
    config = EngineConfig(
        max_batch_size=max(sizes), max_seq_len=32, page_size=8, prefill_chunk=16, compile_cache=False,
        enable_prefix_caching=False, batch_buckets=sizes, variants=("greedy",), warmup="eager",
    )  # fmt: skip
    chosen = SpeculationConfig(**(speculation or dict(tiers=tuple(tiers))))
    return assemble(target, None, chosen, config, drafter=Drafting(drafter, trees=True), progress=False)


@pytest.fixture(scope="module")
def session() -> Iterator[Experiment]:
    target = tiny_target(0)
    engine = build(target, [Tier(2)], lambda geo: (prompt_lookup(13), ()), (1, 2))
    library, ids = prompts(8)
    plan = Sweep((1, 2), ("code", "switch"), TOKENS, 2, waves=1)
    session = Experiment(engine, library, ids, plan, modes_of(engine))
    session.warm_up()
    assert session.runs == [] and session.estimate > 0
    recorded = list(session.measure())
    assert recorded == session.runs
    yield session


def test_every_cell_is_measured_in_rotated_order(session: Experiment):
    assert [mode.name for mode in session.modes] == ["plain", "chain-2", "adaptive"]
    assert len(session.runs) == session.num_runs == 24
    assert [run.mode for run in session.runs[:3]] == ["plain", "chain-2", "adaptive"]
    assert [run.mode for run in session.runs[12:15]] == ["chain-2", "adaptive", "plain"]
    assert session.engine.stats.compilations_after_warmup == 0
    assert session.engine.stats.free_pages == session.engine.facts.sizes.num_pages


def test_records_add_up(session: Experiment):
    for run in session.runs:
        assert all(len(c.token_ids) == TOKENS for c in run.completions)
        # The first token of each request comes from its prefill.
        assert sum(r.tokens for r in run.rounds) == (TOKENS - 1) * len(run.completions)
        assert sum(count for c in run.completions for _, count in c.gaps) == (TOKENS - 1) * len(run.completions)
        assert max(r.batch_size for r in run.rounds) == run.batch_size
        assert 0 < sum(r.seconds or 0.0 for r in run.rounds) <= run.seconds
        assert metrics.end_to_end(run) == TOKENS * len(run.completions) / run.seconds
        # A request's first round follows its prefill, and every wave of prompts has one.
        assert sum(r.seconds is None for r in run.rounds) >= len(run.completions) / run.batch_size
        if run.mode == "plain":
            assert {(r.tier, r.depth) for r in run.rounds} == {("plain", 0)}
            assert metrics.mean_accepted_length([run]) == 1
    switch = next(run for run in session.runs if run.workload == "switch" and run.batch_size == 2)
    assert [c.prompt[0] for c in switch.completions] == ["code", "code", "prose", "prose"] * 2
    assert {"code", "prose"} <= {r.kind for r in switch.rounds}


def test_all_modes_write_the_same_tokens(session: Experiment):
    assert metrics.divergences(session.runs) == []
    chains = [s for s in metrics.summarize(session.runs) if s.mode == "chain-2"]
    assert max(s.mean_accepted_length or 0 for s in chains) > 1
    assert len(metrics.regrets(session.runs)) == 4


def test_loads_that_change_on_the_engine(session: Experiment):
    """The clock is the test's, so that runs are the same again; what is cut at a change is not counted as served."""
    texts = {kind: [ids for (k, _), ids in session.token_ids.items() if k == kind] for kind in ("code", "prose")}
    load, found = loads.load("switch", 2, 1.0), {}
    for name, tier in (("off", PLAIN), ("chain-2", Tier(2))):
        ticks = itertools.count()
        run = drive.run(
            session.engine, StaticPolicy(tier), load, texts, 4.0, TOKENS, clock=lambda ticks=ticks: next(ticks) / 60
        )  # fmt: skip
        found[name] = run
        out = run.outcome
        assert {kind for kind, _ in run.texts} == {"code", "prose"} and {r.phase for r in out.rounds} == {0, 1, 2, 3}
        assert all(r.tokens == TOKENS and 0 <= r.arrival <= r.first <= r.finished <= 4.1 for r in out.served)
        assert out.tokens > TOKENS * len(out.served) and out.unfinished == 2
        assert {r.depth for r in out.rounds} == {tier.depth} and len(out.controller) >= len(out.rounds)
    both = found["off"].texts.keys() & found["chain-2"].texts.keys()
    assert both and all(found["off"].texts[key] == found["chain-2"].texts[key] for key in both)
    drive.valued(load, {name: run.outcome for name, run in found.items()}, found)
    assert all(r.value <= r.best for run in found.values() for r in run.outcome.rounds)
    assert set(found["chain-2"].accepted) == {("code", 2), ("prose", 2)} and not found["off"].accepted
    assert session.engine.stats.free_pages == session.engine.facts.sizes.num_pages


def test_an_interruption_keeps_the_runs_before_it(session: Experiment, monkeypatch: pytest.MonkeyPatch):
    again = dataclasses.replace(session, runs=[])
    steps = iter(range(100))
    step = session.engine.step

    def interrupted() -> Any:
        if next(steps) == 60:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(session.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(again.measure())
    assert 1 <= len(again.runs) < again.num_runs
    assert all(len(c.token_ids) == TOKENS for run in again.runs for c in run.completions)


def jobs_of(max_tokens: int) -> list[FixedRequest]:
    library, ids = prompts(4)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [FixedRequest(p, ids[p.kind, p.index], params) for p in library["code"]]


def eagle(head: Eagle3Head) -> Callable[[Any], Any]:
    core = HeadCore(head)
    return lambda geo: (AutoregressiveDrafter(core, geo), core.params)


def test_growth_into_a_mixture_keeps_tokens_and_acceptance():
    small = tiny_target(0)
    head = Eagle3Head(Eagle3Config(16, 32, 24, 4, 2, 6, 13, 13, (0, 1, 2)), rngs=nnx.Rngs(params=1))
    # Random features of a size that matters.
    head.fc.kernel[...] = head.fc.kernel[...] * 50
    size = grow.Size(3, 48, 64, 9, 3, 16, Experts(8, 4, 24, (0, 1, 2)))
    pairs = ((small, head), (grow.grow_target(small, size), grow.grow_head(head, small.config, size)))
    engines = [build(target, (), eagle(head), depth=2) for target, head in pairs]
    runs = [run_queue(e, Mode("chain-2", Tier(2)), jobs_of(24), workload="code", batch_size=1) for e in engines]
    accepted = [[r.accepted for r in run.rounds] for run in runs]
    assert accepted[0] == accepted[1] and runs[0].completions[0].token_ids == runs[1].completions[0].token_ids
    assert sum(sum(row) for row in accepted[0]) > 0
    # Every token of a round uses 4 of 8 in each of 3 layers, and not all the same.
    assert metrics.experts_a_round(runs[:1]) is None
    assert 12 < (metrics.experts_a_round(runs[1:]) or 0) < 24


def test_simulated_acceptance_meets_its_length_and_stays_exact():
    target = tiny_target(0)
    jobs = jobs_of(24)
    plain = build(target, (), lambda geo: (prompt_lookup(13), ()), policy="off")
    reference = run_queue(plain, Mode("plain", PLAIN), jobs, workload="code", batch_size=1)
    texts = [[*job.token_ids, *c.token_ids] for job, c in zip(jobs, reference.completions, strict=True)]

    def make(geo: Any) -> Any:
        drafter = SimulatedDrafter(prompt_lookup(13), rate_for(2.5, geo.max_depth), 13)
        return drafter, drafter.params((), texts)

    run = run_queue(build(target, (), make, depth=2), Mode("chain-2", Tier(2)), jobs, workload="code", batch_size=1)
    assert [c.token_ids for c in run.completions] == [c.token_ids for c in reference.completions]
    kept = [r for r in run.rounds if r.tokens]
    assert metrics.mean_accepted_length([dataclasses.replace(run, rounds=tuple(kept))]) == pytest.approx(2.5, abs=0.4)
    assert metrics.end_to_end(run) > 0
