"""The findings of the checks, and the page about them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """The result of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    LEFT_OUT = "left out"
    """The check does not apply to this device."""


LEFT_OUT_STATUS = 75
"""Exit status of a check that does not apply; its last line says why (EX_TEMPFAIL of sysexits.h)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. ``output``: its text on stdout; ``exit_code`` None: it was killed at its limit."""

    name: str
    exit_code: int | None
    output: str
    errors: str
    seconds: float

    @property
    def verdict(self) -> Verdict:
        known: dict[int | None, Verdict] = {0: Verdict.PASSED, LEFT_OUT_STATUS: Verdict.LEFT_OUT}
        return known.get(self.exit_code, Verdict.FAILED)

    @property
    def said(self) -> str:
        """The last line that the check printed, on stdout or else on stderr."""
        lines = self.output.strip().splitlines() or self.errors.strip().splitlines() or ["no word"]
        return lines[-1]

    @property
    def line(self) -> str:
        """The finding as a line for the terminal."""
        end = " (ended at its limit)" if self.exit_code is None else ""
        return f"{self.verdict.value:8} | {self.name:10} | {self.seconds:5.1f} s{end} | {self.said}"


def is_good(findings: Sequence[Finding]) -> bool:
    return all(finding.verdict is not Verdict.FAILED for finding in findings)


def page(title: str, command: str, findings: Sequence[Finding]) -> str:
    """The page in Markdown: a table, then the output of each check."""
    return "\n".join(_page(title, command, findings))


def _page(title: str, command: str, findings: Sequence[Finding]) -> Iterator[str]:
    yield from (f"# {title}", "", f"`{command}`", "", "| check | verdict | seconds | found |", "|---|---|---|---|")
    for finding in findings:
        said = finding.said.replace("|", "/")
        yield f"| {finding.name} | {finding.verdict.value} | {finding.seconds:.1f} | {said} |"
    for finding in findings:
        errors = finding.errors.strip() if finding.verdict is Verdict.FAILED else ""
        yield from ("", f"## {finding.name}", "", "```", f"{finding.output.strip()}\n{errors}".strip(), "```")
    yield ""
