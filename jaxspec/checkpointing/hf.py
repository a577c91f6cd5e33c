"""Models as Hugging Face directories: config.json, safetensors, tokenizer.

Owns the map between this project's fused parameters and Hugging Face's names, and what
peers need to load a directory. Must not know how texts are tokenized or models run.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.checkpointing.tensors import (
    WEIGHTS,
    TensorReader,
    read_json,
    read_tensors,
    replace_directory,
    write_json,
    write_safetensors,
)
from jaxspec.models import llama, registry
from jaxspec.models.base import ModelConfig
from jaxspec.models.layers import MLP, Attention, DecoderLayer, Linear, RMSNorm, Transformer

#: Buffers that older checkpoints carry and that are recomputed here.
IGNORED = r".*\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias)"
_DTYPES = {"bfloat16", "float16", "float32"}
_PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]")


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter and the tensors it is made of.

    Attributes:
      param: ours; tensors are joined along its last axis.
      names: the tensors' names.
      widths: how much of the last axis each takes.
      transposed: stored [out, in] in the file, [in, out] here.
      gain: of a norm.
      offset: what the file's values lack of ours: 1 for the gains of families that multiply by 1 + w.
      ones: axes of size 1 that the file has in front.
    """

    param: nnx.Variable
    names: tuple[str, ...]
    widths: tuple[int, ...]
    transposed: bool = False
    gain: bool = False
    offset: float = 0.0
    ones: int = 0

    @property
    def shapes(self) -> Iterator[tuple[int, ...]]:
        """The shape of each tensor as the file has it."""
        lead = (*(1,) * self.ones, *self.param.shape[:-1])
        for width in self.widths:
            yield (width, *lead) if self.transposed else (*lead, width)


def linear_weights(linear: Linear, names: Sequence[str], widths: Sequence[int] | None = None) -> Iterator[Weight]:
    """A Linear from one or more projections named without `.weight`; `widths` are their output sizes."""
    split = tuple(widths or (linear.kernel.shape[1],))
    assert sum(split) == linear.kernel.shape[1] and len(split) == len(names), (split, names, linear.kernel.shape)
    yield Weight(linear.kernel, tuple(f"{n}.weight" for n in names), split, transposed=True)
    if linear.bias is not None:
        yield Weight(linear.bias, tuple(f"{n}.bias" for n in names), split)


def norm_weights(norm: RMSNorm, name: str) -> Iterator[Weight]:
    """A norm's gain."""
    yield Weight(norm.weight, (f"{name}.weight",), tuple(norm.weight.shape), gain=True)


def attention_weights(attn: Attention, prefix: str) -> Iterator[Weight]:
    """`{prefix}.{q,k,v,o}_proj` and, where the family has them, `{prefix}.{q,k}_norm`."""
    q, kv = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
    yield from linear_weights(attn.qkv, [f"{prefix}.{x}_proj" for x in "qkv"], (q, kv, kv))
    yield from linear_weights(attn.out, [f"{prefix}.o_proj"])
    if attn.q_norm is not None and attn.k_norm is not None:
        yield from norm_weights(attn.q_norm, f"{prefix}.q_norm")
        yield from norm_weights(attn.k_norm, f"{prefix}.k_norm")


def mlp_weights(mlp: MLP, prefix: str) -> Iterator[Weight]:
    """`{prefix}.{gate,up,down}_proj`."""
    width = mlp.gate_up.kernel.shape[1] // 2
    yield from linear_weights(mlp.gate_up, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], (width, width))
    yield from linear_weights(mlp.down, [f"{prefix}.down_proj"])


def layer_weights(layer: DecoderLayer, prefix: str) -> Iterator[Weight]:
    """A decoder layer under Llama's names, e.g. with prefix "model.layers.0"."""
    if layer.attn_norm is not None:
        yield from norm_weights(layer.attn_norm, f"{prefix}.input_layernorm")
    yield from attention_weights(layer.attn, f"{prefix}.self_attn")
    yield from norm_weights(layer.mlp_norm, f"{prefix}.post_attention_layernorm")
    yield from mlp_weights(layer.mlp, f"{prefix}.mlp")


def model_weights(model: Transformer) -> Iterator[Weight]:
    """Every parameter of a model, in the order of the forward pass."""
    yield Weight(model.embedding, ("model.embed_tokens.weight",), (model.embedding.shape[1],))
    for i, layer in enumerate(model.layers):
        yield from layer_weights(layer, f"model.layers.{i}")
    yield from norm_weights(model.norm, "model.norm")
    if model.lm_head is not None:
        yield from linear_weights(model.lm_head, ["lm_head"])


def load_weights(weights: Iterable[Weight], reader: TensorReader) -> None:
    """Fills parameters one at a time, in the dtype that each parameter (or its placeholder) has.

    Raises:
      ValueError: a tensor that is missing or has another shape or type.
    """
    for w in weights:
        dtype = w.param.get_value().dtype
        parts = [reader.get(name, shape) for name, shape in zip(w.names, w.shapes, strict=True)]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0 if w.transposed else -1)
        joined = joined.reshape(joined.shape[w.ones :])
        if w.offset:
            joined = joined.astype(np.float32) + np.float32(w.offset)
        value = jnp.asarray(joined).astype(dtype)
        w.param.set_value(value.T if w.transposed else value)


def named_tensors(weights: Iterable[Weight], dtype: DTypeLike) -> dict[str, np.ndarray]:
    """The inverse of load_weights: {name: array in the file's layout}, cast to dtype."""
    out: dict[str, np.ndarray] = {}
    for w in weights:
        value = w.param.get_value()
        if w.offset:
            value = value.astype(jnp.float32) - jnp.float32(w.offset)
        value = value.astype(dtype)
        array = np.asarray(value.T if w.transposed else value)
        array = array.reshape(*(1,) * w.ones, *array.shape)
        cuts = np.cumsum(w.widths)[:-1].tolist()
        out |= dict(zip(w.names, np.split(array, cuts, axis=0 if w.transposed else -1), strict=True))
    return out


