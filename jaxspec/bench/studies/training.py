"""python -m jaxspec.bench.studies.training: what a step of EAGLE-3 training costs against its floor.

The floor is one forward pass of the target (logits included) plus three times the head's forward pass (forward and
backward; logits included) for each step of the training-time test. All are measured in one run, interleaved, and
compared by their medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.bench.studies import report
from jaxspec.checkpointing import hf
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.layers import Transformer
from jaxspec.resolve import resolve_model
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.train.data.batch import Batch, ahead
from jaxspec.train.drafters.eagle import Eagle3Recipe
from jaxspec.train.objective import acceptance, teacher
from jaxspec.train.objective.attention import packed_attention
from jaxspec.train.run import loop
from jaxspec.train.run.optim import COMPUTE_DTYPES, OptimConfig, optimizer

#: "cpu" counts this process's time on all cores: a fairer ratio on a CPU that others use as well.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Sizes by default are the demo's."""
    p.add_argument("--target", default="demo", help='"demo", a Hugging Face directory, or "random"')
    p.add_argument("--target-hidden", type=int, default=384, help="width of a random target")
    p.add_argument("--target-intermediate", type=int, default=1024, help="width within its MLPs")
    p.add_argument("--target-layers", type=int, default=8, help="its layers")
    p.add_argument("--target-heads", type=int, default=6, help="its heads of queries")
    p.add_argument("--target-kv-heads", type=int, default=2, help="its heads of keys and values")
    p.add_argument("--vocab-size", type=int, default=4096, help="its tokens")
    p.add_argument("--hidden", type=int, default=256, help="width of the head")
    p.add_argument("--intermediate", type=int, default=704, help="width within the head's MLPs")
    p.add_argument("--heads", type=int, default=4, help="the head's heads of queries")
    p.add_argument("--kv-heads", type=int, default=2, help="the head's heads of keys and values")
    p.add_argument("--head-dim", type=int, default=64, help="channels of each of them")
    p.add_argument("--head-layers", type=int, default=1, help="layers of the head")
    p.add_argument("--draft-vocab-size", type=int, default=2304, help="tokens that the head may draft, at most")
    p.add_argument("--batch", type=int, default=8, help="rows")
    p.add_argument("--length", type=int, default=256, help="tokens a row")
    p.add_argument("--texts", type=int, default=2, help="texts packed into a row")
    p.add_argument("--ttt-steps", type=int, nargs="+", default=[5, 7], help="drafts of a step, each number for itself")
    p.add_argument("--compute-dtype", choices=COMPUTE_DTYPES, default="float32", help="of the arithmetic")
    p.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: time on all cores (busy machines)")
    p.add_argument("--repeats", type=int, default=9, help="medians are taken over these, interleaved")
    p.add_argument("--seed", type=int, default=0, help="of random weights and tokens")


def build_target(args: argparse.Namespace) -> TargetModel:
    """The named target in the compute dtype, or a random one of the given sizes."""
    dtype = jnp.dtype(args.compute_dtype)
    if args.target != "random":
        return hf.load_model(resolve_model(args.target), dtype=dtype)
    cfg = ModelConfig(
        family="llama",
        vocab_size=args.vocab_size,
        hidden_size=args.target_hidden,
        intermediate_size=args.target_intermediate,
        num_layers=args.target_layers,
        num_heads=args.target_heads,
        num_kv_heads=args.target_kv_heads,
        head_dim=args.target_hidden // args.target_heads,
    )
    return Transformer(cfg, dtype=dtype, rngs=nnx.Rngs(params=args.seed))


def build_head(args: argparse.Namespace, target: TargetModel) -> Eagle3Head:
    """A random head, float32."""
    layers = target.config.aux_layers
    cfg = Eagle3Config(
        hidden_size=args.hidden,
        target_hidden_size=target.config.hidden_size,
        intermediate_size=args.intermediate,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=min(args.draft_vocab_size, target.config.vocab_size),
        aux_layer_ids=layers,
        num_aux=len(layers),
        num_layers=args.head_layers,
    )
    return Eagle3Head(cfg, rngs=nnx.Rngs(params=args.seed))


