"""Files of JSON lines: which shapes a row may have, and what is wrong with one, by file and line.

A row of a .jsonl (or .jsonl.gz) file is one of these; where it is several, the first of this list counts:

    {"prompt_token_ids": [1, 2], "output_token_ids": [3, 4]}     what `regenerate` and the engine's traffic log write
    {"messages": [{"role": "user", "content": "Hi"}, ...]}       OpenAI's shape, rendered by the checkpoint's template
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}   ShareGPT's
    {"prompt": "Once", "completion": " upon a time"}             or "response"
    {"text": "Once upon a time"}

Each may carry "dataset", a label for reports (default: the file's stem), and chats "tools" for their template; further
keys are left alone.

Owns these shapes. Must not know tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
#: ShareGPT's names beside those.
_ALIASES = {**{role: role for role in ROLES}, "human": "user", "gpt": "assistant"}
_SHAPES = ("prompt_token_ids", "messages", "conversations", "prompt", "text")


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of a file. source: file:line."""

    row: dict[str, Any]
    source: str
    dataset: str


def read_rows(paths: Iterable[str | Path]) -> Iterator[Line]:
    """The JSON objects of the files, in order; blank lines are passed over.

    Raises:
      ValueError: no file, or one that is absent, empty, not UTF-8, broken JSON, cut off, or holds other than objects.
    """
    paths = [Path(path) for path in paths]
    if not paths:
        raise ValueError("no data files were given")
    for path in paths:
        stem = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
        found = False
        for number, raw in _raw_lines(path):
            if raw.strip():
                found = True
                with named(f"{path}:{number}"):
                    row = _parse(raw)
                    dataset = row.get("dataset", stem)
                    if not isinstance(dataset, str):
                        raise ValueError(f"dataset must be a string, got {dataset!r}")
                yield Line(row, f"{path}:{number}", dataset)
        if not found:
            raise ValueError(f"{path}:1: the file is empty; at least one row is needed")


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rb") as f:
            for number, raw in enumerate(f, 1):
                yield number, raw
    except FileNotFoundError as e:
        raise ValueError(f"{path}: cannot be read: {e.strerror}") from e
    except (OSError, EOFError, zlib.error) as e:
        raise ValueError(f"{path}:{number + 1}: cannot be read: {e}") from e


def _parse(raw: bytes) -> dict[str, Any]:
    cut = "" if raw.endswith(b"\n") else "; this last line has no end, so the file may have been cut off"
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise ValueError(f"not valid UTF-8: {e}{cut}") from e
    except (json.JSONDecodeError, RecursionError) as e:
        raise ValueError(f"broken JSON: {e}{cut}") from e
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
    return row


@contextlib.contextmanager
def named(source: str) -> Iterator[None]:
    """Puts file:line before the message of a ValueError."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"{source}: {e}") from e


def shape_of(row: dict[str, Any]) -> str:
    """The key that tells a row's shape.

    Raises:
      ValueError: none is there; names those found.
    """
    for shape in _SHAPES:
        if shape in row:
            return shape
    raise ValueError(
        "a row needs 'text', 'prompt' with 'completion' or 'response', 'messages', 'conversations', or "
        f"'prompt_token_ids' with 'output_token_ids'; found the keys {sorted(row)}"
    )


def string(row: dict[str, Any], key: str) -> str:
    """A text of a row.

    Raises:
      ValueError: not a string, or nothing but white space.
    """
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string, got {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{key} is empty, got {value!r}")
    return value


def completion_key(row: dict[str, Any]) -> str:
    """Which key holds what follows the prompt.

    Raises:
      ValueError: none or both.
    """
    found = [key for key in ("completion", "response") if key in row]
    if len(found) != 1:
        raise ValueError(
            f"a prompt needs 'completion' or 'response', found {found}; for prompts alone, let the target answer them "
            "first (--regenerate)"
        )
    return found[0]


def messages_of(items: Any, key: str) -> list[dict[str, Any]]:
    """A conversation of either shape in OpenAI's; keys that only templates know stay in the messages.

    Raises:
      ValueError: no message, an unknown role, or a content that is empty or no text; names the message.
    """
    if not isinstance(items, list) or not items:
        raise ValueError(f"{key} must be a list of at least one message, got {items!r}")
    messages = []
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise ValueError(f"message {number} must be an object, got {type(item).__name__}")
        role_key, content_key = ("role", "content") if "role" in item else ("from", "value")
        given = item.get(role_key)
        role = _ALIASES.get(given) if isinstance(given, str) else None
        if role is None:
            raise ValueError(f"message {number}: {role_key} must be one of {sorted(_ALIASES)}, got {given!r}")
        content = _content(item.get(content_key), f"message {number} ({role}): {content_key}", item.get("tool_calls"))
        rest = {k: v for k, v in item.items() if k not in (role_key, content_key)}
        messages.append({"role": role, "content": content, **rest})
    return messages


def _content(value: Any, name: str, tool_calls: Any) -> str | None:
    if value is None and tool_calls:
        return None
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{name} may hold parts {{'type': 'text', 'text': ...}} only, got {part!r}")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string or a list of text parts, got {type(value).__name__}")
    if not value.strip() and not tool_calls:
        raise ValueError(f"{name} is empty, got {value!r}")
    return value


def read_texts(paths: Iterable[str | Path]) -> Iterator[str]:
    """Every string that a tokenizer would meet in the files, untemplated: what to train one on.

    Raises:
      ValueError: as read_examples; a row of token ids.
    """
    for line in read_rows(paths):
        with named(line.source):
            shape = shape_of(line.row)
            if shape == "prompt_token_ids":
                raise ValueError("token ids cannot train a tokenizer; a text is needed")
            if shape in ("messages", "conversations"):
                yield from (m["content"] for m in messages_of(line.row[shape], shape) if isinstance(m["content"], str))
            elif shape == "prompt":
                yield string(line.row, "prompt") + string(line.row, completion_key(line.row))
            else:
                yield string(line.row, "text")
