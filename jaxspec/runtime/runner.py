"""The runner: holds weights and DecodeState, turns plans into dispatches and results into numpy.

Must not know policies, stop conditions or text. One round may be in flight: `dispatch`
returns at once, and `collect` is the only call that waits.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxspec.models.base import TargetModel
from jaxspec.request import Logprob, Request
from jaxspec.runtime.compile import SpecRuntimeState
from jaxspec.runtime.executables import ExecutableStore
from jaxspec.runtime.programs import (
    AdmitKey,
    CatchUpKey,
    DraftKey,
    ForwardKey,
    GuidedKey,
    Held,
    Key,
    LogprobsKey,
    RoundKey,
    RunnerConfig,
    Setting,
    SettleKey,
)
from jaxspec.runtime.sharding import Placement, abstract
from jaxspec.runtime.timing import Trials
from jaxspec.runtime.warmup import Warmup, WarmupConfig
from jaxspec.scheduling.lag import DraftLag
from jaxspec.scheduling.scheduler import DecodeRow, PrefillChunk
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.layouts import Admission, Batch, Chunk, Packed, PackedLogprobs
from jaxspec.speculation.round import RoundSpec
from jaxspec.speculation.sampling import MAX_STOP_IDS, SamplingState
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import Tier


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
      config: what it can run.
      warmup: how the executables come.
      mesh: devices that share the weights and pools (runtime.sharding); None for the backend's first device alone.

    Attributes:
      config: the target's.
      reachable, variants: see RunnerConfig.
      states: what each tier can run now, by tier.
    """

    def __init__(
        self, model: TargetModel, drafter: Drafter | None, draft_params: Any, geo: Geometry, config: RunnerConfig,
        warmup: WarmupConfig, mesh: Mesh | None = None,
    ):  # fmt: skip
        graph, target = nnx.split(model)
        self.config = model.config
        self.geo, self.drafter = geo, drafter
        self.spec = RoundSpec(graph, model.config, geo, drafter, config.rejection, config.typical)
        self._dtype: jnp.dtype = model.embedding[...].dtype
        self._place = Placement()
        if mesh is not None:
            self._place = Placement.of(mesh, target, draft_params, jax.eval_shape(self._empty_state))
            target = jax.device_put(target, self._place.target)
            draft_params = jax.device_put(draft_params, self._place.draft_params)
        self._target, self._draft_params = target, draft_params
        self._can = config
        self._lag: DraftLag | None = None
        if drafter is not None and drafter.has_cache:
            self._lag = DraftLag(drafter.window, drafter.catch_up_tokens)
        self.reachable, self.variants = config.reachable, config.variants
        words = -(-self.config.vocab_size // 32)
        self._anything = self.put(np.full((1, words), -1, np.int32)) if config.guided else None
        self._batches: dict[bytes, jax.Array] = {}
        self._disturbed = False  # something else than rounds ran on the device since the last one
        self._zero_bias = self.put(np.zeros((self.config.vocab_size,), np.float32))
        self.reset()
        self._compiled: dict[Key, Any] = {}
        self.states = {tier: SpecRuntimeState(tier, {}) for tier in self.reachable}
        self._trials = Trials(warmup.times)
        self._warm_up(warmup)

    def _empty_state(self) -> DecodeState:
        draft = () if self.drafter is None else self.drafter.init_state(self.geo)
        return DecodeState.empty(self.config, self.geo, self._dtype, draft)

    def fresh_state(self) -> DecodeState:
        """A state of no request."""
        if self._place.mesh is None:
            return self._empty_state()
        # As a compiled function each device makes its own part; no device ever holds a whole pool.
        return jax.jit(self._empty_state, out_shardings=self._place.state)()

    def put(self, x: Any) -> jax.Array:
        """A host array on the device, or whole on every one."""
        # device_put, not jnp.asarray: the latter compiles a copy for every new shape.
        return jax.device_put(x, self._place.replicated)

    # Warming up.

    def _warm_up(self, config: WarmupConfig) -> None:
        """Compiles everything, or what the first request needs."""
        place = self._place
        held = {
            Held.TARGET: abstract(self._target, place.target),
            Held.DRAFT: abstract(self._draft_params, place.draft_params),
            Held.STATE: abstract(self.state, place.state),
        }
        self._setting = Setting(self.spec, place, held, self._dtype)
        keys = self._can.keys(catches_up=self._lag is not None)
        order = self._can.order(keys) if config.background else dict.fromkeys(keys, 0)
        first = [key for key in keys if not order[key]]
        store = self._store(config.cache)
        compilations = self._setting.compilations(sorted(keys, key=order.__getitem__), store is not None)
        self._warmup = Warmup(compilations, len(first), store=store)
        # Elsewhere what runs would disturb a compiler that times what it compiles.
        at_once = jax.default_backend() == "cpu" and not config.background
        arrived = []
        wanted = self._warmup.wait(first)
        tell = config.progress if callable(config.progress) else lambda ready, total: None
        tell(0, self._warmup.total)
        bar = tqdm(wanted, total=len(first), desc="compiling", disable=config.progress is not True, leave=False)
        try:
            for count, (key, executable) in enumerate(bar, start=1):
                tell(count, self._warmup.total)
                if at_once:
                    self._take_in(key, executable)
                else:
                    arrived.append((key, executable))
        except BaseException:
            self._warmup.stop()
            wanted.close()  # a traceback may keep it for long, and with it Python's garbage
            raise
        if config.background:
            weakref.finalize(self, self._warmup.stop)  # with its engine, or where none comes of it
            self._warmup.give_way()
        for key, executable in arrived:
            self._take_in(key, executable)

    def _store(self, directory: Path | None) -> ExecutableStore | None:
        if directory is None or jax.process_count() > 1:
            return None
        mesh = self._place.mesh
        return ExecutableStore(directory, jax.devices()[:1] if mesh is None else list(mesh.devices.flat))

    @property
    def num_executables(self) -> int:
        """Executables that there will be once all is warm."""
        return self._warmup.total

    @property
    def num_ready(self) -> int:
        """Executables that can run now."""
        return len(self._compiled)

    @property
    def costs(self) -> dict[tuple[Tier, int], float]:
        """Median seconds of each (tier, bucket) that `advance` has timed."""
        return self._trials.costs

    @property
    def warm(self) -> bool:
        """Whether everything is compiled and timed, or given up."""
        return self._trials.over and self._warmup.over

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
        if self._trials.run_next(self):
            self._disturbed = True
            return True
        arrival = self._warmup.take()
        if arrival is not None:
            self._take_in(*arrival)
            return True
        if not self._warmup.over:
            return False
        pairs = [(tier, bucket) for tier, state in self.states.items() for bucket, _ in state.executables]
        return self._trials.finish(dict.fromkeys(pairs))

    def _take_in(self, key: Key, executable: Any) -> None:
        """Runs an executable once, for no request, and offers it.

        The first run costs several others: CPUs choose how to multiply, GPUs load the program. No request shall pay.
        """
        self._run_once(key, executable)
        self._compiled[key] = executable
        for tier, buckets in self.reachable.items():
            for bucket in buckets:
                if not self.ready(tier, bucket) and all(
                    k in self._compiled for k in self._can.round_keys(tier, bucket)
                ):
                    ready = {(bucket, s): self._compiled[RoundKey(tier, bucket, s)] for s in self.variants}
                    self.states[tier] = SpecRuntimeState(tier, {**self.states[tier].executables, **ready})
                    self._trials.arrived(tier, bucket)

    def _run_once(self, key: Key, executable: Any) -> None:
        zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
        held = {Held.TARGET: self._target, Held.DRAFT: self._draft_params, Held.STATE: self.state}

        def value(arg: Any) -> Any:
            if isinstance(arg, Held):
                return held[arg]
            return self.put(arg) if isinstance(arg, np.ndarray) else jax.tree.map(zeros, arg)

        out = executable(*map(value, key.lowering(self._setting).args))
        results = out if isinstance(out, tuple) else (out,)
        self.state = next((x for x in results if isinstance(x, DecodeState)), self.state)
        self._disturbed = True

    def reset(self) -> None:
        """Forgets every request."""
        self.state = self.fresh_state()

    def repeat(self, tier: Tier, bucket: int, batch: jax.Array, count: int) -> jax.Array:
        """Dispatches the first variant's round `count` times, for timing; returns the last packed result."""
        executable = self.states[tier].executables[bucket, self.variants[0]]
        packed = None
        for _ in range(count):
            self.state, packed, _ = executable(self._target, self._params_for(tier), self.state, batch)
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

    def _batch(self, rows: Sequence[DecodeRow], deepest: int, bucket: int) -> jax.Array:
        """The round's Batch on the device; kept there where no row got new pages."""
        batch = Batch.of(
            self.geo, bucket, [(r.slot, r.request.draft_limit(deepest), r.page_index, r.new_pages) for r in rows]
        ).array
        if any(row.new_pages for row in rows):
            return self.put(batch)
        key = batch.tobytes()
        if key not in self._batches:
            if len(self._batches) > 256:
                self._batches.clear()
            self._batches[key] = self.put(batch)
        return self._batches[key]

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
            stops += self._can.eos
        stops += [self.config.vocab_size] * (MAX_STOP_IDS - len(stops))
        prompt_len = len(request.prompt_token_ids)
        derived = {
            "temperature": 0.0 if params.greedy else params.temperature, "top_k": max(params.top_k, 0),
            "seed": request.seed, "prompt_len": prompt_len, "ban_until": prompt_len + params.min_tokens,
        }  # fmt: skip
        numbers = {
            field: derived[number.name] if number.name in derived else getattr(params, number.name)
            for field, number in SamplingState.numbers().items()
        }
        ints, floats = Admission(chunk.slot, chunk.start, len(text), numbers, stops).arrays()
        bias: Any = self._zero_bias
        if params.logit_bias:
            bias = np.zeros((self.config.vocab_size,), np.float32)
            for token, value in params.logit_bias.items():
                bias[token] = value
        self.state = self._compiled[AdmitKey()](self.state, ints, floats, table, tokens, bias)

    def prefill(self, chunk: PrefillChunk, allowed_W: np.ndarray | None = None) -> Pending | None:
        """Dispatches a chunk; a Pending where it ends the prompt, which holds the first token.

        Args:
          allowed_W: what that token may be, as an int32 set of bits; None: anything.
        """
        if chunk.is_first:
            self.admit(chunk)
        sizes = [size for size in self._can.prefill_sizes if self._can.prefill(size) in self._compiled]
        allowed = self._anything if allowed_W is None else self.put(allowed_W[None])
        at = chunk.start
        while True:  # once, but for chunks longer than what is compiled so far
            size = next((s for s in sizes if s >= chunk.end - at), sizes[-1])
            count = min(size, chunk.end - at)
            at += count
            part = Chunk.of(chunk.slot, count, chunk.is_last and at == chunk.end)
            executable = self._compiled[self._can.prefill(size)]
            self.state, packed, kept = executable(self._target, self._draft_params, self.state, part, allowed)
            if at == chunk.end:
                break
        self._disturbed = True
        if not chunk.is_last:
            return None
        return self._pending([(chunk.request, chunk.request.epoch)], None, 1, packed, kept, 1, chunk.end)

    def dispatch(
        self, rows: Sequence[DecodeRow], state: SpecRuntimeState, bucket: int, guide: Guide | None = None
    ) -> Pending:
        """Dispatches one round of the tier that `state` is bound to.

        Args:
          guide: what the rows may say. Then the call waits for the drafts, and the round counts as untimed.
        """
        tier, requests = state.tier, [row.request for row in rows]
        batch = self._batch(rows, tier.depth, bucket)
        catch_up = self._compiled.get(CatchUpKey(bucket))
        if self._lag is not None and self._lag.before_round(requests, tier.depth, can_catch_up=catch_up is not None):
            assert catch_up is not None
            self.state = catch_up(self._draft_params, self.state, batch)
            self._disturbed = True
        if guide is None:
            sampled = False not in self.variants or any(not request.params.plain_greedy for request in requests)
            executable = state.executables[bucket, sampled]
            self.state, packed, kept = executable(self._target, self._params_for(tier), self.state, batch)
        else:
            packed, kept = self._guided_round(tier, bucket, batch, guide)
            self._disturbed = True
        context = sum(request.num_computed for request in requests)
        epochs = [(row.request, row.epoch) for row in rows]
        return self._pending(epochs, tier, bucket, packed, kept, tier.num_nodes, context)

    def _guided_round(
        self, tier: Tier, bucket: int, batch: jax.Array, guide: Guide
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Dispatches a round's parts, the host's masks between them; (packed, what `logprobs_fn` reads)."""
        if tier.depth == 0:
            masks = self.put(guide.ahead(bucket, 1))
            self.state, packed, kept = self._compiled[GuidedKey(bucket)](self._target, (), self.state, batch, masks)
            return packed, kept
        ahead = self.put(guide.ahead(bucket, tier.depth))
        draft = self._compiled[DraftKey(tier, bucket)]
        self.state, drafted, shown = draft(self._draft_params, self.state, batch, ahead)
        shown.copy_to_host_async()
        tree = drafted.tree
        forward = self._compiled[ForwardKey(tier.num_nodes, bucket)](
            self._target, self.state, batch, tree.tokens_BN, tree.depths_BN, tree.ancestors_BNN
        )
        tokens_parents = np.asarray(shown)  # waits for the drafts while the target runs
        masks = self.put(guide.masks(tokens_parents[:, 0], tokens_parents[:, 1]))
        settle = self._compiled[SettleKey(tier, bucket)]
        self.state, packed, path = settle(self.state, batch, drafted, forward, masks)
        return packed, (forward.logits_BNV, path)

    def _pending(
        self, rows: Sequence[tuple[Request, int]], tier: Tier | None, bucket: int, packed: jax.Array, kept: Any,
        nodes: int, context: int,
    ) -> Pending:  # fmt: skip
        logprobs = None
        if kept is not None and any(request.params.logprobs is not None for request, _ in rows):
            logits, path = kept
            logprobs = self._compiled[LogprobsKey(bucket, nodes, path.shape[1])](logits, path, packed)
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
