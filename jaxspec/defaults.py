"""What an engine does where nobody says: by its backend, by its model's size, and by what was measured on either.

Figures and what was tried are in docs/notes.md. Must not know how an engine comes about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec.config import EngineConfig
from jaxspec.fitting import longest_text, stored_share
from jaxspec.models.base import TargetModel
from jaxspec.scheduling.pace import USUAL_ROUNDS, Pace, may_pay
from jaxspec.scheduling.plan import SchedulerConfig
from jaxspec.scheduling.shapes import PrefillShape, shorter_chunks
from jaxspec.speculation.state import Geometry


def candidate_steps() -> tuple[int, ...]:
    """Depths that the adaptive policy chooses among where nothing else is said.

    A CPU is compute-bound beyond about 6 tokens a step (docs/notes.md), so deeper drafts do not pay there.
    """
    return (0, 1, 2, 4) if jax.default_backend() == "cpu" else (0, 1, 2, 4, 6)


def candidate_budgets() -> tuple[float, ...]:
    """Drafted tokens a row that a chain or tree verifies under a budget, where nothing else is said.

    Those that pay most on mixed batches by measured costs (docs/notes.md); accelerators verify more for nothing.
    """
    return (1.0, 2.0) if jax.default_backend() == "cpu" else (2.0, 4.0)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """How a backend computes prompts well (docs/notes.md).

    Attributes:
      chunk: most tokens of a prompt in a step, where nothing else is said.
      beside: most tokens of a prompt, and of all prompts together, in a step in which others decode.
      alone, several: see shapes_for.
      overhead: what a call costs beside its tokens, in tokens; on accelerators about those that are computed while
        the weights are read.
      unsampled: whether there are executables for chunks that end no prompt, where reading the output layer matters.
      mixed: prompt tokens that a round takes along, where nothing else is said.
    """

    chunk: int
    beside: int
    alone: tuple[int, ...]
    several: tuple[PrefillShape, ...]
    overhead: int
    unsampled: bool
    mixed: int


_CPU = Prompts(256, 256, (16, 64), (PrefillShape(64, 8, 32),), overhead=8, unsampled=False, mixed=0)
_ACCELERATOR = Prompts(
    1024, 1024, (64, 256), (PrefillShape(256, 16, 64), PrefillShape(1024, 32, 128)), overhead=256, unsampled=True,
    mixed=128,
)  # fmt: skip
_GPU = dataclasses.replace(_ACCELERATOR, chunk=2048, alone=(64, 256, 512, 1024), overhead=128)
#: Chunks in one pass with a round, and the batch size from which that is worth an executable by itself: in smaller ones
#: requests end, and others begin, too seldom.
_MIXED_ROWS, _MIXED_FROM = 4, 4


def prompts() -> Prompts:
    """This backend's."""
    return {"cpu": _CPU, "gpu": _GPU}.get(jax.default_backend(), _ACCELERATOR)


def prompts_of(config: EngineConfig) -> Prompts:
    """This backend's, as far as an engine says nothing else.

    Where bits may not depend on what is computed beside a token, no prompts are computed together, and none is cut
    otherwise while others decode.
    """
    usual, chunk = prompts(), config.prefill_chunk
    if config.batch_invariant:
        chunk, usual = chunk or usual.beside, dataclasses.replace(usual, several=())
    return usual if chunk is None else dataclasses.replace(usual, chunk=chunk, beside=chunk)


def without_end(config: EngineConfig, geo: Geometry) -> tuple[int, ...]:
    """Sizes of single chunks that end no prompt: as much as goes at once, beside others that decode or not."""
    usual = prompts_of(config)
    return tuple(sorted({geo.prefill_chunk, min(usual.beside, geo.prefill_chunk)})) if usual.unsampled else ()


def in_background(config: EngineConfig) -> bool:
    """Whether executables may come while requests run: which are ready then decides how prompts are cut."""
    return config.warmup == "background" and not config.batch_invariant


def several(config: EngineConfig, target: TargetModel) -> tuple[tuple[int, ...], Pace]:
    """The buckets in which one executable may run several rounds, and what says when."""
    rounds = config.rounds_per_dispatch
    if isinstance(rounds, int):
        return config.buckets if rounds > 1 else (), Pace(rounds, measured=False)
    read = stored_share(target, config.tensor_parallel)
    buckets = tuple(bucket for bucket in config.buckets if may_pay(read, bucket))
    if jax.default_backend() == "cpu" or not buckets:
        return (), Pace(1, measured=False)
    return buckets, Pace(USUAL_ROUNDS, measured=True)


def mixed(config: EngineConfig, geo: Geometry) -> dict[str, Any]:
    """Of a RunnerConfig, what rounds take along of prompts, and in which buckets."""
    asked, chosen = config.mixed_chunk, prompts().mixed
    size = min(chosen if isinstance(asked, str) else asked, geo.prefill_chunk)
    if not size or config.batch_invariant:  # a round's bits would depend on whether a prompt is under way
        return {}
    buckets = config.buckets if asked != "auto" else tuple(b for b in config.buckets if b >= _MIXED_FROM)
    return {"mixed": PrefillShape(size, min(_MIXED_ROWS, geo.slots), size), "mixed_buckets": buckets}


def measures_drafters(config: EngineConfig) -> bool:
    """Whether it is measured how a drafter lies best: devices of a CPU are virtual, and no figure of theirs says it."""
    return config.draft_tensor_parallel == "auto" and jax.default_backend() != "cpu"


def geometry(config: EngineConfig, context: int, depth: int) -> Geometry:
    """The sizes of an engine, for a model of this context and tiers up to this depth."""
    longest = longest_text(config, context)
    pages_per_seq = -(-(longest + depth + 1) // config.page_size)
    usual = prompts_of(config)
    together = config.max_num_batched_tokens or usual.chunk
    chunk = min(usual.chunk, together, longest)
    return Geometry(
        slots=config.max_batch_size, num_pages=config.num_pages or config.max_batch_size * pages_per_seq,
        page_size=config.page_size, pages_per_seq=pages_per_seq, max_depth=depth, max_seq_len=longest,
        prefill_chunk=chunk, max_num_batched_tokens=max(chunk, min(together, config.max_batch_size * chunk)),
        kernels=config.kernels, batch_invariant=config.batch_invariant,
        whole_drafter=config.tensor_parallel > 1 and (config.draft_tensor_parallel == 1 or measures_drafters(config)),
    )  # fmt: skip


def scheduling(
    config: EngineConfig, geo: Geometry, shapes: Sequence[PrefillShape], lookahead: int, doubling: float | None,
    window: int | None,
) -> SchedulerConfig:  # fmt: skip
    """The scheduler's rules, for executables of these shapes.

    Where bits may not depend on what else is computed, a prompt is cut alike whoever decodes meanwhile, and none reuses
    what rounds and other prompts' chunks have left.

    Args:
      lookahead, window: see SchedulerConfig. doubling: see shorter_chunks.
    """
    if config.batch_invariant:
        return SchedulerConfig(geo, False, lookahead, window=window)
    usual = prompts_of(config)
    beside = min(usual.beside, geo.prefill_chunk)
    alone = [shape.size for shape in shapes if shape.rows == 1 and shape.size <= beside]
    shorter = shorter_chunks(alone, usual.overhead, doubling)
    if beside < geo.prefill_chunk:
        shorter = ((0, beside), *shorter)
    together = None if config.max_num_batched_tokens or config.prefill_chunk else usual.beside
    return SchedulerConfig(
        geo, config.enable_prefix_caching, lookahead, shorter_chunks=shorter, window=window, batched_beside=together
    )
