"""Queues, built-in prompts, and prompt files with their errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxspec.bench.offline import prompts
from jaxspec.bench.offline.workloads import FILE, Passage, built_in, load_prompts, queue

LIBRARY = built_in()


def test_built_in_prompts_are_many_and_different():
    for texts in (prompts.CODE, prompts.PROSE):
        assert len(texts) >= 16
        # Different from the first line on, so that no prefix is shared.
        assert len({text[:24] for text in texts}) == len(texts)
        assert all(75 <= len(text) <= 280 for text in texts)


@pytest.mark.parametrize(("batch_size", "count"), [(1, 2), (2, 2), (3, 3), (16, 16)])
def test_a_run_sends_whole_batches_and_at_least_two_prompts(batch_size: int, count: int):
    sent = queue("code", batch_size, 0, LIBRARY)
    assert len(sent) == count == len(set(sent))
    assert {p.kind for p in sent} == {"code"}


def test_a_longer_queue_sends_more_of_the_same_kind():
    assert [p.index for p in queue("code", 4, 1, LIBRARY, 3)] == [(12 + i) % len(prompts.CODE) for i in range(12)]
    assert [len(queue("switch", 2, 0, LIBRARY, waves)) for waves in (1, 4, 5)] == [8, 8, 16]
    assert len(queue("code", 1, 0, LIBRARY, 1)) == 2


def test_repeats_take_up_where_the_last_one_ended():
    indices = [[p.index for p in queue("prose", 8, repeat, LIBRARY)] for repeat in range(3)]
    many = len(prompts.PROSE)
    assert indices == [[(8 * r + i) % many for i in range(8)] for r in range(3)]


def test_switch_goes_back_and_forth_without_repeating_a_prompt():
    sent = [p for repeat in range(2) for p in queue("switch", 2, repeat, LIBRARY)]
    assert [p.kind for p in sent] == ["code", "code", "prose", "prose"] * 4
    assert len(set(sent)) == 16


def test_a_workload_without_prompts_is_refused():
    with pytest.raises(ValueError, match="'file' needs prompts of kinds"):
        queue(FILE, 1, 0, LIBRARY)


def test_prompt_files_hold_prompts_or_turns(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "one"}, {"question_id": 81, "category": "writing", "turns": ["two", "more"]}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    assert load_prompts(path) == [Passage(FILE, 0, "one"), Passage(FILE, 1, "two")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be an object with 'prompt' or 'turns', got list"),
        ('{"text": "x"}', r"must have 'prompt' or 'turns', got fields \['text'\]"),
        ('{"prompt": ""}', "'prompt' must be a non-empty text, got ''"),
        ('{"prompt": 7}', "'prompt' must be a non-empty text, got 7"),
        ('{"turns": []}', r"'turns' must be a list of at least 1 text, got \[\]"),
        ('{"turns": [null]}', r"'turns\[0\]' must be a non-empty text, got None"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"prompts\.jsonl, line 2: {message}"):
        load_prompts(path)


def test_unreadable_and_empty_files_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"absent\.jsonl' cannot be read"):
        load_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.jsonl' must hold at least 1 prompt, got 0"):
        load_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.jsonl' cannot be read"):
        load_prompts(tmp_path / "binary.jsonl")
