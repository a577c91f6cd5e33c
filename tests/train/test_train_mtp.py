"""MTP's training: the loss by its definition, what a new module says, what is trained, and that it helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpointing import hf
from jaxspec.checkpointing.mtp import inside_target
from jaxspec.drafters.directories import load_drafter, read_kind
from jaxspec.models.layers import causal_attention
from jaxspec.models.tiny import tiny_target
from jaxspec.speculation.drafters.mtp_head import MtpHead
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import mtp
from jaxspec.train.drafters.mtp import MtpRecipe, check_layout, new_head
from jaxspec.train.objective import chunks

SAMPLE = jnp.asarray([[1, 5, 9, 3, 3, 7, 2, 11, 4, 6, 0, 8]], jnp.int32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def random_head(target: Any, layer_type: str = "qwen3") -> MtpHead:
    head = new_head(layer_type, target, SAMPLE, 0)
    for i, param in enumerate(jax.tree.leaves(nnx.state(head, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param))):
        noise = np.asarray(jax.random.normal(jax.random.key(i), param.shape))
        param.set_value(jnp.asarray(np.asarray(param[...]) + 0.2 * noise))
    return head


def drafted(head: MtpHead, tokens: np.ndarray, hidden: np.ndarray, n: int, steps: int, run: Any) -> np.ndarray:
    """Log-probabilities of a chain after position n of a text, as an engine drafts it: [steps, V].

    The true features' keys up to n stay; each step then appends one of the module's own. `run` is the module under
    plain causal attention over 24 entries, those behind the last one empty.
    """
    features = np.zeros((24, hidden.shape[1]), np.float32)
    ids = np.zeros(24, np.int32)
    features[: n + 1], ids[: n + 1] = hidden[: n + 1], tokens[1 : n + 2]
    rows = []
    for i in range(steps):
        out = run(ids[None], features[None])[0, n + i]
        rows.append(np.asarray(head.logits(out[None, None])[0, 0], np.float64))
        features[n + i + 1], ids[n + i + 1] = out, tokens[n + 2 + i]
    return log_softmax(np.stack(rows))


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_is_its_definition(
    soft: bool, packed_batch: Batch, target_states: Any, loss_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LIMIT", 200)
    target, steps = tiny_target(), 2
    head, states = random_head(target), target_states(target, packed_batch)
    recipe = MtpRecipe(steps, decay=0.6, soft=soft)
    assert recipe.weights == pytest.approx((1 / 1.6, 0.6 / 1.6)) and recipe.depth == steps
    loss, matches, _ = loss_of(recipe, head, target, packed_batch, states)
    assert matches.shape == (2, 20 - 1 - steps, steps)
    hidden = np.asarray(states.hidden_BTE)
    verdict = np.asarray(target.logits(states.hidden_BTE), np.float64)
    tokens, learn = np.asarray(packed_batch.tokens_BT), np.asarray(packed_batch.learn_BT)
    run = jax.jit(lambda ids, features: head(ids, features, jnp.arange(24, dtype=jnp.int32)[None], causal_attention))
    terms: list[list[float]] = [[] for _ in range(steps)]
    for row, start, stop in ((0, 0, 9), (0, 9, 16), (1, 0, 20)):
        text = np.append(tokens[row, start:stop], [0] * (steps + 1)).astype(np.int32)
        for n in range(stop - start - 2):
            logs = drafted(head, text, hidden[row, start:stop], n, steps, run)
            for k in range(steps):
                about = start + n + 2 + k
                if about < stop and learn[row, about]:
                    p = np.exp(log_softmax(verdict[row, about - 1]))
                    terms[k].append(float(-(p @ logs[k])) if soft else -logs[k][tokens[row, about]])
                if about < stop and start + n < matches.shape[1]:
                    right = int(np.argmax(logs[k])) == int(np.argmax(verdict[row, about - 1]))
                    assert bool(matches[row, start + n, k]) == right
    expected = sum(w * float(np.mean(at)) for w, at in zip(recipe.weights, terms, strict=True))
    assert float(loss) == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("layer_type", ["qwen3", "llama", "target"])
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}, {"family": "qwen3", "qk_norm": True}])
def test_a_new_module_says_what_the_target_says_but_for_its_layer(layer_type: str, overrides: dict[str, Any]) -> None:
    target = tiny_target(**overrides)
    head = new_head(layer_type, target, SAMPLE, 0)
    positions = jnp.arange(12)[None]
    hidden, stream = target(SAMPLE, positions, causal_attention, (2,))
    assert stream is not None
    normed = head.fc(jnp.concatenate([jnp.zeros_like(hidden), head.hidden_norm(hidden)], axis=-1))
    size = jnp.sqrt(jnp.mean(stream**2, axis=-1))
    np.testing.assert_allclose(
        jnp.median(jnp.sqrt(jnp.mean(normed**2, axis=-1))), jnp.median(size), rtol=0.2
    )  # as large as what the layer reads in the target
    source, layer = target.layers[-1], head.layer
    np.testing.assert_array_equal(layer.mlp.gate_up.kernel[...], source.mlp.gate_up.kernel[...])
    same = np.array_equal(layer.attn.qkv.kernel[...], source.attn.qkv.kernel[...])
    assert same == (layer_type != "llama" or not target.config.qk_norm)
    for part in (layer.attn.out, layer.mlp.down):
        part.kernel[...] = jnp.zeros_like(part.kernel[...])
    out = head(SAMPLE, hidden, positions, causal_attention)
    np.testing.assert_allclose(head.logits(out), target.logits(hidden), rtol=1e-3, atol=1e-3)


def test_norms_that_the_target_lacks_start_at_its_sizes() -> None:
    target = tiny_target()
    head = new_head("qwen3", target, SAMPLE, 0)
    source = target.layers[-1]
    assert source.attn_norm is not None and head.layer.attn.q_norm is not None
    x = jax.random.normal(jax.random.key(0), (1, 4000, 32))
    q = source.attn.qkv(source.attn_norm(x))[..., :32]
    assert float(head.layer.attn.q_norm.weight[0]) == pytest.approx(float(jnp.sqrt(jnp.mean(q**2))), rel=0.05)


def test_gradients_reach_every_parameter_of_the_module_only(
    packed_batch: Batch, target_states: Any, gradients: Any
) -> None:
    target = tiny_target()
    grads = gradients(MtpRecipe(2), random_head(target), target, packed_batch, target_states(target, packed_batch))
    assert not any("embedding']" in path or "lm_head" in path for path in grads), grads.keys()
    assert len(grads) == 12 and all(largest > 0 for largest in grads.values()), grads


@pytest.mark.parametrize("soft", [pytest.param(False, marks=pytest.mark.exhaustive("the soft loss does")), True])
def test_training_raises_the_simulated_acceptance(
    soft: bool, greedy_batch: Any, target_states: Any, simulated_lengths: Any
) -> None:
    target = tiny_target()
    batch = greedy_batch(target)
    head, recipe = new_head("qwen3", target, SAMPLE, 0), MtpRecipe(3, soft=soft)
    lengths = simulated_lengths(recipe, head, target, batch, target_states(target, batch), 40, 1e-2)
    assert lengths[-1] > lengths[0] + 0.5, lengths


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"steps": 0}, "steps must be at least 1, got 0"), ({"decay": 1.2}, r"decay must lie in \(0, 1\], got 1.2")],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MtpRecipe(**fields)


@pytest.fixture(scope="module")
def trained(train_command: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A module that the command trained, and the run's record."""
    out = tmp_path_factory.mktemp("mtp") / "module"
    return out, train_command(mtp, out, "--mtp-steps", "2")


