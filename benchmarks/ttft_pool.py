"""The engines of ``ttft.py``: one single engine, one decode engine, and a prefill engine and router for each push.

    place of prefill                         place of decode (and of the client)
      prefill, push=serial      <----------    router serial     \
      prefill, push=layerwise   <----------    router layerwise   >--  decode,  single engine
              |                                                  /
              +------------------ KV -------------------------->

A place is this machine, or one end of a ``link.py`` link. All engines have one compute thread, so that one core stays
free for lanes, kernel and receiver: with every core computing nothing could be hidden (``facts/measuring.md``).
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.link import End, Link
from benchmarks.ttft_figures import Sample, Transfer, Way, read_transfer

from pdcluster_cli.engines import (
    LOOPBACK,
    ROUTER_MODULE,
    Device,
    EnginePlan,
    Role,
    engine_spec,
    preload_modules,
    router_argv,
    zygote_env,
)
from pdcluster_cli.local.traces import pushes_in, read_traces, requests_in
from pdcluster_cli.tiny_model import WIDE_KV, ensure_tiny_model
from pdcluster_cli.waiting import free_port, wait_healthy
from pdcluster_cli.zygote import EngineSpec, Zygote

MAX_TOKENS: Final = 8192
KV_CACHE_BYTES: Final = 640 << 20
"""10,240 tokens of 64 KiB: the longest prompt and room for its answer."""
ENGINE_ARGS: Final = (
    *("--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching", "--no-enable-log-requests"),
    *("--max-model-len", str(MAX_TOKENS), "--max-num-batched-tokens", str(MAX_TOKENS), "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
)
ANSWER_TOKENS: Final = 16
"""More than one: a layerwise push can be over so early that a shorter answer ends before prefill's own reply."""
START_TIMEOUT_S: Final = 180.0
REQUEST_TIMEOUT_S: Final = 120.0
TRACE_TIMEOUT_S: Final = 10.0
_TRACE_POLL_S: Final = 0.005

Inside = Callable[[], AbstractContextManager[None]]


class BenchmarkError(Exception):
    """A request failed, so there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where processes live: their address as seen by the other place, what they listen on, how to start them there."""

    host: str
    bind_host: str
    inside: Inside


LOCAL: Final = Place(LOOPBACK, LOOPBACK, nullcontext)


def place_at(link: Link, end: End) -> Place:
    """One end of a link."""
    return Place(end.value, "0.0.0.0", lambda: link.inside(end))


@dataclass(frozen=True, slots=True)
class Front:
    """Where one way's requests go, and which trace files tell about them."""

    way: Way
    port: int
    trace_files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """All ways, ready. One thread uses it."""

    client: Place
    fronts: dict[Way, Front]
    _seeds: Iterator[int]

    def ask(self, way: Way, num_tokens: int) -> Sample:
        """One request of ``num_tokens`` random tokens. Waits for its answer and for its trace.

        Raises:
            BenchmarkError: The answer or the transfer failed, or left no trace.
        """
        front = self.fronts[way]
        num_before = len(requests_in(read_traces(front.trace_files)))
        prompt = random.Random(next(self._seeds)).choices(range(100, 1000), k=num_tokens)
        with self.client.inside():
            ttft_s = _time_first_byte(front.port, prompt)
        transfer = None if way is Way.SINGLE else _await_transfer(front, num_before)
        return Sample(way, ttft_s, transfer)


@contextmanager
def start_pool(prefill: Place, decode: Place, folder: Path) -> Iterator[Pool]:
    """All engines and routers answer; they have ended afterwards. Logs and traces are in ``folder``.

    Raises:
        EngineDied: One of them ended while starting; the message holds its last lines.
        TimeoutError: One of them did not answer.
    """
    with ExitStack() as stack:
        starters = [_Starter(_open_zygote(stack, place, folder), place, folder) for place in (prefill, decode)]
        far, near = starters
        single = near.start_engine(Role.SINGLE, "single")
        receiver = near.start_engine(Role.DECODE, "decode")
        senders = {
            Way.SERIAL: far.start_engine(Role.PREFILL, "prefill-serial", push="serial"),
            Way.LAYERWISE: far.start_engine(Role.PREFILL, "prefill-layerwise", push="layerwise"),
        }
        for starter in starters:
            starter.wait_ready()
        fronts = {way: near.start_router(way, prefill.host, sender, receiver) for way, sender in senders.items()}
        near.wait_ready()
        yield Pool(decode, {Way.SINGLE: Front(Way.SINGLE, single.port), **fronts}, itertools.count(1))


