"""EAGLE-3 heads survive their files, other writers' layouts are read, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpointing import eagle3, tensors
from jaxspec.models.base import ModelConfig, RopeScaling
from jaxspec.models.layers import Transformer, causal_attention
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head

LAYERS = 8
CONFIG = Eagle3Config(
    hidden_size=16,
    target_hidden_size=32,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=13,
    draft_vocab_size=9,
    aux_layer_ids=(2, 4, 5),
)
TARGET_IDS = np.array([0, 1, 2, 4, 5, 7, 8, 11, 12])


@pytest.fixture(scope="module")
def target() -> Transformer:
    return tiny_target(num_layers=LAYERS)


def random_head(**overrides: Any) -> Eagle3Head:
    cfg = dataclasses.replace(CONFIG, **overrides)
    head = Eagle3Head(cfg)
    if cfg.draft_vocab_size < cfg.vocab_size:
        head.target_ids[...] = jnp.asarray(TARGET_IDS, jnp.int32)
    rng = np.random.default_rng(0)
    for _, param in nnx.iter_graph(head):
        if isinstance(param, nnx.Param):
            param[...] = jnp.asarray(rng.standard_normal(param.shape), jnp.float32)
    return head


def outputs(head: Eagle3Head) -> jax.Array:
    aux = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, 32 * head.config.num_aux)), jnp.float32)
    tokens = jnp.asarray([[3, 12, 0, 7]])
    return head.logits(head(tokens, head.fuse(aux), jnp.arange(4)[None], causal_attention))


def rewrite(directory: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Replaces tensors of a saved head, or removes them (None)."""
    with tensors.read_tensors(directory) as reader:
        found = {n: reader.get(n, reader.shape(n), tensors.FLOATS + tensors.INTEGERS) for n in reader.names}
    kept = {n: v for n, v in {**found, **changes}.items() if v is not None}
    tensors.write_safetensors(directory / tensors.WEIGHTS, kept)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"draft_vocab_size": 13},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True, "attention_bias": True, "qk_norm": True},
        {"hidden_size": 32, "rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 64)},
        {"aux_layer_ids": (0, 1, 3, 6, 8), "num_aux": 5},
    ],
)
def test_round_trip(tmp_path: Path, target: Transformer, overrides: dict[str, Any]) -> None:
    head = random_head(**overrides)
    eagle3.save_head(head, tmp_path, dtype=jnp.float32)
    back = eagle3.load_head(tmp_path, target)
    assert back.config == head.config
    for (path, ours), (_, theirs) in zip(nnx.iter_graph(head), nnx.iter_graph(back), strict=True):
        if isinstance(ours, nnx.Variable):
            assert bool(jnp.array_equal(ours[...], theirs[...])), path
    np.testing.assert_array_equal(outputs(back), outputs(head))


def test_published_layout(tmp_path: Path) -> None:
    eagle3.save_head(random_head(), tmp_path)
    with tensors.read_tensors(tmp_path) as reader:
        shapes = {name: reader.shape(name) for name in reader.names}
        d2t = reader.get("d2t", (9,), ("I64",))
        t2d = reader.get("t2d", (13,), ("BOOL",))
    assert shapes == {
        "embed_tokens.weight": (13, 16),
        "fc.weight": (16, 96),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.self_attn.q_proj.weight": (24, 32),
        "midlayer.self_attn.k_proj.weight": (12, 32),
        "midlayer.self_attn.v_proj.weight": (12, 32),
        "midlayer.self_attn.o_proj.weight": (16, 24),
        "midlayer.post_attention_layernorm.weight": (16,),
        "midlayer.mlp.gate_proj.weight": (24, 16),
        "midlayer.mlp.up_proj.weight": (24, 16),
        "midlayer.mlp.down_proj.weight": (16, 24),
        "norm.weight": (16,),
        "lm_head.weight": (9, 16),
        "d2t": (9,),
        "t2d": (13,),
    }
    assert (np.arange(9) + d2t).tolist() == TARGET_IDS.tolist()
    assert np.flatnonzero(t2d).tolist() == TARGET_IDS.tolist()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert (config["draft_vocab_size"], config["target_hidden_size"], config["num_hidden_layers"]) == (9, 32, 1)


@pytest.mark.parametrize(
    ("raw", "inputs"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, (2, 4, 8)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3], "aux_layer_convention": "input"}}, (1, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 7], "aux_layer_convention": "output"}}, (0, 8)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
        ({}, (2, 4, 5)),
    ],
)
def test_both_conventions_of_layer_ids(raw: dict[str, Any], inputs: tuple[int, ...]) -> None:
    assert eagle3.aux_layer_ids(raw, tiny_config(num_layers=LAYERS)) == inputs


