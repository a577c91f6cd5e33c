"""Engines under a budget: one batch verifies what is likeliest to be accepted, and every request keeps its text."""

from __future__ import annotations

import dataclasses
import types
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.adaptive.policy import BatchView, DraftLabels, RoundStats
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.config import SpeculationConfig
from jaxspec.events import Finished
from jaxspec.runtime.timing import measure
from jaxspec.tier import Choice, Tier

#: Kinds, their tier, the budget and the packed tokens of 4 rows.
CASES = [("eagle3", Tier(3, 2, 7), 2.0, 12), ("ngram", Tier(5), 1.2, 9), ("dspark", Tier(3), 1.5, 10)]
#: The same of other kinds.
MORE = [
    *((kind, Tier(3, 2, 7), 2.0, 12) for kind in ("draft_model", "eagle1", "mtp", "medusa", "peagle", "hybrid")),
    *((kind, Tier(3), 1.5, 10) for kind in ("dflash", "dflash2", "suffix")),
]
_LATER = pytest.mark.exhaustive("budgets of every drafter; confidences of each kind of network are in the gate")
LIMITS = (None, 0, 1, None, 2, 40, None)
#: Seconds a token that they ask for: nothing, more than there is, and plenty.
ASKED = (None, 1e-6, 100.0)


@pytest.fixture(scope="module")
def engines(bench: Any) -> Callable[[str], Any]:
    """An engine of a kind, with a small pool, so that requests are preempted; its rounds are recorded in `heard`."""
    made: dict[str, Any] = {}

    def engine(kind: str) -> Any:
        if kind not in made:
            tier, budget = next((tier, budget) for name, tier, budget, _ in (*CASES, *MORE) if name == kind)
            shape: dict[str, Any] = {} if tier.is_chain else dict(topk=tier.topk, num_nodes=tier.num_nodes)
            shape |= dict(hybrid=True) if kind == "hybrid" else {}
            speculation = SpeculationConfig(depth=tier.depth, budget=budget, **shape)
            few = dict(num_pages=30, batch_buckets=(4,), variants=("sampled",), together=False)
            made[kind] = bench.build(kind, speculation, **few)
        return made[kind]

    return engine


