"""A sum over the GPUs of one host in one launch: each writes its part to all others, and adds all in rank order.

Small sums cost latency and no bandwidth, so every device takes all parts (one-shot), by plain stores to peers' memory
over NVLink: multicast is not needed, which some hosts disable. Since all devices add in the same order, all hold the
same bits. Parts travel in float32, value by value: what the compiler does not know to be aligned it stores by elements,
and neighbours of four bytes make whole packets of a warp's store.

Who waits for whom: XLA's barrier before the launch says that every device's buffers are free, and that its semaphores
are zero, which are cleared before; a program's signal, released to the system after its stores, that they have arrived;
and nothing is written to a device, nor signalled, that this has not waited for when its programs end. So a replay finds
everything as the first launch did, and a device that is late holds the others up and no more.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

#: Values that a program adds: a warpgroup's threads, some each.
_PER_THREAD, _THREADS = 4, 128
_TILE = _PER_THREAD * _THREADS


def refusal(x: jax.Array) -> str | None:
    """Why the kernel cannot sum such arrays, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it adds bfloat16 and float32, got {x.dtype}"
    return f"its programs add {_TILE} values each, got {x.size}" if x.size % _TILE else None


def device_sum(x: jax.Array, axis_name: Hashable) -> jax.Array:
    """What `jax.lax.psum` gives of x, inside `jax.shard_map`, rounded once: parts are added in float32.

    Raises:
      ValueError: what `refusal` says.
    """
    if (why := refusal(x)) is not None:
        raise ValueError(f"no sum over devices by this kernel: {why}")
    return _launch(x.reshape(-1), axis_name).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=1)
def _launch(x_T: jax.Array, axis_name: Hashable) -> jax.Array:
    peers, size = lax.axis_size(axis_name), x_T.shape[0]
    layout = plgpu.Layout.WG_STRIDED((_TILE,), vec_size=1)

    def device_sum(x: Any, out: Any, parts: Any, arrived: Any) -> None:
        start, rank = lax.axis_index("tile") * _TILE, lax.axis_index(axis_name)
        here = pl.ds(start, _TILE)
        own = plgpu.layout_cast(x[here], layout).astype(jnp.float32)
        # The next device first, so that no two write to the same at once.
        others: list[Any] = [{axis_name: lax.rem(rank + hop, jnp.int32(peers))} for hop in range(1, peers)]
        for at in others:
            theirs = plgpu.remote_ref(parts, at)
            theirs[pl.ds(rank * size + start, _TILE)] = own
        for at in others:
            # Not all at once: `semaphore_signal_parallel` of JAX 0.11.2 has its fence after the first signal.
            pl.semaphore_signal(arrived, device_id=at)
        pl.semaphore_wait(arrived, peers - 1)
        total = None
        for peer in range(peers):
            came = plgpu.layout_cast(parts[pl.ds(peer * size + start, _TILE)], layout)
            mine = jnp.broadcast_to(rank == peer, own.shape)
            part = jnp.where(plgpu.layout_cast(mine, layout), own, came)  # nothing comes of this device itself
            total = part if total is None else total + part
        assert total is not None
        out[here] = total.astype(x_T.dtype)

    out, _ = plgpu.kernel(
        device_sum,
        out_type=(jax.ShapeDtypeStruct((size,), x_T.dtype), jax.ShapeDtypeStruct((peers * size,), jnp.float32)),
        grid=(size // _TILE,),
        grid_names=("tile",),
        scratch_types=(plgpu.SemaphoreType.REGULAR,),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x_T)
    return out
