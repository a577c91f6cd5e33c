"""The study of confidences: right ones look right, wrong ones are mended, and changes of the text are told apart."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import numpy as np
import pytest

from jaxspec.adaptive.policy import DraftLabels
from jaxspec.bench.studies import confidences

DEPTH = 3


def rounds(level: float, seed: int, count: int = 300) -> list[DraftLabels]:
    """Of 8 requests whose drafts are accepted as a logit says that lies `level` above what their drafter tells."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(count):
        said = rng.normal(0, 1, (8, DEPTH))
        right = np.cumprod(rng.random(said.shape) < 1 / (1 + np.exp(-said - level)), axis=1).astype(np.uint8)
        known = np.pad(right[:, :-1], ((0, 0), (1, 0)), constant_values=1)
        told = array("f", (1 / (1 + np.exp(-said))).astype(np.float32).tobytes())
        out.append(DraftLabels(DEPTH, told, bytes([1, 2, 3] * 8), b"\1" * 24, known.tobytes(), right.tobytes()))
    return out


def test_confidences_that_are_right_stay_so_and_others_are_mended(tmp_path: Path, capsys: pytest.CaptureFixture):
    texts = {"right": rounds(0.0, 0), "modest": rounds(1.5, 1)}
    kept = {name: [one.to_dict() for one in many] for name, many in texts.items()}
    (tmp_path / "confidences_eagle3.json").write_text(json.dumps(kept))
    out = tmp_path / "found.json"
    assert confidences.main(["--kind", "eagle3", "--read", str(tmp_path), "--json", str(out)]) == 0
    said, online, modest, mended, turn = json.loads(out.read_text())["confidences"]
    assert [row["how"] for row in (said, online, modest, mended)] == ["said", "online"] * 2
    for row in (said, online, mended):
        assert row["survival"] <= 0.02 and row["chance"] < 0.02, row
    assert modest["survival"] > 0.15 and modest["bias"] < -0.3 and len(modest["positions"]) == DEPTH
    # After a change the first rounds are off, and soon less so.
    first, *_, last = (window["survival"] - window["chance"] for window in turn["after"])
    assert first > 2 * last and last < 0.03
    assert "eagle3       turn   rounds 1 to 10:" in capsys.readouterr().out


def test_drafts_that_were_not_reached_are_no_steps():
    known, right = np.asarray([[1, 1, 0]], bool), np.asarray([[1, 0, 0]], bool)
    found = confidences.errors(np.asarray([[0.75, 0.5, 0.0]]), known, right)
    assert found["steps"] == pytest.approx((0.25 + 0.5) / 2) and found["accepted"] == 1
    assert found["positions"] == pytest.approx([0.25, 0.375, 0.0])
    assert found["bias"] == pytest.approx(0.125)
