"""Drafters from their directories, and weights as this backend and its devices read them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.config import DraftFormat, SpeculationConfig
from jaxspec.drafters import directories, registry
from jaxspec.drafters.rounding import gains_by_int8, round_drafter
from jaxspec.drafters.successor import Successors
from jaxspec.fitting import stored
from jaxspec.models import few_rows, few_rows_fit, packing
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.layouts import column_blocks, tensor_parallel
from jaxspec.models.sharded import BY_XLA
from jaxspec.runtime import summing
from jaxspec.runtime.sharding import check_four_bits, host_memory, spans_processes, tensor_mesh
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.state import Geometry

#: Bytes of weights up to which a CPU keeps them in both layouts, that of rounds and that of prompts.
_KEPT_TWICE = 2 << 30


def way_of(cfg: ModelConfig, dtype: jnp.dtype, shards: int) -> summing.Way:
    """How so many devices sum what they share of a target."""
    if shards == 1 or spans_processes(shards):  # which is quickest, each process would measure for itself
        return summing.Way()
    return summing.WAYS[summing.choose(tensor_mesh(shards), cfg.hidden_size, dtype)]


def laid_out(module: Any, shards: int, sums: str, *, invariant: bool = False, whole: bool = False) -> Any:
    """The module with its weights as this backend and its devices read them best.

    Args:
      invariant: whether few rows shall have the bits that one has: the output layer runs by a kernel for few rows
        too, where the others do, and one row by few bits is not multiplied as integers.
      whole: each device shall have all of it, but for what a drafter has of its target's.

    Weights that are split over devices do not go into column blocks, which would have to end where shards do: on a
    CPU the devices are virtual and share its cores, so tensor parallelism there is a rehearsal, and its speed no aim.
    """
    if shards > 1:
        with host_memory():
            module = tensor_parallel(module, shards, sums, lent=whole)
    if shards > 1 or jax.default_backend() != "cpu":
        if few_rows.unsupported() is not None:
            return module
        with host_memory() if shards > 1 else contextlib.nullcontext():  # what is on devices stays there
            packing.pack_experts(module, shards)
            if few_rows_fit.refusal(module, shards) is not None:
                return few_rows.pack_maps(module, shards)
            return few_rows.prepare(module, output=invariant, invariant=invariant)
    size = stored(nnx.state(module))
    return column_blocks(module, keep_flat=size <= _KEPT_TWICE)


def load_drafter(kind: str, directory: Path | None, target: TargetModel, dtype: jnp.dtype) -> Any:
    """What `bind_drafter` takes: the module of a drafter from its checkpoint, or what its kind has instead of one.

    Raises:
      ValueError: the checkpoint does not fit the target; names the field and both values.
    """
    if directory is None:
        return registry.find(kind).for_target(target)
    return directories.load_drafter(kind, directory, target, dtype)


def draft_format(
    module: Any, directory: Path | None, dtype: jnp.dtype, speculation: SpeculationConfig, shards: int
) -> DraftFormat | None:
    """The format that a drafter's weights are to have; None: as they are loaded.

    "auto" is int8 where few rows by such weights have a kernel, which reads half of the bytes: in an engine in
    bfloat16 on one device (docs/benchmarks/rounds.md, "Drafters in few bits"), of a drafter that borrows no output
    layer. Typical verification's texts depend on what is drafted, so nothing is rounded for it unless somebody asks.

    Args:
      module: what `load_drafter` returned. directory: its checkpoint.
    """
    asked = speculation.draft_quantization
    if asked != "auto":
        return None if asked == "none" else asked
    own = directory is not None and isinstance(module, nnx.Module) and dtype == jnp.bfloat16
    if not own or shards > 1 or speculation.verification == "typical" or few_rows.unsupported() is not None:
        return None
    return "int8" if gains_by_int8(module) else None


def in_few_bits(module: Any, form: DraftFormat | None) -> Any:
    """What `load_drafter` returned, rounded; `check_choice` refuses kinds without weights.

    Raises:
      ValueError: there is nothing to round.
    """
    return module if form is None else round_drafter(module, form)


def bind_drafter(
    kind: str,
    module: Any,
    geo: Geometry,
    speculation: SpeculationConfig | None = None,
    shards: int = 1,
    sums: str = BY_XLA,
) -> tuple[Drafter | None, Any]:
    """(drafter, its parameters) of what `load_drafter` returned.

    Args:
      geo: says besides whether each device has the drafter whole.
      shards: devices that share the drafter's layers; those parts whose heads or widths it does not divide are
        computed by every device alike, since a drafter is small and any target may meet any drafter.
      sums: by what they add up their parts (models.sharded).

    Raises:
      ValueError: tiers that it cannot draft.
    """
    if isinstance(module, nnx.Module):
        module = laid_out(module, shards, sums, whole=geo.whole_drafter)
    return registry.find(kind).bind(module, geo, speculation or SpeculationConfig())


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter that still has to know its engine's sizes.

    Attributes:
      bind: (drafter, its parameters) of a geometry.
      trees: whether it proposes trees as well as chains.
      deepest: most tokens that it can propose in a row; None: any number.
      name: of its kind.
      weights: the format that they were rounded to; None: they are as its checkpoint has them.
      reload: other parameters for it, of a directory; None: it has none that could be exchanged.
    """

    bind: Callable[[Geometry], tuple[Drafter | None, Any]]
    trees: bool = False
    deepest: int | None = None
    name: str = registry.NONE
    weights: DraftFormat | None = None
    reload: Callable[[Geometry, Path], Any] | None = None


def drafting_of(
    kind: str, directory: Path | None, target: TargetModel, dtype: jnp.dtype, speculation: SpeculationConfig,
    shards: int, sums: str,
) -> Drafting | None:  # fmt: skip
    """The drafter of a directory, loaded for its target; None for a kind that drafts nothing.

    Raises:
      ValueError: the checkpoint does not fit the target.
    """
    facts = registry.find(kind)
    if not facts.drafts:
        return None
    # What is going to be split need not fit any device as a whole.
    load = host_memory if shards > 1 else contextlib.nullcontext
    with load():
        loaded = load_drafter(kind, directory, target, dtype)
        form = draft_format(loaded, directory, dtype, speculation, shards)
        module = in_few_bits(loaded, form)
    if isinstance(module, nnx.Module):
        check_four_bits(module, shards)

    def bind(geo: Geometry) -> tuple[Drafter | None, Any]:
        with load():
            return bind_drafter(kind, module, geo, speculation, shards, sums)

    if directory is None:
        return Drafting(bind, facts.trees, facts.deepest(loaded), kind, form)
    successors = Successors(kind, directory, loaded, target, dtype)

    def reload(geo: Geometry, where: Path) -> Any:
        with load():
            other = in_few_bits(successors.load(where), form)
            return bind_drafter(kind, other, geo, speculation, shards, sums)[1]

    return Drafting(bind, facts.trees, facts.deepest(loaded), kind, form, reload)
