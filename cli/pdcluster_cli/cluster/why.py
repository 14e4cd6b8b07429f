"""``pdcluster why``: what happened to one request, by its id: where it was when, how it ended, why, and what to do.

Asks each router of a pool for the requests that it remembers; ``--access-log`` reads older ones from a file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence

import msgspec

from pdcluster_cli.cluster.request_files import read_access_log
from pdcluster_cli.cluster.request_text import OK, describe, duration
from pdcluster_cli.cluster.routers import Unanswered, add_router_flags, ask_routers
from pdcluster_cli.commands import SUBCOMMANDS
from pdcluster_protocol.errors import NO_JSON
from pdcluster_protocol.kept import KeptAnswer, KeptRequest, path_for
from pdcluster_router.core.telemetry.scrub import printable


def main(words: Sequence[str]) -> int:
    """Exit status 0: the request, or the newest of several, went well or still runs; 1: it failed; 2: not found."""
    given = make_parser().parse_args(words)
    try:
        answers = _answers(given)
    except Unanswered as error:
        print(f"pdcluster why: {error}", file=sys.stderr)
        return 2
    return _tell(given.request_id, answers, is_log=bool(given.access_log))


def _answers(given: argparse.Namespace) -> dict[str, KeptAnswer | str]:
    """By source: its answer, or why there is none."""
    if given.access_log:
        answer, problem = read_access_log(given.access_log, given.request_id)
        if problem and answer.requests:
            rest = f"{given.access_log}: could not read the rest of the file, which may hold newer requests: {problem}"
            print(printable(f"pdcluster why: {rest}"), file=sys.stderr)
        return {given.access_log: answer if answer.requests or not problem else f"it cannot be read: {problem}"}
    answers = ask_routers(given, path_for(given.request_id))
    return {router: _read(body) if isinstance(body, bytes) else body for router, body in answers.items()}


def _read(body: bytes) -> KeptAnswer | str:
    try:
        return msgspec.json.decode(body, type=KeptAnswer)
    except NO_JSON as error:
        return f"its answer cannot be read ({error}): is it a router of this version?"


def _tell(name: str, answers: dict[str, KeptAnswer | str], *, is_log: bool = False) -> int:
    """Print the answers. Returns the exit status. ``answers``: by source, an answer, or why there is none."""
    said = {source: answer for source, answer in answers.items() if isinstance(answer, KeptAnswer)}
    for source, problem in answers.items():
        if isinstance(problem, str):
            print(printable(f"pdcluster why: {source}: {problem}"), file=sys.stderr)
    found = [(request, source) for source, answer in said.items() for request in answer.requests]
    if not found:
        if is_log:
            _tell_not_logged(name, said)
        else:
            _tell_none(name, said)
        return 2
    found.sort(key=lambda one: -(one[0].ended_at_unix_s or float("inf")))
    pages = [describe(request, said[source].engines, source) for request, source in found]
    print("\n\n".join(pages))
    return 0 if _is_well(found[0][0]) else 1


def _is_well(request: KeptRequest) -> bool:
    """Whether the request went well or still runs. An end without an outcome is a bug of the router, and not well."""
    return request.outcome == OK or (request.ended_at_unix_s is None and not request.outcome)


def _tell_not_logged(name: str, files: Iterable[str]) -> None:
    for file in files:
        cure = "it may be in the log of another router, or in an older file"
        print(f"pdcluster why: {file} has no line of a request {name!r}: {cure}", file=sys.stderr)


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
    which = add_router_flags(parser)
    which.add_argument("--access-log", metavar="FILE", help="a router's access log, in place of asking; - reads stdin")
    return parser
