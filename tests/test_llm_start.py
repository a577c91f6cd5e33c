"""LLM, the offline front, from its arguments to an engine: what it finds, chooses and refuses."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.checkpointing import hf
from jaxspec.fitting import fitted, host_bytes
from jaxspec.models.tiny import tiny_target
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.speculation.state import Geometry
from jaxspec.text.grammar import GrammarSpec

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
#: What every start here says besides.
COMMON: dict[str, Any] = dict(drafter="ngram", progress=False, compile_cache=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(model="no-such-directory"),
            r"model must be 'demo', a Hugging Face .* hub id \('organisation/model'\), and 'no-such-directory' is none",
        ),
        (dict(drafter="lookahead"), r"drafter must be one of .*'ngram'.* a directory or a hub id, got 'lookahead'"),
        (dict(drafter="eagle3"), r"drafter 'eagle3': no checkpoint in "),
        (dict(speculation={"depht": 3}), r"got unknown arguments \['depht'\]; for 'depht' say 'depth'"),
        (
            dict(speculation={"depth": 3, "topk": 2, "num_nodes": 5}),
            r"this drafter proposes chains only \(topk 1\), got topk 2",
        ),
        (dict(speculation={"policy": "broken.json"}), r"broken.json"),
        (dict(max_seq_len=4096), r"max_seq_len must be at most the model's context of 512 tokens, got 4096"),
        (dict(max_batch_size=0), r"max_batch_size must be an int in \[1, 1024\], got 0"),
        (dict(page_sise=8), r"unknown arguments \['page_sise'\]; for 'page_sise' say 'page_size'; "),
        (dict(max_model_len=8, x=1), r"\['max_model_len', 'x'\]; for 'max_model_len' say 'max_seq_len'; it has"),
        (dict(enforce_eager=True), r"\['enforce_eager'\]; 'enforce_eager': leave it out, rounds are .*; it has"),
        (dict(quantization="fp8"), r"'quantization': leave it out, .*`python -m jaxspec.quantize` writes one"),
        (dict(drafter="eagel3"), r"got 'eagel3'; did you mean 'eagle3'\?"),
    ],
)
def test_engines_that_cannot_be_built(tiny_directory: Path, arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": str(tiny_directory), **COMMON, **arguments})


def test_broken_checkpoints_and_configurations(tiny_directory: Path, tmp_path: Path):
    (tmp_path / "sglang.json").write_text('{"1": {"candidate_steps": [1, "x"]}}')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_bytes((tiny_directory / "config.json").read_bytes())
    (tmp_path / "bin" / "tokenizer.json").write_bytes((tiny_directory / "tokenizer.json").read_bytes())
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"pickle")
    (tmp_path / "drafter").mkdir()
    wide = tmp_path / "wide"
    hf.save_model(tiny_target(0, vocab_size=17), wide, dtype=jnp.float32)
    for arguments, message in [
        (dict(speculation={"policy": str(tmp_path / "sglang.json")}), r"candidate_steps"),
        (dict(model=str(tmp_path / "bin")), r"pickle"),
        (dict(drafter=str(tmp_path / "drafter")), r"drafter.config.json does not exist"),
        (dict(drafter=str(wide)), r"vocab_size is 17, the target's vocab_size is 13"),
    ]:
        with pytest.raises(ValueError, match=message):
            LLM(**{"model": str(tiny_directory), **COMMON, **arguments})


def test_a_broken_tokenizer_is_found_before_weights_are_read(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").symlink_to(tiny_directory / "config.json")
    (tmp_path / "tokenizer.json").write_text("{")
    monkeypatch.setattr(hf, "load_model", lambda *args, **options: pytest.fail("weights are read"))
    with pytest.raises(ValueError, match="tokenizer.json is not a valid tokenizer.json"):
        LLM(**{**COMMON, "model": str(tmp_path), "drafter": "ngram"})


@pytest.mark.parametrize("model", ["", None, 3, Path("/no/such/model")])
def test_what_names_no_model(model: Any):
    what = repr(str(model) if isinstance(model, Path) else model)
    with pytest.raises(ValueError, match=f"a Hugging Face directory or a hub id .* and {what} is none"):
        LLM(model)


def test_names_of_models_and_drafters(tiny_directory: Path):
    assert resolve_model(tiny_directory) == tiny_directory
    assert resolve_drafter(None, tiny_directory) == ("ngram", None)
    assert resolve_drafter("none", tiny_directory) == ("none", None)
    assert resolve_drafter("draft_model", tiny_directory) == ("draft_model", tiny_directory.parent / "draft")
    assert resolve_drafter(str(tiny_directory.parent / "draft"), tiny_directory)[0] == "draft_model"


def test_a_checkpoint_without_a_tokenizer(tiny_llm: LLM, tiny_directory: Path, kept_executables: Path, tmp_path: Path):
    """Token ids in, the same token ids out; whatever needs text is refused."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_directory / name)
    options: dict[str, Any] = dict(
        drafter="ngram", speculation={"depth": 3}, max_batch_size=2, max_seq_len=64, progress=False, page_size=8,
        variants=("sampled",), batch_buckets=(2,), compile_cache=kept_executables, warmup="eager",
    )  # fmt: skip
    with pytest.raises(
        ValueError,
        match=r"has no tokenizer.json or tokenizer.model; with skip_tokenizer_init=True prompts can",
    ):
        LLM(tmp_path, **options)
    expected = tiny_llm.generate("abc", GREEDY)[0].token_ids
    with LLM(tmp_path, skip_tokenizer_init=True, **options) as bare:
        for prompt in ([0, 1, 2], {"prompt_token_ids": [0, 1, 2], "prompt": "abc"}):
            output = bare.generate(prompt, GREEDY)[0]
            assert (output.token_ids, output.text) == (expected, "")
        for refused in (
            lambda: bare.generate("abc", GREEDY),
            lambda: bare.chat([{"role": "user", "content": "abc"}]),
            lambda: bare.tokenizer,
        ):
            with pytest.raises(
                ValueError, match=r"no tokenizer \(skip_tokenizer_init=True\): prompts must be token ids"
            ):
                refused()
        with pytest.raises(ValueError, match=r"stop strings \('a',\) need a tokenizer"):
            bare.generate([0], SamplingParams(stop="a"))
        with pytest.raises(ValueError, match="a grammar needs .* a tokenizer"):
            bare.generate([0], GREEDY, grammar=GrammarSpec("regex", "a"))


