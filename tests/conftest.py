"""Tests that are coroutines (``pytest.mark.anyio``) run on uvloop, as the router itself."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}
