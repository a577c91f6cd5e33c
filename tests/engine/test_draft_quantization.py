"""Drafters whose weights are rounded when they are loaded: which weights, and that rounds take them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from flax import nnx

from jaxspec import LLM
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.assemble import assemble
from jaxspec.bench.studies import drafters
from jaxspec.bench.studies.rounds import SHAPES
from jaxspec.bench.studies.weights import random_weights
from jaxspec.checkpointing import eagle3
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.drafters import registry as registered
from jaxspec.drafters.kind import Saving
from jaxspec.drafters.rounding import round_drafter
from jaxspec.fitting import stored
from jaxspec.loading import Drafting, bind_drafter, draft_format, drafting_of, in_few_bits, laid_out
from jaxspec.models import few_rows, few_rows_fit, registry
from jaxspec.models.base import Experts, ModelConfig
from jaxspec.models.experts import mlp
from jaxspec.models.layers import DecoderLayer, Linear, Shared, Transformer, output_logits, shared_lm_head
from jaxspec.models.layouts import column_blocks
from jaxspec.models.quantised import Quantised
from jaxspec.models.rounding import FORMATS, rounded
from jaxspec.models.tiny import tiny_target
from jaxspec.request import SamplingParams
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from jaxspec.speculation.layouts import Batch
from jaxspec.speculation.round import RoundSpec, round_fn
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import PLAIN, Tier
from pallas_kernels.small_batch.packed import Packed

TREE = Tier(3, 2, 7)
GEO = Geometry(2, 16, 8, 8, 3)
WEIGHTS = [kind for kind in drafters.NAMES if kind not in ("suffix", "ngram")]


def whole(module: Any) -> set[str]:
    """The matrices of a module that are as they were, narrow ones excepted, by name."""
    return {
        ".".join(map(str, path)) for path, leaf in nnx.iter_graph(module)
        if isinstance(leaf, nnx.Variable) and isinstance(leaf.get_value(), jax.Array)
        and leaf.ndim > 1 and min(leaf.shape) >= 64
    }  # fmt: skip


@pytest.mark.parametrize("kind", WEIGHTS)
def test_rounds_take_every_kind_in_few_bits(kind: str):
    """All that each token reads whole is in 8 bits, the target's output layer too, and the target keeps its own."""
    cfg, vocab = SHAPES["tiny"]
    target = random_weights(nnx.eval_shape(lambda: registry.build(cfg)), 0)
    before = jax.tree.map(np.asarray, nnx.state(target))
    filled = lambda build: random_weights(nnx.eval_shape(build), 1)
    sizes = drafters.Sizes(target, vocab, GEO.max_depth, None, cfg, filled)
    seen: list[Any] = []

    def ready(module: Any) -> Any:
        seen.append(few := in_few_bits(module, "int8"))
        return column_blocks(few)

    drafter, params = drafters.bound(kind, sizes, GEO, ready)
    # Of tables single rows are read.
    assert whole(seen[0]) <= {"embedding", *(f"{x}.{y}" for x in ("markov", "selector") for y in ("before", "after"))}
    assert any(isinstance(x, jax.Array) and x.dtype == jnp.int8 for x in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, nnx.state(target)), before)
    graph, weights = nnx.split(target)
    state = DecodeState.empty(cfg, GEO, jnp.dtype(jnp.float32), drafter.init_state(GEO))
    run = round_fn(RoundSpec(graph, cfg, GEO, drafter, False), Tier(3), True)
    _, tokens, _ = jax.eval_shape(run, weights, params, state, Batch.of(GEO, 2).array)
    assert tokens.shape[0] == 2


WIDE = ModelConfig("llama", 256, 256, 512, 2, 2, 1, 128)


def head(target: Any, dtype: Any = jnp.float32) -> Eagle3Head:
    """A random EAGLE-3 head as wide as the target."""
    cfg = target.config
    config = Eagle3Config(
        cfg.hidden_size, cfg.hidden_size, cfg.intermediate_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim,
        cfg.vocab_size, cfg.vocab_size // 2, (0, 1, 2),
    )  # fmt: skip
    return Eagle3Head(config, dtype=dtype, rngs=nnx.Rngs(1))


