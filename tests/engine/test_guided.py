"""Structured output in the engine: the tokens are plain decoding's over masked logits, whatever drafts.

`plain` decodes token by token and is itself compared with whole forwards.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from guided_cases import (
    CHARACTERS,
    EOS,
    PERSON,
    SIZES,
    SPECS,
    TREE,
    Asked,
    Engines,
    V,
    add,
    right,
    run,
    satisfies,
    workload,
)
from tokenizers import Tokenizer as Backend
from tokenizers import models

from jaxspec import LLM, EngineConfig, assemble
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.checkpointing import hf
from jaxspec.engine import Engine
from jaxspec.events import Delta, Finished
from jaxspec.generate import grammar_of, parser
from jaxspec.models.layers import causal_attention
from jaxspec.request import ErrorKind, FinishReason, RequestOutput, SamplingParams
from jaxspec.text.grammar import GrammarSpec
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tier import PLAIN, Choice, Tier
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise


@pytest.fixture(scope="module")
def engines(kept_executables: Path, exhaustive: bool) -> Engines:
    return Engines(kept_executables, exhaustive)


@pytest.fixture(scope="module")
def expected(engines: Engines) -> dict[int, RequestOutput]:
    return run(engines("plain"), workload())


def test_plain_decoding_chooses_among_what_is_allowed(engines: Engines, expected: dict[int, RequestOutput]):
    """Against whole forwards, masks of new matchers, and the request's own noise; no cache, no engine."""
    graph, params = nnx.split(engines.target)
    compiler = engines("plain").facts.grammars
    assert compiler is not None

    @jax.jit
    def forward(params: Any, tokens_BN: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        positions = jnp.arange(tokens_BN.shape[1])[None]
        return model.logits(model(tokens_BN, positions, causal_attention)[0])

    for i in (0, 1, 7, 8, 9, 10):
        prompt, sampling, name = workload()[i]
        assert name is not None
        text, made = list(prompt), []
        while len(made) < sampling.max_tokens:
            matcher = compiler.compile(SPECS[name]).matcher()
            assert matcher.take(made) == len(made)
            if matcher.complete:
                break
            bits = np.unpackbits(matcher.root.view(np.uint8), bitorder="little")[:V].astype(bool)
            padded = np.zeros((1, 96), np.int32)
            padded[0, : len(text)] = text
            x = np.where(bits, np.asarray(forward(params, padded))[0, len(text) - 1], -1e30).astype(np.float32)
            if sampling.temperature:
                seed, at = np.asarray([sampling.seed], np.uint32), np.asarray([[len(text)]], np.int32)
                x = (
                    x * np.float32(1 / np.float32(sampling.temperature))
                    + np.asarray(gumbel_noise(jnp.asarray(seed), jnp.asarray(at), V, Purpose.TARGET))[0, 0]
                )
            made.append(int(np.argmax(x)))
            text.append(made[-1])
        assert expected[i].token_ids == made, i


def test_texts_satisfy_their_grammars(expected: dict[int, RequestOutput]):
    assert right(workload(), expected) >= 7
    assert expected[10].finish_reason is FinishReason.LENGTH
    for i in (3, 11, 12):
        logprobs = expected[i].outputs[0].logprobs
        assert logprobs is not None and len(logprobs) == len(expected[i].token_ids)


MORE = pytest.mark.exhaustive("guided rounds with every drafter; tests/speculation has masks, forced tokens and trees")
OTHERS = [
    pytest.param(k, marks=MORE)
    for k in ("hybrid", "suffix", "draft_model", "peagle", "dflash", "dspark", "dflash2", "medusa", "eagle1", "mtp")
]


@pytest.mark.covers("grammar")
@pytest.mark.parametrize("kind", ["eagle3", "ngram", *OTHERS])
def test_speculation_changes_no_token(kind: str, engines: Engines, expected: dict[int, RequestOutput], tools: Any):
    engine = engines(kind)
    tiers = tuple(engine.runner.reachable)
    script = tools.script(*tiers)
    engine.use_policy(script)
    before = engine.stats.guided_rounds
    outputs = run(engine, workload(), join=lambda i: 3 * i)
    tools.same([outputs[i] for i in sorted(outputs)], [expected[i] for i in sorted(expected)])
    assert engine.stats.guided_rounds > before
    accepted = sum(output.metrics.accepted for i, output in outputs.items() if workload()[i][2] is not None)
    assert accepted > 0
    alone = run(engine, workload()[:1])
    assert alone[0].token_ids == expected[0].token_ids


def test_schemas_are_kept_at_concurrency_32(engines: Engines, tools: Any):
    """Of vLLM #44993, where three quarters of such texts were broken: all 32 at once, drafted, greedy and sampled."""
    engine, rng = engines("ngram"), np.random.default_rng(1)
    asked: list[Asked] = [
        (rng.integers(0, EOS, 1).tolist(), SamplingParams(temperature=i % 4 / 3, seed=i, max_tokens=60), name)
        for i, name in enumerate(["person"] * 24 + ["object"] * 8)
    ]
    script = tools.script(Tier(4))
    engine.use_policy(script)
    outputs = run(engine, asked)
    assert max(stats.batch_size for stats in script.heard) == 32
    assert sum(output.metrics.accepted for output in outputs.values()) >= 100
    assert right(asked, outputs) >= 24
    some = range(0, 32, 5)
    plain = run(engines("plain"), [asked[i] for i in some])
    tools.same([outputs[i] for i in some], [plain[i] for i in range(len(some))])


def test_rows_with_a_grammar_run_round_by_round(engines: Engines, expected: dict[int, RequestOutput], tools: Any):
    """Two rounds a dispatch before one joins and after it has ended, and single ones with it."""
    engine, work = engines("ngram"), workload()
    engine.use_policy(StaticPolicy(Tier(4)))
    free = [i for i, (_, _, grammar) in enumerate(work) if grammar is None][:2]
    before = engine.stats
    outputs = run(engine, [work[i] for i in (*free, 0)], join=lambda i: 5 * (i == 2))
    tools.same([outputs[i] for i in sorted(outputs)], [expected[i] for i in (*free, 0)])
    after = engine.stats
    several = after.rounds - before.rounds - (after.dispatches - before.dispatches)
    guided = after.guided_rounds - before.guided_rounds
    assert several > 0 and guided > 0 and after.dispatches - before.dispatches >= guided + several


def test_rounds_take_no_prompt_along_that_a_grammar_is_about(engines: Engines):
    """Beside rows with one, or before its first token, a prompt goes by itself; others do not."""
    engine, work = engines("plain"), workload()
    order = sorted(range(len(work)), key=lambda i: work[i][2] is not None)  # those without come first
    found, counts = [], []
    for engine.mixes in (True, False):
        engine.scheduler.prefix_cache.reset()
        before = engine.stats
        found.append(run(engine, [work[i] for i in order], join=lambda i: 2 * i))
        after = engine.stats
        counts.append((after.mixed_rounds - before.mixed_rounds, after.guided_rounds - before.guided_rounds))
    engine.mixes = True
    texts = [{i: output.token_ids for i, output in outputs.items()} for outputs in found]
    assert texts[0] == texts[1]
    free = sum(grammar is None for _, _, grammar in work)
    assert 0 < counts[0][0] < 2 * free and counts[1][0] == 0 and min(guided for _, guided in counts) > 0


def test_guided_rounds_stay_out_of_the_cost_table(engines: Engines, tools: Any):
    engine = engines("ngram")
    script = tools.script(PLAIN, Tier(4))
    engine.use_policy(script)
    run(engine, [a for a in workload() if a[2] is not None][:3])
    assert script.heard and all(stats.seconds == 0 for stats in script.heard)


def test_preempted_texts_go_on_where_they_were(engines: Engines, tools: Any):
    """Pools too small for four: some are computed again, prompt and outputs, with the mask of where they stopped."""
    rng = np.random.default_rng(2)
    asked: list[Asked] = [
        (
            rng.integers(0, EOS, 30 + i).tolist(),
            SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=46, logit_bias={EOS: -20.0}),
            "lark" if i % 3 else None,
        )
        for i in range(6)
    ]
    plain = run(engines("plain"), asked)
    engine = engines("eagle3")
    engine.use_policy(tools.script(Tier(3), PLAIN, TREE))
    before = engine.stats.preemptions
    outputs = run(engine, asked, join=lambda i: i)
    assert engine.stats.preemptions > before
    tools.same([outputs[i] for i in range(6)], [plain[i] for i in range(6)])
    again = run(engine, asked)  # prompts come from the prefix cache
    assert engine.stats.prefix_hits > 0
    tools.same([again[i] for i in range(6)], [plain[i] for i in range(6)])


