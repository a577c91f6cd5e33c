"""Drafters of every kind with random weights: what a round costs does not depend on what they say.

Owns their sizes. Heads have as many layers as those that were compared on the demo's target (docs/benchmarks.md) and
are as wide as their target; those for the demo's own shape are as these were in all (DEMO). A draft model has a sixth
of its target's weights at 8B. Must not know runners, nor how rounds are timed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxspec.config import SpeculationConfig
from jaxspec.drafters import registry as kinds
from jaxspec.hybrids import joined
from jaxspec.models import registry
from jaxspec.models.base import ModelConfig
from jaxspec.models.layers import Shared, shared_lm_head
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.drafters.dflash2_head import Dflash2Config, Dflash2Head
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead
from jaxspec.speculation.drafters.dspark_head import DsparkConfig, DsparkHead
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.medusa_head import MedusaConfig, MedusaHeads
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from jaxspec.speculation.state import Geometry
from jaxspec.tier import Tier, parse_tier

#: Behind a kind's name: suffix matches draft beside it (a hybrid), which goes no deeper than a number behind a colon.
BESIDE = "+suffix"
#: Decoder layers of heads.
LAYERS = {"eagle3": 1, "eagle1": 1, "mtp": 1, "peagle": 2, "dflash": 2, "dspark": 2, "dflash2": 2}
_NARROW = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 768}
_BLOCKS = {"intermediate_size": 512, "reads": (3, 5, 7)}
#: What heads of the demo's target have otherwise than as wide as it: fields of their layers and configurations.
DEMO: dict[str, dict[str, Any]] = {
    "eagle3": {**_NARROW, "fc_norm": True, "norm_output": True},
    "peagle": _NARROW,
    "dflash": {**_BLOCKS, "block_size": 8},
    "dspark": {**_BLOCKS, "block_size": 7, "markov_rank": 64},
    "dflash2": {**_BLOCKS, "block_size": 8, "selector_rank": 64},
    "medusa": {"num_heads": 4},
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a drafter is made for.

    Attributes:
      target: with the tables that heads share. draft_vocab: of EAGLE-3 and P-EAGLE heads. depth: of the deepest tier.
      layers: of a head; None: LAYERS. small: of a draft model.
      heads: by kind, what heads have otherwise (as DEMO).
      filled: random weights for an abstract module, on the devices that it is laid out for.
    """

    target: Any
    draft_vocab: int
    depth: int
    layers: int | None
    small: ModelConfig
    filled: Callable[[Callable[[], Any]], Any]
    heads: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def cfg(self) -> ModelConfig:
        return self.target.config

    @property
    def dtype(self) -> jnp.dtype:
        return self.target.embedding[...].dtype

    @property
    def tables(self) -> tuple[Any, Any]:
        return Shared(self.target.embedding[...]), shared_lm_head(self.target)

    def layer(self, kind: str, family: str, **fields: Any) -> ModelConfig:
        """The decoder layers of a head of the target's width."""
        count = self.layers or LAYERS[kind]
        return dataclasses.replace(self.cfg, family=family, num_layers=count, experts=None, **fields)

    @property
    def reads(self) -> tuple[int, ...]:
        """Five layers of the target, which block heads read."""
        count = self.cfg.num_layers
        return tuple(round(1 + i * (count - 4) / 4) for i in range(5)) if count > 4 else tuple(range(count + 1))


def _eagle3(s: Sizes, kind: str = "eagle3", **fields: Any) -> Eagle3Head:
    cfg = s.cfg
    config = Eagle3Config(
        cfg.hidden_size, cfg.hidden_size, cfg.intermediate_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim,
        cfg.vocab_size, s.draft_vocab, cfg.aux_layers, rope_theta=cfg.rope_theta,
        num_layers=s.layers or LAYERS[kind], **fields,
    )  # fmt: skip
    config = dataclasses.replace(config, **s.heads.get(kind, {}))
    return s.filled(lambda: Eagle3Head(config, dtype=s.dtype))


def _last_state(s: Sizes, kind: str, head: type, config: type) -> Any:
    layer = s.layer(kind, s.cfg.family, tie_word_embeddings=False)
    return _with_tables(s, lambda *tables: head(config(layer, s.cfg.num_layers), *tables, dtype=s.dtype))


