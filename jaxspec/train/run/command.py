"""What the trainers' commands share: arguments, loading, the run and what is saved.

Owns the way from arguments to a saved head with its record. Must not know any kind of drafter: a trainer brings a
Recipe and a module.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tokenizers import Tokenizer as Backend

from jaxspec.checkpointing import hf
from jaxspec.drafters.directories import CHAT_MODES, check_layout, save_drafter
from jaxspec.models.base import TargetModel
from jaxspec.models.layers import Shared
from jaxspec.text import modes
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.data.batch import Batch, PackedRows
from jaxspec.train.data.dataset import MIN_TOKENS, Example, RowOrder, chat_modes, pack, read_examples
from jaxspec.train.data.ring import Ring, ring_of, usable
from jaxspec.train.drafters.recipe import Recipe, TargetStates
from jaxspec.train.objective import acceptance, teacher
from jaxspec.train.run import gate, loop, plots, processes
from jaxspec.train.run import mesh as meshes
from jaxspec.train.run.checkpoints import bind, write_whole
from jaxspec.train.run.held import Evaluation, format_table
from jaxspec.train.run.optim import COMPUTE_DTYPES, OPTIMIZERS, SCHEDULES, OptimConfig

#: Arguments of a run that its successor may change.
_FREE = (
    "out", "run_dir", "save_every", "log_every", "eval_every", "mesh", "hidden_cache", "eval_data", "layout",
    "coordinator", "num_processes", "process_id",
)  # fmt: skip


def add_arguments_of_data(p: argparse.ArgumentParser) -> None:
    """Target, texts and where the results go."""
    p.add_argument(
        "--target",
        type=Path,
        required=True,
        help='"demo", a Hugging Face directory or a hub id; its tokenizer reads texts',
    )
    p.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL of texts, chats or the target's outputs; "
                   "ring:DIR is what a server gathers there (feature_ring)")  # fmt: skip
    p.add_argument("--eval-data", type=Path, nargs="+", help="JSONL to evaluate on (default: --eval-share of --data)")
    p.add_argument("--eval-share", type=float, default=0.05, help="texts held out, chosen by their hash")
    p.add_argument("--regenerate", action="store_true", help="let the target answer the prompts of --data first")
    p.add_argument("--chat-template-kwargs", type=modes.parse, metavar="JSON", help="of chats: '{\"enable_thinking\": "
                   "false}'; the drafter's training.json says so, and servers compare (default: none)")  # fmt: skip
    p.add_argument("--out", type=Path, required=True, help="directory to write")
    p.add_argument("--run-dir", type=Path, help="checkpoints, log and plot (default: OUT.run)")
    p.add_argument(
        "--init-from", type=Path, help="directory of a published head to go on from (default: fresh weights)"
    )
    p.add_argument(
        "--gate",
        type=Path,
        help="a head to be better than on held-out texts; else nothing is written (default: no gate)",
    )
    p.add_argument("--gate-margin", type=float, default=0.02, help="by how much more tokens a round, as a share")
    p.add_argument("--layout", help="layout of the saved head (default: the kind's own)")


def add_common_arguments(p: argparse.ArgumentParser) -> None:
    """What every trainer takes; a trainer may change defaults with `p.set_defaults`."""
    add_arguments_of_data(p)
    p.add_argument("--length", type=int, default=2048, help="tokens a packed row")
    p.add_argument("--batch", type=int, default=8, help="rows a step, all micro-batches together")
    p.add_argument("--accumulate", type=int, default=1, help="micro-batches that a step's rows are cut into")
    p.add_argument("--steps", type=int, help="optimiser steps (default: by --epochs)")
    p.add_argument("--epochs", type=float, help="passes over the rows, in place of --steps (default: 1)")
    p.add_argument("--lr", type=float, default=1e-4, help="peak learning rate")
    p.add_argument("--final-lr", type=float, default=0.05, help="where the schedule ends, as a share of --lr")
    p.add_argument("--schedule", choices=SCHEDULES, default="cosine", help="of the learning rate")
    p.add_argument("--warmup", type=float, default=0.015, help="steps of linear warm-up; below 1 a share of all steps")
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="what turns gradients into steps")
    p.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95), metavar=("B1", "B2"), help="of the optimizer")
    p.add_argument("--weight-decay", type=float, help="of matrices (default: 0.05 for adamw, lion and muon, else 0)")
    p.add_argument("--clip", type=float, default=0.5, help="largest global norm of a gradient; 0: none")
    p.add_argument("--compute-dtype", choices=COMPUTE_DTYPES, default="float32", help="of activations")
    p.add_argument("--mesh", help="devices by axis, e.g. data=4,tensor=2 (default: one device)")
    p.add_argument("--hidden-cache", type=Path,
        help="keep the target's hidden states here; prints their size first (default: keep none)")  # fmt: skip
    p.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    p.add_argument("--log-every", type=int, default=20, help="steps between two rows of the log")
    p.add_argument("--eval-every", type=int, default=0, help="steps between evaluations; 0: only at the end")
    p.add_argument("--seed", type=int, default=0, help="same seed, same run")
    processes.add_arguments(p)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a trainer's command works on.

    Attributes:
      args: its arguments. target: in the compute dtype. tokenizer: the target's; None where it has none.
      rows: packed training texts. eval_rows: packed held-out texts by data set; empty where there are none.
      token_counts_V: int64, how often each token is learned in `rows`.
      ring: what a server has gathered, where the texts are from there. held: the held-out texts.
      chat_modes: template arguments of the chats among the texts, each once.
    """

    args: argparse.Namespace
    target: TargetModel
    tokenizer: Tokenizer | None
    rows: PackedRows
    eval_rows: dict[str, PackedRows]
    token_counts_V: np.ndarray
    ring: Ring | None = None
    held: Sequence[Example] = ()
    chat_modes: Sequence[Mapping[str, Any]] = ()

    def states(self, rows: PackedRows, index: np.ndarray, aux_layers: Sequence[int]) -> TargetStates | None:
        """What the target computed on packed rows [B], where a ring has it; in the compute dtype."""
        if self.ring is None or rows.source is None:
            return None
        dtype = jnp.dtype(self.args.compute_dtype)
        return jax.tree.map(lambda x: x.astype(dtype), self.ring.states(rows, index, aux_layers))


