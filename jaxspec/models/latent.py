"""Multi-head latent attention: all heads' keys and values are made of one vector a token, and that alone is cached.

DeepSeek-V2 (2405.04434, section 2.1). Each head's map of the vector to its keys is taken into its queries, and the map
to its values follows the attention, so that heads share one key of `rank` + `rotary` channels, whose first `rank`
channels are the value. That is done for prompts as for single tokens: what is verified, decoded plainly and read from
a prompt is the same arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import Attend, ModelConfig
from jaxspec.models.layers import Attention, Linear, RMSNorm
from jaxspec.models.rope import Tables, apply_rope

#: Of the norms of both vectors, whatever config.json says of the others.
_EPS = 1e-6


class LatentAttention(nnx.Module):
    """Attention by `ModelConfig.latent`, called as `layers.Attention`.

    Attributes:
      down: to the queries, or the vector they are made of, the vector of keys and values, and the rotated channels.
      q_up: from their vector to the queries; None without one.
      keys: [H, key, rank], what a head's queries are multiplied by. values: [H, value, rank], what its output is.
    """

    def __init__(self, cfg: ModelConfig, index: int = 0, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        assert cfg.latent is not None
        own, heads = cfg.latent, cfg.num_heads
        self.latent, self.num_heads, self.interleaved = own, heads, cfg.rope_interleaved
        self.options = cfg.attention_options(index)
        queries = heads * (own.key + own.rotary)
        self.down = Linear(cfg.hidden_size, (own.query_rank or queries) + own.rank + own.rotary, dtype=dtype, rngs=rngs)
        self.q_norm = None if own.query_rank is None else RMSNorm(own.query_rank, _EPS, dtype=dtype)
        self.q_up = None if own.query_rank is None else Linear(own.query_rank, queries, dtype=dtype, rngs=rngs)
        self.kv_norm = RMSNorm(own.rank, _EPS, dtype=dtype)
        self.keys, self.values = (_maps(heads, size, own.rank, dtype, rngs) for size in (own.key, own.value))
        out_std = 0.02 / math.sqrt(2 * max(1, cfg.num_layers))
        self.out = Linear(heads * own.value, cfg.hidden_size, dtype=dtype, rngs=rngs, std=out_std)

    def __call__(self, x_BNE: jax.Array, rope: Tables | None, attend: Attend, layer: int) -> jax.Array:
        (b, n, _), own, h = x_BNE.shape, self.latent, self.num_heads
        assert rope is not None
        both = self.down(x_BNE)
        ends = both.shape[-1] - own.rank - own.rotary, both.shape[-1] - own.rotary
        q, latent_BNR, turning = jnp.split(both, ends, axis=-1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q_BNHC = q.reshape(b, n, h, own.key + own.rotary)
        q_own, q_turned = q_BNHC[..., : own.key], q_BNHC[..., own.key :]
        turned = lambda x_BNHC: apply_rope(x_BNHC, rope, interleaved=self.interleaved)
        asked_BNHR = _by_heads("mhd,hdr->mhr", q_own, self.keys[...])
        value_BN1R = self.kv_norm(latent_BNR)[:, :, None]
        q_BNHC = jnp.concatenate([asked_BNHR, turned(q_turned)], axis=-1)
        k_BN1C = jnp.concatenate([value_BN1R, turned(turning[:, :, None])], axis=-1)
        seen_BNHR = attend(layer, q_BNHC, k_BN1C, value_BN1R, self.options)
        if not seen_BNHR.size:
            return seen_BNHR.reshape(b, 0, h * own.rank)
        out_BNHD = _by_heads("mhr,hdr->mhd", seen_BNHR, self.values[...])
        return self.out(out_BNHD.reshape(b, out_BNHD.shape[1], h * own.value))


def attention(cfg: ModelConfig, index: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> Any:
    """A layer's attention: latent where the configuration says so."""
    return (Attention if cfg.latent is None else LatentAttention)(cfg, index, dtype=dtype, rngs=rngs)


def _maps(heads: int, size: int, rank: int, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> nnx.Param:
    if rngs is None:
        return nnx.Param(jnp.zeros((heads, size, rank), dtype))
    return nnx.Param((0.02 * jax.random.normal(rngs.params(), (heads, size, rank), jnp.float32)).astype(dtype))


def _by_heads(form: str, x_BNHC: jax.Array, maps: jax.Array) -> jax.Array:
    """Each head's rows times its own map; sums are float32."""
    b, n, h, c = x_BNHC.shape
    y = jnp.einsum(form, x_BNHC.reshape(b * n, h, c), maps, preferred_element_type=jnp.float32)
    return y.reshape(b, n, *y.shape[1:]).astype(x_BNHC.dtype)
