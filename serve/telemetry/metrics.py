"""What the server counts, in Prometheus' form.

Owns the names, labels and buckets of every series and the small store behind them. Names and labels that vLLM has too
are vLLM's, so that its dashboards work. The store is a custom collector of prometheus_client: the engine's thread adds
to plain numbers under one lock, and whatever a scrape costs is paid by the thread that scrapes. Its own counters and
histograms would cost that thread seven times as much a message. Must not know gRPC, servicers or how requests run.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from jaxspec.adaptive.policy import RoundStats
from jaxspec.request import FinishReason, RequestMetrics
from jaxspec.stats import EngineStats
from serve.telemetry.http import HttpPort, Probe

#: Distinct route labels (and, by themselves, refusal reasons) that are kept apart; further ones count as OTHER.
MAX_LABELS = 64
OTHER = "other"
#: The label of requests that name no route.
NO_ROUTE = "default"
STATES = ("starting", "serving", "draining", "stalled", "dead", "stopped")
#: Upper ends of the prompt-length buckets in tokens.
PROMPT_BOUNDS = (64, 256, 1024, 4096)
_PROMPT_NAMES = ("1-64", "65-256", "257-1024", "1025-4096", "4097+")

_TOKEN_SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
_REQUEST_TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
)  # fmt: skip
#: Histograms that exist once a route are coarser.
_ROUTE_TOKEN_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 5.0)
_ROUTE_FIRST_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0)


class Labelled(Protocol):
    """What the metrics read of a request (serve.core.jobs.Job has it)."""

    @property
    def route(self) -> str:
        """The client's label; "" where it gave none."""
        ...

    @property
    def tpot_ms(self) -> float | None:
        """Most milliseconds a token after the first that the client wants."""
        ...

    @property
    def ttft_ms(self) -> float | None:
        """Most milliseconds to the first token that the client wants."""
        ...


@dataclasses.dataclass(eq=False)
class _Family:
    """The series of a name: {label values: row}. A counter's or a gauge's row is one number; a histogram's holds the
    count of each bucket, of what lies above them, and the sum.
    """

    make: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    name: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.bounds) + 2 if self.bounds else 1
        self.rows: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0] * size)

    def add(self, amount: float, *labels: str) -> None:
        self.rows[labels][0] += amount

    def set(self, value: float, *labels: str) -> None:
        self.rows[labels][0] = value

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        row = self.rows[labels]
        row[bisect_left(self.bounds, value)] += times
        row[-1] += value * times

    def metric(self, base: dict[str, str], rows: dict[tuple[str, ...], list[float]]) -> Metric:
        """What prometheus_client writes of such rows."""
        out = self.make(self.name, self.help, labels=(*base, *self.labels))
        ends = [floatToGoString(bound) for bound in (*self.bounds, float("inf"))]
        for labels, row in rows.items():
            if isinstance(out, HistogramMetricFamily):
                buckets = list(zip(ends, itertools.accumulate(row[:-1]), strict=True))
                out.add_metric((*base.values(), *labels), buckets, row[-1])
            else:
                out.add_metric((*base.values(), *labels), row[0])
        return out


