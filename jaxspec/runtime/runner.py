"""The runner: holds weights and DecodeState, turns plans into dispatches and results into numpy.

Must not know policies, stop conditions or text. One round may be in flight: `dispatch`
returns at once, and `collect` is the only call that waits.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxspec.adaptive.cost import CostTable
from jaxspec.models.layers import Transformer
from jaxspec.request import MAX_LOGPROBS, Logprob, Request
from jaxspec.runtime.compile import Job, SpecRuntimeState
from jaxspec.runtime.executables import ExecutableStore, Fingerprints, IndescribableError
from jaxspec.runtime.sharding import Placement, abstract
from jaxspec.runtime.warmup import Warmup
from jaxspec.scheduling.scheduler import DecodeRow, PrefillChunk
from jaxspec.speculation import guided
from jaxspec.speculation import round as rounds
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.layouts import Batch, Chunk, Packed, PackedLogprobs
from jaxspec.speculation.sampling import MAX_STOP_IDS
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.speculation.typical import Typical
from jaxspec.tier import PLAIN, Tier

#: How often a round is timed when it has come, and again when all have and nothing is compiled beside.
_FIRST_TRIALS, _FINAL_TRIALS = 3, 5
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Pending:
    """A dispatched prefill (tier None) or round whose result has not been read.

    Attributes:
      rows: (request, its epoch at dispatch), in the batch's order.
      packed: `Packed` tokens on the device. logprobs: `PackedLogprobs`, where some row asked for them.
      dispatched_at: seconds on the runner's clock.
      timed: nothing but rounds ran on the device since the round before, so its seconds are its own.
    """

    rows: tuple[tuple[Request, int], ...]
    tier: Tier | None
    bucket: int
    packed: jax.Array
    logprobs: jax.Array | None
    dispatched_at: float
    context_tokens: int
    timed: bool

    @property
    def is_ready(self) -> bool:
        """Whether the device has finished it."""
        ready: bool = getattr(self.packed, "is_ready")()  # noqa: B009  (absent from jax.Array's published type)
        return ready


@dataclasses.dataclass(frozen=True)
class RowResult:
    """What a round gave one row.

    Attributes:
      tokens: accepted drafts and the token after them.
      finite: False where the target's logits were not finite.
      logprobs: an entry a token, where the request asked for them.
    """

    request: Request
    epoch: int
    tokens: tuple[int, ...]
    finite: bool
    logprobs: tuple[dict[int, Logprob], ...] | None


class Guide(Protocol):
    """What the rows of a round may say next, as int32 sets of bits over the vocabulary; -1 allows everything."""

    def ahead(self, bucket: int, depth: int) -> np.ndarray:
        """At each of the next positions, whatever will be drafted, [bucket, depth, W]."""
        ...

    def masks(self, tokens_BN: np.ndarray, parents_BN: np.ndarray) -> np.ndarray:
        """After each node of the rows' trees, [B, N, W]."""
        ...


