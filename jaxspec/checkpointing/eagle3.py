"""EAGLE-3 heads as directories, in the layout of SafeAILab/EAGLE and SpecForge.

Owns the map between `Eagle3Head` and the published names (those of `speculators`, with
`layers.0` for `midlayer`, and a leading `model.` are read as well), the two conventions for
auxiliary layers, and the check that a head fits its target. Must not know how a head drafts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.checkpointing import hf
from jaxspec.checkpointing.tensors import (
    INTEGERS,
    WEIGHTS,
    TensorReader,
    read_json,
    read_tensors,
    replace_directory,
    write_json,
    write_safetensors,
)
from jaxspec.models import llama
from jaxspec.models.base import ModelConfig
from jaxspec.models.layers import Transformer
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "LlamaForCausalLMEagle",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
)
#: Our addition beside the published ids: "input" or "output"; without it the first id decides.
_CONVENTION = "aux_layer_convention"
_IDS = "eagle_aux_hidden_state_layer_ids"


def head_weights(head: Eagle3Head, block: str = "midlayer", prefix: str = "") -> Iterator[hf.Weight]:
    """Every parameter but the embedding, under names that start with `prefix`; the layer's with `block` after it."""
    layer = f"{prefix}{block}"
    if head.fc_in_norm is not None:
        yield from hf.norm_weights(head.fc_in_norm, f"{prefix}input_norm")
    for i, norm in enumerate(head.fc_norms or ()):
        yield from hf.norm_weights(norm, f"{prefix}fc_norm.{i}")
    yield from hf.linear_weights(head.fc, [f"{prefix}fc"])
    yield from hf.norm_weights(head.input_norm, f"{layer}.input_layernorm")
    yield from hf.norm_weights(head.hidden_norm, f"{layer}.hidden_norm")
    yield from hf.attention_weights(head.attn, f"{layer}.self_attn")
    yield from hf.norm_weights(head.mlp_norm, f"{layer}.post_attention_layernorm")
    yield from hf.mlp_weights(head.mlp, f"{layer}.mlp")
    yield from hf.norm_weights(head.norm, f"{prefix}norm")
    yield from hf.linear_weights(head.lm_head, ["lm_head"])


