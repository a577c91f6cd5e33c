"""P-EAGLE's training: sampled slots, their attention against a dense mask, the loss by its definition, acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpointing import hf
from jaxspec.drafters.directories import load_drafter, read_kind
from jaxspec.models.layers import Transformer, causal_attention
from jaxspec.models.tiny import tiny_target
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.text import tokenizer as text
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import peagle
from jaxspec.train.drafters.peagle import (
    PeagleRecipe,
    Slots,
    cod_loss,
    forward_slots,
    one_pass_states,
    sample_slots,
    valid_slots,
)
from jaxspec.train.drafters.starts import mask_token
from jaxspec.train.objective import chunks

AUX = (0, 1, 2)
#: Of the command.
SIZES = ("--num-depths", "3", "--depth", "2")


def new_head(draft_vocab_size: int = 9, **overrides: Any) -> Eagle3Head:
    """A head of two layers for the tiny target, every parameter random."""
    cfg = Eagle3Config(
        hidden_size=24, target_hidden_size=32, intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=13, draft_vocab_size=draft_vocab_size, aux_layer_ids=AUX, num_layers=2, mask_token_id=12,
        **overrides,
    )  # fmt: skip
    head = Eagle3Head(cfg, rngs=nnx.Rngs(params=0))
    head.target_ids[...] = jnp.arange(13 - draft_vocab_size, 13, dtype=jnp.int32)
    for i, param in enumerate(jax.tree.leaves(nnx.state(head, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param))):
        noise = np.asarray(jax.random.normal(jax.random.key(i), param.shape))
        param.set_value(jnp.asarray(np.asarray(param[...]) + 0.3 * noise))
    return head


def slots_of(batch: Batch, sizes: tuple[int, ...], seed: int = 0) -> Slots:
    return sample_slots(jax.random.key(seed), valid_slots(batch, len(sizes) + 1), sizes)


def listed(slots: Slots, row: int, count: int) -> list[tuple[int, int]]:
    """(anchor, depth) of each slot of a row, in the order of the arrays."""
    deeper = [(int(a), d) for d, size in enumerate(slots.sizes, 1) for a in slots.anchors_BK[row, :size]]
    return [(n, 0) for n in range(count)] + deeper


def test_anchors_are_nested_and_prefer_what_can_be_learned(packed_batch: Batch) -> None:
    sizes = (10, 7, 5, 5)
    valid = np.asarray(valid_slots(packed_batch, 5))
    segments, learn = np.asarray(packed_batch.segments_BT), np.asarray(packed_batch.learn_BT)
    for b, n, d in np.ndindex(valid.shape):
        about = n + 2 + d
        expected = about < 20 and segments[b, n] == segments[b, min(about, 19)] and learn[b, min(about, 19)]
        assert valid[b, n, d] == expected
    chosen = np.zeros((2, 19, 5))
    for seed in range(40):
        slots = slots_of(packed_batch, sizes, seed)
        assert slots.sizes == sizes and slots.anchors_BK.shape == (2, 10)
        for row in range(2):
            assert len(set(np.asarray(slots.anchors_BK[row]))) == 10  # no anchor twice; prefixes are nested
            for anchor, depth in listed(slots, row, 19):
                chosen[row, anchor, depth] += 1
            first = {a for a, d in listed(slots, row, 19) if d == 1}
            could = set(np.flatnonzero(valid[row, :, 1]))
            assert first <= could if len(could) >= 10 else could <= first
    assert (chosen[:, :, 0] == 40).all()
    often = chosen[1, :, 1][valid[1, :, 1]]  # 10 of so many, each as likely as the others
    assert often.min() > 0.5 * often.mean() and often.max() < 1.5 * often.mean()


def dense_hidden(head: Eagle3Head, batch: Batch, aux_BTA: jax.Array, slots: Slots) -> np.ndarray:
    """The same slots with a mask of all of them against all."""
    rows = []
    for b in range(2):
        count = batch.tokens_BT.shape[1] - 1
        slot = listed(slots, b, count)
        anchor, depth = np.array(slot).T
        segments = np.asarray(batch.segments_BT[b])
        text = segments[anchor]
        own = (anchor[:, None] == anchor[None]) & (depth[:, None] >= depth[None])
        before = (depth[None] == 0) & (anchor[:, None] >= anchor[None])
        mask = jnp.asarray((own | before) & (text[:, None] == text[None]))
        tokens = [int(batch.tokens_BT[b, n + 1]) if d == 0 else 12 for n, d in slot]
        assert head.mask_hidden is not None
        aux = [aux_BTA[b, n] if d == 0 else head.mask_hidden[...] for n, d in slot]
        positions = [int(batch.positions_BT[b, n]) + d for n, d in slot]

        def attend(
            _: int, q: jax.Array, k: jax.Array, v: jax.Array, *_options: Any, mask: jax.Array = mask
        ) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])

        run = jax.jit(lambda ids, aux, at, attend=attend: head(ids, head.fuse(aux), at, attend))
        rows.append(run(np.asarray([tokens], np.int32), np.stack(aux)[None], np.asarray([positions], np.int32))[0])
    return np.stack(rows)


@pytest.mark.parametrize(
    ("flags", "limit"),
    [({}, chunks.LIMIT), ({"fc_norm": True, "norm_output": True}, 1000), ({"norm_before_fc": True}, 1000)],
)
def test_structured_attention_equals_a_dense_mask(
    flags: dict[str, bool], limit: int, packed_batch: Batch, target_states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LIMIT", limit)
    head, states = new_head(**flags), target_states(tiny_target(), packed_batch, AUX)
    slots = slots_of(packed_batch, (12, 8, 5))
    hidden = jax.jit(lambda aux: forward_slots(head, packed_batch, aux, slots))(states.aux_BTA)
    np.testing.assert_allclose(hidden, dense_hidden(head, packed_batch, states.aux_BTA, slots), rtol=2e-4, atol=2e-4)


def test_depth_zero_alone_needs_no_anchors(packed_batch: Batch, target_states: Any) -> None:
    head, states = new_head(), target_states(tiny_target(), packed_batch, AUX)
    slots = slots_of(packed_batch, ())
    hidden = jax.jit(lambda aux: forward_slots(head, packed_batch, aux, slots))(states.aux_BTA)
    np.testing.assert_allclose(hidden, dense_hidden(head, packed_batch, states.aux_BTA, slots), rtol=2e-4, atol=2e-4)


def test_evaluation_is_the_one_pass_draft(packed_batch: Batch, target_states: Any) -> None:
    """At a position: its text up to there, then mask slots, as one causal sequence."""
    head, states, depth = new_head(), target_states(tiny_target(), packed_batch, AUX), 4
    everywhere = jax.jit(lambda aux: [head.logits(x) for x in one_pass_states(head, packed_batch, aux, depth)])(
        states.aux_BTA
    )
    assert len(everywhere) == depth and everywhere[0].shape == (2, 19, 9)
    for row, start, n in ((0, 0, 3), (0, 9, 12), (1, 0, 18), (1, 0, 0)):
        length = n - start + 1
        assert head.mask_hidden is not None
        mask = jnp.broadcast_to(head.mask_hidden[...], (depth - 1, 96))
        aux = jnp.concatenate([states.aux_BTA[row, start : n + 1], mask])[None]
        tokens = jnp.concatenate([packed_batch.tokens_BT[row, start + 1 : n + 2], jnp.full((depth - 1,), 12)])[None]
        positions = jnp.arange(length + depth - 1)[None]
        said = jax.jit(lambda ids, aux, at: head.logits(head(ids, head.fuse(aux), at, causal_attention)))
        logits = said(tokens, aux, positions)[0, -depth:]
        for d in range(depth):
            np.testing.assert_allclose(everywhere[d][row, n], logits[d], rtol=2e-4, atol=2e-4)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def defined_loss(
    head: Eagle3Head, target: Transformer, batch: Batch, states: Any, slots: Slots
) -> tuple[float, list[float]]:
    """Slot by slot in float64, hidden states from the dense forward pass."""
    hidden = dense_hidden(head, batch, states.aux_BTA, slots)
    draft = log_softmax(np.asarray(head.logits(jnp.asarray(hidden)), np.float64))
    ids = np.asarray(head.target_ids[...])
    verdict = log_softmax(np.asarray(target.logits(states.hidden_BTE), np.float64)[..., ids])
    segments, learn = np.asarray(batch.segments_BT), np.asarray(batch.learn_BT)
    terms: list[list[float]] = [[] for _ in range(len(slots.sizes) + 1)]
    for b in range(2):
        for s, (n, d) in enumerate(listed(slots, b, 19)):
            about = n + 2 + d
            if about < 20 and segments[b, n] == segments[b, about] and learn[b, about]:
                p = verdict[b, about - 1]
                terms[d].append(float(np.exp(p) @ (p - draft[b, s])))
    return float(np.mean([x for at in terms for x in at])), [float(np.mean(at)) for at in terms]


@pytest.mark.parametrize(("draft_vocab_size", "tied"), [(9, False), (9, True), (13, False)])
def test_the_loss_is_its_definition(draft_vocab_size: int, tied: bool, packed_batch: Batch, target_states: Any) -> None:
    target, head = tiny_target(tie_word_embeddings=tied), new_head(draft_vocab_size)
    states = target_states(target, packed_batch, AUX)
    recipe = PeagleRecipe(AUX, num_depths=4, depth=3)
    key = jax.random.key(3)
    slots = sample_slots(key, valid_slots(packed_batch, 4), recipe.sizes(19))
    assert slots.sizes == (13, 9, 7)  # 19 times 0.7, 0.49, 0.343
    expected, by_depth = defined_loss(head, target, packed_batch, states, slots)
    run = jax.jit(lambda states: recipe.loss(head, target, packed_batch, states, key))
    loss, matches, metrics = run(states)
    assert float(loss) == pytest.approx(expected, rel=2e-4)
    for d, mean in enumerate(by_depth):
        assert float(metrics[f"loss_{d + 1}"]) == pytest.approx(mean, rel=2e-4)
    best = np.argmax(target.logits(states.hidden_BTE), axis=-1)
    assert matches.shape == (2, 20 - 1 - 3, 3)
    said = jax.jit(lambda aux: [head.logits(x) for x in one_pass_states(head, packed_batch, aux, 3)])(states.aux_BTA)
    for d, logits in enumerate(said):
        choice = np.asarray(head.target_ids[...])[np.argmax(logits, axis=-1)]
        np.testing.assert_array_equal(matches[:, :, d], choice[:, :16] == best[:, d + 1 : d + 17])


def test_slots_that_do_not_count_leave_the_loss_alone(packed_batch: Batch, target_states: Any) -> None:
    target, head = tiny_target(), new_head()
    states = target_states(target, packed_batch, AUX)
    slots = Slots.every(2, 19, 2)
    only = jnp.zeros((2, 38), bool).at[1, 19 + 4].set(True)  # depth 1 of anchor 4
    loss, by_depth = jax.jit(lambda states: cod_loss(head, target, packed_batch, states, slots, only))(states)
    verdict = log_softmax(np.asarray(target.logits(states.hidden_BTE), np.float64)[1, 6, 4:])
    said = jax.jit(lambda aux: head.logits(one_pass_states(head, packed_batch, aux, 2)[1]))(states.aux_BTA)
    draft = log_softmax(np.asarray(said[1, 4], np.float64))
    assert float(loss) == pytest.approx(float(np.exp(verdict) @ (verdict - draft)), rel=2e-4)
    np.testing.assert_allclose(by_depth, [0.0, float(loss)], rtol=1e-6)


def test_gradients_reach_every_parameter(packed_batch: Batch, target_states: Any, gradients: Any) -> None:
    target = tiny_target()
    head = new_head(fc_norm=True, qk_norm=True)
    recipe = PeagleRecipe(AUX, num_depths=3, depth=2)
    grads = gradients(recipe, head, target, packed_batch, target_states(target, packed_batch, AUX))
    assert any("mask_hidden" in path for path in grads) and not any("target_ids" in path for path in grads)
    assert all(largest > 0 for largest in grads.values()), grads


@pytest.mark.exhaustive("EAGLE-3's does, and this loss and its gradients are compared with their definition")
def test_training_raises_the_simulated_acceptance(
    greedy_batch: Any, target_states: Any, simulated_lengths: Any
) -> None:
    target = tiny_target()
    batch = greedy_batch(target)
    recipe = PeagleRecipe(AUX, num_depths=4, depth=3)
    states = target_states(target, batch, AUX)
    lengths = simulated_lengths(recipe, new_head(13), target, batch, states, 40, 1e-2)
    assert lengths[-1] > lengths[0] + 0.5, lengths


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_depths": 0}, "num_depths must be at least 1, got 0"),
        ({"ratio": 1.5}, r"ratio must lie in \(0, 1\], got 1.5"),
        ({"num_depths": 4, "depth": 5}, "depth must lie between 1 and num_depths 4, got 5"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PeagleRecipe(AUX, **fields)


@pytest.fixture(scope="module")
def trained(train_command: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A head that the command trained, and the run's record."""
    out = tmp_path_factory.mktemp("peagle") / "head"
    shape = ("--layers", "2", "--hidden-size", "24", "--head-dim", "8", "--draft-vocab-size", "10")
    return out, train_command(peagle, out, *SIZES, *shape)


