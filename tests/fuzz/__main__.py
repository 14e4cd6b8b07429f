"""``python -m fuzz --inputs 1000000 --seed 1`` (from tests/): frames and bodies of all kinds; prints what held."""

from __future__ import annotations

import argparse
import time

from fuzz import bodies, frames


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    begin = time.monotonic()
    print(frames.run(arguments.inputs // 4, arguments.seed), flush=True)
    print(bodies.run(arguments.inputs // 2, arguments.seed), flush=True)
    print(bodies.run_clients(arguments.inputs // 4, arguments.seed), flush=True)
    print(f"{arguments.inputs} inputs, seed {arguments.seed}, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
