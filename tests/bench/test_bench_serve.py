"""A load on a server: the command line, and runs against a server that is none."""

# ruff: noqa: N802 (gRPC's names)

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxspec.bench import __main__ as bench_command
from jaxspec.bench.offline.report import WIDTH
from jaxspec.bench.offline.workloads import Passage, built_in
from jaxspec.bench.online import arrivals, command, overhead, report, sender, traces
from jaxspec.bench.online import session as sessions
from jaxspec.bench.online.arrivals import Arrival, Load
from jaxspec.bench.online.records import (
    INCOMPLETE,
    INTERRUPTED,
    OK,
    Objectives,
    summarize,
)
from jaxspec.bench.online.session import Session, Wanted
from serve.client import AsyncClient
from serve.proto import admin_pb2, generation_pb2
from serve.proto.services import ADMIN, GENERATION, add_to

# The command line.

BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
45,GPT-4,40,7,47,Conversation log
5,ChatGPT,472,18,490,Conversation log
118,ChatGPT,1087,0,1087,API log
"""


def wanted(*argv: str) -> Wanted:
    args = command.parser().parse_args(argv)
    command.check(args)
    return command.wanted_of(args)


def test_defaults():
    plain = wanted()
    assert plain.load == arrivals.closed(4, 64) and not plain.compare and sorted(plain.library) == ["code", "prose"]
    both = wanted("--compare")
    assert both.load is None and both.compare and both.repeats == 3 and both.duration == 40.0
    assert wanted("--compare", "--concurrency", "2").load == arrivals.closed(2, 64)


def test_arrivals_from_flags(tmp_path: Path):
    trace = tmp_path / "t.csv"
    trace.write_text(BURST_GPT)
    assert wanted("--rate", "3", "--requests", "9").load == arrivals.random_process(3.0, 9)
    gamma = wanted("--rate", "3", "--burstiness", "0.5", "--seed", "4").load
    assert gamma == arrivals.random_process(3.0, 64, burstiness=0.5, seed=4)
    timed = wanted("--rate", "50", "--duration", "4").load
    assert timed is not None and 3.5 < timed.arrivals[-1].at < 4 and 150 < len(timed.arrivals) < 250
    on_off = wanted("--rate", "8", "--bursty", "2,3.5", "--off-rate", "1", "--duration", "20").load
    assert on_off == arrivals.on_off(8.0, 1.0, 2.0, 3.5, 20.0)
    assert wanted("--trace", str(trace), "--speed-up", "2").load == traces.read(trace, speed_up=2.0)
    assert wanted("--trace", "synthetic", "--rate", "5").load == arrivals.synthetic(5.0, 40.0)
    assert wanted("--trace", "synthetic").load is None
    assert wanted("--workloads", "prose").library == {"prose": built_in()["prose"]}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--concurrency", "0"], "concurrency must be at least 1, got 0"),
        (["--concurrency", "2", "--rate", "3"], "--rate 3.0 does not go with --concurrency 2"),
        (["--burstiness", "2"], "--burstiness 2.0 needs --rate"),
        (["--rate", "1", "--off-rate", "1"], "--off-rate 1.0 is for --bursty"),
        (["--rate", "1", "--bursty", "x"], "bursty must be two numbers of seconds such as 2,8, got 'x'"),
        (["--trace", "t.csv", "--rate", "1"], "--rate 1.0 does not go with --trace t.csv, which has its own"),
        (["--speed-up", "2"], "--speed-up 2.0 is for trace files"),
        (["--compare", "--requests", "5"], "--requests 5 does not go with the synthetic trace; give --duration"),
        (["--repeats", "5"], "--repeats 5 is for --compare and --overhead"),
        (["--target", "a:1", "--model", "demo"], "--model demo is for an own server, got --target a:1"),
        (["--token-file", "f"], "--token-file f is for a server that runs, got no --target"),
        (["--overhead", "--rate", "1"], "--rate 1.0 does not go with --overhead"),
        (["--overhead", "--max-tokens", "1"], "max-tokens must be at least 2 with --overhead, got 1"),
        (["--batch-sizes", "1"], "--batch-sizes 1 is for --overhead"),
        (["--same-process"], "--same-process True is for --overhead"),
        (["--overhead", "--stub-round-ms", "0"], "stub-round-ms must lie above 0 and be at most 1000, got 0.0"),
        (["--overhead", "--stub-round-ms", "1", "--model", "m"], "--model m does not go with --stub-round-ms 1.0"),
        (["--overhead", "--batch-sizes", "1,x"], "batch-sizes must be integers from 1 to 9999 such as 1,16, got '1,x'"),
        (["--workloads", "poems"], "workloads must be among .'code', 'prose'., got 'poems'"),
        (["--slo-ttft-ms", "-1"], "slo-ttft-ms must be above 0, got -1"),
        (["--timeout", "0"], "timeout must be above 0, got 0.0"),
        (["--json", "/nowhere/x.json"], "--json '/nowhere/x.json': its directory does not exist"),
    ],
)
def test_bad_options_are_named(capsys: pytest.CaptureFixture[str], argv: list[str], message: str):
    assert bench_command.main(["serve", *argv]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and re.search(message, errors), errors


# A server that is none: every token takes its time, some prompts fail.


class Fake:
    """Streams max_tokens in bursts of two, and notes what it was asked.

    Attributes:
      policies, routes, flushed: in order. hang: the requests never end. gone: the server answers nothing.
      together: nobody is answered before so many were live at once.
      policy: what it began with; one that is static has its tier and no other.
    """

    def __init__(self, tiers: tuple[str, ...] = ("off", "chain-1", "chain-3"), policy: str = "adaptive"):
        self.tiers, self.policy, self.gone = tiers, policy, False
        self.policies: list[str] = []
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.live = self.most = self.flushed = self.together = 0
        self.hang = False
        self.fail: Callable[[generation_pb2.GenerateRequest], grpc.StatusCode | None] = lambda request: None

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        self.requests.append(request)
        code = self.fail(request)
        if code is not None:
            await context.abort(code, "as it was told")
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            while self.most < self.together:
                await asyncio.sleep(0.002)
            count = len(request.tokens.ids) or len(request.text)
            yield generation_pb2.GenerateStreamResponse(prompt=generation_pb2.PromptInfo(prompt_tokens=count))
            yield generation_pb2.GenerateStreamResponse(delta=generation_pb2.Delta())  # a character in two halves
            left = request.sampling.max_tokens
            while left:
                await asyncio.sleep(0.002)
                if self.hang:
                    await asyncio.sleep(60)
                now = min(2, left)
                left -= now
                yield generation_pb2.GenerateStreamResponse(delta=generation_pb2.Delta(token_ids=[7] * now))
            stats = generation_pb2.SpeculationStats(num_spec_steps=4, num_draft_tokens=12, num_accepted_draft_tokens=4)
            done = generation_pb2.Finished(reason=generation_pb2.FINISH_REASON_LENGTH, speculation=stats)
            if request.route != "unfinished":
                yield generation_pb2.GenerateStreamResponse(finished=done)
        finally:
            self.live -= 1

    async def Tokenize(self, request: Any, context: Any) -> generation_pb2.TokenizeResponse:
        return generation_pb2.TokenizeResponse(ids=list(request.text.encode()))

    async def GetServerInfo(self, request: Any, context: Any) -> admin_pb2.GetServerInfoResponse:
        if self.gone:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return admin_pb2.GetServerInfoResponse(
            model="fake", drafter="none", policy=self.policy, active_tier=self.tiers[-1],
            verification="coupled", device="cpu", dtype="float32",
            max_seq_len=512, max_batch_size=4, tiers=self.tiers, buckets=[4],
            rounds_by_tier={"off": len(self.requests)},
        )  # fmt: skip

    async def FlushCache(self, request: Any, context: Any) -> admin_pb2.FlushCacheResponse:
        self.flushed += 1
        return admin_pb2.FlushCacheResponse()

    async def SetSpeculation(self, request: Any, context: Any) -> admin_pb2.SetSpeculationResponse:
        self.policies.append(request.policy + (f"-{request.depth}" if request.HasField("depth") else ""))
        if self.policy == "static" and request.policy != "static":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "one tier is compiled")
        if request.HasField("depth") and request.depth == 3:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "depth 3 is not compiled")
        return admin_pb2.SetSpeculationResponse()


def served(fake: Fake, use: Callable[[str], Any]) -> Any:
    """What `use` makes of a port where the fake answers."""

    async def go() -> Any:
        server = grpc.aio.server()
        add_to(server, GENERATION, fake)
        add_to(server, ADMIN, fake)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await use(f"127.0.0.1:{port}")
        finally:
            await server.stop(None)

    return asyncio.run(go())


def session_of(fake: Fake, asked: Wanted) -> Session:
    async def use(target: str) -> Session:
        async with AsyncClient(target) as client:
            session = Session(client, asked, target)
            await session.go()
            return session

    return served(fake, use)


SHORT = {
    "code": [Passage("code", 0, "def f():"), Passage("code", 1, "class A:")],
    "prose": [Passage("prose", 0, "In the")],
}


def asking(load: Load | None, **fields: Any) -> Wanted:
    given: dict[str, Any] = {"library": SHORT, "sending": sender.Sending(timeout=60.0), "max_tokens": 6}
    return Wanted(load, **{**given, **fields})


def test_a_closed_loop_keeps_its_places_full_and_records_every_token():
    fake = Fake()
    slo = Objectives(ttft_ms=60_000, tpot_ms=60_000)
    session = session_of(fake, asking(arrivals.closed(3, 12), sending=sender.Sending(slo=slo), warmup=2))
    made = session.report(interrupted=False)
    assert made is not None and not made.failures and len(made.runs) == 1
    records = made.runs[0].records
    assert len(records) == 12 and len(fake.requests) == 12 + 2 and fake.most == 3
    for r in records:
        assert (r.output_tokens, r.first_tokens, [n for _, n in r.gaps]) == (6, 2, [2, 2])
        assert r.first is not None and r.sent < r.first < r.ended and (r.rounds, r.drafted, r.accepted) == (4, 12, 4)
        assert 0 < sum(gap for gap, _ in r.gaps) <= r.ended - r.first + 1e-6
    assert {r.prompt_tokens for r in records} <= {8, 6}
    sent = fake.requests[-1]
    assert (sent.slo.ttft_ms, sent.slo.tpot_ms) == (60_000, 60_000) and sent.sampling.ignore_eos
    assert sent.route in ("code", "prose") and made.runs[0].tier_rounds == {"off": 12}
    assert summarize("all", records, slo).attained == 1.0
    assert report.render(made) and not fake.policies and not fake.flushed


def test_open_loops_do_not_wait_for_answers():
    fake = Fake()
    fake.together = 5  # more than a batch
    load = Load("all at once", tuple(Arrival(0.001 * i, "", 10, 6) for i in range(20)))
    made = session_of(fake, asking(load, warmup=0)).report(interrupted=False)
    assert made is not None and fake.most >= 5 and not made.failures
    assert [len(request.tokens.ids) for request in fake.requests] == [10] * 20
    due = {r.index: r.due for r in made.runs[0].records}
    assert due == {i: pytest.approx(0.001 * i) for i in range(20)}
    assert all(r.lag >= 0 for r in made.runs[0].records)


def test_errors_are_recorded_by_status():
    fake = Fake()
    codes = {0: grpc.StatusCode.RESOURCE_EXHAUSTED, 1: grpc.StatusCode.INTERNAL}
    fake.fail = lambda request: codes.get(request.sampling.seed)
    made = session_of(fake, asking(arrivals.closed(1, 5), warmup=0)).report(interrupted=False)
    assert made is not None
    assert sorted(r.status for r in made.runs[0].records) == ["INTERNAL", OK, OK, OK, "RESOURCE_EXHAUSTED"]
    assert {r.message for r in made.failures} == {"as it was told"} and "INTERNAL: as it was told" in report.render(
        made
    )


def test_a_stream_without_an_end_is_an_error():
    library = {"unfinished": [Passage("unfinished", 0, "so")]}
    made = session_of(Fake(), asking(arrivals.closed(1, 1), library=library, warmup=0)).report(interrupted=False)
    assert made is not None and [r.status for r in made.runs[0].records] == [INCOMPLETE] and len(made.failures) == 1


def test_a_comparison_interleaves_its_repeats_and_names_what_the_server_refuses():
    fake = Fake()
    load = arrivals.on_off(400.0, 50.0, 0.05, 0.05, 0.2)
    made = session_of(fake, asking(load, compare=True, repeats=2, warmup=1)).report(interrupted=False)
    assert made is not None
    assert [(run.mode, run.repeat) for run in made.runs] == [
        (mode, repeat) for repeat in (0, 1) for mode in ("off", "chain-1", "adaptive")
    ]
    assert fake.policies == [
        "off", "static-1", "static-3", "adaptive", "off", "static-1", "adaptive", "adaptive",
    ]  # fmt: skip
    assert made.skipped == {"chain-3": "depth 3 is not compiled"} and fake.flushed == 6
    assert {v.phase for v in made.judged} == {"on", "off"} and all(len(v.values) == 3 for v in made.judged)
    sizes = {tuple(sorted(r.index for r in run.records)) for run in made.runs}
    assert len(sizes) == 1  # every mode got the same requests
    assert "adaptive against" in report.render(made)


def test_a_comparison_sets_the_server_s_policy_back():
    fake = Fake(("chain-1",), policy="static")
    made = session_of(fake, asking(arrivals.closed(2, 4), compare=True, warmup=0)).report(interrupted=False)
    assert made is not None and [run.mode for run in made.runs] == ["chain-1"]
    assert made.skipped == dict.fromkeys(("off", "adaptive"), "one tier is compiled")
    assert fake.policies == ["off", "static-1", "adaptive", "static-1"]


def test_what_was_measured_is_reported_where_the_server_dies(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fake, path = Fake(), tmp_path / "load.json"
    fake.fail = lambda request: setattr(fake, "gone", True)
    argv = ["--compare", "--concurrency", "1", "--requests", "2", "--max-tokens", "4", "--warmup", "0"]

    async def use(target: str) -> int:
        return await asyncio.to_thread(bench_command.main, ["serve", "--target", target, *argv, "--json", str(path)])

    assert served(fake, use) == 1
    assert "UNAVAILABLE: gone" in capsys.readouterr().err
    data = json.loads(path.read_text())
    assert data["interrupted"] and [run["all"]["requests"] for run in data["runs"]] == [2]


def test_the_shipped_trace_is_scaled_to_what_the_server_takes(monkeypatch: pytest.MonkeyPatch):
    """As on a machine that never stalls: of a server that takes a few requests a second, none would come."""
    monkeypatch.setattr(sessions, "span", lambda records, span=sessions.span: min(span(records), 0.1))
    fake = Fake()
    made = session_of(fake, asking(None, duration=0.3, warmup=0)).report(interrupted=False)
    assert made is not None and made.plan.load.source.startswith("synthetic bursty trace at ")
    assert float(made.plan.load.source.removesuffix("/s").rpartition(" ")[2]) >= 120
    assert len(fake.requests) == 12 + len(made.plan.requests)  # three full batches measured it
    assert {r.phase for r in made.runs[0].records} <= {p.name for p in made.plan.load.phases}


def test_an_interruption_keeps_what_had_ended():
    fake = Fake()
    fake.fail = lambda request: setattr(fake, "hang", len(fake.requests) > 2)

    async def use(target: str) -> Session:
        async with AsyncClient(target) as client:
            session = Session(client, asking(arrivals.closed(1, 6), warmup=0), target)
            task = asyncio.create_task(session.go())
            while not (fake.hang and fake.live):
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return session

    made = served(fake, use).report(interrupted=True)
    assert made is not None and [r.status for r in made.runs[0].records] == [OK, OK, INTERRUPTED]
    assert not made.failures and "INTERRUPTED: 3 requests were sent" in report.render(made)


def test_the_command_writes_table_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fake = Fake()
    files = [tmp_path / "load.json", tmp_path / "load.png"]
    argv = [
        "--concurrency",
        "2",
        "--requests",
        "4",
        "--max-tokens",
        "4",
        "--json",
        str(files[0]),
        "--plot",
        str(files[1]),
    ]

    async def use(target: str) -> int:
        return await asyncio.to_thread(bench_command.main, ["serve", "--target", target, *argv])

    assert served(fake, use) == 0
    printed = capsys.readouterr().out
    assert "closed loop of 2: 4 requests" in printed and f"wrote {files[0]}" in printed
    data = json.loads(files[0].read_text())
    assert data["runs"][0]["all"]["requests"] == 4 and data["conditions"]["model"] == "fake"
    assert files[1].read_bytes()[:4] == b"\x89PNG"
    fake.fail = lambda request: grpc.StatusCode.INTERNAL
    assert served(fake, use) == 1


def test_a_server_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]):
    assert bench_command.main(["serve", "--target", "127.0.0.1:1"]) == 1
    assert "error: the server at 127.0.0.1:1 says UNAVAILABLE" in capsys.readouterr().err


# Overhead.


def test_overhead_verdicts():
    side = lambda tpot, wall, cpu: overhead.Side(tpot, wall, cpu, (1.0, 1.0, 3.0), (1000, 1000, 1000))
    offline = side((0.010, 0.020, 0.010), (1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    cell = overhead.Cell("adaptive", 1, offline, side((0.0105, 0.0212, 0.0150), (1.2, 1.1, 1.0), (2.2, 2.2, 2.2)))
    assert cell.ratio == pytest.approx(1.06) and cell.holds
    words = overhead.line(cell)
    assert "1.060 (1.05-1.50)  holds (1.10)\n" in words and "wall 1.100, cpu 1.100: " in words
    assert "2000 -> 2200 us a round, the server's 1000" in words and max(map(len, words.splitlines())) <= WIDTH
    slow = overhead.Cell("adaptive", 16, offline, side((0.012, 0.024, 0.015), (1.0, 1.0, 1.0), (2.0, 2.0, 2.0)))
    assert slow.ratio == pytest.approx(1.2) and slow.holds is False and "MORE than 1.10" in overhead.line(slow)
    assert dataclasses.replace(cell, batch_size=4).holds is None
    measurement = overhead.Measurement(overhead.Plan(), print)
    measurement.cells = [cell]
    data = json.loads(json.dumps(overhead.to_dict(measurement, interrupted=True)))
    assert data["cells"][0]["ratio"] == pytest.approx(1.06) and data["interrupted"]
    assert data["cells"][0]["serving"]["wall"] == [1.2, 1.1, 1.0]
