"""Decoder layers for few rows by the small-batch kernels: six launches a layer instead of some seventeen on a GPU.

Devices that share the weights run the same kernels on their own columns and inputs; what each has of the two sums of a
layer is added up between them.

Owns which models that fits, and the order of the launches. Must not know what a kernel does inside. Rounding differs
from the layers' own (a norm divides after the product), and is the same for every number of rows that the kernels
serve: what a row becomes does not depend on how many are verified beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxspec.models.base import Attend, ModelConfig
from jaxspec.models.layers import MLP, Linear, Transformer
from jaxspec.models.quantised import Quantised
from jaxspec.models.rope import Tables, apply_rope
from jaxspec.models.sharded import BY_XLA, SPLIT, SUMS, TENSOR_AXIS, summed
from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import gpu, packed, reference
from pallas_kernels.small_batch.packed import Packed
from pallas_kernels.small_batch.reference import TILE, Stream

#: Rows that the kernels are faster with than XLA's products and what it does around them (docs/kernels.md).
MOST_ROWS = 32
#: What the kernels' order of operations leaves no room for, as `ModelConfig` names it: defaults only.
_PLAIN = (
    "attention_bias", "output_bias", "mlp_bias", "qk_norm", "pre_norms", "post_norms", "norm_gain", "hidden_act",
    "residual_scale", "partial_rotary_factor", "rope_interleaved", "no_rope_layers", "local_rope_theta",
)  # fmt: skip
#: Width of a head whose halves are one tile each, so that a product can rotate it.
_ROTATED = 2 * TILE


@dataclasses.dataclass(frozen=True)
class FewRows:
    """What a prepared model runs its layers by.

    Attributes:
      implementation: "gpu" or "reference".
      most: rows up to which it does.
    """

    implementation: str = "gpu"
    most: int = MOST_ROWS

    def layers(
        self, model: Transformer, x_BNE: jax.Array, ropes: Sequence[Tables | None], attend: Attend
    ) -> list[jax.Array]:
        """The residual stream before each layer and after the last, [B, N, E] each."""
        rope = ropes[0]  # of every layer, in models that are served
        assert rope is not None
        first = model.layers[0].attn
        sums = first.out.kernel.get_metadata(SUMS, BY_XLA)
        ways = _Ways(gpu if self.implementation == "gpu" else reference, first.shards, sums)
        b, n, e = x_BNE.shape
        m = b * n
        padded = m if m <= 8 else round_up(m, 8)  # the kernels' copies want whole groups of 8 rows, or less than one
        pad = lambda x: jnp.pad(x, ((0, padded - m), (0, 0)))
        # [C/2, rows], a column for each token, and as many as the kernels pad to.
        tables = tuple(jnp.pad(t.reshape(m, -1).T, ((0, 0), (0, -m % 8))) for t in rope)
        gains = [*(_gain(layer.attn_norm) for layer in model.layers), _gain(model.norm)]
        stream = reference.begin(pad(x_BNE.reshape(m, e)), gains[0])
        streams = [x_BNE]
        for i, layer in enumerate(model.layers):
            attn, eps, t = layer.attn, model.norm.eps, layer.attn.shards
            counts = (attn.num_heads, attn.num_kv_heads, attn.num_kv_heads)
            if attn.head_dim == _ROTATED:
                parts = ways.heads(stream, attn.qkv.kernel[...], tables, counts, eps)
                q, k, v = (p[:m].reshape(b, n, c, attn.head_dim) for p, c in zip(parts, counts, strict=True))
            else:
                qkv = ways.project(stream, attn.qkv.kernel[...], eps)[:m].reshape(b, n, sum(counts), attn.head_dim)
                groups = qkv.reshape(b, n, t, sum(counts) // t, attn.head_dim)
                parts = jnp.split(groups, [counts[0] // t, (counts[0] + counts[1]) // t], axis=3)
                q, k, v = (part.reshape(b, n, -1, attn.head_dim) for part in parts)
                q, k = apply_rope(q, rope), apply_rope(k, rope)
            out = pad(attend(i, q, k, v, attn.options).reshape(m, -1))
            stream = ways.add(out, attn.out.kernel[...], stream.h_ME, _gain(layer.mlp_norm))
            hidden = ways.swiglu(stream, layer.mlp.gate_up.kernel[...], eps)
            stream = ways.add(hidden, layer.mlp.down.kernel[...], stream.h_ME, gains[i + 1])
            streams.append(stream.h_ME[:m].reshape(b, n, e))
        return streams


@dataclasses.dataclass(frozen=True)
class _Ways:
    """The products of a layer by one implementation, on one device or by each of several on its own part.

    Attributes:
      own: a module of functions as `pallas_kernels.small_batch.reference`'s.
      sums: see `sharded.summed`.
    """

    own: Any
    shards: int
    sums: str

    def _each(self, fn: Callable[..., Any], *split: int | None) -> Callable[..., Any]:
        """`fn` by every device: `split` has the axis of each argument, and last of the results, None where whole."""
        if self.shards == 1:
            return fn
        specs = [PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, TENSOR_AXIS) for axis in split]
        return jax.shard_map(fn, in_specs=tuple(specs[:-1]), out_specs=specs[-1], check_vma=False)

    def project(self, stream: Stream, kernel: jax.Array, eps: float) -> jax.Array:
        return self._each(lambda s, w: self.own.project(s, w, eps), None, 1, 1)(stream, kernel)

    def heads(
        self, stream: Stream, kernel: jax.Array, rope: tuple[jax.Array, ...], counts: Sequence[int], eps: float
    ) -> tuple[jax.Array, ...]:
        mine = tuple(count // self.shards for count in counts)
        return self._each(lambda s, w, t: self.own.heads(s, w, t, mine, eps), None, 1, None, 1)(stream, kernel, rope)

    def swiglu(self, stream: Stream, kernel: jax.Array, eps: float) -> jax.Array:
        return self._each(lambda s, w: self.own.swiglu(s, w, eps), None, 1, 1)(stream, kernel)

    def add(self, x_MK: jax.Array, kernel: jax.Array, h_ME: jax.Array, gain_E: jax.Array) -> Stream:
        if self.shards == 1:
            return self.own.add(x_MK, kernel, h_ME, gain_E)

        def parts(x_MK: jax.Array, kernel: jax.Array, h_ME: jax.Array, gain_E: jax.Array) -> Stream:
            y = summed(self.own.multiply(x_MK, kernel), self.sums)
            return reference.begin((h_ME.astype(jnp.float32) + y.astype(jnp.float32)).astype(h_ME.dtype), gain_E)

        return self._each(parts, 1, 0, None, None, None)(x_MK, kernel, h_ME, gain_E)


def _gain(norm: Any) -> jax.Array:
    return norm.weight[...]


def refusal(model: Any) -> str | None:
    """Why a model's layers cannot run by these kernels, or None."""
    if type(model) is not Transformer:
        return f"its class is {type(model).__name__}"
    cfg = model.config
    default = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    if asked := [f"{name}={getattr(cfg, name)}" for name in _PLAIN if getattr(cfg, name) != default[name]]:
        return f"its layers have {', '.join(asked)}"
    if model.embedding.dtype != jnp.bfloat16:
        return f"its activations are {model.embedding.dtype}, not bfloat16"
    for layer in model.layers:
        if not isinstance(layer.mlp, MLP):
            return f"its layers have a {type(layer.mlp).__name__}"
        if layer.attn.shards != layer.mlp.shards:
            return f"devices share its attention {layer.attn.shards} ways and its MLP {layer.mlp.shards} ways"
        for linear in (layer.attn.qkv, layer.attn.out, layer.mlp.gate_up, layer.mlp.down):
            if why := _unserved(linear, layer.attn.shards):
                return why
    return None


