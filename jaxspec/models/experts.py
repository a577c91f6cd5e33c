"""Mixtures of experts: an MLP of which each token uses a few parts, chosen by a router.

Owns the router's arithmetic, and the ways in which experts are read:
- by blocks (CPUs, TPUs): pairs of a token and one of its experts are laid into blocks of a fixed
  number of rows, each of one expert, and block after block is multiplied. An expert is read as often as it has blocks,
  once where few rows touch it, and never where none does. A row's bits do not depend on the other rows of the pass,
  since every block's products have the same shape.
- by pairs (GPUs, where pairs are fewer than experts, in few bits up to four times these): each pair's products as sums,
  into which the compiler fuses the gathering of its experts' weights, so that no other expert is read and nothing is
  copied; a loop over blocks would be launches by the thousand.
- all of them (GPUs, more rows): every expert with every row, of which most weigh nothing; in few bits some experts
  after the others.
- packed (Hopper, in few bits): by a kernel that reads each expert in use once (docs/kernels.md). `packing` says which
  models are laid out so.
- many (Hopper, more rows): by a kernel that multiplies each expert's own rows, of bfloat16 as it is or packed.
How kernels are read in few bits, `stacked` says.
Must not know families.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxspec.models import stacked
from jaxspec.models.base import Experts, ModelConfig, Split, report_experts
from jaxspec.models.layers import ACTIVATIONS, MLP, Linear, Transformer, narrow_product, product
from jaxspec.models.sharded import TENSOR_AXIS, laid_anew, parts_of, shards, share_bytes, split_axis
from pallas_kernels.small_batch import gpu, gpu_experts_many, gpu_packed_experts, packed_experts
from pallas_kernels.small_batch.packed import Packed

#: Rows of a block, and where pairs of tokens and experts are many. CPUs keep to the first, whose bits are the same for
#: any number of tokens; elsewhere prompts need larger products.
_ROWS, _MANY_ROWS, _MANY_PAIRS = 8, 128, 1024
#: Rows that all experts multiply at once, and that kernels do, at most.
_AT_ONCE = 1024
#: Rows of a packed expert on average from which on the kernel for many rows is faster.
_MANY_OF_ONE = 8
#: How many pairs an expert are read one by one in few bits: on an H200 that is quicker than to expand all experts up to
#: three (Qwen3-30B-A3B in fp8) or six (gpt-oss in MXFP4).
_PAIRS_IN_FEW_BITS = 4
#: Rows of which a router's product is made as sums.
_FEW_ROWS = 32


class Routing(NamedTuple):
    """Which experts rows use, the best first.

    Attributes:
      weights_MK: float32.
    """

    experts_MK: jax.Array
    weights_MK: jax.Array


def route(logits_MX: jax.Array, cfg: Experts, correction_X: jax.Array | None = None) -> Routing:
    """The experts of each row by its router's logits, and their weights (`Experts.scores`).

    Args:
      correction_X: see Experts.corrected.
    """
    logits_MX = logits_MX.astype(jnp.float32)
    sigmoid = cfg.scores == "sigmoid"
    choice_MX = jax.nn.sigmoid(logits_MX) if sigmoid else logits_MX
    if correction_X is not None:
        choice_MX = choice_MX + correction_X.astype(jnp.float32)[None]
    top_MK, experts_MK = jax.lax.top_k(_in_best_groups(choice_MX, cfg), cfg.per_token)
    if sigmoid:
        weights_MK = jax.nn.sigmoid(jnp.take_along_axis(logits_MX, experts_MK, axis=1))
        if cfg.normalised:
            weights_MK = weights_MK / (jnp.sum(weights_MK, axis=-1, keepdims=True) + 1e-20)
    elif cfg.scores == "top_k" or cfg.normalised:
        weights_MK = jax.nn.softmax(top_MK, axis=-1)  # one over all, divided by its sum over the best, is theirs alone
    else:
        weights_MK = jnp.exp(top_MK - jax.nn.logsumexp(logits_MX, axis=-1, keepdims=True))
    return Routing(experts_MK, weights_MK if cfg.scale == 1.0 else weights_MK * cfg.scale)


def _in_best_groups(choice_MX: jax.Array, cfg: Experts) -> jax.Array:
    """The scores of the experts whose groups are among a row's best; those of others are -inf."""
    if cfg.groups == 1:
        return choice_MX
    choice_MGX = choice_MX.reshape(choice_MX.shape[0], cfg.groups, -1)
    rated_MG = jnp.sum(jax.lax.top_k(choice_MGX, cfg.group_best)[0], axis=-1)
    _, best_MU = jax.lax.top_k(rated_MG, cfg.groups_used)
    kept_MG = jnp.any(best_MU[:, :, None] == jnp.arange(cfg.groups)[None, None], axis=1)
    return jnp.where(kept_MG[..., None], choice_MGX, -jnp.inf).reshape(choice_MX.shape)


