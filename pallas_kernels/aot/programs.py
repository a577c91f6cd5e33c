"""What a program is, which are known, and how one is made of a function and shapes.

A provider is a function from a Target to Programs. This library's operations are known by their
names, parts of the engine by short ones; others are named "package.module:function". Names are
imported when they are asked for: that is how the command reaches the engine's round, without
this library importing anything of the engine.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pallas_kernels.aot.targets import Target
from pallas_kernels.registry import OPERATIONS

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, ready to be lowered, and what its executable may take.

    Attributes:
      op, name: what the table calls it.
      lower: traces it and lowers it for the target.
      max_temp_bytes: of a device's memory for intermediate values, and of an array that a TPU brings into its VMEM
        for a program. limit: what that bound stands for.
      max_vmem_bytes: of the latter, where it may be larger: weights that are fetched early, as they are.
      max_collective_bytes: that a device may receive from others; None: any. max_collectives: in how many exchanges.
      in_place_bytes: bytes of donated arguments on a device that the results must share.
      kernels: names of kernels that the executable must hold.
      refusal: why a kernel does not serve these arguments, or None.
      quick: whether it is part of the subset that every change is tested with.
    """

    op: str
    name: str
    lower: Callable[[], Any]
    max_temp_bytes: int
    limit: str
    max_vmem_bytes: int | None = None
    max_collective_bytes: int | None = None
    max_collectives: int | None = None
    in_place_bytes: int = 0
    kernels: tuple[str, ...] = ()
    refusal: str | None = None
    quick: bool = False


Provider = Callable[[Target], Iterable[Program]]

_ENGINE = {
    "kv_commit": "jaxspec.runtime.aot:kv_commit",
    "round": "jaxspec.runtime.aot:engine_round",
    "sharded_round": "jaxspec.runtime.aot:sharded_round",
    "mixed_round": "jaxspec.runtime.aot:mixed_round",
    "placed_round": "jaxspec.runtime.aot:placed_round",
    "quantised_round": "jaxspec.runtime.aot_few_bits:quantised_round",
    "experts_round": "jaxspec.runtime.aot_few_bits:experts_round",
}


def known() -> tuple[str, ...]:
    """What the command knows by a short name, and compiles by default."""
    return (*OPERATIONS, *_ENGINE)


def provider(op: str) -> Provider:
    """The provider of a known name, or the one that "package.module:function" names.

    Raises:
      ValueError: neither.
    """
    if op in OPERATIONS:
        return functools.partial(importlib.import_module("pallas_kernels.aot.operations").programs, op)
    path = _ENGINE.get(op, op)
    module, colon, function = path.partition(":")
    if not colon:
        raise ValueError(f"op must be one of {known()} or 'package.module:function', got {op!r}")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"op {op!r}: {path} cannot be imported: {error}") from error


def lowering(
    function: Callable[..., Any], arguments: Iterable[Any], target: Target, mesh: Mesh, **options: Any
) -> Callable[[], Any]:
    """A Program's `lower` for a function of sharded shapes; `options` are jax.jit's."""

    def lower() -> Any:
        import jax  # see Target.mesh

        with jax.set_mesh(mesh):
            return jax.jit(function, **options).trace(*arguments).lower(lowering_platforms=(target.platform,))

    return lower
