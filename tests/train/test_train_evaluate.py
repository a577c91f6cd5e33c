"""Simulated acceptance: the rule for shared noise is what shared noise does; a perfect drafter is always accepted."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpointing import hf
from jaxspec.models.tiny import tiny_target
from jaxspec.tier import Tier
from jaxspec.train.data import dataset
from jaxspec.train.drafters import drafts
from jaxspec.train.run import evaluate, simulation


class Table:
    """A "target" whose hidden states are its logits."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden

    config = argparse.Namespace(vocab_size=5)


@pytest.mark.parametrize("ids", [None, (0, 2, 3)])
def test_noise_in_common_accepts_as_often_as_the_formula_says(ids: tuple[int, ...] | None) -> None:
    count, temperature = 60_000, 0.8
    p, q = np.array([0.3, -1.0, 1.2, 0.0, 0.5]), np.array([0.9, 0.1, 0.4, -0.6, 0.2])
    q = q if ids is None else q[list(ids)]
    noise = np.random.default_rng(0).gumbel(size=(count, 5))
    drawn = np.argmax(p / temperature + noise, axis=1)
    own = noise if ids is None else noise[:, list(ids)]
    choice = np.argmax(q / temperature + own, axis=1)
    accepted = (choice if ids is None else np.array(ids)[choice]) == drawn

    length = 3  # one draft a row: n = 0, about token 2
    tokens = jnp.asarray(np.stack([np.zeros(count), np.zeros(count), drawn], axis=1), jnp.int32)
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (count, length, len(x)))
    chain = drafts.Chain([wide(q)[:, :1]], [lambda x: x], None if ids is None else jnp.asarray(ids), len(q))
    target: Any = Table()
    found = drafts.coupled_matches(chain, target, wide(p), tokens, jnp.float32(temperature), jax.random.key(1))
    assert found.shape == (count, 1, 1)
    for token in range(5):
        here = drawn == token
        assert np.asarray(found)[here].mean() == pytest.approx(accepted[here].mean(), abs=0.02), token


def test_trees_share_the_noise_that_drew_the_text() -> None:
    """Two positions, the best two candidates of each: against noise that is drawn first, and texts that follow."""
    count, temperature, tier = 20_000, 0.8, Tier(2, 2, 4)
    rng, ids = np.random.default_rng(0), np.array([0, 1, 2, 4])
    p, q = rng.normal(size=(2, 5)), rng.normal(size=(2, 4))
    noise = rng.gumbel(size=(2, count, 5))
    drawn = np.argmax(p[:, None] / temperature + noise, axis=2)
    score = q[:, None] / temperature + noise[..., ids]
    score -= np.log(np.exp(score).sum(axis=2, keepdims=True))
    rank = np.argsort(-score, axis=2)[..., :2]
    first, second = np.take_along_axis(score, rank, axis=2)
    paths = np.concatenate([first, (first[:, :, None] + second[:, None]).reshape(count, 4)], axis=1)
    taken = np.zeros(paths.shape, bool)
    np.put_along_axis(taken, np.argsort(-paths, axis=1)[:, :3], True, axis=1)
    hit = ids[rank] == drawn[..., None]
    once = taken[:, :2] & hit[0]
    twice = taken[:, 2:].reshape(count, 2, 2) & hit[0][:, :, None] & hit[1][:, None]

    tokens = jnp.asarray(np.stack([0 * drawn[0], 0 * drawn[0], *drawn], axis=1), jnp.int32)
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (count, 1, len(x)))
    chain = drafts.Chain([wide(x) for x in q], [lambda x: x] * 2, jnp.asarray(ids), 4, one_pass=True)
    target: Any = Table()
    theirs = jnp.concatenate([wide(p[0]), wide(p[0]), wide(p[1]), wide(p[1])], axis=1)
    matches = jax.jit(lambda *args: drafts.tree_matches(chain, tier, target, *args, jax.random.key(1)))
    found = np.asarray(matches(theirs, tokens, jnp.float32(temperature)))
    assert found.shape == (count, 1, 2)
    for token in range(5):
        here = drawn[0] == token
        for depth, accepted in enumerate((once.any(axis=1), twice.any(axis=(1, 2)))):
            assert found[here, 0, depth].mean() == pytest.approx(accepted[here].mean(), abs=0.025), (token, depth)
    for wrong, message in (
        (dataclasses.replace(chain, one_pass=False), "of drafters that draft in one pass, and this one does not"),
        (dataclasses.replace(chain, hidden=chain.hidden[:1]), "at most 1 deep with topk 4, .* got tree-2x2/4"),
        (dataclasses.replace(chain, vocab_size=1), "at most 2 deep with topk 1, .* got tree-2x2/4"),
    ):
        with pytest.raises(ValueError, match=message):
            drafts.tree_matches(wrong, tier, target, theirs, tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.04, 1.0])
def test_the_target_as_its_own_drafter_is_accepted_in_full(temperature: float) -> None:
    target = tiny_target()
    rng = np.random.default_rng(3)
    texts = [
        dataset.Example([int(t) for t in rng.integers(0, 13, 30)], [False] * 6 + [True] * 24, "some", 6, temperature)
        for _ in range(3)
    ]
    (group,) = simulation.simulate(target, target, texts, 3, rows=2)
    assert group.temperature == (0.0 if temperature == 0 else max(0.1, temperature))
    assert group.rounds > 0 and group.accept() == [1.0, 1.0, 1.0] and group.length(Tier(2)) == 3.0


def test_the_command_says_what_chains_are_accepted(tiny_files: Path, tmp_path: Path) -> None:
    """Without an engine, of the target as its own drafter."""
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    target = str(tiny_files / "target")
    files = ["--target", target, "--drafter", target, "--data", str(tiny_files / "texts.jsonl")]
    sizes = ["--json", str(tmp_path / "record.json"), "--depth", "2", "--limit", "2", "--rows", "2", "--no-cost"]
    record = evaluate.main(parser.parse_args([*files, *sizes]))
    assert json.loads((tmp_path / "record.json").read_text()) == record
    (group,) = record["groups"]
    assert (group["label"], group["accept"], group["length"]) == ("texts greedy", [1.0, 1.0], [2.0, 3.0])


def test_texts_too_short_for_a_round_are_refused() -> None:
    target = tiny_target()
    text = dataset.Example([1, 2, 3, 4, 5], [False, False, False, True, True], "some", 3)
    with pytest.raises(ValueError, match="a chain of 4 drafts needs texts of at least 7 tokens, got 5"):
        simulation.simulate(target, target, [text], 4)
    with pytest.raises(ValueError, match="no text holds a whole round of 2 drafts"):
        simulation.simulate(target, target, [text], 2)


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    hf.save_model(tiny_target(), tmp_path / "target")
    base = ["--target", str(tmp_path / "target"), "--data", str(tmp_path / "none.jsonl")]
    for more, message in (
        (["--depth", "0"], "depth must be at least 1, got 0"),
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (["--json", str(tmp_path / "no" / "x.json")], "--json .* its directory does not exist"),
        (["--trees", "tree-3x2/7", "chain-3"], r"--trees must be names such as 'tree-5x4/16', got \['chain-3'\]"),
        (["--batch-sizes", "1,zero"], "--batch-sizes must be integers from 1 to 1024, got 'zero'"),
        (["--drafter", "ngram"], "has no parameters to evaluate"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate.main(parser.parse_args([*base, *more]))