def test_an_embedding_that_is_the_output_layer_is_one_no_longer():
    cfg = ModelConfig("llama", 128, 64, 128, 1, 2, 1, 32, tie_word_embeddings=True)
    plain = Transformer(cfg, rngs=nnx.Rngs(0))
    few = round_drafter(plain, "int8")
    assert plain.lm_head is None and isinstance(few.lm_head.kernel[...], Quantised)
    hidden = jax.random.normal(jax.random.key(1), (2, 3, 64))
    want = output_logits(hidden, None, plain.embedding)
    np.testing.assert_allclose(few.logits(hidden), want, atol=0.02 * float(jnp.abs(want).max()))


def test_an_output_layer_in_few_bits_is_taken_as_it_is():
    """As its own: Hopper lays out what no other reads."""
    target = Transformer(WIDE, rngs=nnx.Rngs(0))
    assert target.lm_head is not None
    target.lm_head.kernel.set_value(rounded(target.lm_head.kernel[...], "int4-g128"))
    layer = ModelConfig("llama", 256, 256, 512, 1, 2, 1, 128)
    mtp = MtpHead(MtpConfig(layer, 2), Shared(target.embedding[...]), shared_lm_head(target), rngs=nnx.Rngs(1))
    few = round_drafter(mtp, "int8")
    assert type(few.lm_head.kernel) is nnx.Param and few.lm_head.kernel[...].values.dtype == jnp.int4
    assert mtp.lm_head is not None and isinstance(mtp.lm_head.kernel, Shared)
    assert few.fc.kernel[...].values.dtype == jnp.int8


def test_routers_experts_and_what_four_bits_do_not_divide_stay():
    cfg = ModelConfig("qwen3_moe", 128, 128, 128, 1, 4, 2, 32, experts=Experts(64, 2, 64, (0,)))
    few = round_drafter(Transformer(cfg, rngs=nnx.Rngs(0), mlp=mlp), "int8")
    assert whole(few) >= {"layers.0.mlp.router.kernel", "layers.0.mlp.gate_up", "layers.0.mlp.down"}
    assert isinstance(few.layers[0].attn.qkv.kernel[...], Quantised)
    narrow = ModelConfig("llama", 128, 64, 128, 1, 2, 1, 32)  # inputs of 64, but for the last product's of 128
    assert whole(round_drafter(Transformer(narrow, rngs=nnx.Rngs(0)), "int4-g128")) >= {"layers.0.attn.qkv.kernel"}


def test_a_drafter_without_anything_to_round_is_refused():
    layer = DecoderLayer(ModelConfig("llama", 16, 16, 16, 1, 2, 1, 8), dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="draft_quantization 'int8' finds no weights to round in this DecoderLayer"):
        round_drafter(layer, "int8")


def test_kinds_without_weights_are_refused_before_anything_is_loaded():
    asked = {"depth": 2, "draft_quantization": "int8"}
    with pytest.raises(ValueError, match="draft_quantization 'int8' is for drafters that have weights, .* 'ngram'"):
        LLM("demo", "ngram", asked)
    with pytest.raises(ValueError, match="draft_quantization int8 needs a drafter, got drafter 'none'"):
        LLM("demo", "none", {"draft_quantization": "int8"})


def test_weights_that_take_its_place_are_rounded_too(tmp_path: Path):
    target = Transformer(WIDE, rngs=nnx.Rngs(0))
    for name in ("one", "other"):
        eagle3.save_head(head(target), tmp_path / name, WIDE, dtype=jnp.float32)
    asked = SpeculationConfig(draft_quantization="int4-g128")
    drafting = drafting_of("eagle3", tmp_path / "one", target, jnp.dtype(jnp.float32), asked, 1, "xla")
    assert drafting is not None and drafting.reload is not None
    (_, first), second = drafting.bind(GEO), drafting.reload(GEO, tmp_path / "other")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), first) == jax.tree.map(lambda x: (x.shape, x.dtype), second)
    assert any(x.dtype == jnp.int4 for x in jax.tree.leaves(second))


