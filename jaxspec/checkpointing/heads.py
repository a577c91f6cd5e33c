"""What the formats of all draft heads share: layer configurations, speculators' wrapper, the target's own tables.

Owns the fields that mean the same in every format, and the rule by which a stored table is the target's. Must not
know any one kind of head.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from jaxspec.checkpointing import hf, quantised
from jaxspec.checkpointing.tensors import (
    INTEGERS,
    WEIGHTS,
    TensorReader,
    replace_directory,
    write_json,
    write_safetensors,
)
from jaxspec.models import registry, weight_map
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.layers import Linear, Shared
from jaxspec.models.quantised import Quantised

#: The release of PyPI `speculators` whose layout is read and written, and its marks in a config.json.
SPECULATORS_VERSION = "0.9.0"
KIND, WRAPPER, LAYER = "speculators_model_type", "speculators_config", "transformer_layer_config"
#: speculators stores these beside its heads in some states of training; they are the target's.
IGNORED = rf"{hf.IGNORED}|verifier_(norm|lm_head)\.weight"
#: Fields of a configuration that say nothing of what is computed, or what reading its layers looks at.
LAYER_FIELDS = frozenset({
    "architectures", "attention_bias", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "mlp_bias", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "pad_token_id", "partial_rotary_factor", "pretraining_tp",
    "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache", "use_sliding_window", "vocab_size",
    "_name_or_path",
    # What transformers 4 writes of every configuration: of its trainers, its own outputs and its generation.
    "add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "prefix", "problem_type", "pruned_heads", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torchscript", "typical_p", "use_bfloat16",
})  # fmt: skip
#: What stands around a speculators head's own fields.
WRAPPER_FIELDS = frozenset({
    "architectures", "auto_map", "draft_vocab_size", "dtype", KIND, "speculators_version", WRAPPER,
    "target_hidden_size", "tie_word_embeddings", "torch_dtype", LAYER, "transformers_version",
})  # fmt: skip
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}

_Config = TypeVar("_Config")
_Head = TypeVar("_Head", bound=Any)


def check_known(what: str, raw: Mapping[str, Any], own: Collection[str]) -> None:
    """Refuses fields of a head's config.json that nobody reads and that are not known to be harmless.

    Args:
      what: the head, for the message.
      own: its fields beside the layers'; those of its layers may stand in a configuration of their own.

    Raises:
      ValueError: names them and their values.
    """
    if LAYER not in raw:
        refuse_unknown(what, "fields", raw, {*LAYER_FIELDS, *own})
        return
    refuse_unknown(what, "fields", raw, {*WRAPPER_FIELDS, *own})
    refuse_unknown(what, LAYER, raw[LAYER], LAYER_FIELDS)


def refuse_unknown(what: str, where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """`check_known` for a part of config.json; fields that are null say nothing."""
    unknown = {key: value for key, value in sorted(given.items()) if key not in known and value is not None}
    if unknown:
        raise ValueError(
            f"config.json: {where} {unknown} of {what} are not known and might change what it computes; known are "
            f"{sorted(known)}"
        )


def read_layer(fields: Mapping[str, Any], family: str) -> ModelConfig:
    """A head's decoder layers from Hugging Face's fields, with every check that models get.

    The result says nothing of what a layer does not have: tied tables and special tokens.

    Args:
      family: whose names and defaults the fields follow (a key of models.registry).

    Raises:
      ValueError: a missing or impossible field, or a feature that is not implemented.
    """
    names = list(registry.FAMILIES[family].architectures[:1])
    return bare(registry.read_config({**fields, "architectures": names}))


def bare(cfg: ModelConfig) -> ModelConfig:
    """A configuration without the fields that only a whole model has a use for."""
    return dataclasses.replace(cfg, tie_word_embeddings=False, bos_token_id=None, eos_token_ids=())


def write_layer(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of read_layer, for the plainest family that can express it; without `architectures`.

    Raises:
      ValueError: fields that no family can express together.
    """
    family = "qwen3" if cfg.qk_norm else "qwen2" if cfg.attention_bias and not cfg.output_bias else "llama"
    raw = registry.write_config(dataclasses.replace(bare(cfg), family=family))
    return {k: v for k, v in raw.items() if k != "architectures"}


def architectures(config: Mapping[str, Any]) -> set[str]:
    """What a config.json names as architecture."""
    found = config.get("architectures")
    return set(found if isinstance(found, list) else [])


def wrapper(
    kind: str, architecture: str, layer: Mapping[str, Any], target: ModelConfig, dtype: DTypeLike,
    verifier: str | None, tokens: int,
) -> dict[str, Any]:  # fmt: skip
    """The fields of a speculators config.json that every kind has.

    Args:
      kind, architecture: speculators' names of them. layer: the head's transformer_layer_config.
      verifier: name or path of the target, which speculators opens when it loads the head; None: unknown.
      tokens: drafted tokens a round that the head proposes to its users.
    """
    family = registry.FAMILIES.get(target.family)
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        KIND: kind,
        "speculators_version": SPECULATORS_VERSION,
        WRAPPER: {
            "algorithm": kind,
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier,
                "architectures": list(family.architectures[:1]) if family is not None else [],
            },
        },
        LAYER: dict(layer),
        "tie_word_embeddings": False,
        "dtype": hf.dtype_name(dtype),
    }


