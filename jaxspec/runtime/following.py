"""One process decides, the others do the same: calls of executables as messages, and what makes calls of them again.

A call is named by its executable. Its arrays of the host go with it. What the runners hold (weights, state) each
process has its own part of; what calls just before have left on the devices is named by its place among their results.
Between calls the others are told of what else changes what is held, each notice by a name. Must not know requests, nor
how messages travel (`hosts`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes  # registers bfloat16 under its name  # noqa: F401
import numpy as np

from jaxspec.runtime.hosts import Hosts
from jaxspec.runtime.programs import Held, Key, Lowering, Setting

_HEAD = struct.Struct("<HB")
#: In place of an executable's number.
_NOTICE = 2**16 - 1
_ARRAY, _FILL, _KEPT = range(3)
_KIND, _INDEX, _SHAPE = struct.Struct("<B8sB"), struct.Struct("<BH"), struct.Struct("<I")
#: Arrays of more bytes are looked at for being of one value throughout, such as rows of nobody.
_LARGE = 4096


class Calls:
    """How calls are written and read; the same in every process.

    Args:
      keys: of all executables, in the same order everywhere.
    """

    def __init__(self, setting: Setting, keys: Sequence[Key]):
        self._setting, self._keys = setting, list(keys)
        assert len(self._keys) < _NOTICE
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        self._lowerings: dict[Key, Lowering] = {}
        self._kept: list[jax.Array] = []

    def lowering(self, key: Key) -> Lowering:
        """Of a key, made once."""
        if key not in self._lowerings:
            self._lowerings[key] = key.lowering(self._setting)
        return self._lowerings[key]

    def written(self, key: Key, args: Sequence[Any]) -> bytes:
        """A call as a message. What it does not use of the calls before is let go."""
        given = zip(self.lowering(key).args, args, strict=True)
        leaves = [leaf for form, arg in given if _crosses(form) for leaf in jax.tree.leaves(arg)]
        places = {id(array): place for place, array in enumerate(self._kept)}
        parts = [_HEAD.pack(self._numbers[key], len(leaves))]
        uses = False
        for leaf in leaves:
            if id(leaf) in places:
                uses = True
                parts.append(_INDEX.pack(_KEPT, places[id(leaf)]))
            else:
                parts += _written(np.asarray(leaf))
        if not uses:
            self._kept = []
        return b"".join(parts)

    def read(self, message: bytearray, held: Callable[[Held], Any]) -> tuple[Key, list[Any]]:
        """The key and the arguments of a message."""
        number, count = _HEAD.unpack_from(message)
        key, at, leaves, uses = self._keys[number], _HEAD.size, [], False
        for _ in range(count):
            if message[at] == _KEPT:
                leaves.append(self._kept[_INDEX.unpack_from(message, at)[1]])
                at, uses = at + _INDEX.size, True
            else:
                leaf, at = _read(message, at)
                leaves.append(leaf)
        if not uses:
            self._kept = []
        args, rest = [], iter(leaves)
        for form in self.lowering(key).args:
            if isinstance(form, Held):
                args.append(held(form))
            elif isinstance(form, tuple):  # in place of parameters that it does not read
                args.append(())
            else:
                structure = jax.tree.structure(form)
                args.append(structure.unflatten([next(rest) for _ in range(structure.num_leaves)]))
        return key, args

    def ran(self, key: Key, results: Any) -> tuple[jax.Array, ...] | None:
        """After a call: keeps what a later one may be given; returns the new state, if there is one."""
        state, others = None, results
        if self.lowering(key).donated:
            # The state alone, or before other results.
            state, others = (results, ()) if isinstance(results[0], jax.Array) else (results[0], results[1:])
        self._kept += jax.tree.leaves(others)
        return state


class Leading:
    """Calls executables here, and has every other process call them."""

    def __init__(self, hosts: Hosts, calls: Calls):
        self.hosts, self._calls = hosts, calls

    def call(self, key: Key, executable: Any, args: Sequence[Any]) -> Any:
        """What the executable returns.

        Raises:
          HostLostError: a process is gone.
        """
        self.hosts.send(self._calls.written(key, args))
        results = executable(*args)
        self._calls.ran(key, results)
        return results

    def tell(self, name: str, facts: Mapping[str, Any]) -> None:
        """Has every other process do what it has under a name, between the calls before and those after.

        Args:
          facts: what JSON can say.

        Raises:
          HostLostError: a process is gone.
        """
        self.hosts.send(_HEAD.pack(_NOTICE, 0) + json.dumps([name, facts]).encode())


class Following:
    """In a process that follows nothing is called but what the first one tells."""

    def __init__(self, hosts: Hosts, calls: Calls):
        self.hosts, self._calls = hosts, calls

    def call(self, key: Key, executable: Any, args: Sequence[Any]) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError("this process follows the first one, which alone takes requests: call follow()")

    def tell(self, name: str, facts: Mapping[str, Any]) -> None:
        """Raises RuntimeError."""
        raise RuntimeError(f"{name!r} is for the first process to say, which this one follows")

    def run(
        self, held: Callable[[Held], Any], compiled: Callable[[Key], Any], keep: Callable[[Any], None],
        heard: Mapping[str, Callable[..., None]],
    ) -> None:  # fmt: skip
        """Calls what the first process calls, until that ends the engine.

        Args:
          held: what this process holds. compiled: executables by key. keep: takes every new state.
          heard: what is done for each notice, called with its facts.

        Raises:
          HostLostError: the first process is gone.
        """
        while (message := self.hosts.receive()) is not None:
            if _HEAD.unpack_from(message)[0] == _NOTICE:
                name, facts = json.loads(message[_HEAD.size :])
                heard[name](**facts)
                continue
            key, args = self._calls.read(message, held)
            try:
                state = self._calls.ran(key, compiled(key)(*args))
            except Exception as error:
                self.hosts.blame(error)
                raise
            if state is not None:
                keep(state)
            del args


def _crosses(form: Any) -> bool:
    """Whether an argument goes with the call."""
    return not isinstance(form, Held | tuple)


def _written(array: np.ndarray) -> list[bytes]:
    flat = np.ascontiguousarray(array).reshape(-1)
    kind = _ARRAY
    if flat.nbytes > _LARGE and (flat == flat[0]).all():
        kind, flat = _FILL, flat[:1]
    head = _KIND.pack(kind, array.dtype.name.encode(), array.ndim)
    return [head, *map(_SHAPE.pack, array.shape), flat.tobytes()]


def _read(message: bytearray, at: int) -> tuple[np.ndarray, int]:
    kind, name, ndim = _KIND.unpack_from(message, at)
    at += _KIND.size
    shape = tuple(_SHAPE.unpack_from(message, at + i * _SHAPE.size)[0] for i in range(ndim))
    at += ndim * _SHAPE.size
    dtype = np.dtype(name.rstrip(b"\0").decode())
    count = 1 if kind == _FILL else int(np.prod(shape, dtype=np.int64))
    flat = np.frombuffer(message, dtype, count, at)
    at += flat.nbytes
    return (np.full(shape, flat[0]) if kind == _FILL else flat.reshape(shape)), at