def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "unsupported", lambda: None)
    monkeypatch.setattr("jaxspec.loading.jax.default_backend", lambda: "gpu")


def test_auto_rounds_checkpoints_in_bfloat16_on_one_hopper_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bfloat16, float32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    target = Transformer(WIDE, dtype=bfloat16, rngs=nnx.Rngs(0))
    eagle3.save_head(head(target, bfloat16), tmp_path / "head", WIDE, dtype=bfloat16)
    asked = SpeculationConfig()
    form = lambda *args: draft_format(head(target, bfloat16), *args)
    assert form(tmp_path, bfloat16, asked, 1) is None  # no such GPU
    hopper(monkeypatch)
    assert form(tmp_path, bfloat16, asked, 1) == "int8"
    assert form(tmp_path, float32, asked, 1) is None
    assert form(tmp_path, bfloat16, asked, 2) is None
    assert form(None, bfloat16, asked, 1) is None  # what the target drafts for itself
    assert form(tmp_path, bfloat16, SpeculationConfig(verification="typical"), 1) is None
    assert form(tmp_path, bfloat16, SpeculationConfig(draft_quantization="none"), 1) is None
    assert form(tmp_path, float32, SpeculationConfig(draft_quantization="fp8"), 2) == "fp8"
    drafting = drafting_of("eagle3", tmp_path / "head", target, bfloat16, asked, 1, "xla")
    assert drafting is not None and drafting.reload is not None and drafting.weights == "int8"
    params = drafting.bind(GEO)[1], drafting.reload(GEO, tmp_path / "head")
    for leaves in map(jax.tree.leaves, params):
        assert any(isinstance(x, jax.Array) and x.dtype == jnp.int8 for x in leaves)


def test_auto_leaves_drafters_that_int8_would_not_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hopper(monkeypatch)
    form = lambda module: draft_format(module, tmp_path, jnp.dtype(jnp.bfloat16), SpeculationConfig(), 1)
    wide = dataclasses.replace(WIDE, intermediate_size=2 * WIDE.hidden_size)
    model = lambda **change: Transformer(
        dataclasses.replace(wide, **change), dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0)
    )
    assert form(model()) == "int8" and form(model(tie_word_embeddings=True)) == "int8"
    # Kernels take whole times 256 inputs and 64 outputs.
    assert form(model(hidden_size=WIDE.hidden_size + 128)) is None
    assert form(model(vocab_size=WIDE.vocab_size + 32)) is None
    target, some = model(), model()
    borrows = Eagle1Head(
        Eagle1Config(wide, wide.num_layers), Shared(target.embedding[...]), shared_lm_head(target),
        dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(1),
    )  # fmt: skip
    assert form(borrows) is None  # it would have an output layer of its own
    down = some.layers[0].mlp.down
    down.kernel.set_value(rounded(down.kernel[...], "fp8"))
    assert form(some) is None and form(round_drafter(head(target, jnp.bfloat16), "int8")) is None


def test_a_rounded_head_may_be_bound_whole_and_shared_in_turns(monkeypatch: pytest.MonkeyPatch):
    """As an engine does that measures which is quicker; nothing of the module that is bound changes."""
    hopper(monkeypatch)
    target = Transformer(WIDE, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    module = round_drafter(head(target, jnp.bfloat16), "int8")
    before, found = nnx.state(module), []
    for whole in (True, False, True):
        geo = dataclasses.replace(GEO, whole_drafter=whole)
        _, params = bind_drafter("eagle3", module, geo, SpeculationConfig(), 2)
        kinds = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed | Quantised))
        found.append(sum(isinstance(x, Packed) for x in kinds))
    # What devices do not split, and tables, stay with XLA.
    assert found[0] == found[2] == 0 < found[1]
    assert jax.tree.structure(before) == jax.tree.structure(nnx.state(module))


