"""Rows end on the device where a plain reading of their text says so, and say and write nothing from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.speculation.layouts import End
from jaxspec.tier import PLAIN, Tier

V, EOS = 7, 6
SLOTS = 12
PROMPT = [3, 1, 4, 1, 5, 1]
STOPS = np.full((SLOTS, 40), V)
STOPS[:, 0], STOPS[:, 1], STOPS[:, 2] = np.arange(SLOTS) % V, 2, EOS
#: Lengths, the least one more than the prompt, and what each row's text ends by.
RULES = {
    "ends_at_S": np.where(np.arange(SLOTS) % 4, len(PROMPT) + 1 + np.arange(SLOTS), 2**31 - 1),
    "eos_ends_S": np.arange(SLOTS) % 2,
    "num_stops_S": np.arange(SLOTS) % 3,
    "ban_until_S": len(PROMPT) + np.arange(SLOTS) % 5 // 3 * 2,
    "stop_ids_SK": STOPS,
}
CASES = [(PLAIN, None, False), (Tier(3), None, True), (Tier(2, 2, 5), None, False), (Tier(3), 30, True)]


def ends(slot: int, token: int, length: int) -> bool:
    """Whether a text of so many tokens is over with its last one."""
    stops = STOPS[slot, : RULES["num_stops_S"][slot]].tolist() + [EOS] * int(RULES["eos_ends_S"][slot])
    return length >= RULES["ends_at_S"][slot] or (token in stops and length > RULES["ban_until_S"][slot])


def start(rounds: Any) -> Any:
    return rounds.state(temperature_S=np.where(np.arange(SLOTS) % 3, 1.1, 0.0), **RULES)


def of_slot(state: Any, slot: int) -> list[np.ndarray]:
    """What a slot holds, its pages among it."""
    table = np.asarray(state.table_SM)[slot]
    per_slot = [state.tokens_SL, state.length_S, state.over_S, state.draft.next_S, state.draft.length_S]
    rows = [np.asarray(x)[slot] for x in [*jax.tree.leaves(state.sampling), *per_slot]]
    return [*rows, *(np.asarray(x)[table] for x in (state.pages, state.draft.pages))]


@pytest.mark.parametrize(("tier", "tokens", "sampled"), CASES, ids=str)
def test_rows_end_where_their_texts_do_and_stay_idle(
    markov: Callable[[int], Any], tier: Tier, tokens: int | None, sampled: bool
):
    rounds = markov(SLOTS)
    state, texts, over = start(rounds), [list(PROMPT) for _ in range(SLOTS)], [False] * SLOTS
    ended = idle = 0
    for _ in range(4):
        before, (state, packed) = state, rounds.run(state, tier, sampled=sampled, tokens=tokens)
        for slot, row in enumerate(packed[:, : 3 + tier.depth].tolist()):
            count, end, *said = row
            if over[slot]:
                idle += 1
                assert (count, end) == (0, End.NOT_YET) and set(said) == {-1}
                for x, y in zip(of_slot(state, slot), of_slot(before, slot), strict=True):
                    np.testing.assert_array_equal(x, y)
                continue
            assert count >= 1
            for token in said[:count]:
                texts[slot].append(token)
                over[slot] |= ends(slot, token, len(texts[slot]))
            assert end == (End.OVER if over[slot] else End.NOT_YET), (slot, texts[slot])
            ended += over[slot]
    assert ended >= 5 and idle >= 3 and not all(over)


@pytest.mark.parametrize(("tier", "tokens", "sampled"), CASES, ids=str)
def test_several_rounds_at_once_are_as_many_one_by_one(
    markov: Callable[[int], Any], tier: Tier, tokens: int | None, sampled: bool
):
    """All that is said and all that is left, though rows end on the way; pages granted before the first."""
    rounds = markov(SLOTS)
    options = dict(sampled=sampled, tokens=tokens)
    state, said = start(rounds), []
    for _ in range(3):
        state, packed = rounds.run(state, tier, **options)
        said.append(packed)
    at_once, packed = rounds.run(start(rounds), tier, several=3, **options)
    np.testing.assert_array_equal(packed, np.stack(said))
    for x, y in zip(jax.tree.leaves(at_once), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(x, y)