def test_the_command_trains_and_saves(trained: Any, tiny_files: Path) -> None:
    out, record = trained
    assert record["kind"] == read_kind(out) == "mtp"
    assert set(next(iter(record["held_out_acceptance"].values()))) >= {"length", "accept_1", "accept_2", "loss"}
    module = load_drafter("mtp", out, hf.load_model(tiny_files / "target"))
    assert isinstance(module, MtpHead) and module.config.layer.qk_norm


@pytest.mark.exhaustive("modules inside their targets' checkpoints go on")
def test_the_command_goes_on(trained: Any, train_command: Any, tiny_files: Path, tmp_path: Path) -> None:
    target = hf.load_model(tiny_files / "target")
    inside = ("--init-from", str(trained[0]), "--mtp-steps", "1", "--soft", "--compute-dtype", "bfloat16")
    train_command(mtp, tmp_path / "more", *inside)
    module, later = (load_drafter("mtp", path, target) for path in (trained[0], tmp_path / "more"))
    assert isinstance(module, MtpHead) and isinstance(later, MtpHead)
    assert bool((later.fc.kernel[...] != module.fc.kernel[...]).any())


@pytest.mark.parametrize("layout", ["deepseek", "qwen3_next"])
def test_a_module_may_go_into_its_targets_checkpoint(
    layout: str, train_command: Any, tiny_files: Path, tmp_path: Path
) -> None:
    one = ("--mtp-steps", "1", "--layout", layout)
    train_command(mtp, tmp_path / "both", *one)
    assert inside_target(tmp_path / "both") and not inside_target(tiny_files / "target")
    target = hf.load_model(tmp_path / "both")
    assert isinstance(load_drafter("mtp", tmp_path / "both", target), MtpHead)
    train_command(mtp, tmp_path / "more", *one, "--init-from", str(tmp_path / "both"))
    assert inside_target(tmp_path / "more")


def test_a_module_that_its_layout_cannot_hold_is_refused_early() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match=r"this layout cannot express qk_norm=True \(would read as False\)"):
        check_layout(new_head("qwen3", target, SAMPLE, 0), target, "deepseek")
    head = new_head("target", target, SAMPLE, 0)
    head.embedding = nnx.Param(target.embedding[...] + 1)
    check_layout(head, target, "deepseek")
    with pytest.raises(ValueError, match="tables of its own, which --layout deepseek holds, got speculators"):
        check_layout(head, target, "speculators")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mtp-steps", "0"], "steps must be at least 1, got 0"),
        (["--layout", "medusa"], "--layout of a mtp drafter must be one of .*, got 'medusa'"),
        (["--layout", "deepseek", "--layer-type", "qwen3"], "--layout deepseek needs --layer-type target, got qwen3"),
        (["--init-from", "TARGET"], "--init-from .* holds a drafter of kind 'draft_model'; this command trains 'mtp'"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: list[str], message: str, train_command: Any, tiny_files: Path, tmp_path: Path
) -> None:
    arguments = [a.replace("TARGET", str(tiny_files / "target")) for a in arguments]
    with pytest.raises(ValueError, match=message):
        train_command(mtp, tmp_path / "out", *arguments)
