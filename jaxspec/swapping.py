"""A drafter's weights, exchanged while an engine runs: loaded beside the rounds, put in place between two of them.

Owns the weights by version. Which version runs is `adaptive.versions`' business, what may take the served one's place
that of `load`. Must not know requests, policies or files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxspec.adaptive.versions import Versions
from jaxspec.runtime.compile import uncounted
from jaxspec.runtime.runner import Runner
from jaxspec.tier import Choice

_log = logging.getLogger(__name__)
_Leaves = tuple[jax.Array, ...]


class DrafterWeights:
    """The versions of a drafter's weights.

    All but `load` and `begin` is for the engine's thread.

    Args:
      load: parameters for the runner's drafter from a directory; ValueError where they do not fit. None: this drafter
        has none that could be exchanged.

    Attributes:
      versions: which one runs; the first is 1.
    """

    def __init__(self, runner: Runner, load: Callable[[Path], Any] | None):
        self._runner, self._load = runner, load
        self.versions = Versions()
        self._held: dict[int, _Leaves | None] = {1: None}  # None: those that the runner has
        self._active = 1
        self._loading: tuple[int, threading.Thread] | None = None
        self._loaded: dict[int, _Leaves | BaseException] = {}
        self._tickets = 0

    @property
    def version(self) -> int:
        """Of the weights that are served; 0 where the drafter has none."""
        return 0 if self._runner.drafter is None or not self._runner.has_draft_params else self.versions.served

    def load(self, directory: str | Path) -> _Leaves:
        """Other weights, on the device, for `use`. From any thread; rounds go on meanwhile.

        Raises:
          ValueError: this engine's drafter has none to exchange, or what the directory holds does not fit.
        """
        if self._load is None or not self.version:
            raise ValueError(
                f"weights can be exchanged of a drafter that was loaded from a directory, and this engine's was not; "
                f"got {str(directory)!r}"
            )
        with uncounted():  # a checkpoint of another type than the first is cast, beside the rounds
            leaves = self._runner.staged(self._load(Path(directory)))
        jax.block_until_ready(leaves)
        return leaves

    def begin(self, directory: str | Path) -> int:
        """Begins to load in a thread; returns a ticket for `finish`.

        Raises:
          ValueError: another load is under way.
        """
        if self._loading is not None and self._loading[1].is_alive():
            raise ValueError("the drafter's weights are being loaded already; wait for that to end")
        self._tickets += 1
        ticket = self._tickets

        def run() -> None:
            try:
                self._loaded[ticket] = self.load(directory)
            except Exception as e:  # whatever is wrong with a file, the engine goes on; `finish` raises it
                self._loaded[ticket] = e

        self._loaded.clear()
        self._loading = ticket, threading.Thread(target=run, name="drafter weights", daemon=True)
        self._loading[1].start()
        return ticket

    def finish(self, ticket: int, *, trial: bool = True) -> int | None:
        """What `use` returns of the weights that `begin` loaded; None while they are being loaded.

        Raises:
          ValueError: as `load`, or no such ticket.
        """
        if self._loading is None or self._loading[0] != ticket:
            raise ValueError(f"no load has ticket {ticket}")
        if self._loading[1].is_alive():
            return None
        self._loading = None
        loaded = self._loaded.pop(ticket)
        if isinstance(loaded, BaseException):
            raise loaded
        return self.use(loaded, trial=trial)

    def use(self, leaves: _Leaves, *, trial: bool = True) -> int:
        """From the next round on: gives the weights a trial beside those that are served, or takes them at once.

        Returns:
          their version.
        """
        version = self.versions.introduce(trial=trial)
        self._held[version] = leaves
        self._settle()
        _log.info("drafter version %d %s", version, "is on trial" if trial else "is served")
        return version

    def before_round(self, choice: Choice, rounds: int) -> int:
        """Has the runner draft the next rounds with the version whose turn it is; returns that."""
        if choice.tier.depth and not choice.tier.lookup:
            self._activate(self.versions.next(rounds))
        return self._active

    def observe(self, version: int, choice: Choice, accepted: tuple[int, ...]) -> None:
        """Drafts that the rows of a finished round accepted."""
        if not choice.tier.depth or choice.tier.lookup:
            return
        versions = self.versions
        was, served = versions.trying, versions.served
        versions.observe(version, (choice.tier, choice.tokens), accepted)
        if was and not versions.trying:
            _log.info("drafter version %d stays, version %s is kept beside it", versions.served, versions.other)
            self._settle()
        elif versions.trying and not was:
            _log.info("drafter versions %d and %s are tried again: tokens a round fell", served, versions.other)

    def _settle(self) -> None:
        """The served version runs until another has its turn; weights that nobody needs are let go."""
        self._activate(self.versions.served)
        for version in self._held.keys() - {*self.versions}:
            del self._held[version]

    def _activate(self, version: int) -> None:
        if version == self._active:
            return
        leaves = self._held[version]
        assert leaves is not None
        self._held[self._active], self._held[version] = self._runner.use_drafter(leaves), None
        self._active = version
