"""What an operation is, and which of its implementations runs: the one that is named, or the backend's own.

A named implementation runs or fails with the reason. None takes the kernel of the backend,
or the reference where there is none or it refuses the arguments, and logs the choice once.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax

try:
    from jax.experimental.pallas import triton as _triton
except ImportError:  # deprecated since JAX 0.11, and to be removed
    _triton = None

Args = TypeVar("Args")
Result = TypeVar("Result")

_KERNEL_OF_BACKEND = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}

#: Pallas on Triton, or None.
triton: Any = _triton

_log = logging.getLogger(__name__)


@functools.cache
def log_once(level: int, message: str) -> None:
    """Says which implementation was chosen, the first time."""
    _log.log(level, message)


def no_triton() -> str | None:
    """Why no kernel on Triton can run, or None."""
    return f"JAX {jax.__version__} has no Pallas on Triton" if triton is None else None


def on_triton() -> None:
    """Keeps JAX's word that Pallas on Triton will go (from 0.11 on, when a program is lowered) from users.

    They did not choose it and cannot answer it: `log_once` says where it runs, docs/kernels.md what still needs it.
    """
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def static(**options: Any) -> Any:
    """A field of an argument record that is no array: jit compiles for each of its values. Named, never positional."""
    return dataclasses.field(kw_only=True, metadata={"static": True}, **options)


@dataclasses.dataclass(frozen=True)
class Implementation(Generic[Args, Result]):
    """One way to compute an operation.

    Attributes:
      run: takes the operation's argument record; what else it takes by name has defaults.
      refusal: why it cannot serve these arguments (arrays, or their shapes), or None.
    """

    run: Callable[..., Result]
    refusal: Callable[[Args], str | None] = lambda _: None


@dataclasses.dataclass(frozen=True)
class Operation(Generic[Args, Result]):
    """An operation: called with its argument record, which its front has checked, it runs one of its implementations.

    Attributes:
      name: of its folder and of its kernels, also in messages.
      implementations: by name. "reference" is plain XLA; "tpu" and "gpu" are kernels; "interpret" runs the TPU
        kernel in TPU interpret mode, on any backend.
    """

    name: str
    implementations: Mapping[str, Implementation[Args, Result]]

    def __call__(self, args: Args, implementation: str | None = None) -> Result:
        return self.implementations[self.resolve(args, implementation)].run(args)

    def resolve(self, args: Args, implementation: str | None) -> str:
        """The name of the implementation that runs.

        Raises:
          ValueError: an unknown name, or a named implementation that refuses the arguments.
        """
        if implementation is None:
            return self._backends_own(args)
        if implementation not in self.implementations:
            names = tuple(self.implementations)
            raise ValueError(f"implementation must be None or one of {names}, got {implementation!r}")
        if (reason := self.implementations[implementation].refusal(args)) is not None:
            raise ValueError(f"{self.name}: implementation {implementation!r} cannot serve these arguments: {reason}")
        return implementation

    def _backends_own(self, args: Args) -> str:
        kernel = self.implementations.get(own := _KERNEL_OF_BACKEND.get(jax.default_backend(), ""))
        reason = "the backend has no kernel" if kernel is None else kernel.refusal(args)
        chosen = own if reason is None else "reference"
        # Plain XLA on an accelerator is several times slower: whoever gets it by a refusal must be told.
        level = logging.INFO if kernel is None or reason is None else logging.WARNING
        log_once(level, f"{self.name}: {chosen}" + (f" on {jax.default_backend()}: {reason}" if reason else ""))
        return chosen
