"""Simulated acceptance: the rate, and drafts that are right exactly where the coin says so."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench.offline.simulate import SimulatedDrafter, rate_for
from jaxspec.speculation.drafters.suffix import prompt_lookup
from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.tier import Tier

VOCAB, SLOTS = 50, 3
GEO = Geometry(slots=SLOTS, num_pages=8, page_size=16, pages_per_seq=4, max_depth=3)
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [3, 1, 4, 7, 8, 2, 8, 1, 8, 2, 8, 4]]


@pytest.mark.parametrize(("length", "depth"), [(1.0, 3), (2.5, 3), (4.0, 3), (1.5, 1)])
def test_rate_gives_the_length(length: float, depth: int):
    rate = rate_for(length, depth)
    assert sum(rate**i for i in range(depth + 1)) == pytest.approx(length, abs=1e-9)


@pytest.mark.parametrize("length", [0.9, 4.1, float("nan")])
def test_a_length_out_of_reach_is_refused(length: float):
    with pytest.raises(ValueError, match=rf"must lie in \[1, 4\] for the deepest tier, chain-3, got {length}"):
        rate_for(length, 3)


@functools.partial(jax.jit, static_argnums=0)
def tree_tokens(rate: float, text: jax.Array, length: jax.Array) -> jax.Array:
    """The root and what is drafted after `length` tokens of a text of TEXTS, which was prefilled in slot 1."""
    drafter = SimulatedDrafter(prompt_lookup(VOCAB), rate, VOCAB)
    params: Any = drafter.params((), TEXTS)
    slot = jnp.asarray([1])
    rows = lambda n: Rows(slot, jnp.asarray([True]), jnp.zeros((1, 4), jnp.int32), jnp.asarray([n]), text[n][None])
    tokens_SL = jnp.zeros((SLOTS, GEO.tokens_per_seq), jnp.int32).at[1, :12].set(text)
    state = drafter.admit(drafter.init_state(GEO), slot, jnp.asarray([0]))
    prompt = jnp.pad(text[:5], (0, 3))[None]
    state = drafter.prefill(params, state, Ragged.of(rows(0), jnp.asarray([5]), 8, 8), prompt, None)
    return drafter.draft(params, state, rows(length), tokens_SL, Tier(3), None, None, False)[0].tokens_BN[0]


def drafted(rate: float, row: int, length: int) -> np.ndarray:
    """What is drafted after `length` tokens of TEXTS[row]."""
    tokens = np.asarray(tree_tokens(rate, jnp.asarray(TEXTS[row]), jnp.asarray(length)))
    assert tokens[0] == TEXTS[row][length]
    return tokens[1:]


@pytest.mark.parametrize("row", [0, 1])
def test_rate_one_drafts_the_text_that_the_prompt_began(row: int):
    assert drafted(1.0, row, 6).tolist() == TEXTS[row][7:10]


@pytest.mark.parametrize("row", [0, 1])
def test_rate_zero_never_drafts_it(row: int):
    assert not (drafted(0.0, row, 6) == np.asarray(TEXTS[row][7:10])).any()


def test_rates_between_are_met_position_by_position():
    text = np.random.default_rng(0).integers(0, VOCAB, 700)
    drafter = SimulatedDrafter(prompt_lookup(VOCAB), 0.7, VOCAB)
    params: Any = drafter.params((), [text.tolist()])
    length = jnp.arange(600)
    rows = Rows(
        jnp.zeros_like(length), length >= 0, jnp.zeros((600, 4), jnp.int32), length, jnp.zeros_like(length)
    )  # fmt: skip
    args = drafter.init_state(GEO), rows, jnp.zeros((SLOTS, 65), jnp.int32)
    tokens_BN = jax.jit(lambda args: drafter.draft(params, *args, Tier(3), None, None, False)[0].tokens_BN)(args)
    right = np.asarray(tokens_BN)[:, 1:] == text[np.arange(600)[:, None] + np.arange(1, 4)[None, :]]
    assert abs(right.mean() - 0.7) < 0.06  # three standard deviations of 600 coins
    np.testing.assert_array_equal(right[1:, 0], right[:-1, 1])  # one coin a position, whatever the round
