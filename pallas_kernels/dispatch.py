"""Which implementation of an operation runs: the one that is named, or the backend's own.

A named implementation runs or fails with the reason. None takes the kernel of the backend,
or the reference where the kernel does not support the shapes, and logs the choice once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

import jax

#: "reference" is plain XLA; "interpret" runs the TPU kernel in TPU interpret mode, on any backend.
IMPLEMENTATIONS = ("reference", "tpu", "gpu", "interpret")

_KERNEL_OF_BACKEND = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}

_log = logging.getLogger(__name__)


@functools.cache
def _log_once(level: int, message: str) -> None:
    _log.log(level, message)


def resolve(op: str, implementation: str | None, refusals: Mapping[str, Callable[[], str | None]]) -> str:
    """The implementation that runs.

    Args:
      op: the operation's name, for messages.
      implementation: one of IMPLEMENTATIONS, or None for the backend's own.
      refusals: for each kernel a function that returns why it cannot serve these arguments, or None.

    Raises:
      ValueError: an unknown name, or a named kernel that refuses the arguments.
    """
    if implementation is None:
        kernel = _KERNEL_OF_BACKEND.get(jax.default_backend())
        reason = "the backend has no kernel" if kernel is None else refusals[kernel]()
        chosen = "reference" if kernel is None or reason is not None else kernel
        # Plain XLA on an accelerator is several times slower: whoever gets it by a refusal must be told.
        level = logging.WARNING if kernel is not None and reason is not None else logging.INFO
        _log_once(level, f"{op}: {chosen}" + (f" on {jax.default_backend()}: {reason}" if reason else ""))
        return chosen
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation != "reference":
        reason = refusals["tpu" if implementation == "interpret" else implementation]()
        if reason is not None:
            raise ValueError(f"{op}: implementation {implementation!r} cannot serve these arguments: {reason}")
    return implementation
