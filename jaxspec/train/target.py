"""`python -m jaxspec.train target`: a Llama from JSONL texts, for demos and benchmarks that need a target of their own.

Owns its geometry, its tokenizer and its loss. Must not know drafters.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer as Backend

from jaxspec.checkpointing import hf
from jaxspec.models import registry
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.data import corpus, dataset
from jaxspec.train.data.batch import Batch, PackedRows
from jaxspec.train.data.jsonl import read_texts
from jaxspec.train.objective import unlikelihood
from jaxspec.train.objective.attention import packed_attention
from jaxspec.train.objective.chunks import map_positions
from jaxspec.train.run import loop, plots
from jaxspec.train.run import mesh as meshes
from jaxspec.train.run.optim import COMPUTE_DTYPES, OPTIMIZERS, SCHEDULES, OptimConfig

#: What a tokenizer is trained on at most; more text changes few merges.
_TOKENIZER_CHARS = 50_000_000


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The defaults of the geometry are the demo target's."""
    p.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL files to train on")
    p.add_argument("--eval-data", type=Path, nargs="+", help="JSONL files to evaluate on (default: none)")
    p.add_argument("--out", type=Path, required=True, help="Hugging Face directory to write")
    p.add_argument("--run-dir", type=Path, required=True, help="checkpoints, log and tokenizer")
    p.add_argument("--tokenizer", type=Path, help="reuse this tokenizer.json (default: train one)")
    p.add_argument("--vocab-size", type=int, default=4096, help="of a tokenizer that is trained")
    p.add_argument("--hidden-size", type=int, default=384, help="width of the residual stream")
    p.add_argument("--layers", type=int, default=8, help="decoder layers")
    p.add_argument("--heads", type=int, default=6, help="query heads of a layer")
    p.add_argument("--kv-heads", type=int, default=2, help="key-value heads of a layer")
    p.add_argument("--intermediate-size", type=int, default=1024, help="width of the MLP")
    p.add_argument("--context", type=int, default=2048, help="longest text in tokens that the checkpoint declares")
    p.add_argument("--rope-theta", type=float, default=10000.0, help="base of the rotary embedding")
    p.add_argument(
        "--chat-template", type=Path, help="Jinja template of the data's chats, kept beside the weights (default: none)"
    )
    p.add_argument(
        "--init-from", type=Path, help="go on from this directory's weights and tokenizer (default: new ones)"
    )
    p.add_argument(
        "--unlikelihood", type=float, default=0.0,
        help="weight of unlikelihood on what the model's own greedy continuations repeat; 0: none",
    )  # fmt: skip
    p.add_argument("--length", type=int, default=256, help="tokens a packed row")
    p.add_argument("--batch", type=int, default=8, help="rows a step, all micro-batches together")
    p.add_argument("--accumulate", type=int, default=1, help="micro-batches that a step's rows are cut into")
    p.add_argument("--steps", type=int, default=4000, help="optimiser steps")
    p.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    p.add_argument("--schedule", choices=SCHEDULES, default="cosine", help="of the learning rate")
    p.add_argument("--warmup", type=float, default=100, help="steps of linear warm-up; below 1 a share of all steps")
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="what turns gradients into steps")
    p.add_argument("--compute-dtype", choices=COMPUTE_DTYPES, default="float32", help="of activations")
    p.add_argument("--mesh", help="devices by axis, e.g. data=4,tensor=2 (default: one device)")
    p.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    p.add_argument("--log-every", type=int, default=20, help="steps between two rows of the log")
    p.add_argument("--eval-every", type=int, default=0, help="steps between evaluations; 0: only at the end")
    p.add_argument("--seed", type=int, default=0, help="same seed, same run")


