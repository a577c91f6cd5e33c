"""Grammars: what a text may say, compiled for a vocabulary.

Owns the compilation of JSON schemas, regular expressions, Lark and GBNF grammars and choices (llguidance); `matcher`
follows a text through one. Must not know models, devices or the engine.

A grammar cannot overflow the stack, nor hold up a step for long, but its compilation has no bound
in time and memory here: some sources of a few bytes take minutes and gigabytes, and a compilation
cannot be interrupted. Grammars of strangers are to be tried in another process first, as the
server does (serve/core/grammar_trials.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask

from jaxspec.names import refuse_unknown
from jaxspec.text.matcher import Matcher, Vocabulary, first_line
from jaxspec.text.tokenizer import Tokenizer

T = TypeVar("T")
GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]
KINDS: tuple[str, ...] = get_args(GrammarKind)
#: What vLLM calls them.
_ELSEWHERE = {"json": "json_schema", "schema": "json_schema", "grammar": "lark"}
MAX_SOURCE_BYTES = 256 * 1024
MAX_CHOICES = 4096
MAX_CHOICE_BYTES = 1024
#: GBNF is translated in Python, which others of the process wait for: some 30 ms for so much.
MAX_GBNF_BYTES = 32 * 1024
#: Compiled grammars that a compiler keeps, and the memory that they may take together.
MAX_CACHED, MAX_CACHED_BYTES = 64, 256 * 2**20
#: Least that a compiled grammar is taken to hold: bytes, and bytes for each of its source.
_LEAST_BYTES, _BYTES_A_BYTE = 64 * 1024, 8
#: Compilers of rules and references recurse. This holds what the longest chains that fit a source need, several times
#: over; it is address space, and only what is used becomes memory.
STACK_BYTES = 2**30
#: How JSON is laid out where the schema says nothing else ("x-guidance"): at most one blank, after "," and ":". A model
#: cannot emit blanks for ever, and most of what lies between two values is forced.
_JSON = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
#: What a grammar may cost beside llguidance's own limits. Items bound the time of one mask: an ambiguous grammar takes
#: seconds without. 500 in a row leave room for a choice among some 300 objects. Lexer states take a kilobyte and, where
#: expressions are large, many times that: their number alone bounds no memory.
_LIMITS = LLParserLimits(
    max_items_in_row=500, step_max_items=5000, max_lexer_states=20_000, max_grammar_size=250_000, verbose_errors=False
)


@dataclasses.dataclass(frozen=True)
class GrammarSpec:
    """What a text has to be. Plain data: only sizes are checked here, the rest by GrammarCompiler.compile.

    Attributes:
      kind: "json_schema" (value: the schema as JSON text), "json_object" (any object; no value), "regex" (matches the
        whole text; no look-around), "lark" (llguidance's dialect, from the rule `start`; or llama.cpp's GBNF, from
        the rule `root`), or "choice" (one of the given texts).
      value: see kind; at most 256 KiB in all, 32 KiB of GBNF, and 4096 choices of 1 KiB each.

    Raises:
      ValueError: an unknown kind, or a value of the wrong type or size.
    """

    kind: GrammarKind
    value: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"GrammarSpec.kind must be one of {KINDS}, got {self.kind!r}")
        if self.kind == "choice":
            self._check_choices()
            return
        if not isinstance(self.value, str):
            raise ValueError(f"GrammarSpec.value of a {self.kind} must be a string, got {type(self.value).__name__}")
        if bool(self.value) == (self.kind == "json_object"):
            wanted = "empty" if self.kind == "json_object" else "a non-empty string"
            raise ValueError(f"GrammarSpec.value of a {self.kind} must be {wanted}, got {self.value[:80]!r}")
        _check_size("value", self.value, MAX_SOURCE_BYTES)

    @classmethod
    def of(cls, value: Any) -> GrammarSpec:
        """A GrammarSpec, or one from a mapping of a kind to its value.

        A schema may be an object instead of JSON text, choices may be a list; of "json_object" the value is True.

        Raises:
          ValueError: anything else, and as above.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ValueError(
                f"a grammar must be a GrammarSpec or {{kind: value}} with a kind of {KINDS}, got {value!r}"
            )
        (kind, source), *_ = value.items()
        if kind not in KINDS:
            refuse_unknown("a grammar", [str(kind)], KINDS, _ELSEWHERE)
        if kind == "json_schema" and isinstance(source, Mapping | bool):
            source = json.dumps(source)
        elif kind == "json_object":
            if source is not True:
                raise ValueError(f"a grammar's json_object must be True, got {source!r}")
            source = ""
        return cls(kind, tuple(source) if isinstance(source, list) else source)

    @property
    def source_bytes(self) -> int:
        """Size of the value."""
        return len((self.value if isinstance(self.value, str) else "".join(self.value)).encode())

    def _check_choices(self) -> None:
        if isinstance(self.value, str) or not isinstance(self.value, Sequence):
            raise ValueError(f"GrammarSpec.value of a choice must be a tuple of strings, got {self.value!r}")
        options = tuple(self.value)
        if not 1 <= len(options) <= MAX_CHOICES:
            raise ValueError(f"GrammarSpec.value must hold 1 to {MAX_CHOICES} choices, got {len(options)}")
        for option in options:
            if not isinstance(option, str) or not option:
                raise ValueError(f"GrammarSpec.value must hold non-empty strings, got {option!r}")
            _check_size("value", option, MAX_CHOICE_BYTES)
        _check_size("value", "".join(options), MAX_SOURCE_BYTES)
        object.__setattr__(self, "value", options)


