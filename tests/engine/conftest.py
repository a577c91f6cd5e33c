"""Engines on the 13-token model: one for each drafter, every tier compiled, and plain decoding to compare with.

Built once a session. Pools of the drafting engines are too small for four long requests, so that preemption happens.
Compiling is what these tests cost, so two kinds' engines alone have several buckets, and EAGLE-3's the rounds of greedy
batches too; the others have one bucket's sampled rounds. With --exhaustive every engine has all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from flax import nnx

from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.policy import BatchView, RoundStats
from jaxspec.assemble import assemble
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.drafters import registry
from jaxspec.engine import Engine
from jaxspec.events import Delta, Finished, Started
from jaxspec.loading import Drafting, bind_drafter
from jaxspec.models.layers import Linear, Shared, causal_attention, shared_lm_head
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.request import FinishReason, RequestOutput, SamplingParams
from jaxspec.speculation.drafters.dflash2_head import Dflash2Config, Dflash2Head
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead
from jaxspec.speculation.drafters.dspark_head import DsparkConfig, DsparkHead
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.medusa_head import MedusaConfig, MedusaHeads
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from jaxspec.tier import PLAIN, Tier

pytest.register_assert_rewrite("guided_cases")

V, EOS = 13, 12
TREE = Tier(3, 2, 7)
#: Of one of two layers, and its end lies inside pages, trees and texts: all that follows is shown for both kinds.
WINDOW: dict[str, Any] = dict(family="ministral", sliding_window=11, sliding_layers=(1,))
#: Kinds whose engines have several buckets: all that a drafter can have (a cache, features, trees), and the least.
WHOLE = ("eagle3", "ngram")
#: Kinds whose engines live only while tests ask for them: executables take memory maps, of which a process has 65,530.
PASSING = ("eagle1", "mtp", "medusa", "peagle", "dflash", "dspark", "dflash2", "suffix", "hybrid")
#: Kinds whose engines compute each prompt by itself: several together go the way of EAGLE-3's, and of DSpark's.
ALONE = ("eagle1", "mtp", "dflash", "dflash2")
#: What the configuration of a kind says besides, and the kind of drafter where that has another name.
SPECULATION: dict[str, dict[str, Any]] = {
    "suffix": dict(suffix_corpus_tokens=512, suffix_corpus_responses=True),
    "hybrid": dict(hybrid=True, hybrid_depth=1, suffix_corpus_tokens=512, suffix_corpus_responses=True),
}
KINDS = {"hybrid": "eagle3"}
TIERS = {
    "ngram": (PLAIN, Tier(3), Tier(5)),
    "draft_model": (PLAIN, Tier(1), Tier(3), TREE),
    "eagle3": (PLAIN, Tier(3), TREE),
    "small": (PLAIN, Tier(5)),
    **{kind: (PLAIN, Tier(3), TREE) for kind in PASSING},
    "dflash": (PLAIN, Tier(3)),
    "dflash2": (PLAIN, Tier(3)),
    "suffix": (PLAIN, Tier(3), Tier(5)),
    "hybrid": (PLAIN, Tier(5, lookup=True), TREE),
}
#: With --exhaustive. The gate has a chain of one draft with a draft model, DFlash's trees as DSpark's, and one chain of
#: two drafters in tests/speculation/test_suffix.py.
ALL_TIERS = TIERS | {
    "dflash": (PLAIN, Tier(3), TREE),
    "dflash2": (PLAIN, Tier(3), TREE),
    "hybrid": (PLAIN, Tier(3), TREE, Tier(5, lookup=True)),
    "ngram": (PLAIN, Tier(1), Tier(3), Tier(5)),
    "eagle3": (PLAIN, Tier(1), Tier(3), TREE),
}
SIZES = dict(
    max_batch_size=4, max_seq_len=120, page_size=8, prefill_chunk=16, max_num_batched_tokens=32, warmup="eager",
)  # fmt: skip


class Script:
    """A policy that runs through its tiers in turn and records what it hears.

    Attributes:
      selected: the tier of each round, as chosen.
      heard: finished rounds.
    """

    def __init__(self, *tiers: Tier) -> None:
        self.tiers = tiers
        self.selected: list[Tier] = []
        self.heard: list[RoundStats] = []

    def select(self, view: BatchView) -> Tier:
        tier = self.tiers[len(self.selected) % len(self.tiers)]
        self.selected.append(tier)
        return tier

    def observe(self, stats: RoundStats) -> None:
        self.heard.append(stats)

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        return buckets


def randomised(module: Any, seed: int) -> Any:
    """The module with every parameter of its own random: gains around 1, maps that keep a unit variance."""
    for i, (path, param) in enumerate(nnx.iter_graph(module)):
        if isinstance(param, nnx.Param):
            noise = np.asarray(jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), param.shape))
            if param.ndim > 1:
                noise = noise * (2.5 if "lm_head" in path else 1.0) * (1 / np.sqrt(param.shape[0]).astype(np.float32))
            else:
                noise = 0.2 * noise + (1.0 if path[-1] == "weight" else 0.0)
            param.set_value(jnp.asarray(noise))
    return module


def eagle3_head(target: Any, **fields: Any) -> Eagle3Head:
    """A random head over a draft vocabulary of 9 of the 13 tokens."""
    cfg = target.config
    config = Eagle3Config(
        hidden_size=16, target_hidden_size=cfg.hidden_size, intermediate_size=24, num_heads=2, num_kv_heads=1,
        head_dim=8, vocab_size=V, draft_vocab_size=9, aux_layer_ids=(0, 1, 2), **fields,
    )  # fmt: skip
    head = Eagle3Head(config, rngs=nnx.Rngs(0))
    for name, scale in (("embedding", 1.0), ("fc", 0.3), ("lm_head", 1.0)):
        part = getattr(head, name)
        param = part if name == "embedding" else part.kernel
        param.set_value(jax.random.normal(jax.random.key(3), param.shape) * scale)
    head.target_ids.set_value(jnp.asarray([0, 1, 2, 4, 5, 7, 8, 10, 11], jnp.int32))
    return head


def dflash_head(target: Any) -> DflashHead:
    """A random head whose second layer sees a window that ends inside the texts, and a draft vocabulary."""
    layer = tiny_config(num_layers=2, num_kv_heads=1, intermediate_size=40, qk_norm=True)
    config = DflashConfig(layer, (1, 2), 5, 6, 9, sliding_layers=(1,), sliding_window=11, window_from_anchor=True)
    lm_head = Linear(layer.hidden_size, 9, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(2))
    head = DflashHead(config, Shared(target.embedding[...]), lm_head, rngs=nnx.Rngs(1))
    head.target_ids.set_value(jnp.asarray([0, 1, 2, 4, 5, 7, 8, 10, 11], jnp.int32))
    return randomised(head, 8)


def dspark_head(target: Any) -> DsparkHead:
    """A random head of one layer, with a Markov head that remembers and a draft vocabulary."""
    layer = tiny_config(num_layers=1, num_kv_heads=1, intermediate_size=40, qk_norm=True)
    config = DsparkConfig(layer, (1, 2), 4, 6, 9, markov_rank=5, markov_type="rnn")
    lm_head = Linear(layer.hidden_size, 9, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(2))
    head = DsparkHead(config, Shared(target.embedding[...]), lm_head, rngs=nnx.Rngs(1))
    head.target_ids.set_value(jnp.asarray([0, 1, 2, 4, 5, 7, 8, 10, 11], jnp.int32))
    return randomised(head, 9)


def dflash2_head(target: Any) -> Dflash2Head:
    """A random head of one layer that lists 4 candidates a place."""
    layer = tiny_config(num_layers=1, num_kv_heads=1, intermediate_size=40, qk_norm=True)
    sizes = dict(conv_taps=3, conv_group=8, selector_rank=5, selector_top_k=4)
    config = Dflash2Config(layer, (1, 2), 4, 6, V, **sizes)
    head = Dflash2Head(config, Shared(target.embedding[...]), shared_lm_head(target), rngs=nnx.Rngs(1))
    return randomised(head, 10)


class Modules(Mapping[str, Any]):
    """A random module of every kind, those of one that may have several layers with two; built when first asked for."""

    def __init__(self, target: Any) -> None:
        cfg, rngs = target.config, nnx.Rngs(1)
        tables = lambda: (Shared(target.embedding[...]), shared_lm_head(target))
        layer = tiny_config(num_layers=2, intermediate_size=40)
        eagle1, mtp = (
            Eagle1Config(layer, cfg.num_layers),
            MtpConfig(tiny_config(num_layers=1, num_kv_heads=1), cfg.num_layers),
        )
        medusa = MedusaConfig(3, cfg.hidden_size, V, cfg.num_layers, num_layers=2)
        self._make: dict[str, Callable[[], Any]] = {
            "draft_model": lambda: tiny_target(1, num_layers=2, eos_token_ids=(EOS,), **WINDOW),
            "eagle3": lambda: eagle3_head(target),
            "eagle1": lambda: randomised(Eagle1Head(eagle1, *tables(), rngs=rngs), 4),
            "mtp": lambda: randomised(MtpHead(mtp, *tables(), rngs=rngs), 5),
            "medusa": lambda: randomised(MedusaHeads(medusa, rngs=rngs), 6),
            "peagle": lambda: randomised(eagle3_head(target, num_layers=2, mask_token_id=6), 7),
            "dflash": lambda: dflash_head(target),
            "dspark": lambda: dspark_head(target),
            "dflash2": lambda: dflash2_head(target),
        }
        self._made: dict[str, Any] = {}

    def __getitem__(self, kind: str) -> Any:
        if kind not in self._made:
            self._made[kind] = self._make[kind]()
        return self._made[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self._make

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)


@dataclasses.dataclass
class Bench:
    """Engines and the expected outputs.

    Attributes:
      target: the model. modules: the drafters' by kind. kept: where executables are kept.
      exhaustive: whether every engine has every bucket and variant.
    """

    target: Any
    modules: Mapping[str, Any]
    kept: Path
    exhaustive: bool

    def __post_init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._expected: dict[Any, RequestOutput] = {}

    def build(
        self, kind: str, speculation: SpeculationConfig, cost: CostTable | None = None, together: bool = True,
        **config: Any,
    ) -> Engine:  # fmt: skip
        """An engine of a drafter, "none" included.

        Args:
          together: whether it computes several prompts together, too.
        """
        kind = KINDS.get(kind, kind)
        module = self.modules[kind] if kind in self.modules else registry.find(kind).for_target(self.target)
        make = lambda geo: bind_drafter(kind, module, geo, speculation)
        sizes = {**SIZES, "compile_cache": self.kept, **config}
        with contextlib.nullcontext() if together else quick.prompts_alone():
            return assemble(
                self.target, None, speculation, EngineConfig(**sizes), cost=cost, progress=False,
                drafter=None if kind == "none" else Drafting(make, registry.find(kind).trees, name=kind),
                files={"model files": "these"},
            )  # fmt: skip

    @property
    def tiers(self) -> Mapping[str, tuple[Tier, ...]]:
        """What the session's engine of a drafter is compiled for, and "small"."""
        return ALL_TIERS if self.exhaustive else TIERS

    def buckets(self, kind: str) -> tuple[int, ...]:
        """Batch sizes that the session's engine of a drafter is compiled for."""
        if self.exhaustive:
            return (1, 2, 4)
        return (1, 4) if kind in (*WHOLE, "none") else (4,)

    def target_as_draft(self, engine: Engine) -> Any:
        """Parameters with which an engine's draft model is its target."""
        return bind_drafter("draft_model", self.target, engine.runner.geo)[1]

    def engine(self, kind: str) -> Engine:
        """The session's engine of a drafter, idle, with nothing in its prefix cache.

        "none" is plain decoding, every row through the executables for sampled batches; "small" is n-gram with one
        tier and one bucket, of the shapes of "ngram", whose executables it finds.
        """
        if kind not in self._engines:
            for other in PASSING:
                self._engines.pop(other, None)
            if kind == "none":
                options = dict(batch_buckets=self.buckets(kind), variants=("sampled",))
                self._engines[kind] = self.build(kind, SpeculationConfig(policy="off"), **options)
            elif kind == "small":
                cost = CostTable({(tier, 4): 1e-3 for tier in self.tiers[kind]})
                few = dict(batch_buckets=(4,), variants=("sampled",), num_pages=30)
                self._engines[kind] = self.build("ngram", SpeculationConfig(tiers=self.tiers[kind]), cost, **few)
            else:
                buckets = self.buckets(kind)
                cost = CostTable({(t, b): 1e-3 * (1 + 0.1 * t.depth) for t in self.tiers[kind] for b in buckets})
                # EAGLE-1 and MTP draft as EAGLE-3 does, whose engine has the rounds of greedy batches too.
                both = kind == "eagle3" or (self.exhaustive and kind not in ("eagle1", "mtp"))
                variants = ("greedy", "sampled") if both else ("sampled",)
                options: dict[str, Any] = dict(batch_buckets=buckets, variants=variants)
                speculation = SpeculationConfig(tiers=self.tiers[kind], **SPECULATION.get(kind, {}))
                options |= dict(num_pages=30, together=self.exhaustive or kind not in ALONE)
                self._engines[kind] = self.build(kind, speculation, cost, **options)
        engine = self._engines[kind]
        for request_id in list(engine._live):  # what a failed test left behind
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        engine.scheduler.prefix_cache.reset()
        return engine

    def expected(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[RequestOutput]:
        """What plain decoding makes of each request (memoised)."""
        keys = [(tuple(prompt), repr(params)) for prompt, params in requests]
        missing = {k: r for k, r in zip(keys, requests, strict=True) if k not in self._expected}
        outputs = drive(self.engine("none"), list(missing.values()))
        self._expected |= dict(zip(missing, outputs, strict=True))
        return [self._expected[key] for key in keys]


def drive(
    engine: Engine,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    *,
    join: Callable[[int], int] = lambda i: 0,
    on_step: Callable[[int, list[str]], None] | None = None,
) -> list[RequestOutput]:
    """Runs requests to their end, and checks what the stream said on the way.

    Args:
      join: the step before which request i is added.
      on_step: called after every step with its number and the ids so far.
    """
    waiting = sorted(range(len(requests)), key=lambda i: (join(i), i))
    ids: dict[str, int] = {}
    outputs: dict[int, RequestOutput] = {}
    started: dict[int, int] = {}
    streamed: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    step = 0
    while waiting or engine.has_work:
        while waiting and join(waiting[0]) <= step:
            i = waiting.pop(0)
            ids[engine.add(*requests[i])] = i
        for event in engine.step():
            i = ids[event.request_id]
            assert i not in outputs, "an event after the last one"
            match event:
                case Started():
                    assert i not in started and not streamed[i] and event.queue_seconds >= 0
                    started[i] = event.cached_prompt_tokens
                case Delta():
                    streamed[i] += event.token_ids
                case Finished():
                    assert event.reason is event.output.finish_reason
                    outputs[i] = event.output
        step += 1
        if on_step is not None:
            on_step(step, list(ids))
        assert step < 20_000, "the engine does not come to an end"
    for i, output in outputs.items():
        assert streamed[i] == output.token_ids
        assert started[i] == output.metrics.cached_prompt_tokens
        assert output.metrics.output_tokens == len(output.token_ids)
    at_baseline(engine)
    return [outputs[i] for i in sorted(outputs)]


def at_baseline(engine: Engine) -> None:
    """Every page is free or idle, every slot free."""
    stats, scheduler = engine.stats, engine.scheduler.stats
    assert stats.free_pages + stats.cached_pages == engine.runner.geo.num_pages
    assert scheduler.running == scheduler.waiting == 0


def same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Tokens, reasons and log-probabilities agree."""
    for i, (a, b) in enumerate(zip(outputs, expected, strict=True)):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), f"request {i}: {a.metrics}"
        one, other = a.outputs[0].logprobs, b.outputs[0].logprobs
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert len(one) == len(other) == len(a.token_ids)
            for x, y in zip(one, other, strict=True):
                assert list(x) == list(y) and [e.rank for e in x.values()] == [e.rank for e in y.values()]
                np.testing.assert_allclose([e.logprob for e in x.values()], [e.logprob for e in y.values()], atol=1e-4)


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled rows with every parameter that shapes a token, prompts below and above a chunk."""
    rng = np.random.default_rng(0)
    prompt = lambda n: rng.integers(0, EOS, n).tolist()
    long = dict(max_tokens=36, ignore_eos=True)
    return [
        (prompt(5), SamplingParams(temperature=0, **long)),
        (prompt(9), SamplingParams(temperature=1.0, seed=3, **long)),
        (prompt(1), SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=4, **long)),
        (prompt(16), SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.4, **long)),
        (
            prompt(7),
            SamplingParams(temperature=1.2, frequency_penalty=0.5, logit_bias={2: 2.0, 5: -4.0}, seed=5, **long),
        ),
        (prompt(6), SamplingParams(temperature=1.0, min_tokens=12, stop_token_ids=[3, 5], seed=6, max_tokens=36)),
        (prompt(8), SamplingParams(temperature=0, logprobs=3, **long)),
        (prompt(12), SamplingParams(temperature=0.9, logprobs=0, seed=7, max_tokens=36)),
        (prompt(40), SamplingParams(temperature=0, **long)),
        (prompt(33), SamplingParams(temperature=1.5, top_p=0.8, repetition_penalty=0.8, seed=8, **long)),
        (prompt(17), SamplingParams(temperature=0, logit_bias={EOS: 3.0}, min_tokens=5, max_tokens=36)),
        (prompt(3), SamplingParams(temperature=1.0, seed=2**32 - 1, max_tokens=1)),
        (prompt(4), SamplingParams(temperature=0, max_tokens=2)),
    ]


