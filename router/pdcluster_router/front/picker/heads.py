"""The heads of a gateway's requests, and which requests go by unread."""

from __future__ import annotations

from typing import Final

from pdcluster_router.core.apis.client_apis import REQUEST_PATHS
from pdcluster_router.core.apis.openai_errors import (
    RefusedRequest,
    headers_too_large,
    method_not_allowed,
    not_found,
)
from pdcluster_router.core.apis.request_head import Headers, path_of
from pdcluster_router.core.requests.consultation import ErrorReply, GatewayHead
from pdcluster_router.front.pass_on import QUESTIONS, VERSION
from pdcluster_router.http.connection import ResponseHead

JSON_TYPE: Final = b"application/json"
JSON: Final[Headers] = [(b"content-type", JSON_TYPE)]
UNREAD_ERROR: Final = b'{"error":{"message":"the gateway passed it on unread","type":"engine_error"}}'
"""In place of an engine's error that goes by unread, for the router's own records."""
UNREAD: Final = b" "
"""In place of an answer that goes by unread."""
CUT: Final = ErrorReply(502, [], b"")
"""Cuts off a client whose answer has begun: a gateway cannot send it any more."""
PASSED: Final[dict[bytes, bytes]] = {
    **dict.fromkeys((path.encode() for path in QUESTIONS), b"POST"),
    **dict.fromkeys((VERSION.encode(), b"/v1/models"), b"GET"),
}
"""The paths of requests that go by unread, and the method of each."""


def head_in(message: GatewayHead) -> tuple[bytes, bytes, Headers]:
    """Path, method and headers, with a host as HTTP/1.1 has it."""
    named = dict(message.headers)
    headers = [header for header in message.headers if header[0][:1] != b":"]
    if b"host" not in named:
        headers.append((b"host", named.get(b":authority", b"")))
    return path_of(named.get(b":path", b"/")), named.get(b":method", b""), headers


def check_head(headers: Headers, path: bytes, method: bytes, max_header_bytes: int) -> None:
    """Raises: RefusedRequest: The head is too large, or a request for tokens has another method than POST."""
    if num_head_bytes(headers) > max_header_bytes:
        raise RefusedRequest(headers_too_large(max_header_bytes))
    if path in REQUEST_PATHS and method != b"POST":
        raise RefusedRequest(method_not_allowed(method.decode("latin-1"), path.decode()))


def answer_head_in(message: GatewayHead) -> ResponseHead:
    """The head of an engine's answer."""
    named = dict(message.headers)
    headers = [header for header in message.headers if header[0][:1] != b":"]
    length = named.get(b"content-length", b"")
    status = int(named.get(b":status", b"502"))
    return ResponseHead(status, headers, int(length) if length.isdigit() else None, named.get(b"content-type", b""))


def is_stream(head: ResponseHead) -> bool:
    return head.content_type.lower().startswith(b"text/event-stream")


def num_head_bytes(headers: Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def check_passed(path: bytes, method: bytes) -> None:
    """Only what our own door passes on unread goes by. Anything else could be a request for tokens that is counted
    nowhere, or have transfer parameters of the client's own.

    Raises:
        RefusedRequest: It is something else.
    """
    wanted = PASSED.get(path)
    if wanted is None:
        raise RefusedRequest(not_found(path.decode("latin-1")))
    if method != wanted:
        raise RefusedRequest(method_not_allowed(method.decode("latin-1"), path.decode()))
