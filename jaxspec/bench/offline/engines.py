"""The engine that a benchmark measures: the front doors' parts, with the tiers and batch sizes asked for.

Owns the way from options to a ready Experiment. Must not know how runs are timed or reported.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.assemble import assemble
from jaxspec.bench.offline import grow
from jaxspec.bench.offline.measure import PLAIN_MODE, Experiment, Mode, Sweep, modes_of, run_queue
from jaxspec.bench.offline.simulate import SimulatedDrafter, rate_for
from jaxspec.bench.offline.widen import widen_head
from jaxspec.bench.offline.workloads import FILE, Passage, built_in, load_prompts, queue
from jaxspec.checkpointing import eagle3, hf
from jaxspec.config import DraftFormat, DraftQuantization, EngineConfig, SpeculationConfig
from jaxspec.defaults import candidate_steps
from jaxspec.drafters import registry
from jaxspec.drafters.rounding import check_weights
from jaxspec.engine import Engine
from jaxspec.loading import Drafting, bind_drafter, draft_format, in_few_bits, load_drafter
from jaxspec.models.base import TargetModel
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.state import Geometry
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tier import PLAIN, Tier

_ROUND_UP = 64
#: Between two lines that say how far compiling is.
_SAID_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What to build; see the command's help.

    Attributes:
      drafter: as LLM takes it. tiers: what is drafted, plain decoding not among them; None: the engine's default.
      grow: a size that `grow.parse_size` reads. simulate: mean accepted length of the deepest tier.
      prompts: a file of prompts, for the workload "file". hybrid, hybrid_depth: as SpeculationConfig's.
      draft_quantization: as SpeculationConfig's. grow_head: whether the EAGLE-3 head grows as wide as the grown target.
    """

    plan: Sweep
    model: str = "demo"
    drafter: str | None = None
    tiers: tuple[Tier, ...] | None = None
    dtype: str | None = None
    grow: str | None = None
    simulate: float | None = None
    prompts: str | None = None
    rounds_per_dispatch: int | str = "auto"
    mixed_chunk: int | str = "auto"
    batch_invariant: bool = False
    hybrid: bool = False
    hybrid_depth: int | None = None
    draft_quantization: DraftQuantization = "auto"
    grow_head: bool = False


