"""How parity with transformers is shown on the models of parity_models.py: weights from numpy alone, what is compared.

Owns the recording's layout. test_models_parity.py asks transformers about them; test_models_recorded.py asks
parity.npz, which record_parity.py writes. Must not import torch or transformers, except in the `reference_*` functions,
which need the extra `parity`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from parity_models import CASES, CONFIGS, SHAPE

from jaxspec.checkpointing.tensors import WEIGHTS, write_json, write_safetensors
from jaxspec.models.layers import Transformer, causal_attention

RECORDING = Path(__file__).with_name("parity.npz")
SEED = 10
NEW_TOKENS = 100
#: Two prompts of twelve tokens, no two alike.
PROMPTS_BN = (np.arange(24, dtype=np.int32).reshape(2, 12) * 37 + 1) % 97
#: Where logits are recorded: every eighth position, the last of prompt and continuation included.
POSITIONS = slice(7, None, 8)
#: Largest difference of logits between two float32 implementations.
TOLERANCE = 1e-4


def settings(case: str) -> dict[str, Any]:
    """The arguments of a case's transformers configuration; all of them stand in its config.json."""
    kind, overrides = CASES[case]
    if text := overrides.get("text_config"):
        return {
            "architectures": [f"{kind}ForConditionalGeneration"],
            **overrides,
            "text_config": {**SHAPE, **text},
        }
    return {"architectures": [f"{kind}ForCausalLM"], **SHAPE, **overrides}


def weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Every tensor random, biases and gains included: float32 normals drawn in the order of the names.

    Matrices [out, in] have a deviation of 1.5 / sqrt(in), which keeps logits apart; gains lie around 1.
    """
    rng = np.random.default_rng(SEED)
    out = {}
    for name in sorted(shapes):
        normal = rng.standard_normal(tuple(shapes[name]))
        if normal.ndim == 1:
            value = 0.3 * normal + (1.0 if name.endswith("norm.weight") else 0.0)
        else:
            value = 1.5 * normal / normal.shape[1] ** 0.5
        out[name] = value.astype(np.float32)
    return out


#: What files call each expert's gate, up and down, and the module around the experts, by its name in transformers.
_SPARSE = ("w1", "w3", "w2"), "block_sparse_moe"
EXPERTS = {"Mixtral": _SPARSE, "MiniMaxM2": _SPARSE, "": (("gate_proj", "up_proj", "down_proj"), "mlp")}


def in_files(shapes: Mapping[str, Sequence[int]], kind: str = "") -> dict[str, tuple[int, ...]]:
    """The tensors of a file by transformers' parameters: it keeps experts in one, most files have each expert's own."""
    if kind in ("GptOss", "Qwen3VL"):
        return {name: tuple(shape) for name, shape in shapes.items()}
    if kind == "Qwen3VLMoe":  # as published; transformers writes them as it has them
        turned = lambda name, shape: (shape[0], shape[2], shape[1]) if ".experts." in name else tuple(shape)
        return {name: turned(name, shape) for name, shape in shapes.items()}
    if kind == "Qwen2_5_VL":
        return {re.sub(r"^model\.(language_(?=model\.)|(?=visual\.))", "", n): tuple(s) for n, s in shapes.items()}
    if any(name.startswith("model.vision_tower.") for name in shapes):
        return {_with_images(name): tuple(shape) for name, shape in shapes.items()}
    (gate, up, down), module = EXPERTS.get(kind, EXPERTS[""])
    out: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if ".mlp.experts." not in name:
            name = name.replace(".gate.moe_statics.", ".moe_statics.")
            out[re.sub(r"\.mlp\.(gate\.|e_score_)", rf".{module}.\1", name)] = tuple(shape)
            continue
        prefix, fused = name.split("mlp.experts.")
        parts = (gate, up) if fused == "gate_up_proj" else (down,)
        for expert in range(shape[0]):
            for part in parts:
                out[f"{prefix}{module}.experts.{expert}.{part}.weight"] = (shape[1] // len(parts), shape[2])
    return out


def _with_images(name: str) -> str:
    """What the hub's files call a parameter of a model that sees images."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.")
    return name.removeprefix("model.") if name.startswith("model.") else f"language_model.{name}"


