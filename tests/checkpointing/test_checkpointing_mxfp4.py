"""gpt-oss' experts in MXFP4: as they lie, and the same products as by the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxspec.checkpointing import hf
from jaxspec.models.mxfp4 import Mxfp4
from jaxspec.models.tiny import FAMILY_FIELDS, tiny_target

#: Of the sixteen codes (OCP Microscaling Formats 1.0, section 5.3.3).
VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
EXPERTS = "model.layers.{}.mlp.experts.{}"
MAPS = [(layer, name) for layer in range(2) for name in ("gate_up_proj", "down_proj")]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """(a directory of float32 weights, its tensors with random blocks in place of the experts' maps)."""
    directory = tmp_path_factory.mktemp("plain")
    fields = dict(FAMILY_FIELDS["gpt_oss"], hidden_size=64, intermediate_size=32)
    fields["experts"] = type(fields["experts"])(**{**vars(fields["experts"]), "inner": 32})
    hf.save_model(tiny_target(3, **fields), directory, dtype=jnp.float32)
    file, rng = directory / "model.safetensors", np.random.default_rng(5)
    plain = load_file(file)
    packed = dict(plain)
    for layer, name in MAPS:
        at = EXPERTS.format(layer, name)
        count, d_in, d_out = packed.pop(at).shape
        blocks = rng.integers(0, 256, (count, d_out, d_in // 32, 16), dtype=np.uint8)
        scales = rng.integers(121, 126, (count, d_out, d_in // 32), dtype=np.uint8)
        packed |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(count, d_out, d_in // 32, 32)
        values = VALUES[codes] * np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
        plain[at] = np.ascontiguousarray(values.reshape(count, d_out, d_in).transpose(0, 2, 1))
    save_file(plain, file)
    return directory, packed


def write(directory: Path, source: Path, packed: Mapping[str, np.ndarray], **quantisation: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    save_file(dict(packed), directory / "model.safetensors")


def test_experts_stay_in_four_bits_and_compute_what_they_stand_for(
    tensors: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    plain, packed = tensors
    write(tmp_path, plain, packed, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    ours, other = hf.load_model(tmp_path, blocked=True), hf.load_model(plain)
    mixture, whole = ours.layers[1].mlp, other.layers[1].mlp
    for name in ("gate_up", "down"):
        kept, kernel = getattr(mixture, name)[...], getattr(whole, name)[...]
        assert isinstance(kept, Mxfp4) and kept.shape == kernel.shape
        assert {str(kept.codes.dtype), str(kept.scale.dtype)} == {"uint8"}
        assert kept.nbytes == kernel.size // 2 + kernel.size // 32
        np.testing.assert_array_equal(np.asarray(kept.dequantised()), np.asarray(kernel))
        np.testing.assert_array_equal(np.asarray(kept.dequantised(jnp.bfloat16)), np.asarray(kernel, jnp.bfloat16))
    x_BNE = jax.random.normal(jax.random.key(0), (1, 20, 64))
    ys = [np.asarray(nnx.jit(lambda made, x: made(x))(made, x_BNE)) for made in (mixture, whole)]
    assert np.abs(ys[1]).max() > 1
    np.testing.assert_allclose(ys[0], ys[1], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"gate_up_proj' is quantised; copy the directory"):
        hf.save_model(ours, tmp_path / "saved")


def test_tensors_that_do_not_fit_are_refused_by_name(
    tensors: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    plain, packed = tensors
    at = EXPERTS.format(1, "down_proj")
    blocks, scales = packed[f"{at}_blocks"], packed[f"{at}_scales"]
    bad = np.where(np.arange(scales.shape[1])[None, :, None] == 3, np.uint8(255), scales)
    for change, message in (
        ({f"{at}_scales": scales[..., :0]}, r"down_proj_scales' .* has shape \(6, 64, 0\); .* \(6, 64, 1\)"),
        ({f"{at}_blocks": blocks.view(np.int8)}, r"down_proj_blocks' .* has type I8; supported are \['U8'\]"),
        ({f"{at}_scales": bad}, r"down_proj_scales' .* not numbers \(255\)"),
        ({at: np.zeros((6, 32, 64), np.float32)}, r"down_proj' twice: as it is and as '.*down_proj_blocks'"),
    ):
        write(tmp_path, plain, {**packed, **change}, quant_method="mxfp4")
        with pytest.raises(ValueError, match=message):
            hf.load_model(tmp_path)
    write(tmp_path, plain, {k: v for k, v in packed.items() if k != f"{at}_scales"}, quant_method="mxfp4")
    with pytest.raises(ValueError, match=r"down_proj_scales' is missing"):
        hf.load_model(tmp_path)


def test_what_config_json_cannot_ask_of_the_family(tensors: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    config = json.loads((tensors[0] / "config.json").read_text())
    for change, message in (
        (dict(swiglu_limit=5.0), "swiglu_limit must be 7.0, got 5.0"),
        (dict(swiglu_alpha=1.0), "swiglu_alpha must be 1.702, got 1.0"),
        (dict(num_experts_per_tok=7), "at most the 6 experts, got 7"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=message):
            hf.load_config(tmp_path)
