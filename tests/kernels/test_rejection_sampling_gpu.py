"""The GPU kernel of rejection sampling: interpreted, emulated as a team, and on a GPU where there is one.

Pallas' interpreter runs programs one after another, and members of a team wait for each other:
so teams run here as one thread a program over numpy, which tests the exchange with real interleavings.
The compile proofs (test_aot.py) know Triton's types and registers; on a GPU,
`pytest --noconftest` on this file compares compiled teams of every size.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rejection_sampling import gpu, gpu_rows, reference
from pallas_kernels.rejection_sampling.cases import CASES, FILTERS, Case
from pallas_kernels.rejection_sampling.noise import GUMBEL_BOUND, gumbel_bound, to_gumbel
from pallas_kernels.rejection_sampling.reference import RejectionSamplingArgs

ON_GPU = jax.default_backend() == "gpu"
SMALL_CHUNK = gpu.Launch(chunk=256)


def assert_same(got: gpu.Verdict, wanted: gpu.Verdict) -> None:
    """Equal verdicts on usable rows, and the same rows unusable; paths count up to num_accepted."""
    fine = np.asarray(wanted.finite_B)
    np.testing.assert_array_equal(got.finite_B, fine)
    for name in ("num_accepted_B", "next_token_B"):
        np.testing.assert_array_equal(
            np.asarray(getattr(got, name))[fine], np.asarray(getattr(wanted, name))[fine], name
        )
    accepted = np.asarray(wanted.num_accepted_B)
    for row in np.flatnonzero(fine):
        path = slice(accepted[row] + 1)
        np.testing.assert_array_equal(np.asarray(got.path_BD)[row, path], np.asarray(wanted.path_BD)[row, path])


def poison(case: Case, args: RejectionSamplingArgs, seed: int) -> RejectionSamplingArgs:
    """The arguments with a NaN, an inf or only -inf in a quarter of the rows' logits."""
    rng = np.random.default_rng(seed)
    logits = np.array(args.logits_BNV.astype(jnp.float32))
    for node in np.ndindex(case.batch, case.nodes):
        kind = rng.integers(12)
        at = rng.integers(case.vocab)
        if kind < 2:
            logits[node][at] = (np.nan, np.inf)[kind]
        elif kind == 2:
            logits[node] = -np.inf
        elif kind == 3:
            logits[node][rng.random(case.vocab) < 0.5] = -np.inf  # banned tokens are no defect
    return dataclasses.replace(args, logits_BNV=jnp.asarray(logits, args.logits_BNV.dtype))


@pytest.mark.parametrize(
    ("name", "dtype"), [("small-greedy", "float32"), ("small-tree-odd", "bfloat16"), ("small-rejection", "float32")]
)
def test_interpreted_kernel_agrees_with_the_reference(name: str, dtype: str) -> None:
    case = dataclasses.replace(CASES[name], dtype=dtype)
    launch = dataclasses.replace(SMALL_CHUNK, members=1)
    run = jax.jit(functools.partial(gpu.rejection_sampling, launch=launch, interpret=not ON_GPU))
    wanted = jax.jit(reference.rejection_sampling)
    for seed in range(4):
        args = case.draw(seed)
        assert_same(run(args), wanted(args))
        args = poison(case, args, seed)
        got = run(args)
        assert_same(got, wanted(args))
        assert np.all((np.asarray(got.next_token_B) >= 0) & (np.asarray(got.next_token_B) < case.vocab))
        assert np.all((np.asarray(got.path_BD) >= 0) & (np.asarray(got.path_BD) < case.nodes))


