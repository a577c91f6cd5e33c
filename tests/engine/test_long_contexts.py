"""Drafts stay right however long the text is: of a drafter with the target's own weights every one is accepted.

Of vLLM #40898 (sliding layers of a drafter run as full ones: nothing accepted beyond 2k), TensorRT-LLM #16888 (a pause)
and llama.cpp #25792 (rotary positions). Texts of every length share the batch, and windows end inside all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxspec.assemble import assemble
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.loading import Drafting, bind_drafter
from jaxspec.models.tiny import tiny_target
from jaxspec.request import SamplingParams
from jaxspec.tier import PLAIN, Tier

PAUSE = [*[Tier(3)] * 2, *[PLAIN] * 5, *[Tier(3)] * 40]


def own_draft(longest: int) -> Engine:
    """A target that is its own draft model, with sliding layers, for texts of up to so many tokens."""
    window = dict(family="ministral", sliding_window=500, sliding_layers=(1,))
    target = tiny_target(0, max_position_embeddings=longest, eos_token_ids=(12,), **window)  # type: ignore[arg-type]
    config = EngineConfig(
        max_batch_size=3, max_seq_len=longest, page_size=64, prefill_chunk=1024, max_num_batched_tokens=1024,
        num_pages=2 * longest // 64, batch_buckets=(3,), variants=("sampled",), warmup="eager", compile_cache=False,
    )  # fmt: skip
    drafting = Drafting(lambda geo: bind_drafter("draft_model", target, geo), True, name="draft_model")
    return assemble(target, None, SpeculationConfig(tiers=(PLAIN, Tier(3))), config, drafter=drafting, progress=False)


@pytest.mark.exhaustive("beyond 2k and 16k of context; test_draft_caches has pauses and windows within 120 tokens")
@pytest.mark.parametrize(
    "longest",
    [2100, pytest.param(16600, marks=pytest.mark.covers("long", kind="draft_model"))],
    ids=str,
)
def test_every_draft_is_accepted_at_any_position(tools: Any, longest: int):
    """Before and after a pause, greedy and sampled."""
    engine, rng = own_draft(longest + 128), np.random.default_rng(0)
    script = tools.script(*PAUSE)
    engine.use_policy(script)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    lengths = (longest, 5, longest // 2)
    work = [
        (rng.integers(0, 12, n).tolist(), dataclasses.replace(params, temperature=0.7 * (n == 5), seed=3))
        for n in lengths
    ]
    outputs = tools.drive(engine, work)
    assert [len(output.token_ids) for output in outputs] == [48] * 3
    for output in outputs:  # the last round may end anywhere, and the script may pause
        histogram = output.metrics.acceptance_histogram
        assert sum(histogram[1:3]) <= 1 and histogram[3] >= 8, (output.metrics, histogram)
    drafted = [stats for stats in script.heard if stats.tier.depth]
    assert {count for stats in drafted[:-6] for count in stats.num_accepted} == {3}
