"""``docs/operations.md`` leaves nothing out: no kind of failure, no setting that limits a wait."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from pdcluster_connector import failures as connector
from pdcluster_connector.settings import Settings as ConnectorSettings
from pdcluster_protocol.access import AccessLine
from pdcluster_router.telemetry import failures as router

PAGE: Final = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
WAITS: Final = sorted(name for name in ConnectorSettings.__struct_fields__ if name.endswith("_s"))
"""Of the router and the operator, pages are made."""


@pytest.mark.parametrize("kind", [*connector.TransferFailure, *router.FailureKind], ids=str)
def test_every_kind_of_failure_has_a_row_that_says_what_to_do(
    kind: connector.TransferFailure | router.FailureKind,
) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{kind.value}` |")]
    assert rows
    assert all(len(row.rstrip("| ").rsplit("|", 1)[1].strip()) > 10 for row in rows)


@pytest.mark.parametrize("name", WAITS)
def test_every_setting_that_limits_a_wait_is_in_a_table(name: str) -> None:
    assert any(line.startswith("|") and f"`{name}`" in line for line in PAGE.splitlines())


def test_the_access_logs_fields_are_those_of_its_table() -> None:
    section = PAGE.partition("## One line for each request\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == ["event", *AccessLine.__struct_fields__]


def test_there_are_settings_to_look_for() -> None:
    assert len(WAITS) > 5
