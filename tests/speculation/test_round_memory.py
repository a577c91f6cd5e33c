"""The donated pools are updated in place: no executable holds a copy of one."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.layers import Shared, Transformer
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.speculation import round as rounds
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import DraftModelCore, HeadCore
from jaxspec.speculation.drafters.dflash import BlockDrafter
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.parallel import ParallelDrafter
from jaxspec.speculation.layouts import Admission, Batch
from jaxspec.speculation.mixed import mixed_fn
from jaxspec.speculation.prefill import last_layer, prefill_fn
from jaxspec.speculation.several import several_fn
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import PLAIN, Tier

GEO = Geometry(slots=2, num_pages=4096, page_size=8, pages_per_seq=16, max_depth=3)


def described(core, drafter):
    target = tiny_target(0, num_layers=2)
    graph, params = nnx.split(target)
    spec = rounds.RoundSpec(graph, target.config, GEO, drafter, rejection=False)
    state = jax.eval_shape(lambda: DecodeState.empty(target.config, GEO, jnp.float32, drafter.init_state(GEO)))
    return spec, params, core.params, state


@pytest.fixture(scope="module")
def setting():
    core = DraftModelCore(tiny_target(1, num_layers=1))
    return described(core, AutoregressiveDrafter(core, GEO))


def temp_and_smallest_pool(compiled, state) -> tuple[int, int]:
    pools = [x.size * x.dtype.itemsize for x in (state.pages, state.draft.pages)]
    return compiled.memory_analysis().temp_size_in_bytes, min(pools)


def check_round(setting, tier, count=1):
    spec, target, draft, state = setting
    batch = jax.ShapeDtypeStruct((2, Batch.width(GEO)), jnp.int32)
    fn = rounds.round_fn(spec, tier, sampled=False)
    fn = fn if count == 1 else several_fn(fn, count)
    compiled = jax.jit(fn, donate_argnums=2).lower(target, draft, state, batch).compile()
    temp, pool = temp_and_smallest_pool(compiled, state)
    assert temp < pool / 4, f"{temp} bytes of temporaries against a pool of {pool}"


@pytest.mark.parametrize("tier", [PLAIN, Tier(2), Tier(2, 2, 5)], ids=str)
def test_rounds_copy_no_pool(setting, tier):
    check_round(setting, tier)


def test_several_rounds_copy_no_pool(setting):
    check_round(setting, Tier(2), count=4)


def test_drafts_of_one_pass_copy_no_pool():
    config = Eagle3Config(
        hidden_size=16, target_hidden_size=32, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8,
        vocab_size=13, draft_vocab_size=9, aux_layer_ids=(0, 1, 2), num_layers=2, mask_token_id=6,
    )  # fmt: skip
    core = HeadCore(Eagle3Head(config, rngs=nnx.Rngs(0)))
    check_round(described(core, ParallelDrafter(core, GEO)), Tier(2))


def test_blocks_copy_no_pool():
    """Its pool is written where a round commits, after a draft and without one."""
    layer = tiny_config(num_layers=2, qk_norm=True)
    config = DflashConfig(layer, (0, 1), 4, 6, 13, sliding_layers=(1,), sliding_window=9)
    target = tiny_target(0, num_layers=2)
    drafter = BlockDrafter(DflashHead(config, Shared(target.embedding[...]), None, rngs=nnx.Rngs(0)), GEO)
    for tier in (PLAIN, Tier(2)):
        check_round(described(drafter, drafter), tier)


def test_heads_without_placeholders_cannot_draft_in_one_pass():
    config = Eagle3Config(16, 32, 24, 2, 1, 8, 13, 9, (0, 1, 2))
    with pytest.raises(ValueError, match="a head that drafts in parallel needs a mask_token_id, got None"):
        ParallelDrafter(HeadCore(Eagle3Head(config)), GEO)


@pytest.mark.parametrize(("rows", "samples"), [(1, False), (2, True)])
def test_prefill_copies_no_pool(setting, rows, samples):
    spec, target, draft, state = setting
    fn = jax.jit(prefill_fn(spec), donate_argnums=2, static_argnames=("size", "width", "samples"))
    chunks, new = jax.ShapeDtypeStruct((rows, 3), jnp.int32), Admission.packed(GEO, rows)
    compiled = fn.lower(target, draft, state, chunks, new, size=16, width=16 // rows, samples=samples).compile()
    temp, pool = temp_and_smallest_pool(compiled, state)
    assert temp < pool / 4, f"{temp} bytes of temporaries against a pool of {pool}"


def test_a_round_that_takes_prompts_along_copies_no_pool(setting):
    spec, target, draft, state = setting
    batch, chunks = (jax.ShapeDtypeStruct((2, width), jnp.int32) for width in (Batch.width(GEO), 3))
    fn = jax.jit(mixed_fn(spec, Tier(2), True, size=16, width=16), donate_argnums=2)
    compiled = fn.lower(target, draft, state, batch, chunks, Admission.packed(GEO, 2)).compile()
    temp, pool = temp_and_smallest_pool(compiled, state)
    assert temp < pool / 4, f"{temp} bytes of temporaries against a pool of {pool}"


def test_behind_their_last_attention_prompts_are_their_last_tokens(setting, monkeypatch):
    """Of 32 tokens of two rows the last layer's MLP sees two, or none where no chunk ends; a round's rows stay."""
    spec, target, draft, state = setting
    cfg, int32 = spec.config, lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    new = Admission.packed(GEO, 2)
    mlp = 2 * 3 * cfg.hidden_size * cfg.intermediate_size  # operations of a token

    def operations(fn, *args, **static):
        lowered = jax.jit(fn, static_argnames=tuple(static)).lower(target, draft, state, *args, **static)
        return lowered.cost_analysis()["flops"]

    def all_of(spec):
        one = prefill_fn(spec)
        chunks = [operations(one, int32(2, 3), new, size=32, width=16, samples=samples) for samples in (True, False)]
        mixed = mixed_fn(spec, PLAIN, False, size=32, width=16)
        return [*chunks, operations(mixed, int32(2, Batch.width(GEO)), int32(2, 3), new)]

    narrow = all_of(spec)
    monkeypatch.setattr(Transformer, "narrows", False)
    for saved, rows in zip((b - a for a, b in zip(narrow, all_of(spec), strict=True)), (30, 32, 30), strict=True):
        assert rows * mlp <= saved < (rows + 2) * mlp * 2


@pytest.mark.parametrize(("layers", "wanted"), [((0, 1), 1), ((0, 2), None), ((3,), None), ((-1,), None)])
def test_drafters_that_read_what_leaves_the_last_layer_have_all_of_it(setting, layers, wanted):
    spec, target, *_ = setting
    own = dataclasses.replace(spec, drafter=SimpleNamespace(aux_layers=layers))
    assert last_layer(own, nnx.merge(spec.graph, target)) == wanted


def test_models_with_a_call_of_their_own_compute_all_unless_they_say_otherwise():
    class Inherits(Transformer):
        pass

    class Calls(Transformer):
        def __call__(self, *args):
            return super().__call__(*args)

    class Says(Calls):
        narrows = True

        def __call__(self, *args):
            return super().__call__(*args)

    assert [each.narrows for each in (Inherits, Calls, Says)] == [True, False, True]


def test_what_is_left_out_changes_nothing_that_is_kept(monkeypatch):
    """Pages, entries and first tokens of two prompts of unequal lengths, one of which goes on, with a head that reads
    layers before the last."""
    target = tiny_target(0, num_layers=3)
    config = Eagle3Config(
        hidden_size=16, target_hidden_size=32, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8,
        vocab_size=target.config.vocab_size, draft_vocab_size=9, aux_layer_ids=(0, 1, 2),
    )  # fmt: skip
    core = HeadCore(Eagle3Head(config, rngs=nnx.Rngs(0)))
    geo = dataclasses.replace(GEO, num_pages=8)
    drafter = AutoregressiveDrafter(core, geo)
    graph, params = nnx.split(target)
    spec = rounds.RoundSpec(graph, target.config, geo, drafter, rejection=False)
    state = DecodeState.empty(target.config, geo, jnp.float32, drafter.init_state(geo))
    tokens = jax.random.randint(jax.random.key(1), state.tokens_SL.shape, 0, target.config.vocab_size)
    table = jnp.arange(2 * geo.pages_per_seq).reshape(2, -1) % geo.num_pages
    state = dataclasses.replace(state, tokens_SL=tokens, table_SM=table)
    chunks = jnp.asarray([[0, 7, 1], [1, 3, 0]])

    def run(samples):
        assert last_layer(spec, target) == (2 if Transformer.narrows else None)
        made = jax.jit(prefill_fn(spec), static_argnames=("size", "width", "samples"))(
            params, core.params, state, chunks, Admission.packed(geo, 2), size=12, width=8, samples=samples
        )
        after, *more = made if samples else (made,)
        return after.pages, after.draft.pages, after.draft.ring_SRA, after.tokens_SL, [x[:1] for x in more]

    narrow = [run(samples) for samples in (True, False)]
    monkeypatch.setattr(Transformer, "narrows", False)
    for found, wanted in zip(narrow, [run(samples) for samples in (True, False)], strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)
