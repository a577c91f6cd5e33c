"""Layers of few rows: the kernels' order of operations against the layers' own, and which models are prepared."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec import fitting
from jaxspec.fitting import fitted, stored
from jaxspec.loading import laid_out
from jaxspec.models import few_rows, few_rows_fit
from jaxspec.models.base import Experts, ModelConfig, counting_experts, touched
from jaxspec.models.experts import mlp
from jaxspec.models.layers import Linear, Transformer, causal_attention, product
from jaxspec.models.layouts import mark, tensor_parallel
from jaxspec.models.quantised import Quantised
from jaxspec.models.sharded import BY_XLA, TENSOR_AXIS, parts_of
from jaxspec.runtime.sharding import parameter_shardings, tensor_mesh
from jaxspec.speculation.state import Geometry
from pallas_kernels import sizes
from pallas_kernels.small_batch import packed_launch, reference
from pallas_kernels.small_batch.packed import Packed

CONFIG = ModelConfig("llama", 64, 256, 384, 2, 2, 1, 128)
AUX = (0, 1, 2, 3)


def model(cfg: ModelConfig = CONFIG, dtype: Any = jnp.bfloat16) -> Transformer:
    return own(*drawn(cfg, dtype))


@functools.cache
def drawn(cfg: ModelConfig, dtype: Any) -> tuple[Any, Any]:
    return nnx.split(Transformer(cfg, dtype=dtype, rngs=nnx.Rngs(3)))


def own(graph: Any, state: Any) -> Transformer:
    """A model whose variables are its own: what is set in it, the next one of the same arrays does not have."""
    return nnx.merge(graph, jax.tree.map(lambda x: x, state))


def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> jax.Array:
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    return causal_attention(layer, q32, k32, v32).astype(q.dtype)


def tokens(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, shape, np.int32)


def forward(module: Transformer, tokens_BN: np.ndarray, hidden_BNE: np.ndarray | None = None) -> list[np.ndarray]:
    """The last hidden states and those of all layers, and the logits of other hidden states, if there are some.

    Args:
      hidden_BNE: as float32, rounded to bfloat16.
    """
    graph, state = nnx.split(module)
    positions = np.broadcast_to(np.arange(tokens_BN.shape[1], dtype=np.int32), tokens_BN.shape)

    def run(state: Any, tokens_BN: Any, positions: Any, hidden_BNE: Any) -> tuple[Any, Any]:
        merged = nnx.merge(graph, state)
        logits = None if hidden_BNE is None else merged.logits(hidden_BNE.astype(jnp.bfloat16))
        return merged(tokens_BN, positions, attend, AUX), logits

    return [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.jit(run)(state, tokens_BN, positions, hidden_BNE))]


QWEN = dict(qk_norm=True, attention_bias=True)


@pytest.mark.parametrize(
    "change",
    [{}, QWEN, QWEN | dict(num_heads=4, num_kv_heads=2, head_dim=64)],
    ids=["rotated-in-the-product", "normed-in-the-product", "normed-and-rotated-after"],
)
def test_few_rows_are_the_layers(change: dict[str, Any]):
    plain = model(dataclasses.replace(CONFIG, **change))
    for layer in plain.layers if change else ():
        attn: Any = layer.attn
        for i, norm in enumerate((attn.q_norm, attn.k_norm)):
            norm.weight.set_value(jax.random.uniform(jax.random.key(i), norm.weight.shape).astype(jnp.bfloat16))
        attn.qkv.bias.set_value(jnp.linspace(-1, 1, attn.qkv.bias.shape[0], dtype=jnp.bfloat16))
    prepared = few_rows.prepare(plain, "reference")
    assert prepared.few_rows == few_rows.FewRows("reference", 128) and plain.few_rows is None
    # Fewer than 8 rows, and numbers that are padded to eights and to more.
    for b, n in ((1, 1), (1, 5), (3, 4), (9, 5)) if not change else ((3, 4),):
        few = tokens(b * n, b, n)
        for got, want in zip(forward(prepared, few), forward(plain, few), strict=True):
            np.testing.assert_allclose(got, want, atol=2**-6 * np.abs(want).max())
    if change:
        return
    many = tokens(0, 1, few_rows_fit.MOST_ROWS + 1)
    for got, want in zip(forward(prepared, many), forward(plain, many), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("inner", [64, 96, 0], ids=["by-kernels", "experts-by-xla", "packed"])
def test_few_rows_of_experts_are_the_layers(inner: int, monkeypatch: pytest.MonkeyPatch):
    """Experts of a width that no kernel takes run as they always do, behind attention that does not.

    Packed ones are picked by a kernel; of 16 rows four are none.
    """
    cfg = dataclasses.replace(CONFIG, qk_norm=True, experts=Experts(64, 4, inner or 64, (1,)))
    plain = Transformer(cfg, dtype=jnp.bfloat16, rngs=nnx.Rngs(3), mlp=mlp)
    few = tokens(12, 3, 4)
    before: list[list[np.ndarray]] = []
    if not inner:
        mixture, rng = plain.layers[1].mlp, np.random.default_rng(0)
        for param in (mixture.gate_up, mixture.down):
            size = param[...].shape
            values = jnp.asarray(rng.integers(-127, 128, size, np.int8))
            scale = jnp.asarray(np.full((size[0], 1, size[2]), 0.02 / 70, np.float32))
            param.set_value(Quantised(values, scale))
        before = [pass_over(plain, few)]
        mixture.pack()
        monkeypatch.setattr(type(mixture), "__call__", None)
    prepared = few_rows.prepare(plain, "reference", output=True)
    assert prepared.few_rows is not None
    for got, want in zip(pass_over(prepared, few), *(before or [pass_over(plain, few)]), strict=True):
        np.testing.assert_allclose(got, want, atol=2**-6 * np.abs(want).max())


def pass_over(module: Transformer, tokens_BN: np.ndarray) -> list[np.ndarray]:
    """Hidden states, logits, and how many experts were read."""
    graph, state = nnx.split(module)
    positions = np.broadcast_to(np.arange(tokens_BN.shape[1], dtype=np.int32), tokens_BN.shape)

    def run(state: Any, tokens_BN: Any, positions: Any) -> list[Any]:
        merged = nnx.merge(graph, state)
        with counting_experts() as chosen:
            hidden, _ = merged(tokens_BN, positions, attend)
        return [hidden, merged.logits(hidden), touched(chosen)]

    return [np.asarray(x, np.float32) for x in jax.jit(run)(state, tokens_BN, positions)]


@pytest.mark.parametrize("c", [128, 64], ids=["rotated-in-the-product", "rotated-after"])
def test_few_rows_on_two_devices_are_those_of_one(c: int):
    plain = model(dataclasses.replace(CONFIG, num_heads=4, num_kv_heads=2, head_dim=c))
    split = few_rows.prepare(tensor_parallel(plain, 2), "reference")
    assert split.few_rows is not None
    few = tokens(1, 1, 3)
    want = forward(few_rows.prepare(plain, "reference"), few)
    with jax.set_mesh(tensor_mesh(2)):
        for got, one in zip(forward(split, few), want, strict=True):
            np.testing.assert_allclose(got, one, atol=2**-6 * np.abs(one).max())


FEW_BITS = pytest.mark.parametrize(
    ("kind", "each", "zeros"),
    [(jnp.int4, 128, False), (jnp.int8, None, False), (jnp.int4, 32, True), (jnp.int8, None, True)],
    ids=["int4-g128", "int8", "int4-g32-zeros", "int8-zeros"],
)


@pytest.mark.parametrize("invariant", [False, True])
def test_weights_of_few_bits_know_whether_rows_shall_have_the_same_bits(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
):
    """As engines with `batch_invariant` lay out their target, the output layer included."""
    monkeypatch.setattr(few_rows, "unsupported", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    asked = {"invariant": True} if invariant else {}
    target = quantised(dataclasses.replace(CONFIG, intermediate_size=512), jnp.int8, None)
    found = laid_out(target, 1, "nccl", **asked)
    kernels = [linear.kernel[...] for _, linear in few_rows_fit.maps(found)] + [found.lm_head.kernel[...]]
    assert len(kernels) == 4 * CONFIG.num_layers + 1
    assert all(isinstance(kernel, Packed) and kernel.invariant == invariant for kernel in kernels)


@FEW_BITS
def test_few_rows_of_quantised_weights_are_the_layers(kind: Any, each: int | None, zeros: bool):
    cfg = dataclasses.replace(CONFIG, intermediate_size=512, **(QWEN if each is None else {}))
    plain = quantised(cfg, kind, each, zeros)
    prepared = few_rows.prepare(quantised(cfg, kind, each, zeros), "reference")
    assert few_rows_fit.refusal(plain) is None
    assert isinstance(plain.layers[0].mlp.down.kernel[...], Quantised)
    down = prepared.layers[0].mlp.down.kernel[...]
    assert isinstance(down, Packed) and down.zeros == zeros
    assert isinstance(prepared.lm_head.kernel[...], Packed) and few_rows_fit.output_refusal(plain) is None
    for n in (5, few_rows_fit.FEW_ROWS + 1):
        assert_alike(prepared, plain, n)


def assert_alike(prepared: Transformer, plain: Transformer, n: int) -> None:
    """Hidden states of so many rows, and logits of other hidden states."""
    few = tokens(n, 1, n)
    hidden = np.random.default_rng(n).normal(size=(1, n, plain.config.hidden_size)).astype(np.float32)
    (*states, logits), (*others, others_logits) = (forward(x, few, hidden) for x in (prepared, plain))
    for got, want in zip(states, others, strict=True):
        np.testing.assert_allclose(got, want, atol=2**-6 * np.abs(want).max())
    np.testing.assert_allclose(logits, others_logits, atol=1e-4)


def test_an_output_layer_of_few_bits_has_its_own_most_rows():
    """Behind layers in bfloat16, which run by kernels up to 128 rows: beyond 32 it is multiplied as others are."""
    plain = model()
    assert plain.lm_head is not None
    values = np.random.default_rng(1).integers(-8, 8, (CONFIG.hidden_size, CONFIG.vocab_size), np.int8)
    scale = jnp.asarray(np.full((1, CONFIG.vocab_size), 0.01, np.float32))
    plain.lm_head.kernel = nnx.Param(Quantised(jnp.asarray(values), scale))
    prepared = few_rows.prepare(plain, "reference")
    assert prepared.few_rows.most == few_rows_fit.MOST_ROWS and isinstance(prepared.lm_head.kernel[...], Packed)
    hidden = jax.random.normal(jax.random.key(2), (1, 40, CONFIG.hidden_size)).astype(jnp.bfloat16)
    assert prepared.few_rows.logits(prepared, hidden) is None
    assert prepared.few_rows.logits(prepared, hidden[:, :32]) is not None
    np.testing.assert_allclose(prepared.logits(hidden), plain.logits(hidden), atol=1e-4)


@pytest.mark.parametrize(("width", "served"), [(256, True), (8192, True), (320, False), (16384, False)])
def test_the_last_norm_has_one_order_of_sums_where_no_kernel_makes_it(
    width: int, served: bool, monkeypatch: pytest.MonkeyPatch
):
    """XLA's own would depend on how many rows there are."""
    asked: list[int] = []

    def norms(parts: Any, _: float) -> jax.Array:
        asked.append(parts[0].rows.shape[1])
        return parts[0].rows

    monkeypatch.setattr(few_rows.gpu_norms, "norms", norms)
    stream = reference.begin(jnp.ones((2, width), jnp.bfloat16), jnp.ones((width,), jnp.bfloat16))
    made = jax.make_jaxpr(lambda stream: few_rows._Ways(True, 1, BY_XLA).normed(stream, stream.h_ME[0], 1e-5))(stream)
    assert asked == [width] * served and "reduce_sum" not in str(made)


