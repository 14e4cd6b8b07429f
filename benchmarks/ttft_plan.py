"""Decides which cases ``ttft.py`` measures, and how often. Estimates how long that takes. Pure.

The estimate uses prefill times of the benchmark's model, measured with one compute thread on 2 cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.ttft_figures import Way

KV_BYTES_PER_TOKEN: Final = 64 << 10
_BITS: Final = 8
_LINK_BITS: Final = {"loopback": 16e9, "1gbit": 0.98e9, "2gbit": 1.96e9}
_START_S: Final = 20.0
"""Start of each way, without its warm-up prompts."""
_REQUEST_S: Final = 0.1
"""Time of a request beside prefill and transfer: answer, traces, prompt."""


@dataclass(frozen=True, slots=True)
class Case:
    """``concurrency`` requests of ``tokens`` tokens at once over one link."""

    link: str
    tokens: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.link} {self.concurrency} x {self.tokens:,} tokens"


@dataclass(frozen=True, slots=True)
class Plan:
    """``links``: keys of ``places.LINKS``; ``rounds`` at most; ``case_s``: seconds for a case at most; ``layers``: the
    model's."""

    links: tuple[str, ...]
    tokens: tuple[int, ...]
    concurrency: tuple[int, ...]
    ways: tuple[Way, ...]
    rounds: int
    case_s: float
    layers: int = 16

    @property
    def max_tokens(self) -> int:
        return max(self.tokens)

    def cases_of(self, links: Sequence[str]) -> Iterator[Case]:
        """The cases that are measured over these links."""
        return (case for case in self._all_cases(links) if self.rounds_of(case))

    @property
    def skipped(self) -> list[Case]:
        """Cases that take too long for even one round."""
        return [case for case in self._all_cases(self.links) if not self.rounds_of(case)]

    def rounds_of(self, case: Case) -> int:
        """The number of rounds that fit into ``case_s``; 0 when none fits."""
        return min(self.rounds, int(self.case_s / self._round_s(case)))

    @property
    def seconds(self) -> float:
        """An estimate of the whole run."""
        measuring = sum(self.rounds_of(case) * self._round_s(case) for case in self.cases_of(self.links))
        num_starts = len(set(self.links) & {"loopback"}) + bool(set(self.links) - {"loopback"})
        return measuring + num_starts * len(self.ways) * (_START_S + 2 * prefill_s(self.max_tokens))

    def _all_cases(self, links: Sequence[str]) -> Iterator[Case]:
        return (Case(link, tokens, c) for link in links for c in self.concurrency for tokens in self.tokens)

    def _round_s(self, case: Case) -> float:
        return case.concurrency * sum(_request_s(way, case) for way in self.ways)


def prefill_s(tokens: int) -> float:
    """Prefill time of one prompt. Example: 2,048 → 1.3, 8,000 → 13."""
    return 3e-4 * tokens + 1.65e-7 * tokens**2


def _request_s(way: Way, case: Case) -> float:
    transfer = case.tokens * KV_BYTES_PER_TOKEN * _BITS / _LINK_BITS[case.link]
    match way:
        case Way.SINGLE:
            return prefill_s(case.tokens) + _REQUEST_S
        case Way.LAYERWISE:
            return max(prefill_s(case.tokens), transfer) + _REQUEST_S
        case _:
            return prefill_s(case.tokens) + transfer + _REQUEST_S
