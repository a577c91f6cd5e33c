"""The default policy decides as it did: what is made quicker or moved must not change a choice.

What stands in decisions.json was recorded by `python tests/adaptive/test_adaptive_decisions.py`, which writes it anew:
where a rule of the policy is changed on purpose, and only then.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from mixed import Crowd, Table, h200, mixed

from jaxspec.adaptive import CostTable, GoodputPolicy
from jaxspec.adaptive.arms import Arm
from jaxspec.tier import PLAIN, Choice, Tier

RECORDED = Path(__file__).with_name("decisions.json")
TIERS = [PLAIN, Tier(1), Tier(2), Tier(4), Tier(6)]
#: Batch size, budgets, factor by which the costs of drafting are told wrong, and rounds of crowds in a row.
SCENES: dict[str, tuple[int, Sequence[float], float, Sequence[tuple[Crowd, int]]]] = {
    "mixed 64": (64, (2.0, 4.0), 1.0, [(mixed(64), 130), (mixed(64, share=0.0), 60)]),
    "wrong 16": (16, (2.0,), 1.7, [(mixed(16, share=1.0), 120)]),
    "alone": (1, (), 1.0, [(Crowd([0.8]), 150), (Crowd([0.2]), 150), (Crowd([0.85]), 150)]),
    "few": (4, (), 0.6, [(Crowd([0.3] * 4), 200), (Crowd([0.9] * 4), 100)]),
}


def decided(scene: str) -> str:
    """The choices of a scene, each with how often it came in a row: "off*3 chain-2*10 chain-6/192*4"."""
    batch, budgets, wrong, crowds = SCENES[scene]
    packed = [Arm(Tier(6), budget) for budget in budgets]
    keys = [*((tier, None) for tier in TIERS), *((arm.tier, arm.tokens(batch)) for arm in packed)]
    seconds = {(t, batch, n): h200(t, batch, n) * (wrong if t.depth else 1.0) for t, n in keys}
    policy, table = GoodputPolicy(TIERS, CostTable(seconds), packed=packed), Table(batch, noise=0.03, seed=3)
    choices = itertools.chain.from_iterable(table.play(policy, crowd, rounds).choices for crowd, rounds in crowds)
    return " ".join(_runs(choices))


def _runs(choices: Iterator[Choice]) -> Iterator[str]:
    name = lambda choice: choice.tier.name + ("" if choice.tokens is None else f"/{choice.tokens}")
    for said, many in itertools.groupby(map(name, choices)):
        yield f"{said}*{len([*many])}"


@pytest.mark.parametrize("scene", SCENES)
def test_decisions_are_those_that_were_recorded(scene: str):
    assert decided(scene) == json.loads(RECORDED.read_text())[scene]


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({scene: decided(scene) for scene in SCENES}, indent=1) + "\n")
