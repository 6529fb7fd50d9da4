"""Prometheus metrics, with vLLM's names, so that its dashboards and its benchmark client read them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import accumulate, pairwise

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import AsyncRequest, Engine, RequestStats
from ..status import FinishReason

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
# Histograms over requests that ended: vLLM's name, the quantity, and its buckets.
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token", SECONDS),
    "inter_token_latency_seconds": ("Between two chunks of tokens of a request", SECONDS),
    "request_time_per_output_token_seconds": ("Mean time for a token after the first, of a request", SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end", SECONDS),
    "request_queue_time_seconds": ("From a request's submission to its slot", SECONDS),
    "request_prefill_time_seconds": ("From a request's slot to its first token", SECONDS),
    "request_decode_time_seconds": ("From a request's first token to its end", SECONDS),
    "request_inference_time_seconds": ("From a request's slot to its end", SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt", TOKENS),
    "request_generation_tokens": ("Tokens of a request's text", TOKENS),
}


class Histogram:
    """Counts of values in buckets, with their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add the samples to a family."""
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        with self._lock:
            family.add_metric(labels, list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class Metrics(Collector):
    """Counters over all requests, running ones included. Work is done only when a request begins and ends.

    Attributes:
        first_token: seconds from the arrival of a request to its first token.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._label = engine, [model]
        self._lock = threading.Lock()
        self._open: dict[AsyncRequest, float] = {}  # requests and their arrival
        self._ended: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._rounds: Counter[int] = Counter()  # number of rounds by their tokens
        self._registry = CollectorRegistry()
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.first_token = self._histograms["time_to_first_token_seconds"]
        self._http: Counter[tuple[str, str, str]] = Counter()  # responses by handler, method and status
        self._http_seconds: dict[tuple[str, str], Histogram] = {}  # by handler and method
        self._registry.register(self)

    @property
    def num_open(self) -> int:
        """Number of running or waiting requests."""
        return len(self._open)

    @property
    def open_requests(self) -> list[AsyncRequest]:
        with self._lock:
            return list(self._open)

    def begin(self, requests: Sequence[AsyncRequest], arrival: float) -> None:
        with self._lock:
            self._open.update(dict.fromkeys(requests, arrival))
        for request in requests:
            request.add_done_callback(self._end)

    def _end(self, request: AsyncRequest) -> None:
        rounds = request.chunks(0, request.num_chunks).rounds
        with self._lock:
            arrival = self._open.pop(request)
            self._ended.update(counts_of([request]))
            self._reasons[request.output.finish_reason.name.lower()] += 1
            self._rounds.update(rounds)
        for name, value in observations(request, arrival):
            self._histograms[name].observe(value)

    def count_response(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a response of the server."""
        with self._lock:
            self._http[handler, method, str(status)] += 1
            self._http_seconds.setdefault((handler, method), Histogram(SECONDS)).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    @property
    def totals(self) -> RequestStats:
        """Statistics over the rounds of all requests so far."""
        counts = self._counts()
        return RequestStats(counts["rounds"], counts["drafted"], counts["accepted"])

    def _counts(self) -> Counter[str]:
        with self._lock:
            return self._ended + counts_of(self._open)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        with self._lock:
            reasons, rounds = dict(self._reasons), dict(self._rounds)

        def counter(name: str, what: str, value: float) -> Metric:
            family = CounterMetricFamily(name, what, labels=["model_name"])
            family.add_metric(self._label, value)
            return family

        def gauge(name: str, what: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, what, labels=["model_name"])
            family.add_metric(self._label, value)
            return family

        for name, (what, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"vllm:{name}", what, labels=["model_name"])
            self._histograms[name].add_to(histogram, self._label)
            yield histogram
        responses = CounterMetricFamily("http_requests", "Responses", labels=["handler", "method", "status"])
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "From a request to the end of its response", labels=["handler", "method"]
        )
        with self._lock:
            for labels, count in self._http.items():
                responses.add_metric(labels, count)
            for pair, seconds in self._http_seconds.items():
                seconds.add_to(durations, pair)
        yield responses
        yield durations
        scheduler, stats = self._engine.core.scheduler, self._engine.stats()
        yield gauge("vllm:num_requests_running", "Requests with a slot", scheduler.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests without a slot", scheduler.num_waiting)
        pages = self._engine.config.num_pages
        free = scheduler.num_free_pages_estimate + scheduler.num_cached_pages - scheduler.num_shared_pages
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use by requests, 1 is all", 1 - free / pages)
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool, 1", labels=["model_name", "block_size", "num_gpu_blocks"]
        )
        cache.add_metric([*self._label, str(self._engine.config.page_size), str(pages)], 1)
        yield cache
        yield gauge("specdec:cached_pages", "Pages in the prefix cache", scheduler.num_cached_pages)
        yield counter("vllm:prompt_tokens", "Tokens of prompts", counts["prompt_tokens"])
        yield counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", counts["prompt_tokens"]
        )
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", counts["cached_tokens"])
        yield counter("vllm:num_preemptions", "Requests preempted", stats.retractions)
        yield counter("vllm:generation_tokens", "Tokens generated", counts["tokens"])
        ends = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(reasons.items()):
            ends.add_metric([*self._label, reason], count)
        yield ends
        yield counter("vllm:spec_decode_num_drafts", "Rounds that emitted tokens", counts["rounds"])
        yield counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified", counts["drafted"])
        yield counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted", counts["accepted"])
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position, of requests that ended",
            labels=["model_name", "position"],
        )
        for position in range(max(rounds, default=1) - 1):
            reached = sum(count for length, count in rounds.items() if length > position + 1)
            per_position.add_metric([*self._label, str(position)], reached)
        yield per_position
        yield gauge("sglang:spec_accept_length", "Mean tokens per round", self.totals.accept_length)
        acceptance = stats.acceptance
        yield gauge("specdec:draft_collapsed", "1 while acceptance of the draft is collapsed", acceptance.collapsed)
        yield counter("specdec:draft_collapses", "Times that acceptance of the draft collapsed", acceptance.collapses)
        if acceptance.recent is not None:
            yield gauge(
                "specdec:draft_recent_accepted_per_round",
                "Accepted draft tokens per round in the last full window",
                acceptance.recent.per_round,
            )
        for field in fields(stats):
            value = getattr(stats, field.name)
            if isinstance(value, int | float):
                yield counter(f"specdec:engine_{field.name}", f"EngineStats.{field.name}", value)


def observations(request: AsyncRequest, arrival: float) -> Iterator[tuple[str, float]]:
    """Yield the values of a request that has ended, by the names of their histograms."""
    times, output = request.times, request.output
    end, num_tokens = times.chunks[-1], num_generated(request)
    yield "e2e_request_latency_seconds", end - arrival
    yield "request_prompt_tokens", len(output.prompt_tokens)
    yield "request_generation_tokens", num_tokens
    if times.begun is None:
        yield "request_queue_time_seconds", end - times.submitted
        return
    yield "request_queue_time_seconds", times.begun - times.submitted
    yield "request_inference_time_seconds", end - times.begun
    if not num_tokens:
        return
    first = times.chunks[0]
    yield "request_prefill_time_seconds", first - times.begun
    yield "request_decode_time_seconds", end - first
    if num_tokens > 1:
        yield "request_time_per_output_token_seconds", (end - first) / (num_tokens - 1)
    for before, after in pairwise(times.chunks):
        yield "inter_token_latency_seconds", after - before


def num_generated(request: AsyncRequest) -> int:
    """Return how many tokens of an output were generated here; a request may bring its first ones."""
    return len(request.output.tokens) - len(request.params.generated_token_ids)


def counts_of(requests: Iterable[AsyncRequest]) -> Counter[str]:
    """Sum the token and round counts of requests."""
    counts: Counter[str] = Counter()
    for request in requests:
        output, stats = request.output, request.output.stats
        if output.finish_reason != FinishReason.ERROR or num_generated(request):
            counts["prompt_tokens"] += len(output.prompt_tokens)
            counts["cached_tokens"] += output.cached_tokens
        counts["tokens"] += num_generated(request)
        counts["rounds"] += stats.rounds
        counts["drafted"] += stats.drafted
        counts["accepted"] += stats.accepted
    return counts
