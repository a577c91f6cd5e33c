"""What is compiled: a key for each executable, which says how it is lowered and what to run it on for no request.

Owns the list of a runner's executables and the order in which they are wanted. Must not know requests, nor run one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.request import MAX_LOGPROBS
from jaxspec.runtime.compile import Compilation
from jaxspec.runtime.executables import Fingerprints, IndescribableError
from jaxspec.runtime.sharding import Placement
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.speculation import guided
from jaxspec.speculation import round as rounds
from jaxspec.speculation.layouts import Admission, Batch, Budget, Chunks, Packed, PackedDrafts, Text, plain_calibration
from jaxspec.speculation.packed import packed_fn
from jaxspec.speculation.round import RoundSpec
from jaxspec.speculation.several import several_fn
from jaxspec.speculation.state import DecodeState
from jaxspec.speculation.typical import Typical
from jaxspec.tier import PLAIN, Tier

_log = logging.getLogger(__name__)


class Held(enum.Enum):
    """Arguments that the runner holds. They cross over as tuples of their leaves, the state as a result too.

    Flattening a tree of modules or dataclasses at each call takes longer than the call.
    """

    TARGET = enum.auto()
    DRAFT = enum.auto()
    STATE = enum.auto()


@dataclasses.dataclass(frozen=True)
class Lowering:
    """How an executable comes about.

    Attributes:
      fn: what is traced.
      args: each Held, an array of the host that means no request, or shapes of what may be zeros then.
      results: shardings of what it returns.
      static: further arguments, by name.
      keeps_state: the state is read only; otherwise it is given away (donated).
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    results: Any
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keeps_state: bool = False

    @property
    def donated(self) -> tuple[int, ...]:
        return tuple(i for i, arg in enumerate(self.args) if arg is Held.STATE and not self.keeps_state)


