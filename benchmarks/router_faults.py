"""Applies twelve faults to each router, and prints what its clients got and how long it took.

    .venv/bin/python -m benchmarks.router_faults [--requests 20] [--limit 180] [--routers NAME ...] [--write]

Two prefill and two decode engines without a model, each router by P/D with its own defaults, but the peers with
``--policy round_robin``. A fault is one engine's, or the clients leave. Each fault has engines and a router of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import httpx
from benchmarks.client import BenchmarkError
from benchmarks.fault_engines import PLAIN, ROOM_S, STREAM, Engine, Fault, Rooms
from benchmarks.figures import format_table, write_page
from benchmarks.places import free_port
from benchmarks.router import PATH
from benchmarks.router_contenders import CONTENDERS, OURS, SETUP, Contender, Flow, running
from benchmarks.router_peers import widened

from pdcluster_protocol.labels import Role

NUM_LEAVING: Final = 4
"""Clients that leave."""
STOPS_WITHIN_S: Final = 5.0
"""How long it is watched whether engines stop for clients that have left."""
_LONG_S: Final = 3600.0
"""Work of an engine whose clients leave: it does not end by itself while it is watched."""


class Outcome(StrEnum):
    """How one request ended for its client."""

    RIGHT = "right"
    ERROR = "error"
    """One clear error: as the answer's status, or as an event of its stream."""
    CUT = "cut off"
    """The connection broke, and nothing says why."""
    FALSE = "looks whole"
    """It ended as a whole answer does, and is none."""
    STUCK = "waiting"
    """Neither answer nor error within the limit."""


@dataclass(frozen=True, slots=True)
class EngineFault:
    """A fault of one of two engines of a role. ``is_stream``: what clients ask for."""

    role: Role
    fault: Fault
    is_stream: bool = True

    @property
    def name(self) -> str:
        asked = "" if self.is_stream or self.fault is not Fault.DIES_IN_ANSWER else ", which is no stream"
        return f"a {self.role.value} engine {self.fault}{asked}"


@dataclass(frozen=True, slots=True)
class Leaving:
    """Clients leave while an engine of ``role`` works for them."""

    role: Role

    @property
    def name(self) -> str:
        return f"clients leave while {self.role.value} works"


CASES: Final[tuple[EngineFault | Leaving, ...]] = (
    *(EngineFault(Role.PREFILL, fault) for fault in (Fault.DOWN, Fault.REFUSES, Fault.SILENT, Fault.DIES)),
    *(EngineFault(Role.DECODE, fault) for fault in (Fault.DOWN, Fault.REFUSES, Fault.SILENT, Fault.DIES)),
    EngineFault(Role.DECODE, Fault.DIES_IN_ANSWER),
    EngineFault(Role.DECODE, Fault.DIES_IN_ANSWER, is_stream=False),
    Leaving(Role.PREFILL),
    Leaving(Role.DECODE),
)


@dataclass(frozen=True, slots=True)
class Ends:
    """How the clients of one fault ended. ``slowest_s``: until the last one did."""

    outcomes: Counter[Outcome]
    slowest_s: float

    def __str__(self) -> str:
        return f"{_counted(self.outcomes)}; {self.slowest_s:.1f} s"


def _counted(outcomes: Counter[Outcome]) -> str:
    """Example: ``3 right, 1 error``."""
    return ", ".join(f"{outcomes[one]} {one}" for one in Outcome if outcomes[one])


@dataclass(frozen=True, slots=True)
class Stops:
    """When the engines stopped working for clients that had left; None: they went on."""

    after_s: float | None

    def __str__(self) -> str:
        return "goes on" if self.after_s is None else f"stops in {self.after_s:.1f} s"


Found = Ends | Stops


@dataclass(frozen=True, slots=True)
class Scene:
    """A router with its engines."""

    url: str
    engines: Mapping[Role, Sequence[Engine]]

    def num_working(self) -> int:
        return sum(engine.num_working for engines in self.engines.values() for engine in engines)


@asynccontextmanager
async def running_scene(contender: Contender) -> AsyncIterator[Scene]:
    """All answer. The router is another process."""
    rooms = Rooms()
    engines = {role: [Engine(role, rooms), Engine(role, rooms)] for role in Role}
    async with AsyncExitStack() as stack:
        for engine in (*engines[Role.PREFILL], *engines[Role.DECODE]):
            await engine.start()
            stack.push_async_callback(engine.stop)
        urls = [engine.url for role in Role for engine in engines[role]]
        router = running(contender, urls, (free_port(), free_port()))
        started = await asyncio.to_thread(router.__enter__)
        stack.push_async_callback(asyncio.to_thread, router.__exit__, None, None, None)
        yield Scene(started.url, engines)


def judge(status: int, body: bytes, *, is_stream: bool) -> Outcome:
    """Of an answer that has ended as HTTP says it should."""
    if status >= 400 or (is_stream and b'"error"' in body):
        return Outcome.ERROR
    return Outcome.RIGHT if body == (STREAM if is_stream else PLAIN) else Outcome.FALSE


async def ask(client: httpx.AsyncClient, url: str, body: bytes, limit_s: float, *, is_stream: bool) -> Outcome:
    """One request, to its end or to the limit."""
    got = bytearray()
    try:
        async with (
            asyncio.timeout(limit_s),
            client.stream("POST", url, content=body, headers={"content-type": "application/json"}) as answer,
        ):
            async for part in answer.aiter_raw():
                got += part
    except TimeoutError:
        return Outcome.STUCK
    except httpx.HTTPError:
        return Outcome.ERROR if is_stream and b'"error"' in got else Outcome.CUT
    return judge(answer.status_code, bytes(got), is_stream=is_stream)


