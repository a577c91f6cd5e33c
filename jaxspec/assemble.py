"""Composition: from names and directories to an engine. The only place that knows every part."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.ema import AdaptiveSpeculativeParams, EmaPolicy
from jaxspec.adaptive.goodput import GoodputPolicy
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.checkpointing import eagle3, hf
from jaxspec.config import DRAFTERS, EngineConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.models.layers import Transformer, column_blocks, tensor_parallel
from jaxspec.runtime.compile import use_persistent_cache
from jaxspec.runtime.runner import Runner
from jaxspec.runtime.sharding import check_divides, host_memory, tensor_mesh
from jaxspec.scheduling.scheduler import Scheduler, SchedulerConfig
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import DraftModelCore, HeadCore
from jaxspec.speculation.drafters.ngram import NgramDrafter
from jaxspec.speculation.state import Geometry
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tier import PLAIN, Tier

_DEFAULT_CONTEXT = 2048


def candidate_steps() -> tuple[int, ...]:
    """Depths that the adaptive policy chooses among where nothing else is said.

    A CPU is compute-bound beyond about 6 tokens a step (docs/notes.md), so deeper drafts do not pay there.
    """
    return (0, 1, 2, 4) if jax.default_backend() == "cpu" else (0, 1, 2, 4, 6)


def demo_directory() -> Path:
    """Where the demo checkpoints lie: beside the package in a checkout, inside it when installed.

    Raises:
      ValueError: this installation has none.
    """
    package = Path(__file__).resolve().parent
    for directory in (package.parent / "checkpoints" / "demo", package / "checkpoints" / "demo"):
        if (directory / "target" / "config.json").exists():
            return directory
    raise ValueError("the demo checkpoints are not part of this installation; pass a Hugging Face directory as model")


def resolve_model(model: str | Path) -> Path:
    """The directory of a model name or path."""
    if str(model) == "demo":
        return demo_directory() / "target"
    path = Path(model)
    if not path.is_dir():
        raise ValueError(f"model must be 'demo' or a Hugging Face directory; {str(model)!r} is neither")
    return path


def resolve_drafter(drafter: str | Path | None, model_dir: Path) -> tuple[str, Path | None]:
    """(kind, directory) of a drafter name or path; kind is one of DRAFTERS.

    A kind that needs a checkpoint finds it beside the target (`../eagle3`, `../draft`) or
    inside its directory. None picks EAGLE-3 where such a head lies there, else n-gram.

    Raises:
      ValueError: an unknown name, or no checkpoint where one is needed.
    """
    places = {"eagle3": "eagle3", "draft_model": "draft"}

    def find(kind: str) -> Path | None:
        for base in (model_dir, model_dir.parent):
            if (base / places[kind] / "config.json").exists():
                return base / places[kind]
        return None

    if drafter is None:
        found = find("eagle3")
        return ("eagle3", found) if found else ("ngram", None)
    name = str(drafter)
    if name in ("none", "ngram"):
        return name, None
    if name in places:
        found = find(name)
        if found is None:
            raise ValueError(
                f"drafter {name!r}: no checkpoint in {model_dir / places[name]} or {model_dir.parent / places[name]}; "
                "pass the drafter's directory instead"
            )
        return name, found
    path = Path(drafter)
    if not path.is_dir():
        raise ValueError(f"drafter must be one of {DRAFTERS} or a directory, got {name!r}")
    config = path / "config.json"
    if not config.exists():
        raise ValueError(f"drafter: {config} does not exist")
    architectures = json.loads(config.read_text()).get("architectures") or []
    return ("eagle3" if any("eagle" in a.lower() for a in architectures) else "draft_model"), path


def _laid_out(module: Any, shards: int) -> Any:
    """The module with its weights as this backend and its devices read them best.

    Weights that are split over devices do not go into column blocks, which would have to end where shards do: on a
    CPU the devices are virtual and share its cores, so tensor parallelism there is a rehearsal, and its speed no aim.
    """
    if shards > 1:
        with host_memory():
            return tensor_parallel(module, shards)
    return column_blocks(module) if jax.default_backend() == "cpu" else module


def build_drafter(
    kind: str,
    directory: Path | None,
    target: Transformer,
    geo: Geometry,
    speculation: SpeculationConfig,
    dtype: jnp.dtype,
    shards: int = 1,
) -> tuple[Drafter | None, Any]:
    """(drafter, its parameters).

    Args:
      shards: devices that share the drafter's layers; those parts whose heads or widths it does not divide are
        computed by every device alike, since a drafter is small and any target may meet any drafter.

    Raises:
      ValueError: the checkpoint does not fit the target; names the field and both values.
    """
    cfg = target.config
    if kind == "none":
        return None, ()
    if kind == "ngram":
        return NgramDrafter(cfg.vocab_size, speculation.ngram_min, speculation.ngram_max), ()
    assert directory is not None
    if kind == "eagle3":
        core: Any = HeadCore(_laid_out(eagle3.load_head(directory, target, dtype), shards))
    else:
        draft = hf.load_model(directory, dtype)
        if draft.config.vocab_size != cfg.vocab_size:
            raise ValueError(
                f"draft model {directory}: vocab_size must equal the target's {cfg.vocab_size}, "
                f"got {draft.config.vocab_size}"
            )
        core = DraftModelCore(_laid_out(draft, shards))
    return AutoregressiveDrafter(core, geo), core.params


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A policy that is still to be built: it may need costs, which need executables.

    Attributes:
      reachable: {tier: buckets} to compile.
    """

    reachable: dict[Tier, tuple[int, ...]]
    needs_cost: bool
    build: Any


