"""What ``pdcluster why`` prints of a request."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pdcluster_cli.cluster.request_text import describe, duration
from pdcluster_protocol.kept import KeptRequest, LineAhead, Moment, QueueAhead

FAILED = KeptRequest(
    request_id="R-7",
    transfer_id="5d41",
    client="team-a",
    model="m",
    path="/v1/completions",
    is_stream=True,
    ended_at_unix_s=1000.0,
    total_s=3.214,
    queue_s=0.5,
    client_address="203.0.113.7",
    status=502,
    outcome="prefill_failed",
    error="prefill_failed",
    prompt_tokens=300,
    cached_tokens=16,
    moments=(
        Moment(0.5, "decode_sent", "decode-0"),
        Moment(0.504, "reserved", "decode-0"),
        Moment(0.505, "prefill_sent", "prefill-1", 1),
        Moment(3.213, "prefill_failed", "prefill-1", 1, "prefill-1 answered 500"),
    ),
    cause="it broke",
    cure="Mend it.",
)


def test_a_failed_request_is_told_from_its_arrival_to_its_cure() -> None:
    text = describe(FAILED, {"decode-0": "pod-d", "prefill-1": "http://p:1", "prefill-9": "x"}, "router-1")
    assert text == (
        "R-7 failed: 502 prefill_failed after 3.214 s, 1970-01-01 00:16:40 UTC (told by router-1)\n"
        "POST /v1/completions, stream, 300 prompt tokens, 16 of them cached on decode, model m, key team-a, "
        "from 203.0.113.7, transfer 5d41\n"
        "\n"
        "         at       took\n"
        "    0.000 s    0.500 s  waits to be admitted\n"
        "    0.500 s    0.004 s  sent to decode-0\n"
        "    0.504 s    0.001 s  decode-0 has reserved blocks for its KV\n"
        "    0.505 s    2.708 s  attempt 1: sent to prefill-1\n"
        "    3.213 s    0.001 s  attempt 1: prefill_failed prefill-1: prefill-1 answered 500\n"
        "    3.214 s             ended\n"
        "\n"
        "decode-0 is pod-d, prefill-1 is http://p:1\n"
        "\n"
        "cause: it broke\n"
        "cure:  Mend it."
    )


def test_a_request_that_went_well_has_no_cause() -> None:
    text = describe(KeptRequest(request_id="R", ended_at_unix_s=1000.0, total_s=1.0, outcome="ok", status=200), {}, "u")
    assert text.startswith("R went well after 1.000 s, 1970-")
    assert "cause" not in text


def test_a_request_that_runs_ends_with_now() -> None:
    text = describe(KeptRequest(request_id="R", total_s=2.5, queue_s=2.5, cause="it waits", cure="Wait."), {}, "u")
    assert text.startswith("R has not ended: it runs for 2.500 s")
    assert "  now\n\ncause: it waits" in text


def test_a_request_that_was_refused_as_it_came_has_no_times() -> None:
    refused = KeptRequest(request_id="R", ended_at_unix_s=1.0, status=401, error="invalid_api_key", outcome="rejected")
    assert "took" not in describe(refused, {}, "u")
    assert describe(refused, {}, "u").startswith("R failed: 401 invalid_api_key, 1970-")


@pytest.mark.parametrize(
    ("seconds", "told"), [(5, "5 s"), (119, "119 s"), (130, "2 minutes"), (7300, "2 hours"), (9e5, "10 days")]
)
def test_a_duration_is_told_in_the_largest_unit_of_which_there_are_two(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_the_times_that_are_shown_add_up() -> None:
    moments = tuple(Moment(0.0006 + 0.0013 * number, "decode_lost") for number in range(40))
    text = describe(KeptRequest(request_id="R", total_s=0.0608, queue_s=0.0, moments=moments), {}, "u")
    rows = [line.split() for line in text.splitlines()[4:]]
    tooks = [float(row[2]) for row in rows[:-1]]
    assert [round(sum(tooks[:number]), 3) for number in range(len(rows))] == [float(row[0]) for row in rows]


def test_the_time_before_its_arrival_is_below_0_and_adds_up_too() -> None:
    request = KeptRequest(request_id="R", total_s=0.5, read_s=2.0004, turn_s=0.0301, queue_s=0.1)
    assert describe(request, {}, "u").splitlines()[4:] == [
        "   -2.030 s    2.000 s  its head and body come",
        "   -0.030 s    0.030 s  waits for its turn behind others",
        "    0.000 s    0.500 s  waits to be admitted",
        "    0.500 s             now",
    ]


def test_no_word_of_a_router_or_a_file_is_a_command_to_the_terminal() -> None:
    words = "\x1b[2J\u2028\nR went well"
    evil = KeptRequest(
        request_id=words,
        ended_at_unix_s=1.0,
        total_s=1.0,
        model=words,
        outcome=words,
        moments=(Moment(0, words, words, 1, words),),
        cause=words,
        cure=words,
    )
    lines = describe(evil, {words: words}, words).split("\n")
    assert len(lines) == 11
    assert all(line.isprintable() for line in lines)


def test_a_client_that_has_its_answer_is_told_of_while_prefill_still_replies() -> None:
    text = describe(KeptRequest(request_id="R", total_s=1.0, outcome="ok", status=200), {}, "u")
    assert text.startswith("R went well after 1.000 s, and prefill's own reply is still to come (told by u)")


def test_the_first_byte_of_no_engine_is_the_clients() -> None:
    text = describe(KeptRequest(request_id="R", total_s=1.0, moments=(Moment(0.5, "first_byte"),)), {}, "u")
    assert "first byte to the client" in text


def test_another_method_and_bytes_that_were_no_request_are_told() -> None:
    page = KeptRequest(request_id="R", method="GET", path="/v1/models")
    assert describe(page, {}, "u").splitlines()[1] == "GET /v1/models"
    assert "POST" not in describe(KeptRequest(request_id="R", method="", path=""), {}, "u")


def test_a_clock_that_is_behind_the_routers_makes_no_negative_time() -> None:
    assert duration(-7200.0) == "0 s"


def test_what_comes_after_the_answer_stands_after_its_end() -> None:
    late = Moment(1.2, "prefill_replied", "prefill-0", 1)
    request = KeptRequest(request_id="R", total_s=1.0, ended_at_unix_s=1.0, outcome="ok", moments=(late,))
    assert describe(request, {}, "u").splitlines()[4:] == [
        "    1.000 s    0.200 s  ended",
        "    1.200 s             attempt 1: prefill-0 has done its part",
    ]


@pytest.mark.parametrize(
    ("ahead", "says"),
    [
        (
            QueueAhead(queue="prefill", first_turn=3, num_requests=0),
            "no other request was let in while it waited in the queue",
        ),
        (
            QueueAhead(queue="prefill", first_turn=3, num_requests=1, num_known=1, lines=(LineAhead("team-a", 1, 7),)),
            "1 request let in while it waited in the queue: 1 of its own key (7 tokens)",
        ),
        (
            QueueAhead(
                queue="prefill",
                first_turn=3,
                num_requests=90,
                num_known=60,
                lines=(LineAhead("team-b", 40, 900), LineAhead("", 5, 70)),
                num_other_keys=2,
            ),
            "90 requests let in while it waited in the queue; of the last 60: 40 of team-b (900 tokens), "
            "5 without a key (70 tokens), those of 2 other keys",
        ),
        (
            QueueAhead(queue="prefill", first_turn=3, num_requests=90),
            "90 requests let in while it waited in the queue; whose they were is not remembered any more",
        ),
    ],
)
def test_it_is_told_whose_requests_were_ahead(ahead: QueueAhead, says: str) -> None:
    lines = describe(replace(FAILED, ahead=ahead), {}, "u").split("\n")
    assert lines[lines.index("cause: it broke") - 2] == f"ahead: {says}"
    assert not [line for line in describe(FAILED, {}, "u").split("\n") if line.startswith("ahead")]
