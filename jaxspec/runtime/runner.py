"""The runner: turns plans into dispatches and results into numpy.

Must not know policies, stop conditions or text. One round may be in flight: `dispatch`
returns at once, and `collect` is the only call that waits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.laps import WAIT, Laps
from jaxspec.models.base import TargetModel
from jaxspec.request import Request
from jaxspec.runtime.arriving import Arriving, corpus_tokens
from jaxspec.runtime.compile import SpecRuntimeState
from jaxspec.runtime.programs import (
    AdmitKey,
    CatchUpKey,
    DraftKey,
    ForwardKey,
    GuidedKey,
    LogprobsKey,
    MixedKey,
    RememberKey,
    RoundKey,
    SettleKey,
)
from jaxspec.runtime.prompts import ChunkCall, PromptWork, admission, bias_of
from jaxspec.runtime.repertoire import RunnerConfig
from jaxspec.runtime.results import Pending, Result
from jaxspec.runtime.warmup import WarmupConfig
from jaxspec.scheduling.lag import DraftLag
from jaxspec.scheduling.plan import DecodeRows, PrefillChunk
from jaxspec.scheduling.shapes import PrefillShape, cover, cover_beside
from jaxspec.speculation.drafter import Drafter, Remembering
from jaxspec.speculation.layouts import Admission, Batch, Text
from jaxspec.speculation.state import Geometry
from jaxspec.tier import PLAIN, Choice, Tier

#: What the first of several processes tells the others.
_FORGET = "forget the corpus"


class Guide(Protocol):
    """What the rows of a round may say next, as int32 sets of bits over the vocabulary; -1 allows everything."""

    def ahead(self, bucket: int, depth: int) -> np.ndarray:
        """At each of the next positions, whatever will be drafted, [bucket, depth, W]."""
        ...

    def masks(self, tokens_BN: np.ndarray, parents_BN: np.ndarray) -> np.ndarray:
        """After each node of the rows' trees, [B, N, W]."""
        ...


