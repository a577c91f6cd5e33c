"""Configurations are checked once, where they enter; messages name the field and both values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.choosing import choose_policy
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.tier import PLAIN, Tier


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_speculative_tokens": 3},
            r"unknown arguments \['num_.*'\]; for 'num_speculative_tokens' say 'depth'; it ",
        ),
        ({"policy": 3}, r"policy must be 'adaptive', 'static', 'off', .*'survival', .* or a path, got 3"),
        ({"depth": -1}, r"depth must be an int in \[0, 32\], got -1"),
        ({"depth": 33}, r"depth must be an int in \[0, 32\], got 33"),
        ({"depth": True}, r"depth must be an int in \[0, 32\], got True"),
        ({"depth": 2.0}, r"depth must be an int in \[0, 32\], got 2.0"),
        ({"topk": 0}, r"topk must be an int in \[1, 64\], got 0"),
        ({"topk": 65}, r"topk must be an int in \[1, 64\], got 65"),
        ({"num_nodes": 0}, r"num_nodes must be an int in \[1, 1024\], got 0"),
        ({"verification": "lossy"}, r"verification must be one of \('coupled', 'rejection', 'typical'\), got 'lossy'"),
        ({"typical_threshold": 0}, r"typical_threshold must be a number in \(0, 1\], got 0"),
        ({"typical_threshold": 1.5}, r"typical_threshold must be a number in \(0, 1\], got 1.5"),
        ({"typical_alpha": float("nan")}, r"typical_alpha must be a number in \(0, 1\], got nan"),
        ({"typical_alpha": True}, r"typical_alpha must be a number in \(0, 1\], got True"),
        ({"ngram_min": 0}, r"ngram_min must be an int in \[1, 16\], got 0"),
        ({"ngram_min": 5}, r"ngram_min 5 exceeds ngram_max 4"),
        ({"hybrid": True, "policy": "off"}, r"hybrid True is for policies that draft, got policy 'off'"),
        (
            {"objective": "step", "depth": 3},
            r"objective 'step' .* only the policies \['adaptive', .*got policy 'static'",
        ),
        ({"objective": "step", "policy": "heuristic"}, r"objective 'step' .*got policy 'heuristic'"),
        (
            {"candidate_budgets": (1,), "candidate_steps": (0, 1)},
            r"\(1,\) need a tier of at least 2 .* got \['chain-1'\]",
        ),
        ({"hybrid": 1}, r"hybrid must be True or False, got 1"),
        ({"hybrid": True, "verification": "rejection"}, r"hybrid needs verification 'coupled', got 'rejection'"),
        ({"draft_quantization": "int2"}, r"draft_quantization must be one of .'auto', 'none', 'int8', .*, got 'int2'"),
        ({"hybrid_depth": 3}, r"hybrid_depth 3 is for hybrids, got hybrid False"),
        ({"hybrid": True, "hybrid_depth": 0}, r"hybrid_depth must be an int in \[1, 32\], got 0"),
        ({"suffix_corpus_tokens": 9}, r"suffix_corpus_tokens must be 0 or at least 64, got 9"),
        ({"suffix_corpus_tokens": 512}, r"the room for suffix_corpus_responses or .* got 512, False and 0 files"),
        ({"suffix_corpus_responses": True}, r"suffix_corpus_tokens is the room .* got 0, True and 0 files"),
        ({"suffix_corpus_files": [3]}, r"suffix_corpus_files must hold paths, got \[3\]"),
        ({"candidate_steps": ()}, r"candidate_steps must hold at least one depth, got \(\)"),
        ({"candidate_steps": (1, -1)}, r"candidate_steps must be an int in \[0, 32\], got -1"),
        ({"candidate_steps": 5}, r"candidate_steps .*got 5"),
        ({"candidate_steps": "13"}, r"candidate_steps .*got '1"),
        ({"tiers": 5}, r"tiers .*got 5"),
        ({"tiers": ()}, r"tiers must hold at least one Tier, got \(\)"),
        ({"tiers": ("chain-3",)}, r"tiers must hold at least one Tier, got \('chain-3',\)"),
        ({"tiers": (Tier(33),)}, r"tiers may be 32 deep, got 33"),
        ({"tiers": (Tier(3),), "depth": 3}, r"tiers \['chain-3'\] .*'depth': 3"),
        ({"candidate_steps": (1,), "depth": 3}, r"candidate_steps .* depth 3"),
        ({"depth": 3, "budget": 0}, r"budget must be a positive number of tokens a request, got 0"),
        ({"depth": 3, "budget": float("inf")}, r"budget must be a positive number of tokens a request, got inf"),
        ({"depth": 3, "budget": True}, r"budget must be a positive number of tokens a request, got True"),
        ({"budget": 2}, r"budget 2 belongs to the static policy, got policy 'adaptive'"),
        ({"depth": 3, "policy": "off", "budget": 2}, r"budget 2 belongs to the static policy, got policy 'off'"),
        ({"depth": 0, "budget": 2}, r"budget 2 is for drafted tokens, got depth 0"),
        *(
            ({"depth": 3, "budget": 2, "verification": rule}, f"budget 2 needs 'coupled' verification.* got '{rule}'")
            for rule in ("rejection", "typical")
        ),
        (
            {"depth": 3, "topk": 2, "num_nodes": 3},
            r"num_nodes must lie between depth \+ 1 = 4 and 11 for topk 2, got 3",
        ),
        (
            {"depth": 3, "topk": 2, "num_nodes": 12},
            r"num_nodes must lie between depth \+ 1 = 4 and 11 for topk 2, got 12",
        ),
        ({"num_nodes": 5}, r"num_nodes 5 is for trees or a static tier, got topk 1 without depth"),
        ({"depth": 3, "num_nodes": 5}, r"num_nodes must lie between depth \+ 1 = 4 and 4 for topk 1, got 5"),
    ],
)
def test_speculation_refusals(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"hybrid": True}, {"suffix_corpus_tokens": 512, "suffix_corpus_responses": True}, {"depth": 3},
        {"candidate_steps": (0, 2)}, {"tiers": (Tier(2),)}, {"topk": 2}, {"candidate_budgets": (2.0,)},
        {"num_speculative_tokens_per_batch_size": ((1, 4, 2),), "policy": "schedule"},
        {"budget": 2.0, "policy": "static"},
    ],
)  # fmt: skip
def test_settings_of_drafters_are_refused_without_one(fields: dict[str, Any]):
    with pytest.raises(ValueError, match=rf"\.{next(iter(fields))} .* needs a drafter, got drafter 'none'"):
        choose_policy(SpeculationConfig(**fields), (1,), False, False, default_steps=(0, 1))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"depth": 0},
        {"depth": 3, "policy": "off"},
        {"policy": "static"},
        {"candidate_steps": (0,)},
        {"tiers": (PLAIN,)},
    ],
)
def test_plain_decoding_needs_no_drafter(fields: dict[str, Any]):
    """Nor does a policy that never drafts, whatever it is given besides."""
    assert set(choose_policy(SpeculationConfig(**fields), (1,), False, False, default_steps=(0, 1)).reachable) == {
        PLAIN
    }


def test_vllms_names_of_prompt_lookup_are_told():
    with pytest.raises(ValueError, match="for 'prompt_lookup_max' say 'ngram_max'"):
        SpeculationConfig.of({"prompt_lookup_max": 3})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_batch_size": 0}, r"max_batch_size must be an int in \[1, 1024\], got 0"),
        ({"max_seq_len": 1}, r"max_seq_len must be an int of at least 2, got 1"),
        ({"page_size": 0}, r"page_size must be an int in \[1, 1024\], got 0"),
        ({"num_pages": 0}, r"num_pages must be an int of at least 1, got 0"),
        (
            {"prefill_chunk": 64, "max_num_batched_tokens": 32},
            r"max_num_batched_tokens must be .* prefill_chunk 64, got 32",
        ),
        ({"prefill_chunk": 0}, r"prefill_chunk must be an int of at least 1, got 0"),
        ({"seed": 2**32}, r"seed must be an int in \[0, 4294967295\], got 4294967296"),
        (
            {"dtype": "float16"},
            r"dtype must be one of \['float32', 'bfloat16', None\], got 'float16'; say 'bfloat16', .* or 'float32'$",
        ),
        ({"dtype": "auto"}, r"dtype must be .*got 'auto'; say nothing: that is the default, by the device"),
        (
            {"dtype": np.float16},
            r"dtype must be .*got <class 'numpy.float16'>; say 'bfloat16', which takes as much memory, or",
        ),
        ({"dtype": "torch.bfloat16"}, r"dtype must be .*got 'torch.bfloat16'; say 'bfloat16'$"),
        ({"dtype": "int8"}, r"dtype must be .*got 'int8'$"),
        ({"batch_buckets": 5}, r"batch_buckets .*got 5"),
        ({"batch_buckets": (1, 9)}, r"batch_buckets must be an int in \[1, 8\], got 9"),
        ({"batch_buckets": (1, 4)}, r"batch_buckets must end at max_batch_size 8, got \(1, 4\)"),
        ({"kernels": "cuda"}, r"kernels must be one of \(None, 'reference', 'tpu', 'gpu', 'interpret'\), got 'cuda'"),
        ({"tensor_parallel": 0}, "tensor_parallel must be .*1.*got 0"),
        (
            {"tensor_parallel": 4, "draft_tensor_parallel": 2},
            "draft_tensor_parallel must be 'auto', 1 or tensor_parallel 4, got 2",
        ),
        ({"draft_tensor_parallel": True}, "draft_tensor_parallel must be .*1, got True"),
        ({"variants": ()}, r"variants must hold 'greedy', 'sampled' or both, or be None, got \(\)"),
        ({"variants": ("fast",)}, r"variants must hold 'greedy', 'sampled' or both, or be None, got \('fast',\)"),
        ({"batch_invariant": "yes"}, r"batch_invariant must be True or False, got 'yes'"),
        ({"enable_prefix_caching": "no"}, r"enable_prefix_caching .*got 'no'"),
        ({"memory_fraction": 0}, r"memory_fraction must be a number in \(0, 1\], got 0"),
        ({"memory_fraction": 1.5}, r"memory_fraction must be a number in \(0, 1\], got 1.5"),
        ({"skip_tokenizer_init": 1}, r"skip_tokenizer_init must be True or False, got 1"),
        (
            {"structured_output": True, "skip_tokenizer_init": True},
            "structured_output needs a tokenizer, and skip_tokenizer_init=True reads none",
        ),
        ({"compile_cache": 3}, r"compile_cache .*got 3"),
        ({"keep_learnt": None}, r"keep_learnt must be True, False or a path, got None"),
        ({"rounds_per_dispatch": 0}, r"rounds_per_dispatch must be 'auto' or an int in \[1, 16\], got 0"),
        ({"rounds_per_dispatch": "many"}, r"rounds_per_dispatch must be 'auto' or an int in \[1, 16\], got 'many'"),
        ({"rounds_per_dispatch": True}, r"rounds_per_dispatch must be 'auto' or an int in \[1, 16\], got True"),
        ({"mixed_chunk": -1}, r"mixed_chunk must be 'auto' or an int in \[0, 1024\], got -1"),
        ({"mixed_chunk": True}, r"mixed_chunk must be 'auto' or an int in \[0, 1024\], got True"),
        ({"profile": 3}, r"profile must be None or a path, got 3"),
    ],
)
def test_engine_refusals(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=rf"EngineConfig\.{message}"):
        EngineConfig(**fields)


def test_policy_defaults():
    assert SpeculationConfig().resolved_policy == "adaptive"
    assert SpeculationConfig(depth=3).resolved_policy == "static"
    assert SpeculationConfig(policy="off", depth=3).resolved_policy == "off"
    assert SpeculationConfig(policy=Path("a.json")).resolved_policy == "a.json"
    assert SpeculationConfig(candidate_steps=[5, 1, 5]).candidate_steps == (1, 5)


def test_typical_defaults_are_medusas():
    config = SpeculationConfig(depth=3, verification="typical")
    assert (config.typical_threshold, config.typical_alpha) == (0.09, 0.3)
    assert SpeculationConfig().verification == "coupled", "lossy verification is never the default"


def test_tiers_of_a_configuration():
    assert SpeculationConfig(depth=3).tier(3) == Tier(3)
    assert SpeculationConfig(depth=0).tier(0) == PLAIN
    assert SpeculationConfig(depth=3, topk=2, num_nodes=7).tier(3) == Tier(3, 2, 7)
    # Candidates of an adaptive set share num_nodes as far as their shapes allow.
    several = SpeculationConfig(topk=2, num_nodes=7, candidate_steps=(1, 3, 7))
    assert [several.tier(d) for d in (0, 1, 3, 7)] == [PLAIN, Tier(1, 2, 3), Tier(3, 2, 7), Tier(7, 2, 8)]


@pytest.mark.parametrize(
    ("depth", "topk", "nodes"),
    [(5, 4, 8), (4, 4, 8), (3, 2, 4), (7, 2, 8), (1, 8, 9), (1, 2, 3), (6, 10, 20), (2, 64, 128)],
)
def test_trees_of_no_named_size(depth: int, topk: int, nodes: int):
    """SGLang's ratio, two nodes a candidate, as far as a tree of this shape needs and can make."""
    assert SpeculationConfig(depth=depth, topk=topk).tier(depth) == Tier(depth, topk, nodes)
    assert SpeculationConfig(topk=topk, candidate_steps=(depth,)).tier(depth) == Tier(depth, topk, nodes)


def test_dictionaries_become_configurations():
    assert SpeculationConfig.of(None) == SpeculationConfig()
    config = SpeculationConfig(depth=2)
    assert SpeculationConfig.of(config) is config and SpeculationConfig.of({"depth": 2}) == config
    with pytest.raises(ValueError, match=r"\['dept'\]; for 'dept' say 'depth'; it has \['budget', 'candidate_budgets'"):
        SpeculationConfig.of({"dept": 2})
    with pytest.raises(ValueError, match="must be a SpeculationConfig or a dict, got 3"):
        SpeculationConfig.of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'eagle3'; a drafter is an argument of its own, drafter=$"):
        SpeculationConfig.of("eagle3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "buckets"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))]
)
def test_buckets_end_at_the_largest_batch(size: int, buckets: tuple[int, ...]):
    assert EngineConfig(max_batch_size=size).buckets == buckets
    assert EngineConfig(max_batch_size=size, batch_buckets=(size, 1)).buckets == tuple(sorted({1, size}))


def test_named_tiers_hold_plain_decoding():
    assert SpeculationConfig(tiers=[Tier(3), Tier(2, 2, 5), Tier(3)]).tiers == (PLAIN, Tier(2, 2, 5), Tier(3))
