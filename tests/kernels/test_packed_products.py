"""Products of packed weights, of few rows and of many: how they lie; their kernels, interpreted, against plain XLA."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import overlap, sizes
from pallas_kernels.aot.targets import TARGETS
from pallas_kernels.small_batch import (
    gpu,
    gpu_packed,
    gpu_packed_many,
    mosaic,
    packed,
    packed_launch,
    packed_walk,
    reference,
)
from pallas_kernels.small_batch.reference import Stream
from tests.kernels import hopper
from tests.kernels.products import COUNTS, EPS, C, E, close, normal, stream


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints a race and goes on."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


#: Values' types, and how many inputs have a scale of their own, if not all the same.
FORMATS = {
    "int8": (jnp.int8, None), "fp8": (jnp.float8_e4m3fn, None), "fp8-block": (jnp.float8_e4m3fn, 128),
    "int4-g128": (jnp.int4, 128), "int4-g128-zeros": (jnp.int4, 128), "int8-zeros": (jnp.int8, None),
    "int4-g32-zeros": (jnp.int4, 32), "int4-g64": (jnp.int4, 64), "int8-g32": (jnp.int8, 32),
}  # fmt: skip


#: In one program each; `product` by `multiply`, as `sizes` say what it does.
pack, dequantised = jax.jit(packed.pack), jax.jit(packed.dequantised)


def multiply(x: np.ndarray | jax.Array, weight: packed.Packed) -> jax.Array:
    return jax.jit(lambda x, weight: packed.product(x, weight))(x, weight)


@functools.cache
def kernel(name: str, k: int, n: int) -> tuple[jax.Array, ...]:
    """Values [in, out] that use all of their bits, scales, and zero points as far as these go, if any."""
    (dtype, each), rng = FORMATS[name], np.random.default_rng(7)
    values = rng.normal(size=(k, n)).astype(np.float32) * {jnp.int8: 60, jnp.int4: 4}.get(dtype, 100)
    whole = jnp.issubdtype(dtype, jnp.integer)
    limits = (jnp.iinfo if whole else jnp.finfo)(dtype)
    values = np.clip(np.round(values) if whole else values, float(limits.min), float(limits.max))
    scale = rng.uniform(0.5, 1.5, (k // (each or k), n)).astype(np.float32) * 0.1 / values.std()
    values = jnp.asarray(values.astype(dtype))
    if not name.endswith("-zeros"):
        return values, jnp.asarray(scale)
    least, most = (-8, 9) if dtype == jnp.int4 else (-128, 128)
    zero = rng.integers(least, most, scale.shape, np.int8)
    zero[0, :2] = least, most - 1
    return values, jnp.asarray(scale.astype(np.float16)), jnp.asarray(zero)


def rows_of(m: int, k: int) -> np.ndarray:
    return np.random.default_rng(9).normal(size=(m, k)).astype(np.float32)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_packed_weights_are_the_same_weights(name: str, monkeypatch: pytest.MonkeyPatch):
    values, scale, *zeros = kernel(name, 256, 64)
    weight = pack(values, scale, *zeros)
    assert weight.kind == values.dtype.name + (packed.ZEROS if zeros else "")
    assert weight.shape == values.shape and weight.values.dtype == values.dtype
    values, scale, *zeros = (np.asarray(x).astype(np.float32) for x in (values, scale, *zeros))
    wide = values.reshape(scale.shape[0], -1, 64)
    wide = ((wide - zeros[0][:, None] if zeros else wide) * scale[:, None]).reshape(256, 64)
    np.testing.assert_allclose(dequantised(weight), wide, rtol=1e-6, atol=1e-6)
    for rows, expanded in ((3, 1 << 20), (140, 1 << 20), (140, 4 * 256 * 64 // 4)):  # by sums, whole, in shares
        monkeypatch.setattr(sizes, "EXPANDED", expanded)
        x = rows_of(rows, 256)
        want = x @ wide
        np.testing.assert_allclose(multiply(x, weight), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", ["int8", "int4-g128-zeros"])
def test_inputs_in_another_order_are_gathered(name: str, monkeypatch: pytest.MonkeyPatch):
    values, scale, *zeros = kernel(name, 256, 64)
    order = np.random.default_rng(5).permutation(256).astype(np.int32)
    weight = pack(values, scale, *(zeros or [None]), order)
    want = np.zeros((256, 64), np.float32)
    want[order] = dequantised(pack(values, scale, *zeros))
    np.testing.assert_array_equal(dequantised(weight), want)
    for rows, expanded in ((3, 1 << 20), (140, 1 << 20), (140, 4 * 256 * 64 // 4)):
        monkeypatch.setattr(sizes, "EXPANDED", expanded)
        x = rows_of(rows, 256)
        np.testing.assert_allclose(multiply(x, weight), x @ want, rtol=1e-5, atol=1e-4)


def test_scales_beside_zero_points_are_rounded_to_the_nearest():
    """They have 16 bits of significand; with zero points on either side of 0."""
    values, scale = np.ones((256, 64), np.int8), np.linspace(1, 2, 128, dtype=np.float32).reshape(2, 64)
    zero = np.where(np.arange(128).reshape(2, 64) % 2 == 0, -1, 2).astype(np.int8)
    weight = pack(values, scale, zero)
    np.testing.assert_array_equal(packed.word_zeros(weight.scale), zero)
    got = np.asarray(packed.word_scales(weight.scale), np.float64)
    assert 2**-18 < np.abs(got / np.asarray(scale, np.float64) - 1).max() <= 2**-16
    np.testing.assert_array_equal(got, np.round(np.asarray(scale, np.float64) * 2**15) / 2**15)


def test_small_groups_leave_room_for_rows_or_are_refused():
    """Llama 3.1 8B's widths have room with groups of 32; 70B's down in 8 bits has not, nor have its normed heads."""
    room = packed_launch.room_refusal
    for dtype in ("int4", "int4_zeros", "int8"):
        for kind, shape in (("heads", (4096, 6144)), ("swiglu", (4096, 28672)), ("logits", (4096, 128256))):
            assert room(kind, dtype, shape, 128) is None and room("add", dtype, (14336, 4096), 448) is None
    assert room("add", "int4", (28672, 8192), 896) is None and room("add", "int8", (28672, 8192), 448) is None
    assert "896 groups of scales leave no room for 32 rows" in (room("add", "int8", (28672, 8192), 896) or "")
    assert room("heads", "int4", (8192, 10240), 256) is None
    assert "256 groups of scales" in (room("heads", "int4", (8192, 10240), 256, normed=True) or "")


@pytest.mark.parametrize("kind", ["project", "logits", "heads", "normed", "swiglu", "add"])
def test_what_has_room_fits_into_shared_memory(kind: Any):
    """With the groups that weights have once they are packed."""
    passed, refused, whole = 0, 0, 0
    for dtype, zeros in (("int4", False), ("int8", False), ("int4_zeros", True), ("int8_zeros", True)):
        for width in (2048, 4096, 8192, 12288, 16384, 28672, 53248, 65536):
            for stored in (1, width // 256, width // 128, width // 64, width // 32):
                groups, normed = packed.packed_groups(width, stored, zeros=zeros), kind == "normed"
                own = "heads" if normed else kind
                if packed_launch.room_refusal(own, dtype, (width, 4096), groups, normed=normed) is not None:
                    refused += 1
                    continue
                passed += 1
                before = kind in ("project", "heads", "normed", "swiglu")
                for m in (1, 8, 16, 32):
                    few = packed_launch.Launch(
                        kind=own, dtype=dtype, shape=(m, width), columns=4096, groups=groups,
                        eps=EPS if before else None, squares=width // 32 if before else 0, width=width,
                        head_eps=EPS if normed else None,
                    )  # fmt: skip
                    forms = [few]
                    if few.takes_integers:
                        forms.append(dataclasses.replace(few, integers=True))
                    for form in forms:
                        arrays = form.scratch(jnp.bfloat16)
                        ring = arrays.pop("w")  # of 4 bits half of what NumPy says
                        size = math.prod(ring.shape) // (2 if ring.dtype == jnp.int4 else 1)
                        assert mosaic.room(arrays, form.neighbours) >= size, (dtype, width, groups, form.shape)
                    whole += len(forms) > 1
    assert passed > 50 and refused > 5 and whole > 30


def test_what_a_thread_of_wgmma_holds_lies_side_by_side():
    """Of every 16 inputs thread q of four holds 2q, 2q + 1, 2q + 8 and 2q + 9, the pairs 16 bits apart in a word."""
    for dtype, bits in ((jnp.int8, 8), (jnp.int4, 4)):
        order = np.asarray(packed.reordered(jnp.arange(128), jnp.dtype(dtype))).reshape(4, -1, 32 // bits)
        for q in range(4):
            for word, inputs in enumerate(order[q]):
                pairs = inputs.reshape(2, -1).T  # values 16 bits apart
                steps = len(pairs) // 2
                want = [
                    [16 * (steps * word + t) + 8 * h + 2 * q + x for x in (0, 1)] for t in range(steps) for h in (0, 1)
                ]
                np.testing.assert_array_equal(pairs, want)


@pytest.mark.parametrize(
    ("dtype", "zero", "said"),
    [
        (jnp.int4, jnp.int8, None), (jnp.int8, jnp.int16, "must be int8, got int16"),
        (jnp.float8_e4m3fn, jnp.int8, "must be int8 or int4, got float8_e4m3fn"),
    ],
)  # fmt: skip
def test_zero_points_that_cannot_be_packed(dtype: Any, zero: Any, said: str | None):
    why = packed.zero_refusal(jnp.dtype(dtype), jnp.dtype(zero))
    assert why is None if said is None else said in (why or "")


@pytest.mark.parametrize("zeros", [False, True])
def test_scales_of_several_blocks_are_those_of_each(zeros: bool):
    """Groups of 256 inputs."""
    rng = np.random.default_rng(0)
    values, zero = (jnp.asarray(rng.integers(-8, 8, shape, np.int8)) for shape in ((1024, 64), (4, 64)))
    scale = jnp.asarray(rng.uniform(0.5, 1.5, (4, 64)), jnp.bfloat16)
    weight = pack(values.astype(jnp.int4), scale, zero if zeros else None)
    spread = lambda x: np.repeat(np.asarray(x, np.float32), 256, axis=0)
    want = (np.asarray(values, np.float32) - spread(zero) * zeros) * spread(scale)
    assert weight.groups == 8
    np.testing.assert_array_equal(dequantised(weight), want)


@pytest.mark.parametrize(
    ("dtype", "shape", "groups", "said"),
    [
        (jnp.uint8, (256, 64), 1, "uint8"),
        (jnp.int4, (384, 64), 3, "multiples of 256 and 64, got (384, 64)"),
        (jnp.int4, (256, 64), 16, "inputs, 32 or 64 or whole times 128 of them, got 16 for 256"),
        (jnp.int4, (256, 64), 8, None),
        (jnp.int4, (1024, 64), 2, None),
        (jnp.int4, (768, 64), 4, "got 4 for 768"),
        (jnp.int4, (256, 64), 2, None),
    ],
)
def test_weights_that_cannot_be_packed(dtype: Any, shape: tuple[int, int], groups: int, said: str | None):
    why = packed.refusal(jnp.dtype(dtype), shape, groups)
    assert why is None if said is None else said in (why or "")


@hopper.interpreted
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"fp8"}))
@pytest.mark.parametrize("product", ["heads", "add"])
def test_kernels_of_packed_weights_agree_with_xla(product: str, name: str, m: int):
    """One of pairs of columns, with a norm, and one of halves of the inputs; the others share their walk."""
    weight = pack(*kernel(name, *((512, 4 * C) if product == "heads" else (768, 512))))
    angle = jax.random.uniform(jax.random.key(2), (C // 2, -(-m // 8) * 8)) * 6
    wide = reference.begin(normal(0, m, 512), normal(1, 512))
    args: tuple[Any, ...] = {
        "heads": (wide, weight, jnp.stack([jnp.cos(angle), jnp.sin(angle)]), COUNTS, EPS),
        "add": (normal(4, m, 768), weight, wide.h_ME, normal(1, 512)),
    }[product]
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.FUNCTIONS[product](*args, interpret=params), getattr(reference, product)(*args), m)


@pytest.mark.parametrize("name", ["int8", "int4-g128", "int4-g128-zeros", "fp8-block", "int8-zeros"])
def test_up_to_four_rows_are_multiplied_as_integers(name: str, monkeypatch: pytest.MonkeyPatch):
    """Where these have room, unless their bits shall be those of more rows; where warpgroups share columns one is."""
    launched: list[Any] = []

    def launch(kernel: Any, outs: Any, *_: Any, **__: Any) -> list[jax.Array]:
        launched.append(kernel)
        return [jnp.zeros(out.shape, out.dtype) for out in outs]

    monkeypatch.setattr(mosaic, "launch", launch)
    weight = pack(*kernel(name, 512, 128))
    for m in (1, 4, 5):
        for own in (weight, dataclasses.replace(weight, invariant=True)):
            gpu_packed.logits(normal(0, m, 512), own)
        gpu_packed.add(normal(0, m, 512), weight, normal(2, m, 128), normal(3, 128))
    served = name in ("int8", "int4-g128", "int4-g128-zeros")
    wanted = [(True, False, True), (True, False, False), (False,) * 3]
    assert [own.integers for own in launched] == [served and own for each in wanted for own in each]
    for width, groups in ((12288, 192), (28672, 1)):
        tight = packed_launch.Launch(kind="swiglu", dtype="int4", shape=(1, width), columns=4096, groups=groups)
        assert not tight.takes_integers


@hopper.interpreted
@pytest.mark.parametrize("name", ["int4-g64", "int8"])
def test_integers_of_a_long_row_are_made_while_weights_come(name: str):
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    weight, h, gain = pack(*kernel(name, 8192, 128)), normal(2, 1, 128), normal(3, 128)
    own = packed_launch.Launch(kind="add", dtype=weight.kind, shape=(1, 8192), columns=128, groups=weight.groups)
    assert own.takes_integers and dataclasses.replace(own, integers=True).row_share(0).turns(64) == 2
    x = normal(4, 1, 8192)
    close(gpu.add(x, weight, h, gain, interpret=params), reference.add(x, weight, h, gain), 1)


@hopper.interpreted
@pytest.mark.parametrize(
    ("m", "biased", "normed"), [(1, False, True), (16, True, True), (3, True, False), (4, False, True)]
)
def test_heads_of_packed_weights_with_norms_and_biases_agree_with_xla(m: int, biased: bool, normed: bool):
    """Those that no norm follows read rows as they are."""
    weight, wide = pack(*kernel("int4-g128", 512, 4 * C)), reference.begin(normal(0, m, 512), normal(1, 512))
    angle = jax.random.uniform(jax.random.key(2), (C // 2, -(-m // 8) * 8)) * 6
    args = wide if normed else wide.scaled_ME, weight, jnp.stack([jnp.cos(angle), jnp.sin(angle)]), COUNTS, EPS
    extra = dict(bias=normal(5, 4 * C) if biased else None, gains=(normal(6, C), normal(7, C)) if normed else None)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.heads(*args, **extra, interpret=params), reference.heads(*args, **extra), m)


@hopper.interpreted
@pytest.mark.parametrize("name", ["int4-g128", "int8"])
def test_programs_of_the_output_layer_go_on_with_other_columns(name: str, monkeypatch: pytest.MonkeyPatch):
    """Where there are digits of several rows; one program of two has two stretches of columns, the other three."""
    monkeypatch.setattr(mosaic, "MULTIPROCESSORS", 2)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    weight, x = pack(*kernel(name, 512, 5 * 128)), normal(0, 3, 512)
    own = packed_launch.Launch(
        kind="logits", dtype=weight.kind, shape=(3, 512), columns=5 * 128, groups=weight.groups, integers=True
    )
    assert own.goes_on and (own.programs, own.laps, own.laps_of(0), own.laps_of(1)) == (2, 3, 3, 2)
    close(gpu_packed.logits(x, weight, interpret=params), reference.logits(x, weight), 3)


@hopper.interpreted
@pytest.mark.parametrize("m", [1, 4])
def test_other_kernels_of_packed_weights_agree_with_xla(m: int):
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    wide, weight = reference.begin(normal(0, m, 512), normal(1, 512)), pack(*kernel("int4-g128", 512, 128))
    close(gpu.project(wide, weight, EPS, interpret=params), reference.project(wide, weight, EPS), m)
    for gates in (64, 128):  # two warpgroups a tile, and one
        both = pack(*kernel("int4-g128", 512, 2 * gates))
        close(gpu.swiglu(wide, both, EPS, interpret=params), reference.swiglu(wide, both, EPS), m)
    close(gpu_packed.logits(wide.h_ME, weight, interpret=params), reference.logits(wide.h_ME, weight), m)


def test_more_multiprocessors_have_a_program_where_tiles_overlap():
    """Llama 3.1 8B's gate and up; Qwen3 8B's would overlap by a third, and half bytes gain nothing."""
    few = lambda dtype, columns: packed_launch.Launch(
        kind="swiglu", dtype=dtype, shape=(1, 4096), columns=2 * columns, groups=1, eps=EPS, squares=128, width=4096
    )
    assert [(few("int8", n).span, few("int8", n).programs) for n in (14336, 12288)] == [(112, 128), (128, 96)]
    assert (few("int4", 14336).span, few("float8_e4m3fn", 28672).span) == (128, 128)
    own = few("int8", 14336)
    begins = np.asarray([own.column(jnp.int32(tile)) for tile in range(4)])
    covered = {column for begin in begins for column in range(begin, begin + packed_walk.COLUMNS)}
    assert covered == set(range(own.span)) and not np.any(begins % 8)


@hopper.interpreted
@pytest.mark.parametrize(("name", "m"), [("int8", 1), ("fp8-block", 3), ("int8-zeros", 16)])
def test_tiles_that_overlap_agree_with_xla(name: str, m: int):
    """Without a look for races: two tiles write the same values where they overlap."""
    both, wide = pack(*kernel(name, 256, 2 * 896)), reference.begin(normal(0, m, 256), normal(1, 256))
    own = packed_launch.Launch(kind="swiglu", dtype=both.kind, shape=(m, 256), columns=2 * 896, groups=both.groups)
    assert (own.tiles, own.span) == (4, 112)
    params = plgpu.InterpretGPUParams(detect_races=False)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.swiglu(wide, both, EPS, interpret=params), reference.swiglu(wide, both, EPS), m)


@hopper.interpreted
@pytest.mark.parametrize(
    ("name", "m", "inputs"),
    [
        ("int4-g128-zeros", 16, 1024),
        ("int8-zeros", 24, 2048),
        ("int4-g128-zeros", 1, 2048),
        ("int4-g64", 16, 1024),
        ("int4-g32-zeros", 16, 1024),
        ("int8-g32", 1, 2048),
    ],
)
def test_rings_of_packed_weights_come_round(name: str, m: int, inputs: int, monkeypatch: pytest.MonkeyPatch):
    """Steps of one and of two blocks, by mma and by wgmma, in rings that are refilled."""
    monkeypatch.setattr(packed_walk, "_MAX_STAGES", 1)
    both, wide = pack(*kernel(name, inputs, 128)), reference.begin(normal(0, m, inputs), normal(1, inputs))
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.swiglu(wide, both, EPS, interpret=params), reference.swiglu(wide, both, EPS), m)


@hopper.interpreted
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("product", ["project", "heads", "normed", "swiglu", "add"])
def test_rings_of_packed_weights_are_filled_in_two_parts(product: str, m: int, monkeypatch: pytest.MonkeyPatch):
    """As kernels that overlap fill them: some weights first, then small arrays and their rows, then the rest."""
    monkeypatch.setattr(packed_launch.Launch, "early", property(lambda _: 1))
    monkeypatch.setattr(packed_walk, "_DEPTHS", (1,))
    monkeypatch.setattr(packed_walk, "_MAX_STAGES", 2)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    weight = pack(*kernel("int4-g128-zeros", 3072, 256 if product == "swiglu" else 4 * C))
    wide, gains = reference.begin(normal(0, m, 3072), normal(1, 3072)), (normal(5, C), normal(6, C))
    angle = jax.random.uniform(jax.random.key(2), (C // 2, 8)) * 6
    rope = jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    h, gain = normal(2, m, 4 * C), normal(3, 4 * C)
    run: Any = {
        "project": lambda of, **how: of.project(wide, weight, EPS, **how),
        "heads": lambda of, **how: of.heads(wide, weight, rope, COUNTS, EPS, **how),
        "normed": lambda of, **how: of.heads(wide, weight, rope, COUNTS, EPS, gains=gains, **how),
        "swiglu": lambda of, **how: of.swiglu(wide, weight, EPS, **how),
        "add": lambda of, **how: of.add(wide.h_ME, weight, h, gain, **how),
    }[product]
    close(run(gpu, interpret=params), run(reference), m)


@hopper.interpreted
@pytest.mark.parametrize("m", [1, 3])
def test_kernels_of_packed_weights_read_their_own_order(m: int):
    """The norm before a product has no order, nor has what is added behind it."""
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    values, scale, zero = kernel("int4-g128-zeros", 512, 512)
    weight = packed.pack(values, scale, zero, jax.random.permutation(jax.random.key(5), 512))
    wide, gain = reference.begin(normal(0, m, 512), normal(1, 512)), normal(1, 512)
    w = packed.dequantised(weight)
    scaled = wide.scaled_ME.astype(jnp.float32) * jax.lax.rsqrt(wide.squares_TR.sum(0)[:m, None] / 512 + EPS)
    close(gpu.project(wide, weight, EPS, interpret=params), (scaled @ w).astype(jnp.bfloat16), m)
    x = normal(4, m, 512)
    y = (x.astype(jnp.float32) @ w).astype(jnp.bfloat16).astype(jnp.float32)
    want = reference.begin((wide.h_ME.astype(jnp.float32) + y).astype(jnp.bfloat16), gain)
    close(gpu.add(x, weight, wide.h_ME, gain, interpret=params), want, m)
    many = gpu_packed_many.product(x, weight, jnp.float32, interpret=params)
    close(many, x.astype(jnp.float32) @ w, m)


@hopper.interpreted
@pytest.mark.parametrize(("name", "m", "dtype"), [
    ("int4-g128", 72, jnp.bfloat16), ("fp8-block", 72, jnp.float32), ("int8", 200, jnp.bfloat16),
    ("int4-g128-zeros", 200, jnp.float32), ("int8-zeros", 72, jnp.bfloat16), ("int4-g32-zeros", 72, jnp.bfloat16),
    ("int4-g64", 200, jnp.float32), ("int8-g32", 72, jnp.float32),
])  # fmt: skip
def test_many_rows_by_packed_weights_agree_with_xla(name: str, m: int, dtype: Any, monkeypatch: pytest.MonkeyPatch):
    """A tile of rows and two, rings that come round, zero points, and (of few columns) programs that share inputs."""
    monkeypatch.setattr(gpu_packed_many, "_MAX_STAGES", 2)
    monkeypatch.setattr(gpu_packed_many, "_SHARES", (2,) if m == 200 else (1,))
    weight, x = pack(*kernel(name, 1024, 128)), normal(4, m, 1024)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    got = gpu_packed_many.product(x, weight, dtype, interpret=params)
    assert got.dtype == dtype and got.shape == (m, 128)
    close(got, packed.product(x, weight).astype(dtype), m)


def test_inputs_are_shared_where_programs_are_too_few():
    """At 8B shapes: not where sums would take longer than multiprocessors wait."""
    shares = lambda m, k, n: gpu_packed_many._shares(-(-m // 128), min(m, 128), k, n, 64)
    assert [shares(128, k, n) for k, n in ((4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256))] == [4, 1, 4, 1]
    assert shares(40, 4096, 6144) > 1 and shares(1024, 14336, 4096) == 1


def test_few_rows_of_many_inputs_are_multiplied_by_the_kernel_for_few():
    takes = lambda rows, k, n: gpu_packed_many._takes_few(rows, pack(*kernel("int4-g128", k, n)))
    assert [takes(m, 512, 128) for m in (2, 8, 16)] == [True, True, False]
    assert not takes(4, 256, 192) and not takes(4, 384, 64)  # of no half of which mma could be given blocks


def test_mxfp4_and_float32_rows_are_multiplied_by_xla():
    codes = np.random.default_rng(0).integers(0, 16, (256, 64), np.uint8)
    weight = jax.jit(packed.pack_float4)(codes, np.full((8, 64), 127, np.uint8))
    with pytest.raises(ValueError, match="MXFP4"):
        gpu_packed_many.product(normal(4, 5, 256), weight, jnp.float32)
    got = jax.jit(lambda x, weight: gpu_packed_many.multiply(x, weight, jnp.float32))(normal(4, 5, 256), weight)
    np.testing.assert_array_equal(got, multiply(normal(4, 5, 256), weight))


def origin(name: str, made: dict[str, str]) -> str:
    """What an array in compiled HLO is made by, behind what only looks at it in another shape."""
    by = re.search(r"\b([a-z-]+)\(([^,)]*)", made[name])
    assert by is not None, made[name]
    return origin(by.group(2).split()[-1].lstrip("%"), made) if by.group(1) == "bitcast" else by.group(1)


@pytest.mark.skipif(not overlap.overlaps(None), reason="this JAX launches no kernel early")
@pytest.mark.skipif(bool(TARGETS["h200"].missing()), reason="no compiler for absent GPUs")
@pytest.mark.parametrize("name", ["bfloat16", *sorted(FORMATS)])
def test_what_is_read_before_the_kernel_before_has_ended_is_a_parameter(name: str):
    """By the real compiler: of two products, one behind the other, weights and scales; rows are the first's result."""
    whole = NamedSharding(TARGETS["h200"].mesh(), PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)

    def run(s: Stream, first: Any, second: Any) -> Any:
        return gpu.add(gpu.swiglu(s, first, EPS), second, s.h_ME, s.h_ME[0])

    shapes, wide = ((E, 2 * 512), (512, E)), name == "bfloat16"
    whole_maps = [normal(1, *shape) for shape in shapes] if wide else []
    weights = whole_maps or [jax.eval_shape(packed.pack, *kernel(name, *shape)) for shape in shapes]
    traced = jax.jit(run).trace(*jax.tree.map(place, (jax.eval_shape(lambda: stream(1)), *weights)))
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    made = dict(re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = (.+)$", text, re.MULTILINE))
    calls = [line for line in made.values() if "custom-call(" in line and "mosaic" in line]
    assert len(calls) == 2
    for call in calls:
        _, values, scale, *_ = (
            x.split()[-1].lstrip("%") for x in call.split("custom-call(")[1].split(")")[0].split(", ")
        )
        assert {origin(x, made) for x in ((values,) if wide else (values, scale))} == {"parameter"}, call
