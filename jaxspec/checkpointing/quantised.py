"""Quantised checkpoints: from `quantization_config` and the tensors of a format to `models.quantised.Quantised`.

Owns what each format calls its tensors, how it packs them and what its scales mean: fp8 (DeepSeek, Qwen),
compressed-tensors (llm-compressor), AWQ's GEMM layout, GPTQ, MXFP4 experts. Which layers are quantised, the file
decides: a module whose weights lie there in bfloat16 stays as it is. Activations are not quantised: what a checkpoint
says of them (dynamic or `input_scale`) is for kernels that need it, and a product without it is the more exact one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpointing import packing
from jaxspec.checkpointing.tensors import FLOAT8, FLOATS, TensorReader
from jaxspec.models import mxfp4
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised, joined
from jaxspec.models.weight_map import ExpertMaps, StackedWeight, Weight

#: Scales of activations, which products here have no use for.
IGNORED = r".*\.(input_scale|input_zero_point)"
#: Formats of compressed-tensors that are served; the third is what both before it were called once.
_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the weights of a module are quantised, as a config says it.

    Attributes:
      kind: "int" or "float". bits: 4 or 8.
      group: inputs that share a scale; None: all of them.
      block: (outputs, inputs) that share one; None: no blocks. whole: the whole tensor has one scale.
    """

    kind: str
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    whole: bool = False


#: A module's kernel [in, out] from its tensors, or None where it lies there unquantised.
Read = Callable[[TensorReader, str, tuple[int, int]], Quantised | None]


def read_config(config: Mapping[str, Any] | None) -> Read | None:
    """What reads the modules of a checkpoint by its `quantization_config`; None where it has none.

    Raises:
      ValueError: a method, format or setting that is not served; names it.
    """
    if not config:
        return None
    method = config.get("quant_method")
    if method not in _METHODS:
        raise ValueError(
            f"config.json: quant_method {method!r} is not served; served are {', '.join(map(repr, _METHODS))}"
        )
    return _METHODS[method](config)


def read_kernel(read: Read, reader: TensorReader, weight: Weight) -> Quantised | Mxfp4 | None:
    """The kernel of a linear map, its fused projections side by side, or of all experts; None: it is not quantised.

    Raises:
      ValueError: tensors that do not fit, or projections that are not quantised alike; names them.
    """
    if isinstance(weight, ExpertMaps):
        return _mxfp4_experts(reader, weight)
    if not weight.linear:
        return None
    if isinstance(weight, StackedWeight):
        return _stacked_experts(read, reader, weight)
    return _side_by_side(read, reader, weight.names, list(weight.shapes))


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
        _side_by_side(read, reader, weight.names[i : i + each], shapes[i : i + each])
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
    read: Read, reader: TensorReader, names: Sequence[str], expected: Sequence[tuple[int, ...]]
) -> Quantised | None:
    modules = [name.removesuffix(".weight") for name in names]
    for name, module in zip(names, modules, strict=True):
        twice = [f"{module}.{other}" for other in ("weight_packed", "qweight") if f"{module}.{other}" in reader]
        if twice and (name in reader or len(twice) > 1):
            raise ValueError(f"{reader.directory} holds {module!r} twice: {name!r} and {', '.join(map(repr, twice))}")
    shapes = [(shape[0], shape[1]) for shape in expected]
    parts = [read(reader, module, shape) for module, shape in zip(modules, shapes, strict=True)]
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


# Methods.


