"""Distributions through the whole engine: the first token of a prefill, and rounds of rejection verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.config import SpeculationConfig
from jaxspec.request import SamplingParams
from jaxspec.tier import Tier

#: Twice the rows of the session's engines: what rounds cost the host is what a thousand requests take.
ROWS: dict[str, Any] = dict(max_batch_size=8, batch_buckets=(8,), variants=("sampled",), together=False)
PROMPT = [5, 9, 2, 7]
COUNT = 1200
SHAPED = dict(temperature=1.7, top_k=8, top_p=0.9, min_p=0.03, presence_penalty=0.8)


def exact_step(logits: np.ndarray, output: list[int], p: SamplingParams) -> np.ndarray:
    """Presence penalty, temperature, min-p, top-k, top-p."""
    x = logits.astype(np.float64)
    x[output] -= p.presence_penalty
    w = np.exp((x - x.max()) / p.temperature)
    w[w < p.min_p] = 0
    if p.top_k:
        w[w < np.sort(w)[-p.top_k]] = 0
    order = np.argsort(-w)
    last = order[min(int(np.searchsorted(np.cumsum(w[order]) / w.sum(), p.top_p)), len(w) - 1)]
    w[w < w[last]] = 0
    return w / w.sum()


def exact_triples(oracle: Callable[..., np.ndarray], p: SamplingParams, v: int) -> np.ndarray:
    """Probabilities of the three tokens after the prompt, [V, V, V]."""
    texts = [PROMPT, *([*PROMPT, a] for a in range(v)), *([*PROMPT, a, b] for a in range(v) for b in range(v))]
    logits = [row[len(text) - 1] for row, text in zip(oracle(texts), texts, strict=True)]
    out = np.zeros((v, v, v))
    first = exact_step(logits[0], [], p)
    for a in np.flatnonzero(first):
        second = exact_step(logits[1 + a], [int(a)], p)
        for b in np.flatnonzero(second):
            out[a, b] = first[a] * second[b] * exact_step(logits[1 + v + a * v + b], [int(a), int(b)], p)
    return out


def p_value(keys: np.ndarray, exact: np.ndarray) -> float:
    """Chi-square over flat cells; those expected fewer than 5 times are one cell."""
    counts = np.bincount(keys, minlength=exact.size)
    assert counts[exact == 0].sum() == 0, "a token that the filters exclude"
    expected = exact * len(keys)
    order = np.argsort(-expected)
    large = max(int((expected >= 5).sum()), 1)
    cells = lambda x: np.append(x[order[:large]], x[order[large:]].sum())
    observed, wanted = cells(counts), cells(expected)
    if wanted[-1] < 5:
        observed, wanted = np.append(observed[:-2], observed[-2:].sum()), np.append(wanted[:-2], wanted[-2:].sum())
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue) if len(wanted) > 1 else 1.0


def triples(engine: Any, tools: Any, p: SamplingParams, greedy: SamplingParams) -> tuple[np.ndarray, list[list[int]]]:
    """Three tokens of COUNT seeds, and the outputs of greedy requests that share their batches."""
    work = [(PROMPT, p)] * COUNT + [(PROMPT, greedy)] * 8
    mixed = [work[i] for i in np.random.default_rng(0).permutation(len(work))]
    outputs = tools.drive(engine, mixed)
    sampled = [o.token_ids for o, (_, q) in zip(outputs, mixed, strict=True) if q is p]
    return np.asarray(sampled), [o.token_ids for o, (_, q) in zip(outputs, mixed, strict=True) if q is greedy]


@pytest.mark.parametrize("mode", ["plain", "rejection"])
def test_the_engine_is_lossless(
    bench: Any, tools: Any, oracle: Callable[..., np.ndarray], mode: str, monkeypatch: pytest.MonkeyPatch
):
    """Seeds that the engine chose itself; greedy rows in the same batches keep their argmax."""
    if mode == "plain":
        engine = bench.engine("none")
    else:
        spec = SpeculationConfig(depth=3, verification="rejection")
        engine = bench.build("draft_model", spec, **ROWS)
    monkeypatch.setattr(engine, "_serial", 0)  # it counts the seeds up, and tests before share the engine
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    v = tools.vocab
    for shape in (dict(temperature=1.0), SHAPED):
        p = SamplingParams(max_tokens=3, ignore_eos=True, **shape)
        tokens, company = triples(engine, tools, p, greedy)
        exact = exact_triples(oracle, p, v)
        np.testing.assert_allclose(exact.sum(), 1)
        a, b, c = tokens.T
        assert p_value(a, exact.sum(axis=(1, 2)).ravel()) > 1e-4, "the first token"
        assert p_value(a * v + b, exact.sum(axis=2).ravel()) > 1e-4
        assert p_value(b * v + c, exact.sum(axis=0).ravel()) > 1e-4
        empirical = np.bincount(a * v + b, minlength=v * v) / COUNT
        pairs = exact.sum(axis=2).ravel()
        noise = np.sqrt(pairs * (1 - pairs) * 2 / np.pi / COUNT).sum() / 2
        assert 0.5 * np.abs(empirical - pairs).sum() < 1.4 * noise
        assert all(other == bench.expected([(PROMPT, greedy)])[0].token_ids for other in company)


MORE = pytest.mark.exhaustive("rejection with every drafter")
OTHERS = ("eagle3", "eagle1", "mtp", "medusa", "peagle", "dflash", "dspark", "dflash2", "suffix", "ngram")


@pytest.mark.covers("rejection")
@pytest.mark.parametrize(
    "kind",
    ["draft_model", *(pytest.param(kind, marks=MORE) for kind in OTHERS)],
)
def test_rejection_accepts_more_than_nothing_and_repeats_itself(bench: Any, tools: Any, kind: str):
    """The same seed twice gives the same tokens, also in other company; greedy requests equal plain decoding."""
    spec = SpeculationConfig(depth=3, verification="rejection")
    engine = bench.build(kind, spec, **ROWS)
    work = tools.workload()
    first, again = tools.drive(engine, work), tools.drive(engine, work[::-1])[::-1]
    tools.same(again, first)
    greedy = [i for i, (_, p) in enumerate(work) if p.temperature == 0]
    tools.same([first[i] for i in greedy], [bench.expected(work)[i] for i in greedy])
    assert set(engine.runner.reachable) == {Tier(3)} and engine.stats.lossless
    assert sum(o.metrics.accepted for o in first) > 0


@pytest.mark.covers("typical", kind="medusa")
def test_typical_verification_is_labelled_and_leaves_greedy_rows_exact(bench: Any, tools: Any, caplog: Any):
    """Sampled rows accept more than the coupled rule lets them, and repeat themselves with their seed."""
    spec = dict(depth=3, topk=2, num_nodes=7)
    one = dict(batch_buckets=(4,), variants=("sampled",), together=False)
    coupled = bench.engine("medusa")
    coupled.use_policy(StaticPolicy(Tier(**spec)))
    assert coupled.stats.lossless and not caplog.records
    engine = bench.build("medusa", SpeculationConfig(**spec, verification="typical", typical_threshold=0.05), **one)
    assert not engine.stats.lossless
    assert [(r.name, r.levelname) for r in caplog.records] == [("jaxspec.assemble", "WARNING")]
    assert "sampled outputs do not have the target's distribution" in caplog.text
    work = tools.workload()
    first, again = tools.drive(engine, work), tools.drive(engine, work[::-1])[::-1]
    tools.same(again, first)
    greedy = [i for i, (_, p) in enumerate(work) if p.temperature == 0]
    expected = bench.expected(work)
    tools.same([first[i] for i in greedy], [expected[i] for i in greedy])
    sampled = [i for i in range(len(work)) if i not in greedy]
    exact = tools.drive(coupled, work)
    tools.same(exact, expected)
    assert any(first[i].token_ids != expected[i].token_ids for i in sampled)
    accepted = lambda outputs: sum(outputs[i].metrics.accepted for i in sampled)
    assert accepted(first) > accepted(exact)


def test_typical_without_drafts_is_lossless(bench: Any, caplog: Any):
    engine = bench.build("none", SpeculationConfig(policy="off", verification="typical"), batch_buckets=(4,))
    assert engine.stats.lossless and not caplog.records
