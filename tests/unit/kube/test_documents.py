"""Documents that are nested deeper than Python's parser goes."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_kube.documents import CUT, MAX_DEPTH, decode_document

DEEP: Final = 9_990
"""About what an API server keeps."""


def levels_of(document: Any) -> tuple[int, Any]:
    """How often ``document`` has one child, and what is innermost."""
    depth = 0
    while isinstance(document, dict | list):
        [document] = document.values() if isinstance(document, dict) else document
        depth += 1
    return depth, document


@pytest.mark.parametrize(("opened", "closed"), [('{"a":', "}"), ("[", "]"), ('{"]\\"}": [', "]}")])
def test_of_a_document_that_is_too_deep_the_outer_levels_are_kept(opened: str, closed: str) -> None:
    found = decode_document((opened * DEEP + "1" + closed * DEEP).encode())
    try:
        json.loads(opened * DEEP + "1" + closed * DEEP)
    except RecursionError:
        assert levels_of(found) == (MAX_DEPTH, CUT)
    else:  # Python 3.13 parses some of them.
        assert levels_of(found)[1] == 1


TOO_DEEP: Final = '{"a":' * 30_000 + "1" + "}" * 30_000


@given(st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_all_else_stays_as_it_is(other: Any) -> None:
    text = json.dumps([other, "[", "}"])
    assert decode_document(text) == [other, "[", "}"]
    beside = decode_document(f'{{"items": [{text}, {TOO_DEEP}, {text}]}}')["items"]
    assert [beside[0], beside[2]] == [[other, "[", "}"]] * 2
    assert levels_of(beside[1]) == (MAX_DEPTH - 2, CUT)


NO_JSON: Final = {
    "nothing": "",
    "no end": "[",
    "other quotes": "{'a': 1}",
    "one bracket less": TOO_DEEP[:-1],
    "deep without an end": "[" * 30_000,
    "one bracket more": "]" + TOO_DEEP,
    "cut in a long string": TOO_DEEP + '"' + "x" * 1_000_000,
}


@pytest.mark.parametrize("text", NO_JSON.values(), ids=NO_JSON)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|Extra data"):
        decode_document(text)
