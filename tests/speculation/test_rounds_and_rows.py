"""Who may write what in a round: accepted paths reach both pools, padding and neighbours stay untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.speculation.layouts import End
from jaxspec.speculation.state import Rows
from jaxspec.tier import PLAIN, Tier

V = 7
SLOTS = 12
PROMPT = [3, 1, 4, 1, 5, 1]
TIERS = [PLAIN, Tier(1), Tier(3), Tier(2, 2, 5), Tier(3, 2, 9)]
_LESS = pytest.mark.exhaustive("a deeper chain and a deeper tree have what these have")
CASES = [pytest.param(tier, marks=[_LESS] if tier in (Tier(1), Tier(2, 2, 5)) else []) for tier in TIERS]
SPARSE = Tier(3, 3, 6)


def pool_text(pages: Any, state: Any, slot: int, count: int) -> list[int]:
    """The tokens whose keys and values lie in a row's pages (they are token + 1)."""
    page = pages.shape[2]
    table = np.asarray(state.table_SM)[slot]
    entries = [np.asarray(pages)[table[p // page], 0, p % page] for p in range(count)]
    assert all((e == e[0]).all() for e in entries)
    return [int(e[0]) - 1 for e in entries]


@pytest.mark.parametrize("tier", CASES, ids=str)
def test_the_pool_holds_the_committed_text(markov: Callable[[int], Any], tier: Tier):
    """After every round: keys and values of all tokens but the root, in order, also across pages and down a tree."""
    rounds = markov(SLOTS)
    state = rounds.state(temperature_S=np.where(np.arange(SLOTS) % 3, 1.1, 0.0))
    emitted = [[] for _ in range(SLOTS)]
    for _ in range(4):
        state, packed = rounds.run(state, tier)
        for slot in range(SLOTS):
            count = packed[slot, 0]
            emitted[slot] += packed[slot, 2 : 2 + count].tolist()
            assert (packed[slot, 2 + count :] == -1).all()
            text = PROMPT + emitted[slot]
            length = int(state.length_S[slot])
            assert length == len(text) - 1
            assert np.asarray(state.tokens_SL)[slot, : len(text)].tolist() == text
            assert pool_text(state.pages, state, slot, length) == text[:-1]
            counts = np.bincount(emitted[slot], minlength=V)
            assert np.asarray(state.sampling.counts_SV)[slot].tolist() == counts.tolist()
            entries = int(state.draft.length_S[slot])
            assert pool_text(state.draft.pages, state, slot, entries) == text[:entries]
            if tier.depth:
                # The draft cache lags by what the last round committed, and never skips a token of one tier.
                assert entries == length + 1 - count
    assert max(map(len, emitted)) > 4 or tier is PLAIN


def poisoned(state: Any, slots: list[int]) -> Any:
    """Everything that belongs to the slots becomes a marker, NaN where it can."""
    own = np.asarray(state.table_SM)[slots].ravel()
    pages, draft = np.asarray(state.pages).copy(), np.asarray(state.draft.pages).copy()
    pages[own], draft[own] = np.nan, np.nan
    return dataclasses.replace(
        state, pages=jnp.asarray(pages), draft=dataclasses.replace(state.draft, pages=jnp.asarray(draft))
    )


def leaves_of(state: Any, slots: list[int]) -> list[np.ndarray]:
    """The bytes of the slots: their rows of every per-slot array, and their pages."""
    table = np.asarray(state.table_SM)[slots].ravel()
    sampling = [np.asarray(x)[slots] for x in jax.tree.leaves(state.sampling)]
    draft = state.draft
    per_slot = [state.table_SM, state.tokens_SL, state.length_S, state.over_S, draft.next_S, draft.length_S]
    pools = [np.asarray(x)[table] for x in (state.pages, state.draft.pages)]
    return [*sampling, *(np.asarray(x)[slots] for x in per_slot), *pools]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("tier", CASES, ids=str)
def test_padding_and_absent_slots_leave_no_trace(markov: Callable[[int], Any], tier: Tier, sampled: bool):
    """Peers: a padding index of -1 corrupted another request's cache. The absent slots are bait."""
    rounds = markov(SLOTS)
    fields = dict(temperature_S=1.1 if sampled else 0.0)
    present, absent = [4, 0, 7], [s for s in range(SLOTS) if s not in (4, 0, 7)]
    start = poisoned(rounds.state(**fields), absent)
    before = leaves_of(start, absent)
    full, expected = rounds.run(rounds.state(**fields), tier, sampled=sampled)
    after, packed = rounds.run(start, tier, sampled=sampled, batch=rounds.batch([*present, SLOTS, SLOTS, SLOTS]))
    for old, new in zip(before, leaves_of(after, absent), strict=True):
        np.testing.assert_array_equal(new, old)
    np.testing.assert_array_equal(packed[:3], expected[present], err_msg="output depends on slot or company")
    for old, new in zip(leaves_of(full, present), leaves_of(after, present), strict=True):
        np.testing.assert_array_equal(new, old)


def test_catching_up_with_nothing_new_forgets_nothing(markov: Callable[[int], Any]):
    rounds = markov(SLOTS)
    state = rounds.state()
    rows = Rows.gather(state, jnp.asarray([4, 0, SLOTS], jnp.int32), rounds.geo)
    catch_up = jax.jit(rounds._drafter("draft").catch_up)
    after = catch_up(rounds.core.params, state.draft, rows, state.tokens_SL)
    np.testing.assert_array_equal(after.next_S, state.draft.next_S)
    np.testing.assert_array_equal(after.length_S, state.draft.length_S)


def test_tables_grow_by_what_the_host_granted(markov: Callable[[int], Any]):
    rounds = markov(SLOTS)
    state = rounds.state()
    none = rounds.geo.num_pages
    table = np.asarray(state.table_SM).copy()
    table[:, 1:] = none
    state = dataclasses.replace(state, table_SM=jnp.asarray(table))
    batch = rounds.batch([2, 5, SLOTS])
    assert batch.shape[1] >= 5
    batch[0, 2:5] = [1, 30, none]
    batch[2, 2:5] = [0, 9, 9]  # padding that asks for pages gets none
    after = np.asarray(rounds.run(state, PLAIN, batch=batch)[0].table_SM)
    table[2, 1] = 30
    np.testing.assert_array_equal(after, table)


@pytest.mark.parametrize("tier", CASES, ids=str)
def test_a_row_without_pages_or_room_writes_nothing(markov: Callable[[int], Any], tier: Tier):
    """A round in flight may outgrow its table or its buffer: what has no place is dropped."""
    rounds = markov(SLOTS)
    state = rounds.state()
    room = rounds.geo.pages_per_seq * rounds.geo.page_size
    table = np.asarray(state.table_SM).copy()
    table[3] = rounds.geo.num_pages
    length = np.asarray(state.length_S).copy()
    length[6] = room  # its root is the buffer's last token
    state = dataclasses.replace(state, table_SM=jnp.asarray(table), length_S=jnp.asarray(length))
    after, _ = rounds.run(state, tier, batch=rounds.batch([3, 6]))
    np.testing.assert_array_equal(after.pages, state.pages)
    others = [s for s in range(SLOTS) if s not in (3, 6)]
    for old, new in zip(leaves_of(state, others), leaves_of(after, others), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("tier", [Tier(3), Tier(3, 2, 9), SPARSE], ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_drafter_of_nonsense_costs_speed_only(markov: Callable[[int], Any], tier: Tier, poison: float, sampled: bool):
    """Draft logits that are not finite after some tokens; the target's are."""
    rounds = markov(SLOTS)
    fields = dict(temperature_S=1.1 if sampled else 0.0)
    good = rounds.generate(rounds.state(**fields), PLAIN, 3, sampled=sampled)[0]
    for bad in ([0, 3], [1], list(range(V))):
        table = np.asarray(rounds.draft, np.float32).copy()
        table[bad, :5] = poison
        params = jax.tree.map(lambda _: jnp.asarray(table), rounds.core.params)  # noqa: B023
        tokens, _ = rounds.generate(rounds.state(**fields), tier, 3, sampled=sampled, draft_params=params)
        np.testing.assert_array_equal(tokens, good)


def test_logits_that_are_not_finite_are_reported_for_their_row_alone(markov: Callable[[int], Any]):
    rounds = markov(SLOTS)
    for value in (np.nan, np.inf):
        table = np.asarray(rounds.target, np.float32).copy()
        table[2, 4] = value
        params = jax.tree.map(lambda _: jnp.asarray(table), rounds.params)  # noqa: B023
        clean, rounds.params = rounds.params, params
        try:
            for tier in TIERS:
                told = []
                for rounds.params in (clean, params):
                    state = rounds.state()
                    roots = np.where(np.arange(SLOTS) == 5, 2, 1)
                    state = dataclasses.replace(state, tokens_SL=state.tokens_SL.at[:, 5].set(jnp.asarray(roots)))
                    told.append(rounds.run(state, tier)[1])
                whole, packed = told
                reached = [s for s in range(SLOTS) if 2 in whole[s, 2 : 1 + whole[s, 0]] or s == 5]
                assert np.flatnonzero(packed[:, 1] == End.NOT_FINITE).tolist() == reached, (tier, value)
                assert not packed[reached, 0].any()  # and commit nothing
        finally:
            rounds.params = clean
