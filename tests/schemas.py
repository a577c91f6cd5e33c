"""JSON schemas for grammars: one of a record, and one with a dead end."""

from __future__ import annotations

from typing import Any


def person(letters: int) -> dict[str, Any]:
    """A name of at most so many letters, an age, and tags."""
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": letters},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }


#: Fails where "b" has been opened: its schema is itself.
DEAD_END = {
    "$defs": {"x": {"$ref": "#/$defs/x"}},
    "type": "object",
    "properties": {"a": {"enum": ["n", "m"]}, "b": {"$ref": "#/$defs/x"}},
    "required": ["a"],
    "additionalProperties": False,
}
