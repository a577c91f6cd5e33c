"""The target answers prompts through the engine: in order, as seeded, and the same after a kill."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from jaxspec import assemble, rowfile
from jaxspec.checkpointing import hf
from jaxspec.models.layers import causal_attention
from jaxspec.models.tiny import tiny_target
from jaxspec.request import FinishReason
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.data import dataset, regenerate
from jaxspec.train.data.regenerate import Answers
from jaxspec.writer import Written

LETTERS, EOS = "abcdefghijkl", 12
TEXTS = ["abcdefgh", "lkjihgfe", "aabbccdd", "dead", "facade", "jig"]
SETTINGS: dict[str, Any] = dict(prompt_tokens=(2, 5), max_tokens=9, temperatures=(0.0, 1.0), batch=3, seed=4)


def letters() -> Backend:
    backend = Backend(models.BPE({c: i for i, c in enumerate([*LETTERS, "</s>"])}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return backend


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a tiny target, prompts, and the rows of an undisturbed run; pages are small, nothing is kept."""
    path = tmp_path_factory.mktemp("regenerate")
    hf.save_model(
        tiny_target(0, bos_token_id=None, eos_token_ids=(EOS,)), path / "target", tokenizer=letters(), dtype=jnp.float32
    )
    rows = [{"text": text} for text in TEXTS] + [{"prompt": "cab", "dataset": "asked"}]
    rows += [{"prompt_token_ids": [i, 3, 1], "output_token_ids": [1]} for i in range(4)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build = assemble.build_engine

    def small(*args: Any, **options: Any) -> Any:
        model, drafter, policy, config = args
        config = dataclasses.replace(config, compile_cache=False, page_size=8)
        return build(model, drafter, policy, config, **{**options, "progress": False})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "build_engine", small)
        regenerate.regenerate(path / "target", [path / "prompts.jsonl"], path / "whole.jsonl", Answers(**SETTINGS))
        yield path


def run(work: Path, name: str, **changes: Any) -> Path:
    how = Answers(**{**SETTINGS, **changes})
    return regenerate.regenerate(work / "target", [work / "prompts.jsonl"], work / name, how)


