"""Which error an answer of the API server is."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.core.answers import error_of
from pdcluster_operator.errors import (
    ApiUnavailable,
    Conflict,
    Exists,
    Forbidden,
    KubeError,
    NotFound,
    OwnConflict,
    Refused,
    Taken,
    Unauthenticated,
)


def answer(status: int, retry_after: str = "", **body: Any) -> KubeError:
    return error_of("PATCH /x", status, body or None, b"plain words", retry_after)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Refused),
        (401, Unauthenticated),
        (403, Forbidden),
        (404, NotFound),
        (408, ApiUnavailable),
        (409, Conflict),
        (410, ApiUnavailable),
        (415, Refused),
        (422, Refused),
        (429, ApiUnavailable),
        (500, ApiUnavailable),
        (503, ApiUnavailable),
        (504, ApiUnavailable),
    ],
)
def test_each_status_has_one_error(status: int, kind: type[KubeError]) -> None:
    assert type(answer(status)) is kind


def test_an_answer_that_is_no_json_is_no_answer() -> None:
    assert type(answer(200)) is ApiUnavailable


def test_the_servers_own_words_are_in_the_message() -> None:
    assert str(answer(422, message="spec.x: Invalid value")) == "PATCH /x: 422 spec.x: Invalid value"
    assert str(answer(502)) == "PATCH /x: 502 plain words"


def test_an_object_that_is_there_already_is_told_from_an_old_picture() -> None:
    assert type(answer(409, reason="AlreadyExists", message="m")) is Exists


def conflict(*managers: str) -> KubeError:
    causes = [{"reason": "FieldManagerConflict", "message": name, "field": ".spec.replicas"} for name in managers]
    return answer(409, reason="Conflict", message="Apply failed", details={"causes": causes})


def test_a_field_of_another_manager_is_taken_and_named() -> None:
    error = conflict('conflict with "kubectl-edit" using apps/v1')
    assert type(error) is Taken
    assert '.spec.replicas (conflict with "kubectl-edit" using apps/v1)' in str(error)
    assert "pdcluster-operator sets this too: leave it to us" in str(error)
    assert (error.fields, error.by) == ((".spec.replicas",), ("kubectl-edit",))


def test_a_field_that_we_wrote_another_way_is_not_somebody_elses() -> None:
    own = 'conflict with "pdcluster-operator" with subresource "scale" using apps/v1'
    assert type(conflict(own)) is OwnConflict
    assert type(conflict(own, 'conflict with "kubectl"')) is Taken
    assert type(conflict('conflict with "pdcluster-operator-of-somebody"')) is Taken


def test_retry_after_is_heeded_and_nonsense_is_not() -> None:
    error = answer(429, "7")
    assert isinstance(error, ApiUnavailable)
    assert error.retry_after_s == 7
    nonsense = answer(429, "Wed, 21 Oct 2026 07:28:00 GMT")
    assert isinstance(nonsense, ApiUnavailable)
    assert nonsense.retry_after_s == 0


def test_an_object_that_is_no_longer_the_one_that_was_seen_is_a_conflict() -> None:
    """The API server says that its uid cannot change."""
    causes = [{"reason": "FieldValueInvalid", "message": "field is immutable", "field": "metadata.uid"}]
    assert type(answer(422, reason="Invalid", message="m", details={"causes": causes})) is Conflict
    others = [{**causes[0], "field": "spec.selector"}]
    assert type(answer(422, reason="Invalid", message="m", details={"causes": others})) is Refused
