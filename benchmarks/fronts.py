"""Sends a request to each kind of pool, and says how long it took.

    SingleFront     one engine
    RouterFront     our router; its trace and prefill's tell about the push
    MooncakeFront   upstream's MooncakeConnector: both engines at once, as its proxy does
    NixlFront       upstream's NixlConnector: prefill first, then decode with prefill's parameters, as its proxy does

The last two play the proxies of these connectors themselves, so that a request pays for no further hop.
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.client import Server, completion_body, post, stream
from benchmarks.ttft_figures import Answer

_HERE_IS_NOTHING: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Front(Protocol):
    """The receiver of one way's requests."""

    @property
    def trace_files(self) -> tuple[Path, ...]:
        """The files that tell about transfers; empty if there are none."""

    def ask(self, prompt: list[int]) -> Answer:
        """Makes one request. Any thread; waits for the answer.

        Raises:
            BenchmarkError: The request failed.
        """


@dataclass(frozen=True, slots=True)
class SingleFront:
    """One engine that does prefill and decode."""

    server: Server
    trace_files: tuple[Path, ...] = ()

    def ask(self, prompt: list[int]) -> Answer:
        answer = stream(self.server, completion_body(prompt))
        return Answer(answer.ttft_s, answer.ttft_s)


@dataclass(frozen=True, slots=True)
class RouterFront:
    """Our pool. The router's trace says what prefill took. ``prefill``: the address of the prefill engine."""

    server: Server
    prefill: Server
    trace_files: tuple[Path, ...]

    def ask(self, prompt: list[int]) -> Answer:
        return Answer(stream(self.server, completion_body(prompt)).ttft_s, None)


@dataclass(frozen=True, slots=True)
class MooncakeFront:
    """``bootstrap``: where decode learns of prefill's ranks."""

    prefill: Server
    decode: Server
    engine_id: str
    bootstrap: Server
    trace_files: tuple[Path, ...] = ()
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    def ask(self, prompt: list[int]) -> Answer:
        transfer_id = uuid.uuid4().hex
        send = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        receive = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": self.engine_id,
            "remote_bootstrap_addr": f"http://{self.bootstrap.host}:{self.bootstrap.port}",
        }
        prefill = self._threads.submit(_time_prefill, self.prefill, prompt, send)
        answer = stream(self.decode, completion_body(prompt, kv_transfer_params=receive))
        return Answer(answer.ttft_s, prefill.result()[0])


@dataclass(frozen=True, slots=True)
class NixlFront:
    """Prefill's answer says where its blocks are."""

    prefill: Server
    decode: Server
    trace_files: tuple[Path, ...] = ()

    def ask(self, prompt: list[int]) -> Answer:
        begun_at = time.monotonic()
        prefill_s, params = _time_prefill(self.prefill, prompt, _HERE_IS_NOTHING)
        answer = stream(self.decode, completion_body(prompt, kv_transfer_params=params))
        return Answer(answer.token_times[0] - begun_at, prefill_s)


def _time_prefill(server: Server, prompt: list[int], params: dict[str, Any]) -> tuple[float, Any]:
    """Seconds that prefill took to answer, and the parameters of its answer for decode."""
    begun_at = time.monotonic()
    answer = post(server, completion_body(prompt, max_tokens=1, kv_transfer_params=params))
    return time.monotonic() - begun_at, answer.get("kv_transfer_params")
