"""Small-batch products compiled on a Hopper GPU: against plain XLA, and one row against many.

`pytest --noconftest`, as conftest.py keeps JAX to the CPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.small_batch import (
    experts,
    gpu,
    gpu_experts,
    gpu_experts_many,
    gpu_norms,
    gpu_packed_experts,
    gpu_packed_many,
    gpu_router,
    packed,
    packed_experts,
    reference,
)
from pallas_kernels.small_batch.reference import Stream

pytestmark = pytest.mark.skipif(gpu.supported() is not None, reason=str(gpu.supported()))

EPS, E, F, C = 1e-5, 1024, 9216, 128
COUNTS = (6, 1, 1)


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(jnp.bfloat16)


def rows(m: int) -> dict[str, Any]:
    """The first m of the same 128 rows, and their tables."""
    padded = reference.padded(m)
    angle = jax.random.uniform(jax.random.key(2), (C // 2, 128))[:, :padded] * 6
    whole = reference.begin(normal(0, 128, E), normal(1, E))  # at once: XLA sums squares of fewer rows in another order
    stream = Stream(whole.h_ME[:m], whole.scaled_ME[:m], whole.squares_TR[:, :padded])
    return {
        "stream": stream, "attended": normal(4, 128, C * COUNTS[0])[:m],
        "rope": jnp.stack([jnp.cos(angle), jnp.sin(angle)]),
    }  # fmt: skip


def layer(m: int, of: Any) -> Any:
    """All four kernels of a layer; its heads are normed and have biases."""
    kernels = [normal(5 + i, *shape, scale=0.03) for i, shape in enumerate(
        ((E, C * sum(COUNTS)), (C * COUNTS[0], E), (E, 2 * F), (F, E))
    )]  # fmt: skip
    own, extra = rows(m), {"bias": normal(10, C * sum(COUNTS)), "gains": (normal(11, C), normal(12, C))}
    heads = of.heads(own["stream"], kernels[0], own["rope"], COUNTS, EPS, **extra)
    stream = of.add(own["attended"], kernels[1], own["stream"].h_ME, normal(1, E))
    hidden = of.swiglu(stream, kernels[2], EPS)
    last = of.add(hidden, kernels[3], stream.h_ME, normal(1, E))
    return heads, stream, hidden, last, of.logits(last.h_ME, kernels[2]), of.logits(last.h_ME, kernels[3], flip=False)


#: Values' types, how many inputs have scales of their own, if not all the same, and whether there are zero points.
FORMATS = (
    (jnp.int8, None, False), (jnp.float8_e4m3fn, 128, False), (jnp.int4, 128, False), (jnp.int8, None, True),
    (jnp.int4, 128, True),
)  # fmt: skip
SMALL = (jnp.int4, 32, True), (jnp.int4, 64, False), (jnp.int8, 32, False)
NAMES = "int8", "float8_e4m3fn", "int4", "int8-zeros", "int4-zeros", "int4-g32-zeros", "int4-g64", "int8-g32"


def few(
    dtype: Any, each: int | None, zeros: bool, seed: int, k: int, n: int, *, order: bool = False, invariant: bool = True
) -> packed.Packed:  # fmt: skip
    """Zero points of either sign, up to a deviation and a half, differ from column to column."""
    values = jax.random.normal(jax.random.key(seed), (k, n)) * (2 if dtype == jnp.int4 else 40)
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.clip(jnp.round(values), jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    scale = jax.random.uniform(jax.random.key(seed), (k // (each or k), n), jnp.float32, 0.5, 1.5)
    own = jax.random.permutation(jax.random.key(seed), k) if order else None
    zero = zero_points(zeros, dtype, seed, scale)
    weight = packed.pack(values.astype(dtype), scale * 0.03 / jnp.std(values), zero, own)
    return dataclasses.replace(weight, invariant=invariant)


def zero_points(zeros: bool, dtype: Any, seed: int, scale: jax.Array) -> jax.Array | None:
    most = 3 if dtype == jnp.int4 else 60
    key = jax.random.key(seed + 1)
    return jax.random.randint(key, scale.shape, -most, most + 1, jnp.int8) if zeros else None


def few_bits(form: Any, m: int, of: Any, *, invariant: bool = True) -> Any:
    """The same four and the output layer of weights in a format; heads as they are, biased, and normed besides."""
    own, found = rows(m), []
    biased = {"bias": normal(10, C * sum(COUNTS))}
    kernel = functools.partial(few, *form, 20, invariant=invariant)
    for extra in ({}, biased, {**biased, "gains": (normal(11, C), normal(12, C))}):
        found += of.heads(own["stream"], kernel(E, C * sum(COUNTS)), own["rope"], COUNTS, EPS, **extra)
    stream = of.add(own["attended"], kernel(C * COUNTS[0], E), own["stream"].h_ME, normal(1, E))
    hidden = of.swiglu(stream, kernel(E, 2 * F), EPS)
    last = of.add(hidden, kernel(F, E), stream.h_ME, normal(1, E))
    return [*found, stream, hidden, last, of.logits(last.h_ME, kernel(E, F))]


def by_digits(form: Any, m: int, of: Any) -> Any:
    """What several rows are multiplied as integers for, gate and up and the output layer, whose programs go on with
    other columns; and heads as they are, biased, and normed besides."""
    own, found = rows(m), []
    biased = {"bias": normal(10, C * sum(COUNTS))}
    kernel = functools.partial(few, *form, 20, invariant=False)
    for extra in ({}, biased, {**biased, "gains": (normal(11, C), normal(12, C))}):
        found += of.heads(own["stream"], kernel(E, C * sum(COUNTS)), own["rope"], COUNTS, EPS, **extra)
    last = kernel(E, 300 * 128)
    return [*found, of.swiglu(own["stream"], kernel(E, 2 * F), EPS), of.logits(own["stream"].h_ME, last)]


def in_order(m: int, of: Any, *, invariant: bool = True) -> Any:
    """A layer's four in 4 bits with zero points, their inputs in another order each."""
    own, kernel = rows(m), functools.partial(few, jnp.int4, 128, True, 20, order=True, invariant=invariant)
    heads = of.heads(own["stream"], kernel(E, C * sum(COUNTS)), own["rope"], COUNTS, EPS)
    stream = of.add(own["attended"], kernel(C * COUNTS[0], E), own["stream"].h_ME, normal(1, E))
    hidden = of.swiglu(stream, kernel(E, 2 * F), EPS)
    last = of.add(hidden, kernel(F, E), stream.h_ME, normal(1, E))
    return heads, stream, hidden, last


