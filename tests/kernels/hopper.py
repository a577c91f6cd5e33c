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


def counts_what_is_written(code: str) -> bool:
    """Whether a warpgroup counts in global memory, each time by one thread between two fences.

    Its threads meet right before, so that all have written, and after it before they read what others wrote.
    """
    found = [count.start() for count in re.finditer(r"atom\.relaxed\.gpu", code)]
    for at in found:
        met, fenced = (code.rfind(what, 0, at) for what in ("bar.sync", "fence.acq_rel.gpu"))
        fences, meets, reads = (code.find(what, at) for what in ("fence.acq_rel.gpu", "bar.red", "ld.global"))
        assert met < fenced and code.count(";", met, fenced) == 1 and fences < meets < reads
    return bool(found)


def sent_to_a_neighbour(code: str) -> int:
    """Bytes that a program of two sends the other, which its barrier expects; and that it sends no sooner than it may.

    Its barrier is made and expects them before it says that it has begun; who copies and who multiplies wait for the
    other's begin, the latter before it sends.
    """
    sends = [found.start() for found in re.finditer(r"st\.async\.shared::cluster", code)]
    expects = re.search(r"arrive\.expect_tx\.shared::cta\.b64 _, \[[^]]+\], (%r\d+);", code)
    assert sends and expects is not None
    said = re.search(rf"mov\.b32\s+{expects.group(1)}, (\d+);", code)
    assert said is not None and int(said.group(1)) == len(sends) * 128 * 8
    made = code.rindex("fence.mbarrier_init.release.cluster", 0, expects.start())
    assert made < expects.start() < code.index("barrier.cluster.arrive.relaxed", made)
    waits = [found.start() for found in re.finditer(r"barrier\.cluster\.wait\.acquire", code)]
    assert len(waits) == 2 and waits[1] < sends[0]
    return int(said.group(1))
