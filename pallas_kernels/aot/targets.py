"""Devices that are not there: what the compilers must be told about each.

Owns topology names, the GPU descriptions and which packages hold the compilers. Must not
know what is compiled.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jax.sharding import Mesh

#: The extra of this distribution that installs every compiler.
EXTRA = ".[aot]"


@dataclasses.dataclass(frozen=True)
class Target:
    """A device and its compiler.

    Attributes:
      name: as on the command line.
      kind: which implementation of the kernels runs on it.
      platform: jax's name to lower for.
      topology: libtpu's name of a slice of at least 4 chips, or XLA's GpuTargetConfigProto as text.
      needs: importable packages that hold the compiler, and what they are called in an index.
    """

    name: str
    kind: Literal["tpu", "gpu"]
    platform: Literal["tpu", "cuda"]
    topology: str
    needs: tuple[tuple[str, str], ...]

    def missing(self) -> list[str]:
        """Names of the packages that are not installed."""
        return [name for module, name in self.needs if not _installed(module)]

    def mesh(self, devices: int = 1, axis: str = "x") -> Mesh:
        """A mesh of absent devices along one axis.

        Raises:
          RuntimeError: the compiler cannot be loaded.
        """
        # Not above: the command reads names from here, and with a compiler installed JAX greets at every import.
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import AxisType, Mesh

        if self.kind == "tpu":
            described = topologies.get_topology_desc(platform="tpu", topology_name=self.topology)
        else:
            described = topologies.get_topology_desc(
                platform="cuda", target_config=self.topology, topology=f"1x1x{devices}"
            )
        return Mesh(np.asarray(described.devices[:devices]), (axis,), axis_types=(AxisType.Auto,))


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """What the compiler reads of a device: NVIDIA's datasheets and the occupancy tables of the CUDA programming guide.

    Attributes:
      capability: compute capability. features: whether code may use that architecture's own instructions.
      sms: multiprocessors. fpus: float32 units of each. threads: resident threads of each, at most.
      smem, smem_block: bytes of shared memory of each, and of a block, at most.
      l2: MiB. bandwidth: bytes a second. ghz: boost clock. memory: bytes.
    """

    description: str
    capability: tuple[int, int]
    features: bool
    sms: int
    fpus: int
    threads: int
    smem: int
    smem_block: int
    l2: int
    bandwidth: float
    ghz: float
    memory: float

    def text(self) -> str:
        """XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.smem_block} shared_memory_per_core: {self.smem}
  core_count: {self.sms} fpus_per_core: {self.fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {int(self.bandwidth)} l2_cache_size: {self.l2 << 20} device_memory_size: {int(self.memory)}
  clock_rate_ghz: {self.ghz}
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {"ACCELERATED_FEATURES" if self.features else "NONE"}
  }}
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 patch: 0 }}
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.description}"
"""


_GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 64, 2048, 167936, 166912, 40, 2.039e12, 1.41, 80e9),
    "l4": _Gpu("NVIDIA L4", (8, 9), False, 58, 128, 1536, 102400, 101376, 48, 0.3e12, 2.04, 24e9),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), True, 132, 128, 2048, 233472, 232448, 50, 3.352e12, 1.98, 80e9),
    "h200": _Gpu("NVIDIA H200", (9, 0), True, 132, 128, 2048, 233472, 232448, 50, 4.8e12, 1.98, 141e9),
    "b200": _Gpu("NVIDIA B200", (10, 0), True, 148, 128, 2048, 233472, 232448, 126, 7.672e12, 1.965, 180e9),
}  # fmt: skip
_TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

_TPU_NEEDS = (("libtpu", "libtpu"),)
_GPU_NEEDS = (
    ("jax_plugins.xla_cuda12", "jax-cuda12-pjrt"),
    ("jax_cuda12_plugin", "jax-cuda12-plugin"),
    ("nvidia.cuda_nvcc", "nvidia-cuda-nvcc-cu12"),
)

TARGETS: dict[str, Target] = {
    **{name: Target(name, "tpu", "tpu", topology, _TPU_NEEDS) for name, topology in _TPUS.items()},
    **{name: Target(name, "gpu", "cuda", gpu.text(), _GPU_NEEDS) for name, gpu in _GPUS.items()},
}
