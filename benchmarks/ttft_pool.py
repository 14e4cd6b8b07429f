"""The engines of ``ttft.py``: one single engine, our decode engine, and prefill engines and routers for each push.

    place of prefill                         place of decode (and of the client)
      prefill, push=serial      <----------    router serial     --+
      prefill, push=layerwise   <----------    router layerwise  --+-- decode,  single engine
      prefill of each peer      <----------    client (plays the peer's proxy)  --  decode of each peer
              |                                                  |
              +------------------ KV -------------------------->

All engines have one compute thread, so that one core stays free for lanes, kernel and receiver: if every core computed,
no push could be hidden. A peer's engines are stopped (SIGSTOP) while others have their turn, because each of NIXL's
progress threads takes half a core even when it has nothing to do.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.client import BenchmarkError, Server
from benchmarks.fronts import Front, RouterFront, SingleFront
from benchmarks.peers import start_mooncake, start_nixl
from benchmarks.places import Place, Places
from benchmarks.starter import WIDE_KV, Served, Starter
from benchmarks.ttft_figures import OURS, Answer, Burst, Transfer, Way, read_transfer

from pdcluster_cli.local.report import pushes_in, read_traces, requests_in
from pdcluster_cli.processes.engines import LOOPBACK, PoolRole, secret_env
from pdcluster_cli.processes.zygote import EngineHandle

TRACE_TIMEOUT_S: Final = 10.0
_PEERS: Final[dict[Way, Callable[[Starter, Starter], Front]]] = {
    Way.MOONCAKE: start_mooncake,
    Way.NIXL: start_nixl,
}
_TRACE_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines and routers of all ways, ready. One thread uses it."""

    client: Place
    fronts: dict[Way, Front]
    resting: dict[Way, tuple[EngineHandle, ...]]
    """Engines of peers, by way. They are stopped except in their way's turn."""
    _seeds: Iterator[int]

    def prompt(self, num_tokens: int) -> list[int]:
        """Tokens that no prompt before had."""
        return random.Random(next(self._seeds)).choices(range(100, 1000), k=num_tokens)

    def ask(self, way: Way, num_tokens: int, count: int = 1, at_once: int = 1) -> Burst:
        """Makes ``count`` requests of ``num_tokens`` random tokens, ``at_once`` at any time. Waits for all of them.

        Raises:
            BenchmarkError: An answer or a transfer failed, or left no trace.
        """
        front = self.fronts[way]
        begun_at = time.monotonic()
        prompts = [self.prompt(num_tokens) for _ in range(count)]
        with self._turn_of(way), ThreadPoolExecutor(at_once) as clients:
            answers = tuple(clients.map(lambda prompt: self._ask_inside(front, prompt), prompts))
        if way not in OURS:
            return Burst(answers)
        return Burst(answers, _await_transfers(front.trace_files, begun_at, num_tokens, count))

    @contextmanager
    def _turn_of(self, way: Way) -> Iterator[None]:
        _signal(self.resting.get(way, ()), signal.SIGCONT)
        try:
            yield
        finally:
            _signal(self.resting.get(way, ()), signal.SIGSTOP)

    def _ask_inside(self, front: Front, prompt: list[int]) -> Answer:
        with self.client.inside():
            return front.ask(prompt)


@contextmanager
def start_pool(
    places: Places, folder: Path, ways: Sequence[Way] = tuple(Way), served: Served = WIDE_KV
) -> Iterator[Pool]:
    """All engines and routers answer; they have ended afterwards. Logs and traces are in ``folder``.

    Raises:
        EngineDied: One of them ended while starting; the message holds its last lines.
        TimeoutError: One of them did not answer.
    """
    os.environ.update(secret_env(os.environ))  # parts that listen on a link refuse to start without a secret
    with ExitStack() as stack:
        far, near = (
            stack.enter_context(Starter(place, folder / side, served))
            for place, side in ((places.prefill, "far"), (places.decode, "near"))
        )
        fronts: dict[Way, Front] = {}
        if Way.SINGLE in ways:
            fronts[Way.SINGLE] = SingleFront(Server(LOOPBACK, near.start_engine(PoolRole.SINGLE, "single").port))
        resting = {}
        for way in (way for way in _PEERS if way in ways):
            fronts[way] = _PEERS[way](far, near)
            resting[way] = (*far.take_peers(), *near.take_peers())
        fronts |= _start_ours(far, near, [way for way in OURS if way in ways])
        peers = [engine for engines in resting.values() for engine in engines]
        stack.callback(_signal, peers, signal.SIGCONT)  # a stopped process does not end
        _signal(peers, signal.SIGSTOP)
        yield Pool(places.decode, fronts, resting, itertools.count(1))


def _signal(engines: Iterable[EngineHandle], number: signal.Signals) -> None:
    for engine in engines:
        os.killpg(engine.pid, number)


def _start_ours(far: Starter, near: Starter, ways: Sequence[Way]) -> dict[Way, Front]:
    """Starts one decode engine, and a prefill engine and a router for each push. Waits until everything answers."""
    decode = near.start_engine(PoolRole.DECODE, "decode")
    prefills = {way: far.start_engine(PoolRole.PREFILL, way.name.lower(), push=way.name.lower()) for way in ways}
    far.wait_ready()
    near.wait_ready()
    fronts: dict[Way, Front] = {}
    for way, prefill in prefills.items():
        server, trace_file = near.start_router(f"router-{way.name.lower()}", far.place.host, prefill, decode)
        assert prefill.trace_file is not None
        direct = Server(far.place.host, prefill.port)
        fronts[way] = RouterFront(server, direct, (trace_file, prefill.trace_file))
    near.wait_ready()
    return fronts


def _await_transfers(files: Sequence[Path], begun_at: float, num_tokens: int, count: int) -> tuple[Transfer, ...]:
    """The transfers of ``count`` requests of ``num_tokens`` tokens that came since ``begun_at``, from the trace files.

    Raises:
        BenchmarkError: The files do not hold all of them within ``TRACE_TIMEOUT_S``.
    """
    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while time.monotonic() < deadline:
        transfers = tuple(it for it in _transfers_since(files, begun_at) if it.report.prompt_tokens == num_tokens)
        if len(transfers) == count:
            return transfers
        time.sleep(_TRACE_POLL_S)
    raise BenchmarkError(f"no whole transfer in {', '.join(map(str, files))}: the push failed")


def _transfers_since(files: Sequence[Path], begun_at: float) -> Iterator[Transfer]:
    traces = read_traces(files)
    for request in requests_in(traces):
        if request.received_at < begun_at:
            continue
        if transfer := read_transfer(request, pushes_in(traces, request.transfer_id)):
            yield transfer
