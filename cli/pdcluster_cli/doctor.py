"""``pdcluster doctor``: says in a few lines whether this machine can run a pool, and what to type when it cannot."""

from __future__ import annotations

import argparse

from pdcluster_cli import checks, numbers
from pdcluster_protocol.launch import HTTP_PORT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    told = f"the port that the router would use (default: {HTTP_PORT})"
    parser.add_argument("--port", type=numbers.port, default=HTTP_PORT, help=told)


def run(arguments: argparse.Namespace) -> int:
    """Status 0 when all is well, 1 when a line needs the user."""
    findings = [
        checks.check_python(),
        checks.check_system_libraries(),
        checks.check_modules(),
        *checks.check_machine(checks.detect_device()),
        checks.check_port(arguments.port),
    ]
    for finding in findings:
        print(f"ok       {finding.what}" if finding.problem is None else f"problem  {finding.problem}")
    return 1 if checks.problems_of(findings) else 0
