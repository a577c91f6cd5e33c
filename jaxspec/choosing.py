"""What a configured policy can reach, and how it is built: what has to be compiled, known before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.adaptive import registry as policies
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.adaptive.kind import Room
from jaxspec.adaptive.policy import TierPolicy
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.defaults import candidate_budgets, candidate_steps
from jaxspec.drafters import registry
from jaxspec.drafters.kind import DrafterKind
from jaxspec.drafters.rounding import check_weights
from jaxspec.models import few_rows_fit
from jaxspec.tier import Tier

#: Context tokens of a row for which a profile is looked up.
_USUAL_CONTEXT = 256
#: How much deeper than its others a hybrid's tier is that only looks up.
_LOOKUP = 2


@dataclasses.dataclass(frozen=True)
class PendingPolicy:
    """A policy that is still to be built: it may need costs, which need executables.

    Attributes:
      reachable: {tier: buckets} to compile. budgets: the packed rounds among them.
    """

    reachable: dict[Tier, tuple[int, ...]]
    budgets: dict[tuple[Tier, int], tuple[int, ...]]
    needs_cost: bool
    build: Callable[[CostTable | None], TierPolicy]


def choose_policy(
    speculation: SpeculationConfig, buckets: Sequence[int], drafts: bool, trees: bool, deepest: int | None = None,
    default_steps: tuple[int, ...] | None = None,
) -> PendingPolicy:  # fmt: skip
    """What to compile, and how to build the policy once costs are known.

    Args:
      deepest: most tokens that the drafter can propose in a row, by which the default's depths are clipped. Depths
        that a user asked for are the drafter's to refuse.
      default_steps: the default's depths; None: those of this process's device, which is initialised for it.

    Raises:
      ValueError: a configuration that the drafter cannot serve.
    """
    if not drafts and (what := speculation.drafts_asked):
        raise ValueError(f"SpeculationConfig.{what} needs a drafter, got drafter {registry.NONE!r}")
    kind = speculation.policy_kind if drafts else policies.find(policies.OFF)
    if kind.drafts and speculation.topk > 1 and not trees:
        raise ValueError(f"this drafter proposes chains only (topk 1), got topk {speculation.topk}")
    steps = candidate_steps() if default_steps is None else default_steps
    steps = steps if deepest is None else tuple(min(step, deepest) for step in steps)
    # What costs no model may look further.
    lookups = (_LOOKUP * max(steps) if deepest is None else deepest,) if speculation.hybrid else ()
    room = Room(tuple(buckets), steps, candidate_budgets() if default_steps is None else (), lookups)
    reachable = kind.reachable(speculation, room)
    if not speculation.hybrid and any(tier.lookup for tier in reachable):
        raise ValueError(f"tiers that only look up are for hybrids, got {[str(tier) for tier in reachable]}")
    if not trees and not all(tier.is_chain for tier in reachable):
        raise ValueError(f"this drafter proposes chains only, got tiers {[str(tier) for tier in reachable]}")
    budgets = kind.budgets(speculation, room)
    return PendingPolicy(reachable, budgets, kind.needs_costs, lambda cost: kind.build(speculation, room, cost))


def check_choice(
    kind: DrafterKind[Any], speculation: SpeculationConfig, engine: EngineConfig,
    default_steps: tuple[int, ...] | None = None,
) -> None:  # fmt: skip
    """Refuses what a kind of drafter cannot honour, as far as that shows before anything is loaded.

    Args:
      default_steps: see choose_policy.

    Raises:
      ValueError: names the setting and both values.
    """
    drafts = kind.drafts and speculation.policy_kind.drafts
    choice = choose_policy(speculation, engine.buckets, kind.drafts, kind.trees, default_steps=default_steps)
    if drafts:
        speculation.check_lookups(kind.looks_up, kind.remembers)
        check_weights(kind, speculation.draft_quantization)
    engine.check_ring(drafts, kind.reads_states)
    if engine.batch_invariant:
        check_invariant_tiers(engine, choice.reachable)


def check_invariant_tiers(engine: EngineConfig, tiers: Iterable[Tier], most: int | None = None) -> None:
    """Refuses tiers in whose rounds `batch_invariant` could not hold.

    Args:
      most: tokens of a round that the target has kernels for; None: it is not known yet.

    Raises:
      ValueError: names the tier.
    """
    me, of = "batch_invariant=True", "any model" if most is None else "this model"
    most = few_rows_fit.MOST_ROWS if most is None else most
    for tier in tiers:
        if not tier.is_chain:
            raise ValueError(
                f"{me} is for chains, whose nodes stand where they will lie once accepted, got tier {tier.name}"
            )
        if (tokens := engine.max_batch_size * tier.num_nodes) > most:
            raise ValueError(
                f"{me} is for rounds of at most {most} tokens with {of}, got {tokens}: max_batch_size="
                f"{engine.max_batch_size} and tier {tier.name}"
            )


def profiled(path: str | Path, choice: PendingPolicy, identity: Mapping[str, str], policy: str) -> CostTable:
    """The costs of a file.

    Raises:
      ValueError: it is broken, of another engine or lacks a cost, or the policy does not want costs.
    """
    if not choice.needs_cost:
        raise ValueError(f"profile {str(path)!r} is for policies that weigh costs, got policy {policy!r}")
    profile = CostProfile.load(path)
    profile.check(identity, choice.reachable, repr(str(path)), choice.budgets)
    return profile.table(_USUAL_CONTEXT)