def test_rows_that_no_copy_of_squares_serves_are_left_to_xla():
    wide = Linear(64 * 257, 128, dtype=jnp.dtype(jnp.bfloat16), rngs=None)
    assert few_rows_fit.unserved(wide, 1, "heads") == "rows have 16448 features, more than 16384"
    assert few_rows_fit.unserved(wide, 1, "add") is None


def test_weights_without_room_have_none_once_they_are_packed():
    """As a drafter's are that is bound again, having been packed for the kernel for many rows."""
    linear = Linear(8192, 512, dtype=jnp.dtype(jnp.bfloat16), rngs=None)
    few = Quantised(jnp.zeros((8192, 512), jnp.int4), jnp.ones((256, 512)))
    for kernel in (few, few_rows._packed(few)):
        linear.kernel.set_value(kernel)
        said = "256 groups of scales leave no room for 32 rows of 8192 features"
        assert few_rows_fit.unserved(linear, 1, "heads", normed=True) == said
        assert few_rows_fit.unserved(linear, 1, "heads") is None and few_rows_fit.unserved(linear, 1) is None


def in_order(module: Transformer) -> Transformer:
    """A quantised model with the inputs of each map in another order."""
    maps = [linear for _, linear in few_rows_fit.maps(module)]
    assert module.lm_head is not None
    for i, linear in enumerate([*maps, module.lm_head]):
        few: Any = linear.kernel[...]
        order = jnp.asarray(np.random.default_rng(i).permutation(few.shape[0]).astype(np.int32))
        linear.kernel.set_value(dataclasses.replace(few, order=order))
    return module


@pytest.mark.parametrize("zeros", [False, True])
def test_few_rows_of_weights_in_activation_order_are_the_layers(zeros: bool):
    cfg = dataclasses.replace(CONFIG, hidden_size=512, intermediate_size=512)
    plain, other = (in_order(quantised(cfg, jnp.int4, 128, zeros)) for _ in range(2))
    prepared = few_rows.prepare(other, "reference")
    assert few_rows_fit.refusal(plain) is None and few_rows_fit.output_refusal(plain) is None
    maps = [linear.kernel[...] for linear in (*(one for _, one in few_rows_fit.maps(prepared)), prepared.lm_head)]
    assert all(isinstance(kernel, Packed) for kernel in maps)
    # Gate and up give what down reads in its order.
    assert [kernel.order is None for kernel in maps] == [False, False, False, True] * cfg.num_layers + [False]
    for n in (1, 5, few_rows_fit.FEW_ROWS + 1):
        assert_alike(prepared, plain, n)


def test_devices_that_share_inputs_in_another_order_leave_them_to_xla():
    """Those that they split by outputs are packed, each with the whole order."""
    cfg = dataclasses.replace(CONFIG, hidden_size=512, intermediate_size=512, num_heads=4, num_kv_heads=2)
    shared = tensor_parallel(in_order(quantised(cfg, jnp.int4, 128)), 2)
    assert "2 devices share inputs that its quantised weights have in another order" in (
        few_rows_fit.refusal(shared) or ""
    )
    packed = few_rows.pack_maps(shared, 2)
    kinds = [type(linear.kernel[...]) for _, linear in few_rows_fit.maps(packed)]
    assert kinds == [Packed, Quantised, Packed, Quantised] * cfg.num_layers
    mesh = tensor_mesh(2)
    plain = in_order(quantised(cfg, jnp.int4, 128))
    nnx.update(packed, jax.tree.map(jax.device_put, nnx.state(packed), parameter_shardings(mesh, nnx.state(packed))))
    few = tokens(1, 1, 5)
    want = forward(plain, few)
    with jax.set_mesh(mesh):
        for got, one in zip(forward(packed, few), want, strict=True):
            np.testing.assert_allclose(got, one, atol=2**-6 * np.abs(one).max())


