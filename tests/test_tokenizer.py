"""Text in and out: BOS, templates, characters cut by tokens, stop strings."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from jaxspec.text import chat_template
from jaxspec.text.tokenizer import IncrementalDetokenizer, StopChecker, StopResult, Tokenizer

SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>"]
TEXT = "def f(x):\n    return x + 1  # größer 你好 👩‍👩‍👧 🙂\n"


def byte_level() -> Backend:
    """Every byte a token, and a few merges."""
    tok = Backend(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(["return def the and x + 1 " * 4], trainer)
    return tok


def byte_fallback() -> Backend:
    """Llama 2's manner: words carry their space, unknown characters fall back to bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "▁b"]
    tok = Backend(
        models.BPE({w: i for i, w in enumerate(words)}, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True)
    )
    tok.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tok


def write(directory: Path, backend: Backend, settings: dict[str, Any] | None = None, **files: dict[str, Any]) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    if settings is not None:
        files["tokenizer_config"] = settings
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


DEMO = dict(bos_token="<|bos|>", eos_token={"content": "<|eos|>", "lstrip": False}, add_bos_token=True)


def test_encode_follows_the_checkpoint_on_bos(tmp_path: Path) -> None:
    demo = Tokenizer.from_directory(write(tmp_path, byte_level(), DEMO))
    ids = demo.encode(TEXT)
    assert demo.adds_bos and ids[0] == demo.bos_token_id == 0 and ids.count(0) == 1
    assert demo.encode(TEXT, add_special_tokens=False) == ids[1:]
    assert demo.decode(ids) == TEXT and demo.decode(ids, skip_special_tokens=False) == "<|bos|>" + TEXT
    assert demo.eos_token_ids == (1,) and demo.vocab_size == byte_level().get_vocab_size()

    plain = Tokenizer.from_directory(write(tmp_path, byte_level(), {**DEMO, "add_bos_token": False}))
    assert not plain.adds_bos and plain.encode(TEXT) == ids[1:]

    templated = byte_level()
    templated.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    for flag in (True, False):
        tok = Tokenizer.from_directory(write(tmp_path, templated, {**DEMO, "add_bos_token": flag}))
        assert tok.adds_bos and tok.encode(TEXT) == ids


def test_special_tokens_come_from_every_file(tmp_path: Path) -> None:
    write(
        tmp_path, byte_level(), config=dict(bos_token_id=0, eos_token_id=2), generation_config=dict(eos_token_id=[1, 2])
    )
    tok = Tokenizer.from_directory(tmp_path)
    assert tok.bos_token_id == 0 and tok.eos_token_ids == (1, 2) and not tok.adds_bos


