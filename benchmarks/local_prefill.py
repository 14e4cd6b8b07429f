"""Compares two ways to get the missing tokens: a prefill engine pushes them, or decode computes them itself.

    .venv/bin/python -m benchmarks.local_prefill --write    about 6 minutes; docs/local-prefill.md
    .venv/bin/python -m benchmarks.local_prefill --quick    two lengths, two rounds, no page

One prefill engine serves two decode engines, each behind a router of its own. One of them has all missing tokens
pushed (``min_push_tokens`` 0), the other one computes them itself. Prefix caching is on, and both decode engines have
the first part of each prompt in their cache. *Streams* run on a decode engine while it is asked. A *step* is the time
between two tokens of a stream. The *longest step* is the longest before the request's first token, mean over the
streams. A *busy prefill* engine computes prompts of 2,048 tokens for others, one after the other. Figures are
milliseconds: median (least..most) over rounds. In each round both ways have their turn, and ratios are of one round.
Each engine has one compute thread. A push lasts for many steps of the streams, and decode's own computation for one.
On a busy machine the longest of many steps is longer by chance alone, so the push looks worse than it is.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.client import BenchmarkError, Server, Streamed, completion_body, post, stream
from benchmarks.figures import format_minutes, format_table, write_page
from benchmarks.local_prefill_figures import COLUMNS, Round, Sample, Way, build_cells, median_wait_s, sample_of
from benchmarks.places import LOCAL
from benchmarks.starter import WIDE_KV, Starter
from benchmarks.ttft_plan import prefill_s

from pdcluster_cli.processes.engines import LOOPBACK, PoolRole
from pdcluster_cli.processes.waiting import EngineDied
from pdcluster_protocol.launch import MAX_MIN_PUSH_TOKENS

SERVED: Final = replace(WIDE_KV, more_args=("--enable-prefix-caching",))
_LEAST: Final = {Way.PUSHED: 0, Way.LOCAL: MAX_MIN_PUSH_TOKENS}
_BUSY_TOKENS: Final = 2048
_STREAM_PROMPT: Final = 64
_STREAM_TOKENS: Final = 1500
"""More than a stream generates in one turn: the client leaves it when the turn is over."""
_TOKENS_AHEAD: Final = 5
"""Tokens after which a stream counts as in its stride: it flows steadily."""
_IN_STRIDE_S: Final = 60.0
_AHEAD_S: Final = 0.4
"""Time in which only the streams run, to measure the undisturbed step."""
_AFTER_S: Final = 0.1
_FAILURES: Final = (BenchmarkError, EngineDied, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class Beside:
    """Other work that goes on during a measured request."""

    num_streams: int = 0
    is_prefill_busy: bool = False

    def __str__(self) -> str:
        streams = f"{self.num_streams} streams" if self.num_streams else "nothing"
        return f"{streams}, busy prefill" if self.is_prefill_busy else streams


BESIDE: Final = (Beside(), Beside(4), Beside(4, is_prefill_busy=True))


@dataclass(frozen=True, slots=True)
class Plan:
    """``cached`` and ``missing``: tokens of the prompts' two parts."""

    cached: tuple[int, ...]
    missing: tuple[int, ...]
    beside: tuple[Beside, ...]
    rounds: int

    @property
    def seconds(self) -> float:
        """An estimate."""
        turn_s = _AHEAD_S + _AFTER_S + 0.3
        asked = sum(prefill_s(cached + missing) * 1.5 for cached in self.cached for missing in self.missing)
        cases = len(self.cached) * len(self.missing)
        return 60 + self.rounds * 2 * len(self.beside) * (cases * turn_s + asked)


@dataclass(frozen=True, slots=True)
class Pool:
    """The servers of one benchmark. One thread uses it."""

    prefill: Server
    routers: dict[Way, Server]
    decodes: dict[Way, Server]
    _seeds: Iterator[int]

    def prompt(self, num_tokens: int) -> list[int]:
        """Tokens that no prompt before had."""
        return random.Random(next(self._seeds)).choices(range(100, 1000), k=num_tokens)

    def take(self, way: Way, cached: int, missing: int, beside: Beside) -> tuple[Sample, float | None]:
        """Makes one request. Returns its sample, and the streams' undisturbed step (None without streams)."""
        prompt = self.prompt(cached)
        if cached:
            post(self.routers[way], completion_body(prompt + self.prompt(1), 1))
        with self._going_on(way, beside) as stop:
            quiet_at = time.monotonic()
            time.sleep(_AHEAD_S if beside.num_streams else 0.0)
            asked = stream(self.routers[way], completion_body(prompt + self.prompt(missing), 2))
            time.sleep(_AFTER_S)
            streams = stop()
        step_s = median_wait_s(streams, quiet_at, asked.begun_at)
        return sample_of(asked, streams), step_s

    @contextmanager
    def _going_on(self, way: Way, beside: Beside) -> Iterator[Callable[[], list[Streamed]]]:
        """Runs the streams, and prefill's other work. Yields a function that ends the streams and returns them."""
        is_over = threading.Event()
        with ThreadPoolExecutor(beside.num_streams + 1) as clients:
            body = completion_body(self.prompt(_STREAM_PROMPT), _STREAM_TOKENS)
            paces = [_Pace(is_over) for _ in range(beside.num_streams)]
            running = [clients.submit(stream, self.decodes[way], body, pace) for pace in paces]
            if beside.is_prefill_busy:
                clients.submit(self._keep_busy, is_over)
            try:
                for pace in paces:
                    pace.wait_in_stride()
                yield lambda: _ended(is_over, [one.result for one in running])
            finally:
                is_over.set()

    def _keep_busy(self, is_over: threading.Event) -> None:
        while not is_over.is_set():
            post(self.prefill, completion_body(self.prompt(_BUSY_TOKENS), 1))


