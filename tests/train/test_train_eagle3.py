"""The training-time test equals drafting with a growing cache; losses and acceptance equal their definitions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.layers import causal_attention
from jaxspec.models.tiny import tiny_target
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.train import evaluate, loop
from jaxspec.train.eagle3 import new_head, ttt_loss
from jaxspec.train.loss import acceptance_metrics, masked_mean, on_draft_vocabulary, soft_cross_entropy
from jaxspec.train.ttt import training_time_test

CONFIG = Eagle3Config(
    hidden_size=16,
    target_hidden_size=32,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=13,
    draft_vocab_size=9,
    aux_layer_ids=(0, 1, 2),
)
jitted_loss = nnx.jit(ttt_loss, static_argnums=(3, 4))
TARGET_IDS = np.array([0, 1, 2, 4, 5, 7, 8, 11, 12])


def random_head(**overrides: Any) -> Eagle3Head:
    """Every parameter random and large, so that a wrong mask or position shows."""
    head = Eagle3Head(dataclasses.replace(CONFIG, **overrides))
    head.target_ids[...] = jnp.asarray(TARGET_IDS, jnp.int32)
    for i, (_, param) in enumerate(nnx.iter_graph(head)):
        if isinstance(param, nnx.Param):
            noise = jax.random.normal(jax.random.key(i), param.shape)
            param[...] = 1.0 + 0.3 * noise if param.ndim == 1 else noise * 2 / np.sqrt(param.shape[0])
    return head


class GrowingCache:
    """An `Attend` as inference has it: keys and values are appended, queries see all before them and themselves."""

    def __init__(self) -> None:
        self.keys: jax.Array | None = None
        self.values: jax.Array | None = None

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        assert layer == 0
        self.keys = k if self.keys is None else jnp.concatenate([self.keys, k], axis=1)
        self.values = v if self.values is None else jnp.concatenate([self.values, v], axis=1)
        past = self.keys.shape[1] - q.shape[1]
        mask = jnp.arange(self.keys.shape[1])[None, :] <= past + jnp.arange(q.shape[1])[:, None]
        return jax.nn.dot_product_attention(q, self.keys, self.values, mask=mask[None, None])


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_output": True, "fc_norm": True},
        {"norm_before_residual": True, "norm_before_fc": True, "qk_norm": True},
    ],
    ids=["plain", "eagle3.1", "residual"],
)
def test_training_time_test_is_drafting_with_a_growing_cache(flags: dict[str, bool]) -> None:
    steps, length = 3, 9
    head = random_head(**flags)
    tokens = jax.random.randint(jax.random.key(1), (2, length), 0, 13)
    aux = jax.random.normal(jax.random.key(2), (2, length, 96))
    unrolled = nnx.jit(training_time_test, static_argnums=3)(head, aux, tokens, steps)
    assert [x.shape for x in unrolled] == [(2, length - steps, 9)] * steps
    for n in (0, 2, length - steps - 1):
        cache = GrowingCache()
        positions = jnp.broadcast_to(jnp.arange(n + 1)[None, :], (2, n + 1))
        hidden = head(tokens[:, 1 : n + 2], head.fuse(aux[:, : n + 1]), positions, cache)[:, -1:]
        for i in range(steps):
            np.testing.assert_allclose(unrolled[i][:, n], head.logits(hidden)[:, 0], rtol=2e-4, atol=2e-5)
            if i + 1 < steps:
                hidden = head(tokens[:, n + 2 + i : n + 3 + i], hidden, jnp.full((2, 1), n + 1 + i), cache)


def test_loss_matches_its_definition() -> None:
    target, head = tiny_target(), random_head()
    tokens = jax.random.randint(jax.random.key(3), (2, 10), 0, 13)
    loss, metrics = jitted_loss(head, target, tokens, 2, 0.5)

    positions = jnp.broadcast_to(jnp.arange(10)[None, :], (2, 10))
    hidden, aux = target(tokens, positions, causal_attention, (0, 1, 2))
    assert aux is not None
    target_logits = np.asarray(target.logits(hidden), np.float64)
    expected, right = 0.0, []
    for i, logits in enumerate(training_time_test(head, aux, tokens, 2)):
        terms, row = [], []
        for b in range(2):
            for n in range(8):
                best = int(target_logits[b, n + 1 + i].argmax())
                row.append(int(TARGET_IDS[np.asarray(logits)[b, n].argmax()]) == best)
                if best in TARGET_IDS:
                    p = np.exp(target_logits[b, n + 1 + i][TARGET_IDS])
                    z = np.asarray(logits, np.float64)[b, n]
                    terms.append(-(p / p.sum() * (z - np.log(np.exp(z).sum()))).sum())
        expected += 0.5**i * np.mean(terms)
        right.append(row)
        assert 0 < len(terms) < 16  # some are masked, not all
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    both = np.asarray(right).all(axis=0).mean()
    assert float(metrics["length"]) == pytest.approx(1 + np.mean(right[0]) + both, rel=1e-5)


def test_gradients_reach_every_parameter_and_no_buffer() -> None:
    target, head = tiny_target(), random_head()
    graph, params, rest = nnx.split(head, nnx.Param, ...)
    tokens = jax.random.randint(jax.random.key(4), (2, 8), 0, 13)
    grads = jax.jit(jax.grad(lambda p: ttt_loss(nnx.merge(graph, p, rest), target, tokens, 2, 0.8)[0]))(params)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
    assert len(jax.tree.leaves(rest)) == 1


def test_soft_cross_entropy_is_least_at_the_target() -> None:
    logits = jax.random.normal(jax.random.key(0), (1, 3, 5))
    probs = jax.nn.softmax(logits, axis=-1)
    entropy = -(probs * jnp.log(probs)).sum(axis=-1)
    np.testing.assert_allclose(soft_cross_entropy(logits, probs), entropy, rtol=1e-5)
    gradient = jax.grad(lambda z: soft_cross_entropy(z, probs).sum())(logits)
    np.testing.assert_allclose(gradient, jnp.zeros_like(gradient), atol=1e-6)


def test_distribution_on_the_draft_vocabulary() -> None:
    logits = jnp.log(jnp.asarray([[[0.5, 0.1, 0.4], [0.2, 0.6, 0.2]]]))
    probs, inside = on_draft_vocabulary(logits, jnp.asarray([0, 2]))
    np.testing.assert_allclose(probs, [[[5 / 9, 4 / 9], [0.5, 0.5]]], rtol=1e-5)
    assert inside.tolist() == [[True, False]]
    full, everywhere = on_draft_vocabulary(logits, jnp.arange(3))
    np.testing.assert_allclose(full, jnp.exp(logits), rtol=1e-5)
    assert bool(everywhere.all())


def test_masked_mean_of_nothing_is_zero() -> None:
    assert float(masked_mean(jnp.ones((2, 2)), jnp.zeros((2, 2), bool))) == 0.0
    assert float(masked_mean(jnp.asarray([1.0, 5.0]), jnp.asarray([False, True]))) == 5.0


def test_acceptance_is_conditional_on_the_chain_so_far() -> None:
    first, second = jnp.asarray([[True, True, False, True]]), jnp.asarray([[True, False, True, True]])
    metrics = {k: float(v) for k, v in acceptance_metrics([first, second]).items()}
    assert metrics == pytest.approx({"accept_1": 0.75, "accept_2": 2 / 3, "length": 1 + 0.75 + 0.5})


def test_walk_counts_rounds_as_an_engine_would() -> None:
    right = np.array([[0, 0], [1, 0], [1, 1], [1, 1], [0, 1], [1, 1], [0, 0]], bool)
    assert evaluate.walk(right, prompt_length=2).tolist() == [1, 2, 0]  # starts at 1, 3, 6
    assert evaluate.walk(right, prompt_length=8).tolist() == []


def test_a_new_head_starts_near_the_target() -> None:
    target = tiny_target(num_layers=3)
    ids = np.arange(13)
    cfg = dataclasses.replace(CONFIG, hidden_size=32, draft_vocab_size=13, aux_layer_ids=(1, 2, 3))
    tokens = jax.random.randint(jax.random.key(5), (8, 24), 0, 13)
    started = jitted_loss(new_head(cfg, target, ids, 0), target, tokens, 1, 1.0)[1]["length"]
    plain = jitted_loss(Eagle3Head(cfg, rngs=nnx.Rngs(params=0)), target, tokens, 1, 1.0)[1]["length"]
    assert float(started) > float(plain)


def test_training_raises_the_acceptance(tmp_path: Path) -> None:
    target = tiny_target()
    cfg = dataclasses.replace(CONFIG, draft_vocab_size=13)
    graph, params, rest = nnx.split(new_head(cfg, target, np.arange(13), 0), nnx.Param, ...)
    target_graph, target_state = nnx.split(target)

    def loss_fn(params: Any, frozen: Any, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        head, model = nnx.merge(graph, params, frozen[0]), nnx.merge(target_graph, frozen[1])
        return ttt_loss(head, model, tokens, 2, 0.8)

    def batch_at(step: int) -> np.ndarray:
        return np.random.default_rng(step).integers(0, 13, (8, 16)).astype(np.int32)

    frozen, probe = (rest, target_state), jnp.asarray(batch_at(999))
    before = jax.jit(loss_fn)(params, frozen, probe)[1]["length"]
    optim = loop.OptimConfig(steps=150, lr=1e-2, warmup=10, log_every=50, save_every=150)
    params = loop.run(loss_fn, params, batch_at, optim, tmp_path, frozen=frozen)
    after = jax.jit(loss_fn)(params, frozen, probe)[1]["length"]
    assert float(after) > float(before) + 0.3
