"""Which experts of a mixture rows use, and the ways in which these are read and their results summed.

Owns the router's arithmetic, and the ways:
- by blocks (CPUs, TPUs): pairs of a token and one of its experts are laid into blocks of a fixed
  number of rows, each of one expert, and block after block is multiplied. An expert is read as often as it has blocks,
  once where few rows touch it, and never where none does. A row's bits do not depend on the other rows of the pass,
  since every block's products have the same shape.
- by pairs (GPUs, where pairs are fewer than experts, in few bits up to four times these): each pair's products as sums,
  into which the compiler fuses the gathering of its experts' weights, so that no other expert is read and nothing is
  copied; a loop over blocks would be launches by the thousand.
- all of them (GPUs, more rows): every expert with every row, of which most weigh nothing; in few bits some experts
  after the others.
- packed (Hopper, in few bits): by a kernel that reads each expert in use once (docs/kernels.md).
- many (Hopper, more rows): by a kernel that multiplies each expert's own rows, of bfloat16 as it is or packed.
How kernels are read in few bits, `stacked` says. Must not know modules, or who chooses a way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.models import stacked
from jaxspec.models.base import Experts
from jaxspec.models.layers import ACTIVATIONS, product
from pallas_kernels.small_batch import gpu, gpu_experts_many, gpu_packed_experts, packed_experts

#: Rows of a block, and where pairs of tokens and experts are many. CPUs keep to the first, whose bits are the same for
#: any number of tokens; elsewhere prompts need larger products.
_ROWS, _MANY_ROWS, _MANY_PAIRS = 8, 128, 1024
#: Rows that all experts multiply at once, and that kernels do, at most.
_AT_ONCE = 1024
#: Of gpt-oss' gates: what they are cut at, and what is in their sigmoid.
CLAMP, SHARPNESS = 7.0, 1.702


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
        choice_MX = choice_MX if sigmoid else jax.nn.softmax(logits_MX, axis=-1)
        choice_MX = choice_MX + correction_X.astype(jnp.float32)[None]
    top_MK, experts_MK = jax.lax.top_k(_in_best_groups(choice_MX, cfg), cfg.per_token)
    if correction_X is not None and not sigmoid:
        top_MK = jnp.take_along_axis(logits_MX, experts_MK, axis=1)
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
    return _mixed(gpu_packed_experts if on_gpu(own.backend) else packed_experts, own, x_ME, routing)


def _by_own_rows(own: Stack, x_ME: jax.Array, routing: Routing) -> jax.Array:
    """Each expert, packed or not, with the rows that use it."""
    return _own_rows((own.experts, own.shards, own.backend), own[1:5], x_ME, routing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _own_rows(about: tuple[Any, ...], kernels: tuple[Any, ...], x_ME: jax.Array, routing: Routing) -> jax.Array:
    """The kernel, which heads that are trained need the derivative of; of bfloat16 alone, as theirs are."""
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


def on_gpu(backend: str | None) -> bool:
    """Whether it is any GPU; see MixtureOfExperts.backend."""
    return (backend or jax.default_backend()) in ("gpu", "hopper")


def hopper(backend: str | None) -> bool:
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


#: By name.
WAYS = {"blocks": _by_blocks, "pairs": _by_pairs, "all": _by_all, "packed": _by_kernels, "many": _by_own_rows}


def block_rows(pairs: int) -> int:
    """Rows of a block, for so many pairs of rows and experts."""
    return _MANY_ROWS if pairs >= _MANY_PAIRS and jax.default_backend() != "cpu" else _ROWS


def one_of(stacked: Any, expert: jax.Array | int) -> Any:
    """One expert's part of what is stacked over experts: an array, or a `Quantised` or `Mxfp4`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, expert, keepdims=False), stacked)
