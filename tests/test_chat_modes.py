"""Chats in another mode than those that a drafter learned from are told, by whichever door they come."""

from __future__ import annotations

import argparse
import json
import logging
import types
from pathlib import Path
from typing import Any

import pytest
from chats import SWITCH, tokenizer

from jaxspec import LLM, SamplingParams
from jaxspec.drafters.directories import chat_modes
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.modes import ChatModes, parse
from jaxspec.text.tokenizer import Tokenizer

#: A template that says how hard to think before the conversation.
EFFORT = "effort {{ effort | default('low') }}: {{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


@pytest.mark.parametrize(
    ("learned", "arguments", "unlike"),
    [
        ([OFF], {}, True),
        ([OFF], ON, True),
        ([OFF], {**OFF, "tools": [{"name": "f"}], "unknown": 1}, False),
        ([{}], ON, False),  # what the template does where nobody says
        ([ON], {}, False),
        ([{}], OFF, True),
        ([{}, OFF], OFF, False),
        ([], OFF, False),
    ],
)
def test_modes_are_what_the_template_writes(learned: list[Any], arguments: dict[str, Any], unlike: bool):
    modes = ChatModes(learned, tokenizer(SWITCH))
    prompt = modes._tokenizer.apply_chat_template([{"role": "user", "content": "[assistant]<t></t>b"}], **arguments)  # type: ignore[union-attr]
    for _ in range(2):
        assert modes.unlike(arguments) == modes.opens_unlike(list(map(ord, prompt))) == unlike
    assert not modes.opens_unlike(list(map(ord, "[assistant]<t></t> and more"))) and not modes.opens_unlike([])


def test_what_stands_before_an_answer_is_seen_in_arguments_alone():
    modes = ChatModes([{"effort": "high"}], tokenizer(EFFORT))
    assert modes.unlike({}) and modes.unlike({"effort": "low"}) and not modes.unlike({"effort": "high"})
    assert not modes.opens_unlike(list(map(ord, "effort low: Hello>")))
    assert modes.told({"effort": "low"}).startswith(
        'the drafter learned from chats with chat_template_kwargs {"effort": "high"}, and a request asks for '
        '{"effort": "low"}: '
    )


def test_without_a_template_nothing_is_told():
    for none in (None, tokenizer("{{ raise_exception('no') }}"), Tokenizer(tokenizer(SWITCH)._backend)):
        modes = ChatModes([OFF], none)
        assert not modes.unlike(ON) and not modes.opens_unlike([1, 2])


def test_many_modes_are_not_remembered_for_good():
    modes = ChatModes([OFF], tokenizer(SWITCH))
    assert not any(modes.unlike({**OFF, "number": i}) for i in range(600)) and len(modes._known) <= 256


def test_what_training_says_is_read(tmp_path: Path):
    assert chat_modes(tmp_path) == []
    for said, read in ((OFF, [OFF]), ([OFF, {}], [OFF, {}])):
        (tmp_path / "training.json").write_text(json.dumps({"kind": "eagle3", "chat_template_kwargs": said}))
        assert chat_modes(tmp_path) == read
    for wrong in ("off", [1]):
        (tmp_path / "training.json").write_text(json.dumps({"chat_template_kwargs": wrong}))
        with pytest.raises(ValueError, match="training.json: chat_template_kwargs must be an object or a list"):
            chat_modes(tmp_path)


def test_arguments_of_a_command_line_are_an_object():
    assert parse('{"enable_thinking": false}') == OFF
    for wrong in ("false", "{", "[1]"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a JSON object"):
            parse(wrong)


def test_an_llm_says_it_once(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    letters = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}ab{% endif %}"
    monkeypatch.setattr(tiny_llm.tokenizer, "_chat", ChatTemplate(letters))
    monkeypatch.setattr(tiny_llm, "_chats", ChatModes([OFF], tiny_llm.tokenizer))
    say = lambda arguments: tiny_llm.chat(
        [{"role": "user", "content": "abc"}], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False,
        chat_template_kwargs=arguments,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "jaxspec.llm"):
        say(OFF)
        assert not caplog.records
        say(None)
        say(ON)
    assert [record.getMessage() for record in caplog.records] == [tiny_llm._chats.told({})]


def test_an_engine_knows_what_its_drafter_learned(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From the directory that is loaded to what the server's front is told."""
    from jaxspec import assemble

    (tmp_path / "draft").symlink_to(tiny_directory.parent / "draft")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (tiny_directory.parent / "draft").iterdir():
        (copy / file.name).symlink_to(file)
    (copy / "training.json").write_text(json.dumps({"chat_template_kwargs": OFF}))
    found: list[Any] = []
    built = types.SimpleNamespace()
    monkeypatch.setattr(assemble, "assemble", lambda *args, chats, **options: found.append(chats) or built)
    for drafter, chats in ((tmp_path / "draft", []), (copy, [OFF]), ("ngram", ())):
        assert assemble.build_engine(tiny_directory, drafter, {"depth": 2}, progress=False) is built
        assert found.pop() == chats
