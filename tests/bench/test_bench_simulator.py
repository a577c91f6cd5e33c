"""The simulator: known rates and costs give known speeds, packed rounds choose as the device does, texts are what they
claim to be, and the command says what it did without JAX."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.adaptive import RoundStats, StaticPolicy, registry
from jaxspec.adaptive.calibration import calibration_error
from jaxspec.adaptive.linear import LinearCost
from jaxspec.bench.__main__ import main
from jaxspec.bench.online.arrivals import Arrival, Load, closed
from jaxspec.bench.simulate import acceptance, breakeven, cells, costs, figures, formulas, policies
from jaxspec.bench.simulate.engine import Simulation
from jaxspec.bench.simulate.records import Machine, Outcome, Ran, Served
from jaxspec.bench.studies import regret
from jaxspec.speculation import budget
from jaxspec.speculation.drafters import draft_cache
from jaxspec.tier import Choice, Tier

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "docs/h200/rounds.json"
#: A device on which each verified token costs a tenth of a plain step, and each draft pass too.
DEVICE = costs.Linear(
    "a made-up device", LinearCost(0.0, 1e-4, 1e-3, math.nan, math.nan), LinearCost(0.0, 0.0, 1e-4, math.nan, math.nan)
)
DEPTHS, BUCKETS = (0, 1, 2, 4), (1, 2, 4, 8)
EVEN, USUAL = acceptance.Reliability(spread=0.0), acceptance.Reliability()


def machine(**changes: Any) -> Machine:
    return Machine(**{"costs": DEVICE, "depths": DEPTHS, "buckets": BUCKETS, "context": 512, **changes})


def tape(text: str, sure: acceptance.Reliability = USUAL, depth: int = 4) -> acceptance.Tape:
    return acceptance.Tape(acceptance.parse(text, sure), 0, depth)


def outcome(text: str, policy: Any, load: Load, seconds: float = math.inf, **options: Any) -> Outcome:
    sure = options.pop("sure", USUAL)
    return Simulation(machine(**options), tape(text, sure), policy, prompt=32, output=200).run(load, seconds)


# ---------------------------------------------------------------- speed


@pytest.mark.parametrize("depth", [0, 2, 4])
def test_known_rates_and_costs_give_the_expected_speed(depth: int):
    found = outcome("0.8", StaticPolicy(Tier(depth)), closed(8, 1), 2.0, sure=EVEN)
    length = sum(0.8**i for i in range(depth + 1))
    assert sum(r.gained for r in found.rounds) / sum(r.rows for r in found.rounds) == pytest.approx(length, rel=0.02)
    # Prompts, and rounds that were dispatched for requests that have ended, take their share.
    ideal = 8 * length / DEVICE.round(depth, 8, 8 * (depth + 1), 0)
    assert 0.85 * ideal < found.tokens / found.seconds < ideal
    full = [r for r in found.rounds if r.rows == 8]
    assert all(r.seconds == pytest.approx(DEVICE.round(depth, 8, 8 * (depth + 1), 0)) for r in full)
    assert all(r.value <= r.best * (1 + 1e-9) for r in full)


def test_several_rounds_of_a_dispatch_hide_a_slow_host():
    """Single rounds take as long as the host does; of four the device's time counts, and they are told as such."""
    seconds, host = DEVICE.round(2, 4, 12, 0), 1.5 * DEVICE.round(2, 4, 12, 0)
    heard: list[RoundStats] = []

    class Told(StaticPolicy):
        def observe(self, stats: RoundStats) -> None:
            heard.append(stats)

    options: dict[str, Any] = {"sure": EVEN, "host": host}
    alone = outcome("0.8", Told(Tier(2)), closed(4, 1), 1.0, **options)
    assert statistics.median(one.seconds for one in heard if one.seconds) == pytest.approx(host)
    heard.clear()
    together = outcome("0.8", Told(Tier(2)), closed(4, 1), 1.0, **options, rounds=4)
    assert statistics.median(one.seconds for one in heard if one.dispatched == 4) == pytest.approx(seconds)
    assert sum(one.dispatched == 4 for one in heard) > 0.9 * len(heard)
    assert together.tokens / together.seconds > 1.3 * alone.tokens / alone.seconds
    assert all(200 * 0.5 <= r.tokens <= 200 * 1.5 for r in together.served), "no text is longer for it"


