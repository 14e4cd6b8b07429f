"""All metrics of the router, declared here and for models in ``model_metrics.py``: name, unit, labels and their bounds.

Labels are bounded by enums, by the known engines and by the file of keys, never by what a client or an engine sends.
Each router has its own registry, so several can live in one process. Counts of each request are kept here and handed
over when they are read: ``Counter.inc`` costs four times as much, ``Histogram.observe`` six times, and each request has
four spans to note.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from pdcluster_protocol.labels import Role
from pdcluster_router.core.apis.openai_errors import JWT_PREFIX
from pdcluster_router.core.clients.key_limits import EVERY_TOKEN, KeyUses
from pdcluster_router.core.engines.placement import Home
from pdcluster_router.core.telemetry.histogram import FINE, Histogram, histogram_text
from pdcluster_router.telemetry.collectors import LabelCounts, LabelNumbers, Total
from pdcluster_router.telemetry.failures import FailureKind
from pdcluster_router.telemetry.model_metrics import ModelMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PREFIX = "pdcluster_router_"


class Outcome(Enum):
    """How a request ended, for the client."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and each request looks up several.

    OK = "ok"
    REJECTED = "rejected"
    """The router refused it: malformed, too large, or while it was draining."""
    ENGINE_ERROR = "engine_error"
    """Decode answered an error."""
    LIMITED = "limited"
    """Turned away: its client was over one of its limits."""
    OVERLOADED = "overloaded"
    """Turned away: the queue for prefill was full, or the wait in it too long."""
    PREFILL_FAILED = "prefill_failed"
    """No prefill attempt was left, and decode shall not recompute."""
    UNAVAILABLE = "unavailable"
    """No engine could be reached."""
    LOST = "lost"
    """Decode was lost before its answer was complete."""
    TIMEOUT = "timeout"
    CLIENT_GONE = "client_gone"


class Span(Enum):
    """A stretch of a request's life. Each but ``PREFILL`` begins with the request's arrival."""

    __hash__ = object.__hash__

    RESERVATION = "reservation"
    PREFILL = "prefill"
    """From a call to prefill to its answer."""
    FIRST_BYTE = "first_byte"
    TOTAL = "total"


@dataclass(frozen=True, slots=True)
class EngineSample:
    """The metrics of one engine. ``is_up``: None before it was ready and once it
    terminates."""

    role: str
    url: str
    revision: str
    state: str
    is_up: bool | None
    is_ejected: bool
    answered: Histogram
    """From a call to its answer: prefill's whole one, or the first byte of decode's."""