@pytest.mark.parametrize("form", ["dense", "dense-int8", "mixture"])
def test_pools_leave_room_on_each_device(form: str, monkeypatch: pytest.MonkeyPatch):
    """What a device has once weights are laid out is what was counted before."""
    cfg = dataclasses.replace(CONFIG, hidden_size=512, intermediate_size=512, num_heads=4, num_kv_heads=2)
    if form == "mixture":
        cfg = dataclasses.replace(cfg, experts=Experts(8, 2, 64, (0, 1)))
    few_bits = form == "dense-int8"
    plain = (
        quantised(cfg, jnp.int8, None) if few_bits else Transformer(cfg, dtype=jnp.bfloat16, rngs=nnx.Rngs(3), mlp=mlp)
    )
    for layer in plain.layers if few_bits else ():  # with scales of 16 bits, as checkpoints have them
        for linear in (layer.attn.qkv, layer.attn.out, layer.mlp.gate_up, layer.mlp.down):
            few = linear.kernel[...]
            linear.kernel.set_value(dataclasses.replace(few, scale=few.scale.astype(jnp.bfloat16)))
    monkeypatch.setattr(few_rows, "unsupported", lambda: None)
    monkeypatch.setattr("jaxspec.models.packing.gpu.supported", lambda: None)
    mesh = tensor_mesh(2)
    added = fitting._added_bytes(plain, 2)
    held = []
    for module in (tensor_parallel(plain, 2), few_rows.prepare(tensor_parallel(plain, 2), "reference")):
        state = nnx.state(module)
        places = jax.tree.leaves(parameter_shardings(mesh, state))
        held.append(
            sum(
                math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
                for x, s in zip(jax.tree.leaves(state), places, strict=True)
            )
        )
    assert held[1] - held[0] == added and (added > 0) == few_bits
    assert fitted(Geometry(1, 4, 8, 4, 2), None, plain, None, (), 2).num_pages == 4


