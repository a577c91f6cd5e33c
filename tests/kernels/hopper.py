"""Kernels on Mosaic GPU by the real compiler, for a Hopper GPU that need not be there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.aot import ptx
from pallas_kernels.aot.targets import TARGETS

#: For tests of such kernels in Pallas' interpreter, and of what the compiler makes of them.
interpreted = pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX has no interpreter for it")
proved = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams") or bool(TARGETS["h200"].missing()), reason="no compiler for absent GPUs"
)


def compiled(
    run: Callable[[Any], Any], args: Any, dump: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[ptx.Usage]]:
    """The executable of a function of shapes, and what its kernels take, as programs by themselves and as linked code.

    Args:
      dump: an empty directory, which gets the kernels' PTX.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(dump))
    replicated = NamedSharding(TARGETS["h200"].mesh(), PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
    executable = jax.jit(run).trace(jax.tree.map(place, args)).lower(lowering_platforms=("cuda",)).compile()
    for path in dump.glob("*.ptx"):  # which name the newest version that XLA's own assembler knows
        path.write_text(re.sub(r"^\.version .*$", ".version 8.6", path.read_text(), flags=re.MULTILINE))
    names = ["tree_attention", "rejection_sampling", "small_batch"]
    return executable, [*ptx.usage(dump, names), *ptx.usage(dump, names, linked=True)]


def meets_before_copies(code: str) -> bool:
    """Whether a warpgroup meets (bar.sync) between what it read by wgmma and every copy that may overwrite it.

    Rings whose readers bring what comes next rely on it: of Pallas' copies it is the first instruction.
    """
    copies = re.finditer(r"cp\.async\.bulk\.tensor\S*\.shared::\w+\.global", code)
    before = [code[: copy.start()] for copy in copies]
    return bool(before) and all(text.rfind("bar.sync") > text.rfind("wgmma.wait_group") for text in before)
