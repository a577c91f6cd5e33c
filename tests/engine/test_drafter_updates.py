"""A drafter's weights change while requests run: no token does, nothing compiles, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
import queue
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.drafters.directories import save_drafter
from jaxspec.drafters.successor import Successors
from jaxspec.loading import bind_drafter, load_drafter
from jaxspec.models.tiny import tiny_target
from jaxspec.request import SamplingParams
from jaxspec.swapping import DrafterWeights, _Follower, _Shelf
from jaxspec.tier import Tier

FLOAT = np.dtype(np.float32)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def saved(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(kind, layout=None, scale=1.0) -> a directory with the kind's drafter, its trained weights scaled."""
    root = tmp_path_factory.mktemp("heads")

    def save(kind: str, layout: str | None = None, scale: float = 1.0) -> Path:
        path = root / f"{kind}-{layout}-{scale}"
        if not path.exists():
            graph, params, rest = nnx.split(bench.modules[kind], nnx.Param, ...)
            module = nnx.merge(graph, jax.tree.map(lambda x: x * scale, params), rest)
            save_drafter(module, path, target=bench.target, dtype=jnp.float32, layout=layout)
        return path

    return save


@pytest.fixture
def updated(bench: Any, saved: Callable[..., Path]) -> Iterator[Callable[[str], Any]]:
    """kind -> the session's engine of that kind, as if it had loaded its drafter from a directory."""
    used = []

    def of(kind: str) -> Any:
        engine, own = bench.engine(kind), saved(kind)
        module = load_drafter(kind, own, bench.target, FLOAT)
        successors = Successors(kind, own, module, bench.target, FLOAT)
        reload = lambda path: bind_drafter(kind, successors.load(path), engine.runner.geo)[1]
        used.append((engine, engine.drafter_weights, engine.runner.draft_params))
        engine.drafter_weights = DrafterWeights(engine.runner, reload)
        return engine

    yield of
    for engine, weights, params in used:
        engine.drafter_weights, engine.runner.draft_params = weights, params


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """What XLA compiles meanwhile, on whichever thread."""
    found: list[str] = []
    hear = lambda event, seconds, **_: found.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(hear)
    yield found
    jax.monitoring.unregister_event_duration_listener(hear)


LATER = pytest.mark.exhaustive("weights of every drafter; what is exchanged is a tree of arrays with all of them")
OTHERS = ("draft_model", "eagle1", "mtp", "medusa", "peagle", "dflash", "dspark", "dflash2")


@pytest.mark.covers("updates")
@pytest.mark.parametrize("kind", ["eagle3", *(pytest.param(kind, marks=LATER) for kind in OTHERS)])
def test_no_token_changes_and_nothing_compiles(
    tools: Any, bench: Any, updated: Any, saved: Any, compilations: list[str], kind: str
):
    """Versions come on trial and at once, under greedy, sampled and shaped rows, while rows join and leave."""
    engine = updated(kind)
    weights = engine.drafter_weights
    loaded = [weights.load(saved(kind, scale=scale)) for scale in (1.0, 0.5)]  # small casts compile once
    engine.use_policy(tools.script(*tools.tiers[kind][::-1]))
    tools.drive(engine, tools.workload()[:2])
    expected = bench.expected(tools.workload())
    del compilations[:]
    ticket, versions = 0, []

    def change(step: int, ids: list[str]) -> None:
        nonlocal ticket
        if step % 11 == 0:
            weights.use(loaded[step % 2], trial=step % 22 == 0)
        if step == 15:
            ticket = weights.begin(saved(kind, scale=2.0))
        if ticket and (version := weights.finish(ticket)) is not None:
            ticket = 0
            versions.append(version)

    tools.same(tools.drive(engine, tools.workload(), join=lambda i: 3 * i, on_step=change), expected)
    assert versions and not compilations
    assert engine.stats.drafter_updates >= 8 and engine.stats.drafter_version >= 1