def aux_layer_ids(raw: dict[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """A head's auxiliary layers as layers whose INPUT is read; the target's default where config.json names none.

    Published ids come in two conventions: those that start at 1 name layers whose output is
    read, all others layers whose input is.

    Raises:
      ValueError: ids that the target does not have; a head without auxiliary states.
    """
    eagle = raw.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise ValueError("config.json: eagle_config.use_aux_hidden_state must be true for an EAGLE-3 head, got false")
    ids = eagle.get(_IDS) or raw.get(_IDS)
    if not ids:
        return target.aux_layers
    convention = eagle.get(_CONVENTION, "output" if ids[0] == 1 else "input")
    if convention not in ("input", "output"):
        raise ValueError(f"config.json: eagle_config.{_CONVENTION} must be 'input' or 'output', got {convention!r}")
    inputs = tuple(int(i) + (convention == "output") for i in ids)
    if not all(0 <= i <= target.num_layers for i in inputs):
        raise ValueError(
            f"config.json: {_IDS} {list(ids)} (by {convention}) do not fit a target of {target.num_layers} layers"
        )
    return inputs


def read_config(raw: dict[str, Any], target: ModelConfig) -> Eagle3Config:
    """A head's config.json, checked against its target.

    Raises:
      ValueError: a head of another kind, or one that does not fit; names the field and both values.
    """
    names = raw.get("architectures") or []
    if not set(names) & set(ARCHITECTURES):
        raise ValueError(f"config.json: architectures {names} name no EAGLE-3 head; supported are {ARCHITECTURES}")
    fields = {**raw, **(raw.get("transformer_layer_config") or {})}
    missing = [n for n in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size") if n not in fields]
    if missing:
        raise ValueError(f"config.json lacks {missing}; found {sorted(fields)}")
    layers = int(fields.get("num_hidden_layers", 1))
    if layers != 1:
        raise ValueError(f"config.json: num_hidden_layers of an EAGLE-3 head must be 1, got {layers}")
    theta, scaling = llama.rope_parameters(fields)
    hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
    ids = aux_layer_ids(raw, target)
    cfg = Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=int(fields.get("target_hidden_size") or hidden),
        intermediate_size=int(fields["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or hidden // heads),
        vocab_size=int(fields["vocab_size"]),
        draft_vocab_size=int(fields.get("draft_vocab_size") or fields["vocab_size"]),
        aux_layer_ids=ids,
        num_aux=len(ids),
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_before_residual=bool(fields.get("norm_before_residual", False)),
        norm_before_fc=bool(fields.get("norm_before_fc", False)),
        fc_norm=bool(fields.get("fc_norm", False)),
        norm_output=bool(fields.get("norm_output", False)),
        attention_bias=bool(fields.get("attention_bias", False)),
        qk_norm=fields.get("model_type") == "qwen3",
        max_position_embeddings=int(fields.get("max_position_embeddings", 2048)),
    )
    if cfg.vocab_size != target.vocab_size:
        raise ValueError(f"config.json: the head's vocab_size is {cfg.vocab_size}, the target's {target.vocab_size}")
    if cfg.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"config.json: the head's target_hidden_size is {cfg.target_hidden_size}, "
            f"the target's hidden_size {target.hidden_size}"
        )
    return cfg


def config_dict(cfg: Eagle3Config, dtype: DTypeLike = jnp.bfloat16) -> dict[str, Any]:
    """config.json of a head, ids in SpecForge's convention; `read_config` gives `cfg` back."""
    return {
        **llama.common_config(cfg.layer),
        "architectures": [ARCHITECTURES[0]],
        "model_type": "qwen3" if cfg.qk_norm else "llama",
        "target_hidden_size": cfg.target_hidden_size,
        "draft_vocab_size": cfg.draft_vocab_size,
        "attention_bias": cfg.attention_bias,
        "norm_before_residual": cfg.norm_before_residual,
        "norm_before_fc": cfg.norm_before_fc,
        "fc_norm": cfg.fc_norm,
        "norm_output": cfg.norm_output,
        "eagle_config": {
            _IDS: [i - 1 for i in cfg.aux_layer_ids],
            _CONVENTION: "output",
            "use_aux_hidden_state": True,
        },
        "torch_dtype": jnp.dtype(dtype).name,
    }


def load_head(directory: str | os.PathLike[str], target: Transformer, dtype: DTypeLike = jnp.float32) -> Eagle3Head:
    """A head for `target`, its weights cast to `dtype`; without an embedding of its own it gets the target's.

    Raises:
      ValueError: whatever does not fit; the message names the file or field, and both values.
    """
    directory = Path(directory)
    cfg = read_config(read_json(directory / "config.json"), target.config)
    head = nnx.eval_shape(lambda: Eagle3Head(cfg, dtype=jnp.dtype(dtype)))
    with read_tensors(directory) as reader:
        prefix = "model." if "model.fc.weight" in reader else ""
        block = "layers.0" if f"{prefix}layers.0.hidden_norm.weight" in reader else "midlayer"
        hf.load_weights(head_weights(head, block, prefix), reader)
        embedding = f"{prefix}embed_tokens.weight"
        if embedding in reader:
            hf.load_weights([hf.Weight(head.embedding, (embedding,), (cfg.hidden_size,))], reader)
        elif cfg.hidden_size == cfg.target_hidden_size:
            head.embedding.set_value(target.embedding.get_value().astype(dtype))
        else:
            raise ValueError(
                f"{directory} has no {embedding!r}, and the target's embedding cannot stand in: the head's hidden_size "
                f"is {cfg.hidden_size}, the target's {cfg.target_hidden_size}"
            )
        head.target_ids.set_value(jnp.asarray(_target_ids(cfg, reader), jnp.int32))
        reader.refuse_unread(hf.IGNORED)
    return head


def save_head(
    head: Eagle3Head,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> None:
    """Writes config.json and model.safetensors (d2t and t2d unless the vocabulary is full); all or nothing."""
    cfg = head.config
    config = config_dict(cfg, dtype)
    embedding = hf.Weight(head.embedding, ("embed_tokens.weight",), (cfg.hidden_size,))
    tensors = hf.named_tensors([embedding, *head_weights(head)], dtype)
    if cfg.draft_vocab_size < cfg.vocab_size:
        ids = np.asarray(head.target_ids.get_value(), np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(cfg.vocab_size), ids)
    with replace_directory(directory) as staging:
        if tokenizer is not None:
            tokenizer.save(str(staging / "tokenizer.json"))
        write_json(staging / "config.json", config)
        write_safetensors(staging / WEIGHTS, tensors)


def _target_ids(cfg: Eagle3Config, reader: TensorReader) -> np.ndarray:
    """[Vd] int64, from d2t's offsets."""
    if "d2t" not in reader:
        if cfg.draft_vocab_size != cfg.vocab_size:
            raise ValueError(
                f"{reader.directory} has no 'd2t', but draft_vocab_size is {cfg.draft_vocab_size} "
                f"and vocab_size {cfg.vocab_size}"
            )
        ids = np.arange(cfg.vocab_size)
    else:
        ids = np.arange(cfg.draft_vocab_size) + reader.get("d2t", (cfg.draft_vocab_size,), INTEGERS)
    if ids.min() < 0 or ids.max() >= cfg.vocab_size or len(np.unique(ids)) != len(ids):
        raise ValueError(
            f"'d2t' in {reader.directory} must give distinct ids from 0 to {cfg.vocab_size - 1}; "
            f"it gives {len(np.unique(ids))} from {ids.min()} to {ids.max()} for {len(ids)} draft ids"
        )
    if "t2d" in reader:
        drafted = np.flatnonzero(reader.get("t2d", (cfg.vocab_size,), INTEGERS))
        if not np.array_equal(drafted, np.sort(ids)):
            raise ValueError(
                f"'t2d' in {reader.directory} marks {len(drafted)} tokens, which are not the {len(ids)} of 'd2t'"
            )
    return ids
