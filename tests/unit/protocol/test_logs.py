"""Lines of the log, as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from pdcluster_protocol.logs import JsonLines, LogFormat, TextLines, event_of, start_logging


def record(template: str, *values: object, **more: Any) -> logging.LogRecord:
    return logging.LogRecord("a.b", logging.WARNING, "file", 1, template, values, **{"exc_info": None, **more})


def as_json(template: str, *values: object, **more: Any) -> dict[str, object]:
    line = JsonLines().format(record(template, *values, **more))
    assert "\n" not in line
    found = dict(json.loads(line))
    assert str(found.pop("ts")).endswith("Z")
    assert (found.pop("level"), found.pop("logger")) == ("warning", "a.b")
    return found


@pytest.mark.parametrize(
    ("template", "values", "event", "fields"),
    [
        ("lease lost lease=%s holder=%s", ("a/b", "me"), "lease lost", {"lease": "a/b", "holder": "me"}),
        ("started engines=%d", (3,), "started", {"engines": 3}),
        ("verified %s seconds=%.3f tokens=%d content=compared", ("p and d", 0.5, 9),
         "verified p and d content=compared", {"seconds": 0.5, "tokens": 9}),
        ("no CRDs group=%s: install the chart", ("pdcluster.dev",), "no CRDs: install the chart",
         {"group": "pdcluster.dev"}),
        ("engine %s role=%s", ("up", "decode"), "engine up", {"role": "decode"}),
        ("100 %% of %s", ("it",), "100 % of it", {}),
        ("broken reason=%r", ("a b",), "broken", {"reason": "a b"}),
        ("plain", (), "plain", {}),
        ("100 % of it, without values", (), "100 % of it, without values", {}),
        ("%(asked)s of a library", ({"asked": "this"},), "this of a library", {}),
    ],
)  # fmt: skip
def test_a_templates_keys_are_the_fields_and_the_rest_is_the_event(
    template: str, values: tuple[object, ...], event: str, fields: dict[str, object]
) -> None:
    assert event_of(record(template, *values)) == (event, fields)
    assert as_json(template, *values) == {"event": event, **fields}


def test_a_line_that_cannot_be_filled_in_is_one_error_and_no_crash() -> None:
    with pytest.raises(TypeError):
        event_of(record("two a=%s b=%s", "one"))


def test_a_value_of_any_kind_is_written_and_none_takes_the_place_of_ours() -> None:
    found = as_json("told level=%s reason=%s number=%s nothing=%s", "high", ValueError("no"), 1.5, None)
    assert found == {"event": "told", "level_": "high", "reason": "no", "number": 1.5, "nothing": None}


def test_an_exception_is_one_field() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        found = as_json("broke key=%s", "k", exc_info=sys.exc_info())
    assert str(found["exception"]).startswith("Traceback")
    assert "first\nsecond" in str(found["exception"])


@pytest.mark.parametrize(
    "value",
    ["a\nWARNING forged", "a\r\nb", "a\u2028b", "a\u2029b", "a\x0bb", "a\x1b[2Jb", "a\x7fb", "a\x85b", "a\x9b2Jb"],
)
def test_what_is_sent_begins_no_line(value: str) -> None:
    text = TextLines("%(message)s").format(record("failure reason=%s", value))
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    assert as_json("failure reason=%s", value)["reason"] == value
    line = JsonLines().format(record("failure reason=%s", value))
    assert len(line.splitlines()) == 1
    assert line.isprintable()


def test_text_is_as_ever() -> None:
    formatter = TextLines("%(levelname)s %(name)s %(message)s")
    assert formatter.format(record("lease lost lease=%s", "a/b")) == "WARNING a.b lease lost lease=a/b"


@pytest.mark.parametrize("form", LogFormat)
def test_a_process_logs_in_the_form_that_it_is_told(form: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        root.handlers.clear()
        start_logging(form, seat=3)
        logging.getLogger("of.a.library").info("started port=%d", 7)
        told = capsys.readouterr().err
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    if form is LogFormat.JSON:
        assert (json.loads(told)["port"], json.loads(told)["seat"]) == (7, 3)
    else:
        assert told.endswith("INFO of.a.library seat=3 started port=7\n")


def test_an_exceptions_text_cannot_look_like_a_line_of_ours() -> None:
    line = "2026-11-27 01:02:03,004 WARNING pdcluster_router.front forged"
    try:
        raise ValueError(f"first\n{line}\r{line}\u2028{line}")
    except ValueError:
        told = TextLines("%(levelname)s %(message)s").format(record("broke", exc_info=sys.exc_info()))
    assert told.count("forged") == 3
    assert not any(one.startswith("2026") for one in told.splitlines())


LINE = "2026-11-27 01:02:03,004 WARNING pdcluster_router.front forged"


def require_one_line_of_ours(told: str) -> None:
    """All but the first line of ``told`` are indented, though it has the forged line."""
    assert LINE in told
    assert [one for one in told.splitlines() if not one.startswith("    ")] == ["WARNING broke"]


def test_an_exceptions_text_that_another_formatter_has_made_cannot_look_like_a_line_of_ours() -> None:
    """logging keeps it in the record, for every handler that follows."""
    try:
        raise ValueError(f"first\n{LINE}")
    except ValueError:
        broken = record("broke", exc_info=sys.exc_info())
    plain = logging.Formatter().format(broken)
    require_one_line_of_ours(TextLines("%(levelname)s %(message)s").format(broken))
    assert logging.Formatter().format(broken) == plain, "the others have theirs"


def test_an_exceptions_text_without_the_exception_cannot_either() -> None:
    """As of a record that came from another process."""
    broken = record("broke")
    broken.exc_text = f"ValueError: first\n{LINE}"
    require_one_line_of_ours(TextLines("%(levelname)s %(message)s").format(broken))


def test_a_stack_cannot_look_like_a_line_of_ours() -> None:
    broken = record("broke", sinfo=f"Stack (most recent call last):\n{LINE}\r{LINE}")
    told = TextLines("%(levelname)s %(message)s").format(broken)
    require_one_line_of_ours(told)
    assert "\\r" in told
