"""The training-time test equals drafting with a growing cache; losses equal their definitions; EAGLE heads learn."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpointing.hf import load_model
from jaxspec.drafters.directories import chat_modes, load_drafter, read_kind
from jaxspec.models.layers import Shared, shared_lm_head
from jaxspec.models.quantised import Quantised
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Buffer, Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import eagle
from jaxspec.train.objective.chunks import draft_vocabulary_logits
from jaxspec.train.objective.loss import (
    draft_loss,
    first_choice,
    masked_mean,
    mean_weights,
    smooth_l1,
    soft_cross_entropy,
)
from jaxspec.train.objective.ttt import unroll

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
TARGET_IDS = np.array([0, 1, 2, 4, 5, 7, 8, 11, 12])


def randomized(head: Any) -> Any:
    """Every parameter random and large, so that a wrong mask or position shows."""
    for i, (_, param) in enumerate(nnx.iter_graph(head)):
        if isinstance(param, nnx.Param):
            noise = np.asarray(jax.random.normal(jax.random.key(i), param.shape))
            scaled = 1.0 + 0.3 * noise if param.ndim == 1 else noise * 2 / np.sqrt(np.float32(param.shape[0]))
            param.set_value(jnp.asarray(scaled))
    return head


def random_head(**overrides: Any) -> Eagle3Head:
    cfg = dataclasses.replace(CONFIG, **overrides)
    head = Eagle3Head(cfg)
    ids = TARGET_IDS if cfg.draft_vocab_size == 9 else np.arange(13)
    head.target_ids[...] = jnp.asarray(ids, jnp.int32)
    return randomized(head)


def random_eagle1(layers: int = 1) -> Eagle1Head:
    target = tiny_target()
    cfg = Eagle1Config(layer=tiny_config(num_layers=layers), target_layers=2)
    return randomized(Eagle1Head(cfg, Shared(target.embedding[...]), shared_lm_head(target)))


def random_mtp() -> MtpHead:
    target = tiny_target()
    cfg = MtpConfig(layer=tiny_config(num_layers=1), target_layers=2)
    return randomized(MtpHead(cfg, Shared(target.embedding[...]), shared_lm_head(target)))


class GrowingCache:
    """An `Attend` as inference has it: keys and values are appended, queries see all before them and themselves."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[jax.Array, jax.Array]] = {}

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> jax.Array:
        if layer in self.entries:
            k, v = (jnp.concatenate([old, new], axis=1) for old, new in zip(self.entries[layer], (k, v), strict=True))
        self.entries[layer] = (k, v)
        past = k.shape[1] - q.shape[1]
        mask = jnp.arange(k.shape[1])[None, :] <= past + jnp.arange(q.shape[1])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])


HEADS: dict[str, Callable[[], Any]] = {
    "plain": random_head,
    "eagle3.1": lambda: random_head(norm_output=True, fc_norm=True),
    "residual": lambda: random_head(norm_before_residual=True, norm_before_fc=True, qk_norm=True),
    "three layers": lambda: random_head(num_layers=3),
    "eagle1": random_eagle1,
    "eagle1 of two layers": lambda: random_eagle1(2),
    "mtp": random_mtp,
}


def training_time_test(head: Any, batch: Batch, aux_BTA: jax.Array, steps: int) -> list[jax.Array]:
    """What the head says in each step, [B, T, Vd]."""
    return [head.logits(hidden) for hidden in unroll(head, batch, aux_BTA, steps)]


def drafting(head: Any, tokens: jax.Array, aux: jax.Array, n: int, steps: int) -> list[jax.Array]:
    """What the head says in each step after position n of one text, its cache growing, [Vd]."""
    cache = GrowingCache()
    hidden = head(tokens[None, 1 : n + 2], head.fuse(aux[:, : n + 1]), jnp.arange(n + 1)[None], cache)[:, -1:]
    said = [head.logits(hidden)[0, 0]]
    for i in range(steps - 1):
        hidden = head(tokens[None, n + 2 + i : n + 3 + i], hidden, jnp.full((1, 1), n + 1 + i), cache)
        said.append(head.logits(hidden)[0, 0])
    return said


