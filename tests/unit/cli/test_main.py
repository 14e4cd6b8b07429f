"""``pdcluster`` finds its subcommand, and ends with the status that scripts expect."""

from __future__ import annotations

import socket

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
    assert {"local", "router", "doctor"} <= set(capsys.readouterr().out.split())


def test_the_routers_words_are_the_routers_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--prefill", "nonsense", "--decode", "http://d:1"]) == 2
    assert capsys.readouterr().err.startswith("pdcluster router: ")


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
