"""``pdcluster`` finds its subcommand, and ends with the status that scripts expect."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from pdcluster_cli.__main__ import main
from pdcluster_cli.waiting import free_port


@pytest.mark.parametrize("words", [[], ["dance"], ["local", "--no-such-flag"], ["doctor", "--port", "x"]])
def test_words_that_mean_nothing_end_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: pdcluster" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert {"local", "router", "doctor", "drain", "ready"} <= set(capsys.readouterr().out.split())


def test_the_routers_words_are_the_routers_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--prefill", "nonsense", "--decode", "http://d:1"]) == 2
    assert capsys.readouterr().err.startswith("pdcluster router: ")


@pytest.mark.parametrize("name", ["drain", "ready"])
def test_what_a_pod_runs_every_few_seconds_imports_next_to_nothing(name: str) -> None:
    code = f"import sys; from pdcluster_cli.__main__ import main; main(['{name}', '--help'])"
    report = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); " + code
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=False)
    ours = {module for module in done.stderr.split() if module.startswith("pdcluster_")}
    assert done.returncode == 0
    assert ours <= {
        "pdcluster_cli",
        "pdcluster_cli.__main__",
        f"pdcluster_cli.{name}",
        "pdcluster_cli.engine_http",
        "pdcluster_cli.idleness",
        "pdcluster_cli.zmtp",
        "pdcluster_protocol",
        "pdcluster_protocol.labels",
    }
    assert not {"numpy", "zmq", "msgspec", "pydantic", "asyncio"} & set(done.stderr.split())


def test_the_doctor_finds_nothing_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", str(free_port())]) == 0
    assert all(line.startswith("ok ") for line in capsys.readouterr().out.splitlines())


def test_the_doctor_names_what_needs_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--port", str(port)]) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem ")]
    assert len(problems) == 1
    assert f"port {port}" in problems[0]


def test_routers_and_operators_start_without_what_only_engines_have() -> None:
    """Their image has neither numpy nor torch."""
    program = """
import contextlib, sys
from pdcluster_cli.__main__ import main
for words in (["--help"], ["router", "--help"], ["operator", "--help"]):
    with contextlib.suppress(SystemExit):
        main(words)
print("loaded:", *sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    help_pages, _, names = done.stdout.partition("loaded: ")
    loaded = set(names.split())
    assert help_pages.count("usage: pdcluster") == 3
    assert {"pdcluster_router.__main__", "pdcluster_operator.__main__"} <= loaded
    assert loaded.isdisjoint({"numpy", "torch", "vllm", "zmq", "safetensors"})
