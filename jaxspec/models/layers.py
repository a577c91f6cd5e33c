"""The transformer's building blocks, shared by every family and by the draft heads.

Owns parameters and arithmetic: norms in float32, products in the weights' dtype. The
projections that read the same input are fused (qkv, gate and up), because an executable
pays for every argument it is called with (reference: 0.4 us each).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models import depths, mxfp4, quantised
from jaxspec.models.base import (
    FULL_ATTENTION,
    Attend,
    AttentionOptions,
    ModelConfig,
    OutputLayer,
    Split,
    TargetModel,
    answered,
)
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised
from jaxspec.models.rope import Tables, apply_rope, layer_tables
from jaxspec.models.sharded import alone, split_product, take_rows
from pallas_kernels.small_batch import gpu_packed_many, packed
from pallas_kernels.small_batch.packed import Packed


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, weight_E: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32, cast back to x's dtype before the gain."""
    return _rms_norm(x, weight_E, eps)


def _rms_norm(x: jax.Array, weight_E: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * _along_last(weight_E, x.ndim).astype(x.dtype)


def _along_last(weight_E: jax.Array, ndim: int) -> jax.Array:
    return weight_E.reshape((1,) * (ndim - 1) + weight_E.shape)


def _rms_norm_forward(x: jax.Array, weight_E: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rms_norm(x, weight_E, eps), (x, weight_E)


def _rms_norm_backward(
    eps: float, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight_E = saved
    x32, g32 = x.astype(jnp.float32), gradient.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    normed = x32 * scale
    inner = g32 * _along_last(weight_E, x.ndim).astype(jnp.float32)
    dx = scale * (inner - normed * jnp.mean(inner * normed, axis=-1, keepdims=True))
    # A product with ones: as a column sum XLA's CPU backend fuses it with the product before, and computes that twice.
    rows = (normed * g32).reshape(-1, x.shape[-1])
    ones = jnp.ones((1, rows.shape[0]), jnp.float32)
    dw = jax.lax.dot(ones, rows, precision=jax.lax.Precision.HIGHEST)[0]
    return dx.astype(x.dtype), dw.astype(weight_E.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _init(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: jnp.dtype, std: float) -> nnx.Param:
    """A normal parameter; with rngs None a placeholder that a checkpoint fills."""
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype))
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * std).astype(dtype))


