"""Finds in an engine's log why it did not start: the first error that does not repeat another error. Pure.

vLLM 0.32 tells one failure many times: a worker logs its traceback, the engine core logs "initialization failed", the
API server raises "See root cause above". So the end of the log, which a person sees first, says the least. Python
prints the oldest exception of a chain first and the raised one last, so the cause is the last line of the first chain.

    [name] (EngineCore pid=7) ERROR 11-22 16:18:58 [core.py:1] Traceback (most recent call last):
    [name] (EngineCore pid=7) ERROR 11-22 16:18:58 [core.py:1]   File "x.py", line 1, in f
    [name] (EngineCore pid=7) ERROR 11-22 16:18:58 [core.py:1] ValueError: why
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

MAX_CHARACTERS: Final = 600
"""Characters of a cause: people do not read a message that quotes a whole configuration."""
_PREFIX: Final = re.compile(
    r"(?:\[[\w-]+\] )?(?:\([^()]*pid=\d+\) )?(?:(?P<level>[A-Z]+) (?P<at>\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]*\] ?)?"
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_CHAINED: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_RAISED: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*|:|)$")
_ECHOES: Final = (
    "root cause",
    "Engine core initialization failed",
    "Executor failed.",
    "KeyboardInterrupt",
    "cancelled",
    "SystemExit",
)
_REFUSED: Final = re.compile(r"\S+: error: (?P<why>.+)$")
"""argparse's last line."""
_PYDANTIC: Final = re.compile(r"^[\w.]*ValidationError: \d+ validation errors? for \S+ (?:Value error, )?")
"""Pydantic's words before those of vLLM's own check. After them comes the whole configuration."""
_CORE_KILLED: Final = re.compile(r"Failed core proc\(s\): \{.*?'(?P<name>\w+)': -(?P<signal>\d+)")
SIGNALS: Final[dict[int, str]] = {
    signal.SIGKILL: "killed from outside, as the kernel does when memory runs out",
    signal.SIGILL: "this CPU lacks an instruction that the build of vLLM or PyTorch needs",
}
"""Causes of signals that leave nothing in the log."""
_ABORTED: Final = re.compile(r"\s*what\(\):\s+(?P<why>.+)$")
"""The line that the C++ library prints before it ends a process."""


_LAST: Final = timedelta(minutes=1)


def last_cause(log: str) -> str | None:
    """Finds the cause for a process that has served. Looks only at the last minute of the log, by the lines' own times,
    or at all of a log whose lines have no times."""
    lines = log.splitlines(keepends=True)
    times = _times_of(lines)
    if not times:
        return root_cause(log)
    last = times[max(times)]
    recent = (number for number, at in times.items() if timedelta() <= last - at <= _LAST)
    return root_cause("".join(lines[min(recent) :]))


def _times_of(lines: Sequence[str]) -> dict[int, datetime]:
    """By number of line, of those that have one."""
    return {number: at for number, line in enumerate(lines) if (at := _time_of(line)) is not None}


def _time_of(line: str) -> datetime | None:
    """The time at the beginning of a line. Log lines have no year, so a leap year is assumed."""
    prefix = _PREFIX.match(line)
    at = prefix["at"] if prefix else None
    try:
        return datetime.strptime(f"2000-{at}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) if at else None
    except ValueError:
        return None


def root_cause(log: str) -> str | None:
    """The first error in one line; None: the log holds none."""
    lines = [_Line(text) for text in log.splitlines()]
    found = next((cause for cause in _chains(lines) if not _is_echo(cause)), None)
    found = found or next(filter(None, (line.refusal for line in lines)), None)
    found = found or next((line.text.strip() for line in lines if line.is_error and not _is_echo(line.text)), None)
    found = found or _killed(log)
    return _shortened(found) if found else None


def _killed(log: str) -> str | None:
    """The end of an engine core by a signal, as vLLM's API server logs it; None: it logs none."""
    found = _CORE_KILLED.search(log)
    if found is None:
        return None
    number = int(found["signal"])
    return f"{found['name']} has ended by signal {number}: {SIGNALS.get(number, 'its log has no more')}"


class _Line:
    """One line of a log without its prefixes."""

    def __init__(self, whole: str) -> None:
        prefix = _PREFIX.match(whole)
        assert prefix is not None  # it also matches the empty text
        self.text = whole[prefix.end() :].rstrip()
        self.level = prefix["level"]

    @property
    def is_error(self) -> bool:
        return self.level in ("ERROR", "CRITICAL") and bool(self.text.strip())

    @property
    def refusal(self) -> str | None:
        found = _REFUSED.match(self.text) or _ABORTED.match(self.text)
        return found["why"] if found else None


def _chains(lines: Sequence[_Line]) -> Iterator[str]:
    """The exception at the end of each chain of tracebacks. Tracebacks that are logged as warnings do not count."""
    end = 0
    while (start := _next_traceback(lines, end)) is not None:
        cause, end = _raised(lines, start)
        while cause and (following := _chained(lines, end)) is not None:
            cause, end = _raised(lines, following)
        if cause:
            yield cause


def _next_traceback(lines: Sequence[_Line], start: int) -> int | None:
    for number in range(start, len(lines)):
        if lines[number].text.strip() == _TRACEBACK and lines[number].level in (None, "ERROR", "CRITICAL"):
            return number
    return None


def _raised(lines: Sequence[_Line], traceback: int) -> tuple[str, int]:
    """The exception below a traceback's indented frames, with its further lines, and the number of the next line."""
    number = traceback + 1
    while number < len(lines) and (not lines[number].text or lines[number].text[0] in " \t"):
        number += 1
    if number == len(lines) or not _RAISED.match(lines[number].text):
        return "", number
    said = [lines[number].text]
    number += 1
    while number < len(lines) and lines[number].text[:2] == "  ":
        said.append(lines[number].text.strip())
        number += 1
    return " ".join(said), number


def _chained(lines: Sequence[_Line], end: int) -> int | None:
    """The line at which this chain's next traceback begins; None: the chain ends here."""
    near = range(end, min(end + 5, len(lines)))
    if any(lines[number].text.strip() in _CHAINED for number in near):
        return next((number for number in near if lines[number].text.strip() == _TRACEBACK), None)
    return None


def _is_echo(text: str) -> bool:
    return any(word in text for word in _ECHOES)


def _shortened(text: str) -> str:
    line = _PYDANTIC.sub("", " ".join(text.split())).partition(" [type=")[0]
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]} [...]"
