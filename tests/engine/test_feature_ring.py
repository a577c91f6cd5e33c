"""A ring gathers the target's states of every committed token, once and as the target computes them anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.adaptive.cost import CostTable
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.models.layers import causal_attention
from jaxspec.request import SamplingParams
from jaxspec.ringfiles import RingDirectory, RingFile, ring_files
from jaxspec.runtime.collecting import Collector
from jaxspec.speculation.state import Geometry
from jaxspec.tier import PLAIN, Tier
from jaxspec.train.data.batch import PackedRows
from jaxspec.train.data.ring import Ring

TIERS = (PLAIN, Tier(2))
FEW: dict[str, Any] = dict(batch_buckets=(4,), variants=("sampled",))


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "ring"


@pytest.fixture(scope="module")
def engine(bench: Any, where: Path) -> Any:
    """EAGLE-3 with a pool that is too small for four long requests, and a ring."""
    cost = CostTable({(tier, 4): 1e-3 for tier in TIERS})
    ring = dict(feature_ring=where, feature_ring_mib=1)
    return bench.build("eagle3", SpeculationConfig(tiers=TIERS), cost, num_pages=30, **ring, **FEW)


def test_what_is_gathered_is_what_the_target_computes(bench: Any, tools: Any, engine: Any, where: Path):
    engine.use_policy(tools.script(Tier(2), PLAIN))
    size = engine.runner.state.ring.features_RF.shape[0]
    engine._collector._size = 200  # so that buffers are exchanged many times
    expected, before = bench.expected(tools.workload()), engine.stats.compilations_after_warmup
    outputs = tools.drive(engine, tools.workload())
    engine.flush_ring()
    assert engine.stats.compilations_after_warmup == before
    tools.same(outputs, expected)
    engine._collector._size = size
    files = ring_files(where)
    assert len(files) >= 3 and all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert engine.stats.ring_lost == 0 and engine.stats.ring_rows == sum(len(RingFile.read(p).about) for p in files)
    ring = Ring.read(where, bench.target.config)
    assert ring.layers == (0, 1, 2, 3)
    full = {}
    for (prompt, params), output in zip(tools.workload(), outputs, strict=True):
        full[tuple([*prompt, *output.token_ids])] = (len(prompt), params.temperature)
    seen = dict.fromkeys(full, 0)
    graph, params = nnx.split(bench.target)

    @jax.jit
    def forward(tokens_1T: jax.Array) -> Any:
        positions = jnp.arange(tokens_1T.shape[1])[None]
        return nnx.merge(graph, params)(tokens_1T, positions, causal_attention, (0, 1, 2))

    for example in ring.examples:
        # A text, or a part of one that was preempted or found its beginning cached; without its last token, but where
        # its last round accepted more than it may have.
        start, count = ring.at(example)[1], len(example.tokens)
        text = next(text for text in full if same_text(text[start:], example.tokens))
        prompt, temperature = full[text]
        seen[text] = max(seen[text], count)
        assert example.temperature == np.float32(temperature)
        assert example.learn == [i > 0 and start + i >= prompt for i in range(count)]
        tokens = np.zeros((1, 120), np.int32)
        tokens[0, : start + count] = [*text[:start], *example.tokens]
        hidden, aux = forward(tokens)
        got = ring.states(rows_of(example.source + np.arange(count)[None]), np.array([0]), (0, 1, 2))
        np.testing.assert_allclose(got.aux_BTA[0], aux[0, start : start + count], atol=2e-4)
        np.testing.assert_allclose(got.hidden_BTE[0], hidden[0, start : start + count], atol=2e-4)
    assert all(length >= len(text) - 1 - 16 for text, length in seen.items()), "every text is there"


def same_text(text: tuple[int, ...], part: list[int]) -> bool:
    both = min(len(text), len(part))
    return both > 0 and list(text[:both]) == part[:both] and len(part) <= len(text) + 1


def rows_of(source_BT: np.ndarray) -> PackedRows:
    zeros = np.zeros_like(source_BT)
    return PackedRows(zeros, zeros, zeros, zeros, source_BT)


def test_a_full_ring_loses_what_comes_and_delays_nothing(bench: Any, tools: Any, engine: Any):
    """While the writer is behind."""
    engine.flush_ring()
    collector: Collector = engine._collector
    own = collector._spare
    engine.use_policy(tools.script(Tier(2)))
    spare = own.get()  # the writer has it
    try:
        requests = [([n, 2, 3], SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)) for n in range(12)]
        tools.same(tools.drive(engine, requests), bench.expected(requests))
        assert collector._coming > engine.runner.state.ring.features_RF.shape[0], "nothing was exchanged"
    finally:
        own.put(spare)
    engine.flush_ring()
    assert engine.stats.ring_lost > 0 and collector._coming == 0


def test_what_one_dispatch_brings_has_room():
    """What comes is counted after each dispatch; a round may bring a chunk of prompts in its pass."""
    sizes = dict(slots=8, num_pages=64, page_size=8, pages_per_seq=8, max_depth=3, prefill_chunk=16)
    for rounds, together, most in ((1, 32, 8 * 4 + 16), (1, 128, 128), (4, 32, 4 * 8 * 4)):
        assert Geometry(**sizes, max_rounds=rounds, max_num_batched_tokens=together).most_features == most


def test_the_oldest_files_make_room(tmp_path: Path):
    directory = RingDirectory(tmp_path / "new", 3000, {"engine": "a"})
    about = np.zeros((10, 5), np.int32)
    for number in range(6):
        directory.write(np.full((10, 16), number, jnp.bfloat16), about)
    kept = [RingFile.read(path) for path in ring_files(tmp_path / "new")]
    assert [float(file.features[0, 0]) for file in kept] == [2.0, 3.0, 4.0, 5.0]
    assert kept[0].features.dtype == jnp.bfloat16 and kept[0].metadata == {"engine": "a"}
    path = ring_files(tmp_path / "new")[0]
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match="no whole file of a feature ring"):
        RingFile.read(path)


def test_rings_that_cannot_be_are_refused(bench: Any, tmp_path: Path):
    for fields, message in (
        (dict(feature_ring=""), "feature_ring must be None or a path, got ''"),
        (dict(feature_ring="x", feature_ring_mib=0), "feature_ring_mib must be an int of at least 1, got 0"),
        (dict(feature_ring="x", feature_ring_disk_mib=0), "feature_ring_disk_mib must be an int of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**fields)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    build = lambda kind, **fields: bench.build(kind, SpeculationConfig(depth=2), **fields, variants=("sampled",))
    with pytest.raises(ValueError, match="for drafters that read the target's states; this engine has one that reads"):
        build("ngram", feature_ring=tmp_path / "ring")
    with pytest.raises(ValueError, match=r"feature_ring_mib must be at least \d+: a position takes \d+ bytes"):
        build("eagle3", feature_ring=tmp_path / "ring", feature_ring_mib=1, max_batch_size=200)
    with pytest.raises(ValueError, match="cannot be written"):
        build("eagle3", feature_ring=tmp_path / "file")
