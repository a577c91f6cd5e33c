"""The documents: links and anchors lead somewhere, commands exist, lines fit, and the example is true."""

from __future__ import annotations

import importlib.util
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "checkpoints/README.md")), *ROOT.glob("docs/**/*.md")]
)
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"\bpython -m ([a-z_][\w.]*\w)")
#: Commands of others.
FOREIGN = {"pip", "pytest", "venv"}
WIDEST = 120


def outside_of_code(text: str) -> Iterator[str]:
    """The lines that are neither in a fenced block nor indented as code."""
    fenced = False
    before = ""
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        indented = line.startswith("    ") and (not before.strip() or before.startswith("    "))
        if not (fenced or fence or indented):
            yield line
        before = line


def anchors(document: Path) -> set[str]:
    """As GitHub makes them: of a heading's text, lower case, punctuation dropped, a number after what repeats."""
    found: set[str] = set()
    for line in outside_of_code(document.read_text(encoding="utf-8")):
        if heading := re.match(r"#+ +(.*?) *$", line):
            shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            repeats = (f"{name}-{again}" for again in range(1, 100))
            found.add(name if name not in found else next(other for other in repeats if other not in found))
    return found


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_relative_link_and_anchor_leads_somewhere(document: Path) -> None:
    prose = "\n".join(outside_of_code(document.read_text(encoding="utf-8")))
    broken = []
    for link in LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        to = (document.parent / path).resolve() if path else document
        if not to.exists() or (anchor and anchor not in anchors(to)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_command_is_a_module_that_runs(document: Path) -> None:
    missing = []
    for name in sorted(set(COMMAND.findall(document.read_text(encoding="utf-8"))) - FOREIGN):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None:
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_no_line_of_prose_is_too_wide(document: Path) -> None:
    wide = [
        line
        for line in outside_of_code(document.read_text(encoding="utf-8"))
        if len(line) > WIDEST and not line.startswith("|") and not LINK.search(line)
    ]
    assert not wide


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """docs/speculate.py, imported."""
    return runpy.run_path(str(ROOT / "docs" / "speculate.py"))


@pytest.mark.parametrize(("seed", "temperature"), [(7, 0.8), (8, 1.0), (0, 0.2), (1, 1e-6)])
def test_the_example_writes_what_plain_decoding_writes(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, seed: int, temperature: float
) -> None:
    shared = example["speculate"].__globals__
    monkeypatch.setitem(shared, "SEED", seed)
    monkeypatch.setitem(shared, "TEMPERATURE", temperature)
    text, rounds = [1], 0
    while len(text) <= 300:
        longer = example["speculate"](text)
        assert longer[: len(text)] == text and 1 <= len(longer) - len(text) <= example["DEPTH"] + 1
        text, rounds = longer, rounds + 1
    assert text == example["decode"]([1], len(text) - 1)
    assert (len(text) - 1) / rounds > 1.5  # drafts are accepted: 1 is plain decoding
    assert len(set(text)) > 5  # and the text is none that repeats itself


def test_the_example_is_short_and_prints_what_the_document_shows(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "docs" / "speculate.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out.strip()
    assert shown in (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
