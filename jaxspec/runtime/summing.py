"""How small sums over devices are made: the ways that there are, and which is quickest here.

A round of tensor parallelism adds up activations twice a layer: a few kilobytes each time, so that latency is all that
counts. NCCL is made for more; XLA has kernels of its own behind an option, pallas_kernels.device_sum is a third way.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.models.sharded import BY_KERNEL, BY_XLA, TENSOR_AXIS, summed

_log = logging.getLogger(__name__)

#: Sums in a row that are timed: what a model of 32 layers has in a step.
CHAIN = 64
#: Rows of the usual rounds, which decide.
ROWS = (1, 8, 32)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to sum.

    Attributes:
      by: see `sharded.summed`. options: XLA's, for every executable with such sums.
    """

    by: str = BY_XLA
    options: tuple[tuple[str, Any], ...] = ()


#: By name; the first is what XLA does by itself.
WAYS: Mapping[str, Way] = {
    "nccl": Way(),
    "one-shot": Way(
        options=(
            ("xla_gpu_experimental_use_collective_kernels", "COLLECTIVE_KERNEL_ALL_REDUCE"),
            ("xla_gpu_unsupported_use_all_reduce_one_shot_kernel", True),
        )
    ),
    "symmetric": Way(options=(("xla_gpu_experimental_enable_nccl_symmetric_buffers", True),)),
    "kernel": Way(BY_KERNEL),
}
#: Ways that engines try at their start on GPUs. Others are for who asks for them by name: they have not been proved.
TRIED = ("nccl",)


@dataclasses.dataclass(frozen=True)
class Timed:
    """A way measured.

    Attributes:
      seconds: of one sum. error: largest difference from the exact result, in units of the sum's own rounding.
      drift: the same after CHAIN sums, each of what the one before gave, and in several runs.
      equal: whether all devices hold the same bits, after one and after all, in all runs.
    """

    seconds: float
    error: float
    drift: float
    equal: bool

    def right(self, devices: int) -> bool:
        """Roundings of CHAIN sums add up to a few units; a sum that took a part of the one before is off by a share."""
        return self.equal and self.error <= devices and self.drift <= CHAIN / 4


def measure(way: Way, mesh: Mesh, rows: int, width: int, dtype: jnp.dtype, repeats: int = 20) -> Timed:
    """Times a chain of sums of [rows, width] on every device of the mesh, and checks what comes out.

    Raises:
      Exception: whatever the compiler or the device has against it.
    """
    shards = mesh.shape[TENSOR_AXIS]
    split = NamedSharding(mesh, PartitionSpec(TENSOR_AXIS))

    # Each sum's parts differ, from one device to the other and from those of the sum before.
    weights_CS = (1 + 0.25 * np.random.default_rng(0).choice([-1, 1], (CHAIN, shards))) / shards
    weights_CS = weights_CS.astype(dtype).astype(np.float64)  # as the devices have them: a third is not the third

    def chain(x: jax.Array) -> jax.Array:
        mine_C = jnp.asarray(weights_CS, dtype)[:, jax.lax.axis_index(TENSOR_AXIS)]
        for step in range(CHAIN):
            x = summed(x * mine_C[step], way.by)
        return x

    def first(x: jax.Array) -> jax.Array:
        return summed(x, way.by)

    def ready(fn: Any) -> Any:
        spread = jax.shard_map(fn, mesh=mesh, in_specs=split.spec, out_specs=split.spec, check_vma=False)
        return jax.jit(spread).lower(x_RE).compile(compiler_options=dict(way.options))

    whole = jax.random.normal(jax.random.key(rows), (shards * rows, width), jnp.float32).astype(dtype)
    x_RE = jax.device_put(whole, split)
    parts_of = lambda y: [np.asarray(s.data, np.float64) for s in y.addressable_shards]
    off = lambda parts, exact: float(np.abs(parts - exact).max() / (float(jnp.finfo(dtype).eps) * np.abs(exact).max()))
    whole_SRE = np.asarray(whole, np.float64).reshape(shards, rows, width)
    ones = parts_of(ready(first)(x_RE))
    run = ready(chain)
    ends = [part for _ in range(4) for part in parts_of(run(x_RE))]
    times = []
    for _ in range(3):
        began = time.perf_counter()
        results = [run(x_RE) for _ in range(repeats)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - began) / (repeats * CHAIN))
        ends += [part for result in results[-2:] for part in parts_of(result)]
    equal = all(np.array_equal(some[0], part) for some in (ones, ends) for part in some)
    end = np.einsum("s,sre->re", weights_CS[0], whole_SRE) * weights_CS[1:].sum(axis=1).prod()
    error, drift = off(ones[0], whole_SRE.sum(axis=0)), off(ends[0], end)
    return Timed(min(times), error, drift, equal)


@functools.cache
def choose(mesh: Mesh, width: int, dtype: jnp.dtype, names: tuple[str, ...] | None = None) -> str:
    """The name of the quickest way that is right, by the sum of its times over ROWS; logged where there was a choice.

    Args:
      names: which to try; by default those that are known to work on this backend.
    """
    default = next(iter(WAYS))
    if names is None:
        # Processes that share a mesh must choose alike, and what they measure differs.
        alone = jax.default_backend() == "gpu" and jax.process_count() == 1
        names = TRIED if alone else (default,)
    if len(names) == 1:
        return names[0]
    seconds: dict[str, float] = {}
    for name in names:
        try:
            found = [measure(WAYS[name], mesh, rows, width, dtype) for rows in ROWS]
        except Exception as error:  # compilers raise many kinds
            _log.warning("sums over devices by %s do not run here: %s", name, str(error).split("\n", 1)[0])
            continue
        if all(one.right(mesh.shape[TENSOR_AXIS]) for one in found):
            seconds[name] = sum(one.seconds for one in found)
        else:
            _log.warning("sums over devices by %s are wrong here and are not used", name)
    if not seconds:
        return default
    best = min(seconds, key=lambda name: seconds[name])
    told = ", ".join(f"{name} {1e6 * s / len(ROWS):.1f}" for name, s in seconds.items())
    _log.info("small sums over %d devices by %s (us, mean of %s rows: %s)", mesh.size, best, ROWS, told)
    return best
