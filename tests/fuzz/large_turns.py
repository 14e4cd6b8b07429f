"""``PYTHONPATH=.:tests python -m fuzz.large_turns [--worst 10]``: how long a router stands for each slow body alone.

A real router, one body of 8 MiB after the other, each ``NUM_TIMES``. Prints a table in Markdown, the slowest first: the
shortest of the times, for other work on the machine makes all of them longer. The engines refuse large bodies unread.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.router_attacks import running_router

from fuzz.noted_router import NOTES
from fuzz.raw import LARGE, large_request
from fuzz.wire import Address, Notes
from patience import PATIENCE_S

NUM_TIMES: Final = 3
QUIET_S: Final = 0.05
"""Until the loop has noted its last turn."""


def turn_s(router: Address, notes: Notes, raw: bytes) -> float:
    """CPU seconds of the longest turn that ``raw`` cost."""
    notes.begin()
    time.sleep(QUIET_S)
    with socket.create_connection(router, timeout=PATIENCE_S) as client:
        client.sendall(raw)
        client.recv(1000)
    time.sleep(QUIET_S)
    return notes.longest_s()[0]


def measured() -> list[tuple[float, str]]:
    """The shortest of each body's times, and which body it is."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        notes = Notes(Path(folder) / "notes")
        notes.begin()
        os.environ[NOTES] = str(notes.file)
        with running_router(Path(folder) / "log", router_module="fuzz.noted_router") as (_, router, _):
            for path, opening, units, ending in LARGE:
                for unit in units:
                    raw = large_request(path, opening, unit, ending)
                    took = min(turn_s(router, notes, raw) for _ in range(NUM_TIMES))
                    found.append((took, f"| `{path}` | `{opening[:24]!r}` | `{unit[:12]!r}` |"))
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzz.large_turns", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worst", type=int, default=10, help="rows to print (default: %(default)s)")
    given = parser.parse_args()
    print("| Path | Begins with | Then again and again | Longest turn, CPU |\n|---|---|---|---|")
    for took, body in measured()[: given.worst]:
        print(f"{body} {took * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
