"""EAGLE-3 and P-EAGLE heads survive their files, other writers' layouts are read, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import head_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from head_cases import LAYERS, TARGET_IDS, eagle3_head, reconfigure, rename, rewrite

from jaxspec.checkpointing import eagle3, tensors
from jaxspec.drafters import directories
from jaxspec.models.base import ModelConfig, RopeScaling
from jaxspec.models.layers import Shared, Transformer, causal_attention
from jaxspec.models.tiny import tiny_config
from jaxspec.speculation.drafters.eagle3_head import Buffer, Eagle3Head


@pytest.fixture(scope="module")
def target() -> Transformer:
    return cases.target()


def save(head: Eagle3Head, directory: Path, target: Transformer, **settings: Any) -> None:
    directories.save_drafter(head, directory, target=target, **{"dtype": jnp.float32, **settings})


def outputs(head: Eagle3Head) -> jax.Array:
    aux = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, 32 * head.config.num_aux)), jnp.float32)
    tokens = jnp.asarray([[3, 12, 0, 7]])
    return head.logits(head(tokens, head.fuse(aux), jnp.arange(4)[None], causal_attention))


@pytest.mark.parametrize("layout", eagle3.LAYOUTS)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"draft_vocab_size": 13},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True, "attention_bias": True, "qk_norm": True},
        {"hidden_size": 32, "rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 64)},
        {"aux_layer_ids": (1, 2, 3, 6, 8), "num_aux": 5},
        {"num_layers": 3, "aux_layer_ids": (1, 2, 2)},
        {"num_layers": 2, "mask_token_id": 0, "fc_norm": True},
    ],
)
def test_round_trip(tmp_path: Path, target: Transformer, overrides: dict[str, Any], layout: str) -> None:
    head = eagle3_head(**overrides)
    save(head, tmp_path, target, layout=layout)
    kind = directories.read_kind(tmp_path)
    assert kind == ("peagle" if "mask_token_id" in overrides else "eagle3")
    back = directories.load_drafter(kind, tmp_path, target)
    cases.assert_same(back, head)
    assert isinstance(back, Eagle3Head)
    np.testing.assert_array_equal(outputs(back), outputs(head))


def test_published_layout(tmp_path: Path, target: Transformer) -> None:
    save(eagle3_head(), tmp_path, target, layout="safeailab")
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


def test_layouts_differ_in_names_alone(tmp_path: Path, target: Transformer) -> None:
    files = {}
    for layout in eagle3.LAYOUTS:
        save(eagle3_head(num_layers=2, mask_token_id=3), tmp_path / layout, target, layout=layout)
        files[layout] = cases.read(tmp_path / layout)
    flat = {n.replace("layers.0.", "midlayer."): v for n, v in files["speculators"].items()}
    assert files["safeailab"].keys() == flat.keys() and "layers.1.input_layernorm.weight" in flat
    prefixed = {n if n == "lm_head.weight" else f"model.{n}" for n in flat}
    assert files["automodel"].keys() == prefixed
    assert files["safeailab"]["mask_hidden"].shape == (1, 1, 96)
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["target_hidden_size"] == 32 and config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def test_the_verifier_and_its_architecture_are_named(tmp_path: Path, target: Transformer) -> None:
    save(eagle3_head(), tmp_path, target, verifier="org/model", tokens=5)
    wrapper = json.loads((tmp_path / "config.json").read_text())["speculators_config"]
    assert wrapper["verifier"] == {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}
    assert wrapper["proposal_methods"][0]["speculative_tokens"] == 5 and wrapper["algorithm"] == "eagle3"


@pytest.mark.parametrize(
    ("raw", "inputs"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, (2, 4, 8)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 8], "speculators_model_type": "eagle3"}, (1, 4, 8)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3], "aux_layer_convention": "input"}}, (1, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 7], "aux_layer_convention": "output"}}, (0, 8)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
        ({}, (2, 4, 5)),
    ],
)
def test_both_conventions_of_layer_ids(raw: dict[str, Any], inputs: tuple[int, ...]) -> None:
    assert eagle3.aux_layer_ids(raw, tiny_config(num_layers=LAYERS)) == inputs


@pytest.mark.parametrize(("ids", "message"), [([-1, 4, 5], r"\[-1, 4, 5\] \(by input\)"), ([2, 4, 9], "of 8 layers")])
def test_speculators_ids_beyond_the_target_are_refused(ids: list[int], message: str) -> None:
    raw = {"eagle_aux_hidden_state_layer_ids": ids, "speculators_model_type": "eagle3"}
    with pytest.raises(ValueError, match=message):
        eagle3.aux_layer_ids(raw, tiny_config(num_layers=LAYERS))


def test_heads_as_safeailab_publishes_them(tmp_path: Path, target: Transformer) -> None:
    """Named as a plain model, without ids, embedding or convention; a full vocabulary may come with d2t of zeros."""
    head = eagle3_head(hidden_size=32, draft_vocab_size=13)
    save(head, tmp_path, target, layout="safeailab")
    reconfigure(tmp_path, architectures=["LlamaForCausalLM"], eagle_config=None, target_hidden_size=None)
    rewrite(tmp_path, {"embed_tokens.weight": None, "d2t": np.zeros(13, np.int64), "t2d": np.ones(13, bool)})
    assert directories.read_kind(tmp_path) == "eagle3"
    back = directories.load_drafter("eagle3", tmp_path, target)
    head.embedding = Shared(target.embedding.get_value())
    cases.assert_same(back, head)


def test_an_automodel_head_may_have_its_tables_bare(tmp_path: Path, target: Transformer) -> None:
    head = eagle3_head(norm_before_residual=True)
    save(head, tmp_path, target, layout="automodel")
    rename(tmp_path, lambda n: n.removeprefix("model.") if n.endswith(("d2t", "t2d")) else n)
    cases.assert_same(directories.load_drafter("eagle3", tmp_path, target), head)


@pytest.mark.parametrize("name", eagle3.MASK_TOKENS)
def test_the_mask_token_has_several_names(tmp_path: Path, target: Transformer, name: str) -> None:
    head = eagle3_head(mask_token_id=3, num_layers=2)
    save(head, tmp_path, target, layout="safeailab")
    reconfigure(tmp_path, mask_token_id=None)
    reconfigure(tmp_path, **{name: 3})
    assert directories.read_kind(tmp_path) == "peagle"
    cases.assert_same(directories.load_drafter("peagle", tmp_path, target), head)


def test_overrides_stand_for_wrong_fields(tmp_path: Path, target: Transformer) -> None:
    save(eagle3_head(norm_output=True, fc_norm=True), tmp_path, target)
    back: Any = directories.load_drafter("eagle3", tmp_path, target, overrides={"norm_output": False})
    assert back.config == dataclasses.replace(cases.EAGLE3, fc_norm=True)
    moved: Any = directories.load_drafter("eagle3", tmp_path, target, overrides={"aux_layer_ids": (1, 3, 4)})
    assert moved.config.aux_layer_ids == (1, 3, 4)
    with pytest.raises(ValueError, match=r"overrides \['norm_out'\] are no fields of Eagle3Config"):
        directories.load_drafter("eagle3", tmp_path, target, overrides={"norm_out": False})


def test_the_target_lends_its_embedding_where_it_fits(tmp_path: Path, target: Transformer) -> None:
    save(eagle3_head(hidden_size=32), tmp_path / "wide", target)
    rewrite(tmp_path / "wide", {"embed_tokens.weight": None})
    head = eagle3.load_head(tmp_path / "wide", target)
    assert isinstance(head.embedding, Shared)
    np.testing.assert_array_equal(head.embedding.get_value(), target.embedding.get_value())
    save(head, tmp_path / "again", target)
    assert "embed_tokens.weight" not in cases.read(tmp_path / "again")
    cases.assert_same(eagle3.load_head(tmp_path / "again", target), head)
    # A table that is not trained may still be the head's own.
    head.embedding = Buffer(head.embedding.get_value() + 1)
    save(head, tmp_path / "again", target)
    assert isinstance(eagle3.load_head(tmp_path / "again", target).embedding, nnx.Param)
    save(eagle3_head(), tmp_path / "narrow", target)
    rewrite(tmp_path / "narrow", {"embed_tokens.weight": None})
    with pytest.raises(ValueError, match="hidden_size is 16, the target's 32"):
        eagle3.load_head(tmp_path / "narrow", target)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"vocab_size": 17}, "vocab_size is 13, the target's vocab_size is 17"),
        ({"hidden_size": 48}, "target_hidden_size is 32, the target's hidden_size is 48"),
        ({"num_layers": 4}, r"\[1, 3, 4\] \(by output\) do not fit a target of 4 layers"),
    ],
)
def test_a_head_of_another_target_is_refused(geometry: dict[str, Any], message: str) -> None:
    mine = tiny_config(num_layers=LAYERS)
    raw = eagle3.config_dict(cases.EAGLE3, mine, layout="safeailab")
    other: ModelConfig = dataclasses.replace(mine, **geometry)
    with pytest.raises(ValueError, match=message):
        eagle3.read_config(raw, other)
    if "num_layers" not in geometry:
        with pytest.raises(ValueError, match=message):
            eagle3.config_dict(cases.EAGLE3, other)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"intermediate_size": None}, "intermediate_size must be a positive integer, got None"),
        ({"draft_vocab_size": 14}, "at most vocab_size 13, got 14"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm excludes norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "must be true for an EAGLE-3 head, got false"),
        ({"eagle_config": {"aux_layer_convention": "both", "eagle_aux_hidden_state_layer_ids": [1]}}, "got 'both'"),
        ({"layer_types": ["sliding_attention"]}, r"full attention only, .* layer_types \['sliding_attention'\]"),
        ({"use_sliding_window": True}, "full attention only, got use_sliding_window=True"),
        ({"mlp_bias": True}, "mlp_bias must be false for an EAGLE-3 head, got true"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"by layer type \(\['full_attention'\]\)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor (must be 1.0, got 0.5|0.5 of head_dim)"),
    ],
)
def test_a_broken_configuration_is_refused(config: dict[str, Any], message: str) -> None:
    target = tiny_config(num_layers=LAYERS)
    flat = {**eagle3.config_dict(cases.EAGLE3, target, layout="safeailab"), **config}
    with pytest.raises(ValueError, match=message):
        eagle3.read_config(flat, target)


@pytest.mark.parametrize(
    ("config", "layer", "message"),
    [
        ({}, {"model_type": "gemma2"}, "model_type must be 'llama' or 'qwen3', got 'gemma2'"),
        ({}, {"layer_types": ["sliding_attention"]}, "need a sliding_window|full attention only|for each of"),
        ({"speculators_model_type": "peagle"}, {}, r"needs one of \('mask_token_id', .*got none"),
    ],
)
def test_a_broken_speculators_configuration_is_refused(
    config: dict[str, Any], layer: dict[str, Any], message: str
) -> None:
    target = tiny_config(num_layers=LAYERS)
    raw = {**eagle3.config_dict(cases.EAGLE3, target), **config}
    raw["transformer_layer_config"] = {**raw["transformer_layer_config"], **layer}
    with pytest.raises(ValueError, match=message):
        eagle3.read_config(raw, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": None, "t2d": None}, "no 'd2t', but draft_vocab_size is 9 and vocab_size 13"),
        ({"d2t": np.full(9, 5)}, "from 0 to 12; it gives 9 from 5 to 13"),
        ({"d2t": -np.arange(9)}, "it gives 1 from 0 to 0 for 9 draft ids"),
        ({"t2d": np.ones(13, bool)}, "marks 13 tokens, which are not the 9 of 'd2t'"),
        ({"d2t": np.zeros(9, np.float32)}, "'d2t' .* has type F32"),
        ({"fc.weight": np.zeros((16, 64), np.float32)}, r"'fc.weight' .* shape \(16, 64\); .* \(16, 96\)"),
        ({"fc.weight": np.zeros((16, 96), np.int8)}, "'fc.weight' .* has type I8"),
        ({"fc.weight": None}, "'fc.weight' is missing"),
        ({"fc.bias": np.zeros(16, np.float32)}, r"no place for: 'fc.bias' \(16,\)"),
        ({"layers.1.input_layernorm.weight": np.zeros(16, np.float32)}, "no place for: 'layers.1.input_layernorm"),
        ({"mask_hidden": np.zeros((1, 1, 96), np.float32)}, "no place for: 'mask_hidden'"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, target: Transformer, changes: dict[str, np.ndarray | None], message: str
) -> None:
    save(eagle3_head(), tmp_path, target)
    rewrite(tmp_path, changes)
    with pytest.raises(ValueError, match=message):
        directories.load_drafter("eagle3", tmp_path, target)


def test_the_verifiers_tables_beside_a_head_are_left_alone(tmp_path: Path, target: Transformer) -> None:
    save(eagle3_head(), tmp_path, target)
    rewrite(tmp_path, {"verifier_lm_head.weight": np.full((9, 16), np.nan, np.float32)})
    cases.assert_same(directories.load_drafter("eagle3", tmp_path, target), eagle3_head())


def test_a_peagle_head_without_its_feature_is_refused(tmp_path: Path, target: Transformer) -> None:
    save(eagle3_head(mask_token_id=3), tmp_path, target)
    rewrite(tmp_path, {"mask_hidden": None})
    with pytest.raises(ValueError, match="'mask_hidden' is missing"):
        directories.load_drafter("peagle", tmp_path, target)
    with pytest.raises(ValueError, match="kind 'peagle', expected 'eagle3'"):
        directories.load_drafter("eagle3", tmp_path, target)


def test_flags_inside_eagle_config_count(tmp_path: Path, target: Transformer) -> None:
    head = eagle3_head(norm_before_residual=True)
    save(head, tmp_path, target, layout="safeailab")
    inner = json.loads((tmp_path / "config.json").read_text())["eagle_config"]
    inner |= {"norm_before_residual": True, "use_last_layernorm": True, "parallel_draft_step": 1}
    reconfigure(tmp_path, norm_before_residual=None, eagle_config=inner)
    cases.assert_same(directories.load_drafter("eagle3", tmp_path, target), head)
    for odd, message in (
        ({"odd": 1}, r"eagle_config \{'odd': 1\} of an EAGLE-3 head are not known"),
        ({"use_mtp_layernorm": True}, "eagle_config.use_mtp_layernorm must be false for an EAGLE-3 head, got true"),
    ):
        reconfigure(tmp_path, eagle_config={**inner, **odd})
        with pytest.raises(ValueError, match=message):
            directories.load_drafter("eagle3", tmp_path, target)
    reconfigure(tmp_path, eagle_config=inner)
    reconfigure(tmp_path, norm_before_residual=False)
    with pytest.raises(ValueError, match="norm_before_residual is False, but eagle_config says True"):
        directories.load_drafter("eagle3", tmp_path, target)


def test_a_convention_that_is_only_guessed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    raw = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 5]}}
    assert eagle3.aux_layer_ids(raw, tiny_config(num_layers=LAYERS)) == (3, 5)
    assert "read as inputs" in caplog.text


def test_the_embeddings_as_a_feature_have_no_name_in_flat_layouts(tmp_path: Path, target: Transformer) -> None:
    head = eagle3_head(aux_layer_ids=(0, 2, 4))
    save(head, tmp_path / "own", target)
    cases.assert_same(directories.load_drafter("eagle3", tmp_path / "own", target), head)
    with pytest.raises(ValueError, match=r"the input of layer 0 \(aux_layer_ids \[0, 2, 4\]\) is none's"):
        save(head, tmp_path / "flat", target, layout="safeailab")
