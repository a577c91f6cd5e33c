"""The heads that parity with PyPI `speculators` is shown on: configurations, inputs, weights, and our own answers.

Owns the cases and the layout of vectors/: for each case the directory that speculators saved (config.json and
model.safetensors) and record.safetensors with inputs and answers. Must not import torch or speculators, which only
record.py needs.

Alignment. speculators' batches are shifted before its models see them (models/eagle3/data.py): index p pairs the
target's auxiliary states of position p with the token at p + 1, as ours do; the logits there predict the token at
p + 2, and their target is the verifier's last hidden state of position p + 1. Its rotary positions start at 1 where
ours start at 0, which makes no difference: only distances count. MTP modules get unshifted tokens and shift them
themselves; each of their steps attends to its own keys only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxspec.models.base import Attend
from jaxspec.models.layers import Transformer, causal_attention
from jaxspec.models.tiny import tiny_target

VECTORS = Path(__file__).with_name("vectors")
VERSIONS = VECTORS / "versions.json"
#: Tokens a case, training-time-test steps and their decay, drafted tokens of an MTP module, depths of P-EAGLE.
LENGTH, STEPS, DECAY, MTP_WEIGHTS, DEPTHS = 12, 3, 0.8, (0.5, 0.3, 0.2), 4
#: Largest difference of logits, both absolute and as a share of the largest logit.
TOLERANCE = 1e-5
VOCAB, DRAFTED, HIDDEN, TARGET_LAYERS = 29, 17, 16, 8
MASK_TOKEN = 3
#: Blocks of DFlash: places, how many, and the decay of their loss.
BLOCK, ANCHORS, GAMMA, ALPHA = 4, 3, 4.0, 0.5

SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One head.

    Attributes:
      kind: speculators' model type. family: "llama" or "qwen3".
      layer: changes of SHAPE. fields: of the head's own configuration.
      texts: lengths of the texts that are packed into the row, LENGTH in all.
    """

    kind: str = "eagle3"
    family: str = "llama"
    layer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    texts: tuple[int, ...] = (LENGTH,)

    @property
    def num_aux(self) -> int:
        ids = self.fields.get("aux_hidden_state_layer_ids") or self.fields.get("eagle_aux_hidden_state_layer_ids")
        return len(ids or (0, 0, 0))

    @property
    def draft_vocab_size(self) -> int:
        return self.fields.get("draft_vocab_size", VOCAB)

    @property
    def document_ids(self) -> np.ndarray:
        """The number of the text of each token, [LENGTH] int64."""
        return np.repeat(np.arange(len(self.texts)), self.texts)


BLOCKS = ("dflash", "dspark", "dflash2")
#: Of DSpark's cross entropy and total variation, which is half the distance that it is written with.
CE, TV = 0.1, 1.8
#: Share of DFlash 2's selector in its loss.
SELECTED = 0.7

DFLASH: dict[str, Any] = dict(aux_hidden_state_layer_ids=[2, 6], block_size=BLOCK, mask_token_id=MASK_TOKEN)
SELECTOR: dict[str, Any] = dict(conv_group_size=4, selector_rank=5, selector_top_k=6)
#: The second layer's window ends inside the text.
SLIDING: dict[str, Any] = dict(
    num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=3
)