def run(engine: Any, work: list[Any]) -> tuple[list[Any], list[RoundStats]]:
    """Requests of mixed limits that join one by one, and the rounds."""
    heard: list[RoundStats] = []
    engine.on_round = heard.append
    waiting = [(f"r{i}", request, LIMITS[i % len(LIMITS)]) for i, request in enumerate(work)]
    names, outputs, steps = [name for name, *_ in waiting], {}, 0
    while waiting or engine.has_work:
        if waiting and steps % 3 == 0:
            name, request, limit = waiting.pop(0)
            engine.add(*request, request_id=name, max_depth=limit, tpot=ASKED[steps // 3 % len(ASKED)])
        outputs |= {e.request_id: e.output for e in engine.step() if isinstance(e, Finished)}
        steps += 1
    engine.on_round = None
    return [outputs[name] for name in names], heard


def check_parents(tier: Tier, drafts: DraftLabels) -> None:
    """Those of trees are the nodes that come before, one level above; verified nodes' parents are verified."""
    assert (drafts.parent is None) == tier.is_chain
    for at, above in enumerate(drafts.parent or ()):
        own, first = at % drafts.nodes, at - at % drafts.nodes
        parent = first + above - 1
        assert above <= own and drafts.depth[at] == 1 + (drafts.depth[parent] if above else 0)
        assert not drafts.verified[at] or not above or drafts.verified[parent]
        assert not drafts.known[at] or not above or (drafts.right[parent] and drafts.verified[parent])


@pytest.mark.covers("budgets", "limits", "tpot", "logprobs")
@pytest.mark.parametrize(
    ("kind", "tier", "budget", "tokens"), [*CASES, *(pytest.param(*case, marks=_LATER) for case in MORE)], ids=str
)
def test_a_budget_changes_no_token(
    bench: Any, tools: Any, engines: Callable[[str], Any], kind: str, tier: Tier, budget: float, tokens: int
):
    """Every sampling parameter, limits, log-probabilities, requests that join and are preempted."""
    engine, work = engines(kind), tools.workload() + tools.long_requests(4)
    expected, compiled = bench.expected(work), engine.stats.compilations_after_warmup
    outputs, heard = run(engine, work)
    tools.same(outputs, expected)
    tools.at_baseline(engine)
    assert engine.stats.compilations_after_warmup == compiled
    assert {stats.tokens for stats in heard} == {tokens} and sum(o.metrics.accepted for o in outputs) > 0
    for stats in heard:
        assert stats.drafts is not None and stats.drafts.nodes == tier.num_nodes - 1
        check_parents(tier, stats.drafts)
        assert len(stats.drafts.confidence) == len(stats.drafts.verified) == stats.batch_size * stats.drafts.nodes
        assert sum(stats.drafts.verified) <= tokens - 4
        assert RoundStats.from_json(stats.to_json()) == stats
    assert sum(o.metrics.drafted for o in outputs) <= sum(sum(stats.drafts.verified) for stats in heard)
    for i, output in enumerate(outputs):
        if LIMITS[i % len(LIMITS)] == 0:
            assert output.metrics.drafted == output.metrics.accepted == 0


def test_budget_and_calibration_may_change_every_round(bench: Any, tools: Any, engines: Callable[[str], Any]):
    """Packed and whole rounds take turns; calibrations that invert, level and spoil the confidences."""
    kind, tier, _, tokens = CASES[0]
    engine, work = engines(kind), tools.workload()
    own = engine.controller.policy
    fits = [(), ((-1.0, 0.0), (-2.0, 1.0)), ((0.0, 0.0),) * 3, ((float("nan"), 1.0),)]
    script = tools.script(tier)
    choices = [*(Choice(tier, tokens, fit) for fit in fits), Choice(tier), tier]
    script.select = lambda view: choices[len(script.heard) % len(choices)]
    engine.use_policy(script)
    outputs, heard = run(engine, work)
    tools.same(outputs, bench.expected(work))
    assert {stats.tokens for stats in heard} == {tokens, None} and len(script.heard) == len(heard)
    for choice, message in (
        (Choice(tier, 13), r"tree-3x2/7 at batch size 4 cannot verify 13 tokens; compiled are \[12\]"),
        (Choice(tier, tokens, ((1.0, 0.0),) * 4), r"a calibration is a \(slope, intercept\) for each of 3 depths"),
    ):
        script.select = lambda view, choice=choice: choice
        name = engine.add(*work[0])
        with pytest.raises(ValueError, match=message):
            while engine.has_work:
                engine.step()
        engine.use_policy(own)
        engine.abort(name)
        engine.use_policy(script)
    engine.use_policy(own)


def test_packed_rounds_are_measured_and_kept_in_profiles(engines: Callable[[str], Any], tmp_path: Path):
    engine, key = engines("ngram"), (Tier(5), 4, 9)
    engine.flush_prefix_cache()  # measuring resets the state
    table = measure(engine.runner, repeats=1, contexts=(16,))
    assert set(table.rounds) == {(Tier(5), 4, None), key} and table.seconds(*key) == table.packed[key] > 0
    assert CostTable.from_json(table.to_json()) == table
    path = tmp_path / "profile.json"
    profile = CostProfile({"device": "one"}, {}, {(16, what): seconds for what, seconds in table.rounds.items()})
    path.write_text(profile.to_json())
    assert CostProfile.load(path) == profile and profile.table(16) == table
    profile.check({"device": "one"}, {Tier(5): (4,)}, "here", {key[:2]: (9,)})
    with pytest.raises(
        ValueError, match=r"lacks packed rounds of \[8\] tokens of chain-5, .* context 16; it has \[9\]"
    ):
        profile.check({"device": "one"}, {Tier(5): (4,)}, "here", {key[:2]: (8, 9)})
    with pytest.raises(ValueError, match="no cost of 8 tokens of chain-5 in bucket 4"):
        table.seconds(Tier(5), 4, 8)
    with pytest.raises(ValueError, match="at least 4 tokens in bucket 4, got 3"):
        CostTable({(Tier(5), 4, 3): 1.0})


def test_labels_cross_over_as_json():
    labels = DraftLabels(2, array("f", [0.5, 0.25]), b"\1\2", b"\1\0", b"\1\1", b"\1\0")
    stats = RoundStats(Tier(2), 1, 4, (1,), 0.5, 99, 7, labels)
    assert RoundStats.from_json(stats.to_json()) == stats and labels.num_verified(0) == 1
    stats = dataclasses.replace(stats, drafts=dataclasses.replace(labels, parent=array("H", [0, 1])))
    assert RoundStats.from_json(stats.to_json()) == stats
    assert '"tokens"' not in dataclasses.replace(stats, tokens=None, drafts=None).to_json()


def test_the_static_policy_rounds_its_budget_up():
    policy = StaticPolicy(Tier(3), 1.2)
    assert [policy.select(BatchView(1, b)) for b in (1, 4, 5)] == [Choice(Tier(3), t) for t in (3, 9, 11)]
    assert StaticPolicy(Tier(3), 9.0).select(BatchView(1, 4)) == Choice(Tier(3), 16)


TREES = pytest.mark.exhaustive("trees under a budget are EAGLE-3's above, and the policy does the same for them")


@pytest.mark.parametrize(
    ("kind", "tier"), [("ngram", Tier(2)), pytest.param("medusa", Tier(2, 2, 5), marks=TREES)], ids=str
)
def test_the_default_policy_runs_packed_rounds_and_corrects_their_cost(bench: Any, tools: Any, kind: str, tier: Tier):
    """They come after the whole ones, are timed, learnt and chosen; nothing compiles then, and no token changes."""
    speculation = SpeculationConfig(tiers=(tier,), candidate_budgets=(0.5,))
    sizes = dict(num_pages=40, batch_buckets=(4,), variants=("sampled",), warmup="background", together=False)
    engine, work = bench.build(kind, speculation, **sizes), tools.workload()
    expected = bench.expected(work)
    tools.same(run(engine, work)[0], expected)
    engine.wait_until_warm()
    policy, packed = engine.controller.policy, (tier, 4, 6)
    assert set(engine.runner.costs) == {(Tier(0), 4, None), (tier, 4, None), packed}
    assert engine.cost.packed[packed] == engine.runner.costs[packed]
    assert policy.seconds(*packed) > 0 and engine.stats.executables_ready == engine.stats.executables
    # As costs that nobody's machine has, but which the rounds themselves correct.
    compiled = engine.stats.compilations_after_warmup
    for one, tokens in ((Tier(0), None), (tier, None), (tier, 6)):
        for _ in range(3):
            policy.learn(one, 4, 1.0 if tokens is None else 1e-4, tokens)
    weights, dispatch = [], engine.runner.dispatch
    engine.runner.dispatch = lambda *args: (weights.append(args[5]), dispatch(*args))[1]
    outputs, heard = run(engine, work)
    tools.same(outputs, expected)
    assert 6 in {stats.tokens for stats in heard}
    # Of the requests of a round those that lag count for more, up to what it can bring; those that do not count as 1.
    assert {1.0, 3.0} == {weight for row in weights for weight in row or ()}
    assert not engine._live.asked([types.SimpleNamespace(tpot=1.0)]), "one that has ended is still counted"
    assert engine.stats.compilations_after_warmup == compiled
