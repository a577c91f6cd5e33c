"""Layouts of the weights that leave the function alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.layers import Linear, causal_attention, column_blocks
from jaxspec.models.tiny import tiny_target


@pytest.mark.parametrize("tied", [False, True])
def test_column_blocks_compute_the_same(tied: bool):
    model = tiny_target(3, tie_word_embeddings=tied, vocab_size=24)
    blocked = column_blocks(model, width=8)
    tokens = jnp.asarray([[1, 5, 23, 0, 7]], jnp.int32)
    positions = jnp.arange(5)[None, :]
    plain = model.logits(model(tokens, positions, causal_attention)[0])
    other = blocked.logits(blocked(tokens, positions, causal_attention)[0])
    assert blocked.layers[0].mlp.gate_up.kernel[...].ndim == 3
    np.testing.assert_allclose(np.asarray(plain), np.asarray(other), atol=2e-5)


def test_column_blocks_copy_and_leave_odd_widths():
    model = tiny_target(3)
    blocked = column_blocks(model, width=8)
    assert model.layers[0].attn.qkv.kernel[...].ndim == 2, "the original must stay as it was"
    assert isinstance(blocked.lm_head, Linear) and blocked.lm_head.kernel[...].shape == (32, 13)
