"""Between strings and token ids: encoding, chat templates, and text that streams.

Owns what a checkpoint directory says about its text, and the two streaming pieces:
IncrementalDetokenizer (never emits half a character) and StopChecker (never emits part of a
stop string). Must not know models, requests or the engine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend

from jaxspec.checkpointing.tensors import read_json
from jaxspec.text.chat_template import ChatTemplate, find_template

#: The file that says how a checkpoint's text becomes token ids, and the one that is read where it is absent.
FILE, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
_REPLACEMENT = "\ufffd"
#: Prompt tokens that give the first generated token its context (spaces depend on the neighbour).
_CONTEXT = 6
#: Tokens that may wait for a character's last byte; garbage bytes are let through after that.
_MAX_PENDING = 16
#: How decoders of SentencePiece's vocabularies begin, in tokenizer.json's words, and what some have behind it.
_PIECES = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
_NO_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
      vocab_size: number of tokens, added ones included (a model's output may be wider).
      bos_token_id: prepended by `encode` if `adds_bos`; None if the checkpoint has none.
      eos_token_ids: tokens that end a text, by tokenizer_config.json, generation_config.json
        and config.json together.
      adds_bos: whether `encode` puts BOS in front.
      drops_first_space: whether a text that begins with a space is decoded without it.
      longest_token: characters of the longest token, so that a text has at least len(text) / longest_token tokens
        (but for what a normalizer or a special token swallows).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        add_bos_token: bool = False,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        # Of these tokens the text is that of their bytes, one after the other; what other decoders make of a token may
        # depend on its neighbours.
        self._byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._has_pieces, self.drops_first_space = _decodes_pieces(backend)
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[bool, dict[int, str]] = {False: {}, True: {}}
        self._chat = None if chat_template is None else ChatTemplate(chat_template)
        self._special_tokens = dict(special_tokens or {})
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        in_template = bos_token_id is not None and bos_token_id in backend.encode("").ids
        self._prepend_bos = add_bos_token and bos_token_id is not None and not in_template
        self.adds_bos = in_template or self._prepend_bos

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, bos={self.bos_token_id}, eos={list(self.eos_token_ids)})"

    @staticmethod
    def is_in(directory: str | os.PathLike[str]) -> bool:
        """Whether a directory holds a tokenizer that `from_directory` would read."""
        return any((Path(directory) / name).is_file() for name in (FILE, SENTENCEPIECE))

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> Tokenizer:
        """Reads tokenizer.json, and what tokenizer_config.json, config.json and chat_template.jinja add to it.

        Where there is none, SentencePiece's tokenizer.model is read, with the tokens that tokenizer_config.json or
        added_tokens.json add to it, and with BOS in front unless tokenizer_config.json says otherwise.

        Raises:
          ValueError: both are absent, or the one is broken, or another file is not JSON; names the file.
        """
        directory = Path(directory)
        settings, config, generation = (
            read_json(directory / name) if (directory / name).exists() else {}
            for name in ("tokenizer_config.json", "config.json", "generation_config.json")
        )
        if not (directory / FILE).is_file() and (directory / SENTENCEPIECE).is_file():
            backend, implied = _read_sentencepiece(directory, settings)
            settings = {**implied, **settings}
        else:
            backend = _read_backend(directory / FILE)
        special = {k: t for k in ("bos_token", "eos_token", "pad_token", "unk_token") if (t := _token(settings.get(k)))}
        bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else config.get("bos_token_id")
        eos = [backend.token_to_id(special["eos_token"])] if "eos_token" in special else []
        for source in (generation, config):
            value = source.get("eos_token_id")
            eos += value if isinstance(value, list) else [value]
        return cls(
            backend,
            bos_token_id=bos[0] if isinstance(bos, list) else bos,
            eos_token_ids=[i for i in eos if i is not None],
            add_bos_token=bool(settings.get("add_bos_token", False)),
            chat_template=find_template(directory, settings),
            special_tokens=special,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text, BOS in front if the checkpoint says so. Other threads run meanwhile.

        Args:
          max_tokens: a text that must have more tokens than these is refused, and costs nothing; one that may have
            fewer is not.

        Raises:
          ValueError: not a string, or one that is not valid Unicode, or too long.
        """
        if not isinstance(text, str):
            raise ValueError(f"a prompt's text must be a string, got {type(text).__name__}")
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            raise ValueError(
                f"a prompt's text must be at most {max_tokens * self.longest_token} characters ({max_tokens} tokens), "
                f"got {len(text)}"
            )
        try:
            # `encode` would hold the GIL all the while; the batch releases it, and this one counts no offsets.
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError) as e:
            raise ValueError(f"a prompt's text must be valid Unicode: {e}") from e
        if add_special_tokens and self._prepend_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids beyond the vocabulary (a model's padding rows) have none.

        Raises:
          ValueError: a negative id.
        """
        text = self.join([i for i in ids if self.has_text(i)], skip_special_tokens)
        return text.removeprefix(" ") if self.drops_first_space else text

    def join(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """What ids of the vocabulary say within a text: as `decode`, but a first space stays if they alone drop it."""
        if not self._has_pieces:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        skipped = self._special_ids if skip_special_tokens else ()
        raw = b"".join(self._bytes_of(i) for i in ids if i not in skipped)
        # A byte that belongs to no character is shown, and the characters beside it stay.
        return re.sub("[\udc80-\udcff]", _REPLACEMENT, raw.decode("utf-8", "surrogateescape"))

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._backend.id_to_token(token_id) or ""
            byte = _BYTE.fullmatch(piece)
            known = bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()
            self._bytes[token_id] = known
        return known

    def piece(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """The text that a token adds to any whole characters; None where only `decode` can tell. Costs a look-up."""
        pieces = self._pieces[skip_special_tokens]
        known = pieces.get(token_id)
        if known is None and (self._byte_level or self._has_pieces) and self.has_text(token_id):
            text = self.join((token_id,), skip_special_tokens)
            if _REPLACEMENT not in text:
                known = pieces[token_id] = text
        return known

    def known_pieces(self, *, skip_special_tokens: bool = True) -> Mapping[int, str]:
        """What `piece` has found so far, by token; grows with it."""
        return self._pieces[skip_special_tokens]

    def to_json(self) -> str:
        """The tokenizer as tokenizer.json would hold it."""
        return self._backend.to_str()

    def has_text(self, token_id: int) -> bool:
        """Whether the vocabulary holds this id.

        Raises:
          ValueError: a negative id.
        """
        if token_id < 0:
            raise ValueError(f"token ids must lie in [0, {self.vocab_size}), got {token_id}")
        return token_id < 2**32 and self._backend.id_to_token(token_id) is not None

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out of a text."""
        return token_id in self._special_ids

    def broken_chat_template(self) -> str | None:
        """Why no conversation can be rendered by the checkpoint's template, or None, also where it has none."""
        return None if self._chat is None else self._chat.broken()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Renders a conversation in jinja2's sandbox; `variables` (tools, ...) reach the template.

        Encode the result with add_special_tokens=False: templates write their own. As in vLLM, a content that is a list
        of text parts becomes a text with a line for each, and a tool call's arguments in JSON become what they say.

        Raises:
          ValueError: no template, malformed messages, parts that are no text, a template that fails or refuses, or an
            argument of transformers' method of this name that this one does not have.
        """
        if self._chat is None:
            raise ValueError("this checkpoint has no chat template (tokenizer_config.json or chat_template.jinja)")
        variables = {**self._special_tokens, "tools": None, "documents": None, **variables}
        return self._chat.render(messages, {**variables, "add_generation_prompt": add_generation_prompt})


class IncrementalDetokenizer:
    """One request's text, token by token; emits a character only when all its bytes are there.

    `prompt_ids` gives the first token its context: a continuation keeps its leading space.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip, self._pieces = skip_special_tokens, tokenizer.known_pieces(skip_special_tokens=skip_special_tokens)
        shown = (i for i in prompt_ids if tokenizer.has_text(i))
        self._drops_space = tokenizer.drops_first_space and not any(self._decode([i]) for i in shown)
        # The window is context (text already out) followed by pending tokens; only it is decoded.
        known = [i for i in prompt_ids[-2 * _CONTEXT :] if tokenizer.has_text(i)]
        starts = range(max(0, len(known) - _CONTEXT), -1, -1)
        start = next((s for s in starts if not self._decode(known[s:]).startswith(_REPLACEMENT)), starts[0])
        self._window = known[start:]
        # A prompt may end within a character: its tokens still wait.
        ends = range(len(self._window), 0, -1)
        self._context = next((e for e in ends if not self._decode(self._window[:e]).endswith(_REPLACEMENT)), 0)
        self._emitted = len(self._decode(self._window).rstrip(_REPLACEMENT))

    def feed(self, token_id: int) -> str:
        """The text that this token made certain, often "" within a character.

        Raises:
          ValueError: a negative id.
        """
        if self._skip and self._tokenizer.is_special(token_id):
            return ""  # and what is beside it stays so: its bytes may belong together
        if self._context == len(self._window):
            piece = self._tokenizer.piece(token_id, skip_special_tokens=self._skip)
            if piece is not None:
                if piece:
                    self._window, self._context, self._emitted = [token_id], 1, len(piece)
                return self._begun(piece)
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        waiting = len(self._window) - self._context <= _MAX_PENDING
        certain = text.rstrip(_REPLACEMENT) if waiting else text
        delta = text[self._emitted : len(certain)]
        self._emitted = max(self._emitted, len(certain))
        if len(certain) == len(text):
            del self._window[: self._context]
            self._context = len(self._window)
            self._emitted = len(self._decode(self._window))
        return self._begun(delta)

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens made certain, one after the other."""
        if self._context == len(self._window):
            try:
                pieces = list(map(self._pieces.__getitem__, token_ids))
            except KeyError:
                pass
            else:
                shown = len(pieces) - 1
                while shown >= 0 and not pieces[shown]:
                    shown -= 1
                if shown >= 0:
                    self._window, self._context, self._emitted = [token_ids[shown]], 1, len(pieces[shown])
                text = "".join(pieces)
                return self._begun(text) if self._drops_space else text
        return "".join(map(self.feed, token_ids))

    def flush(self) -> str:
        """At the end of the request: what still waited, cut characters shown as U+FFFD."""
        text = self._decode(self._window)
        delta, self._emitted = text[self._emitted :], len(text)
        return self._begun(delta)

    def _begun(self, delta: str) -> str:
        """What is added to the text, without the space that the text itself may begin with."""
        if self._drops_space and delta:
            self._drops_space = False
            return delta.removeprefix(" ")
        return delta

    def _decode(self, ids: Sequence[int]) -> str:
        # All of them are in the vocabulary.
        return self._tokenizer.join(ids, self._skip)


class StopResult(NamedTuple):
    """What one call of StopChecker.feed settled.

    Attributes:
      text: to be emitted now.
      num_tokens: how many of the call's tokens to keep; all, unless a stop string matched:
        then up to and including the token that completed it.
      stop: the stop string that matched, or None.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class StopChecker:
    """Stop strings over streamed text, with vLLM's meaning.

    The text ends before the stop string (after it with `include_stop_str_in_output`), while
    the token that completed it stays. A suffix that could still become a stop string is held
    back. The first stop string to be complete wins, the longest of those that end together,
    so the result does not depend on where tokens end. The first `min_tokens` tokens cannot
    complete a match.

    Raises:
      ValueError: an empty stop string or one that is not a string.
    """

    def __init__(self, stop: Sequence[str] = (), *, include_stop_str_in_output: bool = False, min_tokens: int = 0):
        for s in stop:
            if not isinstance(s, str) or not s:
                raise ValueError(f"stop must hold non-empty strings, got {s!r}")
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._seen = 0
        self._held = ""

    def feed(self, token_texts: Sequence[str]) -> StopResult:
        """Takes the text of each new token, in order (what IncrementalDetokenizer.feed returned)."""
        if not self._stop:
            return StopResult("".join(token_texts), len(token_texts))
        text = self._held + "".join(token_texts)
        if self._seen >= self._min_tokens and not any(stop in text for stop in self._stop):
            # As one token: where no stop string is complete, it does not matter where tokens end.
            self._seen += len(token_texts)
            self._held = text
            keep = self._held_length()
            self._held = text[len(text) - keep :]
            return StopResult(text[: len(text) - keep], len(token_texts))
        emitted: list[str] = []
        for count, new in enumerate(token_texts, start=1):
            self._seen += 1
            settled = len(self._held)
            self._held += new
            found = self._find(settled) if new and self._seen > self._min_tokens else None
            if found is not None:
                end, start, stop = found
                emitted.append(self._held[: end if self._include else start])
                self._held = ""
                return StopResult("".join(emitted), count, stop)
            keep = self._held_length()
            emitted.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return StopResult("".join(emitted), len(token_texts))

    def flush(self, tail: str = "") -> str:
        """When a request ends for another reason: the held text, and `tail` from the detokenizer."""
        text, self._held = self._held + tail, ""
        return text

    def _find(self, settled: int) -> tuple[int, int, str] | None:
        """The match (end, start, stop) that ends first beyond the `settled` characters."""
        matches = []
        for stop in self._stop:
            start = self._held.find(stop, max(0, settled - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches, default=None)

    def _held_length(self) -> int:
        """Length of the longest suffix that begins a stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(len(s) > size and s.startswith(tail) for s in self._stop):
                return size
        return 0


def _read_backend(path: Path) -> Backend:
    if not path.is_file():
        raise ValueError(
            f"{path.parent} has no {FILE} or {SENTENCEPIECE}; with skip_tokenizer_init=True prompts can be token ids"
        )
    try:
        return Backend.from_file(str(path))
    except Exception as e:  # the binding raises plain Exception
        raise ValueError(f"{path} is not a valid tokenizer.json: {e}") from e


def _read_sentencepiece(directory: Path, settings: Mapping[str, Any]) -> tuple[Backend, dict[str, Any]]:
    """The tokenizer of tokenizer.model, and what it implies where tokenizer_config.json says nothing."""
    from jaxspec.text import sentencepiece  # protobuf, for those who need it

    path = directory / SENTENCEPIECE
    prefix = settings.get("add_prefix_space")
    try:
        model = sentencepiece.read(
            path.read_bytes(),
            add_dummy_prefix=prefix if isinstance(prefix, bool) else None,
            legacy=settings.get("legacy") is not False,
            added=_added_tokens(directory, settings),
        )
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return model.backend, {"bos_token": model.bos_token, "eos_token": model.eos_token, "add_bos_token": True}


def _added_tokens(directory: Path, settings: Mapping[str, Any]) -> list[tuple[int, AddedToken]]:
    """(id, token) of tokenizer_config.json, or of added_tokens.json, where all are taken to be special."""
    known = settings.get("added_tokens_decoder")
    if isinstance(known, Mapping):
        # Not normalized: a normalizer would put a space in front of them.
        flags = ("special", "lstrip", "rstrip", "single_word")
        return [
            (int(i), AddedToken(text, normalized=False, **{name: bool(value.get(name)) for name in flags}))
            for i, value in known.items()
            if isinstance(value, Mapping) and (text := _token(value)) is not None
        ]
    path = directory / "added_tokens.json"
    named = read_json(path) if path.exists() else {}
    return [(int(i), AddedToken(text, special=True, normalized=False)) for text, i in named.items()]


def _decodes_pieces(backend: Backend) -> tuple[bool, bool]:
    """(whether pieces are decoded as SentencePiece does, a token's bytes at a time; whether a first space goes)."""
    if not isinstance(backend.decoder, decoders.Sequence):
        return False, False
    steps = json.loads(backend.decoder.__getstate__())["decoders"]
    stripped = steps[-1:] == [_NO_FIRST_SPACE]
    return (True, stripped) if (steps[:-1] if stripped else steps) == _PIECES else (False, False)


def _token(value: Any) -> str | None:
    """tokenizer_config.json writes a special token as a string or as an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
