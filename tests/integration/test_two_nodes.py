"""One prefill engine over two nodes: vLLM's own ``--nnodes 2``, two network namespaces, a headless worker in one.

Its two processes make their own ``VllmConfig`` each, with ids of their own; the scheduler's steps join their ranks.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks.places import Place, open_places

from integration.harness import HttpError, complete
from integration.processes import PYTHON_PATH
from patience import HANGS_S, PATIENCE_S
from pdcluster_cli.processes.engines import CPU_ARGS, OFFLINE, LocalDevice, zygote_env
from pdcluster_cli.processes.last_words import last_lines
from pdcluster_cli.processes.linux import die_with_parent
from pdcluster_cli.processes.parallelism import ParallelSizes
from pdcluster_cli.processes.waiting import is_healthy
from pdcluster_cli.processes.zygote import merge_env
from zoo.models import llama
from zoo.weights import ensure_model

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(HANGS_S),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="network namespaces need root and tc"),
]

PREFILL, DECODE, ROUTER, MASTER = 8100, 8200, 8000, 29555
SMALL = (
    *(*CPU_ARGS, "--kv-cache-memory-bytes", str(32 << 20), "--dtype", "float32", "--max-model-len", "2048"),
    "--no-enable-prefix-caching",
)
LENGTHS = (40, 300, 700, 1500)
SECRET = "the secret of two nodes, and of no other test"


@dataclass(frozen=True)
class Nodes:
    """What runs. All but ``worker`` is on the first node."""

    first: Place
    worker: subprocess.Popen[bytes]

    def ask(self, port: int, prompt: list[int]) -> tuple[int, ...]:
        """On the first node."""
        with self.first.inside():
            return complete(f"http://127.0.0.1:{port}", prompt, 8, ignore_eos=True).token_ids

    def metric(self, port: int, name: str) -> float:
        with self.first.inside():
            url = f"http://127.0.0.1:{port}/metrics"
            text = subprocess.run(["curl", "-s", url], capture_output=True, text=True, check=True).stdout
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@contextmanager
def started(place: Place, log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of one node."""
    ours = {"VLLM_HOST_IP": place.host, "GLOO_SOCKET_IFNAME": place.device, "PDCLUSTER_SECRET": SECRET}
    env = merge_env(os.environ, {**zygote_env(LocalDevice.CPU), **OFFLINE, "PYTHONPATH": PYTHON_PATH, **ours})
    parent = os.getpid()
    with log.open("wb") as file, place.starting():
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=file, stderr=file, env=env, start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)


def serve(role: str, *more: str) -> tuple[str, ...]:
    transfer = {"kv_connector": "PDClusterConnector", "kv_role": role, "kv_load_failure_policy": "fail"}
    model = str(ensure_model(llama(4)))
    return ("integration.vllm_serve", "serve", model, *SMALL, *more, "--kv-transfer-config", json.dumps(transfer))


@contextmanager
def running(folder: Path) -> Iterator[Nodes]:
    """A prefill engine of TP 2 with a rank on each node, a decode engine and a router on the first."""
    with open_places("1gbit") as places, ExitStack() as stack:
        first, second = places.prefill, places.decode
        group = ("--nnodes", "2", "--master-addr", first.host, "--master-port", str(MASTER))
        two = (*ParallelSizes(tensor=2).argv(), *group)
        urls = ("--prefill", f"http://127.0.0.1:{PREFILL}", "--decode", f"http://127.0.0.1:{DECODE}")
        commands = {
            "leader": (first, serve("kv_producer", *two, "--node-rank", "0", "--port", str(PREFILL))),
            "worker": (second, serve("kv_producer", *two, "--node-rank", "1", "--headless")),
            "decode": (first, serve("kv_consumer", "--port", str(DECODE))),
            "router": (first, ("pdcluster_cli", "router", *urls, "--port", str(ROUTER))),
        }
        made = {
            name: stack.enter_context(started(place, folder / f"{name}.log", *command))
            for name, (place, command) in commands.items()
        }
        wait(first, made, folder)
        yield Nodes(first, made["worker"])


def wait(first: Place, made: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    for port in (PREFILL, DECODE, ROUTER):
        while not healthy(first, port):
            for name, process in made.items():
                assert process.poll() is None, last_lines(folder / f"{name}.log", 40)
            assert time.monotonic() < deadline, port
            time.sleep(0.2)


def healthy(place: Place, port: int) -> bool:
    with place.inside():
        return is_healthy(port)


def test_an_engine_over_two_nodes_prefills_and_a_lost_node_is_one_clear_error(tmp_path: Path) -> None:
    dice = random.Random(1)
    prompts = [[dice.randrange(50, 1000) for _ in range(length)] for length in LENGTHS]
    with running(tmp_path) as nodes:
        expected = [nodes.ask(DECODE, prompt) for prompt in prompts]
        assert [nodes.ask(ROUTER, prompt) for prompt in prompts] == expected
        assert nodes.metric(DECODE, "pdcluster:receives_done_total") == len(prompts)
        assert nodes.metric(DECODE, "pdcluster:failures_total") == 0
        os.killpg(nodes.worker.pid, signal.SIGKILL)
        with pytest.raises(HttpError) as raised:
            nodes.ask(ROUTER, prompts[1][::-1])
        assert raised.value.status in (502, 503, 504)
        assert nodes.ask(DECODE, prompts[0]) == expected[0]
