"""The spans of a request: one for itself, one for each call to an engine, and its steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdcluster_protocol.kept import KeptRequest, Moment
from pdcluster_router.core.apis.client_apis import REQUEST_PATHS
from pdcluster_router.core.apis.openai_errors import ENGINE_ERROR
from pdcluster_router.core.telemetry.request_trace import SpanIds
from pdcluster_router.core.telemetry.span_calls import DECODE_FAILURES, PREFILL_FAILURES
from pdcluster_router.core.telemetry.spans import ENGINE_REFUSED, OPERATIONS, SpanKind, TraceSpan, spans_of
from pdcluster_router.telemetry.failures import FailureKind

IDS = SpanIds("0af7651916cd43dd8448eb211c80319c", 0x100, 0xB7)
PAIR = (
    Moment(0.1, "decode_sent", "decode-0"),
    Moment(0.2, "reserved", "decode-0"),
    Moment(0.3, "prefill_sent", "prefill-0", 1),
    Moment(0.6, "prefill_replied", "prefill-0", 1),
    Moment(0.7, "first_byte", "decode-0"),
)


def request_with(*moments: Moment, **facts: object) -> KeptRequest:
    told = {"outcome": "ok", "status": 200, "total_s": 1.0, "queue_s": 0.1, "read_s": 0.5, "path": "/v1/completions"}
    return KeptRequest(request_id="R", moments=moments, **{**told, **facts})  # type: ignore[arg-type]  # by name


def spans(request: KeptRequest, ids: SpanIds = IDS, num_parts: int = 0) -> list[TraceSpan]:
    return spans_of(request, ids, scheme="http", num_parts=num_parts)


def story(found: Sequence[TraceSpan]) -> list[str]:
    """Each span's parent, name, times and error."""
    names = {span.span_id: span.name for span in found}
    return [
        f"{names.get(span.parent_id, '-')} > {span.name} {span.begin_s:g} {span.end_s:g} {span.error}".rstrip()
        for span in found
    ]


def test_a_good_pair_is_told_from_its_first_byte_to_its_end() -> None:
    assert story(spans(request_with(*PAIR))) == [
        "- > POST /v1/completions -0.5 1",
        "POST /v1/completions > receive -0.5 0",
        "POST /v1/completions > queue 0 0.1",
        "POST /v1/completions > decode 0.1 1",
        "decode > reservation 0.1 0.2",
        "decode > first_token 0.6 0.7",
        "decode > answer 0.7 1",
        "POST /v1/completions > prefill 0.3 0.6",
    ]


@pytest.mark.parametrize(
    ("told", "steps"),
    [
        (
            (Moment(0.4, "prefill_queued", "prefill-0", 1), Moment(0.5, "prefill_computes", "prefill-0", 1)),
            [
                "prefill > engine_queue 0.4 0.5",
                "prefill > compute 0.5 0.6",
            ],
        ),
        ((Moment(0.4, "prefill_computes", "prefill-0", 1),), ["prefill > compute 0.4 0.6"]),
        ((Moment(0.1, "prefill_computes", "prefill-0", 1),), ["prefill > compute 0.3 0.6"]),
    ],
)
def test_prefills_queue_and_compute_are_steps_of_its_call(told: tuple[Moment, ...], steps: list[str]) -> None:
    found = story(spans(request_with(*PAIR[:3], *told, *PAIR[3:])))
    assert [line for line in found if line.startswith("prefill >")] == steps
    assert [line for line in found if not line.startswith("prefill >")] == story(spans(request_with(*PAIR)))


def test_the_request_is_a_server_and_calls_to_engines_are_clients() -> None:
    kinds = {span.name: span.kind for span in spans(request_with(*PAIR))}
    assert (kinds["POST /v1/completions"], kinds["decode"], kinds["prefill"], kinds["queue"]) == (
        SpanKind.SERVER,
        SpanKind.CLIENT,
        SpanKind.CLIENT,
        SpanKind.INTERNAL,
    )


def test_a_prompt_that_decode_computes_itself_has_no_prefill() -> None:
    alone = (Moment(0.1, "decode_sent", "decode-0"), Moment(0.4, "first_byte", "decode-0"))
    assert story(spans(request_with(*alone)))[3:] == [
        "POST /v1/completions > decode 0.1 1",
        "decode > local_prefill 0.1 0.4",
        "decode > answer 0.4 1",
    ]


def test_a_prompt_of_which_decode_says_that_it_computes_the_rest() -> None:
    local = (PAIR[0], Moment(0.2, "prefills_locally", "decode-0"), PAIR[4])
    assert story(spans(request_with(*local)))[4:] == [
        "decode > reservation 0.1 0.2",
        "decode > local_prefill 0.2 0.7",
        "decode > answer 0.7 1",
    ]


def test_each_prefill_attempt_is_a_span_and_the_failed_one_says_so() -> None:
    failed = (Moment(0.35, "prefill_failed", "prefill-0", 1, "boom"), Moment(0.4, "prefill_sent", "prefill-1", 2))
    found = spans(request_with(*PAIR[:3], *failed, Moment(0.6, "prefill_replied", "prefill-1", 2), PAIR[4]))
    assert [line for line in story(found) if "> prefill" in line] == [
        "POST /v1/completions > prefill 0.3 0.35 prefill_failed",
        "POST /v1/completions > prefill 0.4 0.6",
    ]
    assert [(one.name, one.at_s, dict(one.attributes)) for one in found[0].events] == [
        ("prefill_failed", 0.35, {"pdcluster.engine": "prefill-0", "pdcluster.attempt": 1})
    ]
    assert found[0].error == ""
    attempts = [(span.name, span.attributes.get("pdcluster.attempt")) for span in found if span.kind is SpanKind.CLIENT]
    assert attempts == [("decode", None), ("prefill", 1), ("prefill", 2)]


