"""``python -m tests.versions``, the command behind ``make versions``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest's ``pythonpath``

from versions import environment, surface
from versions.table import SHORT, VERSIONS

MINORS: Final = tuple(version.minor for version in VERSIONS)


def main() -> int:
    """The exit status: 0 when every asked version is as it should be."""
    given = _parser().parse_args()
    chosen = [version for version in VERSIONS if version.minor in (given.minors or MINORS)]
    if given.lock:
        for version in chosen:
            environment.lock(version)
        return 0
    if given.read:
        return surface.read_again()
    failed = []
    for version in chosen:
        print(f"vLLM {version.vllm}", flush=True)
        if environment.run_tests(version, SHORT if given.short else version.tests):
            failed.append(version.vllm)
        if not given.keep:
            environment.remove(version)
    print(f"vLLM {', '.join(failed)} failed" if failed else f"{len(chosen)} versions of vLLM passed", flush=True)
    return int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions",
        description="Real engines of other versions of vLLM, with this repository's tests.",
    )
    parser.add_argument("minors", nargs="*", type=_known, help=f"of {', '.join(MINORS)}; all by default")
    parser.add_argument("--short", action="store_true", help="two tests a version, for a look")
    parser.add_argument("--keep", action="store_true", help="keep each environment (6 GB) for the next time")
    parser.add_argument("--lock", action="store_true", help="resolve requirements/versions/*.lock anew, and end")
    parser.add_argument("--read", action="store_true", help="read vLLM's wheels and write surface.json anew, and end")
    return parser


def _known(minor: str) -> str:
    if minor not in MINORS:
        raise argparse.ArgumentTypeError(f"{minor} is none of {', '.join(MINORS)}")
    return minor


if __name__ == "__main__":
    sys.exit(main())
