"""Composition: from names and directories to an engine. The only place that knows every part."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.adaptive import registry as policies
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.adaptive.kind import Room
from jaxspec.adaptive.learnt import Keeper, digest
from jaxspec.adaptive.policy import TierPolicy
from jaxspec.checkpointing import hf, hub
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.defaults import (
    candidate_budgets,
    candidate_steps,
    geometry,
    in_background,
    mixed,
    prompts_of,
    scheduling,
    several,
)
from jaxspec.drafters import directories, registry
from jaxspec.drafters.successor import Successors
from jaxspec.engine import Engine
from jaxspec.facts import EngineFacts
from jaxspec.fitting import doubling, fitted, longest_text, ring_rows, stored
from jaxspec.hybrids import joined
from jaxspec.models import few_rows
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.layers import Transformer
from jaxspec.models.layouts import column_blocks, tensor_parallel
from jaxspec.models.sharded import BY_XLA
from jaxspec.remembered import texts
from jaxspec.ringfiles import RingDirectory
from jaxspec.runtime import summing
from jaxspec.runtime.collecting import Collector
from jaxspec.runtime.compile import use_persistent_cache
from jaxspec.runtime.executables import source_digest
from jaxspec.runtime.hosts import Hosts
from jaxspec.runtime.repertoire import RunnerConfig
from jaxspec.runtime.runner import Runner
from jaxspec.runtime.sharding import Sharing, check_divides, host_memory, spans_processes, tensor_mesh
from jaxspec.runtime.timing import measure
from jaxspec.runtime.warmup import WarmupConfig
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.shapes import shapes_for
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.drafters.featureless import Featureless
from jaxspec.speculation.ring import ring_layers
from jaxspec.speculation.state import Geometry
from jaxspec.speculation.typical import Typical
from jaxspec.text.grammar import GrammarCompiler
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tier import Tier

#: Context tokens of a row for which a profile is looked up: what `measure` times at.
_USUAL_CONTEXT = 256
#: How much deeper than its others a hybrid's tier is that only looks up.
_LOOKUP = 2
_log = logging.getLogger(__name__)


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
    """The directory of a model's name, path or hub id ("organisation/model", which is downloaded if need be).

    Raises:
      ValueError: none of these, or a download that failed.
    """
    if str(model) == "demo":
        return demo_directory() / "target"
    path = Path(model)
    if path.is_dir():
        return path
    if hub.is_hub_id(str(model)):
        return hub.download(str(model))
    raise ValueError(f"model must be 'demo' or a Hugging Face directory; {str(model)!r} is neither")


def resolve_drafter(drafter: str | Path | None, model_dir: Path) -> tuple[str, Path | None]:
    """(kind, directory) of a drafter's name, path or hub id; the kind is one of jaxspec.drafters.registry.

    A kind that needs a checkpoint finds it beside the target or inside its directory, under its own name (a draft
    model under `draft`), or in the target's own checkpoint. None picks EAGLE-3 where such a head lies there, else
    n-gram.

    Raises:
      ValueError: an unknown name, or no checkpoint where one is needed.
    """
    if drafter is None:
        at_hand = (kind for kind in map(registry.find, registry.UNASKED) if not kind.layouts or kind.find(model_dir))
        drafter = next(at_hand).name
    name = str(drafter)
    if name not in registry.names():
        path = hub.download(name) if hub.is_hub_id(name) and not Path(name).is_dir() else Path(name)
        if not path.is_dir():
            close = difflib.get_close_matches(name, registry.names(), 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"drafter must be one of {registry.names()} or a directory, got {name!r}{hint}")
        return directories.read_kind(path), path
    kind = registry.find(name)
    found = kind.find(model_dir) if kind.layouts else None
    if found is None and kind.layouts:
        raise ValueError(f"drafter {name!r}: {kind.searched(model_dir)}; pass the drafter's directory instead")
    return name, found


#: Bytes of weights up to which a CPU keeps them in both layouts, that of rounds and that of prompts.
_KEPT_TWICE = 2 << 30


def _way(cfg: ModelConfig, dtype: jnp.dtype, shards: int) -> summing.Way:
    """How so many devices sum what they share of a target."""
    if shards == 1 or spans_processes(shards):  # which is quickest, each process would measure for itself
        return summing.Way()
    return summing.WAYS[summing.choose(tensor_mesh(shards), cfg.hidden_size, dtype)]


def check_batch_invariant(config: EngineConfig, target: TargetModel, tiers: Iterable[Tier]) -> None:
    """Refuses an engine whose rounds would not give a token the same bits whatever is computed beside it.

    Raises:
      ValueError: the device, the model, or rounds that the kernels do not serve; it shows both values.
    """
    me = "batch_invariant=True"
    reason = few_rows.unsupported() or few_rows.refusal(target) or few_rows.output_refusal(cast(Transformer, target))
    if reason is not None:
        raise ValueError(f"{me} needs the kernels for few rows: {reason}")
    if target.config.experts is not None:
        raise ValueError(f"{me} does not hold for mixtures of experts, got {target.config.experts.count} experts")
    if config.tensor_parallel > 1:
        raise ValueError(f"{me} is for one device, got tensor_parallel={config.tensor_parallel}")
    if config.mixed_chunk not in ("auto", 0):
        raise ValueError(f"{me} computes no prompts in rounds, got mixed_chunk={config.mixed_chunk}")
    if config.kernels not in (None, "gpu"):
        raise ValueError(f"{me} has a kernel of its own for attention on GPUs, got kernels={config.kernels!r}")
    for tier in tiers:
        if not tier.is_chain:
            raise ValueError(
                f"{me} is for chains, whose nodes stand where they will lie once accepted, got tier {tier.name}"
            )
        if (tokens := config.max_batch_size * tier.num_nodes) > few_rows.MOST_ROWS:
            raise ValueError(
                f"{me} is for rounds of at most {few_rows.MOST_ROWS} tokens, got {tokens}: max_batch_size="
                f"{config.max_batch_size} and tier {tier.name}"
            )


def _laid_out(module: Any, shards: int, sums: str, *, output: bool = False) -> Any:
    """The module with its weights as this backend and its devices read them best.

    Args:
      output: whether the output layer runs by a kernel for few rows too, where the others do.

    Weights that are split over devices do not go into column blocks, which would have to end where shards do: on a
    CPU the devices are virtual and share its cores, so tensor parallelism there is a rehearsal, and its speed no aim.
    """
    if shards > 1:
        with host_memory():
            module = tensor_parallel(module, shards, sums)
    if shards > 1 or jax.default_backend() != "cpu":
        return module if few_rows.unsupported() is not None else few_rows.prepare(module, output=output)
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
      shards: devices that share the drafter's layers; those parts whose heads or widths it does not divide are
        computed by every device alike, since a drafter is small and any target may meet any drafter.
      sums: by what they add up their parts (models.sharded).

    Raises:
      ValueError: tiers that it cannot draft.
    """
    if isinstance(module, nnx.Module):
        module = _laid_out(module, shards, sums)
    return registry.find(kind).bind(module, geo, speculation or SpeculationConfig())


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A policy that is still to be built: it may need costs, which need executables.

    Attributes:
      reachable: {tier: buckets} to compile. budgets: the packed rounds among them.
    """

    reachable: dict[Tier, tuple[int, ...]]
    budgets: dict[tuple[Tier, int], tuple[int, ...]]
    needs_cost: bool
    build: Callable[[CostTable | None], TierPolicy]


def choose_policy(
    speculation: SpeculationConfig, buckets: Sequence[int], drafts: bool, trees: bool, deepest: int | None = None,
    default_steps: tuple[int, ...] | None = None,
) -> _Choice:  # fmt: skip
    """What to compile, and how to build the policy once costs are known.

    Args:
      deepest: most tokens that the drafter can propose in a row, by which the default's depths are clipped. Depths
        that a user asked for are the drafter's to refuse.
      default_steps: the default's depths; None: those of this process's device, which is initialised for it.

    Raises:
      ValueError: a configuration that the drafter cannot serve.
    """
    if not drafts and (speculation.hybrid or speculation.suffix_corpus_tokens):
        what = "hybrid True" if speculation.hybrid else f"suffix_corpus_tokens {speculation.suffix_corpus_tokens}"
        raise ValueError(f"SpeculationConfig.{what} needs a drafter, got drafter {registry.NONE!r}")
    kind = speculation.policy_kind if drafts else policies.find(policies.OFF)
    if kind.drafts and speculation.topk > 1 and not trees:
        raise ValueError(f"this drafter proposes chains only (topk 1), got topk {speculation.topk}")
    steps = candidate_steps() if default_steps is None else default_steps
    steps = steps if deepest is None else tuple(min(step, deepest) for step in steps)
    # What costs no model may look further.
    lookups = (_LOOKUP * max(steps) if deepest is None else deepest,) if speculation.hybrid else ()
    room = Room(tuple(buckets), steps, candidate_budgets() if default_steps is None else (), lookups)
    reachable = kind.reachable(speculation, room)
    if not speculation.hybrid and any(tier.lookup for tier in reachable):
        raise ValueError(f"tiers that only look up are for hybrids, got {[str(tier) for tier in reachable]}")
    if not trees and not all(tier.is_chain for tier in reachable):
        raise ValueError(f"this drafter proposes chains only, got tiers {[str(tier) for tier in reachable]}")
    budgets = kind.budgets(speculation, room)
    return _Choice(reachable, budgets, kind.needs_costs, lambda cost: kind.build(speculation, room, cost))


def build_engine(
    model: str | Path = "demo",
    drafter: str | Path | None = None,
    speculation: SpeculationConfig | Mapping[str, Any] | None = None,
    config: EngineConfig | None = None,
    *,
    progress: bool | Callable[[int, int], None] = True,
) -> Engine:
    """Loads and compiles (see EngineConfig.warmup), and returns an engine that is ready to serve.

    Args:
      progress: show a bar while compiling; or what is called with how many executables have come, of how many in all.
    """
    speculation, config = SpeculationConfig.of(speculation), config or EngineConfig()
    use_persistent_cache(config.compile_cache)  # loading compiles too: a small program for each shape
    model_dir = resolve_model(model)
    kind, directory = resolve_drafter(drafter, model_dir)
    if not speculation.policy_kind.drafts:
        kind, directory = registry.NONE, None
    dtype = jnp.dtype(config.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    shards = config.tensor_parallel
    cfg = hf.load_config(model_dir)
    check_divides(cfg, shards)
    context = longest_text(config, cfg.max_position_embeddings)
    if config.profile is not None:
        CostProfile.load(config.profile)  # before weights are: whether it can be read
    # What is going to be split need not fit any device as a whole.
    load = host_memory if shards > 1 else contextlib.nullcontext
    sums = _way(cfg, dtype, shards).by
    with load():
        blocked = shards == 1 and jax.default_backend() == "cpu"  # see _laid_out
        target = hf.load_model(
            model_dir, dtype, context=context, int8_activations=config.int8_activations, blocked=blocked,
            devices=Sharing(tensor_mesh(shards), sums) if shards > 1 else None,
        )  # fmt: skip
        module = load_drafter(kind, directory, target, dtype)
    text = None if config.skip_tokenizer_init else Tokenizer.from_directory(model_dir)

    def drafter_of(geo: Geometry) -> tuple[Drafter | None, Any]:
        with load():
            return bind_drafter(kind, module, geo, speculation, shards, sums)

    def reloader() -> Callable[[Geometry, Path], Any] | None:
        if directory is None:
            return None
        successors = Successors(kind, directory, module, target, dtype)

        def reload(geo: Geometry, where: Path) -> Any:
            with load():
                return bind_drafter(kind, successors.load(where), geo, speculation, shards, sums)[1]

        return reload

    facts = registry.find(kind)
    drafting = Drafting(drafter_of, facts.trees, facts.deepest(module), kind, reloader()) if facts.drafts else None
    files = {"model files": digest(model_dir), "drafter files": digest(directory)}
    return assemble(target, text, speculation, config, drafter=drafting, progress=progress, files=files)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter that still has to know its engine's sizes.

    Attributes:
      bind: (drafter, its parameters) of a geometry.
      trees: whether it proposes trees as well as chains.
      deepest: most tokens that it can propose in a row; None: any number.
      name: of its kind.
      reload: other parameters for it, of a directory; None: it has none that could be exchanged.
    """

    bind: Callable[[Geometry], tuple[Drafter | None, Any]]
    trees: bool = False
    deepest: int | None = None
    name: str = registry.NONE
    reload: Callable[[Geometry, Path], Any] | None = None