@pytest.mark.parametrize("name", HEADS)
def test_training_time_test_is_drafting_with_a_growing_cache(name: str, packed_batch: Batch) -> None:
    """Every text of packed rows by itself: what stands beside it in the row changes nothing."""
    steps, head, batch = 3, HEADS[name](), packed_batch
    aux = jax.random.normal(jax.random.key(2), (*batch.tokens_BT.shape, head.config.aux_width))
    unrolled = nnx.jit(training_time_test, static_argnums=3)(head, batch, aux, steps)
    assert [x.shape[:2] for x in unrolled] == [(2, 20)] * steps
    cases = [(0, 9, 7, 3), (1, 0, 20, 16)]
    if name in ("plain", "eagle1"):
        cases.append((0, 0, 9, 0))  # without anything before it; every case is compiled
    for row, first, count, n in cases:
        tokens, own_aux = batch.tokens_BT[row, first : first + count], aux[row, first : first + count][None]
        drafted = nnx.jit(drafting, static_argnums=(3, 4))(head, tokens, own_aux, n, steps)
        for i in range(steps):
            np.testing.assert_allclose(unrolled[i][row, first + n], drafted[i], rtol=2e-4, atol=2e-5)


def defined_loss(
    head: Any, hidden: list[jax.Array], target_logits: np.ndarray, batch: Batch, decay: float, kind: str
) -> tuple[float, np.ndarray]:
    """Written out position by position in float64: (loss, matches)."""
    ids = TARGET_IDS if head.config.draft_vocab_size == 9 else np.arange(13)
    segments, learn = np.asarray(batch.segments_BT), np.asarray(batch.learn_BT)
    rows, length = segments.shape
    loss, matches = 0.0, np.zeros((rows, length, len(hidden)), bool)
    for i, states in enumerate(hidden):
        z_all, total, count = np.asarray(head.logits(states), np.float64), 0.0, 0
        for b in range(rows):
            for n in range(length - 2 - i):
                if segments[b, n + 2 + i] != segments[b, n]:
                    continue
                best = int(target_logits[b, n + 1 + i].argmax())
                z = z_all[b, n]
                matches[b, n, i] = ids[z.argmax()] == best
                if not learn[b, n + 2 + i]:
                    continue
                count += 1
                if best in ids:
                    logq = z - np.log(np.exp(z).sum())
                    p = np.exp(target_logits[b, n + 1 + i][ids])
                    p = p / p.sum()
                    if kind == "ce":
                        p = (ids == best).astype(np.float64)
                    total += -(p * logq).sum() + (np.where(p > 0, p * np.log(p), 0).sum() if kind == "kl" else 0.0)
        loss += decay**i * total / count
    return loss, matches


@pytest.mark.parametrize("kind", ["soft", "kl", "ce"])
@pytest.mark.parametrize("limit", [1, 2 * 13 * 7, 2**26])
def test_loss_is_its_definition_however_it_is_cut(
    kind: str, limit: int, packed_batch: Batch, target_states: Any
) -> None:
    target, head, batch = tiny_target(), random_head(), packed_batch
    states = target_states(target, batch, (0, 1, 2))
    hidden = nnx.jit(unroll, static_argnums=3)(head, batch, states.aux_BTA, 3)
    weights = [mean_weights(batch.learned_ahead(2 + i), 0.5**i) for i in range(3)]
    loss, matches = draft_loss(head, target, hidden, states.hidden_BTE, weights, kind=kind, limit=limit)
    target_logits = np.asarray(target.logits(states.hidden_BTE), np.float64)
    wanted, right = defined_loss(head, hidden, target_logits, batch, 0.5, kind)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    for i in range(3):
        inside = np.asarray(batch.learned_ahead(2 + i))
        np.testing.assert_array_equal(np.asarray(matches)[..., i][inside], right[..., i][inside])
    assert 0 < right.mean() < 0.95


