"""Small-batch products: the Mosaic kernels, interpreted with race detection, against plain XLA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.small_batch import (
    bfloat16_launch,
    experts,
    gpu,
    gpu_experts,
    gpu_norms,
    gpu_router,
    mosaic,
    packed,
    packed_launch,
    reference,
)
from pallas_kernels.small_batch.bfloat16_launch import Launch, Sizes
from tests.kernels import hopper
from tests.kernels.products import EPS, C, E, arguments, close, normal, stream


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints a race and goes on."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("width", [1024, 4096, 16384])
def test_rings_fit_into_shared_memory_beside_the_rest(width: int):
    for m in (1, 8, 16, 32, 40, 64, 128):
        for kind in ("project", "logits", "heads", "swiglu", "add"):
            sizes, norm = Sizes.of(kind, m, width, 4 * width), kind in ("project", "heads", "swiglu")
            extra: dict[str, Any] = dict(eps=EPS, squares=width // 32) if norm else {}
            extra |= dict(head_eps=EPS, biased=True) if kind == "heads" else {}
            kernel = Launch(kind, sizes, (m, width), **extra)
            assert mosaic.room(kernel.scratch(jnp.bfloat16), summing=kernel.summing) >= 0, (kind, m)
            if m > 32:
                continue
            few = packed_launch.Launch(
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
@pytest.mark.parametrize("m", [1, 8, 16, 40])  # one, that of one program, half for each of two, and of many rows
@pytest.mark.parametrize("name", sorted(gpu.FUNCTIONS))
def test_kernels_agree_with_xla(name: str, m: int):
    args = arguments(name, m)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.FUNCTIONS[name](*args, interpret=params), getattr(reference, name)(*args), m)


@hopper.interpreted
@pytest.mark.parametrize("m", [3, 32, 40])
def test_heads_with_norms_and_biases_agree_with_xla(m: int):
    bias, gains = normal(5, 4 * C), (normal(6, C), normal(7, C))
    args, extra = arguments("heads", m), {"bias": bias, "gains": gains}
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.heads(*args, **extra, interpret=params), reference.heads(*args, **extra), m)


@hopper.interpreted
@pytest.mark.parametrize("width", [256, 1536])
def test_norms_side_by_side_are_xlas(width: int):
    """Rows of a table, numbers that are none of its among them, and others."""
    parts = [
        reference.NormedPart(normal(0, 9, width), normal(1, width), jnp.asarray([3, -1, 20], jnp.int32)),
        reference.NormedPart(normal(2, 3, width), normal(3, width)),
    ]
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu_norms.norms(parts, EPS, interpret=params), reference.norms(parts, EPS), 3)
    with pytest.raises(ValueError, match="multiple of 256 features, at most 8192, got 320"):
        gpu_norms.norms([reference.NormedPart(normal(0, 3, 320), normal(1, 320))], EPS)


@hopper.interpreted
@pytest.mark.parametrize("m", [3, 40])
def test_heads_of_rows_as_they_are_agree_with_xla(m: int):
    stream, *rest = arguments("heads", m)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.heads(stream.scaled_ME, *rest, interpret=params), reference.heads(stream.scaled_ME, *rest), m)


@hopper.interpreted
@pytest.mark.parametrize("name", ["heads", "add", "project"])
def test_tiles_that_no_two_programs_share_agree_with_xla(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mosaic, "MULTIPROCESSORS", 2)
    args = arguments(name, 40)
    assert Sizes.of(name, 40, E, args[1].shape[1]).members == 1  # pyright: ignore[reportArgumentType]
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    close(gpu.FUNCTIONS[name](*args, interpret=params), getattr(reference, name)(*args), 40)


def test_squares_in_order_do_not_depend_on_the_number_of_rows():
    h, gain = normal(8, 40, 512), normal(9, 512)
    call = jax.jit(lambda h: reference.begin(h, gain, in_order=True).squares_TR)
    want = np.square(np.asarray(h, np.float64)).reshape(40, -1, 64).sum(axis=-1).T
    for m in (1, 3, 40):
        np.testing.assert_array_equal(call(h[:m])[:, :m], call(h)[:, :m])
        np.testing.assert_allclose(call(h[:m])[:, :m], want[:, :m], rtol=1e-6)
        # In an order that is written down: whatever sums by itself may follow the number of rows.
        traced = str(jax.make_jaxpr(lambda h: reference.begin(h, gain, in_order=True))(h[:m]))
        assert "reduce_" not in traced and traced.count(" add ") == 14


def test_more_rows_than_the_kernels_serve_are_refused():
    with pytest.raises(ValueError, match="at most 128 rows are served, got 136"):
        gpu.multiply(*arguments("multiply", 136))
    weight = packed.pack(jnp.ones((256, 64), jnp.int8), jnp.ones((1, 64)))
    with pytest.raises(ValueError, match="at most 32 rows are served, got 40"):
        gpu.multiply(normal(4, 40, 256), weight)


def test_how_tiles_are_shared():
    """8B's shapes: only tiles of which there are few are for two programs, whatever the rows."""
    shapes = {"heads": (4096, 6144), "swiglu": (4096, 28672), "add": (14336, 4096), "logits": (4096, 128256)}
    for m in (1, 16, 32, 40, 128):
        found: dict[str, Any] = {kind: Sizes.of(kind, m, *shape) for kind, shape in shapes.items()}  # pyright: ignore
        shared = {kind: (s.teams, s.parts, s.members, s.programs) for kind, s in found.items()}
        heads = (1, 2, 1, 48) if m <= 16 else (1, 1, 2, 48)
        assert shared == {"heads": heads, "swiglu": (2, 2, 1, 112), "add": (1, 1, 2, 64), "logits": (1, 1, 1, 126)}
        assert found["add"].steps * found["add"].depth == 7168
        assert [found[kind].halves for kind in ("heads", "add")] == ([1, 1 if m == 1 else 2] if m <= 16 else [2, 2])


