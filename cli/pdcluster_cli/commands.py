"""The subcommands of ``pdcluster``, and the flags that several of them have.

Imports nothing of ours, because a probe that runs every few seconds imports this file.
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One subcommand. ``main(words)`` of ``module`` reads the words and returns the exit status."""

    module: str
    help: str
    extra: str = ""
    """The extra whose modules the subcommand imports, always or with some flags. Empty: it needs no extra."""


SUBCOMMANDS: Final = {
    "local": Subcommand(
        "pdcluster_cli.local.options",
        "start prefill engines, decode engines and the router on this machine",
        "router,connector",
    ),
    "router": Subcommand(
        "pdcluster_router.__main__",
        "route requests between engines that run already (see: pdcluster router --help)",
        "router",
    ),
    "operator": Subcommand(
        "pdcluster_operator.__main__",
        "keep the PDClusters of a Kubernetes cluster (see: pdcluster operator --help)",
        "operator",
    ),
    "explain": Subcommand("pdcluster_cli.cluster.explain", "why a PDCluster is not ready, and what to do", "operator"),
    "why": Subcommand(
        "pdcluster_cli.cluster.why", "what happened to one request, by its id, and what to do", "operator"
    ),
    "top": Subcommand(
        "pdcluster_cli.cluster.top", "engines, queues and failures of a pool, refreshed every few seconds", "operator"
    ),
    "plan": Subcommand(
        "pdcluster_cli.cluster.plan", "what applying a PDCluster would make, and in which steps", "operator"
    ),
    "drain": Subcommand(
        "pdcluster_cli.pod.drain",
        "wait until the engine in this pod has ended its requests: the preStop of an engine's container",
    ),
    "ready": Subcommand(
        "pdcluster_cli.pod.ready",
        "whether the engine in this pod can serve: the readiness probe of an engine's container",
    ),
    "mirror": Subcommand(
        "pdcluster_cli.pod.mirror",
        "start an engine beside a copy of its certificate that follows a Secret: the command of an engine with TLS",
    ),
    "doctor": Subcommand("pdcluster_cli.doctor", "check that this machine has what a pool needs"),
}
"""Subcommands by name, in the order of ``pdcluster --help``."""


def add_cluster_flags(parser: ArgumentParser) -> None:
    """Add ``--kubeconfig`` and ``--context``, which ``documents.where_of`` reads."""
    parser.add_argument("--kubeconfig", metavar="PATH", help="to find the API server with (default: as kubectl)")
    parser.add_argument("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")