def test_completions_of_a_prompt_and_limits_of_depth(engines: Engines):
    """Each completion has a matcher of its own; a row that takes no drafts gets the same tokens."""
    engine = engines("ngram")
    engine.use_policy(engine.new_policy())
    prompt, params, name = workload()[1]
    texts = []
    for depth in (None, 0, 2):
        ids = [add(engine, (prompt, params, name), index=index, max_depth=depth) for index in range(3)]
        done: dict[str, RequestOutput] = {}
        while engine.has_work:
            done |= {e.request_id: e.output for e in engine.step() if isinstance(e, Finished)}
        texts.append([done[request_id].text for request_id in ids])
        for request_id in ids:
            satisfies("person", done[request_id].text)
            assert depth != 0 or done[request_id].metrics.accepted == 0
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0])) == 3


def test_aborted_texts_leave_their_neighbours_alone(engines: Engines, expected: dict[int, RequestOutput]):
    engine = engines("eagle3")
    engine.use_policy(engine.new_policy())
    asked = workload()[:6]

    def abort(step: int, ids: dict[str, int]) -> None:
        if step == 5:
            for request_id, i in ids.items():
                if i in (1, 2):
                    live = engine.metrics(request_id)
                    assert live is not None and live.finished_time is None
                    end = engine.abort(request_id)
                    assert end is not None and end.reason is end.output.finish_reason is FinishReason.ABORT
                    assert live.finished_time is None and engine.metrics(request_id) is None, "what was read is a copy"

    done: dict[int, RequestOutput] = {}
    ids = {add(engine, a): i for i, a in enumerate(asked)}
    for step in range(1, 3000):
        for event in engine.step():
            if isinstance(event, Finished):
                done[ids[event.request_id]] = event.output
        abort(step, ids)
        if not engine.has_work:
            break
    assert sorted(done) == [0, 3, 4, 5]
    for i, output in done.items():
        assert output.token_ids == expected[i].token_ids