def _fp8(config: Mapping[str, Any]) -> Read:
    fmt = config.get("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"config.json: quantization_config.fmt must be 'e4m3', got {fmt!r}")
    block = config.get("weight_block_size")
    scheme = Scheme("float", 8, block=None if block is None else _pair(block, "weight_block_size"), whole=not block)
    return lambda reader, module, shape: _natural(reader, module, shape, scheme)


def _compressed(config: Mapping[str, Any]) -> Read:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"config.json: quantization_config.config_groups must name groups, got {groups!r}")
    formats = [config.get("format"), *(g.get("format") for g in groups.values() if isinstance(g, Mapping))]
    for name in [f for f in formats if f is not None]:
        if name not in _COMPRESSED:
            raise ValueError(
                f"config.json: compressed-tensors' format {name!r} is not served; served are {_COMPRESSED}"
            )
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise ValueError(f"config.json: sparsity_config.format must be 'dense', got {sparse!r}")
    for name in ("kv_cache_scheme", "transform_config"):
        if config.get(name):
            raise ValueError(f"config.json: quantization_config.{name} is not served, got {config[name]!r}")
    schemes = [(_targets(g, name), _scheme(g.get("weights"), name)) for name, g in groups.items()]
    ignored = config.get("ignore") or []

    def read(reader: TensorReader, module: str, shape: tuple[int, int]) -> Quantised | None:
        packed = f"{module}.weight_packed" in reader
        if not packed and reader.dtype(f"{module}.weight") in FLOATS:
            return None
        found = [scheme for targets, scheme in schemes if _matches(module, targets)]
        if not found or _matches(module, ignored):
            raise ValueError(
                f"{reader.directory}: {module!r} is quantised, but config.json has no group for it "
                f"(targets {[t for targets, _ in schemes for t in targets]}, ignore {ignored})"
            )
        return (_packed if packed else _natural)(reader, module, shape, found[0])

    return read