def test_every_request_of_a_trace_is_served_with_its_tokens():
    sizes = [(0.0, 40, 10), (0.0, 100, 1), (0.01, 7, 50), (0.5, 30, 20), (0.5, 600, 20)]
    load = Load("a trace", tuple(Arrival(at, "", prompt, output) for at, prompt, output in sizes))
    found = outcome("good", StaticPolicy(Tier(2)), load)
    assert sorted(r.tokens for r in found.served) == [1, 10, 20, 50] and found.refused == 1
    assert found.tokens == 81 and found.unfinished == 0
    assert all(r.arrival < r.first <= r.finished for r in found.served)
    # Nothing runs between two bursts.
    assert max(r.at for r in found.rounds if r.at < 0.5) < 0.2 and found.seconds > 0.5


def test_a_loop_that_grows_doubles_up_to_its_concurrency():
    load, policy = closed(6, 1), StaticPolicy(Tier(1))
    found = Simulation(machine(), tape("good"), policy, prompt=8, output=50).run(load, 0.4, doubles=0.1)
    most = [max(r.rows for r in found.rounds if first <= r.at < first + 0.1) for first in (0.0, 0.1, 0.2, 0.3)]
    assert most == [1, 2, 4, 6]


def test_preempted_requests_end_too():
    load = Load("at once", (Arrival(0.0, "", 100, 200),) * 6)
    found = outcome("good", StaticPolicy(Tier(4)), load, pages=9, buckets=(8,))
    assert found.preemptions > 0 and [r.tokens for r in found.served] == [200] * 6


def test_no_round_takes_longer_than_requests_ask_for():
    make = lambda: policies.entry("adaspec", policies.Setting(DEVICE, DEPTHS, BUCKETS, budgets=(1.0,))).make()
    most = lambda tpot: max(
        r.seconds for r in Simulation(machine(), tape("good"), make(), tpot=tpot).run(closed(4, 1), 0.5).rounds[4:]
    )
    free, least = most(None), DEVICE.round(0, 4, 4, 0)
    assert least < 0.7 * free and most(0.8 * free) <= 0.8 * free


def test_streaks_make_neighbours_alike_and_rates_no_different():
    """As on the demo's texts, whose accepted lengths have autocorrelations of 0.16 to 0.23 at lags 1 and 2."""
    plain, streaky = (tape("fair", acceptance.Reliability(streaks=share)) for share in (0.0, 0.35))
    for text, low, high in ((plain, -0.03, 0.03), (streaky, 0.12, 0.25)):
        lengths, at = [], 0
        while at < 20_000:
            lengths.append(int(text.run_KL[0, at]))
            at += lengths[-1] + 1
        off = np.asarray(lengths) - np.mean(lengths)
        assert low < (off[1:] * off[:-1]).mean() / (off * off).mean() < high
    assert (streaky.run_KL >= 1).mean() == pytest.approx((plain.run_KL >= 1).mean(), abs=0.02)
    with pytest.raises(ValueError, match=r"streaks must lie in \[0, 1\], got 1.5"):
        acceptance.Reliability(streaks=1.5)