@pytest.mark.parametrize(("kind", "limits"), [("soft", (2 * 13 * 7, 2**26)), ("kl", (2**26,)), ("ce", (2 * 13 * 7,))])
def test_gradients_are_those_of_the_plain_formula(
    kind: str, limits: tuple[int, ...], packed_batch: Batch, target_states: Any
) -> None:
    """However the loss is cut."""
    target, head, batch = tiny_target(), random_head(), packed_batch
    states = target_states(target, batch, (0, 1, 2))
    graph, params, rest = nnx.split(head, nnx.Param, ...)
    weights = [mean_weights(batch.learned_ahead(2 + i), 0.5**i) for i in range(3)]

    def ours(params: Any, limit: int) -> jax.Array:
        head = nnx.merge(graph, params, rest)
        hidden = unroll(head, batch, states.aux_BTA, 3)
        return 3.0 * draft_loss(head, target, hidden, states.hidden_BTE, weights, kind=kind, limit=limit)[0]

    def plain(params: Any) -> jax.Array:
        head = nnx.merge(graph, params, rest)
        target_logits = target.logits(states.hidden_BTE)
        probs = jax.nn.softmax(target_logits[..., TARGET_IDS], axis=-1)
        best = jnp.argmax(target_logits, axis=-1)
        if kind == "ce":
            probs = (best[..., None] == jnp.asarray(TARGET_IDS)[None, None]).astype(jnp.float32)
        inside = jnp.isin(best, jnp.asarray(TARGET_IDS))
        loss = jnp.float32(0.0)
        for i, logits in enumerate(training_time_test(head, batch, states.aux_BTA, 3)):
            there = slice(i + 1, None)
            entropy = soft_cross_entropy(logits[:, : 19 - i], probs[:, there])
            loss = loss + jnp.sum(jnp.where(inside[:, there], weights[i][:, : 19 - i] * entropy, 0.0))
        return 3.0 * loss

    wanted = jax.jit(jax.grad(plain))(params)
    for limit in limits:
        found = jax.jit(jax.grad(ours), static_argnums=1)(params, limit)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)


def recipe_of(head: Any, depth: int = 2) -> Any:
    make = eagle.Eagle1Recipe if isinstance(head, Eagle1Head) else eagle.Eagle3Recipe
    return make(head.config.aux_layer_ids, depth)


@pytest.mark.parametrize("name", ["plain", "eagle3.1", "three layers", "eagle1", "eagle1 of two layers"])
def test_gradients_reach_every_parameter_and_no_table_of_the_target(
    name: str, packed_batch: Batch, target_states: Any, gradients: Any
) -> None:
    target, head = tiny_target(), HEADS[name]()
    states = target_states(target, packed_batch, head.config.aux_layer_ids)
    found = gradients(recipe_of(head), head, target, packed_batch, states)
    assert found and all(value > 0 for value in found.values()), found
    assert not any("embedding" in path or "lm_head" in path for path in found) or isinstance(head, Eagle3Head)


def test_eagle1_loss_is_its_definition(packed_batch: Batch, target_states: Any, loss_of: Any) -> None:
    """Without noise: smooth L1 to the next feature and a tenth of the soft cross entropy, over learned positions."""
    target, head, batch = tiny_target(), random_eagle1(), packed_batch
    states = target_states(target, batch, (3,))
    recipe = eagle.Eagle1Recipe((3,), 2, noise=0.0)
    loss, matches, metrics = loss_of(recipe, head, target, batch, states)
    first, second = nnx.jit(unroll, static_argnums=3)(head, batch, states.aux_BTA, 2)
    mask = np.asarray(batch.learned_ahead(2))
    error = np.abs(np.asarray(first)[:, :-1] - np.asarray(states.hidden_BTE)[:, 1:])
    huber = np.where(error < 1, 0.5 * error**2, error - 0.5).mean(axis=-1)
    regression = huber[mask[:, :-1]].mean()
    target_logits = np.asarray(target.logits(states.hidden_BTE), np.float64)
    soft, _ = defined_loss(head, [first], target_logits, batch, 1.0, "soft")
    assert float(metrics["feature_loss"]) == pytest.approx(regression, rel=1e-5)
    assert float(loss) == pytest.approx(regression + 0.1 * soft, rel=1e-5)
    _, right = defined_loss(head, [first, second], target_logits, batch, 1.0, "soft")
    assert matches.shape == (2, 17, 2)
    np.testing.assert_array_equal(matches[..., 0][batch.learned(2, 17)], right[:, :17, 0][batch.learned(2, 17)])
    np.testing.assert_array_equal(matches[..., 1][batch.learned(3, 17)], right[:, :17, 1][batch.learned(3, 17)])
    noisy = dataclasses.replace(recipe, noise=0.1)
    noised = jax.jit(lambda key: noisy.loss(head, target, batch, states, key)[0])
    other = [float(noised(jax.random.key(i))) for i in (0, 0, 1)]
    assert other[0] == other[1] != other[2] and other[0] != float(loss)


