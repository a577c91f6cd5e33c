"""What must be the same in all processes of an engine over several hosts, each by a name: versions, flags and files.

Must not know how processes tell each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
from importlib.metadata import version
from pathlib import Path

import jax

from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.runtime.executables import source_digest

#: Fields that may differ: places on each host, and what the first process alone looks at. Of memory the least counts.
_OWN = {
    "compile_cache", "keep_learnt", "traffic_log", "feature_ring", "feature_ring_disk_mib", "feature_ring_share",
    "memory_fraction", "profile", "suffix_corpus_files",
}  # fmt: skip
#: Bytes of a file of weights that are read at its begin, and in each of so many places.
_BEGIN, _PIECE, _PIECES = 1 << 18, 1 << 12, 16


def versions_and_flags(speculation: SpeculationConfig, config: EngineConfig) -> dict[str, object]:
    """Of this process."""
    device = jax.local_devices()[0]
    flags = [(field.name, getattr(x, field.name)) for x in (config, speculation) for field in dataclasses.fields(x)]
    costs = None if config.profile is None else Path(config.profile)
    return {
        "jaxspec's source": source_digest()[:16],
        "JAX": (jax.__version__, version("jaxlib")),
        "the device": (device.platform, device.device_kind),
        **{name: str(value) if isinstance(value, Path) else value for name, value in flags if name not in _OWN},
        "feature_ring": config.feature_ring is not None,
        "profile": _digest(costs) if costs is not None and costs.is_file() else None,
    }


def files(model: Path, drafter: Path | None) -> dict[str, object]:
    """Digests of the files of a checkpoint and of a drafter. Of weights a sample: each host reads only its own part."""
    found: dict[str, object] = {}
    for directory, whose in ((model, "model"), (drafter, "drafter")):
        for path in sorted(() if directory is None else directory.iterdir()):
            if path.suffix in (".safetensors", ".json"):
                found[f"the {whose}'s {path.name}"] = _digest(path)
    return found


def _digest(path: Path) -> str:
    """Of a small file's size and all of it; of others their begin and some places, whatever their times are."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        found.update(file.read(_BEGIN))
        for piece in range(1, _PIECES + 1):
            file.seek(max(_BEGIN, (size - _PIECE) * piece // _PIECES))
            found.update(file.read(_PIECE))
    return found.hexdigest()[:16]