def test_texts_do_not_depend_on_the_policy():
    """No draft that one tier saw accepted is refused to another."""
    seen: dict[int, tuple[set[int], set[int]]] = {}
    for depth in (1, 4):
        right, wrong, at = set(), set(), 0
        for r in outcome("0.7", StaticPolicy(Tier(depth)), closed(1, 1), 1.0).rounds[:20]:
            right |= set(range(at, at + r.gained - 1))
            wrong |= {at + r.gained - 1} if r.gained <= depth else set()
            at += r.gained
        seen[depth] = right, wrong
    assert min(len(places) for pair in seen.values() for places in pair) > 3
    assert not seen[1][0] & seen[4][1] and not seen[4][0] & seen[1][1]


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize("name", sorted(acceptance.GOLDEN))
def test_golden_curves_are_met(name: str):
    found = tape(name, depth=6)
    for depth, wanted in enumerate(acceptance.GOLDEN[name][:6], start=1):
        at, rounds, tokens = 0, 0, 0
        while at < acceptance.Tape.LENGTH - 8:
            step = 1 + min(depth, int(found.run_KL[0, at]))
            at, rounds, tokens = at + step, rounds + 1, tokens + step
        assert tokens / rounds == pytest.approx(wanted, rel=0.04), depth


def test_confidences_are_as_reliable_as_they_claim():
    honest = tape("good+poor")
    right = [(honest.run_KL >= d + 1).ravel()[::7].tolist() for d in range(3)]
    said = [np.prod(honest.said_KLD[:, :, : d + 1], axis=2).ravel()[::7].tolist() for d in range(3)]
    assert max(calibration_error(s, r) for s, r in zip(said, right, strict=True)) < 0.03
    assert 0.8 < honest.auc() < 0.95
    bold = tape("good+poor", acceptance.Reliability(slope=2.0, level=1.0))
    assert calibration_error(bold.said_KLD[:, :, 0].ravel()[::7].tolist(), right[0]) > 0.1
    assert tape("good+poor", acceptance.Reliability(noise=20.0)).auc() < honest.auc() - 0.05


def test_phases_and_mixtures():
    process = acceptance.parse("good/0.9:0.5+poor*3@2")
    assert [process.phase_at(t)[0] for t in (0.0, 1.9, 2.0, 4.1)] == [0, 0, 1, 2]
    assert process.phase_at(2.5) == (1, 4.0) and process.kinds["0.9:0.5"] == (0.9, 0.5)
    kinds = [process.kind(1, i / 100) for i in range(100)]
    assert kinds.count("poor") == pytest.approx(75, abs=1) and set(kinds) == {"0.9:0.5", "poor"}
    assert {process.kind(2, i / 10) for i in range(10)} == {"good"}


# ---------------------------------------------------------------- packed rounds


def _admitted(confidence: Any, depths: Any, fit: Any, eligible: Any, *, depth: int, tokens: int) -> Any:
    p = budget.calibrated(confidence, depths, fit, jnp.zeros(len(confidence)))
    survival = budget.survival(p, jnp.maximum(depths - 1, 0), depth)
    return budget.select(survival, depths, eligible, tokens).admitted


def test_packed_rounds_verify_what_the_device_would():
    rng = np.random.default_rng(0)
    b, bucket, depth = 3, 4, 4
    calibration = ((1.5, 0.2), (0.7, -0.3))
    # In one program, as on the device: one by one the operations take several times as long to compile.
    admitted = jax.jit(_admitted, static_argnames=("depth", "tokens"))
    simulation = Simulation(machine(), tape("good"), StaticPolicy(Tier(4)))
    for tokens in range(bucket, bucket * (depth + 1) + 1, 5):
        said = rng.choice([0.2, 0.5, 0.5, 0.9, 0.99], (b, depth))  # with ties
        run = rng.integers(0, depth + 1, b)
        accepted, labels = simulation._spend(Choice(Tier(depth), tokens, calibration), bucket, said, run)
        confidence = np.ones((bucket, depth + 1), np.float32)
        confidence[:b, 1:] = said
        depths = np.tile(np.arange(depth + 1, dtype=np.int32), (bucket, 1))
        fit = np.tile(np.asarray([1, 0], np.float32), (depth, 1))
        fit[:2] = calibration
        eligible = np.arange(bucket)[:, None] < b
        chosen = np.asarray(admitted(confidence, depths, fit, eligible, depth=depth, tokens=tokens))
        verified = np.frombuffer(labels.verified, np.uint8).reshape(b, depth)
        assert (verified == chosen[:b, 1:]).all(), tokens
        assert accepted.tolist() == np.minimum(run, verified.sum(axis=1)).tolist()
        known = np.frombuffer(labels.known, np.uint8).reshape(b, depth)
        assert (known.sum(axis=1) == np.minimum(accepted + 1, depth)).all()


