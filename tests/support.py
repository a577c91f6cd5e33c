"""Which feature works with which drafter: what tests say of themselves, and whether they did it.

A test says `@pytest.mark.covers("trees", ...)`; its drafter is the mark's `kind`, else its parameter `kind`. While such
a test runs, its engines are watched: it fails where the feature did not meet drafts of that drafter that were accepted.
What marks of all tests say, and what settings are refused, is docs/support.md, which is written with

    python -m pytest tests --collect-only -q --write-support
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxspec.choosing import check_choice
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.drafters import registry
from jaxspec.engine import Engine
from jaxspec.models.quantised import Quantised
from jaxspec.request import Request
from jaxspec.runtime.results import Result
from jaxspec.speculation.drafters.hybrid import HybridDrafter
from jaxspec.swapping import DrafterWeights
from jaxspec.tier import PLAIN, Tier

ROOT = Path(__file__).resolve().parents[1]
PAGE, TESTS = ROOT / "docs" / "support.md", ROOT / "docs" / "support.json"
COMMAND = "python -m pytest tests --collect-only -q --write-support"
HYBRID = "hybrid"
COLUMNS = (*(name for name in registry.names() if name != registry.NONE), HYBRID)
#: What a cell says: in the gate, in `make test-all` only, refused, in no test.
WORKS, LATER, REFUSED, NOBODY = "yes", "(yes)", "no", "-"


@dataclasses.dataclass
class Seen:
    """What an engine did during a test.

    Attributes:
      requests: rows of rounds that drafted. tiers: of all rounds.
      accepted: drafts. packed, repeated: rounds of a budget, and several rounds of a dispatch, that drafted.
      guided: rounds that drafted for texts under a grammar. copies: completions beyond a prompt's first.
      longest: most context tokens of such a round's rows together.
    """

    engine: Engine
    before: Any
    requests: dict[int, Request] = dataclasses.field(default_factory=dict)
    tiers: set[Tier] = dataclasses.field(default_factory=set)
    accepted: int = 0
    packed: bool = False
    repeated: bool = False
    guided: bool = False
    copies: bool = False
    longest: int = 0

    @property
    def kind(self) -> str:
        return HYBRID if isinstance(self.engine.runner.drafter, HybridDrafter) else self.engine.facts.drafter

    def asks(self, said: Callable[[Request], bool]) -> bool:
        return any(said(request) for request in self.requests.values())

    def grew(self, counter: str) -> bool:
        return getattr(self.engine.stats, counter) > getattr(self.before, counter)

    def target(self, name: str) -> bool:
        return getattr(self.engine.runner.config, name) is not None

    @property
    def devices(self) -> int:
        mesh = self.engine.runner._place.mesh
        return 1 if mesh is None else mesh.size

    @property
    def quantised(self) -> bool:
        leaves = jax.tree.leaves(self.engine.runner.target, is_leaf=lambda x: isinstance(x, Quantised))
        return any(isinstance(leaf, Quantised) for leaf in leaves)

    @property
    def drafts_in_few_bits(self) -> bool:
        few = [jnp.dtype(kind) for kind in (jnp.int8, jnp.int4, jnp.float8_e4m3fn)]
        return any(leaf.dtype in few for leaf in jax.tree.leaves(self.engine.runner._draft_params))


def tried(engine: Mapping[str, Any] | None = None, **speculation: Any) -> Callable[[str], None]:
    """Asks for settings with a kind of drafter, as an engine does before it loads anything."""

    def attempt(kind: str) -> None:
        settings = {"hybrid": True, **speculation} if kind == HYBRID else speculation
        check_choice(
            registry.find("eagle3" if kind == HYBRID else kind), SpeculationConfig(**{"depth": 2, **settings}),
            EngineConfig(**(engine or {})), default_steps=(0, 1),
        )  # fmt: skip

    return attempt


def exchanged(kind: str) -> None:
    """Asks for other weights of a drafter that may have none."""
    if kind != HYBRID and not registry.find(kind).layouts:
        DrafterWeights(mock.MagicMock(has_draft_params=False), None).load("updated")


@dataclasses.dataclass(frozen=True)
class Feature:
    """A row of the table.

    Attributes:
      words: what the page calls it. seen: whether an engine that drafted did it.
      attempt: asks for it with a kind of drafter; a ValueError says that it is refused.
    """

    words: str
    seen: Callable[[Seen], bool]
    attempt: Callable[[str], None] = lambda kind: None


_CORPUS: dict[str, Any] = dict(suffix_corpus_tokens=64, suffix_corpus_responses=True)
FEATURES: dict[str, Feature] = {
    "greedy": Feature("greedy", lambda s: s.asks(lambda r: r.params.temperature == 0)),
    "seeded": Feature("sampling with a seed", lambda s: s.asks(lambda r: r.params.temperature > 0)),
    "filters": Feature(
        "top-k, top-p, min-p",
        lambda s: s.asks(lambda r: r.params.top_k > 0 and r.params.top_p < 1 and r.params.min_p > 0),
    ),
    "penalties": Feature(
        "penalties and logit bias",
        lambda s: all(
            s.asks(lambda r, name=name: bool(getattr(r.params, name)))
            for name in ("presence_penalty", "frequency_penalty", "logit_bias")
        )
        and s.asks(lambda r: r.params.repetition_penalty != 1),
    ),
    "logprobs": Feature("log-probabilities", lambda s: s.asks(lambda r: r.params.logprobs is not None)),
    "stops": Feature(
        "stop tokens, least lengths", lambda s: s.asks(lambda r: bool(r.params.stop_token_ids and r.params.min_tokens))
    ),
    "stop strings": Feature("stop strings", lambda s: s.asks(lambda r: bool(r.params.stop))),
    "copies": Feature("several completions of a prompt", lambda s: s.copies),
    "grammar": Feature("grammars (JSON schema, regex, Lark)", lambda s: s.guided),
    "rejection": Feature(
        "rejection verification", lambda s: s.engine.runner.spec.rejection, tried(verification="rejection")
    ),
    "typical": Feature(
        "typical verification", lambda s: s.engine.runner.spec.typical is not None, tried(verification="typical")
    ),
    "trees": Feature(
        "draft trees", lambda s: any(not tier.is_chain for tier in s.tiers), tried(topk=2, num_nodes=4)
    ),
    "tiers": Feature("another tier every round", lambda s: len(s.tiers) > 2 and PLAIN in s.tiers),
    "limits": Feature("draft limits of requests", lambda s: s.asks(lambda r: r.max_depth is not None)),
    "budgets": Feature("verify budgets (packed rounds)", lambda s: s.packed, tried(budget=1.0)),
    "tpot": Feature("a time per token asked for", lambda s: s.packed and s.asks(lambda r: r.tpot is not None)),
    "corpus": Feature("texts of others (corpus)", lambda s: s.engine.runner._corpus_tokens > 0, tried(**_CORPUS)),
    "prefixes": Feature("prefix cache", lambda s: s.grew("prefix_hits")),
    "preemption": Feature("preemption", lambda s: s.grew("preemptions")),
    "mixed": Feature("prompts in rounds (mixed)", lambda s: s.grew("mixed_rounds")),
    "repeats": Feature("several rounds a dispatch", lambda s: s.repeated),
    "long": Feature("contexts beyond 16k tokens", lambda s: s.longest > 16_000),
    "directory": Feature("served from a directory", lambda s: s.engine.drafter_weights._load is not None),
    "updates": Feature("other weights while serving", lambda s: s.grew("drafter_updates"), exchanged),
    "ring": Feature("feature ring", lambda s: s.engine._collector is not None, tried({"feature_ring": "ring"})),
    "learnt": Feature("what the policy learnt, kept", lambda s: s.engine._decider.keeper is not None),
    "window": Feature("sliding-window target", lambda s: s.target("sliding_window")),
    "experts": Feature("mixture-of-experts target", lambda s: s.target("experts")),
    "latent": Feature("latent-attention target", lambda s: s.target("latent")),
    "quantised": Feature("quantised target", lambda s: s.quantised),
    "few_bit_drafts": Feature(
        "drafter in few bits", lambda s: s.drafts_in_few_bits, tried(draft_quantization="int8")
    ),
    "devices": Feature("tensor parallelism", lambda s: s.devices > 1),
    "whole": Feature(
        "drafter whole on each device", lambda s: s.devices > 1 and s.engine.stats.draft_tensor_parallel == 1
    ),
    "hosts": Feature("several hosts", lambda s: s.engine.runner.hosts is not None),
}  # fmt: skip
#: Settings that exclude one another whatever drafts, and what asks for both.
EXCLUDED: dict[str, Callable[[], object]] = {
    "budgets and rejection": lambda: SpeculationConfig(depth=2, budget=1.0, verification="rejection"),
    "hybrids and rejection": lambda: SpeculationConfig(depth=2, hybrid=True, verification="rejection"),
    "a hybrid of a drafter that looks up": lambda: tried(hybrid=True)("ngram"),
    "batch_invariant and trees": lambda: tried({"batch_invariant": True}, topk=2, num_nodes=4)("eagle3"),
    "batch_invariant and many tokens": lambda: tried({"batch_invariant": True, "max_batch_size": 64})("eagle3"),
    "batch_invariant and tensor parallelism": lambda: EngineConfig(batch_invariant=True, tensor_parallel=2),
    "batch_invariant and prompts in rounds": lambda: EngineConfig(batch_invariant=True, mixed_chunk=64),
}


# Watching.


class Watch:
    """Notes what engines do while it is entered."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}

    def of(self, engine: Engine) -> Seen:
        return self._seen.setdefault(id(engine), Seen(engine, engine.stats))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        add, rounds, commit = Engine.add, Engine._dispatch_rounds, Engine._commit_round

        def adds(engine: Engine, *args: Any, **options: Any) -> str:
            self.of(engine).copies |= options.get("index", 0) > 0
            return add(engine, *args, **options)

        def dispatches(engine: Engine, rows: Any, work: Any) -> Any:
            seen = self.of(engine)
            pending = rounds(engine, rows, work)
            assert pending.tier is not None
            seen.tiers.add(pending.tier)
            if pending.tier.depth:
                seen.requests |= {id(request): request for request in rows.requests}
                seen.packed |= pending.tokens is not None
                seen.repeated |= rows.rounds > 1
                seen.guided |= engine._live.is_guided(pending.requests)
                seen.longest = max(seen.longest, rows.context_tokens)
            return pending

        def commits(engine: Engine, rows: Any, kind: Any, result: Result) -> Any:
            self.of(engine).accepted += int((result.counts_RB > 1).sum())
            return commit(engine, rows, kind, result)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "add", adds)
            patch.setattr(Engine, "_dispatch_rounds", dispatches)
            patch.setattr(Engine, "_commit_round", commits)
            yield

    def missed(self, covered: Mapping[str, Iterable[str]]) -> list[str]:
        """What a test said that it covers, {kind: features}, and did not."""
        missed = []
        for kind, names in covered.items():
            mine = [seen for seen in self._seen.values() if seen.kind == kind and seen.accepted]
            missed += [f"{name} with {kind}" for name in names if not any(FEATURES[name].seen(seen) for seen in mine)]
        return missed