def load_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """config.json, with the end-of-text tokens that generation_config.json may add.

    Raises:
      ValueError: no directory, no config.json, or a model that is not supported.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    cfg = registry.read_config(read_json(directory / "config.json"))
    if (directory / "generation_config.json").exists():
        more = llama.token_ids(read_json(directory / "generation_config.json").get("eos_token_id"))
        cfg = dataclasses.replace(cfg, eos_token_ids=tuple(dict.fromkeys(cfg.eos_token_ids + more)))
    return cfg


def load_model(directory: str | os.PathLike[str], dtype: DTypeLike = jnp.float32) -> Transformer:
    """A causal language model from a Hugging Face directory, its weights cast to `dtype`.

    Tensors are read one at a time, so the host never holds the model twice. A multi-token prediction module that the
    checkpoint carries besides is left alone: `drafters.load_drafter` reads it.

    Raises:
      ValueError: whatever in the directory does not fit: the message names the file, the
        tensor, and what was found and expected. Pickled weights are refused.
    """
    cfg = load_config(directory)
    model = nnx.eval_shape(lambda: registry.build(cfg, dtype))
    with read_tensors(directory) as reader:
        load_weights(model_weights(model), reader)
        if model.lm_head is None and "lm_head.weight" in reader:
            _check_tied(model.embedding.get_value(), reader)
        reader.refuse_unread("|".join([IGNORED, *(rf"{re.escape(p)}.*" for p in mtp_prefixes(reader, cfg.num_layers))]))
    return model


def mtp_prefixes(reader: TensorReader, num_layers: int) -> list[str]:
    """What the names of a checkpoint's multi-token prediction modules start with; [] where it carries none.

    DeepSeek places them after the model's layers, Qwen3-Next in a tree of their own.
    """
    found, i = [], num_layers
    while f"model.layers.{i}.eh_proj.weight" in reader:
        found, i = [*found, f"model.layers.{i}."], i + 1
    return [*found, "mtp."] if "mtp.fc.weight" in reader else found


def save_model(
    model: Transformer,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    more_config: Mapping[str, Any] = MappingProxyType({}),
    more_weights: Iterable[Weight] = (),
) -> None:
    """Writes a directory that transformers, llama.cpp and load_model read; all or nothing.

    The weights go into one model.safetensors under Hugging Face's names. With a tokenizer,
    its tokenizer_config.json asks for a BOS token before every text if the model has one.
    `more_config` and `more_weights` go into the same files (a module that rides along).

    Raises:
      ValueError: a dtype other than bfloat16, float16 or float32; a configuration that its
        family's config.json cannot express; a path that names a file.
    """
    cfg = model.config
    config = config_dict(cfg, dtype)
    generation: dict[str, Any] = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    with replace_directory(directory) as staging:
        if tokenizer is not None:
            tokenizer.save(str(staging / "tokenizer.json"))
            settings = tokenizer_settings(tokenizer, cfg)
            write_json(staging / "tokenizer_config.json", settings)
            if "pad_token" in settings:
                generation["pad_token_id"] = tokenizer.token_to_id(settings["pad_token"])
        write_json(staging / "config.json", {**config, **more_config})
        write_json(staging / "generation_config.json", generation)
        write_safetensors(staging / WEIGHTS, named_tensors([*model_weights(model), *more_weights], dtype))


def config_dict(cfg: ModelConfig, dtype: DTypeLike = jnp.bfloat16) -> dict[str, Any]:
    """config.json as transformers reads it; `registry.read_config` gives `cfg` back.

    Raises:
      ValueError: unknown family or dtype, or fields that the family cannot express.
    """
    return {**registry.write_config(cfg), "torch_dtype": dtype_name(dtype)}


def dtype_name(dtype: DTypeLike) -> str:
    """Hugging Face's name of a type that weights can be stored in.

    Raises:
      ValueError: another type.
    """
    name = jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {sorted(_DTYPES)}, got {name}")
    return name


def tokenizer_settings(tokenizer: Tokenizer, cfg: ModelConfig) -> dict[str, Any]:
    """tokenizer_config.json for a plain `tokenizers` tokenizer, its special tokens taken from the model."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": cfg.bos_token_id is not None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": cfg.max_position_embeddings,
    }
    named = {"bos_token": cfg.bos_token_id, "eos_token": next(iter(cfg.eos_token_ids), None)}
    for key, token_id in named.items():
        if token_id is not None:
            token = tokenizer.id_to_token(token_id)
            if token is None:
                raise ValueError(f"{key} id {token_id} is not in the tokenizer of {tokenizer.get_vocab_size()} tokens")
            settings[key] = token
    pad = next((t for t in _PAD_TOKENS if tokenizer.token_to_id(t) is not None), None)
    if pad is not None:
        settings["pad_token"] = pad
    return settings


def _check_tied(embedding_VE: jax.Array, reader: TensorReader) -> None:
    """Some tied checkpoints store the head as well; it must be the embedding."""
    head_VE = reader.get("lm_head.weight", tuple(embedding_VE.shape))
    if not bool(jnp.array_equal(jnp.asarray(head_VE).astype(embedding_VE.dtype), embedding_VE)):
        raise ValueError(
            f"{reader.directory}: config.json says tie_word_embeddings=true, but 'lm_head.weight' differs from "
            f"'model.embed_tokens.weight'; set it to false to use both"
        )
