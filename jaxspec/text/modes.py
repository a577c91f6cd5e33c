"""Chat modes: what arguments make of a chat template (thinking or not), and whether a drafter learned from such chats.

Must not know drafters or engines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.text.tokenizer import Tokenizer

#: A conversation that shows what a template does with its arguments.
_PROBE = [{"role": "user", "content": "Hello"}]
#: Arguments that are what a conversation is about, not how it is written.
_CONTENT = ("tools", "documents", "add_generation_prompt")
#: Arguments by which templates in use say whether the model thinks.
_SWITCHES = ("enable_thinking", "thinking")
#: Modes of requests that are remembered.
_MOST = 256


def parse(text: str) -> dict[str, Any]:
    """Template arguments of a command line: an object in JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object, such as {{"enable_thinking": false}}, got {text!r}')
    return value


class ChatModes:
    """The modes of the chats that a drafter learned from.

    Two lists of arguments are the same mode where the template writes the same with them. Any thread may ask.

    Args:
      learned: arguments of the chat template, of each mode. tokenizer: with the template; None, or without one: nothing
        can be told.
    """

    def __init__(self, learned: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None):
        self.learned = [dict(arguments) for arguments in learned]
        self._tokenizer = tokenizer
        self._written = {self._write(arguments) for arguments in self.learned}
        if None in self._written:  # a template that does not take its own training's arguments says nothing
            self._written = set()
        self._known: dict[str, bool] = {}
        self._own, self._others = self._openings()

    def unlike(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a chat with these template arguments is in none of the modes."""
        if not self._written:
            return False
        arguments = {name: value for name, value in arguments.items() if name not in _CONTENT}
        key = json.dumps(arguments, sort_keys=True, default=repr)
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            written = self._write(arguments)
            self._known[key] = written is not None and written not in self._written
        return self._known[key]

    def opens_unlike(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt of token ids ends as a template opens an answer in a mode that is none of these."""
        ends = lambda opening: len(opening) <= len(prompt) and list(prompt[-len(opening) :]) == opening
        own = max((len(opening) for opening in self._own if ends(opening)), default=0)
        return any(len(opening) > own for opening in self._others if ends(opening))

    def told(self, arguments: Mapping[str, Any] | None = None) -> str:
        """What is said of a request in another mode."""
        asked = "opens its answer otherwise" if arguments is None else f"asks for {json.dumps(dict(arguments))}"
        learned = " and ".join(json.dumps(known) for known in self.learned)
        return (
            f"the drafter learned from chats with chat_template_kwargs {learned}, and a request {asked}: its text is "
            "the same, but fewer drafts may be accepted"
        )

    def _write(self, arguments: Mapping[str, Any], **more: Any) -> str | None:
        if self._tokenizer is None:
            return None
        try:
            return self._tokenizer.apply_chat_template(_PROBE, **{**arguments, **more})
        except (ValueError, TypeError):
            return None

    def _openings(self) -> tuple[list[list[int]], list[list[int]]]:
        """How answers begin in the modes, and in those of the usual switches that are none of them: token ids."""
        switched = [{}, *({name: on} for name in _SWITCHES for on in (False, True))]
        own = [self._opening(arguments) for arguments in self.learned] if self._written else []
        others = [self._opening(arguments) for arguments in switched] if self._written else []
        return [x for x in own if x], [x for x in others if x and x not in own]

    def _opening(self, arguments: Mapping[str, Any]) -> list[int]:
        whole, closed = self._write(arguments), self._write(arguments, add_generation_prompt=False)
        if self._tokenizer is None or whole is None or closed is None or not whole.startswith(closed):
            return []
        return self._tokenizer.encode(whole[len(closed) :], add_special_tokens=False)