def _block(s: Sizes, kind: str, head: type, config: type, block: int) -> Any:
    sizes = {"intermediate_size": s.cfg.intermediate_size, "reads": s.reads, "block_size": block}
    own = {**sizes, **s.heads.get(kind, {})}
    width, reads, block = (own.pop(name) for name in sizes)
    layer = s.layer(kind, "dflash", qk_norm=True, tie_word_embeddings=False, intermediate_size=width)
    config = config(layer, reads, block, 0, s.cfg.vocab_size, **own)
    return _with_tables(s, lambda *tables: head(config, *tables, dtype=s.dtype))


def _with_tables(s: Sizes, build: Callable[..., Any]) -> Any:
    """A head with random parameters of its own and the target's tables."""
    tables = s.tables
    head = s.filled(lambda: build(*tables))
    head.embedding, head.lm_head = tables
    return head


def _medusa(s: Sizes) -> MedusaHeads:
    heads = s.heads.get("medusa", {}).get("num_heads", s.depth)
    config = MedusaConfig(heads, s.cfg.hidden_size, s.cfg.vocab_size, s.cfg.num_layers)
    return s.filled(lambda: MedusaHeads(config, dtype=s.dtype))


_MADE: dict[str, Callable[[Sizes], Any]] = {
    "eagle3": _eagle3,
    "peagle": lambda s: _eagle3(s, "peagle", mask_token_id=0),
    "eagle1": lambda s: _last_state(s, "eagle1", Eagle1Head, Eagle1Config),
    "mtp": lambda s: _last_state(s, "mtp", MtpHead, MtpConfig),
    "medusa": _medusa,
    "dflash": lambda s: _block(s, "dflash", DflashHead, DflashConfig, s.depth + 1),
    "dspark": lambda s: _block(s, "dspark", DsparkHead, DsparkConfig, s.depth),
    "dflash2": lambda s: _block(s, "dflash2", Dflash2Head, Dflash2Config, s.depth + 1),
    "draft_model": lambda s: s.filled(lambda: registry.build(s.small, s.dtype)),
    "suffix": lambda s: kinds.find("suffix").for_target(s.target),
    "ngram": lambda s: kinds.find("ngram").for_target(s.target),
}
#: What --drafter takes, each also with BESIDE, where it does not look up by itself.
NAMES = tuple(_MADE)


def parse(text: str) -> tuple[str, tuple[Tier, ...]]:
    """A drafter's name, and the tiers that stand behind it: `eagle3=chain-5,tree-3x4/16`; none: not said.

    Raises:
      ValueError: another text.
    """
    name, _, tiers = text.partition("=")
    kind, hybrid, _ = parts(name)
    if kind not in NAMES or (hybrid and kind in ("suffix", "ngram")):
        raise ValueError(f"a drafter is one of {', '.join(NAMES)}, or one with {BESIDE} behind it, got {name!r}")
    own = tuple(map(parse_tier, tiers.split(","))) if tiers else ()
    if any(not tier.is_chain for tier in own) and not draws_trees(name):
        raise ValueError(f"{kind} drafts chains only, got {text!r}")
    return name, own


def parts(name: str) -> tuple[str, bool, int | None]:
    """(the kind, whether it is a hybrid, how deep its model drafts or None: as SpeculationConfig's) of a name."""
    match = re.fullmatch(r"(.*?)(\+suffix(?::([1-9]\d?))?)?", name)
    assert match is not None
    return match[1], match[2] is not None, int(match[3]) if match[3] else None


def draws_trees(name: str) -> bool:
    """Whether a drafter proposes trees."""
    return kinds.find(parts(name)[0]).trees


def bound(
    name: str, sizes: Sizes, geo: Geometry, ready: Callable[[Any], Any] | None = None
) -> tuple[Drafter, Any]:  # fmt: skip
    """(drafter, its parameters) of a name that `parse` knows; `ready`: what is done to its module before."""
    kind, hybrid, depth = parts(name)
    speculation = SpeculationConfig(hybrid=hybrid, hybrid_depth=depth)
    module = _MADE[kind](sizes)
    if ready is not None and isinstance(module, nnx.Module):
        module = ready(module)
    drafter, params = kinds.find(kind).bind(module, geo, speculation)
    assert drafter is not None
    return joined(drafter, sizes.cfg.vocab_size, speculation), params
