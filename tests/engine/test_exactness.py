"""Speculation changes speed only: every drafter, tier, bucket and schedule repeats plain decoding token for token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.adaptive.policy import RoundStats
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.events import Finished
from jaxspec.request import FinishReason, SamplingParams
from jaxspec.tier import PLAIN
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise

INHERITED = pytest.mark.exhaustive(
    "DFlash's part of a round is in DSpark's, and test_drafts_as_defined.py has its drafts"
)
WALKING = pytest.mark.exhaustive("DFlash 2 walks as DSpark does; its drafts are tested as defined")
DRAFTERS = [
    "ngram", "draft_model", "eagle3", "eagle1", "mtp", "medusa", "peagle", pytest.param("dflash", marks=INHERITED),
    "dspark", pytest.param("dflash2", marks=WALKING), "suffix", "hybrid",
]  # fmt: skip
ALIKE = pytest.mark.exhaustive("the host does the same for every drafter")
#: For what the host does: the drafters that keep the least, a cache, features by blocks, and two in one.
FEW = [
    "ngram", "eagle3", "dspark", "hybrid",
    *(
        pytest.param(kind, marks=ALIKE)
        for kind in ("draft_model", "eagle1", "mtp", "medusa", "peagle", "dflash", "dflash2", "suffix")
    ),
]  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
#: Requests that may have few tokens alone.
ALLOWED = [
    ([4, 9, 1], SamplingParams(top_p=0.8, repetition_penalty=0.8, seed=8, allowed_token_ids=[0, 2, 7, 8, 10, 11])),
    ([2, 2], SamplingParams(temperature=0, min_tokens=4, stop_token_ids=[2], allowed_token_ids=[2, 9], max_tokens=20)),
]


def sample(x: np.ndarray, p: SamplingParams, noise: np.ndarray, output: list[int], prompt: list[int], eos: int) -> int:
    """One token in the documented order, from raw logits of float64."""
    x = x.astype(np.float64)
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    if p.allowed_token_ids is not None:
        x[~np.isin(np.arange(len(x)), p.allowed_token_ids)] = -1e30
    if len(output) < p.min_tokens:
        x[[*p.stop_token_ids, *([] if p.ignore_eos else [eos])]] = -1e30
    for token in range(len(x)):
        if token in prompt or token in output:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty * (token in output)
    if p.temperature == 0:
        return int(x.argmax())
    x = x / p.temperature
    x[np.exp(x - x.max()) < p.min_p] = -np.inf
    if 0 < p.top_k < len(x):
        x[x < np.sort(x)[-p.top_k]] = -np.inf
    if p.top_p < 1:
        probs = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        order = np.argsort(-probs)
        last = order[int(np.searchsorted(np.cumsum(probs[order]), p.top_p))]
        x[probs < probs[last]] = -np.inf
    return int((x + noise).argmax())


def test_plain_decoding_is_the_definition(bench: Any, tools: Any, oracle: Callable[..., np.ndarray]):
    """The engine without drafts against whole-sequence forwards without a cache and sampling in numpy."""
    draw = jax.jit(lambda s, p: gumbel_noise(s[None], p[None, None], tools.vocab, Purpose.TARGET)[0, 0])
    work = tools.workload() + ALLOWED
    for i, ((prompt, p), output) in enumerate(zip(work, bench.expected(work), strict=True)):
        text: list[int] = []
        logprobs = []
        for token in output.token_ids:
            logits = oracle([prompt + text])[0, len(prompt) + len(text) - 1]
            noise = np.asarray(draw(np.uint32(p.seed or 0), np.int32(len(prompt) + len(text))), np.float64)
            assert sample(logits, p, noise, text, prompt, tools.eos) == token, (i, len(text))
            x = logits.astype(np.float64) - logits.max()
            logprobs.append(x - np.log(np.exp(x).sum()))
            text.append(token)
        ends = {*p.stop_token_ids, *([] if p.ignore_eos else [tools.eos])}
        stopped = [n for n, t in enumerate(text) if t in ends and n >= p.min_tokens]
        assert output.finish_reason == ("stop" if stopped else "length"), i
        assert len(text) == (stopped[0] + 1 if stopped else p.max_tokens), i
        entries = output.outputs[0].logprobs
        assert (entries is None) == (p.logprobs is None)
        for entry, exact, token in zip(entries or [], logprobs, text, strict=True) if entries is not None else []:
            best = np.argsort(-exact, kind="stable")[: p.logprobs]
            assert list(entry) == list(dict.fromkeys([token, *best.tolist()]))
            for which, value in entry.items():
                assert value.token_id == which and value.rank == 1 + int((exact > exact[which]).sum())
                assert value.logprob == pytest.approx(exact[which], abs=1e-4)


def test_company_and_slot_do_not_matter(bench: Any, tools: Any):
    """Alone, in reverse order, and joining one by one: the tokens of a request are its own."""
    work, engine = tools.workload(), bench.engine("none")
    expected = bench.expected(work)
    for i in (0, 1, 2, 4, 9):
        tools.same(tools.drive(engine, [work[i]]), [expected[i]])
    tools.same(tools.drive(engine, work[::-1])[::-1], expected)
    tools.same(tools.drive(engine, work, join=lambda i: 5 * i), expected)


@pytest.mark.covers("greedy", "seeded", "filters", "penalties", "logprobs", "stops", "trees", "window")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_tier_repeats_plain_decoding(bench: Any, tools: Any, kind: str):
    """All sampling parameters in one mixed batch, which passes through every bucket as rows leave."""
    engine, work = bench.engine(kind), tools.workload()
    for tier in tools.tiers[kind]:
        script = tools.script(tier)
        engine.use_policy(script)
        outputs = tools.drive(engine, work)
        tools.same(outputs, bench.expected(work))
        few = work[8:10] + ALLOWED
        tools.same(tools.drive(engine, few), bench.expected(few))
        assert {stats.bucket for stats in script.heard} == set(bench.buckets(kind))
        accepted = sum(output.metrics.accepted for output in outputs)
        assert (accepted > 0) == (tier.depth > 0), f"{tier}: {accepted} drafts accepted"


@pytest.mark.covers("tiers")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_tier_may_change_every_round(bench: Any, tools: Any, kind: str):
    """Up and down; requests join and leave meanwhile; plain rounds leave gaps in the drafter's cache."""
    engine, work, tiers = bench.engine(kind), tools.workload(), tools.tiers[kind]
    script = tools.script(*tiers, PLAIN, *tiers[::-1], PLAIN, tiers[2])
    engine.use_policy(script)
    tools.same(tools.drive(engine, work, join=lambda i: 4 * i), bench.expected(work))
    assert set(script.selected) == set(tools.tiers[kind])


