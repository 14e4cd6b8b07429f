"""Measures the operator with hundreds of PDClusters on a real API server: seconds, memory, CPU, calls, lag.

    .venv/bin/python -m benchmarks.operator_scale --write          500 PDClusters, 5,000 engines; docs/operator-scale.md
    .venv/bin/python -m benchmarks.operator_scale --quick          10 PDClusters, some seconds
    .venv/bin/python -m benchmarks.operator_scale --clusters 100   as many as one likes

Real are etcd (without fsync), kube-apiserver and the operator: one process with the flags, the ServiceAccount and the
rights of the chart's defaults. Played by this program are users, the Deployment controller and the kubelets: there is
no node, pods are objects whose status it patches, so Ready comes as soon as it can write. Nothing is transferred
either: `POST /pdcluster/verify` of every pool is answered by a stub with 200 at once, and names of Services lead to
127.0.0.1. All processes share the machine's cores, so the tables say who used them.

*Create* makes `examples/cpu.yaml` so many times and waits until all are Ready. *At rest* changes nothing, and the
operator must write nothing but its Lease. *Scale* asks for five engines of each role. *Churn* changes each engine
`--pace` times in a minute (readiness that flips; one in ten is deleted and replaced). A lag runs from before the
pod's write until a watch of PDClusters shows the new count. The time of a watch of the pod itself is beside it; 50 ms
are the operator's own wait for others of a burst. The bare loop applies the same children by the operator's own
client, 16 at a time as the operator has workers. It has an API server of its own, no reads, status, Events or pods.
The prototype's figures are of another day: 500 objects with three children each, 4.7 s, 84 MB. One run, no rounds: the
spread is not known.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.figures import format_minutes, write_page
from benchmarks.kube_user import Object
from benchmarks.operator_bench import NAMESPACE, Bench, at_once, open_kube, pool_document, running_bench
from benchmarks.operator_figures import (
    Bare,
    Lag,
    Phase,
    Snapshot,
    format_calls,
    format_lags,
    format_phases,
    format_references,
    num_changed,
    own_share,
    phase_between,
)
from benchmarks.operator_plane import admin_access, make_namespace, read_usage, running_plane
from benchmarks.pod_churn import Churn

from pdcluster_kube.session import open_session
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.core.manifests.pool import pool_of
from pdcluster_operator.core.plan.actions import Child, Way
from pdcluster_operator.core.plan.pool_plan import plan_pool
from pdcluster_operator.core.seen.observed import Observed
from pdcluster_operator.http_kube import HttpKube

ENGINES: Final = 5
"""Engines of each role, from *scale* on."""

_CLUSTER_S: Final = 0.25
"""Time of each PDCluster in *create*, *scale* and the bare loop together. For the estimate only."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``seconds``: the length of *at rest*, and of *churn*. ``pace``: changes of each engine in a minute of *churn*."""

    clusters: int
    seconds: float
    pace: float = 1.0

    @property
    def names(self) -> list[str]:
        """Example: pool-000."""
        return [f"pool-{number:03}" for number in range(self.clusters)]

    @property
    def num_changes(self) -> int:
        """Changes in *churn*: an even number, because each engine that goes down comes up again."""
        return 2 * round(self.clusters * ENGINES * self.pace * self.seconds / 60)

    @property
    def flags(self) -> str:
        return f"--clusters {self.clusters} --seconds {self.seconds:g} --pace {self.pace:g}"

    @property
    def estimate_s(self) -> float:
        return 20 + 2 * self.seconds + self.clusters * _CLUSTER_S


QUICK: Final = Plan(clusters=10, seconds=4.0, pace=6.0)


@dataclass
class Report:
    """``num_touched``: objects that *at rest* left with another version. ``num_missed``: changes without a status."""

    plan: Plan
    bare: Bare
    start: Snapshot
    phases: dict[str, Phase] = field(default_factory=dict)
    num_touched: int = 0
    lags: list[Lag] = field(default_factory=list)
    num_missed: int = 0

    @property
    def num_short(self) -> int:
        """Planned changes that never began."""
        return self.plan.num_changes - len(self.lags) - self.num_missed

    def faults(self) -> list[str]:
        """A message for each thing that must not happen and did."""
        writes = self.phases["at rest"].counts.num_writes
        told = {
            f"{writes} writes at rest": writes,
            f"{self.num_touched} objects changed at rest": self.num_touched,
            f"{self.num_missed} changes never got into a status": self.num_missed,
            f"{self.num_short} of {self.plan.num_changes} planned changes never happened": self.num_short,
        }
        return [fault for fault, number in told.items() if number]


