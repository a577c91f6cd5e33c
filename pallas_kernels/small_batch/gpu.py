"""Products of few rows on Mosaic GPU, with what stands around them in a decoder layer.

Weights are bfloat16 (`gpu_bfloat16`) or of 8 and 4 bits (`gpu_packed`); these functions take either. Measured on an
H200 in docs/benchmarks.md. Hopper only: wgmma and the copy engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.small_batch import gpu_bfloat16, gpu_packed
from pallas_kernels.small_batch.mosaic import F32
from pallas_kernels.small_batch.packed import Packed
from pallas_kernels.small_batch.reference import TILE, Stream, padded


def _normed(stream: Stream, eps: float) -> dict[str, Any]:
    return dict(eps=eps, squares=stream.squares_TR.shape[0])


def _like(x: jax.Array, columns: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype)


def project(stream: Stream, kernel: jax.Array | Packed, eps: float, *, interpret: Any = None) -> Any:
    """See reference.project."""
    if isinstance(kernel, Packed):
        return gpu_packed.project(stream, kernel, eps, interpret=interpret)
    x, outs = stream.scaled_ME, [_like(stream.h_ME, kernel.shape[1])]
    extra = _normed(stream, eps)
    return gpu_bfloat16.run("project", x, kernel, outs, stream.squares_TR, interpret=interpret, **extra)[0]


def multiply(x_MK: jax.Array, kernel: jax.Array | Packed, *, interpret: Any = None) -> jax.Array:
    """See reference.multiply."""
    if isinstance(kernel, Packed):
        return gpu_packed.multiply(x_MK, kernel, interpret=interpret)
    return gpu_bfloat16.run("project", x_MK, kernel, [_like(x_MK, kernel.shape[1])], interpret=interpret)[0]


def logits(x_MK: jax.Array, kernel: jax.Array | Packed, *, flip: bool = True, interpret: Any = None) -> jax.Array:
    """See reference.logits."""
    if isinstance(kernel, Packed):
        return gpu_packed.logits(x_MK, kernel, interpret=interpret)
    out = jax.ShapeDtypeStruct((x_MK.shape[0], kernel.shape[1 if flip else 0]), F32)
    return gpu_bfloat16.run("logits", x_MK, kernel, [out], flip=flip, interpret=interpret)[0]


def heads(
    stream: Stream | jax.Array, kernel: jax.Array | Packed, rope_2CR: jax.Array, counts: Sequence[int], eps: float, *,
    bias: jax.Array | None = None, gains: tuple[jax.Array, jax.Array] | None = None, interpret: Any = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """See reference.heads."""
    if isinstance(kernel, Packed):
        return gpu_packed.heads(stream, kernel, rope_2CR, counts, eps, bias=bias, gains=gains, interpret=interpret)
    normed = isinstance(stream, Stream)
    x, before = (stream.scaled_ME, _normed(stream, eps)) if normed else (stream, {})
    extra: dict[str, Any] = before | dict(counts=tuple(counts), biased=bias is not None)
    beside = [*((stream.squares_TR,) if normed else ()), rope_2CR, *(() if bias is None else (bias,))]
    if gains is not None:
        extra["head_eps"] = eps
        beside += gains
    outs = [_like(x, count * 2 * TILE) for count in counts]
    return tuple(gpu_bfloat16.run("heads", x, kernel, outs, *beside, interpret=interpret, **extra))


def swiglu(stream: Stream, kernel: jax.Array | Packed, eps: float, *, interpret: Any = None) -> Any:
    """See reference.swiglu."""
    if isinstance(kernel, Packed):
        return gpu_packed.swiglu(stream, kernel, eps, interpret=interpret)
    x, outs = stream.scaled_ME, [_like(stream.h_ME, kernel.shape[1] // 2)]
    extra = _normed(stream, eps)
    return gpu_bfloat16.run("swiglu", x, kernel, outs, stream.squares_TR, interpret=interpret, **extra)[0]


def add(
    x_MK: jax.Array, kernel: jax.Array | Packed, h_ME: jax.Array, gain_E: jax.Array, *,
    interpret: Any = None,
) -> Stream:  # fmt: skip
    """See reference.add."""
    if isinstance(kernel, Packed):
        return gpu_packed.add(x_MK, kernel, h_ME, gain_E, interpret=interpret)
    same = jax.ShapeDtypeStruct(h_ME.shape, h_ME.dtype)
    squares = jax.ShapeDtypeStruct((kernel.shape[1] // TILE, padded(h_ME.shape[0])), F32)
    return Stream(*gpu_bfloat16.run("add", x_MK, kernel, [same, same, squares], h_ME, gain_E, interpret=interpret))


@functools.cache
def too_old() -> str | None:
    """Why this JAX cannot compile these kernels, or None."""
    old = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
    return f"they need JAX 0.11 or newer, this is {jax.__version__}" if old else None


def supported() -> str | None:
    """Why this JAX or device cannot run these kernels, or None."""
    if (why := too_old()) is not None:
        return why
    if jax.default_backend() != "gpu":
        return f"they need a GPU, the backend is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return None if capability.startswith("9.") else f"they need compute capability 9, this device has {capability}"


#: By name, for callers that choose.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "project": project, "multiply": multiply, "logits": logits, "heads": heads, "swiglu": swiglu, "add": add,
}  # fmt: skip
