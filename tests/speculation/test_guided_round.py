"""Rounds in three parts, under masks: what they leave, whose tokens they emit, and that no pool is copied.

A grammar here is a table of what may follow each token, so that plain decoding on a table of logits that lacks the rest
says what is right.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from jaxspec.models.tiny import tiny_target
from jaxspec.speculation import guided
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import DraftModelCore
from jaxspec.speculation.drafters.proposals import Ranking
from jaxspec.speculation.drafters.suffix import prompt_lookup
from jaxspec.speculation.layouts import Admission, Batch
from jaxspec.speculation.prefill import prefill_fn
from jaxspec.speculation.round import RoundSpec, round_fn
from jaxspec.speculation.sampling import restrict_logits, unpack_bits
from jaxspec.speculation.state import DecodeState, Geometry, Rows
from jaxspec.speculation.typical import Typical
from jaxspec.tier import PLAIN, Tier

V, SLOTS = 7, 48
TREE, DEEP = Tier(2, 2, 5), Tier(3, 2, 9)
#: Bit t of entry s: token t may follow token s. Token 1, the prompt's last, forces 2, and 2 forces 4.
FOLLOW = np.asarray([0b0101101, 0b0000100, 0b0010000, 0b1111111, 0b1001011, 0b0100010, 0b0111000], np.int32)
ALLOWED = (FOLLOW[:, None] >> np.arange(V)) & 1 == 1
#: Greedy and sampled rows, filters and penalties, side by side.
FIELDS: dict[str, Any] = dict(
    temperature_S=np.resize([0.0, 1.0, 0.7, 1.5], SLOTS), top_p_S=np.resize([1.0, 1.0, 0.8], SLOTS),
    repetition_S=np.resize([1.0, 1.6], SLOTS), top_k_S=np.resize([0, 0, 0, 0, 3], SLOTS),
)  # fmt: skip


class Parts:
    """Rounds of one tier, in three parts with masks between them, and whole."""

    def __init__(self, rounds: Any, kind: str, tier: Tier, *, rejection: bool = False, typical: Typical | None = None):
        self.rounds, self.kind, self.tier = rounds, kind, tier
        config = nnx.merge(rounds.graph, rounds.params).config
        self.spec = RoundSpec(rounds.graph, config, rounds.geo, rounds._drafter(kind), rejection, typical)
        self.draft = jax.jit(guided.draft_fn(self.spec, tier))
        self.forward = jax.jit(guided.forward_fn(self.spec))
        self.settle = jax.jit(guided.settle_fn(self.spec, tier))
        self.whole = jax.jit(round_fn(self.spec, tier, True))
        self.params = rounds.core.params if kind == "draft" else ()

    def inside(self, state: DecodeState) -> DecodeState:
        """The state as this drafter has it."""
        if self.kind == "draft":
            return state
        return dataclasses.replace(state, draft=self.spec.drafter.init_state(self.spec.geo))

    def ahead(self, state: DecodeState, free: np.ndarray) -> np.ndarray:
        """What Matcher.ahead says of the table; rows of `free` may say anything."""
        length = np.asarray(state.length_S)
        token = np.asarray(state.tokens_SL)[np.arange(len(length)), length]
        out = np.full((len(length), self.tier.depth, 1), -1, np.int32)
        forced = ~free
        for depth in range(self.tier.depth):
            out[forced, depth, 0] = FOLLOW[token[forced]]
            forced = forced & (ALLOWED[token].sum(axis=1) == 1)
            token = np.where(forced, np.argmax(ALLOWED[token], axis=1), 0)
        return out

    def run(self, state: DecodeState, free: np.ndarray, follow: np.ndarray = FOLLOW) -> tuple[DecodeState, np.ndarray]:
        """One guided round: (state, packed)."""
        batch = self.rounds.batch()
        if self.tier.depth == 0:
            length = np.asarray(state.length_S)
            root = np.asarray(state.tokens_SL)[np.arange(len(length)), length]
            masks = np.where(free, -1, follow[root]).astype(np.int32)[:, None, None]
            state, packed, _ = self.whole(self.rounds.params, self.params, state, batch, masks)
            return state, np.asarray(packed)
        ahead = self.ahead(state, free) if follow is FOLLOW else np.full((len(batch), self.tier.depth, 1), -1, np.int32)
        state, drafted, shown = self.draft(self.params, state, batch, ahead)
        tree = drafted.tree
        forward = self.forward(self.rounds.params, state, batch, tree.tokens_BN, tree.depths_BN, tree.ancestors_BNN)
        np.testing.assert_array_equal(shown, np.stack([tree.tokens_BN, tree.parents_BN], axis=1))
        tokens = np.minimum(np.asarray(shown)[:, 0], V - 1)
        masks = np.where(free[:, None], -1, follow[tokens]).astype(np.int32)[:, :, None]
        state, packed, _ = self.settle((), state, batch, drafted, forward, masks)
        return state, np.asarray(packed)


def restricted(table: np.ndarray) -> np.ndarray:
    return np.where(ALLOWED, table, table - 1e30).astype(np.float32)


@pytest.fixture(scope="module")
def parts(markov: Callable[[int], Any]) -> Callable[..., Parts]:
    """Parts of SLOTS rows, compiled once each."""
    made: dict[Any, Parts] = {}
    return lambda kind, tier: made.setdefault((kind, tier), Parts(markov(SLOTS), kind, tier))


FREE = np.arange(SLOTS) % 3 == 0
COUNT = 4


@pytest.fixture(scope="module")
def expected(markov: Callable[[int], Any], parts: Callable[..., Parts]) -> np.ndarray:
    """Plain decoding's tokens; those of rows that are not free on a target without the refused."""
    rounds, out = markov(SLOTS), np.empty((SLOTS, COUNT), np.int32)
    for rows, params in ((FREE, rounds.params), (~FREE, jax.tree.map(restricted, rounds.params))):
        state = rounds.state(**FIELDS)
        first = int(state.length_S[0]) + 1
        for _ in range(COUNT):
            state, _, _ = parts("draft", PLAIN).whole(params, (), state, rounds.batch())
        out[rows] = np.asarray(state.tokens_SL)[rows, first : first + COUNT]
    return out