@pytest.mark.parametrize("kind", ["plain", "ngram"])
def test_a_grammar_that_fails_ends_its_request_alone(kind: str, engines: Engines, expected: dict[int, RequestOutput]):
    """The comma that opens the dead end is made likely for one text and impossible for another."""
    engine = engines(kind)
    engine.use_policy(engine.new_policy())
    comma = CHARACTERS.index(",")
    take, leave = (
        SamplingParams(temperature=0, max_tokens=40, logit_bias={comma: bias, CHARACTERS.index("}"): -bias})
        for bias in (80.0, -80.0)
    )
    asked: list[Asked] = [*workload()[:2], (workload()[0][0], take, "dead end"), (workload()[0][0], leave, "dead end")]
    outputs = run(engine, asked)
    failed = outputs[2]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.outputs[0].error_kind is ErrorKind.GRAMMAR and failed.outputs[0].error
    assert all(outputs[i].outputs[0].error_kind is None for i in (0, 1, 3))
    assert outputs[3].finish_reason is FinishReason.STOP and json.loads(outputs[3].text)["a"] in ("n", "m")
    for i in (0, 1):
        assert outputs[i].token_ids == expected[i].token_ids
    assert run(engine, asked[:1])[0].token_ids == expected[0].token_ids


def test_a_grammar_that_fails_empties_nobodys_cache(engines: Engines):
    engine = engines("plain")
    engine.use_policy(engine.new_policy())
    prompt = [1, 2, 3] * 9
    run(engine, [(prompt, SamplingParams(temperature=0, max_tokens=2), None)])
    cached, hits = engine.stats.cached_pages, engine.stats.prefix_hits
    assert cached >= 3
    comma = CHARACTERS.index(",")
    bias = {comma: 80.0, CHARACTERS.index("}"): -80.0}
    failed = run(engine, [([5], SamplingParams(temperature=0, max_tokens=40, logit_bias=bias), "dead end")])[0]
    assert failed.outputs[0].error_kind is ErrorKind.GRAMMAR
    assert failed.outputs[0].error and re.search(r"the grammar failed: [a-z ]+", failed.outputs[0].error)
    assert engine.stats.cached_pages >= cached
    run(engine, [(prompt, SamplingParams(temperature=0, max_tokens=2), None)])
    assert engine.stats.prefix_hits >= hits + 24


def test_the_end_token_is_no_part_of_a_grammars_text(engines: Engines, monkeypatch: pytest.MonkeyPatch):
    """Also where it does not end texts by itself, and would be shown."""
    monkeypatch.setitem(SPECS, "repeated", GrammarSpec("regex", "(name)+"))
    shown = dict(ignore_eos=True, skip_special_tokens=False, logit_bias={EOS: 60.0})
    for kind in ("plain", "ngram"):
        engine = engines(kind)
        engine.use_policy(engine.new_policy())
        output = run(engine, [([7, 8], SamplingParams(temperature=0, max_tokens=40, **shown), "repeated")])[0]
        assert output.finish_reason is FinishReason.STOP and output.token_ids[-1] == EOS
        assert output.text == "name"


