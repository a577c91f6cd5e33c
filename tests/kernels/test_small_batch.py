"""Small-batch products: the Mosaic kernels, interpreted with race detection, against plain XLA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.small_batch import experts, gpu, gpu_experts, gpu_packed, gpu_router, mosaic, reference
from tests.kernels import hopper
from tests.kernels.products import EPS, C, E, arguments, close, normal, stream


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints a race and goes on."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("width", [1024, 4096, 16384])
def test_rings_fit_into_shared_memory_beside_the_rest(width: int):
    for m in (1, 8, 16, 32):
        for kind in ("project", "logits", "heads", "swiglu", "add"):
            sizes, norm = gpu._Sizes.of(kind, m, width, 4 * width), kind in ("project", "heads", "swiglu")
            extra: dict[str, Any] = dict(eps=EPS, squares=width // 32) if norm else {}
            extra |= dict(head_eps=EPS, biased=True) if kind == "heads" else {}
            own = gpu._Kernel(kind, sizes, (m, width), **extra).scratch(jnp.bfloat16)
            assert mosaic.room(own) >= 0, (kind, m)
            few = gpu_packed._Kernel(
                kind=kind, dtype="float8_e4m3fn", shape=(m, width), columns=4 * width, groups=width // 128, eps=EPS,
                squares=width // 32,
            )  # fmt: skip
            assert mosaic.room(few.scratch(jnp.bfloat16)) >= 0, (kind, m)


@hopper.interpreted
def test_a_race_is_told_in_the_words_that_are_looked_for(capfd: pytest.CaptureFixture[str]):
    """Two threads write the same memory, and nothing says which comes first; JAX 0.12 raises where others print."""

    def body(out: Any) -> None:
        out[...] = jnp.full((64,), 1.0) * jax.lax.axis_index("thread").astype(jnp.float32)

    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    shape = jax.ShapeDtypeStruct((64,), jnp.float32)
    run = plgpu.kernel(body, out_type=shape, num_threads=2, thread_name="thread", interpret=params)
    told = ""
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        told = str(error)
    assert "RACE DETECTED" in told + capfd.readouterr().out
    assert told or jax.__version_info__ < (0, 12)


@hopper.interpreted
@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("name", sorted(gpu.FUNCTIONS))
def test_kernels_agree_with_xla(name: str, m: int):
    args = arguments(name, m)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.FUNCTIONS[name](*args, interpret=params), getattr(reference, name)(*args), m)


@hopper.interpreted
def test_heads_with_norms_and_biases_agree_with_xla():
    bias, gains = normal(5, 4 * C), (normal(6, C), normal(7, C))
    args, extra = arguments("heads", 3), {"bias": bias, "gains": gains}
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.heads(*args, **extra, interpret=params), reference.heads(*args, **extra), 3)


@hopper.interpreted
def test_programs_that_go_on_with_further_tiles_agree_with_xla(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mosaic, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(gpu, "_MAX_STAGES", 3)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    args = stream(1), normal(3, E, 2 * 5 * 64, scale=0.1), EPS  # five tiles over two programs
    close(gpu.swiglu(*args, interpret=params), reference.swiglu(*args), 1)
    args = normal(4, 1, E), normal(3, 3 * 64, E, scale=0.1)  # an embedding
    close(gpu.logits(*args, flip=False, interpret=params), reference.logits(*args, flip=False), 1)


@hopper.interpreted
@pytest.mark.parametrize("m", [1, 3, 16])
def test_experts_agree_with_xla(m: int):
    """Rows that are no one's choose no expert; of 16 rows there are 12."""
    rows, count, inner = min(m, 12), 64, 128
    own, router = stream(m), normal(8, E, count, scale=0.1)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    choice, want = (
        of.choose(own, router, EPS, 4, rows, **extra)
        for of, extra in ((gpu_router, {"interpret": params}), (experts, {}))
    )
    for got, expected in zip(choice[:2], want[:2], strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(choice.weights_XR[:, :m], want.weights_XR[:, :m], rtol=1e-3, atol=1e-6)
    picks, wanted = (of.pick(own, router, EPS, 4, rows, **extra) for of, extra in (
        (gpu_router, {"interpret": params}), (experts, {})
    ))  # fmt: skip
    for name, got, expected in zip(wanted._fields, picks, wanted, strict=True):
        if name == "weights_GP":
            there = wanted.experts_GP >= 0
            np.testing.assert_allclose(got[there], expected[there], rtol=1e-3)
        else:
            assert (got is None) == (expected is None) == (name in ("order_X", "begins_X") and m != 3)
            np.testing.assert_array_equal(got, expected) if expected is not None else None
    kernels = normal(9, count, E, 2 * inner, scale=0.1), normal(10, count, inner, E, scale=0.1)
    args = own, want, *kernels, normal(1, E), EPS, 4
    close(gpu_experts.mix(*args, interpret=params), experts.mix(*args), m)


def test_experts_that_no_kernel_takes():
    assert experts.refusal(2048, 768, 128) is None
    assert "got 96" in (experts.refusal(2048, 768, 96) or "") and "got 192" in (experts.refusal(2048, 768, 192) or "")
    assert "got 2048 and 700" in (experts.refusal(2048, 700, 128) or "")