def side_by_side(m: int, of: Any) -> Any:
    """Rows of a table, one of which is none of its rows, and others; and the latter by themselves."""
    ids = jnp.arange(m, dtype=jnp.int32) * 7919 % 50 + 15
    table, own = reference.NormedPart(normal(20, 64, E), normal(1, E), ids), rows(m)["stream"].h_ME
    return of.norms([table, reference.NormedPart(own, normal(2, E))], EPS), of.norms(
        [reference.NormedPart(own, normal(3, E))], EPS
    )


def mixture(m: int, of: Any) -> Any:
    count, inner, stream = 64, 256, rows(m)["stream"]
    choice = (gpu_router if of is gpu_experts else of).choose(stream, normal(12, E, count, scale=0.1), EPS, 4, m)
    kernels = normal(13, count, E, 2 * inner, scale=0.03), normal(14, count, inner, E, scale=0.03)
    return choice.weights_XR.T[:m], of.mix(stream, choice, *kernels, normal(1, E), EPS, 4)


def packed_mixture(m: int, of: Any) -> Any:
    """Experts of weights in each format that a kernel has picked."""
    count, inner, stream, found = 64, 256, rows(m)["stream"], []
    picks = (gpu_router if of is gpu_packed_experts else experts).pick(
        stream, normal(12, E, count, scale=0.1), EPS, 4, m
    )  # fmt: skip
    for i, form in enumerate(FORMATS + SMALL):
        each = [[few(*form, 40 + i + 3 * n, k, o) for n in range(count)] for k, o in (
            (E, 2 * inner), (inner, E)
        )]  # fmt: skip
        kernels = [jax.tree.map(lambda *x: jnp.stack(x), *one) for one in each]
        found.append(of.mix_picked(stream, picks, 4, *kernels, normal(1, E), EPS))
    return found


