"""vLLM's own load generator against a pool, as users run it first of all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import Harness, Pool
from patience import PATIENCE_S

pytestmark = [pytest.mark.engines, pytest.mark.costly]

NUM_PROMPTS = 6
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""As `vllm bench serve` runs it. That command looks for a package named vllm; the one for CPUs has another name."""


@pytest.fixture(scope="module")
def pool(harness: Harness) -> Iterator[Pool]:
    with harness.start_pool() as pool:
        yield pool


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve_has_all_its_answers(
    harness: Harness, pool: Pool, tmp_path: Path, backend: str, endpoint: str
) -> None:
    words = ("--backend", backend, "--endpoint", endpoint, "--base-url", pool.url, "--model", str(harness.model))
    load = ("--dataset-name", "random", "--random-input-len", "100", "--random-output-len", "8", "--seed", "7")
    ends = ("--num-prompts", str(NUM_PROMPTS), "--max-concurrency", "2", "--save-result", "--result-dir", str(tmp_path))
    bench = [sys.executable, "-c", BENCH_SERVE, *words, *load, *ends]
    done = subprocess.run(bench, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [result] = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert (result["completed"], result.get("failed", 0)) == (NUM_PROMPTS, 0)
    assert result["total_output_tokens"] == 8 * NUM_PROMPTS
    pushed = pool.prefill[0].read_trace("push", 1)
    assert {push["outcome"] for push in pushed} == {"done"}
