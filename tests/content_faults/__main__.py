"""Spoils KV on decode in many ways and looks whether it is found, pushed again and right, or lost with one error.

    python -m tests.content_faults [--faults 100000] [--seed 1] [--jobs 2] [--report docs/reports/content-100000.md]

All TP pairs of 1, 2 and 4, with GQA, MLA, GQA with tokens first, which unequal TP sizes reshard, and state (that at
equal TP only: it is not split), on memory of CPU tensors; the real cores decide and plan. Where all is compared, each
fault must be found; the share that samples find is told.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest's ``pythonpath``

from content_faults.run import PAIRS, Tally, run_pair


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.content_faults")
    arguments.add_argument("--faults", type=int, default=100_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--report", type=Path)
    given = arguments.parse_args()
    begun = time.monotonic()
    each = -(-given.faults // len(PAIRS))
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        tallies = pool.starmap(run_pair, [(*pair, each, given.seed) for pair in PAIRS], chunksize=1)
    page = report(tallies, given.seed, time.monotonic() - begun)
    print(page)
    if given.report:
        given.report.write_text(page)
    return 1 if any(tally.wrong for tally in tallies) else 0


def report(tallies: list[Tally], seed: int, seconds: float) -> str:
    """The page."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    pairs = ", ".join(f"{prefill} to {decode}" for prefill, decode in PAIRS)
    rows = [_row(name, total) for name in total.done]
    return "\n".join((
        f"# {total.done.total():,} faults in the content of KV",
        "",
        f"Written by `python -m tests.content_faults --faults {total.done.total()} --seed {seed}`, {seconds:.0f} s.",
        f"TP pairs: {pairs}. `full` finds a fault or the line below names it; three of four faults are done once and",
        "must be healed by the second push, the fourth is done to the second push too and must lose the attempt.",
        "`sampled` finds: in prompts of 600 tokens on five or six layers, of which it looks at about 3 %.",
        "",
        "| Fault | done | healed by the second push | ended by one error | sampled finds |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"Not found, not healed, or received although wrong: {sum(len(tally.wrong) for tally in tallies)}.",
        *(f"- {line}" for line in total.wrong[:20]),
        "",
    ))  # fmt: skip


def _row(name: str, total: Tally) -> str:
    share = 100 * total.sampled[name] / total.done[name]
    return f"| {name} | {total.done[name]:,} | {total.healed[name]:,} | {total.lost[name]:,} | {share:.1f} % |"


if __name__ == "__main__":
    sys.exit(main())
