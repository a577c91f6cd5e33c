"""Profiles: written and read back, and refused where they are of something else, broken, or lack a cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.tier import PLAIN, Tier

IDENTITY = {"device": "one", "model": "tiny"}
PAIRS = [(tier, bucket, context) for tier in (PLAIN, Tier(2)) for bucket in (1, 4) for context in (64, 512)]
PROFILE = CostProfile(
    IDENTITY, {"jax": "1"}, {(c, (t, b, None)): 1e-3 * (1 + t.depth) + 1e-5 * b + 1e-7 * b * c for t, b, c in PAIRS}
)


def written(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(PROFILE.to_json()), **changes}))
    return path


def test_round_trip_and_look_up(tmp_path: Path):
    profile = CostProfile.load(written(tmp_path))
    assert profile == PROFILE and profile.contexts == (64, 512)
    for context, near in ((0, 64), (100, 64), (300, 512), (9000, 512)):
        assert profile.table(context).seconds(Tier(2), 4) == PROFILE.seconds[near, (Tier(2), 4, None)]
    profile.check(IDENTITY, {PLAIN: (1, 4), Tier(2): (4,)}, "here")
    line = profile.linear(PLAIN)
    assert line.per_context == pytest.approx(1e-7) and line.r2 == pytest.approx(1) and line.worst < 1e-6


@pytest.mark.parametrize(
    ("identity", "reachable", "words"),
    [
        ({**IDENTITY, "device": "two"}, {}, "measured with device 'one', and this engine has 'two'"),
        ({"device": "one"}, {}, "with model 'tiny', and this engine has None"),
        ({**IDENTITY, "dtype": "bfloat16"}, {}, "with dtype None, and this engine has 'bfloat16'"),
        (
            IDENTITY,
            {Tier(2): (1, 2, 3, 4)},
            r"lacks chain-2 in buckets \[2, 3\] at context 64; it has buckets \[1, 4\]",
        ),
        (IDENTITY, {Tier(2): (4, 8)}, "measured for up to 4 requests at once, and this engine runs 8: measure with"),
        (IDENTITY, {Tier(3): (1,)}, r"lacks chain-3 in buckets \[1\] at context 64; .* of \['off', 'chain-2'\]"),
    ],
)
def test_of_another_engine(identity, reachable, words):
    with pytest.raises(ValueError, match=f"profile here .*{words}"):
        PROFILE.check(identity, reachable, "here")


ROUND = {"tier": [0, 1, 1], "bucket": 1, "context": 0, "seconds": 1.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "other"}, "format must be 'jaxspec-profile-1', got 'other'"),
        ({"more": 1}, r"unknown keys \['more'\]"),
        ({"identity": {"device": 3}}, "identity must map names to texts"),
        ({"rounds": []}, "it has no rounds"),
        ({"rounds": [3]}, ""),
        ({"rounds": [{"tier": [0, 1, 1]}]}, r"a round has .* got \['tier'\]"),
        ({"rounds": [{**ROUND, "seconds": -1.0}]}, "off in bucket 1 must be a positive finite number"),
        ({"rounds": [{**ROUND, "bucket": 0}]}, "bucket of at least 1"),
        ({"rounds": [{**ROUND, "context": -1}]}, "a context must be an int of at least 0, got -1"),
        ({"rounds": [{**ROUND, "tier": [2, 1, 9]}]}, "num_nodes"),
        ({"rounds": [ROUND, ROUND]}, "off in bucket 1 at context 0 stands there twice"),
    ],
)
def test_broken_files(tmp_path: Path, changes, words):
    with pytest.raises(ValueError, match=f"profile .*profile.json' is broken: .*{words}"):
        CostProfile.load(written(tmp_path, **changes))


def test_files_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "torn.json").write_text(PROFILE.to_json()[:50])
    for name in ("torn.json", "absent.json"):
        with pytest.raises(ValueError, match=f"{name}' cannot be read"):
            CostProfile.load(tmp_path / name)
