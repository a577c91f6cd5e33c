"""Models as Hugging Face directories: config.json, safetensors, tokenizer.

Owns what peers need to load a directory; a family's own fields and names are its file's in
`models`. Must not know how texts are tokenized or models run.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.checkpointing import quantised, spread
from jaxspec.checkpointing.tensors import (
    WEIGHTS,
    TensorReader,
    located,
    read_json,
    read_tensors,
    replace_directory,
    write_json,
    write_safetensors,
)
from jaxspec.models import registry
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.family import token_ids
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised
from jaxspec.models.rope import served
from jaxspec.models.weight_map import Part, Weight

#: Buffers that older checkpoints carry and that are recomputed here.
IGNORED = r".*\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias)"
#: Multi-token prediction modules in a layout that no drafter here reads (ERNIE 4.5).
_OTHER_MODULES = r"model\.mtp_\w+\..*"
_DTYPES = {"bfloat16", "float16", "float32"}
_PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]")
#: How names start of what is for text in models that see images too, and how they would in a model for text alone.
_TEXT = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
#: An output layer of its own, in any of the formats that are read.
_OUTPUT = re.compile(r"lm_head\.(weight|weight_packed|qweight)$")
_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector|visual)\..*"
_log = logging.getLogger(__name__)


def load_weights(
    weights: Iterable[Weight], reader: TensorReader, quantisation: quantised.Read | None = None, blocked: bool = False
) -> None:
    """Fills parameters one at a time, in the dtype that each parameter (or its placeholder) has.

    Args:
      quantisation: what reads linear maps that are quantised; these stay as they are, whatever the dtype.
      blocked: see load_model.

    Raises:
      ValueError: a tensor that is missing, twice there, or has another shape or type.
    """
    for w in weights:
        w = w.as_stored(reader.names, reader.shape)
        kernel = None if quantisation is None else quantised.read_kernel(quantisation, reader, w)
        if isinstance(kernel, Quantised) and blocked:
            kernel = kernel.blocked()
        if kernel is None:
            kernel = w.join([reader.get(name, shape) for name, shape in zip(w.names, w.shapes, strict=True)])
        w.take(kernel)


def named_tensors(weights: Iterable[Weight], dtype: DTypeLike) -> dict[str, np.ndarray]:
    """The inverse of load_weights: {name: array in the file's layout}, cast to dtype.

    Raises:
      ValueError: weights that are quantised, which only their own format could hold.
    """
    weights = list(weights)
    for w in weights:
        if isinstance(w.param.get_value(), Quantised | Mxfp4):
            raise ValueError(f"{w.names[0]!r} is quantised; copy the directory that it was loaded from instead")
    return {name: part for w in weights for name, part in zip(w.names, w.split(dtype), strict=True)}


def load_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """config.json, with the end-of-text tokens that generation_config.json may add.

    Raises:
      ValueError: no directory, no config.json, or a model that is not supported; names the directory.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    with located(directory):
        return _read_config(directory)


def _read_config(directory: Path) -> ModelConfig:
    config = read_json(directory / "config.json")
    quantised.read_config(quantised.config_of(directory, config))
    config.pop("quantization_config", None)
    text = config.get("text_config", config) if registry.wraps_text(config) else None
    if isinstance(text, dict) and config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is None:
        with read_tensors(directory) as reader:  # by which transformers decides, too
            config["tie_word_embeddings"] = not any(map(_OUTPUT.search, reader.names))
    cfg = registry.read_config(config)
    if (directory / "generation_config.json").exists():
        more = token_ids(read_json(directory / "generation_config.json").get("eos_token_id"), "eos_token_id")
        cfg = dataclasses.replace(cfg, eos_token_ids=tuple(dict.fromkeys(cfg.eos_token_ids + more)))
    return cfg


def load_model(
    directory: str | os.PathLike[str], dtype: DTypeLike = jnp.float32, *, context: int | None = None,
    int8_activations: bool = False, blocked: bool = False, devices: spread.Devices | None = None,
) -> TargetModel:  # fmt: skip
    """A causal language model from a Hugging Face directory, its weights cast to `dtype`.

    Of models that see images the part for text is read. Tensors are read one at a time, so the host never holds the
    model twice. Quantised linear maps stay as they lie, as `models.quantised.Quantised`, which `dtype` does not
    concern. A multi-token prediction module that the checkpoint carries besides is left alone: `drafters.load_drafter`
    reads it.

    Args:
      context: tokens of the longest text that the model will see, where that is known to be less than its own context:
        longrope has other frequencies for short texts (`rope.served`).
      int8_activations: see EngineConfig.
      blocked: quantised kernels in column blocks, as CPUs read them: laid out later they would be there twice.
      devices: that share the model, which is then laid out as by `layouts.tensor_parallel`: what is read of a file are
        their parts, and there they go. None: it lies whole where new arrays do.

    Raises:
      ValueError: whatever in the directory does not fit: the message names the file, the
        tensor, and what was found and expected. Pickled weights are refused.
    """
    cfg = served(load_config(directory), context)
    config = read_json(Path(directory) / "config.json")
    with located(Path(directory)):
        settings = quantised.config_of(Path(directory), config)
        quantisation = quantised.read_config(settings, int8_activations)
    build = lambda: registry.build(cfg, dtype)
    with read_tensors(directory) as reader:
        ignored = [IGNORED, _OTHER_MODULES, *([] if quantisation is None else [quantised.IGNORED])]
        if quantisation is not None:
            quantised.tell_of_cache(Path(directory), settings, reader.names)
        if registry.wraps_text(config):
            _only_text(reader)
            ignored.append(_IMAGES)
        if devices is not None:
            check_copies = functools.partial(_check_copies, reader)
            model = spread.load(build, registry.weights, reader, quantisation, devices, check_copies)
        else:
            model = nnx.eval_shape(build)
            weights = list(registry.weights(model))
            load_weights(weights, reader, quantisation, blocked)
            for w in weights:
                _check_copies(reader, w, None, w.param.get_value())
        reader.refuse_unread(
            "|".join([*ignored, *(rf"{re.escape(p)}.*" for p in mtp_prefixes(reader, cfg.num_layers))])
        )
    return model


def _only_text(reader: TensorReader) -> None:
    """Calls the tensors for text what a model for text alone would, and says once what is left out."""
    starts = {name: next((s for s in _TEXT if name.startswith(s)), None) for name in reader.names}
    reader.rename({_TEXT[start] + name.removeprefix(start): name for name, start in starts.items() if start})
    images = [name for name in reader.names if re.fullmatch(_IMAGES, name)]
    _log.warning(
        "%s: text alone is served; what is for images is left out (tensors: %d), such as %s",
        reader.directory, len(images), images[0] if images else "none",
    )  # fmt: skip


def mtp_prefixes(reader: TensorReader, num_layers: int) -> list[str]:
    """What the names of a checkpoint's multi-token prediction modules start with; [] where it carries none.

    DeepSeek places them after the model's layers, Qwen3-Next in a tree of their own.
    """
    found, i = [], num_layers
    while f"model.layers.{i}.eh_proj.weight" in reader:
        found, i = [*found, f"model.layers.{i}."], i + 1
    return [*found, "mtp."] if "mtp.fc.weight" in reader else found


def save_model(
    model: TargetModel,
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
        write_safetensors(staging / WEIGHTS, named_tensors([*registry.weights(model), *more_weights], dtype))


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


def _check_copies(reader: TensorReader, weight: Weight, part: Part | None, own: Any) -> None:
    """Some tied checkpoints store the head as well; it must be the embedding."""
    for name in weight.copies:
        if name in reader:
            (piece,) = weight.pieces(part)
            other = weight.join([reader.get(name, piece.shape, part=piece.part)])
            if not bool(jnp.array_equal(other, own)):
                raise ValueError(
                    f"{reader.directory}: config.json says tie_word_embeddings=true, but {name!r} differs from "
                    f"{weight.names[0]!r}; set it to false to use both"
                )
