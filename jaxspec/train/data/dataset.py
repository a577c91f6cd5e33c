"""What trainees learn from: rows of JSONL as token ids with the tokens to be learned marked, packed into equal rows.

Owns which tokens a trainee learns, the packing and the order of rows. Must not know files (jsonl.py has the shapes that
a row may take), models or losses.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.data.batch import PackedRows
from jaxspec.train.data.jsonl import ROLES, Line, completion_key, messages_of, named, read_rows, shape_of, string

#: Ends the labels of texts that penalties, a bias or filters shaped.
FILTERED = " (filtered)"
#: A text needs a token to start from, and a draft head predicts the one after the next.
MIN_TOKENS = 3


@dataclasses.dataclass(frozen=True)
class Example:
    """One text.

    Attributes:
      tokens: ids.
      learn: which of them are to be learned.
      dataset: label.
      prompt_length: tokens before the first one that is learned.
      temperature: what the row says that its output was sampled at; 0 where it says nothing.
      origin: the same for all examples of one row: they are held out together.
      chat: arguments that the chat template had; None: it is no chat, or nothing says so.
      source: of the first token: where in a ring the target's states of the tokens begin; None: they are computed.
    """

    tokens: list[int]
    learn: list[bool]
    dataset: str
    prompt_length: int
    temperature: float = 0.0
    origin: str = dataclasses.field(default="", compare=False)
    source: int | None = None
    chat: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)

    @property
    def temperature_band(self) -> float:
        """The temperature to one decimal; what is not greedy never rounds to it."""
        return max(0.1, round(self.temperature, 1)) if self.temperature else 0.0


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What the target is to answer.

    Attributes:
      tokens: ids, at least one.
      dataset: label.
      source: file:line.
      chat: see Example.
    """

    tokens: list[int]
    dataset: str
    source: str
    chat: Mapping[str, Any] | None = None


def read_examples(
    paths: Iterable[str | Path],
    tokenizer: Tokenizer | None,
    *,
    roles: Sequence[str] = ("assistant",),
    vocab_size: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Example]:
    """The texts of JSONL files, in order.

    Token rows learn their output, prompts with a completion the completion and the end of text after it, texts every
    token but the first. Chats learn the turns of `roles`, from where the template would let the model begin up to the
    end-of-text token that closes the turn. A template that rewrites earlier turns (most that strip thinking do) makes
    an example of each such turn, with the conversation before it as the model would see it.

    Args:
      tokenizer: the checkpoint's; None reads rows of token ids only.
      roles: whose turns of a chat are learned.
      vocab_size: token ids must lie below it; default: the tokenizer's.
      chat_template_kwargs: reach the template of every chat.

    Raises:
      ValueError: a file or a row that cannot be honoured; the message begins with file:line.
    """
    unknown = sorted(set(roles) - set(ROLES))
    if unknown or not roles:
        raise ValueError(f"roles must be some of {ROLES}, got {tuple(roles)}")
    reader = _Reader(tokenizer, _limit(tokenizer, vocab_size), chat_template_kwargs)
    examples: list[Example] = []
    for line in read_rows(paths):
        with named(line.source):
            origin = json.dumps(line.row, sort_keys=True)
            origin = hashlib.sha256(origin.encode("utf-8", errors="surrogatepass")).hexdigest()
            examples += [dataclasses.replace(e, origin=origin) for e in reader.examples(line, roles)]
    return examples


