"""How router and operator write their log: one line for each event, as text or as JSON. Standard library only.

The template of a log call says which values are fields, so call sites stay plain:

    logger.warning("lease not renewed or read lease=%s reason=%s", ref, error)

    text   2026-11-23 09:40:01,250 WARNING pdcluster_operator.leader lease not renewed or read lease=Lease a/b
           reason=no answer (one line)
    json   {"ts": "2026-11-23T09:40:01.250Z", "level": "warning", "logger": "pdcluster_operator.leader",
            "event": "lease not renewed or read", "lease": "Lease a/b", "reason": "no answer"}

Each ``key=%s`` of the template is a field, and the rest of the template is the event. Lines of most libraries are
events without fields.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

_FIELD: Final = re.compile(r"\s*\b(\w+)=%[-#0-9.]*[a-z]")
_CONVERSION: Final = re.compile(r"%(?:%|[-#0-9.]*[a-z])")
_OWN: Final = frozenset({"ts", "level", "logger", "event", "exception"})
_HEAD: Final = "%(asctime)s %(levelname)s %(name)s"

_CONTROLS: Final = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_ESCAPED: Final = {code: repr(chr(code))[1:-1] for code in _CONTROLS if chr(code) != "\t"}
_ESCAPED_IN_JSON: Final = {code: f"\\u{code:04x}" for code in _CONTROLS}


class LogFormat(Enum):
    """The form of each line of a log."""

    TEXT = "text"
    JSON = "json"


FORMAT_VARIABLE: Final = "PDCLUSTER_LOG_FORMAT"
"""The environment variable that counts where no flag is given."""


def start_logging(form: LogFormat, **always: int) -> None:
    """Records from INFO up go to stderr in this form. A second call changes the form. ``always``: fields of each line,
    in text before the event."""
    words = "".join(f" {name}={value}" for name, value in always.items())
    formatter = JsonLines(always) if form is LogFormat.JSON else TextLines(f"{_HEAD}{words} %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class TextLines(logging.Formatter):
    """Escapes control characters, and indents tracebacks and stacks: no peer's text can look like a line of ours."""

    def format(self, record: logging.LogRecord) -> str:
        # Another handler's formatter may have left its own text of the exception here, and may want it again.
        kept = record.exc_text
        record.exc_text = None if record.exc_info or not kept else _indented(kept)
        try:
            return super().format(record)
        finally:
            record.exc_text = kept

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        return super().formatMessage(record).translate(_ESCAPED)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's own name
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - logging's own name
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"    {line.translate(_ESCAPED)}" for line in text.split("\n"))


class JsonLines(logging.Formatter):
    """One JSON object a line, also for readers that take other characters than ``\\n`` for the end of a line. A value
    keeps its type if JSON has it, and else becomes text. ``always``: fields of each line."""

    def __init__(self, always: Mapping[str, int] = MappingProxyType({})) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        event, fields = event_of(record)
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._always,
            "event": event,
            **{f"{name}_" if name in _OWN else name: value for name, value in fields.items()},
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str).translate(_ESCAPED_IN_JSON)


def event_of(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """The event, and the fields by name. The event is the template without its fields, with its other values filled in.

    If the values do not fit the template, the event is the whole message and there are no fields.
    """
    values = record.args if isinstance(record.args, tuple) else ()
    template = str(record.msg)
    if not values or len(_conversions(template)) != len(values):
        return record.getMessage(), {}
    fields: dict[str, object] = {}
    others: list[Any] = []
    for value, name in zip(values, _conversions(template), strict=True):
        if name:
            fields[name] = value
        else:
            others.append(value)
    return _FIELD.sub("", template).strip() % tuple(others), fields


def _conversions(template: str) -> list[str]:
    """The name of the field of each conversion, in order; empty: the conversion is part of the event."""
    names = {found.end(): found[1] for found in _FIELD.finditer(template)}
    return [names.get(found.end(), "") for found in _CONVERSION.finditer(template) if found[0] != "%%"]
