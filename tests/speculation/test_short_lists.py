"""Short lists of walks: what a draft from a few candidates is, for greedy, sampled, drawn and guided rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.layers import Shared
from jaxspec.models.tiny import tiny_config
from jaxspec.speculation.drafters.dspark_head import SHORTLIST, DsparkConfig, DsparkHead
from jaxspec.speculation.drafters.proposals import Ranking, propose
from jaxspec.speculation.drafters.walks import Shortlist, walked
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Rows
from jaxspec.tier import Tier
from pallas_kernels.rejection_sampling.noise import Purpose, gumbel_noise_at

ROWS, DEPTH, DRAFTED, VOCAB, COUNT = 6, 3, 30, 40, 5
TEMPERATURE = np.array([0.0, 1.0, 0.7, 0.0, 1.3, 1.0], np.float32)
LENGTH = np.arange(ROWS, dtype=np.int32) + 7


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    """Logits of a block, what follows each token, ids of the draft vocabulary, and rows of which one is guided."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.permutation(VOCAB)[:DRAFTED])
    allowed = np.ones((ROWS, VOCAB), bool)
    allowed[4] = rng.random(VOCAB) < 0.3
    bits = np.pad(allowed, ((0, 0), (0, 64 - VOCAB))).reshape(ROWS, 2, 32).astype(np.uint32)
    words = (bits << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)
    words = np.repeat(words[:, None], DEPTH, axis=1)
    return dict(
        logits=2 * rng.standard_normal((ROWS, DEPTH, DRAFTED)).astype(np.float32),
        after=2 * rng.standard_normal((VOCAB, DRAFTED)).astype(np.float32),
        ids=ids, allowed=allowed, words=words, roots=rng.integers(0, VOCAB, ROWS).astype(np.int32),
    )  # fmt: skip


def drafted(given: dict[str, Any], tier: Tier, *, sample: bool, sampled: bool = True) -> Any:
    """A draft whose logits after each token are the place's and the token's, from lists of the place's best."""
    sampling = SamplingState.empty(ROWS, VOCAB)
    sampling = dataclasses.replace(
        sampling, temperature_S=jnp.asarray(TEMPERATURE), seed_S=jnp.arange(ROWS, dtype=jnp.uint32) + jnp.uint32(5)
    )
    slot_B, valid_B = jnp.arange(ROWS), jnp.ones((ROWS,), bool)
    root_B, length_B = jnp.asarray(given["roots"]), jnp.asarray(LENGTH)
    rows = Rows(slot_B, valid_B, jnp.zeros((ROWS, 1), jnp.int32), length_B, root_B, jnp.asarray(given["words"]))
    ranking = Ranking(rows, sampling if sampled else None, None, VOCAB, jnp.asarray(given["ids"]))
    short = Shortlist.of(ranking, jnp.asarray(given["logits"]), COUNT, sample=sample)

    def levels(depth: int, frontier: Any) -> jax.Array:
        tokens_BW = root_B[:, None] if frontier is None else frontier.tokens_BW
        after_BWV = jnp.take(jnp.asarray(given["after"]), tokens_BW, axis=0)
        return jnp.take_along_axis(after_BWV, short.ids_BDK[:, depth - 1][:, None], axis=2)

    return propose(levels, short, tier, sample=sample)


def noise_at(row: int, depth: int, given: dict[str, Any]) -> np.ndarray:
    """The target's noise of a row's drafted tokens; nothing where it is greedy."""
    if TEMPERATURE[row] == 0:
        return np.zeros(DRAFTED)
    seed, position = jnp.asarray([row + 5], jnp.uint32), jnp.asarray([LENGTH[row] + depth], jnp.int32)
    return np.asarray(gumbel_noise_at(seed, position, jnp.asarray(given["ids"]), Purpose.TARGET))[0]


def test_chains_are_the_best_of_the_list(given: dict[str, Any]) -> None:
    """Of the place's best by its own scores, noise and grammar included, the best with what the last token adds."""
    tree = jax.jit(lambda: drafted(given, Tier(DEPTH), sample=False))()
    elsewhere = 0
    for row in range(ROWS):
        last, heat = given["roots"][row], TEMPERATURE[row] or 1.0
        allowed = given["allowed"][row][given["ids"]]
        for depth in range(1, DEPTH + 1):
            own = given["logits"][row, depth - 1] / heat + noise_at(row, depth, given)
            own = np.where(allowed, own, -np.inf)
            listed = np.argsort(-own, kind="stable")[:COUNT]
            whole = own + given["after"][last] / heat
            best = listed[whole[listed].argmax()]
            elsewhere += best != whole.argmax()
            last = int(tree.tokens_BN[row, depth])
            assert last == given["ids"][best], (row, depth)
            share = np.exp(whole[best]) / np.exp(whole[listed]).sum()
            np.testing.assert_allclose(tree.confidence_BN[row, depth], share, rtol=1e-4)
    assert elsewhere, "the list leaves something out, or this shows nothing"


