"""Parameters and the tensors of a checkpoint that they are made of: the map, both ways.

Owns `Weight`, and the names that the blocks of `layers` have in Llama's checkpoints, which its relatives and most draft
heads share. Must not know files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.latent import LatentAttention
from jaxspec.models.layers import MLP, Attention, DecoderLayer, Linear, RMSNorm, Transformer
from jaxspec.models.quantised import Quantised


@dataclasses.dataclass(frozen=True)
class Part:
    """What one of several devices holds of a parameter.

    Attributes:
      axis: that devices split.
      spans: (start, stop) along it, in the order in which the device has them.
    """

    axis: int
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, axis: int, size: int, shards: int, shard: int, widths: Sequence[int] = ()) -> Part:
        """What `layouts.tensor_parallel` gives a device.

        Args:
          size: of the axis. shards: devices. shard: which of them.
          widths: of the maps that lie side by side along the axis, of each of which every device has its part.
        """
        spans, start = [], 0
        for width in widths or (size,):
            spans.append((start + width * shard // shards, start + width * (shard + 1) // shards))
            start += width
        return cls(axis, tuple(spans))


class Piece(NamedTuple):
    """A tensor of a checkpoint, or some of it.

    Attributes:
      shape: of the whole tensor. part: what of it, along its first axes.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[slice, ...] = ()

    def along(self, axis: int, start: int, stop: int) -> Piece:
        """That of a whole tensor which lies from `start` to `stop` along an axis."""
        return self._replace(part=(*[slice(None)] * axis, slice(start, stop)))


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter and the tensors it is made of.

    A format of another kind overrides shapes, join and split, and pieces where devices split its parameter.

    Attributes:
      param: ours; tensors are joined along its last axis.
      names: the tensors' names.
      widths: how much of the last axis each takes.
      transposed: stored [out, in] in the file, [in, out] here.
      linear: the kernel of a Linear, which may be quantised.
      gain: of a norm.
      offset: what the file's values lack of ours: 1 for the gains of families that multiply by 1 + w.
      ones: axes of size 1 that the file has in front.
      copies: tensors that some checkpoints store besides, which must be the same.
    """

    param: nnx.Variable
    names: tuple[str, ...]
    widths: tuple[int, ...]
    transposed: bool = False
    linear: bool = False
    gain: bool = False
    offset: float = 0.0
    ones: int = 0
    copies: tuple[str, ...] = ()

    @property
    def shapes(self) -> Iterator[tuple[int, ...]]:
        """The shape of each tensor as the file has it."""
        lead = (*(1,) * self.ones, *self.param.shape[:-1])
        for width in self.widths:
            yield (width, *lead) if self.transposed else (*lead, width)

    def pieces(self, part: Part | None = None) -> list[Piece]:
        """What to read for `join` to make the parameter, or a device's part of it."""
        whole = [Piece(name, shape) for name, shape in zip(self.names, self.shapes, strict=True)]
        if part is None:
            return whole
        last = self.param.ndim - 1
        if part.axis == last:
            at = 0 if self.transposed else self.ones + last
            return [whole[i].along(at, start, stop) for i, start, stop in self.side_by_side(part.spans)]
        ((start, stop),) = part.spans
        return [piece.along(self.ones + part.axis + self.transposed, start, stop) for piece in whole]

    def side_by_side(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Spans over `widths`, which lie side by side, as (which of them, start, stop) within each."""
        for begin, end in spans:
            low = 0
            for i, width in enumerate(self.widths):
                start, stop = max(begin - low, 0), min(end - low, width)
                if start < stop:
                    yield i, start, stop
                low += width

    def as_stored(self, names: Collection[str], shape: Callable[[str], tuple[int, ...]]) -> Weight:
        """What to read where a checkpoint may have tensors in one of several forms.

        Args:
          names: of all that it has. shape: of one of them.

        Raises:
          ValueError: tensors that it has twice.
        """
        return self

    def join(self, parts: Sequence[np.ndarray]) -> jax.Array:
        """A value from its pieces, in the dtype that the parameter (or its placeholder) has."""
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0 if self.transposed else -1)
        joined = joined.reshape(joined.shape[self.ones :])
        if self.offset:
            joined = joined.astype(np.float32) + np.float32(self.offset)
        value = jnp.asarray(joined).astype(self.param.get_value().dtype)
        return value.T if self.transposed else value

    def take(self, value: Any) -> None:
        """Gives the parameter what `join` made, or what is read in few bits in place of it."""
        self.param.set_value(value)

    def split(self, dtype: DTypeLike) -> Sequence[np.ndarray]:
        """The inverse of join: the tensors, cast to dtype."""
        value = self.param.get_value()
        if self.offset:
            value = value.astype(jnp.float32) - jnp.float32(self.offset)
        value = value.astype(dtype)
        array = np.asarray(value.T if self.transposed else value)
        array = array.reshape(*(1,) * self.ones, *array.shape)
        return np.split(array, np.cumsum(self.widths)[:-1].tolist(), axis=0 if self.transposed else -1)


@dataclasses.dataclass(frozen=True)
class StackedWeight(Weight):
    """Linear maps of experts, [X, in, out] here; in the file a matrix [out, in] for each expert and map, or one tensor.

    Attributes:
      names: expert after expert, each as many as `widths`.
      fused: the one tensor [X, out, in] that newer files have in place of them; "": none.
      inputs_first: it is [X, in, out], as some files have it, of which its shape tells.
    """

    fused: str = ""
    inputs_first: bool = False

    @property
    def shapes(self) -> Iterator[tuple[int, ...]]:
        count, d_in, d_out = self.param.shape
        if self.names == (self.fused,):
            yield (count, d_in, d_out) if self.inputs_first else (count, d_out, d_in)
            return
        for _ in range(count):
            yield from ((width, d_in) for width in self.widths)

    def pieces(self, part: Part | None = None) -> list[Piece]:
        whole = [Piece(name, shape) for name, shape in zip(self.names, self.shapes, strict=True)]
        if part is None:
            return whole
        if self.names == (self.fused,):
            axis = part.axis if self.inputs_first else 3 - part.axis
            return [whole[0].along(axis, start, stop) for start, stop in part.spans]
        if part.axis == 1:  # inputs, the last axis of a tensor
            ((start, stop),) = part.spans
            return [piece.along(1, start, stop) for piece in whole]
        each, cuts = len(self.widths), list(self.side_by_side(part.spans))
        experts = range(0, len(whole), each)
        return [whole[first + i].along(0, start, stop) for first in experts for i, start, stop in cuts]

    def as_stored(self, names: Collection[str], shape: Callable[[str], tuple[int, ...]]) -> Weight:
        if not self.fused or self.fused not in names:
            return self
        if twice := next((name for name in self.names if name in names), None):
            raise ValueError(f"the checkpoint holds experts twice: as {self.fused!r} and as {twice!r}")
        count, d_in, d_out = self.param.shape
        turned = d_in != d_out and shape(self.fused) == (count, d_in, d_out)
        return dataclasses.replace(self, names=(self.fused,), inputs_first=turned)

    def join(self, parts: Sequence[np.ndarray]) -> jax.Array:
        if self.inputs_first:
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
            return jnp.asarray(joined).astype(self.param.get_value().dtype)
        outputs = parts[0].ndim - 2  # of all experts, [X, F, E], or of one
        stacked = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=outputs)
        stacked_XFE = stacked.reshape(self.param.shape[0], -1, stacked.shape[-1])
        return jnp.asarray(stacked_XFE).astype(self.param.get_value().dtype).transpose(0, 2, 1)

    def split(self, dtype: DTypeLike) -> Sequence[np.ndarray]:
        stacked_XFE = np.asarray(self.param.get_value().astype(dtype).transpose(0, 2, 1))
        ends = np.cumsum(self.widths)[:-1].tolist()
        return [part for expert_FE in stacked_XFE for part in np.split(expert_FE, ends, axis=0)]


@dataclasses.dataclass(frozen=True)
class ExpertMaps(Weight):
    """Maps of all experts in one tensor [X, in, out], or their biases [X, out], as gpt-oss has them.

    Attributes:
      in_turns: gate and up take turns along the outputs in the file; here the gates come first.
    """

    in_turns: bool = False

    def gates_first(self, width: int) -> np.ndarray:
        """Which of the file's outputs each of ours is, where these are all, or a device's gates and their ups."""
        order = np.arange(width)
        return np.concatenate([order[::2], order[1::2]]) if self.in_turns else order

    def pieces(self, part: Part | None = None) -> list[Piece]:
        if part is None or not self.in_turns or part.axis < self.param.ndim - 1:
            return super().pieces(part)
        (start, stop), up = part.spans
        inner = self.widths[0] // 2
        assert up == (inner + start, inner + stop), (part, inner)
        (whole,) = super().pieces()
        return [whole.along(part.axis, 2 * start, 2 * stop)]

    def join(self, parts: Sequence[np.ndarray]) -> jax.Array:
        return super().join([parts[0][..., self.gates_first(parts[0].shape[-1])]])

    def split(self, dtype: DTypeLike) -> Sequence[np.ndarray]:
        (whole,) = super().split(dtype)
        return [np.ascontiguousarray(whole[..., np.argsort(self.gates_first(whole.shape[-1]))])]


@dataclasses.dataclass(frozen=True)
class HeadMaps(Weight):
    """What each head of latent attention makes of its vector, [H, key, rank] and [H, value, rank]; one matrix in files.

    In few bits there, it is expanded here: a product by heads is none of a kernel's.

    Attributes:
      param: the keys'. values: the values'.
    """

    values: Any = None

    @property
    def shapes(self) -> Iterator[tuple[int, ...]]:
        heads, _, rank = self.param.shape
        yield heads * (self.param.shape[1] + self.values.shape[1]), rank

    def join(self, parts: Sequence[np.ndarray]) -> jax.Array:
        return jnp.asarray(parts[0]).astype(self.param.get_value().dtype)

    def take(self, value: Any) -> None:
        heads, key, rank = self.param.shape
        if isinstance(value, Quantised):
            value = value.dequantised().T.astype(self.param.get_value().dtype)
        maps = value.reshape(heads, -1, rank)
        self.param.set_value(maps[:, :key])
        self.values.set_value(maps[:, key:])

    def split(self, dtype: DTypeLike) -> Sequence[np.ndarray]:
        maps = jnp.concatenate([self.param.get_value(), self.values.get_value()], axis=1)
        return [np.asarray(maps.reshape(-1, maps.shape[2]).astype(dtype))]


def linear_weights(linear: Linear, names: Sequence[str], widths: Sequence[int] | None = None) -> Iterator[Weight]:
    """A Linear from one or more projections named without `.weight`; `widths` are their output sizes."""
    split = tuple(widths or (linear.kernel.shape[1],))
    assert sum(split) == linear.kernel.shape[1] and len(split) == len(names), (split, names, linear.kernel.shape)
    yield Weight(linear.kernel, tuple(f"{n}.weight" for n in names), split, transposed=True, linear=True)
    if linear.bias is not None:
        yield Weight(linear.bias, tuple(f"{n}.bias" for n in names), split)


def norm_weights(norm: RMSNorm, name: str) -> Iterator[Weight]:
    """A norm's gain."""
    yield Weight(norm.weight, (f"{name}.weight",), tuple(norm.weight.shape), gain=True)


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """What a family calls the parts of `experts.MixtureOfExperts`; Qwen's names by default.

    Attributes:
      module: of the whole, in the layer.
      gate, up, down: of each expert, under `experts.{number}`.
      correction: of the bias that experts are chosen by. correction_ones: axes of size 1 that files have before it.
      fused: whether newer files have `experts.gate_up_proj` and `experts.down_proj` for all experts at once.
      in_turns: whether files have these alone, as [X, in, out] with gate and up in turns, and biases (gpt-oss).
    """

    module: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    correction: str = "gate.e_score_correction_bias"
    correction_ones: int = 0
    fused: bool = True
    in_turns: bool = False


@dataclasses.dataclass(frozen=True)
class LayerNames:
    """What a family calls the parts of `layers.DecoderLayer`, without `.weight`; Llama's names by default.

    Attributes:
      attn_norm, attn_out_norm, mlp_norm, mlp_out_norm: norms before and after attention and MLP.
      qkv, gate_up: the projections that are fused here; one name where the checkpoint fuses them too.
      experts: of layers that have them in place of the MLP.
    """

    attn_norm: str = "input_layernorm"
    attn_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    experts: ExpertNames | None = None


LLAMA = LayerNames()


def attention_weights(attn: Attention, prefix: str, names: LayerNames = LLAMA) -> Iterator[Weight]:
    """`{prefix}.{q,k,v,o}_proj` and, where the family has them, `{prefix}.{q,k}_norm` and `{prefix}.sinks`."""
    q, kv = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
    widths = (q, kv, kv) if len(names.qkv) == 3 else (q + 2 * kv,)
    yield from linear_weights(attn.qkv, [f"{prefix}.{x}" for x in names.qkv], widths)
    yield from linear_weights(attn.out, [f"{prefix}.o_proj"])
    if attn.q_norm is not None and attn.k_norm is not None:
        yield from norm_weights(attn.q_norm, f"{prefix}.q_norm")
        yield from norm_weights(attn.k_norm, f"{prefix}.k_norm")
    if attn.sinks is not None:
        yield Weight(attn.sinks, (f"{prefix}.sinks",), tuple(attn.sinks.shape))


def latent_weights(attn: LatentAttention, prefix: str) -> Iterator[Weight]:
    """DeepSeek's names, in the layer `prefix`."""
    own = attn.latent
    vector = own.rank + own.rotary
    queries = "q_proj" if attn.q_up is None else "q_a_proj"
    widths = (attn.down.kernel.shape[1] - vector, vector)
    yield from linear_weights(attn.down, [f"{prefix}.{queries}", f"{prefix}.kv_a_proj_with_mqa"], widths)
    if attn.q_norm is not None and attn.q_up is not None:
        yield from norm_weights(attn.q_norm, f"{prefix}.q_a_layernorm")
        yield from linear_weights(attn.q_up, [f"{prefix}.q_b_proj"])
    yield from norm_weights(attn.kv_norm, f"{prefix}.kv_a_layernorm")
    yield HeadMaps(attn.keys, (f"{prefix}.kv_b_proj.weight",), (own.rank,), linear=True, values=attn.values)
    yield from linear_weights(attn.out, [f"{prefix}.o_proj"])


def mlp_weights(mlp: MLP, prefix: str, names: LayerNames = LLAMA) -> Iterator[Weight]:
    """`{prefix}.{gate,up,down}_proj`."""
    width, parts = mlp.gate_up.kernel.shape[1], len(names.gate_up)
    yield from linear_weights(mlp.gate_up, [f"{prefix}.{x}" for x in names.gate_up], (width // parts,) * parts)
    yield from linear_weights(mlp.down, [f"{prefix}.down_proj"])


def experts_weights(mixture: MixtureOfExperts, prefix: str, names: LayerNames) -> Iterator[Weight]:
    """A mixture of experts in the layer `prefix`: a tensor for each expert's gate, up and down, or all in one."""
    own = names.experts
    assert own is not None, f"a family of layers with experts must name them, {names} does not"
    module, count = f"{prefix}.{own.module}", mixture.experts.count
    for weight in linear_weights(mixture.router, [f"{module}.{own.router}"]):
        yield dataclasses.replace(weight, linear=False)  # routers are not quantised
    if mixture.correction is not None:
        shape = tuple(mixture.correction.shape)
        yield Weight(mixture.correction, (f"{module}.{own.correction}",), shape, ones=own.correction_ones)
    if own.in_turns:
        for param, name in ((mixture.gate_up, "gate_up_proj"), (mixture.gate_up_bias, "gate_up_proj_bias")):
            assert param is not None
            yield ExpertMaps(param, (f"{module}.experts.{name}",), param.shape[-1:], in_turns=True)
        for param, name in ((mixture.down, "down_proj"), (mixture.down_bias, "down_proj_bias")):
            assert param is not None
            yield ExpertMaps(param, (f"{module}.experts.{name}",), param.shape[-1:])
        return
    # Not by the kernels' shapes, which they have not where they are in few bits.
    hidden, inner = mixture.router.kernel.shape[0], mixture.experts.inner
    for param, parts, width, fused in (
        (mixture.gate_up, (own.gate, own.up), inner, "gate_up_proj"), (mixture.down, (own.down,), hidden, "down_proj")
    ):  # fmt: skip
        each = tuple(f"{module}.experts.{e}.{part}.weight" for e in range(count) for part in parts)
        widths = (width,) * len(parts)
        one = f"{module}.experts.{fused}" if own.fused else ""
        yield StackedWeight(param, each, widths, linear=True, fused=one)
    if mixture.shared is not None:
        yield from mlp_weights(mixture.shared, f"{module}.{own.shared}", names)
    if mixture.shared_gate is not None:
        yield from linear_weights(mixture.shared_gate, [f"{module}.{own.shared_gate}"])


def layer_weights(layer: DecoderLayer, prefix: str, names: LayerNames = LLAMA) -> Iterator[Weight]:
    """A decoder layer, e.g. with prefix "model.layers.0"."""
    norms = [(layer.attn_norm, names.attn_norm), (layer.attn_out_norm, names.attn_out_norm)]
    norms += [(layer.mlp_norm, names.mlp_norm), (layer.mlp_out_norm, names.mlp_out_norm)]
    for norm, name in norms:
        if norm is not None:
            assert name, f"a family of layers with such norms must name them, {names} does not"
            yield from norm_weights(norm, f"{prefix}.{name}")
    if isinstance(layer.attn, LatentAttention):
        yield from latent_weights(layer.attn, f"{prefix}.self_attn")
    else:
        yield from attention_weights(layer.attn, f"{prefix}.self_attn", names)
    if isinstance(layer.mlp, MixtureOfExperts):
        yield from experts_weights(layer.mlp, prefix, names)
    else:
        yield from mlp_weights(layer.mlp, f"{prefix}.mlp", names)


def transformer_weights(model: Transformer, names: LayerNames = LLAMA) -> Iterator[Weight]:
    """Every parameter of a model, in the order of the layers."""
    copies = ("lm_head.weight",) if model.lm_head is None else ()
    yield Weight(model.embedding, ("model.embed_tokens.weight",), (model.embedding.shape[1],), copies=copies)
    for i, layer in enumerate(model.layers):
        yield from layer_weights(layer, f"model.layers.{i}", names)
    yield from norm_weights(model.norm, "model.norm")
    if isinstance(model.lm_head, Linear):
        yield from linear_weights(model.lm_head, ["lm_head"])
