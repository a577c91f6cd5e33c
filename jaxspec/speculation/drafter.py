"""What every drafter offers the round. Implementations lie in drafters/."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from jaxspec.speculation.ragged import Ragged
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.tier import Tier

#: A drafter's pytrees: of its parameters, and of its part of the DecodeState.
Params = TypeVar("Params", contravariant=True)
State = TypeVar("State")


class Drafter(Protocol[Params, State]):
    """Proposes trees; owns a pytree of parameters and one of state, and no other memory.

    Whatever it proposes, the output is the target's: a wrong or empty draft costs speed only.
    A token equal to the vocabulary's size means "no proposal".
    """

    #: Layers of the target whose inputs it wants to see; empty if none.
    aux_layers: tuple[int, ...]
    #: Tokens beyond a page's end that its cache entries depend on (prefix keys include them).
    lookahead: int
    #: Whether its cache lags behind: rounds without drafting leave tokens that `catch_up` adds, or gaps.
    lags: bool
    #: Whether `extend` runs a part of the network: then rounds that draft nothing take the parameters too.
    extends_by_params: bool
    #: Whether each token of a draft takes a pass of its network, so that a shallower draft takes fewer.
    stepwise: bool
    #: Whether it can propose trees (topk > 1), and draw drafts from its own distribution.
    supports_trees: bool
    #: Most candidates a node: the draft vocabulary.
    max_topk: int

    def init_state(self, geo: Geometry) -> State:
        """The drafter's part of the DecodeState."""
        ...

    def admit(self, draft: State, slot_B: jax.Array, cached_B: jax.Array) -> State:
        """Requests take these slots (S: none); their first `cached_B` tokens come from the prefix cache."""
        ...

    def prefill(
        self, params: Params, draft: State, text: Ragged, tokens_1T: jax.Array, aux_1TA: jax.Array | None
    ) -> State:
        """Sees chunks of committed text, with the target's states of their tokens."""
        ...

    #: Tokens committed since the last draft that the next one consumes by itself, and that `catch_up` adds.
    window: int
    catch_up_tokens: int

    def catch_up(self, params: Params, draft: State, rows: Rows, tokens_SL: jax.Array) -> State:
        """Consumes committed tokens that rounds without drafting left behind (only where `lags`)."""
        ...

    def draft(
        self,
        params: Params,
        draft: State,
        rows: Rows,
        tokens_SL: jax.Array,
        tier: Tier,
        sampling: SamplingState | None,
        noise_BDV: jax.Array | None,
        sample: bool,
    ) -> tuple[DraftTree, State]:
        """A tree of the tier's shape.

        Args:
          sampling: the rows' parameters, None where every row is plain greedy.
          noise_BDV: the target's own Gumbel noise at each drafted position, where the round has it anyway. Sampled
            rows of coupled verification rank their candidates with it, so a drafter that lacks it draws its part.
          sample: draw from the draft distribution and return it (rejection verification).
        """
        ...

    def extend(self, params: Params, draft: State, rows: Rows, aux_BDA: jax.Array | None, count_B: jax.Array) -> State:
        """The round committed count_B tokens from position length on, whose aux states are aux_BDA.

        Args:
          params: (), unless `extends_by_params`, in rounds that draft nothing and in the parts of guided ones.
        """
        ...


@runtime_checkable
class Remembering(Protocol):
    """A drafter that can keep texts of others than the request that it drafts for."""

    #: Room for them, in tokens; 0: it keeps none.
    @property
    def corpus_tokens(self) -> int: ...

    def remember(self, draft: Any, tokens_L: jax.Array, count: jax.Array) -> Any:
        """The drafter's state with the text of the first `count` tokens, in place of the oldest."""
        ...

    def forget(self, draft: Any) -> Any:
        """The drafter's state without any of these texts; not to be traced."""
        ...
