"""A new family is one file and a line of the registry: murmur_family.py, which only this test knows, works whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import murmur_family
import numpy as np
import pytest
from flax import nnx
from murmur_family import Murmur, MurmurConfig
from tokenizers import AddedToken, Tokenizer, decoders, models

from jaxspec import LLM, SamplingParams
from jaxspec.cache import TreeKV, init_pages
from jaxspec.checkpointing import eagle3, hf
from jaxspec.models import registry
from jaxspec.models.base import AttentionOptions
from jaxspec.models.layers import causal_attention
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.sharded import SPLIT
from jaxspec.runtime.sharding import check_divides
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.train.objective.attention import UnrolledAttention, packed_attention

ROOT = Path(__file__).resolve().parents[2]
V, EOS = 16, 15
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [9, 4, 11], list(range(14))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=6, seed=4, max_tokens=24, repetition_penalty=1.2),
]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "murmur", murmur_family.FAMILY)


def config(**overrides: Any) -> MurmurConfig:
    sizes: dict[str, Any] = dict(
        vocab_size=V, hidden_size=32, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8,
        max_position_embeddings=64, eos_token_ids=(EOS,), score_cap=6.0, window=11,
    )  # fmt: skip
    return MurmurConfig("murmur", **{**sizes, **overrides})


def murmur(seed: int = 0, **overrides: Any) -> Murmur:
    return Murmur(config(**overrides), dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(params=seed))


def letters() -> Tokenizer:
    made = Tokenizer(models.BPE({c: i for i, c in enumerate([*"abcdefghijklmno", "</s>"])}, []))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and beside it a smaller draft model and an EAGLE-3 head."""
    base = tmp_path_factory.mktemp("murmur")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FAMILIES, "murmur", murmur_family.FAMILY)
        target = murmur()
        hf.save_model(target, base / "target", tokenizer=letters(), dtype=jnp.float32)
        hf.save_model(murmur(1, num_layers=1, tie_word_embeddings=True), base / "draft", dtype=jnp.float32)
        head = Eagle3Head(Eagle3Config(16, 32, 24, 2, 2, 8, V, 12, (0, 1, 2)), rngs=nnx.Rngs(0))
        eagle3.save_head(head, base / "eagle3", target.config, dtype=jnp.float32)
    return base


