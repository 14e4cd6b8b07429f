"""The command ``pdcluster``: finds the subcommand and runs it. Imports a part only when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

OPERATOR_HELP: Final = "keep the PDClusters of a Kubernetes cluster (see: pdcluster operator --help)"
ROUTER_HELP: Final = "route requests between engines that run already (see: pdcluster router --help)"

_OWN_WORDS: Final = {
    "router": "pdcluster_router.__main__",
    "operator": "pdcluster_operator.__main__",
    "explain": "pdcluster_cli.explain",
    "plan": "pdcluster_cli.plan",
    "drain": "pdcluster_cli.drain",
    "ready": "pdcluster_cli.ready",
}
"""Commands whose module has a ``main`` that reads its own words. Nothing else is imported for them: a probe runs every
few seconds."""


_EXTRAS: Final = {
    "router": "router",
    "operator": "operator",
    "explain": "operator",
    "plan": "operator",
    "local": "router,connector,cpu",
}
"""What brings the modules that a command imports. Those without need the standard library only."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of the subcommand; 2 when modules of its extra are not installed."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except ModuleNotFoundError as error:
        if not _is_of_extra(error, words):
            raise
        extra = _EXTRAS[words[0]]
        cure = f"pip install 'pdcluster[{extra}]'"
        print(f"pdcluster {words[0]}: Python has no module {error.name}: {cure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # Before the command itself takes care of signals there is nothing to stop.
        return 130


def _run(words: list[str]) -> int:
    if words and words[0] in _OWN_WORDS:
        own_main: Callable[[Sequence[str]], int] = import_module(_OWN_WORDS[words[0]]).main
        return own_main(words[1:])
    from pdcluster_cli.local import options

    arguments = _build_parser().parse_args(options.join_args(words))
    status: int = arguments.run(arguments)
    return status


def _is_of_extra(error: ModuleNotFoundError, words: Sequence[str]) -> bool:
    """A module of ours that is missing is our own bug, and stays a traceback."""
    is_ours = (error.name or "").startswith("pdcluster")
    return bool(words) and words[0] in _EXTRAS and not is_ours


def _build_parser() -> argparse.ArgumentParser:
    from pdcluster_cli import doctor, drain, explain, plan, ready
    from pdcluster_cli.local import options

    parser = argparse.ArgumentParser(prog="pdcluster", description="Prefill and decode on different vLLM engines.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    local_help = "start prefill engines, decode engines and the router on this machine"
    local = commands.add_parser("local", help=local_help, description=local_help)
    options.add_arguments(local)
    local.set_defaults(run=_run_local)
    kubernetes = (("operator", OPERATOR_HELP), ("explain", explain.HELP), ("plan", plan.HELP))
    for name, text in (("router", ROUTER_HELP), *kubernetes, ("drain", drain.HELP), ("ready", ready.HELP)):
        commands.add_parser(name, help=text, add_help=False)
    doctor_help = "check that this machine has what a pool needs"
    doctor_parser = commands.add_parser("doctor", help=doctor_help, description=doctor_help)
    doctor.add_arguments(doctor_parser)
    doctor_parser.set_defaults(run=doctor.run)
    return parser


def _run_local(arguments: argparse.Namespace) -> int:
    from pdcluster_cli.local import command

    return command.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
