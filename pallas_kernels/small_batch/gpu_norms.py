"""Norms of few rows on Mosaic GPU, side by side: `reference.norms`.

A row and part is a program's, whose warpgroup holds it in registers. What XLA does as well in a fusion or two, so that
kernels that come behind begin while this one runs, and have weights brought meanwhile (see overlap).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import overlap
from pallas_kernels.small_batch import mosaic
from pallas_kernels.small_batch.mosaic import F32
from pallas_kernels.small_batch.reference import NormedPart

#: Threads of a warpgroup, and features that one may read at once.
_LANES, _VECTORS = 128, (8, 4, 2)
#: Features of a row whose values fit into registers.
_WIDEST = 8192


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One launch, see mosaic.Kernel.

    Attributes:
      gathered: of each part, whether its rows are a table's. rows, width: of a part. eps: of the norms.
    """

    gathered: tuple[bool, ...]
    rows: int
    width: int
    eps: float
    interpret: bool
    teams: int = 1

    @property
    def name(self) -> str:
        return "norms"

    @property
    def programs(self) -> int:
        return self.rows * len(self.gathered)

    def scratch(self, _: Any) -> dict[str, Any]:
        return {}

    @property
    def layout(self) -> Any:
        vector = next(n for n in _VECTORS if self.width % (n * _LANES) == 0)
        return plgpu.Layout.WG_STRIDED((self.width,), vector)

    def body(self, ins: Sequence[Any], outs: Sequence[Any], _: dict[str, Any]) -> None:
        program, refs = lax.axis_index("program"), list(ins)
        for number, gathered in enumerate(self.gathered):
            own, refs = refs[: 2 + gathered], refs[2 + gathered :]

            @pl.when(program // self.rows == number)
            def _(number: int = number, own: Sequence[Any] = own) -> None:
                self._part(number, lax.rem(program, self.rows), own, outs[0])

    def _part(self, number: int, row: Any, ins: Sequence[Any], out: Any) -> None:
        rows, gain_E, *ids = ins
        gain = mosaic.load(gain_E, self.layout).astype(F32)
        overlap.wait(self.interpret)
        overlap.begin(self.interpret)
        at = jnp.clip(ids[0][row], 0, rows.shape[0] - 1) if ids else row
        x = mosaic.load(rows.at[at], self.layout).astype(F32)
        scale = lax.rsqrt(jnp.sum(x * x) * (1.0 / self.width) + self.eps)
        normed = (x * scale).astype(out.dtype).astype(F32) * gain
        mosaic.write(out.at[row, pl.ds(number * self.width, self.width)], normed.astype(out.dtype))


def refusal(width: int) -> str | None:
    """Why rows of so many features are not served, or None."""
    if width % (_LANES * _VECTORS[-1]) or width > _WIDEST:
        return f"rows must have a multiple of {_LANES * _VECTORS[-1]} features, at most {_WIDEST}, got {width}"
    return None


def norms(parts: Sequence[NormedPart], eps: float, *, interpret: Any = None) -> jax.Array:
    """See reference.norms.

    Raises:
      ValueError: see `refusal`.
    """
    width, dtype = parts[0].rows.shape[-1], parts[0].rows.dtype
    if why := refusal(width):
        raise ValueError(why)
    gathered = tuple(part.ids_M is not None for part in parts)
    rows = next(len(part.rows if part.ids_M is None else part.ids_M) for part in parts)
    kernel = _Kernel(gathered, rows, width, eps, interpret is not None)
    out = jax.ShapeDtypeStruct((rows, width * len(parts)), dtype)
    ins = [x for part in parts for x in part if x is not None]
    return mosaic.launch(kernel, (out,), *ins, interpret=interpret)[0]
