"""What an engine refuses, and how its policy is chosen and exchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.adaptive.ema import AdaptiveSpeculativeParams, EmaPolicy
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.bench.offline import command, profile
from jaxspec.checkpointing import hf
from jaxspec.config import SpeculationConfig
from jaxspec.events import Finished
from jaxspec.loading import bind_drafter, load_drafter
from jaxspec.models.tiny import tiny_target
from jaxspec.request import FinishReason, SamplingParams
from jaxspec.runtime.timing import longest_context
from jaxspec.speculation.state import Geometry
from jaxspec.tier import PLAIN, Tier

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
#: As the session's n-gram engine, whose executables are kept.
ALIKE: dict[str, Any] = dict(batch_buckets=(1, 4), variants=("sampled",), num_pages=30)


def test_a_policy_that_needs_other_tiers_is_refused(bench: Any, tools: Any):
    engine = bench.engine("small")
    with pytest.raises(
        ValueError, match=r"can select tiers \['chain-4'\], but states exist only for \['off', 'chain-5'\]"
    ):
        engine.use_policy(StaticPolicy(Tier(4)))
    with pytest.raises(ValueError, match=r"takes a policy object, such as StaticPolicy\(Tier\(3\)\), got 'static'"):
        engine.use_policy("static")
    engine.use_policy(StaticPolicy(Tier(5)))
    tools.same(tools.drive(engine, [([1, 2, 3], GREEDY)]), bench.expected([([1, 2, 3], GREEDY)]))


def test_a_policy_that_needs_other_buckets_is_refused(bench: Any, tmp_path: Path):
    """A tier of which a JSON reaches some buckets only must not fail in the middle of a step."""
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps({"1": {"candidate_steps": [0, 5]}, "4": {"candidate_steps": [0]}}))
    engine = bench.build("ngram", SpeculationConfig(policy=str(path)), **ALIKE)
    assert engine.runner.reachable == {PLAIN: (1, 4), Tier(5): (1,)}
    with pytest.raises(ValueError, match=r"chain-5.*4"):
        engine.use_policy(StaticPolicy(Tier(5)))


def test_an_sglang_configuration_serves(bench: Any, tools: Any, tmp_path: Path):
    """Only what it can reach is compiled, and that suffices for every batch size."""
    path = tmp_path / "adaptive.json"
    slots = {"1": {"candidate_steps": [3, 5]}, "2": {"candidate_steps": [0]}, "4": {"candidate_steps": [0, 5]}}
    path.write_text(json.dumps(slots))
    engine = bench.build("ngram", SpeculationConfig(policy=str(path)), **ALIKE)
    assert engine.runner.reachable == {PLAIN: (4,), Tier(3): (1,), Tier(5): (1, 4)}
    assert isinstance(engine.controller.policy, EmaPolicy)
    work = tools.workload()
    tools.same(tools.drive(engine, work, join=lambda i: 3 * i), bench.expected(work))


def test_the_default_policy_measures_and_serves(
    bench: Any, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Timing leaves nothing behind in the state, and costs exist for every pair; also from a profile of an engine."""
    tiers, few = SpeculationConfig(candidate_steps=(5,)), ALIKE
    engine = bench.build("ngram", tiers, **few)
    assert set(engine.cost) == {(tier, bucket) for tier in (PLAIN, Tier(5)) for bucket in (1, 4)}
    monkeypatch.setattr(profile, "build_engine", lambda *_: engine)
    path, told = tmp_path / "profile.json", []
    asked = f"profile --out {path} --contexts 1,9 --repeats 1".split()
    written = profile.run(command.parse(asked), told.append)
    assert written == CostProfile.load(path) and written.contexts == (1, 9) and "chain-5" in told[1]
    state = engine.runner.state
    assert not np.asarray(state.length_S).any() and not np.asarray(state.pages).any()
    longest = longest_context(engine.runner.geo)  # from which on measuring would clip
    with pytest.raises(ValueError, match=f"contexts may be {longest} tokens .* got {longest + 1}"):
        profile.run(command.parse([*asked[:4], str(longest + 1)]), told.append)

    read = bench.build("ngram", tiers, profile=path, **few)
    assert read.cost == written.table(256)
    work = tools.workload()
    tools.same(tools.drive(read, work), bench.expected(work))
    for speculation, options, words in (
        (tiers, dict(batch_buckets=(1, 2, 4)), r"lacks off in buckets \[2\] at context 1; it has buckets \[1, 4\]"),
        (SpeculationConfig(policy="off"), {}, "is for policies that weigh costs, got policy 'off'"),
    ):
        with pytest.raises(ValueError, match=f"profile '.*' {words}"):
            bench.build("ngram", speculation, profile=path, **{**few, **options})
    with pytest.raises(ValueError, match="was measured with drafter .* 0 weights', and this engine has .* weights'"):
        bench.build("eagle3", tiers, profile=path, **few)


