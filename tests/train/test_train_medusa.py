"""Medusa's training: the loss by its definition, where heads start, what is trained, and that it helps."""

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
from jaxspec.models.layers import Transformer
from jaxspec.models.quantised import Quantised
from jaxspec.models.tiny import tiny_target
from jaxspec.speculation.drafters.medusa_head import MedusaConfig, MedusaHeads
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import medusa
from jaxspec.train.drafters.medusa import MedusaRecipe, new_heads
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.objective import chunks

HEADS = 3


def config(target: Transformer, **overrides: int) -> MedusaConfig:
    cfg = target.config
    sizes = {"num_heads": HEADS, "hidden_size": cfg.hidden_size, "vocab_size": cfg.vocab_size}
    return MedusaConfig(**{**sizes, "target_layers": cfg.num_layers, **overrides})


def random_heads(target: Transformer, **overrides: int) -> MedusaHeads:
    module = new_heads(config(target, **overrides), target)
    for i, param in enumerate(
        jax.tree.leaves(nnx.state(module, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param))
    ):
        noise = np.asarray(jax.random.normal(jax.random.key(i), param.shape))
        param.set_value(jnp.asarray(np.asarray(param[...]) + 0.1 * noise))
    return module


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def defined_loss(
    module: MedusaHeads, target: Transformer, batch: Batch, states: TargetStates, soft: bool, decay: float
) -> float:
    """Position by position, in float64."""
    as64 = lambda x: np.asarray(x, np.float64)
    hidden = as64(states.hidden_BTE)
    tokens, segments, learn = (np.asarray(x) for x in (batch.tokens_BT, batch.segments_BT, batch.learn_BT))
    assert target.lm_head is not None
    target_logs = log_softmax(hidden @ as64(target.lm_head.kernel[...]))
    total = 0.0
    for k, head in enumerate(module.heads):
        x = hidden
        for block in head.blocks:
            assert block.bias is not None
            y = x @ as64(block.kernel[...]) + as64(block.bias[...])
            x = x + y / (1 + np.exp(-y))
        logs = log_softmax(x @ as64(head.lm_head.kernel[...]))
        terms = []
        for b in range(len(tokens)):
            for n in range(tokens.shape[1]):
                about = n + 2 + k
                if about < tokens.shape[1] and segments[b, n] == segments[b, about] and learn[b, about]:
                    hard, distribution = logs[b, n, tokens[b, about]], np.exp(target_logs[b, about - 1])
                    terms.append(-(distribution @ logs[b, n]) if soft else -hard)
        total += decay**k * float(np.mean(terms))
    return total


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("limit", [chunks.LIMIT, 200])  # 200: four positions a part
def test_the_loss_is_its_definition(
    soft: bool, limit: int, packed_batch: Batch, target_states: Any, loss_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LIMIT", limit)
    target = tiny_target()
    module, states = random_heads(target, num_layers=2), target_states(target, packed_batch)
    recipe = MedusaRecipe(HEADS, decay=0.7, soft=soft)
    loss, matches, metrics = loss_of(recipe, module, target, packed_batch, states)
    assert float(loss) == pytest.approx(defined_loss(module, target, packed_batch, states, soft, 0.7), rel=1e-5)
    assert float(loss) == pytest.approx(sum(0.7**k * float(metrics[f"loss_{k + 1}"]) for k in range(HEADS)), rel=1e-6)
    assert matches.shape == (2, 20 - 1 - HEADS, HEADS) and recipe.depth == HEADS
    best = np.argmax(target.logits(states.hidden_BTE), axis=-1)
    for k in range(HEADS):
        choice = np.argmax(module.logits(states.hidden_BTE, k), axis=-1)
        np.testing.assert_array_equal(matches[:, :, k], choice[:, :16] == best[:, k + 1 : k + 17])


@pytest.mark.parametrize("output", ["own", "tied", "few bits"])
@pytest.mark.parametrize("freeze", [False, True])
def test_new_heads_guess_what_the_target_does(
    output: str, freeze: bool, packed_batch: Batch, target_states: Any
) -> None:
    target = tiny_target(tie_word_embeddings=output == "tied")
    if output == "few bits":
        assert target.lm_head is not None
        values_EV = jnp.rint(400 * target.lm_head.kernel[...]).astype(jnp.int8)
        few = Quantised(values_EV, jnp.full((1, values_EV.shape[1]), 1 / 400))
        target.lm_head.kernel = nnx.Param(few)  # pyright: ignore[reportAttributeAccessIssue]
    module = new_heads(config(target), target, freeze_lm_heads=freeze)
    hidden = target_states(target, packed_batch).hidden_BTE
    for k in range(HEADS):
        np.testing.assert_allclose(module.logits(hidden, k), target.logits(hidden), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("freeze", [False, True])
def test_gradients_reach_what_is_trained_and_nothing_else(
    freeze: bool, packed_batch: Batch, target_states: Any, gradients: Any
) -> None:
    target = tiny_target()
    module = new_heads(config(target), target, freeze_lm_heads=freeze)
    states = target_states(target, packed_batch)
    grads = gradients(MedusaRecipe(HEADS), module, target, packed_batch, states)
    assert len(grads) == HEADS * (2 if freeze else 3)
    assert all(largest > 0 for largest in grads.values()), grads
    shared = nnx.state(module, nnx.Not(nnx.Param))
    assert len(jax.tree.leaves(shared)) == freeze  # one output layer for all heads


def test_training_raises_the_simulated_acceptance(
    greedy_batch: Any, target_states: Any, simulated_lengths: Any
) -> None:
    target = tiny_target()
    batch = greedy_batch(target)
    module = new_heads(config(target), target)
    lengths = simulated_lengths(MedusaRecipe(HEADS), module, target, batch, target_states(target, batch), 40, 1e-2)
    assert lengths[-1] > lengths[0] + 0.5, lengths


def test_a_decay_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay must lie in \(0, 1\], got 0.0"):
        MedusaRecipe(3, decay=0.0)


def test_the_command_trains_saves_and_goes_on(
    train_command: Any, tiny_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = hf.load_model(tiny_files / "target")
    record = train_command(medusa, tmp_path / "heads", "--heads", "2")
    assert record["kind"] == read_kind(tmp_path / "heads") == "medusa"
    assert "of the trained parameters 832 are 2 output layers" in capsys.readouterr().out
    module = load_drafter("medusa", tmp_path / "heads", target)
    assert isinstance(module, MedusaHeads) and module.config == config(target, num_heads=2)
    more = ("--init-from", str(tmp_path / "heads"), "--freeze-lm-heads", "--soft", "--compute-dtype", "bfloat16")
    train_command(medusa, tmp_path / "more", *more)
    later = load_drafter("medusa", tmp_path / "more", target)
    assert isinstance(later, MedusaHeads)
    for before, after in zip(module.heads, later.heads, strict=True):
        np.testing.assert_array_equal(before.lm_head.kernel[...], after.lm_head.kernel[...])
        assert bool((before.blocks[0].kernel[...] != after.blocks[0].kernel[...]).any())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "30"], "chains of 30 drafts need --length of at least 33, got 32"),
        (["--layout", "speculators"], r"--layout of a medusa drafter must be one of \('medusa',\), got 'speculators'"),
        (["--init-from", "x", "--heads", "3"], "--heads 3: --init-from x decides that"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: list[str], message: str, train_command: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train_command(medusa, tmp_path / "out", *arguments)
