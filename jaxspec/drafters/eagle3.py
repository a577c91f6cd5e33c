"""EAGLE-3 and EAGLE-3.1 heads (Li et al. 2025)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jaxspec.checkpointing import eagle3, heads
from jaxspec.drafters.kind import HeadKind, Overrides, Saving
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.eagle3_head import Eagle3Head


class Eagle3(HeadKind[Eagle3Head]):
    """Heads without placeholders; those with them, in the same formats, are P-EAGLE's."""

    name = "eagle3"
    layouts = eagle3.LAYOUTS
    module_type = Eagle3Head
    trainer = "jaxspec.train.drafters.eagle"
    placeholders = False

    def architectures(self) -> Sequence[str]:
        return eagle3.ARCHITECTURES

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        if names is None:
            named = not set(eagle3.ARCHITECTURES).isdisjoint(heads.architectures(config))
            head = named or "draft_vocab_size" in config or "eagle_config" in config
        else:
            head = any(name.endswith(".hidden_norm.weight") for name in names)
        return head and (eagle3.mask_token(config) is not None) == self.placeholders

    def owns(self, module: object) -> bool:
        return isinstance(module, Eagle3Head) and (module.config.mask_token_id is not None) == self.placeholders

    def load(self, directory: Path, target: TargetModel, dtype: DTypeLike, overrides: Overrides) -> Eagle3Head:
        return eagle3.load_head(directory, target, dtype, overrides)

    def save(self, module: Eagle3Head, directory: Path, target: TargetModel, how: Saving) -> None:
        eagle3.save_head(
            module, directory, target.config, tokenizer=how.tokenizer, dtype=how.dtype, layout=how.layout,
            verifier=how.verifier, tokens=how.tokens,
        )  # fmt: skip


KIND = Eagle3()