def products_in(dtype: jnp.dtype) -> AbstractContextManager[None]:
    """Products while tracing: of float32 in all its bits, where nobody has set JAX's precision.

    XLA's default rounds their factors to TF32 on GPUs and to bfloat16 on TPUs, after which rows of shapes that differ
    part more often than float32's own rounding lets them.
    """
    if dtype != jnp.float32 or jax.config.values["jax_default_matmul_precision"] is not None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all executables of a runner have in common.

    Attributes:
      held: shapes of what the runner holds, as leaves. trees: what they are the leaves of.
      dtype: of the target's activations and the pool.
    """

    spec: RoundSpec
    place: Placement
    held: Mapping[Held, tuple[Any, ...]]
    trees: Mapping[Held, Any]
    dtype: jnp.dtype

    @property
    def words(self) -> int:
        """Width of a set of bits over the vocabulary."""
        return -(-self.spec.config.vocab_size // 32)

    def batch(self, bucket: int) -> np.ndarray:
        return Batch.of(self.spec.geo, bucket).array

    def shape(self, *sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """Of an argument that every device has as a whole."""
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=self.place.replicated)

    def abstract(self, arg: Any) -> Any:
        """The shapes that stand for an argument while tracing."""
        if isinstance(arg, Held):
            return self.held[arg]
        return self.shape(*arg.shape, dtype=arg.dtype) if isinstance(arg, np.ndarray) else arg

    def parts(self, tier: Tier, bucket: int) -> tuple[rounds.Drafted, rounds.Forward]:
        """See guided.parts; with shardings."""
        with self.place.ambient():
            return self.place.round_parts(*guided.parts(self.spec, tier, bucket, self.dtype))

    def where(self, shapes: Any) -> Any:
        """The shardings of shapes."""
        return None if self.place.mesh is None else jax.tree.map(lambda x: x.sharding, shapes)

    def compilations(self, keys: Sequence[Key], stored: bool) -> list[Compilation]:
        """What is to be compiled for each key.

        Args:
          stored: the executables are kept, by fingerprints of what they are made from.
        """
        describe = Fingerprints() if stored else None
        return [self._compilation(key, describe) for key in keys]

    def _compilation(self, key: Key, describe: Fingerprints | None) -> Compilation:
        lowering, place = key.lowering(self), self.place
        donated, static = lowering.donated, lowering.static
        args, results = tuple(map(self.abstract, lowering.args)), _flat(lowering.results)
        jitted = jax.jit(
            self._flattened(lowering), donate_argnums=donated, static_argnames=tuple(static), out_shardings=results,
            compiler_options=dict(place.options) or None,
        )  # fmt: skip

        def lower() -> jax.stages.Lowered:
            with place.ambient(), products_in(self.dtype):
                return jitted.trace(*args, **static).lower()

        told = None
        if describe is not None:
            flat = *jax.tree.flatten(args), static, *jax.tree.flatten(results)
            trees = [self.trees[arg] for arg in lowering.args if isinstance(arg, Held)]
            try:
                told = describe((lowering.fn, donated, *flat, *trees, place.mesh, place.options))
            except IndescribableError as e:
                _log.debug("an executable is not stored, for it depends on %s", e)
        return Compilation(key, args, lower, told)

    def _flattened(self, lowering: Lowering) -> Callable[..., Any]:
        """The function of leaves that is compiled."""

        def run(*args: Any, **static: Any) -> Any:
            whole = [
                self.trees[named].unflatten(arg) if isinstance(named, Held) else arg
                for named, arg in zip(lowering.args, args, strict=True)
            ]
            return _flat(lowering.fn(*whole, **static))

        return run


def _flat(results: Any) -> Any:
    """What a function returns, or its shardings, with the state as a tuple of leaves."""
    is_state = lambda x: isinstance(x, DecodeState)
    return jax.tree.map(lambda x: tuple(jax.tree.leaves(x)) if is_state(x) else x, results, is_leaf=is_state)


class Key(Protocol):
    """Names an executable of a runner; keys are frozen dataclasses."""

    def lowering(self, at: Setting) -> Lowering: ...


@dataclasses.dataclass(frozen=True)
class RoundKey:
    """A round, for batches of which some row samples or of greedy rows only.

    Attributes:
      tokens: how many nodes of the whole batch the target verifies (a packed round); None: all.
      rounds: so many, one after the other.
    """

    tier: Tier
    bucket: int
    sampled: bool
    tokens: int | None = None
    rounds: int = 1

    def lowering(self, at: Setting) -> Lowering:
        draft = Held.DRAFT if at.spec.takes_drafter(self.tier) else ()
        args = (Held.TARGET, draft, Held.STATE, at.batch(self.bucket))
        if self.tokens is None:
            fn = rounds.round_fn(at.spec, self.tier, self.sampled)
        else:
            fn = packed_fn(at.spec, self.tier, self.sampled, self.tokens)
            args = (*args, plain_calibration(at.spec.geo.max_depth), Budget.even(self.bucket))
        if self.rounds == 1:
            return Lowering(fn, args, at.place.round_results(self.sampled))
        return Lowering(several_fn(fn, self.rounds), args, at.place.round_results(False))


@dataclasses.dataclass(frozen=True)
class GuidedKey:
    """A plain round of guided rows. It needs no parts: its only mask is known before."""

    bucket: int

    def lowering(self, at: Setting) -> Lowering:
        draft = Held.DRAFT if at.spec.takes_drafter(PLAIN) else ()
        args = (Held.TARGET, draft, Held.STATE, at.batch(self.bucket), at.shape(self.bucket, 1, at.words))
        return Lowering(rounds.round_fn(at.spec, PLAIN, True), args, at.place.round_results(True))


@dataclasses.dataclass(frozen=True)
class DraftKey:
    """The first part of a guided round."""

    tier: Tier
    bucket: int

    def lowering(self, at: Setting) -> Lowering:
        drafted, _ = at.parts(self.tier, self.bucket)
        ahead = at.shape(self.bucket, self.tier.depth, at.words)
        results = at.place.state, at.where(drafted), at.place.replicated
        return Lowering(
            guided.draft_fn(at.spec, self.tier), (Held.DRAFT, Held.STATE, at.batch(self.bucket), ahead), results
        )


@dataclasses.dataclass(frozen=True)
class ForwardKey:
    """The second part of a guided round, which tiers of as many nodes share."""

    num_nodes: int
    bucket: int

    def lowering(self, at: Setting) -> Lowering:
        drafted, forward = at.parts(Tier(self.num_nodes - 1), self.bucket)
        tree = drafted.tree
        args = (
            Held.TARGET, Held.STATE, at.batch(self.bucket), tree.tokens_BN, tree.depths_BN, tree.ancestors_BNN,
        )  # fmt: skip
        return Lowering(guided.forward_fn(at.spec), args, at.where(forward), keeps_state=True)


@dataclasses.dataclass(frozen=True)
class SettleKey:
    """The last part of a guided round."""

    tier: Tier
    bucket: int

    def lowering(self, at: Setting) -> Lowering:
        masks = at.shape(self.bucket, self.tier.num_nodes, at.words)
        draft = Held.DRAFT if at.spec.takes_drafter(PLAIN) else ()
        args = (draft, Held.STATE, at.batch(self.bucket), *at.parts(self.tier, self.bucket), masks)
        results = at.place.state, at.place.replicated, at.place.replicated
        return Lowering(guided.settle_fn(at.spec, self.tier), args, results)


@dataclasses.dataclass(frozen=True)
class CatchUpKey:
    """What lets the drafter consume what rounds without drafting left behind."""

    bucket: int

    def lowering(self, at: Setting) -> Lowering:
        args = (Held.DRAFT, Held.STATE, at.batch(self.bucket))
        return Lowering(rounds.catch_up_fn(at.spec), args, at.place.state)


@dataclasses.dataclass(frozen=True)
class PrefillKey:
    """Chunks of prompts.

    Attributes:
      samples: whether it samples the token after a chunk. Without, no chunk may be its prompt's last.
    """

    shape: PrefillShape
    guided: bool = False
    samples: bool = True

    def lowering(self, at: Setting) -> Lowering:
        shape = self.shape
        allowed = at.shape(shape.rows, at.words) if self.guided and self.samples else None
        chunks = Chunks.of(at.spec.geo, shape.rows).array
        args = (Held.TARGET, Held.DRAFT, Held.STATE, chunks, allowed)
        results = at.place.round_results(True) if self.samples else at.place.state
        static = {"size": shape.size, "width": shape.width, "samples": self.samples}
        return Lowering(rounds.prefill_fn(at.spec), args, results, static)


@dataclasses.dataclass(frozen=True)
class AdmitKey:
    """What gives slots to up to `rows` requests.

    Attributes:
      biased: whether it takes logit biases.
    """

    rows: int = 1
    biased: bool = True

    def lowering(self, at: Setting) -> Lowering:
        bias = at.shape(self.rows, at.spec.config.vocab_size, dtype=jnp.float32) if self.biased else None
        args = (Held.STATE, Admission.packed(at.spec.geo, self.rows), bias)
        return Lowering(rounds.admit_fn(at.spec), args, at.place.state)


@dataclasses.dataclass(frozen=True)
class RememberKey:
    """What puts a text into the drafter's corpus."""

    def lowering(self, at: Setting) -> Lowering:
        text = np.zeros(Text.width(at.spec.geo), np.int32)
        return Lowering(rounds.remember_fn(at.spec), (Held.STATE, text), at.place.state)