def test_truncation_settings_do_not_shorten_prompts(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tok = Tokenizer.from_directory(write(tmp_path, backend))
    assert tok.decode(tok.encode(TEXT)) == TEXT


def test_bad_input_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer.json or tokenizer.model; .* token ids"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="tokenizer.json is not a valid tokenizer.json"):
        Tokenizer.from_directory(tmp_path)
    write(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match="tokenizer_config.json is not readable as JSON"):
        Tokenizer.from_directory(tmp_path)
    tok = Tokenizer(byte_level())
    with pytest.raises(ValueError, match="must be a string, got int"):
        tok.encode(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="valid Unicode"):
        tok.encode("a\ud800b")
    with pytest.raises(ValueError, match=rf"\[0, {tok.vocab_size}\), got -1"):
        tok.decode([-1])
    assert tok.decode([*tok.encode("ab"), tok.vocab_size, 2**40]) == "ab"


def test_encoding_is_the_backend_s_and_lets_other_threads_run() -> None:
    backend = byte_level()
    tok = Tokenizer(backend)
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    for text in ("", "a", TEXT, TEXT * 50, "<|bos|>x"):
        for special in (True, False):
            assert tok.encode(text, add_special_tokens=special) == backend.encode(text, add_special_tokens=special).ids

    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.process_time()  # while the machine has no time for this process, no thread gets on
        while not done.is_set():
            time.sleep(0.001)
            now = time.process_time()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    text = TEXT * 20_000
    thread.start()
    began = time.process_time()
    ids = tok.encode(text)
    seconds = time.process_time() - began
    done.set()
    thread.join()
    assert len(ids) > 100_000 and max(gaps) < seconds / 2  # with the GIL held it is all of it


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tok = Tokenizer(byte_level())
    longest = max(map(len, byte_level().get_vocab()))
    assert tok.longest_token == longest
    assert len(tok.encode("a" * longest * 3, max_tokens=3)) >= 3
    monkeypatch.setattr(tok, "_backend", None)
    with pytest.raises(ValueError, match=rf"at most {3 * longest} characters \(3 tokens\), got {3 * longest + 1}"):
        tok.encode("a" * (3 * longest + 1), max_tokens=3)


TEMPLATE = (
    "{%- for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TALK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("place", ["string", "list", "file"])
def test_chat_templates_render_wherever_they_are(tmp_path: Path, place: str) -> None:
    value: Any = TEMPLATE if place == "string" else [dict(name="default", template=TEMPLATE)]
    write(tmp_path, byte_level(), {**DEMO, **({} if place == "file" else dict(chat_template=value))})
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tok = Tokenizer.from_directory(tmp_path)
    assert tok.apply_chat_template(TALK) == "<|bos|>user: hi\nassistant:"
    assert tok.apply_chat_template(TALK, add_generation_prompt=False) == "<|bos|>user: hi\n"
    assert tok.encode(tok.apply_chat_template(TALK), add_special_tokens=False).count(0) == 1
    with pytest.raises(ValueError, match="template failed.*no tool"):
        tok.apply_chat_template([{"role": "tool", "content": ""}])
    with pytest.raises(ValueError, match="messages must be a list.*'hello'"):
        tok.apply_chat_template("hello")  # pyright: ignore[reportArgumentType]
    assert tok.broken_chat_template() is None
    write(tmp_path, byte_level(), {**DEMO, "chat_template": "{{ messages }}\n{% if %}"})
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    broken = Tokenizer.from_directory(tmp_path)
    assert "the chat template cannot be read: line 2: " in str(broken.broken_chat_template())
    for template in ("{{ messages }}\n{% if %}", "{{ f(a=1, a=2) }}"):
        write(tmp_path, byte_level(), {**DEMO, "chat_template": template})
        broken = Tokenizer.from_directory(tmp_path)
        assert "the chat template cannot be read: " in str(broken.broken_chat_template())
        with pytest.raises(ValueError, match="template failed"):
            broken.apply_chat_template(TALK)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10**9) | list }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% if %}",
    ],
)
def test_templates_cannot_do_harm(template: str) -> None:
    with pytest.raises(ValueError, match="the chat template failed"):
        Tokenizer(byte_level(), chat_template=template).apply_chat_template(TALK)


def test_templates_find_what_published_ones_use() -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m | tojson(indent=1) }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%%') }}{{ tools }}"
    )
    tok = Tokenizer(byte_level(), chat_template=template)
    talk = [{"role": "user", "content": "größer"}] * 2
    assert tok.apply_chat_template(talk, tools=["t"]) == '{\n "role": "user",\n "content": "größer"\n}%[\'t\']'


def test_messages_in_openai_s_forms_reach_templates_as_they_expect_them() -> None:
    tok = Tokenizer(byte_level(), chat_template="{% for m in messages %}{{ m | tojson }}{% endfor %}")
    parts = [{"type": "text", "text": "a"}, "b"]
    assert tok.apply_chat_template([{"role": "user", "content": parts}]) == '{"role": "user", "content": "a\\nb"}'
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    told = {"role": "assistant", "content": None, "tool_calls": [call, {"id": 3}]}
    assert '"arguments": {"x": 1}}}, {"id": 3}]' in tok.apply_chat_template([told], tokenize=False)
    for message, refused in [
        (
            {"content": [{"type": "image_url", "image_url": {}}]},
            "a text or a list of text parts .*got a part of type 'image",
        ),
        ({"content": [3]}, "got a part of type .int"),
        ({"tool_calls": [{"function": {"arguments": "{x"}}]}, "arguments must be JSON, got '{x'"),
    ]:
        with pytest.raises(ValueError, match=refused):
            tok.apply_chat_template([{"role": "user", **message}])
    with pytest.raises(ValueError, match=r"rendered as text, and \['tokenize'\] cannot be had"):
        tok.apply_chat_template(TALK, tokenize=True)
    assert tok.apply_chat_template(TALK, messages="shadowed").count("user") == 1


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    environment = chat_template._environment
    monkeypatch.setattr(chat_template, "_environment", lambda: made.append(1) or environment())
    tok = Tokenizer(byte_level(), chat_template=TEMPLATE)
    assert not made
    texts = {tok.apply_chat_template([{"role": "user", "content": str(i)}]) for i in range(3)}
    assert len(made) == 1 and len(texts) == 3


