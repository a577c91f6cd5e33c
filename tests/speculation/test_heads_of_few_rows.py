"""Draft heads whose layers run by the kernels for few rows: their order of operations in plain XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.drafters.rounding import round_drafter
from jaxspec.models import few_rows, few_rows_fit
from jaxspec.models.base import Answering, Experts, Latent, ModelConfig
from jaxspec.models.layers import Linear, Shared, causal_attention
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from pallas_kernels.small_batch.packed import Packed

LAYER = ModelConfig("llama", 256, 256, 512, 1, 2, 1, 128)
EAGLE3 = Eagle3Config(256, 256, 512, 2, 1, 128, 256, 192, (0, 1, 2))


def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> jax.Array:
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    return causal_attention(layer, q32, k32, v32).astype(q.dtype)


def eagle3(**change: Any) -> Eagle3Head:
    head = Eagle3Head(dataclasses.replace(EAGLE3, **change), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for i, norm in enumerate((head.input_norm, head.hidden_norm, head.mlp_norm, head.norm)):
        norm.weight.set_value(jax.random.uniform(jax.random.key(i), norm.weight.shape, jnp.bfloat16, 0.5, 1.5))
    return head


def tables(dtype: Any = jnp.bfloat16) -> tuple[nnx.Variable, Linear]:
    table = jax.random.normal(jax.random.key(1), (256, 256)).astype(dtype)
    return Shared(table), Linear(256, 256, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(2))


def eagle1(count: int, *, norm: bool = False) -> Eagle1Head:
    layers = dataclasses.replace(LAYER, num_layers=count)
    return Eagle1Head(Eagle1Config(layers, 2, first_norm=norm), *tables(), dtype=jnp.bfloat16, rngs=nnx.Rngs(3))


def mtp(**change: Any) -> MtpHead:
    return MtpHead(MtpConfig(dataclasses.replace(LAYER, **change), 2), *tables(), dtype=jnp.bfloat16, rngs=nnx.Rngs(3))


def latent_mixture() -> MtpHead:
    """In float32, which a CPU multiplies in groups."""
    own = dict(latent=Latent(64, 32, 48, 48, query_rank=64), num_kv_heads=1, head_dim=96, rope_interleaved=True)
    layer = dataclasses.replace(LAYER, experts=Experts(8, 2, 64, (0,)), **own)
    return MtpHead(MtpConfig(layer, 2), *tables(jnp.float32), dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(3))


def passed(head: Any, b: int, n: int) -> list[np.ndarray]:
    """Hidden states, logits, and hidden states of a step on top of them."""
    graph, state = nnx.split(head)
    tokens = jax.random.randint(jax.random.key(b * n), (b, n), 0, 256)
    feature = jax.random.normal(jax.random.key(4), (b, n, 256)).astype(jnp.bfloat16)
    positions = jnp.broadcast_to(jnp.arange(n) + 3, (b, n))

    @jax.jit
    def run(state: Any) -> list[jax.Array]:
        own = nnx.merge(graph, state)
        hidden = own(tokens, feature, positions, attend)
        return [hidden, own.logits(hidden), own(tokens, hidden, positions + 1, attend)]

    return [np.asarray(x, np.float32) for x in run(state)]


HEADS = [
    pytest.param(eagle3, id="eagle3"),
    pytest.param(functools.partial(eagle3, num_layers=2, norm_output=True, qk_norm=True), id="eagle3.1-qk-norm"),
    pytest.param(functools.partial(eagle3, norm_before_residual=True, head_dim=64), id="eagle3-rotated-after"),
    pytest.param(functools.partial(eagle1, 2), id="eagle1"),
    pytest.param(functools.partial(eagle1, 1, norm=True), id="eagle1-normed"),
    pytest.param(mtp, id="mtp"),
]


@pytest.mark.parametrize("build", HEADS)
def test_few_rows_are_the_heads(build: Callable[[], Any]):
    plain = build()
    prepared = few_rows.prepare(plain, "reference")
    assert prepared.few_rows == few_rows.FewRows("reference", 128) and plain.few_rows is None
    for b, n in ((1, 1), (3, 4)):
        for got, want in zip(passed(prepared, b, n), passed(plain, b, n), strict=True):
            np.testing.assert_allclose(got, want, atol=2**-6 * np.abs(want).max())
            assert not np.array_equal(got, want), "divided before the product, as without the kernels"
    for got, want in zip(passed(prepared, 1, 129), passed(plain, 1, 129), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("few", [False, True], ids=["layers", "few_rows"])
@pytest.mark.parametrize("build", [*HEADS, pytest.param(latent_mixture, id="mtp-latent-mixture")])
def test_rows_that_attention_does_not_answer_have_entries_alone(build: Callable[[], Any], few: bool):
    """Entries of all, and hidden states of those that it answers; none costs no product behind the heads."""
    head = few_rows.prepare(build(), "reference") if few else build()
    graph, state = nnx.split(head)
    b, n, last = 2, 5, head.config.num_layers - 1
    tokens = jnp.arange(b * n).reshape(b, n) * 7
    feature = jax.random.normal(jax.random.key(4), (b, n, 256)).astype(head.embedding[...].dtype)

    def run(state: Any, asked: int) -> tuple[jax.Array, dict[int, Any]]:
        entries: dict[int, Any] = {}

        def some(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, options: Any) -> jax.Array:
            entries[layer] = k, v
            mixed = (q * jnp.cumsum(k.mean(axis=(1, 2)), axis=1)[:, None, None])[..., : v.shape[-1]]
            return mixed[:, n - asked :] if layer == last else mixed

        positions = jnp.broadcast_to(jnp.arange(n) + 3, (b, n))
        some_queries = Answering(some, last, lambda x: x[:, n - asked :])
        return nnx.merge(graph, state)(tokens, feature, positions, some_queries), entries

    products = lambda asked: str(jax.make_jaxpr(lambda state: run(state, asked)[0])(state)).count("dot_general")
    made = {asked: jax.jit(run, static_argnums=1)(state, asked) for asked in (n, 1, 0)}
    (want, entries), (found, same), (none, also) = made[n], made[1], made[0]
    assert found.shape == (b, 1, 256) and none.shape == (b, 0, 256) and products(0) < products(n) == products(1)
    for one in (same, also):
        jax.tree.map(np.testing.assert_array_equal, one, entries)
    want, found = np.asarray(want[:, -1:], np.float32), np.asarray(found, np.float32)
    np.testing.assert_allclose(found, want, atol=2**-6 * np.abs(want).max())


def test_few_rows_of_heads_in_few_bits_are_the_heads():
    """What is no layer's is packed as well, for the kernel for many rows; a row more than 32 has that for all."""
    few = round_drafter(eagle3(), "int8")
    want = [passed(few, *shape) for shape in ((1, 1), (2, 4), (1, 33))]
    prepared = few_rows.prepare(few, "reference")
    assert prepared.few_rows == few_rows.FewRows("reference", 32) and few_rows.added_bytes(prepared) == 0
    maps = [node.kernel[...] for _, node in nnx.iter_graph(prepared) if isinstance(node, Linear)]
    assert len(maps) == 6 and all(isinstance(kernel, Packed) for kernel in maps)
    for shape, wanted in zip(((1, 1), (2, 4), (1, 33)), want, strict=True):
        for got, one in zip(passed(prepared, *shape), wanted, strict=True):
            np.testing.assert_allclose(got, one, atol=2**-6 * np.abs(one).max())


@pytest.mark.parametrize(
    ("build", "devices", "said"),
    [
        (functools.partial(eagle3, attention_bias=True), 1, "its layers have output_bias=True"),
        (functools.partial(mtp, experts=Experts(8, 2, 64, (0,))), 1, "its layers have a MixtureOfExperts"),
        (eagle3, 2, "it is a draft head, for 2 devices"),
        (mtp, 1, None),
        # Its output layer is not packed, and stays with XLA.
        (lambda: round_drafter(eagle3(draft_vocab_size=100), "int8"), 1, None),
    ],
)
def test_which_heads_are_served(build: Callable[[], Any], devices: int, said: str | None):
    why = few_rows_fit.refusal(build(), devices)
    assert why == said
