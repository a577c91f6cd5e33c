"""Rounds whose bits do not depend on what is computed beside a token: what they ask of attention, what is refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspec import EngineConfig, cache, defaults
from jaxspec.assemble import check_batch_invariant
from jaxspec.defaults import geometry, in_background, mixed, prompts_of, scheduling, without_end
from jaxspec.models import few_rows
from jaxspec.models.base import Experts, ModelConfig
from jaxspec.models.experts import mlp
from jaxspec.models.layers import Transformer
from jaxspec.models.quantised import Quantised
from jaxspec.models.tiny import tiny_target
from jaxspec.scheduling.shapes import shapes_for
from jaxspec.speculation.drafters.suffix import prompt_lookup
from jaxspec.speculation.layouts import Batch, Budget, plain_calibration
from jaxspec.speculation.packed import packed_fn
from jaxspec.speculation.round import RoundSpec, round_fn
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import PLAIN, Tier

GEO = Geometry(slots=2, num_pages=16, page_size=8, pages_per_seq=8, max_depth=3, batch_invariant=True)
CONFIG = ModelConfig("llama", 64, 128, 128, 1, 2, 1, 64)
ENGINE = EngineConfig(max_batch_size=8, batch_invariant=True)


def test_rounds_tell_attention_of_chains_and_name_its_implementation(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str | None, bool]] = []
    attend = cache.tree_attention

    def spy(*args: Any, implementation: str | None = None, **options: Any) -> jax.Array:
        asked.append((implementation, args[6] is None))
        return attend(*args, **options)

    monkeypatch.setattr(cache, "tree_attention", spy)
    target = tiny_target(0, num_layers=1)
    graph, params = nnx.split(target)
    drafter = prompt_lookup(target.config.vocab_size)
    rounds = {
        "plain": lambda spec, *args: round_fn(spec, PLAIN, False)(*args),
        "chain": lambda spec, *args: round_fn(spec, Tier(3), False)(*args),
        "packed": lambda spec, *args: packed_fn(spec, Tier(3), False, 5)(*args, plain_calibration(3), Budget.even(2)),
    }
    for invariant, kinds in ((True, ("plain", "chain", "packed")), (False, ("chain",))):
        geo = dataclasses.replace(GEO, batch_invariant=invariant)
        spec = RoundSpec(graph, target.config, geo, drafter, rejection=False)
        state = jax.eval_shape(
            lambda geo=geo: DecodeState.empty(target.config, geo, jnp.dtype(jnp.float32), drafter.init_state(geo))
        )
        for kind in kinds:
            jax.eval_shape(functools.partial(rounds[kind], spec), params, (), state, Batch.of(geo, 2).array)
        assert asked == [("batch_invariant" if invariant else None, True)] * len(kinds)
        asked.clear()


@functools.cache
def made(config: ModelConfig) -> Transformer:
    return Transformer(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), mlp=mlp)


@pytest.mark.parametrize(
    ("config", "model", "tier", "said"),
    [
        ({}, {}, Tier(3), None),
        ({}, {}, Tier(3, 2, 8), "for chains, .*, got tier tree-3x2/8"),
        ({}, {}, Tier(4), "at most 32 tokens with this model, got 40: max_batch_size=8 and tier chain-4"),
        ({"max_batch_size": 32}, {"head_dim": 128}, Tier(3), None),
        ({"max_batch_size": 32}, {"head_dim": 128}, Tier(4), "at most 128 tokens with this model, got 160: max_batch"),
        ({"max_batch_size": 32}, {"head_dim": 128, "experts": Experts(64, 2, 64, (0,))}, Tier(3), "at most 32 tokens"),
        ({"tensor_parallel": 2}, {}, PLAIN, "for one device, got tensor_parallel=2"),
        ({"mixed_chunk": 64}, {}, PLAIN, "no prompts in rounds, got mixed_chunk=64"),
        ({"kernels": "reference"}, {}, PLAIN, "of its own for attention on GPUs, got kernels='reference'"),
        ({}, {"vocab_size": 70}, PLAIN, "output layer is not whole"),
        ({}, {"hidden_act": "gelu_tanh"}, PLAIN, "hidden_act=gelu_tanh"),
        ({}, {"sliding_window": 64, "sliding_layers": (0,)}, PLAIN, "windows and soft caps, got sliding_window=64"),
        ({}, {"attention_soft_cap": 50.0}, PLAIN, "got attention_soft_cap=50.0"),
        ({}, {"experts": Experts(64, 2, 64, (0,))}, PLAIN, None),
        ({}, {"experts": Experts(64, 2, 64, (0,), shared_inner=64)}, PLAIN, "a shared expert or other gates"),
        ({}, {"experts": Experts(64, 2, 64, (0,), scores="sigmoid")}, PLAIN, "chosen by sigmoids or in groups"),
    ],
)
def test_what_would_not_hold_is_refused(
    config: dict[str, Any], model: dict[str, Any], tier: Tier, said: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(few_rows, "unsupported", lambda: None)
    target = made(dataclasses.replace(CONFIG, **model))
    check = lambda: check_batch_invariant(dataclasses.replace(ENGINE, **config), target, [PLAIN, tier])
    if said is None:
        return check()
    with pytest.raises(ValueError, match=said):
        check()


def test_rounds_take_no_prompts_along(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(defaults, "prompts", lambda: defaults._ACCELERATOR)  # a CPU's take none in any case
    for invariant in (False, True):
        config = EngineConfig(max_batch_size=8, batch_invariant=invariant)
        geo = geometry(config, 256, 3)
        assert geo.batch_invariant == invariant and bool(mixed(config, geo)) != invariant


def test_prompts_are_cut_alike_whatever_else_is_computed():
    """Several together, shorter ones while others decode, and another's pages leave other bits."""
    for invariant in (False, True):
        config = EngineConfig(max_batch_size=8, prefill_chunk=64, batch_invariant=invariant)
        geo, usual = geometry(config, 256, 3), prompts_of(config)
        shapes = shapes_for(geo, usual.alone, usual.several)
        assert {shape.rows == 1 for shape in shapes} == ({True} if invariant else {True, False})
        rules = scheduling(config, geo, shapes, 0, 16.0, None)
        assert bool(rules.shorter_chunks) != invariant and rules.enable_prefix_caching != invariant
        assert in_background(config) != invariant, "what is ready would decide"