def test_the_names_of_other_writers(tmp_path: Path, target: Transformer) -> None:
    head = random_head(norm_before_residual=True)
    eagle3.save_head(head, tmp_path, dtype=jnp.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    inner = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    shape = (*inner, "num_hidden_layers", "rms_norm_eps", "rope_theta", "model_type")
    speculators = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 9,
        "target_hidden_size": 32,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {k: raw[k] for k in shape},
    }
    (tmp_path / "config.json").write_text(json.dumps(speculators))
    with tensors.read_tensors(tmp_path) as reader:
        found = {n: reader.get(n, reader.shape(n), tensors.FLOATS + tensors.INTEGERS) for n in reader.names}
    renamed = {n.replace("midlayer", "layers.0"): v for n, v in found.items()}
    tensors.write_safetensors(tmp_path / tensors.WEIGHTS, renamed)
    np.testing.assert_array_equal(outputs(eagle3.load_head(tmp_path, target)), outputs(head))
    bare = ("lm_head.weight", "d2t", "t2d")
    tensors.write_safetensors(
        tmp_path / tensors.WEIGHTS, {n if n in bare else f"model.{n}": v for n, v in found.items()}
    )
    np.testing.assert_array_equal(outputs(eagle3.load_head(tmp_path, target)), outputs(head))


def test_the_target_lends_its_embedding_where_it_fits(tmp_path: Path, target: Transformer) -> None:
    eagle3.save_head(random_head(hidden_size=32), tmp_path / "wide")
    rewrite(tmp_path / "wide", {"embed_tokens.weight": None})
    assert bool(jnp.array_equal(eagle3.load_head(tmp_path / "wide", target).embedding[...], target.embedding[...]))
    eagle3.save_head(random_head(), tmp_path / "narrow")
    rewrite(tmp_path / "narrow", {"embed_tokens.weight": None})
    with pytest.raises(ValueError, match="hidden_size is 16, the target's 32"):
        eagle3.load_head(tmp_path / "narrow", target)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"vocab_size": 17}, "vocab_size is 13, the target's 17"),
        ({"hidden_size": 48}, "target_hidden_size is 32, the target's hidden_size 48"),
        ({"num_layers": 4}, r"\[1, 3, 4\] \(by output\) do not fit a target of 4 layers"),
    ],
)
def test_a_head_of_another_target_is_refused(geometry: dict[str, Any], message: str) -> None:
    raw = eagle3.config_dict(CONFIG)
    other: ModelConfig = dataclasses.replace(tiny_config(num_layers=LAYERS), **geometry)
    with pytest.raises(ValueError, match=message):
        eagle3.read_config(raw, other)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"\['LlamaForCausalLM'\] name no EAGLE-3 head"),
        ({"num_hidden_layers": 4}, "must be 1, got 4"),
        ({"draft_vocab_size": 14}, "at most vocab_size 13, got 14"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads 3, got 4"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm excludes norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "must be true for an EAGLE-3 head, got false"),
        ({"eagle_config": {"aux_layer_convention": "both", "eagle_aux_hidden_state_layer_ids": [1]}}, "got 'both'"),
    ],
)
def test_a_broken_configuration_is_refused(config: dict[str, Any], message: str) -> None:
    raw = {**eagle3.config_dict(CONFIG), **config}
    with pytest.raises(ValueError, match=message):
        eagle3.read_config(raw, tiny_config(num_layers=LAYERS))


def test_a_configuration_without_its_sizes_is_refused() -> None:
    raw = {k: v for k, v in eagle3.config_dict(CONFIG).items() if k != "intermediate_size"}
    with pytest.raises(ValueError, match=r"lacks \['intermediate_size'\]"):
        eagle3.read_config(raw, tiny_config(num_layers=LAYERS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": None, "t2d": None}, "no 'd2t', but draft_vocab_size is 9 and vocab_size 13"),
        ({"d2t": np.full(9, 5)}, "from 0 to 12; it gives 9 from 5 to 13"),
        ({"d2t": -np.arange(9)}, "it gives 1 from 0 to 0 for 9 draft ids"),
        ({"t2d": np.ones(13, bool)}, "marks 13 tokens, which are not the 9 of 'd2t'"),
        ({"fc.weight": np.zeros((16, 64), np.float32)}, r"'fc.weight' .* shape \(16, 64\); .* \(16, 96\)"),
        ({"fc.weight": None}, "'fc.weight' is missing"),
        ({"fc.bias": np.zeros(16, np.float32)}, r"no place for: 'fc.bias' \(16,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, target: Transformer, changes: dict[str, np.ndarray | None], message: str
) -> None:
    eagle3.save_head(random_head(), tmp_path)
    rewrite(tmp_path, changes)
    with pytest.raises(ValueError, match=message):
        eagle3.load_head(tmp_path, target)