def _client() -> httpx.AsyncClient:
    """``ask`` has the limit. As many connections as requests."""
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))


async def fail(scene: Scene, case: EngineFault, request: bytes, num: int, limit_s: float) -> Ends:
    """Clients ask while the fault lasts, all at once."""
    await scene.engines[case.role][0].strike(case.fault)
    body = widened(request, stream=case.is_stream)
    began = time.monotonic()
    async with _client() as client:
        asked = (ask(client, scene.url + PATH, body, limit_s, is_stream=case.is_stream) for _ in range(num))
        outcomes = await asyncio.gather(*asked)
    return Ends(Counter(outcomes), time.monotonic() - began)


async def leave(scene: Scene, case: Leaving, request: bytes, limit_s: float, stops_within_s: float) -> Stops:
    """Clients leave when each of them is being worked for.

    Raises:
        TimeoutError: Engines do not get the requests within ``limit_s``.
    """
    for engine in scene.engines[case.role]:
        engine.work_s, engine.event_s = _LONG_S, _LONG_S
    workers = scene.engines[case.role]
    async with _client() as client:
        asked = [
            asyncio.create_task(ask(client, scene.url + PATH, widened(request, stream=True), _LONG_S, is_stream=True))
            for _ in range(NUM_LEAVING)
        ]
        async with asyncio.timeout(limit_s):
            while sum(engine.num_working for engine in workers) < NUM_LEAVING:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # The first event of a stream reaches its client.
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return Stops(await _until_idle(scene, stops_within_s))


async def _until_idle(scene: Scene, within_s: float) -> float | None:
    left_at = time.monotonic()
    while scene.num_working():
        if time.monotonic() - left_at > within_s:
            return None
        await asyncio.sleep(0.01)
    return time.monotonic() - left_at


async def run_case(
    contender: Contender,
    case: EngineFault | Leaving,
    num: int,
    limit_s: float,
    stops_within_s: float = STOPS_WITHIN_S,
) -> Found:
    """The result of one fault with one router."""
    async with running_scene(contender) as scene:
        if isinstance(case, Leaving):
            return await leave(scene, case, contender.body, limit_s, stops_within_s)
        return await fail(scene, case, contender.body, num, limit_s)


async def compare(contenders: Sequence[Contender], num: int, limit_s: float) -> dict[Contender, list[Found]]:
    """Each fault for all routers side by side: they mostly wait."""
    found: dict[Contender, list[Found]] = {contender: [] for contender in contenders}
    for case in CASES:
        ends = await asyncio.gather(*(run_case(contender, case, num, limit_s) for contender in contenders))
        for contender, end in zip(contenders, ends, strict=True):
            found[contender].append(end)
            print(f"{case.name}: {contender.name}: {end}", file=sys.stderr, flush=True)
    return found


def rows_of(found: Mapping[Contender, Sequence[Found]]) -> list[tuple[str, ...]]:
    """A row for each fault, and one with the sums."""
    rows = [(case.name, *(str(one[i]) for one in found.values())) for i, case in enumerate(CASES)]
    return [*rows, ("**all**", *map(_sum_of, found.values()))]


def _sum_of(found: Sequence[Found]) -> str:
    ends = [one for one in found if isinstance(one, Ends)]
    outcomes = sum((one.outcomes for one in ends), Counter[Outcome]())
    median = statistics.median(one.slowest_s for one in ends)
    stops = sum(isinstance(one, Stops) and one.after_s is not None for one in found)
    return f"{_counted(outcomes)}; slowest: {median:.1f} s in the median; {stops} of {len(found) - len(ends)} stop"


EXPLAINED: Final = f"""requests for each fault, all at once, to two prefill and two decode engines without a model. One
engine has the fault from before the clients' first request. Each fault has a router of its own, with its defaults, but
the peers with `--policy round_robin`.

- *Right*: the whole answer. *Error*: one clear error, as a status or as an event of the stream.
- *Cut off*: the connection broke, and nothing says why. *Looks whole*: an answer that ended well and is not whole.
- *Waiting*: neither answer nor error within the limit. The seconds are those of the slowest request.
- An engine behind sglang-router waits {ROOM_S:.0f} s for its prefill, and then says an error. SGLang waits for 300 s.
- *Stops*: how long engines go on for clients that have left; *goes on*: for more than {STOPS_WITHIN_S:.0f} s."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20, help="for each fault")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which a client counts as waiting")
    wanted = [contender for contender in CONTENDERS if contender.flow is Flow.PREFILL_DECODE]
    parser.add_argument(
        "--routers",
        nargs="+",
        choices=[c.name for c in wanted],
        default=[c.name for c in wanted],
        help=f"by name; ours is {OURS}",
    )
    parser.add_argument("--write", action="store_true", help="write docs/router-faults.md")
    given = parser.parse_args()
    wanted = [contender for contender in wanted if contender.name in given.routers]
    here = [contender for contender in wanted if contender.is_here]
    if missing := sorted({c.name for c in wanted} - {c.name for c in here}):
        print(f"not here: {', '.join(missing)} ({SETUP})")
    try:
        found = asyncio.run(compare(here, given.requests, given.limit))
    except (BenchmarkError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    table = format_table(("fault", *(contender.name for contender in here)), rows_of(found))
    print(table)
    if given.write:
        words = f"{given.requests} {EXPLAINED}\n\nThe limit is {given.limit:g} s.\n\n{table}"
        write_page("router_faults", "Routers when something fails", words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