class Blocks(NamedTuple):
    """Pairs of rows and experts in blocks of R rows of one expert each.

    Attributes:
      experts_N: of each block; blocks that are left over name the last expert in use, and have no rows.
      rows_NR: the row of each place, M where it is empty.
      places_MK: where each pair is, as a number of N * R.
    """

    experts_N: jax.Array
    rows_NR: jax.Array
    places_MK: jax.Array


def in_blocks(experts_MK: jax.Array, count: int, rows: int) -> Blocks:
    """The blocks of rows' experts.

    Args:
      count: of experts. rows: of a block.
    """
    (m, k), pairs = experts_MK.shape, experts_MK.size
    # Every expert in use may have one block that is not full.
    blocks = min(pairs, pairs // rows + min(count, pairs))
    flat_P = experts_MK.reshape(-1)
    chosen_PX = (flat_P[:, None] == jnp.arange(count)[None, :]).astype(jnp.int32)
    before_PX = jnp.cumsum(chosen_PX, axis=0)
    rank_P = jnp.take_along_axis(before_PX, flat_P[:, None], axis=1)[:, 0] - 1
    used_X = before_PX[-1]
    ends_X = jnp.cumsum(-(-used_X // rows))
    starts_X = ends_X - -(-used_X // rows)
    places_P = (starts_X[flat_P] + rank_P // rows) * rows + rank_P % rows
    token_P = jnp.arange(pairs, dtype=jnp.int32) // k
    rows_S = jnp.full((blocks * rows,), m, jnp.int32).at[places_P].set(token_P, unique_indices=True)
    experts_N = jnp.sum(ends_X[None, :] <= jnp.arange(blocks)[:, None], axis=1)
    experts_N = jnp.minimum(experts_N, jnp.max(flat_P)).astype(jnp.int32)
    return Blocks(experts_N, rows_S.reshape(blocks, rows), places_P.reshape(m, k))


class Stack(NamedTuple):
    """A layer's experts, or a device's part of each: what the ways to read them multiply by.

    Attributes:
      gate_up: [X, E, 2 F]. down: [X, F, E]. gate_up_bias: [X, 2 F]. down_bias: [X, E].
      shards, backend: see MixtureOfExperts.
    """

    experts: Experts
    gate_up: Any
    down: Any
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    shards: int = 1
    backend: str | None = None

    def activated(self, both: jax.Array) -> jax.Array:
        """What gates and ups make of each other."""
        return activated(both, self.experts.hidden_act, self.shards)


def activated(gate_up: jax.Array, act: str, shards: int = 1) -> jax.Array:
    """What the halves [gate up] of the last axis make, for each of `shards` parts; `act` as `Experts.hidden_act`."""
    gate, up = jnp.split(gate_up.reshape(*gate_up.shape[:-1], shards, -1), 2, axis=-1)
    if act == "clamped_swiglu":
        gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
        out = (up + 1) * gate * jax.nn.sigmoid(gate * SHARPNESS)
    else:
        out = ACTIVATIONS[act](gate) * up
    return out.reshape(*gate_up.shape[:-1], -1)


#: Of gpt-oss' gates: what they are cut at, and what is in their sigmoid.
CLAMP, SHARPNESS = 7.0, 1.702


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
        """How experts are read for so many pairs of a row and an expert, see above."""
        count = self.experts.count
        if self.packed:
            many = pairs >= _MANY_OF_ONE * count and pairs > _FEW_ROWS * self.experts.per_token
            return "many" if many and _hopper(self.backend) else "packed"
        gathers = all(stacked.gathers(kernel[...]) for kernel in (self.gate_up, self.down))
        if not _on_gpu(self.backend) or not gathers:
            return "blocks"
        if pairs <= (_PAIRS_IN_FEW_BITS * count if self.in_few_bits else count - 1):
            return "pairs"
        many = pairs > _FEW_ROWS * self.experts.per_token and self.many_refusal() is None
        return "many" if many and _hopper(self.backend) else "all"

    def mixed(self, way: str, x_ME: jax.Array, routing: Routing) -> jax.Array:
        """What the chosen experts make of rows, weighted and summed in float32.

        Devices that share every expert's inner width do all of it with their parts, and exchange one sum.
        """
        params = self.gate_up, self.down, self.gate_up_bias, self.down_bias
        gate_up, down, gate_up_bias, down_bias = own = [None if param is None else param[...] for param in params]
        if split_axis(self.gate_up) is None or split_axis(self.down) is None:
            stack = Stack(self.experts, gate_up, down, gate_up_bias, down_bias, self.shards, self.backend)
            return _WAYS[way](stack, x_ME, routing)
        assert self.shards == shards(), (self.shards, shards())

        def part(
            x_ME: jax.Array, routing: Routing, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any
        ) -> jax.Array:
            if down_bias is not None:  # once, not by every device
                down_bias = jnp.where(jax.lax.axis_index(TENSOR_AXIS) == 0, down_bias, 0)
            stack = Stack(self.experts, gate_up, down, gate_up_bias, down_bias, backend=self.backend)
            return jax.lax.psum(_WAYS[way](stack, x_ME, routing), TENSOR_AXIS)

        whole, inner = PartitionSpec(), PartitionSpec(None, TENSOR_AXIS)
        specs = (whole, whole, parts_of(2, gate_up, self.shards), parts_of(1, down, self.shards), inner, whole)
        return jax.shard_map(part, in_specs=specs, out_specs=whole, check_vma=False)(x_ME, routing, *own)

    def many_refusal(self) -> str | None:
        """Why the kernel for many rows does not serve experts that are not packed, or None."""
        if self.in_few_bits or any(kernel[...].dtype != jnp.bfloat16 for kernel in (self.gate_up, self.down)):
            return "their weights are not bfloat16"
        return self._gates_refusal() or gpu_experts_many.refusal(
            self.down.shape[2], self.down.shape[1] // (1 if split_axis(self.down) is None else self.shards)
        )

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


def _by_blocks(own: Stack, x_ME: jax.Array, routing: Routing) -> jax.Array:
    """One product after the other, each of one expert."""
    blocks = in_blocks(routing.experts_MK, own.experts.count, block_rows(routing.experts_MK.size))

    biases = own.gate_up_bias, own.down_bias

    def step(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        expert, rows_R = block
        gate_up, down = (one_of(kernel, expert) for kernel in (own.gate_up, own.down))
        gate_up_bias, down_bias = (None if b is None else one_of(b, expert)[None] for b in biases)
        x_RE = jnp.take(x_ME, rows_R, axis=0, mode="fill", fill_value=0)
        both = product(x_RE, gate_up)
        both = both if gate_up_bias is None else both + gate_up_bias
        y_RE = product(own.activated(both), down)
        return None, y_RE if down_bias is None else y_RE + down_bias

    _, y_NRE = jax.lax.scan(step, None, (blocks.experts_N, blocks.rows_NR))
    return _weighed(jnp.take(y_NRE.reshape(-1, y_NRE.shape[-1]), blocks.places_MK, axis=0), routing)


def _by_pairs(own: Stack, x_ME: jax.Array, routing: Routing) -> jax.Array:
    """Sums over inputs."""
    m, k = routing.experts_MK.shape
    experts_P = routing.experts_MK.reshape(-1)

    def times(x_PE: jax.Array, kernel: Any, bias_XF: jax.Array | None) -> jax.Array:
        y_PF = stacked.pair_products(x_PE, kernel, experts_P).astype(x_PE.dtype)
        return y_PF if bias_XF is None else y_PF + jnp.take(bias_XF, experts_P, axis=0, mode="clip")

    gate_up_bias, down_bias = own.gate_up_bias, own.down_bias
    hidden_PF = own.activated(times(jnp.repeat(x_ME, k, axis=0), own.gate_up, gate_up_bias))
    return _weighed(times(hidden_PF, own.down, down_bias).reshape(m, k, -1), routing)


def _by_kernels(own: Stack, x_ME: jax.Array, routing: Routing) -> jax.Array:
    """Packed experts, each in use once."""
    return _mixed(gpu_packed_experts if _on_gpu(own.backend) else packed_experts, own, x_ME, routing)


def _by_own_rows(own: Stack, x_ME: jax.Array, routing: Routing) -> jax.Array:
    """Each expert, packed or not, with the rows that use it."""
    return _own_rows((own.experts, own.shards, own.backend), own[1:5], x_ME, routing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _own_rows(about: tuple[Any, ...], kernels: tuple[Any, ...], x_ME: jax.Array, routing: Routing) -> jax.Array:
    """The kernel, which heads that are trained need the derivative of."""
    return _mixed(gpu_experts_many, Stack(about[0], *kernels, *about[1:]), x_ME, routing)


def _own_rows_kept(about: tuple[Any, ...], *args: Any) -> tuple[jax.Array, Any]:
    return _own_rows(about, *args), args


def _own_rows_back(about: tuple[Any, ...], args: Any, out_ME: jax.Array) -> tuple[Any, ...]:
    kernels, x_ME, routing = args

    def by_all(kernels: Any, x_ME: jax.Array, weights_MK: jax.Array) -> jax.Array:
        return _by_all(Stack(about[0], *kernels, *about[1:]), x_ME, Routing(routing.experts_MK, weights_MK))

    *found, weights_MK = jax.vjp(by_all, kernels, x_ME, routing.weights_MK)[1](out_ME)
    return *found, routing._replace(experts_MK=None, weights_MK=weights_MK)


_own_rows.defvjp(_own_rows_kept, _own_rows_back)


def _mixed(by: Any, own: Stack, x_ME: jax.Array, routing: Routing) -> jax.Array:
    gates = packed_experts.Gates(CLAMP, SHARPNESS) if own.experts.hidden_act == "clamped_swiglu" else None
    mix = functools.partial(
        by.mix, gate_up=own.gate_up, down=own.down, gates=gates, gate_up_bias=own.gate_up_bias, down_bias=own.down_bias
    )
    if (rows := x_ME.shape[0]) <= _AT_ONCE:
        return mix(x_ME, *routing)
    return _in_turn(lambda part: mix(*part), (x_ME, *routing), _AT_ONCE)[:rows]


def _on_gpu(backend: str | None) -> bool:
    return (backend or jax.default_backend()) in ("gpu", "hopper")


def _hopper(backend: str | None) -> bool:
    """Whether kernels for Hopper serve it."""
    return gpu.supported() is None if backend is None else backend == "hopper"


def _in_turn(run: Callable[[Any], jax.Array], rows: Any, most: int) -> jax.Array:
    """What `run` makes of rows, at most so many together; the last row again fills the last of them up."""
    count = jax.tree.leaves(rows)[0].shape[0]
    size = -(-count // -(-count // most))
    cut = lambda x: jnp.pad(x, ((0, -x.shape[0] % size), (0, 0)), mode="edge").reshape(-1, size, x.shape[1])
    out_CME = jax.lax.map(run, jax.tree.map(cut, rows))
    return out_CME.reshape(-1, out_CME.shape[-1])


def _by_all(own: Stack, x_ME: jax.Array, routing: Routing) -> jax.Array:
    """Weights before the second product, which sums over experts as well."""
    rows = x_ME.shape[0]
    if rows > _AT_ONCE:
        # Several times with every expert, but never more than so many rows of all of them in memory.
        return _in_turn(lambda part: _by_all(own, *part), (x_ME, routing), _AT_ONCE)[:rows]
    chosen_MKX = routing.experts_MK[:, :, None] == jnp.arange(own.experts.count)[None, None]
    weights_MX = jnp.sum(jnp.where(chosen_MKX, routing.weights_MK[..., None], 0), axis=1)
    if not any(map(stacked.in_few_bits, (own.gate_up, own.down))):
        return _weighed_by_all(own, x_ME, weights_MX)
    numbers = sum(math.prod(stacked.shape_of(kernel)[1:]) for kernel in (own.gate_up, own.down))
    size = stacked.together(own.experts.count, numbers, x_ME.dtype)
    cut = lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:])
    kernels = own.gate_up, own.down, own.gate_up_bias, own.down_bias
    weights_CMX = weights_MX.reshape(rows, -1, size).transpose(1, 0, 2)

    def step(out_ME: jax.Array, part: Any) -> tuple[jax.Array, None]:
        kernels, weights_MX = part
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        some = own._replace(**dict(zip(names, kernels, strict=True)))
        return out_ME + _weighed_by_all(some, x_ME, weights_MX), None

    start_ME = jnp.zeros(x_ME.shape, jnp.float32)
    return jax.lax.scan(step, start_ME, (jax.tree.map(cut, kernels), weights_CMX))[0]


def _weighed_by_all(own: Stack, x_ME: jax.Array, weights_MX: jax.Array) -> jax.Array:
    """What experts make of all rows together; `own` has as many as the weights have columns."""
    gate_up_bias, down_bias = own.gate_up_bias, own.down_bias
    both_XMF = stacked.times_all(x_ME, own.gate_up)
    both_XMF = both_XMF if gate_up_bias is None else both_XMF + gate_up_bias[:, None]
    hidden_XMF = own.activated(both_XMF)
    # Where a row does not use an expert, whatever that makes of it is none of its business: not even where it is NaN.
    used_XM1 = (weights_MX != 0).T[..., None]
    hidden_XMF = jnp.where(used_XM1, hidden_XMF.astype(jnp.float32) * weights_MX.T[..., None], 0).astype(x_ME.dtype)
    out_ME = stacked.times_own(hidden_XMF, own.down)
    return out_ME if down_bias is None else out_ME + weights_MX @ down_bias.astype(jnp.float32)


def _weighed(y_MKE: jax.Array, routing: Routing) -> jax.Array:
    return jnp.sum(y_MKE.astype(jnp.float32) * routing.weights_MK[..., None], axis=1)


_WAYS = {"blocks": _by_blocks, "pairs": _by_pairs, "all": _by_all, "packed": _by_kernels, "many": _by_own_rows}


def block_rows(pairs: int) -> int:
    """Rows of a block, for so many pairs of rows and experts."""
    return _MANY_ROWS if pairs >= _MANY_PAIRS and jax.default_backend() != "cpu" else _ROWS


def one_of(stacked: Any, expert: jax.Array | int) -> Any:
    """One expert's part of what is stacked over experts: an array, or a `Quantised` or `Mxfp4`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, expert, keepdims=False), stacked)


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
