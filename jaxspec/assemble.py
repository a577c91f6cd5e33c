"""Composition: from names and directories to an engine. The only place that knows every part."""

from __future__ import annotations

import contextlib
import dataclasses
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

from jaxspec import alike
from jaxspec.adaptive.cost import Costed, CostTable
from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.adaptive.learnt import Keeper, Learns, digest
from jaxspec.checkpointing import hf
from jaxspec.choosing import PendingPolicy, check_choice, check_invariant_tiers, choose_policy, profiled
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.defaults import (
    geometry,
    in_background,
    measures_drafters,
    mixed,
    prompts_of,
    scheduling,
    several,
    without_end,
)
from jaxspec.drafters import registry
from jaxspec.drafters.directories import chat_modes
from jaxspec.engine import Engine
from jaxspec.facts import EngineFacts
from jaxspec.fitting import doubling, fitted, longest_text, ring_rows
from jaxspec.hybrids import depths, joined
from jaxspec.loading import Drafting, drafting_of, laid_out, way_of
from jaxspec.models import few_rows, few_rows_fit, packing
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.layers import Transformer
from jaxspec.remembered import check_readable, texts
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.ringfiles import RingDirectory
from jaxspec.runtime.collecting import Collector, follow_exchanges
from jaxspec.runtime.compile import use_persistent_cache
from jaxspec.runtime.executables import source_digest
from jaxspec.runtime.hosts import Hosts
from jaxspec.runtime.placing import representative, whole_is_better
from jaxspec.runtime.repertoire import RunnerConfig
from jaxspec.runtime.runner import Runner
from jaxspec.runtime.sharding import (
    Sharing,
    check_devices,
    check_divides,
    check_four_bits,
    host_memory,
    spans_processes,
    tensor_mesh,
)
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

#: In a profile's identity, of a drafter that lies so.
_WHOLE = ", whole on each device"
_log = logging.getLogger(__name__)


def check_batch_invariant(config: EngineConfig, target: TargetModel, tiers: Iterable[Tier]) -> None:
    """Refuses an engine whose rounds would not give a token the same bits whatever is computed beside it.

    Raises:
      ValueError: the device, the model, or rounds that the kernels do not serve; it shows both values.
    """
    me = "batch_invariant=True"
    reason = (
        few_rows.unsupported() or few_rows_fit.refusal(target) or few_rows_fit.output_refusal(cast(Transformer, target))
    )
    if reason is not None:
        raise ValueError(f"{me} needs the kernels for few rows: {reason}")
    if few_rows_fit.norms_apart(cast(Transformer, target)):
        raise ValueError(
            f"{me} is for queries and keys that are normed in their product (heads of 128); got heads of "
            f"{target.config.head_dim} and qk_norm=True"
        )
    if (reason := packing.varies_by_rows(cast(Transformer, target))) is not None:
        raise ValueError(f"{me} is for mixtures whose experts the kernels for few rows choose and multiply: {reason}")
    for name in ("sliding_window", "attention_soft_cap"):
        if (value := getattr(target.config, name)) is not None:
            raise ValueError(f"{me} is for attention without windows and soft caps, got {name}={value}")
    check_invariant_tiers(config, tiers, few_rows_fit.invariant_rows(cast(Transformer, target)))


