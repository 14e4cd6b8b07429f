"""Errors as an OpenAI client reads them: ``{"error": {"message", "type", "param", "code"}}``.

Every error that the router itself answers is declared here, so that status, type and code stay in step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

import orjson

BadRequest = Literal["invalid_request", "invalid_http", "invalid_timeout", "invalid_order"]
"""Codes of a 400."""
ENGINE_ERROR: Final = "engine_error"
"""Code of an engine's error whose body is no error object."""
JWT_PREFIX: Final = "jwt:"
"""Begins the name of each client that shows tokens. No API key's name begins so beside tokens."""
_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_RETRY_AFTER_S: Final = 2
_MAX_NAME_CHARS: Final = 200
"""The most characters of a model's name that an error quotes, the client's or an engine's."""
_PATHS: Final = (
    re.compile(r"/(?:home|lib|mnt|opt|root|srv|tmp|usr|var)(?:/[\w.-]+)+"),
    re.compile(r"(?:/[\w-]+){2,}\.\w+"),
)
"""The texts that vLLM takes for paths of files: below a folder of the system, or with an extension."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """One error answer. ``retry_after_s``: seconds after which trying again may help, None when it will not."""

    status: int
    type: str
    code: str
    message: str
    retry_after_s: int | None = None
    challenge: str = ""
    """The value of WWW-Authenticate in a 401."""
    param: str | None = None
    """The key of the request's body that is wrong. An error that names one has vLLM's form: ``code`` in its body is the
    HTTP status. None: the router's own form."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer, besides the type and length of its body."""
        retry = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return {**retry, "www-authenticate": self.challenge} if self.challenge else retry

    def body(self) -> bytes:
        """The JSON body."""
        code = self.code if self.param is None else self.status
        error = {"message": self.message, "type": self.type, "param": self.param, "code": code}
        return orjson.dumps({"error": error})


class RefusedRequest(Exception):
    """The request is answered with ``error``, and goes to no engine, or to no further one."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


def bad_request(message: str, code: BadRequest = "invalid_request") -> ApiError:
    return ApiError(400, _INVALID, code, message)


def not_found(path: str) -> ApiError:
    return ApiError(404, _INVALID, "not_found", f"there is no {path} here: see /docs for what this router serves")


def model_not_found(name: str, served: str) -> ApiError:
    """As vLLM 0.32 says it (``serve/engine/serving.py``). ``served``: from ``shown_names``."""
    return _not_served(f"The model `{name[:_MAX_NAME_CHARS]}` does not exist. Valid aliases: {served}.")


def alias_not_found(alias: str, served: str) -> ApiError:
    """``alias`` stands for a model that no engine serves. ``served``: from ``shown_names``. The model's own name is not
    told: it may be a place that clients should not see."""
    stands_for = "is an alias here (--model-alias) of a model that no engine serves"
    return _not_served(f"The model `{alias[:_MAX_NAME_CHARS]}` {stands_for}. Valid aliases: {served}.")


def shown_names(names: Iterable[str]) -> str:
    """Names of models with commas between them, for an error."""
    return ", ".join(name[:_MAX_NAME_CHARS] for name in names)


def _not_served(message: str) -> ApiError:
    """vLLM hides the paths of files in all its errors (``serve/exception_handling/utils.py``), so these do too."""
    for path in _PATHS:
        message = path.sub("<path>", message)
    return ApiError(404, "NotFoundError", "model_not_found", message, param="model")


def messages_not_served(reason: str) -> ApiError:
    return ApiError(404, _INVALID, "messages_not_served", f"{reason}: use /v1/chat/completions")


def responses_not_served(reason: str) -> ApiError:
    return ApiError(404, _INVALID, "responses_not_served", f"{reason}: use /v1/chat/completions")


def responses_not_stored() -> ApiError:
    message = "this router stores no responses, and vLLM keeps none here: take the answer of POST /v1/responses"
    return ApiError(404, _INVALID, "responses_not_stored", message)


def method_not_allowed(method: str, path: str) -> ApiError:
    return ApiError(405, _INVALID, "method_not_allowed", f"{path} does not take {method}")


def body_too_large(max_body_bytes: int) -> ApiError:
    message = f"the request body is larger than {max_body_bytes} bytes: shorten it or raise the router's limit"
    return ApiError(413, _INVALID, "body_too_large", message)


def too_many_keys(max_keys: int) -> ApiError:
    return bad_request(f"the request body has more than {max_keys} colons: send less at once")


def headers_too_large(max_header_bytes: int) -> ApiError:
    message = f"the request's headers are larger than {max_header_bytes} bytes"
    return ApiError(431, _INVALID, "headers_too_large", message)


def too_many_headers(max_header_lines: int) -> ApiError:
    message = f"the request has more than {max_header_lines} headers"
    return ApiError(431, _INVALID, "too_many_headers", message)


def expectation_failed(expected: str) -> ApiError:
    message = f"Expect is {expected[:40]!r}: this router knows 100-continue only"
    return ApiError(417, _INVALID, "expectation_failed", message)


def no_room(max_buffered_bytes: int) -> ApiError:
    message = f"the router keeps {max_buffered_bytes} bytes of clients at most and has no room: try again later"
    return ApiError(503, _SERVER, "no_room", message, _RETRY_AFTER_S)


def too_many_connections(max_connections: int) -> ApiError:
    message = f"the router serves {max_connections} connections at most: try again later, or close what is idle"
    return ApiError(503, _SERVER, "too_many_connections", message, _RETRY_AFTER_S)


def client_too_slow(timeout_s: float) -> ApiError:
    return ApiError(408, _INVALID, "client_too_slow", f"the request did not arrive whole within {timeout_s:g} s")


def no_key() -> ApiError:
    message = "this router asks for an API key: send one key, as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
    return ApiError(401, _INVALID, "invalid_api_key", message, challenge="Bearer")


def wrong_key() -> ApiError:
    message = "this API key is not known here: ask who runs this router for one"
    return ApiError(401, _INVALID, "invalid_api_key", message, challenge='Bearer error="invalid_token"')


def no_token(issuer: str, or_key: str) -> ApiError:
    """``or_key``: what clients may show besides; may be empty."""
    message = f"this router asks for a token (JWT) of {issuer}{or_key}: send it as 'Authorization: Bearer TOKEN'"
    return ApiError(401, _INVALID, "invalid_token", message, challenge="Bearer")


def bad_token(reason: str) -> ApiError:
    """``reason``: printable ASCII without quotes and backslashes, and no part of the token."""
    challenge = f'Bearer error="invalid_token", error_description="{reason}"'
    return ApiError(401, _INVALID, "invalid_token", reason, challenge=challenge)


def no_token_keys(issuer: str) -> ApiError:
    """The token may be good: clients' libraries try again after a 503."""
    message = f"the router does not know the keys of {issuer} yet, and can check no token: try again later"
    return ApiError(503, _SERVER, "no_token_keys", message, _RETRY_AFTER_S)