def choose_policy(speculation: SpeculationConfig, buckets: Sequence[int], drafts: bool, trees: bool) -> _Choice:
    """What to compile, and how to build the policy once costs are known.

    Raises:
      ValueError: a configuration that the drafter cannot serve.
    """
    every = tuple(buckets)
    kind = speculation.resolved_policy
    if kind == "off" or not drafts:
        return _Choice({PLAIN: every}, False, lambda _: StaticPolicy(PLAIN))
    if speculation.topk > 1 and not trees:
        raise ValueError(f"this drafter proposes chains only (topk 1), got topk {speculation.topk}")
    if kind == "static":
        tier = speculation.tier(3 if speculation.depth is None else speculation.depth)
        return _Choice({tier: every}, False, lambda _: StaticPolicy(tier))
    if kind != "adaptive":

        def ema(_: CostTable | None) -> EmaPolicy:
            params = AdaptiveSpeculativeParams(kind, speculation.depth, every)
            return EmaPolicy(params, {step: speculation.tier(step) for step in params.candidate_steps})

        first = ema(None)
        reachable = {tier: first.buckets_for(tier, every) for tier in first.tiers}
        return _Choice({tier: at for tier, at in reachable.items() if at}, False, ema)
    tiers = speculation.tiers
    if tiers is None:
        tiers = tuple(
            speculation.tier(step) for step in sorted({0, *(speculation.candidate_steps or candidate_steps())})
        )
    elif not trees and not all(tier.is_chain for tier in tiers):
        raise ValueError(f"this drafter proposes chains only, got tiers {[str(tier) for tier in tiers]}")
    return _Choice({tier: every for tier in tiers}, True, lambda cost: GoodputPolicy(tiers, cost))


