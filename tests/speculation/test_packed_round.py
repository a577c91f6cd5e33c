"""Rounds under a budget: whatever is looked at, the tokens are those of plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.tiny import tiny_target
from jaxspec.speculation.drafters.suffix import prompt_lookup
from jaxspec.speculation.layouts import Batch, Budget, PackedDrafts, plain_calibration
from jaxspec.speculation.packed import packed_fn
from jaxspec.speculation.round import RoundSpec
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.speculation.typical import Typical
from jaxspec.tier import PLAIN, Tier

V, SLOTS, COUNT = 7, 12, 7
TREE, DEEP = Tier(2, 2, 5), Tier(3, 2, 9)
PROMPT = [3, 1, 4, 1, 5, 1]
#: Greedy and sampled rows, filters and penalties, side by side.
FIELDS: dict[str, Any] = dict(
    temperature_S=np.resize([0.0, 1.0, 0.7, 1.5], SLOTS), top_p_S=np.resize([1.0, 1.0, 0.8], SLOTS),
    repetition_S=np.resize([1.0, 1.6], SLOTS), top_k_S=np.resize([0, 0, 0, 0, 3], SLOTS),
    frequency_S=np.resize([0.0, 0.0, 0.4], SLOTS), bias_SV=np.linspace(0, 1, SLOTS * V).reshape(SLOTS, V),
)  # fmt: skip
RARE = pytest.mark.exhaustive("further budgets of the same rounds")


def spending(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A calibration and weights that mean nothing, some of them not even numbers."""
    fit, rows = rng.normal(size=(3, 2)), rng.normal(size=(SLOTS, 2))
    fit[rng.random((3, 2)) < 0.1], rows[rng.random((SLOTS, 2)) < 0.1] = np.nan, np.nan
    return fit.astype(np.float32), rows.astype(np.float32)


