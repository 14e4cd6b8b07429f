"""A router's own errors as a client of Anthropic's Messages API reads them.

    {"type": "error", "error": {"type": "overloaded_error", "message": "...", "code": "no_decode_engine"}}

``type`` is Anthropic's name for the status. ``code`` is the router's own, and the same on every path.
``openai_errors.py`` declares the errors.
"""

from __future__ import annotations

from typing import Final

import orjson

from pdcluster_router.core.apis import sse
from pdcluster_router.core.apis.openai_errors import ApiError

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def type_of(status: int) -> str:
    """Anthropic's name for an error with this status."""
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")


def error_body(error: ApiError) -> bytes:
    """The JSON body."""
    said = {"type": type_of(error.status), "message": error.message, "code": error.code}
    if error.param is not None:  # vLLM answers this error too: here with its own type and without a code.
        said = {"type": error.type, "message": error.message}
    return orjson.dumps({"type": "error", "error": said})


def error_event(error: ApiError) -> bytes:
    """One event that tells ``error`` in a stream that has begun."""
    return b"event: error\ndata: %b\n\n" % error_body(error)


def refusal_event(body: bytes) -> bytes:
    """One event that tells an engine's error body as it is."""
    return b"event: error\n" + sse.refusal_event(body)
