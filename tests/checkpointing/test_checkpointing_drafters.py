"""What a directory holds is told from its files; saving is all or nothing; pickles and broken files are refused."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import head_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from jaxspec.checkpointing import heads, tensors
from jaxspec.drafters import directories, registry
from jaxspec.models.layers import Linear, Transformer
from jaxspec.models.tiny import tiny_target

KINDS = sorted(kind.name for kind in directories.stored_kinds())


@pytest.fixture(scope="module")
def target() -> Transformer:
    return cases.target()


def save(kind: str, directory: Path, target: Transformer, **settings: Any) -> None:
    module = cases.module_of(kind, target)
    directories.save_drafter(module, directory, target=target, **{"dtype": jnp.float32, **settings})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_told_and_loaded(tmp_path: Path, target: Transformer, kind: str) -> None:
    words = {f"t{i}": i for i in range(13)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    save(kind, tmp_path, target, tokenizer=tokenizer)
    assert directories.read_kind(tmp_path) == kind
    cases.assert_same(directories.load_drafter(kind, tmp_path, target), cases.module_of(kind, target))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab() == words


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_of_a_kind_is_read(tmp_path: Path, target: Transformer, kind: str) -> None:
    for layout in registry.find(kind).layouts:
        save(kind, tmp_path / layout, target, layout=layout)
        back = directories.load_drafter(kind, tmp_path / layout, target)
        cases.assert_same(back, cases.module_of(kind, target))
    with pytest.raises(ValueError, match=rf"of kind '{kind}' must be one of \('.*got 'other'"):
        save(kind, tmp_path / "other", target, layout="other")


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_of_another_kind_is_refused(tmp_path: Path, target: Transformer, kind: str) -> None:
    other = "medusa" if kind != "medusa" else "eagle3"
    save(kind, tmp_path, target)
    with pytest.raises(ValueError, match=f"holds a drafter of kind '{kind}', expected '{other}'"):
        directories.load_drafter(other, tmp_path, target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused(tmp_path: Path, target: Transformer, kind: str) -> None:
    save(kind, tmp_path, target)
    path = cases.file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=rf"{path.name} is not a whole safetensors file .*truncated"):
        directories.load_drafter(kind, tmp_path, target)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_another_shape_are_refused(tmp_path: Path, target: Transformer, kind: str) -> None:
    """By name, with both shapes: one row more."""
    save(kind, tmp_path, target)
    stored = cases.read(tmp_path)
    for name, value in list(stored.items())[:: 1 + len(stored) // 6]:
        longer = np.concatenate([value, value[:1]])
        cases.rewrite(tmp_path, {name: longer})
        shapes = rf"'?{name}'?.*\({longer.shape[0]},.*\({value.shape[0]},"
        with pytest.raises(ValueError, match=shapes):
            directories.load_drafter(kind, tmp_path, target)
        cases.rewrite(tmp_path, {name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_pickles_are_refused(tmp_path: Path, target: Transformer, kind: str) -> None:
    save(kind, tmp_path, target)
    cases.file_of(tmp_path).rename(tmp_path / "pytorch_model.bin")
    message = r"only as pickles \(pytorch_model.bin\).*can run any code.*weights_only=True.*'model.safetensors'"
    with pytest.raises(ValueError, match=message):
        directories.load_drafter(kind, tmp_path, target)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "draft_model"])
def test_unknown_fields_are_refused(tmp_path: Path, target: Transformer, kind: str) -> None:
    """In every layout and part of a configuration that is the head's own; null says nothing."""
    for layout in registry.find(kind).layouts:
        if kind == "mtp" and layout != "speculators":
            continue  # there config.json is the target's
        directory = tmp_path / layout
        save(kind, directory, target, layout=layout)
        whole = json.loads((directory / "config.json").read_text())
        parts = ("transformer_layer_config", "dflash_config", "eagle_config")
        odd = [{"odd_gain": 2}, *({part: whole[part] | {"odd_gain": 2}} for part in parts if part in whole)]
        for changes in odd:
            cases.reconfigure(directory, **changes)
            with pytest.raises(ValueError, match=r"\{'odd_gain': 2\} of .* are not known and might change"):
                directories.load_drafter(kind, directory, target)
            (directory / "config.json").write_text(json.dumps({**whole, "odd_gain": None}))
        cases.assert_same(directories.load_drafter(kind, directory, target), cases.module_of(kind, target))


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The operating system refuses files of more than 4096 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C in the middle of a file."""

    def half(_: Any, staging: Path, **__: Any) -> None:
        staging.write_bytes(b"half a file")
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "save_file", half)
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("failing", "error", "message"),
    [(full_disk, OSError, r"safetensors of \d+ bytes cannot be written"), (interrupted, KeyboardInterrupt, None)],
    ids=["full disk", "interrupted"],
)
def test_a_save_that_fails_leaves_the_old_directory(
    tmp_path: Path, target: Transformer, kind: str, failing: Any, error: type[BaseException], message: str | None
) -> None:
    path = tmp_path / "head"
    save(kind, path, target)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    for directory in (path, tmp_path / "new"):
        with failing(), pytest.raises(error, match=message):
            save(kind, directory, target, dtype=jnp.bfloat16)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("kind", KINDS)
def test_types_and_paths_that_cannot_be_written_are_refused(tmp_path: Path, target: Transformer, kind: str) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of \['bfloat16', 'float16', 'float32'\], got float64"):
        save(kind, tmp_path / "head", target, dtype=np.float64)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file, not a directory"):
        save(kind, tmp_path / "file", target)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_round_once(tmp_path: Path, target: Transformer, kind: str, dtype: Any) -> None:
    save(kind, tmp_path, target, dtype=dtype)
    floats = {n: v for n, v in cases.read(tmp_path).items() if n not in ("d2t", "t2d")}
    assert {v.dtype for v in floats.values()} == {np.dtype(dtype)}
    back: Any = directories.load_drafter(kind, tmp_path, target, dtype)
    directories.save_drafter(back, tmp_path / "again", target=target, dtype=dtype)
    again = cases.read(tmp_path / "again")
    assert again.keys() == cases.read(tmp_path).keys()
    for name, value in floats.items():
        np.testing.assert_array_equal(again[name].view(np.uint8), value.view(np.uint8), err_msg=name)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"speculators_model_type": "domino"}, r"speculators_model_type must be one of .*got 'domino'"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures \['GPT2LMHeadModel'\] name no drafter"),
        ({}, "architectures None name no drafter.*LlamaForCausalLMEagle3.*medusa_num_heads"),
    ],
)
def test_unknown_kinds_are_refused(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        directories.read_kind(tmp_path)


def test_a_missing_directory_configuration_or_kind_is_refused(tmp_path: Path, target: Transformer) -> None:
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        directories.read_kind(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="config.json does not exist"):
        directories.read_kind(tmp_path)
    with pytest.raises(ValueError, match="kind of a drafter must be one of .*got 'ngram'"):
        directories.load_drafter("ngram", tmp_path, target)
    with pytest.raises(ValueError, match=r"must be one of \['Eagle3Head'.*'TargetModel'\], got Linear"):
        linear = Linear(2, 2, dtype=jnp.dtype(jnp.float32), rngs=None)
        directories.save_drafter(linear, tmp_path / "head", target=target)


def test_an_eagle_architecture_alone_is_told_by_its_tensors(tmp_path: Path, target: Transformer) -> None:
    """Both EAGLE-1 and EAGLE-3 heads are published as LlamaForCausalLMEagle."""
    for kind in ("eagle1", "eagle3"):
        save(kind, tmp_path / kind, target, layout="safeailab")
        removed = dict.fromkeys(("draft_vocab_size", "eagle_config", "bias", "qkv_bias"))
        cases.reconfigure(tmp_path / kind, architectures=["LlamaForCausalLMEagle"], **removed)
        assert directories.read_kind(tmp_path / kind) == kind


def test_a_draft_model_of_another_vocabulary_and_overrides_for_one_are_refused(
    tmp_path: Path, target: Transformer
) -> None:
    directories.save_drafter(tiny_target(vocab_size=17), tmp_path, target=target)
    with pytest.raises(ValueError, match="vocab_size is 17, the target's vocab_size is 13"):
        directories.load_drafter("draft_model", tmp_path, target)
    with pytest.raises(ValueError, match=r"overrides are for draft heads, got \['norm_output'\]"):
        directories.load_drafter("draft_model", tmp_path, target, overrides={"norm_output": False})


def test_tables_are_the_same_up_to_the_coarser_ones_rounding() -> None:
    table = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    assert heads.same_table(table, jnp.asarray(table).astype(jnp.bfloat16))
    assert heads.same_table(table.astype(np.float16), table)
    assert not heads.same_table(table, table * np.float32(1.01))
    assert not heads.same_table(table, table[:3])
