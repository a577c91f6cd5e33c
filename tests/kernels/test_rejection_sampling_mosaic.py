"""The Mosaic GPU kernel of rejection sampling, interpreted with race detection, against the reference.

Rows of few tokens are drawn so that each way through the kernel is taken: clusters of one and more, trees walked and
all nodes at once, vocabularies of whole tiles and others, lists of tokens that fit and ranges that are narrowed first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.aot import worker
from pallas_kernels.rejection_sampling import gpu, gpu_mosaic, mosaic_filters, mosaic_rows, reference
from pallas_kernels.rejection_sampling.api import OPERATION
from pallas_kernels.rejection_sampling.cases import CASES, COVERAGE, SERVING, Case
from pallas_kernels.rejection_sampling.gpu_mosaic import Launch
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs, SamplingRows
from tests.kernels import hopper

LATER = pytest.mark.exhaustive("the interpreter takes 10 to 40 s of the processor for a case")


def run(args: RejectionSamplingArgs, launch: Launch) -> reference.Verdict:
    params = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(functools.partial(gpu_mosaic.rejection_sampling, launch=launch, interpret=params))(args)


@pytest.fixture
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints a race and goes on."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


def assert_same(got: reference.Verdict, wanted: reference.Verdict) -> None:
    """Equal verdicts on usable rows, and the same rows unusable; paths count up to num_accepted."""
    fine = np.asarray(wanted.finite_B)
    np.testing.assert_array_equal(got.finite_B, fine)
    for name in ("num_accepted_B", "next_token_B"):
        got_, want = (np.asarray(getattr(v, name))[fine] for v in (got, wanted))
        np.testing.assert_array_equal(got_, want, name)
    accepted = np.asarray(wanted.num_accepted_B)
    for row in np.flatnonzero(fine):
        path = slice(accepted[row] + 1)
        np.testing.assert_array_equal(np.asarray(got.path_BD)[row, path], np.asarray(wanted.path_BD)[row, path])


@hopper.interpreted
@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    ("case", "launch"),
    [
        (CASES["small-greedy"], Launch(2, 2, walk=False)),
        (Case("rejection", 3, 4, 384, 2, mode="rejection", rows=("plain", "all", "greedy")), Launch(2, 2, walk=True)),
        pytest.param(dataclasses.replace(CASES["small-tree"], batch=7), Launch(2, 2, walk=True), marks=LATER),
        pytest.param(dataclasses.replace(CASES["small-rejection"], batch=7), Launch(2, 2, walk=True), marks=LATER),
        pytest.param(CASES["small-rejection-chain"], Launch(2, 4, walk=True), marks=LATER),
        pytest.param(dataclasses.replace(CASES["small-tree-odd"], batch=3), Launch(2, 4, walk=True), marks=LATER),
        pytest.param(CASES["small-chain-bf16"], Launch(1, 8, walk=False), marks=LATER),
        pytest.param(CASES["small-plain"], Launch(2, 2, walk=False), marks=LATER),
        pytest.param(
            Case("two words", 2, 1, 128 * 80, 0, chain=True, rows=("plain", "all")),
            Launch(1, 80, walk=False),
            marks=LATER,
        ),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_interpreted_kernel_agrees_with_the_reference(case: Case, launch: Launch) -> None:
    args = case.draw(1)
    assert gpu_mosaic.refusal(args) is None
    assert_same(run(args, launch), jax.jit(reference.rejection_sampling)(args))


@hopper.interpreted
@pytest.mark.usefixtures("no_races")
def test_trees_under_every_filter_beside_broken_rows() -> None:
    """Broken rows are told, and banned tokens are none."""
    rows = ("plain", "plain", "greedy", "all", "all", "top-p", "plain", "top-k", "min-p")
    case = Case("tree", len(rows), 4, 384, 2, rows=rows)
    args = case.draw(2)
    logits = np.array(args.logits_BNV)
    logits[0, 0, 300], logits[1, 0, 7], logits[2, 0], logits[3, :, 5:] = np.nan, np.inf, -np.inf, -np.inf
    args = dataclasses.replace(args, logits_BNV=jnp.asarray(logits))
    got = run(args, Launch(2, 2, walk=True))
    assert np.asarray(got.finite_B).tolist() == [i > 2 for i in range(len(rows))]
    assert np.all((np.asarray(got.next_token_B) >= 0) & (np.asarray(got.next_token_B) < case.vocab))
    assert np.any(np.asarray(got.num_accepted_B)[3:] > 0)
    assert_same(got, jax.jit(reference.rejection_sampling)(args))


#: (logits of a row from normal ones, top-k, top-p): lists too long, many equal values, all of them equal, wide ranges.
HARD = {
    "flat": (lambda x: 0.1 * x, 0, 0.7),
    "many": (lambda x: x, 300, 1.0),
    "equal": (lambda x: jnp.round(2 * x) / 2, 50, 0.5),
    "constant": (lambda x: 0 * x, 3, 0.3),
    "wide": (lambda x: 1000 * x, 400, 1.0),
    "one": (lambda x: x, 1, 1.0),
    "nearly all": (lambda x: x, 0, 0.9999),
    "more than all": (lambda x: x, 5000, 1e-6),
}


@hopper.interpreted
@LATER
@pytest.mark.usefixtures("no_races")
def test_thresholds_of_hard_rows() -> None:
    n = len(HARD)
    rng = np.random.default_rng(0)
    case = Case("hard", n, 1, 1024, 0, chain=True, rows=("plain",))
    args = case.draw(3)
    normal = jnp.asarray(rng.normal(size=(n, 1, 1024)), jnp.float32)
    logits = jnp.stack([shape(normal[i]) for i, (shape, _, _) in enumerate(HARD.values())])
    k = jnp.asarray([k for _, k, _ in HARD.values()], jnp.int32)
    p = jnp.asarray([p for _, _, p in HARD.values()], jnp.float32)
    for seed in range(2):
        seeds = jnp.asarray(rng.integers(0, 2**32, n, dtype=np.uint32))
        sampling = SamplingRows(jnp.ones((n,), jnp.float32), k, p, jnp.zeros((n,), jnp.float32), seeds)
        hard = dataclasses.replace(args, logits_BNV=logits, sampling=sampling)
        assert_same(
            run(hard, Launch(1 + seed, 8 // (1 + seed), walk=False)), jax.jit(reference.rejection_sampling)(hard)
        )


@pytest.mark.skipif(gpu_mosaic.unsupported() is not None, reason="needs a Hopper GPU (and --noconftest)")
@pytest.mark.parametrize(
    ("name", "members"),
    [(name, n) for name in ("small-tree", "small-chain-bf16", "small-rejection", "small-greedy") for n in (1, 2, 8, 16)]
    + [("small-wide", n) for n in (2, 8, 16)],  # more than one member's memory holds
)
def test_compiled_clusters_agree_with_the_reference(name: str, members: int) -> None:
    """Members read each other's memory, which the interpreter does not know."""
    case = CASES[name]
    launch = gpu_mosaic.sizes(members, case.vocab, walk=True)
    run = jax.jit(functools.partial(gpu_mosaic.rejection_sampling, launch=launch))
    wanted = jax.jit(reference.rejection_sampling)
    for seed in range(4):
        args = case.draw(seed)
        assert_same(run(args), wanted(args))


