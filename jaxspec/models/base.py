"""What every target model offers, and nothing about any family.

Owns ModelConfig and what the rest of the engine sees: the protocol `Attend` (attention
over whatever cache the caller keeps) and the base class `TargetModel`. Must not know
families, caches, drafters or schedules.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks of its attention beyond softmax(q k / sqrt(C)) over all that a token may see; None: nothing.

    Attributes:
      window: a query at position p sees positions above p - window only.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap).
      scale: of the scores, instead of 1 / sqrt(C).
      sinks_H: a score of each head that takes its part of the softmax and has no value.
      value_channels: values are the first so many channels of their keys, and a cache need not keep them besides
        (`Latent`).
    """

    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    sinks_H: jax.Array | None = None
    value_channels: int | None = None

    def refuse(self, who: str, honoured: Collection[str] = ()) -> None:
        """Raises ValueError, by name, for what is asked and `who` does not honour: nothing is dropped silently."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in honoured}
        asked = [k if isinstance(v, jax.Array) else f"{k}={v}" for k, v in given.items() if v is not None]
        if asked:
            raise ValueError(f"{who} does not implement {', '.join(asked)}")


FULL_ATTENTION = AttentionOptions()


class Attend(Protocol):
    """Attention of a layer's new tokens over whatever the caller keeps."""

    def __call__(
        self, layer: int, q_BNHC: jax.Array, k_BNGC: jax.Array, v_BNGC: jax.Array, options: AttentionOptions = ..., /
    ) -> jax.Array:
        """out_BNHC, as wide as values. The callee owns the cache and the mask; keys arrive with positions applied.

        Raises:
          ValueError: an option that the callee does not implement.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Answering:
    """An `Attend` that answers some tokens alone in a model's last layer: of others entries in the cache are enough.

    That layer goes on with the rows of these tokens, and so does what comes behind it.

    Attributes:
      attend: what it is; its result in `layer`, the last one, has the rows that `pick` takes of a layer's input.
    """

    attend: Attend
    layer: int
    pick: Callable[[jax.Array], jax.Array]

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions = FULL_ATTENTION, /
    ) -> jax.Array:
        return self.attend(layer, q, k, v, options)


def answered(attend: Attend, layer: int, x_BNE: jax.Array) -> jax.Array:
    """The rows of a layer's input whose queries `attend` answers there: all, or those of `Answering`."""
    return attend.pick(x_BNE) if isinstance(attend, Answering) and layer == attend.layer else x_BNE


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary embedding for texts that are longer than the pre-training's (see `rope`).

    Attributes:
      rope_type: "llama3", "linear", "yarn", "longrope" or "dynamic" (which changes nothing within the context).
      factor: how much longer than the original context.
      low_freq_factor, high_freq_factor: edges of the interpolated band ("llama3" only).
      original_max_position_embeddings: the context of pre-training, in tokens.
      attention_factor: what cosines and sines are multiplied by ("yarn", "longrope").
      beta_fast, beta_slow, truncate: turns within the original context that bound YaRN's ramp, in whole channels.
      short_factor, long_factor: longrope's divisors of each frequency.
      extended: whether longrope divides by the long ones; they are for texts beyond the original context.
      mscale_all_dim: DeepSeek's weight of the factor's logarithm, by which its scores grow ("yarn"; 0: none).
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    extended: bool = False
    mscale_all_dim: float = 0.0


