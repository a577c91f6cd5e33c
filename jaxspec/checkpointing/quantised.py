"""Quantised checkpoints: from `quantization_config` and the tensors of a format to `models.quantised.Quantised`.

Owns which modules are read as one, and what experts lie in one array; `formats` has the methods and their tensors.
Which layers are quantised, the file decides: a module whose weights lie there in bfloat16 stays as it is. Activations
are not quantised: what a checkpoint says of them (dynamic or `input_scale`) is for kernels that need it, and a product
without it is the more exact one.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpointing.formats import METHODS, Cut, Read, mxfp4_experts
from jaxspec.checkpointing.tensors import FLOATS, TensorReader, read_json
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised, joined
from jaxspec.models.weight_map import ExpertMaps, Part, StackedWeight, Weight

#: What says that a key-value cache is quantised: settings, and tensors of attention.
_CACHE_SETTINGS = "kv_cache_scheme", "kv_cache_quant_algo"
_CACHE_SCALES = r".*\.(k_proj\.(k_scale|output_scale)|v_proj\.(v_scale|output_scale)|\w*attn\.[kv]_(scale|zero_point))"
#: Scales of activations and of such a cache, which nothing here has a use for.
IGNORED = rf".*\.(input_scale|input_zero_point|input_global_scale)|{_CACHE_SCALES}"
_log = logging.getLogger(__name__)


def config_of(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A checkpoint's `quantization_config`, or what ModelOpt says in a file of its own.

    Raises:
      ValueError: that file is not as ModelOpt writes it.
    """
    apart = directory / "hf_quant_config.json"
    if config.get("quantization_config") or not apart.exists():
        return config.get("quantization_config")
    found = read_json(apart).get("quantization")
    if not isinstance(found, Mapping):
        raise ValueError(f"{apart} must have settings under 'quantization', got {found!r}")
    return {**found, "quant_method": "modelopt"}


def tell_of_cache(directory: Path, config: Mapping[str, Any] | None, names: Iterable[str]) -> None:
    """Says once if a checkpoint, its tensors of such names, wants its key-value cache quantised: it stays as it is."""
    asked = [f"{name} {config[name]!r}" for name in _CACHE_SETTINGS if config and config.get(name)]
    scales = sum(re.fullmatch(_CACHE_SCALES, name) is not None for name in names)
    if asked or scales:
        _log.warning(
            "%s: made for a quantised key-value cache (%s); it stays in the type of activations, which is more exact "
            "and takes more memory, and %d scales of it are left out",
            directory, ", ".join(asked) or "by its tensors", scales,
        )  # fmt: skip


def read_config(config: Mapping[str, Any] | None, int8_activations: bool = False) -> Read | None:
    """What reads the modules of a checkpoint by its `quantization_config`; None where it has none.

    Args:
      int8_activations: see EngineConfig; what is read refuses it where it is not for it.

    Raises:
      ValueError: a method, format or setting that is not served; names it.
    """
    if int8_activations and (config or {}).get("quant_method") in (None, "mxfp4"):
        found = "unquantised weights" if not config else "experts in MXFP4"
        raise ValueError(f"int8_activations is for int8 weights with a scale per output, got {found}")
    if not config:
        return None
    method = config.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"config.json: quant_method {method!r} is not served; served are {', '.join(map(repr, METHODS))}"
        )
    read = METHODS[method](config)
    return _rounding_inputs(read) if int8_activations else read


def _rounding_inputs(read: Read) -> Read:
    def rounding(
        reader: TensorReader, module: str, shape: tuple[int, int], cut: Cut | None = None, /
    ) -> Quantised | None:
        kernel = read(reader, module, shape, cut)
        if kernel is None:
            return None
        if not kernel.multiplies_integers:
            zeros = "no" if kernel.zero is None else "with"
            raise ValueError(
                f"{reader.directory}: int8_activations is for int8 weights with a scale per output and no zero points; "
                f"{module!r} has {kernel.values.dtype} in {kernel.groups} groups, {zeros} zero points"
            )
        return dataclasses.replace(kernel, int8_activations=True)

    return rounding


