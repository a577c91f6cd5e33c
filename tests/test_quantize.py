"""python -m jaxspec.quantize: what it writes is as others read it, near to what it was made of, and is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import quantize
from jaxspec.checkpointing import hf, tensors
from jaxspec.checkpointing.rounding import FORMATS
from jaxspec.models.quantised import Quantised
from jaxspec.models.tiny import tiny_target

SIZES: dict[str, Any] = dict(hidden_size=128, intermediate_size=128, num_layers=1, num_heads=4, head_dim=32)
#: Of the presets W8A8, FP8_DYNAMIC and W4A16 in compressed-tensors' quant_scheme.py (its fields: quant_args.py).
WEIGHTS = {
    "int8": dict(num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False),
    "fp8": dict(num_bits=8, type="float", strategy="channel", symmetric=True, dynamic=False),
    "int4-g128": dict(num_bits=4, type="int", strategy="group", group_size=128, symmetric=True, dynamic=False),
}
#: Of a weight's size: how far rounding may take it from the largest of its scale.
STEP = {"int8": 0.5 / 127, "fp8": 1 / 28, "int4-g128": 0.5 / 7.5}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "model"
    hf.save_model(tiny_target(2, **SIZES), directory, dtype=jnp.bfloat16)
    (directory / "LICENSE").write_text("as it was")
    return directory


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_the_model_rounded(name: str, source: Path, tmp_path: Path) -> None:
    before, after = quantize.quantise_directory(source, tmp_path, FORMATS[name])
    plain = load_file(source / hf.WEIGHTS)
    with tensors.read_tensors(tmp_path) as reader:
        kinds = (tensors.FLOAT8, "I8", *tensors.FLOATS, *tensors.INTEGERS)
        stored = {name: reader.get(name, reader.shape(name), kinds) for name in reader.names}
    assert after == sum(x.nbytes for x in stored.values()) and 0.2 < after / before < 0.6
    assert (tmp_path / "LICENSE").read_text() == "as it was"
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert (config["quant_method"], config["ignore"], group["targets"]) == (
        "compressed-tensors",
        ["lm_head"],
        ["Linear"],
    )
    assert group["weights"] == WEIGHTS[name] and config["quantization_status"] == "compressed"
    for kept in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        np.testing.assert_array_equal(stored[kept], plain[kept])
    layer = hf.load_model(tmp_path).layers[0]  # pyright: ignore[reportAttributeAccessIssue]
    down = layer.mlp.down.kernel.get_value()
    assert isinstance(down, Quantised)
    exact = plain["model.layers.0.mlp.down_proj.weight"].astype(np.float32).T
    largest = np.abs(exact).max(axis=0)
    error = np.abs(np.asarray(down.dequantised()) - exact)
    # Groups of 4 bits cut their largest weights off where that is the lesser error over all.
    assert (np.quantile(error, 0.9, axis=0) <= 1.01 * largest * STEP[name]).all()
    assert error.mean() < (0.6 if name == "int4-g128" else 0.55) * (largest * STEP[name]).mean()


@pytest.mark.parametrize("output", ["int8", "int4-g128"])
def test_an_output_layer_is_rounded_too(output: str, source: Path, tmp_path: Path) -> None:
    """In the layers' format or in one of its own, and read as the format that the config has under its name."""
    quantize.quantise_directory(source, tmp_path, FORMATS["int8"], output=FORMATS[output])
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    groups = {
        group["targets"][0]: (group.get("format"), group["weights"]) for group in config["config_groups"].values()
    }
    others = {} if output == "int8" else {"lm_head": ("pack-quantized", WEIGHTS[output])}
    assert groups == {"Linear": ("int-quantized" if others else None, WEIGHTS["int8"])} | others
    assert config["format"] == ("mixed-precision" if others else "int-quantized") and config["ignore"] == []
    model = hf.load_model(tmp_path)
    kernel, layer = (at.kernel.get_value() for at in (model.lm_head, model.layers[0].mlp.down))  # pyright: ignore
    assert isinstance(kernel, Quantised) and isinstance(layer, Quantised) and layer.values.dtype == jnp.int8
    assert kernel.values.dtype == (jnp.int4 if others else jnp.int8)
    exact = load_file(source / hf.WEIGHTS)["lm_head.weight"].astype(np.float32).T
    error = np.abs(np.asarray(kernel.dequantised()) - exact)
    assert (np.quantile(error, 0.9, axis=0) <= 1.01 * np.abs(exact).max(axis=0) * STEP[output]).all()


