"""Random weights for the studies' models: whole, or in few bits."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.mxfp4 import BLOCK, Mxfp4
from jaxspec.models.quantised import Quantised
from jaxspec.runtime.sharding import parameter_shardings


def random_weights(module: Any, seed: int, mesh: Mesh | None = None) -> Any:
    """An abstract module with noise for matrices, ones for norms and 0, 1, ... for id tables, made on the device.

    What is there already stays as it is.

    Args:
      mesh: where they lie, if `tensor_parallel` laid the module out.
    """
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    lie = [None] * len(leaves) if mesh is None else jax.tree.leaves(parameter_shardings(mesh, state))
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    @functools.cache
    def filler(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Any) -> Any:
        def fill(key: jax.Array) -> jax.Array:
            if jnp.issubdtype(dtype, jnp.integer):
                return jnp.arange(math.prod(shape), dtype=dtype).reshape(shape)
            if len(shape) == 1:
                return jnp.ones(shape, dtype)
            return (jax.random.normal(key, shape, jnp.float32) * 0.02).astype(dtype)

        return jax.jit(fill, out_shardings=sharding)

    made = [
        x if isinstance(x, jax.Array) else filler(x.shape, x.dtype, at)(key)
        for key, x, at in zip(keys, leaves, lie, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(tree, made))


#: Formats of quantised weights by name: the type of the values, and how many inputs have scales of their own, if not
#: all the same. "-zeros": with zero points, as AWQ has them.
FORMATS = {
    "int8": (jnp.int8, None), "fp8": (jnp.float8_e4m3fn, None), "fp8-block": (jnp.float8_e4m3fn, 128),
    "int4-g128": (jnp.int4, 128), "int4-g128-zeros": (jnp.int4, 128), "int4-g32-zeros": (jnp.int4, 32),
}  # fmt: skip
#: Of experts alone, as gpt-oss has them.
MXFP4 = "mxfp4"


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantised_kernel(key: jax.Array, name: str, shape: tuple[int, ...]) -> Quantised | Mxfp4:
    """Noise [..., in, out] in a format, of a standard deviation of 0.02."""
    *lead, d_in, d_out = shape
    if name == MXFP4:
        codes = jax.random.bits(key, (*lead, d_in // 2, d_out), jnp.uint8)
        return Mxfp4(codes, jnp.full((*lead, d_in // BLOCK, d_out), 120, jnp.uint8))  # values have a deviation of 3
    dtype, each = FORMATS[name]
    top = {jnp.int8: 127.0, jnp.int4: 7.0}.get(dtype, 448.0)
    values = jnp.clip(jax.random.normal(key, shape, jnp.float32) / 4, -1, 1) * top
    values = (jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype)
    spread = jax.random.uniform(key, (*lead, d_in // (each or d_in), d_out), jnp.float32, 0.5, 1.5)
    zero = jax.random.randint(key, spread.shape, -3, 4, jnp.int8) if name.endswith("-zeros") else None
    return Quantised(values, 0.08 / top * spread, zero)


def quantise(target: Any, name: str | None, output: str | None = None) -> None:
    """Noise of a format instead of the layers' weights, and of one instead of the output layer's, in place."""
    if output is not None:
        last = target.lm_head.kernel
        last.set_value(quantised_kernel(jax.random.key(3), output, last.get_value().shape))
    if name is None:
        return
    keys = iter(jax.random.split(jax.random.key(2), 4 * len(target.layers)))
    for layer in target.layers:
        attn, mlp = layer.attn, layer.mlp
        inner = (mlp.gate_up, mlp.down)
        inner = inner if isinstance(mlp, MixtureOfExperts) else tuple(linear.kernel for linear in inner)
        for param in (*(() if name == MXFP4 else (attn.qkv.kernel, attn.out.kernel)), *inner):
            param.set_value(quantised_kernel(next(keys), name, param.get_value().shape))
