"""``pdcluster local`` as a person meets it: it starts, answers, reports, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.harness import eventually
from integration.ports import fresh_port
from integration.processes import descendants, is_port_free, is_running, process_name

pytestmark = pytest.mark.engines

START_TIMEOUT_S = 900
"""More than the command gives itself: it says then what is wrong, and not we."""
README = Path(__file__).parents[2] / "README.md"
STOPPED = "\npdcluster: stopping\npdcluster: stopped\n"


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

    @property
    def answer(self) -> str:
        return self.text().partition("Answer:")[2].partition("\n")[0].strip()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Local]]:
    started: list[Local] = []

    def start_local(*arguments: str, port: int | None = None, env: Mapping[str, str] | None = None) -> Local:
        port = port or fresh_port()
        output = tmp_path / f"output-{len(started)}"
        command = [sys.executable, "-m", "pdcluster_cli", "local", "--port", str(port), *arguments]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
            )
        started.append(Local(process, port, output))
        return started[-1]

    yield start_local
    for local in started:
        local.process.kill()
        local.process.wait()


def _assert_nothing_is_left(local: Local, pids: set[int]) -> None:
    assert eventually(lambda: not any(is_running(pid) for pid in pids))
    assert is_port_free(local.port)


@pytest.mark.slow
def test_once_prints_the_answer_and_a_report_and_ends_with_status_0(start: Callable[..., Local]) -> None:
    local = start("--once")
    local.wait_for("Transfer report")
    pids = local.everything()
    assert local.end() == 0
    _assert_nothing_is_left(local, pids)
    require_report(local)


def require_report(local: Local) -> None:
    """It has answered, and told how the KV went over."""
    report = local.text().partition("Transfer report")[2]
    for row in (
        "tokens by tcp, their content compared on both engines\n",
        "layers per rank        8\n",
        "KV pushed ",
        "coalesced from",
        "hand-over ",
        "hidden behind compute ",
    ):
        assert row in report
    assert "unknown" not in report
    assert local.answer


@pytest.mark.slow
def test_the_readmes_ranks_change_no_answer(start: Callable[..., Local], tmp_path: Path) -> None:
    local = start("--once")
    assert local.end() == 0, local.text()
    assert local.answer
    assert _answer_of_readmes_ranks(tmp_path) == local.answer


def _answer_of_readmes_ranks(folder: Path) -> str:
    """What the README's line with tensor parallel engines answers to the same question."""
    (line,) = re.findall(r"^\$ (make run ARGS=.*--prefill-tp 2 --decode-tp 1 .*)$", README.read_text(), re.MULTILINE)
    command = [*shlex.split(line), f"PORT={fresh_port()}"]
    # The make above us has flags and a job server of its own.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=README.parent, env=env, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    (folder / "output-make").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return Local(subprocess.Popen(["true"]), 0, folder / "output-make").answer


@pytest.mark.slow
def test_a_question_of_ones_own_and_two_engines_of_each_role_that_ask_for_a_key(start: Callable[..., Local]) -> None:
    small = "--kv-cache-memory-bytes 67108864"
    counts = ("--prefill", "2", "--decode", "2", "--prefill-args", small, "--decode-args", small)
    local = start(*counts, "--once", "Why is the sky blue?", env={"VLLM_API_KEY": "of-engines"})
    assert local.end() == 0, local.text()
    assert "Question: Why is the sky blue?" in local.text()
    assert '-H "Authorization: Bearer $VLLM_API_KEY"' in local.text()
    assert all(f"{name} is ready" in local.text() for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(flag, "2") for flag in ("--prefill-pp", "--prefill-dp", "--decode-dp")])
def test_pipeline_and_data_parallel_engines_start_and_hand_over(start: Callable[..., Local], ranks: list[str]) -> None:
    local = start(*ranks, "--once")
    assert local.end() == 0, local.text()
    assert "content compared on both engines" in local.text()
    assert local.answer


def test_it_answers_reports_and_serves_the_curl_line_it_prints_until_sigterm(start: Callable[..., Local]) -> None:
    local = start()
    local.wait_for("serving on")
    require_report(local)
    curl = next(line for line in local.text().splitlines() if line.startswith("curl "))
    reply = subprocess.run([*shlex.split(curl), "--silent"], capture_output=True, check=True, timeout=START_TIMEOUT_S)
    assert json.loads(reply.stdout)["choices"][0]["message"]["content"]
    pids = local.everything()
    local.process.send_signal(signal.SIGTERM)
    assert local.end() == 0
    assert local.text().endswith(STOPPED)
    _assert_nothing_is_left(local, pids)


