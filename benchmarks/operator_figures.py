"""Figures and tables of ``operator_scale``, from the operator's metrics, the kernel and watches. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.figures import format_table, percentile

READS: Final = frozenset({"get", "list", "watch"})
LEASES: Final = "leases"
"""The leader renews its Lease every two seconds; these calls are no work on any object."""
OPERATOR: Final = "operator"
PROTOTYPE_S: Final = 4.7
PROTOTYPE_MIB: Final = 84.0 * 1e6 / 2**20
PROTOTYPE_APPLIES: Final = 1500
"""500 objects with three applied children each, and nothing else: no status, Event or proof."""

_CALLS: Final = "pdcluster_operator_api_calls_total"
_RUNS: Final = "pdcluster_operator_reconcile_seconds_count"
_LINE: Final = re.compile(r"(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call to the API server. ``status``: of the answer, or 0 if no answer came."""

    verb: str
    resource: str
    status: int

    @property
    def is_write(self) -> bool:
        """Whether it writes, and not to the Lease."""
        return self.verb not in READS and self.resource != LEASES


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts since the operator's start, or (``minus``) within a phase. ``runs``: looks, by how they ended."""

    calls: Counter[Call] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)

    def minus(self, earlier: Counts) -> Counts:
        """The growth of each count since ``earlier``. Example: 7 patches now, 5 earlier → 2."""
        return Counts(self.calls - earlier.calls, self.runs - earlier.runs)

    @property
    def num_runs(self) -> int:
        return self.runs.total()

    @property
    def num_writes(self) -> int:
        """All writes, answered or not, except those to the Lease."""
        return sum(number for call, number in self.calls.items() if call.is_write)

    def by_verb(self) -> Counter[str]:
        """Number of calls by verb, without calls about the Lease."""
        found: Counter[str] = Counter()
        for call, number in self.calls.items():
            found[call.verb] += 0 if call.resource == LEASES else number
        return +found


def parse_counts(page: str) -> Counts:
    """Reads the page of the operator's ``/metrics``: Prometheus' text format, whole numbers."""
    counts = Counts()
    for line in map(_LINE.fullmatch, page.splitlines()):
        labels = dict(_LABEL.findall(line["labels"])) if line else {}
        if line and line["name"] == _CALLS:
            counts.calls[Call(labels["verb"], labels["resource"], int(labels["status"]))] += round(float(line["value"]))
        elif line and line["name"] == _RUNS:
            counts.runs[labels["outcome"]] += round(float(line["value"]))
    return counts


@dataclass(frozen=True, slots=True)
class Usage:
    """One process. ``cpu_s``: since its start, or within a phase. ``peak_mib``: since its start."""

    cpu_s: float
    resident_mib: float
    peak_mib: float

    def since(self, earlier: Usage) -> Usage:
        return Usage(self.cpu_s - earlier.cpu_s, self.resident_mib, self.peak_mib)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``at``: monotonic seconds. ``usages``: by process. ``by_hand``: writes of this program as kubelet and user."""

    at: float
    usages: Mapping[str, Usage]
    counts: Counts
    by_hand: int


@dataclass(frozen=True, slots=True)
class Phase:
    """The differences between two snapshots."""

    name: str
    seconds: float
    usages: Mapping[str, Usage]
    counts: Counts
    by_hand: int


def phase_between(name: str, before: Snapshot, after: Snapshot) -> Phase:
    usages = {who: usage.since(before.usages[who]) for who, usage in after.usages.items()}
    counts = after.counts.minus(before.counts)
    return Phase(name, after.at - before.at, usages, counts, after.by_hand - before.by_hand)


def own_share(phases: Sequence[Phase]) -> float:
    """This program's share (0 to 1) of all processes' CPU seconds. It plays users and kubelets."""
    own = sum(phase.usages["this program"].cpu_s for phase in phases)
    return own / sum(usage.cpu_s for phase in phases for usage in phase.usages.values())


def num_changed(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    """Number of objects that are new, gone or of another version. Both arguments are versions by uid.

    Example: a: 1, b: 1 and a: 2, c: 1 → 3.
    """
    return len({uid for uid, _ in before.items() ^ after.items()})


@dataclass(frozen=True, slots=True)
class Lag:
    """How long one pod's change took to be seen, in seconds from before its write. ``pod_s``: by a watch of pods;
    ``status_s``: in a status, by a watch of PDClusters. On a busy machine the status may be seen first."""

    pod_s: float
    status_s: float


@dataclass(frozen=True, slots=True)
class Bare:
    """A loop that writes the same children by the same client, without an operator."""

    num_objects: int
    seconds: float
    client_cpu_s: float

    @property
    def per_s(self) -> float:
        return self.num_objects / self.seconds


def format_phases(phases: Sequence[Phase]) -> str:
    """A table of each phase's seconds, memory, and CPU seconds of each process."""
    others = [who for who in phases[0].usages if who != OPERATOR]
    columns = ["phase", "seconds", "operator CPU s", "memory MiB", "peak MiB", *(f"{who} CPU s" for who in others)]
    rows = []
    for phase in phases:
        own = phase.usages[OPERATOR]
        cpus = [f"{phase.usages[who].cpu_s:.1f}" for who in others]
        memory = [f"{own.resident_mib:.0f}", f"{own.peak_mib:.0f}"]
        rows.append([phase.name, f"{phase.seconds:.1f}", f"{own.cpu_s:.2f}", *memory, *cpus])
    return format_table(columns, rows)


