"""Batches depend on the step alone; generated rows survive their file; the draft vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxspec.train import data
from jaxspec.train.eagle3 import draft_vocabulary


def generated(rows: int = 10, length: int = 8) -> data.Generated:
    rng = np.random.default_rng(0)
    return data.Generated(
        tokens=rng.integers(0, 13, (rows, length)).astype(np.int32),
        prompt_length=rng.integers(2, 5, rows).astype(np.int32),
        kind=np.where(np.arange(rows) % 2 == 0, "code", "prose"),
        held_out=np.arange(rows) >= rows - 2,
        temperature=np.linspace(0, 1, rows).astype(np.float32),
    )


@pytest.mark.parametrize("steps", [[0, 1, 2, 3, 4, 5, 6, 7], [6, 1, 7, 0, 3]])
def test_window_batches_are_a_function_of_the_step(steps: list[int]) -> None:
    tokens = np.arange(100, dtype=np.int32)
    in_order = data.Batches(tokens, length=7, batch=3, seed=5)
    expected = {step: in_order(step) for step in range(8)}
    jumping = data.Batches(tokens, length=7, batch=3, seed=5)
    for step in steps:
        np.testing.assert_array_equal(jumping(step), expected[step])
    assert all(np.array_equal(b[:, 1:] - b[:, :-1], np.ones((3, 7))) for b in expected.values())
    assert not np.array_equal(expected[0], data.Batches(tokens, 7, 3, seed=6)(0))


def test_an_epoch_of_windows_repeats_none() -> None:
    batches = data.Batches(np.arange(100, dtype=np.int32), length=7, batch=3, seed=0)
    first = np.concatenate([batches(step)[:, 0] for step in range(4)])
    assert len(set(first.tolist())) == 12


def test_row_batches_are_a_function_of_the_step_and_use_every_row() -> None:
    rows = np.arange(12, dtype=np.int32)[:, None] * np.ones((1, 5), np.int32)
    batches = data.RowBatches(rows, batch=4, seed=1)
    epochs = [np.concatenate([batches(e * 3 + i)[:, 0] for i in range(3)]) for e in range(2)]
    assert [sorted(e.tolist()) for e in epochs] == [list(range(12))] * 2
    assert not np.array_equal(epochs[0], epochs[1])
    np.testing.assert_array_equal(data.RowBatches(rows, 4, 1)(4), batches(4))


def test_batches_refuse_too_little_data() -> None:
    with pytest.raises(ValueError, match="holds 9 tokens.*at least 10"):
        data.Batches(np.zeros(9, np.int32), length=4, batch=1, seed=0)
    with pytest.raises(ValueError, match="hold 3 rows.*at least 4"):
        data.RowBatches(np.zeros((3, 5), np.int32), batch=4, seed=0)


def test_generated_survives_its_file(tmp_path: Path) -> None:
    before = generated()
    before.save(tmp_path / "tokens.npz")
    after = data.Generated.load(tmp_path / "tokens.npz")
    for name, value in vars(before).items():
        np.testing.assert_array_equal(getattr(after, name), value)
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.npz"]
    np.savez(tmp_path / "other.npz", tokens=before.tokens)
    with pytest.raises(ValueError, match=r"\['held_out', 'kind', 'prompt_length', 'temperature'\] are missing"):
        data.Generated.load(tmp_path / "other.npz")


def test_output_counts_leave_prompts_out() -> None:
    g = generated()
    naive = np.zeros(13, int)
    for row, prompt in zip(g.tokens, g.prompt_length, strict=True):
        for token in row[prompt:]:
            naive[token] += 1
    np.testing.assert_array_equal(g.output_counts(13), naive)
    assert len(g.select(g.held_out)) == 2


def test_draft_vocabulary_by_coverage_and_by_size() -> None:
    counts = np.array([1, 50, 0, 30, 0, 2, 10, 7, 0, 0, 0, 0])
    assert draft_vocabulary(counts, None, 0.9, multiple=1).tolist() == [1, 3, 6]
    assert draft_vocabulary(counts, None, 0.9, multiple=4).tolist() == [1, 3, 6, 7]
    assert draft_vocabulary(counts, None, 0.995, multiple=4).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert draft_vocabulary(counts, None, 0.995, multiple=11).tolist() == list(range(12))
    assert draft_vocabulary(counts, 2, 0.9).tolist() == [1, 3]
    with pytest.raises(ValueError, match="vocab_size 12, got 13"):
        draft_vocabulary(counts, 13, 0.9)
    with pytest.raises(ValueError, match=r"\(0, 1\], got 1.5"):
        draft_vocabulary(counts, None, 1.5)


def test_documents_are_held_out_by_name_alone() -> None:
    names = [f"doc/{i}" for i in range(2000)]
    held = [data.Document(n, "code", "").held_out for n in names]
    assert held == [data.Document(n, "prose", "other text").held_out for n in names]
    assert 0.03 < np.mean(held) < 0.07