def test_other_weights_come_when_the_target_is_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a target that is packed in place, whose output layer in few bits a head reads as it was stored."""
    hopper(monkeypatch)
    cfg = dataclasses.replace(WIDE, family="glm4", post_norms=True, partial_rotary_factor=0.5, rope_interleaved=True)
    target = Transformer(cfg, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert target.lm_head is not None
    for linear in (target.lm_head, target.layers[0].mlp.down):
        linear.kernel.set_value(rounded(linear.kernel[...], "int8"))
    tables = Shared(target.embedding[...]), shared_lm_head(target)
    borrows = Eagle1Head(Eagle1Config(WIDE, WIDE.num_layers), *tables, dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    kind = registered.find("eagle1")
    kind.save(borrows, tmp_path / "head", target, Saving(kind.layouts[0]))
    drafting = drafting_of("eagle1", tmp_path / "head", target, jnp.dtype(jnp.bfloat16), SpeculationConfig(), 1, "xla")
    assert drafting is not None and drafting.reload is not None
    packed = laid_out(target, 1, "xla")
    assert isinstance(packed.lm_head.kernel[...], Packed) and isinstance(packed.layers[0].mlp.down.kernel[...], Packed)
    assert isinstance(target.lm_head.kernel[...], Quantised)
    drafting.reload(GEO, tmp_path / "head")


@pytest.mark.parametrize("outputs", [64, 1024, 1500])
def test_rounding_takes_outputs_in_turns(outputs: int):
    kernel = jax.random.normal(jax.random.key(0), (256, outputs))
    for name in ("int8", "int4-g128"):
        values, scale = FORMATS[name][0](kernel.T)
        few = rounded(kernel, name)
        np.testing.assert_allclose(few.scale, scale.T, rtol=1e-6)
        assert np.mean(np.asarray(few.values, np.float32) != np.asarray(values.T, np.float32)) < 0.01


def test_a_tied_layer_that_stays_is_not_copied(monkeypatch: pytest.MonkeyPatch):
    cfg = ModelConfig("llama", 100, 64, 128, 1, 2, 1, 32, tie_word_embeddings=True)  # 64 does not divide the vocabulary
    assert round_drafter(Transformer(cfg, rngs=nnx.Rngs(0)), "int8").lm_head is None


def test_hopper_packs_the_maps_of_heads_but_not_what_is_their_targets(monkeypatch: pytest.MonkeyPatch):
    """Products of heads, and of models whose layers have no kernels for few rows, are then those for many rows."""
    hopper(monkeypatch)
    target = Transformer(WIDE, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    few = round_drafter(head(target, jnp.bfloat16), "int8")
    lent = Linear(1, 1, dtype=jnp.dtype(jnp.bfloat16), rngs=None)
    lent.kernel = Shared(few.lm_head.kernel[...])  # pyright: ignore[reportAttributeAccessIssue]
    x = jax.random.normal(jax.random.key(3), (2, 512)).astype(jnp.bfloat16)
    want = few.attn.qkv(x)
    packed = laid_out(few, 1, "xla")
    maps = (packed.fc, packed.attn.qkv, packed.attn.out, packed.mlp.gate_up, packed.mlp.down, packed.lm_head)
    assert all(isinstance(linear.kernel[...], Packed) for linear in maps)
    np.testing.assert_allclose(packed.attn.qkv(x), want, atol=2**-6 * float(jnp.abs(want).max()))
    packed.lm_head = lent
    assert isinstance(laid_out(packed, 1, "xla").lm_head.kernel[...], Quantised)
    assert isinstance(laid_out(round_drafter(head(target), "int8"), 1, "xla").fc.kernel[...], Quantised)  # float32

    capped = Transformer(ModelConfig("gemma2", 256, 256, 512, 1, 2, 1, 128, post_norms=True), dtype=jnp.bfloat16,
                         rngs=nnx.Rngs(0))  # fmt: skip
    few = round_drafter(capped, "int4-g128")
    assert few_rows_fit.refusal(few) is not None
    before, last, added = stored(nnx.state(few)), few.lm_head.kernel[...].nbytes, few_rows.added_bytes(few)
    packed = laid_out(few, 1, "xla")
    assert isinstance(packed.layers[0].mlp.down.kernel[...], Packed) and few_rows.added_bytes(packed) == 0
    # An output layer counts twice, as a target's does that heads share.
    assert stored(nnx.state(packed)) - before + last == added > last


def test_hopper_packs_maps_with_zero_points(monkeypatch: pytest.MonkeyPatch):
    """AWQ's and GPTQ's: the model's layers run by the kernels of few rows, of many by another."""
    hopper(monkeypatch)
    few = round_drafter(Transformer(WIDE, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), "int4-g128")
    maps = [node for _, node in nnx.iter_graph(few) if isinstance(node, Linear)]
    for i, linear in enumerate(maps):
        zero = jax.random.randint(jax.random.key(i), linear.kernel[...].scale.shape, -3, 4, jnp.int8)
        linear.kernel.set_value(dataclasses.replace(linear.kernel[...], zero=zero))
    assert few_rows_fit.refusal(few) is None and few_rows_fit.output_refusal(few) is None
    rows = [jax.random.normal(jax.random.key(3), (m, WIDE.hidden_size)).astype(jnp.bfloat16) for m in (1, 5, 90)]
    want, before, added = [few.layers[0].attn.qkv(x) for x in rows], stored(nnx.state(few)), few_rows.added_bytes(few)
    last = few.lm_head.kernel[...].nbytes
    packed = laid_out(few, 1, "xla")
    kernels = [node.kernel[...] for _, node in nnx.iter_graph(packed) if isinstance(node, Linear)]
    assert len(kernels) == len(maps) and all(isinstance(k, Packed) and k.zeros for k in kernels)
    for x, wanted in zip(rows, want, strict=True):
        np.testing.assert_allclose(packed.layers[0].attn.qkv(x), wanted, atol=2**-6 * float(jnp.abs(wanted).max()))
    assert stored(nnx.state(packed)) - before + last == added
    assert packed.few_rows is not None and few_rows.added_bytes(packed) == 0