def test_a_budget_pays_on_a_mixed_batch_and_its_rounds_are_told():
    class Listening(StaticPolicy):
        heard: list[Any]

        def observe(self, stats: Any) -> None:
            self.heard.append(stats)

    spending = Listening(Tier(4), 1.5)
    spending.heard = []
    packed = outcome("good+bad", spending, closed(8, 1), 2.0)
    whole = outcome("good+bad", StaticPolicy(Tier(4)), closed(8, 1), 2.0)
    assert packed.tokens > 1.1 * whole.tokens
    stats = spending.heard[100]
    assert stats.tokens == 20 and sum(stats.drafts.verified) == 12 and stats.drafts.nodes == 4
    assert figures.figures("x", False, packed, True).verified == pytest.approx(1.5, abs=0.02)
    assert calibration_error(packed.predicted, packed.actual) < 0.05 and figures.reliability(packed)


# ---------------------------------------------------------------- figures


def ran(ratios: list[float], phase: int) -> list[Ran]:
    return [Ran(0.0, phase, 1, None, 1, 1, 1.0, 1, ratio, 1.0) for ratio in ratios]


def test_rounds_until_a_policy_has_settled():
    rounds = [*ran([1.0] * 30, 0), *ran([0.5] * 12 + [1.0] * 30, 1), *ran([0.5] * 40, 2), *ran([1.0] * 5, 3)]
    assert figures.settled(rounds) == [11, None]
    assert figures.settled(rounds[:30]) == []


def test_attainment_is_of_plain_decodings_pace():
    served = lambda paces: Outcome(served=[Served(0.0, 1.0, 1.0 + 10 * pace, 11) for pace in paces])
    plain = served([0.1] * 9 + [0.2])
    assert figures.attainment(plain, plain) == {"0.6": 0.0, "0.8": 0.0, "1": 0.9, "1.2": 0.9, "1.4": 0.9, "1.6": 0.9}
    assert figures.attainment(served([0.05, 0.09, 0.15]), plain)["1"] == pytest.approx(2 / 3)


# ---------------------------------------------------------------- costs


def test_measured_points_are_kept_and_read_between():
    device = costs.load(STUDY)
    for row in json.loads(STUDY.read_text())["rounds"]:
        depth, batch = int(row["tier"].removeprefix("chain-").replace("off", "0")), row["batch"]
        assert device.round(depth, batch, batch * (depth + 1), batch * 1024) == pytest.approx(row["ms"] / 1e3)
    low, middle, high = (device.round(3, b, 4 * b, b * 1024) for b in (8, 16, 32))
    assert low < middle < high and device.round(3, 16, 64, 0) < device.round(4, 16, 80, 0) < device.round(5, 16, 96, 0)
    packed = [device.round(5, 32, tokens, 32 * 1024) for tokens in (32, 64, 128, 192)]
    assert packed == sorted(packed) and packed[0] > device.round(0, 32, 32, 32 * 1024)
    assert packed[-1] == device.round(5, 32, 192, 32 * 1024)
    timed = costs.Measured("x", {(0, 4, 4, 9): 1.0, (2, 4, 12, 9): 3.0, (2, 4, 6, 9): 1.5, (2, 4, 8, 9): 2.0})
    assert timed.round(2, 4, 6, 36) == 1.5 and timed.round(2, 4, 7, 36) == pytest.approx(1.75)


