"""What a user can configure.

Every message names the field, the value given and the values allowed. Must not import JAX.
"""

from jaxspec.config.engine import ENGINE_ELSEWHERE, MOST_ROUNDS, SHORT_FLAGS, EngineConfig
from jaxspec.config.speculation import SPECULATION_ELSEWHERE, SPECULATION_FLAGS, VERIFICATIONS, SpeculationConfig

__all__ = [
    "ENGINE_ELSEWHERE", "MOST_ROUNDS", "SHORT_FLAGS", "SPECULATION_ELSEWHERE", "SPECULATION_FLAGS", "VERIFICATIONS",
    "EngineConfig", "SpeculationConfig",
]  # fmt: skip
