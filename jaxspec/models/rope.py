"""Rotary position embeddings: the frequencies of every scaling rule, and the rotation.

Owns what a position does to queries and keys. A rule is a function of the position alone: what is drafted, verified and
decoded plainly gets the same angles, so rules that look at the length of the text are fixed when a model is loaded
(`RopeScaling.extended`). Must not know layers.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxspec.models.base import ModelConfig, RopeScaling

#: (cos, sin), each [B, N, 1, R/2] float32, R the channels that are rotated.
Tables = tuple[jax.Array, jax.Array]


def served(cfg: ModelConfig, context: int | None) -> ModelConfig:
    """The configuration for texts of at most `context` tokens: longrope has other frequencies for short ones.

    Args:
      context: None: the model's own, max_position_embeddings.
    """
    scaling = cfg.rope_scaling
    if scaling is None or scaling.rope_type != "longrope":
        return cfg
    extended = (context or cfg.max_position_embeddings) > scaling.original_max_position_embeddings
    return dataclasses.replace(cfg, rope_scaling=dataclasses.replace(scaling, extended=extended))


def rope_frequencies(channels: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Inverse frequencies, [R/2] float32.

    Args:
      channels: R, those of a head that are rotated.
    """
    plain = [theta ** (-2.0 * i / channels) for i in range(channels // 2)]
    match scaling.rope_type if scaling is not None else None:
        case "linear":
            assert scaling is not None
            out = [f / scaling.factor for f in plain]
        case "llama3":
            assert scaling is not None
            out = [_by_wave_length(f, scaling) for f in plain]
        case "yarn":
            assert scaling is not None
            out = _yarn(plain, theta, scaling)
        case "longrope":
            assert scaling is not None
            factors = scaling.long_factor if scaling.extended else scaling.short_factor
            out = [f / by for f, by in zip(plain, factors, strict=True)]
        case _:  # "dynamic" stretches the texts beyond the model's context, and none is served
            out = plain
    return jnp.asarray(out, jnp.float32)


def _by_wave_length(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1's rule: long waves are interpolated, short ones left, those between mixed."""
    wave = 2 * math.pi / frequency
    original = scaling.original_max_position_embeddings
    if wave < original / scaling.high_freq_factor:
        return frequency
    if wave > original / scaling.low_freq_factor:
        return frequency / scaling.factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    mix = (original / wave - scaling.low_freq_factor) / span
    return (1 - mix) * frequency / scaling.factor + mix * frequency


def _yarn(plain: list[float], theta: float, scaling: RopeScaling) -> list[float]:
    """YaRN (Peng et al. 2023, section 3.2): channels that turn often stay, slow ones are interpolated, a ramp between.

    The ramp's ends are the channels that turn `beta_fast` and `beta_slow` times in the original context.
    """
    count = len(plain)

    def channel(turns: float) -> float:
        return count * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    span = (high - low) or 0.001
    ramp = [min(max((i - low) / span, 0.0), 1.0) for i in range(count)]
    return [f / scaling.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


def layer_tables(cfg: ModelConfig, positions_BN: jax.Array) -> list[Tables | None]:
    """The tables of each layer; None for one that no position reaches."""
    tables = local = rotary_tables(cfg, positions_BN)
    if cfg.local_rope_theta is not None:
        own = dataclasses.replace(cfg, rope_theta=cfg.local_rope_theta, rope_scaling=None)
        local = rotary_tables(own, positions_BN)
    of_layer = lambda i: None if i in cfg.no_rope_layers else local if i in cfg.sliding_layers else tables
    return [of_layer(i) for i in range(cfg.num_layers)]


def rotary_tables(cfg: ModelConfig, positions_BN: jax.Array) -> Tables:
    """The tables of a configuration's layers at these positions, once for all of them."""
    scaling = cfg.rope_scaling
    tables = rope_tables(positions_BN, rope_frequencies(cfg.rotary_dim, cfg.rope_theta, scaling))
    if scaling is None or scaling.attention_factor == 1.0:
        return tables
    cos, sin = tables
    return cos * scaling.attention_factor, sin * scaling.attention_factor


def rope_tables(positions_BN: jax.Array, inv_freq: jax.Array) -> Tables:
    """(cos, sin) of positions."""
    angle = positions_BN.astype(jnp.float32)[:, :, None, None] * inv_freq[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x_BNHC: jax.Array, tables: Tables, *, interleaved: bool = False) -> jax.Array:
    """Rotates the first R channels of each head; the others pass.

    Args:
      interleaved: pairs are neighbours, as in GLM; else channel i turns with channel i + R/2 (Hugging Face's layout).
    """
    cos, sin = tables
    half, channels = cos.shape[-1], x_BNHC.shape[-1]
    x = x_BNHC[..., : 2 * half].astype(jnp.float32)
    if interleaved:
        pairs = x.reshape(*x.shape[:-1], half, 2)
        lo, hi = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1).reshape(x.shape)
    else:
        lo, hi = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1)
    turned = turned.astype(x_BNHC.dtype)
    return turned if 2 * half == channels else jnp.concatenate([turned, x_BNHC[..., 2 * half :]], axis=-1)