@pytest.mark.parametrize(
    ("kind", "tier"), [("draft", Tier(3)), ("draft", DEEP), ("ngram", Tier(3)), ("parallel", DEEP)], ids=str
)
def test_parts_leave_what_a_whole_round_leaves(parts: Callable[..., Parts], kind: str, tier: Tier):
    rounds = parts(kind, tier)
    whole = in_parts = rounds.inside(rounds.rounds.state(**FIELDS))
    for _ in range(3):
        whole, packed, _ = rounds.whole(rounds.rounds.params, rounds.params, whole, rounds.rounds.batch())
        in_parts, other = rounds.run(in_parts, np.zeros(SLOTS, bool), np.full(V, -1, np.int32))
        np.testing.assert_array_equal(packed, other)
        jax.tree.map(np.testing.assert_array_equal, whole, in_parts)


ALIKE = pytest.mark.exhaustive("tiers between those of the gate")


@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        ("draft", PLAIN), ("draft", Tier(1)), ("draft", Tier(3)), ("draft", DEEP), ("ngram", Tier(3)),
        ("parallel", DEEP), pytest.param("draft", TREE, marks=ALIKE), pytest.param("parallel", Tier(2), marks=ALIKE),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_those_of_plain_decoding_without_the_refused(
    parts: Callable[..., Parts], expected: np.ndarray, kind: str, tier: Tier
):
    """Every third row is free: its tokens are those of rounds that know no masks."""
    rounds = parts(kind, tier)
    state, accepted = rounds.inside(rounds.rounds.state(**FIELDS)), 0
    first = int(state.length_S[0]) + 1
    for _ in range(COUNT):
        state, packed = rounds.run(state, FREE)
        assert not packed[:, 1].any()
        accepted += int(packed[:, 0].sum()) - SLOTS
    tokens = np.asarray(state.tokens_SL)[:, first : first + COUNT]
    np.testing.assert_array_equal(tokens, expected)
    assert (accepted > 0) == (tier.depth > 0)
    for row in tokens[~FREE]:
        assert all(ALLOWED[a, b] for a, b in itertools.pairwise([1, *row]))


def test_typical_acceptance_emits_allowed_tokens_only(markov: Callable[[int], Any]):
    rounds = markov(SLOTS)
    parts = Parts(rounds, "draft", DEEP, typical=Typical())
    state, free = rounds.state(**FIELDS), np.zeros(SLOTS, bool)
    for _ in range(4):
        state, packed = parts.run(state, free)
        assert not packed[:, 1].any()
    for row, length in zip(np.asarray(state.tokens_SL), np.asarray(state.length_S), strict=True):
        text = row[5 : length + 1]
        assert len(text) > 4 and all(ALLOWED[a, b] for a, b in itertools.pairwise(text))


