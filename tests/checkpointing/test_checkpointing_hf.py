"""Hugging Face directories: round trips, shards, and every way in which one can be broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models

from jaxspec.checkpointing import hf, tensors
from jaxspec.models.layers import Transformer
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_target
from jaxspec.quantize import FORMATS, quantise_directory

QKV = "model.layers.1.self_attn.k_proj.weight"


def params(model: Transformer) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(value.get_value()) for path, value in flat}


def assert_same(a: Transformer, b: Transformer) -> None:
    assert a.config == b.config
    left, right = params(a), params(b)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        np.testing.assert_array_equal(left[name].view(np.uint8), right[name].view(np.uint8), err_msg=name)


def rewrite(directory: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    tensors.write_safetensors(directory / "model.safetensors", weights)


def shard(directory: Path) -> None:
    """Splits model.safetensors over two files with an index."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{i}-of-00002.safetensors"
        tensors.write_safetensors(directory / file, {n: weights[n] for n in part})
        weight_map |= dict.fromkeys(part, file)
    tensors.write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hf.save_model(tiny_target(), tmp_path / "model", dtype=jnp.float32)
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(tie_word_embeddings=True, attention_bias=True, output_bias=True, mlp_bias=True),
        dict(family="qwen3", qk_norm=True, num_layers=3, eos_token_ids=(2, 5)),
    ],
)
def test_round_trip_is_bit_equal(tmp_path: Path, dtype: Any, overrides: dict[str, Any]) -> None:
    model = tiny_target(1, dtype=dtype, **overrides)
    hf.save_model(model, tmp_path / "a" / "b", dtype=dtype)
    assert_same(hf.load_model(tmp_path / "a" / "b", dtype), model)


def test_loading_casts_and_saving_rounds_once(tmp_path: Path) -> None:
    model = tiny_target()
    hf.save_model(model, tmp_path)
    assert_same(hf.load_model(tmp_path, jnp.bfloat16), tiny_target(dtype=jnp.bfloat16))
    wide = params(hf.load_model(tmp_path))
    for name, value in params(model).items():
        np.testing.assert_array_equal(wide[name], value.astype(jnp.bfloat16).astype(np.float32), err_msg=name)


def test_files_carry_hugging_face_names_and_layout(saved: Path) -> None:
    model = tiny_target()
    with safe_open(str(saved / "model.safetensors"), framework="numpy") as f:
        assert f.metadata() == {"format": "pt"}
    weights = load_file(saved / "model.safetensors")
    assert len(weights) == 2 * 9 + 3
    qkv_EF = np.asarray(model.layers[1].attn.qkv.kernel.get_value())
    np.testing.assert_array_equal(weights[QKV], qkv_EF[:, 32:48].T)
    gate_up = np.asarray(model.layers[0].mlp.gate_up.kernel.get_value())
    np.testing.assert_array_equal(weights["model.layers.0.mlp.up_proj.weight"], gate_up[:, 48:].T)
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["torch_dtype"] == "float32"


def test_shards_load_like_one_file(saved: Path) -> None:
    shard(saved)
    assert_same(hf.load_model(saved), tiny_target())


