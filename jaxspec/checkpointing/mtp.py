"""Multi-token prediction modules: inside their target's checkpoint or as directories of their own.

Owns the map between `MtpHead` and the published names. Layouts:

- "deepseek": `model.layers.{N}.{eh_proj, enorm, hnorm, embed_tokens, shared_head.*}` and a decoder layer, N the
  target's number of layers, in the target's own files.
- "qwen3_next": `mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, layers.0.*, norm}` in the target's own files; the
  families of that name (and qwen3_5) multiply by 1 + w where others multiply by w.
- "speculators": `mtp_layers.0.*`, a directory of its own (PyPI speculators 0.9.0); the tables are always the target's.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.checkpointing import heads, hf, quantised
from jaxspec.checkpointing.tensors import TensorReader, read_json, read_tensors
from jaxspec.models import deepseek, weight_map
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead

LAYOUTS = ("speculators", "deepseek", "qwen3_next")
#: How configurations count their modules.
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_next": "qwen3",
    "qwen3_5_text": "qwen3",
    "qwen3_5": "qwen3",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "glm4_moe_lite",
}
#: Of them those whose modules have all that a layer of theirs has.
_WHOLE = "deepseek_v3", "glm4_moe", "glm4_moe_lite"
#: Parts of published modules that have no counterpart here, but in those of `_WHOLE`.
_REFUSED = {
    r"self_attn\.(q_a_|q_b_|kv_a_|kv_b_)": "latent attention (MLA)",
    r"mlp\.(gate|experts|shared_experts?|shared_expert_gate)\.": "a mixture of experts",
    r"linear_attn\.": "linear attention",
}


@dataclasses.dataclass(frozen=True)
class Names:
    """What a layout calls a module's parts, without `.weight`; the names of all but the tables start with `prefix`.

    Attributes:
      embedding, lm_head: None where the layout has no place for the table.
    """

    prefix: str
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    layer: str
    embedding: str | None
    lm_head: str | None


def names(layout: str, target_layers: int) -> Names:
    """The names of one layout, for a target of so many layers."""
    if layout == "speculators":
        p = "mtp_layers.0"
        return Names(
            prefix=f"{p}.",
            fc=f"{p}.input_proj",
            embedding_norm=f"{p}.token_layernorm",
            hidden_norm=f"{p}.hidden_layernorm",
            norm=f"{p}.final_layernorm",
            layer=p,
            embedding="embed_tokens",
            lm_head="lm_head",
        )
    if layout == "deepseek":
        p = f"model.layers.{target_layers}"
        return Names(
            prefix=f"{p}.",
            fc=f"{p}.eh_proj",
            embedding_norm=f"{p}.enorm",
            hidden_norm=f"{p}.hnorm",
            norm=f"{p}.shared_head.norm",
            layer=p,
            embedding=f"{p}.embed_tokens",
            lm_head=f"{p}.shared_head.head",
        )
    return Names(
        prefix="mtp.",
        fc="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        norm="mtp.norm",
        layer="mtp.layers.0",
        embedding=None,
        lm_head=None,
    )


def head_weights(head: MtpHead, called: Names, gain_offset: float = 0.0) -> Iterator[weight_map.Weight]:
    """Every parameter but the tables; `gain_offset` is 1 where the norms of the file multiply by 1 + w."""

    def weights() -> Iterator[weight_map.Weight]:
        yield from weight_map.linear_weights(head.fc, [called.fc])
        yield from weight_map.norm_weights(head.embedding_norm, called.embedding_norm)
        yield from weight_map.norm_weights(head.hidden_norm, called.hidden_norm)
        yield from weight_map.layer_weights(head.layer, called.layer, deepseek.NAMES)  # Llama's, and of experts
        yield from weight_map.norm_weights(head.norm, called.norm)

    for weight in weights():
        yield dataclasses.replace(weight, offset=gain_offset) if weight.gain else weight


def find_layout(raw: Mapping[str, Any], reader: TensorReader) -> str | None:
    """The layout of the module that a checkpoint carries; None where it carries none."""
    if raw.get(heads.KIND) == "mtp":
        return "speculators"
    layers = raw.get("num_hidden_layers")
    found = hf.mtp_prefixes(reader, layers) if isinstance(layers, int) else []
    return None if not found else "qwen3_next" if found == ["mtp."] else "deepseek"


def inside_target(directory: str | os.PathLike[str]) -> bool:
    """Whether a target's own checkpoint carries a module.

    Raises:
      ValueError: a directory that cannot be read.
    """
    raw = read_json(Path(directory) / "config.json")
    with read_tensors(directory) as reader:
        return find_layout(raw, reader) in ("deepseek", "qwen3_next")


def read_config(
    raw: dict[str, Any], target: ModelConfig, overrides: Mapping[str, Any] = MappingProxyType({})
) -> MtpConfig:
    """A module's geometry from config.json (the target's own, or speculators'), checked against its target.

    Raises:
      ValueError: another number of modules than one, a layer that is not implemented, or another target; names the
        field and both values.
    """
    for name in COUNTS:
        if raw.get(name, 1) != 1:
            raise ValueError(f"config.json: {name} must be 1 (one module, chained), got {raw[name]!r}")
    if heads.LAYER in raw:  # else it is the target's own configuration
        heads.check_known("an MTP module", raw, COUNTS)
    fields = {**raw.get(heads.LAYER, raw)}
    fields.pop("quantization_config", None)
    model_type = fields.get("model_type", "qwen2" if heads.LAYER in raw else "llama")
    if model_type not in _FAMILIES:
        raise ValueError(
            f"config.json: model_type of an MTP layer must be one of {sorted(_FAMILIES)}, got {model_type!r}"
        )
    # Of a hybrid model the module repeats a layer of full attention.
    other = sorted({*(fields.pop("layer_types", None) or ())} - {"full_attention", "linear_attention"})
    if other or fields.get("use_sliding_window"):
        raise ValueError(f"config.json: an MTP module has full attention only, got layer_types {other or 'that slide'}")
    layer = heads.read_layer(fields, _FAMILIES[model_type])
    heads.check_fits("num_hidden_layers", layer.num_layers, "num_hidden_layers", target.num_layers)
    cfg = MtpConfig(as_module(layer), target.num_layers)
    cfg = heads.replaced(cfg, overrides)
    heads.check_fits("hidden_size", cfg.layer.hidden_size, "hidden_size", target.hidden_size)
    heads.check_fits("vocab_size", cfg.vocab_size, "vocab_size", target.vocab_size)
    return cfg


def as_module(cfg: ModelConfig) -> ModelConfig:
    """The one layer of a module, shaped as a target's last ones: with experts where the target has any."""
    experts = None if cfg.experts is None else dataclasses.replace(cfg.experts, layers=(0,))
    return dataclasses.replace(cfg, family="mtp", num_layers=1, experts=experts)


