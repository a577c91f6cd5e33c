"""Later weights of a drafter that is served: what may take its place without compiling anything.

Owns the comparison with the drafter that was loaded at the start: kind, configuration, and every array's shape. Must
not know engines, nor when weights are exchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.checkpointing import heads
from jaxspec.checkpointing.tensors import read_json
from jaxspec.drafters import registry
from jaxspec.drafters.directories import load_drafter
from jaxspec.models.base import TargetModel


class Light:
    """Of a target no more than drafters are loaded for: its configuration and its tables."""

    def __init__(self, target: TargetModel):
        self.config, self.embedding, self.lm_head = target.config, target.embedding, target.lm_head


class Successors:
    """Reads drafters that can take the place of one.

    Args:
      kind: its name. directory: where it came from.
      module: the served drafter, as `load_drafter` gave it; nothing of it is kept alive.
      target: whose tables a drafter may share; they are kept.
      dtype: that it was loaded in.
    """

    def __init__(self, kind: str, directory: Path, module: nnx.Module, target: TargetModel, dtype: jnp.dtype):
        self._kind, self._dtype, self._target = kind, dtype, Light(target)
        self._keys = frozenset(_keys(read_json(directory / "config.json")))
        self._config, self._shapes = getattr(module, "config", None), _shapes(module)
        self._graph = nnx.graphdef(module)

    def load(self, directory: str | Path) -> Any:
        """A module from a directory, for the engine to bind as it bound the first.

        Raises:
          ValueError: it cannot be read, or is of another kind, configuration or shape; names what and both values.
        """
        directory = Path(directory)
        target: Any = self._target
        module = load_drafter(self._kind, directory, target, self._dtype)
        kind = registry.find(self._kind)
        if kind.whole_model or kind.within(directory):  # heads' readers know all their fields
            unknown = sorted(set(_keys(read_json(directory / "config.json"))) - heads.LAYER_FIELDS - self._keys)
            if unknown:
                raise ValueError(
                    f"{directory / 'config.json'}: {unknown} are neither in the served drafter's config.json nor known "
                    "to leave what it computes alone"
                )
        self._compare(directory, module)
        return module

    def _compare(self, directory: Path, module: nnx.Module) -> None:
        config = getattr(module, "config", None)
        if dataclasses.is_dataclass(config) and type(config) is type(self._config):
            for field in dataclasses.fields(config):
                new, served = getattr(config, field.name), getattr(self._config, field.name)
                if new != served:
                    raise ValueError(f"{directory}: {field.name} is {new!r}, the served drafter's is {served!r}")
        shapes = _shapes(module)
        for name in dict.fromkeys([*self._shapes, *shapes]):
            new, served = shapes.get(name, "absent"), self._shapes.get(name, "absent")
            if new != served:
                raise ValueError(f"{directory}: {name} is {new}, the served drafter's is {served}")
        if nnx.graphdef(module) != self._graph:
            raise ValueError(f"{directory}: the drafter is built otherwise than the served {type(module).__name__}")


def _shapes(module: nnx.Module) -> dict[str, str]:
    """What each array of a module is, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(module), is_leaf=lambda x: isinstance(x, nnx.Variable))
    return {
        ".".join(str(getattr(key, "key", key)) for key in path): (
            f"{type(x).__name__} {' '.join(f'{leaf.dtype.name}{list(leaf.shape)}' for leaf in jax.tree.leaves(x))}"
        )
        for path, x in leaves
    }


def _keys(config: Mapping[str, Any]) -> Iterator[str]:
    """The names of a configuration's values, at whatever depth; one that is null says nothing."""
    for key, value in config.items():
        if value is None:
            continue
        yield key
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                yield from _keys(part)