@dataclasses.dataclass(frozen=True)
class Latent:
    """What replaces every head's keys and values by one vector a token (multi-head latent attention, DeepSeek-V2).

    Attributes:
      rank: channels of the vector that keys and values are made of.
      rotary: channels of a key that positions rotate, the same for all heads.
      key, value: channels that each head makes of the vector, for its keys and values.
      query_rank: of the vector that queries are made of; None: of the hidden state itself.
    """

    rank: int
    rotary: int
    key: int
    value: int
    query_rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Experts:
    """What replaces the MLP of some layers by a mixture (`models.experts`).

    Attributes:
      count: experts of a layer. per_token: of them, those that a token uses.
      inner: width of each.
      layers: those that have experts.
      scores: "softmax" over all experts before the best are taken, "top_k" for a softmax over the best alone, or
        "sigmoid" of each.
      normalised: whether the weights of the best are divided by their sum (not "top_k").
      corrected: the best are chosen by scores with a bias of each expert's (not "top_k"); weights are without it.
      groups, groups_used, group_best: experts of so many groups, of which a token uses the best ones only; a group is
        as good as so many of its best experts together.
      scale: of the weights.
      shared_inner: width of an expert that every token uses; 0: none.
      shared_gate: whether it is weighted by a sigmoid of its own.
      bias: on the router and the experts.
      hidden_act: of the gates, as `ModelConfig.hidden_act`, or "clamped_swiglu" (gpt-oss).
    """

    count: int
    per_token: int
    inner: int
    layers: tuple[int, ...]
    scores: str = "softmax"
    normalised: bool = True
    corrected: bool = False
    groups: int = 1
    groups_used: int = 1
    group_best: int = 1
    scale: float = 1.0
    shared_inner: int = 0
    shared_gate: bool = True
    bias: bool = False
    hidden_act: str = "silu"

    def expected(self, rows: float) -> float:
        """Distinct experts that so many rows touch in a layer, if each chooses for itself and all are as likely."""
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry of a decoder-only transformer, in Hugging Face's terms.

    Fields without a default are every family's; of the others those of norms, rotary embedding, attention, scales and
    biases are what `layers` is configured by. A family with needs of its own subclasses this.

    Attributes:
      family: key in jaxspec.models.registry.
      num_layers: decoder layers.
      head_dim: channels a head, as attention sees it (may differ from hidden_size / num_heads).
      partial_rotary_factor: the share of them, the first ones, that positions rotate.
      rope_interleaved: neighbouring channels rotate together (GLM), not those of two halves.
      no_rope_layers: layers that no position reaches (SmolLM3).
      local_rope_theta: base of the sliding layers, which no scaling reaches; None: they are as the others.
      attention_bias: biases on q, k and v (Qwen2; Llama with `attention_bias`).
      output_bias: bias on the attention's output projection (Llama with `attention_bias`).
      qk_norm: RMSNorm over each head's channels of q and k (Qwen3), or over all heads' at once with `qk_norm_wide`.
      sliding_window, sliding_layers: layers whose tokens see the last `sliding_window` positions only, their own
        included.
      attention_scale: of scores, instead of 1 / sqrt(head_dim).
      attention_sinks: each head has a score that takes its part of the softmax and has no value (gpt-oss).
      attention_soft_cap, logit_soft_cap: scores and logits x become cap * tanh(x / cap).
      pre_norms, post_norms: where layers have norms: before attention and MLP, and on what comes out of them.
      norm_gain: "cast" rounds what is normed before the gain, "float32" after it, "one_plus" too, with a gain of 1 + w.
      hidden_act: of the MLP's gate, "silu" or "gelu_tanh".
      latent: what all layers have in place of keys and values; num_kv_heads is 1 then. None: nothing.
      experts: what some layers have in place of the MLP of `intermediate_size`; None: nothing.
      embedding_scale, residual_scale: what embeddings, and what comes out of attention and MLP, are multiplied by.
      logit_divisor: what logits are divided by.
      max_position_embeddings: longest context in tokens.
      eos_token_ids: tokens that end a text; empty if the checkpoint names none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    no_rope_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_wide: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_sinks: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    pre_norms: bool = True
    post_norms: bool = False
    norm_gain: str = "cast"
    hidden_act: str = "silu"
    latent: Latent | None = None
    experts: Experts | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def attention_options(self, layer: int) -> AttentionOptions:
        """What a layer asks of its attention, but for sinks, which are its own parameters."""
        window = self.sliding_window if layer in self.sliding_layers else None
        values = None if self.latent is None else self.latent.rank
        return AttentionOptions(window, self.attention_soft_cap, self.attention_scale, value_channels=values)

    @property
    def kv_width(self) -> int:
        """Numbers that a cache keeps of a token, layer and KV head: a key and a value, or a key that has its value."""
        return 2 * self.head_dim if self.latent is None else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that positions rotate."""
        return int(self.head_dim * self.partial_rotary_factor) if self.latent is None else self.latent.rotary

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose input feeds an EAGLE-3 head by default: [2, N//2, N-3] (reference: SafeAILab/EAGLE)."""
        n = self.num_layers
        return tuple(min(max(i, 0), n - 1) for i in (2, n // 2, n - 3))


@dataclasses.dataclass(frozen=True)
class Split:
    """A parameter of `owner` that tensor parallelism splits along `axis`.

    Attributes:
      widths: of the maps that are fused in its last axis; each shard gets its part of every one.
    """

    owner: nnx.Module
    name: str
    axis: int
    widths: Sequence[int] = ()


class OutputLayer(Protocol):
    """The map from hidden states to logits."""

    @property
    def kernel(self) -> nnx.Variable:
        """[E, V]."""
        ...


class TargetModel(nnx.Module):
    """A causal language model whose attention is supplied by the caller.

    The engine splits it once into a static graph and a flat state, and calls it inside its own jitted round. Modules
    in it with a method `splits(shards) -> list[Split]` say how devices share their parameters (see
    `layouts.tensor_parallel`).

    Attributes:
      embedding: the table of token embeddings [V, E], in the model's dtype; draft heads share it.
      lm_head: the output layer, which draft heads share; None where it is tied to `embedding`.
      narrows: whether layers go on with the rows that attention answers (`answered`), where these are not all. A class
        with a `__call__` of its own says so for itself.
    """

    narrows: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__call__" in cls.__dict__ and "narrows" not in cls.__dict__:
            cls.narrows = False

    config: ModelConfig
    embedding: nnx.Variable
    lm_head: OutputLayer | None

    @abc.abstractmethod
    def __call__(
        self, tokens_BN: jax.Array, positions_BN: jax.Array, attend: Attend, aux_layers: Sequence[int] = ()
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns (hidden_BNE after the final norm, aux_BNA or None); hidden_BNE of the rows that are `answered`.

        aux_BNA concatenates the residual streams that enter `aux_layers`; the index
        `num_layers` names the stream before the final norm, `num_layers + 1` the one after it.
        """
        ...

    @abc.abstractmethod
    def embed(self, tokens_BN: jax.Array) -> jax.Array:
        """Token embeddings, [B, N, E]."""
        ...

    @abc.abstractmethod
    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        """Float32 logits [B, N, V] of hidden states that passed the final norm."""
        ...


#: What mixtures of a pass chose, of so many experts.
_Chosen = list[tuple[jax.Array, int]]
_chosen: contextvars.ContextVar[_Chosen | None] = contextvars.ContextVar("chosen", default=None)


@contextlib.contextmanager
def counting_experts() -> Iterator[_Chosen]:
    """Inside, every mixture of experts that is traced adds to what is yielded, which `touched` counts.

    For whoever traces a model inside a function of his own: what is yielded belongs to that trace.
    """
    found: _Chosen = []
    token = _chosen.set(found)
    try:
        yield found
    finally:
        _chosen.reset(token)


def report_experts(experts: jax.Array, count: int) -> None:
    """For a mixture of so many experts: those that rows use, in any shape; -1 is none."""
    found = _chosen.get()
    if found is not None:
        found.append((experts, count))


def touched(chosen: _Chosen) -> jax.Array | None:
    """How many distinct experts these are, over all layers, int32; None without any mixture."""
    if not chosen:
        return None
    most = max(experts.size for experts, _ in chosen)
    of = lambda experts: jnp.pad(experts.reshape(-1), (0, most - experts.size), constant_values=-1)
    experts_LP = jnp.stack([of(experts) for experts, _ in chosen])
    every = jnp.arange(max(count for _, count in chosen))[None, None]
    return jnp.sum(jnp.any(experts_LP[:, :, None] == every, axis=1), dtype=jnp.int32)