def test_the_command_compares_on_texts(
    tiny_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("abcabcabcabcabc")
    (tmp_path / "b.jsonl").write_text('{"text": "defdefghiabc"}\n{"text": "k"}\n')
    report = tmp_path / "report.json"
    argv = [str(tiny_directory), str(tmp_path / "out"), "--format", "int8", "--length", "8", "--json", str(report)]
    assert quantize.main([*argv, "--texts", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]) == 0
    found = json.loads(report.read_text())
    assert found["tokens"] == 7 + 6 + 7 + 3  # but each piece's first, and no piece of one
    assert found["perplexity"] > 2 and abs(found["perplexity_quantised"] / found["perplexity"] - 1) < 0.05
    assert 0.8 < found["greedy_agreement"] <= 1
    assert "23 tokens of these texts: perplexity" in capsys.readouterr().out


def test_pieces_stop_at_the_most() -> None:
    pieces = quantize.pieces_of([range(7), range(3)], 4, 8)
    assert [piece.tolist() for piece in pieces] == [[0, 1, 2, 3], [4, 5, 6]]
    with pytest.raises(ValueError, match="at least 2 tokens together, of at most 1"):
        quantize.pieces_of([range(7)], 4, 1)


def test_what_cannot_be_done_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*argv: str) -> str:
        assert quantize.main([*argv, "--max-tokens", "0"]) == 2
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "is the built-in model" in refused(str(source), "demo", "--format", "fp8")
    assert "is the model itself" in refused(str(source), str(source), "--format", "fp8")
    assert "lacks: ['head']" in refused(str(source), str(out), "--format", "fp8", "--ignore", "head")
    hf.save_model(tiny_target(tie_word_embeddings=True), tmp_path / "tied", dtype=jnp.float32)
    tied = refused(str(tmp_path / "tied"), str(out), "--format", "fp8", "--output-layer", "fp8")
    assert "has no lm_head: its output layer is its embedding" in tied
    assert "cannot be read" in refused(str(source), str(out), "--format", "fp8", "--texts", str(out))
    hf.save_model(tiny_target(), tmp_path / "small", dtype=jnp.float32)
    small = refused(str(tmp_path / "small"), str(out), "--format", "int4-g128")
    assert "down_proj' has 48 inputs, which groups of 128 do not divide" in small
    both = refused(str(source), str(out), "--format", "fp8", "--ignore", "lm_head", "--output-layer", "fp8")
    assert "lm_head is to stay as it is (ignore) and to be rounded (output layer)" in both
    assert "must be at least 2 tokens" in refused(str(source), str(out), "--format", "fp8", "--length", "1")
    (tmp_path / "file").write_text("")
    below = refused(str(source), str(tmp_path / "file" / "out"), "--format", "fp8")
    assert below.startswith("error: cannot read or write: ") and "/file'" in below and below.count("\n") == 1
    nowhere = str(tmp_path / "none" / "x.json")
    assert "there is no directory" in refused(str(source), str(out), "--format", "fp8", "--json", nowhere)
    assert not out.exists()
    again = [str(source), str(out), "--format", "fp8", "--max-tokens", "0"]
    assert quantize.main(again) == 0
    # Its own work as well: what it writes is what llm-compressor writes, in one file too.
    written = (out / tensors.WEIGHTS).read_bytes()
    assert "out holds a model already (model.safetensors); name another" in refused(*again[:2], "--format", "int8")
    assert (out / tensors.WEIGHTS).read_bytes() == written
    assert "small holds a model already" in refused(str(source), str(tmp_path / "small"), "--format", "fp8")
    assert quantize.main([*again, "--overwrite"]) == 0 and (out / tensors.WEIGHTS).read_bytes() == written
    (out / tensors.INDEX).write_text("{}")
    assert f"in other files than model.safetensors ({tensors.INDEX})" in refused(*again, "--overwrite")
    assert "is quantised already (compressed-tensors)" in refused(str(out), str(tmp_path / "b"), "--format", "int8")
