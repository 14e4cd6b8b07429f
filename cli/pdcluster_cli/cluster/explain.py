"""``pdcluster explain``: why a PDCluster is not ready, and what to do, from its status and Events."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdcluster_cli.commands import SUBCOMMANDS, add_cluster_flags

if TYPE_CHECKING:
    from pdcluster_cli.cluster.documents import Where, YamlDocument


def main(words: Sequence[str]) -> int:
    """Exit status 0: the PDCluster is ready; 1: it is not; 2: it could not be read."""
    from pdcluster_cli.cluster.documents import Unreadable, read_cluster, read_file, where_of
    from pdcluster_operator.core.seen.problems import printable
    from pdcluster_operator.core.status.conditions import Truth, Type
    from pdcluster_operator.core.status.explain import explain, explain_events
    from pdcluster_operator.core.status_document import read_status

    given = make_parser().parse_args(words)
    try:
        document = read_file(given.file) if given.file else read_cluster(given.name, where_of(given))
    except Unreadable as error:
        print(f"pdcluster explain: {error}", file=sys.stderr)
        return 2
    status = read_status(document.get("status"))
    generation = document.get("metadata", {}).get("generation", 0)
    events = [] if given.file else _read_events(document, where_of(given))
    print("\n".join(map(printable, (*explain(status, generation), *explain_events(events)))))
    ready = status.condition(Type.READY) if status and status.observed_generation >= generation else None
    return 0 if ready and ready.truth is Truth.TRUE else 1


def _read_events(document: YamlDocument, where: Where) -> list[tuple[str, str]]:
    """Reason and message of each. If the user may not read Events, the status is told all the same."""
    from pdcluster_cli.cluster.documents import Unreadable, read_events

    try:
        return read_events(document, where)
    except Unreadable as error:
        print(f"pdcluster explain: Events of the PDCluster cannot be read: {error}", file=sys.stderr)
        return []


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdcluster explain", description=SUBCOMMANDS["explain"].help)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?", help="of the PDCluster, which the API server is asked for")
    which.add_argument(
        "-f", "--file", help="what `kubectl get pdcluster NAME -o yaml` has printed; - reads it from stdin"
    )
    parser.add_argument("-n", "--namespace", help="where it is (default: the context's)")
    add_cluster_flags(parser)
    return parser