def test_a_request_that_fails_to_begin_leaves_nothing(engines: Engines, monkeypatch: pytest.MonkeyPatch):
    engine = engines("plain")

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no text")

    with monkeypatch.context() as patch:
        patch.setattr("jaxspec.output.IncrementalDetokenizer", fail)
        with pytest.raises(RuntimeError, match="no text"):
            engine.add([1, 2], SamplingParams(), request_id="x")
    assert not engine.has_work and engine.step() == []
    engine.add([1, 2], SamplingParams(max_tokens=1), request_id="x")
    while engine.has_work:
        engine.step()


def aborted(engine: Engine, request_id: str) -> RequestOutput:
    end = engine.abort(request_id)
    assert end is not None
    return end.output


def test_prompts_are_looked_at_once(engines: Engines):
    engine = engines("plain")
    for wrong in ([1, -1], [1, V], [1, True], [1, 2.0], [1, None], [1, 2**70]):
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(f"must lie in [0, {V}), got {wrong[1]!r}")):
                engine.add(wrong, SamplingParams())  # pyright: ignore[reportArgumentType]
    prompt = [1, 2, 3]
    ids = [engine.add(prompt, SamplingParams(max_tokens=1), index=i) for i in range(3)]
    lists = [aborted(engine, request_id).prompt_token_ids for request_id in ids]
    assert lists == [[1, 2, 3]] * 3 and len({id(tokens) for tokens in [prompt, *lists]}) == 4  # none is shared
    prompt[1] = V  # the same list, but not the same prompt
    with pytest.raises(ValueError, match=f"got {V}"):
        engine.add(prompt, SamplingParams())
    kept = engine.add(np.asarray([4, 5], np.int32), SamplingParams(max_tokens=1))  # pyright: ignore[reportArgumentType]
    tokens = aborted(engine, kept).prompt_token_ids
    assert tokens == [4, 5] and type(tokens[0]) is int
    long, fresh, again = [3] * 90, list[float](), list[float]()
    for _ in range(3):
        began = time.thread_time()
        for _repeat in range(64):
            engine._checked(long * 90)
        fresh.append(time.thread_time() - began)
        same, began = long * 90, time.thread_time()
        for _repeat in range(64):
            engine._checked(same)
        again.append(time.thread_time() - began)
    assert min(again) < 0.2 and min(fresh) < 0.4  # 64 completions of 8100 tokens


def test_stop_strings_end_a_text_before_its_grammar(engines: Engines, expected: dict[int, RequestOutput]):
    prompt, params, name = workload()[0]
    outputs = run(engines("ngram"), [(prompt, dataclasses.replace(params, stop='"age'), name)])
    assert outputs[0].finish_reason is FinishReason.STOP and outputs[0].outputs[0].stop_reason == '"age'
    assert expected[0].text.startswith(outputs[0].text + '"age')


@pytest.fixture(scope="module")
def without(engines: Engines) -> Iterator[Engine]:
    """An engine without structured output."""
    yield engines.build("plain", (PLAIN,), batch_buckets=(4,), structured_output=False)


def test_what_an_engine_refuses(engines: Engines, without: Engine, expected: dict[int, RequestOutput]):
    engine = engines("plain")
    assert engine.facts.grammars is not None and without.facts.grammars is None
    grammar = engine.facts.grammars.compile(SPECS["person"])
    with pytest.raises(ValueError, match=re.escape("needs an engine with EngineConfig.structured_output")):
        without.add([1], SamplingParams(), grammar=grammar)
    with pytest.raises(ValueError, match="min_tokens must be 0 with a grammar, which says when a text ends, got 2"):
        engine.add([1], SamplingParams(min_tokens=2), grammar=grammar)
    with pytest.raises(ValueError, match="allowed_token_ids must be left out with a grammar"):
        engine.add([1], SamplingParams(allowed_token_ids=[2]), grammar=grammar)
    grammar.vocab_size = 13
    with pytest.raises(ValueError, match="compiled for 13 tokens, but this engine's vocabulary has 64"):
        engine.add([1], SamplingParams(), grammar=grammar)
    grammar.vocab_size = V
    assert not engine.has_work and not without.has_work
    # Nothing about masks is compiled into what has no need of them.
    assert without.stats.executables < engine.stats.executables
    free = workload()[2]
    assert run(without, [free])[0].token_ids == expected[2].token_ids


def test_checkpoints_whose_text_cannot_serve_grammars(caplog: pytest.LogCaptureFixture):
    odd = Tokenizer(Backend(models.BPE({"a": 0, "b": 1}, [])), eos_token_ids=[1])
    assert assemble._grammars(EngineConfig(structured_output=True), odd, V, [1]) is None
    assert "no structured output" in caplog.text


