"""A quantised target, with a drafter in few bits or whole: the tokens of plain decoding on the same weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import quick
from flax import nnx

from jaxspec import LLM, SamplingParams
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.checkpointing import eagle3, hf
from jaxspec.checkpointing.rounding import FORMATS, Format
from jaxspec.config import SpeculationConfig
from jaxspec.drafters import successor
from jaxspec.models.quantised import Quantised
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_target
from jaxspec.quantize import quantise_directory
from jaxspec.request import RequestOutput
from jaxspec.runtime.sharding import check_four_bits
from jaxspec.speculation.drafters.eagle3_head import Eagle3Head
from jaxspec.tier import PLAIN, Tier

#: Kernels of which 64 divides the columns of all but the head, which stays as it is.
SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16)
TIERS = (Tier(3, 2, 7),)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [9, 4, 11], list(range(12)) * 2]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=6, seed=4, max_tokens=24, repetition_penalty=1.2, ignore_eos=True),
]
FEW = {
    **FORMATS, "int4": Format("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=32)),
}  # fmt: skip
COVERED = "quantised", "directory"
MORE = pytest.mark.exhaustive("other formats and int8 activations")


@pytest.fixture(scope="module")
def plain_directory(tmp_path_factory: pytest.TempPathFactory, tools: Any) -> Path:
    """The target as it was before, and an EAGLE-3 head beside it."""
    base = tmp_path_factory.mktemp("quantised")
    target = tiny_target(0, bos_token_id=None, **SIZES)
    hf.save_model(target, base / "plain", dtype=jnp.float32)
    # Of widths that are rounded, too.
    config = dataclasses.replace(tools.eagle3_head(target).config, hidden_size=64, intermediate_size=64)
    head = tools.randomised(Eagle3Head(config, rngs=nnx.Rngs(0)), 3)
    head.target_ids.set_value(tools.eagle3_head(target).target_ids[...])
    eagle3.save_head(head, base / "eagle3", target.config, dtype=jnp.float32)
    return base / "plain"


@pytest.mark.covers(*COVERED, kind="eagle3")
@pytest.mark.parametrize(
    ("name", "drafts", "options"),
    [
        pytest.param("int4", "int8", {}, marks=pytest.mark.covers(*COVERED, "few_bit_drafts", kind="eagle3")),
        pytest.param("int8", "none", {}, marks=MORE),
        pytest.param("fp8", "fp8", {}, marks=MORE),
        pytest.param("int8", "none", dict(int8_activations=True), marks=MORE),
    ],
)
def test_speculation_gives_the_tokens_of_plain_decoding(
    name: str, drafts: Any, options: dict[str, Any], plain_directory: Path, tmp_path: Path, kept_executables: Path
) -> None:
    quantise_directory(plain_directory, tmp_path / "target", FEW[name])
    assert isinstance(hf.load_model(tmp_path / "target").layers[1].attn.qkv.kernel[...], Quantised)  # pyright: ignore[reportAttributeAccessIssue]
    speculation = SpeculationConfig(tiers=TIERS, draft_quantization=drafts)
    with quick.prompts_alone():
        made = LLM(
            tmp_path / "target", plain_directory.parent / "eagle3", speculation,
            max_batch_size=3, max_seq_len=60, progress=False, page_size=8, variants=("sampled",), batch_buckets=(3,),
            warmup="eager", prefill_chunk=16, skip_tokenizer_init=True, compile_cache=kept_executables,
            enable_prefix_caching=False, **options,
        )  # fmt: skip
    with made as llm:

        def generate(tier: Tier) -> list[RequestOutput]:
            llm.use_policy(StaticPolicy(tier))
            return llm.generate(PROMPTS, PARAMS, use_tqdm=False)

        plain = [output.token_ids for output in generate(PLAIN)]
        assert all(len(set(tokens)) > 3 for tokens in plain), "a model that repeats itself proves little"
        for tier in TIERS:
            outputs = generate(tier)
            assert [output.token_ids for output in outputs] == plain
            assert sum(output.metrics.accepted for output in outputs) > 0
        assert llm.stats.compilations_after_warmup == 0


def test_two_devices_share_a_quantised_mixture(tmp_path: Path, kept_executables: Path) -> None:
    """Each has its part of every expert, and the tokens are those of one; a request at a time: fewer executables."""
    hf.save_model(tiny_target(0, **FAMILY_FIELDS["qwen3_moe"], vocab_size=64), tmp_path / "whole", dtype=jnp.float32)
    quantise_directory(tmp_path / "whole", tmp_path / "int8", FEW["int8"])
    found = []
    for devices in (1, 2):
        with LLM(
            tmp_path / "int8", "ngram", SpeculationConfig(tiers=(Tier(3),)), max_batch_size=1, max_seq_len=60,
            progress=False, page_size=8, variants=("sampled",), batch_buckets=(1,), warmup="eager", prefill_chunk=16,
            skip_tokenizer_init=True, compile_cache=kept_executables, tensor_parallel=devices,
        ) as llm:  # fmt: skip
            found.append([output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)])
    assert found[0] == found[1]


def test_four_bits_on_several_cpu_devices_are_refused_where_jax_does_not_take_them() -> None:
    target = tiny_target(0)
    kernel = target.layers[0].mlp.down.kernel
    kernel.set_value(Quantised(jnp.zeros(kernel.shape, jnp.int4), jnp.ones((1, kernel.shape[1]))))
    check_four_bits(target, 1)
    check_four_bits(tiny_target(0), 2)
    if jax.__version_info__ >= (0, 12):
        return check_four_bits(target, 2)
    with pytest.raises(ValueError, match="tensor_parallel=2 on CPUs does not serve weights of 4 bits with JAX 0"):
        check_four_bits(target, 2)


def test_a_draft_model_in_few_bits_is_noted_by_all_its_arrays() -> None:
    draft = tiny_target(0)
    kernel = draft.layers[0].mlp.down.kernel
    d_in, d_out = kernel.shape
    kernel.set_value(Quantised(jnp.zeros((d_in, d_out), jnp.int8), jnp.ones((1, d_out))))
    noted = successor._shapes(draft)
    assert noted["layers.0.mlp.down.kernel"] == f"Param int8[{d_in}, {d_out}] float32[1, {d_out}]"
    assert noted["embedding"].startswith("Param float32[")
