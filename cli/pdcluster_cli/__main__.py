"""The command ``pdcluster``: finds the subcommand and runs it. Imports a part only when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pdcluster_cli import doctor
from pdcluster_cli.local import command, options

ROUTER_HELP = "route requests between engines that run already (see: pdcluster router --help)"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of the subcommand."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        # Before the command itself takes care of signals there is nothing to stop.
        return 130


def _run(words: list[str]) -> int:
    if words[:1] == ["router"]:
        from pdcluster_router.__main__ import main as router_main

        return router_main(words[1:]) or 0
    arguments = _build_parser().parse_args(options.join_args(words))
    status: int = arguments.run(arguments)
    return status


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdcluster", description="Prefill and decode on different vLLM engines.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    local_help = "start prefill engines, decode engines and the router on this machine"
    local = commands.add_parser("local", help=local_help, description=local_help)
    options.add_arguments(local)
    local.set_defaults(run=command.run)
    commands.add_parser("router", help=ROUTER_HELP, add_help=False)
    doctor_help = "check that this machine has what a pool needs"
    doctor_parser = commands.add_parser("doctor", help=doctor_help, description=doctor_help)
    doctor.add_arguments(doctor_parser)
    doctor_parser.set_defaults(run=doctor.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