def assemble(
    target: TargetModel, tokenizer: Tokenizer | None, speculation: SpeculationConfig, config: EngineConfig, *,
    drafter: Drafting | None, progress: bool | Callable[[int, int], None], cost: CostTable | None = None,
    files: Mapping[str, str] | None = None,
) -> Engine:  # fmt: skip
    """An engine from a target in memory.

    Args:
      drafter: None: nothing is drafted.
      cost: skips the timing of executables.
      files: digests of what target and drafter were read from; without them nothing that is learnt is kept.
    """
    began = time.perf_counter()
    cache = use_persistent_cache(config.compile_cache)
    model, shards, buckets = target.config, config.tensor_parallel, config.buckets
    check_divides(model, shards)
    if spans_processes(shards):
        _check_shared(speculation, config)
    mesh = tensor_mesh(shards) if shards > 1 else None
    eos = tuple(sorted({*model.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer is not None else ())}))
    can = Drafting(lambda _: (None, ())) if drafter is None else drafter
    choice = choose_policy(speculation, buckets, drafter is not None, can.trees, can.deepest)

    def bind(geo: Geometry) -> tuple[Drafter | None, Any]:
        built, params = can.bind(geo)
        return None if built is None else joined(built, model.vocab_size, speculation), params

    if config.batch_invariant:
        check_batch_invariant(config, target, choice.reachable)
    depth = max(tier.depth for tier in choice.reachable)
    if drafter is not None and speculation.topk > 1 and speculation.num_nodes is None:
        trees = [tier.name for tier in choice.reachable if not tier.is_chain]
        _log.info("topk %d without num_nodes: draft trees are %s", speculation.topk, ", ".join(trees))
    repeated, pace = several(config, target)
    geo = dataclasses.replace(geometry(config, model.max_position_embeddings, depth), max_rounds=pace.most)
    built, params = bind(geo) if depth else (None, ())
    if config.feature_ring is not None:
        geo = dataclasses.replace(geo, ring=ring_rows(config, geo, target, built))
    hosts = None
    if spans_processes(shards):
        hosts = Hosts.meet()
    if config.num_pages is None:
        small, geo = geo, fitted(geo, config.memory_fraction, target, built, params, shards)
        if hosts is not None:  # their memories may differ
            geo = dataclasses.replace(geo, num_pages=hosts.least(geo.num_pages))
        built, params = bind(geo) if depth and geo is not small else (built, params)
    widest = max(tier.topk for tier in choice.reachable)
    if built is not None and widest > built.max_topk:
        raise ValueError(f"topk must be at most {built.max_topk}, the tokens this drafter can propose, got {widest}")
    grammars = _grammars(config, tokenizer, model.vocab_size, eos)
    both = ("sampled",) if jax.default_backend() == "cpu" else ("greedy", "sampled")
    usual = prompts_of(config)
    runs = RunnerConfig(
        choice.reachable, shapes_for(geo, usual.alone, usual.several), usual.overhead, usual.unsampled, eos,
        variants=tuple(sorted({v == "sampled" for v in config.variants or both})),
        rejection=speculation.verification == "rejection",
        typical=None if built is None else _typical(speculation), guided=grammars is not None, budgets=choice.budgets,
        rounds=pace.most, repeated=repeated, **mixed(config, geo),
    )  # fmt: skip
    # What processes share they compile first: what is ready differs between them.
    background = in_background(config) and hosts is None
    identity = _identity(target, can.name + " with suffix matches" * speculation.hybrid, params, shards)
    if config.profile is not None:
        cost = _profiled(config.profile, choice, identity, speculation.resolved_policy)
    store = None if config.feature_ring is None or built is None else _ring_directory(config, target, built)
    times = cost is None and choice.needs_cost
    warmup = WarmupConfig(progress, cache, background, times=times and background)
    if hosts is not None:
        told = [text for name, text in identity.items() if name != "device"]
        hosts.agree((source_digest(), jax.__version__, *told, geo, runs, speculation))
    way = _way(model, target.embedding[...].dtype, shards)
    laid_out = _laid_out(target, shards, way.by, output=config.batch_invariant)
    runner = Runner(laid_out, built, params, geo, runs, warmup, mesh, way.options)
    if times:
        cost = CostTable({}) if background else measure(runner)
    lookahead = 0 if built is None else built.lookahead
    scheduler = Scheduler(
        scheduling(config, geo, runs.prefill_shapes, lookahead, doubling(model), _passed(model, built))
    )
    facts = EngineFacts(
        geo, tuple(buckets), model.vocab_size, True in runner.variants, frozenset(eos), tokenizer, grammars,
        can.name, speculation.resolved_policy, str(target.embedding[...].dtype), speculation.objective, identity,
    )  # fmt: skip
    if hosts is not None:
        runner.join(hosts)
    leads = hosts is None or hosts.leads
    encode = None if tokenizer is None else tokenizer.encode
    for text in texts(speculation.suffix_corpus_files, encode, model.vocab_size):
        runner.remember(text)
    return Engine(
        facts, runner, scheduler, choice.build, cost, config.seed, began, config.traffic_log if leads else None, pace,
        remembers=speculation.suffix_corpus_responses and built is not None,
        load_drafter=_fixed if hosts is not None else can.reload and functools.partial(can.reload, geo),
        collector=None if store is None else Collector(runner, store.file, config.feature_ring_share),
        keeper=_keeper(config, cache, {**identity, **(files or {})}) if files is not None and leads else None,
    )  # fmt: skip


