"""A client of engines and routers that notes when each token of an answer comes. Calls wait: one thread a request.

It also reads how long an engine worked on a prompt, by the engine's own clock. Source of truth: vLLM 0.32
``v1/metrics/stats.py``: ``vllm:request_prefill_time_seconds`` is the time from a request's first schedule to its first
token, observed when the request ends.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

ANSWER_TOKENS: Final = 16
"""More than one: after a layerwise push, a shorter answer can end before prefill's own reply."""
REQUEST_TIMEOUT_S: Final = 600.0
_PATH: Final = "/v1/completions"
_HEADERS: Final = {"content-type": "application/json"}

Body = dict[str, Any]


class BenchmarkError(Exception):
    """A request failed, so there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where an engine or a router listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """When a request was sent, and when each event with a token came. Monotonic seconds."""

    begun_at: float
    token_times: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.begun_at


def completion_body(prompt: list[int], max_tokens: int = ANSWER_TOKENS, **more: object) -> Body:
    """The body of a greedy completion of token ids, which generates exactly ``max_tokens``."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def _never() -> bool:
    return False


def stream(server: Server, body: Body, is_enough: Callable[[], bool] = _never) -> Streamed:
    """Ask, and note when each token comes. Waits for the whole answer, or leaves at a token when ``is_enough()``.

    Raises:
        BenchmarkError: The answer is an error, breaks off, or holds no token.
    """
    with _exchange(server, {**body, "stream": True}) as (begun_at, response):
        times: list[float] = []
        for _ in filter(_has_token, response):
            times.append(time.monotonic())
            if is_enough():
                break
    if not times:
        raise BenchmarkError("the answer has no token")
    return Streamed(begun_at, tuple(times))


def post(server: Server, body: Body) -> Body:
    """Ask, and wait for the whole answer.

    Raises:
        BenchmarkError: The answer is an error.
    """
    with _exchange(server, body) as (_, response):
        answer: Body = json.loads(response.read())
    return answer


def get_text(server: Server, path: str) -> str:
    """A page of the server's, such as its metrics.

    Raises:
        BenchmarkError: The answer is an error.
    """
    with _exchange(server, None, path) as (_, response):
        return response.read().decode()


@contextmanager
def _exchange(server: Server, body: Body | None, path: str = _PATH) -> Iterator[tuple[float, http.client.HTTPResponse]]:
    """Posts ``body`` to ``path``, or gets ``path`` if ``body`` is None. Yields when it began, and the open response."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=REQUEST_TIMEOUT_S)
    try:
        begun_at = time.monotonic()
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), _HEADERS)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise BenchmarkError(f"HTTP {response.status}: {response.read().decode(errors='replace')[:500]}")
        yield begun_at, response
    except (OSError, http.client.HTTPException) as error:
        raise BenchmarkError(f"{server.host}:{server.port}: {error!r}") from error
    finally:
        connection.close()


def _has_token(line: bytes) -> bool:
    """Whether this line of a stream is an event with a choice.

    Raises:
        BenchmarkError: The event is an error.
    """
    if not line.startswith(b"data: {"):
        return False
    event: Body = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise BenchmarkError(f"the stream broke off: {event['error']}")
    return bool(event.get("choices"))


_METRIC: Final = "vllm:request_prefill_time_seconds"
_LOOK_EVERY_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Count and prefill time of all requests since the engine's start."""

    num_requests: int
    seconds: float


def parse_prefill_times(text: str) -> PrefillTimes:
    """Reads an engine's metrics page. Zeros if the engine has observed no request yet."""
    return PrefillTimes(int(_total(text, "count")), _total(text, "sum"))


def prefill_seconds(engine: Server, ask: Callable[[], object], *, reported_within_s: float = 10.0) -> float:
    """The engine's prefill time for the one request that ``ask`` makes. No other request may run meanwhile. Waits.

    Raises:
        BenchmarkError: The engine did not report exactly one request within ``reported_within_s`` after ``ask``.
    """
    before = parse_prefill_times(get_text(engine, "/metrics"))
    ask()
    give_up_at = time.monotonic() + reported_within_s
    while time.monotonic() < give_up_at:
        after = parse_prefill_times(get_text(engine, "/metrics"))
        if after.num_requests == before.num_requests + 1:
            return after.seconds - before.seconds
        time.sleep(_LOOK_EVERY_S)
    raise BenchmarkError(
        f"{engine.host}:{engine.port} reported {after.num_requests - before.num_requests} requests, not 1"
    )


def _total(text: str, of: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{_METRIC}_{of}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
