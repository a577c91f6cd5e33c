"""Experts in few bits for few rows: the Mosaic kernels, interpreted with race detection, against plain XLA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.small_batch import gpu_experts_many, gpu_packed_experts, packed, packed_experts, reference
from pallas_kernels.small_batch.experts import Picks, picked
from pallas_kernels.small_batch.packed import Packed
from pallas_kernels.small_batch.packed_experts import Gates
from pallas_kernels.small_batch.reference import Stream
from tests.kernels import hopper

#: Formats, and how many inputs have a scale of their own; None: all together.
FORMATS = {
    "int4-g128": (jnp.int4, 128), "mxfp4": (jnp.uint8, 32), "fp8-block": (jnp.float8_e4m3fn, 128),
    "int8": (jnp.int8, None), "int4-g128-zeros": (jnp.int4, 128), "int8-zeros": (jnp.int8, None),
    "int4-g64": (jnp.int4, 64), "int4-g32-zeros": (jnp.int4, 32),
}  # fmt: skip
#: Those whose blocks of inputs have several scales, which the loop over them alone sees.
PIECES = "int4-g64", "int4-g32-zeros"
#: Widths of rows and of experts, with whole blocks of inputs and without.
WHOLE, PART = (256, 128), (192, 64)
#: Experts: as many as the kernel that picks some has at least.
COUNT = 64
EPS = 1e-5


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints a race and goes on."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


def experts(name: str, shape: tuple[int, int, int], seed: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Values that use all of their bits, scales and zero points, if any; and what they stand for."""
    (count, k, n), (dtype, inputs), rng = shape, FORMATS[name], np.random.default_rng(seed)
    if name == "mxfp4":
        codes = rng.integers(0, 16, shape)
        scale = rng.integers(118, 123, (count, k // 32, n))
        table = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        wide = table[codes] * np.repeat(2.0 ** (scale - 127), 32, axis=1)
        both = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        return (both, scale.astype(np.uint8)), wide
    values = rng.normal(0, {jnp.int8: 60, jnp.int4: 4}.get(dtype, 100), shape)
    limits = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    values = np.clip(values, float(limits.min), float(limits.max))
    values = (np.round(values) if "int" in name else values).astype(dtype)
    scale = rng.uniform(0.5, 1.5, (count, k // (inputs or k), n)).astype(np.float32) / (k**0.5 * 40)
    wide, each = np.asarray(values, np.float64), k // scale.shape[1]
    if not name.endswith("-zeros"):
        return (values, scale), wide * np.repeat(scale, each, axis=1)
    zero = rng.integers(*((-8, 9) if dtype == jnp.int4 else (-128, 128)), scale.shape).astype(np.int8)
    scale = scale.astype(jnp.bfloat16)
    repeated = (np.repeat(np.asarray(x, np.float64), each, axis=1) for x in (zero, scale))
    return (values, scale, zero), (wide - next(repeated)) * next(repeated)


def packed_as(name: str, *raw: Any) -> Packed:
    return (packed_experts.pack_float4 if name == "mxfp4" else packed_experts.pack)(*raw)


@pytest.mark.parametrize(
    ("kind", "inputs", "groups", "said"),
    [
        ("uint8", 256, 1, "got uint8"),
        ("int4", 160, 1, "multiples of 64 wide, got 160 and 64"),
        ("int4", 256, 8, None),
        ("int4", 256, 16, "got 16 of 256"),
        ("int4", 320, 10, "got 10 of 320"),
        ("int4", 14336, 448, "at most 256 groups of inputs, got 448"),
        ("int4", 192, 1, None),
        ("float4_e2m1fn", 192, 6, None),
        ("float4_e2m1fn", 192, 1, "got 1 of 192"),
    ],
)
def test_experts_that_cannot_be_packed(kind: str, inputs: int, groups: int, said: str | None):
    why = packed_experts.refusal(kind, inputs, 64, groups)
    assert why is None if said is None else said in (why or "")


@pytest.mark.parametrize(("tokens", "each"), [(1, 1), (8, 8), (32, 16), (700, 32)])
def test_a_plan_has_every_pair_once_and_no_slot_in_vain(tokens: int, each: int):
    count, chosen = 9, 3
    rng = np.random.default_rng(tokens)
    experts_MK = np.stack([rng.permutation(count if tokens < 32 else 4)[:chosen] for _ in range(tokens)])
    plan = jax.jit(packed_experts.plan, static_argnums=(1, 2))
    experts_S, sources_Q, places_MK = plan(experts_MK, count, each)
    results = packed_experts.most_slots(tokens, chosen, count, each) * each
    listed = np.asarray(experts_S)
    used = listed[: np.sum(listed >= 0)]
    assert np.all(used >= 0) and set(used.tolist()) == set(experts_MK.reshape(-1).tolist())
    for expert in set(used.tolist()):
        own = 1 if sources_Q is None else -(-int(np.sum(experts_MK == expert)) // each)
        assert np.sum(used == expert) == own
    places = np.asarray(places_MK)
    assert len(set(places.reshape(-1).tolist())) == tokens * chosen and places.max() < results
    np.testing.assert_array_equal(listed[places // each], experts_MK)
    held = places % each if sources_Q is None else np.asarray(sources_Q)[places]
    np.testing.assert_array_equal(held, np.repeat(np.arange(tokens)[:, None], chosen, axis=1))
    if sources_Q is not None:
        assert sources_Q.shape == (results,) and np.sum(np.asarray(sources_Q) < tokens) == tokens * chosen


def arguments(name: str, m: int, *, biased: bool) -> tuple[tuple[Any, ...], dict[str, Any], list[np.ndarray]]:
    """Of `mix`, but for packing; and weights expanded. From 9 rows on one expert has more than 8 of them."""
    chosen, rng = 2, np.random.default_rng(m)
    e, f = PART if name in ("mxfp4", "int8", "int8-zeros") else WHOLE
    (gate_up, first), (down, second) = experts(name, (COUNT, e, 2 * f), 1), experts(name, (COUNT, f, e), 2)
    experts_MK = np.stack([rng.permutation(5)[:chosen] for _ in range(m)])  # most are nobody's
    experts_MK[:9, 0], experts_MK[:9, 1] = 0, 1 + experts_MK[:9, 1] % 4
    weights_MK = rng.uniform(0.2, 1, (m, chosen)).astype(np.float32)
    x = rng.normal(0, 1, (m, e)).astype(jnp.bfloat16)
    extra: dict[str, Any] = {}
    if biased:
        bias = lambda n: rng.normal(0, 1, (COUNT, n)).astype(jnp.bfloat16)
        extra = dict(gates=Gates(7.0, 1.702), gate_up_bias=bias(2 * f), down_bias=bias(e))
    return (x, experts_MK, weights_MK, gate_up, down), extra, [first, second]


def by_rows(args: tuple[Any, ...], extra: dict[str, Any], wide: list[np.ndarray]) -> np.ndarray:
    """The definition in float64, row by row."""
    x, experts_MK, weights_MK = (np.asarray(a, np.float64) for a in args[:3])
    out = np.zeros(x.shape)
    bias = {name: np.asarray(extra[name], np.float64) for name in ("gate_up_bias", "down_bias") if name in extra}
    for row, (own, weights) in enumerate(zip(experts_MK.astype(int), weights_MK, strict=True)):
        for expert, weight in zip(own, weights, strict=True):
            both = x[row] @ wide[0][expert] + (bias["gate_up_bias"][expert] if bias else 0)
            gate, up = np.split(both, 2)
            if bias:
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            else:
                hidden = gate / (1 + np.exp(-gate)) * up
            out[row] += weight * (hidden @ wide[1][expert] + (bias["down_bias"][expert] if bias else 0))
    return out


def picks(args: tuple[Any, ...]) -> Picks:
    """What is picked of a mixture's arguments, as the kernel that picks has it; of 16 rows the last four are none."""
    experts_MK, weights_MK = map(np.array, args[1:3])
    if len(experts_MK) == 16:
        experts_MK[12:], weights_MK[12:] = -1, np.inf
    found = picked(jnp.asarray(experts_MK), jnp.asarray(weights_MK))
    if len(experts_MK) == 1 or found.experts_GP.shape[0] > 1:
        return found
    used = np.isin(np.arange(COUNT), experts_MK)
    order = np.full(COUNT, -1)
    order[: used.sum()] = np.flatnonzero(used)
    begins = np.cumsum(used) - used
    return found._replace(order_X=jnp.asarray(order.astype(np.int32)), begins_X=jnp.asarray(begins.astype(np.int32)))


def stream(x: np.ndarray, gain: float = 1.0) -> Stream:
    return reference.begin(jnp.asarray(x), jnp.full(x.shape[1], gain, jnp.bfloat16))


def test_xlas_path_is_the_definition():
    """Inputs that fill the last block up stand for nothing."""
    given = {name: arguments(name, 5, biased=name == "mxfp4") for name in FORMATS}
    choices = {name: picks(args) for name, (args, _, _) in given.items()}

    @jax.jit
    def every(given: Any) -> Any:
        found = {}
        for name, (args, extra, _) in given.items():
            weights = [packed_as(name, *raw) for raw in args[3:]]
            x, experts_MK, weights_MK = args[:3]
            found[name] = packed_experts.mix(x, experts_MK, weights_MK, weights[0], weights[1], **extra), weights
            own = stream(x)
            gain = jnp.ones(own.h_ME.shape[1], jnp.bfloat16)
            after = packed_experts.mix_picked(own, choices[name], 2, weights[0], weights[1], gain, EPS)
            found[name] += (after.h_ME.astype(jnp.float32) - own.h_ME.astype(jnp.float32),)
            found[name] += ([jax.vmap(packed.dequantised)(weight) for weight in weights],)
        return found

    for name, (mixed, weights, of_choice, expanded) in every(given).items():
        args, extra, wide = given[name]
        for own, weight, want in zip(expanded, weights, wide, strict=True):
            k, n = want.shape[1:]
            zeros = packed.ZEROS if name.endswith("-zeros") else ""
            assert weight.kind == {"mxfp4": "float4_e2m1fn"}.get(name, weight.values.dtype.name + zeros)
            groups = k // (FORMATS[name][1] or k)
            assert packed_experts.refusal(weight.kind, k, n, groups) is None
            np.testing.assert_allclose(own[:, :k], want, rtol=1e-6)
            if not zeros:
                np.testing.assert_array_equal(own[:, k:], 0)
        want = by_rows(args, extra, wide)
        np.testing.assert_allclose(mixed, want, atol=2**-6 * np.abs(want).max())
        x = np.asarray(args[0], np.float64)
        want = by_rows((x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS), *args[1:]), {}, wide)
        np.testing.assert_allclose(of_choice, want, atol=2**-6 * max(np.abs(want).max(), np.abs(x).max()))


@hopper.interpreted
@pytest.mark.parametrize(("name", "m"), [
    (name, m) for name in sorted(FORMATS) for m in (1, 3, 8, 16)
    if m == 16 or (name not in PIECES and (m == 1 or not name.endswith("-zeros")))
])  # fmt: skip
def test_kernels_agree_with_xla(name: str, m: int):
    given, extra, _ = arguments(name, m, biased=name == "mxfp4")
    args: tuple[Any, ...] = (
        *map(jnp.asarray, given[:3]),
        *(packed_as(name, *map(jnp.asarray, raw)) for raw in given[3:]),
    )
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    got, want = gpu_packed_experts.mix(*args, **extra, interpret=params), packed_experts.mix(*args, **extra)
    np.testing.assert_allclose(got, want, atol=2**-7 * float(jnp.abs(want).max()))
    width = given[0].shape[1]
    rest = stream(given[0], 0.5), picks(given), 2, *args[3:], jnp.full(width, 0.75, jnp.bfloat16), EPS
    got, want = (of.mix_picked(*rest, **more) for of, more in (
        (gpu_packed_experts, {"interpret": params}), (packed_experts, {})
    ))  # fmt: skip
    for own, other in zip((*got[:2], got[2][:, :m]), (*want[:2], want[2][:, :m]), strict=True):
        own, other = (np.asarray(x, np.float32) for x in (own, other))
        np.testing.assert_allclose(own, other, atol=2**-6 * np.abs(other).max())


@hopper.proved
@pytest.mark.parametrize("m", [8, 1024, 3000])
def test_kernels_for_quarters_of_blocks_spill_nothing(m: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Qwen3-30B-A3B's experts with scales and zero points for every 32 inputs, by themselves and as linked code."""
    shape = jax.ShapeDtypeStruct

    def weights(k: int, n: int) -> Packed:
        parts = shape((128, k // 32, n), jnp.float32), shape((128, k // 32, n), jnp.int8)
        return jax.eval_shape(packed_experts.pack, shape((128, k, n), jnp.int4), *parts)

    rows = shape((m, 2048), jnp.bfloat16), shape((m, 8), jnp.int32), shape((m, 8), jnp.float32)
    mix = (gpu_packed_experts if m == 8 else gpu_experts_many).mix
    args = *rows, weights(2048, 1536), weights(768, 2048)
    _, usage = hopper.compiled(lambda args: mix(*args), args, tmp_path, monkeypatch)
    assert len(usage) >= 4 and all(x.spill_bytes == 0 and not x.serialized for x in usage), usage


def test_slots_of_many_rows_hold_most_experts_own():
    """Of few rows one for nearly all; of more than a tile has, as many as are needed, about equally full."""
    of = gpu_experts_many.slot_rows
    assert [of(m, 8, 128) for m in (16, 160, 1024, 4096)] == [8, 24, 80, 96]
    assert [of(m, 4, 32) for m in (32, 1024)] == [8, 80]
    assert [of(m, 8, 128, 64) for m in (16, 160, 1024, 4096)] == [8, 24, 40, 64]


@hopper.interpreted
@pytest.mark.parametrize(("name", "rows"), [
    (name, rows) for name in (*sorted(FORMATS), "bfloat16") for rows in (8, 24) if rows == 24 or name not in PIECES
])  # fmt: skip
def test_kernels_for_many_rows_agree_with_xla(name: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    """Programs with several tiles, rings that come round, and slots that are not full; of 8 rows slot after slot in a
    tile, of 24 tile after tile in a slot."""
    monkeypatch.setattr(gpu_experts_many, "_CACHED", 0 if rows == 8 else 1 << 40)
    monkeypatch.setattr(gpu_experts_many.mosaic, "MULTIPROCESSORS", 3)
    monkeypatch.setattr(gpu_experts_many, "_MAX_STAGES", 2)
    monkeypatch.setattr(gpu_experts_many, "slot_rows", lambda *_: rows)
    biased = name in ("mxfp4", "int8", "int8-zeros")
    given, extra, wide = arguments("fp8-block" if name == "bfloat16" else name, 24, biased=biased)
    x, experts_MK, weights_MK, *raw = given
    if name == "bfloat16":
        kernels: list[Any] = [jnp.asarray(w).astype(jnp.bfloat16) for w in wide]
        same = [packed_as("int8", w, jnp.ones((COUNT, 1, w.shape[2]))) for w in kernels]
    else:
        kernels = same = [packed_as(name, *map(jnp.asarray, one)) for one in raw]
    first = jnp.asarray(x), jnp.asarray(experts_MK), jnp.asarray(weights_MK)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    # Waited for: what XLA ran beside three interpreted threads could wait for ever, and they for it.
    got = jax.block_until_ready(gpu_experts_many.mix(*first, kernels[0], kernels[1], **extra, interpret=params))
    want = packed_experts.mix(*first, same[0], same[1], **extra)
    np.testing.assert_allclose(got, want, atol=2**-7 * float(jnp.abs(want).max()))
