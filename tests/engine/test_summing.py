"""How devices add up: what is timed is checked, and what does not run or is wrong is not chosen."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

from jaxspec.runtime import summing
from jaxspec.runtime.sharding import tensor_mesh


def test_ways_that_do_not_run_or_are_wrong_are_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(summing, "CHAIN", 2)
    monkeypatch.setattr(summing, "ROWS", (2,))
    real = summing.summed
    lies = lambda x, by: real(x, by) if by != "lies" else jax.lax.psum(x, summing.TENSOR_AXIS) * 1.01
    alone = lambda x, by: x if by == "alone" else lies(x, by)
    monkeypatch.setattr(summing, "summed", alone)
    ways = {"refused": summing.Way(options=(("xla_no_such_option", True),)), "lies": summing.Way("lies")}
    monkeypatch.setattr(summing, "WAYS", {"nccl": summing.Way(), "alone": summing.Way("alone"), **ways})
    mesh, dtype = tensor_mesh(2), jnp.dtype(jnp.float32)
    with caplog.at_level(logging.INFO, logger=summing.__name__):
        assert summing.choose(mesh, 64, dtype, (*ways, "alone", "nccl")) == "nccl"
    told = [record.getMessage() for record in caplog.records]
    assert "refused do not run here" in told[0] and "xla_no_such_option" in told[0]
    assert "lies are wrong" in told[1] and "alone are wrong" in told[2] and "by nccl" in told[3]
    assert not summing.measure(summing.Way("alone"), mesh, 2, 64, dtype).equal
    assert summing.choose(mesh, 64, dtype) == "nccl", "where there is nothing to choose from nothing is measured"
    assert len(caplog.records) == 4
