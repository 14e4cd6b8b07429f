"""A command line made from a settings model."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from tools.crds import page_of
from tools.reference import connector
from tools.reference.flags import COMMANDS, file_of

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.flags import Flags


class Pace(Enum):
    SLOW = "slow"
    FAST = "fast"


class Settings(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    urls: tuple[Annotated[str, AfterValidator(str)], ...] = ()
    """Where to."""
    wait_s: float = Field(default=2.5, gt=0, le=60)
    """Seconds, 100 % of them;
    as ``most_ports``."""
    most_ports: int = Field(default=4, ge=1)
    """How many."""
    proxies: tuple[str, ...] = ()
    """Whom to believe."""
    file: Path | None = None
    """Where it goes. None: nowhere."""
    pace: Pace = Pace.SLOW
    """How."""
    secret: str = ""


FLAGS = Flags(
    Settings.model_fields,
    named={"urls": "--to"},
    hidden=frozenset({"secret"}),
    variables={"secret": "THE_SECRET", "pace": "THE_PACE", "proxies": "THE_PROXIES"},
)


def parsed(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    FLAGS.add_to(parser)
    return {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}


def test_a_flag_is_read_as_its_field_wants_it() -> None:
    words = ["--to=a", "--to=b", "--wait=1", "--most-ports=7", "--file=/f", "--pace=fast"]
    assert parsed(*words) == {
        "urls": ["a", "b"],
        "wait_s": 1.0,
        "most_ports": 7,
        "file": "/f",
        "pace": "fast",
    }
    assert parsed() == {}


@pytest.mark.parametrize("words", [["--secret=x"], ["--pace=none"], ["--most-ports=1.5"], ["--wait=soon"]])
def test_what_no_field_takes_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*words)
    assert words[0].partition("=")[0] in capsys.readouterr().err


def test_the_help_has_each_docstring_with_flags_for_fields_and_the_default() -> None:
    parser = argparse.ArgumentParser()
    FLAGS.add_to(parser)
    told = " ".join(parser.format_help().split())
    assert "--to URL Where to. Repeat it for more." in told
    assert "--wait SECONDS Seconds, 100 % of them; as --most-ports. (default: 2.5)" in told
    assert "--proxies PROXY Whom to believe. Repeat it for more. (default: $THE_PROXIES, else none)" in told
    assert "--file PATH Where it goes. Without it: nowhere." in told
    assert "--pace {slow,fast} How. (default: $THE_PACE, else slow)" in told


def test_a_page_has_default_bounds_and_reason_of_each() -> None:
    assert FLAGS.rows() == [
        ("--to", "", "", "Where to. Repeat it for more."),
        ("--wait", "2.5", "above 0, at most 60", "Seconds, 100 % of them; as --most-ports."),
        ("--most-ports", "4", "at least 1", "How many."),
        ("--proxies", "$THE_PROXIES, else none", "", "Whom to believe. Repeat it for more."),
        ("--file", "", "", "Where it goes. Without it: nowhere."),
        ("--pace", "$THE_PACE, else slow", "", "How."),
    ]


def test_a_variable_counts_for_its_field_where_it_holds_something() -> None:
    assert FLAGS.told_by({"THE_SECRET": "s", "THE_PACE": "", "OTHER": "x"}) == {"secret": "s"}


@pytest.mark.parametrize(
    ("location", "kind", "given", "message", "said"),
    [
        (("wait_s",), "missing", {}, "Field required", "--wait is needed"),
        (("wait_s",), "less_than_equal", 70, "Input should be less than 60", "--wait is 70: it should be less than 60"),
        (("to", 0), "value_error", "x", "Value error, 'x' is no URL", "--to: 'x' is no URL"),
        (("secret",), "string_type", "S3CRET", "Input should be a string", "THE_SECRET: Input should be a string"),
        ((), "value_error", {}, "Value error, --wait 1: give 2", "these settings do not fit: --wait 1: give 2"),
    ],
)
def test_what_pydantic_finds_is_said_with_the_flag_and_the_value(
    location: tuple[str | int, ...], kind: str, given: object, message: str, said: str
) -> None:
    assert FLAGS.problem({"loc": location, "type": kind, "input": given, "msg": message}) == said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_page_is_fresh_and_says_the_reason_of_each_flag(command: str) -> None:
    assert file_of(command).read_text() == page_of(command), "make crds"
    assert [flag for flag, *_, reason in COMMANDS[command].rows() if len(reason) < 20] == []


def test_the_page_of_the_connectors_settings_is_fresh_and_says_why() -> None:
    assert connector.FILE.read_text() == connector.page(), "make crds"
    assert [name for name, text in connector.docstrings().items() if len(text) < 20] == []


PREFIXED = replace(FLAGS, prefix="P__")


def test_each_flag_has_a_variable() -> None:
    environ = {
        "P__WAIT": "7",
        "P__TO": "a , b,",
        "P__PACE": "fast",
        "THE_PACE": "slow",
        "P__MOST_PORTS": "",
        "WAIT": "9",
    }
    assert PREFIXED.told_by_prefix(environ) == {"wait_s": "7", "urls": ["a", "b"], "pace": "fast"}


def test_without_a_prefix_only_named_variables_count() -> None:
    environ = {"P__WAIT": "7", "THE_PACE": "fast"}
    assert (FLAGS.told_by(environ), FLAGS.told_by_prefix(environ)) == ({"pace": "fast"}, {})


@pytest.mark.parametrize(
    ("variable", "cure"),
    [
        ("P__WIAT", ": did you mean P__WAIT?"),
        ("P__URLS", ": the flags are in --help"),
        ("P__SECRET", " here: THE_SECRET alone gives it"),
        ("P__", ": the flags are in --help"),
    ],
)
def test_a_variable_with_the_prefix_that_is_no_settings_is_refused(variable: str, cure: str) -> None:
    with pytest.raises(ConfigError) as told:
        PREFIXED.told_by_prefix({variable: "1"})
    assert str(told.value) == f"{variable} is no setting{cure}"


def test_a_file_has_the_flags_names() -> None:
    text = 'to = ["a", "b"]\nproxies = "c,d"  # two\nwait = 7\npace = "fast"\n'
    assert FLAGS.told_in(text) == {"urls": ["a", "b"], "proxies": ["c", "d"], "wait_s": 7, "pace": "fast"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wiat = 7", "wiat is no setting: did you mean wait?"),
        ("secret = 7", "secret is no setting here: THE_SECRET alone gives it"),
        ("[limits]\nwait = 7", "limits is no text, number or list of texts: "),
        ("wait = true", "wait is no text, number or list of texts: "),
        ("to = [['a']]", "to is no text, number or list of texts: "),
        ("wait = " + "9" * 5000, "it is no TOML: a number or a list has no end: "),
        ("wait = " + "[" * 100_000, "it is no TOML: "),
        ("--wait 7", "it is no TOML: "),
        ("wait = 7\nwait = 8", "it is no TOML: "),
    ],
)
def test_a_file_with_what_is_no_setting_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        FLAGS.told_in(text)


def test_an_empty_text_in_a_file_is_none() -> None:
    assert FLAGS.told_in("file = ''\nwait = 0") == {"wait_s": 0}


def test_a_problem_names_what_gave_the_value() -> None:
    error = {"loc": ("wait_s",), "type": "greater_than", "msg": "Input should be greater than 0", "input": 0}
    assert FLAGS.problem(error) == "--wait is 0: it should be greater than 0"
    assert FLAGS.problem(error, {"wait_s": "P__WAIT"}) == "P__WAIT is 0: it should be greater than 0"