@pytest.mark.parametrize("kind", ["eagle3"])
def test_a_round_tells_when_the_drafter_caught_up_before_it(bench: Any, tools: Any, kind: str):
    """Its seconds are those of both then, which is told apart: costs are of rounds alone."""
    engine = bench.engine(kind)
    deep = tools.tiers[kind][2]
    script = tools.script(deep, deep, *[PLAIN] * 12, deep, deep, PLAIN, deep)
    engine.use_policy(script)
    tools.drive(engine, [([3, 1, 4], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))])
    heard = script.heard[:18]
    assert [stats.tier for stats in heard] == list(script.selected[:18])
    assert [at for at, stats in enumerate(heard) if stats.entered > 0] == [14, 17]
    assert [at for at, stats in enumerate(heard) if not stats.seconds] == [0, 14, 17]
    assert RoundStats.from_json(heard[14].to_json()) == heard[14] and "entered" not in heard[15].to_json()


@pytest.mark.covers("preemption")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_preempted_requests_resume(bench: Any, tools: Any, kind: str):
    engine, work = bench.engine(kind), tools.long_requests()
    before = engine.stats.preemptions
    engine.use_policy(tools.script(*tools.tiers[kind]))
    outputs = tools.drive(engine, work, join=lambda i: 3 * i)
    assert engine.stats.preemptions - before == sum(output.metrics.preemptions for output in outputs) > 0
    tools.same(outputs, bench.expected(work))