CASES: dict[str, Case] = {
    "eagle3": Case(),
    "eagle3-residual": Case(fields=dict(norm_before_residual=True)),
    "eagle3-before-fc": Case(fields=dict(norm_before_fc=True)),
    "eagle3-fc-norm": Case(fields=dict(fc_norm=True)),
    "eagle3-norm-output": Case(fields=dict(norm_output=True)),
    "eagle31": Case(
        fields=dict(fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[1, 4, 5]), texts=(7, 5)
    ),
    "eagle3-two-layers": Case(layer=dict(num_hidden_layers=2)),
    "eagle3-draft-vocabulary": Case(fields=dict(draft_vocab_size=DRAFTED)),
    "eagle3-qwen3": Case(family="qwen3", fields=dict(norm_before_residual=True)),
    "eagle3-biases-rope": Case(
        layer=dict(attention_bias=True, rope_parameters=LLAMA3, rms_norm_eps=1e-3),
        fields=dict(eagle_aux_hidden_state_layer_ids=[0, 2, 4, 6, 8]),
    ),
    "peagle": Case("peagle", layer=dict(num_hidden_layers=2), fields=dict(mask_token_id=MASK_TOKEN), texts=(7, 5)),
    "peagle-fc-norm": Case(
        "peagle", "qwen3", fields=dict(mask_token_id=MASK_TOKEN, fc_norm=True, draft_vocab_size=DRAFTED)
    ),
    "mtp": Case("mtp", "qwen3", layer=dict(num_hidden_layers=TARGET_LAYERS)),
    "dflash": Case("dflash", "qwen3", fields=DFLASH, texts=(7, 5)),
    "dflash-from-anchor": Case(
        "dflash", "qwen3", fields=DFLASH | dict(draft_vocab_size=DRAFTED, sample_from_anchor=True)
    ),
    "dflash-sliding": Case("dflash", "qwen3", layer=SLIDING, fields=DFLASH),
    "dflash-sliding-non-causal": Case(
        "dflash", "qwen3", layer=SLIDING, fields=DFLASH | dict(sliding_window_non_causal=True)
    ),
    "dspark": Case("dspark", "qwen3", fields=DFLASH | dict(draft_vocab_size=DRAFTED, markov_rank=5)),
    "dspark-gated": Case(
        "dspark", "qwen3", fields=DFLASH | dict(markov_rank=5, markov_head_type="gated", sample_from_anchor=False)
    ),
    "dspark-rnn": Case(
        "dspark",
        "qwen3",
        fields=DFLASH | dict(markov_rank=5, markov_head_type="rnn", confidence_head_with_markov=False),
    ),
    "dflash2": Case("dflash2", "qwen3", fields=DFLASH | SELECTOR),
    "dflash2-sliding": Case(
        "dflash2", "qwen3", layer=SLIDING, fields=DFLASH | SELECTOR | dict(conv_kernel_size=3, sample_from_anchor=True)
    ),
}


def weights(case: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Every tensor random, float32: matrices of deviation 1 / sqrt(in), gains around 1."""
    rng = np.random.default_rng(list(CASES).index(case))
    out = {}
    for name in sorted(shapes):
        normal = rng.standard_normal(tuple(shapes[name]))
        if normal.ndim == 2:
            value = normal * (1.0 if name.startswith("embed") else normal.shape[1] ** -0.5)
        else:
            gain = normal.ndim == 1 and not name.endswith("bias")
            value = 0.3 * normal + gain
        out[name] = value.astype(np.float32)
    return out


def inputs(case: str) -> dict[str, np.ndarray]:
    """What the head is given: shifted as speculators' models expect it (see the module's docstring), batch 1."""
    c = CASES[case]
    rng = np.random.default_rng(1000 + list(CASES).index(case))
    width = HIDDEN if c.kind == "mtp" else c.num_aux * HIDDEN
    mask = np.ones((1, LENGTH), np.int64)
    mask[0, [0, 1, 6]] = 0
    out = {
        "hidden_states": rng.standard_normal((1, LENGTH, width)).astype(np.float32),
        "input_ids": rng.integers(0, VOCAB, (1, LENGTH)),
        "document_ids": c.document_ids[None],
        "loss_mask": mask,
        "targets": (2 * rng.standard_normal((1, LENGTH, c.draft_vocab_size))).astype(np.float32),
    }
    if c.kind in BLOCKS:  # a text that the verifier wrote: speculators' hard targets are its choices
        ids = drafted_ids() if c.draft_vocab_size < VOCAB else np.arange(VOCAB)
        out["input_ids"][:, 1:] = ids[out["targets"].argmax(-1)][:, :-1]
    return out


def drafted_ids() -> np.ndarray:
    """The target's ids that reduced vocabularies have, ascending, [DRAFTED] int64."""
    return np.sort(np.random.default_rng(7).permutation(VOCAB)[:DRAFTED])


def load_record(case: str, directory: Path = VECTORS) -> dict[str, np.ndarray]:
    """Inputs and answers of a case: `logits_{i}` of step i, `loss_*`, and what was sampled.

    That is `anchor_pos` and `depth` for P-EAGLE, `anchor_positions` for DFlash and DSpark, whose `confidence` are the
    logits of its confidence head.
    """
    return load_file(directory / case / "record.safetensors")


