"""Which implementation runs, and who is told."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import warnings

import jax
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.rejection_sampling import api as rejection_sampling
from pallas_kernels.rejection_sampling import gpu as sampling
from pallas_kernels.rejection_sampling.cases import CASES as SAMPLING
from pallas_kernels.tree_attention import api
from pallas_kernels.tree_attention import gpu as attention
from pallas_kernels.tree_attention.cases import CASES as ATTENTION

NAMES = ("reference", "tpu", "gpu", "interpret")


def operation(name: str, reason: str | None, *names: str) -> Operation[int, tuple[str, int]]:
    """One whose implementations return their names; all but the reference refuse for that reason."""
    ways = {n: Implementation(lambda x, n=n: (n, x), lambda _: reason) for n in names or NAMES}
    return Operation(name, ways | {"reference": Implementation(lambda x: ("reference", x))})


def test_a_named_implementation_runs_or_fails_with_the_reason():
    serves, refuses = operation("op", None), operation("op", "too wide")
    for name in NAMES:
        assert serves(7, name) == (name, 7)
    assert refuses(7, "reference") == ("reference", 7)
    for name in ("tpu", "gpu", "interpret"):
        with pytest.raises(ValueError, match=f"op: implementation '{name}' cannot serve these arguments: too wide"):
            refuses(7, name)
    with pytest.raises(ValueError, match=r"must be None or one of \('reference', 'tpu', 'gpu', .* got 'cuda'"):
        serves(7, "cuda")
    with pytest.raises(ValueError, match=r"must be None or one of \('gpu', 'reference'\), got 'tpu'"):
        operation("op", None, "gpu")(7, "tpu")


def test_the_backend_chooses_and_a_refusal_is_a_warning_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "pallas_kernels.dispatch")
    assert operation("on a cpu", None)(7) == ("reference", 7)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert operation("served", None)(7) == ("gpu", 7)
    for _ in range(2):
        assert operation("refused", "too wide")(7) == ("reference", 7)
    assert operation("without a kernel", None, "tpu")(7) == ("reference", 7)
    levels = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in levels] == ["INFO", "INFO", "WARNING", "INFO"]
    assert "too wide" in levels[2][1] and "the backend has no kernel" in levels[3][1]


def test_without_triton_all_that_mosaic_serves_runs_there_and_the_rest_is_told_why(monkeypatch: pytest.MonkeyPatch):
    """As in a JAX that has removed it."""
    taken = []
    monkeypatch.setattr(dispatch, "triton", None)
    for name in ("gpu_mosaic", "mosaic_wide", "mosaic_plain"):
        monkeypatch.setattr(getattr(api, name), "tree_attention", lambda args, name=name: taken.append(name))
    many = dataclasses.replace(ATTENTION["decode-b64-8k"], dtype="bfloat16").shapes()
    odd = dataclasses.replace(ATTENTION["d96"], head_dim=80).shapes()
    assert "no Pallas on Triton" in (api.OPERATION.implementations["gpu"].refusal(many) or "")
    with pytest.raises(ValueError, match=r"no Pallas on Triton; on Mosaic GPU it needs"):
        rejection_sampling.OPERATION(SAMPLING["small-greedy"].shapes(), "gpu")
    monkeypatch.setattr(api, "supported", lambda: None)
    api.OPERATION(many, "gpu")
    api.OPERATION(ATTENTION["prefill512-4k"].shapes(), "gpu")
    api.OPERATION.implementations["gpu"].run(many, blocks=None)  # Triton's sizes are nobody's then
    assert taken == ["gpu_mosaic", "mosaic_wide", "gpu_mosaic"]
    with pytest.raises(
        ValueError, match="no Pallas on Triton; on Mosaic GPU few rows: head dimension must be .* got 80"
    ):
        api.OPERATION(odd, "gpu")


def test_a_jax_without_triton_is_imported():
    code = "import sys; sys.modules['jax.experimental.pallas.triton'] = None; import jaxspec.engine"
    code += "; from pallas_kernels import dispatch; assert dispatch.triton is None"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize("kind", ["sampling", "attention"])
def test_who_gets_triton_hears_no_word_of_its_end(kind: str):
    """What JAX 0.11 says when such a program is lowered; of other deprecations users hear."""
    said = "The Pallas Triton backend is deprecated and will be removed in a future JAX version."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning):
            warnings.warn(said, DeprecationWarning, stacklevel=1)
        if kind == "sampling":
            jax.eval_shape(sampling.rejection_sampling, SAMPLING["small-greedy"].shapes())
        else:
            jax.eval_shape(attention.tree_attention, ATTENTION["small-tree"].shapes())
        warnings.warn(said, DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning):
            warnings.warn("something else is deprecated", DeprecationWarning, stacklevel=1)
