"""What DSpark heads add to DFlash's directories: names, published configurations, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import dspark_head, reconfigure, rewrite

from jaxspec.checkpointing import dspark
from jaxspec.drafters import directories
from jaxspec.models.layers import Shared, Transformer
from jaxspec.models.tiny import tiny_config
from jaxspec.speculation.drafters.dspark_head import DsparkConfig


@pytest.fixture(scope="module")
def target() -> Transformer:
    return cases.target()


def save(module: Any, directory: Path, target: Transformer, **settings: Any) -> None:
    directories.save_drafter(module, directory, target=target, **{"dtype": jnp.float32, **settings})


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("speculators", {"draft": 9, "markov_type": "gated", "sample_from_anchor": False}),
        ("speculators", {"own": True, "confidence": False}),
        ("deepspec", {"own": True, "markov_type": "rnn"}),
        ("deepspec", {"confidence_reads_token": False}),
        ("specforge", {"sliding_layers": (0,), "sliding_window": 7, "markov_type": "gated"}),
        ("specforge", {"confidence": False, "confidence_reads_token": False}),
    ],
)
def test_round_trip(tmp_path: Path, target: Transformer, layout: str, settings: dict[str, Any]) -> None:
    head = dspark_head(target, **settings)
    save(head, tmp_path, target, layout=layout)
    assert directories.read_kind(tmp_path) == "dspark"
    cases.assert_same(directories.load_drafter("dspark", tmp_path, target), head)


def test_published_names(tmp_path: Path, target: Transformer) -> None:
    """DeepSpec's files hold copies of the target's tables, which are the target's again when they are read."""
    save(dspark_head(target), tmp_path, target, layout="deepspec")
    shapes = {n: v.shape for n, v in cases.read(tmp_path).items() if not n.startswith("layers.")}
    assert shapes == {
        "embed_tokens.weight": (13, 32),
        "lm_head.weight": (13, 32),
        "fc.weight": (32, 96),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "markov_head.markov_w1.weight": (13, 5),
        "markov_head.markov_w2.weight": (13, 5),
        "confidence_head.proj.weight": (1, 37),
        "confidence_head.proj.bias": (1,),
    }
    back: Any = directories.load_drafter("dspark", tmp_path, target)
    assert isinstance(back.embedding, Shared) and isinstance(back.lm_head.kernel, Shared)
    for kind, names in (("gated", ["gate_proj"]), ("rnn", ["joint_proj"])):
        save(dspark_head(target, markov_type=kind), tmp_path / kind, target, layout="specforge")
        found = [n for n in cases.read(tmp_path / kind) if n.startswith("markov_head.") and n.endswith("bias")]
        assert found == [f"markov_head.{n}.bias" for n in names]


def published(**changes: Any) -> dict[str, Any]:
    """config.json of a head that DeepSpec afdfa7c trains for Qwen3-8B, its sizes cut down to the test's target."""
    return {
        "architectures": ["Qwen3DSparkModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 7,
        "bos_token_id": 11, "confidence_head_with_markov": True, "dtype": "bfloat16", "enable_confidence_head": True,
        "eos_token_id": 12, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
        "intermediate_size": 48, "layer_types": ["full_attention"] * 5, "markov_head_type": "vanilla",
        "markov_rank": 256, "mask_token_id": 12, "max_position_embeddings": 40960, "max_window_layers": 36,
        "model_type": "qwen3", "num_anchors": 512, "num_attention_heads": 4, "num_hidden_layers": 5,
        "num_key_value_heads": 2, "num_target_layers": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "target_layer_ids": [-1, 1, 3, 5],
        "tie_word_embeddings": False, "transformers_version": "4.57.3", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 13, **changes,
    }  # fmt: skip


def specforge(**own: Any) -> dict[str, Any]:
    """The same as SpecForge a6b6b02 writes it."""
    moved = ("confidence_head_with_markov", "enable_confidence_head", "markov_head_type", "markov_rank")
    raw = {k: v for k, v in published().items() if k not in (*moved, "mask_token_id", "target_layer_ids")}
    raw |= {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}}
    inside = {name: published()[name] for name in (*moved, "mask_token_id", "target_layer_ids")}
    inside |= {"attention_mode": "gqa", "confidence_head_alpha": 1.0, "projector_type": "dspark"}
    return raw | {"dflash_config": inside | own}