def load_versions() -> dict[str, str]:
    """Releases that the vectors were recorded with."""
    return json.loads(VERSIONS.read_text())


def target_of(record: Mapping[str, np.ndarray]) -> Transformer:
    """A target of the cases' geometry; with the tables of the record where it has them."""
    target = tiny_target(vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=TARGET_LAYERS)
    if "embed_tokens" in record:
        target.embedding.set_value(jnp.asarray(record["embed_tokens"]))
    if "lm_head" in record:
        assert target.lm_head is not None
        target.lm_head.kernel.set_value(jnp.asarray(record["lm_head"]).T)
    return target


def masked_attention(q_BNHC: jax.Array, k_BMGC: jax.Array, v_BMGC: jax.Array, mask_NM: np.ndarray) -> jax.Array:
    """Plain grouped-query attention under a mask; what speculators computes eagerly."""
    repeat = q_BNHC.shape[2] // k_BMGC.shape[2]
    k_BMHC, v_BMHC = jnp.repeat(k_BMGC, repeat, axis=2), jnp.repeat(v_BMGC, repeat, axis=2)
    scores_BHNM = jnp.einsum("bnhc,bmhc->bhnm", q_BNHC, k_BMHC) / q_BNHC.shape[-1] ** 0.5
    weights_BHNM = jax.nn.softmax(jnp.where(mask_NM[None, None], scores_BHNM, -jnp.inf), axis=-1)
    return jnp.einsum("bhnm,bmhc->bnhc", weights_BHNM, v_BMHC)


def unrolled(documents_N: np.ndarray) -> Attend:
    """Attention over the steps of a training-time test: the first step's keys causally within a text, and own keys."""
    n = len(documents_N)
    first_NN = np.tril(np.ones((n, n), bool)) & (documents_N[:, None] == documents_N[None])
    seen: dict[int, list[tuple[jax.Array, jax.Array]]] = {}

    def attend(layer: int, q_BNHC: jax.Array, k_BNGC: jax.Array, v_BNGC: jax.Array, *_: Any) -> jax.Array:
        steps = seen.setdefault(layer, [])
        steps.append((k_BNGC, v_BNGC))
        keys, values = (jnp.concatenate(x, axis=1) for x in zip(*steps, strict=True))
        mask_NM = np.concatenate([first_NN, *[np.eye(n, dtype=bool)] * (len(steps) - 1)], axis=1)
        return masked_attention(q_BNHC, keys, values, mask_NM)

    return attend


def eagle3_logits(head: Any, record: Mapping[str, np.ndarray]) -> list[jax.Array]:
    """Our training-time test on a record's inputs: logits [1, N, Vd] of each step."""
    ids = record["input_ids"]
    attend = unrolled(record["document_ids"][0])
    feature_BNE, logits = head.fuse(jnp.asarray(record["hidden_states"])), []
    for step in range(STEPS):
        tokens = np.pad(ids[:, step:], ((0, 0), (0, step)))
        positions = jnp.arange(LENGTH)[None] + step
        feature_BNE = head(jnp.asarray(tokens, jnp.int32), feature_BNE, positions, attend)
        logits.append(head.logits(feature_BNE))
    return logits


def peagle_logits(head: Any, record: Mapping[str, np.ndarray]) -> list[jax.Array]:
    """Our P-EAGLE on a record's sample of positions and depths: logits [1, S, Vd]."""
    anchor, depth = record["anchor_pos"], record["depth"]
    at, real = anchor + depth, depth == 0
    documents = record["document_ids"][0]
    mask = (documents[anchor][:, None] == documents[anchor][None]) & (
        (real[None] & (anchor[:, None] >= anchor[None]))
        | ((anchor[:, None] == anchor[None]) & (depth[:, None] >= depth[None]))
    )
    tokens = np.where(real, record["input_ids"][0, at], head.config.mask_token_id)[None]
    states = jnp.asarray(record["hidden_states"])[:, at]
    aux = jnp.where(real[None, :, None], states, head.mask_hidden[...][None, None])
    attend = lambda _, q, k, v, *_options: masked_attention(q, k, v, mask)
    hidden = head(jnp.asarray(tokens, jnp.int32), head.fuse(aux), jnp.asarray(at)[None], attend)
    return [head.logits(hidden)]


