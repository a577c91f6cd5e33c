"""The same function at a larger model's cost: a small target embedded in a larger geometry.

Owns the embedding of a target and of its EAGLE-3 head, and its checkpoint. New residual channels stay zero: the
embedding and every projection that writes to the residual stream are zero there, and rows
that read new heads or new feed-forward units are zero too, so that what those compute from
random weights is never used. Added layers write nothing. In float32 the grown model's logits
are the small one's up to rounding; every product has the larger shapes.

A dense model also grows into a mixture of experts of Qwen3-MoE's kind. Experts of as many groups as the old MLP needs
hold a part of its units each, every expert in memory of its own. The experts of one set, one of each group, share a
column of the router, so that a token takes whole sets; their weights sum to one, and whichever sets a token takes, it
gets the old MLP. Routers are random: which sets these are depends on the token's state. Norms of heads that the small
model lacks leave queries and keys as they are, for these are far below the norm's epsilon (`_SMALL`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.checkpointing import eagle3, hf
from jaxspec.models import registry
from jaxspec.models.base import Experts, ModelConfig, TargetModel
from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.layers import MLP, Attention, DecoderLayer, Linear, RMSNorm, Transformer
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.speculation.drafters.eagle3_head import Eagle3Head
from jaxspec.text.tokenizer import FILE, SENTENCEPIECE

_STD = 0.02
#: What a norm's gain makes up for where queries and keys are made small: far enough below its epsilon that it divides
#: by a constant, and a power of two, which every dtype holds.
_SMALL = 2.0**-30
#: The family of grown mixtures.
_MIXTURE = "qwen3_moe"
#: What growing leaves as it is.
_TEXT_FILES = (
    FILE, SENTENCEPIECE, "tokenizer_config.json", "added_tokens.json", "generation_config.json", "chat_template.jinja",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Size:
    """A larger geometry; the vocabulary stays the small model's.

    Attributes:
      experts: in every layer, in place of the MLP of `intermediate_size`; None: none.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    experts: Experts | None = None

    def fields(self) -> dict[str, Any]:
        """What a ModelConfig of this geometry has in common with all others of it."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return own if self.experts is None else {**own, "family": _MIXTURE, "qk_norm": True}


#: The layers of Llama 3.2 1B, Llama 3.1 8B and Qwen3-30B-A3B.
PRESETS = {
    "1b": Size(16, 2048, 8192, 32, 8, 64),
    "8b": Size(32, 4096, 14336, 32, 8, 128),
    "30b-a3b": Size(48, 2048, 6144, 32, 4, 128, Experts(128, 8, 768, tuple(range(48)))),
}
#: What --grow takes.
SIZES = "|".join((*PRESETS, "LAYERSxHIDDEN[xEXPERTSaUSED]"))


def parse_size(text: str, cfg: ModelConfig) -> Size:
    """The geometry that --grow names: a preset, or LAYERSxHIDDEN, whose other sizes scale with the hidden size.

    With xEXPERTSaUSED behind it layers have so many experts, half as wide as the MLP would be, and tokens use so many.

    Raises:
      ValueError: another text, or a geometry that cannot hold `cfg`; names the field and both values.
    """
    if text.lower() in PRESETS:
        size = PRESETS[text.lower()]
    else:
        match = re.fullmatch(r"(\d{1,4})x(\d{1,6})(?:x(\d{1,4})a(\d{1,4}))?", text)
        if match is None:
            raise ValueError(
                f"grow must be one of {sorted(PRESETS)}, LAYERSxHIDDEN such as 16x1024 or LAYERSxHIDDENxEXPERTSaUSED "
                f"such as 16x1024x32a4, got {text!r}"
            )
        layers, hidden = int(match[1]), int(match[2])
        groups = max(cfg.num_kv_heads, round(cfg.num_kv_heads * hidden / cfg.hidden_size))
        wide = max(cfg.intermediate_size, round(cfg.intermediate_size * hidden / cfg.hidden_size / 64) * 64)
        mixture = match[3] and Experts(int(match[3]), int(match[4]), -(-wide // 2), tuple(range(layers)))
        heads = groups * (cfg.num_heads // cfg.num_kv_heads)
        size = Size(layers, hidden, wide, heads, groups, cfg.head_dim, mixture or None)
    for name in ("num_layers", "hidden_size", "intermediate_size", "num_kv_heads", "head_dim"):
        if getattr(size, name) < getattr(cfg, name):
            raise ValueError(
                f"grow {text!r}: {name} {getattr(size, name)} must be at least the model's {getattr(cfg, name)}"
            )
    if size.num_heads * cfg.num_kv_heads < cfg.num_heads * size.num_kv_heads:
        raise ValueError(
            f"grow {text!r}: {size.num_heads // size.num_kv_heads} query heads a KV head must be at least "
            f"the model's {cfg.num_heads // cfg.num_kv_heads}"
        )
    if size.head_dim % cfg.head_dim:
        raise ValueError(f"grow {text!r}: head_dim {size.head_dim} must be a multiple of the model's {cfg.head_dim}")
    if size.experts is not None:
        _check_experts(text, size.experts, cfg)
    return size


def _check_experts(text: str, experts: Experts, cfg: ModelConfig) -> None:
    """Raises ValueError for a mixture that cannot hold the MLPs of `cfg`."""
    sets = expert_groups(cfg, experts)
    if not 0 < experts.per_token <= experts.count:
        raise ValueError(
            f"grow {text!r}: a token must use 1 to {experts.count} of {experts.count} experts, got {experts.per_token}"
        )
    if experts.count % sets or experts.per_token % sets:
        raise ValueError(
            f"grow {text!r}: an MLP of {cfg.intermediate_size} takes sets of {sets} experts of {experts.inner}; "
            f"{experts.count} experts and {experts.per_token} a token must be multiples of {sets}"
        )
    if cfg.mlp_bias or cfg.hidden_act != "silu":
        raise ValueError(
            f"grow {text!r}: experts have no biases and silu gates, the model has mlp_bias={cfg.mlp_bias} and "
            f"hidden_act={cfg.hidden_act!r}"
        )


def expert_groups(cfg: ModelConfig, experts: Experts) -> int:
    """Experts that hold an MLP together."""
    return -(-cfg.intermediate_size // experts.inner)


def layer_places(old: int, new: int) -> tuple[int, ...]:
    """Where each of the `old` layers goes among `new` ones: evenly spread, first and last at the ends."""
    return tuple(round(i * (new - 1) / max(1, old - 1)) for i in range(old))


def grown_aux_layers(ids: Sequence[int], old: int, new: int) -> tuple[int, ...]:
    """Layers of the grown model whose inputs are those of the old layers `ids`; `old` names the final norm's input."""
    places = (*layer_places(old, new), new)
    return tuple(places[i] for i in ids)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _noise(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(_STD, dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _placed(base: jax.Array, old: jax.Array, scale: jax.Array, *places: jax.Array) -> jax.Array:
    return base.at[jnp.ix_(*places)].set((old.astype(jnp.float32) * scale).astype(base.dtype))


@functools.partial(jax.jit, static_argnums=3, donate_argnums=(0, 1))
def _with_units(gate_up: jax.Array, down: jax.Array, mlp: tuple[jax.Array, jax.Array], sets: int) -> Any:
    """The stacked kernels of experts in sets, each of which has all units of an MLP [E, 2 F] and [F, E]."""
    units, downs = _parts(*mlp, sets)
    (count, inner, _), (_, part, width) = down.shape, downs.shape
    each = lambda parts: jnp.tile(parts.astype(down.dtype), (count // sets, 1, 1))
    gate, up = jnp.split(each(units), 2, axis=-1)
    gate_up = gate_up.at[:, :width, :part].set(gate).at[:, :width, inner : inner + part].set(up)
    # A group has its share of a token's weights.
    return gate_up, down.at[:, :part, :width].set(each(downs * sets))


def _parts(gate_up: jax.Array, down: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """An MLP's units dealt out into so many parts: gates and ups [parts, E, 2 F], downs [parts, F, E], in float32.

    The last part is filled up with units that are zero.
    """
    gate_up, down = gate_up.astype(jnp.float32), down.astype(jnp.float32)
    inner, width = down.shape
    part = -(-inner // count)
    whole = jnp.pad(gate_up.reshape(width, 2, inner), ((0, 0), (0, 0), (0, part * count - inner)))
    units = whole.reshape(width, 2, count, part).transpose(2, 0, 1, 3).reshape(count, width, 2 * part)
    return units, jnp.pad(down, ((0, part * count - inner), (0, 0))).reshape(count, part, width)


class _Writer:
    """Fills parameters with noise or zeros and puts the old values in place."""

    def __init__(self, seed: int):
        self._key = jax.random.key(seed)
        self._count = 0

    def noise(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        self._count += 1
        return _noise(jax.random.fold_in(self._key, self._count), shape, dtype)

    def put(
        self, param: nnx.Variable, old: jax.Array | None, places: Sequence[np.ndarray], base: jax.Array,
        scale: float | np.ndarray = 1.0,
    ) -> None:  # fmt: skip
        """`base` with `old * scale` at the grid of `places` (index arrays, one an axis)."""
        param.set_value(base if old is None else _placed(base, old, np.asarray(scale, np.float32), *places))


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the old channels of each axis lie in the new geometry."""

    hidden: np.ndarray
    inner: np.ndarray
    gate_up: np.ndarray
    heads: np.ndarray
    qkv: np.ndarray
    dead_qkv: np.ndarray

    @classmethod
    def of(cls, cfg: ModelConfig, size: Size) -> _Places:
        stretch = size.head_dim // cfg.head_dim
        share, new_share = cfg.num_heads // cfg.num_kv_heads, size.num_heads // size.num_kv_heads
        # Channel c of a rotated pair keeps its frequency at stretch * c of the longer head.
        channel = np.arange(cfg.head_dim) * stretch
        query = np.arange(cfg.num_heads) // share * new_share + np.arange(cfg.num_heads) % share
        group = np.arange(cfg.num_kv_heads)
        start = np.concatenate([query, size.num_heads + group, size.num_heads + size.num_kv_heads + group])
        at = lambda head: (head[:, None] * size.head_dim + channel[None, :]).reshape(-1)
        # All channels of the old heads: those between the old channels must stay zero.
        whole = (start[:, None] * size.head_dim + np.arange(size.head_dim)[None, :]).reshape(-1)
        inner = np.arange(cfg.intermediate_size)
        return cls(
            hidden=np.arange(cfg.hidden_size),
            inner=inner,
            gate_up=np.concatenate([inner, size.intermediate_size + inner]),
            heads=at(query),
            qkv=at(start),
            dead_qkv=np.setdiff1d(whole, at(start)),
        )


class Grower(_Writer):
    """Puts the blocks of a small model into those of a grown one, or leaves them without effect (old None)."""

    def __init__(self, cfg: ModelConfig, size: Size, dtype: jnp.dtype, seed: int):
        super().__init__(seed)
        self._cfg, self._stretch, self._dtype = cfg, size.head_dim // cfg.head_dim, dtype
        self.at = _Places.of(cfg, size)
        # A norm over more channels, the new ones zero, comes out larger by sqrt(new / old).
        self._gain = math.sqrt(cfg.hidden_size / size.hidden_size)

    def norm(self, new: RMSNorm, old: RMSNorm | None) -> None:
        ones = jnp.ones(new.weight.shape, self._dtype)
        self.put(new.weight, old and old.weight[...], [self.at.hidden], ones, self._gain)

    def linear(
        self, new: Linear, old: Linear | None, rows: np.ndarray, columns: np.ndarray, *, writes: bool = False,
        scale: float | np.ndarray = 1.0, zero: np.ndarray | None = None, noise: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
          writes: to the residual stream. scale: of the old weights. zero: columns that are. noise: its scale by column.
        """
        shape, dtype = new.kernel.shape, self._dtype
        base = jnp.zeros(shape, dtype) if writes else self.noise(shape, dtype)
        if noise is not None:
            base = base * jnp.asarray(noise, dtype)[None]
        if zero is not None:
            base = base.at[:, zero].set(0)
        self.put(new.kernel, old and old.kernel[...], [rows, columns], base, scale)
        if new.bias is not None:
            bias = old.bias[...] if old is not None and old.bias is not None else None
            self.put(new.bias, bias, [columns], jnp.zeros(new.bias.shape, dtype), np.reshape(scale, -1))

    def attention(self, new: Attention, old: Attention | None, reads: np.ndarray | None = None) -> None:
        """
        Args:
          reads: where the old channels of its input lie; None: where those of the residual stream do.
        """
        cfg, at, stretch = self._cfg, self.at, self._stretch
        # The scores are divided by the root of the longer head; queries make up for it.
        queries, keys = cfg.num_heads * cfg.head_dim, (cfg.num_heads + cfg.num_kv_heads) * cfg.head_dim
        scale = np.where(np.arange(at.qkv.size)[None, :] < queries, math.sqrt(stretch), 1.0)
        noise = None
        # Norms that the small model lacks: queries and keys so small that these divide by the root of epsilon alone.
        silent = new.k_norm is not None and not cfg.qk_norm
        if silent and new.k_norm is not None:
            small = _SMALL * math.sqrt(new.k_norm.eps)
            scale = scale * np.where(np.arange(at.qkv.size)[None, :] < keys, small, 1.0)
            normed = (new.num_heads + new.num_kv_heads) * new.head_dim
            noise = np.where(np.arange(new.qkv.kernel.shape[1]) < normed, small, 1.0)
        reads = at.hidden if reads is None else reads
        self.linear(new.qkv, old and old.qkv, reads, at.qkv, scale=scale, zero=at.dead_qkv, noise=noise)
        self.linear(new.out, old and old.out, at.heads, at.hidden, writes=True)
        # Per-head norms see the larger queries as they were, and keys that look smaller by that root.
        channel = np.arange(cfg.head_dim) * stretch
        for mine, theirs, shrink in (
            (new.q_norm, old and old.q_norm, 1), (new.k_norm, old and old.k_norm, stretch)
        ):  # fmt: skip
            if mine is not None and silent:
                mine.weight.set_value(jnp.full(mine.weight.shape, 1 / _SMALL, self._dtype))
            elif mine is not None:
                mine.eps = cfg.rms_norm_eps / shrink
                ones = jnp.ones(mine.weight.shape, self._dtype)
                self.put(mine.weight, theirs and theirs.weight[...], [channel], ones, 1 / math.sqrt(shrink))

    def mixture(self, new: MixtureOfExperts, old: MLP | None) -> None:
        """Sets of experts in each of which one of every group has its part of the old MLP's units."""
        own, dtype, sets = new.experts, self._dtype, expert_groups(self._cfg, new.experts)
        columns = self.noise((new.router.kernel.shape[0], own.count // sets), dtype)
        new.router.kernel.set_value(jnp.repeat(columns, sets, axis=1))
        gate_up, down = self.noise(new.gate_up.shape, dtype), jnp.zeros(new.down.shape, dtype)
        if old is not None:
            gate_up, down = _with_units(gate_up, down, (old.gate_up.kernel[...], old.down.kernel[...]), sets)
        new.gate_up.set_value(gate_up)
        new.down.set_value(down)

    def layer(self, new: DecoderLayer, old: DecoderLayer | None) -> None:
        assert new.attn_norm is not None and new.mlp_norm is not None
        self.norm(new.attn_norm, old and old.attn_norm)
        self.attention(new.attn, old and old.attn)
        self.norm(new.mlp_norm, old and old.mlp_norm)
        if isinstance(new.mlp, MixtureOfExperts):
            self.mixture(new.mlp, old and old.mlp)
            return
        self.linear(new.mlp.gate_up, old and old.mlp.gate_up, self.at.hidden, self.at.gate_up)
        self.linear(new.mlp.down, old and old.mlp.down, self.at.inner, self.at.hidden, writes=True)


#: What layers may ask for that a grown geometry would turn into something else.
_NOT_GROWN = (
    "partial_rotary_factor", "local_rope_theta", "qk_norm_wide", "attention_scale", "attention_soft_cap", "pre_norms",
    "post_norms", "norm_gain", "embedding_scale", "logit_divisor", "logit_soft_cap", "experts",
)  # fmt: skip


def grow_target(model: TargetModel, size: Size, seed: int = 0) -> Transformer:
    """A model of the given geometry that computes what `model` does.

    Args:
      size: as `parse_size` checks it.
      seed: of the weights that are never used.

    Returns:
      A new model in the same dtype, with an output head of its own.

    Raises:
      ValueError: a model whose layers are not those of models.layers.
    """
    cfg = model.config
    if not isinstance(model, Transformer):
        raise ValueError(f"only models of Llama's shape can grow, got one of family {cfg.family!r}")
    odd = {n: getattr(cfg, n) for n in _NOT_GROWN if getattr(cfg, n) != getattr(ModelConfig, n)}
    if odd:
        raise ValueError(f"only models of Llama's shape can grow, got one of family {cfg.family!r} with {odd}")
    eps = cfg.rms_norm_eps * (cfg.hidden_size / size.hidden_size)
    places = layer_places(cfg.num_layers, size.num_layers)
    # An added layer is as the one before it: of models with windows in some layers the same share has them.
    like = [sum(place <= i for place in places) - 1 for i in range(size.num_layers)]
    named = {
        name: tuple(i for i, old in enumerate(like) if old in getattr(cfg, name))
        for name in ("sliding_layers", "no_rope_layers")
    }
    own = {**size.fields(), **named, "rms_norm_eps": eps, "tie_word_embeddings": False}
    if size.experts is not None:  # whose family has both biases of attention or none
        own["output_bias"] = cfg.attention_bias or cfg.output_bias
    grown = dataclasses.replace(cfg, **own)
    dtype: jnp.dtype = model.embedding[...].dtype
    out = nnx.eval_shape(lambda: registry.build(grown, dtype))
    assert isinstance(out, Transformer)
    write, vocab = Grower(cfg, size, dtype, seed), np.arange(cfg.vocab_size)
    hidden = write.at.hidden
    write.put(out.embedding, model.embedding[...], [vocab, hidden], jnp.zeros(out.embedding.shape, dtype))
    old_of = {place: model.layers[i] for i, place in enumerate(places)}
    for i, layer in enumerate(out.layers):
        write.layer(layer, old_of.get(i))
    write.norm(out.norm, model.norm)
    assert out.lm_head is not None
    head = model.embedding[...].T if model.lm_head is None else model.lm_head.kernel[...]
    write.put(out.lm_head.kernel, head, [hidden, vocab], write.noise(out.lm_head.kernel.shape, dtype))
    return out


def grow_head(head: Eagle3Head, target: ModelConfig, size: Size) -> Eagle3Head:
    """The head for the grown target: it reads the old channels of the old layers, and proposes what it did.

    The head keeps its own width; only what reads the target grows.

    Args:
      target: the small target's configuration.
    """
    cfg = head.config
    ratio = target.hidden_size / size.hidden_size
    ids = grown_aux_layers(cfg.aux_layer_ids, target.num_layers, size.num_layers)
    out = nnx.clone(head)
    out.embedding = nnx.Param(head.embedding[...])  # the grown target's table has more channels
    out.config = dataclasses.replace(cfg, target_hidden_size=size.hidden_size, aux_layer_ids=ids)
    old = np.arange(target.hidden_size)
    wide = (np.arange(cfg.num_aux)[:, None] * size.hidden_size + old[None, :]).reshape(-1)
    width = cfg.num_aux * size.hidden_size
    write = _Writer(0)
    kernel = head.fc.kernel[...]
    rows = np.arange(cfg.hidden_size)
    write.put(out.fc.kernel, kernel, [wide, rows], jnp.zeros((width, cfg.hidden_size), kernel.dtype))
    norms = [(out.fc_in_norm, head.fc_in_norm, wide, width)]
    norms += [
        (new, was, old, size.hidden_size) for new, was in zip(out.fc_norms or (), head.fc_norms or (), strict=True)
    ]
    for new, was, places, count in norms:
        if new is not None and was is not None:
            new.eps = was.eps * ratio
            ones = jnp.ones((count,), was.weight[...].dtype)
            write.put(new.weight, was.weight[...], [places], ones, math.sqrt(ratio))
    return out


def save_grown(model: str, size: str, out: str | os.PathLike[str], dtype: str = "bfloat16") -> int:
    """Writes a grown target, its tokenizer and, where there is one, its EAGLE-3 head (in `eagle3`), to be served.

    Args:
      model: "demo", a Hugging Face directory or a hub id. size: as `parse_size` reads it.

    Returns:
      Weights of the target.

    Raises:
      ValueError: a size that cannot hold the model, a checkpoint that cannot be read, or an `out` that is no place for
        a new one.
    """
    source, kept = resolve_model(model), jnp.dtype(dtype)
    shape = parse_size(size, hf.load_config(source))
    if Path(out).exists():
        raise ValueError(f"{str(out)!r} exists already")
    kind, directory = resolve_drafter(None, source)
    small = hf.load_model(source, kept)
    grown = grow_target(small, shape)
    hf.save_model(grown, out, dtype=kept)
    for name in _TEXT_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, Path(out) / name)
    if kind == "eagle3" and directory is not None:
        head = grow_head(eagle3.load_head(directory, small, kept), small.config, shape)
        eagle3.save_head(head, Path(out) / kind, grown.config, dtype=kept)
    return parameters(grown)


def parameters(model: nnx.Module) -> int:
    """Weights of a model."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