@pytest.mark.parametrize("kind", ["eagle3"])
def test_long_and_short_requests_share_a_small_pool(bench: Any, tools: Any, kind: str):
    """240 tokens for four slots of 120: long ones wait or are preempted while short ones pass, and none changes."""
    engine, rng = bench.engine(kind), np.random.default_rng(11)
    work = [
        (rng.integers(0, tools.eos, n).tolist(), SamplingParams(temperature=t, seed=n, max_tokens=m, ignore_eos=True))
        for n, t, m in ((100, 0.0, 15), (3, 1.0, 30), (90, 0.7, 25), (5, 0.0, 60), (60, 0.0, 55), (7, 1.0, 8))
    ]
    before = engine.stats.preemptions
    engine.use_policy(tools.script(*tools.tiers[kind]))
    most = 0

    def watch(step: int, ids: list[str]) -> None:
        nonlocal most
        most = max(most, engine.scheduler.stats.running)

    tools.same(tools.drive(engine, work, on_step=watch), bench.expected(work))
    assert engine.stats.preemptions > before and most > 2
    with pytest.raises(ValueError, match="prompt must be shorter than max_seq_len = 120 tokens, got 120"):
        engine.add([1] * 120, SamplingParams())


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_context_may_be_filled_to_its_last_token(bench: Any, tools: Any, kind: str):
    """Rounds of the deepest tier run over the end; max_seq_len is 120. Asking for more gives what fits."""
    rng = np.random.default_rng(8)
    fits, asked = [], []
    for n, t, more in ((119, 0.0, 121), (118, 1.0, None), (80, 0.0, 40), (104, 1.0, 17), (1, 0.0, None)):
        prompt = rng.integers(0, tools.eos, n).tolist()
        params = SamplingParams(temperature=t, seed=n, max_tokens=120 - n, ignore_eos=True)
        fits.append((prompt, params))
        asked.append((prompt, dataclasses.replace(params, max_tokens=more)))
    engine = bench.engine(kind)
    for tier in tools.tiers[kind][1:]:
        engine.use_policy(StaticPolicy(tier))
        outputs = tools.drive(engine, asked)
        tools.same(outputs, bench.expected(fits))
        assert all(output.finish_reason == "length" for output in outputs)


@pytest.mark.covers("prefixes")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_prefixes_are_reused(bench: Any, tools: Any, kind: str):
    """The same prompt again, one that continues an output, and one that leaves it half-way."""
    engine = bench.engine(kind)
    if kind != "none":
        engine.use_policy(tools.script(tools.tiers[kind][2]))
    rng = np.random.default_rng(7)
    prompt = rng.integers(0, tools.eos, 35).tolist()
    params = [SamplingParams(temperature=t, seed=9, max_tokens=20, ignore_eos=True) for t in (0, 1)]
    first = tools.drive(engine, [(prompt, p) for p in params])
    turns = [(prompt, p) for p in params]
    turns += [(prompt + first[1].token_ids + [3], p) for p in params]
    turns += [(prompt[:20] + first[0].token_ids[:9], p) for p in params]
    hits = engine.stats.prefix_hits
    outputs = tools.drive(engine, turns)
    assert engine.stats.prefix_hits - hits == sum(o.metrics.cached_prompt_tokens for o in outputs)
    cached = [o.metrics.cached_prompt_tokens for o in outputs]
    # Pages of 8 tokens; the second of a pair also finds what the first has just computed.
    assert cached[0] == cached[1] == 32 and cached[3] == 48 and (cached[4], cached[5]) == (16, 24)
    assert cached[2] >= 40
    reference = bench.engine("none")  # with an empty prefix cache
    tools.same(outputs, [tools.drive(reference, [turn])[0] for turn in turns])


@pytest.mark.covers("copies")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_several_completions_of_a_prompt(bench: Any, tools: Any, kind: str):
    """Completion i of seed s is what seed s + i gives alone."""
    engine, prompt = bench.engine(kind), [5, 1, 7, 2]
    engine.use_policy(StaticPolicy(tools.tiers[kind][2]))
    many = SamplingParams(n=3, temperature=1.0, seed=40, max_tokens=12, ignore_eos=True)
    ids = [engine.add(prompt, many, index=i) for i in range(3)]
    done: dict[str, list[int]] = {}
    while engine.has_work:
        done |= {e.request_id: e.output.token_ids for e in engine.step() if isinstance(e, Finished)}
    alone = [(prompt, SamplingParams(temperature=1.0, seed=40 + i, max_tokens=12, ignore_eos=True)) for i in range(3)]
    assert [done[i] for i in ids] == [o.token_ids for o in bench.expected(alone)]
    assert len({tuple(tokens) for tokens in done.values()}) == 3


