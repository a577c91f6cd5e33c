"""Chat templates: conversations become texts as the checkpoint's own jinja2 template writes them.

Must not know tokens.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Arguments of transformers' apply_chat_template that are no variables of a template.
_NOT_VARIABLES = ("tokenize", "return_dict", "return_tensors", "continue_final_message", "chat_template")

#: What templates end with: their own refusals, what Python says of their code, and what it does not take as code.
_FAILURES = (
    jinja2.TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError,
)  # fmt: skip


def find_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The default template of chat_template.jinja or tokenizer_config.json's settings; None where there is none."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None


class ChatTemplate:
    """A template, compiled at its first use, which two threads may do at once; any thread may render it."""

    def __init__(self, source: str):
        self._source = source

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self._source)

    def broken(self) -> str | None:
        """What is wrong with the template's syntax, or None."""
        try:
            _ = self._template
        except jinja2.TemplateSyntaxError as e:
            return f"as the chat template cannot be read: line {e.lineno}: {e.message}"
        except (jinja2.TemplateError, SyntaxError, RecursionError) as e:  # what it would be as Python is none
            return f"as the chat template cannot be read: {e}"
        return None

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The conversation as a text, made in jinja2's sandbox.

        Raises:
          ValueError: malformed messages, or a template that fails or refuses.
        """
        if isinstance(messages, str | Mapping) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {messages!r}")
        if wanted := [name for name in _NOT_VARIABLES if variables.get(name)]:
            raise ValueError(f"chat templates are rendered as text, and {wanted} cannot be had")
        known = {name: value for name, value in variables.items() if name not in _NOT_VARIABLES}
        try:
            return self._template.render({**known, "messages": [_message(m) for m in messages]})
        except _FAILURES as e:
            raise ValueError(f"the chat template failed on these messages: {e}") from e


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """As templates expect it.

    Raises:
      ValueError: a part of its content that is no text.
    """
    known = dict(message)
    if isinstance(content := known.get("content"), list | tuple):
        known["content"] = "\n".join(map(_text, content))
    if isinstance(calls := known.get("tool_calls"), list | tuple):
        known["tool_calls"] = [_tool_call(call) for call in calls]
    return known


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ValueError(
            f"a message's content must be a text or a list of text parts (images and the like are not served), got a "
            f"part of type {kind!r}"
        )
    return text


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as e:
        raise ValueError(f"a tool call's arguments must be JSON, got {function['arguments']!r}") from e
    return {**call, "function": {**function, "arguments": arguments}}


class _Generation(Extension):
    """`{% generation %}`, with which templates mark for training what an assistant says: its text as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What the templates of published checkpoints expect to find."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    env.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