def test_a_gpus_prompts_go_in_longer_chunks_while_nobody_decodes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(defaults, "prompts", lambda: defaults._GPU)

    def rules(**given: Any) -> tuple[int, int, int, int, int, tuple[int, ...]]:
        config = EngineConfig(max_batch_size=8, **given)
        geo, usual = geometry(config, 4096, 3), prompts_of(config)
        made = scheduling(config, geo, shapes_for(geo, usual.alone, usual.several), 0, None, None)
        beside = made.chunk_at(0, True), made.batched(True)
        return geo.prefill_chunk, geo.max_num_batched_tokens, made.batched(False), *beside, without_end(config, geo)

    assert rules(max_seq_len=4096) == (2048, 2048, 2048, 1024, 1024, (1024, 2048))
    assert rules(max_seq_len=1500) == (1500, 2048, 2048, 1024, 1024, (1024, 1500))
    assert rules(max_seq_len=600) == (600, 2048, 2048, 600, 1024, (600,))
    assert rules(max_seq_len=4096, prefill_chunk=512) == (512, 512, 512, 512, 512, (512,))
    assert rules(max_seq_len=4096, max_num_batched_tokens=4096) == (2048, 4096, 4096, 1024, 4096, (1024, 2048))
    assert rules(max_seq_len=4096, batch_invariant=True) == (1024, 1024, 1024, 1024, 1024, (1024,))
    assert rules(max_seq_len=4096, batch_invariant=True, prefill_chunk=2048) == (*(2048,) * 5, (2048,))


@pytest.mark.parametrize("said", [None, "zero points must be int8, got int16", "normed in their product"])
def test_weights_of_few_bits_are_served_where_the_kernels_read_them(said: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(few_rows, "unsupported", lambda: None)
    normed = said == "normed in their product"
    cfg = dataclasses.replace(CONFIG, hidden_size=256, qk_norm=normed)
    if said is None:  # heads of 128 are normed in their product
        cfg = dataclasses.replace(cfg, head_dim=128, qk_norm=True)
    target = Transformer(cfg, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer = target.layers[-1]
    kernel = layer.attn.qkv.kernel if normed else layer.mlp.gate_up.kernel
    scale = jnp.ones((1, kernel.shape[1]), jnp.float32)
    zero = None if normed else jnp.zeros_like(scale, jnp.int8 if said is None else jnp.int16)
    kernel.set_value(Quantised(jnp.ones(kernel.shape, jnp.int8), scale, zero))
    check = lambda: check_batch_invariant(ENGINE, target, [PLAIN])
    if said is None:
        return check()
    with pytest.raises(ValueError, match=said):
        check()


@pytest.mark.parametrize(
    "said", [None, "stay as they are stored, since .*order of inputs", "has 9 of them, more than 8"]
)
def test_mixtures_in_few_bits_are_served_where_they_will_be_packed(said: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(few_rows, "unsupported", lambda: None)
    own = Experts(64, 9 if said is not None and "9 of" in said else 2, 256, (0,))
    cfg = dataclasses.replace(CONFIG, hidden_size=256, experts=own)
    target = Transformer(cfg, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), mlp=mlp)
    for kernel in (target.layers[0].mlp.gate_up, target.layers[0].mlp.down):
        count, d_in, d_out = kernel.shape
        order = jnp.tile(jnp.arange(d_in), (count, 1)) if said is not None and "order" in said else None
        kernel.set_value(Quantised(jnp.ones(kernel.shape, jnp.int8), jnp.ones((count, 1, d_out)), None, order))
    check = lambda: check_batch_invariant(ENGINE, target, [PLAIN])
    if said is None:
        return check()
    with pytest.raises(ValueError, match=said):
        check()


def test_devices_without_the_kernels_are_refused():
    with pytest.raises(ValueError, match="batch_invariant=True needs the kernels for few rows: they need"):
        check_batch_invariant(ENGINE, tiny_target(0), [PLAIN])