def test_a_draft_that_equals_the_target_is_always_accepted(bench: Any, tools: Any):
    """Chains and trees, greedy and sampled: every draft is accepted, so caches, positions and noise are right."""
    engine = bench.engine("draft_model")
    own, engine.runner.draft_params = engine.runner.draft_params, bench.target_as_draft(engine)
    try:
        rng = np.random.default_rng(5)
        work = [
            (
                rng.integers(0, tools.eos, n).tolist(),
                SamplingParams(temperature=t, seed=n, max_tokens=41, ignore_eos=True),
            )
            for n, t in itertools.product((3, 8, 30), (0.0, 1.0))
        ]
        for tier in tools.tiers["draft_model"][1:]:
            engine.use_policy(StaticPolicy(tier))
            outputs = tools.drive(engine, work)
            tools.same(outputs, bench.expected(work))
            for output in outputs:
                histogram = output.metrics.acceptance_histogram
                assert len(histogram) == tier.depth + 1
                # A tree keeps the best 6 of 10 candidates, so it may lack the end of the target's own path.
                assert sum(histogram[:-1]) <= (0 if tier.is_chain else 3), (tier, histogram)
    finally:
        engine.runner.draft_params = own


@pytest.mark.parametrize("kind", ["none", *DRAFTERS])
def test_nothing_compiles_after_warm_up(bench: Any, tools: Any, kind: str):
    """A varied workload; the counter is the process's, so it is read before and after.

    Without JAX's caches, so that what an earlier engine of this process compiled in service is compiled again.
    """
    engine = bench.engine(kind)
    jax.clear_caches()
    before = engine.stats.compilations_after_warmup
    if kind != "none":
        engine.use_policy(tools.script(*tools.tiers[kind]))
    tools.drive(engine, tools.workload() + tools.long_requests(), join=lambda i: 2 * i)
    victim = engine.add([1, 2, 3], GREEDY)
    engine.step()
    engine.abort(victim)
    while engine.has_work:
        engine.step()
    assert engine.stats.compilations_after_warmup == before


@pytest.mark.parametrize("kind", FEW)
def test_feedback_names_the_tier_that_ran(bench: Any, tools: Any, kind: str):
    """Results arrive a round late, when another tier is selected already; each is credited to its own."""
    engine = bench.engine(kind)
    script = tools.script(*tools.tiers[kind])
    engine.use_policy(script)
    outputs = tools.drive(engine, tools.workload())
    assert [stats.tier for stats in script.heard] == script.selected
    for stats in script.heard:
        # Rows that were over when the round ran, which the host had not seen yet, accept nothing of it.
        assert len(stats.num_accepted) <= stats.batch_size <= stats.bucket
        assert all(0 <= n <= stats.tier.depth for n in stats.num_accepted)
        assert stats.seconds >= 0 and stats.context_tokens > 0
    rounds = engine.stats.rounds_by_tier
    assert rounds == {t.name: script.selected.count(t) for t in script.tiers}
    committed = sum(sum(n for n in o.metrics.tier_rounds.values()) for o in outputs)
    assert committed <= sum(stats.batch_size for stats in script.heard)
    for output in outputs:
        m = output.metrics
        assert m.rounds == sum(m.acceptance_histogram) == sum(m.tier_rounds.values())
        assert m.accepted == sum(i * n for i, n in enumerate(m.acceptance_histogram))
        # Prefill brings the first token; what the last round accepts may lie behind the end.
        assert m.accepted + m.rounds + 1 + m.preemptions >= m.output_tokens


