"""Finds the lines of a process' log that say why it ended."""

from __future__ import annotations

from os import SEEK_END
from pathlib import Path
from typing import BinaryIO, Final

from pdcluster_cli.processes.root_cause import SIGNALS, last_cause, root_cause

_MAX_LOG_BYTES: Final = 4 << 20
"""Length of a log's beginning that is searched for a cause. An engine writes some ten KiB while it starts."""
_MAX_END_BYTES: Final = 64 << 10
"""Length of a log's end in which its last lines are looked for. The log of a pool that serves may have any length."""


def describe_end(name: str, exit_code: int, log_path: Path, *, has_served: bool = False) -> str:
    """Text with the process' name, its exit status or signal, the cause if known, and the last lines of its log.

    ``has_served``: the cause is looked for in the end of the log, since the process survived all earlier errors.
    """
    # A signal says more than the log: a killed process had no time to write, and the first error may be hours old.
    cause = SIGNALS.get(-exit_code) or cause_in(log_path, at_end=has_served)
    how = f"status {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
    return f"{name} has ended with {how}{said(cause)}; the end of {log_path}:\n{last_lines(log_path)}"


def said(cause: str | None) -> str:
    return f": {cause}" if cause else ""


def cause_in(log_path: Path, *, at_end: bool = False) -> str | None:
    """The first error in the log, or in its end, that does not repeat another error; None: there is none."""
    try:
        with log_path.open("rb") as log:
            if at_end:
                return last_cause(_read_end(log).decode(errors="replace"))
            return root_cause(log.read(_MAX_LOG_BYTES).decode(errors="replace"))
    except OSError:
        return None


def last_lines(path: Path, count: int = 15) -> str:
    """The last ``count`` lines of a log, indented."""
    try:
        with path.open("rb") as log:
            lines = _read_end(log).decode(errors="replace").splitlines()[-count:]
    except OSError as error:
        lines = [f"(no log: {error})"]
    return "\n".join(f"    {line}" for line in lines)


def _read_end(log: BinaryIO) -> bytes:
    log.seek(max(0, log.seek(0, SEEK_END) - _MAX_END_BYTES))
    return log.read()
