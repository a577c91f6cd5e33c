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
    monkeypatch.setattr(summing, "CHAIN", 8)
    monkeypatch.setattr(summing, "ROWS", (2,))
    real = summing.summed
    lies = lambda x, by: real(x, by) if by != "lies" else jax.lax.psum(x, summing.TENSOR_AXIS) * 1.01
    alone = lambda x, by: x if by == "alone" else lies(x, by)
    unit = jnp.float32(1 + jnp.finfo(jnp.float32).eps)
    drifts = lambda x, by: alone(x, by) * unit if by == "drifts" else alone(x, by)
    monkeypatch.setattr(summing, "summed", drifts)
    ways = {"refused": summing.Way(options=(("xla_no_such_option", True),))}
    ways |= {name: summing.Way(name) for name in ("lies", "drifts")}
    monkeypatch.setattr(summing, "WAYS", {"nccl": summing.Way(), "alone": summing.Way("alone"), **ways})
    mesh, dtype = tensor_mesh(2), jnp.dtype(jnp.float32)
    with caplog.at_level(logging.INFO, logger=summing.__name__):
        assert summing.choose(mesh, 64, dtype, (*ways, "alone", "nccl")) == "nccl"
    told = [record.getMessage() for record in caplog.records]
    assert "refused do not run here" in told[0] and "xla_no_such_option" in told[0]
    assert "lies are wrong" in told[1] and "drifts are wrong" in told[2], "a unit too much each time"
    assert "alone are wrong" in told[3] and "by nccl" in told[4]
    found = summing.measure(summing.Way("drifts"), mesh, 2, 64, dtype)
    assert found.equal and found.error <= 2 and not found.right(2)
    assert not summing.measure(summing.Way("alone"), mesh, 2, 64, dtype).equal
    monkeypatch.setattr(summing, "CHAIN", 24)
    thirds = summing.measure(summing.Way(), tensor_mesh(3), 2, 64, jnp.dtype(jnp.bfloat16), repeats=1)
    assert thirds.drift < 2, "the exact result is that of the weights as bfloat16 has them"
    assert summing.choose(mesh, 64, dtype) == "nccl", "where there is nothing to choose from nothing is measured"
    assert len(caplog.records) == 5