def build_engine(
    model: str | Path = "demo",
    drafter: str | Path | None = None,
    speculation: SpeculationConfig | Mapping[str, Any] | None = None,
    config: EngineConfig | None = None,
    *,
    tokenizer: bool = True,
    progress: bool = True,
) -> Engine:
    """Loads, compiles, measures, and returns an engine that is ready to serve.

    Args:
      tokenizer: False serves token ids only, from directories without a tokenizer.json.
      progress: show a bar while compiling.
    """
    speculation, config = SpeculationConfig.of(speculation), config or EngineConfig()
    model_dir = resolve_model(model)
    kind, directory = resolve_drafter(drafter, model_dir)
    dtype = jnp.dtype(config.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    shards = config.tensor_parallel
    check_divides(hf.load_config(model_dir), shards)
    # What is going to be split need not fit any device as a whole.
    load = host_memory if shards > 1 else contextlib.nullcontext
    with load():
        target = hf.load_model(model_dir, dtype)
    text = Tokenizer.from_directory(model_dir) if tokenizer else None

    def drafter_of(geo: Geometry) -> tuple[Drafter | None, Any]:
        with load():
            return build_drafter(kind, directory, target, geo, speculation, dtype, shards)

    return assemble(
        target, text, speculation, config, progress=progress, drafter=drafter_of,
        drafts=kind != "none", trees=kind in ("eagle3", "draft_model"),
    )  # fmt: skip


def assemble(
    target: Transformer, tokenizer: Tokenizer | None, speculation: SpeculationConfig, config: EngineConfig, *,
    drafter: Any, drafts: bool, trees: bool, progress: bool, cost: CostTable | None = None,
) -> Engine:  # fmt: skip
    """An engine from a target in memory; `drafter` maps a Geometry to (drafter, parameters).

    Args:
      cost: skips the timing of executables.
    """
    began = time.perf_counter()
    use_persistent_cache(config.compile_cache)
    model = target.config
    shards = config.tensor_parallel
    check_divides(model, shards)
    mesh = tensor_mesh(shards) if shards > 1 else None
    longest = config.max_seq_len or min(model.max_position_embeddings, _DEFAULT_CONTEXT)
    if longest > model.max_position_embeddings:
        raise ValueError(
            f"max_seq_len must be at most the model's context of {model.max_position_embeddings} tokens, got {longest}"
        )
    eos = tuple(sorted({*model.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer is not None else ())}))
    buckets = config.buckets
    choice = choose_policy(speculation, buckets, drafts, trees)
    depth = max(tier.depth for tier in choice.reachable)
    pages_per_seq = -(-(longest + depth + 1) // config.page_size)
    geo = Geometry(
        slots=config.max_batch_size,
        num_pages=config.num_pages or config.max_batch_size * pages_per_seq,
        page_size=config.page_size,
        pages_per_seq=pages_per_seq,
        max_depth=depth,
        kernels=config.kernels,
    )
    built, params = drafter(geo) if drafts and depth else (None, ())
    widest = max(tier.topk for tier in choice.reachable)
    if built is not None and widest > built.max_topk:
        raise ValueError(f"topk must be at most {built.max_topk}, the tokens this drafter can propose, got {widest}")
    chunk = min(config.prefill_chunk, longest)
    sizes = sorted({chunk, *(size for size in (16, 64) if size < chunk)})
    runner = Runner(
        _laid_out(target, shards), built, params, geo,
        rejection=speculation.verification == "rejection", reachable=choice.reachable,
        prefill_sizes=sizes, eos=eos,
        variants=tuple(v == "sampled" for v in config.variants), mesh=mesh, progress=progress,
    )  # fmt: skip
    if cost is None and choice.needs_cost:
        cost = runner.measure()
    scheduler = Scheduler(
        SchedulerConfig(
            max_batch_size=config.max_batch_size,
            num_pages=geo.num_pages,
            page_size=config.page_size,
            max_pages_per_seq=pages_per_seq,
            max_seq_len=longest,
            max_growth=depth + 1,
            prefill_chunk=chunk,
            enable_prefix_caching=config.enable_prefix_caching,
            prefix_lookahead=0 if built is None else built.lookahead,
        )
    )
    warmup = time.perf_counter() - began
    return Engine(runner, scheduler, lambda: choice.build(cost), buckets, tokenizer, eos, config.seed, warmup, cost)