@pytest.mark.parametrize("prompt_end", [1, 4])
def test_rejection_has_the_restricted_distribution(
    markov: Callable[[int], Any], exact_joint: Callable[..., Any], prompt_end: int
):
    """Drafts are drawn from the restricted q; behind a forced token and behind a free choice."""
    slots = 6000
    rounds = markov(slots)
    prompt = [3, 1, 4, 1, 5, prompt_end]
    parts = Parts(rounds, "draft", Tier(2), rejection=True)
    state, accepted = rounds.state(prompt, temperature_S=1.0, top_k_S=5), 0
    for _ in range(3):
        state, packed = parts.run(state, np.zeros(slots, bool))
        accepted += int((packed[:, 0] > 1).sum())
    exact = exact_joint(restricted(rounds.target), 3, prompt, dict(temperature=1.0, top_k=5), {})
    counts = np.zeros(exact.shape)
    np.add.at(counts, tuple(np.asarray(state.tokens_SL)[:, 6:9].T), 1)
    assert counts[exact == 0].sum() == 0 and accepted > slots / 4
    large = exact * slots >= 5
    observed, wanted = np.append(counts[large], counts[~large].sum()), np.append(exact[large], exact[~large].sum())
    assert stats.chisquare(observed[wanted > 0], wanted[wanted > 0] * slots).pvalue > 1e-4


@pytest.mark.parametrize(
    ("kind", "tier"), [("draft", Tier(3)), ("ngram", Tier(3)), ("draft", DEEP), ("parallel", DEEP)]
)
def test_drafts_keep_to_what_is_allowed_ahead(parts: Callable[..., Parts], kind: str, tier: Tier):
    """After token 1 come 2 and 4, whatever the drafter thinks; then one of what may follow 4."""
    rounds = parts(kind, tier)
    state = rounds.inside(rounds.rounds.state(**FIELDS))
    ahead = rounds.ahead(state, np.zeros(SLOTS, bool))
    assert ahead[0, :, 0].tolist() == [FOLLOW[1], FOLLOW[2], FOLLOW[4]]
    _, drafted, _ = rounds.draft(rounds.params, state, rounds.rounds.batch(), ahead)
    tokens, parents = np.asarray(drafted.tree.tokens_BN), np.asarray(drafted.tree.parents_BN)
    for row in range(SLOTS):
        first = int(np.flatnonzero((parents[row] == 0) & (tokens[row] == 2) & (np.arange(tier.num_nodes) > 0))[0])
        second = int(np.flatnonzero((parents[row] == first) & (tokens[row] == 4))[0])
        third = tokens[row][(parents[row] == second) & (np.arange(tier.num_nodes) > 0)]
        assert len(third) >= 1 and all(t == V or ALLOWED[4, t] for t in third[:1])


def test_prompt_lookup_drops_a_refused_first_token():
    """The text repeats 0 1 2 3: after 0 comes 1, unless something else is forced or 1 is refused."""
    text = [0, 1, 2, 3] * 3 + [0]
    tokens = jnp.zeros((3, 32), jnp.int32).at[:, : len(text)].set(jnp.asarray(text))
    allowed = np.full((3, 3, 2), -1, np.int32)
    allowed[1, 0], allowed[1, 1] = [0, 1 << 8], [0, -(2**31)]  # 40, then 63
    allowed[2, 0] = [~2, -1]
    slots = jnp.arange(3, dtype=jnp.int32)
    rows = Rows(
        slots, slots >= 0, jnp.zeros((3, 1), jnp.int32), jnp.full((3,), 12, jnp.int32), jnp.zeros((3,), jnp.int32)
    )
    rows = dataclasses.replace(rows, allowed_BDW=jnp.asarray(np.asarray(allowed, np.int32)))
    drafter = prompt_lookup(64)
    state = drafter.init_state(Geometry(3, 1, 1, 31, 3))
    tree, _ = jax.jit(lambda s: drafter.draft((), s, rows, tokens, Tier(3), None, None, False))(state)
    assert np.asarray(tree.tokens_BN).tolist() == [[0, 1, 2, 3], [0, 40, 63, 3], [0, 64, 2, 3]]


