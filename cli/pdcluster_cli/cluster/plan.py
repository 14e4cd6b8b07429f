"""``pdcluster plan``: shows the objects and steps that applying a PDCluster would lead to. Changes nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pdcluster_cli.commands import SUBCOMMANDS, add_cluster_flags

NOT_CHECKED: Final = "rules between fields are checked by the API server only: kubectl apply --dry-run=server -f {file}"
_EPILOG: Final = (
    "Types and bounds are checked here. Rules between fields (engine arguments that must agree, devices that match the "
    "split) are checked by the API server only: kubectl apply --dry-run=server -f FILE"
)
_FROM_CLUSTER: Final = (
    "the API server says what was applied before; its replicas are those of the spec, also where scalers say others"
)


def main(words: Sequence[str]) -> int:
    """Print the plan. Exit status 0, or 2 if there is none."""
    from pdcluster_cli.cluster.documents import Unreadable, find_cluster, parse_cluster, read_file, where_of
    from pdcluster_operator.core.plan.preview import preview
    from pdcluster_protocol.errors import ConfigError

    parser = make_parser()
    given = parser.parse_args(words)
    if (given.kubeconfig or given.context) and not given.from_cluster:
        parser.error("--kubeconfig and --context say which cluster to compare with: give --from-cluster too")
    try:
        wanted = read_file(given.file)
        running = read_file(given.before) if given.before else None
        if given.from_cluster:  # If the file has no namespace, the context's counts, as for `kubectl apply`.
            where = replace(where_of(given), namespace=wanted["metadata"].get("namespace"))
            running = find_cluster(wanted["metadata"]["name"], where)
        source = given.before or "the API server's PDCluster"
        before = parse_cluster(running, source, is_stored=given.from_cluster) if running else None
        lines = preview(before, parse_cluster(wanted, given.file))
    except (Unreadable, ConfigError) as error:
        print(f"pdcluster plan: {error}", file=sys.stderr)
        return 2
    print("\n".join([*lines, NOT_CHECKED.format(file=given.file)]))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdcluster plan", description=SUBCOMMANDS["plan"].help, epilog=_EPILOG)
    parser.add_argument("-f", "--file", required=True, help="YAML or JSON with a PDCluster; - reads it from stdin")
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--before", help="the file that was applied before (default: nothing runs)")
    before.add_argument("--from-cluster", action="store_true", help=_FROM_CLUSTER)
    add_cluster_flags(parser)
    return parser