def check_pool(state: Any, slot: int, text: list[int]) -> None:
    """Keys and values of all tokens but the last are in the slot's pages (they are token + 1)."""
    page, table = state.pages.shape[2], np.asarray(state.table_SM)[slot]
    at = np.arange(min(len(text) - 1, page * len(table)))  # what has no page is dropped
    held = np.asarray(state.pages)[table[at // page], 0, at % page]
    np.testing.assert_array_equal(held, np.repeat(np.asarray(text)[at][:, None] + 1, held.shape[1], axis=1))


@pytest.mark.parametrize(
    ("kind", "tier", "sampled", "tokens"),
    [
        ("draft", Tier(3), True, SLOTS), ("draft", Tier(3), True, 21), ("ngram", Tier(3), True, 20),
        ("draft", DEEP, True, 34), ("parallel", TREE, True, 25), ("draft", DEEP, False, 30),
        *(pytest.param("draft", Tier(3), False, t, marks=RARE) for t in range(SLOTS, 4 * SLOTS + 1, 9)),
        *(pytest.param("draft", DEEP, True, t, marks=RARE) for t in range(SLOTS + 1, 9 * SLOTS + 1, 19)),
        *(pytest.param(k, Tier(3), True, 4 * SLOTS, marks=RARE) for k in ("draft", "ngram", "parallel")),
    ],
    ids=str,
)  # fmt: skip
def test_any_admission_emits_the_tokens_of_plain_decoding(
    markov: Callable[[int], Any], kind: str, tier: Tier, sampled: bool, tokens: int
):
    """Confidences of every kind, calibrations, weights and limits that change every round."""
    rounds, rng = markov(SLOTS), np.random.default_rng(tokens)
    fields = FIELDS if sampled else {"temperature_S": 0.0}
    expected, _ = rounds.generate(rounds.state(**fields), PLAIN, COUNT, sampled=sampled)
    own, accepted = rounds.core.params if kind == "draft" else (), []
    for which in range(5):
        state, verified = rounds.state(**fields), 0
        emitted = [[*PROMPT] for _ in range(SLOTS)]
        for i in range(COUNT):
            batch = rounds.batch(rng.permutation(SLOTS))
            Batch(batch).cap_B[:] = rng.integers(0, tier.depth + 1, SLOTS) if i % 2 else tier.depth
            spend = spending(rng) if i >= COUNT // 2 else None
            state, packed = rounds.run(
                state, tier, kind=f"unsure {kind}", sampled=sampled, batch=batch, tokens=tokens, spend=spend,
                draft_params=(own, which),
            )  # fmt: skip
            assert not packed[:, 1].any()
            told = PackedDrafts.behind(packed, tier.depth + 1)
            # What is verified fits the budget and the rows' limits, and spends all of it where they leave room.
            verified += told.verified_BM.sum()
            assert told.verified_BM.sum() <= tokens - SLOTS
            assert (told.depth_BM <= Batch(batch).cap_B[:, None])[told.verified_BM].all()
            if not i % 2:
                assert told.verified_BM.sum() == tokens - SLOTS
            for row, slot in enumerate(Batch(batch).slot_B):
                emitted[slot] += packed[row, 2 : 2 + packed[row, 0]].tolist()
        for slot, text in enumerate(emitted):
            assert text[len(PROMPT) : len(PROMPT) + COUNT] == expected[slot].tolist(), Unsure[which]
            check_pool(state, slot, text)
        accepted.append(sum(map(len, emitted)) - SLOTS * (len(PROMPT) + COUNT))
        assert (accepted[-1] > 0) == (tokens > SLOTS), (Unsure[which], verified)
    if sampled and kind != "ngram" and SLOTS < tokens < 3 * SLOTS:  # greedy rows of one prompt are all alike
        assert accepted[0] > accepted[1], "confidences choose better than their opposite"


Unsure = ("its own", "inverted", "random", "constant", "NaN")


@pytest.mark.parametrize(("kind", "tier", "sampled"), [("draft", Tier(3), True), ("parallel", DEEP, False)], ids=str)
def test_a_budget_for_every_node_leaves_what_a_whole_round_leaves(
    markov: Callable[[int], Any], kind: str, tier: Tier, sampled: bool
):
    rounds = markov(SLOTS)
    fields = FIELDS if sampled else {"temperature_S": 0.0}
    whole = packed = rounds.state(**fields)
    batch = rounds.batch()
    Batch(batch).cap_B[3:6] = [0, 1, 2]
    for _ in range(4):
        whole, one = rounds.run(whole, tier, kind=kind, sampled=sampled, batch=batch)
        packed, other = rounds.run(packed, tier, kind=kind, sampled=sampled, batch=batch, tokens=SLOTS * tier.num_nodes)
        np.testing.assert_array_equal(one, other[:, : one.shape[1]])
        jax.tree.map(np.testing.assert_array_equal, whole, packed)


def test_padding_takes_nothing_from_the_budget(markov: Callable[[int], Any]):
    """Rows of a padded batch verify all their drafts; absent slots are not touched."""
    rounds, tier = markov(SLOTS), Tier(3)
    absent = [s for s in range(SLOTS) if s not in (4, 0, 7)]
    start = rounds.state(**FIELDS)
    batch = rounds.batch([4, 0, 7, *[SLOTS] * (SLOTS - 3)])
    after, packed = rounds.run(start, tier, batch=batch, tokens=21)
    assert PackedDrafts.behind(packed, 4).verified_BM.sum(axis=1).tolist() == [3] * 3 + [0] * (SLOTS - 3)
    whole, expected = rounds.run(start, tier, batch=batch)
    np.testing.assert_array_equal(packed[:3, : expected.shape[1]], expected[:3])
    np.testing.assert_array_equal(after.tokens_SL[np.asarray(absent)], start.tokens_SL[np.asarray(absent)])
    jax.tree.map(np.testing.assert_array_equal, whole, after)


@pytest.mark.parametrize("tier", [Tier(3), DEEP], ids=str)
def test_labels_are_the_targets_own_tokens(markov: Callable[[int], Any], tier: Tier):
    """Against rounds that verify everything: one step beyond what was verified, the label is known all the same."""
    rounds, tokens = markov(SLOTS), 21 if tier.is_chain else 34
    state, beyond = rounds.state(**FIELDS), 0
    for _ in range(4):
        _, whole = rounds.run(state, tier, tokens=SLOTS * tier.num_nodes)
        after, packed = rounds.run(state, tier, tokens=tokens)
        all_of, some = (PackedDrafts.behind(x, tier.depth + 1) for x in (whole, packed))
        np.testing.assert_array_equal(all_of.confidence_BM, some.confidence_BM)
        np.testing.assert_array_equal(all_of.depth_BM, some.depth_BM)
        assert all_of.verified_BM.all() and (all_of.known_BM | ~some.known_BM).all()
        np.testing.assert_array_equal(all_of.right_BM[some.known_BM], some.right_BM[some.known_BM])
        assert not some.right_BM[~some.known_BM].any()
        for told, result in ((all_of, whole), (some, packed)):
            assert ((told.right_BM & told.verified_BM).sum(axis=1) == result[:, 0] - 1).all()
            assert told.known_BM[told.depth_BM == 1].all()
        beyond += (some.known_BM & ~some.verified_BM).sum()
        state = after
    assert beyond > 0


def test_what_no_budget_can_serve_is_refused(markov: Callable[[int], Any]):
    rounds = markov(SLOTS)
    spec = RoundSpec(
        rounds.graph,
        nnx.merge(rounds.graph, rounds.params).config,
        rounds.geo,
        rounds._drafter("draft"),
        rejection=True,
    )
    with pytest.raises(ValueError, match="needs coupled verification, got 'rejection'"):
        packed_fn(spec, Tier(3), True, 20)
    spec = dataclasses.replace(spec, rejection=False, typical=Typical())
    with pytest.raises(ValueError, match="needs coupled verification, got 'typical'"):
        packed_fn(spec, Tier(3), True, 20)
    with pytest.raises(ValueError, match="a budget is for drafted tokens, got tier off"):
        packed_fn(dataclasses.replace(spec, typical=None), PLAIN, True, 20)


def test_dense_layers_see_the_budget_alone():
    """Every product with a weight has T rows, none B * N; and no pool is copied."""
    geo = Geometry(slots=5, num_pages=4096, page_size=8, pages_per_seq=16, max_depth=3)
    target = tiny_target(0, num_layers=2)
    graph, params = nnx.split(target)
    drafter = prompt_lookup(target.config.vocab_size)
    spec = RoundSpec(graph, target.config, geo, drafter, rejection=False)
    state = jax.eval_shape(
        lambda: DecodeState.empty(target.config, geo, jnp.dtype(jnp.float32), drafter.init_state(geo))
    )
    args = params, (), state, Batch.of(geo, 5).array, plain_calibration(3), Budget.even(5)
    lowered = jax.jit(packed_fn(spec, Tier(3), False, 11), donate_argnums=2).lower(*args)
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    dense = [line.split(" : (tensor<")[1].split("x")[0] for line in products if "batching_dims" not in line]
    assert dense == ["11"] * len(dense) and len(dense) >= 4 * 2 + 1
    memory = lowered.compile().memory_analysis()
    pool = state.pages.size * state.pages.dtype.itemsize
    assert memory is not None and memory.temp_size_in_bytes < pool / 4
