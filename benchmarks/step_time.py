"""Measures the cost of a transfer to the forward passes of both engines: step times with and without a transfer.

    .venv/bin/python -m benchmarks.step_time --write    about 14 minutes; docs/step-time.md
    .venv/bin/python -m benchmarks.step_time --quick    loopback, two rounds

Decode, receiving: an answer streams from the decode engine while another request's KV comes in; a step is the time
between two of its tokens, until the last byte has come. Without a transfer: the same while a single engine computes the
same prompt, so that the other core has the same work. Prefill, sending: the time from a request's first schedule to its
first token, by the prefill engine's own clock, while it pushes; without a transfer: a plain request of the same length.
Beside a plain socket: without a transfer too, but as many bytes go over the same link by one TCP stream that has
nothing to do with the engines. Where engines fill every core, as on two, that is what any transfer costs at least.
Milliseconds: median (least..most) over interleaved rounds, ratios of the same round each; the aim is 1.03 at most.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.client import BenchmarkError, Streamed, completion_body, post, prefill_seconds, stream
from benchmarks.figures import format_minutes, format_table, ratios, spread, write_page
from benchmarks.fronts import RouterFront
from benchmarks.link import LinkError
from benchmarks.places import LINKS, Inside, StreamPath, open_places, send_evenly, share_places
from benchmarks.ttft_figures import Way
from benchmarks.ttft_plan import prefill_s
from benchmarks.ttft_pool import Pool, start_pool

from pdcluster_cli.processes.waiting import EngineDied

COLUMNS: Final = (
    "link",
    "tokens",
    "step",
    "without a transfer",
    "beside a plain socket",
    "with",
    "with / without",
    "with / plain socket",
)
WAYS: Final = (Way.SINGLE, Way.LAYERWISE)
_FAILURES: Final = (LinkError, BenchmarkError, EngineDied, TimeoutError, OSError)
_START_S: Final = 60.0
_STREAM_PROMPT: Final = 64
_STEPS_AHEAD_S: Final = 0.5
"""After this time the stream is in its stride: it flows steadily."""
_STEP_S: Final = 0.006
"""The shortest step of one sequence, from which ``answer_tokens`` follows."""
_MIN_STEPS: Final = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """``links``: keys of ``LINKS``; ``tokens`` of the prompt whose KV moves."""

    links: tuple[str, ...]
    tokens: int
    rounds: int

    @property
    def answer_tokens(self) -> int:
        """Tokens that the stream must have to outlast the slowest transfer."""
        return int((_STEPS_AHEAD_S + 2 * prefill_s(self.tokens)) / _STEP_S)

    @property
    def seconds(self) -> float:
        """An estimate."""
        stream_s = 2 * self.answer_tokens * _STEP_S
        return 2 * _START_S + len(self.links) * self.rounds * (3 * stream_s + 4 * prefill_s(self.tokens))


@dataclass(frozen=True, slots=True)
class Window:
    """When other work beside a stream began and ended (monotonic seconds)."""

    begun_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds for a step of one engine in one round."""

    without: float
    beside_socket: float
    with_transfer: float


@dataclass(frozen=True, slots=True)
class Round:
    decode: Steps
    prefill: Steps


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of the plain socket during one prefill: ``num_bytes``, spread over ``seconds``."""

    path: StreamPath
    num_bytes: int
    seconds: float

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """The traffic begins with the block. The block's end waits for the traffic's."""
        with ThreadPoolExecutor(1) as sender:
            sent = sender.submit(send_evenly, self.path, self.num_bytes, self.seconds)
            yield
            sent.result()


def main(plan: Plan, *, write: bool) -> int:
    """Measure, print, write. Returns the process's exit status."""
    print(f"takes {format_minutes(plan.seconds)}", flush=True)
    try:
        lines = [line for links in share_places(plan.links) for line in _measure_links(links, plan)]
    except _FAILURES as error:
        print(f"step_time: {error}", file=sys.stderr)
        return 1
    table = format_table(COLUMNS, lines)
    print(f"\n{table}")
    if write:
        words = (__doc__ or "").rpartition("\n\n")[2]
        write_page("step_time", "Step times with a transfer", f"{words}\n{table}")
    return 0


def step_s(stream: Streamed, window: Window) -> float:
    """Mean time between two tokens that both came within the window.

    Raises:
        BenchmarkError: Fewer than ``_MIN_STEPS`` tokens did.
    """
    inside = [at for at in stream.token_times if window.begun_at <= at <= window.ended_at]
    if len(inside) < _MIN_STEPS:
        raise BenchmarkError(f"only {len(inside)} tokens came during a transfer: use a longer prompt")
    return (inside[-1] - inside[0]) / (len(inside) - 1)


def build_cells(link: str, tokens: int, rounds: Sequence[Round]) -> list[tuple[str, ...]]:
    """A line for decode and one for prefill."""
    sides = {
        "decode, receiving": [taken.decode for taken in rounds],
        "prefill, sending": [taken.prefill for taken in rounds],
    }
    return [(link, f"{tokens:,}", name, *_cells(taken)) for name, taken in sides.items()]


