"""Heads that speculators saved: read by name, the same logits, the same losses; ours read by speculators."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import record as recorder
import speculators_cases as cases
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxspec.checkpointing import hf
from jaxspec.drafters import directories
from jaxspec.models.layers import Transformer
from jaxspec.models.tiny import tiny_target
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters.dflash import DflashRecipe
from jaxspec.train.drafters.dflash2 import Dflash2Recipe
from jaxspec.train.drafters.dspark import DsparkRecipe
from jaxspec.train.drafters.eagle import Eagle3Recipe
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.objective.loss import soft_cross_entropy

live = pytest.mark.skipif(
    importlib.util.find_spec("speculators") is None, reason="speculators is not installed (extra parity)"
)
HEADS = [c for c in cases.CASES if cases.CASES[c].kind in ("eagle3", "peagle")]
STEPS_OF = {"eagle3": cases.STEPS, "peagle": 1, "mtp": len(cases.MTP_WEIGHTS), "dflash": 1, "dspark": 1, "dflash2": 2}
BLOCKS = [c for c in cases.CASES if cases.CASES[c].kind in cases.BLOCKS]


@functools.cache
def load(case: str) -> tuple[Any, dict[str, np.ndarray]]:
    """(our module from speculators' directory, the record of its case); for tests that leave both as they are."""
    record = cases.load_record(case)
    kind = cases.CASES[case].kind
    assert directories.read_kind(cases.VECTORS / case) == kind
    return directories.load_drafter(kind, cases.VECTORS / case, cases.target_of(record)), record


def answers(module: Any, record: Mapping[str, np.ndarray], kind: str) -> list[jax.Array]:
    """Our logits of each step, as one program: hundreds of operations take longer to compile by themselves."""
    return jax.jit(lambda: cases.ANSWERS[kind](module, record))()


@functools.cache
def our_logits(case: str) -> list[jax.Array]:
    """Of each step."""
    return answers(*load(case), cases.CASES[case].kind)


def recorded_logits(record: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [record[f"logits_{i}"] for i in range(sum(n.startswith("logits_") for n in record))]


def assert_close(ours: jax.Array | np.ndarray, theirs: np.ndarray) -> None:
    difference = np.abs(np.asarray(ours) - theirs).max()
    assert difference <= cases.TOLERANCE, difference
    assert difference <= cases.TOLERANCE * np.abs(theirs).max(), difference


def names_of(directory: Path) -> set[str]:
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        return set(file.keys())


@pytest.mark.parametrize("case", cases.CASES)
def test_logits_of_every_step_agree(case: str) -> None:
    theirs = recorded_logits(load(case)[1])
    assert len(theirs) == STEPS_OF[cases.CASES[case].kind]
    for step, (a, b) in enumerate(zip(our_logits(case), theirs, strict=True)):
        assert a.shape == b.shape and b.std() > 0.3, step
        assert_close(a, b)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_an_override_replaces_a_field_and_the_logits_show_it(flag: str) -> None:
    case = "eagle3-residual" if flag == "norm_before_residual" else "eagle31"
    record = cases.load_record(case)
    module = directories.load_drafter("eagle3", cases.VECTORS / case, cases.target_of(record), overrides={flag: False})
    wrong = answers(module, record, "eagle3")[1]
    assert np.abs(np.asarray(wrong) - record["logits_1"]).max() > 0.1


def expected_loss(case: str, logits: list[jax.Array], record: Mapping[str, np.ndarray], name: str) -> float:
    """speculators' reduction of our soft cross-entropy: a mean over each step's mask (its epsilon of 1e-5 included)."""
    kind, total = cases.CASES[case].kind, 0.0
    for step, logits_1NV in enumerate(logits):
        mask = record["loss_mask"].astype(np.float32)
        if kind == "mtp":
            count = logits_1NV.shape[1]
            probs = np.eye(cases.VOCAB, dtype=np.float32)[record["input_ids"][:, step + 2 : step + 2 + count]]
            values = np.asarray(soft_cross_entropy(logits_1NV, jnp.asarray(probs)))
            mask = mask[:, step + 2 : step + 2 + count]
            total += cases.MTP_WEIGHTS[step] * float((values * mask).sum() / mask.sum())
            continue
        if kind == "eagle3":
            kept = cases.LENGTH - step
            logits_1NV, targets, mask = logits_1NV[:, :kept], record["targets"][:, step:], mask[:, step:]
        else:
            at = record["anchor_pos"] + record["depth"]
            targets, mask = record["targets"][:, at], mask[:, at]
        log_probs = np.asarray(jax.nn.log_softmax(jnp.asarray(targets), axis=-1))
        probs = np.exp(log_probs)
        if name == "loss_ce":  # speculators' is hard: the verifier's first choice
            probs = np.eye(targets.shape[-1], dtype=np.float32)[targets.argmax(-1)]
        values = np.asarray(soft_cross_entropy(logits_1NV, jnp.asarray(probs)))
        if name == "loss_kl":
            values = values + (probs * log_probs).sum(-1)
        total += cases.DECAY**step * float((values * mask).sum() / (mask.sum() + 1e-5))
    return total


@pytest.mark.parametrize(
    ("case", "name"), [(c, n) for c in HEADS for n in ("loss_kl", "loss_ce")] + [("mtp", "loss_ce")]
)
def test_losses_agree(case: str, name: str) -> None:
    record = load(case)[1]
    ours = expected_loss(case, our_logits(case), record, name)
    assert 0.3 < record[name].item() < 30
    np.testing.assert_allclose(ours, record[name].item(), rtol=cases.TOLERANCE)


def as_batch(case: str, record: Mapping[str, np.ndarray]) -> tuple[Batch, TargetStates, Transformer]:
    """A record as our trainer is given texts: unshifted, with a target whose logits are the record's.

    speculators masks by its index of the target's distribution, p + i of step i; that distribution is about our token
    p + 2 + i, so the mask moves by two.
    """
    count = cases.LENGTH + 2
    tokens, learn = np.zeros((1, count), np.int32), np.zeros((1, count), bool)
    tokens[:, 1:-1], learn[:, 2:] = record["input_ids"], record["loss_mask"]
    aux = np.zeros((1, count, record["hidden_states"].shape[-1]), np.float32)
    aux[:, : cases.LENGTH] = record["hidden_states"]
    hidden = np.zeros((1, count, cases.VOCAB), np.float32)
    ids = cases.drafted_ids() if cases.CASES[case].draft_vocab_size < cases.VOCAB else np.arange(cases.VOCAB)
    hidden[:, 1:-1] = -30.0
    hidden[:, 1:-1, ids] = record["targets"]
    target = tiny_target(vocab_size=cases.VOCAB, hidden_size=cases.VOCAB)
    assert target.lm_head is not None
    target.lm_head.kernel.set_value(jnp.eye(cases.VOCAB))
    ones, positions = jnp.ones((1, count), jnp.int32), jnp.arange(count, dtype=jnp.int32)[None]
    batch = Batch(jnp.asarray(tokens), ones, positions, jnp.asarray(learn))
    return batch, TargetStates(jnp.asarray(aux), jnp.asarray(hidden)), target


@pytest.mark.parametrize(
    "case", [c for c in HEADS if cases.CASES[c].kind == "eagle3" and len(cases.CASES[c].texts) == 1]
)
def test_our_trainers_loss_agrees(case: str) -> None:
    """On rows of one text: across texts speculators' loss compares drafts with the next text, ours leaves them out."""
    module, record = load(case)
    batch, states, target = as_batch(case, record)
    recipes = {k: Eagle3Recipe(module.config.aux_layer_ids, cases.STEPS, cases.DECAY, k) for k in ("kl", "ce")}
    losses = jax.jit(
        lambda of: {k: r.loss(module, target, batch, of, jax.random.key(0))[0] for k, r in recipes.items()}
    )
    for kind, ours in losses(states).items():
        np.testing.assert_allclose(ours, record[f"loss_{kind}"].item(), rtol=cases.TOLERANCE)


@pytest.mark.parametrize("case", [c for c in BLOCKS if len(cases.CASES[c].texts) == 1])
def test_our_block_trainers_loss_agrees(case: str) -> None:
    """On rows of one text, as above. speculators masks by the place, ours by the token that a place is about."""
    module, record = load(case)
    batch, states, target = as_batch(case, record)
    # `as_batch` gives EAGLE's alignment: here tokens, states and what is learned stand at their own positions.
    count, shift = cases.LENGTH, module.config.sample_from_anchor
    tokens = jnp.asarray(record["input_ids"], jnp.int32)
    learn = np.zeros((1, count + 1), bool)
    learn[:, int(shift) : count + int(shift)] = record["loss_mask"]
    states = TargetStates(jnp.asarray(record["hidden_states"]), states.hidden_BTE[:, 1 : 1 + count])
    batch = Batch(tokens, batch.segments_BT[:, :count], batch.positions_BT[:, :count], jnp.asarray(learn[:, :count]))
    anchors = jnp.asarray(record["anchor_positions"], jnp.int32)[None]
    dflash = functools.partial(DflashRecipe, (), gamma=cases.GAMMA, alpha=cases.ALPHA)
    dflash2 = functools.partial(Dflash2Recipe, (), gamma=cases.GAMMA, alpha=cases.ALPHA, selector=cases.SELECTED)
    # speculators' total variation is half of what the paper's share is of.
    dspark = functools.partial(DsparkRecipe, (), gamma=cases.GAMMA, ce=cases.CE, l1=cases.TV / 2)
    recipes = {
        "dflash": {
            "loss_kl": dflash(loss_kind="kl"),
            "loss_ce": dflash(loss_kind="ce"),
            "loss_dpace": dflash(loss_kind="ce", weights="dpace"),
        },
        "dflash2": {
            "loss_kl": dflash2(loss_kind="kl"),
            "loss_ce": dflash2(loss_kind="ce"),
            "loss_dpace": dflash2(loss_kind="ce", weights="dpace"),
        },
        "dspark": {"loss_draft": dspark(confidence=0.0), "loss_whole": dspark(confidence=1.0)},
    }[cases.CASES[case].kind]
    kept = jnp.ones(anchors.shape, bool)
    losses = jax.jit(
        lambda of: {n: r.block_loss(module, target, batch, of, anchors, kept)[0] for n, r in recipes.items()}
    )
    for name, ours in losses(states).items():
        assert record[name].item() > 0.1
        np.testing.assert_allclose(ours, record[name].item(), rtol=cases.TOLERANCE, err_msg=name)


@pytest.mark.parametrize("case", [c for c in BLOCKS if cases.CASES[c].kind == "dspark"])
def test_confidences_agree(case: str) -> None:
    module, record = load(case)
    before = module.markov.embed(cases.tokens_before(module, record))
    ours = module.sure(cases.block_states(module, record), before)
    assert record["confidence"].std() > 0.05
    assert_close(ours.reshape(record["confidence"].shape), record["confidence"])


def test_auxiliary_layers_are_inputs_whatever_the_first_id() -> None:
    ids = {case: load(case)[0].config.aux_layer_ids for case in ("eagle31", "eagle3-biases-rope", "eagle3")}
    assert ids == {"eagle31": (1, 4, 5), "eagle3-biases-rope": (0, 2, 4, 6, 8), "eagle3": (2, 4, 5)}


@pytest.mark.parametrize("case", cases.CASES)
def test_our_export_has_the_tensors_and_fields_of_theirs(case: str, tmp_path: Path) -> None:
    module, record = load(case)
    directories.save_drafter(module, tmp_path, target=cases.target_of(record), dtype=jnp.float32)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(cases.VECTORS / case / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    written, saved = (json.loads((d / "config.json").read_text()) for d in (tmp_path, cases.VECTORS / case))
    # Not ours to write: where transformers finds code, and its version.
    for name in ("auto_map", "transformers_version"):
        saved.pop(name)
    assert written.keys() == saved.keys()
    if "eagle_aux_hidden_state_layer_ids" in saved and saved["eagle_aux_hidden_state_layer_ids"] is None:
        assert written.pop("eagle_aux_hidden_state_layer_ids") == [2, 4, 5]
        saved.pop("eagle_aux_hidden_state_layer_ids")
    layer, theirs_layer = written.pop("transformer_layer_config"), saved.pop("transformer_layer_config")
    assert written == saved
    # transformers reads the older spelling of RoPE's fields too.
    rope = {"rope_theta", "rope_scaling"}
    assert layer.keys() - rope <= theirs_layer.keys()
    special = {"bos_token_id", "eos_token_id"}
    for name in layer.keys() - rope - special:
        assert layer[name] == theirs_layer[name], name
    assert layer["rope_theta"] == theirs_layer["rope_parameters"]["rope_theta"]
    again = directories.load_drafter(cases.CASES[case].kind, tmp_path, cases.target_of(record))
    assert again.config == module.config  # pyright: ignore[reportAttributeAccessIssue]


def test_the_recording_is_of_these_cases() -> None:
    stored = {p.name for p in cases.VECTORS.iterdir() if p.is_dir()}
    assert stored == set(cases.CASES) and cases.load_versions()["speculators"] == "0.9.0"
    for case, c in cases.CASES.items():
        saved = json.loads((cases.VECTORS / case / "config.json").read_text())
        assert {name: saved[name] for name in c.fields} == dict(c.fields)
        assert saved["speculators_version"] == "0.9.0"
        record = cases.load_record(case)
        for name, value in cases.inputs(case).items():
            np.testing.assert_array_equal(record[name], value, err_msg=f"{case}: {name}")


@live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["eagle31", "peagle", "mtp"])
def test_speculators_still_answers_as_recorded(case: str, tmp_path: Path) -> None:
    recorder.record_case(case, tmp_path)
    now, then = cases.load_record(case, tmp_path), cases.load_record(case)
    assert now.keys() == then.keys() and names_of(tmp_path / case) == names_of(cases.VECTORS / case)
    for name, value in then.items():
        np.testing.assert_allclose(now[name], value, atol=cases.TOLERANCE, rtol=0, err_msg=name)


def random_module(case: str) -> Any:
    """Our module of a case's configuration, with other weights than the recorded ones."""
    module = nnx.clone(load(case)[0])
    rng = np.random.default_rng(3)
    for _, param in nnx.iter_graph(module):
        if isinstance(param, nnx.Param):
            noise = rng.standard_normal(param.shape).astype(np.float32)
            param.set_value(param.get_value() * jnp.asarray(1 + 0.2 * noise))
    return module


@live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", cases.CASES)
def test_speculators_reads_our_export(case: str, tmp_path: Path) -> None:
    module, record = random_module(case), cases.load_record(case)
    kind, target, ours = cases.CASES[case].kind, cases.target_of(record), tmp_path / "head"
    hf.save_model(target, tmp_path / "target", dtype=jnp.float32)
    directories.save_drafter(module, ours, target=target, dtype=jnp.float32, verifier=str(tmp_path / "target"))
    model = recorder.read_back(kind, ours)
    tensors = load_file(ours / "model.safetensors")
    state = {n: v.numpy() for n, v in model.state_dict().items() if not n.startswith("verifier_")}
    # The verifier's, but for the output layer of a reduced vocabulary.
    tables = {"embed_tokens.weight", "lm_head.weight"} - tensors.keys() if kind in ("mtp", *cases.BLOCKS) else set()
    assert state.keys() == tensors.keys() | tables
    for name, value in tensors.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)
    theirs = recorder.answers(case, model)
    for a, b in zip(answers(module, record, kind), recorded_logits(theirs), strict=True):
        # Tensors are equal bit by bit, so this is about the configuration; these weights make larger logits.
        np.testing.assert_allclose(a, b, rtol=0, atol=cases.TOLERANCE * np.abs(b).max())