def test_known_buffers_and_an_equal_tied_head_are_accepted(tmp_path: Path) -> None:
    model = tiny_target(tie_word_embeddings=True)
    hf.save_model(model, tmp_path, dtype=jnp.float32)

    def edit(w: dict[str, np.ndarray]) -> None:
        w["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        w["lm_head.weight"] = w["model.embed_tokens.weight"]

    rewrite(tmp_path, edit)
    assert_same(hf.load_model(tmp_path), model)
    rewrite(tmp_path, lambda w: w.update({"lm_head.weight": w["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings=true, but 'lm_head.weight' differs"):
        hf.load_model(tmp_path)


def test_end_tokens_of_the_generation_config_count(saved: Path) -> None:
    tensors.write_json(saved / "generation_config.json", {"eos_token_id": [7, 3]})
    assert hf.load_model(saved).config.eos_token_ids == (7, 3)


def swap(name: str, value: np.ndarray) -> Callable[[Path], None]:
    return lambda d: rewrite(d, lambda w: w.update({name: value}))


def drop(name: str) -> Callable[[Path], None]:
    return lambda d: rewrite(d, lambda w: w.pop(name))


def cut(size: int) -> Callable[[Path], object]:
    return lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:size])


def only(name: str) -> Callable[[Path], object]:
    return lambda d: (d / "model.safetensors").rename(d / name)


def index(text: str) -> Callable[[Path], None]:
    def edit(d: Path) -> None:
        (d / "model.safetensors").rename(d / "one.safetensors")
        (d / "model.safetensors.index.json").write_text(text)

    return edit


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (drop(QKV), f"'{QKV}' is missing from .*model.safetensors"),
        (drop("lm_head.weight"), "'lm_head.weight' is missing"),
        (swap(QKV, np.zeros((16, 31), np.float32)), rf"'{QKV}' in .*model.safetensors .*\(16, 31\).*\(16, 32\)"),
        (swap(QKV, np.zeros((16, 32), np.int8)), f"'{QKV}' in .* has type I8; .*BF16"),
        (swap("model.layers.2.extra", np.zeros(3, np.float32)), r"no place for: 'model.layers.2.extra' \(3,\) in"),
        (swap("model.layers.0.self_attn.q_proj.bias", np.zeros(32, np.float32)), "q_proj.bias"),
        (cut(-5), "model.safetensors is not a whole safetensors file .*truncated"),
        (cut(4), "model.safetensors is not a whole safetensors file .4 bytes"),
        (cut(0), "model.safetensors is not a whole safetensors file .0 bytes"),
        (
            lambda d: (d / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n"),
            "model.safetensors is not a whole safetensors file .* a pointer of Git LFS: run `git lfs pull`",
        ),
        (only("pytorch_model.bin"), "pytorch_model.bin.*can run any code.*safetensors"),
        (only("model-00001-of-00002.safetensors"), "found model-00001-of-00002.safetensors, but no index"),
        (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (index("{"), "index.json is not readable as JSON"),
        (index("[]"), "index.json must hold a JSON object, got list"),
        (index("{}"), "needs a non-empty object 'weight_map', got None"),
        (index('{"weight_map": {"a": "../x.safetensors"}}'), "places 'a' in '../x.safetensors'"),
        (index('{"weight_map": {"a": "x.bin"}}'), "places 'a' in 'x.bin'"),
        (index('{"weight_map": {"a": "x.safetensors"}}'), "x.safetensors does not exist, but .*index.json names it"),
        (
            index('{"weight_map": {"model.embed_tokens.weight": "one.safetensors", "lost": "one.safetensors"}}'),
            "one.safetensors lacks tensor 'lost'",
        ),
        (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not readable as JSON"),
        (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "config.json is not readable as JSON"),
    ],
)
def test_broken_directories_are_refused_by_name(saved: Path, break_it: Callable[[Path], object], message: str) -> None:
    break_it(saved)
    with pytest.raises(ValueError, match=message):
        hf.load_model(saved)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 0, "hidden_size must be a positive integer, got 0"),
        ("architectures", ["Other"], "architectures ['Other'] is not supported"),
        ("bos_token_id", {}, "bos_token_id must be a token id of at least 0, or a list of them, got {}"),
        ("num_hidden_layers", "two", "num_hidden_layers must be a positive integer, got 'two'"),
        ("rms_norm_eps", "tiny", "rms_norm_eps must be a positive number, got 'tiny'"),
        ("rope_scaling", "linear", "rope_scaling must be an object, got 'linear'"),
        ("layer_types", 5, "layer_types (5) has a type or value that LlamaForCausalLM cannot have: "),
        ("quantization_config", {"quant_method": "other"}, "quant_method 'other' is not served"),
    ],
)
def test_wrong_fields_are_told_with_their_file(saved: Path, field: str, value: Any, message: str) -> None:
    file = saved / "config.json"
    tensors.write_json(file, {**tensors.read_json(file), field: value})
    with pytest.raises(ValueError, match="^" + re.escape(f"{file}: {message}")) as refusal:
        hf.load_model(saved)
    assert str(refusal.value).count(str(saved)) == 1


def test_a_short_path_is_no_part_of_other_words() -> None:
    for path, said in ((".", "./config.json: a"), ("c", "c/config.json: a")):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"), tensors.located(Path(path)):
            raise ValueError("config.json: a")
    with pytest.raises(ValueError, match="^c/config.json: a$"), tensors.located(Path("c")):
        raise ValueError("c/config.json: a")


def test_a_missing_directory_and_a_file_are_refused(saved: Path) -> None:
    for path in (saved / "nowhere", saved / "config.json"):
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} is not a directory"):
            hf.load_model(path)
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} is not a directory"):
            tensors.read_tensors(path)
    with pytest.raises(ValueError, match="is a file, not a directory"):
        hf.save_model(tiny_target(), saved / "config.json")
    with pytest.raises(ValueError, match="dtype must be one of .*got float64"):
        hf.save_model(tiny_target(), saved, dtype=np.float64)


