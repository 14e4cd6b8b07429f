"""``pdcluster why`` of requests that real engines served: engines, tokens and times are those that others tell."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

from integration.harness import Harness, Pool, eventually
from integration.prompts import BLOCK
from patience import PATIENCE_S
from pdcluster_cli.processes.engines import LOOPBACK

pytestmark = pytest.mark.engines

LEAST_PUSHED: Final = 100
"""Of shorter prompts decode computes all itself."""
CACHED: Final = 2 * BLOCK
"""Of the prompt that is pushed and streamed: another request has brought them to decode before."""
LENGTHS: Final = {"pushed": CACHED + 150, "alone": 200, "local": 40}
STREAM: Final = {"stream": True, "stream_options": {"include_usage": True}}
ROW: Final = re.compile(r" *(-?\d+\.\d{3}) s +(?:(\d+\.\d{3}) s)?  (.*)")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and what its client saw."""

    name: str
    prompt_tokens: int
    first_byte_s: float


@dataclass(frozen=True, slots=True)
class Page:
    """What the command has printed."""

    text: str

    @property
    def rows(self) -> list[tuple[float, float, str]]:
        """Milliseconds since its arrival, and until the next one; and what happened."""
        found = [ROW.fullmatch(line) for line in self.text.splitlines()]
        return [(1e3 * float(row[1]), 1e3 * float(row[2] or 0), row[3]) for row in found if row is not None]

    @property
    def story(self) -> list[str]:
        return [what for _, _, what in self.rows]

    @property
    def first_byte_ms(self) -> float:
        (at_ms,) = [at_ms for at_ms, _, what in self.rows if what.startswith("first byte")]
        return at_ms

    @property
    def parts_ms(self) -> list[float]:
        """Of the time to first byte."""
        rows = self.rows[: self.story.index("first byte from decode-0")]
        return [took_ms for at_ms, took_ms, _ in rows if at_ms >= 0]  # Before 0 its bytes came.


@pytest.fixture(scope="module")
def pool(harness: Harness) -> Iterator[Pool]:
    with harness.start_pool(decode_connector={"min_push_tokens": LEAST_PUSHED}) as pool:
        yield pool


def ask(pool: Pool, name: str, prompt: list[int], **more: Any) -> Asked:
    """The whole answer has come."""
    connection = http.client.HTTPConnection(LOOPBACK, pool.router.port, timeout=PATIENCE_S)
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, **more}
    begun_at = time.monotonic()
    headers = {"content-type": "application/json", "x-request-id": name}
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    response = connection.getresponse()
    first = response.read(1)
    first_byte_s = time.monotonic() - begun_at
    text = (first + response.read()).decode()
    connection.close()
    assert response.status == 200, text
    if "stream" in more:
        (text,) = [line.removeprefix("data: ") for line in text.splitlines() if '"usage":{' in line]
    return Asked(name, json.loads(text)["usage"]["prompt_tokens"], first_byte_s)


def why(pool: Pool, name: str) -> Page:
    """As a user asks."""
    command = [sys.executable, "-m", "pdcluster_cli", "why", name]
    url = f"http://{LOOPBACK}:{pool.router.internal_port}"
    done = subprocess.run([*command, "--url", url], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert f"{name} went well after " in done.stdout
    return Page(done.stdout)


def trace_of(pool: Pool, name: str) -> Mapping[str, Any]:
    """The router's own trace line."""
    assert eventually(lambda: any(line["request_id"] == name for line in pool.router.read_trace("request")))
    (line,) = [line for line in pool.router.read_trace("request") if line["request_id"] == name]
    return line


def num_pushes(pool: Pool, trace: Mapping[str, Any]) -> int:
    pushes = pool.prefill[0].read_trace("push")
    return sum(push["transfer_id"] == trace["transfer_id"] for push in pushes)


@pytest.mark.parametrize("more", [{}, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("kind", ["pushed", "local", "alone"])
def test_why_tells_the_truth_of_a_request_that_went_well(pool: Pool, kind: str, more: dict[str, Any]) -> None:
    has_cached = kind == "pushed" and bool(more)
    prompt = [100 + (number * (11 + len(kind) + len(more))) % 700 for number in range(LENGTHS[kind])]
    if has_cached:
        ask(pool, "before", prompt[: CACHED + 1])
    asked = ask(pool, f"{kind}-{len(more)}", prompt, **more, **({"best_of": 2} if kind == "alone" else {}))
    page, trace = why(pool, asked.name), trace_of(pool, asked.name)
    decode = {
        "pushed": ["decode-0 has reserved blocks for its KV"],
        "local": ["decode-0 computes the rest of the prompt itself"],
        "alone": [],
    }[kind]
    parts = ("sent to prefill-0", "prefill-0 computes the prompt", "prefill-0 has done its part")
    prefill = [f"attempt 1: {part}" for part in parts] if kind == "pushed" else []
    told = [
        "its head and body come",
        "waits to be admitted",
        "sent to decode-0",
        *decode,
        *prefill,
        "first byte from decode-0",
        "ended",
    ]
    story = [what for what in page.story if what != "attempt 1: waits in the queue of prefill-0"]  # As it comes.
    assert sorted(story) == sorted(told)  # Prefill's reply may come after decode's first byte.
    assert page.story[:3] == told[:3]
    # Engines.
    assert f"decode-0 is {pool.decode[0].url}" in page.text
    assert (f"prefill-0 is {pool.prefill[0].url}" in page.text) == (kind == "pushed")
    assert eventually(lambda: num_pushes(pool, trace) == (kind == "pushed"))
    # Tokens.
    assert asked.prompt_tokens == len(prompt)
    if kind == "alone":
        assert "prompt tokens" not in page.text, "no engine has said how many there are"
    else:
        words = f", {CACHED} of them cached on decode" if has_cached else ""
        assert f", {asked.prompt_tokens} prompt tokens{words}, transfer {trace['transfer_id']}" in page.text
    assert (", stream" in page.text) == bool(more)
    # Times.
    first_byte_ms = 1e3 * (trace["first_byte_at"] - trace["received_at"])
    assert sum(page.parts_ms) == pytest.approx(page.first_byte_ms, abs=0.001)
    assert page.first_byte_ms == pytest.approx(first_byte_ms, rel=0.01, abs=1.0)
    assert page.first_byte_ms <= 1e3 * asked.first_byte_s + 1.0