def test_no_template_is_an_error() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(byte_level()).apply_chat_template(TALK)


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["byte-level", "byte-fallback"])
def test_streamed_text_is_the_decoded_text_and_never_half_a_character(backend: Backend) -> None:
    tok = Tokenizer(backend)
    ids = tok.encode("a b 🙂 é你 a🙂b")
    stream = IncrementalDetokenizer(tok)
    parts = [stream.feed(i) for i in ids]
    assert "".join(parts) == tok.decode(ids) == "a b 🙂 é你 a🙂b"
    assert "" in parts and not any("\ufffd" in p for p in parts)
    assert stream.flush() == ""


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("cut", range(1, 12))
def test_a_continuation_joins_its_prompt(backend: Backend, cut: int) -> None:
    tok = Tokenizer(backend)
    ids = tok.encode("b 🙂 a é b a")
    prompt, rest = ids[:cut], ids[cut:]
    stream = IncrementalDetokenizer(tok, prompt)
    text = "".join(stream.feed(i) for i in rest) + stream.flush()
    assert tok.decode(prompt).rstrip("\ufffd") + text == tok.decode(ids)


def test_cut_characters_and_garbage_come_out_in_the_end() -> None:
    tok = Tokenizer(byte_level())
    ids = tok.encode("é🙂")
    stream = IncrementalDetokenizer(tok)
    assert "".join(stream.feed(i) for i in ids[:-1]) == "é"
    assert stream.flush() == "\ufffd" and stream.flush() == ""

    lead = ids[0]
    stream = IncrementalDetokenizer(tok)
    text = "".join(stream.feed(lead) for _ in range(100))
    assert len(text) >= 80 and set(text) == {"\ufffd"}
    assert len(stream._window) < 40
    assert (text + stream.feed(tok.encode("a")[0])).endswith("a")


def test_special_and_unknown_tokens_have_no_text() -> None:
    tok = Tokenizer(byte_level())
    a = tok.encode("a")[0]
    stream = IncrementalDetokenizer(tok)
    assert [stream.feed(i) for i in (a, 1, tok.vocab_size + 5, a)] == ["a", "", "", "a"]
    shown = IncrementalDetokenizer(tok, skip_special_tokens=False)
    assert [shown.feed(i) for i in (a, 1, a)] == ["a", "<|eos|>", "a"]
    with pytest.raises(ValueError, match="got -1"):
        stream.feed(-1)


def test_tags_that_are_not_special_are_text() -> None:
    """Of thinking and tools, as published tokenizers have them."""
    backend = byte_level()
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>", "<tool_call>")])
    tok = Tokenizer(backend)
    ids = tok.encode("<think>a</think><tool_call>", add_special_tokens=False)
    stream = IncrementalDetokenizer(tok)
    assert len(ids) == 4 and [stream.feed(i) for i in ids] == ["<think>", "a", "</think>", "<tool_call>"]


def test_random_bytes_stream_like_they_decode() -> None:
    tok = Tokenizer(byte_level())
    rng = random.Random(0)
    for _ in range(60):
        raw = "".join(chr(rng.choice((97, 233, 0x4F60, 0x1F642))) for _ in range(12))
        ids = [i for i in tok.encode(raw) if rng.random() > 0.1]
        stream = IncrementalDetokenizer(tok)
        assert "".join(stream.feed(i) for i in ids) + stream.flush() == tok.decode(ids)


