"""Quantised models on a Hopper GPU against XLA's products: with zero points, or without kernels for few rows.

`pytest --noconftest`, as conftest.py keeps JAX to the CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.drafters.rounding import round_drafter
from jaxspec.loading import laid_out
from jaxspec.models import few_rows, few_rows_fit
from jaxspec.models.base import Latent
from jaxspec.models.layers import Linear, causal_attention
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_target
from pallas_kernels.small_batch.packed import Packed

pytestmark = pytest.mark.skipif(few_rows.unsupported() is not None, reason=str(few_rows.unsupported()))

#: Widths that maps can be packed with.
SIZES: dict[str, Any] = dict(vocab_size=256, hidden_size=512, intermediate_size=768, num_heads=8, head_dim=64)
LATENT: dict[str, Any] = {"deepseek_v3": dict(head_dim=128, latent=Latent(64, 64, 64, 64, 256))}


def forward(module: Any, rows: int) -> np.ndarray:
    """Logits of a text."""
    graph, state = nnx.split(module)

    @jax.jit
    def run(state: Any) -> jax.Array:
        net, tokens = nnx.merge(graph, state), jnp.arange(rows)[None] * 7 % 256
        return net.logits(net(tokens, jnp.arange(rows)[None], causal_attention)[0])

    return np.asarray(run(state), np.float32)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("form", ["int8", "int4-g128"])
def test_maps_with_zero_points_are_multiplied_by_kernels(form: str, family: str):
    """By the kernels of few rows and, of more or where layers have none of those, of many; outputs always by either."""
    of = FAMILY_FIELDS[family] if family != "llama" else {}
    stored = round_drafter(tiny_target(0, dtype=jnp.bfloat16, **{**SIZES, **of}), form)
    for i, linear in enumerate(node for _, node in nnx.iter_graph(stored) if isinstance(node, Linear)):
        kernel, most = linear.kernel[...], 2 if form == "int4-g128" else 10
        zero = jax.random.randint(jax.random.key(i), kernel.scale.shape, -most, most + 1, jnp.int8)
        linear.kernel.set_value(dataclasses.replace(kernel, zero=zero))
    wanted = {rows: forward(stored, rows) for rows in (1, 5, 32, 130)}
    packed = laid_out(stored, 1, "xla")
    assert (packed.few_rows is None) == (family != "llama")
    maps = [node.kernel[...] for _, node in nnx.iter_graph(packed) if isinstance(node, Linear)]
    assert all(isinstance(kernel, Packed) and kernel.zeros for kernel in maps)
    for rows, want in wanted.items():
        got = forward(packed, rows)
        assert np.linalg.norm(got - want) <= 0.05 * np.linalg.norm(want), rows  # without the zeros 0.3 or more


@pytest.mark.parametrize("family", ["gemma3", "glm4", "gpt_oss", "deepseek_v3"])
def test_models_without_kernels_for_few_rows_multiply_by_packed_maps(family: str):
    whole = tiny_target(0, dtype=jnp.bfloat16, **{**SIZES, **FAMILY_FIELDS[family], **LATENT.get(family, {})})
    for form in ("int8", "int4-g128"):
        stored, packed = round_drafter(whole, form), laid_out(round_drafter(whole, form), 1, "xla")
        assert few_rows_fit.refusal(packed) is not None
        maps = [node.kernel[...] for _, node in nnx.iter_graph(packed) if isinstance(node, Linear)]
        assert sum(isinstance(kernel, Packed) for kernel in maps) >= 5
        for rows in (1, 5, 130):
            want, got = forward(stored, rows), forward(packed, rows)
            # Roundings of bfloat16, in another order; few experts change places by them.
            assert np.linalg.norm(got - want) <= 0.03 * np.linalg.norm(want), (form, rows)
