"""``PYTHONPATH=.:tests python -m fuzz.wire --inputs 1000000 --report FILE``: raw bytes to a real router, under limits.

The router is started as a user does, before fake engines in a process of their own. Each input has a connection of its
own. It ends with status 1 and says why if the router ends, answers 500, 502 or 504, answers more often than it was
asked, logs a traceback, keeps a request, grows by more than ``MAX_GROWTH_BYTES``, or stands for more than
``MAX_STALL_S`` of CPU: what the longest turn of its loop computed. Not wall time, for other work on the machine takes
the router's cores too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import uvloop
from benchmarks.router import ANSWER, FakeEngines, Peer, serve
from benchmarks.router_attacks import MB, memory_bytes, request, running_router
from benchmarks.router_streams import BODY as SMALL

from fuzz.noted_router import NOTES
from fuzz.raw import Input, inputs, large_input
from patience import PATIENCE_S

MAX_GROWTH_BYTES: Final = 50 * MB
MAX_STALL_S: Final = 0.05
NUM_CALLERS: Final = 128
WAIT_S: Final = 0.3
"""For answers to what may be no whole request, and gets none then."""
INPUTS_PER_LARGE: Final = 5_000
INPUTS_PER_WORD: Final = 50_000
REFUSED: Final = json.dumps({"error": {"message": "this is no JSON", "code": 400}}).encode()
PARAMS: Final = b'"kv_transfer_params":'
"""The router writes them last."""
ENGINE_REFUSES: Final = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(REFUSED), REFUSED)

Address = tuple[str, int]


class ToughEngines(FakeEngines):
    """As those of the benchmark, before clients that send anything and leave at any time."""

    def serve(self, peer: Peer, body: bytes) -> None:
        self._idle = [caller for caller in self._idle if not caller.transport.is_closing()]
        try:
            super().serve(peer, body if len(body) < MB else end_of(body))
        except (ValueError, RecursionError):
            peer.transport.write(ENGINE_REFUSES)

    def _outcome(self, caller: Peer, _body: bytes) -> None:
        self._idle.append(caller)
        peer = self._waiting.pop(caller)
        if not peer.transport.is_closing():
            peer.transport.write(ANSWER)


def end_of(body: bytes) -> bytes:
    """An object with the router's own keys. To read all of a large body would take each engine up to 2 s. They are one
    process: neither would answer probes in time, and the router would say with 503 that it is not ready."""
    at = body.rfind(PARAMS)
    return b"{" + body[at:] if at >= 0 else b"{}"


class Caller(asyncio.Protocol):
    """One connection: what came, and when it is enough."""

    def __init__(self, num_answers: int) -> None:
        self.came = bytearray()
        self.has_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_answers = num_answers

    def data_received(self, data: bytes) -> None:
        self.came += data
        if len(statuses_in(self.came)) >= self._num_answers:  # One too many has mostly come with the last one.
            self._end()

    def connection_lost(self, _: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.has_ended.done():
            self.has_ended.set_result(None)


def statuses_in(came: bytes | bytearray) -> list[int]:
    """Of all answers but the interim ones."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", came)]


def codes_of_503_in(came: bytes | bytearray) -> list[str]:
    """``HEAD``: an answer without a body."""
    answers = re.split(rb"(?=HTTP/1\.1 [1-5]\d\d )", bytes(came))
    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
    codes = [re.search(rb'"code":"(\w+)"', answer) for answer in refused]
    return [code[1].decode() if code else "HEAD" for code in codes]


