"""Tests that are coroutines (``pytest.mark.anyio``) run on uvloop, as the router itself.

Hypothesis judges what is computed, never how fast: a busy machine is no defect.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from control_plane.binaries import find_binaries
from control_plane.plane import ControlPlane
from drawn import drawn
from scheduling import KindScheduling
from seed.start import Seed

settings.register_profile(
    "patient", max_examples=drawn(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


os.environ["KUBECACHEDIR"] = "/dev/null"
"""Helm and kubectl keep what they learn of a server: not of ours, in somebody's home. Before Helm's library is loaded:
it reads the environment once."""


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test that hypothesis draws for is a law: ``make test-costly`` draws more for it than ``make test``."""
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.law)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> KindScheduling | None:
    """Of ``make test``, which gives whole files to its workers."""
    return KindScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_runtest_setup() -> None:
    """A program whose ``main`` another test has called may have started its logging here."""
    logging.getLogger().setLevel(logging.WARNING)


_SEED = pytest.StashKey[Seed]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """The workers of ``make test`` are forks of one process, which has imported vLLM."""
    if config.getvalue("dist") == "loadfile":
        config.stash[_SEED] = seed = Seed()
        for spec in specs:
            spec.python = seed.worker_command


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker knows the seed of its run: its zygote is a fork of it too."""
    if seed := node.config.stash.get(_SEED, None):
        node.workerinput["seed"] = str(seed.path)


def pytest_unconfigure(config: pytest.Config) -> None:
    if seed := config.stash.get(_SEED, None):
        seed.stop()


gc.disable()
"""Until all modules are imported: its passes are a fifth of that."""


def pytest_collection_finish() -> None:
    """The modules live as long as the run: the collector need not walk over them again and again (an eighth of the CPU
    time of the unit tests). What tests leave behind is collected, less often."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One for all tests of a session: each makes a namespace of its own, and none takes a program away for good."""
    with ControlPlane(find_binaries(os.environ), tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane
