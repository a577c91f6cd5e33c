"""EAGLE-1, Medusa and MTP modules survive their files, published names are read, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import head_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from head_cases import eagle1_head, medusa_heads, mtp_head, reconfigure, rename, rewrite

from jaxspec.checkpointing import hf, mtp
from jaxspec.drafters import directories
from jaxspec.models.layers import Shared, Transformer, causal_attention
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_target


@pytest.fixture(scope="module")
def target() -> Transformer:
    return cases.target()


@pytest.fixture(scope="module")
def tied() -> Transformer:
    return cases.target(tie_word_embeddings=True)


def save(module: nnx.Module, directory: Path, target: Transformer, **settings: Any) -> None:
    directories.save_drafter(module, directory, target=target, **{"dtype": jnp.float32, **settings})


def logits(head: Any) -> np.ndarray:
    feature = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, cases.WIDTH)), jnp.float32)
    tokens = jnp.asarray([[3, 12, 0, 7]])
    return np.asarray(head.logits(head(tokens, feature, jnp.arange(4)[None], causal_attention)))


# EAGLE-1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layers": 1, "bias": False},
        {"attention_bias": True},
        {"attention_bias": True, "output_bias": True, "mlp_bias": True, "first_norm": True},
        {"qk_norm": True, "own": True, "rope_theta": 5e5},
    ],
)
@pytest.mark.parametrize("tie", [False, True])
def test_eagle1_round_trip(tmp_path: Path, settings: dict[str, Any], tie: bool) -> None:
    of = cases.target(tie_word_embeddings=tie)
    head = eagle1_head(of, **settings)
    save(head, tmp_path, of)
    assert directories.read_kind(tmp_path) == "eagle1"
    back = directories.load_drafter("eagle1", tmp_path, of)
    cases.assert_same(back, head)
    np.testing.assert_array_equal(logits(back), logits(head))


def test_eagle1_published_names(tmp_path: Path, target: Transformer) -> None:
    save(eagle1_head(target, own=True), tmp_path, target)
    shapes = {n: v.shape for n, v in cases.read(tmp_path).items() if not n.startswith("layers.1")}
    assert shapes == {
        "embed_tokens.weight": (13, 32),
        "lm_head.weight": (13, 32),
        "fc.weight": (32, 64),
        "fc.bias": (32,),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
    }
    assert "layers.1.input_layernorm.weight" in cases.read(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["bias"], config["qkv_bias"], config["num_hidden_layers"]) == (True, False, 2)


def test_eagle1_heads_that_store_the_targets_tables_share_them(tmp_path: Path, target: Transformer) -> None:
    head = eagle1_head(target)
    save(head, tmp_path, target)
    embedding_VE = np.asarray(target.embedding.get_value())
    assert target.lm_head is not None
    rewrite(
        tmp_path,
        {
            # Stored in a coarser type than the target's, as published heads do.
            "embed_tokens.weight": embedding_VE.astype(jnp.bfloat16),
            "lm_head.weight": np.asarray(target.lm_head.kernel.get_value()).T,
        },
    )
    reconfigure(tmp_path, architectures=["LlamaForCausalLM"])
    assert directories.read_kind(tmp_path) == "eagle1"
    cases.assert_same(directories.load_drafter("eagle1", tmp_path, target), head)
    half: Any = directories.load_drafter("eagle1", tmp_path, target, jnp.bfloat16)
    assert isinstance(half.embedding, Shared) and half.embedding.dtype == half.fc.kernel.dtype == jnp.bfloat16


def test_eagle1_names_with_vllms_prefix(tmp_path: Path, target: Transformer) -> None:
    head = eagle1_head(target, own=True)
    save(head, tmp_path, target)
    rename(tmp_path, lambda n: n if n.startswith(("fc", "lm_head")) else f"model.{n}")
    cases.assert_same(directories.load_drafter("eagle1", tmp_path, target), head)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"vocab_size": 17}, {}, "vocab_size is 17, the target's vocab_size is 13"),
        ({"hidden_size": 64}, {}, "hidden_size is 64, the target's hidden_size is 32"),
        ({"layer_types": ["sliding_attention"]}, {}, "full attention only"),
        ({}, {"fc.bias": None}, "'fc.bias' is missing"),
        ({"bias": False}, {}, r"no place for: 'fc.bias' \(32,\)"),
        ({}, {"token_map": np.zeros(4, np.int64)}, r"no place for: 'token_map' \(4,\)"),
        ({"num_hidden_layers": 1}, {}, "no place for: 'layers.1.input_layernorm.weight'"),
        ({}, {"embed_tokens.weight": np.zeros((17, 32), np.float32)}, r"shape \(17, 32\).* \(13, 32\)"),
    ],
)
def test_eagle1_misfits_are_refused(
    tmp_path: Path, target: Transformer, config: dict[str, Any], tensors: dict[str, np.ndarray | None], message: str
) -> None:
    save(eagle1_head(target), tmp_path, target)
    reconfigure(tmp_path, **config)
    rewrite(tmp_path, tensors)
    with pytest.raises(ValueError, match=message):
        directories.load_drafter("eagle1", tmp_path, target)


def test_eagle1_overrides_the_bias(tmp_path: Path, target: Transformer) -> None:
    head = eagle1_head(target, bias=False)
    save(head, tmp_path, target)
    reconfigure(tmp_path, bias=None)
    cases.assert_same(directories.load_drafter("eagle1", tmp_path, target, overrides={"bias": False}), head)


# Medusa


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_medusa_round_trip(tmp_path: Path, target: Transformer, num_layers: int, prefix: str) -> None:
    module = medusa_heads(target, num_layers=num_layers)
    save(module, tmp_path, target, verifier="org/model")
    assert directories.read_kind(tmp_path) == "medusa" and cases.file_of(tmp_path).name == "medusa_lm_head.safetensors"
    assert json.loads((tmp_path / "config.json").read_text())["base_model_name_or_path"] == "org/model"
    rename(tmp_path, lambda n: prefix + n)
    back: Any = directories.load_drafter("medusa", tmp_path, target)
    cases.assert_same(back, module)
    hidden = jnp.ones((1, 2, cases.WIDTH))
    np.testing.assert_array_equal(back.logits(hidden, 2), module.logits(hidden, 2))


def test_medusa_names_and_the_smallest_configuration(tmp_path: Path, target: Transformer) -> None:
    module = medusa_heads(target)
    save(module, tmp_path, target)
    shapes = {n: v.shape for n, v in cases.read(tmp_path).items() if n.startswith("2.")}
    assert shapes == {"2.0.linear.weight": (32, 32), "2.0.linear.bias": (32,), "2.1.weight": (13, 32)}
    reconfigure(tmp_path, model_type=None, hidden_size=None, vocab_size=None, medusa_num_layers=None)
    cases.file_of(tmp_path).rename(tmp_path / "model.safetensors")
    cases.assert_same(directories.load_drafter("medusa", tmp_path, target), module)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"medusa_num_heads": 0}, "/config.json: medusa_num_heads must be a positive integer, got 0"),
        ({"medusa_num_layers": "1"}, "medusa_num_layers must be a positive integer, got '1'"),
        ({"hidden_size": 16}, "hidden_size is 16, the target's hidden_size is 32"),
        ({"vocab_size": 17}, "vocab_size is 17, the target's vocab_size is 13"),
        ({"medusa_num_heads": 4}, "'3.0.linear.weight' is missing"),
        ({"medusa_num_heads": 2}, "no place for: '2.0.linear.bias'"),
    ],
)
def test_medusa_misfits_are_refused(tmp_path: Path, target: Transformer, config: dict[str, Any], message: str) -> None:
    save(medusa_heads(target), tmp_path, target)
    reconfigure(tmp_path, **config)
    with pytest.raises(ValueError, match=message) as refusal:
        directories.load_drafter("medusa", tmp_path, target)
    assert str(refusal.value).count(str(tmp_path)) == 1


def test_a_medusa_pickle_is_refused_with_the_way_to_convert_it(tmp_path: Path, target: Transformer) -> None:
    save(medusa_heads(target), tmp_path, target)
    cases.file_of(tmp_path).rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"torch.load\('medusa_lm_head.pt'.*weights_only=True.*lm_head.safetensors'"):
        directories.load_drafter("medusa", tmp_path, target)


# MTP


@pytest.mark.parametrize("layout", mtp.LAYOUTS)
@pytest.mark.parametrize("tie", [False, True])
def test_mtp_round_trip(tmp_path: Path, layout: str, tie: bool) -> None:
    of = cases.target(tie_word_embeddings=tie, family="qwen3", qk_norm=True)
    head = mtp_head(of)
    save(head, tmp_path, of, layout=layout)
    inside = layout != "speculators"
    assert mtp.inside_target(tmp_path) is inside
    assert directories.read_kind(tmp_path) == ("draft_model" if inside else "mtp")
    back = directories.load_drafter("mtp", tmp_path, of)
    cases.assert_same(back, head)
    np.testing.assert_array_equal(logits(back), logits(head))
    if inside:
        cases.assert_same(hf.load_model(tmp_path), of)
        assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("family", [{}, dict(family="qwen2", attention_bias=True), dict(mlp_bias=True)])
def test_mtp_modules_of_other_families(tmp_path: Path, family: dict[str, Any]) -> None:
    of = cases.target(**family)
    for layout in mtp.LAYOUTS:
        save(mtp_head(of), tmp_path / layout, of, layout=layout)
        cases.assert_same(directories.load_drafter("mtp", tmp_path / layout, of), mtp_head(of))


def test_mtp_modules_with_experts(tmp_path: Path) -> None:
    of = tiny_target(3, **FAMILY_FIELDS["glm4_moe"])
    head = mtp_head(of, experts=mtp.as_module(of.config).experts)
    save(head, tmp_path, of, layout="deepseek")
    cases.assert_same(directories.load_drafter("mtp", tmp_path, of), head)
    cases.assert_same(hf.load_model(tmp_path), of)
    parts = {n.removeprefix("model.layers.2.") for n in cases.read(tmp_path) if n.startswith("model.layers.2.")}
    assert parts > {"mlp.experts.7.up_proj.weight", "mlp.shared_experts.down_proj.weight", "self_attn.q_norm.weight"}
    assert parts > {"mlp.gate.e_score_correction_bias", "self_attn.v_proj.bias", "eh_proj.weight"}


def test_mtp_published_names(tmp_path: Path, target: Transformer) -> None:
    found = {}
    for layout in mtp.LAYOUTS:
        save(mtp_head(target), tmp_path / layout, target, layout=layout)
        names = cases.read(tmp_path / layout).keys()
        found[layout] = {n for n in names if n.startswith(("mtp", "model.layers.8"))}
    parts = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]

    def tensors(prefix: str, layer: str, own: tuple[str, ...]) -> set[str]:
        return {f"{layer}{p}.weight" for p in parts} | {f"{prefix}{p}.weight" for p in own}

    ours = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
    assert found["deepseek"] == tensors("model.layers.8.", "model.layers.8.", ours)
    ours = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    assert found["qwen3_next"] == tensors("mtp.", "mtp.layers.0.", ours)
    ours = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    assert found["speculators"] == tensors("mtp_layers.0.", "mtp_layers.0.", ours)


def test_mtp_tables_of_its_own_stay_its_own(tmp_path: Path, target: Transformer, tied: Transformer) -> None:
    for i, of in enumerate((target, tied)):
        head = mtp_head(of, own=True)
        save(head, tmp_path / str(i), of, layout="deepseek")
        back: Any = directories.load_drafter("mtp", tmp_path / str(i), of)
        assert isinstance(back.embedding, nnx.Param) and isinstance(back.lm_head.kernel, nnx.Param)
        cases.assert_same(back, head)
        for layout in ("speculators", "qwen3_next"):
            with pytest.raises(ValueError, match=f"layout '{layout}' takes the target's tables.*use 'deepseek'"):
                save(head, tmp_path / "other", of, layout=layout)
    assert not (tmp_path / "other").exists()


def test_mtp_with_its_own_embedding_and_the_tied_targets_output(tmp_path: Path, tied: Transformer) -> None:
    save(mtp_head(tied), tmp_path, tied, layout="deepseek")
    own_VE = np.random.default_rng(2).standard_normal((13, 32)).astype(np.float32)
    rewrite(tmp_path, {"model.layers.8.embed_tokens.weight": own_VE})
    back: Any = directories.load_drafter("mtp", tmp_path, tied)
    assert isinstance(back.embedding, nnx.Param) and isinstance(back.lm_head.kernel, Shared)
    np.testing.assert_array_equal(back.lm_head.kernel.get_value(), tied.embedding.get_value().T)


def test_mtp_tables_rounded_by_the_file_are_the_targets(tmp_path: Path, target: Transformer) -> None:
    save(mtp_head(target), tmp_path, target, layout="deepseek", dtype=jnp.bfloat16)
    for dtype in (jnp.float32, jnp.bfloat16):
        back: Any = directories.load_drafter("mtp", tmp_path, target, dtype)
        assert isinstance(back.embedding, Shared) and isinstance(back.lm_head.kernel, Shared)
        assert back.embedding.dtype == back.fc.kernel.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("nested", [False, True])
def test_gains_of_qwen3_next_lack_one(tmp_path: Path, model_type: str, nested: bool) -> None:
    of = cases.target(family="qwen3", qk_norm=True)
    head = mtp_head(of)
    layout = "speculators" if nested else "qwen3_next"
    save(head, tmp_path, of, layout=layout)
    called = mtp.names(layout, cases.LAYERS)
    raw = json.loads((tmp_path / "config.json").read_text())
    fields = raw["transformer_layer_config"] if nested else raw
    fields |= {"model_type": model_type, "layer_types": ["linear_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    rewrite(tmp_path, hf.named_tensors(mtp.head_weights(head, called, 1.0), jnp.float32))
    stored = cases.read(tmp_path)[f"{called.layer}.self_attn.q_norm.weight"]
    assert head.layer.attn.q_norm is not None
    np.testing.assert_array_equal(stored + 1, head.layer.attn.q_norm.weight.get_value())
    cases.assert_same(directories.load_drafter("mtp", tmp_path, of), head)


DEEPSEEK, QWEN = "model.layers.8", "mtp.layers.0"


@pytest.mark.parametrize(
    ("layout", "tensors", "message"),
    [
        ("deepseek", {f"{DEEPSEEK}.self_attn.kv_b_proj.weight": (4, 4)}, f"latent attention .*'{DEEPSEEK}.*kv_b_proj"),
        ("deepseek", {f"{DEEPSEEK}.self_attn.q_a_proj.weight": (4, 4)}, "latent attention .*q_a_proj"),
        ("deepseek", {f"{DEEPSEEK}.mlp.gate.weight": (4, 4)}, "mixture of experts.*mlp.gate.weight"),
        ("deepseek", {f"{DEEPSEEK}.mlp.experts.0.up_proj.weight": (4, 4)}, "mixture of experts.*experts.0.up_proj"),
        ("deepseek", {"model.layers.9.eh_proj.weight": (4, 4)}, "more than one MTP layer.*'model.layers.9.eh_proj"),
        ("deepseek", {f"{DEEPSEEK}.extra": (3,)}, rf"no place for: '{DEEPSEEK}.extra' \(3,\)"),
        ("deepseek", {f"{DEEPSEEK}.eh_proj.weight": (32, 32)}, r"eh_proj.weight'.*\(32, 32\).*\(32, 64\)"),
        ("qwen3_next", {f"{QWEN}.self_attn.q_proj.weight": (64, 32)}, "gated attention.*64 rows for 4 heads of 8"),
        ("qwen3_next", {f"{QWEN}.mlp.shared_expert.up_proj.weight": (4, 4)}, "mixture of experts.*shared_expert"),
        ("qwen3_next", {f"{QWEN}.linear_attn.in_proj.weight": (4, 4)}, "linear attention.*linear_attn.in_proj"),
        ("qwen3_next", {"mtp.layers.1.mlp.up_proj.weight": (4, 4)}, "more than one MTP layer.*'mtp.layers.1.mlp"),
        ("qwen3_next", {"mtp.lm_head.weight": (13, 32)}, r"no place for: 'mtp.lm_head.weight' \(13, 32\)"),
        ("speculators", {"mtp_layers.1.input_proj.weight": (4, 4)}, "more than one MTP layer.*'mtp_layers.1.input"),
        ("speculators", {"other.weight": (4, 4)}, "no place for: 'other.weight'"),
    ],
)
def test_mtp_modules_of_other_kinds_are_refused_by_tensor(
    tmp_path: Path, target: Transformer, layout: str, tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    save(mtp_head(target), tmp_path, target, layout=layout)
    rewrite(tmp_path, {n: np.zeros(shape, np.float32) for n, shape in tensors.items()})
    with pytest.raises(ValueError, match=message):
        directories.load_drafter("mtp", tmp_path, target)
    if layout != "speculators":
        cases.assert_same(hf.load_model(tmp_path), target)


@pytest.mark.parametrize(
    ("layout", "config", "message"),
    [
        ("deepseek", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers must be 1 .*got 2"),
        ("qwen3_next", {"mtp_num_hidden_layers": 3}, "mtp_num_hidden_layers must be 1 .*got 3"),
        ("qwen3_next", {"hidden_size": 16}, "hidden_size is 16, the target's hidden_size is 32"),
        ("qwen3_next", {"vocab_size": 17}, "vocab_size is 17, the target's vocab_size is 13"),
        ("qwen3_next", {"num_hidden_layers": 7}, "num_hidden_layers is 7, the target's num_hidden_layers is 8"),
        ("qwen3_next", {"model_type": "gemma3"}, "model_type of an MTP layer must be one of .*got 'gemma3'"),
        ("speculators", {"num_nextn_predict_layers": 2}, "must be 1 .*got 2"),
    ],
)
def test_mtp_configurations_that_do_not_fit_are_refused(
    tmp_path: Path, target: Transformer, layout: str, config: dict[str, Any], message: str
) -> None:
    save(mtp_head(target), tmp_path, target, layout=layout)
    reconfigure(tmp_path, **config)
    with pytest.raises(ValueError, match=message):
        directories.load_drafter("mtp", tmp_path, target)


def test_a_plain_target_carries_no_module(tmp_path: Path, target: Transformer) -> None:
    hf.save_model(target, tmp_path)
    assert not mtp.inside_target(tmp_path)
    with pytest.raises(ValueError, match="no MTP module: .*'mtp.fc.weight' nor 'model.layers.8.eh_proj.weight'"):
        directories.load_drafter("mtp", tmp_path, target)


def test_a_module_shaped_unlike_its_target_has_no_place_in_its_files(tmp_path: Path, target: Transformer) -> None:
    head = mtp_head(target, intermediate_size=24)
    for layout in ("deepseek", "qwen3_next"):
        with pytest.raises(ValueError, match=r"cannot express intermediate_size=24 \(would read as 48\)"):
            save(head, tmp_path, target, layout=layout)
    save(head, tmp_path, target)
    cases.assert_same(directories.load_drafter("mtp", tmp_path, target), head)


def test_heads_of_other_targets_are_not_written(tmp_path: Path, target: Transformer) -> None:
    other = tiny_target(num_layers=cases.LAYERS, vocab_size=17)
    for module in (eagle1_head(target), mtp_head(target), medusa_heads(target)):
        with pytest.raises(ValueError, match="vocab_size is 13, the target's vocab_size is 17"):
            save(module, tmp_path / "head", other)
    deeper = dataclasses.replace(eagle1_head(target).config, target_layers=9)
    head = eagle1_head(target)
    head.config = deeper
    with pytest.raises(ValueError, match="target_layers is 9, the target's num_layers is 8"):
        save(head, tmp_path / "head", target)
    assert not (tmp_path / "head").exists()