def test_bfloat16_losses_are_close_to_float32(packed_batch: Batch, target_states: Any, loss_of: Any) -> None:
    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree)
    losses = []
    for rounded in (False, True):
        target, head = tiny_target(dtype=jnp.bfloat16 if rounded else jnp.float32), random_head()
        states = target_states(target, packed_batch, (0, 1, 2))
        graph, state = nnx.split(head)
        head = nnx.merge(graph, half(state) if rounded else state)
        losses.append(loss_of(recipe_of(head), head, target, packed_batch, states)[0])
    assert losses[1].dtype == jnp.float32
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=0.05)


def test_soft_cross_entropy_is_least_at_the_target() -> None:
    logits = jax.random.normal(jax.random.key(0), (1, 3, 5))
    probs = jax.nn.softmax(logits, axis=-1)
    np.testing.assert_allclose(soft_cross_entropy(logits, probs), -(probs * jnp.log(probs)).sum(axis=-1), rtol=1e-5)
    gradient = jax.grad(lambda z: soft_cross_entropy(z, probs).sum())(logits)
    np.testing.assert_allclose(gradient, jnp.zeros_like(gradient), atol=1e-6)


def test_small_functions() -> None:
    assert float(masked_mean(jnp.ones((2, 2)), jnp.zeros((2, 2), bool))) == 0.0
    assert float(masked_mean(jnp.asarray([1.0, 5.0]), jnp.asarray([False, True]))) == 5.0
    assert float(mean_weights(jnp.zeros((2, 2), bool)).sum()) == 0.0
    assert float(mean_weights(jnp.ones((2, 2), bool), 0.5).sum()) == 0.5
    np.testing.assert_allclose(smooth_l1(jnp.asarray([0.5, 3.0]), jnp.zeros(2)), (0.125 + 2.5) / 2)
    for width in (13, 128):
        logits = jax.random.randint(jax.random.key(1), (3, 50, width), 0, 20).astype(jnp.float32)
        np.testing.assert_array_equal(first_choice(logits), jnp.argmax(logits, axis=-1))  # ties included


def test_draft_vocabulary() -> None:
    counts = np.array([5, 0, 9, 1, 5, 0])
    np.testing.assert_array_equal(eagle.draft_vocabulary(counts, 3, 0.9), [0, 2, 4])
    np.testing.assert_array_equal(eagle.draft_vocabulary(counts, None, 0.9, multiple=1), [0, 2, 4])
    np.testing.assert_array_equal(eagle.draft_vocabulary(counts, None, 0.9), np.arange(6))
    with pytest.raises(ValueError, match="between 1 and the target's vocab_size 6, got 7"):
        eagle.draft_vocabulary(counts, 7, 0.9)
    with pytest.raises(ValueError, match=r"coverage must lie in \(0, 1\], got 0"):
        eagle.draft_vocabulary(counts, None, 0)


@pytest.mark.parametrize("width", [16, 32])
def test_a_new_head_starts_near_the_target(width: int, greedy_batch: Any, target_states: Any, loss_of: Any) -> None:
    target = tiny_target(num_layers=3)
    cfg = dataclasses.replace(CONFIG, hidden_size=width, draft_vocab_size=13, aux_layer_ids=(1, 2, 3))
    batch = greedy_batch(target)
    states = target_states(target, batch, (1, 2, 3))
    losses = {}
    for name, head in {
        "ours": eagle.new_head(cfg, target, np.arange(13), 0),
        "plain": Eagle3Head(cfg, rngs=nnx.Rngs(params=0)),
    }.items():
        losses[name] = float(loss_of(recipe_of(head, 1), head, target, batch, states)[0])
    assert losses["ours"] < losses["plain"]
    if width == 32:
        np.testing.assert_allclose(eagle.new_head(cfg, target, np.arange(13), 0).embedding[...], target.embedding[...])


