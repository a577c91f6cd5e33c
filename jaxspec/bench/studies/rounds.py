"""python -m jaxspec.bench.studies.rounds: what a round costs at a real model's shapes, against the weights' bytes.

Random weights in the shapes of a target and of drafters as wide (see `drafters`): a round's cost does not depend on
what the weights say. For each drafter, tier and batch: milliseconds a round (rounds dispatched back to back, as the
engine does), the device's busy share of it, and the floor, which is the time that reading the target's weights once
takes at the bandwidth given. All that a batch size has takes turns, repeat by repeat, so that a device that slows down
does so for all of it. The time of all the host's cores stands beside (`busy_ms`, "busy" as a share of plain
decoding's): on a CPU, what to compare where other work runs too. Plain decoding is the first drafter's. Packed rounds,
of so many tokens over the batch, stand behind their tier's. With `--tensor-parallel N` the same on N devices, after one
where a model fits it: how much faster, and which share of the device's time collectives take (waiting for another
included).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec.adaptive.arms import packed_tokens
from jaxspec.bench.studies import drafters, report
from jaxspec.bench.studies.weights import FORMATS, MXFP4, quantise, random_weights
from jaxspec.config import DRAFT_FORMATS, DraftFormat
from jaxspec.drafters import registry as kinds
from jaxspec.drafters.rounding import check_weights
from jaxspec.loading import in_few_bits, laid_out
from jaxspec.models import few_rows, few_rows_fit, packing, registry
from jaxspec.models.base import Experts, ModelConfig
from jaxspec.models.layouts import tensor_parallel
from jaxspec.models.quantised import stored_bytes
from jaxspec.models.sharded import BY_XLA
from jaxspec.runtime import summing
from jaxspec.runtime.compile import use_persistent_cache
from jaxspec.runtime.repertoire import RunnerConfig
from jaxspec.runtime.results import Result
from jaxspec.runtime.runner import Runner
from jaxspec.runtime.sharding import tensor_mesh
from jaxspec.runtime.warmup import WarmupConfig
from jaxspec.speculation.layouts import Batch
from jaxspec.speculation.state import Geometry
from jaxspec.tier import Tier, parse_tier
from pallas_kernels.profile import busy, medians, record

_GPT_OSS_20B = ModelConfig(
    "gpt_oss", 201088, 2880, 2880, 24, 64, 8, 64, rope_theta=150000.0, attention_bias=True, output_bias=True,
    attention_sinks=True, norm_gain="float32", sliding_window=128, sliding_layers=tuple(range(0, 24, 2)),
    experts=Experts(32, 4, 2880, tuple(range(24)), scores="top_k", bias=True, hidden_act="clamped_swiglu"),
)  # fmt: skip
#: Llama 3.1 8B and 3.2 1B, Qwen3-30B-A3B, gpt-oss-20b, Phi-3-mini, the demo's target and its draft model, and small
#: ones for rehearsals; with the heads' draft vocabularies.
SHAPES = {
    "8b": (ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, rope_theta=5e5), 32000),
    "qwen3-8b": (
        ModelConfig("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, rope_theta=1e6, rms_norm_eps=1e-6, qk_norm=True),
        32000,
    ),
    "30b-a3b": (
        ModelConfig(
            "qwen3_moe",
            151936,
            2048,
            6144,
            48,
            32,
            4,
            128,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            qk_norm=True,
            experts=Experts(128, 8, 768, tuple(range(48))),
        ),
        32000,
    ),
    "gpt-oss-20b": (_GPT_OSS_20B, 32000),
    "1b": (ModelConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, rope_theta=5e5, tie_word_embeddings=True), 32000),
    "phi3-mini": (ModelConfig("phi3", 32064, 3072, 8192, 32, 32, 32, 96), 32064),
    "demo": (ModelConfig("llama", 8192, 512, 1408, 7, 8, 2, 64, tie_word_embeddings=True), 4096),
    "demo-draft": (ModelConfig("llama", 8192, 192, 512, 2, 3, 1, 64, tie_word_embeddings=True), 4096),
    "tiny": (ModelConfig("llama", 512, 64, 128, 2, 4, 2, 16), 256),
    "tiny-moe": (ModelConfig("qwen3_moe", 512, 128, 128, 2, 4, 2, 32, experts=Experts(16, 4, 128, (0, 1))), 256),
}

#: Measured device-to-device copy, bytes read plus bytes written a second (docs/kernels.md).
BANDWIDTH = {"H200": 4.28e12}


#: Whose weights draft models have, where not the target's own.
SMALL = {"8b": "1b", "demo": "demo-draft"}
#: What heads have otherwise than as wide as the target.
HEADS = {"demo": drafters.DEMO}
#: Rounds that are dispatched before a clock starts, and those that a text has room for besides.
_AHEAD, _ROOM = 8, 64
#: Names of kernels by which devices exchange something.
_COLLECTIVE = re.compile(r"nccl|all.?reduce|all.?gather|reduce.?scatter|collective", re.IGNORECASE)


def first_layers(cfg: ModelConfig, count: int | None) -> ModelConfig:
    """The model of the first so many layers; None: of all."""
    if count is None:
        return cfg
    own = cfg.experts and dataclasses.replace(cfg.experts, layers=tuple(i for i in cfg.experts.layers if i < count))
    sliding = tuple(i for i in cfg.sliding_layers if i < count)
    return dataclasses.replace(cfg, num_layers=count, experts=own, sliding_layers=sliding)


@dataclasses.dataclass(frozen=True)
class Model:
    """A target of random weights, on so many devices, for the runners of several drafters.

    Attributes:
      target: as it is stored. ready: as rounds run it.
      shape: one of SHAPES. sums: how devices add up activations (runtime.summing).
      layers_by_xla: no small-batch kernels; output: those for the output layer, too. invariant: see laid_out.
      packed: whether experts in few bits are laid out for their kernel, as engines do.
    """

    target: Any
    ready: Any
    shape: str
    mesh: Mesh | None
    sums: str
    layers_by_xla: bool
    output: bool
    packed: bool
    invariant: bool

    @classmethod
    def of(
        cls, shape: str, dtype: jnp.dtype, *, shards: int = 1, sums: str = "nccl", weights: str | None = None,
        last: str | None = None, layers_by_xla: bool = False, output: bool = False, layers: int | None = None,
        packed: bool = True, invariant: bool = False,
    ) -> Model:  # fmt: skip
        """
        Args:
          weights, last: formats of the layers' weights and of the output layer's; None: as they are.
          layers: that it has; None: the shape's.
        """
        cfg = first_layers(SHAPES[shape][0], layers)
        mesh = tensor_mesh(shards) if shards > 1 else None
        model = cls(None, None, shape, mesh, sums, layers_by_xla, output, packed, invariant)
        # Few bits before the other weights are made: they may not all fit in bfloat16.
        target = model.filled(0, lambda: registry.build(cfg, dtype), lambda made: quantise(made, weights, last))
        return dataclasses.replace(model, target=target, ready=model.by_kernels(target))

    @property
    def shards(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def filled(self, seed: int, build: Callable[[], Any], change: Callable[[Any], None] = lambda module: None) -> Any:
        """Random weights for a module, laid out for the devices; `change` is done to it before."""
        way = summing.WAYS[self.sums]
        lay_out = lambda module: tensor_parallel(module, self.shards, way.by) if self.shards > 1 else module
        module = nnx.eval_shape(lambda: lay_out(build()))
        change(module)
        return random_weights(module, seed, self.mesh)

    def by_kernels(self, module: Any) -> Any:
        """Its layers by the small-batch kernels, where there are any for it; on a CPU in blocks, as engines have it."""
        if jax.default_backend() == "cpu" and self.shards == 1:
            return laid_out(module, 1, BY_XLA)
        if few_rows.unsupported() is not None or self.layers_by_xla:
            return module
        if self.packed:
            packing.pack_experts(module, self.shards)
        if few_rows_fit.refusal(module, self.shards) is not None:
            return few_rows.pack_maps(module, self.shards)
        return few_rows.prepare(module, output=self.output, invariant=self.invariant)

    def runner(
        self, name: str, tiers: Sequence[Tier], batches: Sequence[int], context: int, *, kernels: str | None,
        sampled: bool, page: int, budgets: Sequence[float] = (), invariant: bool = False, layers: int | None = None,
        draft_quantization: DraftFormat | None = None,
    ) -> Runner:  # fmt: skip
        """A runner with one executable a tier and batch, and one a budget.

        Args:
          name: of the drafter, as `drafters.parse` knows it. layers: of its head. draft_quantization: see
            SpeculationConfig.
          invariant: attention of `batch_invariant`.

        Raises:
          ValueError: a drafter that several devices cannot share here, or a head of a target with experts.
        """
        cfg, draft_vocab = self.target.config, SHAPES[self.shape][1]
        depth = max(tier.depth for tier in tiers)
        pages = -(-(context + (_ROOM + _AHEAD) * (depth + 1)) // page)
        slots = max(batches)
        geo = Geometry(slots, slots * pages, page, pages, depth, kernels=kernels, batch_invariant=invariant)
        drafter, params = None, ()
        if depth:
            kind = drafters.parts(name)[0]
            if kind not in ("eagle3", "suffix", "ngram") and (self.shards > 1 or cfg.experts is not None):
                raise ValueError(f"{kind} is for dense targets on one device here, got {cfg.family} on {self.shards}")
            small = SHAPES[SMALL.get(self.shape, self.shape)][0]
            small = dataclasses.replace(small, vocab_size=cfg.vocab_size)
            filled = lambda build: self.filled(1, build)
            sizes = drafters.Sizes(
                self.target, draft_vocab, depth, layers, small, filled, HEADS.get(self.shape, {})
            )  # fmt: skip
            ready = lambda module: self.by_kernels(in_few_bits(module, draft_quantization))
            drafter, params = drafters.bound(name, sizes, geo, ready)
        packed = {
            (tier, batch): tuple(sorted({packed_tokens(tier, batch, budget) for budget in budgets}))
            for tier in tiers for batch in batches if tier.depth
        }  # fmt: skip
        reachable = {tier: tuple(batches) for tier in tiers}
        can = RunnerConfig(reachable, prefill_shapes=(), variants=(sampled,), budgets=packed)
        options = summing.WAYS[self.sums].options if self.shards > 1 else ()
        warmup = WarmupConfig(sys.stderr.isatty(), use_persistent_cache(True))
        return Runner(self.ready, drafter, params, geo, can, warmup, self.mesh, options)


def target_bytes(runner: Runner, touched: int) -> int:
    """Bytes of the target's weights that a pass reads; of experts those of the `touched` ones, over all layers."""
    cfg = runner.config
    if cfg.experts is None:
        return runner.weight_bytes
    # Kernels that are stacked over experts; biases are no more than a thousandth of them.
    stacked = [x for x in jax.tree.leaves(runner.target) if x.ndim > 2 and x.shape[0] == cfg.experts.count]
    each = sum(map(stored_bytes, stacked)) // (cfg.experts.count * len(cfg.experts.layers))
    return runner.weight_bytes - sum(map(stored_bytes, stacked)) + touched * each