@dataclasses.dataclass(frozen=True)
class LogprobsKey:
    """What reads log-probabilities of a round of so many nodes, or of a prefill, that emitted up to `tokens`.

    Attributes:
      verified: nodes that a packed round verified over the whole batch; None: all.
    """

    bucket: int
    num_nodes: int
    tokens: int
    verified: int | None = None

    def lowering(self, at: Setting) -> Lowering:
        vocab, width = at.spec.config.vocab_size, Packed.width(self.tokens)
        nodes = (self.bucket, self.num_nodes)
        if self.verified is not None:
            nodes, width = (1, self.verified), width + PackedDrafts.width(self.num_nodes)
        logits = jax.ShapeDtypeStruct((*nodes, vocab), jnp.float32, sharding=at.place.logits)
        args = (logits, at.shape(self.bucket, self.tokens), at.shape(self.bucket, width))
        return Lowering(rounds.logprobs_fn(min(MAX_LOGPROBS, vocab)), args, at.place.replicated)


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """What a runner can run.

    Attributes:
      reachable: {tier: buckets} that the policy can select.
      prefill_shapes: for prompts, ascending; the first is of one chunk.
      prefill_overhead: what a call for prompts costs beside its size, in tokens (scheduling.shapes.cover).
      prefill_unsampled: whether chunks that end no prompt run without the output layer, where reading that matters.
      eos: token ids that min_tokens bans besides a request's own stop ids.
      variants: which rounds to compile: False for greedy ones, True for sampled ones (which serve every batch).
      rejection, typical: how drafts of sampled rows are verified (speculation.round.RoundSpec).
      guided: whether rounds and prefills can be told what rows may say.
      budgets: {(tier, bucket): tokens} of the packed rounds that the policy can select besides.
      rounds: of one dispatch, in the buckets `repeated`, where every node is verified.
    """

    reachable: Mapping[Tier, tuple[int, ...]]
    prefill_shapes: Sequence[PrefillShape]
    prefill_overhead: int = 8
    prefill_unsampled: bool = False
    eos: Sequence[int] = ()
    variants: tuple[bool, ...] = (False, True)
    rejection: bool = False
    typical: Typical | None = None
    guided: bool = False
    budgets: Mapping[tuple[Tier, int], tuple[int, ...]] = dataclasses.field(default_factory=dict)
    rounds: int = 1
    repeated: tuple[int, ...] = ()

    @property
    def buckets(self) -> list[int]:
        return sorted({bucket for buckets in self.reachable.values() for bucket in buckets})

    def prefill(self, shape: PrefillShape, samples: bool = True) -> PrefillKey:
        return PrefillKey(shape, self.guided, samples)

    @property
    def admit_rows(self) -> list[int]:
        """How many requests the executables that admit take, ascending."""
        return sorted({shape.rows for shape in self.prefill_shapes} | {1})

    @property
    def prefill_keys(self) -> list[Key]:
        """The executables that prompts may need. What is computed of one without its end is as much as goes at once."""
        whole = [shape for shape in self.prefill_shapes if shape.rows == 1][-1:] if self.prefill_unsampled else []
        first: list[Key] = [AdmitKey(rows, biased=rows == 1) for rows in self.admit_rows]
        first += [LogprobsKey(rows, 1, 1) for rows in self.admit_rows]
        return [*first, *map(self.prefill, self.prefill_shapes), *(self.prefill(shape, False) for shape in whole)]

    def round_keys(self, tier: Tier, bucket: int) -> list[Key]:
        """The executables that a round of a tier may need."""
        nodes = tier.num_nodes
        keys: list[Key] = [RoundKey(tier, bucket, sampled) for sampled in self.variants]
        if self.guided and tier.depth:
            keys += [DraftKey(tier, bucket), ForwardKey(nodes, bucket), SettleKey(tier, bucket)]
        elif self.guided:
            keys.append(GuidedKey(bucket))
        return [*keys, LogprobsKey(bucket, nodes, tier.depth + 1)]

    def packed_keys(self, tier: Tier, bucket: int, tokens: int) -> list[Key]:
        """The executables that a packed round of a tier may need; ValueError for one that is not among `budgets`."""
        known = self.budgets.get((tier, bucket), ())
        if tokens not in known:
            raise ValueError(f"{tier} at batch size {bucket} cannot verify {tokens} tokens; compiled are {list(known)}")
        keys: list[Key] = [RoundKey(tier, bucket, sampled, tokens) for sampled in self.variants]
        return [*keys, LogprobsKey(bucket, tier.num_nodes, tier.depth + 1, tokens)]

    def repeated_keys(self, tier: Tier, bucket: int) -> list[Key]:
        """The executables of several rounds of a tier."""
        return [RoundKey(tier, bucket, sampled, rounds=self.rounds) for sampled in self.variants]

    def keys(self, *, catches_up: bool, remembers: bool = False) -> list[Key]:
        """Every executable; the dearest first, so that no thread ends with one.

        Args:
          catches_up: whether the drafter has a cache in which rounds that it does not draft leave gaps.
          remembers: whether it has a corpus.
        """
        keys = [key for tier, at in self.reachable.items() for bucket in at for key in self.round_keys(tier, bucket)]
        for (tier, bucket), budgets in self.budgets.items():
            keys += [key for tokens in budgets for key in self.packed_keys(tier, bucket, tokens)]
        for tier, at in self.reachable.items():
            keys += [key for bucket in at if bucket in self.repeated for key in self.repeated_keys(tier, bucket)]
        if catches_up and any(tier == PLAIN or tier.lookup for tier in self.reachable):
            keys += [CatchUpKey(bucket) for bucket in self.buckets]
        if remembers:
            keys.append(RememberKey())
        keys += self.prefill_keys
        weight = lambda key: key.tier.depth if isinstance(key, RoundKey) else -isinstance(key, LogprobsKey)
        return sorted(dict.fromkeys(keys), key=weight, reverse=True)

    def order(self, keys: Sequence[Key]) -> dict[Key, int]:
        """When each key's turn comes, from 0, which the first request waits for."""
        buckets, tiers = self.buckets, sorted(self.reachable)
        least = next(tier for tier in tiers if buckets[0] in self.reachable[tier])  # not every policy decodes plainly
        drafting = [tier for tier in tiers if tier.depth and tier != least]
        likely = drafting[len(drafting) // 2 : len(drafting) // 2 + 1]
        urgent = self.round_keys(least, buckets[0])
        turns: dict[Key, int] = {key: 2 for key in self.prefill_keys}
        turns |= dict.fromkeys((AdmitKey(), LogprobsKey(1, 1, 1), *map(self.prefill, self.prefill_shapes[:1])), 0)
        turns |= dict.fromkeys((*urgent, RememberKey()), 0)
        ends = [(at, tier) for at in (buckets[0], buckets[-1]) for tier in (least, *likely)]
        rest = [(at, tier) for at in buckets for tier in tiers]
        for turn, (bucket, tier) in enumerate([*ends, *rest]):
            if bucket in self.reachable[tier]:
                catch_up = [CatchUpKey(bucket)] if tier.depth else []
                for key in [*self.round_keys(tier, bucket), *catch_up]:
                    turns[key] = min(turns.get(key, turn + 1), turn + 1)  # prompts may need it as well
        # Packed rounds come last: they gain on whole ones, which already run. At the largest batches they gain most.
        last = len(rest) + len(ends)
        for (tier, bucket), budgets in self.budgets.items():
            for key in (key for tokens in budgets for key in self.packed_keys(tier, bucket, tokens)):
                turns.setdefault(key, last + 1 + buckets[::-1].index(bucket))
        return {key: turns.get(key, last) for key in keys}