def test_policies_are_exchanged_while_rounds_are_in_flight(bench: Any, tools: Any):
    """The new policy hears of a tier that it never chose; requests do not notice."""
    engine, work = bench.engine("small"), tools.workload()
    policies = [
        lambda: tools.script(Tier(5)),
        engine.new_policy,
        lambda: EmaPolicy(AdaptiveSpeculativeParams({"1": {"candidate_steps": [0]}}, None, (4,))),
        lambda: StaticPolicy(PLAIN),
    ]

    def exchange(step: int, _: list[str]) -> None:
        if step % 3 == 0:
            engine.use_policy(policies[step // 3 % len(policies)]())

    tools.same(tools.drive(engine, work, on_step=exchange), bench.expected(work))


BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, r"prompt must hold at least 1 token, got 0"),
    ([13], {}, r"prompt token ids must lie in \[0, 13\), got 13"),
    ([3, -1], {}, r"prompt token ids must lie in \[0, 13\), got -1"),
    ([True], {}, r"prompt token ids must lie in \[0, 13\), got True"),
    ([1.5], {}, r"prompt token ids .*got 1.5"),
    ([float("nan")], {}, r"prompt token ids .*got nan"),
    ([2, "3"], {}, r"prompt token ids .*got '3'"),
    ([2, None], {}, r"prompt token ids .*got None"),
    ([2] * 120, {}, r"prompt must be shorter than max_seq_len = 120 tokens, got 120"),
    ([2], {"stop_token_ids": [13]}, r"stop_token_ids must be below the vocabulary size 13, got 13"),
    ([2], {"logit_bias": {99: 1.0}}, r"logit_bias must be below the vocabulary size 13, got 99"),
    ([2], {"stop": "end"}, r"stop strings \('end',\) need a tokenizer, and this engine has none"),
]


@pytest.mark.parametrize(("prompt", "fields", "message"), BAD_REQUESTS, ids=[m[:40] for *_, m in BAD_REQUESTS])
def test_refused_requests_leave_no_trace(bench: Any, tools: Any, prompt: Any, fields: dict[str, Any], message: str):
    """Between two requests that run, and whose tokens stay what they were."""
    engine, good = bench.engine("small"), [([1, 2, 3], GREEDY)]
    engine.use_policy(StaticPolicy(Tier(5)))
    first = engine.add(*good[0])
    engine.step()
    free = engine.stats.free_pages
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, SamplingParams(**fields))
    assert engine.stats.free_pages == free
    done = {}
    while engine.has_work:
        done |= {e.request_id: e.output for e in engine.step() if isinstance(e, Finished)}
    tools.same([done[first]], bench.expected(good))
    tools.at_baseline(engine)
    tools.same(tools.drive(engine, good), bench.expected(good))


def test_duplicate_ids_are_refused(bench: Any, tools: Any):
    engine = bench.engine("small")
    engine.add([1], GREEDY, request_id="a")
    with pytest.raises(ValueError, match="request_id must be unique among live requests, got 'a' again"):
        engine.add([2], GREEDY, request_id="a")
    assert engine.abort("a").reason is FinishReason.ABORT and engine.abort("a") is None
    engine.add([1], GREEDY, request_id="a")  # an id is free again at the end
    engine.abort("a")
    tools.at_baseline(engine)


def build(bench: Any, kind: str, speculation: dict[str, Any], **config: Any) -> Any:
    return bench.build(kind, SpeculationConfig(**speculation), **config)


@pytest.mark.parametrize(
    ("kind", "speculation", "config", "message"),
    [
        ("ngram", dict(depth=3, topk=2, num_nodes=5), {}, r"proposes chains only \(topk 1\), got topk 2"),
        ("draft_model", dict(depth=2, topk=20, num_nodes=30), {}, r"topk .*20.* 13|topk .*13.* 20"),
        ("eagle3", dict(depth=2, topk=10, num_nodes=30), {}, r"topk .*10.* 9|topk .*9.* 10"),
        ("none", dict(policy="off"), dict(max_seq_len=513), r"max_seq_len must be at most the model's context of 512"),
        ("ngram", dict(policy="no-such-file.json"), {}, r"no-such-file.json"),
        ("ngram", dict(policy="adaptve"), {}, r"policy .*adaptve|adaptve.*(policy|file)"),
        ("ngram", dict(policy=""), {}, r"policy must be one of .*got ''"),
        (
            "ngram",
            dict(tiers=(Tier(2), Tier(2, 2, 5))),
            {},
            r"proposes chains only, got tiers \['off', 'chain-2', 'tree-2x2/5'\]",
        ),
        ("medusa", dict(depth=4), {}, r"Medusa heads may be at most 3 deep, one token a head, got 4"),
        ("medusa", dict(candidate_steps=(1, 5)), {}, r"Medusa heads may be at most 3 deep, one token a head, got 5"),
    ],
)
def test_engines_that_cannot_be_built(
    bench: Any, kind: str, speculation: dict[str, Any], config: dict[str, Any], message: str
):
    """Refused before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        build(bench, kind, speculation, **config)


def test_draft_networks_must_share_the_vocabulary(bench: Any, tmp_path: Any):
    geo = Geometry(1, 1, 8, 1, 1)
    with pytest.raises(ValueError, match=r"vocab_size is 11, the target's vocab_size is 13"):
        hf.save_model(tiny_target(0, vocab_size=11), tmp_path)
        load_drafter("draft_model", tmp_path, bench.target, np.dtype(np.float32))
    assert bind_drafter("none", load_drafter("none", None, bench.target, np.dtype(np.float32)), geo) == (None, ())
