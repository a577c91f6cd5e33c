"""Training from a ring: no pass of the target, the same losses as with one, and a gate before anything is written."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpointing import hf
from jaxspec.models.layers import causal_attention
from jaxspec.ringfiles import RingDirectory
from jaxspec.train.data.ring import Ring, ring_of
from jaxspec.train.drafters import eagle
from jaxspec.train.objective import teacher
from jaxspec.train.run import gate

SMALL = ("--hidden-size", "16", "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--intermediate-size", "24")
STEPS = ("--ttt-steps", "2", "--draft-vocab-size", "13")


@pytest.fixture(scope="module")
def ring(tiny_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine would have gathered of tiny_files' texts."""
    path = tmp_path_factory.mktemp("ring")
    target = hf.load_model(tiny_files / "target")
    metadata = {"engine": "one", "layers": "[0, 1, 2, 3]", "hidden_size": "32", "vocab_size": "13"}
    directory = RingDirectory(path, 1 << 20, metadata)
    run = jax.jit(lambda tokens: target(tokens, jnp.arange(tokens.shape[1])[None], causal_attention, (0, 1, 2)))
    features, about = [], []
    for number, line in enumerate((tiny_files / "texts.jsonl").read_text().splitlines()):
        row = json.loads(line)
        text, prompt = [*row["prompt_token_ids"], *row["output_token_ids"]], len(row["prompt_token_ids"])
        hidden, aux = run(jnp.asarray([text]))
        features.append(np.concatenate([aux[0], hidden[0]], axis=1))
        about += [[number, at, token, prompt, 0] for at, token in enumerate(text)]
    both = np.concatenate(features), np.asarray(about, np.int32)
    order = np.random.default_rng(0).permutation(len(about))  # rounds come between one another
    for part in np.array_split(order, 3):
        directory.write(both[0][part], both[1][part])
    return path


def losses(run: Path) -> list[float]:
    with (run / "log.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_a_ring_trains_as_the_texts_do(
    train_command: Callable[..., Any], ring: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    more = (*SMALL, *STEPS, "--eval-share", "0", "--log-every", "1", "--aux-layers", "0", "1", "2")
    train_command(eagle, tmp_path / "texts", *more)

    def never(*args: Any) -> Any:
        raise AssertionError("the target was run")

    monkeypatch.setattr(teacher, "target_states", never)
    train_command(eagle, tmp_path / "ring", *more, "--data", f"ring:{ring}")
    texts, ringed = losses(tmp_path / "texts.run"), losses(tmp_path / "ring.run")
    assert len(texts) == 2 and texts == pytest.approx(ringed, rel=1e-5)


def test_the_gate(train_command: Callable[..., Any], ring: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another head is written where it is better by the margin, and not where it is not; both are walked as rounds."""
    monkeypatch.setattr(gate, "LEAST_ROUNDS", 10)
    data = ("--data", f"ring:{ring}", "--ttt-steps", "2")
    train_command(eagle, tmp_path / "served", *SMALL, *STEPS, *data, "--aux-layers", "0", "1", "2")
    on = ("--init-from", str(tmp_path / "served"), "--gate", str(tmp_path / "served"), *data)
    record = train_command(eagle, tmp_path / "worse", *on, "--gate-margin", "9")
    assert not record["gate"]["passed"] and not (tmp_path / "worse").exists()
    assert json.loads((tmp_path / "worse.run" / gate.VERDICT).read_text()) == record["gate"]
    record = train_command(eagle, tmp_path / "better", *on, "--gate-margin", "-0.5")
    assert record["gate"]["passed"] and (tmp_path / "better" / "model.safetensors").exists()
    assert 1 <= record["gate"]["served"] <= 3 and record["gate"]["rounds"] >= 10
    monkeypatch.setattr(gate, "LEAST_ROUNDS", 10_000)
    assert not train_command(eagle, tmp_path / "few", *on, "--gate-margin", "-0.5")["gate"]["passed"]


def test_rings_that_do_not_fit_are_refused(
    train_command: Callable[..., Any], ring: Path, tiny_files: Path, tmp_path: Path
):
    run = lambda *more: train_command(eagle, tmp_path / "head", *SMALL, *STEPS, *more)
    for more, message in (
        (("--data", f"ring:{tmp_path}"), "holds no files of a feature ring"),
        (("--data", f"ring:{ring}", str(tiny_files / "texts.jsonl")), "takes one ring and nothing beside it"),
        (("--data", f"ring:{ring}", "--regenerate"), "holds the target's own answers"),
        (("--data", f"ring:{ring}", "--hidden-cache", str(tmp_path / "c")), "has the states already"),
        (
            ("--data", f"ring:{ring}", "--aux-layers", "1", "2"),
            r"inputs of layers \[0, 1, 2, 3\], and .* reads \[1, 2\]",
        ),
        (
            ("--data", f"ring:{ring}", "--aux-layers", "0", "1", "2", "--gate", "x", "--eval-share", "0"),
            "needs held-out texts",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(*more)
    assert ring_of(["a.jsonl"]) is None
    wide = RingDirectory(tmp_path / "wide", 1 << 20, {"engine": "a", "layers": "[0]", "hidden_size": "64"})
    wide.write(np.zeros((4, 64), np.float32), np.zeros((4, 5), np.int32))
    with pytest.raises(ValueError, match="hidden_size is 64, --target's is 32"):
        Ring.read(tmp_path / "wide", hf.load_config(tiny_files / "target"))