class Runner(Arriving):
    """What is held and has come (see Arriving), for plans.

    Attributes:
      laps: where the host's time goes, from the parts of a round that are this class's.
    """

    def __init__(
        self, model: TargetModel, drafter: Drafter | None, draft_params: Any, geo: Geometry, config: RunnerConfig,
        warmup: WarmupConfig, mesh: Mesh | None = None, options: tuple[tuple[str, Any], ...] = (),
    ):  # fmt: skip
        super().__init__(model, drafter, draft_params, geo, config, warmup, mesh, options)
        self.laps = Laps()
        self._lag: DraftLag | None = None
        if drafter is not None and drafter.lags:
            self._lag = DraftLag(drafter.window, drafter.catch_up_tokens, geo.slots)
        self._corpus_tokens = corpus_tokens(drafter)
        self.hear(_FORGET, self._forget)
        # What calls for prompts are mostly given, on the device already.
        shapes = [*config.prefill_shapes, *([] if config.mixed is None else [config.mixed])]
        words, rows = -(-self.config.vocab_size // 32), sorted({shape.rows for shape in shapes})
        self._nobody = {b: self.put(Admission.packed(geo, b)) for b in {*map(geo.most_new, rows)}}
        self._zero_bias = self.put(np.zeros((1, self.config.vocab_size), np.float32))
        self._anything = {b: self.put(np.full((b, words), -1, np.int32)) for b in rows if config.guided}

    def _new(self, call: ChunkCall) -> np.ndarray | jax.Array:
        """Who gets a slot in a call; of those who begin in it and do not, each gets it here, in a call of its own.

        Those are the ones with logit biases, which are as wide as the vocabulary, and more than there is room for.
        """
        room = self.geo.most_new(call.shape.rows)
        biased = [chunk for chunk in call.new if chunk.request.params.biased]
        others = [chunk for chunk in call.new if not chunk.request.params.biased]
        for chunk in (*biased, *others[room:]):
            params = chunk.request.params
            bias = bias_of(params, self.config.vocab_size) if params.biased else self._zero_bias
            self._state = self._call(AdmitKey(), self._state, self._rows([chunk], 1), bias)
        return self._rows(others[:room], room) if others else self._nobody[room]

    def _rows(self, chunks: Sequence[PrefillChunk], count: int) -> np.ndarray:
        """The rows of requests whose first chunks these are, and others of none."""
        vocab, eos = self.config.vocab_size, self._can.eos
        return Admission.packed(self.geo, count, [admission(chunk, eos, vocab) for chunk in chunks])

    def remember(self, tokens: Sequence[int]) -> None:
        """Puts a text into the drafter's corpus, in pieces that overlap where it is too long; rounds may be in flight.

        Raises:
          ValueError: the drafter keeps none.
        """
        if not self._corpus_tokens:
            raise ValueError("this drafter keeps no texts")
        # A match of the first tokens of a piece needs those before them.
        piece, overlap = min(self.geo.tokens_per_seq, self._corpus_tokens - 1), 3
        for start in range(0, max(1, len(tokens) - overlap), piece - overlap):
            text = Text.of(self.geo, tokens[start : start + piece]).array
            self._state = self._call(RememberKey(), self._state, text)
        self._disturbed = True

    def forget(self) -> None:
        """Empties the drafter's corpus, where it has one; rounds may be in flight."""
        if self._corpus_tokens:
            self._forget()
            self.tell(_FORGET)

    def _forget(self) -> None:
        assert isinstance(self.drafter, Remembering)
        state = self.state
        self.state = dataclasses.replace(state, draft=self.drafter.forget(state.draft))

    def prefill(self, work: PromptWork) -> list[Pending]:
        """Dispatches what is left of a step's chunks; a Pending for each call that ends prompts: their first tokens.

        Those calls are among them of which a round has taken the chunks along.
        """
        if work.calls is None:
            work.calls = cover(work.counts, self._prefill_shapes, self._can.prefill_overhead)
        for shape, pieces in work.calls:
            call = ChunkCall.of(shape, pieces, work.chunks)
            unsampled = self._can.prefill(shape, samples=False)
            chunks, new = call.array(self.geo), self._new(call)
            args = self._target, self._draft_params, self._state, chunks, new
            if not call.ending and unsampled in self._compiled:
                self._state = self._call(unsampled, *args, None)
                continue
            self._state, packed, kept = self._call(self._can.prefill(shape), *args, self._masks(call, work))
            self._begun(work, call, packed, kept)
        self._disturbed |= bool(work.calls)
        work.calls = ()
        return work.pending

    def _begun(self, work: PromptWork, call: ChunkCall, packed: jax.Array, kept: Any) -> None:
        if call.ending:
            work.pending.append(self._pending(call.begins, None, call.shape.rows, packed, kept, 1, sum(call.counts)))

    @property
    def _prefill_shapes(self) -> list[PrefillShape]:
        """Those that can run now."""
        needed = lambda shape: {self._can.prefill(shape), LogprobsKey(shape.rows, 1, 1)}
        return [shape for shape in self._can.prefill_shapes if self._compiled.keys() >= needed(shape)]

    def _masks(self, call: ChunkCall, work: PromptWork) -> jax.Array | None:
        """What the tokens after a call's chunks may be, [B, W]."""
        if not self._can.guided:
            return None
        masks = [work.mask(chunk) for chunk in call.chunks[: call.ending]]
        if all(mask is None for mask in masks):
            return self._anything[call.shape.rows]
        array = np.full((call.shape.rows, -(-self.config.vocab_size // 32)), -1, np.int32)
        for row, mask in zip(array, masks, strict=False):
            row[:] = -1 if mask is None else mask
        return self.put(array)

    def takes_along(self, tier: Tier, bucket: int) -> PrefillShape | None:
        """What a round of a tier at this padded batch size can take along of prompts, if every node is verified."""
        keys = self._can.mixed_keys(tier, bucket)
        return self._can.mixed if keys and self._compiled.keys() >= {*keys} else None

    def _beside(self, work: PromptWork, choice: Choice, bucket: int) -> tuple[MixedKey, ChunkCall] | None:
        """What a round takes along of a step's chunks; None: nothing."""
        shape = None if choice.tokens is not None else self.takes_along(choice.tier, bucket)
        if shape is None or not work.chunks or not work.free:
            return None
        pieces, calls = cover_beside(work.counts, self._prefill_shapes, self._can.prefill_overhead, shape)
        if not pieces:
            return None
        work.calls = calls
        return MixedKey(choice.tier, bucket, max(self.variants), shape), ChunkCall.of(shape, pieces, work.chunks)

    def dispatch(
        self, rows: DecodeRows, state: SpecRuntimeState, choice: Choice, bucket: int, guide: Guide | None = None,
        weights: Sequence[float] | None = None, work: PromptWork | None = None,
    ) -> Pending:  # fmt: skip
        """Dispatches rounds of the tier that `state` is bound to, `rows.rounds` of them, packed as is chosen.

        Args:
          weights: what a drafted token of each row is worth to a packed round; None: of all the same.
          guide: what the rows may say. Then the call waits for the drafts, and the round is neither timed nor packed.
          work: chunks of prompts that the round may take along; what it leaves is for `prefill`.
        """
        tier, tokens = state.tier, choice.tokens if guide is None else None
        # The host's array as it is: the call uploads it sooner than a device_put before it would.
        caps = tier.depth if rows.caps_B is None else np.minimum(rows.caps_B, tier.depth)
        batch = Batch.of(self.geo, bucket, rows.slots_B, caps, rows.grants).array
        can, entered = CatchUpKey(bucket) in self._compiled, False
        if self._lag is not None and self._lag.before_round(rows, tier.depth, can_catch_up=can, elsewhere=tier.lookup):
            self._state = self._call(CatchUpKey(bucket), self._draft_params, self._state, batch)
            entered = not self._disturbed
            self._disturbed = True
        self.laps.lap("batch array")
        beside = None if work is None or guide is not None or rows.rounds > 1 else self._beside(work, choice, bucket)
        if beside is not None and work is not None:
            key, call = beside
            chunks, new = call.array(self.geo), self._new(call)
            args = self._target, self._draft_params, self._state, batch, chunks, new
            self._state, packed, kept, *begun = self._call(key, *args)
            self._begun(work, call, *begun)
            self._disturbed, entered = True, False
        elif guide is None:
            sampled = False not in self.variants or bool(np.count_nonzero(rows.shaped_B))
            args = self._target, self._params_for(tier), self._state, batch, *self._spend(choice, bucket, weights)
            key = RoundKey(tier, bucket, sampled, tokens, rows.rounds)
            self._state, packed, kept = self._call(key, *args)
        else:
            packed, kept = self._guided_round(tier, bucket, batch, guide)
            self._disturbed, entered = True, False
        pending = self._pending(rows, tier, bucket, packed, kept, tier.num_nodes, rows.context_tokens, tokens)
        pending.entered = entered and rows.rounds == 1
        self.laps.lap("call")
        return pending

    def _guided_round(
        self, tier: Tier, bucket: int, batch: np.ndarray, guide: Guide
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Dispatches a round's parts, the host's masks between them; (packed, what `logprobs_fn` reads)."""
        if tier.depth == 0:
            masks = self.put(guide.ahead(bucket, 1))
            args = self._target, self._params_for(tier), self._state, batch, masks
            self._state, packed, kept = self._call(GuidedKey(bucket), *args)
            return packed, kept
        ahead = self.put(guide.ahead(bucket, tier.depth))
        draft = DraftKey(tier, bucket)
        self._state, drafted, shown = self._call(draft, self._draft_params, self._state, batch, ahead)
        shown.copy_to_host_async()
        tree = drafted.tree
        forward = self._call(
            ForwardKey(tier.num_nodes, bucket), self._target, self._state, batch, tree.tokens_BN, tree.depths_BN,
            tree.ancestors_BNN,
        )  # fmt: skip
        tokens_parents = np.asarray(shown)  # waits for the drafts while the target runs
        masks = self.put(guide.masks(tokens_parents[:, 0], tokens_parents[:, 1]))
        settle, params = SettleKey(tier, bucket), self._params_for(PLAIN)
        self._state, packed, path = self._call(settle, params, self._state, batch, drafted, forward, masks)
        return packed, (forward.logits_BNV, path)

    def _pending(
        self, rows: Sequence[tuple[Request, int]] | DecodeRows, tier: Tier | None, bucket: int, packed: jax.Array,
        kept: Any, nodes: int, context: int, tokens: int | None = None,
    ) -> Pending:  # fmt: skip
        logprobs, rounds = None, rows.rounds if isinstance(rows, DecodeRows) else 1
        if kept is not None and _wants_logprobs(rows):
            logits, path = kept
            logprobs = self._call(LogprobsKey(bucket, nodes, path.shape[1], tokens), logits, path, packed)
            logprobs.copy_to_host_async()
        packed.copy_to_host_async()
        timed = tier is not None and not self._disturbed
        if tier is not None:
            self._disturbed = False
        return Pending(rows, tier, bucket, packed, logprobs, time.perf_counter(), context, timed, False, tokens, rounds)

    def collect(self, pending: Pending) -> Result:
        """Waits for a dispatch and unpacks its rows."""
        try:
            packed = np.asarray(pending.packed)
            logprobs = None if pending.logprobs is None else np.asarray(pending.logprobs)
        except Exception as error:
            if self._together is not None:
                self._together.hosts.blame(error)
            raise
        self.laps.lap(WAIT)
        tier = None if pending.tokens is None else pending.tier
        result = Result.of(packed, len(pending.rows), logprobs, tier)
        self.laps.lap("unpack")
        return result


def _wants_logprobs(rows: Sequence[tuple[Request, int]] | DecodeRows) -> bool:
    if isinstance(rows, DecodeRows):
        return bool(np.count_nonzero(rows.logprobs_B))
    return any(request.params.logprobs is not None for request, _ in rows)