def random_batch(args: argparse.Namespace, vocab_size: int) -> Batch:
    """Rows of `texts` texts of equal length."""
    shape = (args.batch, args.length)
    tokens = np.random.default_rng(args.seed).integers(0, vocab_size, shape).astype(np.int32)
    share = -(-args.length // args.texts)
    column = np.broadcast_to(np.arange(args.length), shape)
    arrays = (tokens, (column // share + 1).astype(np.int32), (column % share).astype(np.int32), column % share > 0)
    return Batch(*(jnp.asarray(x) for x in arrays))


@dataclasses.dataclass
class Timed:
    """A compiled function, its seconds so far, and its memory."""

    call: Callable[[], Any]
    temp_bytes: int
    seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self, clock: Callable[[], float]) -> None:
        began = clock()
        jax.block_until_ready(self.call())
        self.seconds.append(clock() - began)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def timed(fn: Callable[..., Any], *args: Any) -> Timed:
    """fn, compiled for args."""
    compiled = jax.jit(fn).lower(*args).compile()
    return Timed(lambda: compiled(*args), _temp_bytes(compiled))


def _temp_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def timed_step(head: Eagle3Head, target: TargetModel, batch: Batch, args: argparse.Namespace, steps: int) -> Timed:
    """A whole optimiser step; its state moves on from call to call."""
    cfg = OptimConfig(steps=1000, lr=1e-4, compute_dtype=args.compute_dtype)
    recipe = Eagle3Recipe(head.config.aux_layer_ids, steps)
    graph, trainable, rest = nnx.split(head, nnx.Param, ...)
    target_graph, target_state = nnx.split(target)

    def loss_fn(trainable: Any, frozen: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        module, model = nnx.merge(graph, trainable, frozen[0]), nnx.merge(target_graph, frozen[1])
        states = teacher.target_states(model, batch, recipe.aux_layers)
        loss, matches, _ = recipe.loss(module, model, batch, states, key)
        return loss, {loop.HISTOGRAM: acceptance.rounds(matches, batch)[1]}

    tx = optimizer(cfg)
    state = [jax.tree.map(jnp.copy, trainable), tx.init(trainable)]
    frozen = (rest, target_state)
    step = jax.jit(loop.train_step(loss_fn, tx, cfg), donate_argnums=(0, 1))
    compiled = step.lower(*state, frozen, batch, jnp.int32(0)).compile()

    def call() -> Any:
        *state[:], metrics = compiled(*state, frozen, batch, jnp.int32(1))
        return metrics

    return Timed(call, _temp_bytes(compiled))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times everything and returns the medians, ratios and memory."""
    target = build_target(args)
    head = build_head(args, target)
    batch = random_batch(args, target.config.vocab_size)
    dtype = jnp.dtype(args.compute_dtype)
    target_graph, target_state = nnx.split(target)
    head_graph, head_state = nnx.split(head)
    rounded = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, head_state)

    def target_forward(state: Any, batch: Batch) -> Any:
        model = nnx.merge(target_graph, state)
        states = teacher.target_states(model, batch, head.config.aux_layer_ids)
        return states, model.logits(states.hidden_BTE)

    def head_forward(state: Any, batch: Batch, aux_BTA: jax.Array) -> Any:
        module = nnx.merge(head_graph, state)
        attend = packed_attention(batch.segments_BT)
        hidden = module(ahead(batch.tokens_BT, 1), module.fuse(aux_BTA), batch.positions_BT, attend)
        return hidden, module.logits(hidden)

    states = jax.jit(target_forward)(target_state, batch)[0]
    parts = {
        "target forward": timed(target_forward, target_state, batch),
        "head forward": timed(head_forward, rounded, batch, states.aux_BTA),
    }
    for steps in args.ttt_steps:
        parts[f"step, {steps} drafts"] = timed_step(head, target, batch, args, steps)
    for repeat in range(args.repeats + 2):  # two rounds to warm up
        for part in parts.values():
            part.run(CLOCKS[args.clock])
            if repeat < 2:
                part.seconds.clear()
    target_s, head_s = parts["target forward"].median, parts["head forward"].median
    result: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "target_forward_ms": 1e3 * target_s,
        "head_forward_ms": 1e3 * head_s,
        "target_forward_temp_mb": parts["target forward"].temp_bytes / 1e6,
        "steps": [],
    }
    for steps in args.ttt_steps:
        part, floor = parts[f"step, {steps} drafts"], target_s + 3 * steps * head_s
        result["steps"].append(
            {
                "ttt_steps": steps,
                "step_ms": 1e3 * part.median,
                "floor_ms": 1e3 * floor,
                "ratio": part.median / floor,
                "tokens_per_second": args.batch * args.length / part.median,
                "temp_mb": part.temp_bytes / 1e6,
            }
        )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    p = report.parser("training", __doc__)
    add_arguments(p)
    args = report.parse(p, argv)
    result = measure(args)
    print(
        f"{result['device']}, {args.batch} x {args.length} tokens, {args.compute_dtype}: target forward "
        f"{result['target_forward_ms']:.1f} ms, head forward {result['head_forward_ms']:.2f} ms"
    )
    for row in result["steps"]:
        print(
            f"{row['ttt_steps']} drafts: {row['step_ms']:.1f} ms a step, {row['ratio']:.2f} times the floor of "
            f"{row['floor_ms']:.1f} ms, {row['tokens_per_second']:,.0f} tokens/s, {row['temp_mb']:.0f} MB temporary"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
