"""python -m jaxspec.bench.studies.controller: what the default policy takes of the processor for a round.

Simulated rounds are recorded once and then given to fresh policies again and again; of each round counts the shortest
time, for on a machine that does other things the mean of one run says more of these. `bench simulate` gives the mean
and the 99th percentile of a single run; on a server, whose caches hold other things between rounds, it takes longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from jaxspec import cli
from jaxspec.adaptive.policy import BatchView, RoundStats, TierPolicy
from jaxspec.bench.offline.metrics import percentile
from jaxspec.bench.online.arrivals import closed
from jaxspec.bench.simulate import acceptance, costs, policies, tables
from jaxspec.bench.simulate.engine import Simulation
from jaxspec.bench.simulate.records import Machine
from jaxspec.config import EngineConfig
from jaxspec.tier import Choice, Tier

_DEPTHS = (0, 1, 2, 3, 5, 7)


class _Noted:
    """A policy that notes what it is asked and told, in order."""

    def __init__(self, policy: TierPolicy) -> None:
        self.policy, self.tiers = policy, policy.tiers
        self.heard: list[BatchView | RoundStats] = []

    def select(self, view: BatchView) -> Tier | Choice:
        self.heard.append(view)
        return self.policy.select(view)

    def observe(self, stats: RoundStats) -> None:
        self.heard.append(stats)
        self.policy.observe(stats)

    def learn(self, tier: Tier, bucket: int, seconds: float, tokens: int | None = None) -> None:
        self.policy.learn(tier, bucket, seconds, tokens)

    def buckets_for(self, tier: Tier, buckets: tuple[int, ...]) -> tuple[int, ...]:
        return self.policy.buckets_for(tier, buckets)


def microseconds(batch: int, texts: str, seconds: float, repeats: int) -> list[float]:
    """Of each round of a closed loop over so many simulated seconds, selection and observation together."""
    device, buckets = costs.load("h100-adaspec"), EngineConfig(max_batch_size=batch).buckets
    made = policies.entry("adaptive", policies.Setting(device, _DEPTHS, buckets, budgets=(2.0, 4.0)))
    tape = acceptance.Tape(acceptance.parse(texts), 0, _DEPTHS[-1])
    noted = _Noted(made.make())
    Simulation(Machine(device, _DEPTHS, buckets, 512, noise=0.02), tape, noted).run(closed(batch, 1), seconds)
    runs: list[list[float]] = []
    for _ in range(repeats):
        policy, times = made.make(), list[float]()
        for heard in noted.heard:
            began = time.thread_time()
            if isinstance(heard, BatchView):
                policy.select(heard)
                times.append(time.thread_time() - began)
            else:
                policy.observe(heard)
                times[-1] += time.thread_time() - began
        runs.append(times)
    return [1e6 * min(times) for times in zip(*runs, strict=True)]


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.bench.studies.controller", description=(__doc__ or "").split("\n\n")[0],
        formatter_class=cli.Help,
    )  # fmt: skip
    p.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256], help="requests at once")
    p.add_argument("--texts", nargs="+", default=["good", "poor", "good+poor"], help="as of `bench simulate`")
    p.add_argument("--seconds", type=float, default=10.0, help="simulated")
    p.add_argument("--repeats", type=int, default=8, help="of which the shortest counts, for each round")
    p.add_argument("--json", metavar="FILE", help="the table's rows (default: not written)")
    args = cli.parse(p, argv)
    rows = []
    print(
        f"{'batch':>5}  {'texts':<12}{'rounds':>7}{'mean':>6}{'p50':>6}{'p90':>6}{'p99':>6}{'most':>6}  (microseconds)"
    )
    for batch in args.batch:
        for texts in args.texts:
            found = microseconds(batch, texts, args.seconds, args.repeats)
            shares = {f"p{100 * share:.0f}": percentile(found, share) for share in (0.5, 0.9, 0.99)}
            parts = {"mean": statistics.mean(found), **shares, "most": max(found)}
            rows.append({"batch": batch, "texts": texts, "rounds": len(found), **parts})
            print(f"{batch:>5}  {texts:<12}{len(found):>7}" + "".join(f"{x:>6.0f}" for x in parts.values()), flush=True)
    if args.json:
        tables.write({"microseconds": rows, "seconds": args.seconds, "repeats": args.repeats}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
