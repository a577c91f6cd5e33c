"""What compilers of GPUs that are not there make of a sum over devices: nothing may be signalled before it is there.

Its interpreter has no semaphores, so the order of what devices see is read in the program. Where there is no GPU:
`JAX_PLATFORMS=cpu pytest --noconftest`, with the compilers of `pallas_kernels.aot` and JAX 0.11 or newer.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.aot.targets import TARGETS

TARGET = TARGETS["h200"]
pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11) or bool(TARGET.missing()), reason="needs JAX 0.11 and the compilers of NVIDIA's GPUs"
)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_signals_are_released_after_the_stores(
    devices: int, dtype: jnp.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from pallas_kernels.device_sum import gpu

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    mesh = TARGET.mesh(devices, "tensor")
    spec = PartitionSpec("tensor")
    x = jax.ShapeDtypeStruct((devices, 4096), dtype, sharding=NamedSharding(mesh, spec))
    summed = jax.shard_map(
        lambda x: gpu.device_sum(x, "tensor"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    text = jax.jit(summed).trace(x).lower(lowering_platforms=("cuda",)).compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1 and "skip_device_barrier = true" not in text
    (path,) = tmp_path.glob("*.ptx")
    lines = [line.strip() for line in path.read_text().splitlines()]
    signals = [i for i, line in enumerate(lines) if re.search(r"\bred\.", line)]
    assert len(signals) == devices - 1 and all("red.release.sys" in lines[i] for i in signals)
    # Stores to others are of whole packets of neighbours, to addresses whose space JAX 0.11 does not know.
    stores = [i for i, line in enumerate(lines) if line.startswith("st.") and i < min(signals)]
    assert len(stores) == 4 * (devices - 1) and all(re.match(r"st(\.global)?\.b32", lines[i]) for i in stores)
    barriers = [i for i, line in enumerate(lines) if line.startswith("bar.sync")]
    assert any(max(stores) < i < min(signals) for i in barriers)
    waits = [i for i, line in enumerate(lines) if line.startswith("atom.") and ".cas." in line]
    (acquired,) = [i for i, line in enumerate(lines) if line.startswith("fence.acquire.sys")]
    reads = [i for i, line in enumerate(lines) if re.match(r"ld\.global(\.\w+)*\.b32", line)]
    assert max(signals) < min(waits) < acquired < min(i for i in reads if i > acquired)
    assert len([i for i in reads if i > acquired]) == 4 * devices and not any(".nc" in lines[i] for i in reads)