def test_groups_that_devices_do_not_divide_stay_with_xla():
    cfg = dataclasses.replace(CONFIG, intermediate_size=1536, hidden_size=512, num_heads=4, num_kv_heads=2)
    plain = quantised(cfg, jnp.int8, None)
    for layer in plain.layers:
        few = layer.mlp.down.kernel[...]
        scale = jnp.asarray(np.broadcast_to(few.scale, (3, few.scale.shape[1])))
        layer.mlp.down.kernel.set_value(dataclasses.replace(few, scale=scale))
    assert "its 3 groups of scales do not divide among 2 devices" in (
        few_rows_fit.refusal(tensor_parallel(plain, 2)) or ""
    )


def test_devices_share_experts_behind_attention_by_the_kernels():
    """Attention's rows are the kernels' own; a mixture that is split runs as without them."""
    cfg = dataclasses.replace(CONFIG, num_heads=4, num_kv_heads=2, experts=Experts(8, 2, 64, (0, 1)))
    plain = Transformer(cfg, dtype=jnp.bfloat16, rngs=nnx.Rngs(3), mlp=mlp)
    split = few_rows.prepare(tensor_parallel(plain, 2), "reference")
    assert split.few_rows is not None and split.layers[0].mlp.shards == 2
    few = tokens(1, 1, 3)
    want = forward(plain, few)
    with jax.set_mesh(tensor_mesh(2)):
        for got, one in zip(forward(split, few), want, strict=True):
            np.testing.assert_allclose(got, one, atol=2**-5 * np.abs(one).max())


def test_columns_that_two_devices_share_are_not_cut_out(monkeypatch: pytest.MonkeyPatch):
    """XLA would gather what a share of the columns is cut out of; each device expands its own, whole."""
    monkeypatch.setattr(sizes, "EXPANDED", 1 << 16)
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.integers(-8, 8, (256, 512), np.int8)).astype(jnp.int4)
    kernel = Quantised(values, jnp.asarray(rng.uniform(0.5, 1, (2, 512)).astype(np.float32)))
    x, mesh = jnp.asarray(rng.normal(size=(200, 256)).astype(np.float32)), tensor_mesh(2)
    placed = jax.device_put(kernel, jax.tree.map(lambda spec: NamedSharding(mesh, spec), parts_of(1, kernel, 2)))
    for weight, loops in ((kernel, True), (placed, False)):
        with jax.set_mesh(mesh) if weight is placed else contextlib.nullcontext():
            run = jax.jit(lambda x, weight: product(x, weight))
            traced, got = run.trace(x, weight), np.asarray(run(x, weight))
        assert (
            "all-gather" not in str(traced.lower().compile().as_text()) and ("length=8" in str(traced.jaxpr)) == loops
        )
        want = np.asarray(x) @ np.asarray(kernel.dequantised())
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@FEW_BITS
def test_quantised_weights_that_two_devices_share_are_packed(kind: Any, each: int | None, zeros: bool):
    """Few rows and many; the parts lie where their devices read them, and a budget counts what they add."""
    cfg = dataclasses.replace(CONFIG, hidden_size=512, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=128)
    cfg = dataclasses.replace(cfg, **(QWEN if each is None else {}))
    mesh = tensor_mesh(2)
    shared = tensor_parallel(quantised(cfg, kind, each, zeros), 2)
    split = few_rows.prepare(shared, "reference")
    placed = parameter_shardings(mesh, nnx.state(split))
    nnx.update(split, jax.tree.map(jax.device_put, nnx.state(split), placed))
    down, qkv = split.layers[0].mlp.down.kernel[...], split.layers[0].attn.qkv.kernel[...]
    assert isinstance(down, Packed) and isinstance(qkv, Packed)
    places = [NamedSharding(mesh, spec) for spec in (PartitionSpec(None, TENSOR_AXIS), PartitionSpec(TENSOR_AXIS))]
    assert [down.values.sharding, qkv.values.sharding] == places
    alone = few_rows.prepare(quantised(cfg, kind, each, zeros), "reference")
    for n in (1, 3, few_rows_fit.FEW_ROWS + 8):
        few = tokens(1, 1, n)
        want = forward(alone, few)
        with jax.set_mesh(mesh):
            for got, one in zip(forward(split, few), want, strict=True):
                np.testing.assert_allclose(got, one, atol=2**-6 * np.abs(one).max())


