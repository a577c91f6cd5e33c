"""A ring gathers the target's states of every committed token, once and as the target computes them anew."""

from __future__ import annotations

import contextlib
import dataclasses
import time
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
from jaxspec.runtime.collecting import Collector, follow_exchanges
from jaxspec.speculation.ring import FeatureRing, split_rows
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.state import Geometry, Rows
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
    return bench.build("eagle3", SpeculationConfig(tiers=TIERS), cost, num_pages=30, together=False, **ring, **FEW)


@pytest.mark.covers("ring", kind="eagle3")
def test_what_is_gathered_is_what_the_target_computes(bench: Any, tools: Any, engine: Any, where: Path):
    engine.use_policy(tools.script(Tier(2), PLAIN))
    enough = engine._collector._enough
    engine._collector._enough = 100  # so that buffers are exchanged many times
    engine.limit_ring(1.0)
    expected, before = bench.expected(tools.workload()), engine.stats.compilations_after_warmup
    outputs = tools.drive(engine, tools.workload())
    engine.flush_ring()
    assert engine.stats.compilations_after_warmup == before
    tools.same(outputs, expected)
    engine._collector._enough = enough
    engine.limit_ring(EngineConfig.feature_ring_share)
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
        assert example.source is not None
        text = next(text for text in full if same_text(text[start:], example.tokens))
        prompt, temperature = full[text]
        seen[text] = max(seen[text], count)
        assert example.temperature == np.float32(temperature)
        assert example.learn == [i > 0 and start + i >= prompt for i in range(count)]
        tokens = np.zeros((1, 120), np.int32)
        tokens[0, : start + count] = [*text[:start], *example.tokens]
        hidden, aux = map(np.asarray, forward(tokens))
        # As many positions of every text, and NumPy cuts them: JAX would compile a program for each length.
        at = example.source + np.minimum(np.arange(120), count - 1)[None]
        got: Any = ring.states(rows_of(at), np.array([0]), (0, 1, 2))
        for part, want in ((got.aux_BTA, aux), (got.hidden_BTE, hidden)):
            assert part.dtype == jnp.bfloat16
            part = np.asarray(part).astype(np.float32)[0, :count]
            np.testing.assert_allclose(part, want[0, start : start + count], rtol=2**-8, atol=3e-4)
    assert all(length >= len(text) - 1 - 16 for text, length in seen.items()), "every text is there"


def same_text(text: tuple[int, ...], part: list[int]) -> bool:
    both = min(len(text), len(part))
    return both > 0 and list(text[:both]) == part[:both] and len(part) <= len(text) + 1


def rows_of(source_BT: np.ndarray) -> PackedRows:
    zeros = np.zeros_like(source_BT)
    return PackedRows(zeros, zeros, zeros, zeros, source_BT)


def test_while_the_writer_is_behind_whole_texts_are_left_out(bench: Any, tools: Any, engine: Any, where: Path):
    """Nothing waits for it, and those that are gathered have all their positions."""
    engine.flush_ring()
    files, lost = set(ring_files(where)), engine.stats.ring_lost
    collector: Collector = engine._collector
    own = collector._spare
    engine.use_policy(tools.script(Tier(2)))
    spare = own.get()  # the writer has it
    try:
        # Short enough that none is preempted, which would begin a text anew.
        greedy = SamplingParams(temperature=0, max_tokens=45, ignore_eos=True)
        requests = [([n % 13, n % 7, 3], greedy) for n in range(32)]
        tools.same(tools.drive(engine, requests), bench.expected(requests))
        assert collector._coming > collector._enough, "nothing was exchanged"
    finally:
        own.put(spare)
    engine.flush_ring()
    assert engine.stats.ring_lost == lost and collector._coming == 0
    about = np.concatenate([RingFile.read(path).about for path in set(ring_files(where)) - files])
    texts, counts = np.unique(about[:, 0], return_counts=True)
    # Half the buffer and what was under way then; the prompts' three tokens, and of the answers all but the last.
    assert collector._enough < len(about) <= collector._enough + 4 * 50 and len(texts) < 32
    assert all(counts >= 3 + 45 - 1)


