"""``python -m tools.device_check``: what the connector needs of an accelerator, tried on the one of this machine.

    python -m tools.device_check --report report.md      on a lent machine, at most ten minutes
    python -m tools.device_check --device cpu            the same path without an accelerator

Each check is a process of its own with a limit, so a device that hangs fails one check. Decision 0017 explains each.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.device_check.results import Finding, is_good, page

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("", "protocol", "connector", "cli", "tests")
"""Folders of this repository that a check imports from."""
_HERE: Final = "tools.device_check"
_CONTRACT: Final = ("-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(ROOT))


@dataclass(frozen=True, slots=True)
class Check:
    """One check: ``module``, run with ``arguments``; a module of this folder also gets ``--device``."""

    name: str
    module: str
    limit_s: float
    arguments: tuple[str, ...] = ()

    def command(self, device: str) -> list[str]:
        ours = ("--device", device) if self.module.startswith(_HERE) else ()
        return [sys.executable, "-m", self.module, *self.arguments, *ours]


CHECKS: Final = (
    Check("machine", f"{_HERE}.machine", 25),
    Check("events", f"{_HERE}.events", 25),
    Check("contract", "pytest", 50, (*_CONTRACT, str(ROOT / "tests/contract/test_device.py"))),
    Check("layers", f"{_HERE}.layers", 60),
    Check("control", f"{_HERE}.control", 30),
    Check("reshard", f"{_HERE}.reshard", 30),
    Check("content-sums", f"{_HERE}.content_sums", 30),
    Check("hook", f"{_HERE}.hook", 40),
    Check("bandwidth", f"{_HERE}.bandwidth", 40),
    Check("late-errors", f"{_HERE}.late_errors", 70),
    Check("copies", f"{_HERE}.copies", 90),
    Check("receiving", f"{_HERE}.receiving", 40),
    Check("handover", f"{_HERE}.handover", 65),
)
"""All checks in their order. Their limits add up to less than ten minutes."""
_SLOWER: Final = {"cpu": 5}
"""Factor of the limits for a device that is slower than an accelerator."""


def main() -> int:
    given = _parser().parse_args()
    findings = []
    command = f"python -m tools.device_check --device {given.device}"
    for check in CHECKS:
        if check.name in given.checks:
            findings.append(run(check, given.device))
            print(findings[-1].line, flush=True)
            if given.report:  # after each check: the machine may be gone before the last
                given.report.write_text(page(f"Device check on {given.device}", command, findings))
    return 0 if is_good(findings) else 1


def run(check: Check, device: str) -> Finding:
    """Run a check. Afterwards its process has ended; at the limit it is killed with its process group."""
    began = time.monotonic()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*(str(ROOT / one) for one in FOLDERS), *_inherited()])}
    with subprocess.Popen(  # noqa: S603 - our own modules, our own interpreter
        check.command(device),
        cwd=ROOT,
        env=env,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        output, errors, exit_code = _ended(process, check.limit_s * _SLOWER.get(device, 1))
    return Finding(check.name, exit_code, output, errors, time.monotonic() - began)


def _ended(process: subprocess.Popen[str], limit_s: float) -> tuple[str, str, int | None]:
    """Text on stdout and stderr, and the exit status; None: it was killed at the limit."""
    try:
        return *process.communicate(timeout=limit_s), process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return *process.communicate(), None


def _inherited() -> list[str]:
    """Folders of our own ``PYTHONPATH``. On a lent machine they hold the wheels that were carried there."""
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def _parser() -> argparse.ArgumentParser:
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="python -m tools.device_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "checks", nargs="*", default=names, metavar="CHECK", help=f"of {', '.join(names)}; all by default"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "npu", "cpu"])
    parser.add_argument("--report", type=Path, help="write a page of it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
