"""The oldest vLLM that is supported: vllm-ascend's. The others, and all of this one, are for ``make versions``."""

from __future__ import annotations

import pytest

from versions.environment import run_tests
from versions.table import SHORT, VERSIONS


@pytest.mark.costly
@pytest.mark.engines
@pytest.mark.timeout(3600)  # its packages are installed the first time
def test_every_byte_is_pushed_and_a_failure_is_told_on_the_oldest_version(capfd: pytest.CaptureFixture[str]) -> None:
    status = run_tests(VERSIONS[0], SHORT)
    output = capfd.readouterr().out
    assert status == 0, output
    assert f"{len(SHORT)} passed" in output
