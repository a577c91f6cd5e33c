"""Every figure on an engine whose seconds are planted, against the truth worked out by hand.

A prefill takes 1 s and a round 0.5 s throughout, so at batch 1 a request of 9 tokens that gains 4 a round lasts 2 s:
its first token comes after 1 s, 4 after 1.5 s (the round after the prefill: its time is not taken), 4 after 2 s.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planted import PlantedEngine, jobs, mode

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.bench.offline import metrics, overheads, queues, report
from jaxspec.bench.offline.measure import Experiment, Sweep, run_queue
from jaxspec.bench.offline.metrics import Run
from jaxspec.bench.offline.workloads import Passage
from jaxspec.bench.online.overhead import step_offline
from jaxspec.bench.studies import peer_engines
from jaxspec.bench.studies.peers import compare
from jaxspec.laps import PARTS, WAIT
from jaxspec.scheduling.pace import Pace
from jaxspec.tier import PLAIN, Tier


def measured(
    gain: int, count: int, max_tokens: int, batch_size: int = 1, *, name: str = "", repeat: int = 0, **engine: Any
) -> Run:
    planted: Any = PlantedEngine(prefill=1.0, round=0.5, gain=gain, **engine)
    made = dataclasses.replace(mode(gain), name=name or mode(gain).name)
    return run_queue(
        planted, made, jobs(count, max_tokens), workload="code", batch_size=batch_size, repeat=repeat,
        clock=planted.clock,
    )  # fmt: skip


def test_no_token_counts_without_its_time():
    run = measured(4, 2, 9)
    assert run.seconds == 4.0 and metrics.end_to_end(run) == 18 / 4
    assert [r.seconds for r in run.rounds] == [None, 0.5, None, 0.5]
    # All tokens over the seconds that were taken would say 16.
    steady = metrics.steady_rounds(run)
    assert sum(r.tokens for r in steady) / sum(r.seconds or 0 for r in steady) == 8.0
    assert [(c.ttft, c.tpot) for c in run.completions] == [(1.0, 1.0 / 8)] * 2
    assert metrics.mean_accepted_length([run]) == 4.0


def test_speed_ups_are_end_to_end():
    # Plain: 1 s and 8 rounds of 0.5 s a request, 5 s.
    plain, chain = metrics.summarize([measured(1, 2, 9), measured(4, 2, 9)])
    assert plain.end_to_end.tokens_per_second == 18 / 10 and chain.end_to_end.tokens_per_second == 18 / 4
    assert chain.end_to_end.speedup == pytest.approx(10 / 4)
    assert (plain.tpot_p50, chain.tpot_p50, chain.ttft_p50) == (0.5, 0.125, 1.0)


def test_a_steady_state_of_too_few_rounds_says_so():
    plain, chain = metrics.summarize([measured(1, 2, 9), measured(4, 2, 9)])
    assert plain.steady_state == metrics.SteadyState(
        14, None, None, "14 of at least 50 timed rounds with its place in use"
    )
    assert (chain.steady_state.rounds, chain.steady_state.tokens_per_second) == (2, None)
    # 241 tokens: 60 rounds a request, of which the first is not timed; plain decoding 240.
    plain, chain = metrics.summarize([measured(1, 1, 241), measured(4, 1, 241)])
    assert (chain.steady_state.rounds, chain.steady_state.tokens_per_second) == (59, 8.0)
    assert chain.steady_state.speedup == 4.0 and chain.steady_state.reason == ""
    assert chain.end_to_end.speedup == pytest.approx(121 / 31)
    # Without a steady plain decoding there is a speed and no ratio.
    lone = metrics.summarize([measured(1, 1, 9), measured(4, 1, 241)])[1]
    assert lone.steady_state.tokens_per_second == 8.0 and lone.steady_state.speedup is None


def test_repeats_are_pooled_where_both_modes_ran():
    # 33 tokens: 7 timed rounds a run of one request, 31 of plain decoding.
    chains = [measured(4, 1, 33, repeat=i) for i in range(8)]
    summary = metrics.summarize([*(measured(1, 1, 33, repeat=i) for i in range(2)), *chains])[1]
    assert (summary.steady_state.rounds, summary.steady_state.speedup) == (56, 4.0)


def test_a_round_for_requests_that_have_ended_is_time_without_tokens():
    # The second request waits for the round in flight at the first one's end: 2 s and 2.5 s, its TTFT 1.5 s.
    run = measured(4, 2, 9, lost=True)
    assert run.seconds == 4.5 and [c.ttft for c in run.completions] == [1.0, 1.5]
    assert [(r.tokens, r.seconds) for r in run.rounds] == [(4, None), (4, 0.5), (0, 0.5), (4, None), (4, 0.5)]
    assert sum(r.tokens for r in metrics.steady_rounds(run)) == 8 and len(metrics.steady_rounds(run)) == 3


def test_rounds_of_a_batch_that_fills_or_drains_are_not_steady():
    # A alone (untimed), then B's prefill; both (untimed), and A ends at 3.0 s; B alone until 3.5 s.
    run = measured(2, 2, 5, 2)
    assert [(r.batch_size, r.seconds) for r in run.rounds] == [(1, None), (2, None), (1, 0.5)]
    assert metrics.steady_rounds(run) == [] and metrics.end_to_end(run) == 10 / 3.5
    assert [c.ttft for c in run.completions] == [1.0, 2.5] and [c.tpot for c in run.completions] == [0.5, 0.25]
    (summary,) = metrics.summarize([run])
    assert summary.steady_state.reason == "0 of at least 50 timed rounds with all 2 places in use"
    assert (summary.tpot_p50, summary.tpot_p99) == (0.25, 0.5)


def test_regret_is_end_to_end():
    # Steadily adaptive is as fast; over the run it took 2.5 s where the best took 2.
    runs = [
        measured(1, 1, 9), measured(4, 1, 9), dataclasses.replace(measured(4, 1, 9, name="adaptive"), seconds=2.5)
    ]  # fmt: skip
    (regret,) = metrics.regrets(runs)
    assert regret.best == "chain-3" and regret.loss == pytest.approx(0.2)


def test_submitting_is_part_of_the_time_to_the_first_token():
    run = measured(4, 1, 9, add=0.25)
    assert run.completions[0].ttft == 1.25 and run.seconds == 2.25


def test_tokens_of_several_rounds_in_a_step_have_no_time():
    class Twice(PlantedEngine):
        def step(self) -> Any:
            return super().step() + super().step()

    engine: Any = Twice(prefill=1.0, round=0.5, gain=4)
    run = run_queue(engine, mode(4), jobs(1, 17), workload="code", batch_size=1, clock=engine.clock)
    # Prefill and a round, two rounds, one round: only the last step's tokens are one round's.
    assert [(r.tokens, r.seconds) for r in run.rounds] == [(4, None), (0, None), (8, None), (4, 0.5)]
    assert metrics.end_to_end(run) == 17 / 3


def test_the_estimate_is_what_the_plan_then_takes():
    planted: Any = PlantedEngine(prefill=1.0, round=0.5, gain=4)
    library = {"code": [Passage("code", i, "") for i in range(4)]}
    plan = Sweep((1,), ("code",), 33, repeats=3, waves=2)
    session = Experiment(planted, library, {("code", i): (1,) for i in range(4)}, plan, [mode(4)])
    clocked = lambda *args, **rest: run_queue(*args, clock=planted.clock, **rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.bench.offline.measure.run_queue", clocked)
        session.warm_up()
        # 8 tokens take 1 s and 2 rounds; the last round of such a short request is cut, hence a little more than 30.
        took = sum(run.seconds for run in session.measure())
    assert took == 3 * 2 * 5.0 and took <= session.estimate <= 1.2 * took


def test_the_report_has_both_figures_and_no_nan():
    conditions: dict[str, Any] = {
        "device": "cpu", "platform": "cpu", "devices": 1, "cpu_cores": 2, "jax": "0", "model": "demo",
        "parameters": 1, "dtype": "float32", "drafter": "ngram", "grow": None, "geometry": None,
        "queues": {"1": {"code": 1}},
        "simulated_accept_length": None, "temperature": 0.0, "max_tokens": 9, "repeats": 1, "prompts": None,
        "skipped_prompts": 0, "warmup_seconds": 1.0, "executables": 3,
    }  # fmt: skip
    runs = [measured(1, 1, 9), measured(4, 1, 241, name="chain-3"), measured(2, 2, 5, 2, name="adaptive")]
    shown = report.Report(conditions, runs, 0)
    text = report.render(shown)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line[:1].isalnum()}
    assert rows["plain*" if "plain*" in rows else "plain"][5:7] == ["-", "-"]
    assert rows["chain-3"][1] == "7.8" and rows["chain-3"][5:7] == ["8.0", "-"]
    assert "code, batch 1: plain 7" in text and "code, batch 2: adaptive 0" in text and "nan" not in text
    data = report.to_dict(shown)
    first, second, third = data["summaries"]
    assert first["steady_state"]["tokens_per_second"] is None and "7 of at least 50" in first["steady_state"]["reason"]
    assert second["end_to_end"]["tokens_per_second"] == pytest.approx(241 / 31)
    assert third["steady_state"]["rounds"] == 0 and data["runs"][0]["rounds"]["seconds"] == [None, *[0.5] * 7]


def test_serving_is_compared_with_tokens_that_took_their_time():
    planted: Any = PlantedEngine(prefill=1.0, round=0.5, gain=4)
    # Two waves of one request, 2 s each: 8 tokens in the second after the first one.
    assert step_offline(planted, [[[1]], [[1]]], 9, planted.clock) == ([0.125, 0.125], 4.0)


def test_peers_are_compared_end_to_end(capsys: pytest.CaptureFixture[str]):
    now = 0.0

    def runner(seconds: list[float], tokens: int) -> Any:
        def run(prompt: Any) -> list[int]:
            nonlocal now
            now += seconds.pop(0)
            return [7] * tokens

        return run

    # A prompt warms up; then repeats of 2, 4 and 1 s for 8 tokens: the median rate is that of 2 s.
    found = compare({"a": runner([9.0, 2.0, 4.0, 1.0], 8), "b": runner([9.0, 1.0, 1.0, 1.0], 4)}, [[1]], 3, lambda: now)
    assert found["tokens_per_second"] == {"a": 4.0, "b": 4.0} and found["seconds"]["a"] == [2.0, 4.0, 1.0]
    assert found["outputs_that_differ"] == {"b": 3}


def test_engines_in_processes_are_compared_by_case():
    class Stub:
        def __init__(self, seconds: float, wrong: str = ""):
            self.seconds, self.wrong, self.asked = seconds, wrong, 0

        def ask(self, prompts: list[list[int]], mode: str, new: int) -> tuple[float, list[list[int]]]:
            self.asked += 1
            first = 100 if self.asked == 1 else 1  # the first repeat warms up
            time = self.seconds * sum(map(len, prompts)) * first / (2 if mode == "chain-3" else 1)
            return time, [[sum(p) + (mode == self.wrong)] * new for p in prompts]

    stubs: Any = {"jaxspec": Stub(1.0), "llama": Stub(2.0, wrong="chain-3"), "vllm": Stub(0.5), "vllm-4": Stub(4.0)}
    texts = [[1, 2], [3], [4, 5, 6], [7]]
    asked = list(peer_engines.cases(list(stubs), texts, 8))
    assert len(asked) == 3 * 3 + 4 + 4 + 1 + 2 * 3
    assert {len(c.groups[0]) for c in asked if c.title == "plain, batch 16"} == {16}
    assert {len(c.groups[0][0]) for c in asked if c.title == "prompt of 1500"} == {1500}
    found = {(r["case"], r["engine"], r["mode"]): r for r in peer_engines.measure(stubs, asked, 3)}
    assert (
        found["plain, batch 4", "vllm", "plain"]["speed"] == 2
        and found["plain, batch 16", "llama", "plain"]["speed"] == 0.5
    )
    one = found["plain, batch 1", "jaxspec", "plain"]
    assert one["seconds"] == [7.0] * 3 and (one["equal"], one["of"]) == (4, 4)
    # Chains are compared with this engine's plain decoding of the same prompts.
    assert found["draft model, batch 1", "jaxspec", "chain-3"]["speed"] == 2
    assert found["draft model, batch 1", "vllm-4", "chain-4"]["speed"] == 0.25
    assert found["draft model, batch 1", "llama", "chain-3"]["equal"] == 0
    assert found["draft model, batch 1", "llama", "chain-2"]["equal"] == 4


def test_an_engine_that_ends_says_why(tmp_path: Path):
    script = "#!/bin/sh\necho no module named vllm >&2\n"
    (python := tmp_path / "python").write_text(script)
    python.chmod(0o755)
    worker = peer_engines.Worker(str(python), "vllm", tmp_path, tmp_path, tmp_path)
    with pytest.raises(RuntimeError, match="vllm ended:\nno module named vllm"):
        worker.read()
    worker.close()


class Stepped(PlantedEngine):
    """Of each round the host plans 2 ms and calls 1, waits for the rest; they come in twos, every fourth starves."""

    def use_policy(self, policy: Any) -> None:
        self.rounds = 0

    def step(self) -> list[Any]:
        self.rounds += not self._waiting
        return super().step()

    def abort(self, name: str) -> None:
        self._rows.clear()

    @property
    def stats(self) -> Any:
        parts = dict.fromkeys(PARTS, 0.0) | {"plan": 0.002 * self.rounds, "call": 0.001 * self.rounds}
        waited = (self.round - 0.003) * self.rounds
        return SimpleNamespace(
            rounds=self.rounds, dispatches=self.rounds // 2, starved_rounds=self.rounds // 8, device_seconds=waited,
            host_parts=parts,
        )  # fmt: skip


def test_the_hosts_part_of_a_round():
    """Of 40 rounds of 10 ms, prompts and the rounds right behind them left out."""
    planted: Any = Stepped(prefill=1.0, round=0.01, gain=3)
    found = overheads.window(planted, [[1], [2]], StaticPolicy(Tier(2)), 40, 1000, clock=planted.clock)
    assert (found.wall, found.host, found.starved, found.tokens) == pytest.approx((0.01, 0.003, 0.25, 3.0))
    assert found.rounds == 2
    assert found.parts["plan"] == pytest.approx(0.002) and found.parts[WAIT] == pytest.approx(0.007)
    slow = dataclasses.replace(found, wall=0.03, parts={**found.parts, "plan": 0.02})
    assert overheads.median([found, slow, found]) == found


def test_the_table_of_overheads():
    parts = {**dict.fromkeys(PARTS, 0.0), "call": 100.0, WAIT: 900.0}
    row = {"batch_size": 4, "policy": "off", "wall_us": 1000.0, "host_us": 100.0, "parts_us": parts}
    row |= {"starved_share": 0.5, "rounds_per_dispatch": 2.5}
    timed = {**row, "device_us": 950.0, "device_idle_share": 0.05, "call_alone_us": 80.0}
    head, plain, adaptive = (line.split() for line in overheads.table([timed, row]).splitlines())
    assert head[:7] == ["batch", "policy", "rounds", "wall", "device", "idle", "starved"]
    assert plain[:8] == ["4", "off", "2.5", "1000", "950", "5.0%", "50.0%", "100"] and plain[-1] == "80"
    assert adaptive[:6] == ["4", "off", "2.5", "1000", "50.0%", "100"]


class Queued(PlantedEngine):
    """Two slots; a dispatch is a round, or two rounds in three quarters of the time where the pace allows that."""

    pace, mixes = Pace(2, measured=False), True
    facts = SimpleNamespace(sizes=SimpleNamespace(slots=2))

    def __init__(self) -> None:
        super().__init__(prefill=0.0, round=1.0, gain=1)
        self.rounds = self.dispatches = self.mixed = 0

    def step(self) -> list[Any]:
        several = self.pace.repeats().rounds
        self.round = 1.0 if several == 1 else 0.75
        waiting, self._waiting = self._waiting, self._waiting[: 2 - len(self._rows)]
        held = waiting[len(self._waiting) :]
        events = [event for _ in range(several) for event in super(Queued, self).step()]
        self._waiting += held
        self.mixed += several if self.mixes else 0
        self.rounds, self.dispatches = self.rounds + several, self.dispatches + 1
        return events

    def abort(self, name: str) -> None:
        rows = (self._rows, self._waiting)
        self._rows, self._waiting = ([row for row in some if row.name != name] for some in rows)

    @property
    def stats(self) -> Any:
        return SimpleNamespace(rounds=self.rounds, dispatches=self.dispatches, mixed_rounds=self.mixed)


def test_a_queue_at_both_paces():
    """Tokens a second, the wait for the first, and that the engine is left as it was found."""
    planted: Any = Queued()
    own = planted.pace
    one = queues.closed_loop(planted, [[1], [2]], StaticPolicy(PLAIN), 40, clock=planted.clock)
    planted.pace = Pace(1, measured=False)
    other = queues.closed_loop(planted, [[1], [2]], StaticPolicy(PLAIN), 40, clock=planted.clock)
    assert (one.rounds, other.rounds) == (2, 1) and not planted.has_work
    assert other.tokens_per_second == pytest.approx(2.0, rel=0.1)
    assert one.tokens_per_second == pytest.approx(2 / 0.75, rel=0.1)
    assert 10 < one.first_token < other.first_token < 60
    planted.pace = own
    assert list(itertools.islice(queues.lengths(40), 3)) == [35, 51, 26]


def test_the_table_of_queues(monkeypatch: pytest.MonkeyPatch):
    planted: Any = Queued()
    own, loop = planted.pace, queues.closed_loop
    monkeypatch.setattr(queues, "closed_loop", lambda *args: loop(*args, clock=planted.clock))
    rows = queues.rows(planted, [[1], [2]], [PLAIN], 40, 3)
    gains, nothing = rows[0]["gains_over_single"], rows[0]["gains_over_apart"]
    assert planted.pace is own and planted.mixes and len(gains) == 3 and 1.25 < min(gains) < 1.4
    assert nothing == [1.0] * 3 and (rows[0]["own_mixed"], rows[0]["apart_mixed"]) == (1.0, 0.0)
    _, one, other = (line.split() for line in queues.table(rows).splitlines())
    assert one[:7] == other[:7] == ["2", "off", "1", "40", "3", "2.0", "100.0%"]
    assert one[7:9] == ["single", "rounds"] and one[10][:3] == "1.3" and other[10] == "1.000"