def test_trees_and_greedy_batches_keep_to_the_list(given: dict[str, Any]) -> None:
    tree = jax.jit(lambda: drafted(given, Tier(2, 2, 7), sample=False, sampled=False))()
    for row in range(ROWS):
        allowed = given["allowed"][row][given["ids"]]
        level = lambda depth, row=row, allowed=allowed: np.where(allowed, given["logits"][row, depth - 1], -np.inf)
        children = lambda token, depth, level=level: [
            int(given["ids"][i])
            for i in sorted(
                np.argsort(-level(depth), kind="stable")[:COUNT],
                key=lambda i: -(level(depth)[i] + given["after"][token][i]),
            )[:2]
        ]
        first = children(given["roots"][row], 1)
        expected = {(t,) for t in first} | {(t, u) for t in first for u in children(t, 2)}
        tokens, parents = np.asarray(tree.tokens_BN[row]), np.asarray(tree.parents_BN[row])
        paths = {
            (int(tokens[n]),) if parents[n] == 0 else (int(tokens[parents[n]]), int(tokens[n])) for n in range(1, 7)
        }
        assert paths == expected, row


def test_drawn_drafts_say_what_they_were_drawn_from(given: dict[str, Any]) -> None:
    """Rejection is exact for the distribution that is returned: the list's, whatever the noise."""
    tree = jax.jit(lambda: drafted(given, Tier(DEPTH), sample=True))()
    probs = np.asarray(tree.draft_probs_BDV, np.float64)
    np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-5)
    for row in np.flatnonzero(TEMPERATURE):
        last, allowed = given["roots"][row], given["allowed"][row][given["ids"]]
        for depth in range(1, DEPTH + 1):
            own = np.where(allowed, given["logits"][row, depth - 1], -np.inf).astype(np.float64)
            listed = np.argsort(-own, kind="stable")[:COUNT]
            x = np.full(VOCAB, -np.inf)
            x[given["ids"][listed]] = (own + given["after"][last])[listed] / TEMPERATURE[row]
            expected = np.exp(x - x.max())
            np.testing.assert_allclose(probs[row, depth - 1], expected / expected.sum(), rtol=1e-4, atol=1e-7)
            last = int(tree.tokens_BN[row, depth])
            assert expected[last] > 0


def test_a_small_table_is_walked_whole() -> None:
    """What its place alone ranks below a list's end is drafted where the token before asks for it."""
    layer = tiny_config(vocab_size=VOCAB, num_layers=1, qk_norm=True)
    cfg = DsparkConfig(layer, (1, 2), DEPTH, 0, VOCAB, markov_rank=6)
    head = DsparkHead(cfg, Shared(jnp.zeros((VOCAB, layer.hidden_size))), None, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    before, after = 2 * rng.standard_normal((2, VOCAB, 6)).astype(np.float32)
    head.markov.before.set_value(jnp.asarray(before))
    head.markov.after.set_value(jnp.asarray(after))
    logits = rng.standard_normal((ROWS, DEPTH, VOCAB)).astype(np.float32)
    roots, none = rng.integers(0, VOCAB, ROWS).astype(np.int32), jnp.zeros((ROWS, 1), jnp.int32)
    rows = Rows(jnp.arange(ROWS), jnp.ones(ROWS, bool), none, none[:, 0], jnp.asarray(roots))
    hidden = jnp.zeros((ROWS, DEPTH, layer.hidden_size))
    tree, _ = walked(head, rows.root_B, hidden, jnp.asarray(logits), Ranking(rows, None, None, VOCAB), Tier(DEPTH))
    tokens, low = roots, 0
    for depth in range(DEPTH):
        place = logits[:, depth]
        tokens = np.argmax(place + before[tokens] @ after.T, axis=1)
        np.testing.assert_array_equal(tree.tokens_BN[:, depth + 1], tokens)
        low += int((np.sum(place > np.take_along_axis(place, tokens[:, None], axis=1), axis=1) >= SHORTLIST).sum())
    assert low
