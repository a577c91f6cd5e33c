"""LLM, the offline front: directories in, texts and token ids out, nothing lost on the way, bad input refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.events import Delta, Finished
from jaxspec.request import FinishReason, RequestOutput

LETTERS = "abcdefghijkl"
EOS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def spelled(tokens: list[int]) -> str:
    return "".join(LETTERS[t] for t in tokens if t != EOS)


@pytest.fixture
def directory(tiny_directory: Path) -> Path:
    return tiny_directory


@pytest.fixture
def llm(tiny_llm: LLM) -> LLM:
    return tiny_llm


def idle(llm: LLM) -> None:
    """Nothing runs, and all pages are free or only cached."""
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.stats.free_pages + llm.stats.cached_pages == llm.engine.runner.geo.num_pages


def test_texts_and_token_ids_in_order(llm: LLM):
    prompts = ["abc", [0, 1, 2], "lkj", "a", [5]]
    jax.clear_caches()  # what other engines of this process compiled in service must not hide anything
    compiled = llm.stats.compilations_after_warmup
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["abc", None, "lkj", "a", None]
    assert [o.prompt_token_ids for o in outputs] == [[0, 1, 2], [0, 1, 2], [11, 10, 9], [0], [5]]
    assert outputs[0].token_ids == outputs[1].token_ids
    for output in outputs:
        assert output.text == spelled(output.token_ids) and len(output.token_ids) == 12
        assert output.finish_reason is FinishReason.LENGTH and output.finished
        m = output.metrics
        assert m.ttft is not None and m.tpot is not None and m.rounds == sum(m.acceptance_histogram)
        assert m.drafted == 3 * m.rounds and m.tier_rounds == {"chain-3": m.rounds}
    assert llm.stats.compilations_after_warmup == compiled, "a fresh engine compiled in service"
    idle(llm)


def test_drafts_of_each_prompt_are_limited_and_change_no_token(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (free,) = llm.generate("kk", params)
    assert sum(free.metrics.acceptance_histogram[2:]) > 0, "nothing shows a limit"
    plain, one, last = llm.generate(["kk"] * 3, params, max_depth=[0, 1, None], use_tqdm=False)
    assert free.token_ids == plain.token_ids == one.token_ids == last.token_ids
    assert plain.metrics.accepted == sum(one.metrics.acceptance_histogram[2:]) == 0 < one.metrics.accepted
    assert last.metrics.acceptance_histogram == free.metrics.acceptance_histogram
    *_, (_, end) = llm.stream("kk", params, max_depth=0)
    assert isinstance(end, Finished) and end.output.metrics.accepted == 0
    for wrong, message in [
        ([0], "max_depth must be one or one for each prompt: got 1 for 2"),
        (-1, f"max_depth must be an integer from 0 to {2**31 - 1}, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.generate(["abc", "lkj"], GREEDY, max_depth=wrong)
    idle(llm)


def test_no_token_but_those_allowed(llm: LLM):
    for params in (dict(temperature=0), dict(temperature=2.0, seed=1), dict(temperature=1.0, seed=2, top_k=9)):
        params = SamplingParams(allowed_token_ids=[1, 4, EOS], max_tokens=30, **params)
        (output,) = llm.generate("abc", params)
        assert {*output.token_ids} <= {1, 4, EOS} and (len(output.token_ids) == 30) != (EOS in output.token_ids)
    one = SamplingParams(temperature=0, allowed_token_ids=[7], max_tokens=5, logit_bias={3: 100.0, 7: -100.0})
    assert llm.generate("abc", one)[0].token_ids == [7] * 5
    assert llm.generate("abc", GREEDY)[0].token_ids != [7] * 12, "what a slot allowed is left for the next request"
    idle(llm)


def test_no_prompts(llm: LLM):
    assert llm.generate([]) == llm.generate((), [], use_tqdm=False) == list(llm.stream([])) == []
    with pytest.raises(ValueError, match="params must be one SamplingParams or one for each prompt: got 1 for 0"):
        llm.generate([], [GREEDY])


@pytest.mark.parametrize(
    ("progress", "asked", "shown"), [(True, None, True), (False, None, False), (False, True, True)]
)
def test_bars_are_shown_as_the_llm_shows_its_progress(
    llm: LLM, progress: bool, asked: bool | None, shown: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.setattr(llm, "_progress", progress)
    llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=1), use_tqdm=asked)
    assert ("prompts" in capsys.readouterr().err) == shown


def test_one_prompt_in_every_form(llm: LLM):
    forms: list[Any] = [
        "abc",
        [0, 1, 2],
        (0, 1, 2),
        ["abc"],
        [[0, 1, 2]],
        np.asarray([0, 1, 2]),
        [np.asarray([0, 1, 2])],
        {"prompt": "abc"},
        [{"prompt": "abc"}],
        {"prompt_token_ids": [0, 1, 2]},
        [{"prompt_token_ids": np.asarray([0, 1, 2]), "prompt": None}],
    ]
    outputs = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(o) == 1 for o in outputs)
    assert len({tuple(o[0].token_ids) for o in outputs}) == 1


def test_dictionaries_among_other_prompts(llm: LLM):
    """Of text and ids the ids are completed, and the text is reported."""
    mixed: list[Any] = [
        "abc",
        {"prompt": "lkj"},
        [5],
        {"prompt_token_ids": (5,)},
        {"prompt": "so", "prompt_token_ids": [5]},
    ]
    outputs = llm.generate(mixed, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["abc", "lkj", None, None, "so"]
    assert [o.prompt_token_ids for o in outputs] == [[0, 1, 2], [11, 10, 9], [5], [5], [5]]
    assert outputs[2].token_ids == outputs[3].token_ids == outputs[4].token_ids


def test_the_context_cuts_the_length(llm: LLM):
    """None asks for all that there is room for. Stop tokens stay banned up to a min_tokens that lies beyond the end."""
    whole = llm.generate("abc", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(whole.token_ids) == 61 and whole.finish_reason is FinishReason.LENGTH
    more = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    assert llm.generate("abc", more)[0].token_ids == whole.token_ids
    last = llm.generate("a" * 63, more)[0]
    assert len(last.token_ids) == 1 and last.finish_reason is FinishReason.LENGTH
    held = SamplingParams(temperature=0, max_tokens=None, min_tokens=80, logit_bias={EOS: 100.0})
    out = llm.generate("abc", held)[0]
    assert len(out.token_ids) == 61 and EOS not in out.token_ids and out.finish_reason is FinishReason.LENGTH
    idle(llm)


def test_conversations(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """One or several, each a list of messages, in vLLM's words; the template sees what is given beside them."""
    seen: list[dict[str, Any]] = []

    def render(messages: Any, /, **variables: Any) -> str:
        seen.append(variables)
        return "".join(message["content"] for message in messages)

    assert llm.get_tokenizer() is llm.tokenizer
    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", render)
    say = lambda *texts: [{"role": "user", "content": text} for text in texts]
    one = llm.chat(say("ab", "c"), sampling_params=GREEDY, tools=[{"type": "function"}])
    assert [o.prompt_token_ids for o in one] == [[0, 1, 2]]
    assert seen == [{"tools": [{"type": "function"}], "add_generation_prompt": True}]
    two = llm.chat([say("abc"), say("l", "k")], [GREEDY, GREEDY], chat_template_kwargs={"thinking": False})
    assert [o.prompt_token_ids for o in two] == [[0, 1, 2], [11, 10]] and two[0].token_ids == one[0].token_ids
    assert seen[1:] == [{"thinking": False, "add_generation_prompt": True}] * 2
    assert llm.chat([]) == []
    for messages in ("abc", say("abc")[0]):
        with pytest.raises(ValueError, match="messages must be a list of"):
            llm.chat(messages)  # pyright: ignore[reportArgumentType]


