"""Experts in few bits as the kernel of few rows has them: which models get them so, and that nothing else changes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import fitting, loading
from jaxspec.fitting import stored
from jaxspec.models import few_rows, packing
from jaxspec.models.base import Experts, ModelConfig
from jaxspec.models.experts import MixtureOfExperts, mlp
from jaxspec.models.layers import Transformer, causal_attention
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised
from jaxspec.speculation.state import Geometry

GPT_OSS: dict[str, Any] = dict(scores="top_k", bias=True, hidden_act="clamped_swiglu")


def model(form: str, dtype: Any = jnp.bfloat16) -> Transformer:
    """Three layers, of which the first has no experts; in int8 with scales of 16 bits, as checkpoints have them."""
    width, group = (128, 32) if form == "int8-g32" else (64, None)
    own = Experts(8, 2, width, (1, 2), **(GPT_OSS if form == "mxfp4" else {}))
    cfg = ModelConfig("test", 64, width, 128, 3, 2, 1, 64, experts=own)
    made = Transformer(cfg, dtype=dtype, rngs=nnx.Rngs(5 if group else 3), mlp=mlp)  # none of whose rows' experts tie
    rng = np.random.default_rng(1)
    for layer in made.layers:
        if not isinstance(layer.mlp, MixtureOfExperts):
            continue
        for param in (layer.mlp.gate_up, layer.mlp.down):
            count, d_in, d_out = param[...].shape
            if form == "mxfp4":
                codes = jnp.asarray(rng.integers(0, 256, (count, d_in // 2, d_out), np.uint8))
                param.set_value(Mxfp4(codes, jnp.asarray(rng.integers(118, 122, (count, d_in // 32, d_out), np.uint8))))
                continue
            scale = jnp.asarray(rng.uniform(1, 2, (count, d_in // (group or d_in), d_out)) / 1000, jnp.bfloat16)
            param.set_value(Quantised(jnp.asarray(rng.integers(-127, 128, (count, d_in, d_out), np.int8)), scale))
    return made


def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> jax.Array:
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    return causal_attention(layer, q32, k32, v32).astype(q.dtype)


def forward(made: Transformer) -> np.ndarray:
    graph, state = nnx.split(made)
    tokens, positions = jnp.arange(20)[None] * 3, jnp.arange(20)[None]
    run = jax.jit(lambda state: nnx.merge(graph, state)(tokens, positions, attend)[0])
    return np.asarray(run(state), np.float32)


@pytest.mark.parametrize("form", ["int8", "int8-g32", "mxfp4"])
def test_engines_pack_experts_and_make_room_for_them(
    form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = model(form)
    want, before = forward(made), stored(nnx.state(made))
    assert packing.added_bytes(made) == 0  # where there is no such GPU
    monkeypatch.setattr("jaxspec.models.packing.gpu.supported", lambda: None)
    monkeypatch.setattr(few_rows, "prepare", lambda model, **_: model)
    monkeypatch.setattr(loading.jax, "default_backend", lambda: "gpu")
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1 << 24})
    pages = lambda: fitting.fitted(Geometry(1, 1 << 40, 8, 4, 2), 1.0, made, None, (), 1).num_pages
    monkeypatch.setattr("jaxspec.fitting.jax.local_devices", lambda: [device])
    expected, room = packing.added_bytes(made), pages()
    assert expected > 0 and packing.added_bytes(made, 2) == 0
    with caplog.at_level(logging.INFO, logger="jaxspec.models.packing"):
        assert loading.laid_out(made, 1, "xla") is made
    assert [record.message for record in caplog.records] == [
        "experts of 2 layers are packed for the kernel of few rows"
    ]
    assert stored(nnx.state(made)) - before == expected and pages() == room and packing.added_bytes(made) == 0
    monkeypatch.undo()
    np.testing.assert_allclose(forward(made), want, atol=2**-6 * np.abs(want).max())
    caplog.clear()
    packing.pack_experts(made)
    assert not caplog.records


@pytest.mark.parametrize(
    ("form", "dtype", "shards", "scale", "said"),
    [
        ("int8", jnp.float32, 1, None, "activations are float32"),
        ("mxfp4", jnp.bfloat16, 2, None, "2 devices share the model"),
        ("mxfp4", jnp.bfloat16, 1, 32, "2 ** -94 to 2 ** 33, got 2 ** -95 to"),
        ("mxfp4", jnp.bfloat16, 1, 161, "2 ** -94 to 2 ** 33, got 2 ** -9 to 2 ** 34"),
    ],
)
def test_layers_that_stay_as_they_are_stored_say_why(
    form: str, dtype: Any, shards: int, scale: int | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = model(form, dtype)
    if scale is not None:  # of one block, in one layer; and where all values are zeros it does not matter
        down: Any = made.layers[2].mlp.down
        down.set_value(Mxfp4(down[...].codes, down[...].scale.at[3, 1, 5].set(scale)))
        other: Any = made.layers[1].mlp.down
        codes = other[...].codes.at[3, 16:32, 5].set(0x80)
        other.set_value(Mxfp4(codes, other[...].scale.at[3, 1, 5].set(scale)))
    packing.pack_experts(made, shards)
    [record] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert said in record.message and record.message.endswith("layers.2.mlp")
    layers: Any = made.layers
    assert [layer.mlp.packed for layer in layers[1:]] == [scale is not None, False]
