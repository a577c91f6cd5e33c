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

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rejection_sampling.mosaic_cluster import Cluster
from pallas_kernels.rejection_sampling.mosaic_lanes import (
    gather,
    lane_ids,
    math_sum,
    once,
    population,
    quick_exp,
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
_LOWEST = -3e38  # under every finite score
#: Under every logit, and far enough from -inf that differences are finite.
FLOOR = -1e38
#: Rows that a pass takes at once, and rows of a word.
GROUP, WORD = 8, 32
#: Groups of rows whose noise a thread draws at once, so that one need not wait for the other's rounds.
SEVERAL = 2
#: Tokens of a lane in question that are drawn at once, so that one need not wait for the other's rounds.
AT_ONCE = 4
#: Such tokens from which on a pass over all bounds their noise first: it takes as long as drawing so many.
MANY = 48

_i32, _u32, _f32 = jnp.int32, jnp.uint32, jnp.float32


class Best(NamedTuple):
    """Largest values of a row and their tokens: of each of 128 parts of the row, a part a lane, and of all."""

    parts: jax.Array
    tokens: jax.Array
    top: jax.Array
    token: jax.Array


@dataclasses.dataclass(frozen=True)
class Launch:
    """Sizes of a launch; results do not depend on them, but for the last bits of the sum that rejection divides by.

    Attributes:
      members: programs of a cluster. rows: of 128 tokens that each owns, an even number.
      walk: whether a cluster walks a request's tree, or each node has its own.
    """

    members: int
    rows: int
    walk: bool


class Buffers(NamedTuple):
    """Shared memory of a row: its logits, marks of its tokens, and a barrier for every 32 rows."""

    x: Any
    words: Any
    arrived: Any


class Row:
    """A node's logits, as far as they are this member's."""

    def __init__(
        self, logits: Any, buffers: Buffers, cluster: Cluster, vocab: int, launch: Launch, inverse: jax.Array | None
    ) -> None:
        self.logits, self.cluster, self.vocab, self.inverse = logits, cluster, vocab, inverse
        self.x, self.words, self.barriers = buffers
        self.interpret, self.first = cluster.interpret, cluster.member * launch.rows
        self.valid = jnp.clip(-(-vocab // TILE) - self.first, 0, launch.rows)
        self.num_words = jnp.maximum(lax.div(self.valid + (WORD - 1), _i32(WORD)), 1)
        self.most_words = self.words.shape[0]
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

    def _await(self, w: jax.Array, node: jax.Array, waits: jax.Array | None) -> None:
        if waits is None:
            self._arrived(w, node)
        else:
            pl.when(waits)(lambda: self._arrived(w, node))

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

    def exp(self, x: jax.Array) -> jax.Array:
        """exp(x) in lanes."""
        return quick_exp(x, self.interpret)

    def value(self, row: Any) -> jax.Array:
        """What competes with noise added: tempered logits of a row of 128."""
        return self.tempered(self.x[row])

    def logit(self, node: jax.Array, token: jax.Array) -> jax.Array:
        """One of a node's, from global memory."""
        if self.vocab % TILE:
            return self.logits[node, token]
        return self.logits[node, lax.div(token, _i32(TILE)), lax.rem(token, _i32(TILE))]

    def _group(self, row: jax.Array, count: int = GROUP) -> list[jax.Array]:
        return [self.value(row + r) for r in range(count)]

    def sweep(self, body: Callable[..., Any], init: Any) -> Any:
        """Folds body(first row, tempered logits of 8 rows, carry)."""
        step = lambda g, carry: body(g * GROUP, self._group(g * GROUP), carry)
        return lax.fori_loop(0, self.num_words * (WORD // GROUP), step, init)

    def token(self, row: Any) -> jax.Array:
        return (self.first + row) * TILE + self.lane

    def survey(self, node: jax.Array, waits: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """(each lane's largest logit of this member, its token), as the row arrives.

        inf where a NaN or an inf is, and -inf where nothing else is.

        Args:
          waits: whether the row has yet to be waited for; by default it has.
        """

        def word(w: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            self._await(w, node, waits)

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
        return best, token

    def gauge(self, node: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(the row's largest value, the sum of exp(value - it), exchanges so far), as the row arrives.

        inf or NaN where the row holds one, and at most FLOOR where it holds nothing else than -inf.
        """

        def word(w: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            self._arrived(w, node)

            def group(g: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                top, total = carry
                xs = self._group(w * WORD + g * GROUP)
                most = functools.reduce(jnp.maximum, xs, top)  # a NaN stays
                part = math_sum([self.exp(x - most) for x in xs])
                return most, total * self.exp(top - most) + part

            return lax.fori_loop(0, WORD // GROUP, group, carry)

        # Finite, so that differences of it are.
        start = (spread(FLOOR, _f32), spread(0.0, _f32))
        return self.cluster.softmax(step, *lax.fori_loop(0, self.num_words, word, start))

    #: What `bounds` finds besides: of float32 lanes from -inf on the largest, of those from 0 on the sum.
    LARGEST, ADDED = 0, 0

    def bounds(self, begin: Any, more: tuple[jax.Array, ...]) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        """(at least the values of a group of rows, what else there is of all groups so far)."""
        return self._group(begin), more

    def dash(
        self, key: tuple[jax.Array, jax.Array], node: jax.Array | None, step: jax.Array, waits: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, list[jax.Array], jax.Array]:
        """(token of the largest sum of value and noise, whether the row is usable, more, exchanges so far).

        One pass while the row arrives: it keeps each lane's group of 8 rows with the largest bound, and the largest
        bound of its other groups. Each lane then looks for its best token in its group. Another one can only win if its
        bound reaches that of all lanes, which is rare: then a pass looks at all that reach it.

        Args:
          node: whose row arrives; None if it is there. waits: whether it has yet to be waited for; by default it has.
        """

        def noise(begin: Any) -> list[jax.Array]:
            draws = [self.draws(key, self.draw(begin + r)) for r in range(0, GROUP, 2)]
            return [gumbel_bound(word) for words in draws for word in words]

        def take(begin: Any, bounds: list[jax.Array], carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            most, at, rest, *more = carry
            values, found = self.bounds(begin, tuple(more))
            top = functools.reduce(jnp.maximum, [x + b for x, b in zip(values, bounds, strict=True)])  # NaN stays
            rest = jnp.maximum(rest, jnp.minimum(most, top))
            return jnp.maximum(most, top), where(top > most, begin, at), rest, *found

        wide = SEVERAL * GROUP

        def several(begin: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            for begin, bounds in [(b, noise(b)) for b in (begin + g * GROUP for g in range(SEVERAL))]:
                carry = take(begin, bounds, carry)
            return carry

        def word(w: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            if node is not None:
                self._await(w, node, waits)
            begin = w * WORD
            steps = jnp.clip(lax.div(self.valid - begin + (wide - 1), _i32(wide)), 0, WORD // wide)
            return lax.fori_loop(0, steps, lambda g, carry: several(begin + g * wide, carry), carry)

        low = spread(-jnp.inf, _f32)
        more = (low,) * self.LARGEST + (spread(0.0, _f32),) * self.ADDED
        most, at, rest, *more = lax.fori_loop(0, self.num_words, word, (low, spread(0, _i32), low, *more))
        rest = where(most < jnp.inf, rest, jnp.inf)  # a NaN or an inf
        base, word_, row, bound = low, spread(0, _u32), at, low
        for r in range(0, GROUP, 2):
            for i, bits_ in enumerate(self.draws(key, self.draw(at + r))):
                x = self.at(at + (r + i))
                top = x + gumbel_bound(bits_)
                better = top > bound
                rest = jnp.maximum(rest, jnp.minimum(bound, top))
                base, word_, row = where(better, x, base), where(better, bits_, word_), where(better, at + (r + i), row)
                bound = jnp.maximum(bound, top)
        scores = base + to_gumbel(word_)
        largest, added = more[: self.LARGEST], more[self.LARGEST :]
        found = self.cluster.winner(step, scores, self.token(row), [rest, *largest], added)
        score, token, (beside, *more), step = found
        fine = (beside < jnp.inf) & (score > -jnp.inf)
        late = fine & (beside + (GUMBEL_BOUND + 1e-4 + 1e-6 * jnp.abs(score)) >= score)

        def again(_: jax.Array, step: jax.Array) -> Any:
            lanes, tokens = self.settle(key, _LOWEST, self.hopeful(key, _LOWEST, score))
            return self.cluster.winner(step, lanes, tokens)[1::2]

        token, step = once(late, again, (token, step))
        return token, fine, more, step

    def elect(self, best: jax.Array, token: jax.Array, step: jax.Array) -> tuple[Best, jax.Array]:
        """(the best of all members, the lowest token of equals, exchanges so far)."""
        *found, step = self.cluster.parts(step, best, token)
        return Best(*found), step

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
        """(token of the largest sum of value and Gumbel noise among those from `cut` on, exchanges so far).

        Args:
          best: the largest logits; what they score together bounds what can win.
        """
        score = jnp.max(where(best.parts >= cut, best.parts + self.noise(key, best.tokens), -jnp.inf))
        low = jnp.maximum(cut, score - GUMBEL_MAX - (1e-4 + 1e-6 * jnp.abs(score)))
        most = jnp.max(self.mark(lambda _, xs, carry: ([x >= low for x in xs], carry))[0])
        (most,) = once(most > MANY, lambda _: (self.hopeful(key, low, score),), (most,))
        _, token, _, step = self.cluster.winner(step, *self.settle(key, cut, most))
        return jnp.clip(token, 0, self.vocab - 1), step

    def noise(self, key: tuple[jax.Array, jax.Array], token: jax.Array) -> jax.Array:
        """Gumbel noise of any tokens of the vocabulary, one a lane."""
        tile = token >> 7
        first, second = self.draws(key, (tile >> 1) * TILE + (token & (TILE - 1)))
        return to_gumbel(where((tile & 1) == 0, first, second))

    def hopeful(self, key: tuple[jax.Array, jax.Array], low: Any, score: jax.Array) -> jax.Array:
        """Marks tokens from `low` on whose bound reaches a score; how many there are in the lane that has most."""
        least = score - (1e-4 + 1e-6 * jnp.abs(score)) - GUMBEL_BOUND - 1e-4

        def test(row: jax.Array, xs: Sequence[jax.Array], carry: tuple[()]) -> tuple[list[jax.Array], tuple[()]]:
            out = []
            for r in range(0, GROUP, 2):
                for x, word in zip(xs[r : r + 2], self.draws(key, self.draw(row + r)), strict=True):
                    out.append((x >= low) & (x + gumbel_bound(word) >= least))
            return out, carry

        return jnp.max(self.mark(test)[0])

    def settle(self, key: tuple[jax.Array, jax.Array], cut: Any, most: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(largest sum of value and noise among the marked tokens from `cut` on, its token) of each lane.

        Args:
          most: how many are marked in the lane that has most.
        """

        def draw(rows: list[jax.Array], found: list[jax.Array], carry: tuple[jax.Array, jax.Array]) -> Any:
            best, token = carry
            words = [self.draws(key, self.draw(row)) for row in rows]
            for row, there, (first, second) in zip(rows, found, words, strict=True):
                x, here = self.at(row), self.token(row)
                total = x + to_gumbel(where((row & 1) == 0, first, second))
                better = there & (x >= cut) & ((total > best) | ((total == best) & (here < token)))
                best, token = where(better, total, best), where(better, here, token)
            return best, token

        return self.each_marked(most, draw, (spread(-jnp.inf, _f32), spread(NONE, _i32)), AT_ONCE)