@hopper.proved
@pytest.mark.parametrize("name", ["greedy-b16-n16", "chain7-b3-bf16", "v50257-b4-n8-mixed", "rejection-b16-n16"])
def test_compiles_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real compiler: it fits, spills little and copies nothing of the vocabulary's size."""
    executable, found = hopper.compiled(gpu_mosaic.rejection_sampling, CASES[name].shapes(), tmp_path, monkeypatch)
    memory = executable.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 1 << 20
    assert found and max(kernel.spill_bytes for kernel in found) <= worker.MAX_SPILL_BYTES


def test_sizes_of_a_launch() -> None:
    assert gpu_mosaic.launch_for(16, 16, 128_256) == Launch(16, 64, walk=True)
    assert gpu_mosaic.launch_for(1, 4, 128_256) == Launch(16, 64, walk=False)
    assert gpu_mosaic.launch_for(1, 4, 128_256, drafts=True) == Launch(16, 64, walk=True)
    assert gpu_mosaic.launch_for(300, 1, 151_936) == Launch(16, 80, walk=True)
    assert gpu_mosaic.launch_for(64, 64, 32_000) == Launch(8, 32, walk=True)
    assert gpu_mosaic.launch_for(2, 8, 1000) == Launch(1, 8, walk=False)
    for vocab in (130, 4096, 32_000, 50_257, 262_144):
        launch = gpu_mosaic.launch_for(3, 1, vocab)
        assert launch.rows % mosaic_rows.GROUP == 0 and launch.members * launch.rows * 128 >= vocab


def test_takes_the_place_of_triton_for_all_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(gpu_mosaic, "unsupported", lambda: None)
    monkeypatch.setattr(gpu_mosaic, "rejection_sampling", lambda _: ran.append("Mosaic"))
    monkeypatch.setattr(gpu, "rejection_sampling", lambda _, **launch: ran.append("Triton"))
    cases = (*SERVING, *COVERAGE, Case("", 1, 1, 800_000, 0, chain=True))
    for case in cases:
        OPERATION.implementations["gpu"].run(case.shapes())
    assert ran == ["Mosaic"] * (len(cases) - 1) + ["Triton"]


def test_refusals_name_what_was_given() -> None:
    def refusal(n: int = 4, vocab: int = 1024, **options: Any) -> str | None:
        return gpu_mosaic.refusal(Case("", 2, n, vocab, 3, **options).shapes())

    assert refusal() is None
    assert refusal(mode="rejection") is None
    assert "got float16" in (refusal(dtype="float16") or "")
    assert "at most 256 nodes, got 257" in (refusal(n=257) or "")
    assert "at most 786432 float32 logits, got 800000" in (refusal(vocab=800_000) or "")
    assert "at most 393216 float32 logits, got 500000" in (refusal(vocab=500_000, mode="rejection") or "")
    assert mosaic_filters.LIST == 256
