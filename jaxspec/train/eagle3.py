"""`python -m jaxspec.train eagle3`: an EAGLE-3 head by training-time test, on the target's own outputs.

The target is frozen; its auxiliary states and distributions are computed in the training step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from jaxspec.checkpointing import eagle3 as checkpoint
from jaxspec.checkpointing import hf
from jaxspec.models.layers import Transformer, causal_attention
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.train import data, evaluate, loop
from jaxspec.train.loss import acceptance_metrics, masked_mean, on_draft_vocabulary, soft_cross_entropy
from jaxspec.train.ttt import training_time_test

#: A draft vocabulary that would hold this share of the tokens might as well hold all.
NEARLY_FULL = 0.9


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The geometry's defaults are the demo head's."""
    p.add_argument("--target", type=Path, required=True, help="Hugging Face directory with a tokenizer.json")
    p.add_argument("--data", type=Path, required=True, help="what `regenerate` wrote")
    p.add_argument("--out", type=Path, required=True, help="directory to write")
    p.add_argument("--run-dir", type=Path, required=True, help="checkpoints and log")
    p.add_argument("--hidden-size", type=int, default=256)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--intermediate-size", type=int, default=704)
    p.add_argument("--draft-vocab-size", type=int, help="default: by coverage")
    p.add_argument("--coverage", type=float, default=0.985, help="share of the target's output tokens")
    p.add_argument("--ttt-steps", type=int, default=5)
    p.add_argument("--decay", type=float, default=0.8, help="weight of each further step's loss")
    p.add_argument("--corpus-share", type=float, default=0.25, help="rows of a batch from the corpus itself")
    p.add_argument("--batch", type=int, default=8, help="rows a step")
    p.add_argument("--steps", type=int, default=1200)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--save-every", type=int, default=100)
    p.add_argument("--seed", type=int, default=0)


