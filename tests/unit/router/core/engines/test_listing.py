"""What an engine says it serves, as vLLM writes it and as a hostile engine may."""

from __future__ import annotations

import json

import pytest

from fakes.answers import models_answer
from pdcluster_router.core.engines.listing import BASE, MAX_LIST_BYTES, MAX_MODELS, Identity, read_listing

CARD = {"id": "m", "object": "model", "created": 1, "owned_by": "vllm", "root": "/m", "parent": None, "permission": []}


def test_names_of_the_base_model_and_adapters_are_told_apart() -> None:
    listing = read_listing(models_answer("llama", "gpt-4", sql="/adapters/sql"))
    assert listing is not None
    assert listing.bases == ("llama", "gpt-4")
    assert listing.get("gpt-4") is BASE
    assert listing.get("sql") == Identity("llama", "/adapters/sql")
    assert listing.get("other") is None


def test_lists_that_say_the_same_are_equal_in_any_order_of_adapters_and_at_any_time() -> None:
    one = read_listing(models_answer("m", a="/a", b="/b"))
    assert one == read_listing(models_answer("m", b="/b", a="/a"))
    later = {**CARD, "created": 2}
    assert read_listing(json.dumps({"data": [CARD]}).encode()) == read_listing(json.dumps({"data": [later]}).encode())


@pytest.mark.parametrize("other", [models_answer("m", a="/b"), models_answer("m"), models_answer("m", "n", a="/a")])
def test_lists_that_say_something_else_are_not_equal(other: bytes) -> None:
    assert read_listing(models_answer("m", a="/a")) != read_listing(other)


def test_a_name_that_is_an_adapters_too_is_the_base_models_as_in_vllm() -> None:
    listing = read_listing(models_answer("m", "sql", sql="/adapters/sql"))
    assert listing is not None
    assert listing.get("sql") is BASE


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"null",
        b'{"data": null}',
        b'{"data": []}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": ""}]}',
        b'{"data": [{"id": "\xff"}]}',
        b'{"data": [{"id": "\\ud800"}]}',
        b'{"data": [{"id": "sql", "parent": "m"}]}',
        b'{"data": ' + b"[" * 100_000,
        b'{"data": [{"id": "m"}]}' + b" " * MAX_LIST_BYTES,
        b'{"data": [' + b",".join([b'{"id": "m"}'] * (MAX_MODELS + 1)) + b"]}",
    ],
    ids=range(13),
)
def test_an_answer_that_is_no_list_is_as_none(answer: bytes) -> None:
    assert read_listing(answer) is None