def test_who_follows_exchanges_buffers_too(engine: Any):
    """When the first process does: the two take turns, and each is empty when its turn comes."""
    runner = engine.runner
    try:
        follow_exchanges(runner)
        exchange, first, seen = runner._heard["exchange the ring"], runner.state.ring, []
        for came in (5, 7):
            ring = dataclasses.replace(runner.state.ring, count=jnp.int32(came))
            runner.state = dataclasses.replace(runner.state, ring=ring)
            exchange()
            seen.append(runner.state.ring)
        assert seen[1].rows_RX is first.rows_RX is not seen[0].rows_RX
        assert [int(ring.count) for ring in seen] == [0, 0] and seen[1].text_S is first.text_S
    finally:
        runner.reset()


def test_rows_beyond_the_buffer_are_counted():
    """Two rounds of two rows, of which one's text is not gathered, into a buffer of three."""
    rows = Rows(
        jnp.array([1, 0]), jnp.ones(2, bool), jnp.zeros((2, 1), jnp.int32), jnp.array([4, 5]), jnp.zeros(2, int)
    )
    sampling = SamplingState.empty(2, 13)
    features = jnp.arange(2 * 2 * 4, dtype=jnp.float32).reshape(2, 2, 4)

    @jax.jit
    def run(ring: FeatureRing) -> FeatureRing:
        ring = dataclasses.replace(ring.admit(jnp.array([1])), texts=jnp.int32(7))
        tokens = jnp.arange(40, dtype=jnp.int32).reshape(2, 20)
        for _ in range(2):
            ring = ring.round(rows, sampling, tokens, features, jnp.array([2, 1]))
        return ring

    ring = run(FeatureRing.empty(3, 4, 2))
    states, about = split_rows(np.asarray(ring.rows_RX))
    assert int(ring.count) == 4
    assert about[:, :3].tolist() == [[0, 4, 24], [0, 5, 25], [0, 4, 24]]
    assert states.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_the_writer_rests(monkeypatch: pytest.MonkeyPatch):
    """It is busy for its share of the time, but where somebody waits for what it writes."""
    waits, clock = [], [0.0]

    class Hurry:
        def wait(self, seconds: float) -> None:
            waits.append(seconds)
            clock[0] += seconds

    collector: Any = Collector.__new__(Collector)
    collector.share, collector._hurry, collector._size, collector._piece = 0.02, Hurry(), 10, 4
    collector._cut = lambda rows, at: rows[at : at + 4]
    written = []

    @contextlib.contextmanager
    def open_file(count: int, width: int, dtype: Any, columns: int) -> Any:
        assert (count, width, columns) == (9, 8, 5)

        def add(features: np.ndarray, about: np.ndarray) -> None:
            clock[0] += 0.001
            written.extend(about[:, 0].tolist())

        yield add

    collector._open = open_file
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    rows = jnp.arange(90, dtype=jnp.uint32).reshape(10, 9)
    collector._copy(rows, 9)
    assert written == [4 + 9 * i for i in range(9)]
    assert waits == pytest.approx([0.049, 0.049, 0.049, 0.0])


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
        (dict(feature_ring="x", feature_ring_share=0), r"feature_ring_share must be a number in \(0, 1\], got 0"),
        (dict(feature_ring="x", feature_ring_disk_mib=0), "feature_ring_disk_mib must be an int of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**fields)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    build = lambda kind, **fields: bench.build(kind, SpeculationConfig(depth=2), **fields, variants=("sampled",))
    with pytest.raises(ValueError, match="for drafters that read the target's states; this engine has one that reads"):
        build("ngram", feature_ring=tmp_path / "ring")
    with pytest.raises(ValueError, match=r"feature_ring_mib must be at least \d+: a position takes \d+ bytes"):
        build("eagle3", feature_ring=tmp_path / "ring", feature_ring_mib=1, max_batch_size=500)
    with pytest.raises(ValueError, match="cannot be written"):
        build("eagle3", feature_ring=tmp_path / "file")


def test_only_texts_that_begin_get_a_number():
    ring = FeatureRing.empty(8, 4, 4).admit(jnp.asarray([4, 2, 4, 0]))
    assert ring.text_S.tolist() == [1, -1, 0, -1] and int(ring.texts) == 2
    same = ring.admit(jnp.asarray([4, 4]))
    assert same.text_S.tolist() == ring.text_S.tolist() and int(same.texts) == 2
