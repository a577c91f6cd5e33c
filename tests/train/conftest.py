"""Tiny batches for the trainers' tests, and a few steps of Adam on them."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxspec.checkpointing import hf
from jaxspec.models.layers import Transformer
from jaxspec.models.tiny import tiny_target
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import dflash
from jaxspec.train.drafters.recipe import Recipe, TargetStates
from jaxspec.train.objective import acceptance
from jaxspec.train.objective.attention import packed_attention
from jaxspec.train.run import command


@pytest.fixture
def packed_batch() -> Batch:
    """Two rows of 20 tokens: texts of 9 and 7 tokens and padding, and one long text; not every token is learned."""
    rng = np.random.default_rng(0)
    segments = np.array([[1] * 9 + [2] * 7 + [0] * 4, [1] * 20])
    positions = np.array([[*range(9), *range(7), *range(4)], [*range(20)]])
    learn = (rng.random((2, 20)) < 0.8) & (positions > 0) & (segments > 0)
    tokens = rng.integers(0, 13, (2, 20))
    return Batch(*(jnp.asarray(x, jnp.int32) for x in (tokens, segments, positions)), jnp.asarray(learn))


@pytest.fixture
def target_states() -> Callable[..., TargetStates]:
    """(target, batch, aux_layers) -> what the target says."""
    return lambda target, batch, aux_layers=(): _states(*nnx.split(target), batch, tuple(aux_layers))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _states(graph: Any, state: Any, batch: Batch, aux_layers: tuple[int, ...]) -> TargetStates:
    target = nnx.merge(graph, state)
    hidden, aux = target(batch.tokens_BT, batch.positions_BT, packed_attention(batch.segments_BT), aux_layers)
    return TargetStates(aux, hidden)


@pytest.fixture
def loss_of() -> Callable[..., Any]:
    """(recipe, module, target, batch, states, key=0) -> what the recipe's loss is, as one program."""

    def loss(recipe: Recipe, module: Any, target: Transformer, batch: Batch, states: TargetStates, key: int = 0) -> Any:
        return jax.jit(lambda states: recipe.loss(module, target, batch, states, jax.random.key(key)))(states)

    return loss


@pytest.fixture
def greedy_batch() -> Callable[..., Batch]:
    """(target, rows, length) -> texts that the target wrote greedily after two random tokens."""

    def make(target: Transformer, rows: int = 16, length: int = 40) -> Batch:
        prompt = jax.random.randint(jax.random.key(0), (rows, 2), 0, target.config.vocab_size, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        ones = jnp.ones((rows, length), jnp.int32)

        def write(i: jax.Array, tokens: jax.Array) -> jax.Array:
            hidden, _ = target(tokens, positions, packed_attention(ones))
            best = jnp.argmax(target.logits(hidden), axis=-1).astype(jnp.int32)
            return jnp.where((jnp.arange(length) == i)[None], jnp.roll(best, 1, axis=1), tokens)

        tokens = jnp.pad(prompt, ((0, 0), (0, length - 2)))
        tokens = jax.jit(lambda tokens: jax.lax.fori_loop(2, length, write, tokens))(tokens)
        return Batch(tokens, ones, positions, positions >= 2)

    return make


@pytest.fixture
def simulated_lengths() -> Callable[..., list[float]]:
    """(recipe, module, target, batch, states, steps, lr) -> simulated acceptance length at each step of Adam."""

    def train(
        recipe: Recipe, module: Any, target: Transformer, batch: Batch, states: TargetStates, steps: int, lr: float
    ) -> list[float]:
        graph, trainable, rest = nnx.split(module, nnx.Param, ...)
        tx = optax.adam(lr)

        @jax.jit
        def step(trainable: Any, opt: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
            def loss(p: Any) -> tuple[jax.Array, jax.Array]:
                value, matches, _ = recipe.loss(nnx.merge(graph, p, rest), target, batch, states, key)
                return value, acceptance.summary(acceptance.rounds(matches, batch)[1])["length"]

            (_, length), grads = jax.value_and_grad(loss, has_aux=True)(trainable)
            with jax.numpy_dtype_promotion("standard"):
                updates, opt = tx.update(grads, opt)
            return optax.apply_updates(trainable, updates), opt, length

        opt, lengths = tx.init(trainable), []
        for i in range(steps):
            trainable, opt, length = step(trainable, opt, jax.random.key(i))
            lengths.append(float(length))
        return lengths

    return train


@pytest.fixture
def gradients() -> Callable[..., dict[str, float]]:
    """(recipe, module, target, batch, states) -> the largest gradient of each trained parameter, by path."""

    def largest(
        recipe: Recipe, module: Any, target: Transformer, batch: Batch, states: TargetStates
    ) -> dict[str, float]:
        graph, trainable, rest = nnx.split(module, nnx.Param, ...)
        loss = lambda p: recipe.loss(nnx.merge(graph, p, rest), target, batch, states, jax.random.key(0))[0]
        grads = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(trainable))
        return {jax.tree_util.keystr(path): float(jnp.abs(g).max()) for path, g in grads}

    return largest


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny target (target/, 13 tokens of which <|pad|> is special) and texts (texts.jsonl)."""
    path = tmp_path_factory.mktemp("tiny")
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(12)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<|pad|>"])
    hf.save_model(tiny_target(bos_token_id=None), path / "target", tokenizer=backend, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    ids = lambda count: [int(x) for x in rng.integers(0, 12, count)]
    rows = [{"prompt_token_ids": ids(3), "output_token_ids": ids(12)} for _ in range(24)]
    (path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def train_command(tiny_files: Path) -> Callable[..., dict[str, Any]]:
    """(trainer's module, out, *arguments, plot=False) -> its record, after two steps on tiny_files."""

    def run(trainer: ModuleType, out: Path, *arguments: str, plot: bool = False) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        trainer.add_arguments(parser)
        files = ["--target", str(tiny_files / "target"), "--data", str(tiny_files / "texts.jsonl"), "--out", str(out)]
        sizes = ["--length", "32", "--batch", "2", "--steps", "2", "--warmup", "0", "--eval-share", "0.3"]
        with pytest.MonkeyPatch.context() as patch:
            if not plot:  # half of the time
                patch.setattr(command.plots, "plot_run", lambda run_dir: "not plotted")
            return trainer.main(parser.parse_args([*files, *sizes, *arguments]))

    return run


@pytest.fixture(scope="session")
def dflash_run(train_command: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A DFlash head that the command trained, of blocks of 4 and a draft vocabulary of 10, and the run's record."""
    out = tmp_path_factory.mktemp("dflash") / "head"
    shape = ("--layers", "1", "--head-dim", "8", "--draft-vocab-size", "10", "--block-size", "4", "--aux-layers", "1")
    return out, train_command(dflash, out, "--anchors", "6", "--depth", "2", *shape)
