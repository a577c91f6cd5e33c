"""What the host and the device tell each other, column by column: what one side writes, the other reads here.

Owns the arrays that cross over between the host and a round, prefill or admission. Must not know requests.
"""

from __future__ import annotations

import dataclasses
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


_ALL = slice(None)


class Batch(_Layout[A]):
    """The rows of a round, int32 [B, 3 + pages].

    Attributes:
      slot_B: S for padding.
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

        Without any slot it means no request: it reads and writes nothing of the state, and takes as long.
        """
        batch = Batch(np.zeros((bucket, Batch.width(geo)), np.int32))
        batch.slot_B[:], batch.first_B[:], batch.pages_BP[:] = geo.slots, geo.pages_per_seq, geo.num_pages
        count = len(slots)
        if count:
            batch.slot_B[:count], batch.cap_B[:count] = slots, caps
        for row, first, pages in grants:
            batch.first_B[row], batch.pages_BP[row, : len(pages)] = first, pages
        return batch


class Chunk(_Layout[A]):
    """A chunk of one slot's prompt, int32 [3]: the slot, how many tokens are real, whether it ends the prompt (1)."""

    slot_B, count_B, last_B = (_Column(None, at) for at in range(3))

    @staticmethod
    def of(slot: int, count: int, last: bool) -> np.ndarray:
        return np.asarray([slot, count, last], np.int32)


class Admission(NamedTuple):
    """What gives a slot to a request, as int32 [3 + numbers + stop ids] and float32 [numbers].

    Attributes:
      slot, cached, total: the slot, tokens that the prefix cache holds, tokens in all.
      numbers: of the row's SamplingState, by field; unsigned ones cross over as their bits.
      stop_ids_K: padded with V.
    """

    slot: Any
    cached: Any
    total: Any
    numbers: Mapping[str, Any]
    stop_ids_K: Any

    @staticmethod
    def _names() -> tuple[list[str], list[str]]:
        """The fields of SamplingState that are integers, and those that are not."""
        numbers = SamplingState.numbers()
        floats = [name for name, number in numbers.items() if number.dtype == jnp.float32]
        return [name for name in numbers if name not in floats], floats

    @classmethod
    def no_request(cls, geo: Geometry) -> tuple[np.ndarray, np.ndarray]:
        ints, floats = cls._names()
        return np.full(3 + len(ints) + MAX_STOP_IDS, geo.slots, np.int32), np.zeros(len(floats), np.float32)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The host's side."""
        ints, floats = ([self.numbers[name] for name in names] for names in self._names())
        values = np.asarray([self.slot, self.cached, self.total, *ints, *self.stop_ids_K], np.int64)
        return values.astype(np.int32), np.asarray(floats, np.float32)

    @classmethod
    def of(cls, ints: jax.Array, floats: jax.Array) -> Admission:
        """The device's side."""
        names, others = cls._names()
        rest = 3 + len(names)
        numbers = {name: ints[at] for at, name in enumerate(names, start=3)}
        numbers |= {name: floats[at] for at, name in enumerate(others)}
        for name, number in SamplingState.numbers().items():
            if number.dtype == jnp.uint32:
                numbers[name] = jax.lax.bitcast_convert_type(numbers[name], jnp.uint32)
        return cls(ints[0], ints[1], ints[2], numbers, ints[rest:])


class Packed(_Layout[A]):
    """What a round or prefill emitted, int32 [B, 2 + D].

    Attributes:
      count_B: how many tokens. bad_B: 1 where the target's logits were not finite.
      tokens_BD: the tokens, -1 behind them.
    """

    count_B, bad_B, tokens_BD = (_Column(_ALL, at) for at in (0, 1, slice(2, None)))

    @staticmethod
    def width(tokens: int) -> int:
        return 2 + tokens

    @staticmethod
    def of(count_B1: jax.Array, bad_B: jax.Array, tokens_BD: jax.Array) -> jax.Array:
        return jnp.concatenate([count_B1, bad_B[:, None], tokens_BD], axis=1)


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
