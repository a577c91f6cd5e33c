"""A grown model computes what the small one does, and its head drafts what the small one's does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.bench.offline import command, grow
from jaxspec.bench.offline.widen import widen_head
from jaxspec.checkpointing import eagle3, hf
from jaxspec.models.base import Experts, counting_experts
from jaxspec.models.layers import Transformer, causal_attention
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.resolve import resolve_drafter
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head

SMALL: dict[str, Any] = dict(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
#: More layers, channels, KV heads, query heads a KV head, and twice the head's channels.
SIZE = grow.Size(5, 72, 100, 9, 3, 16)
#: Experts in sets of five, the last of which is not full; a token uses two sets of three.
MIXED = dataclasses.replace(SIZE, num_layers=4, experts=Experts(15, 10, 11, tuple(range(4))))
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 12))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "rms_norm_eps": 0.05},
    "windows": {"family": "smollm3", "sliding_window": 4, "sliding_layers": (1,), "no_rope_layers": (2,)},
}


@nnx.jit(static_argnums=(1,))
def forward(model: Transformer, aux_layers: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Logits, auxiliary states, and the experts [layers, tokens, used] of mixtures."""
    tokens = jnp.asarray(TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    with counting_experts() as chosen:
        hidden, aux = model(tokens, positions, causal_attention, aux_layers)
    assert aux is not None
    experts = jnp.stack([experts_MK for experts_MK, _ in chosen]) if chosen else None
    return model.logits(hidden), aux, experts


@pytest.mark.parametrize(("name", "size"), [*((name, SIZE) for name in FAMILIES if name != "tied"), ("tied", MIXED)])
def test_logits_and_auxiliary_states_stay(name: str, size: grow.Size):
    small = tiny_target(1, **SMALL, **FAMILIES[name])
    large = grow.grow_target(small, size)
    ids = (0, 1, 2, 3)
    logits, aux, _ = forward(small, ids)
    grown_logits, grown_aux, experts_LMK = forward(large, grow.grown_aux_layers(ids, 3, size.num_layers))
    np.testing.assert_allclose(grown_logits, logits, atol=1e-4)
    split = np.reshape(grown_aux, (2, 12, 4, 72))
    np.testing.assert_allclose(split[..., :32].reshape(2, 12, -1), aux, atol=1e-4)
    assert not split[..., 32:].any()  # the new channels of the residual stream
    assert float(jnp.std(logits)) > 1
    if experts_LMK is not None:  # whole sets, and of every layer's each is some token's
        found = np.sort(np.asarray(experts_LMK), axis=-1).reshape(*experts_LMK.shape[:2], -1, 5)
        assert (found % 5 == np.arange(5)).all() and (found // 5 == found[..., :1] // 5).all()
        assert all(set(layer.reshape(-1).tolist()) == set(range(15)) for layer in found)


def test_the_grown_model_has_the_size_and_uses_random_weights_elsewhere():
    small = tiny_target(1, **SMALL)
    large = grow.grow_target(small, SIZE)
    cfg = large.config
    assert dataclasses.asdict(SIZE).items() <= dataclasses.asdict(cfg).items()
    assert cfg.vocab_size == 13 and not cfg.tie_word_embeddings
    assert large.layers[0].attn.qkv.kernel.shape == (72, (9 + 2 * 3) * 16)
    # No product is over zeros alone: an added layer reads with random weights and writes nothing.
    added = large.layers[1]
    assert float(jnp.std(added.attn.qkv.kernel[...])) > 0.01 and float(jnp.std(added.mlp.gate_up.kernel[...])) > 0.01
    assert not jnp.any(added.attn.out.kernel[...]) and not jnp.any(added.mlp.down.kernel[...])
    assert grow.parameters(large) > 10 * grow.parameters(small)


def test_layers_are_spread_evenly_and_aux_layers_follow():
    assert grow.layer_places(3, 7) == (0, 3, 6) and grow.layer_places(8, 8) == tuple(range(8))
    assert grow.layer_places(1, 5) == (0,)
    assert grow.grown_aux_layers((2, 4, 5, 8), 8, 32) == (9, 18, 22, 32)


@pytest.mark.parametrize("norms", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_the_head_reads_the_same_features(norms: dict[str, Any]):
    small = tiny_target(1, **SMALL)
    cfg = Eagle3Config(16, 32, 24, 4, 2, 6, 13, 9, (0, 2, 3), **norms)
    head = Eagle3Head(cfg, rngs=nnx.Rngs(params=0))
    if head.fc_norms is not None:
        head.fc_norms[1].weight[...] = jnp.linspace(0.5, 2.0, 32)
    grown = grow.grow_head(head, small.config, SIZE)
    assert grown.config.aux_layer_ids == (0, 4, 5) and grown.config.target_hidden_size == 72
    aux = forward(small, cfg.aux_layer_ids)[1]
    grown_aux = forward(grow.grow_target(small, SIZE), grown.config.aux_layer_ids)[1]
    feature, grown_feature = head.fuse(aux), grown.fuse(grown_aux)
    np.testing.assert_allclose(grown_feature, feature, atol=1e-4)
    assert float(jnp.std(feature)) > 0.01
    assert head.config == cfg and head.fc.kernel.shape == (96, 16)  # the small head is left as it was
    np.testing.assert_array_equal(grown.embedding[...], head.embedding[...])


@pytest.mark.parametrize("fields", [{"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}])
def test_a_widened_head_drafts_the_same(fields: dict[str, Any]):
    """As EAGLE-3.1 and otherwise, two steps long; its layer is the target's."""
    cfg = Eagle3Config(16, 72, 24, 4, 2, 8, 13, 9, (0, 2, 3), rms_norm_eps=0.05, **fields)
    head = Eagle3Head(cfg, rngs=nnx.Rngs(params=0))
    head.norm.weight[...] = jnp.linspace(0.5, 2.0, 16)
    wide = widen_head(head, SIZE)
    assert (
        wide.config.hidden_size == 72 and wide.attn.qkv.kernel.shape[0] == 144 and wide.mlp.down.kernel.shape[0] == 100
    )
    assert float(jnp.std(wide.mlp.gate_up.kernel[...][16:])) > 0.01  # no product is over zeros alone
    tokens, aux = jnp.asarray(TOKENS, jnp.int32), jax.random.normal(jax.random.key(1), (2, 12, 3 * 72))
    positions = jnp.broadcast_to(jnp.arange(12)[None], tokens.shape)

    @nnx.jit
    def drafted(net: Eagle3Head) -> jax.Array:
        feature = net.fuse(aux)
        first = net(tokens, feature, positions, causal_attention)
        return jnp.stack([net.logits(x) for x in (first, net(tokens, first, positions, causal_attention))])

    logits = drafted(head)
    np.testing.assert_allclose(drafted(wide), logits, atol=1e-4)
    assert float(jnp.std(logits)) > 0.01
    with pytest.raises(ValueError, match="only EAGLE-3 heads of one layer.*num_layers=2"):
        widen_head(Eagle3Head(dataclasses.replace(cfg, num_layers=2)), SIZE)


@pytest.mark.parametrize("head", [True, False])
def test_a_grown_checkpoint_is_what_it_was_made_from(
    head: bool, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    small, cfg = tiny_target(1, **SMALL), Eagle3Config(16, 32, 24, 4, 2, 6, 13, 9, (0, 2, 3), fc_norm=True)
    source, out = tmp_path / "target", tmp_path / "grown"
    hf.save_model(small, source, dtype=jnp.float32)
    (source / "tokenizer.json").write_text("{}")
    if head:
        eagle3.save_head(Eagle3Head(cfg, rngs=nnx.Rngs(params=0)), tmp_path / "eagle3", small.config, dtype=jnp.float32)
    size = SIZE if head else MIXED
    monkeypatch.setattr(grow, "PRESETS", {"1b": size})
    assert command.main(["grow", "1b", str(out), "--model", str(source), "--dtype", "float32"]) == 0
    assert re.search(r"wrote .*grown: [\d,]+ weights in float32", capsys.readouterr().out)
    grown = hf.load_model(out, jnp.float32)
    assert isinstance(grown, Transformer)
    assert all(getattr(grown.config, name) == value for name, value in size.fields().items())
    np.testing.assert_allclose(forward(grown, (0,))[0], forward(small, (0,))[0], atol=1e-4)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert resolve_drafter(None, out) == (("eagle3", out / "eagle3") if head else ("ngram", None))
    if head:
        was = eagle3.load_head(tmp_path / "eagle3", small, jnp.float32)
        read = eagle3.load_head(out / "eagle3", grown, jnp.float32)
        assert read.config.aux_layer_ids == (0, 4, 5)
        aux = forward(small, cfg.aux_layer_ids)[1]
        grown_aux = forward(grown, read.config.aux_layer_ids)[1]
        np.testing.assert_allclose(read.fuse(grown_aux), was.fuse(aux), atol=1e-4)
        np.testing.assert_array_equal(read.embedding[...], was.embedding[...])
    assert command.main(["grow", "1b", str(out), "--model", str(source)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_names_of_sizes():
    demo = tiny_config(
        num_layers=8, hidden_size=384, intermediate_size=1024, num_heads=6, num_kv_heads=2, head_dim=64
    )  # fmt: skip
    assert grow.parse_size("8B", demo) == grow.Size(32, 4096, 14336, 32, 8, 128)
    assert grow.parse_size("1b", demo) == grow.Size(16, 2048, 8192, 32, 8, 64)
    assert grow.parse_size("10x768", demo) == grow.Size(10, 768, 2048, 12, 4, 64)
    assert grow.parse_size("8x384", demo) == grow.Size(8, 384, 1024, 6, 2, 64)
    mixture = Experts(128, 8, 768, tuple(range(48)))
    assert grow.parse_size("30B-A3B", demo) == grow.Size(48, 2048, 6144, 32, 4, 128, mixture)
    mixture = Experts(16, 4, 512, tuple(range(9)))
    assert grow.parse_size("9x384x16a4", demo) == grow.Size(9, 384, 1024, 6, 2, 64, mixture)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("7b", {}, "grow must be one of .* got '7b'"),
        ("4x", {}, "got '4x'"),
        ("1x64", {}, "num_layers 1 must be at least the model's 2"),
        ("4x16", {}, "hidden_size 16 must be at least the model's 32"),
        ("1b", {"head_dim": 24}, "head_dim 64 must be a multiple of the model's 24"),
        ("1b", {"num_heads": 16}, "4 query heads a KV head must be at least the model's 8"),
        ("1b", {"num_heads": 32, "num_kv_heads": 16}, "num_kv_heads 8 must be at least the model's 16"),
        ("4x32x8a9", {}, "a token must use 1 to 8 of 8 experts, got 9"),
        ("4x32x8a3", {}, "an MLP of 48 takes sets of 2 experts of 32; 8 experts and 3 a token must be multiples of 2"),
        ("4x32x8a4", {"mlp_bias": True}, "experts have no biases and silu gates, the model has mlp_bias=True"),
    ],
)
def test_sizes_that_cannot_hold_the_model_are_refused(text: str, overrides: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        grow.parse_size(text, tiny_config(**overrides))