def test_a_fraction_of_the_memory(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch):
    """The pool gets what the weights leave; its pages are float32 keys and values of every layer."""
    stats = {"bytes_limit": 2**22, "bytes_in_use": 2**20}
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr("jaxspec.fitting.jax.local_devices", lambda: [device])
    target = hf.load_model(tiny_directory, jnp.float32)
    c = target.config
    page = c.num_layers * c.num_kv_heads * 8 * 2 * c.head_dim * 4

    def pages(fraction: float | None) -> int:
        geo = Geometry(slots=2, num_pages=18, page_size=8, pages_per_seq=9, max_depth=3, max_seq_len=64)
        return fitted(geo, fraction, target, None, (), 1).num_pages

    half, whole = pages(0.5), pages(1.0)
    assert half < (2**21 - 2**20) // page and abs(whole - half - 2**21 / page) <= 1
    assert pages(None) == 18, "unasked for, no more than all slots could fill"
    with monkeypatch.context() as patch:
        patch.setitem(stats, "bytes_limit", int((2**21 + (12.5 - half) * page) / 0.9))
        assert pages(None) == pages(0.9) == 12, "and no more than fit"
        patch.setattr(device, "memory_stats", lambda: None)
        assert pages(0.9) == 18, "a host's pool does not grow with its memory"
    stats["bytes_in_use"] = 2**22
    with pytest.raises(ValueError, match=r"memory_fraction 1.0 of 4194304 bytes holds 0 pages .*tokens needs 9"):
        pages(1.0)
    with pytest.raises(ValueError, match=r"memory_fraction 0.5 .* one sequence of max_seq_len = 512 tokens"):
        LLM(tiny_directory, "draft_model", progress=False, compile_cache=False, memory_fraction=0.5)


def test_a_control_group_bounds_the_memory(tmp_path: Path):
    whole, own = host_bytes(tmp_path, tmp_path / "absent"), tmp_path / "own"

    def limit(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    own.write_text("0::/outer/inner\n")
    assert host_bytes(tmp_path, own) == whole > 2**20
    limit("outer/inner/memory.max", "max")
    assert host_bytes(tmp_path, own) == whole
    limit("outer/memory.max", "9000")
    assert host_bytes(tmp_path, own) == 9000
    limit("memory.max", "7000")  # what a container sees
    assert host_bytes(tmp_path, own) == 7000
    own.write_text("4:cpu:/outer\n3:memory,hugetlb:/inner\n")
    limit("memory/inner/memory.limit_in_bytes", "8000")
    assert host_bytes(tmp_path, own) == 8000


def test_an_engine_says_what_was_chosen_for_it(tiny_directory: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "jaxspec")
    options: dict[str, Any] = dict(
        max_batch_size=2, max_seq_len=64, progress=False, page_size=8, prefill_chunk=16, variants=("sampled",),
        batch_buckets=(2,), compile_cache=False, warmup="eager",
    )  # fmt: skip
    with LLM(tiny_directory, "draft_model", {"depth": 2, "topk": 2}, memory_fraction=0.2, **options) as made:
        assert len(made.generate("abc", GREEDY)[0].token_ids) == 12
        assert made.engine.facts.sizes.num_pages == 18 and "tree-2x2/4" in repr(made)
    assert "topk 2 without num_nodes: draft trees are tree-2x2/4" in caplog.text
    assert f"drafter: draft_model ({tiny_directory.parent / 'draft'})" in caplog.text
    assert "memory_fraction 0.2: " in caplog.text


def test_hub_ids_are_downloaded(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, Any]] = []

    def snapshot(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((hub_id, allow_patterns))
        return str(tiny_directory)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot))
    assert resolve_model("some/Model-1.5") == tiny_directory
    assert resolve_drafter("some/draft", tiny_directory) == ("draft_model", tiny_directory)
    assert [hub_id for hub_id, _ in asked] == ["some/Model-1.5", "some/draft"]
    assert not any("bin" in pattern for pattern in asked[0][1]), "pickles are not read"
    for name in ("no-such", "./some/model", "/some/model", "a/b/c", "some/", "../model"):
        with pytest.raises(ValueError, match="model must be 'demo', a Hugging Face directory or a hub id"):
            resolve_model(name)
    assert len(asked) == 2


def test_hub_ids_that_cannot_be_downloaded(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch):
    def offline(*args: Any, **options: Any) -> str:
        raise ConnectionError("no\nroute")

    by_hand = r"`hf download some/model --local-dir DIR` and pass DIR"
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=offline))
    with pytest.raises(ValueError, match=rf"'some/model' .* \(no route\): download it with {by_hand}"):
        LLM("some/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ValueError, match=rf"huggingface_hub is not installed: install it, or elsewhere download it with {by_hand}"
    ):
        resolve_drafter("some/model", tiny_directory)