def _keeper(config: EngineConfig, cache: Path | None, identity: Mapping[str, str]) -> Keeper | None:
    """Where what the policy learns is kept; None where it is not asked for, or there is no place beside executables."""
    where = config.keep_learnt
    if where is False or (where is True and cache is None):
        return None
    versions = {"jax": jax.__version__, "program": source_digest()[:16]}
    directory = cache.parent / "learnt" if where is True and cache is not None else Path(str(where))
    return Keeper(directory, {**identity, **versions})


def _check_shared(speculation: SpeculationConfig, config: EngineConfig) -> None:
    """Refuses what reads or writes one process's arrays, where several share an engine."""
    asked = {"suffix_corpus_tokens": speculation.suffix_corpus_tokens, "feature_ring": config.feature_ring}
    for name, value in asked.items():
        if value:
            raise ValueError(
                f"{name} is for engines of one process, got {str(value)!r} for {jax.process_count()} processes"
            )


def _fixed(directory: Path) -> Any:
    """In place of what loads a drafter's weights, where several processes would have to."""
    raise ValueError(f"an engine that several processes share keeps its drafter's weights, got {str(directory)!r}")


def _passed(model: ModelConfig, drafter: Drafter | None) -> int | None:
    """The window of all layers that read the pool; None: one sees all, or a drafter keeps entries there."""
    every = len(model.sliding_layers) == model.num_layers
    return model.sliding_window if every and (drafter is None or isinstance(drafter, Featureless)) else None


