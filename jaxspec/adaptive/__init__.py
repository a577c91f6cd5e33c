"""Policies that choose the next round's tier. Host-pure: replayable from a JSONL, without JAX."""

from __future__ import annotations

from jaxspec.adaptive.controller import AdaptiveController, Recorder
from jaxspec.adaptive.cost import CostTable, payable
from jaxspec.adaptive.ema import (
    AGGRESSIVE_CONFIG,
    CONSERVATIVE_CONFIG,
    DEFAULT_CONFIG,
    PRESETS,
    AdaptiveSpeculativeParams,
    EmaPolicy,
)
from jaxspec.adaptive.goodput import GoodputParams, GoodputPolicy
from jaxspec.adaptive.policy import BatchView, RoundStats, TierPolicy, replay
from jaxspec.adaptive.static import StaticPolicy

__all__ = [
    "AGGRESSIVE_CONFIG",
    "CONSERVATIVE_CONFIG",
    "DEFAULT_CONFIG",
    "PRESETS",
    "AdaptiveController",
    "AdaptiveSpeculativeParams",
    "BatchView",
    "CostTable",
    "EmaPolicy",
    "GoodputParams",
    "GoodputPolicy",
    "Recorder",
    "RoundStats",
    "StaticPolicy",
    "TierPolicy",
    "payable",
    "replay",
]