def _maps(model: Transformer) -> Iterator[Linear]:
    for layer in model.layers:
        yield from (layer.attn.qkv, layer.attn.out, layer.mlp.gate_up, layer.mlp.down)


def _unserved(linear: Linear, shards: int) -> str | None:
    """Why no kernel of few rows multiplies by these weights, or None."""
    kernel, axis = linear.kernel[...], linear.kernel.get_metadata(SPLIT, None)
    if isinstance(kernel, Quantised | Packed) and shards != 1:
        return "its quantised weights are split over devices"
    if isinstance(kernel, Packed):
        return None
    if isinstance(kernel, Quantised):
        if kernel.values.ndim != 2 or kernel.zero is not None or kernel.order is not None:
            return "its quantised weights have zero points, an order of inputs or column blocks"
        if kernel.int8_activations:
            return "its activations are quantised"
        return packed.refusal(kernel.values.dtype, kernel.shape, kernel.groups)
    if kernel.dtype != jnp.bfloat16 or kernel.ndim != 2:
        return f"its weights are {kernel.dtype} of {kernel.ndim} axes, not bfloat16 of 2"
    own = [size // (shards if i == axis else 1) for i, size in enumerate(kernel.shape)]
    if any(size % TILE for size in own):
        return f"its weights of {own} on a device are no multiples of {TILE}"
    return None


def prepare(model: Any, implementation: str = "gpu") -> Any:
    """A copy that runs few rows by these kernels, or the model where they do not serve it.

    Quantised kernels are laid out anew in the model itself, one after the other, so that no two layouts of all of them
    take memory at once.

    Args:
      implementation: "gpu", or "reference" for the same order of operations in plain XLA.
    """
    if refusal(model) is not None:
        return model
    for linear in _maps(model):
        if isinstance(few := linear.kernel[...], Quantised):
            linear.kernel.set_value(_packed(few.values, few.scale))
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, state)
    copy.few_rows = FewRows(implementation)
    return copy


_packed = jax.jit(packed.pack)


def unsupported() -> str | None:
    """Why this device or JAX has no such kernels, or None."""
    return gpu.supported()


__all__ = ["MOST_ROWS", "FewRows", "prepare", "refusal", "unsupported"]
