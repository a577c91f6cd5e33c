"""What lives on the device: weights and DecodeState as leaves, and the executables that are called with them.

Must not know how executables come about in time (`arriving`), nor requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec.models.base import TargetModel
from jaxspec.models.quantised import stored_bytes
from jaxspec.runtime.following import Following, Leading
from jaxspec.runtime.hosts import Hosts
from jaxspec.runtime.programs import Held, Key, Setting
from jaxspec.runtime.repertoire import RunnerConfig
from jaxspec.runtime.sharding import Placement, abstract, put
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.ring import empty_ring
from jaxspec.speculation.round import RoundSpec
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import Tier


class Holding:
    """Weights, state and executables of one engine.

    Args:
      model: the target.
      drafter: None where no tier drafts.
      draft_params: the drafter's parameters.
      config: what it can run.
      mesh: devices that share the weights and pools (runtime.sharding); None for the backend's first device alone.
      options: XLA's, for what they run (runtime.summing).

    Attributes:
      config: the target's.
    """

    def __init__(
        self, model: TargetModel, drafter: Drafter | None, draft_params: Any, geo: Geometry, config: RunnerConfig,
        mesh: Mesh | None = None, options: tuple[tuple[str, Any], ...] = (),
    ):  # fmt: skip
        graph, target = nnx.split(model)
        self.config = model.config
        self.geo, self.drafter = geo, drafter
        eos = tuple(sorted(config.eos))
        self.spec = RoundSpec(graph, model.config, geo, drafter, config.rejection, config.typical, eos)
        self._dtype: jnp.dtype = model.embedding[...].dtype
        self._place = Placement()
        if mesh is not None:
            self._place = Placement.of(
                mesh, target, draft_params, jax.eval_shape(self._empty_state), options, whole_drafter=geo.whole_drafter
            )
            target = put(target, self._place.target)
            draft_params = put(draft_params, self._place.draft_params)
        self._trees = {
            Held.TARGET: jax.tree.structure(target),
            Held.DRAFT: jax.tree.structure(draft_params),
            Held.STATE: jax.tree.structure(jax.eval_shape(self._empty_state)),
        }
        self.target, self.draft_params = target, draft_params
        self._can = config
        self._disturbed = False  # something else than rounds ran on the device since the last one
        self.reset()
        self._compiled: dict[Key, Any] = {}
        self._together: Leading | Following | None = None
        self._heard: dict[str, Callable[..., None]] = {}
        place = self._place
        held = {
            Held.TARGET: abstract(self._target, _leaves(place.target)),
            Held.DRAFT: abstract(self._draft_params, _leaves(place.draft_params)),
            Held.STATE: abstract(self._state, _leaves(place.state)),
        }
        self._setting = Setting(self.spec, place, held, self._trees, self._dtype)

    def _empty_state(self) -> DecodeState:
        draft = () if self.drafter is None else self.drafter.init_state(self.geo)
        layers = () if self.drafter is None else self.drafter.aux_layers
        ring = empty_ring(self.config, self.geo, layers)
        return DecodeState.empty(self.config, self.geo, self._dtype, draft, ring)

    def fresh_state(self) -> DecodeState:
        """A state of no request."""
        if self._place.mesh is None:
            return self._empty_state()
        # As a compiled function each device makes its own part; no device ever holds a whole pool.
        return jax.jit(self._empty_state, out_shardings=self._place.state)()

    # What is held, as leaves; these are made of them, and may be set.

    @property
    def target(self) -> Any:
        """The target's parameters."""
        return self._trees[Held.TARGET].unflatten(self._target)

    @target.setter
    def target(self, target: Any) -> None:
        self._target = tuple(jax.tree.leaves(target))

    @property
    def draft_params(self) -> Any:
        """The drafter's parameters."""
        return self._trees[Held.DRAFT].unflatten(self._draft_params)

    @draft_params.setter
    def draft_params(self, draft_params: Any) -> None:
        self._draft_params = tuple(jax.tree.leaves(draft_params))

    @property
    def has_draft_params(self) -> bool:
        """Whether the drafter has any."""
        return bool(self._draft_params)

    @property
    def draft_shards(self) -> int:
        """Devices that share the drafter's own weights; 0 where it has none."""
        shared = 1 if self._place.mesh is None or self.geo.whole_drafter else self._place.mesh.size
        return shared if self.has_draft_params else 0

    def staged(self, draft_params: Any) -> tuple[jax.Array, ...]:
        """Other parameters of the drafter, on the device, for `use_drafter`. From any thread.

        Raises:
          ValueError: they differ in structure, shape or type, so that the executables cannot take them.
        """
        if (tree := jax.tree.structure(draft_params)) != self._trees[Held.DRAFT]:
            raise ValueError(f"the drafter's parameters are {self._trees[Held.DRAFT]}, got {tree}")
        for new, old in zip(leaves := jax.tree.leaves(draft_params), self._draft_params, strict=True):
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ValueError(f"a parameter is {old.dtype}{list(old.shape)}, got {new.dtype}{list(new.shape)}")
        return tuple(put(new, old.sharding) for new, old in zip(leaves, self._draft_params, strict=True))

    def use_drafter(self, staged: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """What is dispatched from now on drafts with these; returns those before. Rounds in flight keep theirs."""
        before, self._draft_params = self._draft_params, staged
        return before

    @property
    def state(self) -> DecodeState:
        """What lives on the device between rounds."""
        return self._trees[Held.STATE].unflatten(self._state)

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = tuple(jax.tree.leaves(state))

    def put(self, x: Any) -> jax.Array:
        """A host array on the device, or whole on every one."""
        # not jnp.asarray: that compiles a copy for every new shape.
        return put(x, self._place.replicated)

    def reset(self) -> None:
        """Forgets every request."""
        self.state = self.fresh_state()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's weights that a step reads: all, but of an input embedding of its own only rows.

        As if every expert were touched.
        """
        total = sum(map(stored_bytes, self._target))
        embedding = self.config.vocab_size * self.config.hidden_size * self._dtype.itemsize
        return total if self.config.tie_word_embeddings else total - embedding

    def _params_for(self, tier: Tier) -> tuple[jax.Array, ...]:
        return self._draft_params if self.spec.takes_drafter(tier) else ()

    def _held(self, what: Held) -> tuple[jax.Array, ...]:
        return {Held.TARGET: self._target, Held.DRAFT: self._draft_params, Held.STATE: self._state}[what]

    # With other processes.

    def follow(self) -> None:
        """Calls what the first process calls; returns when that has closed its engine.

        Raises:
          HostLostError: it, or another process, is gone.
          ValueError: this process follows none.
        """
        if not isinstance(self._together, Following):
            raise ValueError("follow() is for the other processes of an engine that several share; this one leads")

        def keep(state: tuple[jax.Array, ...]) -> None:
            self._state = state

        self._together.run(self._held, self._compiled.__getitem__, keep, self._heard)

    @property
    def hosts(self) -> Hosts | None:
        """The processes that share this engine; None: this one alone."""
        return None if self._together is None else self._together.hosts

    def hear(self, name: str, does: Callable[..., None]) -> None:
        """In a process that follows: what the first one's `tell` of that name does here, between two calls."""
        self._heard[name] = does

    def tell(self, name: str, **facts: Any) -> None:
        """Has the processes that follow, if there are any, do what they `hear` under a name.

        Raises:
          HostLostError: one is gone.
        """
        if self._together is not None:
            self._together.tell(name, facts)

    def leave(self) -> None:
        """Ends the engine in the processes that follow, if there are any."""
        if isinstance(self._together, Leading):
            self._together.hosts.close()

    def _call(self, key: Key, *args: Any) -> Any:
        """What an executable returns; it takes what it holds first, as its `Lowering` says."""
        executable = self._compiled[key]
        return executable(*args) if self._together is None else self._together.call(key, executable, args)

    def _run_once(self, key: Key, executable: Any) -> None:
        zeros = lambda x: put(np.zeros(x.shape, x.dtype), x.sharding)
        lowering = key.lowering(self._setting)

        def value(arg: Any) -> Any:
            if isinstance(arg, Held):
                return self._held(arg)
            return self.put(arg) if isinstance(arg, np.ndarray) else jax.tree.map(zeros, arg)

        out = executable(*map(value, lowering.args))
        if lowering.donated:
            # The state alone, or before other results.
            self._state = out if isinstance(out[0], jax.Array) else out[0]
        self._disturbed = True


def _leaves(shardings: Any) -> tuple[Any, ...] | None:
    return None if shardings is None else tuple(jax.tree.leaves(shardings))
