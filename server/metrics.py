"""Prometheus metrics: our own names, and twins under the names that vLLM's dashboards and routers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.job import Job
from server.worker import EngineWorker

# Old machines take minutes to read a long prompt, fast ones milliseconds.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "request_queue_time_seconds": ("Time in the queue.", _SECONDS),
    "request_prefill_time_seconds": ("From leaving the queue to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _SECONDS),
    "inter_token_latency_seconds": ("Mean time between two tokens of one request.", _TOKEN_SECONDS),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of all requests.",
    "generation_tokens": "Generated tokens of all requests.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
}
_PREFIXES = ("fermion_", "vllm:")

# Counters of the prefix cache that are kept apart by something, and by what.
_CACHE_LABELS = {
    "hits_by_tier": "tier",
    "hits_by_kind": "kind",
    "misses": "reason",
    "lost_tokens": "reason",
    "stored": "kind",
    "evicted_ram": "kind",
    "evicted_disk": "kind",
}


class Metrics:
    """The metrics of one server. `observe` may be called from any thread."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._histograms = {
            name: [
                Histogram(prefix + name, text, ["model_name"], buckets=buckets, registry=self._registry)
                for prefix in _PREFIXES
            ]
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: [Counter(prefix + name, text, ["model_name"], registry=self._registry) for prefix in _PREFIXES]
            for name, text in _COUNTERS.items()
        }
        self._requests = Counter(
            "fermion_requests", "Requests that are over, by how.", ["model_name", "state"], registry=self._registry
        )

    def watch(self, worker: EngineWorker) -> None:
        """Report the queue of `worker`, its engine's prefix cache and its vision tower too."""
        self._registry.register(_Queue(worker, self._labels))
        self._registry.register(_Cache(worker, self._labels))
        self._registry.register(_Pictures(worker, self._labels))

    def observe(self, job: Job) -> None:
        """Take in a job that is over."""
        self._requests.labels(state=job.state.value, **self._labels).inc()
        started, first, finished = job.started_at, job.first_token_at, job.finished_at
        if started is None:
            return
        self._time("request_queue_time_seconds", started - job.created_at)
        self._count("prompt_tokens", job.work.prompt_tokens)
        self._count("generation_tokens", job.completion_tokens)
        self._count("prefix_cache_queries", job.work.prompt_tokens)
        self._count("prefix_cache_hits", job.cached_tokens)
        if first is None or finished is None:
            return
        self._time("time_to_first_token_seconds", first - job.created_at)
        self._time("request_prefill_time_seconds", first - started)
        self._time("request_decode_time_seconds", finished - first)
        self._time("e2e_request_latency_seconds", finished - job.created_at)
        if job.completion_tokens > 1:
            self._time("inter_token_latency_seconds", (finished - first) / (job.completion_tokens - 1))

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def _time(self, name: str, seconds: float) -> None:
        for histogram in self._histograms[name]:
            histogram.labels(**self._labels).observe(seconds)

    def _count(self, name: str, amount: int) -> None:
        for counter in self._counters[name]:
            counter.labels(**self._labels).inc(amount)


class _Queue(Collector):
    """Gauges, read when they are asked for."""

    def __init__(self, worker: EngineWorker, labels: dict[str, str]) -> None:
        self._worker = worker
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        values = {
            "num_requests_running": ("Requests in the engine.", self._worker.running),
            "num_requests_waiting": ("Requests in the queue.", self._worker.queued),
        }
        for name, (text, value) in values.items():
            for prefix in _PREFIXES:
                gauge = GaugeMetricFamily(prefix + name, text, labels=list(self._labels))
                gauge.add_metric(list(self._labels.values()), value)
                yield gauge
        gauge = GaugeMetricFamily(
            "fermion_num_conversations_ahead", "Conversations to be read ahead.", labels=list(self._labels)
        )
        gauge.add_metric(list(self._labels.values()), self._worker.ahead)
        yield gauge


class _Cache(Collector):
    """Counters and sizes of the prefix cache, read when they are asked for; nothing without a cache."""

    def __init__(self, worker: EngineWorker, labels: dict[str, str]) -> None:
        self._worker = worker
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        cache = self._worker.cache
        if cache is None:
            return
        for name, value in cache.counters().items():
            yield self._counter(name, value)
        for name, size in cache.gauges().items():
            if isinstance(size, int | float):
                gauge = GaugeMetricFamily(f"fermion_cache_{name}", _sentence(name), labels=list(self._labels))
                gauge.add_metric(list(self._labels.values()), size)
                yield gauge

    def _counter(self, name: str, value: int | float | Mapping[str, int]) -> Metric:
        names, values = list(self._labels), list(self._labels.values())
        title = f"fermion_cache_{name}"
        if not isinstance(value, Mapping):
            counter = CounterMetricFamily(title, _sentence(name), labels=names)
            counter.add_metric(values, value)
            return counter
        counter = CounterMetricFamily(title, _sentence(name), labels=[*names, _CACHE_LABELS[name]])
        for word, count in value.items():
            counter.add_metric([*values, word], count)
        return counter


# Name -> text, and whether it only grows.
_PICTURE_METRICS = {
    "encoded": ("Pictures that the vision tower took.", True),
    "reused": ("Pictures whose tokens were kept from an earlier request.", True),
    "dropped": ("Pictures whose tokens were forgotten for want of room.", True),
    "kept": ("Pictures whose tokens are kept.", False),
    "bytes": ("Memory that they take.", False),
}


class _Pictures(Collector):
    """What became of the pictures in prompts, read when it is asked for; nothing if the model does not see."""

    def __init__(self, worker: EngineWorker, labels: dict[str, str]) -> None:
        self._worker = worker
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        for name, value in self._worker.picture_counters.items():
            text, grows = _PICTURE_METRICS[name]
            family = CounterMetricFamily if grows else GaugeMetricFamily
            metric = family(f"fermion_pictures_{name}", text, labels=list(self._labels))
            metric.add_metric(list(self._labels.values()), value)
            yield metric


def _sentence(name: str) -> str:
    return f"Prefix cache: {name.replace('_', ' ')}."
