"""The command ``pdcluster``: finds the subcommand and runs it. Imports a part only when it is asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper

from pdcluster_cli.commands import SUBCOMMANDS, Subcommand


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: the subcommand's, or 2: modules of its extra are missing, 130: Ctrl-C, 141: stdout is closed."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # An answer, or a name, may have what this terminal cannot show.
    try:
        try:
            return _run(*_read_words(sys.argv[1:] if argv is None else argv))
        finally:
            # An error in the last bytes comes here, and not at Python's end. Help ends with SystemExit.
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        # The command did not handle the signal yet, so there is nothing to stop.
        print("pdcluster: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Our reader, such as `head`, has closed stdout. Python would write to it again at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(name: str, *words: str) -> int:
    subcommand = SUBCOMMANDS[name]
    try:
        own_main: Callable[[Sequence[str]], int] = import_module(subcommand.module).main
        return own_main(words)
    except ModuleNotFoundError as error:
        if not _is_of_extra(error, subcommand):
            raise
        cure = f"pip install 'pdcluster[{subcommand.extra}]'"
        print(f"pdcluster {name}: Python has no module {error.name}: {cure}", file=sys.stderr)
        return 2


def _read_words(words: Sequence[str]) -> Sequence[str]:
    """``words``, if the first one is a subcommand. Otherwise print the help or an error and end the process."""
    if words and words[0] in SUBCOMMANDS:
        return words
    parser = argparse.ArgumentParser(prog="pdcluster", description="Prefill and decode on different vLLM engines.")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, subcommand in SUBCOMMANDS.items():
        commands.add_parser(name, help=subcommand.help, add_help=False)
    parser.parse_args(words)
    raise AssertionError(f"argparse takes {list(words)}, which name no subcommand")


def _is_of_extra(error: ModuleNotFoundError, subcommand: Subcommand) -> bool:
    """Whether the missing module belongs to the extra. A missing module of ours is a bug, and stays a traceback."""
    return bool(subcommand.extra) and not (error.name or "").startswith("pdcluster")


if __name__ == "__main__":
    sys.exit(main())
