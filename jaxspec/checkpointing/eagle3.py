"""EAGLE-3, EAGLE-3.1 and P-EAGLE heads as directories.

Owns the map between `Eagle3Head` and the published names, the conventions for auxiliary layers, and the check that a
head fits its target. Must not know how a head drafts. Layouts:

- "speculators": `layers.{i}.*`, a nested configuration (PyPI speculators 0.9.0; P-EAGLE is its `peagle`).
- "safeailab": `midlayer.*` (further layers under `layers.{i}`), a flat configuration; SpecForge and AngelSlim write it.
- "automodel": the same with `model.` before every name but the output layer's.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.checkpointing import heads, hf
from jaxspec.checkpointing.tensors import read_json, read_tensors
from jaxspec.models import weight_map
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head

_log = logging.getLogger(__name__)

#: Flat configurations that can be nothing else; SafeAILab's own say "LlamaForCausalLM" and have a draft_vocab_size.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
#: speculators' names of heads without and with placeholders, and of their architectures.
SPECULATORS = (("eagle3", "Eagle3DraftModel"), ("peagle", "PEagleDraftModel"))
LAYOUTS = ("speculators", "safeailab", "automodel")
#: Names of P-EAGLE's mask token, by writer.
MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")
#: Our addition beside the published ids: "input" or "output"; without it the first id decides.
_CONVENTION = "aux_layer_convention"
_IDS = "eagle_aux_hidden_state_layer_ids"
#: What Model-Optimizer says in eagle_config beside them, and what it says of the heads that there are here.
_USUAL = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
}  # fmt: skip
_WHAT = "an EAGLE-3 head"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def head_weights(head: Eagle3Head, first: str = "midlayer", prefix: str = "") -> Iterator[weight_map.Weight]:
    """Every parameter but the embedding, under names that start with `prefix`; the first layer is called `first`."""
    layer = f"{prefix}{first}"
    if head.fc_in_norm is not None:
        yield from weight_map.norm_weights(head.fc_in_norm, f"{prefix}input_norm")
    for i, norm in enumerate(head.fc_norms or ()):
        yield from weight_map.norm_weights(norm, f"{prefix}fc_norm.{i}")
    if head.mask_hidden is not None:
        yield weight_map.Weight(head.mask_hidden, (f"{prefix}mask_hidden",), (head.config.aux_width,), ones=2)
    yield from weight_map.linear_weights(head.fc, [f"{prefix}fc"])
    yield from weight_map.norm_weights(head.input_norm, f"{layer}.input_layernorm")
    yield from weight_map.norm_weights(head.hidden_norm, f"{layer}.hidden_norm")
    yield from weight_map.attention_weights(head.attn, f"{layer}.self_attn")
    yield from weight_map.norm_weights(head.mlp_norm, f"{layer}.post_attention_layernorm")
    yield from weight_map.mlp_weights(head.mlp, f"{layer}.mlp")
    for i, plain in enumerate(head.layers, start=1):
        yield from weight_map.layer_weights(plain, f"{prefix}layers.{i}")
    yield from weight_map.norm_weights(head.norm, f"{prefix}norm")
    yield from weight_map.linear_weights(head.lm_head, ["lm_head"])


def aux_layer_ids(raw: dict[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """A head's auxiliary layers as layers whose INPUT is read; the target's default where config.json names none.

    speculators' ids are such layers (0 the embeddings, the target's num_layers the stream before its final norm;
    negative ones are refused there too). Flat configurations come in two conventions: ids that start at 1 name layers
    whose output is read (SpecForge), all others layers whose input is.

    Raises:
      ValueError: ids that the target does not have; a head without auxiliary states.
    """
    eagle = raw.get("eagle_config") or {}
    ids = eagle.get(_IDS) or raw.get(_IDS)
    if not ids:
        return target.aux_layers
    usual = "output" if ids[0] == 1 and heads.KIND not in raw else "input"
    if heads.KIND not in raw and _CONVENTION not in eagle and ids[0] not in (1, 2):
        _log.warning(
            "config.json: %s %s do not say whether they name inputs or outputs of layers; read as inputs. If drafts "
            "are hardly ever accepted, add %r: 'output' to eagle_config", _IDS, list(ids), _CONVENTION,
        )  # fmt: skip
    convention = eagle.get(_CONVENTION, usual)
    if convention not in ("input", "output"):
        raise ValueError(f"config.json: eagle_config.{_CONVENTION} must be 'input' or 'output', got {convention!r}")
    inputs = tuple(int(i) + (convention == "output") for i in ids)
    if not all(0 <= i <= target.num_layers for i in inputs):
        raise ValueError(
            f"config.json: {_IDS} {list(ids)} (by {convention}) do not fit a target of {target.num_layers} layers"
        )
    return inputs


def _flag(raw: dict[str, Any], name: str) -> bool:
    """A flag, which writers keep beside the sizes or inside eagle_config."""
    found = {bool(part[name]) for part in (raw, raw.get("eagle_config") or {}) if part.get(name) is not None}
    if len(found) > 1:
        raise ValueError(f"config.json: {name} is {raw[name]!r}, but eagle_config says {raw['eagle_config'][name]!r}")
    return found == {True}


def _check_known(raw: Mapping[str, Any]) -> None:
    """Refuses fields that nobody reads, in config.json and in eagle_config, where writers put what changes a head."""
    flat = ("draft_vocab_size", "target_hidden_size", "eagle_config")
    own = (_IDS, *_FLAGS, *MASK_TOKENS, "embed_requires_grad", *(() if heads.LAYER in raw else flat))
    heads.check_known(_WHAT, raw, own)
    eagle = raw.get("eagle_config") or {}
    heads.refuse_unknown(_WHAT, "eagle_config", eagle, (_IDS, _CONVENTION, *_FLAGS, *_USUAL))
    for name, usual in _USUAL.items():
        if eagle.get(name) not in (None, usual):
            wanted, given = json.dumps(usual), json.dumps(eagle[name])
            raise ValueError(f"config.json: eagle_config.{name} must be {wanted} for {_WHAT}, got {given}")


def mask_token(raw: Mapping[str, Any]) -> int | None:
    """P-EAGLE's mask token under whichever name; None where config.json has none."""
    return next((int(raw[n]) for n in MASK_TOKENS if raw.get(n) is not None), None)


