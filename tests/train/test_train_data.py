"""Rows of every shape become tokens and masks, bad ones name their file and line, packing loses and mixes nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxspec.text import tokenizer as text
from jaxspec.train.data import dataset, jsonl
from jaxspec.train.data.batch import PackedRows

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz<>/|_"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Qwen3's manner: only the last turn keeps its (empty) thoughts.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: DeepSeek-R1's: asks with an opened thought that the turn then lacks.
ASKING = CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
TALK = [("user", "hi"), ("assistant", "yes"), ("user", "so"), ("assistant", "no")]


def letters() -> Backend:
    """A token a character, and the special ones."""
    backend = Backend(models.BPE({c: i for i, c in enumerate([*SPECIAL, *CHARACTERS])}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return backend


def tokenizer(template: str | None = CHATML, **options: Any) -> text.Tokenizer:
    options = {"bos_token_id": 0, "eos_token_ids": (1, 3), "add_bos_token": True, **options}
    return text.Tokenizer(letters(), chat_template=template, **options)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path, *rows: Any, template: str | None = CHATML, **options: Any) -> list[dataset.Example]:
    return dataset.read_examples([write(path / "some.jsonl", *rows)], tokenizer(template), **options)


def learned(example: dataset.Example, tok: text.Tokenizer | None = None) -> str:
    tokens = [t for t, wanted in zip(example.tokens, example.learn, strict=True) if wanted]
    return (tok or tokenizer()).decode(tokens, skip_special_tokens=False)


def spelled(example: dataset.Example) -> str:
    return tokenizer().decode(example.tokens, skip_special_tokens=False)


def test_texts_and_completions(tmp_path: Path) -> None:
    plain, told, answered, ids = read(
        tmp_path,
        {"text": "abc"},
        {"prompt": "ab", "completion": " c", "dataset": "told"},
        {"prompt": "ab", "response": "c"},
        {"prompt_token_ids": [5, 6], "output_token_ids": [7, 1], "temperature": 0.5, "dataset": "served"},
    )
    assert (spelled(plain), learned(plain), plain.prompt_length) == ("<s>abc</s>", "abc</s>", 1)
    assert (spelled(told), learned(told), told.prompt_length) == ("<s>ab c</s>", " c</s>", 3)
    assert (spelled(answered), learned(answered)) == ("<s>abc</s>", "c</s>")
    assert ids == dataset.Example([5, 6, 7, 1], [False, False, True, True], "served", 2, temperature=0.5)
    assert [e.dataset for e in (plain, told, answered)] == ["some", "told", "some"]


def test_chats_learn_the_roles_asked_for(tmp_path: Path) -> None:
    openai = {"messages": [{"role": role, "content": content} for role, content in TALK]}
    parts = {"messages": [{"role": r, "content": [{"type": "text", "text": x} for x in c]} for r, c in TALK]}
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = {"conversations": [{"from": names[role], "value": content} for role, content in TALK]}
    found = read(tmp_path, openai, parts, sharegpt)
    assert found[0] == found[1] == found[2]
    assert spelled(found[0]) == tokenizer().apply_chat_template(openai["messages"], add_generation_prompt=False)
    assert learned(found[0]) == "yes<|im_end|>no<|im_end|>"  # not the line's end that the template writes behind
    assert found[0].prompt_length == len("_hi_\n") + len("user\n") + len("_assistant\n")
    both = read(tmp_path, openai, roles=("user", "assistant"))[0]
    assert learned(both).count("<|im_end|>") == 4 and "so<|im_end|>" in learned(both)
    with pytest.raises(ValueError, match=r"roles must be some of .*'assistant'.*got \('robot',\)"):
        read(tmp_path, openai, roles=("robot",))


def test_templates_see_tools_and_calls(tmp_path: Path) -> None:
    template = "{{ tools }}" + CHATML.replace("m.content }}", "m.content or m.tool_calls[0] }}")
    calls = {"role": "assistant", "content": None, "tool_calls": ["find"]}
    talk = [{"role": "user", "content": "a"}, calls, {"role": "tool", "content": "b"}]
    (example,) = read(tmp_path, {"messages": talk, "tools": "kit"}, template=template)
    assert spelled(example).startswith("kit<|im_start|>user") and learned(example) == "find<|im_end|>"


def test_a_template_that_rewrites_history_gives_an_example_a_turn(tmp_path: Path) -> None:
    row = {"messages": [{"role": role, "content": content} for role, content in TALK]}
    first, last = read(tmp_path, row, template=THINKING)
    thought = "<think>\n\n</think>\n\n"
    assert learned(first) == f"{thought}yes<|im_end|>" and spelled(first).count("<|im_start|>") == 2
    assert learned(last) == f"{thought}no<|im_end|>"
    assert spelled(last).count(thought) == 1, "the earlier turn is as the model would see it"
    with pytest.raises(ValueError, match=r"some.jsonl:1: message 2 \(assistant\): the chat template does not continue"):
        read(tmp_path, row, template=ASKING)


def test_no_token_lies_across_the_prompts_end(tmp_path: Path) -> None:
    """Tokenizers that join characters, or that mark the beginning of a text, do not change what is learned."""
    vocab = {t: i for i, t in enumerate(["</s>", *"▁abc", "ab", "▁a", "bc"])}
    backend = Backend(models.BPE(vocab, [("a", "b"), ("▁", "a"), ("b", "c")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tok = text.Tokenizer(backend, eos_token_ids=(0,))
    write(tmp_path / "x.jsonl", {"prompt": "c", "completion": "ca"}, {"prompt": "ca", "completion": "bc"})
    one, joined = dataset.read_examples([tmp_path / "x.jsonl"], tok)
    names = {i: t for t, i in vocab.items()}
    assert [names[t] for t in one.tokens] == ["▁", "c", "c", "a", "</s>"] and one.prompt_length == 2
    assert [names[t] for t in joined.tokens] == ["▁", "c", "ab", "c", "</s>"] and joined.prompt_length == 2


def test_files_may_be_compressed_and_hold_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "abc"}\n\n{"text": "de"}'))
    found = dataset.read_examples([path, write(tmp_path / "b.jsonl", {"text": "x"})], tokenizer())
    assert [(spelled(e), e.dataset) for e in found] == [
        ("<s>abc</s>", "served"), ("<s>de</s>", "served"), ("<s>x</s>", "b")
    ]  # fmt: skip
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"served.jsonl.gz:\d: cannot be read: .*end-of-stream"):
        dataset.read_examples([path], tokenizer())


CHAT = {"role": "user", "content": "a"}
BAD = {
    "nothing known": ({"body": "a", "id": 3}, r"a row needs 'text', .*found the keys \['body', 'id'\]"),
    "no object": ([1], r"must be a JSON object, got list"),
    "not json": ('{"text": "a"', r"broken JSON: "),
    "text is a number": ({"text": 3}, r"text must be a string, got int"),
    "text is blank": ({"text": " \n"}, r"text is empty"),
    "half a character": ('{"text": "a\\ud800"}', r"valid Unicode"),
    "prompt alone": ({"prompt": "a"}, r"a prompt needs 'completion' or 'response', found \[\]"),
    "two answers": ({"prompt": "a", "completion": "b", "response": "c"}, r"found \['completion', 'response'\]"),
    "empty answer": ({"prompt": "a", "completion": ""}, r"completion is empty"),
    "no messages": ({"messages": []}, r"messages must be a list of at least one message, got \[\]"),
    "message is a text": ({"messages": ["a"]}, r"message 1 must be an object, got str"),
    "role": ({"messages": [CHAT, {"role": "robot", "content": "b"}]}, r"message 2: role must be one of .*got 'robot'"),
    "from": ({"conversations": [{"from": "bing", "value": "b"}]}, r"message 1: from must be one of .*got 'bing'"),
    "no role": ({"messages": [{"content": "b"}]}, r"message 1: from must be one of .*got None"),
    "empty content": ({"messages": [{**CHAT, "content": ""}]}, r"message 1 \(user\): content is empty, got ''"),
    "image": ({"messages": [{**CHAT, "content": [{"type": "image"}]}]}, r"parts .* only, got \{'type': 'image'\}"),
    "content": ({"messages": [{**CHAT, "content": 3}]}, r"content must be a string or a list of text parts, got int"),
    "no answer": ({"messages": [CHAT]}, r"no message of the roles .*\('assistant',\), found \['user'\]"),
    "beyond": ({"prompt_token_ids": [1], "output_token_ids": [99]}, r"the vocabulary \[0, 37\), got 99"),
    "negative": ({"prompt_token_ids": [-1], "output_token_ids": [2]}, r"the vocabulary \[0, 37\), got -1"),
    "bool": ({"prompt_token_ids": [True], "output_token_ids": [2]}, r"prompt_token_ids must hold integers, got True"),
    "float": ({"prompt_token_ids": [1], "output_token_ids": [2.0]}, r"output_token_ids must hold integers, got 2.0"),
    "no output": ({"prompt_token_ids": [1]}, r"output_token_ids must be a list of at least one token id, got None"),
    "empty prompt": ({"prompt_token_ids": [], "output_token_ids": [2]}, r"prompt_token_ids must .*got \[\]"),
    "dataset": ({"text": "a", "dataset": 3}, r"dataset must be a string, got 3"),
}


@pytest.mark.parametrize(("row", "message"), BAD.values(), ids=BAD)
def test_bad_rows_name_their_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^\S*/some.jsonl:2: .*" + message):
        read(tmp_path, {"text": "fine"}, row, {"text": "fine"})


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for content, message in [
        (b"", r"x.jsonl:1: the file is empty"),
        (b"\n\n", r"x.jsonl:1: the file is empty"),
        (b'{"text": "a"}\n{"text": "b', r"x.jsonl:2: broken JSON: .*cut off"),
        (b'{"text": "a"}\n{"text": "\xc3', r"x.jsonl:2: not valid UTF-8: .*cut off"),
        (b'{"text": "\xff"}\n', r"x.jsonl:1: not valid UTF-8: (?!.*cut off)"),
        (b"[" * 200_000, r"x.jsonl:1: broken JSON"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            dataset.read_examples([path], tokenizer())
    with pytest.raises(ValueError, match=r"nowhere.jsonl: cannot be read: No such file"):
        dataset.read_examples([tmp_path / "nowhere.jsonl"], tokenizer())
    with pytest.raises(ValueError, match="no data files"):
        dataset.read_examples([], tokenizer())


def test_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    chat = {"messages": [CHAT, {"role": "assistant", "content": "b"}]}
    with pytest.raises(ValueError, match=r"some.jsonl:1: this checkpoint has no chat template"):
        read(tmp_path, chat, template=None)
    path = write(tmp_path / "ids.jsonl", {"prompt_token_ids": [1], "output_token_ids": [12]})
    assert dataset.read_examples([path], None, vocab_size=13)[0].tokens == [1, 12]
    with pytest.raises(ValueError, match=r"ids.jsonl:1: .*\[0, 12\), got 12"):
        dataset.read_examples([path], None, vocab_size=12)
    with pytest.raises(ValueError, match="vocab_size is needed"):
        dataset.read_examples([path], None)
    with pytest.raises(ValueError, match=r"t.jsonl:1: a row of text needs the checkpoint's tokenizer;"):
        dataset.read_examples([write(tmp_path / "t.jsonl", {"text": "a"})], None, vocab_size=13)
    no_ends = tokenizer(bos_token_id=None, eos_token_ids=(), add_bos_token=False)
    (bare,) = dataset.read_examples([write(tmp_path / "t.jsonl", {"text": "abc"})], no_ends)
    assert spelled(bare) == "abc" and bare.learn == [False, True, True]


def test_prompts(tmp_path: Path) -> None:
    talk = [{"role": role, "content": content} for role, content in TALK]
    path = write(
        tmp_path / "p.jsonl",
        {"messages": talk}, {"messages": talk[:3], "dataset": "open"}, {"prompt": "ab"},
        {"prompt_token_ids": [5, 6]}, {"text": "abcdefghijklmnop"}, {"text": "abcdefghijklmnop"},
    )  # fmt: skip
    read_all = lambda **options: dataset.read_prompts([path], tokenizer(), prompt_tokens=(3, 12), **options)
    found = read_all(seed=1)
    asked = tokenizer().apply_chat_template(talk[:3])
    strings = [tokenizer().decode(p.tokens, skip_special_tokens=False) for p in found]
    assert strings[:3] == [asked, asked, "<s>ab"] and found[3].tokens == [5, 6]
    assert [p.source for p in found] == [f"{path}:{i}" for i in range(1, 7)]
    assert [p.dataset for p in found][:2] == ["p", "open"]
    for string, prompt in zip(strings[4:], found[4:], strict=True):
        assert 3 <= len(prompt.tokens) <= 12 and "<s>abcdefghijklmnop".startswith(string)
    assert found == read_all(seed=1)
    assert len({len(read_all(seed=s)[4].tokens) for s in range(20)}) > 4
    with pytest.raises(ValueError, match=r"prompt_tokens must be a range .*got 4:3"):
        dataset.read_prompts([path], tokenizer(), prompt_tokens=(4, 3))
    with pytest.raises(ValueError, match=r"q.jsonl:1: nothing comes before the conversation's only message"):
        dataset.read_prompts([write(tmp_path / "q.jsonl", {"messages": talk[1:2]})], tokenizer())


def test_chats_are_rendered_with_arguments_and_say_so(tmp_path: Path) -> None:
    """What chats had, and what rows of token ids say that theirs had; texts and prompts have none."""
    modes = CHATML.replace("assistant\n{% endif", "assistant\n{% if thinking %}<think>{% endif %}{% endif")
    talk = [{"role": role, "content": content} for role, content in TALK]
    rows = [
        {"messages": talk}, {"text": "abc"}, {"prompt_token_ids": [5], "output_token_ids": [6, 7]},
        {"prompt_token_ids": [5], "output_token_ids": [6, 7], "chat_template_kwargs": {"thinking": False}},
    ]  # fmt: skip
    path, off = write(tmp_path / "p.jsonl", *rows), {"thinking": False}
    with pytest.raises(ValueError, match="the chat template does not continue"):
        dataset.read_examples([path], tokenizer(modes), chat_template_kwargs={"thinking": True})
    found = dataset.read_examples([path], tokenizer(modes), chat_template_kwargs=off)
    assert [example.chat for example in found] == [off, None, None, off] and dataset.chat_modes(found) == [off]
    assert dataset.chat_modes(dataset.read_examples([path], tokenizer(modes))) == [{}, off]
    asked = [
        dataset.read_prompts([path], tokenizer(modes), chat_template_kwargs=how) for how in (None, {"thinking": 1})
    ]
    said = [tokenizer().decode(prompts[0].tokens, skip_special_tokens=False)[-8:] for prompts in asked]
    assert said == ["sistant\n", "\n<think>"] and [prompts[0].chat for prompts in asked] == [{}, {"thinking": 1}]
    with pytest.raises(ValueError, match=r"w.jsonl:1: chat_template_kwargs must be an object, got 'off'"):
        dataset.read_examples([write(tmp_path / "w.jsonl", {**rows[3], "chat_template_kwargs": "off"})], tokenizer())


def test_texts_for_a_tokenizer(tmp_path: Path) -> None:
    talk = [{"role": role, "content": content} for role, content in TALK]
    path = write(tmp_path / "t.jsonl", {"text": "abc"}, {"prompt": "a", "response": "b"}, {"messages": talk})
    assert list(jsonl.read_texts([path])) == ["abc", "ab", "hi", "yes", "so", "no"]
    with pytest.raises(ValueError, match="ids.jsonl:1: token ids cannot train a tokenizer"):
        list(jsonl.read_texts([write(tmp_path / "ids.jsonl", {"prompt_token_ids": [1]})]))


def segments(rows: PackedRows) -> list[tuple[list[int], list[bool]]]:
    """Every text of every row, after checking what must hold for each row."""
    found = []
    for row in range(len(rows)):
        numbers = rows.segments[row]
        count = int(numbers.max())
        used = int((numbers > 0).sum())
        assert count >= 1 and sorted(set(numbers[:used].tolist())) == list(range(1, count + 1))
        assert (np.diff(numbers[:used]) >= 0).all() and not numbers[used:].any()
        assert not rows.learn[row, used:].any() and not rows.tokens[row, used:].any()
        for number in range(1, count + 1):
            here = numbers == number
            assert rows.positions[row, here].tolist() == list(range(int(here.sum())))
            assert not rows.learn[row, here][0]
            found.append((rows.tokens[row, here].tolist(), rows.learn[row, here].tolist()))
    return found


@st.composite
def texts(draw: st.DrawFn) -> list[dataset.Example]:
    """Texts whose tokens are all different, so that a piece tells where it comes from."""
    examples, start = [], 1
    for _ in range(draw(st.integers(1, 12))):
        size = draw(st.integers(1, 40))
        learn = [False, *draw(st.lists(st.booleans(), min_size=size - 1, max_size=size - 1))]
        examples.append(dataset.Example(list(range(start, start + size)), learn, "", 0))
        start += size
    return examples


@settings(max_examples=150, deadline=None)
@given(texts(), st.integers(4, 50), st.integers(0, 3))
def test_packing_learns_every_token_once_and_mixes_no_texts(
    examples: list[dataset.Example], length: int, seed: int
) -> None:
    kept = [e for e in examples if len(e.tokens) >= dataset.MIN_TOKENS]
    wanted = sorted(t for e in kept for t, learn in zip(e.tokens, e.learn, strict=True) if learn)
    if not wanted:
        with pytest.raises(ValueError, match="nothing to learn"):
            dataset.pack(examples, length, seed=seed)
        return
    rows = dataset.pack(examples, length, seed=seed)
    assert rows.length == length
    found = segments(rows)
    assert sorted(t for tokens, learn in found for t, w in zip(tokens, learn, strict=True) if w) == wanted
    for tokens, learn in found:
        assert len(tokens) >= dataset.MIN_TOKENS and any(learn)
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        (home,) = [e for e in kept if tokens[0] in e.tokens]
        assert tokens[-1] in home.tokens
        if len(home.tokens) <= length:
            assert tokens == home.tokens
    again = dataset.pack(examples, length, seed=seed)
    for name in ("tokens", "segments", "positions", "learn"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(again, name))


def test_packing_is_tight_and_quick_and_says_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 600, 20_000)
    examples = [dataset.Example([1] * n, [False] + [True] * (n - 1), "", 1) for n in sizes.tolist()]
    idle = dataset.Example([1] * 900, [False] * 899 + [True], "", 899)
    rows = dataset.pack([*examples, dataset.Example([1, 2], [False, True], "", 1), idle], 512)
    used = (rows.segments > 0).mean()
    assert used > 0.99 and rows.tokens.dtype == np.int32
    said = capsys.readouterr().out
    assert f"{used:.1%} used" in said and "left out 1 texts below 3 tokens and 1 pieces with nothing to learn" in said
    with pytest.raises(ValueError, match="more than 3 tokens a row, got 3"):
        dataset.pack(examples, 3)


def test_row_order_depends_on_the_step_and_uses_every_row() -> None:
    order = dataset.RowOrder(12, 5, seed=1)
    steps = [order(step) for step in range(24)]
    flat = np.concatenate(steps).reshape(10, 12)
    assert [sorted(epoch) for epoch in flat.tolist()] == [list(range(12))] * 10
    assert len({tuple(epoch) for epoch in flat.tolist()}) == 10
    for step in (7, 2, 23, 0):
        np.testing.assert_array_equal(dataset.RowOrder(12, 5, seed=1)(step), steps[step])
        np.testing.assert_array_equal(order(step), steps[step])
    assert not np.array_equal(dataset.RowOrder(12, 5, seed=2)(0), steps[0])
    assert dataset.RowOrder(2, 5, seed=0)(0).shape == (5,)
    with pytest.raises(ValueError, match="got 0 rows and a batch of 4"):
        dataset.RowOrder(0, 4, 0)