def _ring_directory(config: EngineConfig, target: TargetModel, drafter: Drafter) -> RingDirectory:
    """Where a ring's files go, each with what training has to know of the engine."""
    assert config.feature_ring is not None
    layers = ring_layers(target.config, drafter.aux_layers)
    about = {"layers": json.dumps(layers), "hidden_size": str(target.config.hidden_size)}
    mark = {"engine": uuid.uuid4().hex, "vocab_size": str(target.config.vocab_size)}
    return RingDirectory(config.feature_ring, config.feature_ring_disk_mib << 20, {**about, **mark})


def _identity(target: TargetModel, drafter: str, params: Any, shards: int) -> dict[str, str]:
    """What the seconds of rounds depend on, as texts."""
    device, c = jax.devices()[0], target.config
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(target))} - {str(target.embedding[...].dtype)}
    return {
        "device": device.device_kind if device.platform != "cpu" else f"cpu, {os.cpu_count()} cores",
        "devices": str(shards),
        "model": f"{c.family}: {c.num_layers} layers, {c.hidden_size} and {c.intermediate_size} wide, "
        f"{c.num_heads} and {c.num_kv_heads} heads of {c.head_dim}, {c.vocab_size} tokens",
        "drafter": f"{drafter}, {sum(leaf.size for leaf in jax.tree.leaves(params) if hasattr(leaf, 'size'))} weights",
        "dtype": ", ".join([str(target.embedding[...].dtype), *sorted(kinds)]),
    }


