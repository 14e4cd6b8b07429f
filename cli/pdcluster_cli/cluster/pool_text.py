"""Writes one router's ``GET /pdcluster/pool`` as text: its requests, its failures, and a table of its engines."""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster_protocol.pool_page import EngineRow, PoolPage
from pdcluster_router.core.telemetry.scrub import printable


def describe_page(page: PoolPage, router: str) -> str:
    """The whole text. ``router``: the router that has answered."""
    waits = ", ".join(
        f"{num} wait for {role} (backlog {page.requests.backlog_tokens.get(role, 0)} tokens)"
        for role, num in page.requests.queued.items()
    )
    failed = sorted(page.failures.kinds.items(), key=lambda item: (-item[1], item[0]))
    told = ", ".join(f"{kind} {num}" for kind, num in failed) or "none"
    return "\n".join(map(printable, [
        f"{router}: {page.requests.running} requests run, {waits}",
        f"failures of the last {page.failures.seconds:.0f} s: {told}",
        "",
        *_table([_HEAD, *map(_cells, sorted(page.engines, key=_order))]),
    ]))  # fmt: skip


def _order(engine: EngineRow) -> tuple[str, int, str]:
    """Sort key by role and number: ``decode-10`` comes after ``decode-9``."""
    return (engine.name.rpartition("-")[0], len(engine.name), engine.name)


_HEAD = ("ENGINE", "STATE", "HEALTH", "CIRCUIT", "RUNNING", "TOKENS", "REVISION", "WHERE")


def _cells(engine: EngineRow) -> tuple[str, ...]:
    left = f" {engine.ejected_s:.0f} s" if engine.ejected_s else ""
    health = "well" if engine.healthy else "silent"
    numbers = (str(engine.running), str(engine.outstanding_tokens))
    where = engine.pod or engine.url
    return (engine.name, engine.state, health, engine.circuit + left, *numbers, engine.revision or "-", where)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