# What tests say.


def covered_by(item: pytest.Item, *, here: bool = False) -> dict[str, set[str]]:
    """{kind: features} of a test; what is refused of them by no one is not among them.

    Args:
      here: what shows in this process alone.
    """
    found: dict[str, set[str]] = {}
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    for mark in item.iter_markers("covers"):
        if unknown := set(mark.args) - set(FEATURES):
            raise pytest.UsageError(f"{item.nodeid} covers {sorted(unknown)}; there is {sorted(FEATURES)}")
        kind = mark.kwargs.get("kind", parameters.get("kind"))
        if kind not in COLUMNS:
            raise pytest.UsageError(f"{item.nodeid}: the kind of drafter must be one of {COLUMNS}, got {kind!r}")
        if not (here and mark.kwargs.get("elsewhere")):
            found.setdefault(kind, set()).update(name for name in mark.args if refusal(name, kind) is None)
    return found


@functools.cache
def refusal(name: str, kind: str) -> str | None:
    """What is said to who asks for a feature with a drafter that does not have it."""
    try:
        FEATURES[name].attempt(kind)
    except ValueError as e:
        return str(e)
    return None


Covered = dict[str, dict[str, dict[str, bool]]]


def gather(items: Iterable[pytest.Item]) -> Covered:
    """{feature: {kind: {test: whether `make test-all` alone runs it}}}."""
    found: Covered = {}
    for item in items:
        late = item.get_closest_marker("exhaustive") is not None
        test = item.nodeid.partition("[")[0]
        for kind, names in covered_by(item).items():
            for name in names:
                tests = found.setdefault(name, {}).setdefault(kind, {})
                tests[test] = tests.get(test, True) and late
    return found


