"""The page of a run: one file that loads nothing, whose arithmetic is Python's, and which a browser draws."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench.__main__ import main
from jaxspec.bench.page import command
from jaxspec.bench.simulate import breakeven, costs

ASSETS = Path(command.__file__).parent / "assets"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
#: What a name must not be able to do.
HOSTILE = "</script><img src=x onerror=alert(1)> \u2028"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with closed and open loops, a change of texts, and a policy that spends a budget."""
    path = tmp_path_factory.mktemp("page") / "sim.json"
    argv = ["simulate", "--concurrency", "2,4", "--rate", "8", "--acceptance", "good/poor@0.3", "--seconds", "0.9"]
    argv += ["--depths", "1,3", "--policy", "adaptive", "--policy", 'static {"depth": 3, "budget": 1}']
    assert main([*argv, "--json", str(path)]) == 0
    return path


def page(simulated: Path, out: Path, **changes: Any) -> str:
    run = {**json.loads(simulated.read_text()), **changes}
    source = out.with_suffix(".json")
    source.write_text(json.dumps(run))
    assert main(["report", str(source), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_the_page_is_one_file_that_asks_for_nothing(simulated: Path, tmp_path: Path):
    run = json.loads(simulated.read_text())
    run["cells"][0]["name"] = HOSTILE
    text = page(simulated, tmp_path / "page.html", cells=run["cells"])
    plain = text.replace("http://www.w3.org/2000/svg", "")  # a name of what is drawn, no address
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|<link|<img|<iframe|\bfetch\(|XMLHttp|innerHTML", plain)
    assert text.count("<script") == 2 == text.count("</script>") and "/*" + "DATA" not in text
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["cells"][0]["name"] == HOSTILE and not data["measured"] and data["profile"]["deepest"] == 3


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_pages_arithmetic_is_pythons():
    cases, wanted, all_curves = [], [], []
    for name in ("h100-adaspec", "v6e-roofline", str(Path(__file__).resolve().parents[2] / "docs/h200/rounds.json")):
        device = costs.load(name)
        curves = breakeven.curves(device, device.deepest or 7)
        all_curves.append(curves.to_dict())
        for batch in (1, 3, 24, 3000):
            for context in (0, 5000):
                for depth, rate, cost in ((0, 0.5, None), (1, 0.0, 0.1), (2, 0.83, None), (curves.deepest, 1.0, 0.02)):
                    cases.append([len(all_curves) - 1, batch, context, depth, rate, cost])
                    wanted.append([
                        breakeven.length(rate, depth), breakeven.seconds(curves, batch, context, depth, cost),
                        breakeven.speedup(curves, batch, context, depth, rate, cost),
                        breakeven.best_depth(curves, batch, context, rate, cost),
                        breakeven.break_even(curves, batch, context, depth, cost),
                    ])  # fmt: skip
    script = f"""
        const m = require({json.dumps(str(ASSETS / "model.js"))}), curves = {json.dumps(all_curves)};
        console.log(JSON.stringify({json.dumps(cases)}.map(([i, b, x, d, r, k]) => [m.length(r, d),
          m.seconds(curves[i], b, x, d, k), m.speedup(curves[i], b, x, d, r, k), m.bestDepth(curves[i], b, x, r, k),
          m.breakEven(curves[i], b, x, d, k)])))"""
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=300, check=True)
    for case, mine, its in zip(cases, wanted, json.loads(done.stdout), strict=True):
        assert (its[4] is None) == (mine[4] is None), case
        assert its[:4] == pytest.approx(mine[:4], rel=1e-9) and (its[4] or 0) == pytest.approx(mine[4] or 0), case
    assert {row[4] is None for row in wanted} == {True, False} and len({row[3] for row in wanted}) > 2


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_draws_it(simulated: Path, tmp_path: Path):
    run = json.loads(simulated.read_text())
    run["cells"][0]["name"] = HOSTILE
    page(simulated, tmp_path / "page.html", cells=run["cells"])
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}",
         "--enable-logging=stderr", "--virtual-time-budget=2000", "--window-size=1100,900", "--dump-dom",
         (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, re.findall(".*CONSOLE.*", done.stderr)
    dom = done.stdout
    assert 'data-ready="yes"' in dom and "<img" not in dom and 'id="badge">Simulated' in dom
    drawn = re.findall(r'<svg[^>]*aria-label="([^"]*)"', dom)
    assert len(drawn) == 6 and not re.search(r"\bNaN\b|undefined|Infinity", dom.partition('id="data"')[0])
    # What the calculator says is what Python says of its start.
    curves = breakeven.Curves(**run["profile"])
    speed = breakeven.speedup(curves, 8, 1024, 3, 0.7)
    assert f"<b>{speed:.2f}×</b>" in html.unescape(dom)
    table = dom.partition('id="table">')[2].partition("</table>")[0]
    assert re.findall(r"<td>(off|chain-1|chain-3|adaptive)</td>", table) == ["off", "chain-1", "chain-3", "adaptive"]


def test_a_profile_of_ones_own_for_the_calculator(simulated: Path, tmp_path: Path):
    out = tmp_path / "page.html"
    assert main(["report", str(simulated), "--out", str(out), "--profile", "v5e-roofline"]) == 0
    data = json.loads(out.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert "v5e" in data["profile"]["label"] and "H100" in data["where"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "cannot be read"),
        ({"cells": 3}, "must be an output of `bench simulate --json`"),
        ({"cells": []}, "must hold at least 1 cell, got 0"),
        ({"cells": [{"name": "x", "policies": [{"policy": "off"}]}]}, "lacks ['acceptance', 'attainment', "),
    ],
)
def test_other_files_are_refused(
    change: dict[str, Any] | None, message: str, simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    path = tmp_path / "run.json"
    if change is not None:
        path.write_text(json.dumps({**json.loads(simulated.read_text()), **change}))
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "page.html").exists()
