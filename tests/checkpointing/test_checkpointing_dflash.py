"""DFlash heads survive their files, published configurations are read, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import dflash_head, reconfigure, rewrite

from jaxspec.checkpointing import dflash
from jaxspec.drafters import directories
from jaxspec.models.layers import Shared, Transformer
from jaxspec.models.tiny import tiny_config
from jaxspec.speculation.drafters.dflash_head import DflashConfig

SLIDING = dict(sliding_layers=(1,), sliding_window=7)


@pytest.fixture(scope="module")
def target() -> Transformer:
    return cases.target()


def save(module: Any, directory: Path, target: Transformer, **settings: Any) -> None:
    directories.save_drafter(module, directory, target=target, **{"dtype": jnp.float32, **settings})


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("speculators", {"draft": 9, "sample_from_anchor": True}),
        ("speculators", {"draft": 9, "own": True}),
        ("speculators", {"own": True, **SLIDING, "window_from_anchor": True, "sliding_non_causal": True}),
        ("speculators", {**SLIDING, "window_from_anchor": True}),
        ("zlab", {**SLIDING, "sliding_non_causal": True}),
        ("zlab", SLIDING),
        ("zlab", {"layers": 1}),
    ],
)
def test_round_trip(tmp_path: Path, target: Transformer, layout: str, settings: dict[str, Any]) -> None:
    head = dflash_head(target, **settings)
    save(head, tmp_path, target, layout=layout)
    assert directories.read_kind(tmp_path) == "dflash"
    cases.assert_same(directories.load_drafter("dflash", tmp_path, target), head)


def test_a_reduced_vocabulary_takes_the_targets_rows(tmp_path: Path, target: Transformer) -> None:
    head: Any = dflash_head(target, draft=9)
    save(head, tmp_path, target)
    assert cases.read(tmp_path)["lm_head.weight"].shape == (9, 32)
    rewrite(tmp_path, {"lm_head.weight": None})
    back: Any = directories.load_drafter("dflash", tmp_path, target)
    assert isinstance(back.lm_head.kernel, Shared)
    np.testing.assert_array_equal(back.lm_head.kernel[...], target.lm_head.kernel[...][:, cases.TARGET_IDS])  # type: ignore[union-attr]


def test_published_names_and_fields(tmp_path: Path, target: Transformer) -> None:
    save(dflash_head(target), tmp_path, target, layout="zlab")
    shapes = {n: v.shape for n, v in cases.read(tmp_path).items() if not n.startswith("layers.1")}
    assert shapes == {
        "fc.weight": (32, 96),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "layers.0.input_layernorm.weight": (32,),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.self_attn.q_norm.weight": (8,),
        "layers.0.self_attn.k_norm.weight": (8,),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["block_size"], config["num_target_layers"]) == (["DFlashDraftModel"], 4, 8)
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [1, 4, 7]}


def published(**changes: Any) -> dict[str, Any]:
    """config.json of z-lab/Qwen3-8B-DFlash-b16, its sizes cut down to the test's target."""
    return {
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16, "bos_token_id": 11,
        "dflash_config": {"mask_token_id": 12, "target_layer_ids": [1, 3, 5]}, "dtype": "bfloat16", "eos_token_id": 12,
        "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48,
        "layer_types": ["full_attention"] * 5, "max_position_embeddings": 40960, "max_window_layers": 5,
        "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 5, "num_key_value_heads": 2,
        "num_target_layers": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "4.57.3", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 13, **changes,
    }  # fmt: skip


def read(**changes: Any) -> DflashConfig:
    return dflash.read_config(published(**changes), tiny_config(num_layers=8))