@pytest.mark.parametrize("arch", ["eagle3", pytest.param("eagle1", marks=pytest.mark.exhaustive("EAGLE-3's does"))])
def test_training_raises_the_acceptance(
    arch: str, greedy_batch: Any, target_states: Any, simulated_lengths: Any
) -> None:
    target = tiny_target()
    batch = greedy_batch(target)
    if arch == "eagle3":
        cfg = dataclasses.replace(CONFIG, draft_vocab_size=13)
        head: Any = eagle.new_head(cfg, target, np.arange(13), 0)
    else:
        cfg1 = Eagle1Config(layer=tiny_config(num_layers=1), target_layers=2)
        head = Eagle1Head(cfg1, Shared(target.embedding[...]), shared_lm_head(target), rngs=nnx.Rngs(params=0))
    states = target_states(target, batch, head.config.aux_layer_ids)
    lengths = simulated_lengths(recipe_of(head), head, target, batch, states, 120, 1e-2)
    assert lengths[-1] > lengths[0] + 0.3


def test_which_embeddings_are_trained() -> None:
    target = tiny_target()
    wide = dataclasses.replace(CONFIG, hidden_size=32)
    kinds = {}
    for name, cfg, train in (
        ("narrow", CONFIG, None), ("narrow frozen", CONFIG, False), ("wide", wide, None), ("wide trained", wide, True)
    ):  # fmt: skip
        head = eagle.new_head(cfg, target, TARGET_IDS, 0)
        eagle.set_embedding(head, target, train)
        kinds[name] = type(head.embedding)
    assert kinds == {"narrow": nnx.Param, "narrow frozen": Buffer, "wide": Shared, "wide trained": nnx.Param}


def test_a_trained_head_gets_the_vocabulary_of_other_texts() -> None:
    """Tokens that stay keep their rows; where the head's rows are the target's under a linear map, so are new ones'."""
    target, head = tiny_target(), random_head(draft_vocab_size=9)
    table = target.embedding if target.lm_head is None else target.lm_head.kernel
    table_VE = table[...] if target.lm_head is None else table[...].T
    table_VE = table_VE.at[3].set(table_VE[1] + table_VE[2]).at[12].set(table_VE[4] + table_VE[11])
    table[...] = table_VE if target.lm_head is None else table_VE.T
    rows_VE, kernel_EH = eagle._output_rows(target), np.asarray(head.fc.kernel[...])[: target.config.hidden_size]
    old_ids = np.array([1, 2, 4, 5, 6, 7, 8, 9, 11])
    head.target_ids[...] = jnp.asarray(old_ids, jnp.int32)
    head.lm_head.kernel[...] = jnp.asarray((rows_VE[old_ids] @ kernel_EH).T)
    before_HV = np.asarray(head.lm_head.kernel[...])
    counts_V = np.zeros(target.config.vocab_size, np.int64)
    counts_V[[3, 4, 11, 12]] = 2, 9, 1, 5
    record = eagle.renew_vocabulary(head, target, counts_V)
    # What the texts use, and of what the head had besides the lowest ids.
    assert np.asarray(head.target_ids[...]).tolist() == [1, 2, 3, 4, 5, 6, 7, 11, 12]
    assert record == {"draft_vocabulary_coverage": 1.0}
    now_HV = np.asarray(head.lm_head.kernel[...])
    np.testing.assert_array_equal(now_HV[:, [0, 1, 3, 4, 5, 6, 7]], before_HV[:, [0, 1, 2, 3, 4, 5, 8]])
    # The target says tokens 3 and 12 by sums of what it says others by, so the head does, nearly.
    for place, (one, other) in ((2, (0, 1)), (8, (2, 8))):
        wanted_H = before_HV[:, one] + before_HV[:, other]
        assert np.linalg.norm(now_HV[:, place] - wanted_H) < 0.1 * np.linalg.norm(wanted_H)
    assert eagle.renew_vocabulary(head, target, counts_V) == record
    np.testing.assert_array_equal(np.asarray(head.lm_head.kernel[...]), now_HV)


