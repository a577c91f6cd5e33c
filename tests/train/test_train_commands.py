"""The commands in their order on a tiny target: regenerate, eagle3, draft_model, evaluate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxspec.checkpointing import eagle3, hf
from jaxspec.models.layers import causal_attention
from jaxspec.models.tiny import tiny_target
from jaxspec.train import __main__ as command
from jaxspec.train import data, regenerate

ROWS = "--sequences 8 --held-out-sequences 4 --length 24 --prompt-min 3 --prompt-max 6 --batch 4"
LAYER = "--steps 3 --batch 4 --heads 2 --kv-heads 1 --head-dim 8 --intermediate-size 16"


def documents() -> list[data.Document]:
    """A corpus of each kind, with held-out documents."""
    code = [data.Document(f"m{i}.py", "code", f"def f{i}(x):\n    return x + {i}\n" * 4) for i in range(60)]
    prose = [data.Document(f"p{i}", "prose", f"In the beginning there were {i} words. " * 4) for i in range(60)]
    return [*code, *prose]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a tiny target and its outputs; the corpus is small meanwhile."""
    path = tmp_path_factory.mktemp("commands")
    docs = documents()
    assert {(d.kind, d.held_out) for d in docs} == {(k, h) for k in ("code", "prose") for h in (False, True)}
    tok = data.train_tokenizer([d.text for d in docs if not d.held_out], 300)
    target = tiny_target(vocab_size=tok.get_vocab_size(), num_layers=4)
    hf.save_model(target, path / "target", tokenizer=tok, dtype=jnp.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "demo_corpus", documents)
        command.main(["regenerate", "--model", str(path / "target"), "--out", str(path / "tokens.npz"), *ROWS.split()])
        yield path


def test_rows_continue_their_prompts_greedily_or_by_sampling(work: Path) -> None:
    rows = data.Generated.load(work / "tokens.npz")
    assert rows.tokens.shape == (12, 24)
    assert rows.held_out.tolist() == [False] * 8 + [True] * 4
    model = hf.load_model(work / "target")
    sets = data.tokenize(documents(), Tokenizer.from_file(str(work / "target" / "tokenizer.json")))
    hidden, _ = model(jnp.asarray(rows.tokens), jnp.broadcast_to(jnp.arange(24)[None], (12, 24)), causal_attention)
    best = np.asarray(jnp.argmax(model.logits(hidden), axis=-1))
    greedy_rows = 0
    for i in range(len(rows)):
        prompt = int(rows.prompt_length[i])
        assert 3 <= prompt <= 6
        source = sets[str(rows.kind[i]), bool(rows.held_out[i])].tokens
        windows = np.lib.stride_tricks.sliding_window_view(source, prompt)
        assert (windows == rows.tokens[i, :prompt]).all(axis=1).any()
        if rows.temperature[i] == 0:
            greedy_rows += 1
            np.testing.assert_array_equal(rows.tokens[i, prompt:], best[i, prompt - 1 : -1])
        elif rows.temperature[i] > 0.5:
            assert (rows.tokens[i, prompt:] != best[i, prompt - 1 : -1]).any()
    assert 0 < greedy_rows < len(rows)


def test_the_sampler_follows_the_tempered_distribution() -> None:
    model = tiny_target()
    generate, state = regenerate.sampler(model, length=4, segment=2)
    count, temperature = 4096, 0.8
    rows = jnp.broadcast_to(jnp.asarray([[1, 5, 9, 0]]), (count, 4))
    drawn = generate(state, rows, jnp.full((count,), 3), jnp.full((count,), temperature), jax.random.key(1))
    assert bool((drawn[:, :3] == rows[:, :3]).all())
    hidden, _ = model(rows[:1, :3], jnp.arange(3)[None], causal_attention)
    expected = np.asarray(jax.nn.softmax(model.logits(hidden)[0, -1] / temperature))
    found = np.bincount(np.asarray(drawn[:, 3]), minlength=13) / count
    assert np.abs(found - expected).sum() / 2 < 0.03  # total variation


