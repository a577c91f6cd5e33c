"""What a user can configure.

Every message names the field, the value given and the values allowed. Must not import JAX.
"""

from jaxspec.config.engine import ENGINE_ELSEWHERE, MOST_ROUNDS, SHORT_FLAGS, EngineConfig
from jaxspec.config.speculation import (
    DRAFT_FORMATS,
    DRAFT_QUANTIZATIONS,
    SPECULATION_ELSEWHERE,
    SPECULATION_FLAGS,
    VERIFICATIONS,
    DraftFormat,
    DraftQuantization,
    SpeculationConfig,
)

__all__ = [
    "DRAFT_FORMATS", "DRAFT_QUANTIZATIONS", "ENGINE_ELSEWHERE", "MOST_ROUNDS", "SHORT_FLAGS", "SPECULATION_ELSEWHERE",
    "SPECULATION_FLAGS", "VERIFICATIONS", "DraftFormat", "DraftQuantization", "EngineConfig", "SpeculationConfig",
]  # fmt: skip
