"""Every family on the engine: an EAGLE-3 head reads its streams, and what is emitted is what whole forwards choose."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.adaptive.cost import CostTable
from jaxspec.checkpointing import heads, mtp
from jaxspec.config import SpeculationConfig
from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.latent import LatentAttention
from jaxspec.models.layers import Shared, causal_attention, shared_lm_head
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_target
from jaxspec.request import SamplingParams
from jaxspec.runtime.results import Result
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from jaxspec.speculation.layouts import Batch
from jaxspec.tier import Tier

NEW, WIDTH = 24, 64
#: Families whose drafter is another kind than EAGLE-3; what of a family's fields is a row of docs/support.md.
DRAFTERS = {"deepseek_v3": "mtp", "glm4_moe": "mtp", "glm4_moe_lite": "mtp"}
#: Whose prompts are computed together, too: windows, sinks and experts; latent attention. With --exhaustive all.
TOGETHER = "gpt_oss", "deepseek_v3"
_ROWS = {"window": "sliding_window", "experts": "experts", "latent": "latent"}


#: Families whose every peculiarity another one has too.
_LESS = pytest.mark.exhaustive(
    "olmo3, phi3, gemma2, gpt_oss, deepseek_v3 and windows everywhere have what these have, or layers alone see it"
)
_LIKE_OTHERS = (
    "mistral", "ministral", "smollm3", "olmo2", "granite", "gemma3", "glm", "glm4", "mixtral", "qwen2_moe", "qwen3_moe",
    "deepseek_v2", "glm4_moe", "glm4_moe_lite", "minimax_m2", "seed_oss", "exaone4", "ernie4_5", "ernie4_5_moe",
    "olmoe", "dots1",
)  # fmt: skip


def case(family: str) -> Any:
    fields = FAMILY_FIELDS[family]
    shown = [row for row, field in _ROWS.items() if fields.get(field) is not None]
    covers = [pytest.mark.covers(*shown, kind=DRAFTERS.get(family, "eagle3"))] if shown else []
    return pytest.param(family, marks=[*covers, *([_LESS] if family in _LIKE_OTHERS else [])])


CASES = [case(family) for family in FAMILY_FIELDS]


def mtp_module(target: Any) -> MtpHead:
    """A random one with a layer like the target's last."""
    cfg = MtpConfig(mtp.as_module(heads.bare(target.config)), target.config.num_layers)
    head = MtpHead(cfg, Shared(target.embedding[...]), shared_lm_head(target), rngs=nnx.Rngs(5))
    assert isinstance(head.layer.attn, LatentAttention) == (target.config.latent is not None)
    assert isinstance(head.layer.mlp, MixtureOfExperts)
    return head


@pytest.mark.parametrize("family", CASES)
def test_drafts_change_nothing(family: str, bench: Any, tools: Any):
    """Texts and trees go over the ends of windows and pages."""
    target = tiny_target(2, **FAMILY_FIELDS[family])
    tier = Tier(3, 2, 7)
    speculation = SpeculationConfig(policy="static", depth=tier.depth, topk=tier.topk, num_nodes=tier.num_nodes)
    kind = DRAFTERS.get(family, "eagle3")
    head = mtp_module(target) if kind == "mtp" else tools.eagle3_head(target)
    own = type(bench)(target, {kind: head}, bench.kept, False)
    engine = own.build(
        kind, speculation, CostTable({(tier, 2): 1e-3}), batch_buckets=(2,), max_batch_size=2, max_seq_len=WIDTH,
        max_num_batched_tokens=16, variants=("greedy",), together=bench.exhaustive or family in TOGETHER,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 12, n).tolist() for n in (21, 5)]
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    outputs = tools.drive(engine, [(prompt, greedy) for prompt in prompts])

    graph, params = nnx.split(target)
    texts = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
    tokens = jnp.asarray([text + [0] * (WIDTH - len(text)) for text in texts], jnp.int32)

    @jax.jit
    def choices(params: Any, tokens_BN: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        positions = jnp.broadcast_to(jnp.arange(WIDTH)[None], tokens_BN.shape)
        return model.logits(model(tokens_BN, positions, causal_attention)[0]).argmax(-1)

    chosen = np.asarray(choices(params, tokens))
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.token_ids == chosen[i, len(prompt) - 1 : len(prompt) - 1 + NEW].tolist()
        assert len(set(output.token_ids)) > 3, "a text that repeats itself proves little"
    assert sum(output.metrics.accepted for output in outputs) > 0
    if (own := target.config.experts) is not None:
        # Of every layer at least what one token uses, at most what all do; nodes of a round do not all use the same.
        layers, rounds = len(own.layers), engine.stats.rounds
        assert own.per_token * layers * rounds < engine.stats.experts_touched <= own.count * layers * rounds
        # Rounds of no requests, by which costs are measured, touch more than one token's as well.
        trial = engine.runner.repeat(tier, 2, engine.runner.put(Batch.of(engine.runner.geo, 2).array), 1)
        assert Result.of(np.asarray(trial), 2).touched_R[0] > own.per_token * layers
    else:
        assert engine.stats.experts_touched == 0


@pytest.mark.covers("window", kind="ngram")
def test_pages_behind_every_window_serve_other_requests(bench: Any, tools: Any):
    """A window of 9 in every layer, pages of 8: texts of 50 tokens run together in a pool of nine pages."""
    target = tiny_target(2, **FAMILY_FIELDS["mistral"])
    own = type(bench)(target, {}, bench.kept, False)
    speculation = SpeculationConfig(policy="static", depth=2)
    engine = own.build(
        "ngram", speculation, CostTable({(Tier(2), 2): 1e-3}), batch_buckets=(2,), max_batch_size=2, max_seq_len=WIDTH,
        max_num_batched_tokens=16, variants=("sampled",), num_pages=9, together=False,
    )  # fmt: skip
    prompts = [[1, 2, 3, 4, 5] * 5, [7, 8, 7, 8, 7, 8]]
    work = [(p, SamplingParams(temperature=0, max_tokens=25 + 19 * i, ignore_eos=True)) for i, p in enumerate(prompts)]
    held: list[int] = []
    count = lambda step, ids: held.append(9 - engine.stats.free_pages - engine.stats.cached_pages)
    outputs = tools.drive(engine, work, on_step=count)
    assert engine.stats.preemptions == 0 and engine.scheduler.config.window == 9
    assert max(held) <= 8, "seven pages for each text, without windows"
    model = nnx.jit(lambda model, tokens_BN, at: model.logits(model(tokens_BN, at, causal_attention)[0]).argmax(-1))
    for (prompt, params), output in zip(work, outputs, strict=True):
        text = jnp.asarray([[*prompt, *output.token_ids]], jnp.int32)
        chosen = np.asarray(model(target, text, jnp.arange(text.shape[1])[None]))[0, len(prompt) - 1 : -1]
        assert output.token_ids == chosen.tolist() and len(output.token_ids) == params.max_tokens
