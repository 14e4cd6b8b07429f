"""The findings of the checks, and the page that is made of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How a check has ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    LEFT_OUT = "left out"
    """Nothing to see on this device."""


LEFT_OUT_STATUS = 75
"""A check's exit status where its last line says why it has nothing to see (EX_TEMPFAIL of sysexits.h)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. ``output``: what it printed; ``exit_code``: None when it was ended at its limit."""

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
        """The last line: what it found. Of its errors, where it could not say so itself."""
        lines = self.output.strip().splitlines() or self.errors.strip().splitlines() or ["no word"]
        return lines[-1]

    @property
    def line(self) -> str:
        """For the terminal."""
        end = " (ended at its limit)" if self.exit_code is None else ""
        return f"{self.verdict.value:8} | {self.name:10} | {self.seconds:5.1f} s{end} | {self.said}"


def is_good(findings: Sequence[Finding]) -> bool:
    return all(finding.verdict is not Verdict.FAILED for finding in findings)


def page(title: str, command: str, findings: Sequence[Finding]) -> str:
    """Markdown: one table, then what each check printed."""
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
