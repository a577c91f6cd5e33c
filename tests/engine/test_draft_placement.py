"""Where devices share a target, each may have the drafter whole: it drafts alike, and exchanges nothing of its own.

The devices are virtual ones of the CPU (tests/conftest.py). `test_tensor_parallel.py` has engines of both kinds.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.adaptive.cost import CostTable
from jaxspec.assemble import assemble
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.drafters import registry
from jaxspec.fitting import fitted
from jaxspec.loading import Drafting, bind_drafter
from jaxspec.models.layers import Shared, shared_lm_head
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.request import SamplingParams
from jaxspec.runtime import placing
from jaxspec.runtime.placing import representative, whole_is_better
from jaxspec.runtime.sharding import parameter_shardings, state_shardings, tensor_mesh
from jaxspec.speculation.drafters.dflash2_head import Dflash2Config, Dflash2Head
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead
from jaxspec.speculation.drafters.dspark_head import DsparkConfig, DsparkHead
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.medusa_head import MedusaConfig, MedusaHeads
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.tier import PLAIN, Tier
from pallas_kernels.aot.collectives import collectives

V, HEADS, ROWS, SEEN = 16, 4, 2, 6
FIELDS: dict[str, Any] = dict(vocab_size=V, num_heads=HEADS, num_kv_heads=HEADS)
TIER = Tier(2)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(0, **FIELDS)


def eagle3(target: Any, **fields: Any) -> Eagle3Head:
    width = target.config.hidden_size
    config = Eagle3Config(16, width, 24, HEADS, HEADS, 8, V, 12, (0, 1, 2), **fields)
    head = Eagle3Head(config, rngs=nnx.Rngs(0))
    head.target_ids.set_value(jnp.arange(12, dtype=jnp.int32) + 2)
    return head


def of_blocks(make: Callable[..., Any], target: Any, **fields: Any) -> Any:
    layer = tiny_config(num_layers=2, qk_norm=True, intermediate_size=40, **FIELDS)
    return make(layer, (1, 2), 5, 6, V, **fields), Shared(target.embedding[...]), shared_lm_head(target)


def module_of(kind: str, target: Any) -> Any:
    """A module of a kind whose every part the devices could share."""
    layers, rngs = target.config.num_layers, nnx.Rngs(1)
    layer = tiny_config(num_layers=1, intermediate_size=40, **FIELDS)
    tables = lambda: (Shared(target.embedding[...]), shared_lm_head(target))
    sizes = dict(conv_taps=3, conv_group=8, selector_rank=4, selector_top_k=4)
    make: dict[str, Callable[[], Any]] = {
        "eagle1": lambda: Eagle1Head(Eagle1Config(layer, layers), *tables(), rngs=rngs),
        "eagle3": lambda: eagle3(target),
        "peagle": lambda: eagle3(target, num_layers=2, mask_token_id=6),
        "mtp": lambda: MtpHead(MtpConfig(layer, layers), *tables(), rngs=rngs),
        "medusa": lambda: MedusaHeads(MedusaConfig(2, target.config.hidden_size, V, layers), rngs=rngs),
        "dflash": lambda: DflashHead(*of_blocks(DflashConfig, target), rngs=rngs),
        "dspark": lambda: DsparkHead(*of_blocks(DsparkConfig, target, markov_rank=4, markov_type="rnn"), rngs=rngs),
        "dflash2": lambda: Dflash2Head(*of_blocks(Dflash2Config, target, **sizes), rngs=rngs),
        "draft_model": lambda: tiny_target(1, **FIELDS),
    }
    return make[kind]()


def drafted(kind: str, module: Any, shards: int, whole: bool) -> tuple[Any, str]:
    """(tokens, confidences and state of a draft after some tokens of two texts, the compiled program)."""
    geo = Geometry(ROWS, 8, 8, 4, TIER.depth, whole_drafter=whole)
    drafter, params = bind_drafter(kind, module, geo, None, shards)
    assert drafter is not None
    aux_BDA = jax.random.normal(jax.random.key(1), (ROWS, SEEN, 32 * len(drafter.aux_layers)))
    tokens_SL = jax.random.randint(jax.random.key(2), (ROWS, geo.tokens_per_seq), 0, V, jnp.int32)
    table = jnp.arange(8, dtype=jnp.int32).reshape(ROWS, 4)

    def run(params: Any, state: Any) -> Any:
        at = lambda n: Rows(jnp.arange(ROWS), jnp.ones(ROWS, bool), table, jnp.full(ROWS, n), tokens_SL[:, n])
        if drafter.aux_layers:
            state = drafter.extend(params, state, at(0), aux_BDA, jnp.full(ROWS, SEEN))
        tree, state = drafter.draft(params, state, at(SEEN), tokens_SL, TIER, None, None, False)
        return tree.tokens_BN, tree.confidence_BN, state

    state = drafter.init_state(geo)
    if shards == 1:
        return jax.jit(run)(params, state), ""
    mesh = tensor_mesh(shards)
    params = jax.device_put(params, parameter_shardings(mesh, params))
    state = jax.device_put(state, lies := state_shardings(mesh, state, whole=whole))
    everywhere = jax.NamedSharding(mesh, jax.P())
    with jax.set_mesh(mesh):
        compiled = jax.jit(run, out_shardings=(everywhere, everywhere, lies)).lower(params, state).compile()
    return compiled(params, state), compiled.as_text()


MORE = pytest.mark.exhaustive("more kinds and devices")
OTHERS = ("eagle1", "peagle", "medusa", "draft_model", "dspark", "dflash2")


@pytest.mark.parametrize(
    ("kind", "shards"),
    [
        ("eagle3", 2),
        ("mtp", 2),
        ("dflash", 4),
        *(pytest.param(kind, 2, marks=MORE) for kind in OTHERS),
        *(pytest.param(kind, 4, marks=MORE) for kind in ("eagle3", "mtp", "peagle", "draft_model")),
    ],
)
def test_whole_drafters_draft_alike(kind: str, shards: int, target: Any, tools: Any):
    """Tables that are the target's stay split: their rows are summed, and each part's best token is a few words."""
    module = tools.randomised(module_of(kind, target), 5)
    (tokens, sure, state), _ = drafted(kind, module, 1, False)
    (others, surer, replicas), text = drafted(kind, module, shards, True)
    np.testing.assert_array_equal(others, tokens)
    np.testing.assert_allclose(surer, sure, atol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(replicas), strict=True):
        assert theirs.sharding.is_fully_replicated
        np.testing.assert_allclose(theirs, ours, atol=1e-5)
    lent = [x for x in jax.tree.leaves(nnx.state(module), is_leaf=lambda x: isinstance(x, nnx.Variable))]
    shapes = [shape for one in collectives(text) for shape in one.shapes]
    assert bool(shapes) == any(isinstance(x, Shared) for x in lent)
    # DFlash 2 ranks all candidates for its short lists, which the CPU's compiler does not do by parts.
    words = ROWS * TIER.depth * (V if kind == "dflash2" else shards)
    assert all(shape[-1] == 32 or np.prod(shape) <= words for shape in shapes), shapes


@pytest.mark.covers("devices", "trees")
@pytest.mark.exhaustive("engines of two devices with every drafter, shared and whole")
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(k, marks=pytest.mark.covers("whole")) for k in ("eagle3", "mtp", "dflash", *OTHERS, "hybrid")),
        "suffix",
    ],
)
def test_two_devices_write_what_one_does(kind: str, target: Any, tools: Any):
    """Chains and trees of a drafter that is split like its target, and of one that each device has whole."""
    head, more = ("eagle3", dict(hybrid=True)) if kind == "hybrid" else (kind, {})
    module = V if kind == "suffix" else tools.randomised(module_of(head, target), 5)
    trees = registry.find(head).trees
    tiers = (PLAIN, TIER, Tier(2, 2, 5)) if trees else (PLAIN, TIER)
    speculation, texts = SpeculationConfig(tiers=tiers, **more), []
    rng = np.random.default_rng(2)
    work = [
        (rng.integers(0, V, n).tolist(), SamplingParams(temperature=n % 2, seed=n, max_tokens=20, ignore_eos=True))
        for n in (4, 9, 14, 17)
    ]
    cost = CostTable({(tier, 2): 1e-3 for tier in tiers})
    for shards, own in ((1, "auto"), (2, 1), (2, 2)):
        sizes: dict[str, Any] = dict(max_batch_size=2, max_seq_len=60, page_size=8, batch_buckets=(2,))
        config = EngineConfig(
            **sizes, tensor_parallel=shards, draft_tensor_parallel=own, variants=("sampled",), warmup="eager",
            compile_cache=False,
        )  # fmt: skip
        bind = lambda geo, shards=shards: bind_drafter(head, module, geo, speculation, shards)
        drafting = Drafting(bind, trees, name=head)
        engine = assemble(target, None, speculation, config, drafter=drafting, progress=False, cost=cost)
        engine.use_policy(tools.script(*tiers[::-1]))
        texts.append(tools.drive(engine, work))
        if shards > 1 and kind != "suffix":
            assert engine.stats.draft_tensor_parallel == own
    tools.same(texts[1], texts[0])
    tools.same(texts[2], texts[0])


def test_whole_unless_shared_is_clearly_quicker(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """By what all processes have measured, of a few tokens for a few rows; near a tie alike at every start."""
    took = {True: 3e-4, False: 2e-4}
    monkeypatch.setattr(placing, "seconds", lambda bind, geo, *rest: took[geo.whole_drafter])
    tiers, buckets = (PLAIN, Tier(6), Tier(3, 2, 7), Tier(4), Tier(3), Tier(2, lookup=True)), (1, 4, 16)
    assert representative(tiers, buckets) == (Tier(3), 4) and representative(tiers, (32,))[1] == 32
    ask = functools.partial(whole_is_better, None, Geometry(2, 8, 8, 4, 2), tensor_mesh(2), Tier(3), 4)
    with caplog.at_level(logging.INFO, logger=placing.__name__):
        assert not ask()
        assert ask(least=lambda own: min(own, 200_000)), "alike: then nobody waits for anybody"
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == (
        "the drafter lies over all 2 devices (us a draft of chain-3 for 4 rows: whole on each device 300, "
        "over all 2 200; shared it has to be quicker by 10%)"
    )
    assert told[1].startswith("the drafter lies whole on each device (")
    chosen = []
    for took[False] in (2.6e-4, 2.8e-4, 3e-4, 3.2e-4):
        chosen.append(ask())
    assert chosen == [False, True, True, True]


def test_memory_counts_whole_pools(target: Any):
    """Pages are as many as fit where each device has all of a drafter's."""
    pages = []
    for whole in (False, True):
        geo = Geometry(2, 1 << 40, 8, 4, 2, whole_drafter=whole)
        drafter, params = bind_drafter("draft_model", target, geo, None, 2)
        pages.append(fitted(geo, 1e-4, target, drafter, params, 2).num_pages)
    # The draft model is as large as its target: halves of both, or a half and a whole.
    assert pages[1] / pages[0] == pytest.approx(2 / 3, rel=0.05)
