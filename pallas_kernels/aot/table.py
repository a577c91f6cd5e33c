"""Outcomes, and the table that they are printed in. Must not import JAX."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A line of the table. Times are seconds; what does not apply is None.

    Attributes:
      verdict: PASS, FAIL, or REFUSED where the kernel says that it does not serve the case.
      reason: of what is not PASS.
      temp_bytes, max_temp_bytes: taken and allowed. alias_bytes: updated in place.
      vmem_bytes: of the largest array that XLA itself keeps in a TPU's VMEM.
      code_bytes: of the executable; on GPUs of the kernels alone.
      registers, spill_bytes: the most that a kernel of the executable takes.
    """

    target: str
    op: str
    case: str
    verdict: str
    reason: str = ""
    lower_seconds: float | None = None
    compile_seconds: float | None = None
    temp_bytes: int | None = None
    vmem_bytes: int | None = None
    max_temp_bytes: int | None = None
    alias_bytes: int | None = None
    code_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None


_COLUMNS = (
    ("op", 18), ("case", 24), ("lower s", -8), ("compile s", -9), ("temp", -7), ("vmem", -7), ("limit", -7),
    ("in place", -8), ("code", -7), ("regs", -5), ("spill", -6), ("verdict", 8),
)  # fmt: skip


def header() -> str:
    """The table's first line."""
    return "  ".join(f"{name:<{w}}" if w > 0 else f"{name:>{-w}}" for name, w in _COLUMNS).rstrip()


def _size(value: int | None) -> str:
    if value is None:
        return "-"
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return str(value)


def line(outcome: Outcome) -> str:
    """An outcome as a line of the table."""
    seconds = lambda x: "-" if x is None else f"{x:.2f}"
    plain = lambda x: "-" if x is None else str(x)
    cells = (
        outcome.op, outcome.case, seconds(outcome.lower_seconds), seconds(outcome.compile_seconds),
        _size(outcome.temp_bytes), _size(outcome.vmem_bytes), _size(outcome.max_temp_bytes),
        _size(outcome.alias_bytes), _size(outcome.code_bytes), plain(outcome.registers), plain(outcome.spill_bytes),
        outcome.verdict,
    )  # fmt: skip
    texts = (f"{cell:<{w}}" if w > 0 else f"{cell:>{-w}}" for cell, (_, w) in zip(cells, _COLUMNS, strict=True))
    return ("  ".join(texts) + (f"  {outcome.reason}" if outcome.reason else "")).rstrip()
