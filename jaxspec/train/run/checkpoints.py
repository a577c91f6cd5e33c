"""A run's checkpoints on disk (orbax): the newest two, each whole or not there.

Owns what is done about a directory that cannot be written or read. Must not know what is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxspec.train.run import processes

_KEEP = 2


def write_whole(path: Path, text: str) -> None:
    """Writes a small file of which a reader never sees half, also where the disk fills up."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def bind(path: Path, settings: dict[str, Any], checkpoints: Path) -> None:
    """Holds a run to the settings in `path`; one that has saved nothing in `checkpoints` is bound to these from now on.

    Raises:
      ValueError: the run began with other settings (names both values), or the file is broken.
    """
    own = json.loads(json.dumps(settings))
    begun = checkpoints.is_dir() and any(entry.name.isdecimal() for entry in checkpoints.iterdir())
    if not begun or not path.exists():
        write_whole(path, json.dumps(own, indent=1, sort_keys=True) + "\n")
        return
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{path} is broken ({e}); delete {path.parent} to start the run anew") from e
    different = [key for key in sorted(found.keys() | own.keys()) if found.get(key) != own.get(key)]
    if different:
        values = "; ".join(f"{key} was {found.get(key)!r}, is {own.get(key)!r}" for key in different)
        raise ValueError(
            f"{path.parent} holds another run: {values}. Give a --run-dir of its own; --init-from goes on from "
            "what that one trained"
        )


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: made where it is missing.
      settings: what must be the same in every part of a run (JSON).

    Raises:
      ValueError: the directory holds a run of other settings; names both values.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]):
        self._directory = directory.resolve()
        self._directory.mkdir(parents=True, exist_ok=True)
        if processes.leads():
            bind(self._directory / "settings.json", settings, self._directory)
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEEP, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def restore(self, state: Any) -> tuple[int, Any]:
        """(step, state) of the newest checkpoint that can be read, in the shardings of `state`; (0, state) if none.

        Raises:
          ValueError: there are checkpoints, none of which can be read.
        """
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        failures = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                restored = self._manager.restore(step, args=ocp.args.StandardRestore(template))
                _check_whole(template, restored)
            except (OSError, ValueError, KeyError, TypeError, RuntimeError) as e:  # what orbax and tensorstore raise
                reason = (str(e).strip() or type(e).__name__).splitlines()[0][:300]
                failures.append(f"step {step}: {reason}")
                print(f"checkpoint {self._directory / str(step)} cannot be read: {reason}", flush=True)
                continue
            for newer in [s for s in self._manager.all_steps() if s > step]:
                self._manager.delete(newer)  # or a later save of that step would be refused
            return step, restored
        if failures:
            raise ValueError(
                f"{self._directory}: no checkpoint can be read ({'; '.join(failures)}); delete it to start anew"
            )
        return 0, state

    def save(self, step: int, state: Any) -> None:
        """Writes a checkpoint, then drops all but the newest two.

        Raises:
          OSError: the directory cannot be written (a full disk, a quota); earlier checkpoints stay as they are.
        """
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state))
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as e:  # tensorstore reports a full disk as ValueError
            kept = sorted(s for s in self._manager.all_steps(read=True) if s < step)
            raise OSError(
                f"cannot save step {step} in {self._directory}: {e}. "
                + (f"The checkpoint of step {kept[-1]} is whole" if kept else "There is no earlier checkpoint")
            ) from e

    def close(self) -> None:
        self._manager.close()


def _check_whole(template: Any, restored: Any) -> None:
    """Orbax leaves None where a checkpoint has nothing, as of a version whose optimiser kept other moments.

    Raises:
      ValueError: names the first that is missing.
    """
    kept = {path for path, _ in jax.tree_util.tree_leaves_with_path(restored)}
    lacks = [path for path, _ in jax.tree_util.tree_leaves_with_path(template) if path not in kept]
    if lacks:
        raise ValueError(
            f"it lacks {len(lacks)} arrays of this version's state, such as {jax.tree_util.keystr(lacks[0])}: another "
            "version or optimiser wrote it"
        )
