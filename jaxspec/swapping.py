"""A drafter's weights, exchanged while an engine runs: loaded beside the rounds, put in place between two of them.

Owns the weights by version. Which version runs is `adaptive.versions`' business, what may take the served one's place
that of `load`. Where several processes share an engine each loads and holds its own devices' parts: the first one tells
the others what to load and, between two calls, which of it drafts. Must not know requests, policies or formats.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxspec.adaptive.versions import Versions
from jaxspec.runtime.compile import uncounted
from jaxspec.runtime.hosts import HostLostError
from jaxspec.runtime.runner import Runner
from jaxspec.tier import Choice

_log = logging.getLogger(__name__)
_Leaves = tuple[jax.Array, ...]
#: What the first process tells the others.
_LOAD, _USE, _DROP = "load a drafter", "draft with", "drop a drafter"
#: Most characters of an error that goes from one process to another, and of a fingerprint that an error shows.
_LONGEST_ERROR, _SHOWN = 2000, 12


class DrafterWeights:
    """The versions of a drafter's weights.

    All but `load` is for the engine's thread; in a process that follows, all is the first one's to call.

    Args:
      load: parameters for the runner's drafter from a directory; ValueError where they do not fit. None: this drafter
        has none that could be exchanged.

    Attributes:
      versions: which one runs; the first is 1.
    """

    def __init__(self, runner: Runner, load: Callable[[Path], Any] | None):
        self._runner, self._load = runner, load
        self.versions = Versions()
        self._shelf = _Shelf(runner)
        self._places, self._active = {1: 0}, 1  # numbers on the shelf, by version
        self._loading: _Load | None = None
        self._tickets = 0
        _Follower(runner, self._shelf, self.load)

    @property
    def version(self) -> int:
        """Of the weights that are served; 0 where the drafter has none."""
        return 0 if self._runner.drafter is None or not self._runner.has_draft_params else self.versions.served

    def load(self, directory: str | Path) -> _Leaves:
        """Other weights, on this process's devices, for `use`. From any thread; rounds go on meanwhile.

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
        """Begins to load in a thread, and so in every process of this engine; returns a ticket for `finish`.

        Raises:
          ValueError: another load is under way.
          HostLostError: a process is gone.
        """
        if self._loading is not None:
            if not self._loading.over(self._runner):
                raise ValueError("the drafter's weights are being loaded already; wait for that to end")
            self._runner.tell(_DROP, number=self._loading.number)  # nobody asked what came of it
        self._tickets += 1
        self._runner.tell(_LOAD, number=self._tickets, directory=str(directory))
        self._loading = _Load(self._tickets, directory, self.load, fingerprint=self._runner.hosts is not None)
        return self._tickets

    def finish(self, ticket: int, *, trial: bool = True) -> int | None:
        """What `use` returns of the weights that `begin` loaded; None while they are being loaded.

        Raises:
          ValueError: as `load`, in whichever process, or these hold different files; or no such ticket.
          HostLostError: a process is gone.
        """
        loading = self._loading
        if loading is None or loading.number != ticket:
            raise ValueError(
                f"no load has ticket {ticket}: another one took its place, or it has been told what came of it"
            )
        if not loading.over(self._runner):
            return None
        self._loading = None
        try:
            leaves = loading.result()
        except Exception:
            self._runner.tell(_DROP, number=ticket)
            raise
        return self._introduce(ticket, leaves, trial)

    def use(self, leaves: _Leaves, *, trial: bool = True) -> int:
        """From the next round on: gives the weights a trial beside those that are served, or takes them at once.

        Of an engine of one process.

        Returns:
          their version.
        """
        assert self._runner.hosts is None, "the others have not loaded them: begin() and finish()"
        self._tickets += 1
        return self._introduce(self._tickets, leaves, trial)

    def _introduce(self, number: int, leaves: _Leaves, trial: bool) -> int:
        version = self.versions.introduce(trial=trial)
        self._shelf.add(number, leaves)
        self._places[version] = number
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
        for version in self._places.keys() - {*self.versions}:
            number = self._places.pop(version)
            self._shelf.drop(number)
            self._runner.tell(_DROP, number=number)

    def _activate(self, version: int) -> None:
        if version == self._active:
            return
        self._active, number = version, self._places[version]
        self._shelf.use(number)
        self._runner.tell(_USE, number=number)