def _check_size(name: str, text: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise ValueError(f"GrammarSpec.{name} must be valid Unicode: {e}") from e
    if size > limit:
        raise ValueError(f"GrammarSpec.{name} may take {limit} bytes, got {size}")


def _source(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own form."""
    if isinstance(spec.value, tuple):
        # One terminal is one automaton, however many there are to choose from; alternatives of a rule are parsed.
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in spec.value)
        return LLMatcher.grammar_from_lark(f"start: OPTION\nOPTION: {options}")
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.value)
    if spec.kind == "lark":
        gbnf = _GBNF_ROOT.search(spec.value) and not _LARK_START.search(spec.value)
        return LLMatcher.grammar_from_lark(_lark_of_gbnf(spec.value) if gbnf else spec.value)
    schema = '{"type": "object"}' if spec.kind == "json_object" else spec.value
    defaults: Any = _JSON
    return LLMatcher.grammar_from_json_schema(schema, defaults=defaults)


#: The rule where a grammar begins, which tells GBNF (vLLM's and SGLang's users write it) from Lark.
_GBNF_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_LARK_START = re.compile(r"^[ \t]*start[ \t]*:", re.MULTILINE)


def _lark_of_gbnf(source: str) -> str:
    if (size := len(source.encode())) > MAX_GBNF_BYTES:
        raise ValueError(f"GBNF may take {MAX_GBNF_BYTES} bytes, got {size}; Lark {MAX_SOURCE_BYTES}")
    try:
        return gbnf_to_lark(source)
    except Exception as e:  # its errors have no class in common; deep nesting is a RecursionError
        raise ValueError(f"read as GBNF, which `root ::=` begins: {e}") from e


#: threading.stack_size is the whole process's.
_stack_size = threading.Lock()


def _on_deep_stack(function: Callable[[], T]) -> T:
    """What `function` returns or raises, run on a thread whose stack no source can overflow."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as e:
            outcome.set_exception(e)

    # A daemon: a process that ends does not wait for a compilation.
    thread = threading.Thread(target=work, name="grammar-compile", daemon=True)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    futures.wait([outcome])
    _await_exit(thread)
    return outcome.result()


def _await_exit(thread: threading.Thread) -> None:
    """Returns when the system has done with a thread that ends: where address space is short, its stack fits once."""
    thread.join()  # may return before that
    task, ends = f"/proc/self/task/{thread.native_id}", time.monotonic() + 1.0
    while os.path.exists(task) and time.monotonic() < ends:
        time.sleep(0.0001)


#: A spec, or what `GrammarSpec.of` makes one of.
GrammarLike = GrammarSpec | Mapping[str, Any]


class Grammar:
    """A compiled grammar; each request takes a matcher of its own.

    Attributes:
      spec: what it was compiled from.
      vocab_size: of the model whose tokens it allows.
      size_bytes: memory that it is taken to hold.
    """

    def __init__(self, spec: GrammarSpec, core: LLMatcher, vocabulary: Vocabulary, size_bytes: int = 0):
        self.spec, self.vocab_size = spec, vocabulary.size
        self.size_bytes = max(size_bytes, _LEAST_BYTES + _BYTES_A_BYTE * spec.source_bytes)
        self._core, self._vocabulary = core, vocabulary

    def matcher(self) -> Matcher:
        """A matcher at the text's start."""
        return Matcher(self._core, self._vocabulary)


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Thread-safe; the latest grammars are kept.

    Args:
      tokenizer: the checkpoint's, or what its `to_json` returns.
      vocab_size: the model's, at least the tokenizer's.
      eos_token_ids: what ends a text; None: the tokenizer's.

    Raises:
      ValueError: no end token, or a tokenizer whose tokens have no bytes of their own.
    """

    def __init__(self, tokenizer: Tokenizer | str, vocab_size: int, eos_token_ids: Sequence[int] | None = None):
        if eos_token_ids is None:
            eos_token_ids = () if isinstance(tokenizer, str) else tokenizer.eos_token_ids
        eos = sorted(set(eos_token_ids))
        if not eos or max(eos) >= vocab_size:
            raise ValueError(f"grammars need end tokens in [0, {vocab_size}), got {eos}")
        self._made_of = tokenizer
        try:
            self._tokenizer = LLTokenizer(self.tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        except ValueError as e:
            raise ValueError(f"this tokenizer cannot serve grammars: {first_line(str(e))}") from e
        bits = np.zeros((-(-vocab_size // 32),), np.uint32)
        for token in eos:
            bits[token // 32] |= np.uint32(1 << token % 32)
        self._vocabulary = Vocabulary(vocab_size, frozenset(eos), bits.view(np.int32))
        self._lock = threading.Lock()
        self._grammars: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()
        self._held: weakref.WeakSet[Grammar] = weakref.WeakSet()

    @property
    def tokenizer_json(self) -> str:
        """With `vocab_size` and `eos_token_ids`, what another process needs to make the same compiler."""
        return self._made_of if isinstance(self._made_of, str) else self._made_of.to_json()

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    @property
    def eos_token_ids(self) -> list[int]:
        """What ends a text, in order."""
        return sorted(self._vocabulary.eos)

    @property
    def held_bytes(self) -> int:
        """Memory that compiled grammars are taken to hold: those that are kept, and those that somebody still uses."""
        with self._lock:
            return sum(grammar.size_bytes for grammar in self._held)

    def known(self, spec: GrammarSpec) -> Grammar | None:
        """The grammar of a spec if it is kept; never waits for a compilation."""
        with self._lock:
            made = self._grammars.get(spec)
            if made is None or not made.done() or made.exception() is not None:
                return None
            self._grammars.move_to_end(spec)
            return made.result()

    def compile(self, spec: GrammarSpec, size_bytes: int = 0) -> Grammar:
        """The grammar of a spec, its first mask computed.

        Mostly takes milliseconds, a large schema some ten; there is no bound, see above.

        Args:
          size_bytes: memory that it was seen to take; it is taken to hold at least in proportion to its source.

        Raises:
          ValueError: not valid, not supported, too large, or nothing can satisfy it.
        """
        with self._lock:
            known = self._grammars.get(spec)
            made: Future[Grammar] = known or Future()
            self._grammars[spec] = made
            self._grammars.move_to_end(spec)
        if known is None:
            try:
                grammar = _on_deep_stack(lambda: self._compile(spec, size_bytes))
            except BaseException as e:
                with self._lock:
                    if self._grammars.get(spec) is made:
                        del self._grammars[spec]
                made.set_exception(e)
            else:
                made.set_result(grammar)
                with self._lock:
                    self._held.add(grammar)
                self.shrink()
        return made.result()

    def try_out(self, spec: GrammarSpec) -> Grammar:
        """Compiles a grammar that is not kept, and uses it as a step would. Raises ValueError as `compile`."""
        grammar = _on_deep_stack(lambda: self._compile(spec, 0))
        _ = grammar.matcher().root
        return grammar

    def shrink(self, size_bytes: int = MAX_CACHED_BYTES) -> None:
        """Forgets the kept grammars that were used the longest ago, until the others take at most so much together."""
        with self._lock:
            done = {spec: made.result() for spec, made in self._grammars.items() if made.done()}
            total, count = sum(grammar.size_bytes for grammar in done.values()), len(done)
            for spec, grammar in done.items():
                if total <= size_bytes and count <= MAX_CACHED:
                    break
                del self._grammars[spec]
                total, count = total - grammar.size_bytes, count - 1

    def _compile(self, spec: GrammarSpec, size_bytes: int) -> Grammar:
        try:
            source = _source(spec)
        except ValueError as e:
            raise ValueError(f"the {spec.kind} is not valid: {first_line(str(e))}") from e
        core = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if core.is_error():
            raise ValueError(f"the {spec.kind} cannot be compiled: {first_line(core.get_error())}")
        # The first touch of a mask is the dearest: not in the engine's step.
        fill_next_token_bitmask(core, np.empty((1, self._vocabulary.words), np.int32))
        grammar = Grammar(spec, core, self._vocabulary, size_bytes)
        matcher = grammar.matcher()
        _ = matcher.root
        if matcher.error is not None:
            raise ValueError(f"the {spec.kind} allows no first token of this vocabulary: {matcher.error}")
        return grammar
