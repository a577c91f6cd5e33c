"""`python -m jaxspec.train target`: a Llama from the demo corpus."""

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
from jaxspec.train import data, loop


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The geometry's defaults are the demo target's."""
    p.add_argument("--out", type=Path, required=True, help="Hugging Face directory to write")
    p.add_argument("--run-dir", type=Path, required=True, help="checkpoints, log and token cache")
    p.add_argument("--tokenizer", type=Path, help="reuse this tokenizer.json instead of training one")
    p.add_argument("--vocab-size", type=int, default=4096)
    p.add_argument("--hidden-size", type=int, default=384)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--heads", type=int, default=6)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--intermediate-size", type=int, default=1024)
    p.add_argument("--length", type=int, default=256, help="tokens a window")
    p.add_argument("--batch", type=int, default=8, help="windows a step")
    p.add_argument("--steps", type=int, default=4000)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--save-every", type=int, default=200)
    p.add_argument("--seed", type=int, default=0)


def next_token_loss(model: Transformer, windows_BT: jax.Array) -> jax.Array:
    """Cross entropy a token, [B, T - 1] nats."""
    inputs, labels = windows_BT[:, :-1], windows_BT[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None, :], inputs.shape)
    hidden, _ = model(inputs, positions, causal_attention)
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), labels)


def held_out_loss(model: Transformer, windows: np.ndarray, batch: int = 16, limit: int = 128) -> float:
    """Mean cross entropy in nats a token over at most `limit` windows."""
    graph, state = nnx.split(model)
    f = jax.jit(lambda s, w: next_token_loss(nnx.merge(graph, s), w).mean())
    usable = min(limit, len(windows)) // batch * batch
    return float(np.mean([f(state, jnp.asarray(windows[i : i + batch])) for i in range(0, usable, batch)]))


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out, and returns (and saves as training.json) the held-out losses."""
    documents = data.demo_corpus()
    args.run_dir.mkdir(parents=True, exist_ok=True)
    tok_path = args.tokenizer or args.run_dir / "tokenizer.json"
    if not tok_path.exists():
        texts = [d.text for d in documents if not d.held_out]
        data.train_tokenizer(texts, args.vocab_size).save(str(tok_path))
    tok = Tokenizer.from_file(str(tok_path))
    sets = data.tokenize(documents, tok)
    for (kind, held), s in sorted(sets.items()):
        print(f"{kind} {'held out' if held else 'training'}: {len(s.tokens):,} tokens", flush=True)

    bos, eos = data.text_ends(tok)
    cfg = ModelConfig(
        family="llama",
        vocab_size=tok.get_vocab_size(),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.hidden_size // args.heads,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=bos,
        eos_token_ids=(eos,),
    )
    model = Transformer(cfg, rngs=nnx.Rngs(params=args.seed))
    graph, state = nnx.split(model)
    print(f"parameters: {sum(x.size for x in jax.tree.leaves(state)):,}", flush=True)
    tokens = np.concatenate([s.tokens for (_, held), s in sorted(sets.items()) if not held])
    batches = data.Batches(tokens, args.length, args.batch, args.seed)

    def loss_fn(state: Any, _frozen: Any, windows: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return next_token_loss(nnx.merge(graph, state), windows).mean(), {}

    held = {kind: s.windows(args.length) for (kind, held), s in sets.items() if held}

    def on_log(step: int, _: dict[str, float]) -> None:
        if step % 500 == 0:
            print(f"step {step} data epoch {step * args.batch * args.length / len(tokens):.2f}", flush=True)

    optim = loop.OptimConfig(steps=args.steps, lr=args.lr, save_every=args.save_every)
    state = loop.run(loss_fn, state, batches, optim, args.run_dir, on_log)
    model = nnx.merge(graph, state)
    losses = {kind: round(held_out_loss(model, w), 4) for kind, w in sorted(held.items())}
    print(f"held-out loss, nats a token: {losses}", flush=True)
    hf.save_model(model, args.out, tokenizer=tok, dtype=jnp.bfloat16)
    record = {
        "held_out_loss_nats_per_token": losses,
        "parameters": int(sum(x.size for x in jax.tree.leaves(state))),
        "tokens_seen": args.steps * args.batch * args.length,
        "tokens_in_corpus": len(tokens),
        "optimizer": dataclasses.asdict(optim),
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return record
