"""The shipped checkpoints: the same tokens with every drafter, and drafts that are worth having."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.assemble import demo_directory
from jaxspec.config import SpeculationConfig
from jaxspec.llm import LLM
from jaxspec.request import RequestOutput, SamplingParams
from jaxspec.tier import PLAIN, Tier

PROMPTS = (
    "def read_lines(path):\n    ",
    "class Connection:\n    def __init__(self, host, port):\n        ",
    "import unittest\n\nclass TestCase(",
    "And the king said to the people, ",
)
TIERS = {"eagle3": (Tier(5), Tier(3, 2, 8)), "draft_model": (Tier(5),), "ngram": (Tier(4),)}


def generate(llm: LLM, tier: Tier, params: list[SamplingParams]) -> list[RequestOutput]:
    llm.use_policy(StaticPolicy(tier))
    return llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", TIERS)
def test_same_tokens_as_plain_decoding(drafter: str, tmp_path: Path):
    """Greedy and seeded rows in one batch; several pages of text; the ring, the window and the catch-up in use."""
    params = [
        SamplingParams(temperature=0, max_tokens=96, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=96, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=96, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=20, min_p=0.02, seed=2, max_tokens=96, ignore_eos=True),
    ]
    llm = LLM(
        "demo", drafter, SpeculationConfig(tiers=TIERS[drafter]), max_batch_size=4, max_seq_len=256, progress=False,
        batch_buckets=(4,), variants=("sampled",), compile_cache=False, enable_prefix_caching=False,
    )  # fmt: skip
    expected = [o.token_ids for o in generate(llm, PLAIN, params)]
    for tier in TIERS[drafter]:
        outputs = generate(llm, tier, params)
        assert [o.token_ids for o in outputs] == expected, tier
        if drafter != "ngram":
            lengths = [o.metrics.mean_accepted_length for o in outputs]
            assert sum(lengths) / len(lengths) > 1.6, f"drafts are worth having, sampled rows included: {lengths}"
    assert llm.stats.compilations_after_warmup == 0


def test_shipped_files_stay_small():
    files = [path for path in demo_directory().rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert sum(path.stat().st_size for path in files) < 64e6
