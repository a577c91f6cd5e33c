"""Where a text stands in its grammar, token by token, as sets of bits over the vocabulary.

Owns what may come next, alone (Matcher) and for a batch (Guide), and what a failure means in plain words. A set of bits
is an int32 row of ceil(vocabulary / 32) words; -1 everywhere allows everything. Must not know how a grammar is
compiled, models, devices or the engine. Nothing here raises where a grammar fails while it runs: its matcher says so.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

#: Processor seconds that a text's masks may take: these in all, and so many more for each of its tokens. A mask mostly
#: takes tens of microseconds and at worst some ten milliseconds; a step must not wait for one that always is at worst.
_MASK_SECONDS, _MASK_SECONDS_A_TOKEN = 0.5, 0.02
#: What helps where a grammar takes too long or is too large.
SIMPLER = "make it simpler: smaller numbers in {m,n} and maxLength, fewer of them within or behind other repetitions"
_STATES = f"an expression in it has too many states: {SIMPLER}"
#: What llguidance says of a grammar that fails while it runs, by how that begins or by a part of it, in plain words.
_REASONS = {
    "NoExtension": "no token of the vocabulary continues the text",
    "ParserTooComplex": "it has too many readings of the text: make it less ambiguous",
    "LexerTooComplex": _STATES,
    "MaxTokens": "a limit on tokens in it was reached",
    "InternalError": "the grammar engine failed",
    "Too many items": "it has too many readings of the text: make it less ambiguous",
    "Current row has": "it has too many readings of the text: make it less ambiguous",
    "too many states": _STATES,
    "too many expressions": _STATES,
    "fuel": f"an expression in it takes too long to match: {SIMPLER}",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """What matchers share.

    Attributes:
      size: tokens of the model.
      eos: tokens that end a text. eos_bits_W: the same as a set of bits.
    """

    size: int
    eos: frozenset[int]
    eos_bits_W: np.ndarray

    @property
    def words(self) -> int:
        return len(self.eos_bits_W)


class Matcher:
    """Where one text stands in its grammar. Not thread-safe.

    Attributes:
      complete: the text satisfies the grammar and nothing but its end may follow.
      error: why the grammar failed; from then on the matcher allows everything, and its text is to be given up. A text
        also fails when its masks have taken far more of the processor's time than masks do: what it says never
        depends on that time, only whether it goes on.
    """

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary):
        self._start, self._vocabulary = start, vocabulary
        self._core = start.deep_copy()
        self._taken: list[int] = []
        self._root: np.ndarray | None = None
        #: Continuations on which the grammar fails, found while looking ahead, and why.
        self._dead_ends: dict[tuple[int, ...], str] = {}
        self._seconds = 0.0
        self.complete = False
        self.error: str | None = None

    @property
    def root(self) -> np.ndarray:
        """The tokens that may come next, [W]."""
        if self._root is None:
            mask_W = None if self.error is not None else self._mask()
            if mask_W is None:
                self._fail()
                mask_W = np.full((self._vocabulary.words,), -1, np.int32)
            self._root = mask_W
        return self._root

    def take(self, tokens: Sequence[int]) -> int:
        """The text goes on with these tokens; returns how many of them belong to it: fewer where it is complete."""
        dead_ends, self._dead_ends = self._dead_ends, {}
        for count, token in enumerate(tokens, start=1):
            if self.complete or self.error is not None:
                return count - 1
            if token in self._vocabulary.eos and self._core.is_accepting():
                self.complete = True
                continue
            if self._core.try_consume_tokens([token]) != 1:
                said = self._core.get_error()
                self._fail(_plainly(said) if said.strip() else f"token {token} is not among those it allows")
                return count - 1
            self._taken.append(token)
            self._root = None
            if tuple(tokens[:count]) in dead_ends:
                self._fail(dead_ends[tuple(tokens[:count])])
            elif self._core.is_accepting():
                # That nothing may follow can show as late as in the mask: it must not depend on a round's length.
                self.complete = self._ends(self.root)
        return len(tokens)

    def ahead(self, out_DW: np.ndarray) -> None:
        """Fills what is allowed at each of the next positions, however the text goes on.

        After the first, positions are known as long as each before has but one token to choose.
        """
        out_DW[:] = -1
        path: list[int] = []
        mask_W: np.ndarray | None = self.root
        for depth in range(len(out_DW)):
            out_DW[depth] = mask_W
            token = _only(mask_W)
            mask_W = None if token is None or depth + 1 == len(out_DW) else self._try(path, token)
            if mask_W is None:
                break
        self._back(len(path))

    def masks(self, tokens_N: Sequence[int], parents_N: Sequence[int], out_NW: np.ndarray) -> None:
        """Fills what may follow each node of a tree of drafts; nodes that cannot be accepted allow everything.

        Args:
          tokens_N, parents_N: parents before their children; node 0 is the text's last token.
        """
        out_NW[:] = -1
        children: dict[int, list[int]] = {}
        for node in range(1, len(tokens_N)):
            children.setdefault(parents_N[node], []).append(node)
        path: list[int] = []

        def visit(node: int, mask_W: np.ndarray) -> None:
            out_NW[node] = mask_W
            for child in children.get(node, ()):
                after_W = self._try(path, tokens_N[child]) if self._allows(mask_W, tokens_N[child]) else None
                if after_W is not None:
                    visit(child, after_W)
                    path.pop()
                    self._back(1)

        visit(0, self.root)

    def _allows(self, mask_W: np.ndarray, token: int) -> bool:
        return 0 <= token < self._vocabulary.size and bool(mask_W[token // 32] >> token % 32 & 1)

    def _ends(self, mask_W: np.ndarray) -> bool:
        return not np.any(mask_W & ~self._vocabulary.eos_bits_W)

    def _try(self, path: list[int], token: int) -> np.ndarray | None:
        """The mask after a further token of a path ahead; None where the text ends or the grammar fails there."""
        if token in self._vocabulary.eos or self.error is not None:
            return None
        mask_W = self._mask() if self._core.try_consume_tokens([token]) == 1 else None
        if mask_W is not None:
            path.append(token)
            return mask_W
        # Only a text that takes this path has failed; but llguidance never leaves an error.
        self._dead_ends[(*path, token)] = self._why()
        began = time.thread_time()
        self._core = self._start.deep_copy()
        if not self._core.consume_tokens([*self._taken, *path]):
            self._fail()
        self._took(began)
        return None

    def _back(self, count: int) -> None:
        if count and self.error is None and not self._core.rollback(count):
            self._fail(f"{count} tokens cannot be taken back")

    def _mask(self) -> np.ndarray | None:
        """What may come next where the core stands; None where the grammar fails."""
        out = np.empty((1, self._vocabulary.words), np.int32)
        began = time.thread_time()
        fill_next_token_bitmask(self._core, out)
        self._took(began)
        if self._core.is_error():
            return None
        if not self._core.is_accepting():
            out &= ~self._vocabulary.eos_bits_W
        return out[0] if out.any() else None

    def _why(self) -> str:
        return _plainly(self._core.get_error())

    def _took(self, began: float) -> None:
        """Adds up what masks take; `began` is the thread's own time, which other threads do not lengthen."""
        self._seconds += time.thread_time() - began
        allowed = _MASK_SECONDS + _MASK_SECONDS_A_TOKEN * len(self._taken)
        if self._seconds > allowed:
            took = f"{self._seconds:.1f} s for {len(self._taken)} tokens, which may take {allowed:.1f} s"
            self._fail(f"its masks take too long: {took}; {SIMPLER}")

    def _fail(self, why: str | None = None) -> None:
        if self.error is None:
            self.error = self._why() if why is None else why