def check_paths(args: argparse.Namespace) -> None:
    """Refuses results that would overwrite what a run reads; sets run_dir's default.

    Raises:
      ValueError: names both paths.
    """
    if args.run_dir is None:
        if not args.out.name:
            raise ValueError(f"--out must name a directory to write, got {str(args.out)!r}")
        args.run_dir = args.out.with_name(args.out.name + ".run")
    out = args.out.resolve()
    if out == args.run_dir.resolve():
        raise ValueError(f"--run-dir must differ from --out, both are {args.out}")
    for name in ("target", "init_from", "hidden_cache"):
        path = getattr(args, name)
        if path is not None and path.resolve() == out:
            raise ValueError(f"--out must differ from --{name.replace('_', '-')}, both are {path}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {args.out} is a file, not a directory")
    for name in ("out", "run_dir"):
        check_writable(f"--{name.replace('_', '-')}", getattr(args, name))


def check_writable(option: str, path: Path) -> None:
    """Refuses, before hours of work, a path that nothing can be written to.

    Raises:
      ValueError: names the option and the directory that is in the way.
    """
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise ValueError(f"{option} {path}: {parent} is not a directory")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as e:
        raise ValueError(f"{option} {path} cannot be written: {e}") from e


def prepare(args: argparse.Namespace) -> Setup:
    """Loads the target, and reads and packs the texts; with --regenerate the target answers their prompts first.

    Raises:
      ValueError: paths, data, lengths or sizes that cannot be used; names what was given and what is allowed.
    """
    check_paths(args)
    processes.refuse(args)
    for name in ("length", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if not 0.0 <= args.eval_share < 1.0:
        raise ValueError(f"--eval-share must lie in [0, 1), got {args.eval_share}")
    if args.steps is not None and args.epochs is not None:
        raise ValueError(f"--steps {args.steps} and --epochs {args.epochs} exclude each other")
    target = hf.load_model(args.target, dtype=jnp.dtype(args.compute_dtype), context=args.length)
    if args.length > target.config.max_position_embeddings:
        raise ValueError(
            f"--length must be at most the target's max_position_embeddings {target.config.max_position_embeddings}, "
            f"got {args.length}"
        )
    tokenizer = Tokenizer.from_directory(args.target) if Tokenizer.is_in(args.target) else None
    paths = list(args.data)
    if args.regenerate:
        if ring_of(paths) is not None:
            raise ValueError(f"--regenerate: {paths[0]} holds the target's own answers; leave it out")
        regenerate = importlib.import_module("jaxspec.train.data.regenerate")
        paths = regenerate.answer(args.target, paths, args.run_dir / "regenerated.jsonl", length=args.length,
                                  seed=args.seed, chat_template_kwargs=args.chat_template_kwargs)  # fmt: skip
    directory = ring_of(paths)
    if directory is not None and args.hidden_cache is not None:
        raise ValueError(f"--hidden-cache {args.hidden_cache}: {paths[0]} has the states already; leave it out")
    ring = None if directory is None else Ring.read(directory, target.config)
    if ring is None:
        examples = read_examples(
            paths, tokenizer, vocab_size=target.config.vocab_size, chat_template_kwargs=args.chat_template_kwargs
        )
    else:
        examples = usable(ring.examples)
    if args.eval_data:
        held = read_examples(
            args.eval_data, tokenizer, vocab_size=target.config.vocab_size,
            chat_template_kwargs=args.chat_template_kwargs,
        )  # fmt: skip
    else:
        held = [e for e in examples if held_out(e, args.eval_share)]
        examples = [e for e in examples if not held_out(e, args.eval_share)]
    if not examples:
        raise ValueError(
            f"--data {[str(p) for p in paths]} holds no text to train on (--eval-share {args.eval_share:g})"
        )
    rows = pack(examples, args.length, seed=args.seed)
    held = [e for e in held if any(e.learn) and len(e.tokens) >= MIN_TOKENS]
    groups: dict[str, list[Example]] = {}
    for example in held:
        groups.setdefault(_label(example), []).append(example)
    eval_rows = {name: pack(groups[name], args.length, seed=args.seed, report=False) for name in sorted(groups)}
    counts_V = np.bincount(rows.tokens[rows.learn], minlength=target.config.vocab_size).astype(np.int64)
    print(
        f"{len(examples):,} texts in {len(rows):,} rows of {rows.length:,} tokens, {int(rows.learn.sum()):,} learned; "
        f"{len(held):,} held out",
        flush=True,
    )
    return Setup(args, target, tokenizer, rows, eval_rows, counts_V, ring, held, chat_modes(examples))


def _label(example: Example) -> str:
    """Sampled texts apart: what is accepted of drafts on greedy ones is what an engine would accept."""
    return f"{example.dataset} T={example.temperature_band:g}" if example.temperature else example.dataset


def held_out(example: Example, share: float) -> bool:
    """Whether a text belongs to the held-out share; depends on its row of JSONL only."""
    digest = hashlib.sha256(example.origin.encode()).digest()
    return int.from_bytes(digest[:4]) < share * 2**32


def optim_config(args: argparse.Namespace, rows: PackedRows) -> OptimConfig:
    """The arguments in the loop's terms.

    Raises:
      ValueError: see OptimConfig.
    """
    epochs = 1.0 if args.epochs is None else args.epochs
    if args.steps is None and epochs <= 0:
        raise ValueError(f"--epochs must be positive, got {epochs}")
    steps = args.steps if args.steps is not None else max(1, round(epochs * len(rows) / args.batch))
    return OptimConfig(
        steps=steps, lr=args.lr, final_lr=args.final_lr, warmup=args.warmup, schedule=args.schedule,
        optimizer=args.optimizer, b1=args.betas[0], b2=args.betas[1], weight_decay=args.weight_decay, clip=args.clip,
        accumulate=args.accumulate, compute_dtype=args.compute_dtype, save_every=args.save_every,
        log_every=args.log_every, eval_every=args.eval_every, seed=args.seed,
        tokens_per_step=args.batch * rows.length,
    )  # fmt: skip


def fit(
    setup: Setup, recipe: Recipe, module: Any, *, kind: str, extra_record: dict[str, Any] | None = None,
    held_out: Recipe | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Trains a module, saves it with its record, and plots the run.

    Args:
      module: its nnx.Param leaves are trained, in float32; other leaves stay.
      kind: its name. extra_record: added to training.json.
      held_out: the same recipe with a fuller report, for held-out texts; None: `recipe`.

    Returns:
      what training.json holds: arguments, held-out acceptance by data set, tokens seen, versions.

    Raises:
      ValueError, OSError, FloatingPointError: see loop.run.
    """
    args = setup.args
    check_layout(kind, args.layout, "--layout")
    if setup.ring is not None:
        setup.ring.check(recipe.aux_layers)
    if args.gate is not None:
        gate.check(args.gate, setup.held)
    cfg = optim_config(args, setup.rows)
    mesh = meshes.make_mesh(args.mesh) if args.mesh else None
    graph, trainable, rest = nnx.split(module, nnx.Param, ...)
    _check_run(args, _made_of(setup, recipe, module))
    trainable = jax.tree.map(lambda x: x.astype(jnp.float32), trainable)
    target_graph, target_state = nnx.split(setup.target)
    frozen = meshes.place(mesh, {"rest": rest, "target": target_state})
    parameters = sum(x.size for x in jax.tree.leaves(trainable))
    print(f"{kind}: {parameters:,} trained parameters, {cfg.steps:,} steps of {args.batch} rows", flush=True)

    loss_fn = _loss_fn(recipe, graph, target_graph)
    batch_at = _batches(setup, recipe, mesh)
    held_fn = loss_fn if held_out is None else _loss_fn(held_out, graph, target_graph)
    known = functools.partial(setup.states, aux_layers=recipe.aux_layers)
    held = Evaluation(held_fn, frozen, setup.eval_rows, cfg, args.batch, mesh, known)
    evaluate = (lambda trainable: held.metrics(held.table(trainable))) if setup.eval_rows else None
    trained = loop.run(loss_fn, trainable, batch_at, cfg, args.run_dir, frozen=frozen, mesh=mesh, evaluate=evaluate)
    table = held.table(trained)
    print(format_table(table) if table else "no held-out texts: give --eval-data or more texts", flush=True)
    record = {
        "kind": kind,
        "held_out_acceptance": table,
        "parameters": parameters,
        "tokens_seen": cfg.steps * cfg.tokens_per_step,
        **({CHAT_MODES: setup.chat_modes} if setup.chat_modes else {}),
        **(extra_record or {}),
        "optimizer": dataclasses.asdict(cfg),
        "arguments": {key: _plain(value) for key, value in sorted(vars(args).items())},
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint")},
    }
    trained = meshes.whole(mesh, trained)
    if not processes.leads():
        return record
    trainee = nnx.merge(graph, trained, rest)
    if args.gate is not None:
        record["gate"] = gate.compare(
            trainee, args.gate, setup.target, setup.held, known, depth=recipe.depth, length=setup.rows.length,
            rows=args.batch, margin=args.gate_margin,
        )  # fmt: skip
        write_whole(args.run_dir / gate.VERDICT, json.dumps(record["gate"], indent=1) + "\n")
        if not record["gate"]["passed"]:
            return record
    _save(setup, recipe, trainee, record)
    return record


def _loss_fn(recipe: Recipe, graph: Any, target_graph: Any) -> loop.LossFn:
    """The recipe's loss as the loop takes it; frozen are the module's other leaves and the target."""

    def loss_fn(
        trainable: Any, frozen: Any, item: tuple[Batch, TargetStates | None], key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        module = nnx.merge(graph, trainable, frozen["rest"])
        target = nnx.merge(target_graph, frozen["target"])
        batch, states = item
        if states is None:
            states = teacher.target_states(target, batch, recipe.aux_layers)
        loss, matches_RND, metrics = recipe.loss(module, target, batch, states, key)
        reported = jax.tree.map(lambda x: x[: len(matches_RND)], batch)
        return loss, {**metrics, loop.HISTOGRAM: acceptance.rounds(matches_RND, reported)[1]}

    return loss_fn


def _batches(setup: Setup, recipe: Recipe, mesh: Mesh | None) -> Callable[[int], tuple[Batch, TargetStates | None]]:
    """step -> its rows, and what the target computed on them where that is kept on disk."""
    args, rows = setup.args, setup.rows
    order = RowOrder(len(rows), args.batch, args.seed)
    cache = None
    if args.hidden_cache:
        cache = teacher.cached_states(
            args.hidden_cache, args.target, setup.target, rows, recipe.aux_layers, args.batch, mesh
        )

    def batch_at(step: int) -> tuple[Batch, TargetStates | None]:
        index = order(step)
        known = setup.states(rows, index, recipe.aux_layers)
        return rows.batch(index), known if known is not None else cache.states(index) if cache else None

    return batch_at


def _save(setup: Setup, recipe: Recipe, module: Any, record: dict[str, Any]) -> None:
    """Writes the drafter and its record, and plots the run."""
    args = setup.args
    tokenizer = None if setup.tokenizer is None else Backend.from_str(setup.tokenizer.to_json())
    save_drafter(
        module, args.out, target=setup.target, tokenizer=tokenizer, layout=args.layout,
        verifier=str(args.target), tokens=recipe.depth,
    )  # fmt: skip
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(plots.plot_run(args.run_dir), flush=True)
    held_out = shlex.join(map(str, args.eval_data)) if args.eval_data else "FILE"
    names = shlex.join(["--target", str(args.target), "--drafter", str(args.out)])
    print(f"wrote {args.out}; its worth: python -m jaxspec.train evaluate {names} --data {held_out}", flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return str(value) if isinstance(value, Path) else value


def _made_of(setup: Setup, recipe: Recipe, module: Any) -> dict[str, str]:
    """What a run depends on besides its arguments: the target, the packed texts, what it began from."""
    args = setup.args
    made_of = teacher.fingerprint(args.target, setup.rows, recipe.aux_layers, args.compute_dtype)
    if args.init_from is not None:
        made_of["init_from weights"] = teacher.weights_digest(args.init_from)
    # Parts that are neither trained nor the target's, such as the draft vocabulary, are not in a checkpoint.
    _, _, _, own = nnx.split(module, nnx.Param, Shared, ...)
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(own):
        digest.update(jax.tree_util.keystr(path).encode() + np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return {**made_of, "untrained parts": digest.hexdigest()}


def _check_run(args: argparse.Namespace, made_of: dict[str, str]) -> None:
    """Refuses to go on with a run that began with other arguments, texts or weights."""
    args.run_dir.mkdir(parents=True, exist_ok=True)
    own = {key: _plain(value) for key, value in sorted(vars(args).items()) if key not in _FREE} | made_of
    if processes.leads():
        bind(args.run_dir / "arguments.json", own, args.run_dir / "checkpoints")