def long_requests(count: int = 6) -> list[tuple[list[int], SamplingParams]]:
    """Requests of which the small pools hold two and a half."""
    rng = np.random.default_rng(1)
    return [
        (
            rng.integers(0, EOS, 21 + i).tolist(),
            SamplingParams(
                temperature=0.9 * (i % 2), seed=i, max_tokens=70, ignore_eos=True, presence_penalty=i % 3 / 4
            ),
        )
        for i in range(count)
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a passing kind come together, those of drafts and of exactness, so that its engine is built once."""

    def group(item: pytest.Item) -> int:
        kind = (
            item.callspec.params.get("kind") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
        )
        return PASSING.index(kind) if kind in PASSING else -1

    of = ("test_drafts_as_defined.py", "test_exactness.py")
    places = [i for i, item in enumerate(items) if item.path.name in of]
    for place, item in zip(places, sorted((items[i] for i in places), key=group), strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def bench(kept_executables: Path, exhaustive: bool) -> Bench:
    target = tiny_target(0, eos_token_ids=(EOS,), **WINDOW)
    return Bench(target, Modules(target), kept_executables, exhaustive)


@pytest.fixture(scope="session")
def tools(bench: Bench) -> Any:
    """What test modules share; they cannot import each other."""

    class Tools:
        eagle3_head = staticmethod(eagle3_head)
        drive, same, at_baseline = staticmethod(drive), staticmethod(same), staticmethod(at_baseline)
        workload, long_requests = staticmethod(workload), staticmethod(long_requests)
        script, randomised = Script, staticmethod(randomised)
        eagle3_head = staticmethod(eagle3_head)
        tiers, tree, vocab, eos, error = bench.tiers, TREE, V, EOS, FinishReason.ERROR
        speculation = SPECULATION

    return Tools


@pytest.fixture(scope="session")
def oracle(bench: Bench) -> Callable[[Sequence[Sequence[int]]], np.ndarray]:
    """Logits [batch, length, V] of whole sequences of up to 128 tokens: no cache, no engine."""
    graph, params = nnx.split(bench.target)

    @jax.jit
    def forward(params: Any, tokens_BN: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        positions = jnp.broadcast_to(jnp.arange(tokens_BN.shape[1])[None], tokens_BN.shape)
        return model.logits(model(tokens_BN, positions, causal_attention)[0])

    def run(texts: Sequence[Sequence[int]]) -> np.ndarray:
        width = 128 if max(map(len, texts)) > 16 else 16
        tokens = np.zeros((len(texts), width), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        return np.asarray(forward(params, tokens))

    return run
