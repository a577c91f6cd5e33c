"""New kinds of drafters and policies, registered by this file alone, work end to end: a file and a registry line each.

What CONTRIBUTING.md says of them ("Adding a part") is what this file does.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from flax import nnx
from jax.typing import DTypeLike

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.adaptive import registry as policies
from jaxspec.adaptive.cost import CostTable
from jaxspec.adaptive.kind import PolicyKind, Room, Settings
from jaxspec.adaptive.policy import BatchView
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.checkpointing import heads, hf
from jaxspec.checkpointing.tensors import read_tensors
from jaxspec.drafters import directories, registry
from jaxspec.drafters.kind import DrafterKind, Overrides, Saving
from jaxspec.models.layers import Transformer
from jaxspec.resolve import resolve_drafter
from jaxspec.speculation.drafters.featureless import Featureless
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
from jaxspec.speculation.tree import DraftTree
from jaxspec.tier import PLAIN, Choice, Tier

ROOT = Path(__file__).resolve().parent.parent


# -------------------------------------------------------------------- a kind of drafter


class Successors(nnx.Module):
    """What is drafted after each token, whatever stands before it: float ids [V]."""

    def __init__(self, vocab_size: int) -> None:
        self.table = nnx.Param((jnp.arange(vocab_size, dtype=jnp.float32) * 5 + 1) % vocab_size)


class SuccessorDrafter(Featureless):
    """Follows the table; like prompt look-up it has no state."""

    def draft(
        self, params: Any, draft: Any, rows: Rows, tokens_SL: jax.Array, tier: Tier, sampling: SamplingState | None,
        noise_BDV: jax.Array | None, sample: bool,
    ) -> tuple[DraftTree, Any]:  # fmt: skip
        tokens = [rows.root_B]
        for _ in range(tier.depth):
            tokens.append(jnp.take(params, tokens[-1], mode="clip").astype(jnp.int32))
        return DraftTree.chain(jnp.stack(tokens, axis=1)), draft


class Successor(DrafterKind[Successors]):
    name = "successor"
    trees = False
    layouts = ("table",)
    module_type = Successors
    told_by = "a table of successors (successor_table)"

    def recognise(self, config: Mapping[str, Any], names: Collection[str] | None) -> bool:
        return "successor_table" in config

    def load(self, directory: Path, target: Transformer, dtype: DTypeLike, overrides: Overrides) -> Successors:
        module = nnx.eval_shape(lambda: Successors(target.config.vocab_size))
        with read_tensors(directory) as reader:
            module.table.set_value(jnp.asarray(reader.get("table", module.table.shape)))
        return module

    def save(self, module: Successors, directory: Path, target: Transformer, how: Saving) -> None:
        heads.write_head(directory, {"successor_table": True}, {"table": np.asarray(module.table[...])}, how.tokenizer)

    def bind(
        self, module: Successors, geo: Geometry, speculation: SpeculationConfig
    ) -> tuple[SuccessorDrafter, jax.Array]:
        return SuccessorDrafter(), module.table[...]


KIND = Successor()


# -------------------------------------------------------------------- a kind of policy


class AlternatingPolicy(StaticPolicy):
    """Plain decoding, a tier, and the tier under a budget by turns; nobody says how probable these drafts are."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.tiers, self.rounds = (PLAIN, tier), 0

    def select(self, view: BatchView) -> Tier | Choice:
        self.rounds += 1
        return (*self.tiers, Choice(self.tier, 2 * view.bucket))[self.rounds % 3]

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        return buckets


class Alternating(PolicyKind):
    name = "alternating"
    fields = frozenset({"depth"})

    def reachable(self, settings: Settings, room: Room) -> dict[Tier, tuple[int, ...]]:
        return dict.fromkeys((PLAIN, settings.tier(settings.depth or 1)), room.buckets)

    def budgets(self, settings: Settings, room: Room) -> dict[tuple[Tier, int], tuple[int, ...]]:
        return {(settings.tier(settings.depth or 1), bucket): (2 * bucket,) for bucket in room.buckets}

    def build(self, settings: Settings, room: Room, cost: CostTable | None) -> AlternatingPolicy:
        return AlternatingPolicy(settings.tier(settings.depth or 1))


ALTERNATING = Alternating()


