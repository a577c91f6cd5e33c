"""DFlash's training: sampled anchors, blocks against a dense mask, losses by their definition, the command."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpointing import heads, hf
from jaxspec.drafters.directories import load_drafter, read_kind
from jaxspec.models.layers import Shared, Transformer, shared_lm_head
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import dflash, drafts
from jaxspec.train.drafters.dflash import DflashRecipe, dpace_weights, forward_blocks, sample_anchors
from jaxspec.train.objective import chunks

AUX = (1, 2)


def new_head(target: Transformer, draft_vocab_size: int = 13, block_size: int = 4, **fields: Any) -> DflashHead:
    """A head of two layers for the tiny target, every parameter random."""
    layer = tiny_config(num_layers=2, intermediate_size=40, qk_norm=True)
    cfg = DflashConfig(layer, AUX, block_size, 12, draft_vocab_size, **fields)
    ids_V = np.arange(13 - draft_vocab_size, 13)
    lm_head = shared_lm_head(target) if draft_vocab_size == 13 else heads.lend_rows(target, jnp.float32, ids_V, None)
    head = DflashHead(cfg, Shared(target.embedding[...]), lm_head, rngs=nnx.Rngs(params=0))
    head.target_ids[...] = jnp.asarray(ids_V, jnp.int32)
    for i, param in enumerate(jax.tree.leaves(nnx.state(head, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param))):
        noise = np.asarray(jax.random.normal(jax.random.key(i), param.shape))
        param.set_value(jnp.asarray(np.asarray(param[...]) + 0.2 * noise))
    return head


def test_anchors_are_learned_tokens_with_something_to_predict(packed_batch: Batch) -> None:
    segments, learn = np.asarray(packed_batch.segments_BT), np.asarray(packed_batch.learn_BT)
    could = [
        {n for n in range(19) if learn[b, n] and learn[b, n + 1] and segments[b, n] == segments[b, n + 1]}
        for b in range(2)
    ]
    drawn: list[set[int]] = [set(), set()]
    for seed in range(30):
        anchors, kept = map(np.asarray, sample_anchors(jax.random.key(seed), packed_batch, 8))
        for b in range(2):
            assert len(set(anchors[b])) == 8  # none twice
            chosen = set(anchors[b][kept[b]].tolist())
            assert chosen <= could[b] and len(chosen) == min(8, len(could[b]))
            drawn[b] |= chosen
    assert drawn == could


def dense_hidden(head: DflashHead, batch: Batch, aux_BTA: jax.Array, anchors_BK: np.ndarray) -> np.ndarray:
    """Every place of every block against a mask of all of them and the whole row, [B, K, drafts, E]."""
    cfg, count, length = head.config, anchors_BK.shape[1], batch.tokens_BT.shape[1]
    offset, column = np.arange(cfg.block_size), np.arange(length)

    def row(aux_TA: jax.Array, tokens_T: jax.Array, positions_T: jax.Array, segments_T: Any, anchors_K: Any) -> Any:
        anchor_M, place_M = jnp.repeat(anchors_K, cfg.block_size), np.tile(offset, count)
        block_M = np.repeat(np.arange(count), cfg.block_size)
        entries = head.entries(aux_TA[None], positions_T[None])

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, options: Any) -> jax.Array:
            seen = (column[None] < anchor_M[:, None]) & (segments_T[None] == segments_T[anchor_M][:, None])
            own = block_M[:, None] == block_M[None]
            if options.window is not None:
                counted = anchor_M - 1 if cfg.window_from_anchor else anchor_M + place_M
                seen = seen & (column[None] > counted[:, None] - options.window)
                own = own if cfg.sliding_non_causal else own & (place_M[None] <= place_M[:, None])
            keys, values = jnp.split(entries[layer], 2, axis=-1)
            keys, values = jnp.concatenate([keys, k], axis=1), jnp.concatenate([values, v], axis=1)
            mask = jnp.concatenate([seen, jnp.asarray(own)], axis=1)
            return jax.nn.dot_product_attention(q, keys, values, mask=mask[None, None])

        tokens = head.block(tokens_T[anchors_K]).reshape(1, -1)
        hidden = head(tokens, (positions_T[anchor_M] + place_M)[None], attend)
        return head.predicting(hidden.reshape(count, cfg.block_size, -1))

    run = jax.jit(row)
    arrays = (aux_BTA, batch.tokens_BT, batch.positions_BT, batch.segments_BT, jnp.asarray(anchors_BK))
    return np.stack([run(*(x[b] for x in arrays)) for b in range(len(anchors_BK))])


SLIDING = dict(sliding_layers=(1,), sliding_window=3)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, chunks.LIMIT),
        (SLIDING, 1000),
        (dict(sample_from_anchor=True, sliding_non_causal=True, window_from_anchor=True, **SLIDING), 1000),
    ],
)
def test_blocks_equal_a_dense_mask(
    fields: dict[str, Any], limit: int, packed_batch: Batch, target_states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LIMIT", limit)
    target = tiny_target()
    head, states = new_head(target, **fields), target_states(target, packed_batch, AUX)
    anchors = np.array([[1, 4, 9, 12, 15], [2, 5, 6, 13, 19]])
    run = lambda aux: forward_blocks(head, packed_batch, head.entries(aux, packed_batch.positions_BT), anchors)
    hidden = jax.jit(run)(states.aux_BTA)
    np.testing.assert_allclose(hidden, dense_hidden(head, packed_batch, states.aux_BTA, anchors), rtol=2e-4, atol=2e-4)


def test_what_is_reported_is_the_chain_and_the_loss_counts_learned_tokens(
    packed_batch: Batch, target_states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LIMIT", 5000)
    target = tiny_target()
    head, states = new_head(target, draft_vocab_size=9), target_states(target, packed_batch, AUX)
    recipe = DflashRecipe(AUX, anchors=6, depth=2, gamma=2.0)
    ids, key = np.asarray(head.target_ids[...]), jax.random.key(3)

    def everything(states: Any) -> Any:
        chain = dflash.chain(head, packed_batch, states.aux_BTA, 2)
        said = [logits(hidden) for logits, hidden in zip(chain.logits, chain.hidden, strict=True)]
        anchors, kept = sample_anchors(key, packed_batch, 6)
        entries = head.entries(states.aux_BTA, packed_batch.positions_BT)
        drafted = head.logits(forward_blocks(head, packed_batch, entries, anchors).reshape(2, 18, -1))
        greedy = drafts.greedy_matches(chain, target, states.hidden_BTE)
        part = dataclasses.replace(recipe, reported=2).matches(head, target, packed_batch, states)
        return recipe.loss(head, target, packed_batch, states, key), said, anchors, kept, drafted, greedy, part

    (loss, matches, metrics), said, anchors, kept, drafted, greedy, part = jax.jit(everything)(states)
    np.testing.assert_array_equal(part, matches[:1, :6])
    assert matches.shape == (2, 17, 2) and said[0].shape == (2, 17, 9)
    np.testing.assert_array_equal(matches, greedy)
    best = np.argmax(target.logits(states.hidden_BTE), axis=-1)
    for d, logits in enumerate(said):
        np.testing.assert_array_equal(matches[:, :, d], ids[np.argmax(logits, -1)] == best[:, d + 1 : d + 18])
    log_softmax = lambda x: np.asarray(jax.nn.log_softmax(np.asarray(x, np.float64), axis=-1))
    verdict, draft = log_softmax(target.logits(states.hidden_BTE)[..., ids]), log_softmax(drafted).reshape(2, 6, 3, 9)
    segments, learn = np.asarray(packed_batch.segments_BT), np.asarray(packed_batch.learn_BT)
    terms: list[list[float]] = [[], [], []]
    for b, k, d in np.ndindex(2, 6, 3):
        anchor = int(anchors[b, k])
        about = anchor + 1 + d
        if kept[b, k] and about < 20 and segments[b, about] == segments[b, anchor] and learn[b, about]:
            p = verdict[b, about - 1]
            terms[d].append(float(np.exp(p) @ (p - draft[b, k, d])))
    weighed = sum(np.exp(-d / 2.0) * sum(at) for d, at in enumerate(terms)) / sum(map(len, terms))
    assert float(loss) == pytest.approx(weighed, rel=2e-4)
    for d, at in enumerate(terms):
        assert float(metrics[f"loss_{d + 1}"]) == pytest.approx(np.mean(at), rel=2e-4)


def test_dpace_weighs_by_what_is_expected_to_be_accepted() -> None:
    """w_j = sum over m >= j of the products of (1 - a) q_i + a for i <= m; drafts that do not count are left out."""
    q, alpha = np.array([0.9, 0.4, 0.7, 0.2]), 0.5
    smooth = (1 - alpha) * q + alpha
    expected = [sum(np.prod(smooth[: m + 1]) for m in range(j, 4)) for j in range(4)]
    given = jnp.asarray(-np.log(q), jnp.float32)[None, None]
    np.testing.assert_allclose(dpace_weights(given, jnp.ones((1, 1, 4), bool), alpha)[0, 0], expected, rtol=1e-6)
    kept = np.array([True, False, True, True])
    without = dpace_weights(given, jnp.asarray(kept)[None, None], alpha)[0, 0]
    rest = smooth[kept]
    np.testing.assert_allclose(
        np.asarray(without)[kept], [sum(np.prod(rest[: m + 1]) for m in range(j, 3)) for j in range(3)], rtol=1e-6
    )


def test_gradients_reach_every_parameter(packed_batch: Batch, target_states: Any, gradients: Any) -> None:
    target = tiny_target()
    recipe = DflashRecipe(AUX, anchors=6, loss_kind="ce", weights="dpace", depth=2)
    states = target_states(target, packed_batch, AUX)
    grads = gradients(recipe, new_head(target, **SLIDING), target, packed_batch, states)
    assert not any("target_ids" in path or "embedding" in path or "lm_head" in path for path in grads)
    assert all(largest > 0 for largest in grads.values()), grads


def test_training_raises_the_simulated_acceptance(
    greedy_batch: Any, target_states: Any, simulated_lengths: Any
) -> None:
    target = tiny_target()
    batch = greedy_batch(target)
    states = target_states(target, batch, AUX)
    lengths = simulated_lengths(
        DflashRecipe(AUX, anchors=24, depth=3), new_head(target), target, batch, states, 40, 1e-2
    )
    assert lengths[-1] > lengths[0] + 0.5, lengths


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"anchors": 0}, "anchors must be at least 1, got 0"),
        ({"gamma": 0.0}, "gamma must be above 0, got 0"),
        ({"loss_kind": "ce", "weights": "dpace", "alpha": 1.5}, r"alpha must lie in \[0, 1\], got 1.5"),
        ({"weights": "dpace"}, "weights 'dpace' are of the cross entropy, loss 'ce', got loss 'kl'"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DflashRecipe(AUX, **fields)


def test_the_command_trains_and_saves(dflash_run: Any, tiny_files: Path) -> None:
    out, record = dflash_run
    assert record["kind"] == read_kind(out) == "dflash" and record["gamma"] == 4.0
    assert set(next(iter(record["held_out_acceptance"].values()))) >= {"length", "accept_1", "accept_2", "loss"}
    head: Any = load_drafter("dflash", out, hf.load_model(tiny_files / "target"))
    cfg = head.config
    assert (cfg.mask_token_id, cfg.num_layers, cfg.draft_vocab_size, cfg.drafts) == (12, 1, 10, 3)


@pytest.mark.exhaustive("DSpark's and DFlash 2's commands go on from a DFlash head")
def test_the_command_goes_on(train_command: Any, dflash_run: Any, tiny_files: Path, tmp_path: Path) -> None:
    target = hf.load_model(tiny_files / "target")
    more = ("--anchors", "6", "--depth", "2", "--init-from", str(dflash_run[0]), "--compute-dtype", "bfloat16")
    train_command(dflash, tmp_path / "more", *more, "--loss", "ce", "--weights", "dpace")
    head, later = (load_drafter("dflash", path, target) for path in (dflash_run[0], tmp_path / "more"))
    assert bool((later.fc.kernel[...] != head.fc.kernel[...]).any())  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mask-token", "w3"], r"--mask-token 'w3' \(id 3\) occurs \d+ times in the texts"),
        (["--depth", "8"], "--depth must lie between 1 and the block's 7 drafts, got 8"),
        (["--aux-layers", "1", "4"], r"--aux-layers must lie in 0 .. 2 \(the target's\), got \(1, 4\)"),
        (["--layout", "zlab", "--sample-from-anchor"], "--layout zlab cannot say --sample-from-anchor"),
        (["--block-size", "1"], "block_size must be at least 2, got 1"),
        (["--layout", "safeailab"], r"--layout of a dflash drafter must be one of \('speculators', 'zlab'\)"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: list[str], message: str, train_command: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train_command(dflash, tmp_path / "out", "--layers", "1", *arguments)


def test_chains_longer_than_a_block_are_refused(packed_batch: Batch, target_states: Any) -> None:
    target = tiny_target()
    states = target_states(target, packed_batch, AUX)
    with pytest.raises(ValueError, match="drafts 3 tokens a block, got chains of 4"):
        dflash.chain(new_head(target), packed_batch, states.aux_BTA, 4)