def by_rows(found: Any, m: int) -> list[np.ndarray]:
    """Arrays; the squares of a stream's tiles added up, as of one tile any rounding of a few values shows.

    Added by NumPy: XLA takes an order that depends on the number of rows.
    """
    total = lambda squares_TR: np.asarray(squares_TR, np.float64).sum(axis=0)[:m, None]
    fixed = jax.tree.map(
        lambda x: (*x[:2], total(x.squares_TR)) if isinstance(x, Stream) else x, found,
        is_leaf=lambda x: isinstance(x, Stream),
    )  # fmt: skip
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(fixed)]


@pytest.mark.parametrize(
    ("run", "of", "want", "counts"),
    [
        (layer, gpu, reference, (1, 4, 16, 24, 32, 40, 128)),
        # By wgmma from 16 rows on, in steps of two blocks and of one.
        *(pytest.param(functools.partial(few_bits, form), gpu, reference, (1, 4, 16, 24, 32), id=f"few_bits-{name}")
          for form, name in zip(FORMATS + SMALL, NAMES, strict=True)),
        # Up to four rows as integers, and one where a residual is added.
        *(pytest.param(functools.partial(by_digits, form), gpu, reference, (1, 2, 3, 4), id=f"digits-{name}")
          for form, name in zip(FORMATS + SMALL, NAMES, strict=True) if "float" not in name),
        *(pytest.param(functools.partial(few_bits, form, invariant=False), gpu, reference, (1,), id=f"integers-{name}")
          for form, name in zip(FORMATS + SMALL, NAMES, strict=True) if "float" not in name),
        (in_order, gpu, reference, (1, 4, 16, 32)),
        (side_by_side, gpu_norms, reference, (1, 4, 128)),
        pytest.param(functools.partial(in_order, invariant=False), gpu, reference, (1,), id="integers-in_order"),
        (mixture, gpu_experts, experts, (1, 4, 32)),
        (packed_mixture, gpu_packed_experts, packed_experts, (1, 4, 32)),
    ],
)  # fmt: skip
def test_rows_are_xlas_and_have_the_same_bits_among_others(run: Any, of: Any, want: Any, counts: tuple[int, ...]):
    alone = by_rows(run(1, of), 1)
    for m in counts:
        for i, (got, expected) in enumerate(zip(by_rows(run(m, of), m), by_rows(run(m, want), m), strict=True)):
            np.testing.assert_array_equal(got[:1], alone[i])
            np.testing.assert_allclose(got, expected, atol=2**-6 * np.abs(expected).max())


@pytest.mark.parametrize("m", [33, 130, 600, 1100])
@pytest.mark.parametrize("form", FORMATS + SMALL, ids=NAMES)
def test_many_rows_of_few_bits_agree_with_float32(form: tuple[Any, bool, bool], m: int):
    """Programs that share inputs, and several tiles of rows."""
    for k, n in ((E, F), (F, E), (F, 64 * 3)):
        weight, x = few(*form, 7, k, n, order=m == 130), normal(3, m, k)
        want = np.asarray(x.astype(jnp.float32) @ packed.dequantised(weight))
        for out in (jnp.bfloat16, jnp.float32):
            got = jax.jit(gpu_packed_many.multiply, static_argnums=2)(x, weight, out)
            assert got.dtype == out
            assert np.abs(np.asarray(got, np.float32) - want).max() <= 2**-7 * np.abs(want).max()


