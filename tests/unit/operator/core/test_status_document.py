"""Status as JSON and back."""

from __future__ import annotations

from dataclasses import replace

from fakes.operator_cluster import make_cluster
from operator_cases.statuses import FIRST
from pdcluster_operator.core.seen.picture import Routers
from pdcluster_operator.core.status.conditions import Condition, Counts, Reason, Status, Truth, Type
from pdcluster_operator.core.status.pool_status import reduce_status
from pdcluster_operator.core.status_document import bare_document, read_status, status_document

COUNTS = Counts(wanted=3, least=2, replicas=4, updated=2, ready=3, updated_ready=1, terminating=1)
STATUS = Status(
    observed_generation=7,
    target="aaaaaaaa-bbbbbbbb-cccccccc",
    verified="",
    prefill=COUNTS,
    decode=Counts(),
    conditions=(
        Condition(Type.PROGRESSING, Truth.TRUE, Reason.ROLLING_OUT, "1 of 3", 7, 1_700_000_000, 1_700_000_100),
        Condition(Type.READY, Truth.FALSE, Reason.ROLLING_OUT, "not yet", 7, 1_700_000_001),
    ),
)


def written(status: Status) -> dict[str, object]:
    return status_document(status, make_cluster().spec, Routers(2, 1), "http://x")


def test_what_was_written_reads_as_what_was_meant() -> None:
    read = read_status(written(STATUS))
    assert read == replace(STATUS, prefill=replace(COUNTS, least=0))
    verified = replace(STATUS, verified=STATUS.target)
    assert read_status(written(verified)) == replace(verified, prefill=replace(COUNTS, least=0))


def test_printer_columns_and_addresses_are_there() -> None:
    found = written(STATUS)
    assert found["model"] == "tiny"
    assert found["url"] == "http://x"
    assert found["router"] == {"replicas": 2, "ready": 1}
    assert found["roles"]["prefill"]["summary"] == "3/3x1"  # type: ignore[index]


def test_the_same_status_is_the_same_document() -> None:
    """Else every look would be a write."""
    read = read_status(written(STATUS))
    assert read is not None
    assert written(read) == written(STATUS)


def test_no_status_and_one_that_cannot_be_read_are_none() -> None:
    assert read_status(None) is None
    assert read_status({}) is None
    assert read_status({**written(STATUS), "conditions": "none"}) is None


def test_of_a_newer_operators_status_what_is_known_is_read_and_its_proof_stays_one() -> None:
    proven = replace(STATUS, verified=STATUS.target)
    newer = written(proven)
    newer["fieldOfTheFuture"] = 1
    newer["conditions"][0]["reason"] = "OfTheFuture"  # type: ignore[index]
    assert read_status(newer) == replace(proven, prefill=replace(COUNTS, least=0), conditions=(STATUS.conditions[1],))


def test_of_an_object_that_nobody_can_read_only_conditions_are_told() -> None:
    assert set(bare_document(STATUS)) == {"observedGeneration", "conditions"}


def test_a_refusal_that_is_longer_than_the_api_server_takes_is_told_all_the_same() -> None:
    """It quotes the spec, and without it nobody would hear why nothing moves."""
    status = reduce_status(replace(FIRST, refusal="podOverrides is " + "A" * 600_000), None, now=0)
    [accepted] = [one for one in bare_document(status)["conditions"] if one["type"] == "Accepted"]
    assert accepted["message"].startswith("podOverrides is AAAA")
    assert written(status)["conditions"] == bare_document(status)["conditions"]
