"""Experts in few bits for few rows: how their weights lie, which rows each has, and the specification in plain XLA.

`gpu_packed_experts` has the kernels. Routers are the caller's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.small_batch import packed, reference
from pallas_kernels.small_batch.experts import Picks, by_rows
from pallas_kernels.small_batch.packed import BLOCK, Packed
from pallas_kernels.small_batch.reference import Stream

#: Rows of the pass up to which every expert in use has all of them; of a slot where there are more, and that mma
#: multiplies together.
PIECE = 8
#: Groups of scales that one copy brings.
_MOST_GROUPS = 256
#: Pairs of a row and an expert that are compared with each other.
_BLOCK = 1024


class Gates(NamedTuple):
    """gpt-oss' gates: gate and up are cut at `limit`, and (up + 1) * gate * sigmoid(sharpness * gate) is left."""

    limit: float
    sharpness: float


def refusal(kind: str, inputs: int, outputs: int, groups: int) -> str | None:
    """Why experts [inputs, outputs] of `Packed.kind` with so many groups of scales are not served, or None."""
    if kind.removesuffix(packed.ZEROS) not in ("int8", "int4", "float8_e4m3fn", packed.FLOAT4):
        return f"values must be int8, int4, float8_e4m3fn or {packed.FLOAT4}, got {kind}"
    if inputs % 64 or outputs % 64:
        return f"experts must be multiples of 64 wide, got {inputs} and {outputs}"
    if kind == packed.FLOAT4:
        return None if groups == inputs // 32 else f"scales must be of 32 inputs each, got {groups} of {inputs}"
    sizes = [BLOCK // n for n in packed.PIECES]
    if groups > 1 and (inputs % BLOCK or groups not in [inputs // size for size in sizes]):
        shown = ", ".join(map(str, sizes))
        return f"scales must be one, or one for every {shown} inputs of whole blocks, got {groups} of {inputs}"
    return (
        None if groups <= _MOST_GROUPS else f"scales must be for at most {_MOST_GROUPS} groups of inputs, got {groups}"
    )


def pack(values_XKN: jax.Array, scale_XGN: jax.Array, zero_XGN: jax.Array | None = None) -> Packed:
    """From values [X, in, out] in their own order; inputs are filled up to whole blocks with zeros.

    With zero points these weigh something, but no row has such inputs.
    """
    more = -values_XKN.shape[1] % BLOCK
    return jax.vmap(packed.pack)(jnp.pad(values_XKN, ((0, 0), (0, more), (0, 0))), scale_XGN, zero_XGN)


def pack_float4(codes_XKN: jax.Array, scale_XGN: jax.Array) -> Packed:
    """From MXFP4's codes [X, in / 2, out], the even input in a byte's low half, and exponents [X, in / 32, out]."""
    count, pairs, outputs = codes_XKN.shape
    codes = jnp.stack([codes_XKN & 15, codes_XKN >> 4], axis=2).reshape(count, 2 * pairs, outputs)
    more = -2 * pairs % BLOCK
    codes = jnp.pad(codes, ((0, 0), (0, more), (0, 0)))
    return jax.vmap(packed.pack_float4)(codes, jnp.pad(scale_XGN, ((0, 0), (0, more // 32), (0, 0))))


class Plan(NamedTuple):
    """Which rows each expert in use multiplies.

    Attributes:
      experts_S: int32, the expert of each slot, -1 after the last. Every slot has as many rows of results, one slot
        after the other.
      sources_Q: of each row of results the row of the pass, M where it has none; None: every slot has all rows.
      places_MK: the row of results of each pair of a row and one of its experts.
    """

    experts_S: jax.Array
    sources_Q: jax.Array | None
    places_MK: jax.Array


def plan(experts_MK: jax.Array, count: int, each: int) -> Plan:
    """The plan of rows' experts, `count` in all, for slots of `each` rows.

    Up to PIECE rows stand side by side for every expert in use; of more rows each expert has its own, in as many slots
    as they fill. Sums over comparisons, which are a few launches; sorting is more.
    """
    (m, k), flat_P = experts_MK.shape, experts_MK.reshape(-1).astype(jnp.int32)
    pairs, slots = m * k, most_slots(m, k, count, each)
    if m == 1:
        return Plan(flat_P, None, jnp.arange(k)[None])
    of_X, before_XX = jnp.arange(count, dtype=jnp.int32), jnp.tri(count, k=-1, dtype=jnp.bool_)
    chosen_PX = flat_P[:, None] == of_X[None]
    rows_X = jnp.sum(chosen_PX, axis=0, dtype=jnp.int32)
    slots_X = jnp.minimum(rows_X, 1) if m <= PIECE else (rows_X + each - 1) // each
    begins_X = jnp.sum(jnp.where(before_XX, slots_X[None], 0), axis=1)
    at_S1 = jnp.arange(slots, dtype=jnp.int32)[:, None]
    here_SX = (begins_X[None] <= at_S1) & (at_S1 < (begins_X + slots_X)[None])
    experts_S = jnp.sum(jnp.where(here_SX, of_X[None] + 1, 0), axis=1) - 1
    begins_P = each * jnp.sum(jnp.where(chosen_PX, begins_X[None], 0), axis=1)
    row_P = jnp.arange(pairs, dtype=jnp.int32) // k
    if m <= PIECE:
        return Plan(experts_S, None, (begins_P + row_P).reshape(m, k))
    places_P = begins_P + _ranks(flat_P, count)
    sources_Q = jnp.full((slots * each,), m, jnp.int32).at[places_P].set(row_P, unique_indices=True, mode="drop")
    return Plan(experts_S, sources_Q, places_P.reshape(m, k))


def _ranks(flat_P: jax.Array, count: int) -> jax.Array:
    """How many pairs before each have the same expert."""
    size = min(flat_P.size, _BLOCK)
    blocks_BP = jnp.pad(flat_P, (0, -flat_P.size % size), constant_values=-1).reshape(-1, size)
    same_BPP = (blocks_BP[:, :, None] == blocks_BP[:, None]) & jnp.tri(size, k=-1, dtype=jnp.bool_)[None]
    ranks_BP = jnp.sum(same_BPP, axis=2, dtype=jnp.int32)
    if blocks_BP.shape[0] > 1:
        chosen_BPX = blocks_BP[:, :, None] == jnp.arange(count, dtype=jnp.int32)[None, None]
        rows_BX = jnp.sum(chosen_BPX, axis=1, dtype=jnp.int32)
        before_BX = jnp.cumsum(rows_BX, axis=0) - rows_BX
        ranks_BP += jnp.sum(jnp.where(chosen_BPX, before_BX[:, None], 0), axis=2)
    return ranks_BP.reshape(-1)[: flat_P.size]


def most_slots(m: int, per_token: int, count: int, each: int) -> int:
    """Slots of so many rows that all experts together may need."""
    pairs = m * per_token
    return min(pairs, count) if m <= PIECE else min(pairs, pairs // each + min(count, pairs))


def activated(both: jax.Array, gates: Gates | None) -> jax.Array:
    """What the halves [gate up] of the last axis make of each other, float32."""
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    return gated(gate, up, gates)


def gated(gate: jax.Array, up: jax.Array, gates: Gates | None) -> jax.Array:
    """The same of each half, float32; also in kernels."""
    if gates is None:
        return gate * lax.logistic(gate) * up
    gate, up = jnp.minimum(gate, gates.limit), jnp.maximum(jnp.minimum(up, gates.limit), -gates.limit)
    return (up + 1) * gate * lax.logistic(gate * gates.sharpness)


def weighed(y_MKE: jax.Array, weights_MK: jax.Array) -> jax.Array:
    """Float32 [M, E]: the sum over a row's experts in the order of `weights_MK`."""
    total = y_MKE[:, 0].astype(jnp.float32) * weights_MK[:, :1]
    for i in range(1, weights_MK.shape[1]):
        total = total + y_MKE[:, i].astype(jnp.float32) * weights_MK[:, i : i + 1]
    return total


def mix(
    x_ME: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array, gate_up: Packed, down: Packed, *,
    gates: Gates | None = None, gate_up_bias: jax.Array | None = None, down_bias: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """What rows' experts make of them, weighted and summed: float32 [M, E].

    Args:
      experts_MK, weights_MK: of each row; float32 weights.
      gate_up: [X, E, 2 F], each expert's gate beside its up. down: [X, F, E]. Both may have more inputs than rows.
      gates: None: SwiGLU.
      gate_up_bias: [X, 2 F]. down_bias: [X, E].
    """
    del interpret

    hidden_XMF = activated(_times(x_ME[None], gate_up, gate_up_bias), gates).astype(x_ME.dtype)
    y_XME = _times(hidden_XMF, down, down_bias)
    return weighed(y_XME[experts_MK, jnp.arange(x_ME.shape[0])[:, None]], weights_MK)


def mix_picked(
    stream: Stream, picks: Picks, per_token: int, gate_up: Packed, down: Packed, gain_E: jax.Array, eps: float, *,
    interpret: Any = None,
) -> Stream:  # fmt: skip
    """The stream after what picked experts (`experts.pick`) make of its norm is added, weighted.

    For experts without biases whose gates are SwiGLU's; summed in the order of the choice.

    Args:
      per_token: experts of a row. gain_E: of the norm that reads the stream next.
    """
    del interpret
    m, dtype = stream.h_ME.shape[0], stream.h_ME.dtype
    mean_M = stream.squares_TR[:, :m].sum(axis=0) / stream.h_ME.shape[1]
    both_XMF = _products(stream.scaled_ME[None], gate_up) * jax.lax.rsqrt(mean_M + eps)[None, :, None]
    hidden_XMF = activated(both_XMF.astype(dtype), None).astype(dtype)
    y_XME = _products(hidden_XMF, down).astype(dtype)
    experts_MK, weights_MK = (x[:m, :per_token] for x in by_rows(picks))
    y_MKE, there_MK = y_XME[experts_MK, jnp.arange(m)[:, None]], experts_MK >= 0
    y_ME = weighed(jnp.where(there_MK[..., None], y_MKE, 0), jnp.where(there_MK, weights_MK, 0)).astype(dtype)
    return reference.begin((stream.h_ME.astype(jnp.float32) + y_ME.astype(jnp.float32)).astype(dtype), gain_E)


def _times(x: jax.Array, weight: Packed, bias_XN: jax.Array | None) -> jax.Array:
    """Rows of every expert, or of all, times its kernel and with its bias, in their type."""
    y = _products(x, weight).astype(x.dtype)
    return y if bias_XN is None else y + bias_XN[:, None]


def _products(x: jax.Array, weight: Packed) -> jax.Array:
    """The same without a bias, float32."""
    w_XKN = jax.vmap(packed.dequantised)(weight)[:, : x.shape[-1]]
    return jnp.matmul(x.astype(jnp.float32), w_XKN)