def experts_of(name: str, seed: int, count: int, k: int, n: int) -> Any:
    """Experts in bfloat16, or packed."""
    if name == "bfloat16":
        return normal(seed, count, k, n, scale=0.03)
    if name == "mxfp4":
        codes = jax.random.bits(jax.random.key(seed), (count, k // 2, n), jnp.uint8)
        scales = jax.random.randint(jax.random.key(seed + 1), (count, k // 32, n), 118, 122)
        return packed_experts.pack_float4(codes, scales.astype(jnp.uint8))
    dtype, inputs, zeros = (FORMATS + SMALL)[NAMES.index(name)]
    values = jax.random.normal(jax.random.key(seed), (count, k, n)) * (2 if dtype == jnp.int4 else 40)
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.clip(jnp.round(values), jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    scale = jax.random.uniform(jax.random.key(seed), (count, k // (inputs or k), n), jnp.float32, 0.5, 1.5)
    zero = zero_points(zeros, dtype, seed, scale)
    return packed_experts.pack(values.astype(dtype), scale * 0.03 / jnp.std(values), zero)


@pytest.mark.parametrize("m", [24, 1000])
@pytest.mark.parametrize("name", ["bfloat16", "mxfp4", *NAMES])
def test_experts_of_many_rows_agree_with_float32(name: str, m: int):
    """Slots of several sizes, one expert that all rows have; biases, gates and widths of gpt-oss and of Qwen3."""
    count, per_token, odd = 32, 4, name in ("bfloat16", "mxfp4")
    width, inner = (1088, 320) if odd else (1024, 384)
    gates = packed_experts.Gates(7.0, 1.702) if odd else None
    x, keys = normal(3, m, width), jax.random.split(jax.random.key(4), 2)
    others_MK = jnp.argsort(jax.random.uniform(keys[0], (m, count - 1)), axis=1)[:, : per_token - 1] + 1
    experts_MK = jnp.concatenate([jnp.zeros((m, 1), jnp.int32), others_MK.astype(jnp.int32)], axis=1)
    weights_MK = jax.nn.softmax(jax.random.normal(keys[1], (m, per_token)))
    kernels = [experts_of(name, 20, count, width, 2 * inner), experts_of(name, 90, count, inner, width)]
    biases = [normal(6, count, 2 * inner, scale=float(odd)), normal(7, count, width, scale=float(odd))]
    given = {"gate_up_bias": biases[0], "down_bias": biases[1]} if odd else {}
    got = jax.jit(functools.partial(gpu_experts_many.mix, gates=gates))(x, experts_MK, weights_MK, *kernels, **given)
    assert got.dtype == jnp.float32

    @jax.jit
    def wanted(x: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array, kernels: Any, biases: Any) -> jax.Array:
        wide = [w if isinstance(w, jax.Array) else jax.vmap(packed.dequantised)(w) for w in kernels]
        wide = [w[:, :k].astype(jnp.float32) for w, k in zip(wide, (width, inner), strict=True)]
        both = jnp.einsum("me,xef->mxf", x.astype(jnp.float32), wide[0]) + biases[0].astype(jnp.float32)[None]
        y_MXE = jnp.einsum("mxf,xfe->mxe", packed_experts.activated(both, gates), wide[1])
        y_MXE = y_MXE + biases[1].astype(jnp.float32)[None]
        return packed_experts.weighed(jnp.take_along_axis(y_MXE, experts_MK[..., None], axis=1), weights_MK)

    with jax.default_device(jax.devices("cpu")[0]):  # a GPU's compiler tries many ways for every product
        want = np.asarray(wanted(*jax.device_put((x, experts_MK, weights_MK, kernels, biases), jax.devices("cpu")[0])))
    np.testing.assert_allclose(got, want, atol=2**-6 * np.abs(want).max())