def test_the_command_trains_and_saves(trained: Any, tiny_files: Path) -> None:
    out, record = trained
    assert record["kind"] == read_kind(out) == "peagle"
    assert set(next(iter(record["held_out_acceptance"].values()))) >= {"length", "accept_1", "accept_2", "loss"}
    head = load_drafter("peagle", out, hf.load_model(tiny_files / "target"))
    assert isinstance(head, Eagle3Head)
    assert (head.config.mask_token_id, head.config.num_layers, head.config.draft_vocab_size) == (12, 2, 10)


@pytest.mark.exhaustive("EAGLE-3's command goes on, and is given a mesh")
def test_the_command_goes_on(trained: Any, train_command: Any, tiny_files: Path, tmp_path: Path) -> None:
    target = hf.load_model(tiny_files / "target")
    head = load_drafter("peagle", trained[0], target)
    assert isinstance(head, Eagle3Head)
    more = ("--init-from", str(trained[0]), "--compute-dtype", "bfloat16", "--mesh", "data=2")
    train_command(peagle, tmp_path / "more", *SIZES, *more)
    later = load_drafter("peagle", tmp_path / "more", target)
    assert isinstance(later, Eagle3Head) and later.mask_hidden is not None and head.mask_hidden is not None
    assert bool((later.mask_hidden[...] != head.mask_hidden[...]).any())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mask-token", "w3"], r"--mask-token 'w3' \(id 3\) occurs \d+ times in the texts"),
        (
            ["--mask-token", "13"],
            r"must be a token's name or an id below 13, got '13'; special tokens: \['<\|pad\|>'\]",
        ),
        (["--depth", "9"], "depth must lie between 1 and num_depths 8, got 9"),
        (["--aux-layers", "1", "4"], r"--aux-layers must lie in 0 .. 2 \(the target's\), got \(1, 4\)"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: list[str], message: str, train_command: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train_command(peagle, tmp_path / "out", *arguments)


def test_the_mask_token_is_one_that_texts_do_not_use(tiny_files: Path, tmp_path: Path) -> None:
    tokenizer = text.Tokenizer.from_directory(tiny_files / "target")
    unused, padded = np.zeros(13, np.int64), np.zeros(16, np.int64)
    assert mask_token(None, tiny_files / "target", tokenizer, unused) == 12
    assert mask_token("w4", tiny_files / "target", tokenizer, unused) == 4
    assert mask_token("7", tiny_files / "target", tokenizer, unused) == 7
    padded[12] = 1  # the only special token is in use, but the model's table has rows that no text can reach
    assert mask_token(None, tiny_files / "target", tokenizer, padded) == 15
    with pytest.raises(ValueError, match=r"name one with --mask-token .*do not use: \[\]"):
        mask_token(None, tiny_files / "target", tokenizer, np.ones(13, np.int64))
