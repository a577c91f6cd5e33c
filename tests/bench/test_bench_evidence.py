"""Evidence on the engine: loads that change, what is told of packed rounds, values of rounds, refusals."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest

from jaxspec.adaptive import registry
from jaxspec.adaptive.kind import Room
from jaxspec.adaptive.policy import DraftLabels
from jaxspec.bench.__main__ import main
from jaxspec.bench.evidence import command, drive, loads
from jaxspec.bench.simulate import tables
from jaxspec.bench.simulate.policies import settings_of
from jaxspec.bench.simulate.records import Outcome, Ran
from jaxspec.config import SpeculationConfig
from jaxspec.tier import Tier


def test_loads_change_as_they_say():
    switch, grow, mix = (loads.load(name, 6, 2.0) for name in ("switch", "grow", "mix"))
    assert [switch.kind(switch.phase(t), 3) for t in (0.0, 1.9, 2.0, 4.1)] == ["code", "code", "prose", "code"]
    assert switch.cuts and switch.key(0) == switch.key(2) != switch.key(1) and switch.places(1) == 6
    assert [grow.places(grow.phase(t)) for t in (0, 2, 4, 6, 100)] == [1, 2, 4, 6, 6] and not grow.cuts
    assert [loads.load("grow", 4, 1.0).places(p) for p in range(4)] == [1, 2, 4, 4]
    assert [mix.kind(0, place) for place in range(4)] == ["code", "prose", "code", "prose"]
    assert {loads.load(name, 2, 1.0).kind(0, 0) for name in ("code", "prose", "chat")} == {"code", "prose", "chat"}


def test_drafts_behind_what_a_budget_left_out_have_no_label():
    said = array("f", [0.9, 0.8, 0.5, 0.6, 0.5, 0.4])
    # The first row: two right, the third unknown. The second: the first is wrong, so that none behind it survives.
    labels = DraftLabels(3, said, bytes([1, 2, 3] * 2), b"\1\1\0\1\0\0", b"\1\1\0\1\0\0", b"\1\1\0\0\0\0")
    predicted, actual = drive.survivals(labels, 3, ((2.0, 0.5),))
    first = [1 / (1 + math.exp(-(2 * math.log(p / (1 - p)) + 0.5))) for p in (0.9, 0.6)]
    assert predicted == pytest.approx([first[0], first[0] * 0.8, first[1], first[1] * 0.5, first[1] * 0.2], rel=1e-6)
    assert actual == [True, True, False, False, False]


def ran(phase: int, depth: int, gained: int, tokens: int | None = None, seconds: float = 1.0) -> Ran:
    return Ran(0.0, phase, depth, tokens, 1, 1, seconds, gained, math.nan, math.nan)


def test_rounds_are_worth_what_fixed_tiers_made_of_phases_like_theirs():
    load = loads.load("switch", 1, 1.0)
    runs = {
        "off": Outcome(rounds=[ran(p, 0, 1) for p in range(4)]),
        "chain-2": Outcome(rounds=[ran(p, 2, (3, 1)[p % 2], seconds=2.0) for p in range(4)]),
        "mine": Outcome(rounds=[ran(0, 2, 3), ran(1, 0, 1), ran(3, 2, 2, tokens=2), ran(1, 1, 1, seconds=0.0)]),
    }
    drive.valued(load, runs, ["off", "chain-2"])
    assert [(r.value, r.best) for r in runs["mine"].rounds] == [(1.5, 1.5), (1.0, 1.0), (2.0, 1.0)]
    assert np.isfinite([r.value for r in runs["chain-2"].rounds]).all()


def test_the_engine_compiles_what_all_compared_policies_may_run(monkeypatch: pytest.MonkeyPatch):
    compared = command.Compared()
    named = [
        "adaptive",
        'static {"depth": 3, "budget": 0.5}',
        'schedule {"num_speculative_tokens_per_batch_size": [[1, 4, 1]]}',
    ]
    compared.members = tuple(settings_of(name, (0, 2, 3)) for name in named)
    monkeypatch.setitem(registry.KINDS, "compared", (command.__name__, "COMPARED"))
    settings = SpeculationConfig("compared", tiers=(Tier(2), Tier(3)))
    room = Room((1, 4), (1, 2, 4))
    assert compared.reachable(settings, room) == dict.fromkeys(map(Tier, range(4)), (1, 4))
    assert compared.budgets(settings, room)[Tier(3), 4] == (6,)
    for member in compared.members:
        wanted = member.policy_kind.budgets(member, Room((1, 4), (2, 3)))
        assert all(set(tokens) <= set(compared.budgets(settings, room)[pair]) for pair, tokens in wanted.items())


def test_runs_share_the_time_that_is_left():
    """Each of 2 cells has a run of 5 modes that is not recorded, and 3 that are; all take a little besides."""
    seconds = command._share(100.0, 2, 5, 3)
    assert 2 * 5 * (3 * (seconds + 0.1) + 0.4) == pytest.approx(100)
    assert command._share(math.inf, 2, 5, 3) == math.inf


def test_gains_over_the_tier_that_is_best_over_all_cells():
    def cell(**speeds: float) -> dict:
        return {"policies": [{"policy": name, "speed": s, "fixed": name != "mine"} for name, s in speeds.items()]}

    single, gains = tables._against_one([cell(off=1.0, deep=4.0, mine=4.0), cell(off=2.0, deep=1.0, mine=2.0)])
    assert single == "deep" and gains["mine"] == pytest.approx(2**0.5 - 1)
    assert tables._against_one([cell(off=0.0, mine=1.0)]) == (None, {})
    assert tables._noise([[1.0, 3.0]]) == pytest.approx(2**0.5 / 2) and tables._noise([[1.0]]) is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workloads", "code,songs"], "workloads must be among ['code',"),
        (["--batch-sizes", "0"], "batch-sizes must be integers from 1 to 1024, got '0'"),
        (["--tiers", "tree-4x3/16"], "tiers must be chains, got 'tree-4x3/16'"),
        (["--within", "0"], "within must be above 0 seconds, got 0.0"),
        (["--seconds", "0"], "seconds must be at least 0.1, got 0.0"),
        (["--policy", "oracle"], "policy 'oracle' knows what only a simulation does"),
        (["--policy", "bold"], "policy must be one of"),
        (["--json", "/absent/x.json"], "its directory does not exist"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    argv: list[str], message: str, capsys: pytest.CaptureFixture
):
    assert main(["adaptive", *argv]) == 2
    assert message in capsys.readouterr().err