# The page.


def stored(covered: Covered) -> str:
    """As docs/support.json."""
    ordered = {
        name: {kind: dict(sorted(covered[name][kind].items())) for kind in COLUMNS if kind in covered[name]}
        for name in FEATURES
        if name in covered
    }
    return json.dumps(ordered, indent=1) + "\n"


def write(directory: Path, items: Iterable[pytest.Item]) -> None:
    """Both files."""
    covered = gather(items)
    (directory / PAGE.name).write_text(page(covered), encoding="utf-8")
    (directory / TESTS.name).write_text(stored(covered), encoding="utf-8")


def page(covered: Covered) -> str:
    """As docs/support.md."""
    refused: dict[str, list[str]] = {}
    lines = [f"| | {' | '.join(f'`{kind}`' for kind in COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, feature in FEATURES.items():
        cells = []
        for kind in COLUMNS:
            if message := refusal(name, kind):
                cells.append(REFUSED)
                refused.setdefault(f"{feature.words}: {message}", []).append(f"`{kind}`")
                continue
            tests = covered.get(name, {}).get(kind, {})
            cells.append(NOBODY if not tests else LATER if all(tests.values()) else WORKS)
        lines.append(f"| {feature.words} | {' | '.join(cells)} |")
    said = [f"{', '.join(kinds)}: {words}" for words, kinds in refused.items()]
    return _PAGE.format(table="\n".join(lines), refused=_list(said), excluded=_list(map(_excluded, EXCLUDED)))


def _excluded(words: str) -> str:
    with pytest.raises(ValueError) as raised:
        EXCLUDED[words]()
    return f"{words}: {raised.value}"


def _list(entries: Iterable[str]) -> str:
    wrap = lambda text: textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(map(wrap, entries))


_PAGE = f"""# What works with which drafter

Written by the tests, not by hand, with

    {COMMAND}

and a test fails where the page and the tests differ.

- `yes`: a test of `make test` runs it with that drafter. In float32 its text is compared with plain decoding's (on
  several devices with one device's); under rejection, and of sampled rows under typical verification, with its own
  repetition. While such a test runs it is watched: it fails unless the feature and accepted drafts of that drafter
  meet.
- `(yes)`: a test of `make test-all` does.
- `no`: refused, before anything is loaded; weights to exchange, when they are asked for.
- `-`: no test of an engine runs it, and nothing refuses it: nobody has looked.

`hybrid` is EAGLE-3 with suffix matches. [support.json](support.json) names the tests of every cell, with `true` where
only `make test-all` runs them. [Kernels](kernels.md#how-the-kernels-are-proved), training, head formats and the server
have tests of their own, and `batch_invariant` runs on Hopper GPUs only.

{{table}}

## Refused

What is said to who asks for it:

{{refused}}

## Settings that exclude one another

Whatever drafts:

{{excluded}}
"""