def test_what_byte_level_tokens_add_is_known_alone() -> None:
    quick, slow = byte_level(), byte_level()
    slow.decoder = decoders.Sequence([slow.decoder])  # of its tokens nothing is known
    known, unknown = Tokenizer(quick), Tokenizer(slow)
    a, *cut = known.encode("a🙂")
    assert known.piece(a) == "a" and known.piece(1) == "" and known.piece(1, skip_special_tokens=False) == "<|eos|>"
    assert known.piece(cut[0]) is known.piece(known.vocab_size) is unknown.piece(a) is None
    rng = random.Random(2)
    for case in range(200):
        ids = [rng.choice((a, 1, rng.choice(cut), rng.randrange(known.vocab_size + 2))) for _ in range(40)]
        ids[: rng.randrange(20)] = [cut[0]] * rng.randrange(20)  # more than may wait
        start, skip = rng.randrange(30), rng.random() < 0.5
        if case == 0:  # garbage was let through, and a special token is within what may yet be a character
            ids, start, skip = [*[cut[0]] * 17, 1, *cut[1:], a], 0, True
        tokenizers = (known, unknown, known)
        one, other, many = (IncrementalDetokenizer(t, ids[:start], skip_special_tokens=skip) for t in tokenizers)
        texts = [one.feed(i) for i in ids[start:]]
        assert texts == [other.feed(i) for i in ids[start:]]
        size = 1 + start % 6
        rounds = [many.feed_all(ids[at : at + size]) for at in range(start, len(ids), size)]
        assert rounds == ["".join(texts[at : at + size]) for at in range(0, len(texts), size)]
        assert one.flush() == other.flush() == many.flush()


@pytest.mark.parametrize(
    ("stop", "tokens", "expected"),
    [
        (["END"], ["a", "bE", "ND", "x"], StopResult("ab", 3, "END")),
        (["END"], ["a END b"], StopResult("a ", 1, "END")),
        (["END"], ["E", "N", "d"], StopResult("ENd", 3)),
        (["END"], ["a", "EN"], StopResult("a", 2)),
        (["\n\n"], ["x\n", "\ny"], StopResult("x", 2, "\n\n")),
        (["aab"], ["aa", "ab"], StopResult("a", 2, "aab")),
        (["b", "abc"], ["ab", "c"], StopResult("a", 1, "b")),
        (["b", "ab"], ["xab"], StopResult("x", 1, "ab")),
        (["q"], ["", "x", ""], StopResult("x", 3)),
        ([], ["x", "y"], StopResult("xy", 2)),
    ],
)
def test_stop_strings(stop: list[str], tokens: list[str], expected: StopResult) -> None:
    assert StopChecker(stop).feed(tokens) == expected


def test_stop_strings_may_be_kept_and_held_text_is_released() -> None:
    checker = StopChecker(["END"], include_stop_str_in_output=True)
    assert checker.feed(["aE"]) == StopResult("a", 1)
    assert checker.feed(["N", "Dx", "y"]) == StopResult("END", 2, "END")
    assert checker.flush() == ""
    checker = StopChecker(["END"])
    assert checker.feed(["aEN"]).text == "a"
    assert checker.flush("\ufffd") == "EN\ufffd"


def test_min_tokens_delays_stop_strings() -> None:
    checker = StopChecker(["b", "abc"], min_tokens=2)
    assert checker.feed(["b", "ab"]) == StopResult("b", 2)
    assert checker.feed(["c"]) == StopResult("", 1, "abc")
    checker = StopChecker(["b"], min_tokens=1)
    assert checker.feed(["ab", "x", "b"]) == StopResult("abx", 3, "b")


def test_text_never_passes_a_stop_and_chunks_do_not_matter() -> None:
    rng = random.Random(1)
    for _ in range(300):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=14))
        ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
        _, start, stop = min(ends, default=(len(text), len(text), None))
        checker, out, rest, found = StopChecker(stops), "", text, None
        while rest and found is None:
            size, middle = rng.randint(1, 5), rng.randint(0, 2)
            result = checker.feed([rest[:middle], rest[middle:size]] if middle < size else [rest[:size]])
            out, rest, found = out + result.text, rest[size:], result.stop
            assert len(out) <= start
        assert (out + checker.flush(), found) == (text[:start], stop)


def test_stop_must_hold_strings() -> None:
    for bad in ("", 3):
        with pytest.raises(ValueError, match=f"non-empty strings, got {bad!r}"):
            StopChecker([bad])  # pyright: ignore[reportArgumentType]
