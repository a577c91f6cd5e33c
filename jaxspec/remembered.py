"""Files whose texts a suffix drafter's corpus holds from the start. Must not know engines or drafters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

#: Tokens of a prompt that stand before its answer, for the matches of the answer's first tokens.
PROMPT_TOKENS = 3


def answer(prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """What is remembered of a request."""
    return [*prompt[-PROMPT_TOKENS:], *output]


def texts(
    paths: Sequence[str | Path], encode: Callable[[str], Sequence[int]] | None, vocab_size: int
) -> Iterator[Sequence[int]]:
    """Token ids of every text: the answers of a traffic log (*.jsonl), the whole of any other file.

    Args:
      encode: None where there is no tokenizer: then traffic logs alone can be read.

    Raises:
      ValueError: a file that cannot be read, that needs a tokenizer, or that holds other tokens; it is named.
    """
    for path in map(Path, paths):
        content = _read(path)
        if path.suffix == ".jsonl":
            found = [_logged(path, number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
        elif encode is None:
            raise ValueError(f"suffix_corpus_files: {path} is text, which needs a tokenizer; a traffic log does not")
        else:
            found = [encode(content)]
        for tokens in found:
            bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if bad is not None:
                raise ValueError(f"suffix_corpus_files: {path} holds token {bad}; the vocabulary has {vocab_size}")
            yield tokens


def check_readable(paths: Sequence[str | Path]) -> None:
    """Whether files are there and may be read.

    Raises:
      ValueError: one is not; it is named.
    """
    for path in map(Path, paths):
        _read(path, 0)


def _read(path: Path, size: int = -1) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(size)
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"suffix_corpus_files: {path} cannot be read: {e}") from e


def _logged(path: Path, number: int, line: str) -> list[int]:
    try:
        row = json.loads(line)
        prompt, output = row["prompt_token_ids"], row["output_token_ids"]
        if not all(isinstance(token, int) for token in [*prompt, *output]):
            raise TypeError("token ids are integers")
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"suffix_corpus_files: {path}, line {number} is none of a traffic log: {e!r}") from e
    return answer(prompt, output)
