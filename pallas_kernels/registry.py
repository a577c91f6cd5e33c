"""Which operations there are, and what each one's cases tell tests, benchmarks and compile proofs.

Must not import JAX: commands read the operations' names before they choose a backend.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from pallas_kernels.dispatch import Operation

Args = TypeVar("Args")
Result = TypeVar("Result")

#: The module of each operation's cases, which holds its SUITE.
OPERATIONS = {
    "tree_attention": "pallas_kernels.tree_attention.cases",
    "rejection_sampling": "pallas_kernels.rejection_sampling.cases",
}

#: What else computes a case, or nearly: from the record to its own arguments (not timed), and from these to the result.
Alternative = tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]


class Device(Protocol):
    """What kernels choose their sizes by: jax's name of a device, and the TensorCores of a TPU."""

    device_kind: str
    num_cores: int


@dataclasses.dataclass(frozen=True)
class Proof(Generic[Args]):
    """What is compiled for a case on one kind of device, and what the executable may take.

    Attributes:
      args: the argument record without values.
      max_temp_bytes, limit: as of aot.programs.Program.
      options: what the implementation takes by name on that device.
      free: fields of `args` that a TPU's compiler may lay out as their reader wants them.
    """

    args: Args
    max_temp_bytes: int
    limit: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    free: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case(abc.ABC, Generic[Args, Result]):
    """The shape of one call.

    Attributes:
      name: unique within its operation.
      quick: whether its compile proof is part of the subset that every change is tested with.
    """

    name: str
    quick: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Devices whose kernels serve it, where there are any; on others it is the reference's."""
        return ("tpu", "gpu")

    @abc.abstractmethod
    def shapes(self) -> Args:
        """The argument record without values."""

    @abc.abstractmethod
    def draw(self, seed: int = 0) -> Args:
        """Random arguments, made on the device where large."""

    @abc.abstractmethod
    def min_bytes(self, args: Args) -> float:
        """Fewest bytes that a call must move."""

    @abc.abstractmethod
    def proof(self, kind: Literal["tpu", "gpu"], device: Device) -> Proof[Args]:
        """What proves that the kernel compiles for a device that may be absent."""

    def specified(self, result: Result) -> Result:
        """The result, cleared where implementations may differ."""
        return result

    def alternatives(self, torch: ModuleType) -> Mapping[str, Alternative]:
        """By name, what PyTorch has to compare with."""
        del torch
        return {}


@dataclasses.dataclass(frozen=True)
class Suite:
    """An operation and its cases.

    Attributes:
      serving: what serving looks like; measured, and compiled.
      coverage: what else the kernels promise to serve; compiled.
      small: for interpreters; run by the tests.
    """

    operation: Operation[Any, Any]
    serving: Sequence[Case[Any, Any]] = ()
    coverage: Sequence[Case[Any, Any]] = ()
    small: Sequence[Case[Any, Any]] = ()


def suite(name: str) -> Suite:
    """The suite of a registered operation."""
    return importlib.import_module(OPERATIONS[name]).SUITE