class Parts:
    """Model, tokenizer and drafter of the options, loaded when they are first asked for; `engine` assembles them.

    What can be refused is refused before: by configurations and the file of prompts alone.

    Attributes:
      passages: prompts by their kind.
      draft_format: of the weights of the latest engine's drafter; None: as they were loaded.

    Raises:
      ValueError: what cannot be loaded or does not fit together.
    """

    def __init__(self, options: Options):
        directory = resolve_model(options.model)
        self.options = options
        self.draft_format: DraftFormat | None = None
        self.kind, self.head = resolve_drafter(options.drafter, directory)
        if options.grow_head and (options.grow is None or self.kind != "eagle3"):
            raise ValueError(
                f"grow-head is for EAGLE-3 heads of grown targets, got {self.kind} and grow {options.grow}"
            )
        trees = [t.name for t in options.tiers or () if not t.is_chain]
        check_weights(registry.find(self.kind), options.draft_quantization)
        self.trees = registry.find(self.kind).trees and options.simulate is None
        if trees and not self.trees:
            why = "simulated acceptance" if options.simulate is not None else f"drafter {self.kind!r}"
            raise ValueError(f"{why} drafts chains only, got tiers {trees}")
        if self.kind == registry.NONE and any(t.depth for t in options.tiers or ()):
            raise ValueError(f"tiers {[t.name for t in options.tiers or ()]} need a drafter, got drafter 'none'")
        #: Draft tokens of the deepest tier.
        self.depth = max(candidate_steps() if options.tiers is None else (t.depth for t in options.tiers))
        if options.simulate is not None:
            if options.hybrid:
                raise ValueError(f"simulate-accept-length {options.simulate} and hybrid exclude each other")
            if self.kind == registry.NONE:
                raise ValueError(f"simulate-accept-length {options.simulate} needs a drafter, got drafter 'none'")
            rate_for(options.simulate, self.depth)
        default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        self.dtype = jnp.dtype(options.dtype or default)
        config = hf.load_config(directory)
        self.size = None if options.grow is None else grow.parse_size(options.grow, config)
        self.passages: dict[str, list[Passage]] = dict(built_in())
        if options.prompts is not None:
            self.passages[FILE] = load_prompts(options.prompts)
        self.tokenizer = Tokenizer.from_directory(directory)
        self._directory = directory

    @functools.cached_property
    def small(self) -> TargetModel:
        """The target as it lies in its directory."""
        return hf.load_model(self._directory, self.dtype)

    @functools.cached_property
    def target(self) -> TargetModel:
        """The target as it is measured."""
        return self.small if self.size is None else grow.grow_target(self.small, self.size)

    def drafter(self, speculation: SpeculationConfig) -> tuple[Any, DraftFormat | None]:
        """What is to be bound, and in which format; a grown target gets the grown head."""
        if self.size is None or self.kind != "eagle3":
            module = load_drafter(self.kind, self.head, self.target, self.dtype)
        else:
            assert self.head is not None
            head = grow.grow_head(eagle3.load_head(self.head, self.small, self.dtype), self.small.config, self.size)
            module = widen_head(head, self.size) if self.options.grow_head else head
        self.draft_format = form = draft_format(module, self.head, self.dtype, speculation, 1)
        return in_few_bits(module, form), form

    def engine(
        self, longest: int, texts: Sequence[Sequence[int]] | None = None, *, plain: bool = False,
        policy: str | None = None,
    ) -> Engine:  # fmt: skip
        """An engine for requests of up to `longest` tokens.

        Args:
          texts: prompts with completions, where acceptance is simulated.
          plain: without speculation.
          policy: the kind whose tiers are compiled; None: the default's.
        """
        options = self.options
        limit = self.target.config.max_position_embeddings
        speculation = SpeculationConfig(policy="off")
        if not plain:
            speculation = SpeculationConfig(
                policy, tiers=options.tiers, hybrid=options.hybrid, hybrid_depth=options.hybrid_depth,
                draft_quantization=options.draft_quantization,
            )  # fmt: skip
        config = EngineConfig(
            max_batch_size=max(options.plan.batch_sizes),
            max_seq_len=min(limit, -(-longest // _ROUND_UP) * _ROUND_UP),
            dtype=self.dtype.name,
            # Every mode sends the same prompts; none may profit from the one before.
            enable_prefix_caching=False,
            batch_buckets=options.plan.batch_sizes,
            variants=("greedy",) if options.plan.temperature == 0 else ("sampled",),
            rounds_per_dispatch=options.rounds_per_dispatch,
            mixed_chunk=options.mixed_chunk,
            batch_invariant=options.batch_invariant,
            warmup="eager",
        )

        none = self.kind == registry.NONE or plain
        module, form = (None, None) if none else self.drafter(speculation)

        def make(geo: Geometry) -> tuple[Drafter | None, Any]:
            drafter, params = bind_drafter(self.kind, module, geo, speculation)
            if drafter is None or texts is None or options.simulate is None:
                return drafter, params
            rate = rate_for(options.simulate, geo.max_depth)
            simulated = SimulatedDrafter(drafter, rate, self.target.config.vocab_size)
            return simulated, simulated.params(params, texts)

        drafting = None if none else Drafting(make, self.trees, name=self.kind, weights=form)
        progress = sys.stderr.isatty() or _line_by_line()
        return assemble(self.target, self.tokenizer, speculation, config, drafter=drafting, progress=progress)


def _line_by_line() -> Callable[[int, int], None]:
    """Says how far compiling is where no bar can be seen, every _SAID_SECONDS."""
    told = time.monotonic()

    def tell(ready: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > _SAID_SECONDS and ready < total:
            told = time.monotonic()
            print(f"compiling: {ready} of {total} executables", file=sys.stderr, flush=True)

    return tell


def prepare(parts: Parts, *, adaptive: bool = True) -> tuple[Experiment, dict[str, Any]]:
    """Loads, compiles and returns (session, conditions of the measurement).

    Args:
      adaptive: measure the adaptive policy too.

    Raises:
      ValueError: prompts that do not fit the model; names what was given and what is allowed.
    """
    options, plan, library = parts.options, parts.options.plan, parts.passages
    limit = parts.target.config.max_position_embeddings
    token_ids: dict[tuple[str, int], tuple[int, ...]] = {}
    skipped: list[Passage] = []
    for many in library.values():
        for prompt in many:
            ids = tuple(parts.tokenizer.encode(prompt.text))
            if not ids or len(ids) + plan.max_tokens > limit:
                skipped.append(prompt)
            else:
                token_ids[prompt.kind, prompt.index] = ids
    usable = {kind: [p for p in many if (p.kind, p.index) in token_ids] for kind, many in library.items()}
    for kind, many in usable.items():
        if library[kind] and not many:
            raise ValueError(
                f"no prompt of kind {kind!r} fits: prompt and max_tokens {plan.max_tokens} together must be at most "
                f"the model's context of {limit} tokens"
            )
    used = {
        (p.kind, p.index): p
        for workload in plan.workloads
        for batch_size in plan.batch_sizes
        for repeat in range(plan.repeats)
        for p in queue(workload, batch_size, repeat, usable, plan.waves_of(batch_size))
    }
    longest = max(len(token_ids[key]) for key in used) + plan.max_tokens
    texts = None
    if options.simulate is not None:
        texts = _references(parts, longest, usable, token_ids, list(used.values()))
    engine = parts.engine(longest, texts)
    session = Experiment(engine, usable, token_ids, plan, modes_of(engine, adaptive))
    return session, _conditions(parts, session, sum(p.kind == FILE for p in skipped))


def _references(
    parts: Parts, longest: int, library: dict[str, list[Passage]], token_ids: dict[tuple[str, int], tuple[int, ...]],
    prompts: Sequence[Passage],
) -> list[list[int]]:  # fmt: skip
    """Every prompt with what plain decoding writes after it."""
    plan = parts.options.plan
    # The last drafts of a request, and a round in flight at its end, reach beyond its tokens.
    beyond = 2 * (parts.depth + 1)
    engine = parts.engine(longest + beyond, plain=True)
    session = Experiment(engine, library, token_ids, plan, [])
    room = engine.facts.sizes.max_seq_len
    jobs = [session.job(p, min(plan.max_tokens + beyond, room - len(token_ids[p.kind, p.index]))) for p in prompts]
    run = run_queue(engine, Mode(PLAIN_MODE, PLAIN), jobs, workload="reference", batch_size=max(plan.batch_sizes))
    return [[*job.token_ids, *c.token_ids] for job, c in zip(jobs, run.completions, strict=True)]


def _conditions(parts: Parts, session: Experiment, skipped: int) -> dict[str, Any]:
    options, plan, stats = parts.options, session.plan, session.engine.stats
    device = jax.devices()[0]
    source = "" if parts.head is None else f" ({_short(parts.head)})"
    mixture = parts.target.config.experts
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "cpu_cores": os.cpu_count(),
        "jax": jax.__version__,
        "model": options.model,
        "parameters": grow.parameters(parts.target),
        "dtype": parts.dtype.name,
        "drafter": parts.kind + source + " and suffix matches" * options.hybrid,
        "hybrid_depth": options.hybrid_depth,
        "draft_quantization": parts.draft_format,
        "grow": options.grow,
        "grow_head": options.grow_head,
        "geometry": None if parts.size is None else dataclasses.asdict(parts.size),
        "experts": None if mixture is None else {**dataclasses.asdict(mixture), "layers": len(mixture.layers)},
        "simulated_accept_length": options.simulate,
        "temperature": plan.temperature,
        "max_tokens": plan.max_tokens,
        "repeats": plan.repeats,
        "batch_sizes": list(plan.batch_sizes),
        "queues": {
            str(size): {w: len(session.jobs(w, size, 0, plan.max_tokens)) for w in plan.workloads}
            for size in plan.batch_sizes
        },
        "workloads": list(plan.workloads),
        "modes": [mode.name for mode in session.modes],
        "prompts": options.prompts,
        "skipped_prompts": skipped,
        "max_seq_len": session.engine.facts.sizes.max_seq_len,
        "warmup_seconds": stats.warmup_seconds,
        "executables": stats.executables,
    }


def _short(path: Path) -> str:
    return str(Path(*path.parts[-3:]))