def read(raw: dict[str, Any], **overrides: Any) -> DsparkConfig:
    return dspark.read_config(raw, tiny_config(num_layers=8), overrides)


def test_published_configurations_are_read() -> None:
    cfg = read(published())
    assert (cfg.block_size, cfg.drafts, cfg.sample_from_anchor) == (7, 7, True)
    assert (cfg.mask_token_id, cfg.aux_layer_ids, cfg.num_layers) == (12, (0, 2, 4, 6), 5)
    assert (cfg.markov_rank, cfg.markov_type, cfg.confidence, cfg.confidence_reads_token) == (
        256,
        "vanilla",
        True,
        True,
    )
    assert read(specforge()) == cfg
    plain = read(published(enable_confidence_head=False, confidence_head_with_markov=None))
    assert (plain.confidence, plain.confidence_reads_token) == (False, False)
    assert read(published(), sample_from_anchor=False, markov_type="rnn").drafts == 6


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (published(hidden_size=64), "hidden_size is 64, the target's hidden_size is 32"),
        (published(num_target_layers=36), "num_target_layers is 36, the target's num_layers is 8"),
        (published(markov_rank=0), r"markov_rank must be at least 1 .*, got 0"),
        (published(markov_head_type="lstm"), "markov_type must be one of .*, got 'lstm'"),
        (published(target_layer_ids=[8]), r"target_layer_ids \[8\] do not fit a target of 8 layers"),
        (published(selector_rank=8), r"fields \{'selector_rank': 8\} of a DFlash head are not known"),
        (specforge(projector_type="domino"), "projector_type must be 'dspark', got 'domino'"),
        (specforge(conv_kernel_size=2), r"dflash_config \{'conv_kernel_size': 2\}"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(raw)


def test_directories_that_do_not_fit_are_refused(tmp_path: Path, target: Transformer) -> None:
    table = "markov_head.markov_w2.weight"
    for i, (config, tensors, message) in enumerate((
        ({}, {table: np.zeros((9, 5), np.float32)}, rf"'{table}'.*shape \(9, 5\).* \(13, 5\)"),
        ({}, {"confidence_head.proj.bias": None}, "'confidence_head.proj.bias' is missing"),
        ({"markov_head_type": "gated"}, {}, "'markov_head.gate_proj.weight' is missing"),
        ({"enable_confidence_head": False}, {}, "no place for: 'confidence_head.proj.bias'"),
    )):  # fmt: skip
        save(dspark_head(target), tmp_path / str(i), target)
        reconfigure(tmp_path / str(i), **config)
        rewrite(tmp_path / str(i), tensors)
        with pytest.raises(ValueError, match=message):
            directories.load_drafter("dspark", tmp_path / str(i), target)


def test_layouts_that_cannot_say_it_are_refused(tmp_path: Path, target: Transformer) -> None:
    for layout, settings, message in (
        ("deepspec", {"sample_from_anchor": False}, "cannot express sample_from_anchor=False"),
        ("specforge", {"own": True}, r"layout 'specforge' has no tables, got \['embed_tokens"),
        ("specforge", {"draft": 9}, "cannot express draft_vocab_size=9"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            save(dspark_head(target, **settings), tmp_path, target, layout=layout)


def test_the_kinds_of_blocks_are_told_apart(tmp_path: Path, target: Transformer) -> None:
    """A DSpark head without its config.json's marks would load as DFlash's and draft a place late."""
    save(dspark_head(target), tmp_path, target, layout="specforge")
    raw = json.loads((tmp_path / "config.json").read_text())
    reconfigure(tmp_path, architectures=["DFlashDraftModel"])
    assert directories.read_kind(tmp_path) == "dspark"
    own = {k: v for k, v in raw["dflash_config"].items() if k != "projector_type"}
    reconfigure(tmp_path, architectures=["DFlashDraftModel"], dflash_config=own)
    with pytest.raises(ValueError, match=r"dflash_config \{'confidence_head_with_markov': True"):
        directories.load_drafter("dflash", tmp_path, target)