def config_dict(
    cfg: MtpConfig,
    target: ModelConfig,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    verifier: str | None = None,
    tokens: int = 3,
) -> dict[str, Any]:
    """config.json of the "speculators" layout; `read_config` gives `cfg` back.

    speculators itself builds modules of Qwen3's layers only; it reads the configuration of others, no more.

    Raises:
      ValueError: an unknown dtype, a module of another target, or one that no configuration can express.
    """
    layer = heads.write_layer(dataclasses.replace(cfg.layer, num_layers=target.num_layers))
    config = {
        **heads.wrapper("mtp", "MTPDraftModel", layer, target, dtype, verifier, tokens),
        COUNTS[0]: 1,
    }
    normal = MtpConfig(dataclasses.replace(heads.bare(cfg.layer), family="mtp"), cfg.target_layers)
    back = read_config(config, target)
    heads.check_written(normal.layer, back.layer)
    heads.check_written(normal, back)
    return config


def load_head(
    directory: str | os.PathLike[str],
    target: TargetModel,
    dtype: DTypeLike = jnp.float32,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> MtpHead:
    """The module of a checkpoint, its weights cast to `dtype`.

    Tables that equal the target's, or are absent, are the target's (`Shared`). Linear maps that are quantised stay so.

    Args:
      directory: the target's own, or one of speculators' layout.

    Raises:
      ValueError: no module, more than one, one that is not implemented (gated attention; latent attention or experts
        but those of DeepSeek-V3 and GLM-4.5: the message names the tensor), or one that does not fit; names the file or
        field, and both values.
    """
    directory = Path(directory)
    raw = read_json(directory / "config.json")
    with read_tensors(directory) as reader:
        layout = find_layout(raw, reader)
        if layout is None:
            raise ValueError(
                f"{directory} carries no MTP module: it has neither 'mtp.fc.weight' nor "
                f"'model.layers.{raw.get('num_hidden_layers')}.eh_proj.weight'"
            )
        called = names(layout, target.config.num_layers)
        _refuse_others(reader, raw, called)
        cfg = read_config(raw, target.config, overrides)
        shape = (cfg.vocab_size, cfg.layer.hidden_size)
        tables = heads.lend_tables(
            target,
            dtype,
            heads.stored_table(reader, shape, called.embedding),
            heads.stored_table(reader, shape, called.lm_head),
        )
        model_type = str(raw.get(heads.LAYER, raw).get("model_type", ""))
        offset = 1.0 if model_type.startswith(("qwen3_next", "qwen3_5")) else 0.0
        elsewhere = "" if layout == "speculators" else rf"|(?!{re.escape(called.prefix)}).*"
        new = functools.partial(MtpHead, cfg, dtype=jnp.dtype(dtype))
        return heads.read_head(
            new, lambda head: head_weights(head, called, offset), tables, reader, dtype, elsewhere,
            quantised.read_config(quantised.config_of(directory, raw)),
        )  # fmt: skip


def save_head(
    head: MtpHead,
    directory: str | os.PathLike[str],
    target: TargetModel,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    layout: str = "speculators",
    verifier: str | None = None,
    tokens: int = 3,
) -> None:
    """Writes a module: as a directory of its own ("speculators"), or with a copy of its target; all or nothing.

    Args:
      verifier: name or path of the target, and tokens: drafts a round, for speculators' configuration.

    Raises:
      ValueError: an unknown layout; tables of the module's own where the layout has no place for them; a layer that
        is not shaped as the target's where they share a config.json; a path that names a file.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout of an MTP module must be one of {LAYOUTS}, got {layout!r}")
    called = names(layout, target.config.num_layers)
    weights = list(head_weights(head, called))
    if layout != "deepseek":
        own = [n for w in heads.own_tables(head.embedding, head.lm_head, "embedding", "lm_head") for n in w.names]
        if own:
            raise ValueError(
                f"layout {layout!r} takes the target's tables, but the module has its own {own}; use 'deepseek'"
            )
    if layout == "speculators":
        config = config_dict(head.config, target.config, dtype, verifier=verifier, tokens=tokens)
        heads.write_head(directory, config, hf.named_tensors(weights, dtype), tokenizer)
        return
    shaped = as_module(heads.bare(target.config))
    heads.check_written(dataclasses.replace(heads.bare(head.config.layer), family="mtp"), shaped)
    if layout == "deepseek":
        # DeepSeek stores both tables with the module, those that are the target's as well.
        embedding, layer = head.embedding, f"{called.prefix[:-1]}"
        weights.append(weight_map.Weight(embedding, (f"{layer}.embed_tokens.weight",), (embedding.shape[1],)))
        if head.lm_head is None:
            weights.append(weight_map.Weight(embedding, (f"{layer}.shared_head.head.weight",), (embedding.shape[1],)))
        else:
            weights += weight_map.linear_weights(head.lm_head, [f"{layer}.shared_head.head"])
    hf.save_model(target, directory, tokenizer=tokenizer, dtype=dtype, more_config={COUNTS[0]: 1}, more_weights=weights)


def _refuse_others(reader: TensorReader, raw: Mapping[str, Any], called: Names) -> None:
    """Names the tensor that shows a module of another kind, before its shapes are compared with config.json's."""
    later = [n for n in sorted(reader.names) if re.match(r"mtp\.layers\.[1-9]|mtp_layers\.[1-9]", n)]
    if called.prefix.startswith("model.layers."):
        after = hf.mtp_prefixes(reader, int(raw["num_hidden_layers"]))[1:]
        later += [f"{p}eh_proj.weight" for p in after if p != "mtp."]
    if later:
        raise ValueError(f"{reader.directory} carries more than one MTP layer, but only one is supported: {later[0]!r}")
    own = [n for n in sorted(reader.names) if n.startswith(called.prefix)]
    whole = raw.get(heads.LAYER, raw).get("model_type") in _WHOLE
    for pattern, what in () if whole else _REFUSED.items():
        found = next((n for n in own if re.search(pattern, n)), None)
        if found is not None:
            raise ValueError(f"the MTP module in {reader.directory} has {what}, which is not supported: {found!r}")
    fields = raw.get(heads.LAYER, raw)
    count, width = fields.get("num_attention_heads"), fields.get("head_dim")
    query = f"{called.layer}.self_attn.q_proj.weight"
    known = query in reader and isinstance(count, int) and isinstance(width, int)
    if known and reader.shape(query)[0] == 2 * count * width:
        raise ValueError(
            f"the MTP module in {reader.directory} has gated attention, which is not supported: {query!r} has "
            f"{reader.shape(query)[0]} rows for {count} heads of {width} channels"
        )
