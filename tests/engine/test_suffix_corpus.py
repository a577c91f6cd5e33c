"""Texts of others in a suffix drafter's corpus: they change how fast a text comes, never the text; only if asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.config import SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.remembered import texts
from jaxspec.request import SamplingParams
from jaxspec.tier import PLAIN, Tier

#: Sampled text of thirteen tokens does not repeat itself for long, so what is accepted of it was remembered.
HOT = SamplingParams(temperature=2.0, seed=5, max_tokens=40, ignore_eos=True)


def corpus_of(engine: Engine) -> Any:
    draft = engine.runner.state.draft
    return getattr(draft, "suffix", draft).corpus


@pytest.mark.parametrize("kind", ["suffix", "hybrid"])
def test_a_text_comes_faster_the_second_time(bench: Any, tools: Any, kind: str):
    """The same tokens in fewer rounds: by the look-up tier, from what the first request left behind."""
    engine, work = bench.engine(kind), [([5, 1, 7, 2, 9, 3], HOT)]
    engine.use_policy(StaticPolicy(Tier(5, lookup=kind == "hybrid")))
    before = int(corpus_of(engine).texts)
    first, second = (tools.drive(engine, work)[0] for _ in range(2))
    tools.same([first, second], bench.expected(work * 2))
    assert int(corpus_of(engine).texts) == before + 2
    assert second.metrics.rounds < 0.6 * first.metrics.rounds, (first.metrics, second.metrics)


@pytest.mark.covers("corpus")
@pytest.mark.parametrize("kind", ["suffix", "hybrid"])
def test_a_corpus_that_changes_under_requests_changes_no_token(bench: Any, tools: Any, kind: str):
    """Right and wrong continuations come in while all rows run, and the ring overflows several times."""
    engine, work = bench.engine(kind), tools.workload()
    expected = bench.expected(work)
    engine.use_policy(tools.script(*tools.tiers[kind]))
    rng = np.random.default_rng(4)

    def meddle(step: int, _: list[str]) -> None:
        if step % 3 == 0:
            prompt, output = work[step % len(work)][0], expected[step % len(work)].token_ids
            text = [*prompt, *output]
            if step % 2:
                text[len(prompt) + 2 :: 5] = rng.integers(0, 12, len(text[len(prompt) + 2 :: 5])).tolist()
            engine.runner.remember(text)

    outputs = tools.drive(engine, work, join=lambda i: 2 * i, on_step=meddle)
    tools.same(outputs, expected)
    engine.runner.remember(rng.integers(0, 12, 1000).tolist())  # longer than a row: in pieces
    assert sum(o.metrics.accepted for o in outputs) > 0


@pytest.mark.parametrize("kind", ["suffix", "hybrid"])
def test_a_flush_forgets_all_texts(bench: Any, tools: Any, kind: str):
    """Rounds in flight or not, and nothing compiles; what comes then is remembered anew."""
    engine, (prompt, params) = bench.engine(kind), ([5, 1, 7, 2, 9, 3], HOT)
    engine.use_policy(StaticPolicy(Tier(5, lookup=kind == "hybrid")))
    compiled = engine.stats.compilations_after_warmup
    forget = lambda step, _: engine.forget_texts() if step == 6 else None
    outputs = [tools.drive(engine, [(prompt, params)], on_step=then)[0] for then in (None, forget)]
    tools.same(outputs, bench.expected([(prompt, params)] * 2))
    assert int(corpus_of(engine).texts) == 1  # the second one's own, which ended after the flush
    engine.forget_texts()
    first, second = (tools.drive(engine, [(prompt, params)])[0].metrics.rounds for _ in range(2))
    assert second < 0.6 * first and engine.stats.compilations_after_warmup == compiled


def test_nothing_is_remembered_unless_asked(bench: Any):
    engine = bench.engine("ngram")
    assert corpus_of(engine) is None
    with pytest.raises(ValueError, match="this drafter keeps no texts"):
        engine.runner.remember([1, 2, 3])


def test_files_are_there_from_the_start(bench: Any, tools: Any, tmp_path: Path):
    """A traffic log without a tokenizer; an aborted request is not remembered, responses stay out unless asked."""
    prompt, output = [5, 1, 7, 2, 9, 3], bench.expected([([5, 1, 7, 2, 9, 3], HOT)])[0].token_ids
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt_token_ids": prompt, "output_token_ids": output, "temperature": 2.0}) + "\n\n")
    speculation = SpeculationConfig(depth=5, suffix_corpus_tokens=512, suffix_corpus_files=(log,))
    # As the session's engine, whose executables are kept.
    engine = bench.build("suffix", speculation, batch_buckets=(4,), variants=("sampled",), num_pages=30)
    assert int(corpus_of(engine).texts) == 1
    told = tools.drive(engine, [(prompt, HOT)])[0]
    assert told.token_ids == output and told.metrics.rounds <= 15
    assert int(corpus_of(engine).texts) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "words", "a.txt is text, which needs a tokenizer"),
        ("a.jsonl", '{"prompt_token_ids": [1]}', "a.jsonl, line 1 is none of a traffic log: KeyError"),
        ("a.jsonl", "[", "a.jsonl, line 1 is none of a traffic log"),
        ("a.jsonl", '{"prompt_token_ids": [1], "output_token_ids": ["x"]}', "line 1 is none of a traffic log"),
        ("a.jsonl", '{"prompt_token_ids": [1], "output_token_ids": [13]}', "holds token 13; the vocabulary has 13"),
        ("a.jsonl", b"\xff\xfe", "a.jsonl cannot be read"),
        ("missing.txt", None, "missing.txt cannot be read"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, name: str, content: Any, message: str):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        list(texts([tmp_path / name], None, 13))


def test_text_files_are_read_whole(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abc")
    assert list(texts([tmp_path / "a.txt"], lambda text: [ord(c) - 97 for c in text], 13)) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("kind", "speculation", "message"),
    [
        ("ngram", dict(depth=2, hybrid=True), "hybrid joins suffix matches with a drafter of another kind"),
        ("eagle3", dict(tiers=(PLAIN, Tier(2, lookup=True))), r"tiers that only look up are for hybrids.*suffix-2"),
        (
            "eagle3", dict(depth=2, suffix_corpus_tokens=512, suffix_corpus_responses=True),
            "suffix_corpus_tokens is for the drafter that looks up whole suffixes and for hybrids.*got 512",
        ),
        ("medusa", dict(tiers=(Tier(2), Tier(5, lookup=True)), hybrid=True), "Medusa heads may be at most 3 deep"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(bench: Any, kind: str, speculation: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        bench.build(kind, SpeculationConfig(**speculation))
