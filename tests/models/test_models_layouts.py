"""Layouts of the weights that leave the function alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models import depths
from jaxspec.models.layers import Linear, Transformer, causal_attention, product
from jaxspec.models.layouts import column_blocks, tensor_parallel
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_target


def logits(model: Transformer, tokens: jax.Array) -> np.ndarray:
    """As one program: hundreds of operations take longer to compile by themselves."""
    positions = jnp.arange(tokens.shape[1])[None, :]
    return np.asarray(jax.jit(lambda: model.logits(model(tokens, positions, causal_attention)[0]))())


@pytest.mark.parametrize(("tied", "keep_flat", "length"), [(False, False, 5), (True, True, 50)])
def test_column_blocks_compute_the_same(tied: bool, keep_flat: bool, length: int):
    model = tiny_target(3, tie_word_embeddings=tied, vocab_size=24)
    blocked = column_blocks(model, width=8, keep_flat=keep_flat)
    tokens = jnp.arange(length, dtype=jnp.int32)[None, :] * 5 % 24
    assert blocked.layers[0].mlp.gate_up.kernel[...].ndim == 3
    np.testing.assert_allclose(logits(model, tokens), logits(blocked, tokens), atol=2e-5)


@pytest.mark.parametrize("family", ["olmo2", "phi3", "glm4", "gemma2"])
def test_columns_by_shard_compute_the_same(family: str):
    """Norms over all heads, fused and interleaved projections and odd gates, laid out for two devices."""
    model = tiny_target(3, **FAMILY_FIELDS[family])
    split = tensor_parallel(model, 2)
    tokens = jnp.arange(20, dtype=jnp.int32)[None, :] * 5 % 13
    assert split.layers[0].attn.shards == split.layers[0].mlp.shards == 2
    np.testing.assert_allclose(logits(model, tokens), logits(split, tokens), atol=2e-5)


@pytest.mark.parametrize("inputs", [192, 2000])
def test_a_row_does_not_depend_on_how_many_there_are(inputs: int):
    layer = column_blocks(Linear(inputs, 128, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)), keep_flat=True)
    assert layer.flat is not None
    x_NE = jax.random.normal(jax.random.key(1), (100, inputs))
    call = nnx.jit(lambda layer, x_NE: layer(x_NE))
    all_N = np.asarray(call(layer, x_NE))
    for count in (1, 4, 47, 48, 70):
        np.testing.assert_array_equal(np.asarray(call(layer, x_NE[:count])), all_N[:count])
    layer.flat.set_value(jnp.full_like(layer.flat[...], jnp.nan))
    assert np.isnan(call(layer, x_NE[:48])).all() and np.isfinite(call(layer, x_NE[:47])).all()


@pytest.mark.parametrize(("same", "parts"), [({2048}, None), ({512, 256}, 512), ({128}, 128), (set(), 128)])
def test_deep_products_are_cut_as_the_backend_sums(same: set[int], parts: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(depths, "_same_bits", lambda depth: depth in same)
    assert depths.at_once.__wrapped__() == parts
    monkeypatch.setattr(depths, "at_once", lambda: parts)
    x, kernel = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(3, 700), (2, 700, 8)]))
    made = jax.make_jaxpr(lambda x, kernel: product(x, kernel))(x, kernel)
    shape = {None: "2,3,8", 512: "2,2,3,8", 128: "2,7,3,8"}[parts]
    assert f"f32[{shape}] = dot_general" in str(made)
    want = jnp.einsum("ni,bio->nbo", x, kernel).reshape(3, 16)
    np.testing.assert_allclose(product(x, kernel), want, atol=1e-3)


def test_column_blocks_copy_leave_odd_widths_and_fill_up_an_output_layer():
    model = tiny_target(3)
    blocked = column_blocks(model, width=8)
    assert model.layers[0].attn.qkv.kernel[...].ndim == 2, "the original must stay as it was"
    assert isinstance(blocked.lm_head, Linear) and blocked.lm_head.kernel[...].shape == (2, 32, 8)
    assert blocked.logits(jnp.zeros((1, 1, 32))).shape == (1, 1, 13)
    odd = column_blocks(Linear(32, 13, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)), width=8)
    assert odd.kernel[...].shape == (32, 13)


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_of_odd_width_has_bits_that_do_not_depend_on_the_number_of_rows(tied: bool):
    model = column_blocks(tiny_target(3, vocab_size=100, tie_word_embeddings=tied, hidden_size=2048))
    x_NE = jax.random.normal(jax.random.key(1), (1, 100, 2048))
    call = nnx.jit(lambda model, x: model.logits(x))
    whole = np.asarray(call(model, x_NE))
    assert whole.shape == (1, 100, 100)
    for count in (1, 2, 5, 16, 47, 70):
        np.testing.assert_array_equal(np.asarray(call(model, x_NE[:, :count])), whole[:, :count])


def test_gpus_keep_norms_of_many_rows_apart_from_products(monkeypatch: pytest.MonkeyPatch):
    """Two of each layer; the other barrier of a layer holds back a layout (`Attention`)."""
    model = tiny_target(0, num_layers=3)

    def barriers(rows: int) -> int:
        tokens = jnp.zeros((2, rows // 2), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(rows // 2), tokens.shape)
        run = lambda tokens, positions: model(tokens, positions, causal_attention)[0]
        return str(jax.make_jaxpr(run)(tokens, positions)).count("optimization_barrier")

    assert barriers(34) == 3
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (barriers(32), barriers(34)) == (3, 3 + 6)
