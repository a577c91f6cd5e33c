"""Multi-token prediction modules (DeepSeek-V3 and its kin): of their own, or inside their target's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jaxspec.checkpointing import mtp
from jaxspec.drafters.kind import DrafterKind, HeadKind, Overrides, Saving
from jaxspec.models.base import TargetModel
from jaxspec.speculation.drafters.mtp_head import MtpHead


class Mtp(HeadKind[MtpHead]):
    """Directories of its own are in speculators' layout only, which names the kind."""

    name = "mtp"
    layouts = mtp.LAYOUTS
    module_type = MtpHead
    trainer = "jaxspec.train.drafters.mtp"

    def searched(self, model_dir: Path) -> str:
        return f"{super().searched(model_dir)} nor an MTP layer in {model_dir}"

    def within(self, directory: Path) -> bool:
        return mtp.inside_target(directory)

    def accepts(self, found: DrafterKind[Any]) -> bool:
        # Of a target without a module, `load_head` says what it lacks.
        return found.whole_model or super().accepts(found)

    def load(self, directory: Path, target: TargetModel, dtype: DTypeLike, overrides: Overrides) -> MtpHead:
        return mtp.load_head(directory, target, dtype, overrides)

    def save(self, module: MtpHead, directory: Path, target: TargetModel, how: Saving) -> None:
        mtp.save_head(
            module, directory, target, tokenizer=how.tokenizer, dtype=how.dtype, layout=how.layout,
            verifier=how.verifier, tokens=how.tokens,
        )  # fmt: skip


KIND = Mtp()
