"""A sum over the GPUs of one host in one launch: each writes its part to all, and adds what came in rank order.

Small sums cost latency and no bandwidth, so every device takes all parts (one-shot), by plain stores to peers' memory
over NVLink: multicast is not needed, which some hosts disable. Since all devices add in the same order, all hold the
same bits. XLA's barrier before the launch says that every device's buffers are free; another one, between the programs
of the same number, that what they wrote has arrived.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

#: Values that a program adds: a warpgroup's threads, a number of 16 bytes each.
_PER_THREAD, _THREADS = 16, 128


def refusal(x: jax.Array) -> str | None:
    """Why the kernel cannot sum such arrays, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it adds bfloat16 and float32, got {x.dtype}"
    tile = _PER_THREAD // x.dtype.itemsize * _THREADS
    return f"its programs add {tile} values each, got {x.size}" if x.size % tile else None


def device_sum(x: jax.Array, axis_name: Hashable) -> jax.Array:
    """What `jax.lax.psum` gives of x, inside `jax.shard_map`, rounded once: parts are added in float32.

    Raises:
      ValueError: what `refusal` says.
    """
    if (why := refusal(x)) is not None:
        raise ValueError(f"no sum over devices by this kernel: {why}")
    vector = _PER_THREAD // x.dtype.itemsize
    return _launch(x.reshape(-1), axis_name, vector, vector * _THREADS).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _launch(x_T: jax.Array, axis_name: Hashable, vector: int, tile: int) -> jax.Array:
    peers, size = lax.axis_size(axis_name), x_T.shape[0]
    layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=vector)

    def device_sum(x: Any, out: Any, parts: Any, arrived: Any) -> None:
        here = pl.ds(lax.axis_index("tile") * tile, tile)
        rank = lax.axis_index(axis_name)
        own = plgpu.layout_cast(x[here], layout)
        for peer in range(peers):
            at = {axis_name: jnp.int32(peer)}
            theirs = plgpu.remote_ref(parts, at)  # pyright: ignore[reportArgumentType]: JAX takes mesh coordinates
            theirs[pl.ds(rank * size + here.start, tile)] = own
        told = [plgpu.SemaphoreSignal(arrived, device_id={axis_name: jnp.int32(peer)}) for peer in range(peers)]
        plgpu.semaphore_signal_parallel(*told)
        pl.semaphore_wait(arrived, peers)
        total = None
        for peer in range(peers):
            part = plgpu.layout_cast(parts[pl.ds(peer * size + here.start, tile)], layout).astype(jnp.float32)
            total = part if total is None else total + part
        assert total is not None
        out[here] = total.astype(x_T.dtype)

    out, _ = plgpu.kernel(
        device_sum,
        out_type=(jax.ShapeDtypeStruct((size,), x_T.dtype), jax.ShapeDtypeStruct((peers * size,), x_T.dtype)),
        grid=(math.ceil(size / tile),),
        grid_names=("tile",),
        scratch_types=(plgpu.SemaphoreType.REGULAR,),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x_T)
    return out
