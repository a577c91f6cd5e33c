"""Every family against what transformers answered when parity.npz was recorded: logits and greedy tokens, no torch."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import parity_cases as parity
import pytest

from jaxspec.checkpointing import hf

RECORDS = parity.load_records()


def test_the_recording_is_of_these_cases() -> None:
    assert list(RECORDS) == list(parity.CASES)
    for case, record in RECORDS.items():
        wanted = parity.settings(case)
        text = wanted.pop("text_config", {})
        wanted.pop("vision_config", None)
        assert {name: record.config[name] for name in wanted} == wanted
        assert {name: record.config["text_config"][name] for name in text} == text
        length = parity.PROMPTS_BN.shape[1] + parity.NEW_TOKENS
        assert record.tokens_BN.shape == (len(parity.PROMPTS_BN), length)
        np.testing.assert_array_equal(record.tokens_BN[:, : -parity.NEW_TOKENS], parity.PROMPTS_BN)
        recorded = np.arange(length)[parity.POSITIONS]
        assert record.logits_BPV.shape == (len(parity.PROMPTS_BN), len(recorded), parity.SHAPE["vocab_size"])
        assert record.logits_BPV.dtype == np.float32 and record.logits_BPV.std() > 0.5


@pytest.mark.parametrize("case", parity.CASES)
def test_logits_and_greedy_tokens_agree_with_the_recording(case: str, tmp_path: Path) -> None:
    record = RECORDS[case]
    record.write_directory(tmp_path)
    model = hf.load_model(tmp_path, jnp.float32)
    logits_BNV = parity.logits_of(model, record.tokens_BN)
    np.testing.assert_allclose(logits_BNV[:, parity.POSITIONS], record.logits_BPV, atol=parity.TOLERANCE, rtol=0)
    prompt = parity.PROMPTS_BN.shape[1]
    np.testing.assert_array_equal(logits_BNV[:, prompt - 1 : -1].argmax(-1), record.tokens_BN[:, prompt:])


def test_other_weights_than_the_recorded_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "SEED", parity.SEED + 1)
    with pytest.raises(ValueError, match="other weights than the recorded ones"):
        RECORDS["llama"].write_directory(tmp_path)