def product(x: jax.Array, kernel: jax.Array | Quantised | Packed, dtype: jnp.dtype | None = None) -> jax.Array:
    """x [..., in] times a kernel [in, out], or one in column blocks [out / w, in, w] (see `layouts`).

    Args:
      dtype: of the result, where sums shall not be rounded to x's.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 1 and jax.default_backend() != "tpu":
        # One row is a bad case of XLA's: slower than two, which a library multiplies, and on CPUs a loop to be compiled
        # for every product (docs/notes.md).
        y = product(jnp.pad(rows, ((0, 1), (0, 0))), kernel, dtype)
        return y[:1].reshape(*x.shape[:-1], y.shape[1])
    if isinstance(kernel, Packed):
        wanted = x.dtype if dtype is None else dtype
        # XLA cannot split a kernel.
        if alone():
            y = gpu_packed_many.multiply(rows, kernel, wanted)
        else:
            y = packed.product(rows, kernel, cut=False).astype(wanted)
        return y.reshape(*x.shape[:-1], y.shape[1])
    if isinstance(kernel, Quantised | Mxfp4):
        few = isinstance(kernel, Quantised)
        y = quantised.product(rows, kernel, dtype, cut=alone()) if few else mxfp4.product(rows, kernel, dtype)
        return y.reshape(*x.shape[:-1], y.shape[1])
    if kernel.ndim == 2:
        # One row axis: the kernel's gradient contracts over it, 3 times faster than over two on XLA's CPU backend.
        y = jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
        return y.reshape(*x.shape[:-1], kernel.shape[1])
    y = depths.multiply(rows, kernel, dtype)
    return y.transpose(1, 0, 2).reshape(*x.shape[:-1], -1)


#: Columns of a block of a CPU's kernels (see `layouts`).
BLOCK = 64


def narrow_product(x: jax.Array, kernel: jax.Array | Quantised | Packed, dtype: jnp.dtype) -> jax.Array:
    """`product`, where few columns' bits must not depend on the number of rows.

    XLA's CPU backend sums narrow flat kernels in an order that does, and column blocks in one that does not
    (docs/notes.md); so there a flat kernel gets columns of zeros up to a whole block.
    """
    if not isinstance(kernel, jax.Array) or kernel.ndim != 2 or jax.default_backend() != "cpu":
        return product(x, kernel, dtype)
    d_in, d_out = kernel.shape
    padded = jnp.pad(kernel, ((0, 0), (0, -d_out % BLOCK)))
    return product(x, padded.reshape(d_in, -1, BLOCK).transpose(1, 0, 2), dtype)[..., :d_out]


#: From how many rows on a product reads a layer's flat kernel where that is kept beside its blocks, and how many rows
#: it has then at least: XLA's CPU backend sums a flat product of fewer in another order (docs/notes.md).
_WIDE, _FLAT_ROWS = 48, 64


class Linear(nnx.Module):
    """y = x W (+ b), W stored [in, out].

    Attributes:
      flat: the kernel [in, out] once more, for many rows, where `kernel` is in column blocks (see `layouts`).
    """

    def __init__(
        self, d_in: int, d_out: int, *, bias: bool = False, dtype: jnp.dtype, rngs: nnx.Rngs | None, std: float = 0.02
    ):
        self.kernel = _init(rngs, (d_in, d_out), dtype, std)
        self.bias = nnx.Param(jnp.zeros((d_out,), dtype)) if bias else None
        self.flat: nnx.Param | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        count = math.prod(x.shape[:-1])
        if (split := split_product(x, self.kernel, product)) is not None:
            y = split
        elif self.flat is None or count < _WIDE:
            y = product(x, self.kernel[...])
        else:
            rows = jnp.pad(x.reshape(count, -1), ((0, max(0, _FLAT_ROWS - count)), (0, 0)))
            y = depths.multiply(rows, self.flat[...])[:count].reshape(*x.shape[:-1], -1)
        if self.bias is not None:
            y = y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))
        return y

    def columns(self, widths: Sequence[int] = ()) -> list[Split]:
        """Split by outputs, the bias too."""
        return [Split(self, "kernel", 1, widths), Split(self, "bias", 0, widths)]

    def rows(self) -> list[Split]:
        """Split by inputs."""
        return [Split(self, "kernel", 0)]


def output_logits(hidden_BNE: jax.Array, lm_head: OutputLayer | None, embedding_VE: nnx.Variable) -> jax.Array:
    """Float32 logits by an output layer, or by the embedding where that is tied (lm_head None)."""
    # float32 sums as they are: rounded to bfloat16 the best tokens tie, and ties part rounds from plain decoding.
    if lm_head is not None:
        logits_BNV = product(hidden_BNE, lm_head.kernel[...], jnp.dtype(jnp.float32))
        return logits_BNV[..., : embedding_VE.shape[0]]  # a CPU's whole blocks may be more (see `layouts`)
    contract = (((hidden_BNE.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(hidden_BNE, embedding_VE[...], contract, preferred_element_type=jnp.float32)


class RMSNorm(nnx.Module):
    """Learned gain over the last axis; `gain` as ModelConfig.norm_gain."""

    def __init__(self, dim: int, eps: float, *, dtype: jnp.dtype, gain: str = "cast"):
        self.weight = nnx.Param((jnp.zeros if gain == "one_plus" else jnp.ones)((dim,), dtype))
        self.eps, self.gain = eps, gain

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gain == "cast":
            return rms_norm(x, self.weight[...], self.eps)
        weight_E = jnp.asarray(self.weight[...], jnp.float32)
        weight_E = weight_E + 1.0 if self.gain == "one_plus" else weight_E
        return jnp.asarray(rms_norm(x.astype(jnp.float32), weight_E, self.eps), x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention around a caller's `attend`; d_in may exceed the residual width (EAGLE-3).

    Args:
      index: the layer's number, by which the configuration says what it asks of attention.

    Attributes:
      sinks: float32 [H], where heads have them (ModelConfig.attention_sinks).
      shards: groups of columns that qkv is stored in, [q k v] of one shard after the other (`layouts.tensor_parallel`).
    """

    def __init__(
        self, cfg: ModelConfig, index: int = 0, *, d_in: int | None = None, dtype: jnp.dtype, rngs: nnx.Rngs | None
    ):
        d_in = d_in or cfg.hidden_size
        self.shards = 1
        self._options, self.interleaved = cfg.attention_options(index), cfg.rope_interleaved
        self.sinks = nnx.Param(jnp.zeros((cfg.num_heads,), jnp.float32)) if cfg.attention_sinks else None
        self.num_heads, self.num_kv_heads, self.head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        width = (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim
        out_std = 0.02 / math.sqrt(2 * max(1, cfg.num_layers))
        self.qkv = Linear(d_in, width, bias=cfg.attention_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(
            cfg.num_heads * cfg.head_dim, cfg.hidden_size, bias=cfg.output_bias, dtype=dtype, rngs=rngs, std=out_std
        )
        norm = functools.partial(RMSNorm, eps=cfg.rms_norm_eps, dtype=dtype, gain=cfg.norm_gain)
        normed_heads = (cfg.num_heads, cfg.num_kv_heads) if cfg.qk_norm_wide else (1, 1)
        self.q_norm, self.k_norm = (norm(n * cfg.head_dim) if cfg.qk_norm else None for n in normed_heads)
        self.wide_norm = cfg.qk_norm_wide

    @property
    def options(self) -> AttentionOptions:
        """What it asks of `attend`."""
        return self._options if self.sinks is None else dataclasses.replace(self._options, sinks_H=self.sinks[...])

    def __call__(self, x_BNE: jax.Array, rope: Tables | None, attend: Attend, layer: int) -> jax.Array:
        b, n, _ = x_BNE.shape
        h, g, c, t = self.num_heads, self.num_kv_heads, self.head_dim, self.shards
        # The barrier holds back a layout that heads would like and the kernel lacks: TPUs copied the kernel into it.
        groups = jax.lax.optimization_barrier(self.qkv(x_BNE)).reshape(b, n, t, (h + 2 * g) // t, c)
        q, k, v = jnp.split(groups, [h // t, (h + g) // t], axis=3)
        q_BNHC, k_BNGC, v_BNGC = q.reshape(b, n, h, c), k.reshape(b, n, g, c), v.reshape(b, n, g, c)
        if self.q_norm is not None and self.k_norm is not None:
            q_BNHC, k_BNGC = self._normed(self.q_norm, q_BNHC), self._normed(self.k_norm, k_BNGC)
        if rope is not None:
            q_BNHC, k_BNGC = (apply_rope(x, rope, interleaved=self.interleaved) for x in (q_BNHC, k_BNGC))
        out_BNHC = attend(layer, q_BNHC, k_BNGC, v_BNGC, self.options)
        out = out_BNHC.reshape(b, out_BNHC.shape[1], h * c)
        return self.out(out) if out.size else out

    def _normed(self, norm: RMSNorm, x_BNHC: jax.Array) -> jax.Array:
        if not self.wide_norm:
            return norm(x_BNHC)
        return norm(x_BNHC.reshape(*x_BNHC.shape[:2], -1)).reshape(x_BNHC.shape)

    def splits(self, shards: int) -> list[Split]:
        """See `layouts.tensor_parallel`."""
        if self.num_kv_heads % shards:
            return []
        self.shards = shards
        query, value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [*self.qkv.columns((query, value, value)), *self.out.rows(), Split(self, "sinks", 0)]


#: The MLP's gates by ModelConfig.hidden_act.
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


class MLP(nnx.Module):
    """SwiGLU, or GeGLU, with gate and up fused.

    Attributes:
      shards: groups of columns that gate_up is stored in, [gate up] of one shard after the other.
    """

    def __init__(self, cfg: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        self.shards, self.act = 1, cfg.hidden_act
        out_std = 0.02 / math.sqrt(2 * max(1, cfg.num_layers))
        self.gate_up = Linear(cfg.hidden_size, 2 * cfg.intermediate_size, bias=cfg.mlp_bias, dtype=dtype, rngs=rngs)
        self.down = Linear(
            cfg.intermediate_size, cfg.hidden_size, bias=cfg.mlp_bias, dtype=dtype, rngs=rngs, std=out_std
        )

    def __call__(self, x_BNE: jax.Array) -> jax.Array:
        both = self.gate_up(x_BNE)
        gate, up = jnp.split(both.reshape(*both.shape[:-1], self.shards, -1), 2, axis=-1)
        return self.down((ACTIVATIONS[self.act](gate) * up).reshape(*both.shape[:-1], -1))

    def splits(self, shards: int) -> list[Split]:
        """See `layouts.tensor_parallel`."""
        width = self.down.kernel[...].shape[0]
        if width % shards:
            return []
        self.shards = shards
        return [*self.gate_up.columns((width, width)), *self.down.rows()]


class BuildPart(Protocol):
    """Makes what a layer has between its second norm and the residual stream: a module of [..., E] to [..., E].

    Of attention likewise: a module that is called as `Attention`, and gives the rows that `attend` answers.
    """

    def __call__(self, cfg: Any, index: int, /, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> Any: ...


class DecoderLayer(nnx.Module):
    """Attention and MLP, each with a norm before it, on what comes out, or both (ModelConfig.pre_norms, post_norms).

    Without `attn_norm` (EAGLE-1's first layer) attention reads the stream itself. `mlp` makes another than `MLP`,
    `attn` another than `Attention`.
    """

    def __init__(
        self, cfg: ModelConfig, index: int = 0, *, attn_norm: bool = True, dtype: jnp.dtype, rngs: nnx.Rngs | None,
        mlp: BuildPart | None = None, attn: BuildPart | None = None,
    ):  # fmt: skip
        norm = lambda there: (
            RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, dtype=dtype, gain=cfg.norm_gain) if there else None
        )
        self.attn_norm = norm(attn_norm and cfg.pre_norms)
        self.attn: Any = (Attention if attn is None else attn)(cfg, index, dtype=dtype, rngs=rngs)
        self.attn_out_norm = norm(cfg.post_norms)
        self.mlp_norm = norm(cfg.pre_norms)
        self.mlp: Any = MLP(cfg, dtype=dtype, rngs=rngs) if mlp is None else mlp(cfg, index, dtype=dtype, rngs=rngs)
        self.mlp_out_norm = norm(cfg.post_norms)
        self.residual_scale = cfg.residual_scale

    def __call__(self, x_BNE: jax.Array, rope: Tables | None, attend: Attend, layer: int) -> jax.Array:
        out_BNE = self.attn(_normed(x_BNE, self.attn_norm), rope, attend, layer)
        x_BNE = answered(attend, layer, x_BNE)
        if not x_BNE.size:
            return x_BNE
        x_BNE = self._added(x_BNE, out_BNE, self.attn_out_norm)
        return self._added(x_BNE, self.mlp(_normed(x_BNE, self.mlp_norm)), self.mlp_out_norm)

    def _added(self, x_BNE: jax.Array, out_BNE: jax.Array, norm: RMSNorm | None) -> jax.Array:
        out_BNE = out_BNE if norm is None else norm(out_BNE)
        return x_BNE + _scaled(out_BNE, self.residual_scale)


#: Up to so many rows XLA's own products for GPUs may be faster with the norm's gain fused into them.
_FEW = 32


def _normed(x_BNE: jax.Array, norm: RMSNorm | None) -> jax.Array:
    if norm is None:
        return x_BNE
    normed_BNE = norm(x_BNE)
    if jax.default_backend() == "gpu" and math.prod(x_BNE.shape[:-1]) > _FEW:
        # Else XLA takes the gain to the product, whose library then has it multiplied by a kernel of its own.
        return jax.lax.optimization_barrier(normed_BNE)
    return normed_BNE


def _scaled(x: jax.Array, by: float) -> jax.Array:
    return x if by == 1.0 else x * jnp.asarray(by, x.dtype)


class LayerRunner(Protocol):
    """Another way to run a model's layers, for few rows (`jaxspec.models.few_rows`). Hashable: part of a trace's key.

    Attributes:
      most: rows, of all requests together, up to which it runs.
    """

    most: int

    def layers(
        self, model: Any, x_BNE: jax.Array, ropes: Sequence[Tables | None], attend: Attend, /
    ) -> list[jax.Array]:
        """The residual stream before each layer and after the last, and the norm of that one, [B, N, E] each.

        Args:
          ropes: of each layer.
        """
        ...

    def blocks(
        self, blocks: Sequence[Any], norm: RMSNorm, x_BNE: jax.Array, ropes: Sequence[Tables | None], attend: Attend,
        first_BNK: jax.Array | None = None, /,
    ) -> list[jax.Array]:  # fmt: skip
        """The same of a draft head's: what has `attn`, `mlp` and its norm, and `attn_norm` but for the first.

        Args:
          norm: of the last one's stream.
          first_BNK: what the first one's attention reads; None: its norm of the stream.
        """
        ...

    def norms(
        self, norms: Sequence[RMSNorm], rows: Sequence[jax.Array], tokens_BN: jax.Array | None = None, /
    ) -> jax.Array:  # fmt: skip
        """Norms of rows [B, N, E] by one each, of one epsilon, side by side [B, N, len(norms) * E].

        Args:
          tokens_BN: the first of `rows` is a table [V, E], of which it has these rows.
        """
        ...

    def logits(self, model: Any, hidden_BNE: jax.Array, /) -> jax.Array | None:
        """Float32 logits of what was normed, or None where the output layer runs as it always does."""
        ...


class Transformer(TargetModel):
    """A decoder-only language model of the blocks above; families configure it.

    Attributes:
      few_rows: how layers run where rows are few; None: as they always do.
    """

    narrows = True

    def __init__(
        self, cfg: ModelConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs | None = None,
        mlp: BuildPart | None = None, attn: BuildPart | None = None,
    ):  # fmt: skip
        self.config = cfg
        self.few_rows: LayerRunner | None = None
        self.embedding = _init(rngs, (cfg.vocab_size, cfg.hidden_size), dtype, 0.02)
        layer = functools.partial(DecoderLayer, dtype=dtype, rngs=rngs, mlp=mlp, attn=attn)
        self.layers = nnx.List([layer(cfg, i) for i in range(cfg.num_layers)])
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, dtype=dtype, gain=cfg.norm_gain)
        self.lm_head = (
            None if cfg.tie_word_embeddings else Linear(cfg.hidden_size, cfg.vocab_size, dtype=dtype, rngs=rngs)
        )

    def embed(self, tokens_BN: jax.Array) -> jax.Array:
        x_BNE = take_rows(self.embedding, tokens_BN)
        return _scaled(x_BNE, self.config.embedding_scale)

    def __call__(
        self, tokens_BN: jax.Array, positions_BN: jax.Array, attend: Attend, aux_layers: Sequence[int] = ()
    ) -> tuple[jax.Array, jax.Array | None]:
        cfg = self.config
        x_BNE = self.embed(tokens_BN)
        ropes = layer_tables(cfg, positions_BN)
        streams = [x_BNE]
        if self.few_rows is not None and tokens_BN.size <= self.few_rows.most:
            streams = self.few_rows.layers(self, x_BNE, ropes, attend)
        else:
            for i, (layer, rope) in enumerate(zip(self.layers, ropes, strict=True)):
                streams.append(layer(streams[-1], rope, attend, i))
            streams.append(self.norm(streams[-1]))
        aux_BNA = jnp.concatenate([streams[i] for i in aux_layers], axis=-1) if aux_layers else None
        return streams[-1], aux_BNA

    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        cfg = self.config
        logits_BNV = None if self.few_rows is None else self.few_rows.logits(self, hidden_BNE)
        if logits_BNV is None:
            logits_BNV = output_logits(hidden_BNE, self.lm_head, self.embedding)
        if cfg.logit_divisor != 1.0:
            logits_BNV = logits_BNV / cfg.logit_divisor
        cap = cfg.logit_soft_cap
        return logits_BNV if cap is None else cap * jnp.tanh(logits_BNV / cap)


class Shared(nnx.Variable):
    """The target's own parameter inside a draft head: read, never trained, never saved with the head."""


def shared_lm_head(target: TargetModel) -> Linear | None:
    """The target's output layer for a head to use; None where it is tied to the embedding."""
    if target.lm_head is None:
        return None
    head = Linear(1, 1, dtype=jnp.dtype(jnp.float32), rngs=None)
    head.kernel = Shared(target.lm_head.kernel[...])  # pyright: ignore[reportAttributeAccessIssue]
    return head


def causal_attention(
    _layer: int, q_BNHC: jax.Array, k_BNGC: jax.Array, v_BNGC: jax.Array, options: AttentionOptions = FULL_ATTENTION
) -> jax.Array:
    """An `Attend` without a cache: plain causal attention over the sequence itself (training, references)."""
    window = None if options.window is None else (options.window - 1, 0)
    if options.soft_cap is None and options.sinks_H is None and options.value_channels is None:
        return jax.nn.dot_product_attention(
            q_BNHC, k_BNGC, v_BNGC, is_causal=True, scale=options.scale, local_window_size=window
        )
    b, n, h, c = q_BNHC.shape
    q_BNGRC = q_BNHC.reshape(b, n, k_BNGC.shape[2], -1, c)
    scores = jnp.einsum("bngrc,bmgc->bgrnm", q_BNGRC, k_BNGC, preferred_element_type=jnp.float32)
    scores = scores * (c**-0.5 if options.scale is None else options.scale)
    scores = scores if options.soft_cap is None else options.soft_cap * jnp.tanh(scores / options.soft_cap)
    apart_NN = jnp.arange(n)[:, None] - jnp.arange(n)[None, :]
    seen_NN = (apart_NN >= 0) & (apart_NN < (options.window or n))
    scores = jnp.where(seen_NN[None, None, None], scores, -jnp.inf)
    if options.sinks_H is not None:
        sinks = options.sinks_H.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:4], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :n].astype(v_BNGC.dtype)
    return jnp.einsum("bgrnm,bmgc->bngrc", weights, v_BNGC).reshape(b, n, h, v_BNGC.shape[3])
