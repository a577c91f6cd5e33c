"""What DFlash 2 heads add to DFlash's directories: names, published configurations, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import head_cases as cases
import jax.numpy as jnp
import pytest
from head_cases import dflash2_head, reconfigure, rewrite

from jaxspec.checkpointing import dflash2
from jaxspec.drafters import directories
from jaxspec.models.layers import Transformer
from jaxspec.models.tiny import tiny_config
from jaxspec.speculation.drafters.dflash2_head import Dflash2Config

SLIDING = dict(sliding_layers=(0,), sliding_window=7)


@pytest.fixture(scope="module")
def target() -> Transformer:
    return cases.target()


def save(module: Any, directory: Path, target: Transformer, **settings: Any) -> None:
    directories.save_drafter(module, directory, target=target, **{"dtype": jnp.float32, **settings})


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("speculators", {"own": True, "sample_from_anchor": True, "conv_taps": 1}),
        ("speculators", {**SLIDING, "window_from_anchor": True, "sliding_non_causal": True}),
        ("zlab", {**SLIDING, "sliding_non_causal": True}),
        ("zlab", SLIDING),
    ],
)
def test_round_trip(tmp_path: Path, target: Transformer, layout: str, settings: dict[str, Any]) -> None:
    head = dflash2_head(target, **settings)
    save(head, tmp_path, target, layout=layout)
    assert directories.read_kind(tmp_path) == "dflash2"
    cases.assert_same(directories.load_drafter("dflash2", tmp_path, target), head)


def test_published_names(tmp_path: Path, target: Transformer) -> None:
    save(dflash2_head(target), tmp_path, target, layout="zlab")
    shapes = {n: v.shape for n, v in cases.read(tmp_path).items() if "conv" in n or "selector" in n}
    assert shapes == {
        "layers.0.attention_conv.base_kernel": (2, 3, 32),
        "layers.0.attention_conv.kernel_projection.weight": (24, 32),
        "layers.0.mlp_conv.base_kernel": (2, 3, 32),
        "layers.0.mlp_conv.kernel_projection.weight": (24, 32),
        "candidate_selector.predecessor_codebook": (13, 5),
        "candidate_selector.successor_codebook": (13, 5),
        "candidate_selector.hidden_projection.weight": (5, 32),
    }


def published(changes: dict[str, Any] | None = None, **own: Any) -> dict[str, Any]:
    """config.json of z-lab/Qwen3.8-27B-DFlash2, its sizes cut down to the test's target."""
    inside = {
        "block_size": 8, "mask_token_id": 12, "target_layer_ids": [0, 3, 5], "conv_kernel_size": 2,
        "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 13, **own,
    }  # fmt: skip
    return {
        "architectures": ["DFlash2DraftModel"], "attention_bias": False, "dtype": "bfloat16", "head_dim": 16,
        "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "layer_types": ["sliding_attention"] * 5,
        "max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 5,
        "num_key_value_heads": 2, "num_target_layers": 8, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
        "sliding_window": 2048, "tie_word_embeddings": False, "use_sliding_window": True, "vocab_size": 13,
        "dflash_config": {k: v for k, v in inside.items() if v is not None}, **(changes or {}),
    }  # fmt: skip


def read(raw: dict[str, Any], **overrides: Any) -> Dflash2Config:
    return dflash2.read_config(raw, tiny_config(num_layers=8), overrides)


def test_published_configurations_are_read() -> None:
    cfg = read(published())
    assert (cfg.block_size, cfg.drafts, cfg.mask_token_id, cfg.aux_layer_ids) == (8, 7, 12, (1, 4, 6))
    assert (cfg.conv_taps, cfg.conv_group, cfg.selector_rank, cfg.selector_top_k) == (2, 16, 256, 13)
    assert cfg.sliding_layers == (0, 1, 2, 3, 4) and cfg.sliding_non_causal and not cfg.window_from_anchor
    assert read(published(), selector_top_k=5, sliding_non_causal=False).selector_top_k == 5


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (published(selector_rank=None), r"dflash_config of a DFlash 2 head needs \['selector_rank'\]"),
        (published(selector_top_k=16), "selector_top_k must be from 1 to vocab_size 13, got 16"),
        (published(conv_kernel_size=9), "conv_taps must be from 1 to block_size 8, got 9"),
        (published(conv_group_size=5), "conv_group must divide hidden_size 32, got 5"),
        (published(final_logit_softcapping=30.0), r"dflash_config \{'final_logit_softcapping': 30.0\}"),
        (published({"hidden_size": 64}), "hidden_size is 64, the target's hidden_size is 32"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(raw)


def test_directories_that_do_not_fit_are_refused(tmp_path: Path, target: Transformer) -> None:
    save(dflash2_head(target), tmp_path, target)
    reconfigure(tmp_path, draft_vocab_size=9)
    with pytest.raises(ValueError, match="draft_vocab_size must be vocab_size 13, got 9"):
        directories.load_drafter("dflash2", tmp_path, target)
    reconfigure(tmp_path, draft_vocab_size=13)
    rewrite(tmp_path, {"layers.0.mlp_conv.base_kernel": None})
    with pytest.raises(ValueError, match=r"'layers.0.mlp_conv.base_kernel' is missing"):
        directories.load_drafter("dflash2", tmp_path, target)
    with pytest.raises(ValueError, match="layout 'zlab' has no tables, got"):
        save(dflash2_head(target, own=True), tmp_path, target, layout="zlab")
