"""The head of a client's request: HTTP's demands on it, and the headers that concern this connection alone.

Decides what is refused (RFC 9110 and 9112), which id the request has, and which headers engines may see. Knows no
path of ours. The parser has checked names and values: CR, LF and NUL are in none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from pdcluster_router.core.apis.openai_errors import RefusedRequest, bad_request, expectation_failed

Headers = list[tuple[bytes, bytes]]

MAX_ID_BYTES: Final = 128
"""A request id goes into logs, traces and two engines: twice as long as the longest kind in use (a W3C traceparent)."""

ID_HEADER: Final = b"x-request-id"
_GOOD_ID: Final = re.compile(rb"[!-~]{1,%d}" % MAX_ID_BYTES)
_ORIGIN: Final = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
ADDRESS_HEADERS: Final = frozenset(
    (
        b"cf-connecting-ip",
        b"forwarded",
        b"true-client-ip",
        b"x-client-ip",
        b"x-envoy-external-address",
        b"x-forwarded-for",
        b"x-original-forwarded-for",
        b"x-real-ip",
    )
)
"""Headers in which proxies tell a client's address. A client cannot remove one by naming it in ``Connection``. Engines
get none of them."""
PER_CONNECTION: Final = (
    b"connection",
    b"content-length",
    b"expect",
    b"host",
    b"keep-alive",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
)
"""Headers that concern one connection alone (RFC 9110, 7.6.1, 10.1.1 and 11.7), or are written anew for each."""
_KEPT_OPTIONS: Final = frozenset((b"keep-alive", b"close", b"", *ADDRESS_HEADERS))


class RequestHead(msgspec.Struct, frozen=True):
    """``headers``: names in lower case, without those for this hop only. ``content_length``: bytes, 0 for none.

    A Struct, because each request makes one: to make a frozen dataclass takes several times as long.
    """

    headers: Headers
    fields: dict[bytes, bytes]
    """The same headers by name; of equal names the last one."""
    content_length: int
    expects_continue: bool
    request_id: bytes
    """The client's id, of visible characters; empty where it gave none that can be used."""


def read_head(version: str, headers: Headers) -> RequestHead:
    """The head, checked. ``version``: as ``1.1``.

    Raises:
        RefusedRequest: It has two Host headers, none (except in HTTP/1.0), or an Expect other than ``100-continue``.
    """
    fields = dict(headers)
    num_bytes = int(fields[b"content-length"]) if b"content-length" in fields else 0
    is_plain = len(fields) == len(headers) and (b"connection" not in fields or fields[b"connection"] in _KEPT_OPTIONS)
    if is_plain and b"host" in fields and b"expect" not in fields and ID_HEADER not in fields:
        return RequestHead(headers, fields, num_bytes, False, b"")
    if b"host" not in fields and version != "1.0":
        raise RefusedRequest(bad_request("the request has no Host header", "invalid_http"))
    _check_repeated(headers)
    expected = fields.get(b"expect")
    if expected is not None and expected.lower() != b"100-continue":
        raise RefusedRequest(expectation_failed(expected.decode("latin-1")))
    given_id = fields.get(ID_HEADER)
    if not is_plain:
        headers = without_hop(headers)
        fields = dict(headers)
    request_id = b"" if given_id is None else _id_in(given_id, headers)
    return RequestHead(headers, fields, num_bytes, expected is not None, request_id)


def request_id_in(headers: Headers) -> bytes:
    """The client's id, of visible characters; empty where it gave none that can be used."""
    given = dict(headers).get(ID_HEADER)
    return b"" if given is None else _id_in(given, headers)


def path_of(target: bytes) -> bytes:
    """The path that a request target names, in origin form or absolute form, its escapes decoded.

    Example: ``http://a/v1/%63ompletions?x#y`` → ``/v1/completions``.
    """
    if target[:1] != b"/":
        target = _ORIGIN.sub(b"", target, count=1)
    path = target.partition(b"?")[0].partition(b"#")[0] or b"/"
    return unquote_to_bytes(path) if b"%" in path else path


def origin_form(target: bytes) -> bytes:
    """The same target without scheme and host."""
    if target[:1] == b"/":
        return target
    bare = _ORIGIN.sub(b"", target, count=1)
    return b"/" + bare if bare[:1] in (b"", b"?") else bare


def hop_options(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """The headers for one hop: those that ``Connection`` names, without ``_KEPT_OPTIONS``."""
    values = (value for name, value in headers if name == b"connection")
    return {option.strip().lower() for value in values for option in value.split(b",")} - _KEPT_OPTIONS


def without_hop(headers: Headers) -> Headers:
    """The headers without ``hop_options`` (RFC 9110, 7.6.1)."""
    named = hop_options(headers)
    return [header for header in headers if header[0] not in named] if named else headers


def _check_repeated(headers: Headers) -> None:
    names = [name for name, _ in headers]
    if names.count(b"host") > 1:
        raise RefusedRequest(bad_request("the request has two Host headers", "invalid_http"))


def _id_in(given: bytes, headers: Headers) -> bytes:
    is_one = sum(name == ID_HEADER for name, _ in headers) == 1
    return given if is_one and _GOOD_ID.fullmatch(given) else b""
