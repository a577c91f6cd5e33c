"""DSpark's training: losses by their definition, what is reported, the start from a DFlash head, the command."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
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
from jaxspec.speculation.drafters.dspark_head import DsparkConfig, DsparkHead
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import dflash, drafts, dspark
from jaxspec.train.drafters.dflash import forward_blocks, sample_anchors
from jaxspec.train.drafters.dspark import DsparkRecipe
from jaxspec.train.drafters.walked import initial, tokens_before
from jaxspec.train.objective import chunks

AUX = (1, 2)


def new_head(target: Transformer, draft_vocab_size: int = 13, block_size: int = 3, **fields: Any) -> DsparkHead:
    """A head of one layer for the tiny target, every parameter random."""
    layer = tiny_config(num_layers=1, intermediate_size=40, qk_norm=True)
    cfg = DsparkConfig(layer, AUX, block_size, 12, draft_vocab_size, **{"markov_rank": 5, **fields})
    ids_V = np.arange(13 - draft_vocab_size, 13)
    lm_head = shared_lm_head(target) if draft_vocab_size == 13 else heads.lend_rows(target, jnp.float32, ids_V, None)
    head = DsparkHead(cfg, Shared(target.embedding[...]), lm_head, rngs=nnx.Rngs(params=0))
    head.target_ids[...] = jnp.asarray(ids_V, jnp.int32)
    for i, param in enumerate(jax.tree.leaves(nnx.state(head, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param))):
        noise = np.asarray(jax.random.normal(jax.random.key(i), param.shape))
        param.set_value(jnp.asarray(np.asarray(param[...]) + 0.3 * noise))
    return head


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


sigmoid = lambda x: 1 / (1 + np.exp(-x))


def markov_features(head: DsparkHead, hidden_DE: np.ndarray, before_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what candidates' rows are multiplied with, rows of the tokens before) of a block, by the paper's formulas."""
    markov, rank = head.markov, head.config.markov_rank
    rows = np.asarray(markov.before[...], np.float64)[before_D]
    if markov.mix is None:
        return rows, rows
    kernel, bias = (np.asarray(x[...], np.float64) for x in (markov.mix.kernel, markov.mix.bias))  # type: ignore[arg-type]
    if head.config.markov_type == "gated":
        return sigmoid(np.concatenate([hidden_DE, rows], -1) @ kernel + bias) * rows, rows
    state, out = np.zeros(rank), []
    for hidden, row in zip(hidden_DE, rows, strict=True):
        gate, new, said = np.split(np.concatenate([state, row, hidden]) @ kernel + bias, 3)
        state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(new)
        out.append(np.tanh(said))
    return np.stack(out), rows


