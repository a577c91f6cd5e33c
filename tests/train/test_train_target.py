"""The target's loss in parts, and the command from JSONL files to a directory that loads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpointing import hf
from jaxspec.models.layers import causal_attention
from jaxspec.models.tiny import tiny_target
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train import target
from jaxspec.train.data import dataset
from jaxspec.train.objective import chunks, unlikelihood


def packed() -> tuple[list[dataset.Example], dataset.PackedRows]:
    rng = np.random.default_rng(0)
    examples = []
    for size in (9, 5, 4, 12, 7):
        learn = [False, *(rng.random(size - 1) < 0.7).tolist()]
        examples.append(dataset.Example(rng.integers(0, 13, size).tolist(), learn, "", 1))
    return examples, dataset.pack(examples, 16)


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_each_texts_own(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts alone, without packing, chunks or masks, give the same mean; so does every chunking, and its gradient."""
    model = tiny_target(tie_word_embeddings=tied)
    examples, rows = packed()
    alone_BT = jnp.asarray([example.tokens + [0] * (16 - len(example.tokens)) for example in examples])
    positions = jnp.broadcast_to(jnp.arange(16)[None], alone_BT.shape)
    logits = jax.jit(lambda tokens: model.logits(model(tokens, positions, causal_attention)[0]))(alone_BT)
    logs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    nats = [
        -logs[row, i - 1, token]
        for row, example in enumerate(examples)
        for i, token in enumerate(example.tokens)
        if example.learn[i]
    ]
    batch = rows.batch(np.arange(len(rows)))
    graph, state = nnx.split(model)
    loss = lambda s, b: target.next_token_loss(nnx.merge(graph, s), b)
    found = jax.jit(jax.value_and_grad(loss))(state, batch)
    assert float(found[0]) == pytest.approx(np.mean(nats), rel=1e-5)
    assert target.held_out_loss(model, rows, batch=2) == pytest.approx(np.mean(nats), rel=1e-5)
    monkeypatch.setattr(chunks, "LIMIT", 100)
    parts = jax.jit(jax.value_and_grad(lambda s, b: loss(s, b)))(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), parts, found)


def test_unlikelihood_reads_the_models_own_greedy_text() -> None:
    """The text is that of whole forwards; what it repeats becomes improbable by a step along the gradient."""
    model = tiny_target()
    prompts = np.random.default_rng(0).integers(3, model.config.vocab_size, (3, 7))
    graph, state = nnx.split(model)
    logits = jax.jit(
        lambda tokens: model.logits(
            model(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape), causal_attention)[0]
        )
    )
    text = np.zeros((3, 16), np.int32)
    text[:, :7] = prompts
    for at in range(7, 16):
        text[:, at] = np.argmax(np.asarray(logits(jnp.asarray(text)))[:, at - 1], axis=-1)
    found = jax.jit(lambda s, p: unlikelihood.continued(nnx.merge(graph, s), p, 9))(state, jnp.asarray(prompts))
    np.testing.assert_array_equal(found, text)

    row = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 4]
    again = unlikelihood.repeated(jnp.asarray([row, [7] * len(row)]))
    assert np.flatnonzero(again[0]).tolist() == [8, 13] and np.flatnonzero(again[1]).tolist() == [*range(4, 14)]

    batch = packed()[1].batch(np.arange(2))
    own = lambda s: unlikelihood.of_own_text(
        nnx.merge(graph, s), nnx.merge(graph, state), batch, jax.random.key(0), prompt=6, own=40
    )
    (before, repeats), gradient = jax.jit(jax.value_and_grad(own, has_aux=True))(state)
    assert 0 < repeats < 1, "a model of random weights repeats itself"
    stepped = jax.tree.map(lambda w, g: w - 0.02 * g / (1e-6 + jnp.abs(g).max()), state, gradient)
    assert jax.jit(own)(stepped)[0] < before


def arguments(work: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    target.add_arguments(parser)
    sizes = "--vocab-size 280 --hidden-size 16 --layers 2 --heads 2 --kv-heads 1 --intermediate-size 24 --length 24"
    paths = {"--data": "train.jsonl", "--eval-data": "held.jsonl", "--out": "out", "--run-dir": "run"}
    given = [part for option, name in paths.items() for part in (option, str(work / name))]
    return parser.parse_args([*given, *sizes.split(), "--batch", "4", "--warmup", "2", "--lr", "0.02", *more])


def test_from_files_to_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"def f{i}(x):\n    return x + {i}\n" for i in range(60)]
    for name, part in (("train", lines[:50]), ("held", lines[50:])):
        rows = [json.dumps({"text": line, "dataset": "code"}) for line in part]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    record = target.main(arguments(tmp_path, "--steps", "25", "--compute-dtype", "bfloat16"))
    assert json.loads((tmp_path / "out" / "training.json").read_text()) == record
    loss = record["held_out_loss_nats_per_token"]["code"]
    assert loss < 0.7 * np.log(280)
    model = hf.load_model(tmp_path / "out")
    assert (model.config.num_layers, model.config.vocab_size, model.config.eos_token_ids) == (2, 280, (1,))
    tokenizer = Tokenizer.from_directory(tmp_path / "out")
    assert tokenizer.adds_bos
    held = dataset.pack(dataset.read_examples([tmp_path / "held.jsonl"], tokenizer), 24)
    assert target.held_out_loss(model, held) == pytest.approx(loss, abs=0.05), "saved in bfloat16"

    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    more = [
        "--init-from",
        str(tmp_path / "out"),
        "--unlikelihood",
        "1",
        "--chat-template",
        str(tmp_path / "chat.jinja"),
    ]
    args = arguments(tmp_path, "--steps", "2", "--length", "80", *more)
    args.run_dir, args.out = tmp_path / "on", tmp_path / "further"
    monkeypatch.setattr(unlikelihood, "OWN", 8)
    assert target.main(args)["held_out_loss_nats_per_token"]["code"] < loss + 0.1, "it goes on from there"
    assert "repeats" in (tmp_path / "on" / "log.csv").read_text()
    assert Tokenizer.from_directory(tmp_path / "further").apply_chat_template([{"role": "user", "content": "a"}]) == "a"

    own = tmp_path / "run" / "tokenizer.json"
    args = arguments(tmp_path, "--tokenizer", str(own))
    args.run_dir = tmp_path / "elsewhere"
    assert target._tokenizer(args).to_str() == target._tokenizer(arguments(tmp_path)).to_str()
    monkeypatch.setattr(target, "_TOKENIZER_CHARS", 300)
    few = target.new_tokenizer([tmp_path / "train.jsonl"], 280, seed=0)
    assert few.get_vocab_size() <= 280
    for wrong, message in [
        (["--length", "80", "--context", "64"], "--length must be at most --context, got 80 and 64"),
        (["--heads", "3"], "got heads 3, hidden_size 16, kv_heads 1"),
        (["--tokenizer", str(tmp_path / "none.json")], "none.json is not a file"),
    ]:
        with pytest.raises(ValueError, match=message):
            target.main(arguments(tmp_path, *wrong))
