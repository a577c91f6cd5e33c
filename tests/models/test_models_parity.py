"""Every family against transformers: logits, greedy tokens, and directories in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpointing import hf
from jaxspec.models import registry
from jaxspec.models.base import RopeScaling
from jaxspec.models.layers import Transformer, causal_attention
from jaxspec.models.tiny import tiny_target

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-mha-wide-heads": ("Llama", dict(num_key_value_heads=4, head_dim=12, rms_norm_eps=1e-3)),
    "llama-llama3-rope": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-linear-rope": (
        "Llama",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    ),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3-biases": ("Qwen3", dict(head_dim=8, attention_bias=True)),
}


def logits_of(model: Transformer, ids: np.ndarray) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1])[None, :], ids.shape)
    hidden, aux = model(jnp.asarray(ids, jnp.int32), positions, causal_attention)
    assert aux is None
    return np.asarray(model.logits(hidden))


def torch_model(kind: str, **overrides: Any) -> Any:
    """A transformers model in which every parameter is random, biases and gains included."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **overrides})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(torch.randn_like(p) * 0.3 + (1.0 if "norm" in name else 0.0))
            else:
                p.copy_(torch.randn_like(p) * 1.5 / p.shape[1] ** 0.5)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_agree(case: str, tmp_path: Path) -> None:
    kind, overrides = CASES[case]
    theirs = torch_model(kind, **overrides)
    theirs.save_pretrained(tmp_path)
    ours = hf.load_model(tmp_path, jnp.float32)

    prompt = torch.tensor([[1, 17, 5, 60, 33]])
    greedy = theirs.generate(prompt, do_sample=False, max_new_tokens=100, min_new_tokens=100, pad_token_id=0)
    assert greedy.shape == (1, 105) and len(set(greedy[0].tolist())) > 8
    ids = greedy.numpy()
    with torch.no_grad():
        expected = theirs(greedy).logits.numpy()
    got = logits_of(ours, ids)
    assert expected.std() > 0.5
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(got[0, 4:-1].argmax(-1), ids[0, 5:])


def test_auxiliary_states_are_the_streams_that_enter_the_layers(tmp_path: Path) -> None:
    theirs = torch_model("Llama")
    theirs.save_pretrained(tmp_path)
    ours = hf.load_model(tmp_path)
    ids = np.array([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        states = theirs(torch.tensor(ids), output_hidden_states=True).hidden_states
    _, aux = ours(jnp.asarray(ids), jnp.arange(5)[None, :], causal_attention, aux_layers=(1, 0))
    assert aux is not None
    expected = np.concatenate([states[i].numpy() for i in (1, 0)], axis=-1)
    np.testing.assert_allclose(np.asarray(aux), expected, atol=1e-4, rtol=0)


EXPORTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biases": dict(tie_word_embeddings=True, attention_bias=True, output_bias=True, mlp_bias=True),
    "llama-llama3-rope": dict(rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16), rope_theta=500000.0),
    "llama-linear-rope": dict(rope_scaling=RopeScaling("linear", 2.0), eos_token_ids=(3, 7)),
    "qwen2": dict(family="qwen2", attention_bias=True),
    "qwen3": dict(family="qwen3", qk_norm=True, head_dim=16),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_transformers_loads_what_we_save(case: str, tmp_path: Path) -> None:
    ours = tiny_target(**EXPORTS[case])
    hf.save_model(ours, tmp_path, dtype=jnp.float32)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert theirs.dtype == torch.float32
    ids = np.arange(40)[None, :] * 5 % 13
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(logits_of(ours, ids), expected, atol=1e-4, rtol=0)
    eos = ours.config.eos_token_ids
    assert theirs.generation_config.eos_token_id == (list(eos) or None)


def test_configs_read_as_transformers_means_them() -> None:
    """Fields that a config.json leaves out take transformers' defaults, family by family."""
    counts = {k: SHAPE[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    for kind in ("Llama", "Qwen2", "Qwen3"):
        config = getattr(transformers, f"{kind}Config")(**counts, num_attention_heads=4, num_key_value_heads=2)
        bare = {"architectures": [f"{kind}ForCausalLM"], **counts, "num_attention_heads": 4, "num_key_value_heads": 2}
        cfg = registry.read_config(bare)
        assert cfg.head_dim == getattr(config, "head_dim", 8)
        assert cfg.max_position_embeddings == config.max_position_embeddings
        assert cfg.rms_norm_eps == config.rms_norm_eps
        assert cfg.tie_word_embeddings == config.tie_word_embeddings
        assert cfg.bos_token_id == config.bos_token_id
        assert cfg.eos_token_ids == (() if config.eos_token_id is None else (config.eos_token_id,))
        assert cfg.rope_theta == config.rope_parameters["rope_theta"]