def test_published_configurations_are_read() -> None:
    cfg = read()
    assert (cfg.block_size, cfg.drafts, cfg.mask_token_id, cfg.aux_layer_ids) == (16, 15, 12, (2, 4, 6))
    assert (cfg.num_layers, cfg.layer.head_dim, cfg.sliding_layers, cfg.draft_vocab_size) == (5, 16, (), 13)
    inside = read(block_size=None, dflash_config={"block_size": 8, "mask_token_id": 12, "target_layer_ids": [-1, 7]})
    assert (inside.block_size, inside.aux_layer_ids) == (8, (0, 8))
    windows = ["sliding_attention"] * 4 + ["full_attention"]
    newer = read(layer_types=windows, use_sliding_window=True, sliding_window=2048)
    assert (newer.sliding_layers, newer.sliding_window) == ((0, 1, 2, 3), 2048)
    assert newer.sliding_non_causal and not newer.window_from_anchor
    # z-lab's rule, where nothing names the layers: of 36 the outputs of 1, 9, 17, 25 and 33.
    assert dflash.default_layers(36, 5) == (2, 10, 18, 26, 34) and dflash.default_layers(36, 1) == (19,)
    assert read(dflash_config={"mask_token_id": 12}).aux_layer_ids == dflash.default_layers(8, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 17}, "vocab_size is 17, the target's vocab_size is 13"),
        ({"hidden_size": 64}, "hidden_size is 64, the target's hidden_size is 32"),
        ({"num_target_layers": 36}, "num_target_layers is 36, the target's num_layers is 8"),
        ({"model_type": "llama"}, "model_type of a DFlash head must be 'qwen3', got 'llama'"),
        ({"conv_kernel_size": 2}, r"fields \{'conv_kernel_size': 2\} of a DFlash head are not known"),
        ({"dflash_config": {"mask_token_id": 3, "selector_rank": 8}}, r"dflash_config \{'selector_rank': 8\}"),
        ({"dflash_config": {"mask_token_id": 3, "projector_type": "domino"}}, "must be 'dflash', got 'domino'"),
        ({"dflash_config": {}}, r"integers block_size and mask_token_id, got \{'mask_token_id': None\}"),
        ({"dflash_config": {"mask_token_id": 13}}, r"mask_token_id must lie in \[0, vocab_size 13\), got 13"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [8]}}, r"\[8\] do not fit a target of 8 layers"),
        ({"layer_types": ["sliding_attention"] * 5}, "need use_sliding_window and a sliding_window of at least 1"),
        ({"layer_types": ["full_attention"]}, "for each of 5 layers"),
        ({"block_size": 1}, "block_size must be at least 2, got 1"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "rope_type 'mrope' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized weights \(fp8\)"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"fc.weight": np.zeros((32, 64), np.float32)}, r"'fc.weight'.*shape \(32, 64\).* \(32, 96\)"),
        ({}, {"norm.weight": None}, "'norm.weight' is missing"),
        (
            {},
            {"candidate_selector.hidden_projection.weight": np.zeros((4, 32), np.float32)},
            "no place for: 'candidate",
        ),
        ({"draft_vocab_size": 9}, {}, "no 'd2t', but draft_vocab_size is 9 and vocab_size 13"),
        ({"target_hidden_size": 64}, {}, "target_hidden_size is 64, the target's hidden_size is 32"),
        ({"markov_rank": 256}, {}, r"fields \{'markov_rank': 256\} of a DFlash head are not known"),
    ],
)
def test_directories_that_do_not_fit_are_refused(
    tmp_path: Path, target: Transformer, config: dict[str, Any], tensors: dict[str, np.ndarray | None], message: str
) -> None:
    save(dflash_head(target), tmp_path, target)
    reconfigure(tmp_path, **config)
    rewrite(tmp_path, tensors)
    with pytest.raises(ValueError, match=message):
        directories.load_drafter("dflash", tmp_path, target)


def test_layouts_that_cannot_say_it_are_refused(tmp_path: Path, target: Transformer) -> None:
    for settings, message in (
        ({"sample_from_anchor": True}, "cannot express sample_from_anchor=True"),
        ({"own": True}, r"layout 'zlab' has no tables, got \['embed_tokens.weight', 'lm_head.weight'\]"),
        ({**SLIDING, "window_from_anchor": True}, "cannot express window_from_anchor=True"),
    ):
        with pytest.raises(ValueError, match=message):
            save(dflash_head(target, **settings), tmp_path, target, layout="zlab")
    head = dflash_head(target, **SLIDING)
    with pytest.raises(ValueError, match="cannot express window_from_anchor=False"):
        save(head, tmp_path, target)


def test_overrides_replace_fields(tmp_path: Path, target: Transformer) -> None:
    save(dflash_head(target, **SLIDING, sliding_non_causal=True), tmp_path, target, layout="zlab")
    causal: Any = directories.load_drafter("dflash", tmp_path, target, overrides={"sliding_non_causal": False})
    assert not causal.config.sliding_non_causal and causal.config.sliding_layers == (1,)
