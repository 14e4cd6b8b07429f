"""Compares the costs of two checkouts side by side. Each runs its own programs, in turns; no page.

    .venv/bin/python -m benchmarks.paired OLDER NEWER                 about 8 minutes; both are installed
    .venv/bin/python -m benchmarks.paired OLDER NEWER --parts starts --turns 1

    router    benchmarks/router.py of each checkout
    hook      benchmarks/save_kv_layer.py of each checkout
    starts    this checkout's benchmarks/starts.py, with each checkout's Python and sources

In each turn both checkouts run each part once; the checkout that is first changes from turn to turn. The ratio is newer
over older in the same turn: median (least..most). The figures *straight* and *without connector* use no product code of
a checkout: their ratio is the machine's own noise. So is much of *us a step*: on two cores the thread may wait up to
5 ms for Python's lock at a step's begin, and the median of twelve steps is 0.1 or 1.5 ms.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.figures import format_table, ratios, times

COLUMNS: Final = ("part", "figure", "older", "newer", "newer / older")
_LIMIT_S: Final = 300.0
"""The limit of one run of one part in one checkout."""
_STARTS: Final = Path(__file__).with_name("starts.py")
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")

Figures = Mapping[str, float]


class PairError(Exception):
    """A program of a checkout failed; the message holds its last lines."""


@dataclass(frozen=True, slots=True)
class Part:
    """``words``: arguments of the checkout's Python; ``read``: turns output into figures; ``turns``: the default."""

    words: tuple[str, ...]
    read: Callable[[str], Figures]
    turns: int


def read_router(output: str) -> Figures:
    """Reads the table of ``router.py``: rates of all ways, and the latency and CPU time that the router adds."""
    found: dict[str, float] = {}
    for connections, way, rate, p50, _, _, added, cpu in _rows(output, 8):
        case = f"{way}, {connections} connections"
        found[f"{case}: requests/s"] = float(rate)
        if way == "straight":
            found[f"{case}: p50 us"] = float(p50)
        else:
            found[f"{case}: added p50 us"] = float(added)
            found[f"{case}: router CPU us/request"] = float(cpu)
    return found


def read_hook(output: str) -> Figures:
    """Reads the table of ``save_kv_layer.py``."""
    found: dict[str, float] = {}
    for requests, step, layer, _, reference, _ in _rows(output.replace("|", " "), 6):
        found[f"{requests} requests: us a step"] = float(step)
        found[f"{requests} requests: us a layer"] = float(layer)
        found[f"{requests} requests: without connector, us a layer"] = float(reference)
    return found


def read_starts(output: str) -> Figures:
    """Reads the table of ``starts.py``."""
    found: dict[str, float] = {}
    for part, seconds, cpu, mib in _rows(output, 4):
        found |= {f"{part}: seconds": float(seconds), f"{part}: CPU s": float(cpu), f"{part}: MiB": float(mib)}
    return found


PARTS: Final = {
    "router": Part(("benchmarks/router.py", "--seconds", "3"), read_router, 3),
    "hook": Part(("benchmarks/save_kv_layer.py",), read_hook, 3),
    "starts": Part(("-P", str(_STARTS)), read_starts, 3),
}


def compare(part: str, older: Sequence[Figures], newer: Sequence[Figures]) -> Iterator[tuple[str, ...]]:
    """A line for each figure that both have; the figures of one turn are at the same place of both lists."""
    for name in (name for name in older[0] if name in newer[0]):
        ours, theirs = [turn[name] for turn in newer], [turn[name] for turn in older]
        medians = (f"{statistics.median(values):,.4g}" for values in (theirs, ours))
        yield (part, name, *medians, times(ratios(ours, theirs)))


def run(part: Part, checkout: Path) -> Figures:
    """Runs the part's program in this checkout, and returns its figures. Waits.

    Raises:
        PairError: The program failed, took too long, or printed no figure.
    """
    command = [str(checkout / ".venv/bin/python"), *part.words]
    env = {**os.environ, "PYTHONPATH": str(checkout)}  # so that it imports ``benchmarks`` from ``checkout``
    try:
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PairError(f"{checkout}: {error}") from error
    figures = part.read(done.stdout)
    if done.returncode or not figures:
        raise PairError(f"{checkout}: {' '.join(part.words)} exited with {done.returncode}: {done.stderr[-1500:]}")
    return figures


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the process's exit status."""
    given = _parse(argv)
    print(format_table(COLUMNS, ()), flush=True)
    try:
        for name in given.parts:
            older, newer = _in_turns(PARTS[name], given.older, given.newer, given.turns or PARTS[name].turns)
            for line in compare(name, older, newer):
                print(f"| {' | '.join(line)} |", flush=True)
    except PairError as error:
        print(f"paired: {error}", file=sys.stderr)
        return 1
    return 0


def _in_turns(part: Part, older: Path, newer: Path, turns: int) -> tuple[list[Figures], list[Figures]]:
    """The figures of both. Prints each run's to stderr at once, so that they are not lost if a later run fails."""
    taken: dict[Path, list[Figures]] = {older: [], newer: []}
    for turn in range(turns):
        for checkout in (older, newer) if turn % 2 == 0 else (newer, older):
            taken[checkout].append(run(part, checkout))
            print(f"turn {turn + 1}, {checkout}: {dict(taken[checkout][-1])}", file=sys.stderr, flush=True)
    return taken[older], taken[newer]


def _rows(output: str, columns: int) -> Iterator[list[str]]:
    """The lines of ``columns`` words, of which all but the first two are numbers."""
    for line in output.splitlines():
        words = line.split()
        if len(words) == columns and all(_NUMBER.fullmatch(word) for word in words[2:]):
            yield words


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=lambda text: Path(text).resolve(), help="a checkout with its .venv")
    parser.add_argument("newer", type=lambda text: Path(text).resolve(), help="another one")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--turns", type=int, default=0, help="for each part; 3 if left out")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