class Metrics:
    """The router's metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._ended = dict.fromkeys(Outcome, 0)
        self._failed = dict.fromkeys(FailureKind, 0)
        outcomes = "Requests that have ended, by how they ended for the client"
        self._registry.register(LabelCounts(_PREFIX + "requests", outcomes, "outcome", self._ended))
        self._registry.register(
            LabelCounts(_PREFIX + "failures", "Everything that failed, by kind", "kind", self._failed)
        )
        self._ejected = dict.fromkeys(Role, 0)
        ejections = "Engines left alone for a while because they failed"
        self._registry.register(LabelCounts(_PREFIX + "engine_ejections", ejections, "role", self._ejected))
        self._seconds = {span: Histogram() for span in Span}
        self._registry.register(_SpanSeconds(self._seconds))
        self.models = ModelMetrics()
        self._samples: Callable[[], Iterable[EngineSample]] = tuple
        self._waits: dict[str, _Wait] = {}
        """By the key's name."""
        self._in_flight = self._gauge("in_flight", "Requests that have not ended")
        self._queued = self._gauge("queue_length", "Requests that wait until there is room to prefill them")
        self._backlog = self._gauge(
            "prefill_backlog_tokens",
            "Prompt tokens of requests that are, or will be, work for a prefill engine; none counts for more than a "
            "quarter of max_prefill_backlog_tokens",
        )
        self._local_backlog = self._gauge(
            "local_prefill_backlog_tokens", "Likewise of requests that decode engines prefill by themselves"
        )
        self.num_local_prefills = 0
        """For ``Record`` to count: a ``Counter`` has a lock, which costs a hundredth of a request."""
        local = (
            "Requests that decode prefills by itself: best_of > 1, echo, prompt logprobs, several sequences as a whole"
        )
        self._registry.register(Total(_PREFIX + "local_prefill", local, lambda: self.num_local_prefills))
        self.decode_resent = self._counter(
            "decode_resent",
            "Requests sent to decode again: the first try never reached an engine, the engine failed, or its revision "
            "has no prefill engine left",
        )
        self.trace_lost = self._counter("trace_lost_lines", "Lines of --trace-file that could not be written")
        self.access_log_lost = self._counter("access_log_lost_lines", "Lines of --access-log that could not be written")
        self.spans_lost = self._counter(
            "spans_lost_requests", "Sampled requests whose spans the collector has not got, or not all of them"
        )
        self.discovery_failed = self._counter(
            "discovery_failures", "Failed lists and watches of the API server, or looks at the engines' file"
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(_PREFIX + name, text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(_PREFIX + name, text, registry=self._registry)

    def ended(self, outcome: Outcome) -> None:
        self._ended[outcome] += 1

    @property
    def num_ended(self) -> Mapping[Outcome, int]:
        """Requests that have ended, by outcome. The counts go on growing."""
        return self._ended

    def failed(self, kind: FailureKind) -> None:
        self._failed[kind] += 1

    def ejected(self, role: Role) -> None:
        self._ejected[role] += 1

    def took(self, span: Span, seconds: float) -> None:
        one = self._seconds[span]  # ``Histogram.add``, without a call.
        one.counts[bisect_left(FINE, seconds)] += 1
        one.total += seconds

    def waited(self, client: str, seconds: float) -> None:
        """A request was in the queue for so long. ``client``: the name of its key. Clients of tokens are counted as
        one, for there may be any number of them."""
        if client.startswith(JWT_PREFIX):
            client = EVERY_TOKEN
        wait = self._waits.get(client)
        if wait is None:
            wait = self._waits[client] = _Wait()
        wait.num_requests += 1
        wait.total_s += seconds

    def watch_in_flight(self, count: Callable[[], float]) -> None:
        """``count`` is called when the metrics are read: nothing is counted on the hot path."""
        self._in_flight.set_function(count)

    def watch_queue(
        self,
        length: Callable[[], float],
        backlog_tokens: Callable[[], float],
        local_backlog_tokens: Callable[[], float],
    ) -> None:
        """As ``watch_in_flight``."""
        self._queued.set_function(length)
        self._backlog.set_function(backlog_tokens)
        self._local_backlog.set_function(local_backlog_tokens)

    def watch_model_queues(self, lengths: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """As ``watch_in_flight``. ``lengths``: of the queues of base models that have one of their own."""
        text = "Of the requests that wait until there is room to prefill them, those in a base model's own queue"
        self._registry.register(LabelNumbers(_PREFIX + "model_queue_length", text, "model", lengths))

    def watch_engines(self, samples: Callable[[], Iterable[EngineSample]]) -> None:
        """As ``watch_in_flight``. Engines that are gone are gone from the metrics too."""
        self._samples = samples
        self._registry.register(_Engines(samples))

    def watch_keep_alives(self, count: Callable[[], int]) -> None:
        """As ``watch_in_flight``."""
        text = "Comments that kept silent streams open"
        self._registry.register(Total(_PREFIX + "keep_alives", text, count))

    def watch_keys(self, uses: KeyUses, names: Callable[[], Container[str]]) -> None:
        """As ``watch_in_flight``. ``uses``: those of keys with limits; ``names``: all names in the file of keys. Keys
        that are gone are gone from the metrics too.
        """
        self._registry.register(_Keys(uses))
        self._registry.register(_Waits(self._waits, names))

    def watch_certificate(self, expires_at: Callable[[], float]) -> None:
        """As ``watch_in_flight``. Call it only where the router shows a certificate."""
        expiry = self._gauge(
            "tls_certificate_expiry_seconds", "Unix time at which the first certificate expires that this router shows"
        )
        expiry.set_function(expires_at)

    def watch_token_keys(self, age_s: Callable[[], float]) -> None:
        """As ``watch_in_flight``. Call it only where the keys of tokens come from a URL."""
        text = "Seconds since the key set of the identity provider was last read well from its URL"
        self._gauge("token_keys_age_seconds", text).set_function(age_s)

    def watch_homes(self, tallies: Mapping[Role, Mapping[Home, int]]) -> None:
        """As ``watch_in_flight``."""
        self._registry.register(_Tallies(tallies))

    def watch_discovery(self, is_current: Callable[[], bool]) -> None:
        """As ``watch_in_flight``. Call it only where engines are not named at start."""
        up = self._gauge("discovery_up", "Whether changes of the engines reach us")
        up.set_function(is_current)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        by_url = {(sample.role, sample.url): sample for sample in self._samples()}  # An old pod's engine may still end.
        engines = (({"role": role, "engine": url}, one.answered) for (role, url), one in by_url.items())
        own = histogram_text(_PREFIX + "engine_answer_seconds", _ENGINES, engines)
        return generate_latest(self._registry) + (own + self.models.text(_PREFIX + "model_")).encode()


_ENGINES = (
    "Seconds from a call to an engine to its answer, by role and URL: prefill's whole answer without an error, or the "
    "first byte of decode's, if that ended well"
)


class _Tallies(Collector):
    """Where the policy has sent requests, by role and ``Home``."""

    def __init__(self, tallies: Mapping[Role, Mapping[Home, int]]) -> None:
        """``tallies`` go on growing."""
        self._tallies = tallies
        self._created_at = time.time()

    def collect(self) -> Iterator[Metric]:
        text = "Requests by where the policy affinity has sent them at first: their conversation's home, or past it"
        family = CounterMetricFamily(_PREFIX + "affinity", text, labels=("role", "home"))
        for role, tally in self._tallies.items():
            for home, number in tally.items():
                family.add_metric((role.value, home.value), number, created=self._created_at)
        yield family


class _Keys(Collector):
    """The API keys and clients of tokens that have limits, by name."""

    def __init__(self, uses: KeyUses) -> None:
        self._uses = uses
        self._created_at = time.time()

    def collect(self) -> Iterator[Metric]:
        text = "Requests turned away because their client was over a limit, by the name of the key or token's client"
        refused = CounterMetricFamily(_PREFIX + "key_limited", text, labels=("client", "limit"))
        text = "Requests of clients with limits that have not ended, by the name of the key or token's client"
        running = GaugeMetricFamily(_PREFIX + "key_running", text, labels=("client",))
        for name, use in self._uses.all():
            running.add_metric((name,), use.num_running)
            for by, number in use.num_refused.items():
                refused.add_metric((name, by.value), number, created=self._created_at)
        yield refused
        yield running


class _Wait:
    """How long one key's requests have waited, in all."""

    __slots__ = ("num_requests", "total_s")

    def __init__(self) -> None:
        self.num_requests = 0
        self.total_s = 0.0


class _Waits(Collector):
    """The waits in the queue, by the name of the key, or ``jwt:*``."""

    def __init__(self, waits: dict[str, _Wait], names: Callable[[], Container[str]]) -> None:
        self._waits = waits
        self._names = names

    def collect(self) -> Iterator[Metric]:
        names = self._names()
        for gone in [name for name in self._waits if name not in names]:
            del self._waits[gone]
        text = "Seconds in the queue of requests that had to wait and wait no more, by the name of the key, or jwt:*"
        family = SummaryMetricFamily(_PREFIX + "queue_wait_seconds", text, labels=("client",))
        for name, wait in self._waits.items():
            family.add_metric((name,), wait.num_requests, wait.total_s)
        yield family


class _SpanSeconds(Collector):
    """The seconds of all spans, as a histogram."""

    def __init__(self, seconds: dict[Span, Histogram]) -> None:
        self._seconds = seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            _PREFIX + "phase_seconds",
            "Seconds from a request's arrival to its reservation, first body byte and end, and of its prefill alone",
            labels=("phase",),
        )
        for span, one in self._seconds.items():
            family.add_metric((span.value,), one.buckets(), sum_value=one.total)
        yield family


class _Engines(Collector):
    """The engines of the moment, read when the metrics are."""

    def __init__(self, samples: Callable[[], Iterable[EngineSample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        samples = list(self._samples())
        up = GaugeMetricFamily(
            _PREFIX + "engine_up",
            "Whether an engine that was ready answered its last probe, by role and URL",
            labels=("role", "engine"),
        )
        for (role, url), is_up in {(one.role, one.url): one.is_up for one in samples if one.is_up is not None}.items():
            up.add_metric((role, url), float(is_up))
        yield up
        ejected = GaugeMetricFamily(
            _PREFIX + "engine_ejected",
            "Whether the engine gets no requests for a while because its last ones failed, by role and URL",
            labels=("role", "engine"),
        )
        for (role, url), is_ejected in {(one.role, one.url): one.is_ejected for one in samples}.items():
            ejected.add_metric((role, url), float(is_ejected))
        yield ejected
        yield _counted(samples)


def _counted(samples: Iterable[EngineSample]) -> Metric:
    engines = GaugeMetricFamily(
        _PREFIX + "engines",
        "Engines that are known, by role, revision and state; serving ones get new work",
        labels=("role", "revision", "state"),
    )
    for labels, number in Counted((one.role, one.revision, one.state) for one in samples).items():
        engines.add_metric(labels, number)
    return engines
