"""How formats of quantised checkpoints call, pack and scale a module's tensors, and what reads them.

Owns the methods of a `quantization_config` and their tensors: fp8 (DeepSeek, Qwen), compressed-tensors
(llm-compressor), ModelOpt's FP8 and NVFP4, AWQ's GEMM layout, GPTQ, MXFP4 experts. Must not know which modules are
multiplied as one (`quantised`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxspec.checkpointing import packing
from jaxspec.checkpointing.schemes import Scheme, bits_of, group_of, groups_of, matches, pair_of, scheme_of, targets_of
from jaxspec.checkpointing.tensors import FLOAT8, FLOATS, TensorReader
from jaxspec.models import mxfp4
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised
from jaxspec.models.weight_map import ExpertMaps, Piece

#: Formats of compressed-tensors that are served; the third is what both before it were called once.
_COMPRESSED = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
#: ModelOpt's algorithms, and inputs that share a scale in the second if it does not say.
_MODELOPT, _NVFP4_GROUP = ("FP8", "NVFP4"), 16


@dataclasses.dataclass(frozen=True)
class Cut:
    """Which of a module's values a device holds: spans (start, stop) of the inputs, or else of the outputs."""

    inputs: bool
    spans: tuple[tuple[int, int], ...]

    def of(self, values_FE: np.ndarray) -> np.ndarray:
        """Of all values those."""
        parts = [values_FE[:, a:b] if self.inputs else values_FE[a:b] for a, b in self.spans]
        return np.concatenate(parts, axis=1 if self.inputs else 0)


class Read(Protocol):
    """A module's kernel [in, out] from its tensors, or None where it lies there unquantised."""

    def __call__(
        self, reader: TensorReader, module: str, shape: tuple[int, int], cut: Cut | None = None, /
    ) -> Quantised | None:
        """With a cut the values alone are cut: their scales, zeros and order are small, and stay whole.

        Args:
          shape: (out, in), of all values.
        """
        ...


# Methods.


