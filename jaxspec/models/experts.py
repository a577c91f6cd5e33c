"""A mixture of experts: an MLP of which each token uses a few parts, chosen by a router.

Owns the module: its parameters, which way of reading them a pass takes (`mixing` has the ways), and how they are split
over devices and packed (`packing` says for which models). Must not know families.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxspec.models import mixing, stacked
from jaxspec.models.base import ModelConfig, Split, report_experts
from jaxspec.models.layers import MLP, Linear, Transformer, narrow_product
from jaxspec.models.mixing import Routing, Stack, route
from jaxspec.models.sharded import TENSOR_AXIS, laid_anew, parts_of, shards, share_bytes, split_axis
from pallas_kernels.small_batch import gpu_experts_many
from pallas_kernels.small_batch.packed import Packed

#: Rows of a packed expert on average from which on the kernel for many rows is faster.
_MANY_OF_ONE = 8
#: How many pairs an expert are read one by one in few bits: on an H200 that is quicker than to expand all experts up to
#: three (Qwen3-30B-A3B in fp8) or six (gpt-oss in MXFP4).
_PAIRS_IN_FEW_BITS = 4
#: Rows of which a router's product is made as sums.
_FEW_ROWS = 32


class MixtureOfExperts(nnx.Module):
    """A router and its experts, stacked; with `Experts.shared_inner` an MLP besides that every token uses.

    Attributes:
      gate_up: [X, E, 2 F], each expert's gate beside its up; an array, or a `Quantised` or `Mxfp4` of such.
      down: [X, F, E].
      gate_up_bias: [X, 2 F]. down_bias: [X, E].
      correction: float32 [X], see Experts.corrected.
      shards: groups of columns that gate_up is stored in, [gate up] of one shard after the other.
      backend: by which the way of reading is chosen, of GPUs "hopper" or another; None: the process's.
    """

    def __init__(self, cfg: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        assert cfg.experts is not None
        own, width = cfg.experts, cfg.hidden_size
        self.experts, self.shards = own, 1
        self.backend: str | None = None
        std = 0.02 / math.sqrt(2 * max(1, cfg.num_layers))
        self.router = Linear(width, own.count, bias=own.bias, dtype=dtype, rngs=rngs)
        self.gate_up = _stacked(own.count, width, 2 * own.inner, dtype, rngs, 0.02)
        self.down = _stacked(own.count, own.inner, width, dtype, rngs, std)
        bias = lambda size: nnx.Param(jnp.zeros((own.count, size), dtype)) if own.bias else None
        self.gate_up_bias, self.down_bias = bias(2 * own.inner), bias(width)
        shared = dataclasses.replace(cfg, intermediate_size=own.shared_inner, experts=None)
        self.shared = MLP(shared, dtype=dtype, rngs=rngs) if own.shared_inner else None
        gated = own.shared_inner and own.shared_gate
        self.shared_gate = Linear(width, 1, dtype=dtype, rngs=rngs) if gated else None
        self.correction = nnx.Param(jnp.zeros((own.count,), jnp.float32)) if own.corrected else None

    def __call__(self, x_BNE: jax.Array) -> jax.Array:
        x_ME = x_BNE.reshape(-1, x_BNE.shape[-1])
        way = self.way(x_ME.shape[0] * self.experts.per_token)
        kernel_EX = self.router.kernel[...]
        few = way == "pairs" or (way == "packed" and x_ME.shape[0] <= _FEW_ROWS)
        if few and isinstance(kernel_EX, jax.Array) and kernel_EX.ndim == 2:
            # As sums, one launch; as a product split over its inputs, four.
            logits_MX = jnp.sum(x_ME.astype(jnp.float32)[:, :, None] * kernel_EX.astype(jnp.float32)[None], axis=1)
        else:
            logits_MX = narrow_product(x_ME, kernel_EX, jnp.dtype(jnp.float32))
        if self.router.bias is not None:
            logits_MX = logits_MX + self.router.bias[...][None].astype(jnp.float32)
        routing = route(logits_MX, self.experts, None if self.correction is None else self.correction[...])
        report_experts(routing.experts_MK, self.experts.count)
        out_ME = self.mixed(way, x_ME, routing).astype(x_ME.dtype)
        if self.shared is not None:
            shared_ME = self.shared(x_ME)
            gate_M1 = None
            if self.shared_gate is not None:
                gate_M1 = jax.nn.sigmoid(narrow_product(x_ME, self.shared_gate.kernel[...], x_ME.dtype))
            out_ME = out_ME + (shared_ME if gate_M1 is None else gate_M1 * shared_ME)
        return out_ME.reshape(x_BNE.shape)

    @property
    def packed(self) -> bool:
        """Whether both kernels are laid out for the kernel of packed experts."""
        return all(isinstance(kernel[...], Packed) for kernel in (self.gate_up, self.down))

    @property
    def in_few_bits(self) -> bool:
        """Whether experts are quantised, if only by half: a file may leave out either kernel."""
        return any(stacked.in_few_bits(kernel[...]) for kernel in (self.gate_up, self.down))

    def way(self, pairs: int) -> str:
        """How experts are read for so many pairs of a row and an expert: a name of `mixing.WAYS`."""
        count = self.experts.count
        if self.packed:
            many = pairs >= _MANY_OF_ONE * count and pairs > _FEW_ROWS * self.experts.per_token
            return "many" if many and mixing.hopper(self.backend) and self._widths_refusal() is None else "packed"
        gathers = all(stacked.gathers(kernel[...]) for kernel in (self.gate_up, self.down))
        if not mixing.on_gpu(self.backend) or not gathers:
            return "blocks"
        if pairs <= (_PAIRS_IN_FEW_BITS * count if self.in_few_bits else count - 1):
            return "pairs"
        many = pairs > _FEW_ROWS * self.experts.per_token and self.many_refusal() is None
        return "many" if many and mixing.hopper(self.backend) else "all"

    def mixed(self, way: str, x_ME: jax.Array, routing: Routing) -> jax.Array:
        """What the chosen experts make of rows, weighted and summed in float32.

        Devices that share every expert's inner width do all of it with their parts, and exchange one sum.
        """
        params = self.gate_up, self.down, self.gate_up_bias, self.down_bias
        gate_up, down, gate_up_bias, down_bias = own = [None if param is None else param[...] for param in params]
        if split_axis(self.gate_up) is None or split_axis(self.down) is None:
            stack = Stack(self.experts, gate_up, down, gate_up_bias, down_bias, self.shards, self.backend)
            return mixing.WAYS[way](stack, x_ME, routing)
        assert self.shards == shards(), (self.shards, shards())

        def part(
            x_ME: jax.Array, routing: Routing, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any
        ) -> jax.Array:
            if down_bias is not None:  # once, not by every device
                down_bias = jnp.where(jax.lax.axis_index(TENSOR_AXIS) == 0, down_bias, 0)
            stack = Stack(self.experts, gate_up, down, gate_up_bias, down_bias, backend=self.backend)
            return jax.lax.psum(mixing.WAYS[way](stack, x_ME, routing), TENSOR_AXIS)

        whole, inner = PartitionSpec(), PartitionSpec(None, TENSOR_AXIS)
        specs = (whole, whole, parts_of(2, gate_up, self.shards), parts_of(1, down, self.shards), inner, whole)
        return jax.shard_map(part, in_specs=specs, out_specs=whole, check_vma=False)(x_ME, routing, *own)

    def many_refusal(self) -> str | None:
        """Why the kernel for many rows does not serve experts that are not packed, or None."""
        if self.shards > 1 and split_axis(self.down) is None:
            return f"they are laid out for {self.shards} devices, and this one has them whole"
        if self.in_few_bits or any(kernel[...].dtype != jnp.bfloat16 for kernel in (self.gate_up, self.down)):
            return "their weights are not bfloat16"
        return self._gates_refusal() or self._widths_refusal()

    def _widths_refusal(self) -> str | None:
        _, inner, width = stacked.shape_of(self.down[...])
        return gpu_experts_many.refusal(width, inner // self.shards)

    def _gates_refusal(self) -> str | None:
        """Why kernels do not serve their gates, or None."""
        served = self.experts.hidden_act in ("silu", "clamped_swiglu")
        return None if served else f"their gates are {self.experts.hidden_act}"

    def packing_refusal(self) -> str | None:
        """Why the kernel for packed experts does not serve these, or what a device has of each, or None."""
        if (why := self._gates_refusal()) is not None:
            return why
        kernels = (self.gate_up, 2), (self.down, 1)
        found = (stacked.packing_refusal(kernel[...], axis, self.shards) for kernel, axis in kernels)
        return next(filter(None, found), None)

    def scale_refusal(self) -> str | None:
        """Why it does not serve these values, or None."""
        return next(filter(None, (stacked.scale_refusal(kernel[...]) for kernel in (self.gate_up, self.down))), None)

    def added_bytes(self) -> int:
        """Bytes of memory that they take on each device once they are packed, besides what they do."""
        added = 0
        for kernel, axis in ((self.gate_up, 2), (self.down, 1)):
            place = axis if self.shards > 1 else None
            made = jax.eval_shape(lambda few, axis=axis: stacked.pack(few, axis, self.shards), kernel[...])
            added += share_bytes(place, made, self.shards) - share_bytes(place, kernel[...], self.shards)
        return added

    def pack(self) -> None:
        """Lays both kernels out for it, one after the other."""
        for kernel, axis in ((self.gate_up, 2), (self.down, 1)):
            kernel.set_value(laid_anew(kernel, stacked.pack, axis, self.shards))
        if self.gate_up_bias is not None:
            self.gate_up_bias.set_value(laid_anew(self.gate_up_bias, stacked.filled_halves, self.shards))

    def splits(self, shards: int) -> list[Split]:
        """See `layouts.tensor_parallel`: experts are split by their inner width."""
        inner, kernels = self.experts.inner, ((self.gate_up, 2), (self.down, 1))
        if inner % shards or not all(stacked.divides(kernel.get_value(), axis, shards) for kernel, axis in kernels):
            return []
        self.shards = shards
        widths = (inner, inner)
        return [Split(self, "gate_up", 2, widths), Split(self, "gate_up_bias", 1, widths), Split(self, "down", 1)]


def mlp(cfg: ModelConfig, index: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> MLP | MixtureOfExperts:
    """A layer's MLP: experts where the configuration has them in that layer."""
    if cfg.experts is not None and index in cfg.experts.layers:
        return MixtureOfExperts(cfg, dtype=dtype, rngs=rngs)
    return MLP(cfg, dtype=dtype, rngs=rngs)


#: A model with experts; a `Family.build`.
build = functools.partial(Transformer, mlp=mlp)


def _stacked(count: int, d_in: int, d_out: int, dtype: jnp.dtype, rngs: nnx.Rngs | None, std: float) -> nnx.Param:
    shape = (count, d_in, d_out)
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype))
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * std).astype(dtype))