def _cells(taken: Sequence[Steps]) -> tuple[str, ...]:
    without, beside, ours = ([getattr(steps, name) for steps in taken] for name in Steps.__slots__)
    return _ms(without), _ms(beside), _ms(ours), _ratio(ours, without), _ratio(ours, beside)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratio = ratios(ours, theirs)
    return f"{ratio.median:.3f} ({ratio.low:.3f}..{ratio.high:.3f})"


def _ms(seconds: Sequence[float]) -> str:
    figure = spread(seconds)
    return f"{figure.median * 1000:,.2f} ({figure.low * 1000:,.2f}..{figure.high * 1000:,.2f})"


def _measure_links(links: Sequence[str], plan: Plan) -> Iterator[tuple[str, ...]]:
    with (
        tempfile.TemporaryDirectory(prefix="pdcluster-step-") as folder,
        open_places(links[0]) as places,
        start_pool(places, Path(folder), WAYS) as pool,
    ):
        for _ in range(2):
            warm = {way: pool.ask(way, plan.tokens) for way in WAYS}
        for link in links:
            places.set_rate(link)
            traffic = Traffic(places.path, warm[Way.LAYERWISE].num_bytes, warm[Way.SINGLE].ttft_s)
            rounds = [_run_round(pool, plan, traffic, number) for number in range(plan.rounds)]
            yield from build_cells(LINKS[link], plan.tokens, rounds)


def _run_round(pool: Pool, plan: Plan, traffic: Traffic, number: int) -> Round:
    """Takes each case once. The order rotates from round to round."""
    cases = (_without, partial(_beside_socket, traffic), _with_transfer)
    turns = [(number + shift) % len(cases) for shift in range(len(cases))]
    taken = {turn: cases[turn](pool, plan) for turn in turns}
    decode, prefill = zip(*(taken[turn] for turn in sorted(turns)), strict=True)
    return Round(Steps(*decode), Steps(*prefill))


def _without(pool: Pool, plan: Plan) -> tuple[float, float]:
    """Decode's and prefill's step."""
    return _decode_step(pool, plan, Way.SINGLE), _prefill_s(pool, lambda: _ask_prefill(pool, plan.tokens))


def _beside_socket(traffic: Traffic, pool: Pool, plan: Plan) -> tuple[float, float]:
    def ask_prefill() -> None:
        with traffic.flowing():
            _ask_prefill(pool, plan.tokens)

    return _decode_step(pool, plan, Way.SINGLE, traffic.flowing), _prefill_s(pool, ask_prefill)


def _with_transfer(pool: Pool, plan: Plan) -> tuple[float, float]:
    sending = _prefill_s(pool, lambda: pool.ask(Way.LAYERWISE, plan.tokens))
    return _decode_step(pool, plan, Way.LAYERWISE), sending


def _decode_step(pool: Pool, plan: Plan, way: Way, beside: Inside = nullcontext) -> float:
    """Decode's step while ``way`` answers a prompt and ``beside`` goes on."""
    front = pool.fronts[Way.LAYERWISE]
    assert isinstance(front, RouterFront)
    with ThreadPoolExecutor(1) as streamer:
        streamed = streamer.submit(_stream, pool, front, plan.answer_tokens)
        time.sleep(_STEPS_AHEAD_S)
        begun_at = time.monotonic()
        with beside():
            burst = pool.ask(way, plan.tokens)
        if way is Way.LAYERWISE:
            window = Window(begun_at, max(it.last_acked_at for it in burst.transfers))
        else:
            window = Window(begun_at, begun_at + burst.ttft_s)
        return step_s(streamed.result(), window)


def _stream(pool: Pool, front: RouterFront, answer_tokens: int) -> Streamed:
    with pool.client.inside():
        return stream(front.server, completion_body(pool.prompt(_STREAM_PROMPT), answer_tokens))


def _prefill_s(pool: Pool, ask: Callable[[], object]) -> float:
    """The prefill engine's time for the request that ``ask`` makes."""
    front = pool.fronts[Way.LAYERWISE]
    assert isinstance(front, RouterFront)
    with pool.client.inside():
        return prefill_seconds(front.prefill, ask)


def _ask_prefill(pool: Pool, tokens: int) -> None:
    """A plain request to the prefill engine, which pushes nothing."""
    front = pool.fronts[Way.LAYERWISE]
    assert isinstance(front, RouterFront)
    post(front.prefill, completion_body(pool.prompt(tokens), 1))


def _parse(argv: Sequence[str]) -> tuple[Plan, bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="write docs/step-time.md")
    parser.add_argument("--quick", action="store_true", help="loopback, two rounds, no file")
    given = parser.parse_args(argv)
    if given.quick:
        return Plan(("loopback",), 2048, 2), False
    return Plan(tuple(given.links), given.tokens, given.rounds), given.write


if __name__ == "__main__":
    chosen, is_written = _parse(sys.argv[1:])
    sys.exit(main(chosen, write=is_written))