def _only(mask_W: np.ndarray) -> int | None:
    """The only token of a set of bits, or None."""
    words = np.flatnonzero(mask_W)
    if len(words) != 1:
        return None
    word = int(mask_W[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1


class Guide:
    """The matchers of a batch; rows without one may say anything."""

    def __init__(self, matchers: Sequence[Matcher | None], vocab_size: int):
        self._matchers, self._words = matchers, -(-vocab_size // 32)

    def ahead(self, bucket: int, depth: int) -> np.ndarray:
        """See Matcher.ahead; int32 [bucket, depth, W]."""
        out = np.full((bucket, depth, self._words), -1, np.int32)
        for row, matcher in enumerate(self._matchers):
            if matcher is not None:
                matcher.ahead(out[row])
        return out

    def masks(self, tokens_BN: np.ndarray, parents_BN: np.ndarray) -> np.ndarray:
        """See Matcher.masks; int32 [B, N, W]."""
        out = np.full((*tokens_BN.shape, self._words), -1, np.int32)
        for row, matcher in enumerate(self._matchers):
            if matcher is not None:
                matcher.masks(tokens_BN[row].tolist(), parents_BN[row].tolist(), out[row])
        return out


def first_line(message: str) -> str:
    """The first line of what llguidance says, and the reason that its parser of regular expressions gives below."""
    first, _, rest = message.strip().partition("\n")
    reason = next((line for line in rest.splitlines() if line.startswith("error: ")), "")
    return f"{first[:300]} {reason.removeprefix('error: ')[:100]}".rstrip()


def _plainly(message: str) -> str:
    """What llguidance says of a grammar that failed, for those who wrote the grammar."""
    message = first_line(message)
    for part, words in _REASONS.items():
        if part in message:
            return f"{words} ({message})"
    return message or "no token of the vocabulary continues the text"
