"""Engines that run as CUDA's do: vLLM's V2 model runner, and a step scheduled before the one before it has ended.

``zoo/interpreted.py`` says how that goes on a CPU. Each test runs others of this folder on such engines; the harness
refuses an engine that fell back to the V1 runner.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from integration.harness import V2_RUNNER_VARIABLE

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

FOLDER: Final = Path(__file__).parent
SHORT: Final = (
    "test_exact.py::test_every_byte_of_every_layers_blocks_on_decode_equals_prefills[192]",
    "test_failures.py::test_preemption_on_prefill_by_a_small_cache_changes_no_answer",
)
WHOLE: Final = (
    "test_adapters.py::test_decode_never_uses_kv_of_weights_that_it_has_replaced",
    "test_adapters.py::test_files_that_change_while_a_request_with_its_kv_waits_for_room_never_mix_with_that_kv[1]",
    "test_exact.py::test_200_prompts_at_concurrency_16_answer_like_a_single_engine[chunked prefill]",
    "test_exact.py::test_every_byte_of_every_layers_blocks_on_decode_equals_prefills",
    "test_exact.py::test_two_prefill_and_two_decode_engines_answer_like_one",
    "test_failures.py",
    "test_local_prefill.py",
    "test_retry.py",
    "test_support_tp.py::test_tp_sizes_that_do_not_divide_each_other_answer_like_a_single_engine",
    "test_support_models.py",
)


def run_on_v2(folder: Path, *tests: str) -> None:
    """These tests pass on such engines."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'v2'}"]
    ended = subprocess.run(
        [*command, *(str(FOLDER / test) for test in tests)],
        env={**ours, V2_RUNNER_VARIABLE: "1"}, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    logs = [log.read_text() for log in folder.glob("v2/engines0/*.log")]
    assert any("asynchronous scheduling: True" in log for log in logs)


@pytest.mark.costly
def test_bytes_and_preemption_on_the_v2_runner(tmp_path: Path) -> None:
    run_on_v2(tmp_path, *SHORT)


@pytest.mark.slow
def test_answers_failures_retries_and_every_kind_of_kv_on_the_v2_runner(tmp_path: Path) -> None:
    run_on_v2(tmp_path, *WHOLE)
