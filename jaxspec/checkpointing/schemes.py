"""What a checkpoint's `quantization_config` says of its weights; what is not served is refused by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the weights of a module are quantised, as a config says it.

    Attributes:
      kind: "int" or "float". bits: 4 or 8.
      group: inputs that share a scale; None: all of them.
      block: (outputs, inputs) that share one; None: no blocks. whole: the whole tensor has one scale.
    """

    kind: str
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    whole: bool = False


def scheme_of(weights: Any, group: str) -> Scheme:
    """The weights of one of compressed-tensors' config_groups.

    Raises:
      ValueError: what is not served; names it.
    """
    where = f"config.json: quantization_config.config_groups.{group}.weights"
    if not isinstance(weights, Mapping):
        raise ValueError(f"{where} must say how weights are quantised, got {weights!r}")
    kind, bits, size = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 4), ("float", 8)):
        raise ValueError(f"{where}: {kind!r} of {bits!r} bits is not served; served are int and float of 4 and 8")
    if weights.get("dynamic"):
        raise ValueError(f"{where}: dynamic must be false, got {weights['dynamic']!r}")
    if (kind, bits) == ("float", 4) and weights.get("strategy") != "tensor_group":
        raise ValueError(f"{where}: float of 4 bits needs strategy 'tensor_group', got {weights.get('strategy')!r}")
    strategy = weights.get("strategy") or ("group" if (size or 0) > 0 else "channel" if size == -1 else "tensor")
    if strategy == "group" or (kind, bits) == ("float", 4):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{where}: strategy {strategy!r} needs a positive group_size, got {size!r}")
        return Scheme(kind, bits, group=size)
    if strategy == "block":
        return Scheme(kind, bits, block=pair_of(weights.get("block_structure"), "block_structure"))
    if strategy not in ("tensor", "channel"):
        raise ValueError(f"{where}: strategy must be tensor, channel, group or block, got {strategy!r}")
    return Scheme(kind, bits, whole=strategy == "tensor")


def targets_of(group: Any, name: str) -> Sequence[str]:
    """What one of compressed-tensors' config_groups is for.

    Raises:
      ValueError: no list of names.
    """
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise ValueError(
            f"config.json: quantization_config.config_groups.{name}.targets must be names, got {targets!r}"
        )
    return targets


def matches(module: str, names: Sequence[str]) -> bool:
    """Names of modules, "Linear" for all, and regular expressions after "re:"."""
    return any(
        re.match(n.removeprefix("re:"), module) is not None if n.startswith("re:") else n in (module, "Linear")
        for n in names
    )


def bits_of(bits: Any, served: Sequence[int]) -> int:
    """Bits of a value.

    Raises:
      ValueError: others than are served.
    """
    if bits not in served:
        raise ValueError(f"config.json: quantization_config.bits must be one of {list(served)}, got {bits!r}")
    return bits


def group_of(config: Mapping[str, Any], old: str) -> int | None:
    """Inputs that share a scale; None: all of them.

    Args:
      old: another name of the setting.

    Raises:
      ValueError: neither a positive integer nor -1.
    """
    size = config.get("group_size", config.get(old))
    if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1:
        raise ValueError(f"config.json: quantization_config.group_size must be positive or -1, got {size!r}")
    return None if size == -1 else size


def groups_of(module: str, d_in: int, group: int | None) -> int:
    """How many groups a module's inputs are in.

    Raises:
      ValueError: groups do not divide them.
    """
    if group is not None and d_in % group:
        raise ValueError(f"{module!r} has {d_in} inputs, which groups of {group} do not divide")
    return 1 if group is None else d_in // group


def pair_of(value: Any, name: str) -> tuple[int, int]:
    """(outputs, inputs) of a block.

    Raises:
      ValueError: not two positive integers.
    """
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise ValueError(f"config.json: quantization_config: {name} must be two positive integers, got {value!r}")
    return value[0], value[1]
