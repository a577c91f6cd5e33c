"""`python -m jaxspec.train regenerate`: a model's own outputs, on which its drafters learn.

Prompts are the beginnings of random windows of the demo corpus. Owns a plain batched sampler
(dense cache, one jitted scan); it shares nothing with the engine, so that training never
depends on it. Rows of held-out documents are flagged and never trained on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from jaxspec.checkpointing import hf
from jaxspec.models.layers import Transformer
from jaxspec.train import data

#: (state, rows_BT, prompt_length_B, temperature_B, key) -> tokens_BT.
Generate = Callable[[nnx.State, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The defaults are the demo's."""
    p.add_argument("--model", type=Path, required=True, help="Hugging Face directory with a tokenizer.json")
    p.add_argument("--out", type=Path, required=True, help="the .npz to write")
    p.add_argument("--sequences", type=int, default=3072, help="rows from training documents")
    p.add_argument("--held-out-sequences", type=int, default=256, help="rows from held-out documents")
    p.add_argument("--length", type=int, default=256, help="tokens a row, prompt included")
    p.add_argument("--prompt-min", type=int, default=16)
    p.add_argument("--prompt-max", type=int, default=64)
    p.add_argument("--code-share", type=float, default=0.6)
    p.add_argument("--greedy-share", type=float, default=0.5, help="rows at temperature 0 to 0.3; others 0.7 to 1")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--seed", type=int, default=0)


def sampler(model: Transformer, length: int, segment: int = 64) -> tuple[Generate, nnx.State]:
    """A jitted function that completes rows of `length` tokens, and the state to call it with.

    The cache grows by `segment` positions, so that early tokens do not pay for late ones.
    """
    graph, state = nnx.split(model)
    cfg = model.config
    groups = cfg.num_heads // cfg.num_kv_heads

    def generate(
        state: nnx.State, rows_BT: jax.Array, prompt_length_B: jax.Array, temperature_B: jax.Array, key: jax.Array
    ) -> jax.Array:
        model = nnx.merge(graph, state)
        batch = rows_BT.shape[0]
        sampled_B1 = (temperature_B > 0)[:, None]
        scale_B1 = 1.0 / jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]

        def step(
            carry: tuple[jax.Array, list[tuple[jax.Array, jax.Array]]], t: jax.Array
        ) -> tuple[tuple[jax.Array, list[tuple[jax.Array, jax.Array]]], None]:
            rows_BT, caches = carry
            caches = list(caches)

            def attend(layer: int, q_BNHC: jax.Array, k_BNGC: jax.Array, v_BNGC: jax.Array) -> jax.Array:
                keys, values = (
                    jax.lax.dynamic_update_slice_in_dim(cache, jnp.swapaxes(new, 1, 2), t, axis=2)
                    for cache, new in zip(caches[layer], (k_BNGC, v_BNGC), strict=True)
                )
                caches[layer] = (keys, values)
                q_BGRC = q_BNHC.reshape(batch, cfg.num_kv_heads, groups, cfg.head_dim)
                scores = jnp.einsum("bgrc,bglc->bgrl", q_BGRC, keys) * cfg.head_dim**-0.5
                visible = (jnp.arange(keys.shape[2]) <= t)[None, None, None, :]
                weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
                return jnp.einsum("bgrl,bglc->bgrc", weights, values).reshape(q_BNHC.shape)

            tokens_B1 = jax.lax.dynamic_slice_in_dim(rows_BT, t, 1, axis=1)
            hidden, _ = model(tokens_B1, jnp.full((batch, 1), t, jnp.int32), attend)
            logits_BV = model.logits(hidden)[:, 0]
            noise_BV = jax.random.gumbel(jax.random.fold_in(key, t), logits_BV.shape)
            drawn_B = jnp.argmax(jnp.where(sampled_B1, logits_BV * scale_B1 + noise_BV, logits_BV), axis=-1)
            given_B = jax.lax.dynamic_index_in_dim(rows_BT, t + 1, axis=1, keepdims=False)
            next_B = jnp.where(t + 1 < prompt_length_B, given_B, drawn_B.astype(jnp.int32))
            return (jax.lax.dynamic_update_index_in_dim(rows_BT, next_B, t + 1, axis=1), caches), None

        empty = jnp.zeros((batch, cfg.num_kv_heads, 0, cfg.head_dim), model.embedding[...].dtype)
        caches = [(empty, empty)] * cfg.num_layers
        for start in range(0, length - 1, segment):
            stop = min(start + segment, length - 1)
            caches = jax.tree.map(lambda c: jnp.pad(c, ((0, 0), (0, 0), (0, stop - start), (0, 0))), caches)  # noqa: B023
            (rows_BT, caches), _ = jax.lax.scan(step, (rows_BT, caches), jnp.arange(start, stop, dtype=jnp.int32))
        return rows_BT

    return jax.jit(generate), state