@pytest.mark.covers("updates", kind="draft_model")
def test_drafts_are_as_good_as_the_weights_that_make_them(bench: Any, tools: Any, updated: Any, tmp_path: Path):
    """Weights with which every draft is accepted. A request that goes on keeps entries that the old ones made."""
    engine = updated("draft_model")
    engine.use_policy(StaticPolicy(Tier(3)))
    save_drafter(bench.target, tmp_path, target=bench.target, dtype=jnp.float32)
    weights = engine.drafter_weights
    before = tools.drive(engine, [([3, 1, 4], GREEDY)])[0].metrics
    perfect = weights.load(tmp_path)
    late = lambda step, ids: weights.use(perfect, trial=False) if step == 5 else None
    params = dataclasses.replace(GREEDY, max_tokens=100)
    through = tools.drive(engine, [([3, 1, 4], params)], on_step=late)[0]
    after = tools.drive(engine, [([5, 9, 2], GREEDY)])[0].metrics
    tools.same([through], bench.expected([([3, 1, 4], params)]))
    assert engine.stats.drafter_version == 2
    assert after.acceptance_histogram[-1] >= 9 and sum(after.acceptance_histogram[:-1]) <= 1
    assert before.mean_accepted_length < 2.5
    engine.drafter_weights.use(weights.load(tmp_path), trial=False)
    assert engine.stats.drafter_version == 3


def test_worse_weights_are_rolled_back_and_better_ones_stay(bench: Any, tools: Any, updated: Any, tmp_path: Path):
    engine = updated("draft_model")
    engine.use_policy(StaticPolicy(Tier(3)))
    save_drafter(bench.target, tmp_path, target=bench.target, dtype=jnp.float32)
    weights = engine.drafter_weights
    own, perfect = weights.load(tmp_path), weights.load(tmp_path)
    weights.use(perfect, trial=False)
    assert weights.version == 2
    poor = tuple(jnp.zeros_like(x) for x in own)
    work = [([n % 12, 3, 7], dataclasses.replace(GREEDY, max_tokens=100)) for n in range(8)]
    expected = bench.expected(work)
    assert weights.use(poor) == 3
    assert engine.stats.drafter_trial and engine.stats.drafter_version == 2
    for _ in range(12):
        tools.same(tools.drive(engine, work), expected)
        if not engine.stats.drafter_trial:
            break
    assert (engine.stats.drafter_version, engine.stats.drafter_rollbacks) == (2, 1)
    assert set(weights.versions) == {2, 3}
    after = tools.drive(engine, [([5, 9, 2], GREEDY)])[0].metrics
    assert sum(after.acceptance_histogram[:-1]) <= 1


def test_prefixes_are_reused_across_a_swap_as_without_drafting(bench: Any, tools: Any, updated: Any, saved: Any):
    """A conversation: each turn repeats all that came before. Hits and texts are those of plain decoding."""

    def talk(engine: Any, between: Callable[[], None]) -> tuple[list[int], list[list[int]]]:
        text, hits, said = [1, 5, 2, 8], [], []
        for turn in range(4):
            output = tools.drive(engine, [(text, dataclasses.replace(GREEDY, max_tokens=20))])[0]
            hits.append(output.metrics.cached_prompt_tokens)
            said.append(output.token_ids)
            text = [*text, *output.token_ids, 3 + turn]
            between()
        return hits, said

    engine = updated("eagle3")
    weights, scales = engine.drafter_weights, iter((0.5, 1.0, 2.0, 1.5))
    engine.use_policy(StaticPolicy(Tier(3)))
    swapped = talk(engine, lambda: weights.use(weights.load(saved("eagle3", scale=next(scales))), trial=False) and None)
    plain = talk(bench.engine("none"), lambda: None)
    assert swapped[1] == plain[1]
    # An entry of EAGLE's cache depends on the token after it, so the page that ends a turn may be short of one.
    page = engine.runner.geo.page_size
    assert plain[0][-1] > 3 * page and all(0 <= b - a <= page for a, b in zip(swapped[0], plain[0], strict=True))


@pytest.mark.parametrize("kind", ["eagle3", "draft_model", "eagle1", "mtp", "medusa", "peagle", "dflash"])
def test_every_kind_reads_its_successor(bench: Any, saved: Any, kind: str):
    """In every layout that it is written in, whatever layout the served one had; and refuses another kind's."""
    own = saved(kind)
    module = load_drafter(kind, own, bench.target, FLOAT)
    successors = Successors(kind, own, module, bench.target, FLOAT)
    for layout in ("safeailab", "automodel", "zlab", "speculators", "medusa"):
        try:
            path = saved(kind, layout, 0.5)
        except ValueError:  # not this kind's, or not for this configuration
            continue
        new = successors.load(path)
        assert jax.tree.structure(nnx.state(new)) == jax.tree.structure(nnx.state(module))
    other = "eagle3" if kind != "eagle3" else "medusa"
    with pytest.raises(ValueError, match=f"kind '{other}', expected '{kind}'"):
        successors.load(saved(other))