def draft_vocabulary(counts_V: np.ndarray, size: int | None, coverage: float, multiple: int = 256) -> np.ndarray:
    """The most frequent tokens, ascending, int64 [Vd].

    Args:
      counts_V: how often the target wrote each token.
      size: how many; None for as many as `coverage` of the counts needs, rounded up to
        `multiple`, or all where that is nearly all.

    Raises:
      ValueError: size or coverage out of range.
    """
    vocab_size = len(counts_V)
    if size is not None and not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size must lie between 1 and the target's vocab_size {vocab_size}, got {size}")
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"coverage must lie in (0, 1], got {coverage}")
    frequent = np.argsort(-counts_V, kind="stable")
    if size is None:
        share = np.cumsum(counts_V[frequent]) / max(1, counts_V.sum())
        needed = int(np.searchsorted(share, coverage)) + 1
        size = -(-needed // multiple) * multiple
        if size >= NEARLY_FULL * vocab_size:
            size = vocab_size
    return np.sort(frequent[:size])


def new_head(cfg: Eagle3Config, target: Transformer, target_ids: np.ndarray, seed: int) -> Eagle3Head:
    """A head that starts from the target: its tables, projected on their principal directions.

    The last auxiliary state passes fc by the same projection, so the untrained head already
    resembles the target cut off after that layer.
    """
    head = Eagle3Head(cfg, rngs=nnx.Rngs(params=seed))
    head.target_ids[...] = jnp.asarray(target_ids, jnp.int32)
    table_VE = np.asarray(target.embedding[...], np.float32)
    output_VE = table_VE if target.lm_head is None else np.asarray(target.lm_head.kernel[...], np.float32).T
    output_VE = output_VE * np.asarray(target.norm.weight[...], np.float32)[None, :]
    directions_EH = np.linalg.svd(output_VE, full_matrices=False)[2][: cfg.hidden_size].T
    width = directions_EH.shape[1]
    head.embedding[...] = head.embedding[...].at[:, :width].set(table_VE @ directions_EH)
    head.lm_head.kernel[...] = head.lm_head.kernel[...].at[:width].set((output_VE[target_ids] @ directions_EH).T)
    last = cfg.target_hidden_size * (cfg.num_aux - 1)
    head.fc.kernel[...] = head.fc.kernel[...].at[last:, :width].set(directions_EH)
    return head


def ttt_loss(
    head: Eagle3Head, target: Transformer, tokens_BT: jax.Array, steps: int, decay: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum over the steps i of decay**i times the soft cross entropy to the target, nats; and the acceptance."""
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None, :], tokens_BT.shape)
    hidden_BTE, aux_BTA = target(tokens_BT, positions_BT, causal_attention, head.config.aux_layer_ids)
    assert aux_BTA is not None
    target_logits_BTV = target.logits(hidden_BTE)
    target_ids_V = head.target_ids[...]
    probs_BTV, inside_BT = on_draft_vocabulary(target_logits_BTV, target_ids_V)
    best_BT = jnp.argmax(target_logits_BTV, axis=-1)
    loss, matches = jnp.float32(0.0), []
    for i, logits_BNV in enumerate(training_time_test(head, aux_BTA, tokens_BT, steps)):
        here = slice(i + 1, i + 1 + logits_BNV.shape[1])  # the target's position n + 1 + i predicts the same token
        entropy_BN = soft_cross_entropy(logits_BNV, probs_BTV[:, here])
        loss = loss + decay**i * masked_mean(entropy_BN, inside_BT[:, here])
        matches.append(target_ids_V[jnp.argmax(logits_BNV, axis=-1)] == best_BT[:, here])
    return loss, acceptance_metrics(matches)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out, and returns (and saves as training.json) the held-out acceptance."""
    target = hf.load_model(args.target, dtype=jnp.float32)
    tok = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    generated = data.Generated.load(args.data)
    counts_V = generated.select(~generated.held_out).output_counts(target.config.vocab_size)
    target_ids = draft_vocabulary(counts_V, args.draft_vocab_size, args.coverage)
    coverage = float(counts_V[target_ids].sum() / counts_V.sum())
    print(f"draft vocabulary: {len(target_ids)} tokens, {coverage:.2%} of the target's outputs", flush=True)

    cfg = Eagle3Config(
        hidden_size=args.hidden_size,
        target_hidden_size=target.config.hidden_size,
        intermediate_size=args.intermediate_size,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=len(target_ids),
        aux_layer_ids=target.config.aux_layers,
        num_aux=len(target.config.aux_layers),
        rms_norm_eps=target.config.rms_norm_eps,
        rope_theta=target.config.rope_theta,
        rope_scaling=target.config.rope_scaling,
        max_position_embeddings=target.config.max_position_embeddings,
    )
    head_graph, state, buffers = nnx.split(new_head(cfg, target, target_ids, args.seed), nnx.Param, ...)
    target_graph, target_state = nnx.split(target)
    parameters = sum(x.size for x in jax.tree.leaves(state))
    print(f"parameters: {parameters:,}", flush=True)

    def loss_fn(state: Any, frozen: Any, tokens_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        head, target = nnx.merge(head_graph, state, frozen["buffers"]), nnx.merge(target_graph, frozen["target"])
        return ttt_loss(head, target, tokens_BT, args.ttt_steps, args.decay)

    batches = data.student_batches(generated, tok, args.batch, args.corpus_share, args.seed)
    optim = loop.OptimConfig(steps=args.steps, lr=args.lr, save_every=args.save_every)
    frozen = {"target": target_state, "buffers": buffers}
    state = loop.run(loss_fn, state, batches, optim, args.run_dir, frozen=frozen)
    head = nnx.merge(head_graph, state, buffers)
    checkpoint.save_head(head, args.out, tokenizer=tok, dtype=jnp.bfloat16)
    table = evaluate.acceptance(generated, evaluate.eagle3_matches(head, target, args.ttt_steps), args.ttt_steps)
    print(evaluate.format_table(table), flush=True)
    record = {
        "held_out_acceptance": table,
        "parameters": parameters,
        "draft_vocabulary_coverage": round(coverage, 5),
        "tokens_seen": args.steps * args.batch * generated.tokens.shape[1],
        "optimizer": dataclasses.asdict(optim),
        "ttt_steps": args.ttt_steps,
        "corpus_share": args.corpus_share,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return record