def test_a_failed_save_leaves_the_old_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(arrays: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    with monkeypatch.context() as m:
        m.setattr(tensors, "save_file", full_disk)
        for target in (saved, saved.parent / "new"):
            with pytest.raises(OSError, match="No space left"):
                hf.save_model(tiny_target(2), target)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["model"]


def test_saving_over_a_checkpoint_replaces_it_and_keeps_other_files(saved: Path) -> None:
    (saved / "README.md").write_text("how it was made")
    hf.save_model(tiny_target(2), saved, dtype=jnp.float32)
    assert_same(hf.load_model(saved), tiny_target(2))
    assert (saved / "README.md").read_text() == "how it was made"
    assert [p.name for p in saved.parent.iterdir()] == ["model"]


def test_reader_checks_and_reports(tmp_path: Path) -> None:
    tensors.write_safetensors(
        tmp_path / "model.safetensors",
        {"w": np.arange(6, dtype=np.float32).reshape(2, 3).T, "d2t": np.arange(4, dtype=np.int64)},
    )
    with tensors.read_tensors(tmp_path) as reader:
        assert sorted(reader.names) == ["d2t", "w"] and "w" in reader and "x" not in reader
        assert reader.shape("w") == (3, 2)
        w = reader.get("w", (3, 2))
        with pytest.raises(ValueError, match="'d2t' .* has type I64"):
            reader.get("d2t", (4,))
        with pytest.raises(ValueError, match=r"no place for: 'd2t' \(4,\) in model.safetensors"):
            reader.refuse_unread()
        reader.refuse_unread("d2.")
        assert reader.get("d2t", (4,), tensors.INTEGERS).tolist() == [0, 1, 2, 3]
        reader.refuse_unread()
    np.testing.assert_array_equal(w, [[0, 3], [1, 4], [2, 5]])


def test_tokenizer_files_name_the_special_tokens(tmp_path: Path) -> None:
    words = ["<|bos|>", "<|eos|>", "<|pad|>", *"abcdefghij"]
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    hf.save_model(tiny_target(eos_token_ids=(1,)), tmp_path, tokenizer=tok)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    names = [settings[k] for k in ("bos_token", "eos_token", "pad_token")]
    assert names == words[:3] and settings["add_bos_token"] is True
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    with pytest.raises(ValueError, match="eos_token id 12 is not in the tokenizer of 3 tokens"):
        small = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words[:3])}, unk_token="<|pad|>"))
        hf.save_model(tiny_target(eos_token_ids=(12,)), tmp_path, tokenizer=small)


def test_loaded_weights_run_under_jit(saved: Path) -> None:
    model = hf.load_model(saved)
    graph, state = nnx.split(model)
    embedded = jax.jit(lambda s, t: nnx.merge(graph, s).embed(t))(state, jnp.array([[3]]))
    np.testing.assert_array_equal(np.asarray(embedded)[0, 0], np.asarray(model.embedding.get_value())[3])


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("start", ["language_model.model.", "model.language_model."])
def test_of_models_that_see_images_the_part_for_text_is_read(
    start: str, tie: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the hub's names and in transformers'; whether the output layer is the embedding, the file says."""
    text = tiny_target(family="mistral", tie_word_embeddings=tie, bos_token_id=3)
    hf.save_model(text, tmp_path, dtype=jnp.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("tie_word_embeddings") is tie
    around = {"architectures": ["Mistral3ForConditionalGeneration"], "bos_token_id": config.pop("bos_token_id")}
    hub, file = start.startswith("language"), tmp_path / "model.safetensors"

    def named(name: str) -> str:
        return name.replace("model.", start, 1) if name.startswith("model.") else "language_model." * hub + name

    images = [("" if hub else "model.") + part for part in ("vision_tower.patch.weight", "multi_modal_projector.a")]
    stored = {named(name): value for name, value in load_file(file).items()}
    tensors.write_safetensors(file, stored | dict.fromkeys(images, np.zeros((2, 3), np.float32)))
    tensors.write_json(tmp_path / "config.json", {**around, "text_config": config, "vision_config": {}})
    assert_same(hf.load_model(tmp_path), text)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "text alone is served; what is for images is left out (tensors: 2)" in warning

    with pytest.raises(ValueError, match=r"holds more than a model for text \(\['Mistral3ForCond"):
        quantise_directory(tmp_path, tmp_path / "out", FORMATS["int8"])
    tensors.write_safetensors(file, stored | {"audio_tower.a": np.zeros((2, 3), np.float32)})
    with pytest.raises(ValueError, match="no place for: 'audio_tower.a'"):
        hf.load_model(tmp_path)
    for wrong, message in (
        ({"model_type": "ministral3"}, "must be 'mistral', got 'ministral3'"), (3, "needs an object text_config, got 3")
    ):  # fmt: skip
        tensors.write_json(tmp_path / "config.json", {**around, "text_config": wrong})
        with pytest.raises(ValueError, match=message):
            hf.load_config(tmp_path)


def test_modules_that_no_drafter_reads_are_left_alone(tmp_path: Path) -> None:
    model = tiny_target(**FAMILY_FIELDS["ernie4_5_moe"])
    hf.save_model(model, tmp_path, dtype=jnp.float32)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.1.mlp.moe_statics.e_score_correction_bias"].shape == (1, 8)
    tensors.write_safetensors(tmp_path / "model.safetensors", stored | {"model.mtp_block.0.a.weight": np.zeros((2, 3))})
    assert_same(hf.load_model(tmp_path), model)
