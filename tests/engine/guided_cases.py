"""A target whose 64 tokens can write JSON, engines on it by drafter, and texts with a grammar to run on them."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from flax import nnx
from schemas import DEAD_END, person
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxspec.adaptive.cost import CostTable
from jaxspec.assemble import assemble
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.events import Delta, Finished
from jaxspec.loading import Drafting, bind_drafter
from jaxspec.models.layers import Shared, shared_lm_head
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.request import FinishReason, RequestOutput, SamplingParams
from jaxspec.runtime.compile import Compilation
from jaxspec.speculation.drafters.dflash2_head import Dflash2Config, Dflash2Head
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead
from jaxspec.speculation.drafters.dspark_head import DsparkConfig, DsparkHead
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.medusa_head import MedusaConfig, MedusaHeads
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from jaxspec.speculation.drafters.suffix import prompt_lookup
from jaxspec.text.grammar import GrammarSpec
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tier import PLAIN, Tier

CHARACTERS = [*'{}[]":,.-+_ ', *"0123456789", *"abcdefghijklmnopqrstuvwxyz"]
MERGES = [('"', ":"), ('"', ","), ("{", '"'), ("n", "a"), ("m", "e"), ("na", "me"), ("a", "g"), ("ag", "e"), ('"', "}")]
EOS, V = len(CHARACTERS) + len(MERGES), 64
TREE = Tier(3, 2, 7)
SIZES = dict(
    max_batch_size=4, max_seq_len=96, page_size=8, prefill_chunk=16, variants=("sampled",), structured_output=True,
    warmup="eager",
)  # fmt: skip
PERSON = person(8)
SPECS = {
    "person": GrammarSpec("json_schema", json.dumps(PERSON)),
    "object": GrammarSpec("json_object"),
    "regex": GrammarSpec("regex", "(name|na+)_[0-9]{2,6}(-[a-f]+)?"),
    "lark": GrammarSpec("lark", 'start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "[" start "]"'),
    "choice": GrammarSpec("choice", ("name", "names", "age of me", "zzz")),
    "dead end": GrammarSpec("json_schema", json.dumps(DEAD_END)),
}
#: A prompt, its parameters, and the name of what the text has to be.
Asked = tuple[list[int], SamplingParams, str | None]


def tokenizer() -> Tokenizer:
    tokens = [c.replace(" ", "Ġ") for c in CHARACTERS] + [a + b for a, b in MERGES]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, eos_token_ids=[EOS])


def modules_of(target: Any) -> dict[str, Any]:
    """Random drafters; each module is built where it is asked for."""
    cfg, rngs = target.config, nnx.Rngs(1)
    tables = lambda: (Shared(target.embedding[...]), shared_lm_head(target))
    head = lambda **fields: Eagle3Head(
        Eagle3Config(16, cfg.hidden_size, 24, 2, 1, 8, V, 40, (0, 1, 2), **fields), rngs=nnx.Rngs(0)
    )
    return {
        "draft_model": lambda: tiny_target(1, num_layers=1, vocab_size=V),
        "eagle3": lambda: randomised(head()),
        "peagle": lambda: randomised(head(num_layers=1, mask_token_id=6)),
        "eagle1": lambda: Eagle1Head(Eagle1Config(tiny_config(vocab_size=V, num_layers=1), 2), *tables(), rngs=rngs),
        "mtp": lambda: MtpHead(MtpConfig(tiny_config(vocab_size=V, num_layers=1), 2), *tables(), rngs=rngs),
        "dflash": lambda: DflashHead(
            DflashConfig(tiny_config(vocab_size=V, num_layers=1, qk_norm=True), (1, 2), 5, 6, V), *tables(), rngs=rngs
        ),
        "dspark": lambda: DsparkHead(
            DsparkConfig(tiny_config(vocab_size=V, num_layers=1, qk_norm=True), (1, 2), 5, 6, V), *tables(), rngs=rngs
        ),
        "dflash2": lambda: Dflash2Head(
            Dflash2Config(tiny_config(vocab_size=V, num_layers=1, qk_norm=True), (1, 2), 5, 6, V), *tables(), rngs=rngs
        ),
        "medusa": lambda: MedusaHeads(MedusaConfig(3, cfg.hidden_size, V, 2, num_layers=1), rngs=rngs),
    }


def randomised(head: Any) -> Any:
    """A head over every third to second token of the vocabulary, so that some of what is forced is missing."""
    for part in (head.fc.kernel, head.lm_head.kernel):
        part.set_value(jax.random.normal(jax.random.key(3), part.shape) * 0.4)
    head.target_ids.set_value(jnp.asarray(np.sort(np.random.default_rng(0).permutation(V)[:40]), jnp.int32))
    return head


class Engines:
    """Engines by drafter, built where they are asked for, on one target.

    Attributes:
      rehearsed: of each, how often an executable had run when it was built.
    """

    def __init__(self, kept: Path | None = None, exhaustive: bool = False) -> None:
        self.cache: Any = kept or False
        self.exhaustive = exhaustive
        self.target = tiny_target(0, vocab_size=V, eos_token_ids=(EOS,))
        self.tokenizer = tokenizer()
        self._made: dict[str, Engine] = {}
        self.rehearsed: dict[str, dict[Any, int]] = {}

    def __call__(self, kind: str) -> Engine:
        if kind not in self._made:
            tiers = {
                "plain": (PLAIN,),
                "eagle3": (PLAIN, Tier(3), TREE),
                "ngram": (PLAIN, Tier(4)),
                "suffix": (Tier(4),),
            }
            tiers = (tiers | {"hybrid": (TREE, Tier(4, lookup=True))}).get(kind, (TREE,))
            # Rows leave a bucket for a smaller one, and many come at once, where that costs least to compile.
            buckets = (1, 32) if kind == "ngram" else (1, 4) if self.exhaustive else (4,)
            more = {"eagle3": dict(num_pages=24), "ngram": dict(rounds_per_dispatch=2, max_batch_size=32)}
            more = more.get(kind, {"mixed_chunk": 8} if kind == "plain" else {})
            # Prompts with a grammar are computed together by the engines of the others.
            alone = quick.prompts_alone() if kind == "ngram" else contextlib.nullcontext()
            with counted_runs() as ran, alone:
                self._made[kind] = self.build(kind, tiers, batch_buckets=buckets, **more)
            self.rehearsed[kind] = dict(ran)
        engine = self._made[kind]
        engine.scheduler.prefix_cache.reset()
        assert not engine.has_work
        return engine

    def build(self, kind: str, tiers: Sequence[Tier], **config: Any) -> Engine:
        if len(tiers) > 1:
            # A quarter of a draft a row: nodes are left out as soon as several rows draft.
            budgets = (0.25,) if kind == "ngram" else ()
            speculation = SpeculationConfig(tiers=tuple(tiers), hybrid=kind == "hybrid", candidate_budgets=budgets)
        elif tiers[0] == PLAIN:
            speculation = SpeculationConfig(policy="off")
        else:
            (tier,) = tiers
            speculation = SpeculationConfig(depth=tier.depth, topk=tier.topk, num_nodes=tier.num_nodes)
        cost = CostTable({(t, b): 1e-3 * (1 + 0.1 * t.depth) for t in tiers for b in (1, 2, 4, 32)})
        if kind in ("plain", "ngram"):
            make: Any = lambda geo: (prompt_lookup(V), ())
        else:
            head = "eagle3" if kind == "hybrid" else kind
            module = self.target.config.vocab_size if head == "suffix" else modules_of(self.target)[head]()
            make = lambda geo: bind_drafter(head, module, geo)
        config = {**SIZES, "compile_cache": self.cache, **config}
        return assemble(
            self.target, self.tokenizer, speculation, EngineConfig(**config), cost=cost, progress=False,
            drafter=None if kind == "plain" else Drafting(make, kind not in ("ngram", "suffix"), name=kind),
        )  # fmt: skip


@contextlib.contextmanager
def counted_runs() -> Iterator[collections.Counter[Any]]:
    """Counts the runs of executables that come meanwhile, by their keys."""
    ran: collections.Counter[Any] = collections.Counter()
    compiled = Compilation.compiled

    def counting(job: Compilation, store: Any) -> Any:
        executable = compiled(job, store)

        def call(*args: Any) -> Any:
            ran[job.key] += 1
            return executable(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compilation, "compiled", counting)
        yield ran


def add(engine: Engine, asked: Asked, **options: Any) -> str:
    prompt, params, name = asked
    grammar = None
    if name is not None:
        assert engine.facts.grammars is not None
        grammar = engine.facts.grammars.compile(SPECS[name])
    return engine.add(prompt, params, grammar=grammar, **options)


def run(
    engine: Engine, asked: Sequence[Asked], join: Callable[[int], int] = lambda i: 0,
    on_step: Callable[[int, dict[str, int]], None] | None = None,
) -> dict[int, RequestOutput]:  # fmt: skip
    """Runs requests to their end, each added before step join(i); outputs by index. Nothing may compile meanwhile."""
    outputs: dict[int, RequestOutput] = {}
    ids: dict[str, int] = {}
    streamed = [""] * len(asked)
    waiting, step = sorted(range(len(asked)), key=join), 0
    compilations = engine.stats.compilations_after_warmup
    while waiting or engine.has_work:
        while waiting and join(waiting[0]) <= step:
            i = waiting.pop(0)
            ids[add(engine, asked[i])] = i
        for event in engine.step():
            match event:
                case Delta():
                    streamed[ids[event.request_id]] += event.text
                case Finished():
                    outputs[ids[event.request_id]] = event.output
        step += 1
        if on_step is not None:
            on_step(step, ids)
        assert step < 5000, "the engine does not come to an end"
    for i, output in outputs.items():
        assert streamed[i] == output.outputs[0].text
    stats = engine.stats
    assert stats.free_pages + stats.cached_pages == engine.facts.sizes.num_pages
    assert stats.compilations_after_warmup == compilations
    return outputs


def workload() -> list[Asked]:
    """Grammars of every kind under every parameter that shapes a token, and rows without one between them."""
    rng = np.random.default_rng(0)
    prompt = lambda n: rng.integers(0, EOS, n).tolist()
    p = functools.partial(SamplingParams, max_tokens=50)
    return [
        (prompt(5), p(temperature=0), "person"),
        (prompt(9), p(temperature=1.0, seed=3), "person"),
        (prompt(6), p(temperature=0, ignore_eos=True, max_tokens=30), None),
        (prompt(20), p(temperature=0.8, top_k=8, top_p=0.9, min_p=0.02, seed=4, logprobs=2), "regex"),
        (prompt(3), p(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, ignore_eos=True), "person"),
        (prompt(7), p(temperature=1.3, seed=5, frequency_penalty=0.4, logit_bias={0: 5.0, 9: -4.0}), "object"),
        (prompt(4), p(temperature=1.0, seed=6, ignore_eos=True, max_tokens=30), None),
        (prompt(8), p(temperature=1.0, seed=7), "choice"),
        (prompt(2), p(temperature=0, ignore_eos=True), "choice"),
        (prompt(33), p(temperature=1.2, seed=8), "lark"),
        (prompt(5), p(temperature=0, max_tokens=1), "person"),
        (prompt(12), p(temperature=0.9, seed=9, logprobs=0, max_tokens=12), "person"),
        (prompt(11), p(temperature=0, logprobs=1), "regex"),
    ]


def satisfies(name: str, text: str) -> None:
    if name == "person":
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"] and len(value["name"]) <= 8
        assert type(value["age"]) is int and 0 <= value["age"] <= 120
        assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "bc"}
    elif name == "object":
        assert isinstance(json.loads(text), dict)
    elif name == "choice":
        assert text in SPECS["choice"].value
    else:
        assert re.fullmatch(str(SPECS["regex"].value) if name == "regex" else r"[0-9+\[\]]+", text)


def right(asked: Sequence[Asked], outputs: dict[int, RequestOutput]) -> int:
    """Every text satisfies its grammar or was cut by its length; returns how many were not cut."""
    finished = 0
    for i, (_, params, name) in enumerate(asked):
        output = outputs[i]
        if name is not None and output.finish_reason is FinishReason.STOP:
            satisfies(name, output.text)
            finished += 1
        elif name is not None:
            assert output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == params.max_tokens
    return finished
