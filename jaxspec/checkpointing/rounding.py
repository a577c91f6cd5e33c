"""Rounded weights in compressed-tensors' layout: llm-compressor's presets W8A8, FP8_DYNAMIC and W4A16.

How weights are rounded, models.rounding owns. Must not know models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.checkpointing import packing
from jaxspec.models import rounding

_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True, "num_bits": 8}


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
        if self.name == "pack-quantized":
            return _packed(module, weight_FE, self.weights["group_size"])
        rounded = rounding.fp8 if self.name == "float-quantized" else rounding.int8
        values, scale = rounded(weight_FE)
        return {f"{module}.weight": values, f"{module}.weight_scale": scale}


FORMATS = {
    "int8": Format("int-quantized", dict(num_bits=8, type="int", strategy="channel"), {**_TOKEN, "type": "int"}),
    "fp8": Format("float-quantized", dict(num_bits=8, type="float", strategy="channel"), {**_TOKEN, "type": "float"}),
    "int4-g128": Format("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=128)),
}


def _packed(module: str, w_FE: np.ndarray, group: int) -> dict[str, np.ndarray]:
    d_out, d_in = w_FE.shape
    if d_in % group:
        raise ValueError(
            f"{module!r} has {d_in} inputs, which groups of {group} do not divide; ignore it, or take int8 or fp8"
        )
    values, scale = rounding.int4(w_FE, group)
    return {
        f"{module}.weight_packed": packing.packed(values + 8, 4),
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": np.array([d_out, d_in], np.int64),
    }