NO_DECODE: Final = "no revision has a prefill and a decode engine to use"


def bad_pass(reason: str) -> ApiError:
    return ApiError(401, _INVALID, "bad_pass", reason)


def too_many_verifications(most: int) -> ApiError:
    message = f"{most} verifications run here already: try again later"
    return ApiError(429, "rate_limit_error", "too_many_verifications", message, _RETRY_AFTER_S)


def nothing_to_verify(reason: str) -> ApiError:
    """No request was made: an engine is missing."""
    return ApiError(503, _SERVER, "nothing_to_verify", reason, _RETRY_AFTER_S)


def not_verified(reason: str) -> ApiError:
    """A request was made, and proved nothing."""
    return ApiError(409, _SERVER, "not_verified", reason)


def not_verifiable(reason: str) -> ApiError:
    """No request was made, because no request could prove anything."""
    return ApiError(501, _SERVER, "not_verifiable", reason)


def no_engine(role: str, reason: str) -> ApiError:
    message = f"no {role} engine can be reached: {reason}"
    return ApiError(503, _SERVER, f"no_{role}_engine", message, _RETRY_AFTER_S)


def unanswered(reason: str) -> ApiError:
    message = f"a decode engine was asked and gave no whole answer: {reason}: ask for less at once"
    return ApiError(502, _SERVER, "no_answer", message)


def answer_too_large(num_bytes: int, most: int) -> ApiError:
    message = (
        f"a decode engine's answer has {num_bytes} bytes, and the router has room for {most}: "
        "ask for less at once, or raise its --max-buffered-bytes"
    )
    return ApiError(502, _SERVER, "answer_too_large", message)


def not_ready(problem: str) -> ApiError:
    """Only ``/health`` answers so."""
    return ApiError(503, _SERVER, "not_ready", problem)


def draining() -> ApiError:
    message = "this router is shutting down: send the request again"
    return ApiError(503, _SERVER, "draining", message, _RETRY_AFTER_S)


def stopped() -> ApiError:
    return ApiError(503, _SERVER, "stopped", "the router was stopped before the answer was complete", _RETRY_AFTER_S)


def queue_full(retry_after_s: int) -> ApiError:
    message = "too many requests wait for a prefill engine already: try again later"
    return ApiError(429, "rate_limit_error", "queue_full", message, retry_after_s)