def build_engine(
    model: str | Path = "demo",
    drafter: str | Path | None = None,
    speculation: SpeculationConfig | Mapping[str, Any] | None = None,
    config: EngineConfig | None = None,
    *,
    progress: bool | Callable[[int, int], None] = True, together: bool = False,
) -> Engine:  # fmt: skip
    """Loads and compiles (see EngineConfig.warmup), and returns an engine that is ready to serve.

    Args:
      progress: show a bar while compiling; or what is called with how many executables have come, of how many in all.
      together: all processes of jax.distributed share the engine, or it is refused in all of them; else those do that
        tensor_parallel needs.

    Raises:
      ValueError: what cannot be loaded or does not fit together, or is not the same in all processes.
    """
    speculation, config = SpeculationConfig.of(speculation), config or EngineConfig()
    check_devices(config.kernels)
    # Before anything that may fail in one of them: from here on the others hear of it.
    hosts = Hosts.meet() if together or spans_processes(config.tensor_parallel) else None
    if hosts is not None:
        hosts.agree(alike.versions_and_flags(speculation, config))
        if not spans_processes(config.tensor_parallel):
            raise ValueError(
                f"{hosts.count} processes share an engine whose tensor_parallel is more than the devices of one, which "
                f"has {jax.local_device_count()}; got tensor_parallel {config.tensor_parallel}"
            )
    use_persistent_cache(config.compile_cache)  # loading compiles too: a small program for each shape
    model_dir = resolve_model(model)
    kind, directory = resolve_drafter(drafter, model_dir)
    check_choice(registry.find(kind), speculation, config)
    if hosts is None or hosts.leads:
        check_readable(speculation.suffix_corpus_files)
    if not speculation.policy_kind.drafts:
        kind, directory = registry.NONE, None
    if drafter is None and kind == registry.UNASKED[-1]:
        _log.info("drafter: %s, as no draft head lies beside the model", kind)
    else:
        _log.info("drafter: %s%s", kind, "" if directory is None else f" ({directory})")
    if hosts is not None:
        hosts.agree({"the drafter": kind, **alike.files(model_dir, directory)})
    dtype = jnp.dtype(config.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    shards = config.tensor_parallel
    cfg = hf.load_config(model_dir)
    check_divides(cfg, shards)
    context = longest_text(config, cfg.max_position_embeddings)
    if config.profile is not None:
        CostProfile.load(config.profile)  # before weights are: whether it can be read
    text = None if config.skip_tokenizer_init else Tokenizer.from_directory(model_dir)  # as well
    # What is going to be split need not fit any device as a whole.
    load = host_memory if shards > 1 else contextlib.nullcontext
    sums = way_of(cfg, dtype, shards).by
    with load():
        blocked = shards == 1 and jax.default_backend() == "cpu"  # see laid_out
        target = hf.load_model(
            model_dir, dtype, context=context, int8_activations=config.int8_activations, blocked=blocked,
            devices=Sharing(tensor_mesh(shards), sums) if shards > 1 else None,
        )  # fmt: skip
    drafting = drafting_of(kind, directory, target, dtype, speculation, shards, sums)
    files = {"model files": digest(model_dir), "drafter files": digest(directory)}
    chats = () if directory is None else chat_modes(directory)
    return assemble(
        target, text, speculation, config, drafter=drafting, progress=progress, files=files, hosts=hosts, chats=chats
    )


def assemble(
    target: TargetModel, tokenizer: Tokenizer | None, speculation: SpeculationConfig, config: EngineConfig, *,
    drafter: Drafting | None, progress: bool | Callable[[int, int], None], cost: CostTable | None = None,
    files: Mapping[str, str] | None = None, hosts: Hosts | None = None, chats: Sequence[Mapping[str, Any]] = (),
) -> Engine:  # fmt: skip
    """An engine from a target in memory.

    Args:
      drafter: None: nothing is drafted.
      cost: skips the timing of executables.
      files: digests of what target and drafter were read from; without them nothing that is learnt is kept.
      hosts: the processes that share it, which agree on all of this.
      chats: see EngineFacts.
    """
    began = time.perf_counter()
    cache = use_persistent_cache(config.compile_cache)
    model, shards, buckets = target.config, config.tensor_parallel, config.buckets
    check_divides(model, shards)
    check_four_bits(target, shards)
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
    way = way_of(model, target.embedding[...].dtype, shards)
    if mesh is not None and config.draft_tensor_parallel == "auto" and jax.tree.leaves(params):
        whole = geo.whole_drafter
        if config.profile is not None:  # whose costs are of one of them
            whole = _WHOLE in CostProfile.load(config.profile).identity.get("drafter", "")
        elif measures_drafters(config):
            what = (*representative(choice.reachable, buckets), way.options)
            whole = whole_is_better(can.bind, geo, mesh, *what, **({} if hosts is None else {"least": hosts.least}))
        if whole != geo.whole_drafter:
            geo = dataclasses.replace(geo, whole_drafter=whole)
            built, params = bind(geo)
    if config.num_pages is None:
        small, geo = geo, fitted(geo, config.memory_fraction, target, built, params, shards)
        if hosts is not None:  # their memories may differ
            geo = dataclasses.replace(geo, num_pages=hosts.least(geo.num_pages))
        built, params = bind(geo) if depth and geo is not small else (built, params)
    elif geo.longest < geo.max_seq_len:
        _log.warning(
            "num_pages %d of %d tokens hold texts of at most %d tokens, fewer than max_seq_len = %d: longer ones end "
            "there, and longer prompts are refused", geo.num_pages, geo.page_size, geo.longest, geo.max_seq_len,
        )  # fmt: skip
    widest = max(tier.topk for tier in choice.reachable)
    if built is not None and widest > built.max_topk:
        raise ValueError(f"topk must be at most {built.max_topk}, the tokens this drafter can propose, got {widest}")
    grammars = _grammars(config, tokenizer, model.vocab_size, eos)
    both = ("sampled",) if jax.default_backend() == "cpu" else ("greedy", "sampled")
    usual = prompts_of(config)
    runs = RunnerConfig(
        choice.reachable, shapes_for(geo, usual.alone, usual.several), usual.overhead, without_end(config, geo), eos,
        variants=tuple(sorted({v == "sampled" for v in config.variants or both})),
        rejection=speculation.verification == "rejection",
        typical=None if built is None else _typical(speculation), guided=grammars is not None, budgets=choice.budgets,
        rounds=pace.most, repeated=repeated, **mixed(config, geo),
    )  # fmt: skip
    # What processes share they compile first: what is ready differs between them.
    background = in_background(config) and hosts is None
    on_each = mesh is not None and geo.whole_drafter
    few = "" if can.weights is None or built is None else f" in {can.weights}"
    name = can.name + few + " with suffix matches" * speculation.hybrid + _WHOLE * on_each + depths(built)
    identity = _identity(target, name, params, shards)
    if config.profile is not None:
        cost = profiled(config.profile, choice, identity, speculation.resolved_policy)
    times = cost is None and choice.needs_cost
    leads, written = hosts is None or hosts.leads, None
    keeper = _keeper(config, cache, {**identity, **(files or {})}) if files is not None and leads else None
    timing = times and background
    known = known_rounds(keeper, choice) if timing else {}
    warmup = WarmupConfig(progress, cache, background, timing, known)
    if hosts is not None:
        sizes = {field.name: getattr(x, field.name) for x in (geo, runs) for field in dataclasses.fields(x)}
        hosts.agree({**identity, "device": None, **sizes})
    if config.feature_ring is not None and built is not None and leads:  # before anything takes its time
        written = _ring_directory(config, target, built)
    weights = laid_out(target, shards, way.by, invariant=config.batch_invariant)
    runner = Runner(weights, built, params, geo, runs, warmup, mesh, way.options)
    if times:
        cost = CostTable(runner.costs) if background else measure(runner)
    lookahead = 0 if built is None else built.lookahead
    scheduler = Scheduler(
        scheduling(config, geo, runs.prefill_shapes, lookahead, doubling(model), _passed(model, built))
    )
    facts = EngineFacts(
        geo, tuple(buckets), model.vocab_size, True in runner.variants, frozenset(eos), tokenizer, grammars,
        can.name, speculation.resolved_policy, str(target.embedding[...].dtype), speculation.objective, identity, chats,
    )  # fmt: skip
    if hosts is not None:
        runner.join(hosts)
    collector = None if written is None else Collector(runner, written.file, config.feature_ring_share)
    if config.feature_ring is not None and built is not None and not leads:
        follow_exchanges(runner)
    encode = None if tokenizer is None else tokenizer.encode
    for text in texts(speculation.suffix_corpus_files, encode, model.vocab_size) if leads else ():
        runner.remember(text)
    return Engine(
        facts, runner, scheduler, choice.build, cost, config.seed, began, config.traffic_log if leads else None, pace,
        remembers=speculation.suffix_corpus_responses and built is not None,
        load_drafter=can.reload and functools.partial(can.reload, geo), collector=collector,
        keeper=keeper,
    )  # fmt: skip


def _keeper(config: EngineConfig, cache: Path | None, identity: Mapping[str, str]) -> Keeper | None:
    """Where what the policy learns is kept; None where it is not asked for, or there is no place beside executables."""
    where = config.keep_learnt
    if where is False or (where is True and cache is None):
        return None
    versions = {"jax": jax.__version__, "program": source_digest()[:16]}
    directory = cache.parent / "learnt" if where is True and cache is not None else Path(str(where))
    return Keeper(directory, {**identity, **versions})


def known_rounds(keeper: Keeper | None, choice: PendingPolicy) -> dict[Costed, float]:
    """Seconds of rounds that an earlier engine has learnt, for a policy that rounds set right where they have changed.

    Two cores that time rounds serve nobody meanwhile, and what hundreds of rounds have told is surer. Of a bucket all
    or none: one that is timed now, on a machine that has other work than it had, compares with no older one.
    """
    learnt = keeper.read() if keeper is not None and isinstance(choice.build(CostTable({})), Learns) else None
    rounds: dict[int, set[Costed]] = {}
    for tier, buckets in choice.reachable.items():
        for bucket in buckets:
            rounds.setdefault(bucket, set()).add((tier, bucket, None))
    for (tier, bucket), budgets in choice.budgets.items():
        rounds[bucket] |= {(tier, bucket, tokens) for tokens in budgets}
    seconds = {} if learnt is None else learnt.seconds
    return {key: seconds[key][0] for keys in rounds.values() if keys <= seconds.keys() for key in keys}


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