def draw_prompts(
    sets: dict[tuple[str, bool], data.TokenSet], held_out: bool, count: int, args: argparse.Namespace, chunk: int
) -> data.Generated:
    """`count` rows that hold only their prompts, with their kinds and temperatures; depends on seed and chunk."""
    rng = np.random.default_rng((args.seed, int(held_out), chunk))
    kind = np.where(rng.random(count) < args.code_share, "code", "prose")
    prompt_length = rng.integers(args.prompt_min, args.prompt_max + 1, count).astype(np.int32)
    rows = np.zeros((count, args.length), np.int32)
    for i in range(count):
        tokens = sets[str(kind[i]), held_out].tokens
        start = rng.integers(len(tokens) - args.prompt_max)
        rows[i, : prompt_length[i]] = tokens[start : start + prompt_length[i]]
    low = np.where(rng.random(count) < 2 / 3, 0.0, rng.uniform(0.1, 0.3, count))
    temperature = np.where(rng.random(count) < args.greedy_share, low, rng.uniform(0.7, 1.0, count))
    return data.Generated(rows, prompt_length, kind, np.full(count, held_out), temperature.astype(np.float32))


def main(args: argparse.Namespace) -> data.Generated:
    """Writes args.out chunk by chunk (a killed run goes on where it stopped) and returns it.

    Raises:
      ValueError: prompts that do not fit the rows, or chunks of a run with other arguments.
    """
    if not 1 <= args.prompt_min <= args.prompt_max < args.length:
        raise ValueError(
            f"need 1 <= prompt_min <= prompt_max < length, got prompt_min {args.prompt_min}, "
            f"prompt_max {args.prompt_max}, length {args.length}"
        )
    parts = args.out.with_name(args.out.name + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    record = {k: str(v) for k, v in sorted(vars(args).items()) if k not in ("out", "command")}
    record_path = parts / "arguments.json"
    if record_path.exists() and json.loads(record_path.read_text()) != record:
        raise ValueError(f"{parts} holds chunks made with {record_path.read_text()}; these arguments are {record}")
    record_path.write_text(json.dumps(record))

    model = hf.load_model(args.model, dtype=jnp.float32)
    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    sets = data.tokenize(data.demo_corpus(), tok)
    generate, state = sampler(model, args.length)

    chunks = [(False, i) for i in range(-(-args.sequences // args.batch))]
    chunks += [(True, i) for i in range(-(-args.held_out_sequences // args.batch))]
    done: list[data.Generated] = []
    for number, (held_out, index) in enumerate(chunks):
        path = parts / f"{'held_out' if held_out else 'train'}-{index:05d}.npz"
        if path.exists():
            done.append(data.Generated.load(path))
            continue
        began = time.monotonic()
        rows = draw_prompts(sets, held_out, args.batch, args, index)
        key = jax.random.fold_in(jax.random.key(args.seed), 2 * index + int(held_out))
        inputs = (jnp.asarray(rows.tokens), jnp.asarray(rows.prompt_length), jnp.asarray(rows.temperature))
        rows = data.Generated(**{**vars(rows), "tokens": np.asarray(generate(state, *inputs, key))})
        rows.save(path)
        done.append(rows)
        rate = rows.tokens.size / (time.monotonic() - began)
        print(f"chunk {number + 1}/{len(chunks)}: {rate:,.0f} tokens/s", flush=True)
    result = data.Generated.concatenate(done)
    result.save(args.out)
    shutil.rmtree(parts)
    print(f"{len(result)} rows of {args.length} tokens in {args.out}", flush=True)
    return result
