"""What the host and the device tell each other, column by column: what one side writes, the other reads here.

Owns the arrays that cross over between the host and a round, prefill or admission. Must not know requests.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.speculation.sampling import MAX_STOP_IDS, SamplingState
from jaxspec.speculation.state import Geometry

A = TypeVar("A", jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class _Layout(Generic[A]):
    """A view of an array, the host's or the device's, by the names of its columns."""

    array: A


class _Column:
    def __init__(self, *at: int | slice | None):
        self.at = at

    def __get__(self, layout: _Layout[A], owner: object = None) -> A:
        return layout.array[self.at]


class _Bits(_Column):
    """Some bits of a column."""

    def __init__(self, *at: int | slice | None, low: int, count: int):
        super().__init__(*at)
        self.low, self.mask = low, (1 << count) - 1

    def __get__(self, layout: _Layout[A], owner: object = None) -> A:
        return layout.array[self.at] >> self.low & self.mask


_ALL = slice(None)


class Batch(_Layout[A]):
    """The rows of a round, int32 [B, 3 + pages].

    Attributes:
      slot_B: S or more for padding.
      cap_B: most drafts to accept.
      first_B: first entry of the slot's page table to fill. pages_BP: the pages to fill in, P for none.
    """

    slot_B, cap_B, first_B, pages_BP = (_Column(_ALL, at) for at in (0, 1, 2, slice(3, None)))

    @staticmethod
    def width(geo: Geometry) -> int:
        return 3 + geo.growth_pages

    @staticmethod
    def of(
        geo: Geometry, bucket: int, slots: Sequence[int] | np.ndarray = (), caps: int | np.ndarray = 0,
        grants: Sequence[tuple[int, int, Sequence[int]]] = (),
    ) -> Batch[np.ndarray]:  # fmt: skip
        """A batch of slots and their most drafts; of grants of (row, first table entry, new pages).

        Without any slot it means no request: it reads and writes nothing of the state, and takes as long. Its rows have
        tokens of their own (`Rows.gather`), so that where experts are chosen it takes as long, too.
        """
        batch = Batch(np.zeros((bucket, Batch.width(geo)), np.int32))
        batch.slot_B[:], batch.first_B[:], batch.pages_BP[:] = geo.slots, geo.pages_per_seq, geo.num_pages
        count = len(slots)
        if not count:
            batch.slot_B[:] += np.arange(bucket, dtype=np.int32)
        else:
            batch.slot_B[:count], batch.cap_B[:count] = slots, caps
        for row, first, pages in grants:
            batch.first_B[row], batch.pages_BP[row, : len(pages)] = first, pages
        return batch

    @staticmethod
    def without_grants(batch_BX: A) -> A:
        """A batch whose pages are filled in already."""
        return batch_BX[:, :3]


class Chunks(_Layout[A]):
    """A chunk of each of B slots' prompts, int32 [B, 3].

    Attributes:
      slot_B: S for padding, which comes last. count_B: how many tokens. last_B: whether they end the prompt (1).
    """

    slot_B, count_B, last_B = (_Column(_ALL, at) for at in range(3))

    @staticmethod
    def of(geo: Geometry, bucket: int, rows: Sequence[tuple[int, int, bool]] = ()) -> Chunks[np.ndarray]:
        """Chunks of (slot, count, whether it is the prompt's last); without any they mean no request."""
        chunks = Chunks(np.zeros((bucket, 3), np.int32))
        chunks.slot_B[:] = geo.slots
        if rows:
            chunks.array[: len(rows)] = rows
        return chunks


class Text(_Layout[A]):
    """A text for the drafter's corpus, int32 [1 + L].

    Attributes:
      count: how many tokens; 0: no text. tokens_L: the tokens, anything behind them.
    """

    count, tokens_L = _Column(0), _Column(slice(1, None))

    @staticmethod
    def width(geo: Geometry) -> int:
        return 1 + geo.tokens_per_seq

    @staticmethod
    def of(geo: Geometry, tokens: Sequence[int]) -> Text[np.ndarray]:
        text = Text(np.zeros(Text.width(geo), np.int32))
        text.array[0], text.array[1 : 1 + len(tokens)] = len(tokens), tokens
        return text


class Admission(NamedTuple):
    """What gives a slot to a request; on the device, slots to B of them.

    They cross over as one int32 array [B, 3 + numbers + stop ids + M + L]; floats do as their bits.

    Attributes:
      slot, cached, total: the slot, tokens that the prefix cache holds, tokens in all.
      numbers: of the row's SamplingState, by field.
      stop_ids: K, padded with V. table: M pages. tokens: L of them. On the host the latter two may be shorter.
    """

    slot: Any
    cached: Any
    total: Any
    numbers: Mapping[str, Any]
    stop_ids: Any
    table: Any
    tokens: Any

    @staticmethod
    def _ends(geo: Geometry) -> list[int]:
        """Where the stop ids, the table and the tokens begin, and where those end."""
        ends = [3 + len(SamplingState.numbers())]
        for width in (MAX_STOP_IDS, geo.pages_per_seq, geo.tokens_per_seq):
            ends.append(ends[-1] + width)
        return ends

    @classmethod
    def packed(cls, geo: Geometry, bucket: int, requests: Sequence[Admission] = ()) -> np.ndarray:
        """The host's side. Rows without a request have one number throughout, which is no slot."""
        stops, table, tokens, end = cls._ends(geo)
        array = np.full((bucket, end), geo.slots, np.int32)
        array[: len(requests), tokens:] = 0
        array[: len(requests), table:tokens] = geo.num_pages
        types = [np.dtype(number.dtype) for number in SamplingState.numbers().values()]
        for row, request in zip(array, requests, strict=False):
            row[:3] = request.slot, request.cached, request.total
            for at, (value, dtype) in enumerate(zip(request.numbers.values(), types, strict=True), start=3):
                row[at] = np.asarray(value, dtype).view(np.int32)
            row[stops:table] = request.stop_ids
            row[table : table + len(request.table)] = request.table
            row[tokens : tokens + len(request.tokens)] = request.tokens
        return array

    @classmethod
    def of(cls, geo: Geometry, rows_BX: jax.Array) -> Admission:
        """The device's side."""
        stops, table, tokens, _ = cls._ends(geo)
        types = {name: number.dtype for name, number in SamplingState.numbers().items()}
        numbers = {
            name: jax.lax.bitcast_convert_type(rows_BX[:, at], dtype)
            for at, (name, dtype) in enumerate(types.items(), start=3)
        }
        return cls(
            rows_BX[:, 0], rows_BX[:, 1], rows_BX[:, 2], numbers, rows_BX[:, stops:table], rows_BX[:, table:tokens],
            rows_BX[:, tokens:],
        )  # fmt: skip


class End(enum.IntEnum):
    """What became of a row in a round, for the host to look at: it goes on, or one of the reasons why it is over."""

    NOT_YET = 0
    NOT_FINITE = 1
    OVER = 2


class Packed(_Layout[A]):
    """What a round or prefill emitted, int32 [B, 2 + D].

    Attributes:
      count_B: how many tokens; 0 of a row that was over before, or whose logits were not finite.
      told_B: `end_B`, and above its bits `touched_B`.
      end_B: an `End`; NOT_FINITE where the target's logits were not, OVER where a token or the length ends the text.
      touched_B: distinct experts that the pass read, over all layers, the same for every row; 0 of models without.
      tokens_BD: the tokens, -1 behind them.
    """

    count_B, told_B, tokens_BD = (_Column(_ALL, at) for at in (0, 1, slice(2, None)))
    end_B, touched_B = _Bits(_ALL, 1, low=0, count=2), _Bits(_ALL, 1, low=2, count=29)

    @staticmethod
    def width(tokens: int) -> int:
        return 2 + tokens

    @staticmethod
    def of(count_B: jax.Array, end_B: jax.Array, tokens_BD: jax.Array, touched: jax.Array | None = None) -> jax.Array:
        if touched is not None:
            end_B = end_B | touched << 2
        return jnp.concatenate([count_B[:, None], end_B[:, None], tokens_BD], axis=1)


class Budget(_Layout[A]):
    """How a packed round spends on its rows, float32 [B, 2].

    Attributes:
      offset_B: added to the logits of the row's confidences; 0 changes nothing.
      weight_B: what a token of the row is worth, relative to others'; 0 buys it nothing as long as others want some.
    """

    offset_B, weight_B = (_Column(_ALL, at) for at in range(2))

    @staticmethod
    def even(bucket: int) -> np.ndarray:
        """All rows alike."""
        return np.tile(np.asarray([0, 1], np.float32), (bucket, 1))


def plain_calibration(depth: int) -> np.ndarray:
    """What leaves confidences as they are: a slope and an intercept for each depth from 1, float32 [D, 2]."""
    return np.tile(np.asarray([1, 0], np.float32), (depth, 1))


class PackedDrafts(NamedTuple):
    """What was said of a round's drafted nodes and what became of them; crosses over behind the round's `Packed`.

    Attributes:
      confidence_BM: the drafter's own, 0 where it is not a number.
      depth_BM: from 1.
      verified_BM: whether the target looked at the node.
      known_BM: whether its parent was reached, so that the target's token in its place is known, verified or not.
      right_BM: whether that is its token.
      parent_BM: index of the node that it continues, the root's being 0.
    """

    confidence_BM: Any
    depth_BM: Any
    verified_BM: Any
    known_BM: Any
    right_BM: Any
    parent_BM: Any

    @staticmethod
    def width(num_nodes: int) -> int:
        return 2 * (num_nodes - 1)

    def columns(self) -> jax.Array:
        """The device's side, int32 [B, 2 * (N - 1)]: confidences as their bits; parents, depths and flags."""
        word_BM = (self.parent_BM << 16) | (self.depth_BM << 3)
        for at, flag_BM in enumerate((self.verified_BM, self.known_BM, self.right_BM)):
            word_BM |= flag_BM.astype(jnp.int32) << at
        return jnp.concatenate([jax.lax.bitcast_convert_type(self.confidence_BM, jnp.int32), word_BM], axis=1)

    @classmethod
    def behind(cls, packed: np.ndarray, tokens: int) -> PackedDrafts:
        """The host's side, of a round's whole result, whose `Packed` has so many tokens."""
        bits, word = np.split(packed[:, Packed.width(tokens) :], 2, axis=1)
        verified, known, right = (word >> at & 1 == 1 for at in range(3))
        return cls(bits.copy().view(np.float32), word >> 3 & 0x1FFF, verified, known, right, word >> 16)


class PackedLogprobs(_Layout[np.ndarray]):
    """Log-probabilities of emitted tokens, int32 [..., 2 + 2k]; floats cross over as their bits."""

    @staticmethod
    def of(chosen_N: jax.Array, rank_N: jax.Array, values_NK: jax.Array, ids_NK: jax.Array) -> jax.Array:
        """Of the emitted tokens, their ranks from 1, and the k best with their tokens."""
        bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
        return jnp.concatenate([bits(chosen_N)[:, None], rank_N[:, None], bits(values_NK), ids_NK], axis=1)

    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What `of` was given."""
        values, ids = np.split(self.array[..., 2:], 2, axis=-1)
        return self.array[..., 0].view(np.float32), self.array[..., 1], values.view(np.float32), ids