def generate(directories: Path, drafter: str, speculation: Any = None, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of each prompt, and how many drafts were accepted."""
    with LLM(
        directories / "target", drafter, speculation or {"depth": 2}, max_batch_size=3, max_seq_len=60, progress=False,
        page_size=8, prefill_chunk=16, variants=("sampled",), batch_buckets=(3,), compile_cache=False, warmup="eager",
        **options,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, PARAMS)
    return [o.token_ids for o in outputs], sum(o.metrics.accepted for o in outputs)


@pytest.fixture(scope="module")
def plain(directories: Path) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FAMILIES, "murmur", murmur_family.FAMILY)
        return generate(directories, "none", {"policy": "off"})[0]


def states(model: Any, attend: Callable[..., jax.Array] = causal_attention) -> tuple[jax.Array, jax.Array | None]:
    tokens_BN = jnp.asarray([PROMPTS[0]], jnp.int32)
    return jax.jit(lambda: model(tokens_BN, jnp.arange(tokens_BN.shape[1])[None, :], attend, (0, 2, 3)))()


@pytest.mark.parametrize("tied", [False, True])
def test_a_directory_is_read_as_it_was_written(tied: bool, tmp_path: Path) -> None:
    model = murmur(2, tie_word_embeddings=tied, score_cap=None)
    hf.save_model(model, tmp_path, dtype=jnp.float32)
    back = hf.load_model(tmp_path)
    assert isinstance(back, Murmur) and back.config == model.config
    for a, b in zip(states(model), states(back), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    tensors = hf.named_tensors(registry.weights(back), jnp.float32)
    assert tensors["1.tell.values.w"].shape == (32, 32) and tensors["places"].shape == (66, 32)
    assert not any("layers" in name or "embed" in name for name in tensors)


def test_a_copy_of_a_tied_table_must_be_the_same(tmp_path: Path) -> None:
    hf.save_model(murmur(tie_word_embeddings=True), tmp_path, dtype=jnp.float32)
    tensors = hf.named_tensors(registry.weights(hf.load_model(tmp_path)), jnp.float32)
    hf.write_safetensors(tmp_path / hf.WEIGHTS, {**tensors, "say.w": tensors["words"]})
    hf.load_model(tmp_path)
    hf.write_safetensors(tmp_path / hf.WEIGHTS, {**tensors, "say.w": tensors["words"] + 1})
    with pytest.raises(ValueError, match=r"'say\.w' differs from 'words'"):
        hf.load_model(tmp_path)


LIKE = pytest.mark.exhaustive("the target as its own draft, and the smaller one on two devices, have what these have")


@pytest.mark.parametrize(
    "drafter", [*(pytest.param(name, marks=LIKE) for name in ("ngram", "draft_model")), "eagle3", "target"]
)
def test_speculation_gives_the_tokens_of_plain_decoding(
    drafter: str, directories: Path, plain: list[list[int]]
) -> None:
    name = str(directories / "target") if drafter == "target" else drafter
    tokens, accepted = generate(directories, name)
    assert tokens == plain
    assert all(len(set(t)) > 3 for t in plain), "a model that repeats itself proves little"
    assert accepted > (30 if drafter == "target" else 0)


def test_two_devices_give_the_tokens_of_one(directories: Path, plain: list[list[int]]) -> None:
    tokens, _ = generate(directories, "draft_model", tensor_parallel=2)
    assert tokens == plain
    split = tensor_parallel(murmur(), 2)
    assert {split.ears[0].tell.shift.get_metadata(SPLIT), split.minds[0].narrow.kernel.get_metadata(SPLIT)} == {0}
    assert split.ears[0].tell.kernel.get_metadata(SPLIT) == 1


def test_what_devices_cannot_divide_is_refused(directories: Path) -> None:
    with pytest.raises(ValueError, match="tensor_parallel must divide the target's num_heads 4, got 3"):
        generate(directories, "ngram", tensor_parallel=3)
    check_divides(config(num_heads=6, num_kv_heads=6, hidden_size=48, vocab_size=18), 3)
    with pytest.raises(ValueError, match="vocab_size 16, got 3"):
        check_divides(config(num_heads=6, num_kv_heads=6, hidden_size=48), 3)


def paged_attention() -> Callable[..., jax.Array]:
    tree = jnp.tril(jnp.ones((8, 8), bool))[None]
    none = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32)
    return TreeKV(init_pages(2, 1, 4, 8, 16, jnp.dtype(jnp.float32)), *none, tree, 1).attend


def test_what_attention_lacks_is_refused_by_name() -> None:
    q, unrolled = jnp.zeros((1, 8, 4, 8)), UnrolledAttention(jnp.ones((1, 8), jnp.int32))
    with pytest.raises(ValueError, match=r"training's attention does not implement window=3, sinks_H"):
        unrolled(0, q, q, q, AttentionOptions(window=3, sinks_H=jnp.zeros(4)))


@pytest.mark.parametrize(
    ("window", "cap", "sinks"), [(None, None, False), (3, 6.0, False), (None, 6.0, True), (3, None, True)]
)
def test_every_attention_honours_what_it_is_asked(window: int | None, cap: float | None, sinks: bool) -> None:
    """Against numpy: a query at p sees keys above p - window up to its own."""
    q, k, v = (np.asarray(jax.random.normal(jax.random.key(i), (1, 8, 4, 8))) for i in range(3))
    scores = np.einsum("bnhc,bmhc->bhnm", q, k) * 0.3
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    apart = np.arange(8)[:, None] - np.arange(8)[None]
    scores = np.where((apart >= 0) & (apart < (window or 8)), scores, -np.inf)
    sinks_H = np.asarray([-30.0, 0.5, 2.0, 20.0], np.float32)
    weights = np.exp(scores - 20.0)
    total = weights.sum(-1, keepdims=True) + (np.exp(sinks_H - 20.0)[None, :, None, None] if sinks else 0.0)
    expected = np.einsum("bhnm,bmhc->bnhc", weights / total, v)
    options = AttentionOptions(window, cap, 0.3, jnp.asarray(sinks_H) if sinks else None)
    unmasked = TreeKV(
        init_pages(1, 1, 4, 8, 16, jnp.dtype(jnp.float32)), jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32),
        None, 1,
    )  # fmt: skip
    packed = packed_attention(jnp.ones((1, 8), jnp.int32), 4)
    for attend in (causal_attention, paged_attention(), unmasked.attend, packed):
        out = jax.jit(lambda q, k, v, attend=attend: attend(0, q, k, v, options))(q, k, v)
        np.testing.assert_allclose(np.asarray(out), expected, atol=1e-5)


def test_sinks_are_refused_by_name_where_they_are_traced() -> None:
    refuse = lambda sinks_H: AttentionOptions(sinks_H=sinks_H).refuse("this callee")
    with pytest.raises(ValueError, match="this callee does not implement sinks_H"):
        jax.jit(refuse)(jnp.zeros(4))


def test_a_paged_pool_gives_what_causal_attention_gives() -> None:
    model = murmur(window=3)
    for a, b in zip(states(model), states(model, paged_attention()), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)


def test_a_family_is_one_file_and_one_line() -> None:
    sources = [p for part in ("jaxspec", "serve", "pallas_kernels") for p in sorted((ROOT / part).rglob("*.py"))]
    naming = lambda name: {p.relative_to(ROOT).as_posix() for p in sources if re.search(name, p.read_text(), re.M)}
    assert naming(r"\"murmur\"|murmur_|Murmur[A-Z]") == set()
    heads = {
        "jaxspec/checkpointing/heads.py",
        "jaxspec/checkpointing/mtp.py",
    }  # formats that ask for its layers by name
    assert naming(r"import.*\bqwen2\b|^    qwen2,|\"qwen2\"") - heads == {
        "jaxspec/models/qwen2.py",
        "jaxspec/models/registry.py",
    }
