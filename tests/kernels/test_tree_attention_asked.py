"""Which blocks warpgroups of attention ask for: those that they compute, in that order, each when its slot is free.

The kernels' own code, walked with plain integers and without an interpreter of any kind, so that every version of JAX
runs it: many more shapes than can be computed.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.tree_attention import (
    gpu_mosaic,
    mosaic_few,
    mosaic_launch,
    mosaic_near,
    mosaic_near_launch,
    mosaic_plan,
)
from pallas_kernels.tree_attention.mosaic_few import Few
from pallas_kernels.tree_attention.mosaic_plan import BLOCK

MODULES = gpu_mosaic, mosaic_few, mosaic_launch, mosaic_near, mosaic_near_launch


class Nothing:
    """References and registers that are handed around."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __getitem__(self, at: Any) -> Nothing:
        return self

    def __call__(self, *args: Any, **options: Any) -> Nothing:
        return self


class Log(dict[str, Any]):
    """The shared memory of a warpgroup: what was asked for and is not computed yet, by slot, and what was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, tuple[Any, ...]] = {}
        self.computed: list[tuple[int, ...]] = []
        self.sent: list[int] = []
        self.expected = 0

    def __missing__(self, name: str) -> Nothing:
        return Nothing()


class Noted:
    """A kernel's walk, of which blocks are noted instead of brought and computed."""

    stages: int
    page: int
    nothing = 0, 0, 0
    early = False

    def put(self, *args: Any, **options: Any) -> None: ...
    def add(self, sums: Any, more: Any) -> Any:
        return sums

    def fetch(self, *args: Any) -> Any:
        return self.nothing

    spill = finish = join = begin = wait_for_members = wait_for_sums = put

    def send(self, inbox: Any, shared: Log, sums: Any, number: int) -> None:
        shared.sent.append(number)

    def expect(self, count: int, member: int, shared: Log) -> None:
        shared.expected = count

    def bring_block(
        self, team: int, step: int, j: int, head: int, length: int, numbers: Sequence[int], k: int, ins: Any,
        shared: Log,
    ) -> None:  # fmt: skip
        slot = step % self.stages
        assert slot not in shared.asked, f"slot {slot} is written over"
        shared.asked[slot] = j, head, length, numbers[k] if j * BLOCK < length else None

    def block(
        self, unit: tuple[Any, ...], team: int, ins: dict[str, Any], shared: Log, q: Any, loaded: Any,
        ask: Callable[[int, Any], Any], j: int, carry: tuple[Any, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        head, tile, _, b, _, _, length = unit
        (step, ahead), *sums = carry
        assert step % self.stages in shared.asked, "nobody asked for the block that is waited for"
        page = ins["table"][b, j * BLOCK // self.page] + ins["first"] if j * BLOCK < length else None
        assert shared.asked.pop(step % self.stages) == (j, head, length, page)
        shared.computed.append((int(b), head, tile, j))
        return (step + 1, ask(step, ahead)), *sums


def arrive(words: list[int], unit: int, others: int) -> int:
    """mosaic_sums.arrive, of one warpgroup after the other."""
    last = words[unit] == others
    words[unit] = 0 if last else words[unit] + 1
    return int(last)


def note_result(self: Any, b: int, head: int, outs: Any, ins: Any) -> None:
    self.results.append((int(b), head))


Walked: Any = type("Walked", (Noted, gpu_mosaic._Kernel), {"gather_pieces": note_result, "results": []})


class Gathered(gpu_mosaic._Kernel):
    """A kernel that says which places it adds up, and in which order."""

    nothing: Any = ("",) * 3

    def fetch(self, refs: Any, at: Any, tile: Any) -> Any:
        return (str(at),) * 3

    def add(self, sums: Any, more: Any) -> Any:
        return (added(sums[0], more[0]),) * 3


def added(one: str, other: str) -> str:
    return f"({one} + {other})" if one and other else one or other


WalkedNear: Any = type("WalkedNear", (Noted, mosaic_near.Near), {})


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Where the code believes to be; its operations are Python's."""
    axes: dict[str, int] = {}

    def loop(begin: int, end: int, body: Callable[..., Any], carry: Any) -> Any:
        for i in range(begin, end):
            carry = body(i, carry)
        return carry

    def of_none_negative(operation: Callable[[int, int], int]) -> Callable[[Any, int], int]:
        def run(a: Any, b: int) -> int:
            assert a >= 0
            return operation(int(a), b)

        return run

    lax = SimpleNamespace(
        cond=lambda which, yes, no, *args: (yes if which else no)(*args), fori_loop=loop, axis_index=axes.__getitem__,
        div=lambda a, b: int(a) // int(b), rem=lambda a, b: int(a) % int(b),
    )  # fmt: skip
    numbers = SimpleNamespace(
        int32=int, where=lambda which, a, b: np.int64(a if which else b), minimum=min, maximum=max, float32=np.float32,
        clip=lambda x, low, high: min(max(x, low), high), logical_not=lambda x: not x,
    )  # fmt: skip
    pl = SimpleNamespace(when=lambda which: lambda run: run() if which else None)
    fakes = dict(
        lax=lax, jnp=numbers, pl=pl, plgpu=Nothing(), div=of_none_negative(lambda a, b: a // b),
        rem=of_none_negative(lambda a, b: a % b), arrive=arrive, overlap=Nothing(),
    )  # fmt: skip
    for module in MODULES:
        for name, fake in fakes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fake)
    yield axes


def few(
    draw: random.Random, nodes: Sequence[int], heads: int, mosts: Sequence[int], windows: Sequence[int]
) -> tuple[Few, list[int], np.ndarray]:
    """A launch, requests' lengths at the edges of blocks and groups, and their pages."""
    causal, batch = draw.random() < 0.7, draw.choice([1, 2, 3, 9])
    window = draw.choice([None, None, *windows]) if causal else None
    entries, page, most = draw.choice(nodes), draw.choice([64, 128, 256]), draw.choice(mosts)
    length = lambda: min(most, draw.choice([0, 1, 63, 64, 65, 256, 257, 1024, draw.randrange(most + 1), most - 70]))
    lengths, columns = [length() for _ in range(batch)], -(-(most + entries) // page)
    table = np.random.default_rng(draw.randrange(1 << 30)).permutation(batch * columns).reshape(batch, columns)
    kv_heads, programs, teams = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 7, 40]), draw.choice([1, 2, 2])
    shape = batch, entries, entries, kv_heads * heads, kv_heads, 64, page, causal, window, 0.1, programs, teams
    return Few(*shape, True), lengths, table


def seen(kernel: Few, lengths: Sequence[int]) -> set[tuple[int, ...]]:
    """Every request's blocks, of each KV head and tile of rows."""
    found = set()
    for b, length in enumerate(lengths):
        low = 0 if kernel.window is None else max(length - kernel.window + 1, 0) // BLOCK
        end = -(-length // BLOCK) + -(-kernel.entries // BLOCK)
        if kernel.causal:
            end = -(-(length + kernel.entries) // BLOCK)
        found |= {
            (b, head, tile, j)
            for head in range(kernel.kv_heads) for tile in range(kernel.tiles) for j in range(low, end)
        }  # fmt: skip
    return found


def plan(lengths: np.ndarray, *options: Any) -> tuple[jax.Array, ...]:
    """A plan as one program, which is traced anew each time: it depends on what was patched."""
    return jax.jit(lambda lengths: mosaic_plan.plan(lengths, *options))(lengths)


@pytest.mark.parametrize("seed", range(24))
def test_warpgroups_that_walk_along_items_ask_for_what_they_compute(
    seed: int, place: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    draw = random.Random(seed)
    nodes, mosts, windows = [1, 2, 4, 63, 64, 65, 130], [200, 500, 2000, 6000], [1, 63, 70, 300, 1300]
    launch, lengths, table = few(draw, nodes, draw.choice([1, 2, 4]), mosts, windows)
    single, quarter = draw.choice([(1.5, 4), (1000, 0), (0, 1000), (0, 0)])
    monkeypatch.setattr(mosaic_plan, "_SINGLE", single)
    monkeypatch.setattr(mosaic_plan, "_QUARTER", quarter)
    sizes = mosaic_plan.Sizes.of(launch, table.size // launch.batch * launch.page, draw.choice([None, True, False]))
    if launch.spread and draw.random() < 0.5:
        sizes = dataclasses.replace(sizes, whole=False, straight=False, mixed=True, room=draw.choice([0, 12, 40]))
        monkeypatch.setattr(mosaic_plan, "_PIECE", draw.choice([-100, 1.5, 100]))
    planned = plan(np.asarray(lengths, np.int32), launch.entries, sizes, launch.window, launch.causal)
    items, count, _ = (np.asarray(x).astype(np.int64) for x in planned)
    fields = {field.name: getattr(launch, field.name) for field in dataclasses.fields(launch)}
    direct = sizes.whole and launch.tiles == 1
    kernel = Walked(**fields | dict(direct=direct, straight=sizes.straight, mixed=sizes.mixed, interpret=False))
    ins: dict[str, Any] = {"items": items, "count": count, "table": table, "q": None, "k": None, "v": None}
    ins |= {"first": [draw.choice([0, 1000])], "arrived": [0] * (launch.batch * launch.kv_heads)}
    kernel.results.clear()
    computed = []
    for place["program"] in range(launch.programs):
        for place["team"] in range(launch.teams):
            log = Log()
            kernel.body(ins, (Nothing(),) * 7, log)
            assert not log.asked
            computed += log.computed
    assert len(computed) == len(set(computed)) and set(computed) == seen(launch, lengths)
    assert not any(ins["arrived"])
    if sizes.mixed and not count[1]:  # the last piece's warpgroup makes a result
        units = [(b, head) for b in range(launch.batch) for head in range(launch.kv_heads)]
        assert sorted(kernel.results) == units


@pytest.mark.parametrize("per", [mosaic_plan.FEW, mosaic_plan.GROUP])
@pytest.mark.parametrize("low", [0, 1, 3, 6])
def test_pieces_are_added_up_in_the_order_of_groups(per: int, low: int, place: dict[str, int]):
    """Of a request whose items lie somewhere, its last one elsewhere; and what is read beyond the end is not added."""
    end, found = low + 7, []
    kernel = Gathered(1, 1, 1, 2, 2, 64, 64, 64, True, None, 0.1, 1, 1, False, mixed=True)
    kernel.finish = lambda sums, *_: found.append(sums[0])
    ins = {"ends": np.asarray([[low], [end], [20], [3], [per]])}
    kernel.gather_pieces(0, 1, (None,) * 7, ins)
    groups: dict[int, str] = {}
    for i in range(low, end):
        group, item = i * per // mosaic_plan.GROUP, 2 * (3 if i == end - 1 else 20 + i - low) + 1
        groups[group] = added(groups.get(group, ""), str(item))
    assert found == [functools.reduce(added, groups.values())]


@pytest.mark.parametrize("causal", [True, False])
def test_a_plan_of_requests_in_their_order_has_the_items_of_any_other(causal: bool):
    lengths, straight = np.asarray([0, 63, 64, 1024, 7], np.int32), mosaic_plan.Sizes(8, 264, 20, True, True)
    plans = [
        plan(lengths, 4, sizes, None, causal) for sizes in (straight, dataclasses.replace(straight, straight=False))
    ]
    items, sorted_items = (np.asarray(planned[0]) for planned in plans)
    np.testing.assert_array_equal(items, sorted_items[:, np.argsort(sorted_items[0])])
    np.testing.assert_array_equal(plans[0][1], plans[1][1])
    ends, others = (np.asarray(planned[2]) for planned in plans)
    np.testing.assert_array_equal(np.delete(ends, 3, axis=0), np.delete(others, 3, axis=0))
    np.testing.assert_array_equal(ends[3], np.arange(5))


@pytest.mark.parametrize("seed", range(24))
def test_members_of_clusters_ask_for_what_they_compute(seed: int, place: dict[str, int]):
    draw = random.Random(seed)
    launch, lengths, table = few(draw, [1, 2, 4, 7], 4, [500, 2000, 8000], [70, 1300, 1330, 4000])
    near = WalkedNear.of(launch, draw.choice([2, 4, 8]))
    if launch.window is None:  # what there is room for
        lengths = [min(length, (near.most - 2) * BLOCK) for length in lengths]
    first = [draw.choice([0, 1000])]
    ins: dict[str, Any] = {"length": lengths, "table": table, "first": first, "q": None, "k": None, "v": None}
    computed = []
    for place["unit"] in range(launch.batch * launch.kv_heads):
        sent, expected = [], set()
        for place["member"] in range(near.members):
            for place["team"] in range(launch.teams):
                log = Log()
                near.body(ins, Nothing(), log, [Nothing(), Nothing()])
                assert not log.asked
                computed += log.computed
                sent += log.sent
                expected |= {log.expected} if place["team"] == 0 else set()
        assert expected == {len(sent)} and sorted(sent) == list(range(len(sent)))
        assert len(sent) <= near.workers * near.held
    assert len(computed) == len(set(computed)) and set(computed) == seen(launch, lengths)
