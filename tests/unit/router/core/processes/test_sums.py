"""The metrics of several processes, added up."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pdcluster_protocol.labels import Role
from pdcluster_router.core.processes.sums import counts_in, summed
from pdcluster_router.core.telemetry.histogram import COARSE, Histogram
from pdcluster_router.telemetry.failures import FailureKind
from pdcluster_router.telemetry.metrics import EngineSample, Metrics, Outcome, Span


def of_a_process(num_ok: int, seconds: float, *, is_up: bool = True, queued: int = 0) -> str:
    metrics = Metrics()
    for _ in range(num_ok):
        metrics.ended(Outcome.OK)
    metrics.failed(FailureKind.DRAINING)
    metrics.took(Span.TOTAL, seconds)
    metrics.ejected(Role.DECODE)
    metrics.discovery_failed.inc()
    metrics.watch_in_flight(lambda: 3)
    metrics.watch_queue(lambda: queued, lambda: 0, lambda: 0)
    answered = Histogram(COARSE)
    answered.add(seconds)
    metrics.watch_engines(
        lambda: [EngineSample("decode", "http://a\u2028b:1", "r", "serving", is_up, not is_up, answered)]
    )
    metrics.watch_discovery(lambda: is_up)
    return metrics.render().decode()


def numbers(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def number(text: str, name: str, **labels: str) -> float:
    return numbers(text)[name, tuple(sorted(labels.items()))]


def test_the_metrics_of_one_process_stay_as_they_are() -> None:
    text = of_a_process(2, 0.5)
    assert numbers(summed([text])) == numbers(text)
    kept = [line for line in summed([text]).split("\n") if line.startswith("#")]
    assert kept == [line for line in text.split("\n") if line.startswith("#")]


def test_amounts_are_added() -> None:
    text = summed([of_a_process(2, 0.5, queued=1), of_a_process(3, 4.0, queued=4)])
    assert number(text, "pdcluster_router_requests_total", outcome="ok") == 5
    assert number(text, "pdcluster_router_in_flight") == 6
    assert number(text, "pdcluster_router_queue_length") == 5
    assert number(text, "pdcluster_router_phase_seconds_count", phase="total") == 2
    assert number(text, "pdcluster_router_phase_seconds_sum", phase="total") == 4.5
    assert number(text, "pdcluster_router_discovery_failures_total") == 2
    assert number(text, "pdcluster_router_engine_ejections_total", role="decode") == 2


def test_what_is_no_amount_is_not_added() -> None:
    text = summed([of_a_process(1, 1.0), of_a_process(1, 1.0, is_up=False)])
    engine = {"role": "decode", "engine": "http://a\u2028b:1"}
    assert number(text, "pdcluster_router_engine_up", **engine) == 0
    assert number(text, "pdcluster_router_engine_ejected", **engine) == 1
    assert number(text, "pdcluster_router_engines", role="decode", revision="r", state="serving") == 1
    assert number(text, "pdcluster_router_discovery_up") == 0


def test_of_the_ages_of_keys_the_oldest_counts() -> None:
    head = "# HELP pdcluster_router_token_keys_age_seconds A\n# TYPE pdcluster_router_token_keys_age_seconds gauge\n"
    texts = [head + f"pdcluster_router_token_keys_age_seconds {age}\n" for age in (5.0, 70.0, 6.0)]
    assert number(summed(texts), "pdcluster_router_token_keys_age_seconds") == 70


def test_an_engine_has_the_state_in_which_the_asked_process_finds_it() -> None:
    head = "# HELP pdcluster_router_engines E\n# TYPE pdcluster_router_engines gauge\n"
    texts = [head + f'pdcluster_router_engines{{state="{state}"}} 1.0\n' for state in ("serving", "not_ready")]
    assert numbers(summed(texts)) == numbers(texts[0])


def test_a_process_that_has_ended_counts_with_what_it_counted_alone() -> None:
    text = summed([of_a_process(2, 0.5)], [of_a_process(40, 0.5, is_up=False, queued=7)])
    assert number(text, "pdcluster_router_requests_total", outcome="ok") == 42
    assert number(text, "pdcluster_router_phase_seconds_count", phase="total") == 2
    assert number(text, "pdcluster_router_in_flight") == 3
    assert number(text, "pdcluster_router_queue_length") == 0
    assert number(text, "pdcluster_router_engine_up", role="decode", engine="http://a\u2028b:1") == 1


def test_counts_may_be_added_up_in_steps() -> None:
    texts = [of_a_process(num, 0.5 * num) for num in (1, 2, 3)]
    at_once = summed([texts[0]], texts[1:])
    in_steps = summed([texts[0]], [counts_in([counts_in([texts[1]]), texts[2]])])
    assert numbers(in_steps) == numbers(at_once)


def test_a_metric_that_only_one_process_has_is_kept() -> None:
    other = Metrics()
    other.models.of("m").first_byte.add(1.0)
    text = summed([of_a_process(1, 1.0), other.render().decode()])
    assert number(text, "pdcluster_router_model_first_byte_seconds_count", model="m") == 1


def test_the_tokens_of_a_model_are_added_and_a_process_that_has_ended_keeps_its_own() -> None:
    texts = []
    for num_answer in (3, 5, 90):
        one = Metrics()
        one.models.of("m").answered(None, b'{"usage":{"completion_tokens":%d}}' % num_answer)
        texts.append(one.render().decode())
    text = summed(texts[:2], texts[2:])
    name = "pdcluster_router_model_answer_tokens"
    assert (number(text, f"{name}_sum", model="m"), number(text, f"{name}_count", model="m")) == (98, 3)
    assert [number(text, f"{name}_bucket", model="m", le=bound) for bound in ("0.0", "16.0", "256.0")] == [0, 2, 3]


def test_of_when_a_count_began_the_first_one_counts() -> None:
    texts = [of_a_process(1, 1.0) for _ in range(2)]
    began = [number(text, "pdcluster_router_requests_created", outcome="ok") for text in texts]
    assert number(summed(reversed(texts)), "pdcluster_router_requests_created", outcome="ok") == min(began)