def test_no_reason_leaves_the_router_for_it_may_quote_an_engine() -> None:
    found = spans(request_with(*PAIR[:3], Moment(0.35, "prefill_failed", "prefill-0", 1, "needle-5"), outcome="lost"))
    assert "needle-5" not in repr(found)


def test_an_attempt_whose_kv_did_not_come_failed_although_it_was_answered() -> None:
    found = spans(request_with(*PAIR[:4], Moment(0.65, "attempt_lost", "prefill-0", 1), outcome="lost", status=502))
    assert "POST /v1/completions > prefill 0.3 0.6 attempt_lost" in story(found)


def test_decode_that_computes_after_all_prefill_has_failed() -> None:
    gone = (Moment(0.4, "prefill_failed", "prefill-0", 1), Moment(0.4, "prefill_exhausted"), PAIR[4])
    assert "decode > local_prefill 0.4 0.7" in story(spans(request_with(*PAIR[:3], *gone)))


def test_each_decode_engine_has_a_span_and_the_first_one_ends_where_the_next_begins() -> None:
    again = (Moment(0.25, "decode_lost", "decode-0"), Moment(0.3, "decode_sent", "decode-1"))
    found = story(spans(request_with(*PAIR[:2], *again, Moment(0.7, "first_byte", "decode-1"))))
    assert [line for line in found if "> decode" in line] == [
        "POST /v1/completions > decode 0.1 0.25 decode_lost",
        "POST /v1/completions > decode 0.3 1",
    ]


@pytest.mark.parametrize(
    ("facts", "error", "error_type"),
    [
        ({"status": 400, "outcome": "engine_error", "error": "engine_error"}, "", "engine_error"),
        ({"status": 429, "outcome": "overloaded", "error": "queue_full"}, "", "queue_full"),
        ({"status": 502, "outcome": "lost", "error": "decode_lost"}, "decode_lost", "decode_lost"),
        ({"status": None, "outcome": "client_gone"}, "client_gone", "client_gone"),
        ({"status": 500, "outcome": "", "error": "internal_error"}, "internal_error", "internal_error"),
        ({"status": None, "outcome": ""}, "unknown", "unknown"),
    ],
)
def test_a_clients_mistake_is_no_error_of_the_server(facts: dict[str, object], error: str, error_type: str) -> None:
    span = spans(request_with(**facts))[0]
    assert (span.error, span.attributes["error.type"]) == (error, error_type)


def test_decodes_refusal_is_an_error_of_its_call() -> None:
    refused = request_with(PAIR[0], status=404, outcome="engine_error", error=ENGINE_ERROR)
    assert "POST /v1/completions > decode 0.1 1 404" in story(spans(refused))
    assert ENGINE_REFUSED == ENGINE_ERROR


def test_attributes_have_the_names_of_opentelemetrys_conventions() -> None:
    request = request_with(
        *PAIR, path="/v1/chat/completions", is_stream=True, model="m", prompt_tokens=9, cached_tokens=4, client="team"
    )
    assert spans(request)[0].attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.provider.name": "vllm",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.time_to_first_chunk": 0.7,
        "pdcluster.request_id": "R",
        "pdcluster.client": "team",
        "pdcluster.outcome": "ok",
    }


def test_each_path_is_an_operation_and_each_failure_of_an_engine_is_a_kind() -> None:
    assert {path.encode() for path in OPERATIONS} == REQUEST_PATHS
    assert {kind.value for kind in FailureKind} >= PREFILL_FAILURES | DECODE_FAILURES


def test_a_request_in_parts_has_its_own_span_alone_and_parts_have_the_calls() -> None:
    whole = spans(request_with(*PAIR), num_parts=2)
    assert story(whole) == ["- > POST /v1/completions -0.5 1", "POST /v1/completions > receive -0.5 0"]
    assert whole[0].attributes["pdcluster.parts"] == 2
    part = spans(request_with(*PAIR), SpanIds(IDS.trace_id, 0x900, IDS.span_id, is_part=True))
    assert (part[0].name, part[0].parent_id, part[0].begin_s) == ("part", IDS.span_id, 0.0)
    assert part[0].attributes == {"pdcluster.request_id": "R", "pdcluster.outcome": "ok"}
    assert [span.name for span in part[1:]] == ["queue", "decode", "reservation", "first_token", "answer", "prefill"]


def test_a_part_that_failed_has_the_kind_of_its_failure() -> None:
    lost = request_with(PAIR[0], status=502, outcome="lost", error="decode_lost")
    part = spans(lost, SpanIds(IDS.trace_id, 0x900, IDS.span_id, is_part=True))[0]
    assert (part.error, part.attributes["error.type"]) == ("decode_lost", "decode_lost")


def test_a_request_that_was_only_read_has_the_time_of_that() -> None:
    assert story(spans(KeptRequest(request_id="R", path="/v1/completions", read_s=2.0, turn_s=0.5)))[1:] == [
        "POST /v1/completions > receive -2.5 -0.5",
        "POST /v1/completions > turn -0.5 0",
    ]
