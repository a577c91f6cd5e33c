"""A model's weights straight onto the devices that share it: each device's part is read, and no other byte.

Owns the way from a checkpoint's tensors to the arrays of `layouts.tensor_parallel`, device after device, so that the
host never holds more than one tensor's part besides what is on devices. Whole, and on every device, are small tensors
and what devices cannot share; a layer's experts in few bits are read whole, then cut. Must not know how devices are
found (`runtime.sharding`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.checkpointing import quantised
from jaxspec.checkpointing.tensors import TensorReader
from jaxspec.models.base import TargetModel
from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.layouts import divided, mark
from jaxspec.models.quantised import Quantised
from jaxspec.models.weight_map import Part, Weight

_log = logging.getLogger(__name__)


class Devices(Protocol):
    """Those that share a model, over one process or several.

    Attributes:
      shards: how many.
      own: numbers of those that are this process's.
      sums: by what they add up their parts of products (`models.sharded`).
    """

    @property
    def shards(self) -> int: ...
    @property
    def own(self) -> Sequence[int]: ...
    @property
    def sums(self) -> str: ...

    def put(self, part: Any, shard: int) -> Any:
        """A tree of arrays on one of its own devices."""
        ...

    def joined(self, like: Any, axis: int | None, parts: Sequence[Any]) -> Any:
        """One tree of arrays over all devices.

        Args:
          like: shapes of the whole. axis: that parts are along; None: every part is the whole.
          parts: of the own devices, in their order; where `axis` does not divide an array, that is whole in each.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _Shared:
    """How devices share a parameter.

    Attributes:
      widths: see `models.base.Split`.
    """

    axis: int
    widths: tuple[int, ...]

    def part(self, size: int, devices: Devices, shard: int) -> Part:
        return Part.of(self.axis, size, devices.shards, shard, self.widths)


def load(
    build: Callable[[], TargetModel], weights_of: Callable[[TargetModel], Iterable[Weight]], reader: TensorReader,
    quantisation: quantised.Read | None, devices: Devices, check_copies: Callable[[Weight, Part | None, Any], None],
) -> TargetModel:  # fmt: skip
    """A model that devices share, as `tensor_parallel` lays it out.

    Args:
      build: makes the model with placeholders. weights_of: its map.
      check_copies: of a weight, a part of it and the value that was read.

    Raises:
      ValueError: see `hf.load_weights`.
    """
    few = {} if quantisation is None else _experts(nnx.eval_shape(build), weights_of, reader, quantisation, devices)
    shared: dict[int, _Shared] = {}

    def laid_out() -> TargetModel:
        model = build()
        numbers: dict[int, int] = {}
        for number, w in enumerate(weights_of(model)):
            numbers[id(w.param)] = number
            if number in few:  # what a model has in few bits, devices may have to have whole
                w.param.set_value(jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), few[number]))
        for split in divided(model, devices.shards):
            param = getattr(split.owner, split.name)
            mark(param, split.axis, devices.sums)
            shared[numbers[id(param)]] = _Shared(split.axis, tuple(split.widths))
        return model

    model = nnx.eval_shape(laid_out)
    head = None if model.lm_head is None else model.lm_head.kernel
    for number, w in enumerate(weights_of(model)):
        if number in few:
            w.param.set_value(few[number])
            continue
        w = w.as_stored(reader.names, reader.shape)
        how = shared.get(number)
        kernel = None
        if quantisation is not None and w.linear:
            kernel = _quantised(quantisation, reader, w, how, devices, whole=w.param is head)
        value = _plain(reader, w, how, devices, check_copies) if kernel is None else kernel
        w.take(jax.block_until_ready(value))  # what is under way to a device, the host still holds
    _log.info("read %.1f MiB of weights for %d of %d devices", reader.bytes_read / 2**20, len(devices.own),
              devices.shards)  # fmt: skip
    return model


