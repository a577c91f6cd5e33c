"""`--chat`: turns from standard input, the conversation that is kept, what is said of each answer. No engine."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jaxspec import chat
from jaxspec.chat import Chat, StatusLine
from jaxspec.events import Delta, Finished
from jaxspec.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SamplingParams


class Words:
    """A token a word, and a template that refuses rude turns."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if "rude" in messages[-1]["content"]:
            raise ValueError("the chat template failed on these messages: manners")
        return " ".join(f"{message['role']}: {message['content']}" for message in messages)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[str]:
        assert not add_special_tokens  # templates write their own
        return text.split()


class Parrot:
    """Says how many words it was told; drafts were accepted three times out of four."""

    def __init__(self) -> None:
        self.tokenizer, self.shared = Words(), self
        self.asked: list[tuple[str, SamplingParams]] = []
        self.metrics = RequestMetrics(rounds=2, drafted=8, accepted=6)

    def call(self, function: Any) -> Any:
        stats = SimpleNamespace(active_tier="chain-4", executables=20, executables_ready=12)
        return function(SimpleNamespace(metrics=lambda request_id: self.metrics, stats=stats))

    def stream(self, tokens: list[str], params: SamplingParams, grammar: Any) -> Iterator[tuple[int, Any]]:
        self.asked.append((" ".join(tokens), params))
        text = f"heard {len(tokens)}"
        for piece in text.split(" "):
            yield 0, Delta("r", 0, [1], f"{piece} " if piece == "heard" else piece)
        output = CompletionOutput(0, [1] * 8, text, FinishReason.STOP)
        yield 0, Finished("r", 0, FinishReason.STOP, RequestOutput("r", None, [], [output], self.metrics))


def talk(
    monkeypatch: pytest.MonkeyPatch, lines: str, context: int = 64, quiet: bool = False
) -> tuple[int, Parrot, Chat]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    llm: Any = Parrot()
    conversation = Chat(llm, SamplingParams(max_tokens=50), context, quiet=quiet)
    return conversation.run(), llm, conversation


def test_the_conversation_is_kept_until_it_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, llm, conversation = talk(monkeypatch, "hello there\n\n  again \n/reset\nanew\n/exit\nnever\n")
    assert status == 0
    assert [text for text, _ in llm.asked] == [
        "user: hello there",
        "user: hello there assistant: heard 3 user: again",
        "user: anew",
    ]
    out, error = capsys.readouterr()
    assert out == "heard 3\nheard 8\nheard 2\n"
    assert conversation.messages == [
        {"role": "user", "content": "anew"}, {"role": "assistant", "content": "heard 2"},
    ]  # fmt: skip
    lines = error.splitlines()
    assert len(lines) == 3 and "\x1b" not in error
    assert lines[0].startswith("8 tokens, ") and lines[0].endswith(
        " tokens/s, 4.00 tokens a round | compiling: 12 of 20 executables"
    )


def test_quiet_prints_answers_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert talk(monkeypatch, "hello", quiet=True)[0] == 0
    assert capsys.readouterr() == ("heard 2\n", "")


def test_what_looks_like_a_command_is_not_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """As llama.cpp and Ollama name theirs; a path is a text."""
    status, llm, _ = talk(monkeypatch, "/quit\n/?\n/usr/bin/env\n/exit\n", quiet=True)
    assert status == 1 and [text for text, _ in llm.asked] == ["user: /usr/bin/env"]
    error = capsys.readouterr().err.splitlines()
    assert error[0] == "error: there is no command /quit: /reset forgets the conversation, /exit or Ctrl-D leaves"
    assert len(error) == 2 and "no command /?" in error[1]


def test_a_full_context_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    status, llm, conversation = talk(monkeypatch, "a b c\nd e f g h i\n/reset\nx\n", context=10)
    assert status == 1
    assert [params.max_tokens for _, params in llm.asked] == [50, 50]
    assert "error: the conversation holds 14 tokens and the context 10; /reset forgets it" in capsys.readouterr().err
    assert [message["content"] for message in conversation.messages] == ["x", "heard 2"]


def test_a_refused_turn_is_forgotten(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    status, llm, conversation = talk(monkeypatch, "rude\nkind\n")
    assert status == 1 and [text for text, _ in llm.asked] == ["user: kind"]
    assert len(conversation.messages) == 2
    assert "error: the chat template failed on these messages: manners" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 7


def test_the_status_line_says_tier_and_acceptance_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(chat.os, "get_terminal_size", lambda number: (100, 24))
    talk(monkeypatch, "hello\n")
    said = screen.getvalue()
    assert "tier chain-4 | 75% of drafts accepted, 4.00 tokens a round | compiling: 12 of 20 executables" in said
    assert "\x1b[1;23r" in said and "\x1b[24;1H" in said  # the last line does not scroll
    assert said.rstrip("\n").endswith("\x1b[24;1H\x1b[K\x1b8") and "\x1b[r" in said  # given back
    assert "\x1b[2m8 tokens, " in said


def test_lines_are_cut_to_the_terminal_and_follow_its_size(monkeypatch: pytest.MonkeyPatch):
    sizes = iter([(10, 24), (10, 24), (10, 30)])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(chat.os, "get_terminal_size", lambda number: next(sizes))
    screen = Terminal()
    line = StatusLine(screen)
    for text in ("abcdefghijkl", "m", "n"):
        line.show(text)
    assert "abcdefghi\x1b" in screen.getvalue() and screen.getvalue().count("r\x1b8") == 2
    monkeypatch.setenv("TERM", "dumb")
    assert not StatusLine(Terminal()).shown


def test_a_terminal_is_asked_until_its_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    lines = iter(["one", "  ", "two"])

    def ask(prompt: str) -> str:
        assert prompt == "> "
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    assert list(chat.turns()) == ["one", "two"]