def format_calls(phases: Sequence[Phase]) -> str:
    """A table of each phase's calls by verb, in all and per look."""
    verbs = sorted({verb for phase in phases for verb in phase.counts.by_verb()})
    columns = ["phase", "looks", "out of date or failed", *(f"{verb} (per look)" for verb in verbs), "writes by hand"]
    rows = []
    for phase in phases:
        found, looks = phase.counts.by_verb(), phase.counts.num_runs
        cells = [f"{found[verb]:,} ({found[verb] / looks:.1f})" if looks else f"{found[verb]:,}" for verb in verbs]
        other = looks - phase.counts.runs["done"]
        rows.append([phase.name, f"{looks:,}", f"{other:,}", *cells, f"{phase.by_hand:,}"])
    return format_table(columns, rows)


def format_lags(lags: Iterable[Lag]) -> str:
    """A table in milliseconds. At least one lag."""
    taken = list(lags)
    told = {
        "pod's change until a watch of pods shows it": [lag.pod_s for lag in taken],
        "pod's change until status shows it": [lag.status_s for lag in taken],
        "between the two": [lag.status_s - lag.pod_s for lag in taken],
    }
    shares = (0.5, 0.9, 0.99, 1.0)
    rows = [[name, *(f"{percentile(values, share) * 1000:,.0f}" for share in shares)] for name, values in told.items()]
    return format_table(["ms", "median", "90 %", "99 %", "most"], rows)


def format_references(bare: Bare, first: Phase) -> str:
    """A table that compares the first phase with the bare loop and the prototype."""
    own = first.usages[OPERATOR]
    all_writes = first.counts.num_writes + first.by_hand
    rows = [
        [
            "seconds",
            f"{first.seconds:.1f}",
            *_beside(first.seconds, bare.seconds),
            *_beside(first.seconds, PROTOTYPE_S),
        ],
        ["CPU s of the client", f"{own.cpu_s:.1f}", *_beside(own.cpu_s, bare.client_cpu_s), "1.4 to 2.1", ""],
        [
            "writes/s, of all who write",
            f"{all_writes / first.seconds:.0f}",
            *_beside(all_writes / first.seconds, bare.per_s),
            *_beside(all_writes / first.seconds, PROTOTYPE_APPLIES / PROTOTYPE_S),
        ],
        ["peak MiB", f"{own.peak_mib:.0f}", "", "", *_beside(own.peak_mib, PROTOTYPE_MIB)],
    ]
    return format_table(["", "operator", "bare loop", "ratio", "prototype", "ratio"], rows)


def _beside(ours: float, theirs: float) -> tuple[str, str]:
    """Their figure, and ours divided by it. Example: 6 beside 4 → "4.0" and "1.50"."""
    return f"{theirs:.0f}" if theirs >= 100 else f"{theirs:.1f}", f"{ours / theirs:.2f}"
