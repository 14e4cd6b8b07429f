"""Tests that are coroutines (``pytest.mark.anyio``) run on uvloop, as the router itself.

Hypothesis judges what is computed, never how fast: a busy machine is no defect.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}