class Ref:
    """A kernel's reference to an array that several threads read and write."""

    def __init__(self, array: Any) -> None:
        self.array = np.array(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    @property
    def at(self) -> _At:
        return _At(self)

    def __getitem__(self, index: Any) -> jax.Array:
        return jnp.asarray(self.array[tuple(int(i) for i in _tuple(index))])

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        self.array[tuple(int(i) for i in _tuple(index))] = np.asarray(value)


class _At:
    def __init__(self, ref: Ref) -> None:
        self.ref = ref

    def __getitem__(self, index: Any) -> tuple[Ref, tuple[Any, ...]]:
        return self.ref, _tuple(index)


def _tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


class Triton:
    """What the kernel uses of pallas.triton, over numpy."""

    @staticmethod
    def _where(index: tuple[Any, ...], mask: jax.Array) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        live = np.asarray(mask)
        return live, tuple(np.broadcast_to(np.asarray(i), live.shape)[live] for i in index)

    @classmethod
    def load(cls, view: Any, *, mask: jax.Array, other: jax.Array, volatile: bool = False) -> jax.Array:
        ref, index = view
        shape = np.broadcast_shapes(np.shape(mask), *(np.shape(i) for i in index))
        live, at = cls._where(index, jnp.broadcast_to(mask, shape))
        out = np.full(shape, np.asarray(other), ref.dtype)
        out[live] = ref.array[at]
        if volatile:
            time.sleep(0.002)  # a spinning thread lets others run
        return jnp.asarray(out)

    @classmethod
    def store(cls, view: Any, value: jax.Array, *, mask: jax.Array) -> None:
        ref, index = view
        live, at = cls._where(index, mask)
        ref.array[at] = np.asarray(value)[live]

    @classmethod
    def atomic_xchg(cls, ref: Ref, index: tuple[Any, ...], value: jax.Array, *, mask: jax.Array) -> None:
        live, at = cls._where(index, mask)
        words = np.asarray(value)[live]
        for i in np.random.default_rng().permutation(words.size):  # words arrive one by one, in any order
            ref.array[tuple(a[i] for a in at)] = words[i]
            if i % 3 == 0:
                time.sleep(0)

    @staticmethod
    def debug_barrier() -> None:
        pass


def run_as_threads(
    monkeypatch: pytest.MonkeyPatch, case: Case, args: RejectionSamplingArgs, launch: gpu.Launch
) -> gpu.Verdict:
    """The kernel with a thread for each program."""
    here = threading.local()
    pallas = SimpleNamespace(
        program_id=lambda axis: jnp.int32(here.program[axis]),
        when=lambda condition: lambda f: f() if condition else None,
    )
    monkeypatch.setattr(gpu, "pl", pallas)
    monkeypatch.setattr(gpu, "plgpu", Triton)
    monkeypatch.setattr(gpu_rows, "plgpu", Triton)
    members, each = launch.split(case.batch, case.vocab)
    assert members == launch.members
    drafts = args.draft_probs_BXV is not None
    flat = [args.logits_BNV, args.tokens_BN, args.parents_BN, args.position_B, *args.sampling]
    flat += [args.draft_probs_BXV] if drafts else []
    b = case.batch
    out = [Ref(np.zeros((b, case.depth + 1), np.int32)), *(Ref(np.zeros(b, t)) for t in (np.int32, np.int32, bool))]
    table = Ref(np.zeros((b, 2, gpu_rows.table_words(case.vocab, launch.chunk, members)), np.uint32))
    refs = [*map(Ref, flat), *([table] if members > 1 else []), *out, *([table] if members > 1 else [])]
    failures: list[BaseException] = []

    def program(*index: int) -> None:
        here.program = index
        try:
            with jax.disable_jit():
                gpu._kernel(*refs, members=members, each=each, launch=launch, drafts=drafts, **case.options)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=program, args=i, daemon=True) for i in np.ndindex(members, b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a program waits for ever"
    return gpu.Verdict(*(ref.array for ref in out))


@pytest.mark.parametrize(
    ("mode", "members", "rows"),
    [
        pytest.param("coupled", 4, ("all",), marks=pytest.mark.exhaustive("larger teams under every filter")),
        ("coupled", 2, ("plain",)),
        ("rejection", 3, ("all", "plain")),
    ],
)
def test_a_team_agrees_with_the_reference(
    monkeypatch: pytest.MonkeyPatch, mode: Any, members: int, rows: tuple[str, ...]
) -> None:
    case = Case("team", len(rows), 4, 256 * members - 24, 1, mode=mode, rows=rows)
    args = case.draw(members)
    got = run_as_threads(monkeypatch, case, args, dataclasses.replace(SMALL_CHUNK, members=members))
    assert_same(got, jax.jit(reference.rejection_sampling)(args))


def test_a_slot_is_reused_by_greedy_members_that_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("long chain", 1, 16, 600, 15, chain=True, rows=("greedy",), acceptance=1.0)
    args = case.draw()
    got = run_as_threads(monkeypatch, case, args, dataclasses.replace(SMALL_CHUNK, members=3))
    assert got.num_accepted_B[0] == 15
    assert_same(got, jax.jit(reference.rejection_sampling)(args))


def test_bounds_of_noise_hold_for_every_draw_and_are_close_where_draws_win() -> None:
    bits = jnp.arange(2**23, dtype=jnp.uint32) << jnp.uint32(9)
    over = np.asarray(gumbel_bound(bits) + GUMBEL_BOUND - to_gumbel(bits))
    assert over.min() > -1e-4  # the margin of the race
    assert over[-(2**16) : -64].max() < 0.08  # the highest 1/128 of draws, but for the last few


def test_sizes_of_a_launch() -> None:
    launch = gpu.launch_for("NVIDIA H200")
    assert launch.split(16, 128_256) == (16, 4)
    assert launch.split(1, 128_256) == (63, 1)
    assert launch.split(64, 128_256) == (4, 16)
    assert launch.split(300, 128_256) == (1, 63)
    for batch in range(1, 300):
        members, each = launch.split(batch, 151_936)
        assert members == 1 or members * batch <= 264
        assert members * each >= 75 > (members - 1) * each
    assert gpu.launch_for("NVIDIA A100-SXM4-80GB").num_sms == 108
    assert gpu.launch_for("NVIDIA L40S").num_sms < 58  # not an L4: unknown, so small
    with pytest.raises(ValueError, match="at most 66 for a batch of 4, got 67"):
        dataclasses.replace(launch, members=67).split(4, 1 << 20)
    with pytest.raises(ValueError, match="got 4 \\* 3"):
        gpu.Launch(ctas_per_sm=3)
    with pytest.raises(ValueError, match="at least 256, got 128"):
        gpu.Launch(chunk=128)


def test_refusals_name_what_was_given() -> None:
    def refusal(dtype: str, n: int = 4, draft_dtype: str = "float32") -> str | None:
        args = Case("", 2, n, 100, 3, mode="rejection", dtype=dtype).shapes()
        drafts: Any = jax.ShapeDtypeStruct((2, n, 100), jnp.dtype(draft_dtype))
        return gpu.refusal(dataclasses.replace(args, draft_probs_BXV=drafts))

    assert gpu.refusal(Case("", 2, 4, 100, 3).shapes()) is None
    assert refusal("bfloat16") is None
    assert "got float16" in str(refusal("float16"))
    assert "got bfloat16" in str(refusal("float32", draft_dtype="bfloat16"))
    assert "got 300 and 3" in str(refusal("float32", 300))


@pytest.mark.skipif(not ON_GPU, reason="teams of compiled programs need a GPU (and --noconftest)")
@pytest.mark.parametrize("members", [2, 4, 8, 16, 33])
@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_compiled_teams_agree_bit_for_bit(mode: Any, members: int) -> None:
    case = Case("team", 7, 12, 100_003, 4, mode=mode, rows=tuple(FILTERS))
    launch = gpu.launch_for(jax.devices()[0].device_kind)
    run = lambda size: jax.jit(
        functools.partial(gpu.rejection_sampling, launch=dataclasses.replace(launch, members=size))
    )
    team, solo = run(members), run(1)
    wanted = jax.jit(reference.rejection_sampling)
    for seed in range(30):
        args = case.draw(seed)
        got = team(args)
        for a, b in zip(got, solo(args), strict=True):
            np.testing.assert_array_equal(a, b)
        assert_same(got, wanted(args))
