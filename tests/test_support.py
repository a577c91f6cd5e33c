"""docs/support.md is what tests say and what is refused, and a test that says more than it does fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import support


def test_the_page_is_what_tests_say(collected: list[pytest.Item], tmp_path: Path):
    """Of this run, where it has all of them; else they are collected in another process."""
    folder = support.ROOT / "tests"
    marked = [str(path) for path in sorted(folder.rglob("test_*.py")) if "mark.covers(" in path.read_text()]
    whole = {str(item.path) for item in collected if "::" not in " ".join(item.config.args)}
    if whole.issuperset(marked):
        support.write(tmp_path, collected)
    else:
        options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--write-support", str(tmp_path)]
        subprocess.run([sys.executable, "-m", "pytest", *options, *marked], cwd=support.ROOT, check=True)
    for kept in (support.PAGE, support.TESTS):
        assert (tmp_path / kept.name).read_text() == kept.read_text(), f"{kept} is stale: {support.COMMAND}"


def test_what_a_test_says_and_does_not_is_named():
    watch = support.Watch()
    assert watch.missed({"eagle3": ["trees"], "ngram": []}) == ["trees with eagle3"]
    seen: Any = support.Seen(type("Engine", (), {"runner": type("R", (), {"drafter": None}), "facts": None}), None)  # type: ignore
    seen.engine.facts = type("Facts", (), {"drafter": "eagle3"})
    watch._seen[0] = seen
    seen.tiers = {support.Tier(3, 2, 7)}
    assert watch.missed({"eagle3": ["trees"]}) == ["trees with eagle3"], "no draft was accepted"
    seen.accepted = 1
    assert not watch.missed({"eagle3": ["trees"]})
    assert watch.missed({"eagle3": ["tiers"], "ngram": ["trees"]}) == ["tiers with eagle3", "trees with ngram"]


@pytest.mark.parametrize(("mark", "message"), [(("tree",), "covers \\['tree'\\]; there is"), ((), "got 'eagel3'")])
def test_marks_that_name_nothing_are_refused(mark: tuple[str, ...], message: str, request: pytest.FixtureRequest):
    item: Any = request.node
    item.add_marker(pytest.mark.covers(*mark, kind="eagel3"))
    try:
        with pytest.raises(pytest.UsageError, match=message):
            support.covered_by(item)
    finally:
        item.own_markers.pop()
