"""Mixtures of experts: an MLP of which each token uses a few parts, chosen by a router.

Owns the router's arithmetic, and the order in which experts are read. Pairs of a token and one of its experts are laid
into blocks of a fixed number of rows, each of one expert, and block after block is multiplied: an expert is read as
often as it has blocks, once where few rows touch it, and never where none does. A row's bits do not depend on the other
rows of the pass, since every block's products have the same shape. Must not know families.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import Experts, ModelConfig, Split, report_touched
from jaxspec.models.layers import ACTIVATIONS, MLP, Linear, Transformer, product
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised

#: Rows of a block, and where pairs of tokens and experts are many. CPUs keep to the first, whose bits are the same for
#: any number of tokens; elsewhere prompts need larger products.
_ROWS, _MANY_ROWS, _MANY_PAIRS = 8, 128, 1024


class Routing(NamedTuple):
    """Which experts rows use.

    Attributes:
      experts_MK: ascending in each row, so that sums over them have one order.
      weights_MK: float32.
    """

    experts_MK: jax.Array
    weights_MK: jax.Array


def route(logits_MX: jax.Array, cfg: Experts) -> Routing:
    """The experts of each row by its router's logits, and their weights (`Experts.scores`)."""
    logits_MX = logits_MX.astype(jnp.float32)
    if cfg.scores == "softmax":
        weights_MK, experts_MK = jax.lax.top_k(jax.nn.softmax(logits_MX, axis=-1), cfg.per_token)
        if cfg.normalised:
            weights_MK = weights_MK / jnp.sum(weights_MK, axis=-1, keepdims=True)
    else:
        top_MK, experts_MK = jax.lax.top_k(logits_MX, cfg.per_token)
        weights_MK = jax.nn.softmax(top_MK, axis=-1)
    experts_MK, weights_MK = jax.lax.sort((experts_MK, weights_MK), dimension=1, num_keys=1)
    return Routing(experts_MK, weights_MK)


class Blocks(NamedTuple):
    """Pairs of rows and experts in blocks of R rows of one expert each.

    Attributes:
      experts_N: of each block; blocks that are left over name the last expert in use, and have no rows.
      rows_NR: the row of each place, M where it is empty.
      places_MK: where each pair is, as a number of N * R.
      touched: distinct experts.
    """

    experts_N: jax.Array
    rows_NR: jax.Array
    places_MK: jax.Array
    touched: jax.Array


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
    return Blocks(experts_N, rows_S.reshape(blocks, rows), places_P.reshape(m, k), jnp.sum(used_X > 0, dtype=jnp.int32))


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
      shards: groups of columns that gate_up is stored in, [gate up] of one shard after the other.
    """

    def __init__(self, cfg: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        assert cfg.experts is not None
        own, width = cfg.experts, cfg.hidden_size
        self.experts, self.shards = own, 1
        std = 0.02 / math.sqrt(2 * max(1, cfg.num_layers))
        self.router = Linear(width, own.count, bias=own.bias, dtype=dtype, rngs=rngs)
        self.gate_up = _stacked(own.count, width, 2 * own.inner, dtype, rngs, 0.02)
        self.down = _stacked(own.count, own.inner, width, dtype, rngs, std)
        bias = lambda size: nnx.Param(jnp.zeros((own.count, size), dtype)) if own.bias else None
        self.gate_up_bias, self.down_bias = bias(2 * own.inner), bias(width)
        shared = dataclasses.replace(cfg, intermediate_size=own.shared_inner, experts=None)
        self.shared = MLP(shared, dtype=dtype, rngs=rngs) if own.shared_inner else None
        self.shared_gate = Linear(width, 1, dtype=dtype, rngs=rngs) if own.shared_inner else None

    def __call__(self, x_BNE: jax.Array) -> jax.Array:
        x_ME = x_BNE.reshape(-1, x_BNE.shape[-1])
        logits_MX = product(x_ME, self.router.kernel[...], jnp.dtype(jnp.float32))
        if self.router.bias is not None:
            logits_MX = logits_MX + self.router.bias[...][None].astype(jnp.float32)
        routing = route(logits_MX, self.experts)
        blocks = in_blocks(routing.experts_MK, self.experts.count, block_rows(routing.experts_MK.size))
        report_touched(blocks.touched)
        out_ME = self.mixed(x_ME, routing, blocks)
        if self.shared is not None and self.shared_gate is not None:
            out_ME = out_ME + jax.nn.sigmoid(self.shared_gate(x_ME)) * self.shared(x_ME)
        return out_ME.reshape(x_BNE.shape)

    def mixed(self, x_ME: jax.Array, routing: Routing, blocks: Blocks) -> jax.Array:
        """What the chosen experts make of rows, weighted and summed in float32, in the order of the experts."""
        kernels = self.gate_up[...], self.down[...]
        biases = [None if b is None else b[...] for b in (self.gate_up_bias, self.down_bias)]

        def step(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            expert, rows_R = block
            gate_up, down = (one_of(kernel, expert) for kernel in kernels)
            gate_up_bias, down_bias = (None if b is None else one_of(b, expert)[None] for b in biases)
            x_RE = jnp.take(x_ME, rows_R, axis=0, mode="fill", fill_value=0)
            both = product(x_RE, gate_up)
            both = both if gate_up_bias is None else both + gate_up_bias
            y_RE = product(activated(both, self.experts.hidden_act, self.shards), down)
            return None, y_RE if down_bias is None else y_RE + down_bias

        _, y_NRE = jax.lax.scan(step, None, (blocks.experts_N, blocks.rows_NR))
        y_MKE = jnp.take(y_NRE.reshape(-1, y_NRE.shape[-1]), blocks.places_MK, axis=0)
        weighted = y_MKE.astype(jnp.float32) * routing.weights_MK[..., None]
        return jnp.sum(weighted, axis=1).astype(x_ME.dtype)

    def splits(self, shards: int) -> list[Split]:
        """See `layers.tensor_parallel`: experts are split by their inner width."""
        inner = self.experts.inner
        if inner % shards or isinstance(self.gate_up[...], Quantised | Mxfp4):
            return []
        self.shards = shards
        widths = (inner, inner)
        return [Split(self, "gate_up", 2, widths), Split(self, "gate_up_bias", 1, widths), Split(self, "down", 1)]


def block_rows(pairs: int) -> int:
    """Rows of a block, for so many pairs of rows and experts."""
    return _MANY_ROWS if pairs >= _MANY_PAIRS and jax.default_backend() != "cpu" else _ROWS


def one_of(stacked: Any, expert: jax.Array) -> Any:
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