@pytest.mark.slow
def test_an_engine_that_dies_while_serving_is_named_and_everything_stops(start: Callable[..., Local]) -> None:
    local = start()
    local.wait_for("serving on")
    pids = local.everything()
    subprocess.run(["kill", "-KILL", str(local.engine_pid("decode-0"))], check=True)
    assert local.end() == 1
    assert (
        "pdcluster: decode-0 has ended with signal 9: killed from outside, as the kernel does when memory runs out; "
        in local.text()
    )
    assert "[decode-0] " in local.text().partition("has ended with")[2]
    _assert_nothing_is_left(local, pids)


@pytest.mark.costly
def test_an_engine_that_dies_while_starting_is_named_and_everything_stops(start: Callable[..., Local]) -> None:
    local = start("--decode-tp", "3", "--decode-args", "--hf-overrides={}")  # With these words only vLLM can judge.
    assert local.end() == 1
    cause = "Total number of attention heads (8) must be divisible by tensor parallel size (3)."
    ending = local.text().partition(f"pdcluster: decode-0 has ended with status 1: {cause}; the end of ")[2]
    assert "[decode-0] " in ending
    assert descendants(local.process.pid) == set()
    assert is_port_free(local.port)


def test_sigint_while_importing_leaves_nothing(start: Callable[..., Local]) -> None:
    local = start()
    local.wait_for("importing vLLM")
    assert eventually(lambda: len(local.everything()) > 1)
    pids = local.everything()
    local.process.send_signal(signal.SIGINT)
    assert local.end() == 130
    assert local.text().endswith(STOPPED)
    _assert_nothing_is_left(local, pids)


@pytest.mark.slow
def test_sigint_while_engines_start_leaves_nothing(start: Callable[..., Local]) -> None:
    local = start()
    local.wait_for("starting prefill-0, decode-0")
    assert eventually(lambda: any(process_name(pid) == "decode-0" for pid in local.everything()))
    pids = local.everything()
    local.process.send_signal(signal.SIGINT)
    assert local.end() == 130
    _assert_nothing_is_left(local, pids)
    assert "Traceback" not in local.text()


@pytest.mark.slow
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
        "--model wants a folder with config.json, weights and a tokenizer, or a model's name on a hub\n"
    )


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (
            ("--prefill-tp", "2", "--prefill-args", "--distributed-executor-backend uni"),
            2,
            "--prefill-args: --distributed-executor-backend uni runs one rank, and TP 2 x PP 1 are 2: "
            "leave it out, or use mp",
        ),
        (("--decode-tp", "2", "--decode-args", "-tp 4"), 2, "--decode-args: tensor parallel size is both 2 and 4 "),
        (("--decode-args", "--kv-cache-memory-bytes 1125899906842624"), 1, "KV caches of 2 ranks need 1048576.5 GiB, "),
        (("--prefill-tp", "3"), 1, "prefill TP 3 cannot split the model's 8 attention heads and 2 KV heads: give "),
        (("--start-timeout", "1"), 1, "importing vLLM takes more than 1 s (--start-timeout): see "),
    ],
    ids=["executor", "two sizes", "memory", "heads", "import"],
)
def test_what_can_never_run_ends_with_one_clear_line(
    start: Callable[..., Local], words: tuple[str, ...], status: int, line: str
) -> None:
    local = start(*words)
    assert local.end() == status
    last = local.text().splitlines()[-1]
    assert last.startswith(f"pdcluster: {line}")
    assert descendants(local.process.pid) == set()


def test_a_model_that_no_hub_can_give_is_one_line_before_anything_starts(
    start: Callable[..., Local], tmp_path: Path
) -> None:
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{fresh_port()}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    local = start("--model", "org/name", env=env)
    assert local.end() == 1
    (line,) = local.text().splitlines()
    assert line.startswith(
        f"pdcluster: model org/name is no folder here and not in {tmp_path}/hub, and there is no way to"
    )