class Runner:
    """Weights, state and executables of one engine.

    Args:
      model: the target.
      drafter: None where no tier drafts.
      draft_params: the drafter's parameters.
      rejection, typical: how drafts of sampled rows are verified (speculation.round.RoundSpec).
      reachable: {tier: buckets} that the policy can select.
      prefill_sizes: chunk lengths that get an executable, ascending.
      eos: token ids that min_tokens bans besides a request's own stop ids.
      variants: which rounds to compile: False for greedy ones, True for sampled ones (which serve every batch).
      mesh: devices that share the weights and pools (runtime.sharding); None for the backend's first device alone.
      guided: whether rounds and prefills can be told what rows may say.
      cache: directory in which executables are kept for the next process; None: nowhere.
      background: return as soon as a request can be served; `advance` takes in what comes later.
      times: `advance` also times the rounds.

    Attributes:
      states: what each tier can run now, by tier.
      costs: median seconds of each (tier, bucket) that `advance` has timed.
    """

    def __init__(
        self, model: Transformer, drafter: Drafter | None, draft_params: Any, geo: Geometry, *,
        rejection: bool, reachable: Mapping[Tier, Sequence[int]], prefill_sizes: Sequence[int],
        eos: Sequence[int], variants: Sequence[bool] = (False, True), mesh: Mesh | None = None, progress: bool,
        typical: Typical | None = None, guided: bool = False, cache: Path | None = None, background: bool = False,
        times: bool = False,
    ):  # fmt: skip
        graph, target = nnx.split(model)
        self.config = model.config
        self.geo, self.drafter, self.eos = geo, drafter, tuple(eos)
        self.spec = rounds.RoundSpec(graph, model.config, geo, drafter, rejection, typical)
        self._dtype: jnp.dtype = model.embedding[...].dtype
        self._place = Placement()
        if mesh is not None:
            self._place = Placement.of(mesh, target, draft_params, jax.eval_shape(self._empty_state))
            target = jax.device_put(target, self._place.target)
            draft_params = jax.device_put(draft_params, self._place.draft_params)
        self._target, self._draft_params = target, draft_params
        self.prefill_sizes = tuple(prefill_sizes)
        self.reachable = {tier: tuple(buckets) for tier, buckets in reachable.items()}
        self.variants = tuple(sorted(set(variants)))
        self.guided = guided
        self._words = -(-self.config.vocab_size // 32)
        self._anything = self._put(np.full((1, self._words), -1, np.int32)) if guided else None
        self._plans: dict[bytes, jax.Array] = {}
        self._disturbed = False  # something else than rounds ran on the device since the last one
        self._zero_bias = self._put(np.zeros((self.config.vocab_size,), np.float32))
        self.state = self._fresh_state()
        self._compiled: dict[Any, Any] = {}
        self.states = {tier: SpecRuntimeState(tier, {}) for tier in self.reachable}
        self.costs: dict[tuple[Tier, int], float] = {}
        self._times, self._timed_finally = times, not times
        self._trials: deque[tuple[Tier, int]] = deque()
        self._samples: dict[tuple[Tier, int], list[float]] = {}
        self._warm_up(cache, progress, background)

    def _empty_state(self) -> DecodeState:
        draft = () if self.drafter is None else self.drafter.init_state(self.geo)
        return DecodeState.empty(self.config, self.geo, self._dtype, draft)

    def _fresh_state(self) -> DecodeState:
        if self._place.mesh is None:
            return self._empty_state()
        # As a compiled function each device makes its own part; no device ever holds a whole pool.
        return jax.jit(self._empty_state, out_shardings=self._place.state)()

    def _put(self, x: Any) -> jax.Array:
        """A host array on the device, or whole on every one."""
        # device_put, not jnp.asarray: the latter compiles a copy for every new shape.
        return jax.device_put(x, self._place.replicated)

    # Compilation.

    def _fingerprint(self, *described: Any) -> str | None:
        """Of what an executable is made from; None where it is not kept."""
        if self._fingerprints is None:
            return None
        try:
            return self._fingerprints(described)
        except IndescribableError as e:
            _log.debug("an executable is not stored, for it depends on %s", e)
            return None

    def _warm_up(self, cache: Path | None, progress: bool, background: bool) -> None:
        """Compiles everything, or what the first request needs."""
        jobs = self._jobs(cache)
        order = self._order(jobs) if background else {}
        first = [job for job in jobs if not order.get(job.key)]
        # The most urgent first; of those, and of all without an order, the dearest, so that no thread ends with one.
        jobs.sort(key=lambda job: (order.get(job.key, 0), job.key[0] == "round" and -job.key[1].depth))
        self._warmup = Warmup(jobs, len(first), store=self._store)
        # Elsewhere what runs would disturb a compiler that times what it compiles.
        at_once = jax.default_backend() == "cpu" and not background
        arrived = []
        wanted = self._warmup.wait([job.key for job in first])
        bar = tqdm(wanted, total=len(first), desc="compiling", disable=not progress, leave=False)
        try:
            for key, executable in bar:
                if at_once:
                    self._take_in(key, executable)
                else:
                    arrived.append((key, executable))
        except BaseException:
            self._warmup.stop()
            wanted.close()  # a traceback may keep it for long, and with it Python's garbage
            raise
        if background:
            weakref.finalize(self, self._warmup.stop)  # with its engine, or where none comes of it
            self._warmup.give_way()
        for key, executable in arrived:
            self._take_in(key, executable)

    def _order(self, jobs: Sequence[Job]) -> dict[Any, int]:
        """When each job's turn comes, from 0, which the first request waits for."""
        buckets = sorted({bucket for at in self.reachable.values() for bucket in at})
        tiers = sorted(self.reachable)
        least = next(tier for tier in tiers if buckets[0] in self.reachable[tier])  # not every policy decodes plainly
        drafting = [tier for tier in tiers if tier.depth and tier != least]
        likely = drafting[len(drafting) // 2 : len(drafting) // 2 + 1]
        order: dict[Any, int] = {("admit",): 0, ("prefill", self.prefill_sizes[0]): 0, ("logprobs", 1, 1, 1): 0}
        order |= {("prefill", size): 2 for size in self.prefill_sizes[1:]}
        ends = [(at, tier) for at in (buckets[0], buckets[-1]) for tier in (least, *likely)]
        rest = [(at, tier) for at in buckets for tier in tiers]
        urgent = self._keys_of(least, buckets[0])
        for turn, (bucket, tier) in enumerate([*ends, *rest]):
            if bucket in self.reachable[tier]:
                catch_up = [("catch_up", bucket)] if tier.depth else []
                for key in [*self._keys_of(tier, bucket), *catch_up]:
                    order.setdefault(key, 0 if key in urgent else turn + 1)
        return {job.key: order.get(job.key, len(rest) + len(ends)) for job in jobs}

    def _keys_of(self, tier: Tier, bucket: int) -> list[Any]:
        """The executables that a round of a tier may need."""
        nodes = tier.num_nodes
        keys: list[Any] = [("round", tier, bucket, sampled) for sampled in self.variants]
        keys.append(("logprobs", bucket, nodes, tier.depth + 1))
        if self.guided and tier.depth:
            keys += [("draft", tier, bucket), ("forward", nodes, bucket), ("settle", tier, bucket)]
        elif self.guided:
            keys.append(("guided", bucket))
        return keys

    def _jobs(self, cache: Path | None) -> list[Job]:
        place = self._place
        self._store = None
        if cache is not None and jax.process_count() == 1:
            devices = jax.devices()[:1] if place.mesh is None else list(place.mesh.devices.flat)
            self._store = ExecutableStore(cache, devices)
        self._fingerprints = None if self._store is None else Fingerprints()
        shape = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct(s, dtype, sharding=place.replicated)
        plan_of = functools.cache(lambda bucket: shape(bucket, width))
        target = abstract(self._target, place.target)
        draft = abstract(self._draft_params, place.draft_params)
        state = abstract(self.state, place.state)
        width = Batch.width(self.geo)
        jobs: list[Job] = []
        added: set[Any] = set()

        def lower(jitted: Any, args: tuple[Any, ...], static: Mapping[str, Any]) -> Any:
            with place.ambient():
                return jitted.trace(*args, **static).lower()

        def add(
            key: Any, fn: Callable[..., Any], donate: int | None, args: tuple[Any, ...], to: Any, **static: Any
        ) -> None:
            if key in added:  # tiers of as many nodes share the target's forward
                return
            added.add(key)
            donated = () if donate is None else (donate,)
            jitted = jax.jit(fn, donate_argnums=donated, static_argnames=tuple(static), out_shardings=to)
            told = self._fingerprint(fn, donated, *jax.tree.flatten(args), static, *jax.tree.flatten(to), place.mesh)
            jobs.append(Job(key, args, lambda: lower(jitted, args, static), told))

        vocab = self.config.vocab_size
        widths: set[tuple[int, int, int]] = {(1, 1, 1)}
        for tier, buckets in self.reachable.items():
            for bucket in buckets:
                widths.add((bucket, tier.num_nodes, tier.depth + 1))
                for sampled in self.variants:
                    fn = rounds.round_fn(self.spec, tier, sampled)
                    params = draft if tier.depth else ()
                    args = (target, params, state, plan_of(bucket))
                    add(("round", tier, bucket, sampled), fn, 2, args, place.round_results(sampled))
                if self.guided:
                    self._add_guided(add, tier, bucket, target, draft, state, plan_of(bucket))
        if self.drafter is not None and self.drafter.has_cache and PLAIN in self.reachable:
            catch_up = rounds.catch_up_fn(self.spec)
            for bucket in sorted({b for buckets in self.reachable.values() for b in buckets}):
                add(("catch_up", bucket), catch_up, 1, (draft, state, plan_of(bucket)), place.state)
        prefill = rounds.prefill_fn(self.spec)
        anything = shape(1, self._words) if self.guided else None
        chunk, admitted = shape(3), shape(7 + MAX_STOP_IDS)
        for size in self.prefill_sizes:
            args = (target, draft, state, chunk, anything)
            add(("prefill", size), prefill, 2, args, place.round_results(True), size=size)
        f32 = jnp.float32
        admit_args = (
            state, admitted, shape(6, dtype=f32), shape(self.geo.pages_per_seq),
            shape(self.geo.tokens_per_seq), shape(vocab, dtype=f32),
        )  # fmt: skip
        add(("admit",), rounds.admit_fn(self.spec), 0, admit_args, place.state)
        self._logprobs_k = min(MAX_LOGPROBS, vocab)
        for b, n, d in sorted(widths):
            logits = jax.ShapeDtypeStruct((b, n, vocab), f32, sharding=place.logits)
            args = (logits, shape(b, d), shape(b, Packed.width(d)))
            add(("logprobs", b, n, d), rounds.logprobs_fn(self._logprobs_k), None, args, place.replicated)

        # What to call each with when no request is meant: whole trees by name, a plan of no rows, zeros.
        names: dict[int, Any] = {id(target): "target", id(draft): "draft", id(state): "state"}
        names |= {
            id(plan_of(bucket)): Batch.of(self.geo, bucket).array for at in self.reachable.values() for bucket in at
        }
        names[id(chunk)] = np.asarray([self.geo.slots, 0, 0], np.int32)
        names[id(admitted)] = np.full(admitted.shape, self.geo.slots, np.int32)
        self._arguments = {job.key: tuple(names.get(id(arg), arg) for arg in job.args) for job in jobs}
        return jobs

    def _add_guided(
        self, add: Callable[..., None], tier: Tier, bucket: int, target: Any, draft: Any, state: Any, plan: Any
    ) -> None:
        """The executables of guided rounds of one tier; a plain one needs no parts: its only mask is known before."""
        place, spec = self._place, self.spec
        shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32, sharding=place.replicated)
        masks = shape(bucket, tier.num_nodes, self._words)
        if tier.depth == 0:
            args = (target, (), state, plan, masks)
            add(("guided", bucket), rounds.round_fn(spec, tier, True), 2, args, place.round_results(True))
            return
        with place.ambient():
            drafted, forward = place.round_parts(*guided.parts(spec, tier, bucket, self._dtype))
        where = lambda tree: None if place.mesh is None else jax.tree.map(lambda x: x.sharding, tree)
        args = (draft, state, plan, shape(bucket, tier.depth, self._words))
        to = place.state, where(drafted), place.replicated
        add(("draft", tier, bucket), guided.draft_fn(spec, tier), 1, args, to)
        tree = drafted.tree
        args = (target, state, plan, tree.tokens_BN, tree.depths_BN, tree.ancestors_BNN)
        add(("forward", tier.num_nodes, bucket), guided.forward_fn(spec), None, args, where(forward))
        args = (state, plan, drafted, forward, masks)
        add(
            ("settle", tier, bucket),
            guided.settle_fn(spec, tier),
            0,
            args,
            (place.state, place.replicated, place.replicated),
        )

    @property
    def num_executables(self) -> int:
        """Executables that there will be once all is warm."""
        return self._warmup.total

    @property
    def num_ready(self) -> int:
        """Executables that can run now."""
        return len(self._compiled)

    @property
    def warm(self) -> bool:
        """Whether everything is compiled and timed, or given up."""
        return self._timed_finally and not self._trials and self._warmup.over

    @property
    def warmup_error(self) -> BaseException | None:
        """What ended the compiling before its time."""
        return self._warmup.error

    def attend(self, advance: Callable[[], bool | None]) -> None:
        """See Warmup.attend."""
        self._warmup.attend(advance)

    def stop_warmup(self) -> None:
        """Compiles nothing more after what is being compiled."""
        self._warmup.stop()

    def ready(self, tier: Tier, bucket: int) -> bool:
        """Whether a round of the tier can run at this padded batch size."""
        return (bucket, self.variants[0]) in self.states[tier].executables

    def largest_ready(self) -> int:
        """The largest padded batch size at which some tier can run."""
        return max(bucket for state in self.states.values() for bucket, _ in state.executables)

    def advance(self) -> bool:
        """One piece of warming up, beside live requests or without: takes in or times one executable.

        Returns:
          Whether there was something to do. Where that ended the timing of a round, `costs` has it.
        """
        if self._trials:
            self._try(*self._trials.popleft())
            return True
        arrival = self._warmup.take()
        if arrival is not None:
            self._take_in(*arrival)
            return True
        if self._timed_finally or not self._warmup.over:
            return False
        # Until now compilers ran beside. Round by round, so that what disturbs one repeat disturbs every tier.
        self._timed_finally = True
        self._samples.clear()
        pairs = [(tier, bucket) for tier, state in self.states.items() for bucket, _ in state.executables]
        self._trials.extend([*dict.fromkeys(pairs)] * _FINAL_TRIALS)
        return True

    def _take_in(self, key: Any, executable: Any) -> None:
        """Runs an executable once, for no request, and offers it.

        The first run costs several others: CPUs choose how to multiply, GPUs load the program. No request shall pay.
        """
        self._run_once(key, executable)
        self._compiled[key] = executable
        for tier, buckets in self.reachable.items():
            for bucket in buckets:
                if not self.ready(tier, bucket) and all(k in self._compiled for k in self._keys_of(tier, bucket)):
                    ready = {(bucket, s): self._compiled["round", tier, bucket, s] for s in self.variants}
                    self.states[tier] = SpecRuntimeState(tier, {**self.states[tier].executables, **ready})
                    if self._times:
                        self._trials.extend([(tier, bucket)] * _FIRST_TRIALS)

    def _run_once(self, key: Any, executable: Any) -> None:
        zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
        held = {"target": self._target, "draft": self._draft_params, "state": self.state}

        def value(arg: Any) -> Any:
            if isinstance(arg, str):
                return held[arg]
            return self._put(arg) if isinstance(arg, np.ndarray) else jax.tree.map(zeros, arg)

        out = executable(*(value(arg) for arg in self._arguments[key]))
        results = out if isinstance(out, tuple) else (out,)
        self.state = next((x for x in results if isinstance(x, DecodeState)), self.state)
        self._disturbed = True

    def _try(self, tier: Tier, bucket: int) -> None:
        """Times one round of no rows."""
        plan = self._put(Batch.of(self.geo, bucket).array)
        jax.block_until_ready((self.state, plan))
        began = time.perf_counter()
        self.repeat(tier, bucket, plan, 1).block_until_ready()
        samples = self._samples.setdefault((tier, bucket), [])
        samples.append(time.perf_counter() - began)
        self._disturbed = True
        if (tier, bucket) not in self._trials:
            self.costs[tier, bucket] = statistics.median(samples)

    def measure(self, repeats: int = 5, context: int = 256) -> CostTable:
        """Times every round (greedy where compiled) a few times at a moderate context, and resets the state.

        Args:
          context: committed tokens of each row while timing.
        """
        geo = self.geo
        context = max(0, min(context, geo.tokens_per_seq - 2 * (geo.max_depth + 1)))
        pages = np.arange(geo.slots * geo.pages_per_seq, dtype=np.int32).reshape(geo.slots, -1) % geo.num_pages
        length = lambda: self._put(np.full((geo.slots,), context, np.int32))
        self.state = dataclasses.replace(self.state, table_SM=self._put(pages), length_S=length())
        samples: dict[tuple[Tier, int], list[float]] = {}
        pairs = [(tier, bucket) for tier, buckets in self.reachable.items() for bucket in buckets]
        for repeat in range(repeats + 1):
            for tier, bucket in pairs:
                plan = self._plan([(slot, geo.max_depth, geo.pages_per_seq, ()) for slot in range(bucket)], bucket)
                self.state = dataclasses.replace(self.state, length_S=length())
                jax.block_until_ready(self.state)
                began = time.perf_counter()
                self.repeat(tier, bucket, plan, 1).block_until_ready()
                if repeat:
                    samples.setdefault((tier, bucket), []).append(time.perf_counter() - began)
        self.state = self._fresh_state()
        return CostTable({pair: statistics.median(times) for pair, times in samples.items()})

    def repeat(self, tier: Tier, bucket: int, plan: jax.Array, count: int) -> jax.Array:
        """Dispatches the first variant's round `count` times, for timing; returns the last packed result."""
        executable = self.states[tier].executables[bucket, self.variants[0]]
        packed = None
        for _ in range(count):
            self.state, packed, _ = executable(self._target, self._params_for(tier), self.state, plan)
        assert packed is not None
        return packed

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's weights that a step reads: all, but of an input embedding of its own only rows."""
        total = sum(x.nbytes for x in jax.tree.leaves(self._target))
        embedding = self.config.vocab_size * self.config.hidden_size * self._dtype.itemsize
        return total if self.config.tie_word_embeddings else total - embedding

    def _params_for(self, tier: Tier) -> Any:
        # A plain round does not even pay for the drafter's arguments.
        return self._draft_params if tier.depth else ()

    # Dispatch.

    def _plan(self, rows: Sequence[tuple[int, int, int, Sequence[int]]], bucket: int) -> jax.Array:
        """The Batch of (slot, most drafts, first table entry, new pages); kept on the device if none are new."""
        plan = Batch.of(self.geo, bucket, rows).array
        if any(pages for *_, pages in rows):
            return self._put(plan)
        key = plan.tobytes()
        if key not in self._plans:
            if len(self._plans) > 256:
                self._plans.clear()
            self._plans[key] = self._put(plan)
        return self._plans[key]

    def admit(self, chunk: PrefillChunk) -> None:
        """Uploads a request's row: tokens, parameters and page table."""
        geo, request, params = self.geo, chunk.request, chunk.request.params
        text = request.token_ids
        tokens = np.zeros((geo.tokens_per_seq,), np.int32)
        tokens[: len(text)] = text
        table = np.full((geo.pages_per_seq,), geo.num_pages, np.int32)
        table[: len(chunk.page_table)] = chunk.page_table
        stops = [] if params.min_tokens == 0 else list(params.stop_token_ids)
        if params.min_tokens and not params.ignore_eos:
            stops += self.eos
        ints = np.full((7 + MAX_STOP_IDS,), self.config.vocab_size, np.int32)
        prompt_len = len(request.prompt_token_ids)
        seed = int(np.uint32(request.seed).view(np.int32))
        ints[:7] = [
            chunk.slot,
            chunk.start,
            prompt_len,
            len(text),
            max(params.top_k, 0),
            seed,
            prompt_len + params.min_tokens,
        ]
        ints[7 : 7 + len(stops)] = stops
        temperature = 0.0 if params.greedy else params.temperature
        floats = np.asarray(
            [temperature, params.top_p, params.min_p, params.presence_penalty, params.frequency_penalty,
             params.repetition_penalty], np.float32,
        )  # fmt: skip
        bias: Any = self._zero_bias
        if params.logit_bias:
            bias = np.zeros((self.config.vocab_size,), np.float32)
            for token, value in params.logit_bias.items():
                bias[token] = value
        self.state = self._compiled[("admit",)](self.state, ints, floats, table, tokens, bias)

    def prefill(self, chunk: PrefillChunk, allowed_W: np.ndarray | None = None) -> Pending | None:
        """Dispatches a chunk; a Pending where it ends the prompt, which holds the first token.

        Args:
          allowed_W: what that token may be, as an int32 set of bits; None: anything.
        """
        if chunk.is_first:
            self.admit(chunk)
        sizes = [size for size in self.prefill_sizes if ("prefill", size) in self._compiled]
        at = chunk.start
        while True:  # once, but for chunks longer than what is compiled so far
            size = next((s for s in sizes if s >= chunk.end - at), sizes[-1])
            count = min(size, chunk.end - at)
            at += count
            plan = Chunk.of(chunk.slot, count, chunk.is_last and at == chunk.end)
            executable = self._compiled["prefill", size]
            allowed = self._anything if allowed_W is None else self._put(allowed_W[None])
            self.state, packed, kept = executable(self._target, self._draft_params, self.state, plan, allowed)
            if at == chunk.end:
                break
        self._disturbed = True
        if not chunk.is_last:
            return None
        return self._pending([(chunk.request, chunk.request.epoch)], None, 1, packed, kept, 1, chunk.end)

    def can_catch_up(self, bucket: int) -> bool:
        """Whether drafters can consume what rounds without drafting left behind, at this padded batch size."""
        return ("catch_up", bucket) in self._compiled

    def dispatch(
        self, rows: Sequence[DecodeRow], state: SpecRuntimeState, bucket: int, *, catch_up: bool = False,
        guide: Guide | None = None,
    ) -> Pending:  # fmt: skip
        """Dispatches one round of the tier that `state` is bound to.

        Args:
          catch_up: first let the drafter consume what rounds without drafting left behind.
          guide: what the rows may say. Then the call waits for the drafts, and the round counts as untimed.
        """
        sampled = False not in self.variants or any(not row.request.params.plain_greedy for row in rows)
        deepest = state.tier.depth
        plan = self._plan(
            [(row.slot, row.request.draft_limit(deepest), row.page_index, row.new_pages) for row in rows], bucket
        )
        if catch_up:
            self.state = self._compiled["catch_up", bucket](self._draft_params, self.state, plan)
            self._disturbed = True
        if guide is None:
            executable = state.executables[bucket, sampled]
            self.state, packed, kept = executable(self._target, self._params_for(state.tier), self.state, plan)
        else:
            packed, kept = self._guided_round(state.tier, bucket, plan, guide)
            self._disturbed = True
        context = sum(row.request.num_computed for row in rows)
        nodes = state.tier.num_nodes
        return self._pending(
            [(row.request, row.epoch) for row in rows], state.tier, bucket, packed, kept, nodes, context
        )

    def _guided_round(
        self, tier: Tier, bucket: int, plan: jax.Array, guide: Guide
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Dispatches a round's parts, the host's masks between them; (packed, what `logprobs_fn` reads)."""
        if tier.depth == 0:
            masks = self._put(guide.ahead(bucket, 1))
            self.state, packed, kept = self._compiled["guided", bucket](self._target, (), self.state, plan, masks)
            return packed, kept
        ahead = self._put(guide.ahead(bucket, tier.depth))
        draft = self._compiled["draft", tier, bucket]
        self.state, drafted, shown = draft(self._draft_params, self.state, plan, ahead)
        shown.copy_to_host_async()
        tree = drafted.tree
        forward = self._compiled["forward", tier.num_nodes, bucket](
            self._target, self.state, plan, tree.tokens_BN, tree.depths_BN, tree.ancestors_BNN
        )
        tokens_parents = np.asarray(shown)  # waits for the drafts while the target runs
        masks = self._put(guide.masks(tokens_parents[:, 0], tokens_parents[:, 1]))
        settle = self._compiled["settle", tier, bucket]
        self.state, packed, path = settle(self.state, plan, drafted, forward, masks)
        return packed, (forward.logits_BNV, path)

    def _pending(
        self, rows: Sequence[tuple[Request, int]], tier: Tier | None, bucket: int, packed: jax.Array, kept: Any,
        nodes: int, context: int,
    ) -> Pending:  # fmt: skip
        logprobs = None
        if kept is not None and any(request.params.logprobs is not None for request, _ in rows):
            logits, path = kept
            logprobs = self._compiled["logprobs", bucket, nodes, path.shape[1]](logits, path, packed)
            logprobs.copy_to_host_async()
        packed.copy_to_host_async()
        timed = tier is not None and not self._disturbed
        if tier is not None:
            self._disturbed = False
        return Pending(tuple(rows), tier, bucket, packed, logprobs, time.perf_counter(), context, timed)

    def collect(self, pending: Pending) -> list[RowResult]:
        """Waits for a dispatch and unpacks its rows."""
        packed = Packed(np.asarray(pending.packed))
        logprobs = None if pending.logprobs is None else np.asarray(pending.logprobs)
        counts, bad = packed.count_B.tolist(), packed.bad_B.tolist()
        results = []
        for i, (request, epoch) in enumerate(pending.rows):
            tokens = tuple(packed.tokens_BD[i, : counts[i]].tolist())
            entries = None
            if logprobs is not None and request.params.logprobs is not None:
                entries = _entries(logprobs[i], tokens, request.params.logprobs)
            results.append(RowResult(request, epoch, tokens, not bad[i], entries))
        return results


def _entries(logprobs: np.ndarray, tokens: Sequence[int], wanted: int) -> tuple[dict[int, Logprob], ...]:
    """For each token itself first, then the `wanted` best of the vocabulary, as vLLM orders them."""
    chosen, ranks, values, ids = (part.tolist() for part in PackedLogprobs(logprobs).unpacked())
    entries = []
    for i, token in enumerate(tokens):
        entry = {token: Logprob(token, chosen[i], ranks[i])}
        for rank, (other, value) in enumerate(zip(ids[i][:wanted], values[i], strict=False), start=1):
            entry.setdefault(other, Logprob(other, value, rank))
        entries.append(entry)
    return tuple(entries)
