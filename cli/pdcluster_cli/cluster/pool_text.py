"""Writes one router's pool as lines of text: its requests, its failures, a table of its engines, and their troubles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdcluster_protocol.pool_page import EngineRow, PoolPage


def describe_pool(page: PoolPage, router: str) -> list[str]:
    """The lines. ``router``: the router that has answered."""
    waits = ", ".join(
        f"{num} wait for {role} (backlog {page.requests.backlog_tokens.get(role, 0)} tokens)"
        for role, num in page.requests.queued.items()
    )
    engines = sorted(page.engines, key=_order)
    return [
        f"{router}: {page.requests.running} requests run, {waits}",
        f"ended since the start: {_counts(page.ended)}",
        f"failures of the last {page.failures.seconds:.0f} s: {_counts(page.failures.kinds)}",
        "",
        *table([_HEAD, *map(_cells, engines)]),
        *(note for engine in engines if (note := _note(engine))),
    ]


def _counts(numbers: Mapping[str, int]) -> str:
    """The numbers with their names as text, the largest first."""
    found = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {num}" for name, num in found) or "none"


def _note(engine: EngineRow) -> str:
    """The engine's slow start, ejections and last failure; empty if it has none of them."""
    age = "" if engine.last_failure_s is None else f" {engine.last_failure_s:.0f} s ago"
    told = [
        f"starts slowly for {engine.slow_start_s:.0f} s more" if engine.slow_start_s else "",
        f"ejected {engine.ejections} times" if engine.ejections else "",
        f"last failure{age}: {engine.last_failure}" if engine.last_failure else "",
    ]
    return f"{engine.name}: {', '.join(filter(None, told))}" if any(told) else ""


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


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