def test_the_offline_front(engines: Engines, expected: dict[int, RequestOutput], tmp_path: Path):
    """LLM takes one grammar or one for each prompt, refuses what does not fit, and runs nothing then."""
    hf.save_model(engines.target, tmp_path / "target", tokenizer=engines.tokenizer._backend, dtype=jnp.float32)
    # As the fixture's plain engine, whose executables it finds.
    alike: dict[str, Any] = {**SIZES, "batch_buckets": (4,), "mixed_chunk": 8, "compile_cache": engines.cache}
    llm = LLM(tmp_path / "target", "none", progress=False, **alike)
    prompts, params = [workload()[i][0] for i in (0, 2)], [workload()[i][1] for i in (0, 2)]
    outputs = llm.generate(prompts, params, grammar=[SPECS["person"], None], use_tqdm=False)
    assert [output.token_ids for output in outputs] == [expected[0].token_ids, expected[2].token_ids]
    person = {"json_schema": json.loads(str(SPECS["person"].value))}
    events = [event for _, event in llm.stream(prompts[0], params[0], grammar=person, priority=[2], tpot=0.1)]
    assert "".join(event.text for event in events if isinstance(event, Delta)) == expected[0].text
    for wrong, message in [
        ([SPECS["person"]], "got 1 for 2"),
        ("person", "a grammar must be a GrammarSpec or {kind: value} with a kind of"),
        (GrammarSpec("regex", "("), "the regex cannot be compiled"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            llm.generate(prompts, params, grammar=wrong)  # pyright: ignore[reportArgumentType]
    assert not llm.engine.has_work
    llm.engine.facts = dataclasses.replace(llm.engine.facts, grammars=None)
    with pytest.raises(ValueError, match=re.escape("a grammar needs LLM(structured_output=True)")):
        llm.generate(prompts, params, grammar=SPECS["person"])


def test_grammars_of_the_command(tmp_path: Path):
    of = lambda *args: grammar_of(parser().parse_args(["prompt", *args]))
    (tmp_path / "schema.json").write_text(json.dumps(PERSON))
    assert of() is None
    assert of("--json-schema", str(tmp_path / "schema.json")) == of("--json-schema", json.dumps(PERSON))
    assert of("--json-schema", json.dumps(PERSON)) == SPECS["person"]
    assert of("--regex", "a+") == GrammarSpec("regex", "a+")
    assert of("--choice", "yes", "--choice", "no") == GrammarSpec("choice", ("yes", "no"))
    with pytest.raises(ValueError, match="must be a JSON object or a file, got '/nowhere.json'"):
        of("--json-schema", "/nowhere.json")
    with pytest.raises(SystemExit):
        of("--regex", "a", "--choice", "b")


@pytest.mark.exhaustive("a second device for guided rounds; those of test_tensor_parallel.py take no masks")
def test_devices_share_guided_rounds(engines: Engines, expected: dict[int, RequestOutput], tools: Any):
    engine = engines.build("eagle3", (PLAIN, TREE), batch_buckets=(4,), tensor_parallel=2)
    engine.use_policy(tools.script(PLAIN, TREE))
    outputs = run(engine, workload(), join=lambda i: i)
    tools.same([outputs[i] for i in sorted(outputs)], [expected[i] for i in sorted(expected)])


def test_a_rehearsal_runs_everything_once_and_packed_rounds_leave_grammars_whole(
    engines: Engines, expected: dict[int, RequestOutput], tools: Any
):
    engine, rng = engines("ngram"), np.random.default_rng(3)
    ran = engines.rehearsed["ngram"]
    assert len(ran) == engine.stats.executables and set(ran.values()) == {1}
    # First with grammars among them, then without, and at last one alone.
    late: list[Asked] = [
        (
            rng.integers(0, EOS, 6).tolist(),
            SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=16 + 8 * (i == 7), ignore_eos=True),
            None,
        )
        for i in range(8)
    ]
    plain = run(engines("plain"), late)
    script = tools.script(PLAIN, Tier(4))
    script.select = lambda view: Choice(Tier(4), {32: 40, 1: 2}[view.bucket])
    engine.use_policy(script)
    before, count = engine.stats.guided_rounds, len(expected)
    outputs = run(engine, [*workload(), *late], join=lambda i: 200 * (i >= count))
    assert engine.stats.guided_rounds > before and {s.tokens for s in script.heard} == {40, 2, None}
    tools.same(
        [outputs[i] for i in range(count + 8)], [expected[i] for i in range(count)] + [plain[i] for i in range(8)]
    )