def fingerprint(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Sums and first absolute moments of the tensors in the order of their names, [2, tensors] float64."""
    wide = [tensors[name].astype(np.float64) for name in sorted(tensors)]
    return np.array([[w.sum() for w in wide], [np.abs(w).sum() for w in wide]])


def logits_of(model: Transformer, tokens_BN: np.ndarray) -> np.ndarray:
    """Our logits at every position, [B, N, V] float32."""
    positions_BN = jnp.broadcast_to(jnp.arange(tokens_BN.shape[1])[None, :], tokens_BN.shape)

    @jax.jit
    def forward(tokens_BN: jax.Array) -> jax.Array:
        hidden_BNE, aux = model(tokens_BN, positions_BN, causal_attention)
        assert aux is None
        return model.logits(hidden_BNE)

    return np.asarray(forward(jnp.asarray(tokens_BN, jnp.int32)))


@dataclasses.dataclass(frozen=True)
class Record:
    """What transformers said about one case.

    Attributes:
      config: config.json as transformers writes it.
      shapes: the tensors of model.safetensors, {name: shape}.
      fingerprint: of the weights that were used, [2, tensors] float64.
      tokens_BN: the prompts and their greedy continuations, int32.
      logits_BPV: float32 logits at POSITIONS of tokens_BN.
    """

    config: dict[str, Any]
    shapes: dict[str, list[int]]
    fingerprint: np.ndarray
    tokens_BN: np.ndarray
    logits_BPV: np.ndarray

    def write_directory(self, directory: Path) -> None:
        """Writes config.json and model.safetensors.

        Raises:
          ValueError: numpy draws other weights than those that were recorded.
        """
        tensors = weights(self.shapes)
        found = fingerprint(tensors)
        if found.shape != self.fingerprint.shape or not np.allclose(found, self.fingerprint, rtol=1e-6, atol=1e-6):
            raise ValueError(
                f"numpy {np.__version__} and parity_cases.weights give other weights than the recorded ones; "
                f"run record_parity.py again"
            )
        write_json(directory / "config.json", self.config)
        write_safetensors(directory / WEIGHTS, tensors)


def save_records(path: Path, records: Mapping[str, Record]) -> None:
    """One compressed .npz without pickles: arrays under `case/field`, dictionaries as JSON."""
    arrays = {}
    for case, record in records.items():
        for field in dataclasses.fields(Record):
            value = getattr(record, field.name)
            arrays[f"{case}/{field.name}"] = np.array(json.dumps(value)) if isinstance(value, dict) else value
    np.savez_compressed(path, **arrays)


def load_records(path: Path = RECORDING) -> dict[str, Record]:
    """The inverse of save_records."""
    fields: dict[str, dict[str, Any]] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for key, value in arrays.items():
            case, name = key.split("/")
            fields.setdefault(case, {})[name] = json.loads(value.item()) if value.dtype.kind == "U" else value
    return {case: Record(**values) for case, values in fields.items()}


def reference_model(case: str, directory: Path) -> Any:
    """The transformers model of a case, read back from `directory`, where its config.json and weights are written.

    Raises:
      ValueError: transformers finds a tensor missing or has no place for one.
    """
    import torch
    import transformers

    kind = CASES[case][0]
    own = f"{kind}Config"
    config = getattr(transformers, own if "text_config" in CASES[case][1] else CONFIGS.get(kind, own))(**settings(case))
    config.save_pretrained(directory)
    kind = getattr(transformers, config.architectures[0])
    with torch.device("meta"):  # names and shapes only: tied tensors count once
        empty = kind(config)
    buffers = [(name, buffer) for name, buffer in empty.named_buffers() if name in empty.state_dict()]
    shapes = in_files({name: tuple(p.shape) for name, p in [*empty.named_parameters(), *buffers]}, CASES[case][0])
    write_safetensors(directory / WEIGHTS, weights(shapes))
    model, report = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"]:
        raise ValueError(f"{case}: transformers misses {report['missing_keys']}, ignores {report['unexpected_keys']}")
    return model.eval()


def reference_answers(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """(prompts with their greedy continuations [B, N] int32, logits at each of their positions [B, N, V] float32)."""
    import torch

    prompts = torch.tensor(PROMPTS_BN, dtype=torch.long)
    lengths = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    with torch.no_grad():
        tokens = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, pad_token_id=0, **lengths
        )
        logits_BNV = model(tokens).logits
    return tokens.numpy().astype(np.int32), logits_BNV.numpy()
