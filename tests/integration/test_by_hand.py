"""The three commands of ``docs/by-hand.md``, run as they stand but for the model, the ports and the engines' size."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from integration.harness import complete
from integration.ports import fresh_port
from patience import PATIENCE_S
from pdcluster_cli.processes.linux import die_with_parent
from pdcluster_cli.processes.waiting import is_healthy

pytestmark = [pytest.mark.engines, pytest.mark.slow]

PAGE = (Path(__file__).parents[2] / "docs" / "by-hand.md").read_text().replace("\\\n", "")
SMALL = ("--enforce-eager", "--max-model-len", "2048")


def commands(model: Path, ports: Mapping[str, str]) -> list[list[str]]:
    """The page's three commands; what is not a start of a server is left out."""
    lines = re.findall(r"^\$ ((?:python|pdcluster) .*)$", PAGE, re.MULTILINE)
    text = [line.replace("MODEL", str(model)) for line in lines]
    for shown, free in ports.items():
        text = [line.replace(shown, free) for line in text]
    programs = {"python": [sys.executable], "pdcluster": [sys.executable, "-m", "pdcluster_cli"]}
    return [[*programs[words[0]], *words[1:]] for words in map(shlex.split, text)]


def exports() -> dict[str, str]:
    """The page's environment."""
    lines = re.findall(r"^\$ export (.*)$", PAGE, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in line.split())


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        env = {**os.environ, **exports(), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        parent = os.getpid()
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=env, start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # a killed test run leaves nothing
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


def test_the_three_commands_of_the_page_serve(tiny_model: Path, tmp_path: Path) -> None:
    ports = {shown: str(fresh_port()) for shown in ("8100", "8200", "8000")}
    prefill, decode, router = commands(tiny_model, ports)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running(command, tmp_path / f"{number}.log"))
            for number, command in enumerate([[*prefill, *SMALL], [*decode, *SMALL], router])
        ]
        deadline = time.monotonic() + PATIENCE_S
        for port in ports.values():
            while not is_healthy(int(port)):
                assert time.monotonic() < deadline, [(log.name, log.read_text()[-2000:]) for log in tmp_path.iterdir()]
                assert [server.poll() for server in servers] == [None] * 3
                time.sleep(0.2)
        url = f"http://127.0.0.1:{ports['8000']}"
        prompt = list(range(100, 700))
        assert complete(url, prompt, 8).token_ids == complete(f"http://127.0.0.1:{ports['8200']}", prompt, 8).token_ids
