"""Decodes documents of an API server, however deeply they are nested.

An API server keeps objects that are 10,000 levels deep. Python's parser ends at 1,000 to 10,000, by its version, with a
``RecursionError``. One such object would stop every client that lists its kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

MAX_DEPTH: Final = 200
"""Levels that are kept of a document that is too deep for Python. Kubernetes' own kinds have less than 30."""
CUT: Final = "pdcluster: nested too deep"
"""Stands for what was deeper. A text, since null would delete a field where documents are merged."""
_TO_BRACKET: Final = re.compile(r'[^"\[\]{}]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"\[\]{}]*)*([\[\]{}])')
"""Up to the next bracket that is in no string."""


def decode_document(text: str | bytes) -> Any:
    """The document. If Python cannot parse it, what is deeper than ``MAX_DEPTH`` is replaced by ``CUT``.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads("".join(_shallow(text if isinstance(text, str) else text.decode())))


def _shallow(text: str) -> Iterator[str]:
    """The pieces of ``text`` without what is deeper."""
    depth = begin = 0
    at = 0
    while found := _TO_BRACKET.match(text, at):  # Not ``finditer``: that would try each place of a text that is cut.
        at = found.end()
        match found[1]:
            case "[" | "{":
                depth += 1
                if depth == MAX_DEPTH + 1:
                    yield text[begin : at - 1]
            case "]" | "}":
                if depth == MAX_DEPTH + 1:
                    yield json.dumps(CUT)
                    begin = at
                depth -= 1
    if depth <= MAX_DEPTH:
        yield text[begin:]
