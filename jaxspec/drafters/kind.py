"""What one kind of drafter is: its name, and how it is told, found, read, written, bound and trained.

A kind composes parts that do not know one another: a network and its way of drafting (speculation/drafters), a format
(checkpointing) and a training command (train/drafters). Must not know other kinds, engines or policies.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.config import SpeculationConfig
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import HeadCore
from jaxspec.speculation.state import Geometry

#: What `load` returns and `bind` takes: a module, or what a kind without parameters needs to know of the target.
Module = TypeVar("Module")
#: Fields of a configuration that a config.json has wrong.
Overrides = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Saving:
    """How a drafter is written.

    Attributes:
      layout: one of the kind's.
      tokenizer: written beside the weights; None: none.
      dtype: of the stored weights.
      verifier: name or path of the target, for layouts whose configuration names it.
      tokens: drafted tokens a round, for layouts whose configuration proposes them.
    """

    layout: str
    tokenizer: Tokenizer | None = None
    dtype: DTypeLike = jnp.bfloat16
    verifier: str | None = None
    tokens: int = 3


class DrafterKind(abc.ABC, Generic[Module]):
    """One kind of drafter. A module of this package holds an instance as KIND, and `registry` names the module.

    Kinds with parameters give `module_type` and `layouts` and override `recognise`, `load` and `save`; the others
    override `for_target`. All override `bind`.

    Attributes:
      name: what users call it. place: the directory of its checkpoint, beside the target's or inside it; None: `name`.
      drafts: whether there is a drafter at all.
      trees: whether it proposes trees (topk > 1), not chains alone.
      looks_up: whether it drafts by matches of suffixes itself, so that a hybrid would join it with its like.
      remembers: whether it looks in texts of others (SpeculationConfig.suffix_corpus_tokens).
      layouts: names of the formats that it is written in, the default first; empty where it has no parameters.
        "speculators" stands for PyPI speculators', whose config.json calls the kind by `name`.
      module_type: class of its modules.
      whole_model: whether its checkpoint is a language model by itself, not a head on its target.
      told_by: in error messages, what tells its config.json where that is not the architecture.
      trainer: module of `python -m jaxspec.train`'s command (train.drafters.drafts.Trainer); None: nothing to train.
    """

    name: ClassVar[str]
    place: ClassVar[str | None] = None
    drafts: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    looks_up: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    layouts: ClassVar[tuple[str, ...]] = ()
    module_type: ClassVar[type | None] = None
    whole_model: ClassVar[bool] = False
    told_by: ClassVar[str | None] = None
    trainer: ClassVar[str | None] = None

    # ---------------------------------------------------------------- checkpoints

    def find(self, model_dir: Path) -> Path | None:
        """Its checkpoint for the target of a directory; None where there is none."""
        found = next((path for path in self._places(model_dir) if (path / "config.json").exists()), None)
        return model_dir if found is None and self.within(model_dir) else found

    def searched(self, model_dir: Path) -> str:
        """Where `find` looks, for messages."""
        return f"no checkpoint in {' or '.join(map(str, self._places(model_dir)))}"

    def _places(self, model_dir: Path) -> list[Path]:
        return [base / (self.place or self.name) for base in (model_dir, model_dir.parent)]

    def architectures(self) -> Sequence[str]:
        """What its config.json may name as architecture."""
        return ()

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        """Whether a checkpoint is of this kind.

        Args:
          config: its config.json. names: of its tensors; None while config.json alone is asked, which goes first.
        """
        return False

    def within(self, directory: Path) -> bool:
        """Whether a target's own checkpoint holds a drafter of this kind."""
        return False

    def accepts(self, found: DrafterKind[Any]) -> bool:
        """Whether a checkpoint that was recognised as one of kind `found` may be loaded as this kind."""
        return found is self

    def owns(self, module: object) -> bool:
        """Whether a module is of this kind."""
        return self.module_type is not None and isinstance(module, self.module_type)

    def for_target(self, target: TargetModel) -> Module:
        """What `bind` takes of a kind without parameters."""
        raise NotImplementedError(f"a drafter of kind {self.name!r} has parameters to load")

    def load(self, directory: Path, target: TargetModel, dtype: DTypeLike, overrides: Overrides) -> Module:
        """A drafter for `target` from its checkpoint, its weights cast to `dtype`.

        Raises:
          ValueError: whatever does not fit the target; names the file, field or tensor, and both values.
        """
        raise NotImplementedError(f"a drafter of kind {self.name!r} has no parameters to load")

    def save(self, module: Module, directory: Path, target: TargetModel, how: Saving) -> None:
        """Writes what `load` reads; all or nothing.

        Raises:
          ValueError: a configuration that the layout cannot express, or a path that names a file.
        """
        raise NotImplementedError(f"a drafter of kind {self.name!r} has no parameters to write")

    # ---------------------------------------------------------------- drafting

    @abc.abstractmethod
    def bind(self, module: Module, geo: Geometry, speculation: SpeculationConfig) -> tuple[Drafter | None, Any]:
        """(drafter, its parameters), for an engine of these sizes.

        Raises:
          ValueError: tiers that it cannot draft.
        """

    def deepest(self, module: Module) -> int | None:
        """Most tokens that it can propose in a row; None: any number."""
        return None

    def aux_layers(self, module: Module) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads."""
        return ()

    @property
    def reads_states(self) -> bool:
        """Whether it reads the target's states, of which layers its checkpoint says."""
        return type(self).aux_layers is not DrafterKind.aux_layers


class HeadKind(DrafterKind[Module]):
    """A FeatureHead (speculation/drafters/cores.py): run token by token over the target's features."""

    def bind(self, module: Module, geo: Geometry, speculation: SpeculationConfig) -> tuple[Drafter, Any]:
        core = HeadCore(module)
        return AutoregressiveDrafter(core, geo), core.take_params()

    def aux_layers(self, module: Any) -> tuple[int, ...]:
        return module.config.aux_layer_ids