@dataclasses.dataclass(eq=False)
class Bench:
    """Back-to-back rounds of one runner at a given context."""

    drafter: str
    runner: Runner
    tiers: Sequence[Tier]
    context: int

    def start(self, tier: Tier, batch: int, tokens: int | None = None) -> Callable[[int], Any]:
        """Goes back to the same context; returns what dispatches so many rounds, and returns the last one's result."""
        runner, geo = self.runner, self.runner.geo
        table = np.arange(geo.slots * geo.pages_per_seq, dtype=np.int32).reshape(geo.slots, -1)
        length = jnp.full((geo.slots,), self.context, jnp.int32)
        # Each request has a text of its own, and with it experts of its own.
        vocab, shape = runner.config.vocab_size, runner.state.tokens_SL.shape
        texts = jax.random.randint(jax.random.key(0), shape, 0, vocab, jnp.int32)
        runner.state = dataclasses.replace(runner.state, table_SM=jnp.asarray(table), length_S=length, tokens_SL=texts)
        rows = Batch.of(geo, batch, range(batch), geo.max_depth)
        array = jax.device_put(rows.array)
        return lambda count: runner.repeat(tier, batch, array, count, tokens)


@dataclasses.dataclass(eq=False)
class Program:
    """One executable's rounds, timed."""

    bench: Bench
    tier: Tier
    batch: int
    tokens: int | None

    def __post_init__(self) -> None:
        self.seconds: list[float] = []
        self.busy: list[float] = []

    def run(self, count: int) -> Any:
        return jax.block_until_ready(self.bench.start(self.tier, self.batch, self.tokens)(count))

    def time(self, count: int) -> None:
        """From one round's end, where the device takes the time others being under way then, to the last one's."""
        go = self.bench.start(self.tier, self.batch, self.tokens)
        before = [go(1) for _ in range(min(_AHEAD, count))]
        under_way = [result for result in before if not result.is_ready()] or before[-1:]
        jax.block_until_ready(under_way[0])
        began, spent, left = time.perf_counter(), time.process_time(), count - len(under_way) + 1
        jax.block_until_ready(go(left))
        self.seconds.append((time.perf_counter() - began) / count)
        self.busy.append((time.process_time() - spent) / left)

    def row(self, count: int) -> dict[str, Any]:
        """Milliseconds a round, and what the device did with them."""
        found = record(lambda: self.run(count))
        active, span = busy(found)
        top = medians(found)
        exchanged = sum(event.seconds for event in found if _COLLECTIVE.search(event.name))
        return {
            "drafter": self.bench.drafter if self.tier.depth else None,
            "tier": self.tier.name,
            "batch": self.batch,
            "tokens": self.tokens,
            "ms": 1e3 * statistics.median(self.seconds),
            "ms_spread": 1e3 * (max(self.seconds) - min(self.seconds)),
            "ms_each": [round(1e3 * s, 4) for s in self.seconds],
            "busy_ms": 1e3 * statistics.median(self.busy),
            "busy_ms_each": [round(1e3 * s, 4) for s in self.busy],
            "device_ms": 1e3 * active / count,
            "idle_share": None if not span else 1 - active / span,
            "kernels": round(len(found) / count),
            "collective_share": exchanged / active if active else None,
            "experts": Result.of(np.asarray(self.run(1)), self.batch).touched_R[0],
            "top": {name: [n / count, 1e6 * t] for name, (n, t) in list(top.items())[:12]},
        }