def test_output_layers_in_few_bits_begin_and_teach_heads() -> None:
    target = tiny_target()
    assert target.lm_head is not None
    values_EV = jax.random.randint(jax.random.key(0), target.lm_head.kernel.shape, -127, 128, jnp.int8)
    scale_1V = jax.random.uniform(jax.random.key(1), (1, values_EV.shape[1]))
    hidden_BNE, found = jax.random.normal(jax.random.key(2), (2, 3, values_EV.shape[0])), []
    for kernel in (values_EV.astype(jnp.float32) * scale_1V, Quantised(values_EV, scale_1V)):
        target.lm_head.kernel = nnx.Param(kernel)  # pyright: ignore[reportAttributeAccessIssue]
        head = eagle.new_head(CONFIG, target, TARGET_IDS, 0)
        found.append((head.lm_head.kernel[...], draft_vocabulary_logits(target, head)(hidden_BNE)))
    for few, wide in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(few, wide, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "arch", [pytest.param("eagle3", marks=pytest.mark.exhaustive("EAGLE-3.1's do, the default")), None, "eagle1"]
)
def test_a_head_trains_saves_and_goes_on(
    arch: str | None, tmp_path: Path, tiny_files: Path, train_command: Any
) -> None:  # fmt: skip
    named = [] if arch is None else ["--arch", arch]
    shape = [] if arch == "eagle1" else ["--draft-vocab-size", "9", "--hidden-size", "16", "--head-dim", "6"]
    record = train_command(eagle, tmp_path / "head", *named, "--ttt-steps", "2", *shape)
    target = load_model(tiny_files / "target")
    kind = "eagle1" if arch == "eagle1" else "eagle3"
    assert read_kind(tmp_path / "head") == kind == record["kind"]
    head: Any = load_drafter(kind, tmp_path / "head", target, jnp.float32)
    if arch != "eagle1":
        assert (head.config.draft_vocab_size, head.config.fc_norm) == (9, arch is None)
        assert head.config.norm_output == head.config.fc_norm
    saved = json.loads((tmp_path / "head" / "training.json").read_text())
    assert saved == json.loads(json.dumps(record))
    assert saved["tokens_seen"] == 2 * 2 * 32 and saved["held_out_acceptance"]["texts"]["rounds"] > 0
    assert "chat_template_kwargs" not in saved
    chats, rng = tmp_path / "chats.jsonl", np.random.default_rng(0)
    said = {"chat_template_kwargs": {"enable_thinking": False}}
    rows = [{"prompt_token_ids": [1], "output_token_ids": rng.integers(0, 12, 20).tolist(), **said} for _ in range(12)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["--init-from", str(tmp_path / "head"), "--ttt-steps", "2", "--data", str(chats)]
    again = train_command(eagle, tmp_path / "again", *more)
    assert again["parameters"] == record["parameters"] and chat_modes(tmp_path / "again") == list(said.values())
    with pytest.raises(ValueError, match="leave out \\['layers'\\]"):
        train_command(eagle, tmp_path / "x", "--init-from", str(tmp_path / "head"), "--layers", "2")


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, train_command: Any) -> None:
    for arguments, message in (
        (["--arch", "eagle1", "--hidden-size", "16"], "must be the target's 32, got 16"),
        (["--arch", "eagle1", "--coverage", "0.5"], "--coverage belongs to EAGLE-3"),
        (["--norm-before-fc"], "--norm-before-fc belongs to --arch eagle3, got it with eagle3.1"),
        (["--aux-layers", "0", "1", "7"], r"--aux-layers must lie in 0 .. 2 \(the target's\), got \(0, 1, 7\)"),
        (["--ttt-steps", "31"], "--ttt-steps must lie in 1 .. --length 32 - 2, got 31"),
        (["--layout", "other"], "--layout of a drafter of kind 'eagle3' must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            train_command(eagle, tmp_path / "head", *arguments)
    assert not (tmp_path / "head").exists()


def test_a_run_does_not_go_on_with_other_texts(tmp_path: Path, tiny_files: Path, train_command: Any) -> None:
    """The draft vocabulary is counted from them and lies in no checkpoint."""
    shape = ["--draft-vocab-size", "9", "--hidden-size", "16", "--head-dim", "6", "--ttt-steps", "2"]
    train_command(eagle, tmp_path / "head", *shape)
    texts = tiny_files / "texts.jsonl"
    before = texts.read_bytes()
    try:
        texts.write_bytes(before + before.splitlines(keepends=True)[0])
        with pytest.raises(ValueError, match=r"head.run holds another run: rows was '\w+', is '\w+'"):
            train_command(eagle, tmp_path / "head", *shape)
    finally:
        texts.write_bytes(before)