def read_prompts(
    paths: Iterable[str | Path],
    tokenizer: Tokenizer | None,
    *,
    prompt_tokens: tuple[int, int] = (16, 64),
    seed: int = 0,
    vocab_size: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """What of each row a model is to continue.

    Chats give everything before their final assistant turn, with the template's generation prompt; prompts and token
    rows their prompt; texts their first tokens, as many as the seed picks from prompt_tokens (both ends included).

    Raises:
      ValueError: as read_examples; prompt_tokens that are no range.
    """
    low, high = prompt_tokens
    if not 1 <= low <= high:
        raise ValueError(f"prompt_tokens must be a range MIN:MAX with 1 <= MIN <= MAX, got {low}:{high}")
    reader = _Reader(tokenizer, _limit(tokenizer, vocab_size), chat_template_kwargs)
    prompts = []
    for index, line in enumerate(read_rows(paths)):
        with named(line.source):
            count = int(np.random.default_rng((seed, index)).integers(low, high + 1))
            tokens = reader.prompt(line.row, count)
            prompts.append(Prompt(tokens, line.dataset, line.source, reader.chat(line.row)))
    return prompts


def chat_modes(examples: Iterable[Example]) -> list[dict[str, Any]]:
    """The template arguments of the chats among examples, each once, in the order of their first."""
    found: dict[str, dict[str, Any]] = {}
    for example in examples:
        if example.chat is not None:
            found.setdefault(json.dumps(example.chat, sort_keys=True), dict(example.chat))
    return list(found.values())


def _limit(tokenizer: Tokenizer | None, vocab_size: int | None) -> int:
    if vocab_size is not None:
        return vocab_size
    if tokenizer is None:
        raise ValueError("vocab_size is needed where there is no tokenizer, got None")
    return tokenizer.vocab_size


class _Reader:
    """Rows to tokens, by one tokenizer and for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, variables: Mapping[str, Any] | None = None):
        self._tokenizer, self._vocab_size, self._variables = tokenizer, vocab_size, dict(variables or {})

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("a row of text needs the checkpoint's tokenizer; without one rows are token ids")
        return self._tokenizer

    def examples(self, line: Line, roles: Collection[str]) -> list[Example]:
        row, shape = line.row, shape_of(line.row)
        if shape == "prompt_token_ids":
            prompt, output = self._ids(row, "prompt_token_ids"), self._ids(row, "output_token_ids")
            example = _example([*prompt, *output], [(len(prompt), len(prompt) + len(output))], line.dataset)
            # What filters shaped is not the tempered distribution that acceptance is simulated with: kept apart.
            label = f"{line.dataset}{FILTERED}" if row.get("filtered") else line.dataset
            temperature, chat = self._temperature(row), self.chat(row)
            return [dataclasses.replace(example, temperature=temperature, dataset=label, chat=chat)]
        if shape in ("messages", "conversations"):
            rendered = self._chat(messages_of(row[shape], shape), roles, row.get("tools"))
            turns = [self._turns(text, spans, line.dataset) for text, spans in rendered]
            return [dataclasses.replace(turn, chat=self.chat(row)) for turn in turns]
        if shape == "prompt":
            prompt, completion = string(row, "prompt"), string(row, completion_key(row))
            tokens, (start,) = self._encode(prompt + completion, [len(prompt)])
        else:
            tokens, start = self._encode(string(row, "text"), [])[0], 1
        ends = self.tokenizer.eos_token_ids
        if ends and tokens[-1] not in ends:
            tokens.append(ends[0])
        return [_example(self._checked(tokens), [(start, len(tokens))], line.dataset)]

    def prompt(self, row: dict[str, Any], count: int) -> list[int]:
        """The tokens to continue; of a text the first `count`."""
        shape = shape_of(row)
        if shape == "prompt_token_ids":
            return self._ids(row, shape)
        if shape in ("messages", "conversations"):
            messages = messages_of(row[shape], shape)
            before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            if not before:
                raise ValueError("nothing comes before the conversation's only message, an assistant's")
            text = self._render(before, True, row.get("tools"))
            return self._checked(self.tokenizer.encode(text, add_special_tokens=False))
        text = string(row, shape)
        tokens = self.tokenizer.encode(text)
        return self._checked(tokens if shape == "prompt" else tokens[:count])

    def chat(self, row: dict[str, Any]) -> Mapping[str, Any] | None:
        """The template arguments of a chat: the reader's own, or those that a row of token ids says it had."""
        if shape_of(row) in ("messages", "conversations"):
            return self._variables
        value = row.get("chat_template_kwargs")
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"chat_template_kwargs must be an object, got {value!r}")
        return value

    def _ids(self, row: dict[str, Any], key: str) -> list[int]:
        ids = row.get(key)
        if not isinstance(ids, list) or not ids:
            raise ValueError(f"{key} must be a list of at least one token id, got {ids!r}")
        for token in ids:
            if type(token) is not int:  # bool is an int
                raise ValueError(f"{key} must hold integers, got {token!r}")
        return self._checked(ids)

    @staticmethod
    def _temperature(row: dict[str, Any]) -> float:
        value = row.get("temperature")
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"temperature must be a finite number of at least 0, got {value!r}")
        return float(value)

    def _checked(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise ValueError("the tokenizer makes no token of this row")
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            wrong = next(t for t in tokens if not 0 <= t < self._vocab_size)
            raise ValueError(f"token ids must lie in the vocabulary [0, {self._vocab_size}), got {wrong}")
        return tokens

    def _encode(self, text: str, cuts: Sequence[int], special: bool = True) -> tuple[list[int], list[int]]:
        """Token ids of a text, and for each of its character positions `cuts` how many tokens lie before it."""
        encode = self.tokenizer.encode
        whole = encode(text, add_special_tokens=special)
        if not cuts:
            return whole, []
        edges = [0, *cuts, len(text)]
        pieces = [encode(text[a:b], add_special_tokens=special and i == 0) for i, (a, b) in enumerate(pairwise(edges))]
        if [t for piece in pieces for t in piece] == whole:
            return whole, [int(n) for n in np.cumsum([len(piece) for piece in pieces])[:-1]]
        # Tokens depend on what is before them, or one lies across a cut: it is not the prompt's.
        return whole, [_common(whole, encode(text[:cut], add_special_tokens=special)) for cut in cuts]

    def _render(self, messages: list[dict[str, Any]], generate: bool, tools: Any) -> str:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=generate, tools=tools, **self._variables
        )

    def _chat(
        self, messages: list[dict[str, Any]], roles: Collection[str], tools: Any
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Renderings, each with its turns to be learned as ranges of characters."""
        wanted = [i for i, message in enumerate(messages) if message["role"] in roles]
        if not wanted:
            found = sorted({message["role"] for message in messages})
            raise ValueError(f"no message of the roles to be learned {tuple(roles)}, found {found}")
        whole = self._render(messages, False, tools)
        spans: list[tuple[int, int]] = []
        apart: list[tuple[str, list[tuple[int, int]]]] = []
        for i in wanted:
            role = messages[i]["role"]
            asks = role == "assistant"
            head = self._render(messages[:i], asks, tools) if i or asks else ""
            turn = whole if i + 1 == len(messages) else self._render(messages[: i + 1], False, tools)
            if not turn.startswith(head):
                same = _common(turn, head)
                raise ValueError(
                    f"message {i + 1} ({role}): the chat template does not continue what it wrote before that turn, so "
                    f"what the model wrote cannot be told apart: after {head[max(0, same - 20) : same]!r} came "
                    f"{head[same : same + 20]!r}, with the turn it is {turn[same : same + 20]!r}"
                )
            if whole.startswith(turn):
                spans.append((len(head), len(turn)))
            else:
                apart.append((turn, [(len(head), len(turn))]))
        return [*apart, *([(whole, spans)] if spans else [])]

    def _turns(self, text: str, spans: Sequence[tuple[int, int]], dataset: str) -> Example:
        tokens, cuts = self._encode(text, [edge for span in spans for edge in span], special=False)
        ends = set(self.tokenizer.eos_token_ids)
        ranges = []
        for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
            # What a template writes behind the end of a turn, nobody has to predict.
            last = next((i for i in range(stop - 1, start - 1, -1) if tokens[i] in ends), stop - 1)
            ranges.append((start, last + 1))
        return _example(self._checked(tokens), ranges, dataset)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _example(tokens: list[int], ranges: Sequence[tuple[int, int]], dataset: str) -> Example:
    learn = [False] * len(tokens)
    for start, stop in ranges:
        learn[start:stop] = [True] * (stop - start)
    learn[0] = False
    first = next((i for i, wanted in enumerate(learn) if wanted), len(tokens))
    return Example(tokens, learn, dataset, first)


def pack(examples: Sequence[Example], length: int, *, seed: int = 0, report: bool = True) -> PackedRows:
    """Texts side by side in rows of `length` tokens, longest first into the fullest row that has room.

    A longer text is cut into consecutive pieces, each a segment of its own that knows nothing of the one before; a
    piece begins with the last token of the one before, not to be learned again, so every learned token is learned
    once. Segments count from 1 in each row, positions restart, padding (segment 0) stands at the end. Texts below
    MIN_TOKENS tokens are left out, and so are pieces without a token to learn.

    Args:
      seed: decides which of equally long pieces go together and the order of the rows.
      report: print what was packed and what was left out.

    Raises:
      ValueError: a length below 4, or nothing to learn in any text.
    """
    if length <= MIN_TOKENS:
        raise ValueError(f"length must be more than {MIN_TOKENS} tokens a row, got {length}")
    pieces: list[tuple[np.ndarray, np.ndarray, int]] = []
    short = idle = 0
    for example in examples:
        if len(example.tokens) < MIN_TOKENS:
            short += 1
            continue
        for piece in _cut(example, length):
            if piece[1].any():
                pieces.append(piece)
            else:
                idle += 1
    if not pieces:
        raise ValueError(f"nothing to learn: of {len(examples)} texts, {short} are shorter than {MIN_TOKENS} tokens")
    rng = np.random.default_rng(seed)
    sizes = np.asarray([len(tokens) for tokens, *_ in pieces])
    order = rng.permutation(len(pieces))
    bins = _best_fit(sizes, order[np.argsort(-sizes[order], kind="stable")], length)
    shape = (len(bins), length)
    sources = np.full(shape, -1, np.int64) if any(source >= 0 for *_, source in pieces) else None
    rows = PackedRows(
        np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool), sources
    )
    for row, number in enumerate(rng.permutation(len(bins))):
        start = 0
        for segment, index in enumerate(bins[number], 1):
            tokens, learn, source = pieces[index]
            place = slice(start, start + len(tokens))
            rows.tokens[row, place], rows.learn[row, place] = tokens, learn
            rows.segments[row, place], rows.positions[row, place] = segment, np.arange(len(tokens))
            if sources is not None and source >= 0:
                sources[row, place] = source + np.arange(len(tokens))
            start = place.stop
    if report:
        print(
            f"packed {len(examples) - short:,} texts as {len(pieces):,} pieces into {len(rows):,} rows of {length} "
            f"tokens: {sizes.sum() / rows.tokens.size:.1%} used, {int(rows.learn.sum()):,} tokens to learn; left out "
            f"{short:,} texts below {MIN_TOKENS} tokens and {idle:,} pieces with nothing to learn",
            flush=True,
        )
    return rows


def _cut(example: Example, length: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(tokens, learn, source or -1) of an example's pieces of at least MIN_TOKENS and at most `length` tokens."""
    tokens, learn = np.asarray(example.tokens, np.int32), np.asarray(example.learn, bool)
    start, known = 0, 1  # the first token has nothing to be predicted from
    while True:
        stop = min(start + length, len(tokens))
        wanted = learn[start:stop].copy()
        wanted[: known - start] = False
        yield tokens[start:stop], wanted, -1 if example.source is None else example.source + start
        if stop == len(tokens):
            return
        start, known = min(stop - 1, len(tokens) - MIN_TOKENS), stop


def _best_fit(sizes: np.ndarray, order: np.ndarray, length: int) -> list[list[int]]:
    """Which pieces share a row: each goes, in order, where the least room is left over."""
    bins: list[list[int]] = []
    rooms: list[int] = []  # distinct rooms of rows that are open, sorted
    at_room: dict[int, list[int]] = {}
    for index in order.tolist():
        size = int(sizes[index])
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            room, number = length, len(bins)
            bins.append([])
        else:
            room = rooms[place]
            number = at_room[room].pop()
            if not at_room[room]:
                del at_room[room], rooms[place]
        bins[number].append(index)
        left = room - size
        if left >= MIN_TOKENS:
            if left not in at_room:
                at_room[left] = []
                bisect.insort(rooms, left)
            at_room[left].append(number)
    return bins


class RowOrder:
    """Which rows a step takes: every row once an epoch, each epoch in another seeded order.

    Depends on the step alone, so a resumed run sees the same data. A batch may lie across two epochs.

    Raises:
      ValueError: no rows or an empty batch.
    """

    def __init__(self, count: int, batch: int, seed: int):
        if count < 1 or batch < 1:
            raise ValueError(f"at least one row and a batch of one are needed, got {count} rows and a batch of {batch}")
        self._count, self._batch, self._seed = count, batch, seed
        self._epochs: dict[int, np.ndarray] = {}

    def __call__(self, step: int) -> np.ndarray:
        """Row numbers of a step, int64 [batch]."""
        wanted = np.arange(step * self._batch, (step + 1) * self._batch)
        epochs, places = np.divmod(wanted, self._count)
        orders = {int(e): self._order(int(e)) for e in np.unique(epochs)}
        self._epochs = orders
        return np.asarray([orders[int(e)][place] for e, place in zip(epochs, places, strict=True)])

    def _order(self, epoch: int) -> np.ndarray:
        known = self._epochs.get(epoch)
        return np.random.default_rng((self._seed, epoch)).permutation(self._count) if known is None else known
