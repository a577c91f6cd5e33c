"""The draft model's distillation: the loss by its definition, acceptance of its chains, and that it helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.checkpointing import hf
from jaxspec.drafters.directories import load_drafter, read_kind
from jaxspec.models.layers import Transformer
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import draft_model
from jaxspec.train.drafters.draft_model import DraftModelRecipe, new_draft_model
from jaxspec.train.objective import chunks


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("hard_share", [0.0, 0.3, 1.0])
def test_the_loss_is_its_definition(
    hard_share: float, packed_batch: Batch, target_states: Any, loss_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LIMIT", 300)
    target, draft = tiny_target(), tiny_target(1, num_layers=1, hidden_size=16)
    states = target_states(target, packed_batch)
    recipe = DraftModelRecipe(hard_share, depth=3)
    loss, matches, _ = loss_of(recipe, draft, target, packed_batch, states)
    hidden = target_states(draft, packed_batch).hidden_BTE
    own = log_softmax(np.asarray(draft.logits(hidden), np.float64))
    theirs = log_softmax(np.asarray(target.logits(states.hidden_BTE), np.float64))
    tokens, segments, learn = (
        np.asarray(x) for x in (packed_batch.tokens_BT, packed_batch.segments_BT, packed_batch.learn_BT)
    )
    terms = []
    for b, n in np.ndindex(2, 19):
        if segments[b, n] == segments[b, n + 1] and learn[b, n + 1]:
            hard, soft = -own[b, n, tokens[b, n + 1]], -(np.exp(theirs[b, n]) @ own[b, n])
            terms.append(hard_share * hard + (1 - hard_share) * soft)
    assert float(loss) == pytest.approx(float(np.mean(terms)), rel=1e-5)
    same = own.argmax(axis=-1) == theirs.argmax(axis=-1)
    assert matches.shape == (2, 16, 3)
    for i in range(3):
        np.testing.assert_array_equal(matches[:, :, i], same[:, i + 1 : i + 17])


def test_a_model_accepts_its_own_drafts(greedy_batch: Any, target_states: Any, loss_of: Any) -> None:
    target = tiny_target()
    batch = greedy_batch(target, rows=4)
    _, matches, _ = loss_of(DraftModelRecipe(), target, target, batch, target_states(target, batch))
    assert bool(matches.all())


def test_gradients_reach_every_parameter(packed_batch: Batch, target_states: Any, gradients: Any) -> None:
    target = tiny_target()
    draft = new_draft_model(tiny_config(num_layers=1, hidden_size=16, tie_word_embeddings=True), target, 0)
    grads = gradients(DraftModelRecipe(), draft, target, packed_batch, target_states(target, packed_batch))
    assert len(grads) == 8 and all(largest > 0 for largest in grads.values()), grads


def test_training_raises_the_simulated_acceptance(
    greedy_batch: Any, target_states: Any, simulated_lengths: Any
) -> None:
    target = tiny_target(tie_word_embeddings=True)
    batch = greedy_batch(target)
    draft = new_draft_model(tiny_config(num_layers=1, tie_word_embeddings=True), target, 0)
    recipe, states = DraftModelRecipe(depth=3), target_states(target, batch)
    lengths = simulated_lengths(recipe, draft, target, batch, states, 60, 1e-2)
    assert lengths[-1] > lengths[0] + 0.5, lengths


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hard_share": 2.0}, "hard_share must lie between 0 and 1, got 2.0"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftModelRecipe(**fields)


def test_the_command_trains_saves_and_goes_on(train_command: Any, tiny_files: Path, tmp_path: Path) -> None:
    target = hf.load_model(tiny_files / "target")
    shape = ("--hidden-size", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--head-dim", "8")
    record = train_command(draft_model, tmp_path / "draft", "--depth", "2", *shape)
    assert record["kind"] == read_kind(tmp_path / "draft") == "draft_model"
    draft = load_drafter("draft_model", tmp_path / "draft", target)
    assert isinstance(draft, Transformer) and (draft.config.num_layers, draft.config.hidden_size) == (1, 16)
    more = ("--init-from", str(tmp_path / "draft"), "--hard-share", "0.5", "--compute-dtype", "bfloat16")
    train_command(draft_model, tmp_path / "more", *more)
    later = load_drafter("draft_model", tmp_path / "more", target)
    assert isinstance(later, Transformer) and bool((later.embedding[...] != draft.embedding[...]).any())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hard-share", "2"], "hard_share must lie between 0 and 1, got 2.0"),
        (["--init-from", "OTHER"], "vocab_size must be the target's 13, got 14"),
        (["--init-from", "OTHER", "--layers", "2"], "--layers 2: --init-from .* decides that; leave it out"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: list[str], message: str, train_command: Any, tmp_path: Path
) -> None:
    hf.save_model(tiny_target(vocab_size=14), tmp_path / "other")
    with pytest.raises(ValueError, match=message):
        train_command(draft_model, tmp_path / "out", *(a.replace("OTHER", str(tmp_path / "other")) for a in arguments))