def _awq(config: Mapping[str, Any]) -> Read:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"config.json: AWQ's version must be 'gemm', got {version!r}")
    bits, group = _bits(config.get("bits", config.get("w_bit")), (4,)), _group(config, "q_group_size")

    def read(reader: TensorReader, module: str, shape: tuple[int, int]) -> Quantised | None:
        if f"{module}.qweight" not in reader:
            return None
        d_out, d_in = shape
        groups = _groups(module, d_in, group)
        words = packing.words(reader.get(f"{module}.qweight", (d_in, d_out // 8), ("I32",)), packing.AWQ)
        zeros = packing.words(reader.get(f"{module}.qzeros", (groups, d_out // 8), ("I32",)), packing.AWQ)
        scale = reader.get(f"{module}.scales", (groups, d_out))
        return _kernel(words.T, bits, scale, zeros)

    return read


def _gptq(config: Mapping[str, Any]) -> Read:
    form = config.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"config.json: checkpoint_format must be 'gptq' or 'gptq_v2', got {form!r}")
    if config.get("dynamic"):
        raise ValueError(f"config.json: settings by module (dynamic) are not served, got {config['dynamic']!r}")
    bits, group = _bits(config.get("bits"), (4, 8)), _group(config, "group_size")
    each = 32 // bits

    def read(reader: TensorReader, module: str, shape: tuple[int, int]) -> Quantised | None:
        if f"{module}.qweight" not in reader:
            return None
        d_out, d_in = shape
        groups = _groups(module, d_in, group)
        rows = reader.get(f"{module}.qweight", (d_in // each, d_out), ("I32",))
        zeros = packing.unpacked(reader.get(f"{module}.qzeros", (groups, d_out // each), ("I32",)), bits)
        scale = reader.get(f"{module}.scales", (groups, d_out))
        order = _order(reader, f"{module}.g_idx", module, d_in, groups)
        # The older format stores zeros less one.
        return _kernel(packing.unpacked(rows.T, bits), bits, scale, zeros + (form == "gptq"), order)

    return read


def _mxfp4(config: Mapping[str, Any]) -> Read:
    """Of experts alone, which `read_kernel` knows by their tensors; linear maps are as they are."""
    return lambda reader, module, shape: None


def _mxfp4_experts(reader: TensorReader, weight: ExpertMaps) -> Mxfp4 | None:
    """gpt-oss' `{name}_blocks` [X, out, in / 32, 16] and `{name}_scales` [X, out, in / 32], both uint8."""
    (name,), (shape,) = weight.names, weight.shapes
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    if blocks not in reader:
        return None
    if name in reader:
        raise ValueError(f"{reader.directory} holds {name!r} twice: as it is and as {blocks!r}")
    count, d_in, d_out = shape
    if d_in % mxfp4.BLOCK:
        raise ValueError(f"{name!r} has {d_in} inputs, which blocks of {mxfp4.BLOCK} do not divide")
    groups, order = d_in // mxfp4.BLOCK, weight.gates_first()
    codes = reader.get(blocks, (count, d_out, groups, mxfp4.BLOCK // 2), ("U8",)).reshape(count, d_out, d_in // 2)
    scale = reader.get(scales, (count, d_out, groups), ("U8",))
    if scale.max() == 255:
        raise ValueError(f"tensor {scales!r} in {reader.directory} has scales that are not numbers (255)")
    turned = lambda x_XFG: jnp.asarray(x_XFG[:, order]).transpose(0, 2, 1)
    return Mxfp4(turned(codes), turned(scale))


_METHODS: dict[str, Callable[[Mapping[str, Any]], Read]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


# Tensors.


def _natural(reader: TensorReader, module: str, shape: tuple[int, int], scheme: Scheme) -> Quantised | None:
    """Weights in a type of their own, fp8 or int8, [out, in]."""
    name = f"{module}.weight"
    if reader.dtype(name) in FLOATS:
        return None
    values = reader.get(name, shape, (FLOAT8,) if scheme.kind == "float" else ("I8",))
    scale = _scale(reader, module, shape, scheme)
    zero = None
    if f"{module}.weight_zero_point" in reader:
        zero = reader.get(f"{module}.weight_zero_point", _scale_shapes(shape, scheme)[0], ("I8",)).T
        zero = np.broadcast_to(zero, scale.shape) if np.any(zero) else None
    return _device(values, scale, zero)


def _packed(reader: TensorReader, module: str, shape: tuple[int, int], scheme: Scheme) -> Quantised:
    """compressed-tensors' pack-quantized: offset integers in words of 32 bits along the inputs."""
    d_out, d_in = shape
    if scheme.kind != "int" or scheme.block is not None:
        raise ValueError(f"{reader.directory}: {module!r} is packed, which is for integers, got {scheme}")
    each = 32 // scheme.bits
    said = reader.get(f"{module}.weight_shape", (2,), ("I64", "I32"))
    if tuple(said) != shape:
        raise ValueError(f"tensor '{module}.weight_shape' says {tuple(said.tolist())}; config.json asks for {shape}")
    words = reader.get(f"{module}.weight_packed", (d_out, -(-d_in // each)), ("I32",))
    scale = _scale(reader, module, shape, scheme)
    groups, zeros = scale.shape[0], None
    if f"{module}.weight_zero_point" in reader:
        stored = reader.get(f"{module}.weight_zero_point", (-(-d_out // each), groups), ("I32",))
        zeros = packing.unpacked(stored.T, scheme.bits)[:, :d_out]
    order = _order(reader, f"{module}.weight_g_idx", module, d_in, groups)
    return _kernel(packing.unpacked(words, scheme.bits)[:, :d_in], scheme.bits, scale, zeros, order)


def _kernel(
    unsigned_FE: np.ndarray, bits: int, scale_GF: np.ndarray, zeros_GF: np.ndarray | None,
    order: np.ndarray | None = None,
) -> Quantised:  # fmt: skip
    """From values and zeros as they were packed, unsigned; no zeros: the middle of the range."""
    middle = 1 << (bits - 1)
    values = np.subtract(unsigned_FE, np.uint8(middle)).view(np.int8)  # wraps to what is meant
    zero = None if zeros_GF is None else zeros_GF.astype(np.int16) - middle
    if zero is not None and bits == 4:
        zero = zero.astype(np.int8)
    if order is not None:
        values = values[:, order]
    return _device(values, scale_GF, zero if zero is not None and np.any(zero) else None, order, bits)


def _device(
    values_FE: np.ndarray, scale_GF: np.ndarray, zero_GF: np.ndarray | None, order: np.ndarray | None = None,
    bits: int = 8,
) -> Quantised:  # fmt: skip
    values = _turned(jnp.asarray(values_FE), jnp.dtype(jnp.int4 if bits == 4 else values_FE.dtype))
    optional = lambda x: None if x is None else jnp.asarray(x)
    return Quantised(values, jnp.asarray(scale_GF), optional(zero_GF), optional(order))


_turned = jax.jit(lambda values_FE, dtype: values_FE.T.astype(dtype), static_argnums=1)


def _scale_shapes(shape: tuple[int, int], scheme: Scheme) -> list[tuple[int, ...]]:
    """Those that a scheme's scales may have in a file."""
    d_out, d_in = shape
    if scheme.whole:
        return [(1,), (), (1, 1)]
    if scheme.block is not None:
        return [(-(-d_out // scheme.block[0]), -(-d_in // scheme.block[1]))]
    if scheme.group is not None:
        return [(d_out, -(-d_in // scheme.group))]
    return [(d_out, 1), (d_out,)]


def _scale(reader: TensorReader, module: str, shape: tuple[int, int], scheme: Scheme) -> np.ndarray:
    """The scales as [G, out], in their own type."""
    d_out, d_in = shape
    # `weight_scale_inv` is a multiplier like the other, whatever its name says.
    name = reader.first(f"{module}.weight_scale_inv", f"{module}.weight_scale") or f"{module}.weight_scale"
    found = reader.shape(name)
    shapes = _scale_shapes(shape, scheme)
    if found not in shapes:
        raise ValueError(
            f"tensor {name!r} in {reader.directory} has shape {found}; for weights {shape} and {scheme} it must be one "
            f"of {shapes}"
        )
    scale = reader.get(name, found)
    if scheme.whole:
        return np.broadcast_to(scale.reshape(1, 1).astype(np.float32), (1, d_out))
    if scheme.block is None:
        _groups(module, d_in, scheme.group)
        return scale.reshape(d_out, -1).T
    rows, columns = scheme.block
    # A scale for each output and group of inputs; groups are as large as divide the inputs.
    group = math.gcd(d_in, columns)
    spread = np.repeat(np.repeat(scale, rows, axis=0)[:d_out], columns // group, axis=1)
    return spread[:, : d_in // group].T


def _order(reader: TensorReader, name: str, module: str, d_in: int, groups: int) -> np.ndarray | None:
    """The inputs in the order of their groups, where a checkpoint has these mixed (act-order)."""
    if name not in reader:
        return None
    g_idx = reader.get(name, (d_in,), ("I32", "I64"))
    size = d_in // groups
    if np.array_equal(g_idx, np.arange(d_in) // size) or np.all(g_idx == -1):
        return None
    if g_idx.min() < 0 or g_idx.max() >= groups or np.any(np.bincount(g_idx, minlength=groups) != size):
        raise ValueError(f"tensor {name!r} must put {size} inputs of {module!r} into each of {groups} groups")
    return np.argsort(g_idx, kind="stable").astype(np.int32)


# What configs say.


def _scheme(weights: Any, group: str) -> Scheme:
    where = f"config.json: quantization_config.config_groups.{group}.weights"
    if not isinstance(weights, Mapping):
        raise ValueError(f"{where} must say how weights are quantised, got {weights!r}")
    kind, bits, size = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise ValueError(f"{where}: {kind!r} of {bits!r} bits is not served; served are int 4, int 8 and float 8")
    if weights.get("dynamic"):
        raise ValueError(f"{where}: dynamic must be false, got {weights['dynamic']!r}")
    strategy = weights.get("strategy") or ("group" if (size or 0) > 0 else "channel" if size == -1 else "tensor")
    if strategy == "group":
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{where}: strategy 'group' needs a positive group_size, got {size!r}")
        return Scheme(kind, bits, group=size)
    if strategy == "block":
        return Scheme(kind, bits, block=_pair(weights.get("block_structure"), "block_structure"))
    if strategy not in ("tensor", "channel"):
        raise ValueError(f"{where}: strategy must be tensor, channel, group or block, got {strategy!r}")
    return Scheme(kind, bits, whole=strategy == "tensor")


def _targets(group: Any, name: str) -> Sequence[str]:
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise ValueError(
            f"config.json: quantization_config.config_groups.{name}.targets must be names, got {targets!r}"
        )
    return targets


def _matches(module: str, names: Sequence[str]) -> bool:
    """Names of modules, "Linear" for all, and regular expressions after "re:"."""
    return any(
        re.match(n.removeprefix("re:"), module) is not None if n.startswith("re:") else n in (module, "Linear")
        for n in names
    )


def _bits(bits: Any, served: Sequence[int]) -> int:
    if bits not in served:
        raise ValueError(f"config.json: quantization_config.bits must be one of {list(served)}, got {bits!r}")
    return bits


def _group(config: Mapping[str, Any], old: str) -> int | None:
    size = config.get("group_size", config.get(old))
    if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1:
        raise ValueError(f"config.json: quantization_config.group_size must be positive or -1, got {size!r}")
    return None if size == -1 else size


def _groups(module: str, d_in: int, group: int | None) -> int:
    if group is not None and d_in % group:
        raise ValueError(f"{module!r} has {d_in} inputs, which groups of {group} do not divide")
    return 1 if group is None else d_in // group


def _pair(value: Any, name: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise ValueError(f"config.json: quantization_config: {name} must be two positive integers, got {value!r}")
    return value[0], value[1]
