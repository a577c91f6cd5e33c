"""What a family of target models is, in one record; and readings of a config.json that all families share.

A family is one file of this package that makes a `Family`, and its name in the registry.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.weight_map import Weight

_Model = TypeVar("_Model", bound=TargetModel)
_Made = TypeVar("_Made", covariant=True)


class Build(Protocol[_Made]):
    """A model with random weights, or with zeros (rngs None) that a checkpoint fills."""

    def __call__(self, cfg: Any, /, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> _Made: ...


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """An architecture that has a family's model for text, beside what sees images.

    Attributes:
      architecture: Hugging Face's name. model_type: of its `text_config`.
      usual: what transformers assumes for fields that `text_config` leaves out, and the family requires.
      flat: whether files without `text_config` have its fields beside the others.
    """

    architecture: str
    model_type: str
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flat: bool = False

    def text_fields(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The family's config.json out of this architecture's.

        Raises:
          ValueError: no text_config, or one of another model.
        """
        text = hf.get("text_config")
        if text is None and self.flat:
            return _one_axis({**self.usual, **hf})
        if not isinstance(text, dict):
            raise ValueError(f"config.json: {self.architecture} needs an object text_config, got {text!r}")
        if text.get("model_type", self.model_type) != self.model_type:
            raise ValueError(
                f"config.json: text_config.model_type of {self.architecture} must be {self.model_type!r}, got "
                f"{text['model_type']!r}"
            )
        above = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
        return _one_axis({**self.usual, **text, **{name: hf[name] for name in above if hf.get(name) is not None}})


def _one_axis(fields: dict[str, Any]) -> dict[str, Any]:
    """With plain rotary embedding for one of several axes (mrope): along all of them a text has the same positions."""
    for name in ("rope_scaling", "rope_parameters"):
        given = fields.get(name)
        if isinstance(given, dict) and given.get("rope_type", given.get("type")) == "mrope":
            fields[name] = {**given, "rope_type": "default"}
    return fields


@dataclasses.dataclass(frozen=True)
class Family(Generic[_Model]):
    """A family's module class, and its ways into and out of Hugging Face's files.

    Attributes:
      name: `ModelConfig.family`.
      architectures: Hugging Face's names; the first is the one written.
      read: config.json as a ModelConfig, or the family's subclass of it. Refuses with a ValueError what changes the
        model's output and is not implemented.
      write: the inverse, without `architectures`; with `bos_token_id` and `eos_token_id`, which peers look for.
      build: the module class.
      weights: every parameter of a model with its names in a checkpoint.
      divides: fields of the configuration that the devices of tensor parallelism must divide, besides `vocab_size`,
        over which logits are split. How each parameter is split, modules say themselves (`layouts.tensor_parallel`).
      wrapped: architectures of which this family is the part for text; read, not written.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[dict[str, Any]], ModelConfig]
    write: Callable[[Any], dict[str, Any]]
    build: Build[_Model]
    weights: Callable[[_Model], Iterator[Weight]]
    divides: tuple[str, ...] = ("num_kv_heads", "num_heads", "intermediate_size")
    wrapped: tuple[Wrapped, ...] = ()


def token_ids(value: Any, name: str = "eos_token_id") -> tuple[int, ...]:
    """Hugging Face writes one id, a list of ids, or null.

    Raises:
      ValueError: something else, in the field `name`.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(v) is not int or v < 0 for v in ids):
        raise ValueError(f"config.json: {name} must be a token id of at least 0, or a list of them, got {value!r}")
    return tuple(ids)


def check_positive(hf: dict[str, Any], name: str, *, required: bool = False) -> None:
    """Raises ValueError where a field is no positive integer; an absent one may be if it is not required."""
    value = hf.get(name)
    if value is None and not required:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {name} must be a positive integer, got {value!r}")


def check_number(hf: Mapping[str, Any], name: str) -> None:
    """Raises ValueError where a field is neither absent, null nor a positive finite number."""
    value = hf.get(name)
    if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
        raise ValueError(f"config.json: {name} must be a positive number, got {value!r}")


def flag(hf: Mapping[str, Any], name: str, usual: bool = False) -> bool:
    """A field that is true or false; `usual` where it is absent.

    Raises:
      ValueError: it is something else, as "false" in quotes is.
    """
    value = hf.get(name, usual)
    if value not in (True, False, None):
        raise ValueError(f"config.json: {name} must be true or false, got {value!r}")
    return bool(value)


_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(
    hf: dict[str, Any], usual: Callable[[int], bool], window: int | None = None, *, switched: bool = False
) -> dict[str, Any]:
    """ModelConfig's `sliding_window` and `sliding_layers` from `layer_types` and `sliding_window`.

    Args:
      usual: whether a layer slides where config.json has no layer_types but a window.
      window: what transformers assumes where config.json names none.
      switched: only where `use_sliding_window` says so.

    Raises:
      ValueError: an unknown type of layer, a type for fewer or more layers than there are, or sliding layers without
        their window.
    """
    count, window = int(hf["num_hidden_layers"]), hf.get("sliding_window", window)
    if switched and not hf.get("use_sliding_window"):
        window = None
    types = hf.get("layer_types")
    if types is None:
        types = [_SLIDING if window is not None and usual(i) else _FULL for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not set(types) <= {_FULL, _SLIDING}:
        raise ValueError(
            f"config.json: layer_types must name {_FULL!r} or {_SLIDING!r} for each of {count} layers, got {types!r}"
        )
    sliding = tuple(i for i, kind in enumerate(types) if kind == _SLIDING)
    if sliding and (type(window) is not int or window < 1):
        switch = f" (use_sliding_window {hf.get('use_sliding_window')!r})" if switched else ""
        raise ValueError(
            f"config.json: layers of {_SLIDING!r} need a sliding_window of at least 1, got {window!r}{switch}"
        )
    return dict(sliding_window=window if sliding else None, sliding_layers=sliding)


def write_windows(cfg: ModelConfig, *, switched: bool = False) -> dict[str, Any]:
    """The inverse of read_windows."""
    types = [_SLIDING if i in cfg.sliding_layers else _FULL for i in range(cfg.num_layers)]
    switch = {"use_sliding_window": bool(cfg.sliding_layers)} if switched else {}
    return {"sliding_window": cfg.sliding_window, "layer_types": types, **switch}


def refuse(hf: dict[str, Any], **expected: Any) -> None:
    """Raises ValueError where a field is neither absent, null nor what is expected of it: the family has no other."""
    for name, wanted in expected.items():
        if hf.get(name) not in (None, wanted):
            raise ValueError(f"config.json: {name} must be {wanted!r}, got {hf[name]!r}")
