"""An answer says that it is whole where the router wants that, and the engine has ended its request."""

from __future__ import annotations

import pytest
from vllm.v1.request import Request, RequestStatus

from pdcluster_connector.vllm.whole import with_whole
from unit.connector.vllm.test_connector import prefill_connector, request_of

ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION)
STATUSES = [status for status in RequestStatus if status > RequestStatus.PREEMPTED]


def ended(status: RequestStatus, params: object) -> Request:
    request = request_of([5, 6, 7])
    request.status, request.kv_transfer_params = status, params
    return request


@pytest.mark.parametrize("status", STATUSES, ids=str)
def test_only_a_request_that_the_engine_has_ended_is_whole(status: RequestStatus) -> None:
    said = with_whole(ended(status, {"wants_whole": True}), None)
    assert said == ({"pdcluster_is_whole": True} if status in ENDED else None)


@pytest.mark.parametrize("params", [None, {}, "text", {"wants_whole": False}, {"wants_whole": 1}])
def test_an_answer_of_which_the_router_wants_no_word_has_none(params: object) -> None:
    assert with_whole(ended(RequestStatus.FINISHED_STOPPED, params), None) is None


def test_the_word_stands_beside_a_receipt() -> None:
    request = ended(RequestStatus.FINISHED_STOPPED, {"wants_whole": True})
    assert with_whole(request, {"pdcluster_reason": "why"}) == {"pdcluster_reason": "why", "pdcluster_is_whole": True}


def test_the_connector_says_it_as_the_request_ends() -> None:
    connector, request = prefill_connector(), ended(RequestStatus.FINISHED_STOPPED, {"wants_whole": True})
    connector.on_new_request(request)
    assert connector.request_finished(request, []) == (False, {"pdcluster_is_whole": True})