def test_a_profile_of_the_command_is_read(tmp_path: Path):
    path = tmp_path / "profile.json"
    rows = [
        {"tier": [d, 1, d + 1], "bucket": b, "context": c, "seconds": (1 + d) * b * (c + 100) * 1e-5}
        for d in (0, 2) for b in (1, 2) for c in (64, 128)
    ]  # fmt: skip
    head = {"format": "jaxspec-profile-1", "identity": {"device": "a cpu"}, "versions": {}}
    path.write_text(json.dumps({**head, "rounds": rows}))
    device = costs.load(path)
    assert device.measured and "a cpu" in device.label and (device.largest, device.deepest) == (2, 2)
    assert device.round(1, 2, 4, 2 * 96) == pytest.approx(2 * 2 * 196e-5)
    with pytest.raises(ValueError, match="knows batches up to 2, got 8"):
        machine(costs=device, depths=(0, 2))
    with pytest.raises(ValueError, match="knows depths up to 2, got 4"):
        machine(costs=device, buckets=(1, 2))


#: Of which a curve over the tokens of a pass cannot tell: what rows cost that are in a batch, or read for each token.
_NO_CURVE = {"a100-vicuna-expanded", "h200-formula", "h200-1b"}


@pytest.mark.parametrize("name", [*(name for name in costs.NAMES if name not in _NO_CURVE), str(STUDY)])
def test_the_calculators_costs_are_those_of_the_device(name: str):
    device = costs.load(name)
    deepest = device.deepest or 7
    curves = breakeven.curves(device, deepest)
    for batch in (1, 8, 32):
        for depth in (0, 1, deepest):
            mine = breakeven.seconds(curves, batch, 1024, depth)
            # A line cannot tell what a token costs that reads its context for itself.
            near = 0.4 if name.endswith("expanded") else 0.12
            assert mine == pytest.approx(device.round(depth, batch, batch * (depth + 1), batch * 1024), rel=near)
    least = breakeven.break_even(curves, 8, 1024, 3)
    assert least is not None and breakeven.speedup(curves, 8, 1024, 3, least) == pytest.approx(1.0, abs=1e-6)
    assert breakeven.best_depth(curves, 8, 1024, 0.02) == 0 < breakeven.best_depth(curves, 1, 1024, 0.9)


# ---------------------------------------------------------------- the command


def test_the_command_compares_every_policy_of_the_registry(tmp_path: Path, capsys: pytest.CaptureFixture):
    path, records = tmp_path / "sim.json", tmp_path / "rounds"
    argv = ["simulate", "--concurrency", "4", "--acceptance", "good/bad@0.5", "--seconds", "1.5", "--depths", "1,3"]
    assert main([*argv, "--json", str(path), "--record", str(records)]) == 0
    printed, report = capsys.readouterr().out, json.loads(path.read_text())
    assert printed.startswith("SIMULATED on published")
    (cell,) = report["cells"]
    rows = {row["policy"]: row for row in cell["policies"]}
    named = {kind.name for kind in registry.kinds() if kind.chooses and kind.drafts}
    assert named | {"off", "chain-1", "chain-3", "oracle", "sglang-default"} == rows.keys()
    assert rows[cell["best_fixed"]]["regret"] == 0 and rows["oracle"]["gap"] == 1
    assert max(row["speed"] for row in rows.values() if row["fixed"]) == rows[cell["best_fixed"]]["speed"]
    assert rows["oracle"]["speed"] > rows[cell["best_fixed"]]["speed"] and rows["oracle"]["settled"][0] == 0
    # A recorded run has the acceptance that it was run with.
    (good,) = records.glob("good_bad*chain-3*.jsonl")
    again = acceptance.recorded(str(good), acceptance.Reliability(), window=40)
    first = again.kinds[again.kind(0, 0.0)]
    assert first[0] == pytest.approx(0.88, abs=0.12) and len(again.phases) > 1


def test_policies_are_told_costs_at_contexts_that_requests_can_have():
    assert cells.told_at(16384) == policies.Setting.contexts
    assert cells.told_at(512) == (64, 512) and cells.told_at(40) == (40,)
    one = costs.table(costs.load("h100-adaspec"), [(Tier(0), 1), (Tier(2), 1)], {}, cells.told_at(40))
    assert (one.context, one.growth) == (40, 0)