class _Pace:
    """Counts the tokens of one stream, in its thread, and says when the client is to leave the stream."""

    def __init__(self, is_over: threading.Event) -> None:
        self._is_over = is_over
        self._is_in_stride = threading.Event()
        self._num_tokens = 0

    def __call__(self) -> bool:
        self._num_tokens += 1
        if self._num_tokens == _TOKENS_AHEAD:
            self._is_in_stride.set()
        return self._is_over.is_set()

    def wait_in_stride(self) -> None:
        """Waits until the stream is in its stride. Called by another thread than the stream's.

        Raises:
            BenchmarkError: The stream does not get there within ``_IN_STRIDE_S``.
        """
        if not self._is_in_stride.wait(_IN_STRIDE_S):
            raise BenchmarkError("a stream beside the request does not flow")


def _ended(is_over: threading.Event, results: Sequence[Callable[[], Streamed]]) -> list[Streamed]:
    is_over.set()
    return [result() for result in results]


@contextmanager
def start_pool(folder: Path) -> Iterator[Pool]:
    """All engines and routers answer; they have ended afterwards.

    Raises:
        EngineDied: One of them ended while starting.
        TimeoutError: One of them did not answer.
    """
    with ExitStack() as stack:
        starter = stack.enter_context(Starter(LOCAL, folder / "pool", SERVED))
        prefill = starter.start_engine(PoolRole.PREFILL, "prefill")
        decodes = {
            way: starter.start_engine(PoolRole.DECODE, f"decode-{way.name.lower()}", min_push_tokens=least)
            for way, least in _LEAST.items()
        }
        starter.wait_ready()
        routers = {
            way: starter.start_router(f"router-{way.name.lower()}", LOOPBACK, prefill, decode)[0]
            for way, decode in decodes.items()
        }
        starter.wait_ready()
        servers = {way: Server(LOOPBACK, decode.port) for way, decode in decodes.items()}
        yield Pool(Server(LOOPBACK, prefill.port), routers, servers, itertools.count(1))


def main(plan: Plan, *, write: bool) -> int:
    """Measure, print, write. Returns the process's exit status."""
    print(f"takes {format_minutes(plan.seconds)}", flush=True)
    try:
        lines = _measure(plan)
    except _FAILURES as error:
        print(f"local_prefill: {error}", file=sys.stderr)
        return 1
    table = format_table(COLUMNS, lines)
    print(f"\n{table}")
    if write:
        words = (__doc__ or "").rpartition("\n\n")[2]
        write_page("local_prefill", "A few missing tokens: pushed, or computed by decode", f"{words}\n{table}")
    return 0


def _measure(plan: Plan) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="pdcluster-local-") as folder, start_pool(Path(folder)) as pool:
        for way in (*Way, *Way):
            pool.take(way, 128, max(plan.missing), Beside())
        for cached, beside, missing in itertools.product(plan.cached, plan.beside, plan.missing):
            rounds = [_run_round(pool, cached, missing, beside, number) for number in range(plan.rounds)]
            lines.append(build_cells(cached, missing, str(beside), rounds))
            print(" | ".join(lines[-1]), flush=True)
    return lines


def _run_round(pool: Pool, cached: int, missing: int, beside: Beside, number: int) -> Round:
    """Takes both ways once. The way that comes first changes from round to round."""
    ways = list(Way) if number % 2 == 0 else list(reversed(Way))
    taken = {way: pool.take(way, cached, missing, beside) for way in ways}
    steps = [step_s for _, step_s in taken.values() if step_s is not None]
    return Round({way: sample for way, (sample, _) in taken.items()}, min(steps, default=None))


def _parse(argv: Sequence[str]) -> tuple[Plan, bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", nargs="+", type=int, default=[1024], help="tokens, whole blocks of 128")
    parser.add_argument("--missing", nargs="+", type=int, default=[16, 64, 256, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write docs/local-prefill.md")
    parser.add_argument("--quick", action="store_true", help="16 and 256 tokens, two rounds, no page")
    given = parser.parse_args(argv)
    if given.quick:
        return Plan((0, 1024), (16, 256), BESIDE, 2), False
    return Plan(tuple(given.cached), tuple(given.missing), BESIDE, given.rounds), given.write


if __name__ == "__main__":
    chosen, is_written = _parse(sys.argv[1:])
    sys.exit(main(chosen, write=is_written))
