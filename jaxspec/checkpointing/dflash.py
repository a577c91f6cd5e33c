"""DFlash heads as directories.

Owns the map between `DflashHead` and the published names, the conventions for the target's layers and for windows, and
the check that a head fits its target. Must not know how a head drafts. Layouts, whose tensors have the same names:

- "speculators": a nested configuration (PyPI speculators 0.9.0), and the output layer where the vocabulary is reduced.
- "zlab": Qwen3's fields, flat, with a `dflash_config`; no tables, the whole vocabulary, nothing drafted at the anchor's
  place (z-lab, SpecForge and NVIDIA's Model-Optimizer write it).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.checkpointing import heads, hf
from jaxspec.checkpointing.tensors import TensorReader, read_json, read_tensors
from jaxspec.models import weight_map
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.layers import Linear
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead

_log = logging.getLogger(__name__)
_Head = TypeVar("_Head", bound=DflashHead)

ARCHITECTURES = ("DFlashDraftModel",)
LAYOUTS = ("speculators", "zlab")
#: Where flat configurations keep what Qwen3's have no field for.
OWN = "dflash_config"
#: speculators' flag, which is read and written in `dflash_config` too; published flat heads say nothing of it.
NON_CAUSAL = "sliding_window_non_causal"
#: What may stand in dflash_config; other things change what the head computes.
_KNOWN_OWN = frozenset({"block_size", "mask_token_id", "target_layer_ids", "projector_type", NON_CAUSAL})
#: What may stand beside the layers, in a nested configuration and in a flat one.
_KNOWN_NESTED = ("aux_hidden_state_layer_ids", "block_size", "mask_token_id", "sample_from_anchor", NON_CAUSAL)
_KNOWN_FLAT = ("block_size", OWN, "num_target_layers")
_WHAT = "a DFlash head"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def head_weights(head: DflashHead) -> Iterator[weight_map.Weight]:
    """Every parameter but the tables."""
    yield from weight_map.linear_weights(head.fc, ["fc"])
    yield from weight_map.norm_weights(head.hidden_norm, "hidden_norm")
    for i, layer in enumerate(head.layers):
        name, attn = f"layers.{i}", layer.attn
        narrow = attn.num_kv_heads * attn.head_dim
        yield from weight_map.norm_weights(layer.attn_norm, f"{name}.input_layernorm")
        yield from weight_map.linear_weights(attn.q, [f"{name}.self_attn.q_proj"])
        kv = [f"{name}.self_attn.{x}_proj" for x in "kv"]
        yield from weight_map.linear_weights(attn.kv, kv, (narrow, narrow))
        yield from weight_map.linear_weights(attn.out, [f"{name}.self_attn.o_proj"])
        yield from weight_map.norm_weights(attn.q_norm, f"{name}.self_attn.q_norm")
        yield from weight_map.norm_weights(attn.k_norm, f"{name}.self_attn.k_norm")
        yield from weight_map.norm_weights(layer.mlp_norm, f"{name}.post_attention_layernorm")
        yield from weight_map.mlp_weights(layer.mlp, f"{name}.mlp")
    yield from weight_map.norm_weights(head.norm, "norm")


def default_layers(target_layers: int, layers: int) -> tuple[int, ...]:
    """Layers of the target whose inputs a head of so many layers reads where nothing else is said (z-lab's rule)."""
    last = target_layers - 3
    outputs = (
        (target_layers // 2,) if layers == 1 else (round(1 + i * (last - 1) / (layers - 1)) for i in range(layers))
    )
    return tuple(min(max(i, 0), target_layers - 1) + 1 for i in outputs)


def _windows(fields: Mapping[str, Any], count: int) -> tuple[tuple[int, ...], int | None]:
    """(sliding layers, their window) of Qwen3's fields."""
    types = fields.get("layer_types") or [_FULL] * count
    if len(types) != count or not set(types) <= {_FULL, _SLIDING}:
        raise ValueError(
            f"config.json: layer_types must name {_FULL!r} or {_SLIDING!r} for each of {count} layers, got {types}"
        )
    sliding = tuple(i for i, kind in enumerate(types) if kind == _SLIDING)
    window = fields.get("sliding_window")
    if sliding and (fields.get("use_sliding_window") is False or type(window) is not int or window < 1):
        raise ValueError(
            f"config.json: layers of {_SLIDING!r} need use_sliding_window and a sliding_window of at least 1, got "
            f"{fields.get('use_sliding_window')!r} and {window!r}"
        )
    if not fields.get("layer_types") and fields.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window needs layer_types, which say where, got none")
    return sliding, window if sliding else None


def read_config(
    raw: dict[str, Any], target: ModelConfig, overrides: Mapping[str, Any] = MappingProxyType({})
) -> DflashConfig:
    """A head's config.json, checked against its target.

    Args:
      overrides: DflashConfig's fields that config.json has wrong. A flat head with sliding layers may have been trained
        with causal masks in them (SpecForge's are): {"sliding_non_causal": False}.

    Raises:
      ValueError: an unknown field, one that is not implemented, or a head that does not fit; names it and both values.
    """
    nested = heads.LAYER in raw
    fields: dict[str, Any] = raw[heads.LAYER] if nested else raw
    own: dict[str, Any] = raw if nested else raw.get(OWN) or {}
    heads.check_known(_WHAT, raw, _KNOWN_NESTED if nested else _KNOWN_FLAT)
    model_type = fields.get("model_type", "qwen3")
    if model_type != "qwen3":
        raise ValueError(f"config.json: model_type of a DFlash head must be 'qwen3', got {model_type!r}")
    if not nested:
        heads.refuse_unknown(_WHAT, OWN, own, _KNOWN_OWN)
        if own.get("projector_type") not in (None, "dflash"):
            raise ValueError(f"config.json: {OWN}.projector_type must be 'dflash', got {own['projector_type']!r}")
        if raw.get("num_target_layers") is not None:
            heads.check_fits("num_target_layers", raw["num_target_layers"], "num_layers", target.num_layers)
    # The windows are this head's to read; `read_layer` knows full attention only.
    layer = heads.read_layer(fields | {"layer_types": None, "use_sliding_window": False}, "qwen3")
    sliding, window = _windows(fields, layer.num_layers)
    if sliding and not nested and NON_CAUSAL not in own:
        _log.warning(
            "config.json: %s.%s is not given; sliding layers see their whole block, as z-lab's do. If few drafts are "
            "accepted, add it as false", OWN, NON_CAUSAL,
        )  # fmt: skip
    sizes: dict[str, Any] = {
        name: own.get(name) if raw.get(name) is None else raw[name] for name in ("block_size", "mask_token_id")
    }
    wrong = {name: value for name, value in sizes.items() if type(value) is not int}
    if wrong:
        raise ValueError(f"config.json: a DFlash head needs integers block_size and mask_token_id, got {wrong}")
    cfg = DflashConfig(
        layer=dataclasses.replace(layer, family="dflash"),
        aux_layer_ids=tuple(overrides.get("aux_layer_ids", ())) or _aux_layers(raw, own, nested, layer, target),
        block_size=sizes["block_size"],
        mask_token_id=sizes["mask_token_id"],
        draft_vocab_size=int(raw.get("draft_vocab_size") or layer.vocab_size) if nested else layer.vocab_size,
        sample_from_anchor=nested and bool(raw.get("sample_from_anchor", False)),
        sliding_layers=sliding,
        sliding_window=window,
        sliding_non_causal=bool(sliding) and bool(own.get(NON_CAUSAL, not nested)),
        window_from_anchor=bool(sliding) and nested,
    )
    cfg = heads.replaced(cfg, overrides)
    heads.check_fits("vocab_size", cfg.vocab_size, "vocab_size", target.vocab_size)
    heads.check_fits("hidden_size", cfg.layer.hidden_size, "hidden_size", target.hidden_size)
    if nested and raw.get("target_hidden_size") is not None:
        heads.check_fits("target_hidden_size", raw["target_hidden_size"], "hidden_size", target.hidden_size)
    return cfg


def _aux_layers(
    raw: Mapping[str, Any], own: Mapping[str, Any], nested: bool, layer: ModelConfig, target: ModelConfig
) -> tuple[int, ...]:
    """Layers whose input is read: speculators' ids are that, flat ones name layers whose output is."""
    name = "aux_hidden_state_layer_ids" if nested else "target_layer_ids"
    given = own.get(name)
    if given is None:
        return default_layers(target.num_layers, layer.num_layers)
    inputs = tuple(int(i) + (not nested) for i in given)
    if not inputs or not all(0 <= i <= target.num_layers for i in inputs):
        raise ValueError(f"config.json: {name} {list(given)} do not fit a target of {target.num_layers} layers")
    return inputs


def config_dict(
    cfg: DflashConfig, target: ModelConfig, dtype: DTypeLike = jnp.bfloat16, *, layout: str = LAYOUTS[0],
    verifier: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """config.json of a head; `read_config` gives `cfg` back.

    Raises:
      ValueError: an unknown dtype, a head of another target, or one that the layout cannot express.
    """
    kinds = [_SLIDING if i in cfg.sliding_layers else _FULL for i in range(cfg.num_layers)]
    windows = {
        "layer_types": kinds,
        "sliding_window": cfg.sliding_window,
        "use_sliding_window": bool(cfg.sliding_layers),
    }
    layer = {**heads.write_layer(cfg.layer), **windows}
    if layout == "speculators":
        config = {
            **heads.wrapper("dflash", ARCHITECTURES[0], layer, target, dtype, verifier, cfg.drafts),
            "aux_hidden_state_layer_ids": list(cfg.aux_layer_ids),
            "block_size": cfg.block_size,
            "draft_vocab_size": cfg.draft_vocab_size,
            "mask_token_id": cfg.mask_token_id,
            "sample_from_anchor": cfg.sample_from_anchor,
            NON_CAUSAL: cfg.sliding_non_causal,
            "target_hidden_size": None,
        }
    else:
        own = {"mask_token_id": cfg.mask_token_id, "target_layer_ids": [i - 1 for i in cfg.aux_layer_ids]}
        config = {
            **layer,
            "architectures": [ARCHITECTURES[0]],
            "block_size": cfg.block_size,
            "num_target_layers": target.num_layers,
            OWN: own | ({NON_CAUSAL: cfg.sliding_non_causal} if cfg.sliding_layers else {}),
            "torch_dtype": hf.dtype_name(dtype),
        }
    plain = dataclasses.replace(cfg, layer=dataclasses.replace(heads.bare(cfg.layer), family="dflash"))
    heads.check_written(plain, read_config(config, target))
    return config


def _tables(
    cfg: DflashConfig, target: TargetModel, dtype: DTypeLike, reader: TensorReader, ids_V: np.ndarray
) -> tuple[nnx.Variable, Linear | None]:
    """The embedding and the output layer: the checkpoint's where it has others than the target."""
    width = cfg.layer.hidden_size
    own_VE = heads.stored_table(reader, (cfg.vocab_size, width), "embed_tokens")
    own_out = heads.stored_table(reader, (cfg.draft_vocab_size, width), "lm_head")
    if cfg.draft_vocab_size == cfg.vocab_size:
        return heads.lend_tables(target, dtype, own_VE, own_out)
    return heads.lend_embedding(target, dtype, own_VE), heads.lend_rows(target, dtype, ids_V, own_out)


@dataclasses.dataclass(frozen=True)
class BlockFormat(Generic[_Head]):
    """How a kind of heads that draft in blocks is read and written.

    Attributes:
      make: a head from its configuration and tables. weights: its parameters but the tables.
      read_config, config_dict: the kind's own.
      tables: what is written of a head's tables in a layout.
    """

    make: Callable[..., _Head]
    weights: Callable[[_Head], Iterator[weight_map.Weight]]
    read_config: Callable[[dict[str, Any], ModelConfig, Mapping[str, Any]], DflashConfig]
    config_dict: Callable[..., dict[str, Any]]
    tables: Callable[[_Head, str], list[weight_map.Weight]]

    def load_head(
        self, directory: str | os.PathLike[str], target: TargetModel, dtype: DTypeLike = jnp.float32,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> _Head:  # fmt: skip
        """A head for `target`, its weights cast to `dtype`.

        Tables that equal the target's, or are absent, are `Shared`.

        Raises:
          ValueError: whatever does not fit; the message names the file or field, and both values.
        """
        cfg = self.read_config(read_json(Path(directory) / "config.json"), target.config, overrides)
        with read_tensors(directory) as reader:
            ids_V = heads.read_target_ids(reader, cfg.draft_vocab_size, cfg.vocab_size)
            tables = _tables(cfg, target, dtype, reader, ids_V)
            new = functools.partial(self.make, cfg, dtype=jnp.dtype(dtype))
            head = heads.read_head(new, self.weights, tables, reader, dtype)
        head.target_ids.set_value(jnp.asarray(ids_V, jnp.int32))
        return head

    def save_head(
        self, head: _Head, directory: str | os.PathLike[str], target: ModelConfig, *,
        tokenizer: Tokenizer | None = None, dtype: DTypeLike = jnp.bfloat16, layout: str = LAYOUTS[0],
        verifier: str | None = None,
    ) -> None:  # fmt: skip
        """Writes config.json and model.safetensors; all or nothing.

        Of a reduced vocabulary the output layer is written even where it is rows of the target's, as speculators needs
        it.

        Args:
          verifier: name or path of the target, for speculators' configuration.

        Raises:
          ValueError: as config_dict; tables of its own in a layout that has none; a path that names a file.
        """
        config = self.config_dict(head.config, target, dtype, layout=layout, verifier=verifier)
        tensors = hf.named_tensors([*self.tables(head, layout), *self.weights(head)], dtype)
        tensors |= heads.vocabulary_tensors(np.asarray(head.target_ids.get_value(), np.int64), head.config.vocab_size)
        heads.write_head(directory, config, tensors, tokenizer)


def tables_to_write(head: DflashHead, layout: str) -> list[weight_map.Weight]:
    """The head's own tables, and the output layer of a reduced vocabulary.

    Raises:
      ValueError: there are any, and the layout is not speculators'.
    """
    cfg, lm_head = head.config, head.lm_head
    if lm_head is not None and cfg.draft_vocab_size < cfg.vocab_size:
        lm_head = heads.owned(lm_head)
    tables = list(heads.own_tables(head.embedding, lm_head, "embed_tokens", "lm_head"))
    if tables and layout != LAYOUTS[0]:
        names = [t.names[0] for t in tables]
        raise ValueError(f"layout {layout!r} has no tables, got {names}; use layout {LAYOUTS[0]!r}")
    return tables


FORMAT = BlockFormat(DflashHead, head_weights, read_config, config_dict, tables_to_write)
