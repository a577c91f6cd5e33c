"""The shipped checkpoints: the same tokens with every drafter, and drafts that are worth having.

Each in a process of its own, which runs this file: there the engine is compiled as users compile it, not as tests are.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.config import SpeculationConfig
from jaxspec.llm import LLM
from jaxspec.request import RequestOutput, SamplingParams
from jaxspec.resolve import demo_directory
from jaxspec.tier import PLAIN, Tier

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = (
    "def read_lines(path):\n    ",
    "class Connection:\n    def __init__(self, host, port):\n        ",
    "import unittest\n\nclass TestCase(",
    "And the king said to the people, ",
)
TREE = Tier(3, 2, 8)
TIERS = {"eagle3": (TREE,), "eagle3 chains": (Tier(5),), "draft_model": (Tier(5),), "ngram": (Tier(4),)}


def generate(llm: LLM, tier: Tier, params: list[SamplingParams]) -> list[RequestOutput]:
    llm.use_policy(StaticPolicy(tier))
    return llm.generate(PROMPTS, params, use_tqdm=False)


MORE = pytest.mark.exhaustive("every shipped drafter, and chains")


@pytest.mark.parametrize("case", ["eagle3", *(pytest.param(case, marks=MORE) for case in list(TIERS)[1:])])
def test_same_tokens_as_plain_decoding(case: str):
    """Greedy and seeded rows in one batch; several pages of text; the ring, the window and the catch-up in use."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    if kept := jax.config.values["jax_compilation_cache_dir"]:
        options = {"MIN_COMPILE_TIME_SECS": "0", "ENABLE_XLA_CACHES": "none"}
        env |= {f"JAX_PERSISTENT_CACHE_{name}": value for name, value in options.items()}
        env["JAX_COMPILATION_CACHE_DIR"] = kept
    command = [sys.executable, "-m", "tests.engine.test_demo_models", case]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]


def check(case: str) -> None:
    """What the test's process does."""
    from tests import quick

    drafter = case.split()[0]
    params = [
        SamplingParams(temperature=0, max_tokens=96, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=96, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=96, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=20, min_p=0.02, seed=2, max_tokens=96, ignore_eos=True),
    ]
    with quick.prompts_alone() if case == "eagle3" else contextlib.nullcontext():
        llm = LLM(
            "demo", drafter, SpeculationConfig(tiers=TIERS[case]), max_batch_size=4, max_seq_len=256, progress=False,
            batch_buckets=(4,), variants=("sampled",), compile_cache=False, enable_prefix_caching=False,
            prefill_chunk=16, warmup="eager",
        )  # fmt: skip
    expected = [o.token_ids for o in generate(llm, PLAIN, params)]
    for tier in TIERS[case]:
        outputs = generate(llm, tier, params)
        assert [o.token_ids for o in outputs] == expected, tier
        if drafter != "ngram":
            lengths = [o.metrics.mean_accepted_length for o in outputs]
            assert sum(lengths) / len(lengths) > 1.6, f"drafts are worth having, sampled rows included: {lengths}"
    assert llm.stats.compilations_after_warmup == 0


def test_shipped_files_stay_small():
    files = [path for path in demo_directory().rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert sum(path.stat().st_size for path in files) < 90e6


if __name__ == "__main__":
    check(sys.argv[1])