def test_quantised_output_layers_among_devices(monkeypatch: pytest.MonkeyPatch):
    """Each device computes all of one that is whole, as XLA cannot split a kernel; one that is split stays XLA's.

    The model's own stays as it was stored, for draft heads, and pools leave room for both.
    """
    cfg = dataclasses.replace(CONFIG, intermediate_size=512)
    plain = quantised(cfg, jnp.int8, None)
    for _, linear in few_rows_fit.maps(plain):  # checkpoints have scales of 16 bits
        few: Any = linear.kernel[...]
        linear.kernel.set_value(dataclasses.replace(few, scale=few.scale.astype(jnp.bfloat16)))
    before, added, pages = stored(nnx.state(plain)), [], []
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1 << 24})
    with monkeypatch.context() as patched:
        patched.setattr("jaxspec.fitting.jax.local_devices", lambda: [device])
        for why in ("no GPU", None):
            patched.setattr(few_rows, "unsupported", lambda why=why: why)
            added.append(few_rows.added_bytes(plain))
            pages.append(fitted(Geometry(1, 1 << 40, 8, 4, 2), 1.0, plain, None, (), 1).num_pages)
    page = cfg.num_layers * cfg.num_kv_heads * 8 * 2 * cfg.head_dim * 2
    assert added[0] == 0 and abs(pages[0] - pages[1] - added[1] / page) <= 1
    prepared, hidden = few_rows.prepare(plain, "reference"), jnp.ones((1, 3, cfg.hidden_size), jnp.bfloat16)
    both = {id(x): x for x in jax.tree.leaves((nnx.state(plain), nnx.state(prepared)))}
    assert stored(list(both.values())) - before == added[1] > 0
    assert plain.lm_head is not None and isinstance(prepared.lm_head.kernel[...], Packed)
    with jax.set_mesh(tensor_mesh(2)):
        assert "shard_map" in str(jax.make_jaxpr(prepared.logits)(hidden))
        got = jax.jit(prepared.logits)(hidden)
    np.testing.assert_array_equal(got, jax.jit(prepared.logits)(hidden))
    assert isinstance(plain.lm_head.kernel[...], Quantised)
    mark(plain.lm_head.kernel, 1, BY_XLA)
    assert isinstance(few_rows.prepare(plain, "reference").lm_head.kernel[...], Quantised)
    assert "output layer is not whole" in (few_rows_fit.output_refusal(plain) or "")


def quantised(cfg: ModelConfig, kind: Any, each: int | None, zeros: bool = False) -> Transformer:
    """The same model with the weights of its layers and of its output layer rounded, or with zero points.

    Args:
      each: inputs that have a scale of their own, if not all the same.
    """
    return own(*drawn_quantised(cfg, kind, each, zeros))