def test_what_does_not_fit_is_refused_and_the_old_weights_serve(
    bench: Any, tools: Any, updated: Any, saved: Any, tmp_path: Path
):
    engine = updated("eagle3")
    weights = engine.drafter_weights

    def broken(name: str, change: Callable[[Path], None]) -> Path:
        shutil.copytree(saved("eagle3"), path := tmp_path / name)
        change(path)
        return path

    def config(**fields: Any) -> Callable[[Path], None]:
        def change(path: Path) -> None:
            raw = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**raw, **fields}))

        return change

    def cut(path: Path) -> None:
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[: len(data) // 2])

    def pickled(path: Path) -> None:
        (path / "model.safetensors").rename(path / "pytorch_model.bin")

    wide = tmp_path / "wide"
    cases = {
        broken("cut", cut): r"not a whole safetensors file \(\d+ bytes",
        broken("pickled", pickled): "only as pickles",
        broken("unknown", config(gate_norm=True)): r"\{'gate_norm': True\} of an EAGLE-3 head are not known",
        broken("normed", config(norm_output=True)): "norm_output is True, the served drafter's is False",
        broken("small", config(draft_vocab_size=8)): r"lm_head.*\(9, 16\).*\(8, 16\)|d2t.*shape",
        tmp_path / "nowhere": "is not a directory",
        saved("medusa"): "kind 'medusa', expected 'eagle3'",
    }
    save_drafter(bench.modules["peagle"], wide, target=bench.target, dtype=jnp.float32)
    cases[wide] = "kind 'peagle', expected 'eagle3'"
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            weights.load(path)
        ticket = weights.begin(path)
        with pytest.raises(ValueError, match=message):
            while weights.finish(ticket) is None:
                pass
    assert weights.version == 1 and engine.stats.drafter_updates == 0
    with pytest.raises(ValueError, match="no load has ticket"):
        weights.finish(0)
    with pytest.raises(ValueError, match="loaded from a directory, and this engine's was not"):
        DrafterWeights(engine.runner, None).load(saved("eagle3"))
    deeper = tiny_target(1, num_layers=3, family="ministral", sliding_window=11, sliding_layers=(1,))
    save_drafter(deeper, tmp_path / "deeper", target=bench.target)
    own = saved("draft_model")
    module = load_drafter("draft_model", own, bench.target, FLOAT)
    config(gate_norm=True)(shutil.copytree(own, tmp_path / "odd"))
    for name, message in (
        ("deeper", r"num_layers is 3, the served drafter's is 2"),
        ("odd", r"\['gate_norm'\] are neither in the served"),
    ):
        with pytest.raises(ValueError, match=message):
            Successors("draft_model", own, module, bench.target, FLOAT).load(tmp_path / name)


def test_who_follows_keeps_a_trial_while_it_loads_another(tmp_path: Path):
    """One that has not drafted yet, whatever comes of the other load; an error without words is told by its type."""
    heard: dict[str, Callable[..., None]] = {}
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    class Runner:
        params: Any = "first"
        hosts = SimpleNamespace(answer=lambda message: answers.put(json.loads(message)))
        hear = staticmethod(heard.__setitem__)

        def use_drafter(self, leaves: Any) -> Any:
            self.params, before = leaves, self.params
            return before

    def load(directory: Path) -> Any:
        if directory.name == "bad":
            raise MemoryError
        return directory.name

    runner = cast("Any", Runner())
    _Follower(runner, _Shelf(runner), load)
    for number, name in enumerate(("second", "bad"), start=1):
        (tmp_path / name).mkdir()
        heard["load a drafter"](number=number, directory=str(tmp_path / name))
        assert answers.get(timeout=100)["error"] == ("MemoryError()" if name == "bad" else "")
    heard["drop a drafter"](number=2)
    heard["draft with"](number=1)
    assert runner.params == "second"
    heard["draft with"](number=0)
    assert runner.params == "first"