def measured(benches: Sequence[Bench], batch: int, count: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each program of a batch size; they take turns."""
    programs = [
        Program(bench, tier, batch, tokens)
        for bench in benches for tier in bench.tiers for tokens in (None, *bench.runner.budgets.get((tier, batch), ()))
    ]  # fmt: skip
    for program in programs:
        program.run(3)
    for _ in range(repeats):
        for program in programs:
            program.time(count)
    return [program.row(count) for program in programs]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("rounds", __doc__)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="8b", help="of the target")
    add("--layers", type=int, help="of the target (default: all): drafts cost what they cost, and compiling less")
    add("--batch", type=int, nargs="+", default=[1], help="requests of a round, each measured for itself")
    add("--depth", type=int, nargs="+", default=[0, 1, 3, 5], help="0 is plain decoding; it is always measured")
    add("--trees", nargs="+", default=[], metavar="TIER", help="trees besides, such as tree-5x4/16")
    add("--drafter", type=drafters.parse, nargs="+", default=[("eagle3", ())], metavar="KIND",
        help=f"{', '.join(drafters.NAMES)}; KIND{drafters.BESIDE}[:N]: a hybrid, its drafter N deep; "
        "KIND=TIER,TIER: its own tiers")  # fmt: skip
    add("--apart", action="store_true", help="one drafter after the other, each told as soon as it is measured")
    add("--draft-layers", type=int, help="of heads (default: by kind, as those of the demo)")
    add("--draft-quantization", choices=("none", *DRAFT_FORMATS), nargs="+", default=["none"],
        help="formats of drafters' weights, each measured for itself, on one device")  # fmt: skip
    add("--budget", type=float, nargs="+", default=[], help="packed rounds: drafted tokens verified a row, on average")
    add("--context", type=int, default=1024, help="committed tokens of each request")
    add("--page", type=int, default=64, help="tokens a page")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and cache")
    formats = [*sorted(FORMATS), MXFP4]
    add("--weights", choices=formats, help="of the layers, quantised, mxfp4 of experts alone (default: as --dtype)")
    add("--output-weights", choices=sorted(FORMATS), help="of the output layer, quantised (default: as --dtype)")
    add("--kernels", choices=("reference", "tpu", "gpu", "interpret"), help="default: the backend's own")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="on N devices too, after one")
    add("--without-one", action="store_true", help="on N devices only")
    add("--sums", choices=sorted(summing.WAYS), nargs="+", help="how N devices add up (default: measured)")
    add("--layers-by-xla", action="store_true", help="no small-batch kernels (default: where the device has them)")
    add("--experts-as-stored", action="store_true", help="in few bits, not packed (default: where the device can)")
    add("--output-by-kernel", action="store_true", help="the output layer by its kernel, too (default: by XLA)")
    add("--batch-invariant", action="store_true", help="as engines with batch_invariant, the output layer included")
    add("--sampled", action="store_true", help="rounds that sample (temperature 0 rows included)")
    add("--rounds", type=int, default=50, help="rounds dispatched back to back")
    add("--repeats", type=int, default=5, help="medians are taken over these")
    add("--bandwidth", type=float, help="TB/s, for the floor; default: the device's where it is known")
    args = report.parse(parser, argv)
    if args.output_weights and SHAPES[args.shape][0].tie_word_embeddings:
        parser.error(f"--output-weights wants an output layer of its own, and that of {args.shape} is the embedding")
    if args.draft_quantization != ["none"] and args.tensor_parallel > 1:
        parser.error(f"--draft-quantization is for one device here, got --tensor-parallel {args.tensor_parallel}")
    for form in args.draft_quantization:
        for name, _ in args.drafter:
            try:
                check_weights(kinds.find(drafters.parts(name)[0]), None if form == "none" else form)
            except ValueError as e:
                parser.error(str(e))
    if args.weights == MXFP4 and SHAPES[args.shape][0].experts is None:
        parser.error(f"--weights {MXFP4} is for experts, and {args.shape} has none")

    tiers = [*(Tier(depth) for depth in sorted({0, *args.depth})), *map(parse_tier, args.trees)]
    rows: list[dict[str, Any]] = []
    kind = args.weights or args.dtype
    print(f"{args.shape} {kind} on {jax.devices()[0].device_kind}, context {args.context}, jax {jax.__version__}")
    print(
        "devices batch  drafter               tier          tokens      ms  x plain   busy  x one  share of floor  "
        "device ms  idle  collectives kernels  experts a layer"
    )
    ways = [(1, "nccl")] if args.tensor_parallel == 1 or not args.without_one else []
    for name in args.sums or [None] if args.tensor_parallel > 1 else []:
        width, dtype = SHAPES[args.shape][0].hidden_size, jnp.dtype(args.dtype)
        ways.append((args.tensor_parallel, name or summing.choose(tensor_mesh(args.tensor_parallel), width, dtype)))
    for shards, sums in ways:
        if shards > 1:
            print(f"{shards} devices, sums by {sums}", flush=True)
        try:
            _measure(args, tiers, shards, sums, rows)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or shards == args.tensor_parallel:
                raise
            print(f"{shards:7d} does not fit: {str(error).splitlines()[0]}", flush=True)
        gc.collect()  # its weights and pools
    return 0


def _measure(
    args: argparse.Namespace, tiers: Sequence[Tier], shards: int, sums: str, rows: list[dict[str, Any]]
) -> None:
    """Measures on so many devices, prints, and appends to `rows`."""
    model = Model.of(
        args.shape, jnp.dtype(args.dtype), shards=shards, sums=sums, weights=args.weights, last=args.output_weights,
        layers_by_xla=args.layers_by_xla, output=args.output_by_kernel or args.batch_invariant,
        invariant=args.batch_invariant, layers=args.layers, packed=not args.experts_as_stored,
    )  # fmt: skip

    def bench_of(asked: tuple[str, tuple[Tier, ...], DraftFormat | None]) -> Bench:
        name, own, form = asked
        own = own or [t for t in tiers if t.depth and (t.is_chain or drafters.draws_trees(name))]
        own = [Tier(0)] * (asked == every[0]) + [*own]
        runner = model.runner(
            name, own, sorted(set(args.batch)), args.context, kernels=args.kernels, sampled=args.sampled,
            page=args.page, budgets=args.budget, invariant=args.batch_invariant, layers=args.draft_layers,
            draft_quantization=form,
        )  # fmt: skip
        return Bench(name if form is None else f"{name}, {form}", runner, own, args.context)

    forms = [None if form == "none" else form for form in args.draft_quantization]
    every = [(name, own, form) for name, own in args.drafter for form in forms]
    alone = {_key(row): row["ms"] for row in rows if row["devices"] == 1}
    plain: dict[int, dict[str, Any]] = {}
    for together in [[asked] for asked in every] if args.apart else [every]:
        # Each compiles its own programs, side by side.
        with ThreadPoolExecutor(len(together)) as pool:
            benches = list(pool.map(bench_of, together))
        for batch in sorted(set(args.batch)):
            for row in measured(benches, batch, args.rounds, args.repeats):
                off = plain.setdefault(batch, row)
                busy_ratios = [mine / its for mine, its in zip(row["busy_ms_each"], off["busy_ms_each"], strict=True)]
                row |= {"devices": shards, "sums": sums, "ratio": row["ms"] / off["ms"]}
                row["busy_ratio"] = statistics.median(busy_ratios)
                _tell(args, benches[0].runner, row, alone.get(_key(row)))
                rows.append(row)
            report.write(args, "rounds", rows)  # what is measured so far
        del benches
        gc.collect()


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("drafter", "tier", "batch", "tokens"))


def _tell(args: argparse.Namespace, runner: Runner, row: dict[str, Any], one: float | None) -> None:
    """Adds to a row what its milliseconds are worth, and prints it; `one`: what it takes on one device."""
    cfg, tier, batch, rate = (
        runner.config,
        parse_tier(row["tier"]),
        row["batch"],
        report.rate(BANDWIDTH, args.bandwidth),
    )
    kv = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * jnp.dtype(args.dtype).itemsize * args.context
    read = (target_bytes(runner, row["experts"]) + batch * kv) / row["devices"]
    row["floor_ms"] = least = None if rate is None else 1e3 * read / rate
    row["speedup"] = None if one is None else one / row["ms"]
    percent = lambda x: "" if x is None else f"{x:.1%}"
    floor = percent(least / row["ms"] if least is not None and (not tier.depth or cfg.experts is not None) else None)
    print(
        f"{row['devices']:7d} {batch:5d}  {row['drafter'] or '':20s}  {tier.name:12s}  "
        f"{row['tokens'] or batch * tier.num_nodes:5d} {row['ms']:7.3f}  "
        f"{row['ratio']:7.3f}  {row['busy_ratio']:5.2f}  "
        f"{'' if one is None else format(row['speedup'], '.2f'):>5s}  {floor:>14s}  "
        f"{row['device_ms']:9.3f} {percent(row['idle_share']):>5s}  {percent(row['collective_share']):>11s} "
        f"{row['kernels']:7d}" + ("" if cfg.experts is None else f"  {row['experts'] / len(cfg.experts.layers):15.1f}"),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
