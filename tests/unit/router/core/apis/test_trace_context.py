"""Which ``traceparent`` names a trace: W3C Trace Context, section 3.2."""

from __future__ import annotations

import pytest

from pdcluster_router.core.apis.request_head import RequestHead
from pdcluster_router.core.apis.trace_context import TRACE_HEADER, remains_of, trace_id_in

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


def found_in(*values: str) -> str:
    headers = [(b"host", b"h"), *((b"traceparent", value.encode()) for value in values)]
    return trace_id_in(headers, dict(headers))


@pytest.mark.parametrize(
    "value",
    [
        f"00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-00",
        f"cc-{TRACE}-{SPAN}-01-what-comes",
        f"00-{TRACE}-{SPAN}-01 \t",  # The parser leaves the space behind a value, which is no part of it.
    ],
)
def test_a_valid_one_names_its_trace(value: str) -> None:
    assert found_in(value) == TRACE


@pytest.mark.parametrize(
    "value",
    [
        "",
        TRACE,
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.what",
        f"00-{TRACE}-{SPAN}-0",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
    ],
)
def test_one_that_is_not_valid_names_none(value: str) -> None:
    assert found_in(value) == ""


def test_two_of_them_name_none() -> None:
    assert found_in(f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01") == ""


def test_without_one_there_is_none() -> None:
    assert found_in() == ""


def remains(*values: str) -> RequestHead:
    headers = [(b"cookie", b"secret"), *((TRACE_HEADER, value.encode()) for value in values)]
    return remains_of(RequestHead(headers, dict(headers), 7, expects_continue=True, request_id=b"R"))


def test_of_a_refused_request_no_more_than_the_trace_remains() -> None:
    left = remains(f"01-{TRACE}-{SPAN}-01-" + "x" * 9999)
    assert left.headers == [(TRACE_HEADER, f"01-{TRACE}-{SPAN}-01".encode())]
    assert trace_id_in(left.headers, left.fields) == TRACE
    assert remains().headers == remains("odd").headers == remains(*[f"00-{TRACE}-{SPAN}-01"] * 2).headers == []
