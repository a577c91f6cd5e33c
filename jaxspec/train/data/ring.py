"""Texts and the target's states that a serving engine has left in a feature ring: training without a target's pass.

Owns the way from a ring's files to texts and to the states of packed rows. Must not know engines or losses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspec.models.base import ModelConfig
from jaxspec.ringfiles import RingFile, ring_files
from jaxspec.train.data.batch import PackedRows
from jaxspec.train.data.dataset import MIN_TOKENS, Example
from jaxspec.train.drafters.recipe import TargetStates

#: What names a ring among the files of --data.
SCHEME = "ring:"
_TEXT, _POSITION, _TOKEN, _PROMPT, _HEAT = range(5)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The rows of a ring's files, ordered by text and position.

    Attributes:
      directory: where they lie.
      features, about: of each file [N, F] and [N, 5]; mapped.
      at_R2: file and row of each position.
      layers: streams side by side in a row; the last are the states that the target's logits are made of.
      hidden_size: of a stream.
      examples: the texts.
    """

    directory: Path
    features: Sequence[np.ndarray]
    about: Sequence[np.ndarray]
    at_R2: np.ndarray
    layers: tuple[int, ...]
    hidden_size: int
    examples: list[Example]

    @classmethod
    def read(cls, directory: Path, target: ModelConfig) -> Ring:
        """What lies there now; files that come later are not seen, those that go stay readable.

        Raises:
          ValueError: no files, broken ones, or those of another target; names both values.
        """
        files = list(_files(directory))
        if not files:
            raise ValueError(f"--data {SCHEME}{directory} holds no files of a feature ring")
        metadata = files[-1].metadata
        for name, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if metadata.get(name) != str(own):
                raise ValueError(
                    f"{directory} is of a target whose {name} is {metadata.get(name)}, --target's is {own}"
                )
        # Files of an engine that gathered other layers cannot be put beside these.
        files = [file for file in files if file.metadata.get("layers") == metadata["layers"]]
        about_RI = np.concatenate([file.about for file in files])
        at_R2 = np.concatenate(
            [np.stack([np.full(len(f.about), i), np.arange(len(f.about))], axis=1) for i, f in enumerate(files)]
        )
        engines = {name: i for i, name in enumerate(dict.fromkeys(file.metadata["engine"] for file in files))}
        engine_R = np.concatenate([np.full(len(f.about), engines[f.metadata["engine"]]) for f in files])
        order = np.lexsort((about_RI[:, _POSITION], about_RI[:, _TEXT], engine_R))
        about_RI, at_R2, engine_R = about_RI[order], at_R2[order], engine_R[order]
        same = (np.diff(engine_R) == 0) & (np.diff(about_RI[:, _TEXT]) == 0) & (np.diff(about_RI[:, _POSITION]) == 1)
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        label, examples = directory.name, []
        for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
            part = about_RI[start:stop]
            learn = part[:, _POSITION] >= part[:, _PROMPT]
            learn[0] = False
            first = int(np.argmax(learn)) if learn.any() else len(part)
            heat = float(part[0, _HEAT : _HEAT + 1].view(np.float32)[0])
            origin = f"{engine_R[start]}:{part[0, _TEXT]}"
            examples.append(
                Example(part[:, _TOKEN].tolist(), learn.tolist(), label, first, heat, origin, source=int(start))
            )
        layers = tuple(json.loads(metadata["layers"]))
        features = [file.features for file in files]
        return cls(directory, features, [file.about for file in files], at_R2, layers, target.hidden_size, examples)

    def at(self, example: Example) -> tuple[int, int]:
        """Number and first position of a text."""
        assert example.source is not None
        file, row = self.at_R2[example.source]
        text, position = self.about[file][row, [_TEXT, _POSITION]].tolist()
        return text, position

    def check(self, aux_layers: Sequence[int]) -> None:
        """Raises ValueError, with both, where the rows lack the streams that a head reads."""
        if self.layers[: len(aux_layers)] != tuple(aux_layers):
            raise ValueError(
                f"{self.directory} holds the inputs of layers {list(self.layers)}, and this head reads "
                f"{list(aux_layers)}: serve with a head of its kind, or train without the ring"
            )

    def states(self, rows: PackedRows, index: np.ndarray, aux_layers: Sequence[int]) -> TargetStates:
        """Of packed rows [B]; zeros where a row is padding."""
        assert rows.source is not None
        source_BT = rows.source[index]
        width = len(aux_layers) * self.hidden_size
        out = np.zeros((*source_BT.shape, self.features[0].shape[1]), self.features[0].dtype)
        there = source_BT >= 0
        at = self.at_R2[source_BT[there]]
        found = np.zeros((len(at), out.shape[-1]), out.dtype)
        for file in np.unique(at[:, 0]):
            here = at[:, 0] == file
            found[here] = self.features[file][at[here, 1]]
        out[there] = found
        aux = jnp.asarray(out[..., :width]) if width else None
        return TargetStates(aux, jnp.asarray(out[..., -self.hidden_size :]))


def _files(directory: Path) -> Iterator[RingFile]:
    for path in ring_files(directory):
        try:
            yield RingFile.read(path)
        except FileNotFoundError:  # its place was needed meanwhile
            continue


def ring_of(paths: Sequence[str | Path]) -> Path | None:
    """The directory, where the files of --data are a ring; None where there is none.

    Raises:
      ValueError: a ring beside other files.
    """
    rings = [str(path) for path in paths if str(path).startswith(SCHEME)]
    if not rings:
        return None
    if len(paths) > 1:
        raise ValueError(f"--data takes one ring and nothing beside it, got {[str(path) for path in paths]}")
    return Path(rings[0][len(SCHEME) :])


def usable(examples: Sequence[Example]) -> list[Example]:
    """Those that something can be learned from."""
    return [example for example in examples if len(example.tokens) >= MIN_TOKENS and any(example.learn)]
