"""Dummies for tests: a Llama of 13 tokens whose distribution is peaked, never constant.

Owns geometry and random weights that make a wrong mask, position, bias or norm visible in
the output. Must not be used for anything but tests.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.models import registry
from jaxspec.models.base import Experts, Latent, ModelConfig, RopeScaling
from jaxspec.models.layers import Transformer

#: Standard deviation of the logits: greedy choices are clear, sampled ones vary.
LOGIT_STD = 2.5
#: A tied embedding is small, or the model would repeat its last token for ever.
_TIED_STD = 0.15

_CONFIG = ModelConfig(
    family="llama",
    vocab_size=13,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    bos_token_id=0,
)

_OLMO: dict[str, Any] = dict(qk_norm=True, qk_norm_wide=True, pre_norms=False, post_norms=True, norm_gain="float32")
_GEMMA: dict[str, Any] = dict(
    hidden_act="gelu_tanh", post_norms=True, norm_gain="one_plus", embedding_scale=math.sqrt(32), attention_scale=0.25
)
_LATENT: dict[str, Any] = dict(
    num_kv_heads=1,
    head_dim=20,
    rope_interleaved=True,
    attention_scale=12**-0.5 * (0.1 * math.log(4) + 1) ** 2,
    rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=128, mscale_all_dim=1.0),
)
_WINDOW: dict[str, Any] = dict(sliding_window=9, sliding_layers=(0,))
#: What a family has that `tiny_config` lacks, for those that are not Llama's relatives in all.
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    name: dict(family=name, **fields)
    for name, fields in {
        "mistral": dict(sliding_window=9, sliding_layers=(0, 1)),
        "ministral": _WINDOW,
        "smollm3": dict(no_rope_layers=(1,)),
        "olmo2": _OLMO,
        "olmo3": dict(_OLMO, **_WINDOW),
        "granite": dict(embedding_scale=3.0, attention_scale=0.4, residual_scale=0.7, logit_divisor=1.5),
        "phi3": dict(
            sliding_window=9, sliding_layers=(0, 1), partial_rotary_factor=0.75,
            rope_scaling=RopeScaling(
                "longrope", 4.0, original_max_position_embeddings=32, attention_factor=1.2,
                short_factor=(1.0, 1.5, 2.0), long_factor=(1.0, 3.0, 9.0), extended=True,
            ),
        ),
        "glm": dict(attention_bias=True, partial_rotary_factor=0.5, rope_interleaved=True),
        "glm4": dict(attention_bias=True, partial_rotary_factor=0.5, rope_interleaved=True, post_norms=True),
        "gemma2": dict(_GEMMA, **_WINDOW, attention_soft_cap=4.0, logit_soft_cap=6.0),
        "mixtral": dict(experts=Experts(4, 2, 48, (0, 1)), rope_theta=1e6),
        "qwen2_moe": dict(
            attention_bias=True, experts=Experts(6, 2, 24, (1,), normalised=False, shared_inner=40), **_WINDOW
        ),
        "qwen3_moe": dict(qk_norm=True, experts=Experts(8, 3, 16, (0, 1))),
        "gpt_oss": dict(
            attention_bias=True, output_bias=True, attention_sinks=True, norm_gain="float32", rope_theta=150000.0,
            experts=Experts(6, 2, 48, (0, 1), scores="top_k", bias=True, hidden_act="clamped_swiglu"), **_WINDOW,
        ),
        "deepseek_v2": dict(
            _LATENT, latent=Latent(16, 4, 8, 6), experts=Experts(
                8, 3, 16, (0, 1), normalised=False, groups=4, groups_used=2, scale=1.5, shared_inner=32,
                shared_gate=False,
            ),
        ),
        "deepseek_v3": dict(
            _LATENT, latent=Latent(16, 4, 8, 6, 24), experts=Experts(
                8, 3, 16, (1,), scores="sigmoid", corrected=True, groups=4, groups_used=2, group_best=2, scale=2.5,
                shared_inner=16, shared_gate=False,
            ),
        ),
        "glm4_moe": dict(
            attention_bias=True, qk_norm=True, partial_rotary_factor=0.5, experts=Experts(
                8, 3, 16, (1,), scores="sigmoid", corrected=True, groups=2, groups_used=1, group_best=2, scale=2.5,
                shared_inner=16, shared_gate=False,
            ),
        ),
        "glm4_moe_lite": dict(
            _LATENT, latent=Latent(16, 4, 8, 6, 24), experts=Experts(
                8, 3, 16, (1,), scores="sigmoid", corrected=True, scale=3.0, shared_inner=16, shared_gate=False,
            ),
        ),
        "minimax_m2": dict(
            qk_norm=True, qk_norm_wide=True, partial_rotary_factor=0.5,
            experts=Experts(8, 3, 48, (0, 1), scores="sigmoid", corrected=True),
        ),
        "seed_oss": dict(attention_bias=True),
        "exaone4": dict(qk_norm=True, pre_norms=False, post_norms=True, no_rope_layers=(1,), **_WINDOW),
        "ernie4_5": dict(rope_interleaved=True, rope_theta=5e5),
        "ernie4_5_moe": dict(
            rope_interleaved=True, experts=Experts(8, 3, 16, (1,), corrected=True, shared_inner=32, shared_gate=False),
        ),
        "olmoe": dict(qk_norm=True, qk_norm_wide=True, experts=Experts(8, 3, 48, (0, 1), normalised=False)),
        "dots1": dict(
            qk_norm=True, **_WINDOW, experts=Experts(
                8, 2, 16, (1,), scores="sigmoid", normalised=False, corrected=True, scale=2.5, shared_inner=32,
                shared_gate=False,
            ),
        ),
        "gemma3": dict(_GEMMA, **_WINDOW, qk_norm=True, rope_theta=1e6, local_rope_theta=1e4),
    }.items()
}  # fmt: skip


def tiny_config(**overrides: Any) -> ModelConfig:
    """13 tokens, 2 layers, width 32, 4 query and 2 KV heads of 8 channels, no end-of-text token.

    `overrides` are ModelConfig's fields; unknown ones raise TypeError.
    """
    return dataclasses.replace(_CONFIG, **overrides)


def tiny_target(seed: int = 0, *, dtype: DTypeLike = jnp.float32, **overrides: Any) -> Transformer:
    """A random model on `tiny_config(**overrides)`, the same for the same seed and configuration.

    Every parameter is random, gains and biases included, so that none can be dropped unnoticed.
    """
    cfg = tiny_config(**overrides)
    model = nnx.eval_shape(lambda: registry.build(cfg, dtype))
    assert isinstance(model, Transformer)
    key = jax.random.key(seed)
    for path, param in nnx.iter_graph(model):
        if isinstance(param, nnx.Param):
            name = ".".join(str(p) for p in path)
            noise = jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), param.shape, jnp.float32)
            # By NumPy: JAX would compile three programs for every shape.
            values = _mean(name, cfg) + _std(name, cfg, param.shape) * np.asarray(noise)
            param.set_value(jax.device_put(values.astype(jnp.dtype(dtype))))
    return model


def _mean(name: str, cfg: ModelConfig) -> float:
    if name == "norm.weight" and cfg.tie_word_embeddings:
        return LOGIT_STD / (_TIED_STD * math.sqrt(cfg.hidden_size))
    return 2.0 if "q_norm" in name else 1.0 if name.endswith("weight") else 0.0


def _std(name: str, cfg: ModelConfig, shape: tuple[int, ...]) -> float:
    """Unit variance through the layers, LOGIT_STD at the end; attention sharp enough to look somewhere."""
    if len(shape) == 1 or name.endswith("bias"):
        return 0.2
    if name == "embedding":
        return _TIED_STD if cfg.tie_word_embeddings else 1.0
    gain = LOGIT_STD if name.startswith("lm_head") else 2.0 if "qkv" in name or "attn.keys" in name else 1.0
    return gain / math.sqrt(shape[-2])