# -------------------------------------------------------------------- they work


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two lines."""
    monkeypatch.setitem(registry.MODULES, "successor", __name__)
    monkeypatch.setitem(policies.KINDS, "alternating", (__name__, "ALTERNATING"))


@pytest.fixture
def model(tiny_directory: Path, tmp_path: Path) -> Iterator[Path]:
    """A target with a table of successors beside it."""
    (tmp_path / "target").symlink_to(tiny_directory)
    target = hf.load_model(tiny_directory, jnp.float32)
    module = Successors(target.config.vocab_size)
    directories.save_drafter(module, tmp_path / "successor", target=target)
    yield tmp_path / "target"


def test_a_drafter_is_told_and_loaded_by_its_directory(model: Path):
    place = model.parent / "successor"
    assert directories.read_kind(place) == "successor"
    assert resolve_drafter("successor", model) == resolve_drafter(place, model) == ("successor", place)
    target = hf.load_model(model, jnp.float32)
    back = directories.load_drafter("successor", place, target)
    np.testing.assert_array_equal(back.table[...], Successors(13).table[...])
    with pytest.raises(ValueError, match=r"must be one of \('table',\), got 'other'"):
        directories.save_drafter(back, place, target=target, layout="other")
    with pytest.raises(ValueError, match="holds a drafter of kind 'successor', expected 'medusa'"):
        directories.load_drafter("medusa", place, target)


def test_names_are_told_where_they_are_asked_for(model: Path):
    with pytest.raises(ValueError, match="drafter must be one of .*'successor'"):
        resolve_drafter("nothing", model)
    with pytest.raises(ValueError, match="policy must be 'adaptive', .*'alternating' or a path, got 3"):
        SpeculationConfig(policy=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="candidate_steps .1,. belongs to the adaptive or .* got policy 'altern"):
        SpeculationConfig(policy="alternating", candidate_steps=(1,))
    with pytest.raises(ValueError, match=r"proposes chains only \(topk 1\), got topk 2"):
        speculation = dict(policy="alternating", depth=2, topk=2, num_nodes=4)
        LLM(str(model), "successor", speculation, progress=False, compile_cache=False)


def test_both_serve_what_plain_decoding_says(model: Path, tiny_llm: LLM):
    with quick.prompts_alone():
        llm = LLM(
            str(model), "successor", {"policy": "alternating", "depth": 2}, max_batch_size=2, max_seq_len=64, seed=5,
            progress=False, page_size=8, prefill_chunk=16, variants=("sampled",), batch_buckets=(2,),
            compile_cache=False, warmup="eager",
        )  # fmt: skip
    prompts = [[0, 1, 2], [5], [7, 3]]
    params = [SamplingParams(temperature=t, seed=9, max_tokens=20, ignore_eos=True) for t in (0.0, 1.0, 0.0)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tiny_llm.use_policy(StaticPolicy(Tier(3)))
    plain = tiny_llm.generate(prompts, params, use_tqdm=False)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert llm.stats.rounds_by_tier.keys() == {"off", "chain-2"} and all(llm.stats.rounds_by_tier.values())
    assert sum(o.metrics.accepted for o in outputs) > 0


# -------------------------------------------------------------------- and nothing else is to be touched

#: Files that speak of one kind, and why; a new kind needs no line here.
SPOKEN_OF = {
    "jaxspec/bench/studies/": "a study says what it compares",
    "jaxspec/bench/offline/grow.py": "only such heads can be grown",
    "jaxspec/bench/offline/engines.py": "only such heads can be grown",
    "jaxspec/bench/online/": "what a client says on the wire",
    "jaxspec/bench/offline/metrics.py": "a mode of the benchmark",
}
#: P-EAGLE's heads are EAGLE-3's with placeholders, in the same format.
SHARED = {("peagle", "jaxspec/checkpointing/eagle3.py"), ("dflash", "jaxspec/train/drafters/walked.py")}


def constants(path: Path) -> set[str]:
    return {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
            and isinstance(node.value, str)}  # fmt: skip


def others(folder: str) -> Iterator[tuple[str, set[str]]]:
    """Every source file outside a folder that may not name kinds, with its strings."""
    for top in ("jaxspec", "serve"):  # the kernels know nothing of jaxspec
        for path in sorted((ROOT / top).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith((folder, *SPOKEN_OF)):
                yield name, constants(path)


def test_kinds_of_drafters_are_named_in_their_own_files_only():
    named = [name for name in registry.names() if name != registry.NONE]
    assert {path.stem for path in (ROOT / "jaxspec/drafters").glob("*.py")} == {
        "__init__", "kind", "blocks", "registry", "directories", "rounding", "successor", registry.NONE, *named
    }, "a file a kind"  # fmt: skip
    for path, strings in others("jaxspec/drafters/registry.py"):
        for kind in strings & set(named):
            own = Path(path).stem.startswith(kind.rstrip("0123456789"))
            assert own or (kind, path) in SHARED, f"{path} names {kind!r}"


def test_kinds_of_policies_are_named_in_their_own_files_only():
    # "off" is the name of a tier, too, and learning rates have a schedule.
    named = {kind.name for kind in [*policies.kinds(), policies.find("a.json")]} - {policies.OFF, "schedule"}
    for path, strings in others("jaxspec/adaptive/"):
        command = {policies.DEFAULT} if path == "jaxspec/bench/__main__.py" else set()
        assert strings.isdisjoint(named - command), path