def test_what_it_is_in_one_line(llm: LLM, directory: Path):
    assert repr(llm) == (
        f"LLM({str(directory)!r}, drafter='ngram', policy='static', tiers=[chain-3], dtype=float32, max_batch_size=2, "
        "max_seq_len=64)"
    )


def test_parameters_one_each(llm: LLM):
    short, long = (
        SamplingParams(temperature=0, max_tokens=2),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    )
    outputs = llm.generate(["abc", "abc"], [short, long])
    assert [len(o.token_ids) for o in outputs] == [2, 5]
    assert len(llm.generate("abc")[0].token_ids) <= 16
    for params, message in [
        ([GREEDY], r"one SamplingParams or one for each prompt: got 1 for 2"),
        ([GREEDY, None], r"params must hold SamplingParams, got NoneType"),
        ({"temperature": 0}, r"params must"),
        (3, r"params must .*int"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.generate(["abc", "abc"], params)  # type: ignore[arg-type]
    idle(llm)


def test_several_completions(llm: LLM):
    many = SamplingParams(n=5, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
    output, other = llm.generate(["abc", "d"], many)
    assert [c.index for c in output.outputs] == list(range(5)) == [c.index for c in other.outputs]
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    alone = llm.generate("abc", SamplingParams(temperature=1.0, seed=9, max_tokens=8, ignore_eos=True))[0]
    assert alone.token_ids == output.outputs[2].token_ids
    assert output.metrics.output_tokens == 40 and output.metrics.rounds == sum(output.metrics.acceptance_histogram)


def test_streams_add_up(llm: LLM):
    prompts = ["abc", "kk", [4, 4, 1]]
    mixed = [GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=20), SamplingParams(n=2, seed=1, max_tokens=9)]
    whole = llm.generate(prompts, mixed)
    texts: dict[tuple[int, int], str] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    final: dict[int, RequestOutput] = {}
    for position, event in llm.stream(prompts, mixed):
        key = position, event.index
        assert position not in final or not final[position].finished or len(final[position].outputs) < mixed[position].n
        if isinstance(event, Finished):
            assert [c.index for c in event.output.outputs if c.index == event.index] == [event.index]
            final[position] = event.output
        else:
            texts[key] = texts.get(key, "") + event.text
            tokens[key] = tokens.get(key, []) + event.token_ids
    for position, output in enumerate(whole):
        for choice in output.outputs:
            assert texts[position, choice.index] == choice.text
            assert tokens[position, choice.index] == choice.token_ids
        assert [c.token_ids for c in final[position].outputs] == [c.token_ids for c in output.outputs]


@pytest.mark.parametrize("when", ["before the first token", "half-way"])
def test_leaving_a_stream_aborts_what_is_left(llm: LLM, when: str):
    stream = llm.stream(["abc", "def"], GREEDY)
    if when == "half-way":
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    live = llm.engine.scheduler.stats
    assert (live.running, live.waiting) == (0, 0)
    idle(llm)


@pytest.fixture
def bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that waits for what will never come fails instead of hanging."""
    step, left = llm.engine.step, iter(range(500))

    def counted() -> Any:
        assert next(left, None) is not None, "500 steps without an end"
        return step()

    monkeypatch.setattr(llm.engine, "step", counted)


@pytest.mark.usefixtures("bounded")
def test_a_call_within_a_stream(llm: LLM):
    """The outer stream loses nothing to the inner call, and comes to its end."""
    expected, inner = llm.generate(["abc", "fgh"], GREEDY)
    tokens: list[int] = []
    for i, (_, event) in enumerate(llm.stream("abc", GREEDY)):
        tokens += event.token_ids if isinstance(event, Delta) else []
        if i == 1:
            assert llm.generate("fgh", GREEDY)[0].token_ids == inner.token_ids
    assert tokens == expected.token_ids


@pytest.mark.usefixtures("bounded")
def test_two_streams_side_by_side(llm: LLM):
    expected = llm.generate(["abc", "fgh"], GREEDY)
    streams = [llm.stream("abc", GREEDY), llm.stream("fgh", GREEDY)]
    tokens: list[list[int]] = [[], []]
    live = [0, 1]
    while live:
        for i in list(live):
            item = next(streams[i], None)
            if item is None:
                live.remove(i)
            else:
                tokens[i] += item[1].token_ids if isinstance(item[1], Delta) else []
    assert tokens == [o.token_ids for o in expected]


def test_stop_strings_end_the_text(llm: LLM):
    full = llm.generate("abc", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
    needle = full.text[5:8]
    at = full.text.index(needle)
    out = llm.generate("abc", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=needle))[0]
    assert out.text == full.text[:at] and out.finish_reason is FinishReason.STOP
    assert out.outputs[0].stop_reason == needle and out.token_ids == full.token_ids[: at + 3]
    kept = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[needle], include_stop_str_in_output=True)
    assert llm.generate("abc", kept)[0].text == full.text[: at + 3]
    by_token = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[full.token_ids[4]])
    out = llm.generate("abc", by_token)[0]
    first = full.token_ids.index(full.token_ids[4])
    assert out.token_ids == full.token_ids[: first + 1] and out.outputs[0].stop_reason == full.token_ids[4]
    assert out.text == full.text[:first]


def test_the_end_of_a_text(llm: LLM):
    """The checkpoint's end stops; ignore_eos goes on; min_tokens holds it back, and no longer than asked."""
    wants_end = dict(temperature=0, max_tokens=20, logit_bias={EOS: 100.0})
    out = llm.generate("abc", SamplingParams(**wants_end))[0]
    assert (out.token_ids, out.text, out.finish_reason) == ([EOS], "", "stop") and out.outputs[0].stop_reason is None
    held = llm.generate("abc", SamplingParams(min_tokens=6, **wants_end))[0]
    assert len(held.token_ids) == 7 and held.token_ids[6] == EOS and EOS not in held.token_ids[:6]
    assert llm.generate("abc", SamplingParams(ignore_eos=True, **wants_end))[0].token_ids == [EOS] * 20


def test_logprobs_reach_the_output(llm: LLM):
    out = llm.generate("abc", SamplingParams(temperature=1.0, seed=2, max_tokens=6, logprobs=2))[0]
    entries = out.outputs[0].logprobs
    assert entries is not None and len(entries) == len(out.token_ids)
    for token, entry in zip(out.token_ids, entries, strict=True):
        assert next(iter(entry)) == token and 2 <= len(entry) <= 3
        assert sorted(e.rank for e in entry.values())[:2] == [1, 2]
    assert llm.generate("abc", GREEDY)[0].outputs[0].logprobs is None


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([[]], {}, r"prompt must hold at least 1 token, got \[\] at position 0"),
    ("", {}, r"prompt must hold at least 1 token, got ''"),
    (["abc", ""], {}, r"prompt must hold at least 1 token, got '' at position 1"),
    (3, {}, r"prompts must be a text, token ids, or a list of either, got int"),
    (
        {"prompts": "abc"},
        {},
        r"prompt's keys must be of \['prompt', 'prompt_token_ids'\], got \['prompts'\] at position 0",
    ),
    (["abc", {"prompt": "a", "multi_modal_data": {}}], {}, r"got \['multi_modal_data'\] at position 1"),
    ([{"role": "user", "content": "a"}], {}, r"got \['role', 'content'\] at position 0; conversations go to LLM.chat"),
    ([{}], {}, r"must have one of the keys \['prompt', 'prompt_token_ids'\], got \{\} at position 0"),
    ({"prompt": [1]}, {}, r"prompt's text must be a string, got list at position 0"),
    ({"prompt_token_ids": "abc"}, {}, r"prompt_token_ids must be a list of token ids, got str at position 0"),
    ({"prompt": ""}, {}, r"prompt must hold at least 1 token"),
    ({"prompt": "abc", "prompt_token_ids": []}, {}, r"prompt must hold at least 1 token"),
    (None, {}, r"prompts must be a text, token ids, or a list of either, got NoneType"),
    (["abc", 3], {}, r"prompts must all be texts or lists of token ids, got 3 among them"),
    (b"abc", {}, r"prompts must .*bytes"),
    ([[1, 99]], {}, r"prompt token ids must lie in \[0, 13\), got 99"),
    ([[1.5]], {}, r"prompt token ids .*got 1.5"),
    (["abc", "a" * 64], {}, r"prompt must be shorter than max_seq_len = 64 tokens, got 64"),
    ("abc", {"logit_bias": {13: 1.0}}, r"logit_bias must be below the vocabulary size 13, got 13"),
    ("abc", {"allowed_token_ids": [13]}, r"allowed_token_ids must be below the vocabulary size 13, got 13"),
    ("abc", dict(allowed_token_ids=[EOS, 3], stop_token_ids=[3], min_tokens=1), r"min_tokens = 1 does not forbid"),
]


@pytest.mark.parametrize(("prompts", "fields", "message"), BAD, ids=[m[:45] for *_, m in BAD])
def test_refused_calls_leave_no_trace(llm: LLM, prompts: Any, fields: dict[str, Any], message: str):
    """Also the prompts of the same call that were fine: nothing was queued."""
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, SamplingParams(**fields))
    with pytest.raises(ValueError, match=message):
        llm.stream(prompts, SamplingParams(**fields))
    live = llm.engine.scheduler.stats
    assert (live.running, live.waiting) == (0, 0)
    idle(llm)
    assert llm.generate("abc", GREEDY)[0].token_ids == llm.generate([0, 1, 2], GREEDY)[0].token_ids


def test_nan_is_an_output_not_an_exception(llm: LLM):
    """One prompt of a call fails; the others keep their tokens."""
    expected = llm.generate(["cab", "ccc"], SamplingParams(temperature=0, max_tokens=9, logit_bias={11: -100.0}))
    llm.engine.scheduler.prefix_cache.reset()
    clean = llm.engine.runner.target
    poisoned = jax.tree.map(lambda x: x, clean)
    row = np.asarray(poisoned["embedding"][...]).copy()
    row[11] = np.nan
    poisoned["embedding"].set_value(jax.device_put(row))
    llm.engine.runner.target = poisoned
    try:
        outputs = llm.generate(
            ["cab", "cl", "ccc"], SamplingParams(temperature=0, max_tokens=9, logit_bias={11: -100.0}), use_tqdm=False
        )
    finally:
        llm.engine.runner.target = clean
    assert [o.finish_reason for o in outputs] == [expected[0].finish_reason, "error", expected[1].finish_reason]
    assert outputs[1].outputs[0].error == "the target's logits are not finite"
    assert [outputs[0].token_ids, outputs[2].token_ids] == [o.token_ids for o in expected]
    assert llm.generate("cl", GREEDY)[0].finish_reason is FinishReason.LENGTH