@functools.cache
def drawn_quantised(cfg: ModelConfig, kind: Any, each: int | None, zeros: bool) -> tuple[Any, Any]:
    module = model(cfg)
    layers = [(x.attn.qkv, x.attn.out, x.mlp.gate_up, x.mlp.down) for x in module.layers]
    assert module.lm_head is not None
    for linear in [*(linear for layer in layers for linear in layer), module.lm_head]:
        few = Quantised(*rounded(linear.kernel[...], kind, each))
        if zeros:
            zero = np.random.default_rng(few.shape[1]).integers(-3, 4, few.scale.shape, np.int8)
            few = dataclasses.replace(few, zero=jnp.asarray(zero), scale=few.scale.astype(jnp.bfloat16))
        linear.kernel.set_value(few)
    return nnx.split(module)


@functools.partial(jax.jit, static_argnums=(1, 2))
def rounded(kernel: jax.Array, kind: Any, each: int | None) -> tuple[jax.Array, jax.Array]:
    """Values and scales, one for each column or so many rows of one."""
    w = kernel.astype(jnp.float32)
    rows = w.reshape(w.shape[0] // (each or w.shape[0]), -1, w.shape[1])
    scale = jnp.abs(rows).max(axis=1) / jnp.iinfo(kind).max
    return jnp.round(rows / scale[:, None]).astype(kind).reshape(w.shape), scale


def test_quantised_weights_that_no_kernel_reads(monkeypatch: pytest.MonkeyPatch):
    for change, said in (
        ({"zero": jnp.ones((1, 512), jnp.int16)}, "zero points must be int8, got int16"),
        ({"int8_activations": True}, "activations"),
    ):  # fmt: skip
        other = quantised(dataclasses.replace(CONFIG, intermediate_size=512), jnp.int8, None)
        down = other.layers[1].attn.out.kernel
        down.set_value(dataclasses.replace(down[...], **change))
        assert said in (few_rows_fit.refusal(other) or "") and few_rows.prepare(other) is other
    wide, small = (
        dataclasses.replace(CONFIG, intermediate_size=512),
        functools.partial(quantised, kind=jnp.int4, each=32),
    )
    assert few_rows_fit.refusal(small(wide)) is None
    with monkeypatch.context() as patch:
        asked: list[Any] = []
        patch.setattr(packed_launch, "room_refusal", lambda *args, normed: asked.append((*args, normed)))
        assert few_rows_fit.refusal(small(dataclasses.replace(wide, qk_norm=True))) is None
        assert asked[:4] == [
            ("heads", "int4", (256, 512), 8, True), ("add", "int4", (256, 256), 8, False),
            ("swiglu", "int4", (256, 1024), 8, False), ("add", "int4", (512, 256), 16, False),
        ]  # fmt: skip
        few_rows_fit.refusal(quantised(wide, jnp.int8, None, zeros=True))
        assert asked[8][:4] == ("heads", "int8_zeros", (256, 512), 2)  # scales beside zeros are repeated
        patch.setattr(packed_launch, "room_refusal", lambda kind, *_, **__: "no room" if kind == "add" else None)
        assert few_rows_fit.refusal(small(wide)) == "no room"
    assert "multiples of 256 and 64, got (384, 256)" in (few_rows_fit.refusal(quantised(CONFIG, jnp.int4, 128)) or "")


@pytest.mark.parametrize(
    ("change", "dtype", "said"),
    [
        ({"qk_norm": True, "qk_norm_wide": True}, jnp.bfloat16, "qk_norm_wide=True"),
        ({"attention_bias": True, "norm_gain": "one_plus"}, jnp.bfloat16, "norm_gain=one_plus"),
        ({"intermediate_size": 400}, jnp.bfloat16, "multiples"),
        ({}, jnp.float32, "float32"),
    ],
)
def test_models_that_are_not_served_stay_as_they_are(change: dict[str, Any], dtype: Any, said: str):
    other = model(dataclasses.replace(CONFIG, **change), dtype)
    assert said in (few_rows_fit.refusal(other) or "") and few_rows.prepare(other) is other


def test_a_device_without_the_kernels_says_why():
    assert "0.11" in (why := few_rows.unsupported() or "") or "GPU" in why
