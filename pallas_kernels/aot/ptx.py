"""What ptxas says about kernels: registers and spills, read from the PTX that XLA dumps.

Owns the search for ptxas and for the kernels' PTX. XLA writes a module for each kernel and
numbers them as it pleases, so modules are found by the names of their entries.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_ARCHITECTURE = re.compile(r"^\.target\s+(sm_\w+)", re.MULTILINE)
_REPORT = re.compile(
    r"Compiling entry function '(?P<entry>[\w$]+)'"
    r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one kernel takes.

    Attributes:
      entry: its name in the PTX.
      registers: of a thread.
      spill_bytes: stores and loads of a thread's registers in local memory.
      code_bytes: of the device code that ptxas makes of its module.
      serialized: whether wgmma's wait for each other, as there are too few registers.
    """

    entry: str
    registers: int
    spill_bytes: int
    code_bytes: int
    serialized: bool = False


def find_ptxas() -> str:
    """The assembler of the installed nvcc package, or else of the machine.

    Raises:
      FileNotFoundError: there is none.
    """
    spec = importlib.util.find_spec("nvidia.cuda_nvcc") if importlib.util.find_spec("nvidia") else None
    for place in spec.submodule_search_locations or () if spec else ():
        if (path := Path(place) / "bin" / "ptxas").exists():
            return str(path)
    if found := shutil.which("ptxas"):
        return found
    raise FileNotFoundError("ptxas is not installed: it comes with nvidia-cuda-nvcc-cu12")


def parse(report: str) -> list[tuple[str, int, int]]:
    """(entry, registers, bytes of spill stores and loads) of each kernel in what `ptxas -v` prints."""
    return [(m["entry"], int(m["registers"]), int(m["stores"]) + int(m["loads"])) for m in _REPORT.finditer(report)]


def belongs(entry: str, kernel: str) -> bool:
    """Whether an entry is a kernel's: it has its name, or that and a suffix ("_2", "_merge")."""
    return entry == kernel or entry.startswith(kernel + "_")


def usage(dump: Path, kernels: Sequence[str], *, linked: bool = False) -> list[Usage]:
    """Assembles the modules in a directory of XLA's dumps that hold the named kernels.

    Args:
      linked: as code to be linked with other code, which JAX 0.12 makes of Mosaic's kernels where it finds CUDA's
        linker; warpgroups cannot hand over registers there ("'setmaxnreg' ignored to maintain compatibility across
        compilation units").

    Raises:
      FileNotFoundError: no ptxas.
      RuntimeError: ptxas refuses a module.
    """
    found = []
    for path in sorted(dump.rglob("*.ptx")):
        text = path.read_text()
        if not any(belongs(entry, kernel) for entry in _ENTRY.findall(text) for kernel in kernels):
            continue
        architecture = _ARCHITECTURE.search(text)
        assert architecture is not None, path
        with tempfile.TemporaryDirectory() as scratch:
            cubin = Path(scratch) / "kernel.cubin"
            command = [find_ptxas(), "-v", f"-arch={architecture[1]}", str(path), "-o", str(cubin)]
            command += ["-c"] if linked else []
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"ptxas refuses {path.name}: {done.stderr.strip()[:500]}")
            report = done.stderr + done.stdout
            for entry, registers, spills in parse(report):
                if any(belongs(entry, kernel) for kernel in kernels):
                    found.append(Usage(entry, registers, spills, cubin.stat().st_size, "serialized" in report))
    return found