def replaced(cfg: _Config, overrides: Mapping[str, Any]) -> _Config:
    """A configuration with fields that the caller knows better than config.json does.

    Raises:
      ValueError: a field that the configuration does not have; values that it refuses.
    """
    known = {f.name for f in dataclasses.fields(cfg)}  # pyright: ignore[reportArgumentType]
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f"overrides {unknown} are no fields of {type(cfg).__name__}; it has {sorted(known)}")
    return dataclasses.replace(cfg, **overrides)  # pyright: ignore[reportArgumentType,reportCallIssue]


def check_fits(what: str, given: Any, of_target: str, wanted: Any) -> None:
    """Raises ValueError, with both values, where a head's field is not the target's."""
    if given != wanted:
        raise ValueError(f"config.json: the head's {what} is {given}, the target's {of_target} is {wanted}")


def check_written(cfg: Any, back: Any) -> None:
    """Raises ValueError, naming fields and values, where a written configuration would read as another."""
    if cfg != back:
        wrong = [f.name for f in dataclasses.fields(cfg) if getattr(cfg, f.name) != getattr(back, f.name)]
        pairs = ", ".join(f"{n}={getattr(cfg, n)!r} (would read as {getattr(back, n)!r})" for n in wrong)
        raise ValueError(f"this layout cannot express {pairs}")


def same_table(a: np.ndarray | jax.Array, b: np.ndarray | jax.Array) -> bool:
    """Whether two tables are one: equal, up to the rounding of the coarser one's type."""
    if a.shape != b.shape:
        return False
    coarse = min((a.dtype, b.dtype), key=lambda d: _BITS[np.dtype(d).name])
    left, right = (np.asarray(x).astype(coarse, copy=False) for x in (a, b))
    return bool(np.array_equal(left, right))


def lend_tables(
    target: TargetModel, dtype: DTypeLike, own_embedding_VE: np.ndarray | None, own_head_VE: np.ndarray | None
) -> tuple[nnx.Variable, Linear | None]:
    """(embedding, lm_head) of a head: the target's own as `Shared`, unless a checkpoint stores others.

    Args:
      dtype: of the head; a target of another type is cast.
      own_embedding_VE, own_head_VE: what the checkpoint stores, [V, E]; None where it stores nothing.

    Returns:
      lm_head is None where it is tied to the returned embedding.
    """
    embedding = lend_embedding(target, dtype, own_embedding_VE)
    if target.lm_head is not None and isinstance(few := target.lm_head.kernel.get_value(), Quantised):
        own = None if own_head_VE is None else nnx.Param(jnp.asarray(own_head_VE).astype(dtype).T)
        return embedding, _output_layer(Shared(few) if own is None else own)
    kernel_EV = target.embedding.get_value().T if target.lm_head is None else target.lm_head.kernel.get_value()
    if own_head_VE is not None and not same_table(own_head_VE, kernel_EV.T):
        return embedding, _output_layer(nnx.Param(jnp.asarray(own_head_VE).astype(dtype).T))
    if target.lm_head is None and isinstance(embedding, Shared):
        return embedding, None
    return embedding, _output_layer(Shared(kernel_EV.astype(dtype)))


def lend_embedding(target: TargetModel, dtype: DTypeLike, own_VE: np.ndarray | None) -> nnx.Variable:
    """The embedding of `lend_tables`."""
    theirs_VE = target.embedding.get_value()
    if own_VE is None or same_table(own_VE, theirs_VE):
        return Shared(theirs_VE.astype(dtype))
    return nnx.Param(jnp.asarray(own_VE).astype(dtype))


def lend_rows(target: TargetModel, dtype: DTypeLike, ids_V: np.ndarray, own_VE: np.ndarray | None) -> Linear:
    """The output layer of a reduced vocabulary: rows of the target's as `Shared`, unless a checkpoint stores others.

    Args:
      ids_V: the target's id of each draft id. own_VE: what the checkpoint stores, [Vd, E].
    """
    if target.lm_head is not None and isinstance(few := target.lm_head.kernel.get_value(), Quantised):
        if own_VE is None:
            return _output_layer(Shared(few.along_outputs(lambda x: x[:, ids_V])))
        return _output_layer(nnx.Param(jnp.asarray(own_VE).astype(dtype).T))
    full_VE = target.embedding.get_value() if target.lm_head is None else target.lm_head.kernel.get_value().T
    theirs_VE = full_VE[ids_V]
    if own_VE is None or same_table(own_VE, theirs_VE):
        return _output_layer(Shared(theirs_VE.astype(dtype).T))
    return _output_layer(nnx.Param(jnp.asarray(own_VE).astype(dtype).T))