@pytest.mark.parametrize("kind", FEW)
def test_aborts_at_any_moment(bench: Any, tools: Any, kind: str):
    """Waiting, between two chunks of a prompt, with a round in flight: the others go on, and all pages return."""
    engine, work = bench.engine(kind), tools.long_requests(5)
    expected = bench.expected(work)
    for moment in (0, 1, 2, 3, 5, 9, 14):
        engine.scheduler.prefix_cache.reset()
        engine.use_policy(tools.script(*tools.tiers[kind]))
        ids = [engine.add(*request) for request in work]
        for _ in range(moment):
            engine.step()
        victims = {ids[0], ids[2], ids[4]}
        for victim in victims:
            end = engine.abort(victim)
            assert end.reason is FinishReason.ABORT and end.output.finish_reason is FinishReason.ABORT
            assert end.output.token_ids == expected[ids.index(victim)].token_ids[: len(end.output.token_ids)]
        done = {}
        while engine.has_work:
            for d in engine.step():
                assert d.request_id not in victims
                if isinstance(d, Finished):
                    done[d.request_id] = d.output
        tools.same([done[ids[i]] for i in (1, 3)], [expected[i] for i in (1, 3)])
        tools.at_baseline(engine)
        engine.scheduler.prefix_cache.reset()
        assert engine.stats.free_pages == engine.runner.geo.num_pages


def with_poison(engine: Any, token: int) -> Callable[[], None]:
    """NaN in one token's embedding; returns what takes it back."""
    clean = engine.runner.target
    poisoned = jax.tree.map(lambda x: x, clean)
    row = np.asarray(poisoned["embedding"][...]).copy()
    row[token] = np.nan
    poisoned["embedding"].set_value(jax.numpy.asarray(row))
    engine.runner.target = poisoned

    def restore() -> None:
        engine.runner.target = clean

    return restore


@pytest.mark.parametrize("kind", ["none", *DRAFTERS])
def test_nan_fails_its_request_alone(bench: Any, tools: Any, kind: str):
    """A NaN at the prompt's start, in a later chunk and after some tokens; then the engine serves on.

    The others' texts do not hold the poisoned token; their drafts may.
    """
    rng = np.random.default_rng(3)
    never = dict(logit_bias={11: -100.0}, max_tokens=25, ignore_eos=True)
    good = [
        (rng.integers(0, 11, n).tolist(), SamplingParams(temperature=t, seed=n, **never))
        for n, t in ((5, 0), (20, 1), (33, 0), (2, 0.8))
    ]
    bad = [([11, 3], GREEDY), ([*([4] * 30), 11, 2], GREEDY)]
    emits = ([4, 5], SamplingParams(temperature=0, max_tokens=25, logit_bias={11: 100.0}))
    expected, sound = bench.expected(good), bench.expected(bad)
    engine = bench.engine(kind)
    if kind != "none":
        engine.use_policy(tools.script(*tools.tiers[kind]))
    restore = with_poison(engine, 11)
    try:
        outputs = tools.drive(engine, [good[0], bad[0], good[1], emits, good[2], bad[1], good[3]], join=lambda i: i)
    finally:
        restore()
    for i in (1, 3, 5):
        assert outputs[i].finish_reason is FinishReason.ERROR
        assert outputs[i].outputs[0].error == "the target's logits are not finite"
    assert outputs[1].token_ids == outputs[5].token_ids == [] and outputs[3].token_ids[:1] == [11]
    tools.same([outputs[i] for i in (0, 2, 4, 6)], expected)
    # No prefix with NaN survives: the same prompts on sound weights.
    tools.same(tools.drive(engine, bad), sound)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_poisoned_pool_does_not_reach_new_requests(bench: Any, tools: Any, kind: str):
    """Whatever freed pages hold: every byte of both pools is NaN before the requests come."""
    engine, work = bench.engine(kind), tools.workload()
    expected = bench.expected(work)
    engine = bench.engine(kind)
    state = engine.runner.state
    nan = lambda x: np.full(x.shape, np.nan, x.dtype)
    # The text's bookkeeping is the drafter's own; what it computes with is poison.
    draft = jax.tree.map(lambda x: jax.device_put(nan(x)) if x.dtype == np.float32 else x, state.draft)
    engine.runner.state = dataclasses.replace(state, pages=jax.device_put(nan(state.pages)), draft=draft)
    engine.use_policy(tools.script(*tools.tiers[kind]))
    outputs = tools.drive(engine, work)
    tools.same(outputs, expected)
    assert sum(o.metrics.accepted for o in outputs) > 0