def test_cache_segments_do_not_change_the_outcome() -> None:
    model = tiny_target()
    rows = jnp.tile(jnp.asarray([[1, 5, 9, 0, 0, 0, 0, 0, 0, 0, 0]]), (3, 1))
    inputs = (rows, jnp.asarray([1, 2, 3]), jnp.asarray([0.0, 0.5, 1.0]), jax.random.key(0))
    outcomes = []
    for segment in (3, 64):
        generate, state = regenerate.sampler(model, length=11, segment=segment)
        outcomes.append(np.asarray(generate(state, *inputs)))
    np.testing.assert_array_equal(*outcomes)


def test_a_killed_regeneration_resumes_to_the_same_rows(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["regenerate", "--model", str(work / "target"), "--out", str(work / "again.npz"), *ROWS.split()]
    draw, drawn = regenerate.draw_prompts, []

    def killed(*args: object) -> data.Generated:
        drawn.append(args[-1])
        if len(drawn) == 2:
            raise KeyboardInterrupt
        return draw(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(regenerate, "draw_prompts", killed)
    with pytest.raises(KeyboardInterrupt):
        command.main(argv)
    with pytest.raises(ValueError, match="holds chunks made with"):
        command.main([*argv, "--seed", "7"])
    command.main(argv)
    assert drawn == [0, 1, 1, 0]  # two training chunks, the second twice, and the held-out one
    again, whole = data.Generated.load(work / "again.npz"), data.Generated.load(work / "tokens.npz")
    for field in dataclasses.fields(data.Generated):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(whole, field.name))


def test_prompts_must_leave_room(work: Path) -> None:
    argv = ["regenerate", "--model", str(work / "target"), "--out", str(work / "x.npz"), "--length", "32"]
    with pytest.raises(ValueError, match="prompt_max 64, length 32"):
        command.main(argv)


def common(work: Path, name: str) -> list[str]:
    paths = {"--target": "target", "--data": "tokens.npz", "--out": name, "--run-dir": f"{name}-run"}
    options = [part for option, path in paths.items() for part in (option, str(work / path))]
    return [*options, *LAYER.split()]


def evaluated(work: Path, name: str) -> dict[str, dict[str, float]]:
    parser_args = ["--target", str(work / "target"), "--drafter", str(work / name), "--data", str(work / "tokens.npz")]
    return command.main(["evaluate", *parser_args, "--depth", "2"])


def test_eagle3_trains_saves_and_evaluates(work: Path) -> None:
    command.main(
        ["eagle3", *common(work, "head"), "--hidden-size", "16", "--ttt-steps", "2", "--draft-vocab-size", "40"]
    )
    head = eagle3.load_head(work / "head", hf.load_model(work / "target"))
    assert (head.config.draft_vocab_size, head.config.aux_layer_ids) == (40, (2, 2, 1))
    record = json.loads((work / "head" / "training.json").read_text())
    table = record["held_out_acceptance"]
    assert table and all(1 <= row["length"] <= 3 for row in table.values())
    assert evaluated(work, "head") == table


def test_draft_model_trains_saves_and_evaluates(work: Path) -> None:
    command.main(["draft_model", *common(work, "draft"), "--hidden-size", "16", "--layers", "1", "--depth", "2"])
    draft = hf.load_model(work / "draft")
    assert (draft.config.num_layers, draft.config.hidden_size) == (1, 16)
    table = json.loads((work / "draft" / "training.json").read_text())["held_out_acceptance"]
    assert evaluated(work, "draft") == table
    with pytest.raises(ValueError, match="hard_share must lie between 0 and 1, got 2.0"):
        command.main(["draft_model", *common(work, "other"), "--hard-share", "2"])


def test_a_model_accepts_its_own_greedy_drafts(work: Path) -> None:
    """The target as its own draft model is accepted in full on greedy text, and less on sampled text."""
    table = evaluated(work, "target")
    greedy = [row["length"] for name, row in table.items() if name.endswith("greedy")]
    assert greedy and all(length == 3.0 for length in greedy)
