"""`python -m jaxspec.train draft_model`: a small Llama distilled from the target, for draft-model speculation."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

from jaxspec.checkpointing import hf
from jaxspec.models.base import ModelConfig
from jaxspec.models.layers import Transformer, causal_attention
from jaxspec.train import data, evaluate, loop
from jaxspec.train.loss import soft_cross_entropy


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The geometry's defaults are the demo draft model's."""
    p.add_argument("--target", type=Path, required=True, help="Hugging Face directory with a tokenizer.json")
    p.add_argument("--data", type=Path, required=True, help="what `regenerate` wrote")
    p.add_argument("--out", type=Path, required=True, help="Hugging Face directory to write")
    p.add_argument("--run-dir", type=Path, required=True, help="checkpoints and log")
    p.add_argument("--hidden-size", type=int, default=192)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--heads", type=int, default=3)
    p.add_argument("--kv-heads", type=int, default=1)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--intermediate-size", type=int, default=512)
    p.add_argument("--hard-share", type=float, default=0.0, help="weight of the cross entropy to the text itself")
    p.add_argument("--corpus-share", type=float, default=0.25, help="rows of a batch from the corpus itself")
    p.add_argument("--batch", type=int, default=8, help="rows a step")
    p.add_argument("--steps", type=int, default=900)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--save-every", type=int, default=100)
    p.add_argument("--depth", type=int, default=5, help="tokens a chain in the final evaluation")
    p.add_argument("--seed", type=int, default=0)


def new_draft_model(cfg: ModelConfig, target: Transformer, seed: int) -> Transformer:
    """A tied model whose embedding starts as the target's, projected on its principal directions."""
    draft = Transformer(cfg, rngs=nnx.Rngs(params=seed))
    table_VE = np.asarray(target.embedding[...], np.float32)
    directions_EH = np.linalg.svd(table_VE, full_matrices=False)[2][: cfg.hidden_size].T
    width = directions_EH.shape[1]
    draft.embedding[...] = draft.embedding[...].at[:, :width].set(table_VE @ directions_EH)
    return draft


def distillation_loss(
    draft: Transformer, target: Transformer, tokens_BT: jax.Array, hard_share: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """hard_share of the cross entropy to the text and the rest to the target's distribution, nats; and agreement."""
    inputs, labels = tokens_BT[:, :-1], tokens_BT[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None, :], inputs.shape)
    hidden, _ = draft(inputs, positions, causal_attention)
    logits = draft.logits(hidden)
    loss = hard_share * optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    if hard_share == 1.0:
        return loss, {"accept": (jnp.argmax(logits, axis=-1) == labels).mean()}
    target_hidden, _ = target(inputs, positions, causal_attention)
    target_logits = target.logits(target_hidden)
    soft = soft_cross_entropy(logits, jax.nn.softmax(target_logits, axis=-1)).mean()
    same = jnp.argmax(logits, axis=-1) == jnp.argmax(target_logits, axis=-1)
    return loss + (1.0 - hard_share) * soft, {"accept": same.mean()}


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out, and returns (and saves as training.json) the held-out acceptance.

    Raises:
      ValueError: hard_share outside [0, 1].
    """
    if not 0.0 <= args.hard_share <= 1.0:
        raise ValueError(f"hard_share must lie between 0 and 1, got {args.hard_share}")
    target = hf.load_model(args.target, dtype=jnp.float32)
    tok = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    generated = data.Generated.load(args.data)
    cfg = dataclasses.replace(
        target.config,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        tie_word_embeddings=True,
    )
    graph, state = nnx.split(new_draft_model(cfg, target, args.seed))
    target_graph, target_state = nnx.split(target)
    parameters = sum(x.size for x in jax.tree.leaves(state))
    print(f"parameters: {parameters:,}", flush=True)

    def loss_fn(state: Any, frozen: Any, tokens_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return distillation_loss(nnx.merge(graph, state), nnx.merge(target_graph, frozen), tokens_BT, args.hard_share)

    batches = data.student_batches(generated, tok, args.batch, args.corpus_share, args.seed)
    optim = loop.OptimConfig(steps=args.steps, lr=args.lr, save_every=args.save_every)
    state = loop.run(loss_fn, state, batches, optim, args.run_dir, frozen=target_state)
    draft = nnx.merge(graph, state)
    hf.save_model(draft, args.out, tokenizer=tok, dtype=jnp.bfloat16)
    table = evaluate.acceptance(generated, evaluate.draft_model_matches(draft, args.depth), args.depth)
    print(evaluate.format_table(table), flush=True)
    record = {
        "held_out_acceptance": table,
        "parameters": parameters,
        "tokens_seen": args.steps * args.batch * generated.tokens.shape[1],
        "optimizer": dataclasses.asdict(optim),
        "hard_share": args.hard_share,
        "corpus_share": args.corpus_share,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return record