def _open_zygote(stack: ExitStack, place: Place, folder: Path) -> Zygote:
    log_path = folder / f"zygote-{place.host}-{len(list(folder.iterdir()))}.log"
    with place.inside():  # the engines are its children, so they live there too
        zygote = Zygote(preload_modules(Device.CPU), env=zygote_env(Device.CPU), log_path=log_path)
    return stack.enter_context(zygote)


class _Starter:
    """Starts processes in one place."""

    def __init__(self, zygote: Zygote, place: Place, folder: Path) -> None:
        self._zygote = zygote
        self._place = place
        self._folder = folder
        self._model = ensure_tiny_model(WIDE_KV)
        self._waiting: list[Callable[[float], None]] = []

    def start_engine(self, role: Role, name: str, **connector: object) -> EnginePlan:
        plan = EnginePlan(
            name=name,
            role=role,
            model=self._model,
            port=self._free_port(),
            log_path=self._folder / f"{name}.log",
            num_threads=1,
            args=(*ENGINE_ARGS, "--host", self._place.bind_host),
            trace_file=self._folder / f"{name}.trace",
            connector={"host": self._place.host, **connector},
        )
        self._start(engine_spec(plan), plan.port)
        return plan

    def start_router(self, way: Way, prefill_host: str, prefill: EnginePlan, decode: EnginePlan) -> Front:
        name, port = f"router-{way.name.lower()}", self._free_port()
        trace_file = self._folder / f"{name}.trace"
        argv = router_argv(
            prefill=[f"http://{prefill_host}:{prefill.port}"],
            decode=[f"http://{LOOPBACK}:{decode.port}"],
            port=port,
            trace_file=trace_file,
            args=(),
        )
        self._start(EngineSpec(name, ROUTER_MODULE, argv, {}, self._folder / f"{name}.log"), port)
        assert prefill.trace_file is not None
        return Front(way, port, (trace_file, prefill.trace_file))

    def wait_ready(self) -> None:
        """Everything that was started answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with self._place.inside():
            while self._waiting:
                self._waiting.pop()(deadline)

    def _start(self, spec: EngineSpec, port: int) -> None:
        handle = self._zygote.start_engine(spec)
        self._waiting.append(lambda deadline: wait_healthy(handle, port, deadline=deadline))

    def _free_port(self) -> int:
        with self._place.inside():
            return free_port()


def _time_first_byte(port: int, prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=REQUEST_TIMEOUT_S)
    try:
        begun = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read1(1)
        ttft_s = time.monotonic() - begun
        answer += response.read()
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK or not _has_token(answer):
        raise BenchmarkError(f"HTTP {response.status}: {answer.decode(errors='replace')[:500]}")
    return ttft_s


def _has_token(answer: bytes) -> bool:
    """Whether the first server-sent event holds a choice, not an error."""
    if not answer.startswith(b"data: {"):
        return False
    event: dict[str, Any] = json.loads(answer.partition(b"\n")[0].removeprefix(b"data: "))
    return bool(event.get("choices"))


def _await_transfer(front: Front, num_before: int) -> Transfer:
    """What router and prefill wrote about the request after the first ``num_before``."""
    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while time.monotonic() < deadline:
        traces = read_traces(front.trace_files)
        for request in requests_in(traces)[num_before:]:
            if transfer := read_transfer(request, pushes_in(traces, request.transfer_id)):
                return transfer
        time.sleep(_TRACE_POLL_S)
    raise BenchmarkError(f"no whole transfer in {', '.join(map(str, front.trace_files))}: the push failed")