@pytest.mark.parametrize(
    ("fields", "draft_vocab_size"),
    [
        ({"markov_type": "rnn"}, 9),
        ({"markov_type": "gated", "confidence_reads_token": False, "sample_from_anchor": False, "block_size": 4}, 13),
    ],
)
def test_the_loss_and_what_is_reported_are_their_definition(
    fields: dict[str, Any], draft_vocab_size: int, packed_batch: Batch, target_states: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(chunks, "LIMIT", 5000)
    target = tiny_target()
    head, states = new_head(target, draft_vocab_size, **fields), target_states(target, packed_batch, AUX)
    recipe = DsparkRecipe(AUX, anchors=6, depth=2, gamma=2.0, ce=0.3, l1=0.7, kl=0.4, confidence=0.5)
    ids, key = np.asarray(head.target_ids[...]), jax.random.key(3)

    def everything(states: Any) -> Any:
        chain = dspark.chain(head, packed_batch, states.aux_BTA, 2)
        said = [logits(hidden) for logits, hidden in zip(chain.logits, chain.hidden, strict=True)]
        anchors, kept = sample_anchors(key, packed_batch, 6)
        entries = head.entries(states.aux_BTA, packed_batch.positions_BT)
        every = jnp.broadcast_to(jnp.arange(1, 18, dtype=jnp.int32), (2, 17))
        hidden = [forward_blocks(head, packed_batch, entries, at) for at in (anchors, every)]
        base = [head.logits(x.reshape(2, -1, x.shape[-1])).reshape(*x.shape[:3], -1) for x in hidden]
        greedy = drafts.greedy_matches(chain, target, states.hidden_BTE)
        best = jnp.argmax(target.logits(states.hidden_BTE), axis=-1)
        verdict = target.logits(states.hidden_BTE)
        loss = recipe.loss(head, target, packed_batch, states, key)
        return loss, said, anchors, kept, hidden, base, greedy, best, verdict

    result = jax.tree.map(np.asarray, jax.jit(everything)(states))
    (loss, matches, metrics), said, anchors, kept, hidden, base, greedy, best, verdict = result
    segments, learn = np.asarray(packed_batch.segments_BT), np.asarray(packed_batch.learn_BT)
    tokens, after = np.asarray(packed_batch.tokens_BT), np.asarray(head.markov.after[...], np.float64)

    def drafted(which: int, b: int, k: int, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        features, rows = markov_features(head, hidden[which][b, k].astype(np.float64), before)
        return base[which][b, k] + features @ after.T, rows

    # What is reported: blocks after every position, with the text's tokens before each draft.
    np.testing.assert_array_equal(matches, greedy)
    for b, n in np.ndindex(2, 17):
        own = drafted(1, b, n, tokens[b, np.minimum(n + 1 + np.arange(3), 19)])[0]
        for d in range(2):
            np.testing.assert_allclose(said[d][b, n], own[d], rtol=1e-3, atol=1e-4)
            assert matches[b, n, d] == (ids[said[d][b, n].argmax()] == best[b, n + 1 + d])

    assert head.confidence is not None
    kernel, bias = (np.asarray(x[...], np.float64) for x in (head.confidence.kernel, head.confidence.bias))
    sums, covered, count = dict.fromkeys(("ce", "l1", "kl", "confidence"), 0.0), 0.0, 0
    for b, k in np.ndindex(2, 6):
        anchor = int(anchors[b, k])
        own, rows = drafted(0, b, k, tokens[b, np.minimum(anchor + np.arange(3), 19)])
        for d in range(3):
            about = anchor + 1 + d
            if not (kept[b, k] and about < 20 and segments[b, about] == segments[b, anchor] and learn[b, about]):
                continue
            p, q, weight = softmax(verdict[b, about - 1][ids].astype(np.float64)), softmax(own[d]), np.exp(-d / 2.0)
            if tokens[b, about] in ids:
                sums["ce"] -= weight * float(np.log(q[ids.tolist().index(tokens[b, about])]))
            seen = hidden[0][b, k, d]
            seen = np.concatenate([seen, rows[d]]) if head.config.confidence_reads_token else seen
            sure, share = float(sigmoid(seen @ kernel[:, 0] + bias[0])), float(np.minimum(p, q).sum())
            sums["l1"] += weight * float(np.abs(p - q).sum())
            sums["kl"] += weight * float((p * np.log(p / q)).sum())
            sums["confidence"] -= weight * (share * np.log(sure) + (1 - share) * np.log(1 - sure))
            covered, count = covered + share, count + 1
    for name, value in sums.items():
        assert float(metrics[name]) == pytest.approx(value / count, rel=5e-4), name
    assert float(metrics["covered"]) == pytest.approx(covered / count, rel=5e-4)
    whole = 0.3 * sums["ce"] + 0.7 * sums["l1"] + 0.4 * sums["kl"] + 0.5 * sums["confidence"]
    assert float(loss) == pytest.approx(whole / count, rel=5e-4)


def test_gradients_reach_every_parameter(packed_batch: Batch, target_states: Any, gradients: Any) -> None:
    target = tiny_target()
    recipe = DsparkRecipe(AUX, anchors=6, depth=2)
    states = target_states(target, packed_batch, AUX)
    grads = gradients(recipe, new_head(target, markov_type="rnn"), target, packed_batch, states)
    assert any("markov" in path for path in grads) and any("confidence" in path for path in grads)
    assert not any("target_ids" in path or "embedding" in path or "lm_head" in path for path in grads)
    assert all(largest > 0 for largest in grads.values()), grads


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ce": -1.0}, "ce must be at least 0, got -1"),
        ({"ce": 0.0, "l1": 0.0}, "one of ce, l1 and kl must be above 0, got 0.0, 0.0 and 0.0"),
        ({"anchors": 0}, "anchors must be at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DsparkRecipe(AUX, **fields)


def test_impossible_geometry_is_refused() -> None:
    cfg = new_head(tiny_target()).config
    for fields, message in (
        ({"markov_rank": 0}, "markov_rank must be at least 1 .*, got 0"),
        ({"markov_type": "lstm"}, r"markov_type must be one of \('vanilla', 'gated', 'rnn'\), got 'lstm'"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(cfg, **fields)


def test_the_command_goes_on_from_a_dflash_head_and_saves(
    train_command: Any, dflash_run: Any, tiny_files: Path, tmp_path: Path, packed_batch: Batch, target_states: Any
) -> None:
    target = hf.load_model(tiny_files / "target")
    sizes = ("--anchors", "6", "--depth", "2")
    before: Any = load_drafter("dflash", dflash_run[0], target)

    # From a DFlash head, before anything is learned: the same drafts.
    parts: dict[str, Any] = dict(markov_rank=4, markov_type="gated", confidence=True, confidence_reads_token=False)
    setup: Any = SimpleNamespace(target=target, args=SimpleNamespace(seed=0, init_from=dflash_run[0]))
    start = initial("dspark", DsparkHead, DsparkConfig, setup, parts, parts)
    assert start.config.dflash == before.config and not start.config.sample_from_anchor
    states = target_states(target, packed_batch, (1,))

    @jax.jit
    def chains(aux_BTA: jax.Array) -> list[list[jax.Array]]:
        each = (of.chain(head, packed_batch, aux_BTA, 2) for of, head in ((dflash, before), (dspark, start)))
        return [[x.logits[d](x.hidden[d]) for d in range(2)] for x in each]

    np.testing.assert_array_equal(*chains(states.aux_BTA))
    assert not start.markov.after[...].any() and start.markov.before[...].any()

    # Trained on and saved.
    asked = ("--markov-rank", "4", "--markov-type", "gated", "--no-confidence-reads-token")
    more = ("--init-from", str(dflash_run[0]), "--compute-dtype", "bfloat16")
    record = train_command(dspark, tmp_path / "more", *sizes, *asked, *more)
    assert record["kind"] == read_kind(tmp_path / "more") == "dspark" and record["gamma"] == 4.0
    later: Any = load_drafter("dspark", tmp_path / "more", target)
    assert later.config == start.config and later.markov.after[...].any() and later.confidence.kernel[...].any()
    with pytest.raises(ValueError, match="--markov-rank 8: the head of kind 'dspark' in --init-from .* decides that"):
        train_command(dspark, tmp_path / "no", "--init-from", str(tmp_path / "more"), "--markov-rank", "8")


@pytest.mark.exhaustive("the command trains a DSpark head that begins as a DFlash head")
def test_the_command_trains_a_new_head(train_command: Any, tiny_files: Path, tmp_path: Path) -> None:
    target = hf.load_model(tiny_files / "target")
    sizes = ("--anchors", "6", "--depth", "2")
    fresh = ("--layers", "1", "--markov-rank", "3", "--confidence", "0", "--layout", "deepspec")
    train_command(dspark, tmp_path / "fresh", *sizes, *fresh)
    new: Any = load_drafter("dspark", tmp_path / "fresh", target)
    assert (new.config.drafts, new.config.block_size, new.confidence, new.config.markov_rank) == (7, 7, None, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "zlab"], r"--layout of a dspark drafter must be one of \('speculators', 'deepspec', 'specforge'"),
        (
            ["--layout", "deepspec", "--draft-vocab-size", "9"],
            "deepspec cannot say --no-sample-from-anchor or",
        ),
        (["--layout", "specforge", "--no-sample-from-anchor"], "--layout specforge cannot say --no-sample-from-anchor"),
        (["--depth", "8"], "--depth must lie between 1 and the block's 7 drafts, got 8"),
        (["--markov-rank", "0"], "markov_rank must be at least 1"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: list[str], message: str, train_command: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train_command(dspark, tmp_path / "out", "--layers", "1", *arguments)


def test_tokens_before_stop_at_a_rows_end(packed_batch: Batch) -> None:
    before = tokens_before(packed_batch, jnp.asarray([[3], [18]]), 4)
    tokens = np.asarray(packed_batch.tokens_BT)
    np.testing.assert_array_equal(before, [[tokens[0, 3:7]], [[*tokens[1, 18:20], *[tokens[1, 19]] * 2]]])
