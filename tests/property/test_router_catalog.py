"""Laws of who may serve a request for a model, over any engines, lists and states."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from fakes.answers import models_answer
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.breaker import Breaker
from pdcluster_router.core.engines.catalog import (
    MOST_SHOWN,
    ModelGroup,
    group_again,
    group_for,
    lists_of,
    namesakes,
    served_names,
)
from pdcluster_router.core.engines.listing import BASE, Listing, read_listing
from pdcluster_router.core.engines.membership import EngineState
from pdcluster_router.core.engines.placement import decode_tiers, prefill_tiers

NAMES = ("llama", "qwen", "sql")
SAID = [
    models_answer("llama"),
    models_answer("llama", sql="/sql-1"),
    models_answer("llama", sql="/sql-2"),
    models_answer("qwen"),
    models_answer("qwen", sql="/sql-1"),
    models_answer("qwen", "llama"),
    models_answer("sql"),
]
LISTINGS = [read_listing(said) for said in SAID]


@dataclass(eq=False)
class Stub:
    """An engine, as far as these decisions see it."""

    role: Role
    revision: str
    state: EngineState
    is_healthy: bool
    listing: Listing | None
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def is_well(self) -> bool:
        return self.is_healthy and self.state is EngineState.SERVING

    def same(self, name: str, other: Stub) -> bool:
        """Whether ``name`` is the same on both."""
        mine, others = (one.listing.get(name) if one.listing else None for one in (self, other))
        return mine is not None and mine == others


STATES = st.sampled_from([EngineState.SERVING] * 3 + list(EngineState))
ENGINES = st.lists(
    st.builds(
        Stub,
        st.sampled_from(Role),
        st.sampled_from(["", "r2"]),
        STATES,
        st.booleans(),
        st.sampled_from([None, *LISTINGS]),
    ),
    max_size=8,
)


def present(engines: list[Stub]) -> list[Stub]:
    return [engine for engine in engines if engine.state is not EngineState.LEAVING]


def lists(engines: list[Stub]) -> list[Listing]:
    return [engine.listing for engine in present(engines) if engine.listing is not None]


def pairs(group: ModelGroup[Stub]) -> list[tuple[Stub, Stub]]:
    """All pairs that requests of this group can come to, at whatever attempt."""
    decodes = [engine for tier in decode_tiers(group.engines) for engine in tier]
    if not group.has_prefill:
        return []
    tiers = {engine.revision: prefill_tiers(group.engines, engine.revision) for engine in decodes}
    return [(prefill, decode) for decode in decodes for tier in tiers[decode.revision] for prefill in tier]


@given(ENGINES, st.sampled_from(NAMES))
def test_no_pair_is_of_two_models(engines: list[Stub], name: str) -> None:
    group = group_for(name, engines)
    if group is None or len({id(listing) for listing in lists(engines)}) <= 1:
        return
    for prefill, decode in pairs(group):
        said = {one.listing.get(name) for one in (prefill, decode) if one.listing is not None}
        is_silent = prefill.listing is None or decode.listing is None
        assert prefill.same(name, decode) or (is_silent and said <= {BASE}), "a silent engine may have any base model"


@given(ENGINES, st.sampled_from(NAMES))
def test_a_decode_engine_that_is_known_not_to_serve_a_model_is_asked_only_where_nobody_differs(
    engines: list[Stub], name: str
) -> None:
    group = group_for(name, engines)
    if group is None or group.is_whole:
        return
    for decode in (engine for tier in decode_tiers(group.engines) for engine in tier):
        assert decode.listing is None or decode.listing.get(name) is not None


@given(ENGINES, st.sampled_from(NAMES))
def test_a_model_that_a_healthy_pair_serves_is_served_by_a_healthy_pair(engines: list[Stub], name: str) -> None:
    well = [engine for engine in engines if engine.is_well]
    serving = [
        (one, other)
        for one, other in product(well, well)
        if (one.role, other.role) == (Role.PREFILL, Role.DECODE)
        if one.revision == other.revision and one.same(name, other)
    ]
    group = group_for(name, engines)
    if not serving:
        return
    assert group is not None
    assert group.has_prefill
    for decode in decode_tiers(group.engines)[0]:
        assert decode.is_well
        assert all(prefill.is_well for prefill in prefill_tiers(group.engines, decode.revision)[0])


@given(ENGINES, st.sampled_from(NAMES))
def test_decode_computes_no_prompt_of_a_base_model_for_want_of_a_prefill_engine(engines: list[Stub], name: str) -> None:
    group = group_for(name, engines)
    if group is not None:
        decodes = [engine.listing for engine in group.engines if engine.role is Role.DECODE and engine.listing]
        if decodes and all(listing.get(name) == BASE for listing in decodes):
            assert group.has_prefill


@given(ENGINES, st.sampled_from([*NAMES, "nobody's"]))
def test_a_name_is_unknown_exactly_if_nobody_lists_it_and_nobody_who_can_answer_is_silent(
    engines: list[Stub], name: str
) -> None:
    is_listed = any(listing.get(name) is not None for listing in lists(engines))
    is_silent = [engine for engine in present(engines) if engine.listing is None and engine.is_healthy]
    can_answer = any(engine.role is Role.DECODE for engine in is_silent)
    is_known = is_listed or can_answer or not lists(engines)
    assert (group_for(name, engines) is not None) == is_known


@given(ENGINES)
def test_a_request_that_names_no_model_is_always_taken(engines: list[Stub]) -> None:
    group = group_for("", engines)
    assert group is not None
    assert group.has_prefill


@given(ENGINES, st.sampled_from([None, *LISTINGS]), st.sampled_from(["", *NAMES]))
def test_where_all_say_the_same_any_engine_may_get_any_known_model(
    engines: list[Stub], listing: Listing | None, name: str
) -> None:
    for engine in engines:
        engine.listing = listing
    group = group_for(name, engines)
    if group is not None:
        assert (group.is_whole, list(group.engines)) == (True, present(engines))
    else:
        assert listing is not None
        assert listing.get(name) is None


@given(ENGINES, st.lists(st.sampled_from(LISTINGS), min_size=8, max_size=8), st.sampled_from(["", *NAMES]))
def test_what_a_name_was_when_a_request_came_it_is_on_each_engine_that_it_comes_to(
    engines: list[Stub], new: list[Listing], name: str
) -> None:
    before = group_for(name, engines)
    then = lists_of(before.engines) if before is not None else []
    for engine, listing in zip(engines, new, strict=False):
        engine.listing = listing
    name = name or (then[0].bases[0] if then else "")
    was = next((identity for listing in then if (identity := listing.get(name)) is not None), None)
    group = group_again(name, then, engines)
    if was is None or group is None:
        return
    for prefill, decode in pairs(group):
        assert [one.listing.get(name) if one.listing else None for one in (prefill, decode)] == [was, was]


@given(ENGINES, st.dictionaries(st.sampled_from("xyz"), st.sampled_from(NAMES), max_size=3))
def test_few_names_are_told_and_each_is_served_or_the_alias_of_one_that_is(
    engines: list[Stub], aliases: dict[str, str]
) -> None:
    names = served_names(engines, aliases)
    assert len(names) <= MOST_SHOWN
    served = {name for name in names if any(one.get(name) is not None for one in map(_listing, engines) if one)}
    assert set(names) - served <= aliases.keys()
    decodes = [one.listing for one in engines if one.role is Role.DECODE and one.listing is not None]
    for alias, model in aliases.items():
        assert (alias in names) == any(one.get(model) is not None for one in decodes) or len(names) == MOST_SHOWN


@given(ENGINES, st.sets(st.sampled_from(NAMES), max_size=3))
def test_an_alias_has_a_namesake_if_and_only_if_an_engine_lists_it(engines: list[Stub], aliases: set[str]) -> None:
    listed = {alias for alias in aliases for one in map(_listing, engines) if one and one.get(alias) is not None}
    found = namesakes(aliases, engines)
    assert found.keys() == listed
    assert all(one.listing is not None and one.listing.get(alias) is not None for alias, one in found.items())
    bases = namesakes(aliases, engines, of_bases=True)
    assert bases.keys() == {alias for alias in aliases for one in map(_listing, engines) if one and alias in one.bases}


def _listing(engine: Stub) -> Listing | None:
    return engine.listing
