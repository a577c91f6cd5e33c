"""One program's stretch of a row of logits on Mosaic GPU: in shared memory, and what is done with it.

A row of the vocabulary is rows of 128 tokens, and a member of a request's cluster has R of them, an even number, so
that both tokens of a draw are one thread's (the same lane of two neighbouring rows):

    x      [R, 128]        logits as they came; read again by every pass, never from global memory
    words  [R / 32, 128]   bits: which of a lane's tokens are still in question

Noise costs more than anything else here, so it is drawn for tokens that can still win only: those within reach of
the best score of the lanes' most likely tokens. Where these are many, a first pass over all of them draws bits and
bounds the noise by one conversion (`noise.gumbel_bound`); those left are drawn once more, with both logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rejection_sampling.mosaic_lanes import (
    Cluster,
    bits,
    gather,
    lane_ids,
    once,
    population,
    real,
    spread,
    where,
)  # fmt: skip
from pallas_kernels.rejection_sampling.noise import (
    GUMBEL_BOUND,
    GUMBEL_MAX,
    TILE,
    Purpose,
    gumbel_bound,
    threefry2x32,
    to_gumbel,
)

NONE = 2**30  # no node, no token
#: Rows that a pass takes at once, and rows of a word.
GROUP, WORD = 8, 32
#: Tokens of a lane in question that are drawn at once, so that one need not wait for the other's rounds.
AT_ONCE = 4
#: Such tokens from which on a pass over all bounds their noise first: it takes as long as drawing so many.
MANY = 48

_i32, _u32, _f32 = jnp.int32, jnp.uint32, jnp.float32


class Best(NamedTuple):
    """Largest values of a row and their tokens: of each lane, [128], and of all."""

    lanes: jax.Array
    tokens: jax.Array
    top: jax.Array
    token: jax.Array


class Row:
    """A node's logits, as far as they are this member's."""

    def __init__(
        self, logits: Any, x: Any, words: Any, barriers: Any, cluster: Cluster, vocab: int, rows: int,
        inverse: jax.Array | None,
    ) -> None:  # fmt: skip
        self.logits, self.x, self.words, self.barriers, self.cluster = logits, x, words, barriers, cluster
        self.vocab, self.inverse, self.interpret = vocab, inverse, cluster.interpret
        self.first = cluster.member * rows
        self.valid = jnp.clip(-(-vocab // TILE) - self.first, 0, rows)
        self.num_words = jnp.maximum(lax.div(self.valid + (WORD - 1), _i32(WORD)), 1)
        self.most_words = words.shape[0]
        self.lane = lane_ids()

    def fetch(self, node: jax.Array) -> None:
        """Begins to copy a node's logits (its number among all nodes of the batch)."""
        plgpu.commit_smem()  # all have read what is overwritten
        if self.vocab % TILE:
            return
        for w in range(self.most_words):

            @pl.when(w < self.num_words)
            def _(w: int = w) -> None:
                source = self.logits.at[node, pl.ds(self.first + w * WORD, WORD)]
                plgpu.copy_gmem_to_smem(source, self.x.at[pl.ds(w * WORD, WORD)], self.barriers.at[w])

    def _arrived(self, w: jax.Array, node: jax.Array) -> None:
        """Waits for a word's rows; behind the vocabulary they are -inf."""
        low = spread(-jnp.inf, self.x.dtype)
        begin = w * WORD
        if self.vocab % TILE == 0:
            plgpu.barrier_wait(self.barriers.at[w])

            def clear(row: jax.Array, _: Any) -> tuple[()]:
                self.x[row] = low
                return ()

            lax.fori_loop(jnp.maximum(self.valid, begin), begin + WORD, clear, ())
            return

        # The copy engine wants rows of whole 16 bytes.
        def load(row: jax.Array, _: Any) -> tuple[()]:
            token = (self.first + row) * TILE + self.lane
            there = jnp.minimum(token, self.vocab - 1)
            value = gather(self.logits, there, self.interpret, node, self.vocab)
            self.x[row] = where((token < self.vocab) & (row < self.valid), value, low)
            return ()

        lax.fori_loop(begin, begin + WORD, load, ())

    def tempered(self, x: jax.Array) -> jax.Array:
        x = x.astype(_f32)
        return x if self.inverse is None else x * self.inverse

    def _group(self, row: jax.Array, count: int = GROUP) -> list[jax.Array]:
        return [self.tempered(self.x[row + r]) for r in range(count)]

    def sweep(self, body: Callable[..., Any], init: Any) -> Any:
        """Folds body(first row, tempered logits of 8 rows, carry)."""
        step = lambda g, carry: body(g * GROUP, self._group(g * GROUP), carry)
        return lax.fori_loop(0, self.num_words * (WORD // GROUP), step, init)

    def token(self, row: Any) -> jax.Array:
        return (self.first + row) * TILE + self.lane

    def survey(self, node: jax.Array, step: jax.Array) -> tuple[Best, jax.Array]:
        """(the largest logits in all members, exchanges so far).

        inf where a NaN or an inf is, and -inf where nothing else is.
        """

        def word(w: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            self._arrived(w, node)

            def group(g: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                best, token, peak = carry
                row = w * WORD + g * GROUP
                for r, x in enumerate(self._group(row)):
                    better = x > best
                    best, token = where(better, x, best), where(better, self.token(row + r), token)
                    peak = jnp.maximum(peak, x)  # a NaN stays
                return best, token, peak

            return lax.fori_loop(0, WORD // GROUP, group, carry)

        low = spread(-jnp.inf, _f32)
        best, token, peak = lax.fori_loop(0, self.num_words, word, (low, spread(NONE, _i32), low))
        best = where(peak < jnp.inf, best, jnp.inf)
        return self.elect(best, token, step)

    def elect(self, best: jax.Array, token: jax.Array, step: jax.Array) -> tuple[Best, jax.Array]:
        """(the best of all members, the lowest token of equals, exchanges so far)."""
        read, step = self.cluster.share(step, [bits(best), token])
        for c in range(self.cluster.size):
            x, t = real(read(c, 0)), read(c, 1)
            if c == 0:
                best, token = x, t
            else:
                better = (x > best) | ((x == best) & (t < token))
                best, token = where(better, x, best), where(better, t, token)
        top = jnp.max(best)
        return Best(best, token, top, jnp.min(where(best == top, token, NONE))), step

    def mark(self, test: Callable[..., tuple[Sequence[jax.Array], Any]], init: Any = ()) -> tuple[jax.Array, Any]:
        """Writes the bits of tokens for which test(first row, tempered logits of 8 rows, carry) holds, and folds it.

        Returns:
          (how many of each lane, the last carry).
        """
        none = spread(0, _u32)

        def word(w: jax.Array, carry: Any) -> Any:
            count, carry = carry

            def group(g: jax.Array, carry: Any) -> Any:
                found, carry = carry
                row = w * WORD + g * GROUP
                part = none
                holds, carry = test(row, self._group(row), carry)
                for r, yes in enumerate(holds):
                    part = where(yes, part | _u32(1 << r), part)
                return found | (part << (g * GROUP).astype(_u32)), carry

            found, carry = lax.fori_loop(0, WORD // GROUP, group, (none, carry))
            self.words[w] = found
            return count + population(found), carry

        return lax.fori_loop(0, self.num_words, word, (spread(0, _i32), init))

    def at(self, row: jax.Array) -> jax.Array:
        """Tempered logits, each lane's from a row of its own."""
        return self.tempered(gather(self.x, row * TILE + self.lane, self.interpret))

    def draw(self, row: jax.Array) -> jax.Array:
        """The number of the draws that serve an even row and the next."""
        return ((self.first + row) >> 1) * TILE + self.lane

    def draws(self, key: tuple[jax.Array, jax.Array], draw: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both words of draws, by their numbers."""
        purpose = spread(int(Purpose.TARGET), _u32)
        return threefry2x32(*key, draw.astype(_u32), purpose)

    def each_marked(self, most: jax.Array, body: Callable[..., Any], init: Any, at_once: int = 1) -> Any:
        """Folds body(rows, whether there are any, carry) over the marked tokens, some of each lane at a time."""
        words = tuple(jnp.where(w < self.num_words, self.words[w], _u32(0)) for w in range(self.most_words))

        def lowest(words: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
            word, at = words[0], spread(0, _i32)
            for w in range(1, self.most_words):
                empty = word == 0
                word, at = where(empty, words[w], word), where(empty, w, at)
            bit = word & (~word + _u32(1))
            row = at * WORD + 31 - lax.clz(bit).astype(_i32)
            rest = word ^ bit
            found = word != 0
            return where(found, row, 0), found, tuple(where(at == w, rest, x) for w, x in enumerate(words))

        def step(_: Any, carry: Any) -> Any:
            words, inner = carry
            rows, found = [], []
            for _ in range(at_once):
                row, there, words = lowest(words)
                rows.append(row)
                found.append(there)
            return words, body(rows, found, inner)

        return lax.fori_loop(0, lax.div(most + (at_once - 1), _i32(at_once)), step, (words, init))[1]

    def race(
        self, key: tuple[jax.Array, jax.Array], cut: jax.Array, best: Best, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(token of the largest sum of tempered logit and Gumbel noise among those from `cut` on, exchanges so far).

        Args:
          best: the largest logits; what they score together bounds what can win.
        """
        tile = best.tokens >> 7
        first, second = self.draws(key, ((tile >> 1) * TILE + (best.tokens & (TILE - 1))))
        scores = best.lanes + to_gumbel(where((tile & 1) == 0, first, second))
        score = jnp.max(where(best.lanes >= cut, scores, -jnp.inf))
        slack = 1e-4 + 1e-6 * jnp.abs(score)
        low = jnp.maximum(cut, score - GUMBEL_MAX - slack)
        near = lambda _, xs, carry: ([x >= low for x in xs], carry)
        most = jnp.max(self.mark(near)[0])

        def refine(_: jax.Array) -> tuple[jax.Array]:
            def hopeful(row: jax.Array, xs: Sequence[jax.Array], carry: tuple[()]) -> tuple[list[jax.Array], tuple[()]]:
                out = []
                for r in range(0, GROUP, 2):
                    for x, word in zip(xs[r : r + 2], self.draws(key, self.draw(row + r)), strict=True):
                        out.append((x >= low) & (x + gumbel_bound(word) >= score - slack - GUMBEL_BOUND - 1e-4))
                return out, carry

            return (jnp.max(self.mark(hopeful)[0]),)

        (most,) = once(most > MANY, refine, (most,))

        def draw(rows: list[jax.Array], found: list[jax.Array], carry: tuple[jax.Array, jax.Array]) -> Any:
            best, token = carry
            words = [self.draws(key, self.draw(row)) for row in rows]
            for row, there, (first, second) in zip(rows, found, words, strict=True):
                total = self.at(row) + to_gumbel(where((row & 1) == 0, first, second))
                here = self.token(row)
                better = there & ((total > best) | ((total == best) & (here < token)))
                best, token = where(better, total, best), where(better, here, token)
            return best, token

        start = (spread(-jnp.inf, _f32), spread(NONE, _i32))
        lanes, token = self.each_marked(most, draw, start, AT_ONCE)
        best, step = self.elect(lanes, token, step)
        return jnp.clip(best.token, 0, self.vocab - 1), step
