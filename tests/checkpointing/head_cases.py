"""A random head of every kind for one tiny target, and hands to break their directories with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.checkpointing import heads, tensors
from jaxspec.models.layers import Transformer
from jaxspec.models.tiny import tiny_target
from jaxspec.speculation.drafters.dflash2_head import Dflash2Config, Dflash2Head
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead
from jaxspec.speculation.drafters.dspark_head import DsparkConfig, DsparkHead
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.medusa_head import MedusaConfig, MedusaHeads
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead

LAYERS, VOCAB, WIDTH = 8, 13, 32
EAGLE3 = Eagle3Config(
    hidden_size=16,
    target_hidden_size=WIDTH,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=VOCAB,
    draft_vocab_size=9,
    aux_layer_ids=(2, 4, 5),
)
TARGET_IDS = np.array([0, 1, 2, 4, 5, 7, 8, 11, 12])


def target(**overrides: Any) -> Transformer:
    return tiny_target(num_layers=LAYERS, **overrides)


def randomised(module: Any, seed: int = 0) -> Any:
    """Every trained parameter drawn anew; gains and biases from 0.5 to 1.5, where adding 1 loses nothing."""
    rng = np.random.default_rng(seed)
    for _, param in nnx.iter_graph(module):
        if isinstance(param, nnx.Param):
            value = rng.uniform(0.5, 1.5, param.shape) if param.ndim == 1 else rng.standard_normal(param.shape)
            param.set_value(jnp.asarray(value, param.dtype))
    return module


def eagle3_head(**overrides: Any) -> Eagle3Head:
    cfg = dataclasses.replace(EAGLE3, **overrides)
    head = Eagle3Head(cfg)
    if cfg.draft_vocab_size < cfg.vocab_size:
        head.target_ids.set_value(jnp.asarray(TARGET_IDS, jnp.int32))
    return randomised(head)


def eagle1_head(
    of: Transformer, *, layers: int = 2, own: bool = False, bias: bool = True, first_norm: bool = False, **layer: Any
) -> Eagle1Head:
    """On the target's tables, or with tables of its own."""
    shape = dataclasses.replace(heads.bare(of.config), num_layers=layers, family="eagle1", **layer)
    cfg = Eagle1Config(shape, of.config.num_layers, bias=bias, first_norm=first_norm)
    embedding, lm_head = heads.lend_tables(of, jnp.float32, *_tables(own))
    return randomised(Eagle1Head(cfg, embedding, lm_head))


def mtp_head(of: Transformer, *, own: bool = False, **layer: Any) -> MtpHead:
    shape = dataclasses.replace(heads.bare(of.config), num_layers=1, family="mtp", **layer)
    embedding, lm_head = heads.lend_tables(of, jnp.float32, *_tables(own))
    return randomised(MtpHead(MtpConfig(shape, of.config.num_layers), embedding, lm_head))


def medusa_heads(of: Transformer, *, num_heads: int = 3, num_layers: int = 1) -> MedusaHeads:
    cfg = MedusaConfig(num_heads, of.config.hidden_size, of.config.vocab_size, of.config.num_layers, num_layers)
    return randomised(MedusaHeads(cfg))


def dflash_head(
    of: Transformer, *, own: bool = False, draft: int = VOCAB, layers: int = 2, **fields: Any
) -> DflashHead:
    """On the target's tables, or with tables of its own; `draft` tokens can be drafted."""
    return _block_head(DflashHead, DflashConfig, of, own, draft, layers, fields)


def dspark_head(
    of: Transformer, *, own: bool = False, draft: int = VOCAB, layers: int = 1, **fields: Any
) -> DsparkHead:
    """As dflash_head."""
    return _block_head(DsparkHead, DsparkConfig, of, own, draft, layers, {"markov_rank": 5, **fields})


def dflash2_head(of: Transformer, *, own: bool = False, layers: int = 1, **fields: Any) -> Dflash2Head:
    """As dflash_head."""
    sizes = dict(conv_taps=3, conv_group=8, selector_rank=5, selector_top_k=4)
    return _block_head(Dflash2Head, Dflash2Config, of, own, VOCAB, layers, sizes | fields)


def _block_head(
    make: Any, config: Any, of: Transformer, own: bool, draft: int, layers: int, fields: dict[str, Any]
) -> Any:
    layer = dataclasses.replace(heads.bare(of.config), num_layers=layers, family="dflash", qk_norm=True)
    cfg = config(layer, (2, 5, 8), **{"block_size": 4, "mask_token_id": 3, "draft_vocab_size": draft, **fields})
    embedding, lm_head = heads.lend_tables(of, jnp.float32, *_tables(own))
    if draft < VOCAB:
        lm_head = heads.lend_rows(of, jnp.float32, TARGET_IDS, _tables(own)[1][:draft] if own else None)  # pyright: ignore[reportOptionalSubscript]
    head = randomised(make(cfg, embedding, lm_head))
    head.target_ids.set_value(jnp.asarray(TARGET_IDS if draft < VOCAB else np.arange(VOCAB), jnp.int32))
    return head


def module_of(kind: str, of: Transformer) -> Any:
    """A module of a kind that save_drafter writes."""
    make: dict[str, Callable[[], Any]] = {
        "eagle3": eagle3_head,
        "peagle": lambda: eagle3_head(mask_token_id=3, num_layers=2),
        "eagle1": lambda: eagle1_head(of),
        "dflash": lambda: dflash_head(of),
        "dspark": lambda: dspark_head(of),
        "dflash2": lambda: dflash2_head(of),
        "medusa": lambda: medusa_heads(of),
        "mtp": lambda: mtp_head(of),
        "draft_model": lambda: tiny_target(3),
    }
    return make[kind]()


def assert_same(left: Any, right: Any) -> None:
    """The same configuration, structure, kinds of variables and values."""
    assert left.config == right.config
    ours, theirs = (
        {path: node for path, node in nnx.iter_graph(m) if isinstance(node, nnx.Variable)} for m in (left, right)
    )
    assert ours.keys() == theirs.keys()
    for path, node in ours.items():
        assert type(node) is type(theirs[path]), path
        np.testing.assert_array_equal(node.get_value(), theirs[path].get_value(), err_msg=str(path))


def file_of(directory: Path) -> Path:
    """The one safetensors file of a directory."""
    (path,) = directory.glob("*.safetensors")
    return path


def read(directory: Path) -> dict[str, np.ndarray]:
    with tensors.read_tensors(directory, also=(file_of(directory).name,)) as reader:
        return {n: reader.get(n, reader.shape(n), tensors.FLOATS + tensors.INTEGERS) for n in reader.names}


def rewrite(directory: Path, changes: Mapping[str, np.ndarray | None]) -> None:
    """Replaces tensors of a saved head, or removes them (None)."""
    kept = {n: v for n, v in {**read(directory), **changes}.items() if v is not None}
    tensors.write_safetensors(file_of(directory), kept)


def rename(directory: Path, new_name: Callable[[str], str]) -> None:
    tensors.write_safetensors(file_of(directory), {new_name(n): v for n, v in read(directory).items()})


def reconfigure(directory: Path, **changes: Any) -> None:
    """Changes fields of config.json, or removes them (None)."""
    raw = {**json.loads((directory / "config.json").read_text()), **changes}
    tensors.write_json(directory / "config.json", {k: v for k, v in raw.items() if v is not None})


def _tables(own: bool) -> tuple[np.ndarray | None, np.ndarray | None]:
    if not own:
        return None, None
    rng = np.random.default_rng(5)
    table = lambda: rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
    return table(), table()