class _Shelf:
    """Weights on this process's devices, by the number of their load; 0 are those that it started with."""

    def __init__(self, runner: Runner):
        self._runner, self._active = runner, 0
        self._others: dict[int, _Leaves] = {}  # but those that the runner has

    def add(self, number: int, leaves: _Leaves) -> None:
        self._others[number] = leaves

    def use(self, number: int) -> None:
        """The runner drafts with them from now on."""
        self._others[self._active] = self._runner.use_drafter(self._others.pop(number))
        self._active = number

    def drop(self, number: int) -> None:
        self._others.pop(number, None)


class _Load:
    """A load in a thread, and what the other processes say of theirs.

    Args:
      fingerprint: also look at what the files hold, to compare.
    """

    def __init__(self, number: int, directory: str | Path, load: Callable[[Path], _Leaves], *, fingerprint: bool):
        self.number, self._directory = number, Path(directory)
        self._loaded: _Leaves | Exception | None = None
        self._fingerprint = ""
        self._said: dict[int, dict[str, Any]] = {}

        def run() -> None:
            try:
                loaded = load(self._directory)
                self._fingerprint = _fingerprint(self._directory) if fingerprint else ""
                self._loaded = loaded
            except Exception as e:  # whatever is wrong with a file, the engine goes on
                self._loaded = e

        self._thread = threading.Thread(target=run, name="drafter weights", daemon=True)
        self._thread.start()

    def over(self, runner: Runner) -> bool:
        """Whether all processes have ended theirs; never waits."""
        hosts = runner.hosts
        if hosts is not None:
            said = ((process, json.loads(answer)) for process, answer in hosts.answers())
            self._said |= {process: told for process, told in said if told["number"] == self.number}
            if len(self._said) < hosts.count - 1:
                return False
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when this process has ended its own."""
        self._thread.join()

    def result(self) -> _Leaves:
        """What was loaded.

        Raises:
          Exception: what was wrong here.
          ValueError: what was wrong elsewhere, or others have other files.
        """
        assert self._loaded is not None
        if isinstance(self._loaded, Exception):
            raise self._loaded
        kept = f"the drafter's weights stay as they are in all processes, {str(self._directory)!r} is not the same: "
        if errors := {process: told["error"] for process, told in sorted(self._said.items()) if told["error"]}:
            raise ValueError(kept + "; ".join(f"process {process} says {error}" for process, error in errors.items()))
        others = {process: told["fingerprint"] for process, told in sorted(self._said.items())}
        if {*others.values()} - {self._fingerprint}:
            found = {0: self._fingerprint} | others
            told = ", ".join(f"process {process} read {sha[:_SHOWN]}" for process, sha in found.items())
            raise ValueError(f"{kept}by the SHA-256 of its files {told}")
        return self._loaded

    def told(self) -> dict[str, Any]:
        """What the first process has to know of this one's."""
        loaded = self._loaded
        error = (str(loaded) or repr(loaded))[:_LONGEST_ERROR] if isinstance(loaded, Exception) else ""
        return {"number": self.number, "error": error, "fingerprint": self._fingerprint}


class _Follower:
    """What a process that follows does when the first one says so."""

    def __init__(self, runner: Runner, shelf: _Shelf, load: Callable[[Path], _Leaves]):
        self._runner, self._shelf, self._read = runner, shelf, load
        self._loading: _Load | None = None
        runner.hear(_LOAD, self._load)
        runner.hear(_USE, self._use)
        runner.hear(_DROP, self._drop)

    def _load(self, number: int, directory: str) -> None:
        self._shelve()  # what the first process has taken and has not drafted with yet: else it would have dropped it
        self._loading = loading = _Load(number, directory, self._read, fingerprint=True)

        def answer() -> None:
            hosts = self._runner.hosts
            assert hosts is not None
            loading.wait()
            with contextlib.suppress(HostLostError):  # of which this process hears elsewhere
                hosts.answer(json.dumps(loading.told()).encode())

        threading.Thread(target=answer, name="drafter weights", daemon=True).start()

    def _use(self, number: int) -> None:
        if self._loading is not None and self._loading.number == number:
            self._shelve()
        self._shelf.use(number)

    def _shelve(self) -> None:
        if self._loading is not None:
            self._shelf.add(self._loading.number, self._loading.result())
            self._loading = None

    def _drop(self, number: int) -> None:
        if self._loading is not None and self._loading.number == number:
            self._loading = None
        self._shelf.drop(number)


def _fingerprint(directory: Path) -> str:
    """SHA-256 over the names and contents of a checkpoint's files."""
    found = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            with path.open("rb") as file:
                found.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()