def _subject(client: str) -> str:
    """A client in an error: by its key's name, or by its token."""
    return f"the client {client}" if client.startswith(JWT_PREFIX) else f"the API key {client}"


def too_many_running(key: str, max_concurrent: int, retry_after_s: int | None) -> ApiError:
    message = (
        f"{_subject(key)} may have {max_concurrent} requests at once (max_concurrent), and has as many: "
        "wait until one has ended, or ask who runs this router for more"
    )
    return ApiError(429, "rate_limit_error", "too_many_running", message, retry_after_s)


def too_many_requests(key: str, requests_per_minute: int, retry_after_s: int | None) -> ApiError:
    message = (
        f"{_subject(key)} may send {requests_per_minute} requests a minute (requests_per_minute), and has none left: "
        f"try again in {retry_after_s} s, or ask who runs this router for more"
    )
    return ApiError(429, "rate_limit_error", "too_many_requests", message, retry_after_s)


def too_many_tokens(
    key: str, prompt_tokens_per_minute: int, num_tokens: int, num_left: int, retry_after_s: int | None
) -> ApiError:
    message = (
        f"this prompt counts as {num_tokens} tokens, and of {prompt_tokens_per_minute} a minute "
        f"(prompt_tokens_per_minute) {_subject(key)} has {num_left} left: "
        f"try again in {retry_after_s} s, or ask who runs this router for more"
    )
    return ApiError(429, "rate_limit_error", "too_many_tokens", message, retry_after_s)


def prompt_over_limit(key: str, prompt_tokens_per_minute: int, num_tokens: int) -> ApiError:
    """A 413, because waiting does not help: clients' libraries would try again after a 429."""
    message = (
        f"this prompt counts as {num_tokens} tokens, and {_subject(key)} may send {prompt_tokens_per_minute} "
        "a minute (prompt_tokens_per_minute): shorten it, or ask who runs this router for more"
    )
    return ApiError(413, _INVALID, "prompt_over_limit", message)


def queue_timeout(retry_after_s: int) -> ApiError:
    message = "no prefill engine had room for this request in time: try again later"
    return ApiError(503, _SERVER, "queue_timeout", message, retry_after_s)


def decode_lost(engine: str, reason: str) -> ApiError:
    return ApiError(502, _SERVER, "decode_lost", f"{engine} did not answer to the end: {reason}")


def answer_head_too_large(most: int, cure: str) -> ApiError:
    message = f"a decode engine's answer has more than {most} bytes of headers, and the router takes no more: {cure}"
    return ApiError(502, _SERVER, "answer_head_too_large", message)


def prefill_failed(reason: str) -> ApiError:
    return ApiError(502, _SERVER, "prefill_failed", f"the prompt could not be prefilled: {reason}", _RETRY_AFTER_S)


def deadline_passed(seconds: float, phase: str) -> ApiError:
    return ApiError(504, "timeout", "deadline_passed", f"no complete answer within {seconds:g} s, while {phase}")


def stalled(engine: str, seconds: float, *, is_client: bool) -> ApiError:
    what = "the client took" if is_client else f"{engine} sent"
    return ApiError(504, "timeout", "stalled", f"{what} no byte of the answer for {seconds:g} s")


def bad_gateway_mode(problem: str) -> ApiError:
    """A gateway asks in a way that the picker cannot serve."""
    return ApiError(500, _SERVER, "bad_gateway_mode", problem)


def internal() -> ApiError:
    return ApiError(500, _SERVER, "internal_error", "the router failed on this request: see its log")


BUG: Final = internal()
"""No other error of the router has its code or its status."""


def parse_error(body: bytes | bytearray) -> int | None:
    """The status that an engine's error object names; 500: it names none. None: ``body`` is no error object."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return None
    status = error.get("code")
    return status if isinstance(status, int) and 400 <= status <= 599 else 500


def message_of(body: bytes | bytearray) -> str:
    """The message of an engine's error object."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "an error that cannot be read"
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error)[:_MAX_QUOTED_BYTES]


def from_engine(status: int, body: bytes | bytearray, shaped: Callable[[ApiError], bytes] = ApiError.body) -> bytes:
    """The client's body for an engine's error: ``body`` if it is an error object; else ``shaped`` makes one that quotes
    it."""
    if parse_error(body) is not None:
        return bytes(body)
    text = body[:_MAX_QUOTED_BYTES].decode("utf-8", "replace").strip() or "no message"
    kind = _INVALID if status < 500 else _SERVER
    return shaped(ApiError(status, kind, ENGINE_ERROR, f"the decode engine answered {status}: {text}"))


_MAX_QUOTED_BYTES: Final = 2000
