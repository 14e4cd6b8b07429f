"""``pdcluster local`` as a person meets it: it starts, answers, reports, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.harness import eventually
from integration.ports import fresh_port
from integration.processes import descendants, is_port_free, is_running, process_name

pytestmark = pytest.mark.engines

START_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class Local:
    """One running ``pdcluster local`` with what it printed so far in a file."""

    process: subprocess.Popen[bytes]
    port: int
    output: Path

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, words: str) -> None:
        def is_said_or_over() -> bool:
            return words in self.text() or self.process.poll() is not None

        assert eventually(is_said_or_over, timeout_s=START_TIMEOUT_S)
        assert words in self.text(), self.text()

    def everything(self) -> set[int]:
        return descendants(self.process.pid) | {self.process.pid}

    def engine_pid(self, name: str) -> int:
        return next(pid for pid in self.everything() if process_name(pid) == name)

    def end(self) -> int:
        return self.process.wait(START_TIMEOUT_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Local]]:
    started: list[Local] = []

    def start_local(*arguments: str, port: int | None = None) -> Local:
        port = port or fresh_port()
        output = tmp_path / f"output-{len(started)}"
        command = [sys.executable, "-m", "pdcluster_cli", "local", "--port", str(port), *arguments]
        with output.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        started.append(Local(process, port, output))
        return started[-1]

    yield start_local
    for local in started:
        local.process.kill()
        local.process.wait()


def _assert_nothing_is_left(local: Local, pids: set[int]) -> None:
    assert eventually(lambda: not any(is_running(pid) for pid in pids))
    assert is_port_free(local.port)


def test_once_prints_the_answer_and_a_report_and_ends_with_status_0(start: Callable[..., Local]) -> None:
    local = start("--once")
    local.wait_for("Transfer report")
    pids = local.everything()
    assert local.end() == 0
    _assert_nothing_is_left(local, pids)
    report = local.text().partition("Transfer report")[2]
    for row in ("layers                 8\n", "KV pushed ", "coalesced from", "hand-over ", "hidden behind compute "):
        assert row in report
    assert "unknown" not in report
    assert local.text().partition("Answer:")[2].partition("\n")[0].strip()


def test_a_question_of_ones_own_and_two_engines_of_each_role(start: Callable[..., Local]) -> None:
    small = "--kv-cache-memory-bytes 67108864"
    counts = ("--prefill", "2", "--decode", "2", "--prefill-args", small, "--decode-args", small)
    local = start(*counts, "--once", "Why is the sky blue?")
    assert local.end() == 0, local.text()
    assert "Question: Why is the sky blue?" in local.text()
    assert all(f"{name} is ready" in local.text() for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"))


def test_it_serves_the_curl_line_it_prints_until_sigterm(start: Callable[..., Local]) -> None:
    local = start()
    local.wait_for("serving on")
    curl = next(line for line in local.text().splitlines() if line.startswith("curl "))
    reply = subprocess.run([*shlex.split(curl), "--silent"], capture_output=True, check=True, timeout=60)
    assert json.loads(reply.stdout)["choices"][0]["message"]["content"]
    pids = local.everything()
    local.process.send_signal(signal.SIGTERM)
    assert local.end() == 0
    _assert_nothing_is_left(local, pids)


def test_an_engine_that_dies_while_serving_is_named_and_everything_stops(start: Callable[..., Local]) -> None:
    local = start()
    local.wait_for("serving on")
    pids = local.everything()
    subprocess.run(["kill", "-KILL", str(local.engine_pid("decode-0"))], check=True)
    assert local.end() == 1
    assert "pdcluster: decode-0 has ended with signal 9; the end of " in local.text()
    assert "[decode-0] " in local.text().partition("has ended with")[2]
    _assert_nothing_is_left(local, pids)


def test_an_engine_that_dies_while_starting_is_named_and_everything_stops(start: Callable[..., Local]) -> None:
    local = start("--decode-args", "--no-such-option")
    assert local.end() == 1
    ending = local.text().partition("pdcluster: decode-0 has ended with status 2; the end of ")[2]
    assert "[decode-0] " in ending
    assert "--no-such-option" in ending
    assert descendants(local.process.pid) == set()
    assert is_port_free(local.port)


def test_sigint_while_importing_leaves_nothing(start: Callable[..., Local]) -> None:
    local = start()
    local.wait_for("importing vLLM")
    assert eventually(lambda: len(local.everything()) > 1)
    pids = local.everything()
    local.process.send_signal(signal.SIGINT)
    assert local.end() == 130
    _assert_nothing_is_left(local, pids)


def test_sigint_while_engines_start_leaves_nothing(start: Callable[..., Local]) -> None:
    local = start()
    local.wait_for("starting prefill-0, decode-0")
    assert eventually(lambda: any(process_name(pid) == "decode-0" for pid in local.everything()))
    pids = local.everything()
    local.process.send_signal(signal.SIGINT)
    assert local.end() == 130
    _assert_nothing_is_left(local, pids)
    assert "Traceback" not in local.text()


def test_sigkill_while_serving_leaves_nothing(start: Callable[..., Local]) -> None:
    local = start()
    local.wait_for("serving on")
    pids = local.everything()
    assert len(pids) >= 7  # itself, the zygote, the router, two API servers, two engine cores
    local.process.kill()
    _assert_nothing_is_left(local, pids)


def test_a_taken_port_is_one_line_with_the_cure(start: Callable[..., Local]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        local = start(port=port)
        assert local.end() == 1
    assert local.text() == (
        f"pdcluster: port {port} on 127.0.0.1 cannot be used (Address already in use): "
        "stop what listens there or choose another port (--port N, make run PORT=N)\n"
    )


def test_a_missing_model_is_one_line_with_the_cure(start: Callable[..., Local], tmp_path: Path) -> None:
    local = start("--model", str(tmp_path / "nowhere"))
    assert local.end() == 1
    assert local.text() == (
        f"pdcluster: model {tmp_path}/nowhere does not exist: "
        "--model wants a folder with config.json, weights and a tokenizer\n"
    )