def mtp_logits(head: Any, record: Mapping[str, np.ndarray]) -> list[jax.Array]:
    """Our chained MTP module on a record's inputs: logits [1, N, V] of each step, N the positions with all steps."""
    count = LENGTH - len(MTP_WEIGHTS) - 1
    feature, logits = jnp.asarray(record["hidden_states"])[:, :count], []
    for step in range(len(MTP_WEIGHTS)):
        tokens = jnp.asarray(record["input_ids"][:, step + 1 : step + 1 + count], jnp.int32)
        feature = head(tokens, feature, jnp.arange(count)[None], causal_attention)
        logits.append(head.logits(feature))
    return logits


def block_states(head: Any, record: Mapping[str, np.ndarray]) -> jax.Array:
    """Our hidden states of the places that predict, on a record's blocks: [1, K, drafts, E]."""
    cfg, anchors_K = head.config, record["anchor_positions"]
    offset, column, texts = np.arange(cfg.block_size), np.arange(LENGTH), record["document_ids"][0]
    anchor_M = np.repeat(anchors_K, cfg.block_size)
    own_MM = anchor_M[:, None] == anchor_M[None]
    place_M = np.tile(offset, len(anchors_K))

    def run(states: jax.Array, tokens_K: jax.Array) -> jax.Array:
        entries = head.entries(states, jnp.arange(LENGTH)[None])

        def attend(layer: int, q: Any, k: Any, v: Any, options: Any) -> jax.Array:
            seen = (column[None] < anchor_M[:, None]) & (texts[None] == texts[anchor_M][:, None])
            own = own_MM
            if options.window is not None:  # as speculators counts it, from the anchor
                seen = seen & (column[None] >= anchor_M[:, None] - options.window)
                own = own if cfg.sliding_non_causal else own & (place_M[None] <= place_M[:, None])
            keys, values = jnp.split(entries[layer], 2, axis=-1)
            keys, values = jnp.concatenate([keys, k], axis=1), jnp.concatenate([values, v], axis=1)
            return masked_attention(q, keys, values, np.concatenate([seen, own], axis=1))

        hidden = head(head.block(tokens_K).reshape(1, -1), jnp.asarray(anchor_M + place_M)[None], attend)
        return head.predicting(hidden.reshape(len(anchors_K), cfg.block_size, -1))[None]

    return jax.jit(run)(record["hidden_states"], record["input_ids"][0, anchors_K].astype(np.int32))


def dflash_logits(head: Any, record: Mapping[str, np.ndarray]) -> list[jax.Array]:
    """Our DFlash on a record's blocks: logits [1, K * drafts, Vd]."""
    hidden = block_states(head, record)
    return [head.logits(hidden.reshape(1, -1, hidden.shape[-1]))]


def tokens_before(head: Any, record: Mapping[str, np.ndarray]) -> np.ndarray:
    """The token before each draft of a record's blocks, [1, K, drafts]."""
    at = record["anchor_positions"][:, None] + np.arange(head.config.drafts)[None]
    return record["input_ids"][:, at].astype(np.int32)


def dspark_logits(head: Any, record: Mapping[str, np.ndarray]) -> list[jax.Array]:
    """Our DSpark on a record's blocks: logits [1, K * drafts, Vd]."""
    joined = head.joined(block_states(head, record), tokens_before(head, record))
    return [head.joined_logits(joined.reshape(1, -1, joined.shape[-1]))]


def dflash2_logits(head: Any, record: Mapping[str, np.ndarray]) -> list[jax.Array]:
    """Our DFlash 2 on a record's blocks: logits [1, K * drafts, V], and scores of the record's candidates."""
    joined = head.joined(block_states(head, record), tokens_before(head, record))
    logits, features = head.parts(joined.reshape(1, -1, joined.shape[-1]))
    ids = jnp.asarray(record["candidates"], jnp.int32)
    return [logits, jnp.take_along_axis(logits, ids, axis=-1) + head.selector.scores(features, ids)]


ANSWERS = {
    "eagle3": eagle3_logits,
    "peagle": peagle_logits,
    "mtp": mtp_logits,
    "dflash": dflash_logits,
    "dspark": dspark_logits,
    "dflash2": dflash2_logits,
}