def _experts(
    model: TargetModel, weights_of: Callable[[TargetModel], Iterable[Weight]], reader: TensorReader,
    quantisation: quantised.Read, devices: Devices,
) -> dict[int, Any]:  # fmt: skip
    """Experts in few bits, by the number of their weight, where the devices have them; shapes, and they, of the model's
    mixtures say how these share them."""
    mixtures = [node for _, node in nnx.iter_graph(model) if isinstance(node, MixtureOfExperts)]
    of = {id(kernel): mixture for mixture in mixtures for kernel in (mixture.gate_up, mixture.down)}
    read: dict[int, tuple[int, Any]] = {}  # of one mixture, by its variable
    found: dict[int, Any] = {}
    for number, w in enumerate(list(weights_of(model))):  # before any of them has other shapes
        if (mixture := of.get(id(w.param))) is None:
            continue
        kernel = quantised.read_kernel(quantisation, reader, w.as_stored(reader.names, reader.shape))
        if kernel is not None:
            w.param.set_value(_shapes(kernel))
            read[id(w.param)] = number, kernel
        if w.param is mixture.down:  # the second of both
            splits = mixture.splits(devices.shards)
            how = {id(getattr(mixture, split.name)): _Shared(split.axis, tuple(split.widths)) for split in splits}
            for variable, (at, kernel) in read.items():
                found[at] = _cut(kernel, how.get(variable), devices)
            read.clear()
    return found


def _cut(kernel: Any, how: _Shared | None, devices: Devices) -> Any:
    """What was read whole, where the devices have it."""
    if how is None:
        return _whole(kernel, devices)

    def part(shard: int) -> Any:
        return devices.put(jax.tree.map(lambda x: _of_device(x, how, devices, shard), kernel), shard)

    return jax.block_until_ready(devices.joined(_shapes(kernel), how.axis, [part(shard) for shard in devices.own]))


def _of_device(whole: jax.Array, how: _Shared, devices: Devices, shard: int) -> jax.Array:
    """A device's part of an array; the whole where there are none."""
    if how.axis >= whole.ndim or whole.shape[how.axis] % devices.shards:
        return whole
    spans = Part.of(how.axis, whole.shape[how.axis], devices.shards, shard, how.widths).spans
    return jnp.concatenate([jax.lax.slice_in_dim(whole, *span, axis=how.axis) for span in spans], axis=how.axis)


def _plain(
    reader: TensorReader, w: Weight, how: _Shared | None, devices: Devices,
    check_copies: Callable[[Weight, Part | None, Any], None],
) -> Any:  # fmt: skip
    like = jax.ShapeDtypeStruct(w.param.shape, w.param.get_value().dtype)

    def read(part: Part | None) -> jax.Array:
        value = w.join([reader.get(piece.name, piece.shape, part=piece.part) for piece in w.pieces(part)])
        check_copies(w, part, value)
        return value

    if how is None:
        return _whole(read(None), devices)
    size = like.shape[how.axis]
    parts = [devices.put(read(how.part(size, devices, shard)), shard) for shard in devices.own]
    return devices.joined(like, how.axis, parts)


def _quantised(
    quantisation: quantised.Read, reader: TensorReader, w: Weight, how: _Shared | None, devices: Devices, whole: bool
) -> Any:
    """A kernel in few bits, or None.

    Args:
      whole: stays on the host; draft heads may lend some of its columns.
    """
    if how is None or whole:
        kernel = quantised.read_kernel(quantisation, reader, w)
        return kernel if kernel is None or whole else _whole(kernel, devices)
    size, parts, like = w.param.shape[how.axis], [], None
    for shard in devices.own:
        part = how.part(size, devices, shard)
        kernel = quantised.read_kernel(quantisation, reader, w, part)
        if kernel is None:
            return None
        assert isinstance(kernel, Quantised)
        values = jax.ShapeDtypeStruct(w.param.shape, kernel.values.dtype)
        like = dataclasses.replace(_shapes(kernel), values=values)
        parts.append(devices.put(_own(kernel, how, devices, shard), shard))
    return devices.joined(like, how.axis, parts)


def _own(kernel: Quantised, how: _Shared, devices: Devices, shard: int) -> Quantised:
    """A device's values with its part of what was read whole."""
    part = lambda whole: None if whole is None else _of_device(whole, how, devices, shard)
    own = {name: part(getattr(kernel, name)) for name in ("scale", "zero", "order")}
    return dataclasses.replace(kernel, **own)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _whole(tree: Any, devices: Devices) -> Any:
    return devices.joined(_shapes(tree), None, [devices.put(tree, shard) for shard in devices.own])
