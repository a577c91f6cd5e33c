"""Tensor parallelism: where the arrays of an engine lie on a mesh, and what does not fit one.

Owns the mesh, the shardings of weights and DecodeState, and the abstract arguments with which
a round compiles for devices that are not there. Layers stay as they are laid out by
`models.layouts.tensor_parallel`; the partitioning itself is XLA's, but for attention, which
`cache.TreeKV` maps over the heads. Must not know policies or requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.models import registry
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.sharded import SPLIT, TENSOR_AXIS, part_of, parts_of
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.layouts import Admission, Batch, Budget, Chunks, plain_calibration
from jaxspec.speculation.mixed import mixed_fn
from jaxspec.speculation.packed import packed_fn
from jaxspec.speculation.round import Drafted, Forward, RoundSpec, round_fn
from jaxspec.speculation.several import several_fn
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import Tier
from pallas_kernels import compilers
from pallas_kernels.small_batch.packed import Packed


def check_devices(kernels: str | None = None) -> None:
    """Whether there is a device to run on.

    Args:
      kernels: whose are asked for (`EngineConfig.kernels`).

    Raises:
      ValueError: JAX finds none of those that it is told to use, or kernels are asked for that run on others.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as e:  # the latter where a platform has no plugin
        why = str(e) or "no such device, or no plugin for it, is installed"
        raise ValueError(f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')!r}: {why}") from e
    if kernels in ("gpu", "tpu") and kernels != (backend := jax.default_backend()):
        raise ValueError(
            f"kernels {kernels!r} run on a {kernels.upper()}, and this is a {backend.upper()}: leave it out"
        )


def tensor_mesh(shards: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of one axis over the first `shards` devices; XLA partitions what runs on it.

    Args:
      devices: by default the backend's; those of a topology description compile for absent hardware.

    Raises:
      ValueError: more shards than devices.
    """
    devices = _own_devices(shards) if devices is None else devices
    if shards > len(devices):
        raise ValueError(f"tensor_parallel must be at most the {len(devices)} devices at hand, got {shards}")
    return Mesh(np.asarray(devices[:shards]), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def spans_processes(shards: int) -> bool:
    """Whether so many devices are those of several processes, which then run one engine together."""
    return shards > jax.local_device_count() and jax.process_count() > 1


def _own_devices(shards: int) -> Sequence[Any]:
    """This process's devices, or as many of each process as make so many.

    Raises:
      ValueError: the processes cannot share evenly.
    """
    if not spans_processes(shards):
        return jax.local_devices()
    count = jax.process_count()
    by_process = [[device for device in jax.devices() if device.process_index == process] for process in range(count)]
    if shards % count:
        raise ValueError(f"tensor_parallel must be a multiple of the {count} processes, got {shards}")
    least = min(map(len, by_process))
    if shards > least * count:
        raise ValueError(f"tensor_parallel must be at most {least} devices of {count} processes, got {shards}")
    return [device for devices in by_process for device in devices[: shards // count]]


def put(x: Any, sharding: Any) -> Any:
    """jax.device_put of trees of arrays; of those that every process has whole, each puts its own devices' parts.

    device_put itself would have the processes compare what they put.

    Args:
      sharding: one for all, or a tree of them; None: the backend's first device.
    """
    if not any(isinstance(s, NamedSharding) and not s.is_fully_addressable for s in jax.tree.leaves(sharding)):
        return jax.device_put(x, sharding)
    if isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda leaf: _own_parts(leaf, sharding), x)
    return jax.tree.map(_own_parts, x, sharding)


def _own_parts(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)  # on all processes' devices already, as what heads share with targets
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def check_divides(cfg: ModelConfig, shards: int) -> None:
    """Refuses a target that cannot be split evenly: its family says what must divide.

    Raises:
      ValueError: names the first such field and both values.
    """
    for name in (*registry.of(cfg).divides, "vocab_size"):
        if getattr(cfg, name) % shards:
            raise ValueError(f"tensor_parallel must divide the target's {name} {getattr(cfg, name)}, got {shards}")


def check_four_bits(target: nnx.Module, shards: int) -> None:
    """Refuses weights of 4 bits on several CPU devices where JAX's executables do not take them as they lie (0.10).

    Raises:
      ValueError: names the versions that do.
    """
    if shards == 1 or jax.default_backend() != "cpu":
        return
    some: Any = jnp.zeros((2,), jnp.int4)
    if some.format.layout.sub_byte_element_size_in_bits:
        return
    if any(leaf.dtype in (jnp.int4, jnp.float4_e2m1fn) for leaf in jax.tree.leaves(nnx.state(target))):
        raise ValueError(
            f"tensor_parallel={shards} on CPUs does not serve weights of 4 bits with JAX {jax.__version__}; take JAX "
            "0.12, or weights of 8 bits"
        )


@contextlib.contextmanager
def host_memory() -> Iterator[None]:
    """Inside, new arrays lie in the host's memory, so that no device has to hold a whole model before it is split."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # jax_platforms leaves the CPU out: then the model must fit one device while loading
        yield
        return
    with jax.default_device(cpu):
        yield


class Sharing:
    """The devices of a mesh as loading sees them: each takes its own part (`checkpointing.spread.Devices`).

    Attributes:
      shards: devices of all processes.
      own: which of them are this process's.
      sums: by what they add up their parts.
    """

    def __init__(self, mesh: Mesh, sums: str):
        self._mesh, self.shards, self.sums = mesh, mesh.shape[TENSOR_AXIS], sums
        self._devices = list(mesh.devices.flat)
        self.own = [i for i, device in enumerate(self._devices) if device.process_index == jax.process_index()]

    def put(self, part: Any, shard: int) -> Any:
        """A tree of arrays on one of its own devices."""
        return jax.device_put(part, self._devices[shard])

    def joined(self, like: Any, axis: int | None, parts: Sequence[Any]) -> Any:
        """One tree of arrays over the mesh from the parts of the own devices, in their order.

        Args:
          like: shapes of the whole. axis: that parts are along, where it divides; None: each is the whole.
        """

        def one(whole: jax.ShapeDtypeStruct, *own: jax.Array) -> jax.Array:
            sharding = NamedSharding(self._mesh, part_of(axis, whole, self.shards))
            return jax.make_array_from_single_device_arrays(whole.shape, sharding, list(own))

        return jax.tree.map(one, like, *parts)


def parameter_shardings(mesh: Mesh, params: Any) -> Any:
    """NamedShardings of parameters laid out by `tensor_parallel`, or of their shapes, in their structure."""
    shards = mesh.shape[TENSOR_AXIS]
    is_param = lambda x: isinstance(x, nnx.Variable)

    def of(x: Any) -> Any:
        axis = x.get_metadata(SPLIT, None) if is_param(x) else None
        place = lambda value: jax.tree.map(functools.partial(NamedSharding, mesh), parts_of(axis, value, shards))
        return jax.tree.map(place, x, is_leaf=lambda value: isinstance(value, Packed))

    return jax.tree.map(of, params, is_leaf=is_param)


def state_shardings(mesh: Mesh, state: Any, *, whole: bool = False) -> Any:
    """NamedShardings of a DecodeState or a part of one, or of its shapes, in its structure.

    Pools are split over their KV heads where the mesh divides them, as `TreeKV` does with the
    heads of attention; what else there is is small and is replicated.

    Args:
      whole: pools are replicated, too.
    """
    shards = mesh.shape[TENSOR_AXIS]

    def of(path: Any, x: Any) -> NamedSharding:
        is_pool = bool(path) and getattr(path[-1], "name", None) == "pages"
        split = is_pool and not whole and x.shape[1] % shards == 0
        return NamedSharding(mesh, PartitionSpec(None, TENSOR_AXIS) if split else PartitionSpec())

    return jax.tree_util.tree_map_with_path(of, state)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Shardings of everything that enters or leaves an executable. Without a mesh: the backend's first device.

    Attributes:
      target, draft_params, state: NamedShardings, in the structure of what they place.
      logits: of [B, N, V]. replicated: a whole copy on every device.
      options: XLA's, for what is compiled, besides those of the devices.
    """

    mesh: Mesh | None = None
    target: Any = None
    draft_params: Any = None
    state: Any = None
    logits: NamedSharding | None = None
    replicated: NamedSharding | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def compiler_options(self) -> tuple[tuple[str, Any], ...]:
        """All of XLA's for what is compiled: those of its devices, and `options`."""
        device = jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        return (*compilers.options(device.platform, device.device_kind).items(), *self.options)

    @property
    def spans(self) -> bool:
        """Whether several processes share the mesh."""
        return self.replicated is not None and not self.replicated.is_fully_addressable

    @classmethod
    def of(
        cls, mesh: Mesh, target: Any, draft_params: Any, state: DecodeState, options: tuple[tuple[str, Any], ...] = (),
        *, whole_drafter: bool = False,
    ) -> Placement:  # fmt: skip
        """The placement of parameters laid out by `tensor_parallel`, or of their shapes.

        Args:
          whole_drafter: see Geometry.
        """
        states = dataclasses.replace(
            state_shardings(mesh, dataclasses.replace(state, draft=())),
            draft=state_shardings(mesh, state.draft, whole=whole_drafter),
        )
        params = functools.partial(parameter_shardings, mesh)
        logits = NamedSharding(mesh, PartitionSpec(None, None, TENSOR_AXIS))
        whole = NamedSharding(mesh, PartitionSpec())
        return cls(mesh, params(target), params(draft_params), states, logits, whole, options)

    def round_results(self, sampled: bool) -> Any:
        """Shardings of what a round returns; a prefill's are those of a sampled one."""
        return self.state, self.replicated, (self.logits, self.replicated) if sampled else None

    def round_parts(self, drafted: Drafted, forward: Forward) -> tuple[Drafted, Forward]:
        """The shapes that pass between the parts of a guided round, each with its sharding."""
        if self.mesh is None or self.logits is None:
            return drafted, forward
        heads = self.replicated
        if forward.kv_LBNGc.shape[3] % self.mesh.shape[TENSOR_AXIS] == 0:
            heads = NamedSharding(self.mesh, PartitionSpec(None, None, None, TENSOR_AXIS))
        lie = lambda tree, sharding: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )
        whole = lambda tree: lie(tree, self.replicated)
        aux, touched = whole(forward.aux_BNA), whole(forward.touched)
        parts = Forward(lie(forward.logits_BNV, self.logits), lie(forward.kv_LBNGc, heads), aux, touched)
        return whole(drafted), parts

    def ambient(self) -> contextlib.AbstractContextManager[Any]:
        """What to trace in; it belongs to the thread that traces."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def abstract(tree: Any, shardings: Any = None) -> Any:
    """The shapes of arrays, with the shardings that a compiled executable expects them in."""
    if shardings is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


# A whole round of a model that is not there.


class _Core(Protocol):
    params: Any


_SomeCore = TypeVar("_SomeCore", bound=_Core)


def abstract_core(build: Callable[[], _SomeCore]) -> _SomeCore:
    """The draft core that `build` makes, with shapes for parameters: nothing is computed or allocated."""
    cores: list[_SomeCore] = []

    def params() -> Any:
        cores.append(build())
        return cores[0].params

    shapes = jax.eval_shape(params)
    cores[0].params = shapes
    return cores[0]


@dataclasses.dataclass(frozen=True)
class AbstractRound:
    """A round's function and its arguments as sharded shapes, ready to be lowered.

    Attributes:
      arguments: of a round: (target, drafter's parameters, DecodeState, Batch).
    """

    spec: RoundSpec
    placement: Placement
    arguments: tuple[Any, Any, DecodeState, Any]

    def lower(
        self, tier: Tier, *, sampled: bool = False, rounds: int = 1, tokens: int | None = None,
        chunks: PrefillShape | None = None, platforms: Sequence[str] | None = None,
    ) -> Any:  # fmt: skip
        """Traces and lowers the round as the runner does: the state donated, every result's sharding given.

        Args:
          rounds: so many, one after the other.
          tokens: of a packed round.
          chunks: of a mixed round, which is neither packed nor repeated.
          platforms: to lower for, where the mesh's devices are a topology's and not the backend's.
        """
        more: tuple[Any, ...] = ()
        results = self.placement.round_results(sampled and rounds == 1)
        takes_drafter = self.spec.takes_drafter(tier)
        if chunks is not None:
            fn = mixed_fn(self.spec, tier, sampled, chunks.size, chunks.width)
            geo = self.spec.geo
            given = Chunks.of(geo, chunks.rows).array, Admission.packed(geo, geo.most_new(chunks.rows))
            more = abstract(given, (self.placement.replicated,) * 2)
            results, takes_drafter = (*results, *self.placement.round_results(True)[1:]), True
        elif tokens is None:
            fn = round_fn(self.spec, tier, sampled)
        else:
            fn = packed_fn(self.spec, tier, sampled, tokens)
            given = plain_calibration(self.spec.geo.max_depth), Budget.even(self.arguments[3].shape[0])
            more = abstract(given, (self.placement.replicated,) * 2)
        fn = fn if rounds == 1 else several_fn(fn, rounds)
        jitted = jax.jit(fn, donate_argnums=2, out_shardings=results)
        target, draft_params, state, batch = self.arguments
        with self.placement.ambient():
            traced = jitted.trace(target, draft_params if takes_drafter else (), state, batch, *more)
            return traced.lower(lowering_platforms=None if platforms is None else tuple(platforms))


def abstract_round(
    cfg: ModelConfig, geo: Geometry, mesh: Mesh, bucket: int, *, dtype: jnp.dtype, drafter: Drafter | None = None,
    draft_params: Any = (), rejection: bool = False, change: Callable[[TargetModel], TargetModel] = lambda model: model,
) -> AbstractRound:  # fmt: skip
    """A round at any size, without its weights: for compilers, and for counting bytes.

    Args:
      bucket: rows of the batch.
      change: what is done to the model before it is laid out for several devices.
      drafter, draft_params: from an `abstract_core`, laid out by `tensor_parallel`.

    Raises:
      ValueError: the mesh does not divide the model.
    """
    shards = mesh.shape[TENSOR_AXIS]
    check_divides(cfg, shards)
    laid_out = lambda model: tensor_parallel(model, shards) if shards > 1 else model
    model = nnx.eval_shape(lambda: laid_out(change(registry.build(cfg, dtype))))
    graph, target = nnx.split(model)

    def empty() -> DecodeState:
        return DecodeState.empty(cfg, geo, dtype, () if drafter is None else drafter.init_state(geo))

    state = jax.eval_shape(empty)
    place = Placement.of(mesh, target, draft_params, state, whole_drafter=geo.whole_drafter)
    batch = jax.ShapeDtypeStruct((bucket, Batch.width(geo)), jnp.int32, sharding=place.replicated)
    arguments = (
        abstract(target, place.target), abstract(draft_params, place.draft_params), abstract(state, place.state), batch,
    )  # fmt: skip
    return AbstractRound(RoundSpec(graph, cfg, geo, drafter, rejection), place, arguments)
