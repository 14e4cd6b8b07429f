"""Errors in OpenAI's shape."""

from __future__ import annotations

import json

import pytest

from pdcluster_router.core.apis.openai_errors import ApiError, from_engine, no_engine, parse_error


def test_an_error_has_openais_four_keys() -> None:
    body = json.loads(ApiError(400, "t", "c", "m").body())
    assert body == {"error": {"message": "m", "type": "t", "param": None, "code": "c"}}


def test_who_may_try_again_is_told_when() -> None:
    error = no_engine("decode", "refused")
    assert error.status == 503
    assert error.retry_after_s


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"error": {"code": 429}}', 429),
        (b'{"error": {}}', 500),
        (b'{"error": "x"}', None),
        (b"[]", None),
        (b"", None),
    ],
)
def test_an_engines_error_object_is_known(body: bytes, status: int | None) -> None:
    assert parse_error(body) == status


def test_an_engines_own_error_is_kept_as_it_is() -> None:
    body = b'{ "error": {"message": "x", "code": 400} }'
    assert from_engine(400, body) is body


@pytest.mark.parametrize("body", [b"Internal Server Error", b'{"detail": "Not Found"}', b"", b"\xff\xfe"])
def test_any_other_error_body_is_quoted_in_an_error_of_ours(body: bytes) -> None:
    wrapped = json.loads(from_engine(500, body))["error"]
    assert wrapped["code"] == "engine_error"
    assert "500" in wrapped["message"]