def _profiled(path: str | Path, choice: _Choice, identity: Mapping[str, str], policy: str) -> CostTable:
    """The costs of a file.

    Raises:
      ValueError: it is broken, of another engine or lacks a cost, or the policy does not want costs.
    """
    if not choice.needs_cost:
        raise ValueError(f"profile {str(path)!r} is for policies that weigh costs, got policy {policy!r}")
    profile = CostProfile.load(path)
    profile.check(identity, choice.reachable, repr(str(path)), choice.budgets)
    return profile.table(_USUAL_CONTEXT)


def _typical(speculation: SpeculationConfig) -> Typical | None:
    """The rule of typical verification, where that is asked for."""
    if speculation.verification != "typical":
        return None
    typical = Typical(speculation.typical_threshold, speculation.typical_alpha)
    _log.warning(
        "verification 'typical' is lossy: sampled outputs do not have the target's distribution "
        "(threshold %g, alpha %g)", typical.threshold, typical.alpha,
    )  # fmt: skip
    return typical


def _grammars(
    config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int, eos: Sequence[int]
) -> GrammarCompiler | None:
    """What compiles grammars; None where none are wanted, or where this checkpoint's text cannot serve them."""
    if not config.structured_output or tokenizer is None:
        return None
    try:
        return GrammarCompiler(tokenizer, vocab_size, eos)
    except ValueError as e:
        _log.warning("no structured output: %s", e)
        return None