@hopper.proved
@pytest.mark.parametrize("m", [8, 24, 40, 128])
def test_kernels_spill_nothing_and_send_and_wait_in_order(m: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At 8B's widths, by themselves and as linked code; what no interpreter runs is read in the compiled code."""
    shape = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype)
    padded, wide = reference.padded(m), shape(m, 4096)
    squares, rope = shape(64, padded, dtype=jnp.float32), shape(2, 64, padded, dtype=jnp.float32)
    stream, counts = reference.Stream(wide, wide, squares), (32, 8, 8)
    heads = lambda args: gpu.heads(args[0], args[1], args[2], counts, EPS)
    calls: dict[str, tuple[Any, Any]] = {
        "heads": (heads, (stream, shape(4096, 6144), rope)),
        "swiglu": (lambda args: gpu.swiglu(*args, EPS), (stream, shape(4096, 28672))),
        "add": (lambda args: gpu.add(*args), (shape(m, 14336), shape(14336, 4096), wide, shape(4096))),
    }
    for kind, (run, args) in calls.items():
        dump = tmp_path / kind
        dump.mkdir()
        _, usage = hopper.compiled(run, args, dump, monkeypatch)
        assert usage and all(x.spill_bytes == 0 and not x.serialized for x in usage), (kind, usage)
        code = next(dump.glob("*.ptx")).read_text()
        sizes: Any = Sizes.of(kind, m, *args[1].shape)  # pyright: ignore[reportArgumentType]
        if sizes.members == 2:
            assert hopper.sent_to_a_neighbour(code) == 4 * 64 * (sizes.rows // sizes.halves), kind
        else:
            assert "st.async" not in code
        if not overlap.overlaps(None):
            continue
        early, *_ = code.split("griddepcontrol.wait;")
        assert code.count("griddepcontrol.wait;") == 2 and "st.global" not in early and "ld.global" not in early
        stages = Launch(kind, sizes, (m, args[1].shape[0]), eps=EPS if kind != "add" else None, squares=64).stages  # pyright: ignore
        assert early.count("cp.async.bulk.tensor") == (stages - 1) * sizes.teams * sizes.parts, kind
        begun = code.index("griddepcontrol.launch_dependents")
        assert "shared::cluster.global.tile" not in code[begun:] and "shared::cta.global" not in code[begun:], kind


@hopper.interpreted
@pytest.mark.parametrize("m", [1, 40])
def test_programs_that_go_on_with_further_tiles_agree_with_xla(m: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mosaic, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(bfloat16_launch, "_MAX_STAGES", 3)
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    for tiles in (5, 6):  # over two programs; six are three for the two warpgroups of a program
        args = stream(m), normal(3, E, 2 * tiles * 64, scale=0.1), EPS
        close(gpu.swiglu(*args, interpret=params), reference.swiglu(*args), m)
    if m > 1:
        return
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
