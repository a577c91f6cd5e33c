"""Engines whose layers and pools are split over devices give the tokens of one device, and move activations only.

The devices are virtual ones of the CPU (tests/conftest.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from flax import nnx

from jaxspec import LLM, defaults
from jaxspec import assemble as assembling
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.costprofile import CostProfile
from jaxspec.assemble import assemble, build_engine
from jaxspec.checkpointing import hf
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.fitting import stored_share
from jaxspec.loading import Drafting
from jaxspec.models import registry
from jaxspec.models.layers import Shared, causal_attention, shared_lm_head
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.quantised import Quantised
from jaxspec.models.sharded import BY_XLA
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_config, tiny_target
from jaxspec.runtime import placing
from jaxspec.runtime.sharding import (
    AbstractRound,
    Sharing,
    abstract_core,
    abstract_round,
    parameter_shardings,
    tensor_mesh,
)
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import DraftModelCore, HeadCore
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.state import Geometry
from jaxspec.tier import PLAIN, Choice, Tier

V, EOS, SHARDS = 16, 12, 2
TIERS = (PLAIN, Tier(2), Tier(2, 2, 5))
SIZES = dict(
    max_batch_size=4, max_seq_len=120, page_size=8, prefill_chunk=16, batch_buckets=(4,), variants=("sampled",),
    compile_cache=False, warmup="eager",
)  # fmt: skip
#: A request at a time: fewer executables, and the products of one row, which XLA partitions in its own way.
ONE_ROW = {**SIZES, "max_batch_size": 1, "batch_buckets": (1,)}
WRITTEN = Path(__file__).with_name("one_device.json")


def eagle3_head(**fields: int) -> Eagle3Head:
    """A random head for the tiny target; by default two devices can split every part of it."""
    sizes = dict(intermediate_size=24, num_heads=4, num_kv_heads=2, draft_vocab_size=10) | fields
    config = Eagle3Config(
        hidden_size=16, target_hidden_size=32, head_dim=8, vocab_size=V, aux_layer_ids=(0, 1, 2), **sizes
    )
    head = Eagle3Head(config, rngs=nnx.Rngs(0))
    for param, scale in ((head.embedding, 1.0), (head.fc.kernel, 0.3), (head.lm_head.kernel, 1.0)):
        param.set_value(jax.random.normal(jax.random.key(3), param.shape) * scale)
    head.target_ids.set_value(jnp.arange(16, dtype=jnp.int32)[-config.draft_vocab_size :])
    return head


def build(
    target: Any, tools: Any, shards: int, head: Any = None, tiers: tuple[Tier, ...] = (PLAIN,),
    sizes: dict[str, Any] = SIZES, kind: str = "eagle3", **speculation: Any,
) -> Any:  # fmt: skip
    """An engine without a drafter, or with a head."""
    config = EngineConfig(**sizes, tensor_parallel=shards)
    if head is not None and not speculation:
        speculation = dict(tiers=tiers)

    def make(geo: Geometry) -> Any:
        core = HeadCore(tensor_parallel(head, shards))
        return AutoregressiveDrafter(core, geo), core.params

    cost = CostTable({(tier, bucket): 1e-3 for tier in tiers for bucket in config.buckets})
    return assemble(
        target, None, SpeculationConfig(**(speculation or dict(policy="off"))), config, cost=cost, progress=False,
        drafter=None if head is None else Drafting(make, trees=True, name=kind),
    )  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(0, vocab_size=V, eos_token_ids=(EOS,))


def run_tiers(target: Any, tools: Any, shards: int) -> tuple[Any, Any]:
    """(engine, outputs): chains, trees, plain rounds and what the drafter catches up after them."""
    with contextlib.nullcontext() if shards > 1 else quick.prompts_alone():
        engine = build(target, tools, shards, eagle3_head(), TIERS)
    plain, chain, tree = TIERS
    engine.use_policy(tools.script(chain, tree, tree, plain, chain, plain))
    outputs = tools.drive(engine, tools.workload())
    assert engine.stats.compilations_after_warmup == 0
    return engine, outputs


@pytest.fixture(scope="module")
def expected(target: Any, tools: Any) -> Any:
    """What plain decoding on one device gives."""
    with quick.prompts_alone():
        return tools.drive(build(target, tools, 1), tools.workload())


def histograms(outputs: Any) -> list[list[int]]:
    return [o.metrics.acceptance_histogram for o in outputs]


def run_whole_parts(target: Any, tools: Any, shards: int) -> tuple[Any, Any]:
    """(engine, outputs) of a head of one KV head, nine draft tokens and an odd MLP; packed and whole rounds in turn."""
    head = eagle3_head(num_heads=1, num_kv_heads=1, draft_vocab_size=9, intermediate_size=23)
    with quick.prompts_alone():
        engine, script = build(target, tools, shards, head, depth=2, budget=1.0), tools.script(Tier(2))
    script.select = lambda view, heard=script.heard: (Choice(Tier(2), 8), Tier(2))[len(heard) % 2]
    engine.use_policy(script)
    return engine, tools.drive(engine, tools.workload())


def run_shared_tables(tmp_path: Path, tools: Any, shards: int) -> tuple[Any, Any]:
    """(engine, outputs) of EAGLE-1 under rejection, one row at a time."""
    target = tiny_target(0, vocab_size=V, eos_token_ids=(EOS,))
    if shards > 1:
        hf.save_model(target, tmp_path, dtype=jnp.float32)
        target = hf.load_model(tmp_path, devices=Sharing(tensor_mesh(shards), BY_XLA))
    cfg = Eagle1Config(tiny_config(vocab_size=V, num_layers=1), target.config.num_layers)
    head = Eagle1Head(cfg, Shared(target.embedding[...]), shared_lm_head(target), rngs=nnx.Rngs(0))
    head.fc.kernel.set_value(jax.random.normal(jax.random.key(2), head.fc.kernel.shape) * 0.2)
    engine = build(target, tools, shards, head, sizes=ONE_ROW, kind="eagle1", depth=2, verification="rejection")
    return engine, tools.drive(engine, tools.workload())


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    """What one device gives in the three runs above; `test_one_device_gives_what_is_written` runs them again."""
    return json.loads(WRITTEN.read_text())


@pytest.mark.exhaustive("three engines of one device, for what is written down")
def test_one_device_gives_what_is_written(target: Any, tools: Any, tmp_path: Path, written: dict[str, Any]):
    tiers = run_tiers(target, tools, 1)[1]
    whole, shared = run_whole_parts(target, tools, 1)[1], run_shared_tables(tmp_path, tools, 1)[1]
    found = {
        "tiers": {"histograms": histograms(tiers)},
        "whole parts": {"histograms": histograms(whole)},
        "shared tables": {"tokens": [o.token_ids for o in shared], "histograms": histograms(shared)},
    }
    (new := tmp_path / WRITTEN.name).write_text(json.dumps(found))
    assert found == written, f"it gives what {new} says"


@pytest.mark.covers("devices", "trees", kind="eagle3")
def test_an_eagle_head_on_two_devices(target: Any, tools: Any, expected: Any, written: dict[str, Any]):
    """Tokens, log-probabilities and acceptance are those of one device."""
    engine, outputs = run_tiers(target, tools, SHARDS)
    tools.same(outputs, expected)
    assert histograms(outputs) == written["tiers"]["histograms"]
    assert sum(o.metrics.accepted for o in outputs) > 0
    assert engine.stats.draft_tensor_parallel == SHARDS
    state = engine.runner.state
    for pages in (state.pages, state.draft.pages):
        assert {s.data.shape[1] for s in pages.addressable_shards} == {1} and len(pages.addressable_shards) == SHARDS
    assert state.tokens_SL.sharding.is_fully_replicated and state.draft.ring_SRA.sharding.is_fully_replicated


@pytest.mark.covers("devices", "budgets", kind="eagle3")
def test_a_head_that_two_devices_cannot_split(target: Any, tools: Any, expected: Any, written: dict[str, Any]):
    """Those parts are computed whole, beside a split target."""
    engine, outputs = run_whole_parts(target, tools, SHARDS)
    tools.same(outputs, expected)
    assert histograms(outputs) == written["whole parts"]["histograms"]
    state = engine.runner.state
    assert state.draft.pages.sharding.is_fully_replicated and not state.pages.sharding.is_fully_replicated


@pytest.mark.covers("devices", "rejection", kind="eagle1")
def test_a_head_with_the_targets_tables(tmp_path: Path, tools: Any, expected: Any, written: dict[str, Any]):
    """EAGLE-1 on two devices: embedding and output layer are the very arrays that the target reads, on each device.

    Under rejection: drafts drawn from distributions that are split, and residuals of such.
    """
    engine, outputs = run_shared_tables(tmp_path, tools, SHARDS)
    assert [o.token_ids for o in outputs] == written["shared tables"]["tokens"]
    greedy = [i for i, (_, params) in enumerate(tools.workload()) if params.temperature == 0]
    tools.same([outputs[i] for i in greedy], [expected[i] for i in greedy])
    assert histograms(outputs) == written["shared tables"]["histograms"]
    assert sum(o.metrics.accepted for o in outputs) > 0
    own, drafts = engine.runner.target, engine.runner.draft_params
    for a, b in (
        (own["embedding"], drafts["embedding"]),
        (own["lm_head"]["kernel"], drafts["lm_head"]["kernel"]),
    ):
        parts = [[s.data.unsafe_buffer_pointer() for s in x.get_value().addressable_shards] for x in (a, b)]
        assert parts[0] == parts[1] and len(set(parts[0])) == SHARDS


@pytest.mark.covers("devices", "rejection", kind="eagle3")
@pytest.mark.exhaustive("rejection on two devices with a draft vocabulary of its own; with the target's it stays")
def test_rejection_verification_on_two_devices(target: Any, tools: Any):
    """Drafts drawn from a draft vocabulary that is split, and residuals of distributions that are."""
    runs = []
    for shards in (1, SHARDS):
        engine = build(target, tools, shards, eagle3_head(), depth=2, verification="rejection")
        runs.append(tools.drive(engine, tools.workload()))
    tools.same(runs[1], runs[0])
    assert histograms(runs[0]) == histograms(runs[1]) and sum(o.metrics.accepted for o in runs[0]) > 0


@pytest.mark.covers("devices", "whole", "directory", kind="draft_model")
def test_directories_load_onto_two_devices(
    tmp_path: Path, target: Any, tools: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
):
    """From the front: a draft model equal to its target has every greedy draft accepted.

    It lies as is measured to be quicker, as on accelerators: here whole, whatever the virtual devices took.
    """
    measured = []
    seconds = lambda *args: measured.append(real(*args)) or float(len(measured))
    real = placing.seconds
    monkeypatch.setattr(placing, "seconds", seconds)
    for module in (assembling, defaults):
        monkeypatch.setattr(module, "measures_drafters", lambda config: config.draft_tensor_parallel == "auto")
    hf.save_model(target, tmp_path / "target", dtype=jnp.float32)
    hf.save_model(target, tmp_path / "draft", dtype=jnp.float32)
    config = EngineConfig(**ONE_ROW, tensor_parallel=SHARDS, skip_tokenizer_init=True)
    engine = build_engine(tmp_path / "target", "draft_model", {"depth": 3}, config, progress=False)
    work = tools.workload()
    outputs = tools.drive(engine, work)
    tools.same(outputs, expected)
    for output, (_, params) in zip(outputs, work, strict=True):
        if params.temperature == 0 and params.repetition_penalty == 1 and not params.min_tokens:
            assert sum(output.metrics.acceptance_histogram[:-1]) <= 1, "but the round that ends the request"
    kernel = engine.runner.target["layers"][0]["attn"]["qkv"]["kernel"].get_value()
    assert {s.data.shape for s in kernel.addressable_shards} == {(32, 32)} and kernel.shape == (32, 64)
    kernel = engine.runner.draft_params["layers"][0]["attn"]["qkv"]["kernel"].get_value()
    assert {s.data.shape for s in kernel.addressable_shards} == {(32, 64)} and engine.stats.draft_tensor_parallel == 1
    assert engine.runner.state.draft.pages.sharding.is_fully_replicated and all(took > 0 for took in measured)
    identity = engine.facts.identity
    assert len(measured) == 2 and identity["drafter"].startswith("draft_model, whole on each device, ")
    # A profile has the placement that its costs are of: the drafter is found to be the same before the dtype is not.
    costs = tmp_path / "profile.json"
    costs.write_text(CostProfile({**identity, "dtype": "another"}, {}, {(0, (Tier(0), 1, None)): 1.0}).to_json())
    with pytest.raises(ValueError, match="was measured with dtype 'another'"):
        build_engine(
            tmp_path / "target", "draft_model", {"candidate_steps": (3,)}, dataclasses.replace(config, profile=costs),
            progress=False,
        )  # fmt: skip
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("model", "shards", "message"),
    [
        (dict(vocab_size=V), 3, r"tensor_parallel must divide the target's num_kv_heads 2, got 3"),
        (dict(num_kv_heads=4), 2, r"tensor_parallel must divide the target's vocab_size 13, got 2"),
        (dict(intermediate_size=49), 2, r"tensor_parallel must divide the target's intermediate_size 49, got 2"),
        (
            dict(vocab_size=64, intermediate_size=64, num_heads=64, num_kv_heads=64),
            64,
            rf"tensor_parallel must be at most the {jax.device_count()} devices at hand, got 64",
        ),
    ],
)
def test_targets_that_cannot_be_split(model: dict[str, int], shards: int, message: str, tools: Any):
    with pytest.raises(ValueError, match=message):
        build(tiny_target(0, **model), tools, shards)


def test_refusals_come_before_the_weights(tmp_path: Path):
    hf.save_model(tiny_target(0), tmp_path, dtype=jnp.float32)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"tensor_parallel must divide the target's vocab_size 13, got 2"):
        LLM(tmp_path, "ngram", tensor_parallel=2, progress=False)
    for value in (0, True, "2"):
        with pytest.raises(ValueError, match=rf"tensor_parallel must be an int of at least 1, got {value!r}"):
            LLM(tmp_path, tensor_parallel=value)


def test_memory_counts_what_each_device_holds():
    """Of experts a part on every device, in four bits too; with inputs in another order the whole, beside parts of all
    else."""
    graph, shapes = nnx.split(tiny_target(0, **{**FAMILY_FIELDS["gpt_oss"], "vocab_size": V}))
    target = nnx.merge(graph, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
    experts = target.layers[1].mlp
    count, width, inner = experts.gate_up[...].shape
    four_bits = Mxfp4(jnp.zeros((count, width // 2, inner), jnp.uint8), jnp.zeros((count, 1, inner), jnp.uint8))
    order = jnp.broadcast_to(jnp.arange(width)[None], (count, width))
    ordered = Quantised(jnp.zeros((count, width, inner), jnp.int8), jnp.ones((count, 1, inner)), order=order)
    for kernel in (experts.gate_up[...], four_bits, ordered):
        experts.gate_up = nnx.Param(kernel)
        state = nnx.state(nnx.eval_shape(lambda: tensor_parallel(target, SHARDS)))
        shardings = parameter_shardings(tensor_mesh(SHARDS), state)
        held = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, state, shardings)
        assert stored_share(target, SHARDS) == sum(jax.tree.leaves(held))
        assert (stored_share(target, SHARDS) - stored_share(target, 1) / 2 > 10_000) == (kernel is ordered)


@pytest.mark.parametrize(
    "fields",
    [
        dict(attention_bias=True, output_bias=True, mlp_bias=True),
        dict(tie_word_embeddings=True, qk_norm=True, num_kv_heads=4),
    ],
)
def test_the_layout_computes_the_same(fields: dict[str, Any]):
    """Without any mesh: columns in groups of one shard after the other."""
    model = tiny_target(3, vocab_size=V, **fields)
    other = tensor_parallel(model, SHARDS)
    tokens = jnp.asarray([[1, 5, 15, 0, 7]], jnp.int32)
    forward = nnx.jit(lambda m: m.logits(m(tokens, jnp.arange(5)[None], causal_attention)[0]))
    logits = [np.asarray(forward(m)) for m in (model, other)]
    np.testing.assert_allclose(*logits, atol=2e-5)
    before, after = model.layers[0].attn.qkv, other.layers[0].attn.qkv
    assert (model.layers[0].attn.shards, other.layers[0].attn.shards) == (1, SHARDS), "the original stays as it was"
    assert not np.array_equal(before.kernel[...], after.kernel[...])
    if before.bias is not None:
        assert not np.array_equal(before.bias[...], after.bias[...])


@pytest.fixture(scope="module")
def abstract() -> AbstractRound:
    """A round on two devices, whose pools and kernels are larger than all activations."""
    cfg = tiny_config(vocab_size=512, hidden_size=128, intermediate_size=256, num_heads=8, num_kv_heads=4, head_dim=16)
    geo = Geometry(slots=2, num_pages=256, page_size=8, pages_per_seq=8, max_depth=3)
    mesh = tensor_mesh(SHARDS)
    draft = tiny_config(vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=1)
    core = abstract_core(lambda: DraftModelCore(tensor_parallel(registry.build(draft, jnp.float32), SHARDS)))
    drafter = AutoregressiveDrafter(core, geo)
    return abstract_round(cfg, geo, mesh, 2, dtype=jnp.dtype(jnp.float32), drafter=drafter, draft_params=core.params)


def test_rounds_move_activations_only(abstract: AbstractRound):
    """Two sums a layer and one an embedding; no weight and no pool travels or is copied, and the state is aliased."""
    compiled = abstract.lower(Tier(2)).compile()
    text = compiled.as_text()
    found = re.findall(r"= (\(?)[a-z]+\d+\[([\d,]*)\].*? (all-[a-z-]+|collective-permute|reduce-scatter)\(", text)
    assert found and not any(bracket for bracket, _, _ in found)
    shapes = [(kind, tuple(map(int, filter(None, shape.split(","))))) for _, shape, kind in found]
    wide = [kind for kind, shape in shapes if 128 in shape]
    # The target has two layers; the draft model runs its layer over the window, and then for the second token.
    assert wide == ["all-reduce"] * (2 * 2 + 1 + 2 * (2 + 1)), shapes
    # Three words of each shard, row and node: the best token, its score, and whether the logits are usable.
    assert all(np.prod(shape) <= 3 * SHARDS * 2 * 3 for _, shape in shapes if 128 not in shape), shapes
    state = abstract.arguments[2]
    pools = [np.prod(x.shape) * 4 // SHARDS for x in (state.pages, state.draft.pages)]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(pools) and memory.temp_size_in_bytes < min(pools) / 2
