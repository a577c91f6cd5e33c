"""config.json in and out: what is refused, and that nothing is silently dropped."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models import registry
from jaxspec.models.base import ModelConfig, RopeScaling
from jaxspec.models.layers import causal_attention
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_config, tiny_target

GOOD: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=13,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(architectures=["MambaForCausalLM"]), "MambaForCausalLM.*LlamaForCausalLM.*Qwen2ForCausalLM.*Qwen3"),
        (dict(architectures=["Qwen3ForCasualLM"]), "the name most like it is 'Qwen3ForCausalLM'$"),
        (dict(architectures=None), "architectures None is not supported"),
        (dict(architectures="LlamaForCausalLM"), "architectures 'LlamaForCausalLM' is not supported"),
        (dict(vocab_size=None), "vocab_size must be a positive integer, got None"),
        (dict(hidden_size="32"), "hidden_size must be a positive integer, got '32'"),
        (dict(num_hidden_layers=0), "num_hidden_layers must be a positive integer, got 0"),
        (dict(attention_bias="false"), "attention_bias must be true or false, got 'false'"),
        (dict(tie_word_embeddings="no"), "tie_word_embeddings must be true or false, got 'no'"),
        (dict(rms_norm_eps=-1), "rms_norm_eps must be a positive number, got -1"),
        (dict(rms_norm_eps="1e-5"), "rms_norm_eps must be a positive number, got '1e-5'"),
        (dict(rope_theta=0), "rope_theta must be a positive number, got 0"),
        (dict(rope_scaling="yarn"), "rope_scaling must be an object, got 'yarn'"),
        (dict(rope_parameters=[1]), "rope_parameters must be an object, got \\[1\\]"),
        (dict(rope_parameters=dict(rope_theta=-1.0)), "rope_theta must be a positive number, got -1.0"),
        (dict(eos_token_id=2.7), "eos_token_id must be a token id of at least 0, or a list of them, got 2.7"),
        (dict(bos_token_id="1"), "bos_token_id must be a token id of at least 0, or a list of them, got '1'"),
        (dict(eos_token_id=[2, True]), "eos_token_id must be a token id of at least 0, or a list of them"),
        (dict(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        (dict(hidden_size=30), "hidden_size 30 is not a multiple of num_attention_heads 4"),
        (dict(head_dim=7), "head_dim must be even.*got 7"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu'.*'silu'"),
        (dict(quantization_config=dict(quant_method="gptq")), "quantized weights .gptq."),
        (dict(use_sliding_window=True), "with full attention only.*use_sliding_window=True"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "full attention only.*sliding_attention"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor must be 1.0, got 0.5"),
        (dict(partial_rotary_factor=0.4), "partial_rotary_factor 0.4 of head_dim 8 gives 3 rotary channels"),
        (dict(partial_rotary_factor=0), "partial_rotary_factor must lie in .0, 1., got 0"),
        (dict(rope_scaling=dict(rope_type="mrope", factor=4.0)), "'mrope'.*'dynamic'.*'llama3'.*'longrope'.*'yarn'"),
        (dict(rope_parameters=dict(rope_type="yarn", factor="4")), "'yarn' needs a factor of at least 1, got '4'"),
        (
            dict(rope_scaling=dict(rope_type="yarn", factor=4, original_max_position_embeddings=0.5)),
            "original_max_position_embeddings must be a positive integer, got 0.5",
        ),
        (
            dict(rope_scaling=dict(type="longrope", long_factor=[1.0] * 4)),
            "4 positive numbers as short_factor, got None",
        ),
        (
            dict(rope_scaling=dict(type="longrope", short_factor=[1.0] * 4, long_factor=[1.0] * 3)),
            "4 positive numbers as long_factor, got 3 values",
        ),
        (dict(rope_scaling=dict(type="linear")), "'linear' needs a factor of at least 1, got None"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=0.5)), "factor of at least 1, got 0.5"),
    ],
)
def test_refusals_name_the_field_and_the_value(change: dict[str, Any], message: str) -> None:
    registry.read_config(GOOD)
    with pytest.raises(ValueError, match=message):
        registry.read_config({**GOOD, **change})


def test_the_part_for_text_stands_in_text_config_or_beside_the_others() -> None:
    text = {name: value for name, value in GOOD.items() if name != "architectures"}
    text["rope_scaling"] = dict(type="mrope", mrope_section=[1, 2, 1])
    flat = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}, **text}
    nested = {"architectures": flat["architectures"], "text_config": {"model_type": "qwen2_5_vl_text", **text}}
    cfg = registry.read_config(flat)
    assert cfg == registry.read_config(nested)
    assert (cfg.family, cfg.rope_scaling, cfg.rope_theta, cfg.eos_token_ids) == ("qwen2", None, 1e6, (151645,))
    assert registry.wraps_text(flat) and registry.wraps_text(nested) and not registry.wraps_text(GOOD)
    with pytest.raises(ValueError, match="Qwen3VLForConditionalGeneration needs an object text_config, got None"):
        registry.read_config({**flat, "architectures": ["Qwen3VLForConditionalGeneration"]})


@pytest.mark.parametrize(
    "cfg",
    [
        tiny_config(),
        tiny_config(bos_token_id=None, eos_token_ids=(3, 4), tie_word_embeddings=True),
        tiny_config(attention_bias=True, output_bias=True, mlp_bias=True, head_dim=16),
        tiny_config(rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
        tiny_config(rope_scaling=RopeScaling("linear", 2.0)),
        tiny_config(rope_scaling=RopeScaling("dynamic", 2.0)),
        tiny_config(
            rope_scaling=RopeScaling(
                "yarn", 4.0, original_max_position_embeddings=128, attention_factor=1.25, beta_fast=16.0, truncate=False
            )
        ),
        tiny_config(
            rope_scaling=RopeScaling(
                "longrope",
                4.0,
                original_max_position_embeddings=128,
                attention_factor=1.5,
                short_factor=(1.0, 1.5, 2.0, 3.0),
                long_factor=(1.0, 3.0, 9.0, 27.0),
                extended=True,
            )
        ),
        tiny_config(family="qwen2", attention_bias=True, sliding_window=7, sliding_layers=(1,)),
        tiny_config(family="qwen2", attention_bias=True),
        tiny_config(family="qwen3", qk_norm=True),
        tiny_config(family="qwen3", qk_norm=True, attention_bias=True, output_bias=True),
        *(tiny_config(**fields) for fields in FAMILY_FIELDS.values()),
    ],
)
def test_configs_survive_the_round_trip(cfg: ModelConfig) -> None:
    assert registry.read_config(registry.write_config(cfg)) == cfg


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (dict(qk_norm=True), "qk_norm=True (would read as False)"),
        (dict(attention_bias=True), "output_bias=False (would read as True)"),
        (dict(family="qwen2"), "attention_bias=False (would read as True)"),
        (dict(family="qwen2", attention_bias=True, mlp_bias=True), "mlp_bias=True"),
        (dict(family="gpt2"), f"one of {sorted(registry.FAMILIES)}, got 'gpt2'"),
        (dict(family="mistral", sliding_window=9, sliding_layers=(0,)), "sliding_layers=(0,) (would read as (0, 1))"),
        (dict(FAMILY_FIELDS["gemma2"], attention_scale=None), "attention_scale=None (would read as 0.35"),
    ],
)
def test_what_a_family_cannot_express_is_not_written(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        registry.write_config(tiny_config(**overrides))


def test_build_refuses_unknown_families_and_honours_dtype() -> None:
    with pytest.raises(ValueError, match="got 'gpt2'"):
        registry.build(tiny_config(family="gpt2"))
    model = registry.build(tiny_config(), jnp.bfloat16, nnx.Rngs(params=0))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {x.dtype for x in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert all(bool(jnp.any(x != 0)) for x in leaves)


@pytest.mark.parametrize("shape", [(13, 32), (7,), (3, 5, 2)])
def test_draws_of_tests_are_jaxs(shape: tuple[int, ...]):
    """Eager ones are parts of larger draws there (tests/conftest.py); a traced one is JAX's own."""
    key = jax.random.key(3)
    own = jax.jit(lambda key: jax.random.normal(key, shape))(key)
    assert jnp.array_equal(jax.random.normal(key, shape), own) and own.shape == shape


def test_tiny_target_is_deterministic_and_neither_flat_nor_constant() -> None:
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 13, (8, 24)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(24)[None, :], ids.shape)

    def logits(seed: int, **overrides: Any) -> np.ndarray:
        model = tiny_target(seed, **overrides)
        return np.asarray(jax.jit(lambda: model.logits(model(ids, positions, causal_attention)[0]))())

    a = logits(0)
    np.testing.assert_array_equal(a, logits(0))
    assert not np.allclose(a, logits(1))
    for values in (a, logits(3, tie_word_embeddings=True), logits(0, family="qwen3", qk_norm=True)):
        probs = np.asarray(jax.nn.softmax(jnp.asarray(values), axis=-1))
        entropy = -(probs * np.log(probs)).sum(-1).mean()
        assert 0.5 < entropy < 2.0
        assert len(set(values.argmax(-1).ravel().tolist())) >= 8
