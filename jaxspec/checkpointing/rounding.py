"""Weights rounded to few bits, in compressed-tensors' layout: llm-compressor's presets W8A8, FP8_DYNAMIC and W4A16.

No text is needed: a scale is what its own weights ask for. Must not know models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpointing import packing

_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True, "num_bits": 8}
#: How far groups of 4 bits may cut their largest weights off, of which the least squared error is taken.
_CUTS = np.linspace(1.0, 0.72, 15, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class Format:
    """How linear maps are rounded and stored.

    Attributes:
      name: compressed-tensors' `format`.
      weights, activations: its QuantizationArgs; activations are for servers that round these, too.
    """

    name: str
    weights: dict[str, Any]
    activations: dict[str, Any] | None = None

    def config(self, ignore: Sequence[str], others: Mapping[str, Format] | None = None) -> dict[str, Any]:
        """`quantization_config`.

        Args:
          ignore: modules that stay as they are. others: modules that have a format of their own.
        """
        own = {module: form for module, form in (others or {}).items() if form != self}
        groups = [self._group("Linear"), *(form._group(module) for module, form in own.items())]
        if own:
            groups = [{**group, "format": form.name} for group, form in zip(groups, (self, *own.values()), strict=True)]
        return {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision" if own else self.name,
            "quantization_status": "compressed",
            "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
        }

    def _group(self, target: str) -> dict[str, Any]:
        weights = {**self.weights, "symmetric": True, "dynamic": False}
        return {
            "targets": [target], "weights": weights, "input_activations": self.activations, "output_activations": None,
        }  # fmt: skip

    def tensors(self, module: str, weight_FE: np.ndarray) -> dict[str, np.ndarray]:
        """A module's tensors from its weight [out, in]; scales are of the weight's type.

        Raises:
          ValueError: groups that do not divide the inputs.
        """
        w, kind = weight_FE.astype(np.float32), weight_FE.dtype
        if self.name == "float-quantized":
            scale = _scale(np.abs(w).max(axis=1, keepdims=True) / 448, kind)
            values = np.clip(w / scale.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        elif self.name == "int-quantized":
            scale = _scale(np.abs(w).max(axis=1, keepdims=True) / 127, kind)
            values = np.clip(np.rint(w / scale.astype(np.float32)), -128, 127).astype(np.int8)
        else:
            return _packed(module, w, kind, self.weights["group_size"])
        return {f"{module}.weight": values, f"{module}.weight_scale": scale}


FORMATS = {
    "int8": Format("int-quantized", dict(num_bits=8, type="int", strategy="channel"), {**_TOKEN, "type": "int"}),
    "fp8": Format("float-quantized", dict(num_bits=8, type="float", strategy="channel"), {**_TOKEN, "type": "float"}),
    "int4-g128": Format("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=128)),
}


def _scale(scale: np.ndarray, kind: np.dtype) -> np.ndarray:
    """As it will be stored, and never 0."""
    return np.maximum(scale, 1e-8).astype(kind)


def _packed(module: str, w_FE: np.ndarray, kind: np.dtype, group: int) -> dict[str, np.ndarray]:
    d_out, d_in = w_FE.shape
    if d_in % group:
        raise ValueError(
            f"{module!r} has {d_in} inputs, which groups of {group} do not divide; ignore it, or take int8 or fp8"
        )
    w_FGg = w_FE.reshape(d_out, -1, group)
    largest = np.abs(w_FGg).max(axis=2)
    best, least = _scale(largest / 7.5, kind), np.full(largest.shape, np.inf, np.float32)
    for cut in _CUTS:
        scale = _scale(cut * largest / 7.5, kind)
        error = np.square(_rounded(w_FGg, scale) * scale.astype(np.float32)[..., None] - w_FGg).sum(axis=2)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    unsigned = _rounded(w_FGg, best).reshape(d_out, d_in) + 8
    return {
        f"{module}.weight_packed": packing.packed(unsigned, 4),
        f"{module}.weight_scale": best,
        f"{module}.weight_shape": np.array([d_out, d_in], np.int64),
    }


def _rounded(w_FGg: np.ndarray, scale_FG: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(w_FGg / scale_FG.astype(np.float32)[..., None]), -8, 7)
