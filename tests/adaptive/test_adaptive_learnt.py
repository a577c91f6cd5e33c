"""What a policy has learnt survives a restart: the file, what of it is refused, and what a second start gains."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from mixed import Table, h200, mixed

from jaxspec.adaptive import CostTable, GoodputPolicy, StaticPolicy
from jaxspec.adaptive.arms import Arm
from jaxspec.adaptive.learnt import Keeper, Learnt, digest
from jaxspec.tier import PLAIN, Tier

TIERS, BUCKET = [PLAIN, Tier(1), Tier(3), Tier(5)], 16
PACKED = [Arm(Tier(5), 2.0)]
IDENTITY = {"device": "a chip", "model": "a model", "drafter files": "0123"}


def policy(wrong: float = 1.0) -> GoodputPolicy:
    """Told costs of drafting that are wrong by a factor."""
    seconds: dict[Any, float] = {(t, BUCKET): h200(t, BUCKET) * (wrong if t.depth else 1.0) for t in TIERS}
    (tokens,) = (arm.tokens(BUCKET) for arm in PACKED)
    seconds[Tier(5), BUCKET, tokens] = h200(Tier(5), BUCKET, tokens) * wrong
    return GoodputPolicy(TIERS, CostTable(seconds), packed=PACKED)


@pytest.fixture(scope="module")
def taught() -> GoodputPolicy:
    one = policy()
    Table(BUCKET, noise=0.02).play(one, mixed(BUCKET), 150)
    return one


def test_the_file_says_what_was_learnt(taught: GoodputPolicy, tmp_path: Path):
    learnt = taught.learnt()
    assert Learnt.from_json(learnt.to_json()) == learnt
    plain, error = learnt.seconds[PLAIN, BUCKET, None]
    for (tier, bucket, tokens), (seconds, off) in learnt.seconds.items():
        assert seconds / plain == pytest.approx(h200(tier, bucket, tokens) / h200(PLAIN, bucket), rel=0.15)
        assert 0 <= off < 0.2 and error < 0.1
    assert len(learnt.seconds) == 5 and 0.6 < learnt.rates[BUCKET][0] < 0.8
    keeper = Keeper(tmp_path / "new", IDENTITY, clock=lambda: 0.0)
    keeper.keep(taught)
    assert not keeper.path.exists()  # once a minute at most
    keeper.keep(taught, at_once=True)
    again = policy()
    assert keeper.recall(again) and [p.name for p in keeper.path.parent.iterdir()] == [keeper.path.name]
    assert again.learnt().seconds == {key: pytest.approx((s, max(e, 0.03))) for key, (s, e) in learnt.seconds.items()}
    assert again.seconds(Tier(3), BUCKET) / again.seconds(PLAIN, BUCKET) == pytest.approx(
        taught.seconds(Tier(3), BUCKET) / taught.seconds(PLAIN, BUCKET), rel=0.02
    )
    assert not keeper.recall(StaticPolicy(Tier(1)))


def test_a_second_start_needs_no_first_looks(taught: GoodputPolicy):
    """Neither where it is told the truth nor where its start-up table was measured beside other work."""
    for wrong in (1.0, 1.7):
        fresh, again = policy(wrong), policy(wrong)
        again.recall(taught.learnt())
        a, b = (Table(BUCKET, noise=0.02, seed=1).play(one, mixed(BUCKET), 60) for one in (fresh, again))
        assert b.goodput() >= 1.01 * a.goodput()
        assert b.switches() <= (0 if wrong == 1.0 else a.switches())


def test_what_was_learnt_is_overruled_by_what_is_seen(taught: GoodputPolicy):
    again = policy()
    again.recall(taught.learnt())
    dear = lambda tier, batch, tokens=None: h200(tier, batch, tokens) * (3.0 if tier.depth else 1.0)
    played = Table(BUCKET, dear, noise=0.02, seed=2).play(again, mixed(BUCKET), 120)
    assert [choice.tier for choice in played.choices[-60:]].count(PLAIN) >= 55


def test_entries_that_a_policy_lacks_are_left_out(taught: GoodputPolicy):
    other = GoodputPolicy([Tier(1)], CostTable({(t, 4): h200(t, 4) for t in TIERS[:2]}))
    other.recall(taught.learnt())
    assert other.seconds(Tier(1), 4) == pytest.approx(h200(Tier(1), 4))


def test_another_engines_file_is_refused(taught: GoodputPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    keeper = Keeper(tmp_path, IDENTITY)
    keeper.keep(taught, at_once=True)
    text = keeper.path.read_text()
    for name in IDENTITY:
        assert Keeper(tmp_path, {**IDENTITY, name: "another"}).path != keeper.path
    one, told = policy(), []
    for broken, why in (
        (text.replace("a chip", "another chip"), "it is of device 'another chip', and this engine has 'a chip'"),
        (text.replace("jaxspec-learnt-1", "jaxspec-learnt-0"), "its format must be 'jaxspec-learnt-1'"),
        (text[:-20], "Expecting|Unterminated|delimiter"),
        ("[]", "its format must be"),
        (json.dumps({**json.loads(text), "start": float("nan")}), "start must lie between 0 and 1, got nan"),
        (json.dumps({**json.loads(text), "curves": [[1, 2, 3]]}), "too many values"),
        (json.dumps({key: x for key, x in json.loads(text).items() if key != "rates"}), "'rates'"),
        (" " * (1 << 21), "at most 1048576 characters"),
    ):
        keeper.path.write_text(broken)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert not keeper.recall(one)
        told.append(caplog.text)
        assert any(part in caplog.text for part in why.split("|")), (why, caplog.text)
    assert one.learnt() == policy().learnt()


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": {(Tier(1), 4, None): (-1.0, 0.1)}},
        {"seconds": {(Tier(1), 4, None): (1.0, float("inf"))}},
        {"rates": {4: (1.5,)}},
        {"rates": {0: (0.5,)}},
        {"means": {(Tier(1), True): 0.5}},
        {"pauses": {4: (-1.0, 3.0)}},
        {"shares": {(Tier(5), 4, 8): ("1", 1.0)}},
    ],
)
def test_figures_out_of_range_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match="must|keyed"):
        dataclasses.replace(Learnt(), **wrong)


def test_checkpoints_differ_by_their_files(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"12")
    first = digest(tmp_path)
    (tmp_path / "notes.txt").write_text("no part of it")
    assert digest(tmp_path) == first != digest(None)
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert digest(tmp_path) != first
