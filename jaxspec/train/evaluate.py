"""`python -m jaxspec.train evaluate`: what a target would accept of a drafter's chains, without an engine.

The texts are the target's own (held-out prompts, `regenerate`), so a chain is right as long as
it repeats the text; rounds are walked over the text as an engine would walk them. On sampled
texts this is the acceptance of deterministic candidates; noise that draft and target share
accepts more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.checkpointing import eagle3 as eagle3_checkpoint
from jaxspec.checkpointing import hf
from jaxspec.models.layers import Transformer, causal_attention
from jaxspec.speculation.drafters.eagle3_head import Eagle3Head
from jaxspec.train import data
from jaxspec.train.ttt import training_time_test

#: tokens_BT -> bool [B, T - 1 - D, D]: of the chain drafted after token n + 1, token n + 2 + i was right.
Matches = Callable[[jax.Array], jax.Array]
BANDS = {"greedy": (0.0, 0.0), "low temperature": (1e-6, 0.5), "sampled": (0.5, 10.0)}


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--target", type=Path, required=True, help="Hugging Face directory")
    p.add_argument("--drafter", type=Path, required=True, help="directory of an EAGLE-3 head or a draft model")
    p.add_argument("--data", type=Path, required=True, help="what `regenerate` wrote")
    p.add_argument("--depth", type=int, default=5, help="tokens a chain")


def eagle3_matches(head: Eagle3Head, target: Transformer, depth: int) -> Matches:
    """The chains of an EAGLE-3 head that starts from true features at every position."""
    head_graph, head_state = nnx.split(head)
    target_graph, target_state = nnx.split(target)

    @jax.jit
    def matches(head_state: nnx.State, target_state: nnx.State, tokens_BT: jax.Array) -> jax.Array:
        head, target = nnx.merge(head_graph, head_state), nnx.merge(target_graph, target_state)
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None, :], tokens_BT.shape)
        _, aux_BTA = target(tokens_BT, positions, causal_attention, head.config.aux_layer_ids)
        assert aux_BTA is not None
        count = tokens_BT.shape[1] - 1 - depth
        right = []
        for i, logits_BNV in enumerate(training_time_test(head, aux_BTA, tokens_BT, depth)):
            choice_BN = head.target_ids[...][jnp.argmax(logits_BNV, axis=-1)]
            right.append(choice_BN[:, :count] == tokens_BT[:, i + 2 : i + 2 + count])
        return jnp.stack(right, axis=-1)

    return lambda tokens_BT: matches(head_state, target_state, tokens_BT)


def draft_model_matches(draft: Transformer, depth: int) -> Matches:
    """The chains of a language model that drafts from the text alone."""
    graph, state = nnx.split(draft)

    @jax.jit
    def matches(state: nnx.State, tokens_BT: jax.Array) -> jax.Array:
        draft = nnx.merge(graph, state)
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None, :], tokens_BT.shape)
        hidden, _ = draft(tokens_BT, positions, causal_attention)
        right_BT = jnp.argmax(draft.logits(hidden), axis=-1)[:, :-1] == tokens_BT[:, 1:]
        count = tokens_BT.shape[1] - 1 - depth
        return jnp.stack([right_BT[:, i + 1 : i + 1 + count] for i in range(depth)], axis=-1)

    return lambda tokens_BT: matches(state, tokens_BT)


def walk(match_ND: np.ndarray, prompt_length: int) -> np.ndarray:
    """Draft tokens accepted in each round of a text, int64 [rounds].

    Args:
      match_ND: one row of `Matches`.
      prompt_length: tokens before the first round; the target itself gives the next one.
    """
    accepted = []
    n = prompt_length - 1
    while n < len(match_ND):
        wrong = np.flatnonzero(~match_ND[n])
        accepted.append(int(wrong[0]) if len(wrong) else match_ND.shape[1])
        n += accepted[-1] + 1
    return np.asarray(accepted, np.int64)


def acceptance(generated: data.Generated, matches: Matches, depth: int, batch: int = 16) -> dict[str, dict[str, float]]:
    """Acceptance on the held-out rows, by kind and temperature.

    Returns:
      {"code greedy": {"length": tokens a round with the bonus, "accept_1": ..., "rounds": ...}, ...};
      accept_i is the share of the rounds that reached draft position i and accepted there.
    """
    held = generated.select(generated.held_out)
    order = np.arange(-(-len(held) // batch) * batch) % max(1, len(held))
    blocks = [np.asarray(matches(jnp.asarray(held.tokens[block]))) for block in order.reshape(-1, batch)]
    match_SND = [row for block in blocks for row in block]
    rounds = [walk(match_SND[i], int(held.prompt_length[i])) for i in range(len(held))]
    table = {}
    for kind in sorted(set(held.kind.tolist())):
        for band, (low, high) in BANDS.items():
            rows = np.flatnonzero((held.kind == kind) & (held.temperature >= low) & (held.temperature <= high))
            accepted = np.concatenate([rounds[i] for i in rows]) if len(rows) else np.zeros(0, np.int64)
            if len(accepted):
                table[f"{kind} {band}"] = {
                    "length": round(float(accepted.mean()) + 1, 3),
                    **{
                        f"accept_{i + 1}": round(float((accepted > i).sum() / max(1, (accepted >= i).sum())), 3)
                        for i in range(depth)
                    },
                    "rounds": len(accepted),
                }
    return table


def format_table(table: dict[str, dict[str, float]]) -> str:
    """One line a kind and temperature."""
    return "\n".join(
        f"{name:22s} " + "  ".join(f"{key} {value:g}" for key, value in row.items()) for name, row in table.items()
    )


def main(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Prints and returns `acceptance` of the drafter in args.drafter."""
    target = hf.load_model(args.target, dtype=jnp.float32)
    architecture = json.loads((args.drafter / "config.json").read_text())["architectures"][0]
    if architecture in eagle3_checkpoint.ARCHITECTURES:
        head = eagle3_checkpoint.load_head(args.drafter, target, dtype=jnp.float32)
        matches = eagle3_matches(head, target, args.depth)
    else:
        matches = draft_model_matches(hf.load_model(args.drafter, dtype=jnp.float32), args.depth)
    table = acceptance(data.Generated.load(args.data), matches, args.depth)
    print(format_table(table), flush=True)
    return table