@dataclass
class Run:
    """What came of it."""

    router: Address
    internal: Address
    statuses: Counter[int] = field(default_factory=Counter)
    unserved: Counter[str] = field(default_factory=Counter)
    """Codes of the answers with 503."""
    problems: list[str] = field(default_factory=list)
    num_sent: int = 0
    tell: Callable[[Run], None] = lambda _: None
    """Called now and then."""

    async def send_all(self, num_inputs: int, seed: int) -> None:
        left = itertools.islice(self._drawn(seed), num_inputs)
        async with asyncio.TaskGroup() as callers:
            for _ in range(NUM_CALLERS):
                callers.create_task(self._send_some(left))

    def _drawn(self, seed: int) -> Iterator[Input]:
        rng = random.Random(seed)
        small = inputs(rng)
        for number in itertools.count(1):
            yield large_input(rng) if number % INPUTS_PER_LARGE == 0 else next(small)

    async def _send_some(self, left: Iterator[Input]) -> None:
        for one in left:
            if self.problems:
                return
            await self._send(one)
            self.num_sent += 1
            if self.num_sent % INPUTS_PER_WORD == 0:
                self.tell(self)

    async def _send(self, one: Input) -> None:
        address = self.internal if one.is_internal else self.router
        loop = asyncio.get_running_loop()
        try:
            transport, caller = await loop.create_connection(lambda: Caller(one.num_answers), *address)
        except OSError as error:
            self.problems.append(f"the router takes no connection: {error}")
            return
        await self._write(one, transport, caller)
        self.unserved.update(codes_of_503_in(caller.came))
        self.judge(one, statuses_in(caller.came))

    async def _write(self, one: Input, transport: asyncio.Transport, caller: Caller) -> None:
        for part in one.parts:
            if not transport.is_closing():
                transport.write(part)
                await asyncio.sleep(0)
        if not one.leaves:
            await asyncio.wait([caller.has_ended], timeout=PATIENCE_S if one.is_whole else WAIT_S)
        transport.abort()

    def judge(self, one: Input, statuses: list[int]) -> None:
        self.statuses.update(statuses)
        if len(statuses) > one.num_answers:
            self.problems.append(
                f"{len(statuses)} answers, at most {one.num_answers} were asked for: {one.parts!r:.2000}"
            )
        if one.is_whole and len(statuses) < one.num_answers and 503 not in statuses:
            self.problems.append(f"{statuses} of {one.num_answers} answers: {one.parts!r:.2000}")
        if {500, 502, 504}.intersection(statuses):
            self.problems.append(f"answered {statuses}: {one.parts!r:.2000}")


async def ask(address: Address, raw: bytes, is_all: Callable[[bytes], bool]) -> bytes:
    """The answer to ``raw``, once it ``is_all`` there."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(raw)
    came = b""
    async with asyncio.timeout(30):
        while not is_all(came):
            if not (part := await reader.read(1 << 16)):
                break
            came += part
    writer.close()
    return came


async def problems_after(run: Run) -> list[str]:
    """The router must be as before: it serves, and holds nothing of any request."""
    found = []
    answer = await ask(run.router, request("/v1/completions", SMALL), lambda came: came.endswith(ANSWER[-20:]))
    if b" 200 " not in answer:
        found.append(f"a good request is not served any more: {answer!r:.500}")
    for _ in range(100):
        page = await ask(run.internal, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", lambda came: came.endswith(b"}"))
        if b'"in_flight":0' in page:
            return found
        await asyncio.sleep(0.1)
    return [*found, f"requests are left: {page!r:.500}"]


@dataclass(frozen=True, slots=True)
class Notes:
    """Where the router's loop notes how long it stood: ``noted_router.py``."""

    file: Path

    def begin(self) -> None:
        self.file.write_bytes(b"")

    def longest_s(self) -> tuple[float, float]:
        """CPU and wall seconds of the longest turn since ``begin``."""
        cpu_s, wall_s = map(float, self.file.read_text().split())
        return cpu_s, wall_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """``problems``: none if all held."""

    text: str
    seconds: float
    growth_bytes: int
    stall: tuple[float, float]
    """Of the longest turn of the router's loop: seconds of CPU, and wall seconds."""
    statuses: Counter[int]
    problems: list[str]
    unserved: Counter[str] = field(default_factory=Counter)

    @property
    def num_answers(self) -> int:
        return sum(self.statuses.values())