def read_kernel(read: Read, reader: TensorReader, weight: Weight, part: Part | None = None) -> Quantised | Mxfp4 | None:
    """The kernel of a linear map, its fused projections side by side, or of all experts; None: it is not quantised.

    Args:
      part: of a linear map, whose values alone are a device's then, see `Read`.

    Raises:
      ValueError: tensors that do not fit, or projections that are not quantised alike; names them.
    """
    if isinstance(weight, ExpertMaps):
        return mxfp4_experts(reader, weight)
    if not weight.linear:
        return None
    if isinstance(weight, StackedWeight):
        return _stacked_experts(read, reader, weight)
    return _side_by_side(read, reader, weight.names, list(weight.shapes), _cuts(weight, part))


def _cuts(weight: Weight, part: Part | None) -> list[Cut | None]:
    """A device's part of each module that a linear map is made of."""
    if part is None:
        return [None] * len(weight.names)
    if part.axis == 0:
        return [Cut(True, part.spans)] * len(weight.names)
    spans: list[list[tuple[int, int]]] = [[] for _ in weight.names]
    for i, start, stop in weight.side_by_side(part.spans):
        spans[i].append((start, stop))
    return [Cut(False, tuple(own)) for own in spans]


def _stacked_experts(read: Read, reader: TensorReader, weight: StackedWeight) -> Quantised | None:
    """The experts of a layer, along the first axis of every array."""
    if weight.names == (weight.fused,):
        if reader.dtype(weight.fused) not in FLOATS:
            raise ValueError(
                f"{reader.directory}: {weight.fused!r} is quantised, all experts in one, which is not served; served "
                "are a tensor for each expert"
            )
        return None
    shapes, each = list(weight.shapes), len(weight.widths)
    found = [
        _side_by_side(read, reader, weight.names[i : i + each], shapes[i : i + each], [None] * each)
        for i in range(0, len(shapes), each)
    ]
    forms = [str(jax.tree.map(lambda x: (x.shape, x.dtype), part)) for part in found]
    other = next((i for i, form in enumerate(forms) if form != forms[0]), None)
    if other is not None:
        raise ValueError(
            f"{reader.directory}: {weight.names[0]!r} and {weight.names[other * each]!r} are quantised in different "
            "ways, and lie in one array; quantise all experts of a layer alike"
        )
    if found[0] is None:
        return None
    return jax.tree.map(lambda *parts: jnp.stack(parts), *found)


def _side_by_side(
    read: Read, reader: TensorReader, names: Sequence[str], expected: Sequence[tuple[int, ...]],
    cuts: Sequence[Cut | None],
) -> Quantised | None:  # fmt: skip
    modules = [name.removesuffix(".weight") for name in names]
    for name, module in zip(names, modules, strict=True):
        twice = [f"{module}.{other}" for other in ("weight_packed", "qweight") if f"{module}.{other}" in reader]
        if twice and (name in reader or len(twice) > 1):
            raise ValueError(f"{reader.directory} holds {module!r} twice: {name!r} and {', '.join(map(repr, twice))}")
    shapes = [(shape[0], shape[1]) for shape in expected]
    parts = [read(reader, *module) for module in zip(modules, shapes, cuts, strict=True)]
    found = [part for part in parts if part is not None]
    if not found:
        return None
    if len(found) < len(parts):
        plain = [module for module, part in zip(modules, parts, strict=True) if part is None]
        raise ValueError(
            f"{reader.directory}: {', '.join(plain)} is not quantised but {', '.join(set(modules) - set(plain))} is, "
            "and they are multiplied as one; quantise all of them or none"
        )
    alike = {(str(p.values.dtype), p.groups) for p in found}
    if len(alike) > 1:
        raise ValueError(f"{reader.directory}: {', '.join(modules)} are quantised in different ways: {sorted(alike)}")
    if len({None if p.order is None else np.asarray(p.order).tobytes() for p in found}) > 1:
        raise ValueError(
            f"{reader.directory}: {', '.join(modules)} read the same inputs but order them differently (g_idx), "
            "which is not served"
        )
    return joined(found)