def main(plan: Plan, *, write: bool) -> int:
    """Measure, print, write. Returns 1 for a fault: a write at rest, a status that did not follow, too few changes."""
    print(f"takes {format_minutes(plan.estimate_s)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(measure(plan, Path(folder)))
    text = format_report(report)
    print(f"\n{text}")
    for fault in report.faults():
        print(f"operator_scale: {fault}", file=sys.stderr)
    if write:
        title = f"The operator and {plan.clusters:,} PDClusters"
        write_page("operator_scale", title, f"{_words()}\n\n{text}", flags=plan.flags)
    return 1 if report.faults() else 0


async def measure(plan: Plan, folder: Path) -> Report:
    """Runs the bare loop and all phases. ``folder``: empty; logs are left there."""
    for name in ("bare", "whole"):
        (folder / name).mkdir()
    bare = await measure_bare(plan, folder / "bare")
    async with running_bench(folder / "whole") as bench:
        report = Report(plan, bare, await bench.snapshot())
        await _measure_phase(bench, report, "create", bench.create_pools(plan.names))
        await bench.until_quiet()
        before = await bench.versions()
        await _measure_phase(bench, report, "at rest", asyncio.sleep(plan.seconds))
        report.num_touched = num_changed(before, await bench.versions())
        await _measure_phase(bench, report, "scale", bench.scale_pools(plan.names, ENGINES))
        await bench.until_quiet()
        await _churn(bench, report)
    return report


async def measure_bare(plan: Plan, folder: Path) -> Bare:
    """The operator's client applies or creates every child of every PDCluster, without an operator."""
    with running_plane(folder) as plane:
        make_namespace(plane, NAMESPACE)
        async with open_session(admin_access(plane, folder)) as session:
            kube = open_kube(session, plane.url)
            children = [child for name in plan.names for child in first_children(pool_document(name, 80))]
            began, cpu_s = time.monotonic(), read_usage(os.getpid()).cpu_s
            await at_once(_bring_about(kube, child) for child in children)
            return Bare(len(children), time.monotonic() - began, read_usage(os.getpid()).cpu_s - cpu_s)


def first_children(document: Object) -> tuple[Child, ...]:
    """The children that the operator makes for a new PDCluster."""
    metadata = {**document["metadata"], "uid": f"uid-of-{document['metadata']['name']}", "generation": 1}
    cluster = PDCluster.from_wire({**document, "metadata": metadata})
    pool = pool_of(cluster, "pdcluster:1")
    return plan_pool(pool, Observed(), secret_text="0" * 64, now=int(time.time())).children


async def _bring_about(kube: HttpKube, child: Child) -> None:
    await (kube.create if child.way is Way.CREATE else kube.apply)(child.document)


async def _measure_phase(bench: Bench, report: Report, name: str, work: Awaitable[object]) -> None:
    before = await bench.snapshot()
    await work
    report.phases[name] = phase_between(name, before, await bench.snapshot())
    print(f"{name}: {report.phases[name].seconds:.1f} s", flush=True)


async def _churn(bench: Bench, report: Report) -> None:
    plan, churn = report.plan, Churn(bench.kubelet, bench.pods, bench.clusters, random.Random(1))
    work = churn.run(plan.names, seconds=plan.seconds, num_changes=plan.num_changes)
    await _measure_phase(bench, report, "churn", work)
    report.lags, report.num_missed = churn.lags, churn.num_missed


def format_report(report: Report) -> str:
    """The page's tables."""
    phases, plan = list(report.phases.values()), report.plan
    leases = sum(number for call, number in phases[1].counts.calls.items() if call.resource == "leases")
    return "\n\n".join(
        [
            f"{plan.clusters:,} PDClusters, three Deployments and {report.bare.num_objects // plan.clusters} objects"
            f" each. The operator before the first one: {report.start.usages['operator'].resident_mib:.0f} MiB.",
            format_phases(phases),
            f"Of all CPU seconds, {own_share(phases):.0%} are this program's.",
            "Calls of the operator without its Lease and kopf's watches, dry runs among them (four for a new pool, they"
            " store nothing). A look: one reconcile of one object.",
            format_calls(phases),
            f"At rest: {phases[1].counts.num_writes} writes but for {leases} calls about the Lease,"
            f" {report.num_touched} objects with another resourceVersion.",
            f"Churn: {len(report.lags):,} of {plan.num_changes:,} planned changes to {plan.clusters * 2 * ENGINES:,}"
            f" engines in {report.phases['churn'].seconds:.1f} s; {report.num_missed} missed.",
            format_lags(report.lags),
            f"*Create* beside the references; the bare loop wrote {report.bare.num_objects:,} objects:",
            format_references(report.bare, report.phases["create"]),
        ]
    )


def _words() -> str:
    """The words of this file's docstring, without its first line and its command lines."""
    return (__doc__ or "").split("\n\n", 2)[2].strip()


def _parse(argv: Sequence[str]) -> tuple[Plan, bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0, help="of rest and of churn, each")
    parser.add_argument("--pace", type=float, default=1.0, help="changes of each engine in a minute of churn")
    parser.add_argument("--write", action="store_true", help="write docs/operator-scale.md")
    parser.add_argument("--quick", action="store_true", help="10 PDClusters, no file")
    given = parser.parse_args(argv)
    plan = QUICK if given.quick else Plan(given.clusters, given.seconds, given.pace)
    return plan, given.write and not given.quick


if __name__ == "__main__":
    chosen, is_written = _parse(sys.argv[1:])
    sys.exit(main(chosen, write=is_written))
