"""``pdcluster doctor``: says in a few lines whether this machine can run a pool, and if not what to do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pdcluster_cli import checks, numbers
from pdcluster_cli.commands import SUBCOMMANDS
from pdcluster_protocol.launch import HTTP_PORT


def main(words: Sequence[str]) -> int:
    """Print the findings. Exit status 0: all is well; 1: there is a problem."""
    given = make_parser().parse_args(words)
    device = checks.detect_device()
    findings = [
        checks.check_python(),
        checks.check_system_libraries(),
        checks.check_modules(device),
        *checks.check_machine(device),
        checks.check_port(given.port),
    ]
    for finding in findings:
        print(f"ok       {finding.what}" if finding.problem is None else f"problem  {finding.problem}")
    return 1 if checks.problems_of(findings) else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdcluster doctor", description=SUBCOMMANDS["doctor"].help)
    told = f"the port that the router would use (default: {HTTP_PORT})"
    parser.add_argument("--port", type=numbers.port, default=HTTP_PORT, help=told)
    return parser