class _Bounded:
    """Label values from outside: the first MAX_LABELS are kept, all others are OTHER."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def __call__(self, label: str) -> str:
        if label not in self._known:
            if len(self._known) >= MAX_LABELS:
                return OTHER
            self._known.add(label)
        return label


class _Store(Collector):
    """All families of a server.

    Attributes:
      lock: held by whoever adds, and by a scrape while it copies.
      base: labels of every series.
    """

    def __init__(self, base: dict[str, str]) -> None:
        self.lock = threading.Lock()
        self.base = base
        self.families: list[_Family] = []

    def counter(self, name: str, help: str, *labels: str, known: Iterable[str] = ()) -> _Family:
        """A counter; the series of `known` label values (the only one, without labels) exist from the start, at 0."""
        return self._new(_Family(CounterMetricFamily, name, help, labels), known)

    def gauge(self, name: str, help: str, *labels: str, known: Iterable[str] = ()) -> _Family:
        """A gauge; see `counter`."""
        return self._new(_Family(GaugeMetricFamily, name, help, labels), known)

    def histogram(self, name: str, help: str, bounds: tuple[float, ...], *labels: str) -> _Family:
        """A histogram; without labels it exists from the start."""
        return self._new(_Family(HistogramMetricFamily, name, help, labels, bounds), ())

    def _new(self, family: _Family, known: Iterable[str]) -> _Family:
        for labels in [(value,) for value in known] if family.labels else [()]:
            _ = family.rows[labels]
        self.families.append(family)
        return family

    def describe(self) -> list[Metric]:
        """Names alone, so that a registry can tell clashes."""
        return [family.metric(self.base, {}) for family in self.families]

    def collect(self) -> list[Metric]:
        """A consistent picture."""
        with self.lock:
            copies = [(family, {labels: row[:] for labels, row in family.rows.items()}) for family in self.families]
        return [family.metric(self.base, rows) for family, rows in copies]


class ServerMetrics:
    """The server's metrics. Every `on_` method may be called from any thread and costs microseconds.

    Args:
      model_name, engine: vLLM's labels, on every series.
      registry: where to register; None: one of its own, with the process's memory and CPU beside.
    """

    def __init__(self, model_name: str, *, registry: CollectorRegistry | None = None, engine: str = "0") -> None:
        store = self._store = _Store({"model_name": model_name, "engine": engine})
        self._route, self._reason = _Bounded(), _Bounded()
        self._http: HttpPort | None = None
        self._last_tier: str | None = None
        self._seen: dict[str, float] = {}

        self._declare_vllms(store)
        self._declare_ours(store)
        own = registry is None
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(store)
        if own:
            ProcessCollector(registry=self.registry)

    def _declare_vllms(self, store: _Store) -> None:
        counter, gauge, histogram = store.counter, store.gauge, store.histogram
        self._drafts = counter(
            "vllm:spec_decode_num_drafts",
            "Drafts verified: rows of rounds that drafted, but for those of requests with a smaller max_depth.",
        )
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at a position.", "position"
        )
        self._running = gauge("vllm:num_requests_running", "Requests being decoded or prefilled.")
        self._waiting = gauge("vllm:num_requests_waiting", "Completions queued.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Share of the pool held by live requests, 1 is all.")
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = counter("vllm:num_preemptions", "Requests that gave their pages back to be run again.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of ended completions that had a slot.")
        self._generated = counter("vllm:generation_tokens", "Generated tokens streamed.")
        self._ended = counter(
            "vllm:request_success", "Completions that ended, by reason.", "finished_reason",
            known=map(str, FinishReason),
        )  # fmt: skip
        tokens = lambda name, help: histogram(f"vllm:request_{name}_tokens", help, _REQUEST_TOKENS)
        self._prompt_sizes = tokens("prompt", "Prompt tokens of each ended completion that had a slot.")
        self._output_sizes = tokens("generation", "Generated tokens of the same.")
        request = lambda name, help: histogram(f"vllm:{name}_seconds", help, _REQUEST_SECONDS)
        self._ttft = request("time_to_first_token", "From arrival to the first token.")
        self._itl = histogram(
            "vllm:inter_token_latency_seconds", "Gap between tokens; a burst of n is gap/n, n times.", _TOKEN_SECONDS
        )
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Seconds a token after the first.", _TOKEN_SECONDS
        )
        self._e2e = request("e2e_request_latency", "From arrival to the end, of completions that ended well.")
        self._queue = request("request_queue_time", "From arrival to the first scheduling.")
        self._prefill = request("request_prefill_time", "From the first scheduling to the first token.")
        self._decode = request("request_decode_time", "From the first token to the end.")

    def _declare_ours(self, store: _Store) -> None:
        counter, gauge, histogram = store.counter, store.gauge, store.histogram
        self._num_steps = gauge("jaxspec:num_steps", "Draft tokens of the tier that ran last; 0 is plain decoding.")
        self._tier_rounds = counter("jaxspec:tier_rounds", "Rounds by tier and padded batch size.", "tier", "bucket")
        self._switches = counter("jaxspec:tier_switches", "Rounds whose tier differs from the one before.")
        self._compiles = counter("jaxspec:compiles_after_warmup", "XLA compilations outside the warm-up; must stay 0.")
        self._executables = gauge("jaxspec:executables", "Executables that there are once all is warm.")
        self._ready = gauge("jaxspec:executables_ready", "Executables that can run now.")
        shares = "Devices that share the drafter's own weights; 0 where it has none."
        self._draft_shards = gauge("jaxspec:draft_tensor_parallel", shares)
        self._drafter_version = gauge("jaxspec:drafter_version", "Of the drafter's weights; 0 where it has none.")
        self._drafter_trial = gauge("jaxspec:drafter_trial", "1 while another version takes turns with it.")
        self._drafter_updates = counter("jaxspec:drafter_updates", "Versions of the drafter's weights that came.")
        self._drafter_rollbacks = counter("jaxspec:drafter_rollbacks", "Trials that ended with the older weights.")
        where = ("route", "prompt_tokens")
        self._route_rounds = counter("jaxspec:acceptance_rounds", "Decode rounds of ended completions.", *where)
        self._route_drafted = counter("jaxspec:acceptance_drafted_tokens", "Draft tokens of the same.", *where)
        self._route_accepted = counter("jaxspec:acceptance_accepted_tokens", "Of those, accepted ones.", *where)
        self._lengths = histogram(
            "jaxspec:acceptance_length", "Tokens a round of each ended completion, bonus included.", _LENGTHS, *where
        )
        self._route_ttft = histogram(
            "jaxspec:route_time_to_first_token_seconds", "As vLLM's, by route.", _ROUTE_FIRST_SECONDS, "route"
        )
        self._route_tpot = histogram(
            "jaxspec:route_time_per_output_token_seconds", "As vLLM's, by route.", _ROUTE_TOKEN_SECONDS, "route"
        )
        self._slo = counter(
            "jaxspec:slo_requests", "Completions that asked for a latency, and whether they got it.",
            "route", "slo", "met",
        )  # fmt: skip
        self._refused = counter("jaxspec:refused_requests", "Requests refused or broken off.", "code", "reason")
        self._other_chats = counter(
            "jaxspec:other_mode_chats", "Chats whose template arguments are none that the drafter learned from."
        )
        self._states = gauge("jaxspec:engine_state", "1 for the state the server is in.", "state", known=STATES)
        self._pages = gauge("jaxspec:pages", "Pages of the KV pool.")
        self._free = gauge("jaxspec:free_pages", "Pages that hold nothing.")
        self._cached = gauge("jaxspec:cached_pages", "Pages that only the prefix cache holds.")
        self._steps = counter("jaxspec:engine_steps", "Steps of the engine.")
        self._starved = counter("jaxspec:starved_rounds", "Rounds that the device had no work before.")
        self._experts = counter("jaxspec:experts_touched", "Distinct experts that rounds read, over all layers.")
        self._host = counter("jaxspec:host_seconds", "Seconds of the steps' own work.")
        self._device = counter("jaxspec:device_seconds", "Seconds that steps waited for the device.")

    # The engine's thread.

    def on_round(self, stats: RoundStats) -> None:
        """Counts one finished decode round."""
        tier = stats.tier
        with self._store.lock:
            self._tier_rounds.add(1, tier.name, str(stats.bucket))
            self._switches.add(self._last_tier not in (None, tier.name))
            self._last_tier = tier.name
            self._num_steps.set(tier.depth)
            if not tier.depth:
                return
            # Rows whose request accepts fewer drafts than the tier's are not among num_accepted.
            self._drafts.add(len(stats.num_accepted))
            self._draft_tokens.add((tier.num_nodes - 1) * len(stats.num_accepted))
            self._accepted.add(sum(stats.num_accepted))
            for position in range(tier.depth):
                count = sum(accepted > position for accepted in stats.num_accepted)
                self._accepted_at.add(count, str(position))

    def on_compiled(self, ready: int, total: int) -> None:
        """Takes over how many executables have come, and how many there will be, while the engine is built."""
        with self._store.lock:
            self._executables.set(total)
            self._ready.set(ready)

    def on_stats(self, stats: EngineStats, pages: int) -> None:
        """Takes over the engine's gauges, and its counters by what was added since the last call.

        Args:
          pages: of the pool.
        """
        with self._store.lock:
            self._running.set(stats.running)
            self._waiting.set(stats.waiting)
            self._usage.set(1 - (stats.free_pages + stats.cached_pages) / pages)
            self._pages.set(pages)
            self._free.set(stats.free_pages)
            self._cached.set(stats.cached_pages)
            self._executables.set(stats.executables)
            self._ready.set(stats.executables_ready)
            self._draft_shards.set(stats.draft_tensor_parallel)
            self._drafter_version.set(stats.drafter_version)
            self._drafter_trial.set(stats.drafter_trial)
            for family, total in (
                (self._queries, stats.prefix_queries),
                (self._hits, stats.prefix_hits),
                (self._preemptions, stats.preemptions),
                (self._compiles, stats.compilations_after_warmup),
                (self._drafter_updates, stats.drafter_updates),
                (self._drafter_rollbacks, stats.drafter_rollbacks),
                (self._steps, stats.steps),
                (self._starved, stats.starved_rounds),
                (self._experts, stats.experts_touched),
                (self._host, stats.host_seconds),
                (self._device, stats.device_seconds),
            ):
                before = self._seen.get(family.name, 0)
                # A smaller total is a new engine's.
                family.add(total - before if total >= before else total)
                self._seen[family.name] = total

    def on_tokens(self, job: Labelled, count: int, gap_seconds: float | None) -> None:
        """Counts tokens handed to a client.

        Args:
          gap_seconds: since the tokens before; None for a completion's first ones.
        """
        with self._store.lock:
            self._generated.add(count)
            if gap_seconds is not None and count:
                self._itl.observe(gap_seconds / count, times=count)

    # Requests.

    def on_finished(self, job: Labelled, reason: str, prompt_tokens: int, metrics: RequestMetrics) -> None:
        """Counts one ended completion.

        Latencies are those of completions that ended well; times to first tokens are everybody's who got one.
        Whoever left early does not count for its SLO; whoever was broken off has missed it.

        Args:
          reason: a FinishReason, or the server's own word.
        """
        well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        arrival, scheduled, first = metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time
        end, tpot, ttft = metrics.finished_time, metrics.tpot, metrics.ttft
        with self._store.lock:
            route = self._route(job.route or NO_ROUTE)
            where = (route, _PROMPT_NAMES[bisect_left(PROMPT_BOUNDS, prompt_tokens)])
            self._ended.add(1, str(reason))
            if scheduled is not None:
                self._prompt_tokens.add(prompt_tokens)
                self._prompt_sizes.observe(prompt_tokens)
                self._output_sizes.observe(metrics.output_tokens)
            self._route_rounds.add(metrics.rounds, *where)
            self._route_drafted.add(metrics.drafted, *where)
            self._route_accepted.add(metrics.accepted, *where)
            if metrics.rounds:
                self._lengths.observe(metrics.mean_accepted_length, *where)
            if ttft is not None:
                self._ttft.observe(ttft)
                self._route_ttft.observe(ttft, route)
            if well and scheduled is not None and first is not None and end is not None:
                self._queue.observe(scheduled - arrival)
                self._prefill.observe(first - scheduled)
                self._decode.observe(end - first)
                self._e2e.observe(end - arrival)
            if well and tpot is not None:
                self._tpot.observe(tpot)
                self._route_tpot.observe(tpot, route)
            if reason == FinishReason.ABORT:
                return
            # A single token has no time between tokens to miss.
            for name, wanted, got in (("ttft", job.ttft_ms, ttft), ("tpot", job.tpot_ms, tpot)):
                if wanted is not None:
                    met = well and (got is None or 1e3 * got <= wanted)
                    self._slo.add(1, route, name, "true" if met else "false")

    def on_refused(self, code: str, reason: str) -> None:
        """Counts a request that was refused or broken off.

        Args:
          code: the gRPC status's name. reason: a word or two from a fixed set; of others, MAX_LABELS are kept apart.
        """
        with self._store.lock:
            self._refused.add(1, code, self._reason(reason))

    def on_other_chat(self) -> None:
        """Counts a chat in a mode that the drafter did not learn from."""
        with self._store.lock:
            self._other_chats.add(1)

    def on_state(self, state: str) -> None:
        """The server is in one of STATES; ValueError otherwise."""
        if state not in STATES:
            raise ValueError(f"state must be one of {STATES}, got {state!r}")
        with self._store.lock:
            for name in STATES:
                self._states.set(float(name == state), name)

    # The port.

    def serve(self, host: str, port: int, probes: Mapping[str, Probe] = MappingProxyType({})) -> int:
        """Answers scrapes at http://host:port/metrics on threads of its own; returns the bound port.

        Args:
          port: 0 takes a free one.
          probes: what else is answered there, by path; see serve.telemetry.http.

        Raises:
          OSError: the address cannot be bound.
          ValueError: it is served already.
        """
        if self._http is not None:
            raise ValueError(f"metrics are served already, on port {self._http.port}, got port {port}")
        self._http = HttpPort(host, port, self.registry, probes)
        return self._http.port

    def close(self) -> None:
        """Frees the port; safe to call twice."""
        if self._http is not None:
            http, self._http = self._http, None
            http.close()
