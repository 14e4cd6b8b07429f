"""Numbers of a command line: what is taken, and what an error says."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from pdcluster_cli import numbers
from pdcluster_cli.pod.drain import make_parser as drain_parser
from pdcluster_cli.pod.ready import make_parser as ready_parser


@pytest.mark.parametrize(
    ("read", "text", "number"),
    [(numbers.port, "1", 1), (numbers.port, "65535", 65535), (numbers.ranks, "1024", 1024),
     (numbers.seconds(0, 60), "0", 0.0), (numbers.seconds(0, 60), "0.5", 0.5), (numbers.seconds(0, 60), "60", 60.0)],
)  # fmt: skip
def test_numbers_within_the_bounds_are_taken(read: Callable[[str], float], text: str, number: float) -> None:
    assert read(text) == number


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [(numbers.port, "0", "port 0: use 1 to 65535"), (numbers.port, "65536", "port 65536: use 1 to 65535"),
     (numbers.port, "-1", "port -1: use"), (numbers.port, "http", "port http: use"), (numbers.port, "²", "port ²: use"),
     (numbers.ranks, "0", "0 ranks: use 1 to 1024"), (numbers.seconds(0.1, 60), "0", "0 seconds: use 0.1 to 60"),
     (numbers.seconds(0, 60), "61", "61 seconds: use 0 to 60"), (numbers.seconds(0, 60), "nan", "nan seconds: use"),
     (numbers.seconds(0, 60), "inf", "inf seconds: use"), (numbers.seconds(0, 60), "long", "long seconds: use")],
)  # fmt: skip
def test_others_are_refused_with_what_was_given_and_the_bounds(
    read: Callable[[str], float], text: str, told: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=told):
        read(text)


@pytest.mark.parametrize(
    ("command", "words", "told"),
    [("ready", ["--role", "decode", "--port", "99999"], "port 99999: use 1 to 65535"),
     ("ready", ["--role", "decode", "--ranks", "0"], "0 ranks: use 1 to 1024"),
     ("ready", ["--role", "decode", "--timeout-s", "-1"], "-1 seconds: use 0.1 to 3600"),
     ("drain", ["--timeout-s", "-1"], "-1 seconds: use 0 to 86400"),
     ("drain", ["--idle-s", "x"], "x seconds: use 0 to 86400")],
)  # fmt: skip
def test_a_probe_is_refused_a_number_that_means_nothing(
    command: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = {"ready": ready_parser, "drain": drain_parser}[command]()
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert told in capsys.readouterr().err