@pytest.mark.covers("few_bit_drafts", "greedy", "seeded", "trees")
@pytest.mark.parametrize("kind", ["draft_model"])
def test_a_target_drafts_for_itself_in_few_bits(kind: str, tools: Any, kept_executables: Path):
    """Rounded it is mostly right, and the texts are those of plain decoding."""
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    target, tier = tiny_target(0, **sizes), TREE
    asked = SpeculationConfig(tiers=(tier,), draft_quantization="int8")
    make = lambda geo: bind_drafter(kind, in_few_bits(target, "int8"), geo, asked)
    config = EngineConfig(
        max_batch_size=2, max_seq_len=60, page_size=8, prefill_chunk=16, batch_buckets=(2,), variants=("sampled",),
        warmup="eager", compile_cache=kept_executables,
    )  # fmt: skip
    with quick.prompts_alone():
        engine = assemble(target, None, asked, config, drafter=Drafting(make, True, name=kind), progress=False)
    work = [
        ([1, 2, 3], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)),
        ([9, 4], SamplingParams(temperature=0.9, seed=2, max_tokens=24, ignore_eos=True)),
    ]
    found: dict[Tier, list[Any]] = {}
    for each in (PLAIN, tier):
        engine.use_policy(StaticPolicy(each))
        found[each] = tools.drive(engine, work)
    assert [x.token_ids for x in found[tier]] == [x.token_ids for x in found[PLAIN]]
    assert sum(x.metrics.accepted for x in found[tier]) > 20
