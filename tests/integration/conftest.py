"""One zygote and one tiny model for all integration tests of a session."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.certificates import Authority
from fakes.clock import RunningClock
from fakes.router import Rig, running_rig
from integration.harness import V2_RUNNER_VARIABLE, Harness, complete, harness_env, zygote_modules
from integration.prompts import LONG, PROMPT
from patience import HANGS_S
from pdcluster_cli.models.tiny_model import ensure_tiny_model
from pdcluster_cli.processes.engines import SCRATCH
from pdcluster_cli.processes.zygote import Zygote
from pdcluster_router.services import Services
from seed.start import SeededZygote


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes take as long as the machine lets them; pytest's own limit is for what computes."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(HANGS_S))


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return ensure_tiny_model()


@pytest.fixture(scope="session")
def harness(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("engines")
    seed = getattr(request.config, "workerinput", {}).get("seed")
    kind = functools.partial(SeededZygote, Path(seed)) if seed and V2_RUNNER_VARIABLE not in os.environ else Zygote
    with kind(zygote_modules(), env=harness_env(), log_path=folder / "zygote.log", scratch=SCRATCH) as zygote:
        yield Harness(zygote, tiny_model, folder)


@pytest.fixture
async def running_clock(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A router that the test starts goes by a clock that stands still when this process does."""
    clock = RunningClock()
    monkeypatch.setattr(Services, "now", staticmethod(clock.now))
    task = asyncio.create_task(clock.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A router with a prefill and a decode engine, and default settings."""
    async with running_rig() as rig:
        yield rig


@pytest.fixture(scope="session")
def expected(harness: Harness) -> dict[int, tuple[int, ...]]:
    """By the prompt's length: the 16 tokens that a single engine answers to ``PROMPT`` and ``LONG``."""
    with harness.single_engine() as engine:
        return {len(prompt): complete(engine.url, prompt, 16).token_ids for prompt in (PROMPT, LONG)}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca.crt")


@pytest.fixture
def tls_files(authority: Authority, tmp_path: Path) -> dict[str, Any]:
    """The router's settings for a certificate and its key."""
    return authority.issue().write(tmp_path / "secret")


@pytest.fixture
async def tls(tls_files: dict[str, Any]) -> AsyncIterator[Rig]:
    async with running_rig(**tls_files) as rig:
        yield rig