def test_rows_are_the_targets_answers_in_order(work: Path) -> None:
    rows = [json.loads(line) for line in (work / "whole.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.from_directory(work / "target")
    prompts = dataset.read_prompts([work / "prompts.jsonl"], tokenizer, prompt_tokens=(2, 5), seed=4)
    assert [row["prompt_token_ids"] for row in rows] == [p.tokens for p in prompts]
    assert [row["dataset"] for row in rows] == ["prompts"] * 6 + ["asked"] + ["prompts"] * 4
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    texts_BT = np.zeros((len(rows), 16), np.int32)
    for i, row in enumerate(rows):
        text = row["prompt_token_ids"] + row["output_token_ids"]
        texts_BT[i, : len(text)] = text
    model = hf.load_model(work / "target")
    positions = jnp.broadcast_to(jnp.arange(16)[None], texts_BT.shape)
    forward = jax.jit(lambda tokens: model.logits(model(tokens, positions, causal_attention)[0]))
    best_BT = np.asarray(jnp.argmax(forward(jnp.asarray(texts_BT)), axis=-1))
    surprises = 0
    for row, best in zip(rows, best_BT, strict=True):
        start, output = len(row["prompt_token_ids"]), row["output_token_ids"]
        assert EOS not in output[:-1] and (len(output) == 9 or output[-1] == EOS)
        greedy = best[start - 1 : start - 1 + len(output)].tolist()
        if row["temperature"] == 0:
            assert output == greedy
        surprises += output != greedy
    assert surprises >= 2
    examples = dataset.read_examples([work / "whole.jsonl"], tokenizer)
    assert [e.prompt_length for e in examples] == [len(p.tokens) for p in prompts]


def test_answers_say_how_their_chats_were_written(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row, for the trainer that reads it; a file is of one mode."""
    target = tmp_path / "target"
    target.mkdir()
    for file in (work / "target").iterdir():
        (target / file.name).symlink_to(file)
    template = "{{ messages[0].content }}{% if thinking %}b{% endif %}"
    (target / "chat_template.jinja").write_text(template)
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "ca"}]}\n{"prompt": "cab"}\n')
    told = Written([1, 2], "", FinishReason.LENGTH, None)
    monkeypatch.setattr(regenerate, "write", lambda how, texts, cluster: ((i, told) for i in range(len(texts))))
    for name, chat, prompt in (("on", {"thinking": True}, "cab"), ("usual", {}, "ca")):
        out = regenerate.regenerate(target, [data], tmp_path / f"{name}.jsonl", Answers(chat_template_kwargs=chat))
        row, other = map(json.loads, out.read_text().splitlines())
        assert row["prompt_token_ids"] == [LETTERS.index(c) for c in prompt] and row["chat_template_kwargs"] == chat
        assert "chat_template_kwargs" not in other
        assert dataset.chat_modes(dataset.read_examples([out], None, vocab_size=13)) == [chat]
    other_mode = Answers(chat_template_kwargs={"thinking": "yes"})
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        regenerate.regenerate(target, [data], tmp_path / "on.jsonl", other_mode)


def test_a_killed_run_goes_on_to_the_same_bytes(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append, written = rowfile.write_line, []

    def killed(f: Any, line: bytes, path: Path) -> None:
        written.append(line)
        if len(written) == 5:
            f.write(line[: len(line) // 2])  # the kill comes within a line
            raise KeyboardInterrupt
        append(f, line, path)

    monkeypatch.setattr(rowfile, "write_line", killed)
    with pytest.raises(KeyboardInterrupt):
        run(work, "killed.jsonl")
    monkeypatch.undo()
    whole = (work / "whole.jsonl").read_bytes()
    assert (work / "killed.jsonl").read_bytes() == whole[: len((work / "killed.jsonl").read_bytes())] != whole
    run(work, "killed.jsonl", batch=2)
    assert "going on after 4 of 11 rows" in capsys.readouterr().out
    assert (work / "killed.jsonl").read_bytes() == whole
    monkeypatch.setattr(assemble, "build_engine", None)  # a finished run needs no engine
    run(work, "killed.jsonl")
    assert "all 11 rows are there" in capsys.readouterr().out


def test_a_drafter_changes_no_answer(work: Path) -> None:
    run(work, "drafted.jsonl", drafter="ngram", temperatures=(0.0,), limit=4)
    rows = [json.loads(line) for line in (work / "drafted.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (work / "whole.jsonl").read_text().splitlines()]
    greedy = [(a, b) for a, b in zip(rows, whole, strict=False) if b["temperature"] == 0]
    assert len(rows) == 4 and greedy and all(a == b for a, b in greedy)


def test_another_runs_file_is_refused(work: Path) -> None:
    for name in ("whole.jsonl", "whole.jsonl.made_of.json"):
        shutil.copy(work / name, work / name.replace("whole", "other"))
    for changes, message in [
        ({"seed": 5}, r"other.jsonl was made with seed 4, got 5"),
        ({"temperatures": (0.0,)}, r"temperatures \[0.0, 1.0\], got \[0.0\]"),
        ({"limit": 3}, r"limit None, got 3"),
        ({"drafter": "ngram"}, r"drafter 'none', got 'ngram'"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(work, "other.jsonl", **changes)
    other = work / "more.jsonl"
    other.write_text('{"text": "abc"}\n')
    with pytest.raises(ValueError, match=r"made with data \[\['prompts.jsonl', '.*'\]\], got \[\['more.jsonl'"):
        regenerate.regenerate(work / "target", [other], work / "other.jsonl", Answers(**SETTINGS))
    lines = (work / "other.jsonl").read_text().splitlines(keepends=True)
    (work / "other.jsonl").write_text(lines[1] + lines[0])
    with pytest.raises(ValueError, match=r"other.jsonl:1: this row does not answer prompt 1"):
        run(work, "other.jsonl")
    (work / "mine.jsonl").write_text("precious\n")
    with pytest.raises(ValueError, match=r"mine.jsonl exists, but mine.jsonl.made_of.json"):
        run(work, "mine.jsonl")
    assert (work / "mine.jsonl").read_text() == "precious\n"


def test_what_cannot_be_asked(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes, message in [
        ({"temperatures": ()}, r"temperatures must lie between 0 and 10, got \(\)"),
        ({"temperatures": (-1.0,)}, r"temperatures must .*got \(-1.0,\)"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        (
            {"context": 10},
            r"11 of 11 prompts are longer than 1 tokens \(context 10 - max_tokens 9\); .*prompts.jsonl:1",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            run(work, "never.jsonl", **changes)
    assert not (work / "never.jsonl").exists()
    with pytest.raises(ValueError, match="length must be at least 4"):
        regenerate.answer(work / "target", [work / "prompts.jsonl"], work / "x.jsonl", length=3)


def test_prompts_without_room_are_left_out_and_counted(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = regenerate.answer(work / "target", [work / "prompts.jsonl"], work / "short.jsonl", length=4, seed=1)
    assert "left out: 5 of 11 prompts are longer than 2 tokens" in capsys.readouterr().out
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["prompt_token_ids"] for row in rows] == [[LETTERS.index(text[0])] for text in TEXTS]
    assert {len(row["output_token_ids"]) for row in rows} <= {1, 2}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_names_the_file() -> None:
    with (
        open("/dev/full", "ab", buffering=0) as f,
        pytest.raises(OSError, match=r"No space left.*run the command again"),
    ):
        rowfile.write_line(f, b"{}\n", Path("/dev/full"))


def test_the_command(work: Path) -> None:
    parser = argparse.ArgumentParser()
    regenerate.add_arguments(parser)
    common = [
        "--target",
        str(work / "target"),
        "--data",
        str(work / "prompts.jsonl"),
        "--out",
        str(work / "whole.jsonl"),
    ]
    options = ["--prompt-tokens", "2:5", "--max-tokens", "9", "--temperatures", "0,1", "--batch", "3", "--seed", "4"]
    before = (work / "whole.jsonl").read_bytes()
    assert regenerate.main(parser.parse_args([*common, *options])) == work / "whole.jsonl"
    assert (work / "whole.jsonl").read_bytes() == before
    for wrong in (["--prompt-tokens", "5"], ["--prompt-tokens", "5:2"], ["--temperatures", "warm"]):
        with pytest.raises(SystemExit):
            parser.parse_args([*common, *wrong])
