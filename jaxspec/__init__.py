"""jaxspec: adaptive speculative decoding in JAX.

    from jaxspec import LLM, SamplingParams
    print(LLM("demo").generate("def main():", SamplingParams(temperature=0, max_tokens=64))[0].text)

Shape suffixes used throughout: B bucket (padded batch), S slots, N tree nodes, D depth,
W top-k, L length, M page-table entries, P pages, T context tokens, H and G query and
key-value heads, C head dimension, E embedding, A auxiliary states, V vocabulary.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "jaxspec.llm",
    "AsyncLLM": "jaxspec.async_llm",
    "Delta": "jaxspec.events",
    "Finished": "jaxspec.events",
    "GrammarSpec": "jaxspec.text.grammar",
    "EngineConfig": "jaxspec.config",
    "SpeculationConfig": "jaxspec.config",
    "RequestOutput": "jaxspec.request",
    "SamplingParams": "jaxspec.request",
    "Tier": "jaxspec.tier",
}
__all__ = [
    "LLM", "AsyncLLM", "Delta", "EngineConfig", "Finished", "GrammarSpec", "RequestOutput", "SamplingParams",
    "SpeculationConfig", "Tier",
]  # fmt: skip

if TYPE_CHECKING:
    from jaxspec.async_llm import AsyncLLM
    from jaxspec.config import EngineConfig, SpeculationConfig
    from jaxspec.events import Delta, Finished
    from jaxspec.llm import LLM
    from jaxspec.request import RequestOutput, SamplingParams
    from jaxspec.text.grammar import GrammarSpec
    from jaxspec.tier import Tier


def __getattr__(name: str) -> Any:
    # Lazy, so that policies replay and configurations validate without JAX.
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
