"""Which implementation runs, and who is told."""

from __future__ import annotations

import logging

import jax
import pytest

from pallas_kernels import dispatch

REFUSES = {"tpu": lambda: "too wide", "gpu": lambda: "too wide"}
SERVES = {"tpu": lambda: None, "gpu": lambda: None}


def test_a_named_implementation_runs_or_fails_with_the_reason():
    for name in dispatch.IMPLEMENTATIONS:
        assert dispatch.resolve("op", name, SERVES) == name
    assert dispatch.resolve("op", "reference", REFUSES) == "reference"
    for name in ("tpu", "gpu", "interpret"):
        with pytest.raises(ValueError, match=f"'{name}' cannot serve these arguments: too wide"):
            dispatch.resolve("op", name, REFUSES)
    with pytest.raises(ValueError, match="must be None or one of .* got 'cuda'"):
        dispatch.resolve("op", "cuda", SERVES)


def test_the_backend_chooses_and_a_refusal_is_a_warning_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "pallas_kernels.dispatch")
    assert dispatch.resolve("on a cpu", None, SERVES) == "reference"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert dispatch.resolve("served", None, SERVES) == "gpu"
    for _ in range(2):
        assert dispatch.resolve("refused", None, REFUSES) == "reference"
    levels = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in levels] == ["INFO", "INFO", "WARNING"]
    assert "too wide" in levels[2][1]