def fuzz(num_inputs: int, seed: int) -> Outcome:
    """A fresh router gets ``num_inputs``. Long runs say now and then how it is."""
    began = time.monotonic()

    def tell(run: Run) -> None:
        print(_told(run, began, memory_bytes(pid, "VmHWM") - before, notes.longest_s()), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        log, notes = Path(folder) / "log", Notes(Path(folder) / "notes")
        notes.begin()
        os.environ[NOTES] = str(notes.file)
        with running_router(log, engines="fuzz.wire", router_module="fuzz.noted_router") as (pid, router, internal):
            run = Run(router, internal, tell=tell)
            before = memory_bytes(pid, "VmRSS")
            notes.begin()
            uvloop.run(run.send_all(num_inputs, seed))
            growth, stall = memory_bytes(pid, "VmHWM") - before, notes.longest_s()
            run.problems += uvloop.run(problems_after(run))
        run.problems += tracebacks_in(log.read_text())[:1]
    run.problems += limits_passed(growth, stall[0])
    text = _told(run, began, growth, stall)
    return Outcome(text, time.monotonic() - began, growth, stall, run.statuses, run.problems, run.unserved)


def _told(run: Run, began: float, growth_bytes: int, stall: tuple[float, float]) -> str:
    cpu_ms, wall_ms = (seconds * 1e3 for seconds in stall)
    return (
        f"{run.num_sent} inputs, {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.0f}: RSS growth"
        f" {growth_bytes / MB:.1f} MB, longest stall {cpu_ms:.1f} ms of CPU ({wall_ms:.0f} ms wall);"
        f" answers {', '.join(f'{num} x {status}' for status, num in sorted(run.statuses.items()))}"
    )


def tracebacks_in(log: str) -> list[str]:
    """Each with the line before it, and what it ended with."""
    return [found[0] for found in re.finditer(r"[^\n]*\nTraceback .*?\n(?=\S)[^\n]*", log, re.DOTALL)]


def limits_passed(growth_bytes: int, stall_s: float) -> list[str]:
    found = []
    if growth_bytes > MAX_GROWTH_BYTES:
        found.append(f"the router grew by {growth_bytes / MB:.1f} MB, {MAX_GROWTH_BYTES / MB:.0f} are allowed")
    if stall_s > MAX_STALL_S:
        found.append(f"the router stood for {stall_s * 1e3:.1f} ms, {MAX_STALL_S * 1e3:.0f} are allowed")
    return found


def report_of(outcome: Outcome, num_inputs: int, seed: int) -> str:
    """The page of one run."""
    found = "\n".join(f"- {problem}" for problem in outcome.problems) or "None."
    unserved = ", ".join(f"{num:,} `{code}`" for code, num in outcome.unserved.most_common()) or "none"
    rows = "\n".join(f"| {status} | {num:,} |" for status, num in sorted(outcome.statuses.items()))
    return f"""# Raw bytes to a router process

Written by `PYTHONPATH=.:tests .venv/bin/python -m fuzz.wire --inputs {num_inputs} --seed {seed} --report FILE`, on \
{datetime.now(UTC):%Y-%m-%d}, commit {_commit()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}.

Each input has a connection of its own, {NUM_CALLERS} at a time: requests of all forms, spoiled ones, other protocols, \
noise, and one body of 8 MiB in {INPUTS_PER_LARGE:,} that is made to be slow. Some clients cut the connection. The \
router runs as a user starts it, with fake engines in a process of their own.

| What | Measured | Allowed |
|---|---|---|
| inputs | {num_inputs:,} in {outcome.seconds:.0f} s | - |
| growth of the router's memory, most | {outcome.growth_bytes / MB:.1f} MiB | {MAX_GROWTH_BYTES / MB:.0f} MiB |
| longest turn of its loop, CPU | {outcome.stall[0] * 1e3:.1f} ms | {MAX_STALL_S * 1e3:.0f} ms |
| the same, wall, with all else that this machine did | {outcome.stall[1] * 1e3:.0f} ms | - |

| Status | Answers |
|---|---|
{rows}

Answers with 503, by code: {unserved}. `not_ready` is the answer of `/health` while the engines, one process, do not \
answer probes in time; other work on the machine can do that.

## Problems
{found}
"""


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.wire", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what came of it there, in Markdown")
    parser.add_argument("--engines", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engines:
        uvloop.run(serve(ToughEngines()))
    outcome = fuzz(given.inputs, given.seed)
    print(outcome.text, *outcome.problems, sep="\n")
    if given.report is not None:
        given.report.write_text(report_of(outcome, given.inputs, given.seed))
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