def token_losses(model: TargetModel, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Cross entropy of each token after the first, without logits [B, T, V] in memory.

    Returns:
      (nats float32 [B, T - 1], which of them count bool [B, T - 1]).
    """
    hidden_BTE, _ = model(batch.tokens_BT, batch.positions_BT, packed_attention(batch.segments_BT))
    tied = model.lm_head is None
    table = model.embedding[...] if model.lm_head is None else model.lm_head.kernel[...]
    # Rounded inside each part: the parts' gradients are summed in float32.
    table = table.astype(jnp.float32)

    def losses(hidden_BNE: jax.Array, labels_BN: jax.Array) -> jax.Array:
        contract = (((2,), (1 if tied else 0,)), ((), ()))
        logits_BNV = jax.lax.dot_general(
            hidden_BNE, table.astype(hidden_BNE.dtype), contract, preferred_element_type=jnp.float32
        )
        chosen_BN1 = jnp.take_along_axis(logits_BNV, labels_BN[..., None], axis=-1)
        return jax.nn.logsumexp(logits_BNV, axis=-1) - chosen_BN1[..., 0]

    count = batch.tokens_BT.shape[1] - 1
    nats = map_positions(losses, (hidden_BTE[:, :-1], batch.tokens_BT[:, 1:]), model.config.vocab_size)
    return nats, batch.learned(1, count) & (batch.segments_BT[:, 1:] > 0)


def next_token_loss(model: TargetModel, batch: Batch) -> jax.Array:
    """Mean cross entropy over the tokens to be learned, nats."""
    nats, counts = token_losses(model, batch)
    return jnp.sum(jnp.where(counts, nats, 0.0)) / jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)


def _loss(args: argparse.Namespace, graph: Any) -> loop.LossFn:
    """What a step minimises, as the loop wants it."""

    def loss_fn(state: Any, _frozen: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        model = nnx.merge(graph, state)
        loss = next_token_loss(model, batch)
        if not args.unlikelihood:
            return loss, {}
        fixed = nnx.merge(graph, jax.lax.stop_gradient(state))
        sizes = {"prompt": unlikelihood.PROMPT, "own": unlikelihood.OWN}
        own, repeats = unlikelihood.of_own_text(model, fixed, batch, key, **sizes)
        return loss + args.unlikelihood * own, {"next_token": loss, "repeats": repeats}

    return loss_fn


def held_out_loss(model: TargetModel, rows: PackedRows, batch: int = 16, limit: int = 128) -> float:
    """Mean cross entropy in nats a learned token over at most `limit` rows."""
    graph, state = nnx.split(model)
    parts = np.array_split(np.arange(min(limit, len(rows))), -(-min(limit, len(rows)) // batch))
    found = [_sums(graph, state, rows.batch(part)) for part in parts]
    return float(sum(float(nats) for nats, _ in found) / sum(int(count) for _, count in found))


@functools.partial(jax.jit, static_argnums=0)
def _sums(graph: Any, state: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    nats, counts = token_losses(nnx.merge(graph, state), batch)
    return jnp.sum(jnp.where(counts, nats, 0.0)), jnp.sum(counts)


def new_tokenizer(paths: Sequence[Path], vocab_size: int, seed: int) -> Backend:
    """A byte-level BPE trained on the files' texts, or on a seeded share of them where they are many."""
    texts = list(read_texts(paths))
    share = _TOKENIZER_CHARS / max(1, sum(map(len, texts)))
    if share < 1:
        keep = np.random.default_rng(seed).random(len(texts)) < share
        texts = [text for text, wanted in zip(texts, keep.tolist(), strict=True) if wanted]
    return corpus.train_tokenizer(texts, vocab_size)


def _tokenizer(args: argparse.Namespace) -> Backend:
    path = args.tokenizer or (args.init_from or args.run_dir) / "tokenizer.json"
    if args.tokenizer is None and args.init_from is None and not path.exists():
        partial = path.with_name(path.name + ".partial")
        new_tokenizer(args.data, args.vocab_size, args.seed).save(str(partial))
        partial.replace(path)
    if not path.is_file():
        raise ValueError(f"--tokenizer {path} is not a file")
    return Backend.from_file(str(path))


def _config(args: argparse.Namespace, tok: Backend) -> ModelConfig:
    if args.hidden_size % args.heads or args.heads % args.kv_heads:
        raise ValueError(
            f"--heads must divide --hidden-size and be a multiple of --kv-heads, got heads {args.heads}, "
            f"hidden_size {args.hidden_size}, kv_heads {args.kv_heads}"
        )
    if args.length > args.context:
        raise ValueError(f"--length must be at most --context, got {args.length} and {args.context}")
    bos, eos = corpus.text_ends(tok)
    return ModelConfig(
        family="llama",
        vocab_size=tok.get_vocab_size(),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.hidden_size // args.heads,
        tie_word_embeddings=True,
        max_position_embeddings=args.context,
        rope_theta=args.rope_theta,
        bos_token_id=bos,
        eos_token_ids=(eos,),
    )


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out, and returns (and saves as training.json) the held-out losses by data set.

    Raises:
      ValueError: data, a geometry or settings that cannot be used.
    """
    args.run_dir.mkdir(parents=True, exist_ok=True)
    tok = _tokenizer(args)
    cfg = _config(args, tok) if args.init_from is None else hf.load_config(args.init_from)
    template = None if args.chat_template is None else args.chat_template.read_text(encoding="utf-8")
    text = Tokenizer(
        tok, bos_token_id=cfg.bos_token_id, eos_token_ids=cfg.eos_token_ids, add_bos_token=True, chat_template=template,
        special_tokens={"bos_token": corpus.BOS, "eos_token": corpus.EOS},
    )  # fmt: skip
    rows = dataset.pack(dataset.read_examples(args.data, text), args.length, seed=args.seed)
    held = dataset.read_examples(args.eval_data, text) if args.eval_data else []
    names = sorted({example.dataset for example in held})
    held_rows = {name: dataset.pack([e for e in held if e.dataset == name], args.length, seed=0) for name in names}
    if args.init_from is None:
        model = registry.build(cfg, rngs=nnx.Rngs(params=args.seed))
    else:
        model = hf.load_model(args.init_from)
    graph, state = nnx.split(model)
    parameters = sum(x.size for x in jax.tree.leaves(state))
    print(f"parameters: {parameters:,}", flush=True)

    def losses(state: Any) -> dict[str, float]:
        model = nnx.merge(graph, state)
        return {name: held_out_loss(model, part, args.batch) for name, part in held_rows.items()}

    optim = OptimConfig(
        steps=args.steps, lr=args.lr, schedule=args.schedule, warmup=args.warmup, optimizer=args.optimizer,
        accumulate=args.accumulate, compute_dtype=args.compute_dtype, save_every=args.save_every,
        log_every=args.log_every, eval_every=args.eval_every, seed=args.seed, tokens_per_step=args.batch * args.length,
    )  # fmt: skip
    order = dataset.RowOrder(len(rows), args.batch, args.seed)
    state = loop.run(
        _loss(args, graph), state, lambda step: rows.batch(order(step)), optim, args.run_dir,
        mesh=meshes.make_mesh(args.mesh) if args.mesh else None, evaluate=losses if held_rows else None,
    )  # fmt: skip
    state = jax.device_get(state)
    record = {
        "held_out_loss_nats_per_token": {name: round(loss, 4) for name, loss in losses(state).items()},
        "parameters": parameters,
        "tokens_seen": args.steps * args.batch * args.length,
        "tokens_in_corpus": int((rows.segments > 0).sum()),
        "optimizer": dataclasses.asdict(optim),
    }
    print(f"held-out loss, nats a token: {record['held_out_loss_nats_per_token']}", flush=True)
    hf.save_model(nnx.merge(graph, state), args.out, tokenizer=tok, dtype=jnp.bfloat16)
    if template is not None:
        (args.out / "chat_template.jinja").write_text(template, encoding="utf-8")
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(plots.plot_run(args.run_dir), flush=True)
    print(f"wrote {args.out}", flush=True)
    return record
