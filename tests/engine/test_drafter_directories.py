"""From a directory to a served drafter: how names are resolved, and that every kind serves what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from flax import nnx

from jaxspec.assemble import build_engine
from jaxspec.checkpointing import hf
from jaxspec.choosing import choose_policy
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.drafters.directories import save_drafter, stored_kinds
from jaxspec.loading import bind_drafter, load_drafter
from jaxspec.models.layers import Shared, shared_lm_head
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.request import SamplingParams
from jaxspec.resolve import resolve_drafter
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from jaxspec.speculation.state import Geometry
from jaxspec.tier import PLAIN, Tier

PLACES = {kind.name: kind.place or kind.name for kind in stored_kinds()}


@pytest.fixture(scope="module")
def directory(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a drafter of every kind beside it."""
    root = tmp_path_factory.mktemp("models")
    hf.save_model(bench.target, root / "target", dtype=jnp.float32)
    for kind, module in bench.modules.items():
        save_drafter(module, root / PLACES[kind], target=bench.target, dtype=jnp.float32)
    return root


@pytest.fixture(scope="module")
def with_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that carries an MTP module in its own files."""
    target, path = tiny_target(0, eos_token_ids=(12,)), tmp_path_factory.mktemp("deepseek") / "target"  # no windows
    cfg = MtpConfig(tiny_config(num_layers=1), target.config.num_layers)
    head = MtpHead(cfg, Shared(target.embedding[...]), shared_lm_head(target), rngs=nnx.Rngs(2))
    save_drafter(head, path, target=target, dtype=jnp.float32, layout="deepseek")
    return path


def test_names_and_paths(directory: Path, with_module: Path):
    target = directory / "target"
    for kind, place in PLACES.items():
        assert resolve_drafter(kind, target) == (kind, directory / place)
        assert resolve_drafter(directory / place, target) == (kind, directory / place), "by what it holds"
    assert resolve_drafter(None, target) == ("eagle3", directory / "eagle3")
    assert resolve_drafter("mtp", with_module) == ("mtp", with_module)
    assert resolve_drafter(None, with_module) == ("ngram", None)


def test_absent_checkpoints_are_named(directory: Path, with_module: Path, tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).symlink_to(directory / "target" / name)
    with pytest.raises(
        ValueError, match=rf"drafter 'mtp': no checkpoint in .*mtp or .*mtp nor an MTP layer in {target}"
    ):
        resolve_drafter("mtp", target)
    with pytest.raises(ValueError, match=r"drafter 'medusa': no checkpoint in .*target/medusa or .*/medusa; pass"):
        resolve_drafter("medusa", with_module)


def test_a_directory_of_another_kind_is_refused(directory: Path, tmp_path: Path):
    (tmp_path / "target").symlink_to(directory / "target")
    (tmp_path / "medusa").symlink_to(directory / "peagle")
    with pytest.raises(ValueError, match=r"kind 'peagle', expected 'medusa'"):
        build_engine(
            tmp_path / "target", "medusa", dict(depth=1), EngineConfig(skip_tokenizer_init=True), progress=False
        )


def test_default_depths_end_where_the_heads_do():
    steps = SpeculationConfig()
    assert set(choose_policy(steps, (1,), True, True, 3).reachable) == {PLAIN, Tier(1), Tier(2), Tier(3)}
    assert Tier(3) not in choose_policy(steps, (1,), True, True).reachable
    asked = SpeculationConfig(candidate_steps=(1, 5))
    assert Tier(5) in choose_policy(asked, (1,), True, True, 3).reachable, "the drafter refuses it by name"


@pytest.mark.parametrize("kind", sorted(PLACES))
def test_what_was_saved_is_what_drafts(bench: Any, directory: Path, kind: str):
    geo = Geometry(1, 1, 8, 1, 1)
    place = resolve_drafter(kind, directory / "target")[1]
    _, params = bind_drafter(kind, load_drafter(kind, place, bench.target, np.dtype(np.float32)), geo)
    _, expected = bind_drafter(kind, bench.modules[kind], geo)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


LATER = pytest.mark.exhaustive("every drafter from its directory")
DIRECTORIES = [
    pytest.param("own mtp", marks=pytest.mark.covers("directory", kind="mtp")),
    *(pytest.param(kind, marks=[LATER, pytest.mark.covers("directory", kind=kind)]) for kind in sorted(PLACES)),
]


@pytest.mark.parametrize("place", DIRECTORIES)
def test_directories_are_served(bench: Any, tools: Any, directory: Path, with_module: Path, place: str):
    """Greedy and sampled rows repeat plain decoding."""
    config = EngineConfig(
        max_batch_size=4,
        max_seq_len=64,
        page_size=8,
        prefill_chunk=16,
        batch_buckets=(4,),
        variants=("sampled",),
        compile_cache=False,
        warmup="eager",
        skip_tokenizer_init=True,
    )
    model, name = (with_module, "mtp") if place == "own mtp" else (directory / "target", place)
    told: list[tuple[int, int]] = []
    with quick.prompts_alone():
        engine = build_engine(model, name, dict(depth=2), config, progress=lambda *counts: told.append(counts))
        plain_engine = build_engine(model, "none", {}, config) if place == "own mtp" else None
    total = engine.stats.executables
    assert told == [(ready, total) for ready in range(total + 1)]
    work = [
        ([5, 1, 7, n], SamplingParams(temperature=t, seed=n, max_tokens=24, ignore_eos=True))
        for n, t in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 0.7))
    ]
    outputs = tools.drive(engine, work)
    plain = bench.expected(work) if plain_engine is None else tools.drive(plain_engine, work)
    tools.same(outputs, plain)
    assert sum(o.metrics.accepted for o in outputs) > 0
