"""What is compiled: a key for each executable, which says how it is lowered and what to run it on for no request.

Must not know which of them a runner has (`repertoire`), nor requests, nor run one.
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
from jaxspec.speculation.mixed import mixed_fn
from jaxspec.speculation.packed import packed_fn
from jaxspec.speculation.prefill import prefill_fn
from jaxspec.speculation.round import RoundSpec
from jaxspec.speculation.several import several_fn
from jaxspec.speculation.state import DecodeState
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
            compiler_options=dict(place.compiler_options) or None,
        )  # fmt: skip

        def lower() -> jax.stages.Lowered:
            with place.ambient(), products_in(self.dtype):
                return jitted.trace(*args, **static).lower()

        told = None
        if describe is not None:
            flat = *jax.tree.flatten(args), static, *jax.tree.flatten(results)
            trees = [self.trees[arg] for arg in lowering.args if isinstance(arg, Held)]
            try:
                told = describe((lowering.fn, donated, *flat, *trees, place.mesh, place.compiler_options))
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
        geo = at.spec.geo
        chunks, nobody = Chunks.of(geo, shape.rows).array, Admission.packed(geo, geo.most_new(shape.rows))
        args = (Held.TARGET, Held.DRAFT, Held.STATE, chunks, nobody, allowed)
        results = at.place.round_results(True) if self.samples else at.place.state
        static = {"size": shape.size, "width": shape.width, "samples": self.samples}
        return Lowering(prefill_fn(at.spec), args, results, static)


@dataclasses.dataclass(frozen=True)
class MixedKey:
    """A round, and chunks of prompts in the same pass."""

    tier: Tier
    bucket: int
    sampled: bool
    shape: PrefillShape

    def lowering(self, at: Setting) -> Lowering:
        geo, rows = at.spec.geo, self.shape.rows
        chunks, nobody = Chunks.of(geo, rows).array, Admission.packed(geo, geo.most_new(rows))
        args = (Held.TARGET, Held.DRAFT, Held.STATE, at.batch(self.bucket), chunks, nobody)
        results = (*at.place.round_results(self.sampled), *at.place.round_results(True)[1:])
        return Lowering(mixed_fn(at.spec, self.tier, self.sampled, self.shape.size, self.shape.width), args, results)


@dataclasses.dataclass(frozen=True)
class AdmitKey:
    """What gives a slot to a request that does not get it in the call of its first chunk (Runner._new)."""

    def lowering(self, at: Setting) -> Lowering:
        bias = at.shape(1, at.spec.config.vocab_size, dtype=jnp.float32)
        return Lowering(rounds.admit_fn(at.spec), (Held.STATE, Admission.packed(at.spec.geo, 1), bias), at.place.state)


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