def _fp8(config: Mapping[str, Any]) -> Read:
    fmt = config.get("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"config.json: quantization_config.fmt must be 'e4m3', got {fmt!r}")
    block = config.get("weight_block_size")
    scheme = Scheme("float", 8, block=None if block is None else pair_of(block, "weight_block_size"), whole=not block)
    return lambda reader, module, shape, cut=None, /: _natural(reader, module, shape, cut, scheme)


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
    if transforms := config.get("transform_config"):
        raise ValueError(f"config.json: quantization_config.transform_config is not served, got {transforms!r}")
    schemes = [(targets_of(g, name), scheme_of(g.get("weights"), name)) for name, g in groups.items()]
    ignored = config.get("ignore") or []

    def read(reader: TensorReader, module: str, shape: tuple[int, int], cut: Cut | None = None, /) -> Quantised | None:
        packed = f"{module}.weight_packed" in reader
        if not packed and reader.dtype(f"{module}.weight") in FLOATS:
            return None
        found = [scheme for targets, scheme in schemes if matches(module, targets)]
        # A name says more than "Linear".
        named = [scheme for targets, scheme in schemes if matches(module, [t for t in targets if t != "Linear"])]
        if not found or matches(module, ignored):
            raise ValueError(
                f"{reader.directory}: {module!r} is quantised, but config.json has no group for it "
                f"(targets {[t for targets, _ in schemes for t in targets]}, ignore {ignored})"
            )
        scheme = (named or found)[0]
        if (scheme.kind, scheme.bits) == ("float", 4):
            return _float4(reader, module, shape, cut, scheme.group, "weight_packed", "weight_global_scale")
        return (_packed if packed else _natural)(reader, module, shape, cut, scheme)

    return read


def _modelopt(config: Mapping[str, Any]) -> Read:
    """NVIDIA's: the second scale of NVFP4 multiplies, where compressed-tensors' divides."""
    algorithm = config.get("quant_algo")
    if algorithm not in _MODELOPT:
        raise ValueError(f"config.json: quant_algo {algorithm!r} is not served; served are {_MODELOPT}")
    if algorithm == "FP8":
        scheme = Scheme("float", 8, whole=True)
        return lambda reader, module, shape, cut=None, /: _natural(reader, module, shape, cut, scheme)
    group = group_of({"group_size": config.get("group_size") or _NVFP4_GROUP}, "group_size")

    def read(reader: TensorReader, module: str, shape: tuple[int, int], cut: Cut | None = None, /) -> Quantised | None:
        if reader.dtype(f"{module}.weight") in FLOATS:
            return None
        return _float4(reader, module, shape, cut, group, "weight", "weight_scale_2")

    return read


def _awq(config: Mapping[str, Any]) -> Read:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"config.json: AWQ's version must be 'gemm', got {version!r}")
    bits, group = bits_of(config.get("bits", config.get("w_bit")), (4,)), group_of(config, "q_group_size")

    def read(reader: TensorReader, module: str, shape: tuple[int, int], cut: Cut | None = None, /) -> Quantised | None:
        if f"{module}.qweight" not in reader:
            return None
        d_out, d_in = shape
        groups = groups_of(module, d_in, group)
        stored, rest = _stored(reader, f"{module}.qweight", (d_in, d_out // 8), ("I32",), cut, (1, 8), (0, 1))
        zeros = packing.words(reader.get(f"{module}.qzeros", (groups, d_out // 8), ("I32",)), packing.AWQ)
        scale = reader.get(f"{module}.scales", (groups, d_out))
        return _kernel(packing.words(stored, packing.AWQ).T, bits, scale, zeros, cut=rest)

    return read


def _gptq(config: Mapping[str, Any]) -> Read:
    form = config.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"config.json: checkpoint_format must be 'gptq' or 'gptq_v2', got {form!r}")
    if config.get("dynamic"):
        raise ValueError(f"config.json: settings by module (dynamic) are not served, got {config['dynamic']!r}")
    bits, group = bits_of(config.get("bits"), (4, 8)), group_of(config, "group_size")
    each = 32 // bits

    def read(reader: TensorReader, module: str, shape: tuple[int, int], cut: Cut | None = None, /) -> Quantised | None:
        if f"{module}.qweight" not in reader:
            return None
        d_out, d_in = shape
        groups = groups_of(module, d_in, group)
        order = _order(reader, f"{module}.g_idx", module, d_in, groups)
        rows, rest = _stored(
            reader, f"{module}.qweight", (d_in // each, d_out), ("I32",), cut, (1, 1), (0, each), order
        )
        zeros = packing.unpacked(reader.get(f"{module}.qzeros", (groups, d_out // each), ("I32",)), bits)
        scale = reader.get(f"{module}.scales", (groups, d_out))
        # The older format stores zeros less one.
        return _kernel(packing.unpacked(rows.T, bits), bits, scale, zeros + (form == "gptq"), order, rest)

    return read


def _mxfp4(config: Mapping[str, Any]) -> Read:
    """Of experts alone, which `read_kernel` knows by their tensors; linear maps are as they are."""
    return lambda reader, module, shape, cut=None, /: None


def mxfp4_experts(reader: TensorReader, weight: ExpertMaps) -> Mxfp4 | None:
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
    groups, order = d_in // mxfp4.BLOCK, weight.gates_first(d_out)
    codes = reader.get(blocks, (count, d_out, groups, mxfp4.BLOCK // 2), ("U8",)).reshape(count, d_out, d_in // 2)
    scale = reader.get(scales, (count, d_out, groups), ("U8",))
    if scale.max() == 255:
        raise ValueError(f"tensor {scales!r} in {reader.directory} has scales that are not numbers (255)")
    turned = lambda x_XFG: jnp.asarray(x_XFG[:, order]).transpose(0, 2, 1)
    return Mxfp4(turned(codes), turned(scale))


METHODS: dict[str, Callable[[Mapping[str, Any]], Read]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


# Tensors.


def _stored(
    reader: TensorReader, name: str, shape: tuple[int, int], dtypes: Collection[str], cut: Cut | None,
    outputs: tuple[int, int] = (0, 1), inputs: tuple[int, int] = (1, 1), order: np.ndarray | None = None,
) -> tuple[np.ndarray, Cut | None]:  # fmt: skip
    """A tensor of values, or what of it holds a device's, and what is still to be cut of these.

    Args:
      outputs, inputs: (the tensor's axis, how many values along it lie in one word).
      order: of the inputs; a device's are then anywhere in the file.
    """
    if cut is None:
        return reader.get(name, shape, dtypes), None
    axis, each = inputs if cut.inputs else outputs
    if (cut.inputs and order is not None) or any(edge % each for span in cut.spans for edge in span):
        return reader.get(name, shape, dtypes), cut
    whole = Piece(name, shape)
    parts = [reader.get(name, shape, dtypes, whole.along(axis, a // each, b // each).part) for a, b in cut.spans]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis), None


def _natural(
    reader: TensorReader, module: str, shape: tuple[int, int], cut: Cut | None, scheme: Scheme
) -> Quantised | None:
    """Weights in a type of their own, fp8 or int8, [out, in]."""
    name = f"{module}.weight"
    if reader.dtype(name) in FLOATS:
        return None
    values, _ = _stored(reader, name, shape, (FLOAT8,) if scheme.kind == "float" else ("I8",), cut)
    scale = _scale(reader, module, shape, scheme)
    zero = None
    if f"{module}.weight_zero_point" in reader:
        zero = reader.get(f"{module}.weight_zero_point", _scale_shapes(shape, scheme)[0], ("I8",)).T
        zero = np.broadcast_to(zero, scale.shape) if np.any(zero) else None
    return _device(values, scale, zero)


def _packed(reader: TensorReader, module: str, shape: tuple[int, int], cut: Cut | None, scheme: Scheme) -> Quantised:
    """compressed-tensors' pack-quantized: offset integers in words of 32 bits along the inputs."""
    d_out, d_in = shape
    if scheme.kind != "int" or scheme.block is not None:
        raise ValueError(f"{reader.directory}: {module!r} is packed, which is for integers, got {scheme}")
    each = 32 // scheme.bits
    said = reader.get(f"{module}.weight_shape", (2,), ("I64", "I32"))
    if tuple(said) != shape:
        raise ValueError(f"tensor '{module}.weight_shape' says {tuple(said.tolist())}; config.json asks for {shape}")
    scale = _scale(reader, module, shape, scheme)
    groups, zeros = scale.shape[0], None
    order = _order(reader, f"{module}.weight_g_idx", module, d_in, groups)
    packed = f"{module}.weight_packed", (d_out, -(-d_in // each)), ("I32",)
    words, rest = _stored(reader, *packed, cut, inputs=(1, each), order=order)
    if f"{module}.weight_zero_point" in reader:
        stored = reader.get(f"{module}.weight_zero_point", (-(-d_out // each), groups), ("I32",))
        zeros = packing.unpacked(stored.T, scheme.bits)[:, :d_out]
    return _kernel(packing.unpacked(words, scheme.bits)[:, :d_in], scheme.bits, scale, zeros, order, rest)


def _float4(
    reader: TensorReader, module: str, shape: tuple[int, int], cut: Cut | None, group: int | None, values: str,
    factor: str,
) -> Quantised:  # fmt: skip
    """NVFP4: e2m1, two in a byte, the first low; a float8 scale for each group, and one of float32 for all.

    Args:
      values, factor: names of the first and the last. compressed-tensors divides by its `weight_global_scale`.
    """
    d_out, d_in = shape
    groups = groups_of(module, d_in, group)
    codes, rest = _stored(reader, f"{module}.{values}", (d_out, d_in // 2), ("U8",), cut, inputs=(1, 2))
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    nibbles = nibbles if rest is None else rest.of(nibbles)
    name = f"{module}.{factor}"
    whole = reader.get(name, reader.shape(name) if name in reader and math.prod(reader.shape(name)) == 1 else (1,))
    whole = whole.astype(np.float32).reshape(())
    scale = reader.get(f"{module}.weight_scale", (d_out, groups), (FLOAT8,)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = scale / whole if factor == "weight_global_scale" else scale * whole
    if not np.isfinite(scale).all():
        raise ValueError(f"{reader.directory}: scales of {module!r} ({factor} {whole}) are not all numbers")
    return _device(nibbles.view(ml_dtypes.float4_e2m1fn), scale.T, None)


def _kernel(
    unsigned_FE: np.ndarray, bits: int, scale_GF: np.ndarray, zeros_GF: np.ndarray | None,
    order: np.ndarray | None = None, cut: Cut | None = None,
) -> Quantised:  # fmt: skip
    """From values and zeros as they were packed, unsigned; no zeros: the middle of the range."""
    middle = 1 << (bits - 1)
    values = np.subtract(unsigned_FE, np.uint8(middle)).view(np.int8)  # wraps to what is meant
    # Of 8 bits they are bytes even where one was added: 255, which was 0 less one, is 0 again.
    zero = None if zeros_GF is None else (zeros_GF.astype(np.int16) - middle).astype(np.int8)
    if order is not None:
        values = values[:, order]
    if cut is not None:
        values = cut.of(values)
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
        groups_of(module, d_in, scheme.group)
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