def owned(lm_head: Linear) -> Linear:
    """An output layer that `own_tables` takes for a head's own."""
    return _output_layer(nnx.Param(lm_head.kernel.get_value()))


def _output_layer(kernel_EV: nnx.Variable) -> Linear:
    layer = Linear(1, 1, dtype=jnp.dtype(jnp.float32), rngs=None)
    layer.kernel = kernel_EV  # pyright: ignore[reportAttributeAccessIssue]
    return layer


def stored_table(reader: TensorReader, shape: tuple[int, ...], *names: str | None) -> np.ndarray | None:
    """A table [V, E] under the first of these names (without `.weight`) that the checkpoint has; None without one."""
    name = reader.first(*(f"{n}.weight" for n in names if n is not None))
    return None if name is None else reader.get(name, shape)


def read_target_ids(reader: TensorReader, draft_vocab: int, vocab: int, prefix: str = "") -> np.ndarray:
    """The target's id of each draft id, [Vd] int64, from d2t's offsets.

    Raises:
      ValueError: tensors that contradict each other or the sizes.
    """
    d2t, t2d = (reader.first(name, prefix + name) for name in ("d2t", "t2d"))
    if d2t is None:
        if draft_vocab != vocab:
            raise ValueError(
                f"{reader.directory} has no 'd2t', but draft_vocab_size is {draft_vocab} and vocab_size {vocab}"
            )
        ids = np.arange(vocab)
    else:
        ids = np.arange(draft_vocab) + reader.get(d2t, (draft_vocab,), INTEGERS)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != len(ids):
        raise ValueError(
            f"'d2t' in {reader.directory} must give distinct ids from 0 to {vocab - 1}; "
            f"it gives {len(np.unique(ids))} from {ids.min()} to {ids.max()} for {len(ids)} draft ids"
        )
    if t2d is not None:
        drafted = np.flatnonzero(reader.get(t2d, (vocab,), INTEGERS))
        if not np.array_equal(drafted, np.sort(ids)):
            raise ValueError(
                f"'t2d' in {reader.directory} marks {len(drafted)} tokens, which are not the {len(ids)} of 'd2t'"
            )
    return ids


def vocabulary_tensors(ids_V: np.ndarray, vocab: int, prefix: str = "") -> dict[str, np.ndarray]:
    """What `read_target_ids` reads; nothing where the vocabulary is full."""
    if len(ids_V) == vocab:
        return {}
    return {f"{prefix}d2t": ids_V - np.arange(len(ids_V)), f"{prefix}t2d": np.isin(np.arange(vocab), ids_V)}


def read_head(
    make: Callable[[nnx.Variable, Linear | None], _Head], weights: Callable[[_Head], Iterable[weight_map.Weight]],
    tables: tuple[nnx.Variable, Linear | None], reader: TensorReader, dtype: DTypeLike, elsewhere: str = "",
    quantisation: quantised.Read | None = None,
) -> _Head:  # fmt: skip
    """A head with a checkpoint's tensors, on tables that `lend_tables` and its like gave.

    Args:
      make: a head on (embedding, lm_head). weights: its parameters but the tables.
      elsewhere: a regular expression of tensors that are not the head's; what no parameter takes besides is refused.
      quantisation: see hf.load_weights.

    Raises:
      ValueError: see `hf.load_weights` and `TensorReader.refuse_unread`.
    """
    embedding, lm_head = tables

    def placeholders() -> _Head:
        out = None if lm_head is None else Linear(1, 1, dtype=jnp.dtype(dtype), rngs=None)
        return make(Shared(jnp.zeros((1, 1), dtype)), out)

    head = nnx.eval_shape(placeholders)
    hf.load_weights(weights(head), reader, quantisation)
    reader.refuse_unread(IGNORED + elsewhere + (f"|{quantised.IGNORED}" if quantisation is not None else ""))
    head.embedding = embedding
    if lm_head is not None and head.lm_head is not None:
        head.lm_head.kernel = lm_head.kernel
    return head


def own_tables(
    embedding: nnx.Variable, lm_head: Linear | None, embedding_name: str, head_name: str
) -> Iterable[weight_map.Weight]:
    """The tables that are not the target's (`Shared`), trained or not, under these names (without `.weight`)."""
    if not isinstance(embedding, Shared):
        yield weight_map.Weight(embedding, (f"{embedding_name}.weight",), (embedding.shape[1],))
    if lm_head is not None and not isinstance(lm_head.kernel, Shared):
        yield from weight_map.linear_weights(lm_head, [head_name])


def write_head(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    tokenizer: Tokenizer | None,
    file: str = WEIGHTS,
) -> None:
    """Writes config.json, the tensors and tokenizer.json; all or nothing."""
    with replace_directory(directory) as staging:
        if tokenizer is not None:
            tokenizer.save(str(staging / "tokenizer.json"))
        write_json(staging / "config.json", config)
        write_safetensors(staging / file, tensors)
