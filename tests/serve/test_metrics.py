"""What is counted, under which names and labels, what a scrape says, and whether the dashboard asks for what exists."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from jaxspec.adaptive.policy import RoundStats
from jaxspec.bench.offline.workloads import Passage
from jaxspec.bench.online import host
from jaxspec.bench.online.arrivals import closed
from jaxspec.bench.online.records import Objectives
from jaxspec.bench.online.sender import Sending
from jaxspec.bench.online.session import Session, Wanted
from jaxspec.request import FinishReason, RequestMetrics
from jaxspec.stats import EngineStats
from jaxspec.tier import PLAIN, Tier
from serve.app import Server
from serve.client import AsyncClient
from serve.config import ServerConfig
from serve.telemetry.metrics import MAX_LABELS, STATES, ServerMetrics

DASHBOARD = Path(__file__).resolve().parents[2] / "serve" / "dashboards" / "jaxspec.json"
BASE = {"model_name": "demo", "engine": "0"}


@dataclasses.dataclass
class Request:
    route: str = ""
    tpot_ms: float | None = None
    ttft_ms: float | None = None


def engine_stats(**fields: Any) -> EngineStats:
    given = {
        "warmup_seconds": 1.0, "startup_seconds": 0.5, "executables": 8, "executables_ready": 8,
        "compilations_after_warmup": 0, "steps": 0, "rounds": 0,
        "starved_rounds": 0, "device_seconds": 0.0, "host_seconds": 0.0, "switches": 0, "rounds_by_tier": {},
        "preemptions": 0, "prefix_hits": 0, "prefix_queries": 0, "free_pages": 0, "cached_pages": 0,
        "lossless": True, "running": 0, "waiting": 0, "active_tier": "",
    }  # fmt: skip
    return EngineStats(**{**given, **fields})


def ended(**fields: Any) -> RequestMetrics:
    """Arrives at 0, scheduled at 0.1, first token at 0.3, ends at 1.3 with 11 tokens: TTFT 0.3 s, TPOT 0.1 s."""
    given = {
        "rounds": 4, "drafted": 12, "accepted": 6, "output_tokens": 11, "arrival_time": 0.0,
        "first_scheduled_time": 0.1, "first_token_time": 0.3, "finished_time": 1.3,
    }  # fmt: skip
    return RequestMetrics(**{**given, **fields})


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {**BASE, **labels})


@pytest.fixture
def metrics() -> Iterator[ServerMetrics]:
    made = ServerMetrics("demo")
    yield made
    made.close()


def test_vllms_names_are_there_with_its_labels(metrics: ServerMetrics):
    busy(metrics)
    found = {(s.name, tuple(sorted(s.labels))) for family in metrics.registry.collect() for s in family.samples}
    base = ("engine", "model_name")
    for name in (
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total", "vllm:num_requests_running", "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "jaxspec:num_steps", "jaxspec:tier_switches_total", "jaxspec:compiles_after_warmup_total",
    ):  # fmt: skip
        assert (name, base) in found, name
    assert ("vllm:spec_decode_num_accepted_tokens_per_pos_total", (*base, "position")) in found
    assert ("vllm:request_success_total", ("engine", "finished_reason", "model_name")) in found
    assert ("jaxspec:tier_rounds_total", ("bucket", *base, "tier")) in found
    for name in (
        "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
    ):  # fmt: skip
        assert (f"{name}_bucket", ("engine", "le", "model_name")) in found, name
        assert (f"{name}_sum", base) in found and (f"{name}_count", base) in found
        low = [float(s.labels["le"]) for f in metrics.registry.collect() if f.name == name for s in f.samples
               if s.name.endswith("_bucket")]  # fmt: skip
        assert sum(bound < 0.01 for bound in low) >= 3, name


def busy(metrics: ServerMetrics) -> None:
    """Everything happens once."""
    metrics.on_round(RoundStats(Tier(3), 4, 4, (0, 1, 3, 3)))
    metrics.on_round(RoundStats(PLAIN, 4, 4, (0, 0, 0, 0)))
    metrics.on_stats(engine_stats(running=2, waiting=5, free_pages=50, cached_pages=25, steps=7), pages=100)
    metrics.on_tokens(Request(), 1, None)
    metrics.on_tokens(Request(), 4, 0.02)
    metrics.on_finished(Request("code", 200.0, 200.0), "stop", 100, ended())
    metrics.on_refused("RESOURCE_EXHAUSTED", "queue")
    metrics.on_state("serving")


def test_rounds(metrics: ServerMetrics):
    metrics.on_round(RoundStats(Tier(3), 4, 4, (0, 1, 3, 3)))
    metrics.on_round(RoundStats(Tier(3), 1, 2, (2,)))
    assert value(metrics, "jaxspec:num_steps") == 3 and value(metrics, "jaxspec:tier_switches_total") == 0
    metrics.on_round(RoundStats(PLAIN, 3, 4, (0, 0, 0)))
    metrics.on_round(RoundStats(Tier(2, 2, 5), 2, 2, (2, 1)))
    assert value(metrics, "jaxspec:num_steps") == 2 and value(metrics, "jaxspec:tier_switches_total") == 2
    assert value(metrics, "jaxspec:tier_rounds_total", tier="chain-3", bucket="4") == 1
    assert value(metrics, "jaxspec:tier_rounds_total", tier="chain-3", bucket="2") == 1
    assert value(metrics, "jaxspec:tier_rounds_total", tier="off", bucket="4") == 1
    # Plain rounds draft nothing; a tree of 5 nodes verifies 4 drafts a row.
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 4 + 1 + 2
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 3 * 5 + 4 * 2
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 7 + 2 + 3
    at = [value(metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
    assert at == [3 + 1 + 2, 2 + 1 + 1, 2]


def test_rows_that_could_not_accept_the_whole_tier_are_not_counted(metrics: ServerMetrics):
    metrics.on_round(RoundStats(Tier(3), 4, 4, (3, 0)))
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 2
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 6


def test_the_engines_totals_become_counters_and_survive_a_new_engine(metrics: ServerMetrics):
    metrics.on_stats(engine_stats(prefix_hits=10, prefix_queries=40, host_seconds=1.5, preemptions=3), pages=10)
    metrics.on_stats(engine_stats(prefix_hits=10, prefix_queries=60, host_seconds=2.0, preemptions=3), pages=10)
    assert value(metrics, "vllm:prefix_cache_hits_total") == 10
    assert value(metrics, "vllm:prefix_cache_queries_total") == 60
    assert value(metrics, "jaxspec:host_seconds_total") == 2.0
    metrics.on_stats(engine_stats(prefix_queries=5, preemptions=1), pages=10)
    assert value(metrics, "vllm:prefix_cache_queries_total") == 65
    assert value(metrics, "vllm:num_preemptions_total") == 4


def test_gauges_follow_the_engine(metrics: ServerMetrics):
    metrics.on_compiled(3, 40)
    assert (value(metrics, "jaxspec:executables_ready"), value(metrics, "jaxspec:executables")) == (3, 40)
    metrics.on_stats(engine_stats(running=2, waiting=5, free_pages=50, cached_pages=25), pages=100)
    assert value(metrics, "vllm:num_requests_running") == 2 and value(metrics, "vllm:num_requests_waiting") == 5
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert [value(metrics, f"jaxspec:{n}") for n in ("pages", "free_pages", "cached_pages")] == [100, 50, 25]
    metrics.on_stats(engine_stats(free_pages=100), pages=100)
    assert value(metrics, "vllm:num_requests_running") == 0 and value(metrics, "vllm:kv_cache_usage_perc") == 0


def test_a_burst_counts_once_a_token(metrics: ServerMetrics):
    name = "vllm:inter_token_latency_seconds"
    metrics.on_tokens(Request(), 1, None)
    metrics.on_tokens(Request(), 4, 0.02)  # four gaps of 5 ms
    metrics.on_tokens(Request(), 1, 0.3)
    metrics.on_tokens(Request(), 0, 0.1)
    assert value(metrics, "vllm:generation_tokens_total") == 6
    assert value(metrics, f"{name}_count") == 5
    assert value(metrics, f"{name}_sum") == pytest.approx(0.32)
    # Upper bounds belong to their buckets, as everywhere in Prometheus.
    assert value(metrics, f"{name}_bucket", le="0.004") == 0 and value(metrics, f"{name}_bucket", le="0.005") == 4
    assert value(metrics, f"{name}_bucket", le="0.3") == 5 and value(metrics, f"{name}_bucket", le="+Inf") == 5


def test_latencies_are_those_of_completions_that_ended_well(metrics: ServerMetrics):
    metrics.on_finished(Request(), FinishReason.STOP, 10, ended())
    metrics.on_finished(Request(), "length", 10, ended(output_tokens=1))  # no TPOT
    metrics.on_finished(Request(), "abort", 10, ended(finished_time=0.4))
    metrics.on_finished(Request(), "timeout", 10, ended(first_token_time=None, first_scheduled_time=None))
    ends = {"stop": 1, "length": 1, "abort": 1, "timeout": 1, "error": 0}
    for reason, count in ends.items():
        assert value(metrics, "vllm:request_success_total", finished_reason=reason) == count
    count_and_sum = lambda name: (
        value(metrics, f"vllm:{name}_seconds_count"),
        value(metrics, f"vllm:{name}_seconds_sum"),
    )
    assert count_and_sum("time_to_first_token") == (3, pytest.approx(0.9))
    assert count_and_sum("request_time_per_output_token") == (1, pytest.approx(0.1))
    assert count_and_sum("e2e_request_latency") == (2, pytest.approx(2.6))
    assert count_and_sum("request_queue_time") == (2, pytest.approx(0.2))
    assert count_and_sum("request_prefill_time") == (2, pytest.approx(0.4))
    assert count_and_sum("request_decode_time") == (2, pytest.approx(2.0))
    assert value(metrics, "vllm:prompt_tokens_total") == 30  # one never had a slot
    for name, total in (("prompt", 30), ("generation", 2 * ended().output_tokens + 1)):
        assert value(metrics, f"vllm:request_{name}_tokens_count") == 3
        assert value(metrics, f"vllm:request_{name}_tokens_sum") == total


def test_acceptance_is_kept_by_route_and_prompt_length(metrics: ServerMetrics):
    metrics.on_finished(Request("code"), "stop", 64, ended())
    metrics.on_finished(Request("code"), "stop", 65, ended(accepted=0))
    metrics.on_finished(Request(), "stop", 9000, ended(rounds=0, drafted=0, accepted=0))
    drafted = lambda route, tokens: value(
        metrics, "jaxspec:acceptance_drafted_tokens_total", route=route, prompt_tokens=tokens
    )
    assert drafted("code", "1-64") == 12 and drafted("code", "65-256") == 12 and drafted("default", "4097+") == 0
    where = dict(route="code", prompt_tokens="1-64")
    assert value(metrics, "jaxspec:acceptance_accepted_tokens_total", **where) == 6
    assert value(metrics, "jaxspec:acceptance_rounds_total", **where) == 4
    # 10 tokens in 4 rounds.
    assert value(metrics, "jaxspec:acceptance_length_bucket", le="2.5", **where) == 1
    assert value(metrics, "jaxspec:acceptance_length_bucket", le="2.0", **where) == 0
    assert value(metrics, "jaxspec:acceptance_length_count", route="default", prompt_tokens="4097+") is None
    assert value(metrics, "jaxspec:route_time_to_first_token_seconds_count", route="code") == 2


@pytest.mark.parametrize(
    ("wanted", "reason", "fields", "expected"),
    [
        ((150.0, None), "stop", {}, {"tpot": "true"}),
        ((99.0, 300.0), "length", {}, {"tpot": "false", "ttft": "true"}),
        ((None, 299.0), "stop", {}, {"ttft": "false"}),
        ((50.0, None), "length", {"output_tokens": 1}, {"tpot": "true"}),  # nothing to be late with
        ((1e4, 1e4), "error", {}, {"tpot": "false", "ttft": "false"}),
        ((1e4, 1e4), "timeout", {"first_token_time": None}, {"tpot": "false", "ttft": "false"}),
        ((1.0, 1.0), "abort", {}, {}),  # the client left
        ((None, None), "stop", {}, {}),
    ],
)
def test_objectives(metrics: ServerMetrics, wanted: Any, reason: str, fields: Any, expected: dict[str, str]):
    metrics.on_finished(Request("chat", *wanted), reason, 10, ended(**fields))
    for slo in ("tpot", "ttft"):
        for met in ("true", "false"):
            count = value(metrics, "jaxspec:slo_requests_total", route="chat", slo=slo, met=met)
            assert count == (1 if expected.get(slo) == met else None)


def test_clients_cannot_make_series_without_end(metrics: ServerMetrics):
    for i in range(MAX_LABELS + 30):
        metrics.on_finished(Request(f"route-{i}"), "stop", 10, ended())
        metrics.on_refused("INVALID_ARGUMENT", f"reason-{i}")
    metrics.on_finished(Request("route-3"), "stop", 10, ended())
    rounds = {
        s.labels["route"]: s.value
        for family in metrics.registry.collect() if family.name == "jaxspec:acceptance_rounds"
        for s in family.samples
    }  # fmt: skip
    assert len(rounds) == MAX_LABELS + 1 and rounds["other"] == 4 * 30 and rounds["route-3"] == 8
    assert value(metrics, "jaxspec:refused_requests_total", code="INVALID_ARGUMENT", reason="other") == 30


def test_the_state_is_one_of_a_set(metrics: ServerMetrics):
    metrics.on_state("serving")
    metrics.on_state("draining")
    now = {state: value(metrics, "jaxspec:engine_state", state=state) for state in STATES}
    assert now == {**dict.fromkeys(STATES, 0.0), "draining": 1.0}
    with pytest.raises(ValueError, match="state must be one of .* got 'sleeping'"):
        metrics.on_state("sleeping")


def test_series_exist_before_anything_happens(metrics: ServerMetrics):
    for name in ("jaxspec:compiles_after_warmup_total", "vllm:generation_tokens_total", "vllm:num_requests_waiting",
                 "vllm:time_to_first_token_seconds_count"):  # fmt: skip
        assert value(metrics, name) == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 0


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=100) as answer:
        return answer.read().decode()


def test_several_servers_in_one_process_answer_on_ports_of_their_own():
    first, second = ServerMetrics("demo"), ServerMetrics("other", engine="1")
    busy(first)
    try:
        ports = [m.serve("127.0.0.1", 0) for m in (first, second)]
        assert ports[0] != ports[1] and all(ports)
        text = scrape(ports[0])
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert [s.value for s in families["vllm:generation_tokens"].samples] == [5]
        assert "process_resident_memory_bytes" in families
        assert 'vllm:num_requests_running{engine="1",model_name="other"} 0.0' in scrape(ports[1])
        with pytest.raises(ValueError, match=f"served already, on port {ports[0]}, got port 1"):
            first.serve("127.0.0.1", 1)
        with pytest.raises(OSError, match="in use"):
            ServerMetrics("third").serve("127.0.0.1", ports[0])
    finally:
        for m in (first, second):
            m.close()
            m.close()
    with pytest.raises(urllib.error.URLError):
        scrape(ports[0])
    assert first.serve("127.0.0.1", 0) > 0  # it may be served again
    first.close()


def test_a_registry_of_the_callers_is_used_and_clashes_are_refused():
    registry = CollectorRegistry()
    metrics = ServerMetrics("demo", registry=registry)
    assert metrics.registry is registry
    assert registry.get_sample_value("vllm:num_requests_running", BASE) == 0
    assert registry.get_sample_value("process_resident_memory_bytes") is None
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        ServerMetrics("demo", registry=registry)


def test_no_count_is_lost_between_threads(metrics: ServerMetrics):
    def work() -> None:
        for _ in range(2000):
            metrics.on_tokens(Request(), 2, 0.01)
            metrics.on_finished(Request("code"), "stop", 1, ended())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for family in metrics.registry.collect():
            assert family.samples is not None
    for thread in threads:
        thread.join()
    assert value(metrics, "vllm:generation_tokens_total") == 12_000
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 12_000
    assert value(metrics, "jaxspec:acceptance_rounds_total", route="code", prompt_tokens="1-64") == 24_000


# A load on the real server.


def test_the_server_counts_what_its_clients_see(kit: Any):
    async def story() -> tuple[Any, ServerMetrics]:
        config = ServerConfig(port=0, host="127.0.0.1", metrics_port=0)
        facade = kit.clean()
        server = Server(config, build=lambda: facade)
        texts = {"code": [Passage("code", i, "abcabcabd" * (i + 1)) for i in range(3)], "": [Passage("", 0, "fkf")]}
        async with server, AsyncClient(f"127.0.0.1:{server.port}") as client:
            slo = Objectives(tpot_ms=60_000.0)
            wanted = Wanted(closed(3, 9), texts, Sending(timeout=50.0, slo=slo), max_tokens=12, warmup=0)
            session = Session(client, wanted, "here")
            await session.go()
            text = await asyncio.to_thread(scrape, server.metrics_port)
            assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="demo"} 9.0' in text
        return session.report(interrupted=False), server.metrics

    made, metrics = kit.run(story())
    assert not made.failures and len(made.runs[0].records) == 9
    records, total = made.runs[0].records, lambda name: value(metrics, name)
    assert total("vllm:generation_tokens_total") == sum(r.output_tokens for r in records) == 9 * 12
    assert total("vllm:prompt_tokens_total") == sum(r.prompt_tokens for r in records)
    assert total("vllm:time_to_first_token_seconds_count") == total("vllm:e2e_request_latency_seconds_count") == 9
    by_route: dict[str, int] = {}
    for family in metrics.registry.collect():
        for s in family.samples:
            if s.name == "jaxspec:acceptance_drafted_tokens_total":
                by_route[s.labels["route"]] = by_route.get(s.labels["route"], 0) + int(s.value)
    for route in ("code", ""):
        assert by_route[route or "default"] == sum(r.drafted for r in records if r.route == route)
    met = [value(metrics, "jaxspec:slo_requests_total", route=r, slo="tpot", met="true") for r in ("code", "default")]
    assert sum(count or 0 for count in met) == 9
    assert total("vllm:num_requests_running") == 0
    # Of this process, in which other tests compile too.
    assert total("jaxspec:compiles_after_warmup_total") == made.compilations
    assert value(metrics, "jaxspec:engine_state", state="serving") == 0  # it was stopped


def test_the_engine_of_a_server_can_be_stepped_offline_between_its_requests(kit: Any):
    """What `python -m jaxspec.bench serve --overhead` asks of its host."""

    async def story() -> tuple[dict[str, Any], list[Any], list[str]]:
        facade = kit.clean()
        async with (
            Server(ServerConfig(port=0, host="127.0.0.1", metrics_port=None), build=lambda: facade) as server,
            AsyncClient(f"127.0.0.1:{server.port}") as client,
        ):
            before = await client.generate([1, 2, 3], max_tokens=9, temperature=0, ignore_eos=True)
            assert await host.obey(server, {"do": "prepare", "mode": "chain-3"}) == {}
            spent = await host.obey(server, {"do": "spent"})
            assert spent["rounds"] > 0 and spent["engine"] > 0 and spent["server"] > 0
            counted = value(server.metrics, "jaxspec:tier_rounds_total", tier="chain-3", bucket="2")
            command = {"do": "offline", "waves": [[[1, 2, 3], [4, 5]], [[6]]], "max_tokens": 9}
            answer = await host.obey(server, command)
            assert counted == value(server.metrics, "jaxspec:tier_rounds_total", tier="chain-3", bucket="2")
            tiers = await server.engine.call(lambda engine: [tier.name for tier in engine.controller.policy.tiers])
            after = await client.generate([1, 2, 3], max_tokens=9, temperature=0, ignore_eos=True)
            with pytest.raises(ValueError, match="mode must be 'adaptive' or one of .* got 'chain-9'"):
                await host.obey(server, {"do": "prepare", "mode": "chain-9"})
            with pytest.raises(ValueError, match="do must be 'prepare', 'spent' or 'offline', got 'sleep'"):
                await host.obey(server, {"do": "sleep"})
            await host.obey(server, {"do": "prepare", "mode": "adaptive"})
        return answer, [before.token_ids, after.token_ids], tiers

    answer, tokens, tiers = kit.run(story())
    assert len(answer["tpots"]) == 3 and all(0 < tpot < answer["seconds"] for tpot in answer["tpots"])
    assert tokens[0] == tokens[1] and tiers == ["chain-3"]


# The dashboard.


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for panel in board["panels"] for p in (panel, *panel.get("panels", []))]


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def test_the_dashboard_asks_for_series_and_labels_that_exist(metrics: ServerMetrics, board: dict[str, Any]):
    busy(metrics)
    labels: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            # What a Prometheus server adds to every series.
            labels.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    queries = [t["expr"] for p in panels(board) for t in p.get("targets", [])]
    queries += [v["definition"] for v in board["templating"]["list"] if v["type"] == "query"]
    assert len(queries) > 40
    used = set()
    for query in queries:
        bare = re.sub(r'"[^"]*"', '""', query)
        names = re.findall(r"\b(?:vllm|jaxspec|process)[:_][A-Za-z0-9_:]+", bare)
        assert names, query
        used |= set(names)
        allowed: set[str] = set()
        for name in names:
            assert name in labels, f"{name} of {query}"
            allowed |= labels[name]
        for name, matchers in re.findall(r"([a-z]+:[a-z0-9_]+)\{([^}]*)\}", bare):
            for label in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers):
                assert label in labels[name], f"{label} of {name} in {query}"
        for grouping in re.findall(r"\b(?:by|ignoring|on)\s*\(([^)]*)\)", bare):
            assert {label.strip() for label in grouping.split(",")} <= allowed, query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
        # A counter or a histogram is only ever rated or shown as a total.
        if re.search(r"_(bucket|sum)\{", bare):
            assert "rate(" in bare or "increase(" in bare, query
    ours = {name for name in labels if name.startswith(("vllm:", "jaxspec:"))}
    unused = {n for n in ours - used if not n.endswith(("_sum", "_count", "_bucket"))}
    assert not unused, f"series that no panel shows: {sorted(unused)}"


def test_the_dashboard_imports_cleanly(board: dict[str, Any]):
    every = panels(board)
    ids = [panel["id"] for panel in every]
    assert len(set(ids)) == len(ids) and board["id"] is None and board["schemaVersion"] >= 36
    assert [p["title"] for p in every if p["type"] == "row"] == [
        "Load", "Latency", "Speculation", "Memory", "Health"
    ]  # fmt: skip
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert list(variables) == ["datasource", "model_name", "engine", "route"]
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["description"] and panel["targets"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"} <= set(variables), target["expr"]