def read_config(
    raw: dict[str, Any], target: ModelConfig, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Eagle3Config:
    """A head's config.json, checked against its target.

    Args:
      overrides: Eagle3Config's fields that config.json has wrong. Heads that SpecForge wrote before September 2026
        say norm_output but feed the un-normed state back: {"norm_output": False}.

    Raises:
      ValueError: a head that is not implemented or does not fit; names the field and both values.
    """
    _check_known(raw)
    nested = heads.LAYER in raw
    fields: dict[str, Any] = raw[heads.LAYER] if nested else raw
    model_type = fields.get("model_type", "qwen3" if nested else "llama")
    if nested and model_type not in ("llama", "qwen3"):
        raise ValueError(f"config.json: {heads.LAYER}.model_type must be 'llama' or 'qwen3', got {model_type!r}")
    # Flat configurations are of Llama's layers, whatever type they name, but for Qwen3's norms.
    layer = heads.read_layer(fields, "qwen3" if model_type == "qwen3" else "llama")
    if layer.mlp_bias:
        raise ValueError("config.json: mlp_bias must be false for an EAGLE-3 head, got true")
    if raw.get(heads.KIND) == "peagle" and mask_token(raw) is None:
        raise ValueError(f"config.json: a P-EAGLE head needs one of {MASK_TOKENS}, got none")
    ids = tuple(overrides.get("aux_layer_ids", ())) or aux_layer_ids(raw, target)
    cfg = Eagle3Config(
        hidden_size=layer.hidden_size,
        target_hidden_size=int(raw.get("target_hidden_size") or layer.hidden_size),
        intermediate_size=layer.intermediate_size,
        num_layers=layer.num_layers,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        vocab_size=layer.vocab_size,
        draft_vocab_size=int(raw.get("draft_vocab_size") or layer.vocab_size),
        aux_layer_ids=ids,
        num_aux=len(ids),
        rms_norm_eps=layer.rms_norm_eps,
        rope_theta=layer.rope_theta,
        rope_scaling=layer.rope_scaling,
        attention_bias=layer.attention_bias,
        qk_norm=layer.qk_norm,
        max_position_embeddings=layer.max_position_embeddings,
        sliding_window=layer.sliding_window,
        sliding_layers=layer.sliding_layers,
        mask_token_id=mask_token(raw),
        **{name: _flag(raw, name) for name in _FLAGS},
    )
    cfg = heads.replaced(cfg, overrides)
    heads.check_fits("vocab_size", cfg.vocab_size, "vocab_size", target.vocab_size)
    heads.check_fits("target_hidden_size", cfg.target_hidden_size, "hidden_size", target.hidden_size)
    return cfg


def config_dict(
    cfg: Eagle3Config,
    target: ModelConfig,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    layout: str = "speculators",
    verifier: str | None = None,
    tokens: int = 3,
) -> dict[str, Any]:
    """config.json of a head; `read_config` gives `cfg` back. Flat layouts name auxiliary layers as SpecForge does.

    Raises:
      ValueError: an unknown layout or dtype; a head of another target, or one that no configuration can express.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout of an EAGLE-3 head must be one of {LAYOUTS}, got {layout!r}")
    own: dict[str, Any] = {
        "draft_vocab_size": cfg.draft_vocab_size,
        **{name: getattr(cfg, name) for name in _FLAGS},
        **({"mask_token_id": cfg.mask_token_id} if cfg.mask_token_id is not None else {}),
    }
    layer = heads.write_layer(cfg.layer)
    if layout != "speculators" and 0 in cfg.aux_layer_ids:
        raise ValueError(
            f"layout {layout!r} names layers by their output, and the input of layer 0 (aux_layer_ids "
            f"{list(cfg.aux_layer_ids)}) is none's; use layout 'speculators'"
        )
    if layout == "speculators":
        kind, architecture = SPECULATORS[cfg.mask_token_id is not None]
        config = {
            **heads.wrapper(kind, architecture, layer, target, dtype, verifier, tokens),
            **own,
            "target_hidden_size": cfg.target_hidden_size if cfg.target_hidden_size != cfg.hidden_size else None,
            _IDS: list(cfg.aux_layer_ids),
            "embed_requires_grad": kind == "peagle",
        }
    else:
        config = {
            **layer,
            **own,
            "architectures": [ARCHITECTURES[0]],
            "target_hidden_size": cfg.target_hidden_size,
            "eagle_config": {
                _IDS: [i - 1 for i in cfg.aux_layer_ids],
                _CONVENTION: "output",
                "use_aux_hidden_state": True,
            },
            "torch_dtype": hf.dtype_name(dtype),
        }
    heads.check_written(cfg, read_config(config, target))
    return config


def load_head(
    directory: str | os.PathLike[str],
    target: TargetModel,
    dtype: DTypeLike = jnp.float32,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Eagle3Head:
    """A head for `target`, its weights cast to `dtype`.

    An embedding that equals the target's, or is absent, is the target's (`Shared`).

    Args:
      overrides: fields of Eagle3Config that config.json has wrong (see read_config).

    Raises:
      ValueError: whatever does not fit; the message names the file or field, and both values.
    """
    directory = Path(directory)
    cfg = read_config(read_json(directory / "config.json"), target.config, overrides)
    head = nnx.eval_shape(lambda: Eagle3Head(cfg, dtype=jnp.dtype(dtype)))
    with read_tensors(directory) as reader:
        prefix = "model." if "model.fc.weight" in reader else ""
        first = "midlayer" if f"{prefix}midlayer.hidden_norm.weight" in reader else "layers.0"
        hf.load_weights(head_weights(head, first, prefix), reader)
        own_VE = heads.stored_table(reader, (cfg.vocab_size, cfg.hidden_size), f"{prefix}embed_tokens")
        if own_VE is None and cfg.hidden_size != cfg.target_hidden_size:
            raise ValueError(
                f"{directory} has no '{prefix}embed_tokens.weight', and the target's embedding cannot stand in: the "
                f"head's hidden_size is {cfg.hidden_size}, the target's {cfg.target_hidden_size}"
            )
        head.embedding = heads.lend_embedding(target, dtype, own_VE)  # pyright: ignore[reportAttributeAccessIssue]
        head.target_ids.set_value(
            jnp.asarray(heads.read_target_ids(reader, cfg.draft_vocab_size, cfg.vocab_size, prefix), jnp.int32)
        )
        reader.refuse_unread(heads.IGNORED)
    return head


def save_head(
    head: Eagle3Head,
    directory: str | os.PathLike[str],
    target: ModelConfig,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    layout: str = "speculators",
    verifier: str | None = None,
    tokens: int = 3,
) -> None:
    """Writes config.json and model.safetensors; all or nothing.

    d2t and t2d are left out where the vocabulary is full, the embedding where it is the target's (`Shared`): those who
    read such heads take the target's too.

    Args:
      verifier: name or path of the target, and tokens: drafts a round, for speculators' configuration.

    Raises:
      ValueError: as config_dict; a path that names a file.
    """
    cfg = head.config
    config = config_dict(cfg, target, dtype, layout=layout, verifier=verifier, tokens=tokens)
    prefix = "model." if layout == "automodel" else ""
    first = "layers.0" if layout == "speculators" else "midlayer"
    table = heads.own_tables(head.embedding, None, f"{prefix}embed_tokens", "")
    tensors = hf.named_tensors([*table, *head_weights(head, first, prefix)], dtype)
    tensors |= heads.vocabulary_tensors(np.asarray(head.target_ids.get_value(), np.int64), cfg.vocab_size, prefix)
    heads.write_head(directory, config, tensors, tokenizer)