def test_equal_seeds_simulate_the_same(tmp_path: Path):
    cells = []
    for i in range(2):
        path = tmp_path / f"{i}.json"
        argv = ["simulate", "--rate", "20", "--acceptance", "good+poor", "--seconds", "0.5", "--policy", "adaptive"]
        argv += ["--depths", "1,3", "--table-error", "1.7", "--carry", "--tpot-scale", "1.2"]
        assert main([*argv, "--json", str(path)]) == 0
        (cell,) = json.loads(path.read_text())["cells"]
        for row in cell["policies"]:
            del row["controller_us"], row["controller_p99"], row["faster"]
        cells.append(cell)
    assert cells[0] == cells[1] and not cells[0]["closed"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--profile", "h300"], "profile must be one of ['h100-adaspec'"),
        (["--profile", str(STUDY), "--depths", "7"], "knows depths up to 5, got 7"),
        (["--profile", str(STUDY), "--concurrency", "64"], "knows batches up to 32, got 64"),
        (["--acceptance", "great"], "acceptance must be a kind of"),
        (["--acceptance", "0.9:1.5"], "rates lie in [0, 1], got '0.9:1.5'"),
        (["--acceptance", "good/poor@0"], "'good/poor@0' ('0')"),
        (["--concurrency", "0"], "concurrency must be integers from 1 to 4096, got '0'"),
        (["--seconds", "0"], "seconds must be above 0, got 0.0"),
        (["--noise", "2"], "noise must lie in [0, 1)"),
        (["--rounds-per-dispatch", "0"], "rounds-per-dispatch must lie in [1, 64] and host-ms in [0, 1000), got 0 and"),
        (["--grow", "0"], "grow must be a finite number of seconds above 0, got 0.0"),
        (["--tpot-scale", "0"], "tpot-scale must lie in (0, 100), got 0.0"),
        (["--policy", "bold"], "policy must be one of"),
        (["--policy", "adaptive [1]"], "a JSON object of settings, got '[1]'"),
        (["--policy", "sglang-bold"], "SGLang's presets are"),
        (["--policy", 'static {"depth": 9}'], "may run ['chain-9']"),
        (["--trace", "absent.csv"], "cannot be read"),
        (["--json", "/absent/sim.json"], "its directory does not exist"),
    ],
)
def test_bad_options_are_refused_with_both_values(argv: list[str], message: str, capsys: pytest.CaptureFixture):
    assert main(["simulate", "--seconds", "0.05", "--concurrency", "1", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_bound_that_knows_everything_is_never_beaten_by_a_tier():
    found = {
        one.name: outcome("good/bad@0.3", one.make(), closed(4, 1), 0.7)
        for one in (*policies.fixed(DEPTHS), policies.entry("oracle", policies.Setting(DEVICE, DEPTHS, BUCKETS)))
    }
    bound = found.pop("oracle")
    assert all(bound.tokens > other.tokens for other in found.values())
    assert figures.settled(bound.rounds)[0] == 0


def test_it_runs_without_jax():
    block = "import sys; sys.modules |= dict.fromkeys(('jax', 'jaxlib', 'flax', 'grpc'))\n"
    code = block + "from jaxspec.bench.__main__ import main; sys.exit(main(sys.argv[1:]))"
    argv = ["simulate", "--concurrency", "1", "--seconds", "0.05", "--acceptance", "good", "--policy", "adaptive"]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and "adaptive" in done.stdout, done.stderr


def test_drafts_are_not_free_at_batch_1_where_tokens_choose_experts():
    """128 experts of which a token uses 8: 8, 29 and 112 of them for 1, 4 and 32 tokens."""
    dense, moe = (costs.load(f"h200-roofline{model}") for model in ("", "-30b-a3b"))
    verify = lambda of, tokens: of.round(0, 1, tokens, 0.0)
    assert verify(dense, 4) == verify(dense, 1)
    read = lambda experts: 2.46e9 + 57.98e9 * experts / 128
    assert verify(moe, 4) / verify(moe, 1) == pytest.approx(read(29.1) / read(8), rel=2e-3)
    assert verify(moe, 32) / verify(moe, 1) == pytest.approx(read(111.8) / read(8), rel=2e-3)


# ---------------------------------------------------------------- the study over many cells


def test_rounds_of_whole_queues_are_costs_too():
    told = json.loads((ROOT / "docs/bench_cpu.json").read_text())
    device = costs.load(ROOT / "docs/bench_cpu.json", catch_up_rate=5e4)
    assert device.measured and (device.largest, device.deepest) == (16, 4)
    chains = [row for row in told["summaries"] if row["mode"] == "chain-4" and row["batch_size"] == 4]
    rounds = [4 * row["mean_accepted_length"] / row["steady_state"]["tokens_per_second"] for row in chains]
    assert device.round(4, 4, 20, 600) == pytest.approx(sum(rounds) / len(rounds))
    assert formulas.CATCH_UP == draft_cache.CATCH_UP  # which needs JAX, and this does not
    assert device.catching_up(4, 600) == pytest.approx(4 * formulas.CATCH_UP / 5e4)


def test_the_formula_is_within_four_percent_of_what_was_measured():
    for name in ("rounds", "packed"):
        for row in json.loads((ROOT / f"docs/h200/{name}.json").read_text())["rounds"]:
            depth, batch = int(row["tier"].removeprefix("chain-").replace("off", "0")), row["batch"]
            tokens = row.get("tokens") or batch * (depth + 1)
            assert formulas.H200.round(depth, batch, tokens, 0) == pytest.approx(row["ms"] / 1e3, rel=0.04)


def test_the_study_compares_policies_with_the_best_fixed_tier_of_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    cell = regret.Cell("H200", 8, "good/poor", 100, 2, phase=40)
    monkeypatch.setitem(regret.SETS, "default", [cell])
    static = 'static {"depth": 3}'
    command = ["--policy", "adaptive", "--policy", static, "--json", str(tmp_path / "found.json")]
    assert regret.main(command) == 0
    found = json.loads((tmp_path / "found.json").read_text())["cells"]
    adaptive, fixed = found
    assert [row["policy"] for row in found] == ["adaptive", static]
    # The policy that runs one tier is that tier, seed for seed, and never changes it.
    assert fixed["speeds"][static] == fixed["speeds"]["chain-3"] and fixed["switches"] == 0 and fixed["drafted"] == 1
    best = fixed["speeds"][fixed["best"]]
    for row in found:
        mine = row["speeds"][row["policy"]]
        assert row["regret"] == pytest.approx(sum(1 - a / b for a, b in zip(mine, best, strict=True)) / 2, abs=1e-4)
        assert row["plain"] == pytest.approx(
            sum(a / b for a, b in zip(mine, row["speeds"]["off"], strict=True)) / 2, rel=1e-4
        )
        assert row["best"] == max(("off", "chain-1", "chain-3", "chain-5"), key=lambda name: sum(row["speeds"][name]))
    assert 0 < adaptive["switches"] < 100 and len(adaptive["better"]) + len(adaptive["worse"]) > 1
    told = capsys.readouterr().out
    assert "H200, 8, good/poor, 100" in told and "within 20 rounds" in told
    assert regret.main(["--match", "nothing"]) == 2 and "no cell of 'default'" in capsys.readouterr().err


def test_changes_for_the_better_and_for_the_worse_are_told_apart():
    ran = lambda phase, value: Ran(0.0, phase, 1, None, 1, 1, 1.0, 1, value, 1.0)
    rounds = [ran(0, 1.0)] * 30 + [ran(1, 0.5)] * 10 + [ran(1, 1.0)] * 20 + [ran(2, 1.0)] * 30 + [ran(3, 1.0)] * 5
    assert figures.changes(rounds) == [(1, 9), (2, 0)]  # nine of ten windows hold a bad round too many
    assert regret.median([4, None, None]) is None and regret.median([4, 8, None]) == 8 and regret.median([]) is None
