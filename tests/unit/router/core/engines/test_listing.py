"""What an engine says it serves, as vLLM writes it and as a hostile engine may."""

from __future__ import annotations

import json

import pytest

from fakes.answers import models_answer
from pdcluster_router.core.engines.listing import (
    BASE,
    MAX_LIST_BYTES,
    MAX_MODELS,
    Identity,
    read_list,
    read_listing,
    with_aliases,
)

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
    ],
    ids=range(12),
)
def test_an_answer_that_is_no_list_is_as_none(answer: bytes) -> None:
    assert read_listing(answer) is None


def test_of_too_many_models_the_base_and_those_that_were_loaded_first_are_known() -> None:
    adapters = {f"a{number}": f"/a/{number}" for number in range(MAX_MODELS + 1)}
    cards = json.loads(models_answer("m", **adapters))["data"]
    read = read_list(json.dumps({"data": [*cards[1:], cards[0]]}).encode())
    assert read.listing is not None
    assert read.listing.bases == ("m",)
    assert read.listing.get("a0") == Identity("m", "/a/0")
    known = [name for name in adapters if read.listing.get(name) is not None]
    assert known == list(adapters)[: MAX_MODELS - 1]
    assert read.surplus == (
        f"it lists {MAX_MODELS + 2} models, and the first {MAX_MODELS} are known here: clients get 404 for the others"
    )


def test_a_list_that_is_read_whole_has_no_surplus() -> None:
    adapters = {f"a{number}": f"/a/{number}" for number in range(MAX_MODELS - 1)}
    read = read_list(models_answer("m", **adapters))
    assert (read.surplus, read.listing is not None) == ("", True)


def test_a_list_of_too_many_bytes_says_how_many() -> None:
    read = read_list(models_answer("m") + b" " * MAX_LIST_BYTES)
    assert read.listing is None
    assert read.surplus.endswith(f"and {MAX_LIST_BYTES} are read: the list before stays")


def test_an_alias_has_the_card_of_its_model_under_its_own_name() -> None:
    listed = json.loads(with_aliases(models_answer("llama", sql="/sql"), {"gpt-4": "llama", "db": "sql", "x": "none"}))
    before = json.loads(models_answer("llama", sql="/sql"))["data"]
    assert listed["object"] == "list"
    assert listed["data"] == [*before, {**before[0], "id": "gpt-4"}, {**before[1], "id": "db"}]


def test_a_card_that_an_alias_hides_is_left_out() -> None:
    llama, qwen = json.loads(models_answer("llama", "qwen"))["data"]
    assert json.loads(with_aliases(models_answer("llama", "qwen"), {"qwen": "llama"}))["data"] == [
        llama,
        {**llama, "id": "qwen"},
    ]
    assert json.loads(with_aliases(models_answer("llama", "qwen"), {"qwen": "gone"}))["data"] == [llama]
    assert qwen["id"] == "qwen"
