"""``pdcluster why``: what happened to one request, by its id: where it was when, how it ended, why, and what to do.

Asks each router of a pool what it remembers; ``--access-log`` reads what is older.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Final

from pdcluster_cli.commands import SUBCOMMANDS
from pdcluster_cli.request_text import OK, describe, duration
from pdcluster_protocol.kept import KeptAnswer
from pdcluster_protocol.launch import HTTP_PORT

DEFAULT_URL: Final = f"http://127.0.0.1:{HTTP_PORT + 1}"
"""The internal port of ``pdcluster local``."""


def main(words: Sequence[str]) -> int:
    """Status 0 when the request, or the newest of several, went well or still runs; 1 when it failed; 2 when it was
    not found."""
    from pdcluster_cli.request_files import read_access_log
    from pdcluster_cli.routers import Unanswered, ask_cluster, ask_urls

    given = make_parser().parse_args(words)
    try:
        if given.access_log:
            answers = {given.access_log: read_access_log(given.access_log, given.request_id)}
        elif given.cluster:
            answers = ask_cluster(given.cluster, given, given.request_id)
        else:
            answers = ask_urls(given.url or [DEFAULT_URL], given.request_id)
    except Unanswered as error:
        print(f"pdcluster why: {error}", file=sys.stderr)
        return 2
    return _tell(given.request_id, answers)


def _tell(name: str, answers: dict[str, KeptAnswer | str]) -> int:
    """``answers``: what each source says, or why it says nothing."""
    said = {source: answer for source, answer in answers.items() if isinstance(answer, KeptAnswer)}
    for source, problem in answers.items():
        if isinstance(problem, str):
            print(f"pdcluster why: {source}: {problem}", file=sys.stderr)
    found = [(request, source) for source, answer in said.items() for request in answer.requests]
    if not found:
        _tell_none(name, said)
        return 2
    found.sort(key=lambda one: -(one[0].ended_at_unix_s or float("inf")))
    pages = [describe(request, said[source].engines, source) for request, source in found]
    print("\n\n".join(pages))
    return 0 if found[0][0].outcome in (OK, "") and not found[0][0].error else 1


def _tell_none(name: str, said: dict[str, KeptAnswer]) -> None:
    for source, answer in said.items():
        spans = {fate: time.time() - at for fate, at in answer.since_unix_s.items()}
        since = ", ".join(f"{fate} ones of the last {duration(seconds)}" for fate, seconds in spans.items())
        print(f"pdcluster why: {source} knows no request {name!r}; it has {since or 'none at all'}", file=sys.stderr)
    if said:
        cure = "look for it in an access log: --access-log FILE"
        print(f"pdcluster why: {cure}, or - for what `kubectl logs` prints", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdcluster why", description=SUBCOMMANDS["why"].help)
    parser.add_argument(
        "request_id", help="x-request-id of the answer, the id in vLLM's answer, or a transfer id from a log"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help=f"of a router's internal port; repeat it for more (default: {DEFAULT_URL})",
    )
    where.add_argument(
        "--cluster", metavar="NAME", help="of a PDCluster: all its routers are asked, through Kubernetes"
    )
    where.add_argument("--access-log", metavar="FILE", help="a router's access log, in place of asking; - reads stdin")
    parser.add_argument("-n", "--namespace", help="of the PDCluster (default: the context's)")
    parser.add_argument("--kubeconfig", metavar="PATH", help="to find the API server with (default: as kubectl)")
    parser.add_argument("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")
    return parser