def test_a_draft_vocabulary_without_an_allowed_token_keeps_its_distribution(markov: Callable[[int], Any]):
    rounds = markov(SLOTS)
    state = rounds.state(temperature_S=1.0)
    rows = Rows.gather(state, jnp.arange(SLOTS), rounds.geo)
    words = jnp.broadcast_to(jnp.asarray([[1 << 6], [1 << 2]], jnp.int32)[None], (SLOTS, 2, 1))
    rows = dataclasses.replace(rows, allowed_BDW=words)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, 1, 3)), jnp.float32)
    ranking = Ranking(rows, None, None, V, jnp.asarray([1, 2, 4]))
    np.testing.assert_array_equal(ranking.scores(logits, 1), logits)
    assert np.all(np.argmax(ranking.scores(logits, 2)[:, 0], axis=-1) == 1)
    drawing = dataclasses.replace(ranking, sampling=state.sampling.rows(rows.slot_B))
    free = dataclasses.replace(drawing, rows=dataclasses.replace(rows, allowed_BDW=None))
    for one, other in zip(drawing.draw(logits[:, 0], 1), free.draw(logits[:, 0], 1), strict=True):
        np.testing.assert_array_equal(one, other)
    token, probs = drawing.draw(logits[:, 0], 2)
    assert np.all(np.asarray(token) == 2)
    np.testing.assert_allclose(np.asarray(probs), np.broadcast_to(np.eye(V)[2], (SLOTS, V)), atol=1e-6)


def test_masks_as_bits():
    words = np.asarray([[0b101, -(2**31)], [-1, 0]], np.int32)
    bits = np.asarray(unpack_bits(jnp.asarray(words), 64))
    assert np.flatnonzero(bits[0]).tolist() == [0, 2, 63] and np.flatnonzero(bits[1]).tolist() == list(range(32))
    logits = jnp.asarray([[[1.0, -2.0, jnp.nan, jnp.nan]]])
    out = np.asarray(restrict_logits(logits, jnp.asarray([[[0b1001]]], jnp.int32)))[0, 0]
    assert out[0] == 1 and out[1] < -1e29 and np.isnan(out[2:]).all()


# Memory.

GEO = Geometry(slots=2, num_pages=4096, page_size=8, pages_per_seq=16, max_depth=3)


def test_no_part_copies_a_pool_and_shapes_are_as_foretold():
    core = DraftModelCore(tiny_target(1, num_layers=1))
    drafter = AutoregressiveDrafter(core, GEO)
    target = tiny_target(0, num_layers=2)
    graph, params = nnx.split(target)
    spec = RoundSpec(graph, target.config, GEO, drafter, rejection=False)
    state = jax.eval_shape(lambda: DecodeState.empty(target.config, GEO, jnp.float32, drafter.init_state(GEO)))
    pool = min(x.size * x.dtype.itemsize for x in (state.pages, state.draft.pages))
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = i32(2, Batch.width(GEO))

    def check(fn: Any, donate: int | None, *args: Any, **static: Any) -> Any:
        donated = () if donate is None else (donate,)
        lowered = jax.jit(fn, donate_argnums=donated, static_argnames=tuple(static)).lower(*args, **static)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < pool / 4
        # What is not given away is not written: a part that copied the pool into its result would show here.
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < pool / 4
        return lowered.out_info

    tier = Tier(2, 2, 5)
    drafted, forward = guided.parts(spec, tier, 2, jnp.dtype(jnp.float32))
    tree = drafted.tree
    same = lambda a, b: jax.tree.map(lambda x, y: x.shape == y.shape and x.dtype == y.dtype, a, b)
    out = check(guided.draft_fn(spec, tier), 1, core.params, state, batch, i32(2, 2, 1))
    assert jax.tree.all(same(drafted, out[1]))
    out = check(guided.forward_fn(spec), None, params, state, batch, tree.tokens_BN, tree.depths_BN, tree.ancestors_BNN)
    assert jax.tree.all(same(forward, out))
    check(guided.settle_fn(spec, tier), 1, (), state, batch, drafted, forward, i32(2, 5, 1))
    check(round_fn(spec, PLAIN, True), 2, params, (), state, batch, i32(2, 1, 1))
    prompts = i32(2, 3), Admission.packed(spec.geo, 2), i32(2, 1)
    check(prefill_fn(spec), 2, params, core.params, state, *prompts, size=16, width=12, samples=True)
