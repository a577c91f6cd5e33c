"""Every family against transformers itself (the extra `parity`): logits, greedy tokens, directories both ways.

test_models_recorded.py is what runs without torch; here transformers also answers for its recording.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import parity_cases as parity
import pytest

from jaxspec.checkpointing import hf
from jaxspec.models import registry
from jaxspec.models.base import RopeScaling
from jaxspec.models.family import token_ids
from jaxspec.models.layers import causal_attention
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_target

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)


@pytest.mark.parametrize("case", parity.CASES)
def test_logits_and_greedy_tokens_agree(case: str, tmp_path: Path) -> None:
    theirs = parity.reference_model(case, tmp_path / "numpy")
    theirs.save_pretrained(tmp_path / "transformers")
    ours = hf.load_model(tmp_path / "transformers", jnp.float32)

    tokens, expected = parity.reference_answers(theirs)
    prompt = parity.PROMPTS_BN.shape[1]
    assert tokens.shape[1] == prompt + parity.NEW_TOKENS
    assert min(len(set(row)) for row in tokens[:, prompt:].tolist()) > 8
    got = parity.logits_of(ours, tokens)
    assert expected.std() > 0.5
    np.testing.assert_allclose(got, expected, atol=parity.TOLERANCE, rtol=0)
    np.testing.assert_array_equal(got[:, prompt - 1 : -1].argmax(-1), tokens[:, prompt:])


@pytest.mark.parametrize("case", parity.CASES)
def test_the_recording_is_what_transformers_answers(case: str, tmp_path: Path) -> None:
    record = parity.load_records()[case]
    record.write_directory(tmp_path)
    kind = getattr(transformers, record.config["architectures"][0])
    theirs = kind.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens, logits = parity.reference_answers(theirs)
    np.testing.assert_array_equal(tokens, record.tokens_BN)
    np.testing.assert_allclose(logits[:, parity.POSITIONS], record.logits_BPV, atol=parity.TOLERANCE, rtol=0)


def test_auxiliary_states_are_the_streams_that_enter_the_layers(tmp_path: Path) -> None:
    theirs = parity.reference_model("llama", tmp_path)
    ours = hf.load_model(tmp_path)
    ids = np.array([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        states = theirs(torch.tensor(ids), output_hidden_states=True).hidden_states
    _, aux = ours(jnp.asarray(ids), jnp.arange(5)[None, :], causal_attention, aux_layers=(1, 0))
    assert aux is not None
    expected = np.concatenate([states[i].numpy() for i in (1, 0)], axis=-1)
    np.testing.assert_allclose(np.asarray(aux), expected, atol=parity.TOLERANCE, rtol=0)


EXPORTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biases": dict(tie_word_embeddings=True, attention_bias=True, output_bias=True, mlp_bias=True),
    "llama-llama3-rope": dict(rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16), rope_theta=500000.0),
    "llama-linear-rope": dict(rope_scaling=RopeScaling("linear", 2.0), eos_token_ids=(3, 7)),
    "qwen2": dict(family="qwen2", attention_bias=True),
    "qwen3": dict(family="qwen3", qk_norm=True, head_dim=16),
    "qwen3-window": dict(family="qwen3", qk_norm=True, sliding_window=9, sliding_layers=(1,)),
    **FAMILY_FIELDS,
}


@pytest.mark.parametrize("case", EXPORTS)
def test_transformers_loads_what_we_save(case: str, tmp_path: Path) -> None:
    ours = tiny_target(**EXPORTS[case])
    hf.save_model(ours, tmp_path, dtype=jnp.float32, more_config={"pad_token_id": 0})  # defaults lie beyond 13 tokens
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert theirs.dtype == torch.float32
    ids = np.arange(40)[None, :] * 5 % 13
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(parity.logits_of(ours, ids), expected, atol=parity.TOLERANCE, rtol=0)
    eos = ours.config.eos_token_ids
    assert theirs.generation_config.eos_token_id == (list(eos) or None)


def test_configs_read_as_transformers_means_them() -> None:
    """Fields that a config.json leaves out take transformers' defaults, family by family."""
    counts = {k: parity.SHAPE[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    kinds = dict.fromkeys(kind for kind, fields in parity.CASES.values() if "text_config" not in fields)
    for kind in kinds:
        given = {**counts, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
        if kind.startswith(("Deepseek", "Glm4MoeLite")):
            given |= {"num_key_value_heads": 4, "num_experts_per_tok": 8}
        if kind == "Dots1":  # has no defaults of these
            given |= {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
        config = getattr(transformers, parity.CONFIGS.get(kind, f"{kind}Config"))(**given)
        bare = {"architectures": [f"{kind}ForCausalLM"], **given}
        cfg = registry.read_config(bare)
        assert (cfg.rotary_dim if cfg.latent else cfg.head_dim) == (getattr(config, "head_dim", None) or 8)
        assert cfg.max_position_embeddings == config.max_position_embeddings
        assert cfg.rms_norm_eps == config.rms_norm_eps
        assert cfg.tie_word_embeddings == config.tie_word_embeddings
        assert cfg.bos_token_id == config.bos_token_id
        assert cfg.eos_token_ids == token_ids(config.eos_token_id)
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        assert (cfg.rope_theta, cfg.partial_rotary_factor) == (
            rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
        )  # fmt: skip
        sliding = "sliding_attention"
        types = getattr(config, "layer_types", None) or [sliding if cfg.sliding_window else ""] * 2
        assert cfg.sliding_layers == tuple(i for i, which in enumerate(types) if which == sliding)
        if cfg.sliding_layers:
            assert cfg.sliding_window == config.sliding_window
