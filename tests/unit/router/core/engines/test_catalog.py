"""Known answers of who gets a request for a model; ``test_router_catalog.py`` has the laws."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fakes.answers import models_answer
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.breaker import Breaker
from pdcluster_router.core.engines.catalog import (
    base_names,
    base_of,
    engines_of_base,
    group_for,
    group_unpaired,
    is_listed,
    models_of_decodes,
)
from pdcluster_router.core.engines.listing import Listing, read_listing
from pdcluster_router.core.engines.membership import EngineState

PREFILL, DECODE = Role.PREFILL, Role.DECODE
SERVING, NOT_READY = EngineState.SERVING, EngineState.NOT_READY
WELL, SICK, DOUBTED, WAITS = (SERVING, True), (SERVING, False), (NOT_READY, True), (NOT_READY, False)
NEW = EngineState.STARTING, True
ONE = read_listing(models_answer("m", sql="/sql-1"))
TWO = read_listing(models_answer("m", sql="/sql-2"))
PLAIN = read_listing(models_answer("m"))
LLAMA, QWEN = (read_listing(models_answer(name)) for name in ("llama", "qwen"))


@dataclass(eq=False)
class Stub:
    """An engine, as far as these decisions see it."""

    role: Role
    listing: Listing | None
    state: EngineState = SERVING
    is_healthy: bool = True
    revision: str = ""
    breaker: Breaker = field(default_factory=Breaker)


Standing = tuple[EngineState, bool]


def _other(role: Role) -> Role:
    return DECODE if role is PREFILL else PREFILL


def pair(listing: Listing | None, prefill: Standing = WELL, decode: Standing = WELL) -> list[Stub]:
    return [Stub(PREFILL, listing, *prefill), Stub(DECODE, listing, *decode)]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((WELL, WELL), (SICK, WELL)),
        ((WELL, WELL), (WELL, SICK)),
        ((SICK, WELL), (WAITS, WELL)),
        ((SICK, WELL), (SICK, SICK)),
        ((WAITS, WELL), (WAITS, SICK)),
        ((DOUBTED, WELL), (SICK, SICK)),
        ((WAITS, SICK), (NEW, WELL)),
    ],
)
def test_of_two_things_with_one_name_the_one_that_is_served_better_comes_first(
    better: tuple[Standing, Standing], worse: tuple[Standing, Standing], *, is_first: bool
) -> None:
    one, other = (ONE, TWO) if is_first else (TWO, ONE)
    best = pair(one, *better)
    group = group_for("sql", [*pair(other, *worse), *best])
    assert group is not None
    assert group.engines == tuple(best)


def test_two_things_that_are_served_as_well_are_told_apart_in_the_same_way_by_each_router() -> None:
    one, two = pair(ONE), pair(TWO)
    groups = [group_for("sql", engines) for engines in ([*one, *two], [*two, *one])]
    assert [set(group.engines) for group in groups if group is not None] == [set(one)] * 2


def test_a_request_that_names_no_model_is_for_that_of_the_first_decode_engine() -> None:
    prefills, decodes = zip(pair(LLAMA), pair(QWEN), strict=True)
    group = group_for("", [*prefills, *reversed(decodes)])
    assert group is not None
    assert group.engines == (prefills[1], decodes[1])


def test_a_request_that_names_no_model_may_go_to_a_pair_that_calls_its_model_differently() -> None:
    engines = [Stub(PREFILL, LLAMA), Stub(DECODE, QWEN)]
    group = group_for("", engines)
    assert group is not None
    assert (group.is_whole, group.engines) == (True, tuple(engines))


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", ["", "m"])
def test_engines_that_have_not_told_their_models_serve_a_base_model_that_others_of_their_role_do_not_tell(
    role: Role, name: str
) -> None:
    silent, (one, other) = Stub(role, None), (Stub(_other(role), listing) for listing in (PLAIN, ONE))
    group = group_for(name, [silent, one, other])
    assert group is not None
    assert set(group.engines) == {silent, one, other}
    telling = Stub(role, PLAIN)
    group = group_for(name, [silent, telling, one, other])
    assert group is not None
    assert silent not in group.engines, "one that has told them is there"


@pytest.mark.parametrize("is_healthy", [True, False])
def test_a_name_that_nobody_lists_may_be_that_of_a_silent_engine_which_answers(*, is_healthy: bool) -> None:
    silent = [Stub(PREFILL, None), Stub(DECODE, None, is_healthy=is_healthy)]
    group = group_for("nobody's", [*pair(PLAIN), *silent])
    assert (group.engines if group is not None else ()) == (tuple(silent) if is_healthy else ())


@pytest.mark.parametrize("role", Role)
def test_a_silent_engine_stands_in_though_one_of_its_role_and_another_revision_has_told_its_models(role: Role) -> None:
    silent, old = Stub(role, None, revision="2"), Stub(role, PLAIN, revision="1")
    other = Stub(_other(role), PLAIN, revision="2")
    elsewhere = Stub(role, QWEN, revision="3")
    group = group_for("m", [old, silent, other, elsewhere])
    assert group is not None
    assert {silent, other} <= set(group.engines), "no pair is left without it: revisions are never paired"
    assert elsewhere not in group.engines
    whole = Stub(_other(role), PLAIN, revision="1")
    group = group_for("m", [old, whole, silent, other, elsewhere])
    assert group is not None
    assert silent not in group.engines, "a pair that has told its models is there"


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_decode_engine_will_serve_comes_before_what_only_prefill_engines_have(*, is_first: bool) -> None:
    one, other = (ONE, TWO) if is_first else (TWO, ONE)
    decode = Stub(DECODE, one, *WAITS)
    group = group_for("sql", [Stub(PREFILL, other), decode])
    assert group is not None
    assert decode in group.engines


A, A_AND_B, B = (read_listing(models_answer(*names)) for names in (("a",), ("a", "b"), ("b",)))


def num_of(model: str, engines: list[Stub], kept: frozenset[str] = frozenset()) -> tuple[int, int]:
    """How many prefill and decode engines requests for this base model may be placed among."""
    names = base_names(engines, kept)
    found = engines_of_base(names.get(model, model), names, engines)
    return sum(one.role is PREFILL for one in found), sum(one.role is DECODE for one in found)


def test_names_that_one_engine_lists_are_of_one_model_and_the_first_of_the_alphabet_stands_for_it() -> None:
    engines = [*pair(B), *pair(A_AND_B), *pair(QWEN)]
    assert base_names(engines, frozenset()) == {"a": "a", "b": "a", "qwen": "qwen"}
    assert models_of_decodes(engines, base_names(engines, frozenset())) == {"a", "qwen"}
    assert base_names(list(reversed(engines)), frozenset()) == {"a": "a", "b": "a", "qwen": "qwen"}


def test_a_name_that_stood_for_a_model_still_does() -> None:
    assert base_names(pair(A_AND_B), frozenset({"b"})) == {"a": "b", "b": "b"}


def test_all_engines_of_a_model_count_whatever_they_call_it() -> None:
    engines = [*(Stub(PREFILL, B) for _ in range(3)), Stub(DECODE, A_AND_B), *pair(QWEN)]
    assert num_of("b", engines) == num_of("a", engines) == (3, 1)
    assert base_of(engines) == "a"


def test_silent_engines_count_only_where_they_stand_in() -> None:
    silent = pair(None)
    assert num_of("llama", [*pair(LLAMA), *pair(QWEN), *silent]) == (1, 1)
    assert num_of("llama", [*pair(LLAMA, decode=SICK), *pair(QWEN), *silent]) == (1, 2)
    assert base_of(silent) == ""


def test_engines_that_leave_do_not_count() -> None:
    assert num_of("llama", [*pair(LLAMA), *pair(LLAMA, (EngineState.LEAVING, True)), *pair(QWEN)]) == (1, 2)


def test_a_name_is_listed_where_an_engine_says_that_it_serves_it() -> None:
    engines = [*pair(None), *pair(ONE)]
    assert [is_listed(name, engines) for name in ("m", "sql", "llama")] == [True, True, False]
    assert not is_listed("m", pair(None))


E5 = read_listing(models_answer("e5"))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_model_that_decode_engines_alone_serve_is_the_one_of_pooling_requests_that_name_none(
    *, is_first: bool
) -> None:
    prefill, decode = pair(LLAMA)
    alone = Stub(DECODE, E5)
    engines = [prefill, alone, decode] if is_first else [prefill, decode, alone]
    pooled, paired = group_unpaired("", engines), group_for("", engines)
    assert pooled is not None
    assert paired is not None
    assert (pooled.engines, set(paired.engines)) == ((alone,), {prefill, decode})


@pytest.mark.parametrize("listing", [LLAMA, None])
def test_without_such_a_model_they_are_for_any_decode_engine(listing: Listing | None) -> None:
    engines = pair(listing)
    group = group_unpaired("", engines)
    assert group is not None
    assert group.engines == tuple(engines)


def test_a_model_that_pairs_serve_is_served_to_pooling_requests_too() -> None:
    engines = [*pair(LLAMA), Stub(DECODE, E5)]
    group = group_unpaired("llama", engines)
    assert group is not None
    assert group.engines == tuple(engines[:2])
    assert group_unpaired("mistral", engines) is None


@pytest.mark.parametrize("others", [pair(LLAMA), []], ids=["beside a pair", "the only list"])
def test_an_engine_without_a_list_gets_no_pooling_request_for_a_model_that_another_one_has_told(
    others: list[Stub],
) -> None:
    told, silent = Stub(DECODE, E5, revision="e"), Stub(DECODE, None, revision="new")
    group = group_unpaired("e5", [*others, told, silent])
    assert group is not None
    assert [one for one in group.engines if one.role is DECODE and one.listing is not LLAMA] == [told]
    assert not group.is_whole
    told.is_healthy = False
    left = group_unpaired("e5", [*others, told, silent])
    assert left is not None
    assert silent in left.engines, "it may serve the model, and no other engine can"


def test_a_pooling_request_without_a_name_is_for_no_model_that_a_prefill_engine_without_a_list_may_serve() -> None:
    prefill, decode = Stub(PREFILL, None), Stub(DECODE, LLAMA)
    alone = Stub(DECODE, E5, revision="e")
    group = group_unpaired("", [prefill, decode, alone])
    assert group is not None
    assert alone in group.engines
    assert decode not in group.engines
    only = group_unpaired("", [prefill, decode])
    assert only is not None
    assert decode in only.engines, "no other one is left"


def test_a_pooling_request_without_a_name_is_for_no_model_of_an_engine_that_leaves() -> None:
    gone, alone = Stub(DECODE, QWEN, EngineState.LEAVING), Stub(DECODE, E5)
    group = group_unpaired("", [gone, *pair(LLAMA), alone])
    assert group is not None
    assert group.engines == (alone,)


def test_a_prefill_engine_that_leaves_serves_no_model() -> None:
    group = group_unpaired("", [Stub(PREFILL, E5, EngineState.LEAVING), *pair(LLAMA), Stub(DECODE, E5)])
    assert group is not None
    assert [one.listing for one in group.engines] == [E5]
