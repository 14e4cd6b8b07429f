"""The engines that may serve a request for a model: prefill and decode have the same model and adapter.

    name --each engine's list--> what it is there: a name of the base model, or an adapter, its parent and its place
         --engines that say the same of it--> a model group: any prefill engine may push to any decode engine of it

Mostly, all engines of a pool say the same: then a request goes to any of them. ``placement.py`` sorts the engines of
such a group as it sorts those of a whole pool. Decides from lists and states alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.listing import BASE, Identity, Listing
from pdcluster_router.core.engines.membership import EngineState
from pdcluster_router.core.engines.placement import Standing, serving_revisions

MOST_SHOWN: Final = 20
"""The most names that an error tells."""


class SaysModels(Standing, Protocol):
    """An engine that may have said which models it serves."""

    @property
    def listing(self) -> Listing | None:
        """None: the engine has not said which, and may serve any. Engines that say the same have the same object."""
        ...


E = TypeVar("E", bound=SaysModels)


class ModelGroup(msgspec.Struct, Generic[E], frozen=True):
    """The engines among which a request may be placed."""

    engines: tuple[E, ...]
    """With ``has_prefill`` False, prefill engines are here only because a revision needs some to be used."""
    is_whole: bool = False
    """Whether these are all engines of the pool."""
    has_prefill: bool = True
    """Whether a prefill engine serves the model; False: decode computes the prompts itself."""


def group_for(name: str, engines: Sequence[E]) -> ModelGroup[E] | None:
    """The engines for a request for the model ``name``; empty: it names no model. None: no engine serves the model."""
    present = [engine for engine in engines if engine.state is not EngineState.LEAVING]
    listings = _listings_of(present)
    if not listings or not name:
        return _group_of_default(present, listings)
    known = [listing for listing in listings if listing.get(name) is not None]
    if not known:
        return _group_of_silent(present)
    return _whole(present) if len(listings) == 1 else _best_group(name, known, present)


def group_unpaired(name: str, engines: Sequence[E]) -> ModelGroup[E] | None:
    """As ``group_for``, for a request that needs no prefill engine. One that names no model is for the first model that
    decode engines alone serve, if they serve one. Engines without a list are left out while a healthy one has told that
    it serves the model."""
    name = name or _unpaired_base(engines)
    if not _is_served(name, engines):
        return group_for(name, engines)
    telling = [engine for engine in engines if engine.listing is not None]
    group = group_for(name, telling)
    return msgspec.structs.replace(group, is_whole=group.is_whole and len(telling) == len(engines)) if group else None


def group_again(name: str, then: Sequence[Listing], engines: Sequence[E]) -> ModelGroup[E] | None:
    """The engines for the next step of a request for ``name``, since engines say other things than when it came.

    Its first engine was chosen for what the name was: an engine on which the name is another thing now may not follow.
    ``then``: what engines said when it came, the first decode engine's list first. None: no engine is left.
    """
    name = name or (then[0].bases[0] if then else "")
    was = next((identity for listing in then if (identity := listing.get(name)) is not None), None)
    if was is None:
        return group_for(name, engines)  # No engine had said what it is.
    present = [engine for engine in engines if engine.state is not EngineState.LEAVING]
    listings = _listings_of(present)
    if not any(listing.get(name) == was for listing in listings):
        return None if listings else _whole(present)
    if len(listings) == 1:
        return _whole(present)
    return _group_of(was, [engine for engine in present if engine.listing and engine.listing.get(name) == was], present)


def lists_of(engines: Sequence[SaysModels]) -> list[Listing]:
    """The lists that differ, those of decode engines first. Engines that leave count: they may still have requests."""
    return _listings_of(sorted(engines, key=lambda engine: engine.role is not Role.DECODE))


def lists_that_differ(engines: Sequence[E]) -> list[list[E]]:
    """The decode engines with a list, sorted by it: one element for each different list, in the order of
    ``engines``."""
    decodes = [engine for engine in engines if engine.role is Role.DECODE and engine.listing is not None]
    same: dict[int, list[E]] = {}
    for engine in decodes:
        same.setdefault(id(engine.listing), []).append(engine)
    return list(same.values())


def base_names(engines: Sequence[SaysModels], kept: Collection[str]) -> dict[str, str]:
    """Each name of a base model that engines list, and the one name that stands for all names of that model.

    Names that one engine lists are of one model. One of ``kept`` stands for it, else the first of the alphabet.
    """
    models: list[set[str]] = []
    for listing in _listings_of(engines):
        names = set(listing.bases)
        same = [one for one in models if one & names]
        models = [one for one in models if not one & names] + [names.union(*same)]
    return {name: min(names & set(kept) or names) for names in models for name in names}


def models_of_decodes(engines: Sequence[SaysModels], names: Mapping[str, str]) -> set[str]:
    """The base models that decode engines list. ``names``: of ``base_names``."""
    return {names[listing.bases[0]] for listing in _listings_of([one for one in engines if one.role is Role.DECODE])}


def engines_of_base(model: str, names: Mapping[str, str], engines: Sequence[E]) -> tuple[E, ...]:
    """The engines that requests for this base model may be placed among. ``names``: of ``base_names``."""
    present = [engine for engine in engines if engine.state is not EngineState.LEAVING]
    own = [one for one in present if one.listing is not None and names[one.listing.bases[0]] == model]
    return _group_of(BASE, own, present).engines


def base_of(engines: Sequence[SaysModels]) -> str:
    """The first name of the base model that these decode engines list; empty: none tells it."""
    listings = _listings_of([engine for engine in engines if engine.role is Role.DECODE])
    return listings[0].bases[0] if listings else ""


def served_names(engines: Sequence[SaysModels], aliases: Mapping[str, str]) -> list[str]:
    """The names of base models that decode engines serve, and the aliases of models that they serve.

    ``MOST_SHOWN`` at most, for an error worded as vLLM's own. ``aliases``: the model of each.
    """
    listings = _listings_of([engine for engine in engines if engine.role is Role.DECODE])
    names = dict.fromkeys(name for listing in listings for name in listing.bases[:MOST_SHOWN])
    served = (alias for alias, model in aliases.items() if any(listing.get(model) for listing in listings))
    return list(dict.fromkeys([*names, *served]))[:MOST_SHOWN]


def is_adapter(name: str, engines: Sequence[SaysModels]) -> bool:
    """Whether ``name`` is an adapter on these engines, which are those of a model group."""
    return any(listing.get(name) not in (None, BASE) for listing in _listings_of(engines))


def is_listed(name: str, engines: Sequence[SaysModels]) -> bool:
    """Whether one of these engines says that it serves ``name``. Engines that say nothing may serve any."""
    return any(listing.get(name) is not None for listing in _listings_of(engines))


def namesakes(aliases: Collection[str], engines: Sequence[E], *, of_bases: bool = False) -> dict[str, E]:
    """Each alias that an engine serves as a model of its own, and the first such engine. ``of_bases``: looks at names
    of base models only."""
    found: dict[str, E] = {}
    for engine in engines:
        listing = engine.listing
        if listing is not None:
            names = [one for one in aliases if (one in listing.bases if of_bases else listing.get(one) is not None)]
            found = dict.fromkeys(names, engine) | found
    return found


def _group_of_default(present: list[E], listings: list[Listing]) -> ModelGroup[E]:
    """For a request that names no model. vLLM then takes its first model; the router takes that of the first decode
    engine whose model a prefill engine serves too."""
    if len(listings) > 1:
        decodes = [engine for engine in present if engine.role is Role.DECODE]
        for name in [listing.bases[0] for listing in _listings_of(decodes) or listings[:1]]:
            known = [listing for listing in listings if listing.get(name) is not None]
            group = _best_group(name, known, present)
            if group.has_prefill and _has(group.engines, Role.PREFILL):
                return group
    return _whole(present)  # Engines that name one model differently may serve it: the connectors compare it.


def _unpaired_base(engines: Sequence[SaysModels]) -> str:
    """The first base model of a decode engine that no prefill engine lists; empty: there is none.

    A prefill engine without a list may serve what the decode engines of its revision do: theirs come last.
    """
    present = [engine for engine in engines if engine.state is not EngineState.LEAVING]
    prefills = [engine for engine in present if engine.role is Role.PREFILL]
    doubtful = {engine.revision for engine in prefills if engine.listing is None}
    decodes = [engine for engine in present if engine.role is Role.DECODE]
    alone = _listings_of(sorted(decodes, key=lambda engine: engine.revision in doubtful))
    paired = _listings_of(prefills)
    names = [one.bases[0] for one in alone]
    return next((name for name in names if all(listing.get(name) is None for listing in paired)), "")


def _is_served(name: str, engines: Sequence[SaysModels]) -> bool:
    """Whether a decode engine that may get requests now says that it serves ``name``."""
    serving = [one for one in engines if one.state is EngineState.SERVING and one.is_healthy]
    return bool(name) and is_listed(name, [engine for engine in serving if engine.role is Role.DECODE])


def _group_of_silent(present: list[E]) -> ModelGroup[E] | None:
    """The healthy engines without a list, if a decode engine is among them: each may serve any model."""
    silent = [engine for engine in present if engine.listing is None and engine.is_healthy]
    return _group(silent, present) if _has(silent, Role.DECODE) else None


def _best_group(name: str, known: list[Listing], present: list[E]) -> ModelGroup[E]:
    """The engines on which ``name`` has one identity: of several identities, the one that can be served best now."""
    groups: dict[Identity, list[E]] = {}
    numbers = {id(listing): listing.get(name) for listing in known}
    for engine in present:
        identity = numbers.get(id(engine.listing))
        if identity is not None:
            groups.setdefault(identity, []).append(engine)
    best = max(sorted(groups), key=lambda identity: _worth(groups[identity]))
    return _group_of(best, groups[best], present)


def _worth(engines: list[E]) -> tuple[bool, ...]:
    """How well a group can serve a request, as a sort key."""
    serving = [engine for engine in engines if engine.state is EngineState.SERVING]
    well = [engine for engine in serving if engine.is_healthy]
    once_ready = [engine for engine in engines if engine.state.was_ready]
    answering = [engine for engine in once_ready if engine.is_healthy]
    pairs = (bool(serving_revisions(these)) for these in (well, answering, serving, once_ready))
    return (*pairs, *(_has(these, Role.DECODE) for these in (well, serving, engines)))


def _group_of(identity: Identity, engines: list[E], present: list[E]) -> ModelGroup[E]:
    """A base model that no prefill engine serves is a mistake in somebody's settings: then no engine can be used.

    If no healthy pair lists the model, engines without a list may serve it, unless a healthy engine of their role and
    revision lists it: the connectors compare base models.
    """
    if identity != BASE:
        return _group(engines, present)
    well = [engine for engine in engines if engine.state is EngineState.SERVING and engine.is_healthy]
    if serving_revisions(well):
        return ModelGroup(tuple(engines))
    told = {(engine.role, engine.revision) for engine in well}
    silent = [one for one in present if one.listing is None and (one.role, one.revision) not in told]
    return ModelGroup((*engines, *silent))


def _group(engines: list[E], present: list[E]) -> ModelGroup[E]:
    """An adapter that no prefill engine has may be on its way: decode computes its prompts."""
    if _has(engines, Role.PREFILL):
        return ModelGroup(tuple(engines))
    prefills = [engine for engine in present if engine.role is Role.PREFILL]
    return ModelGroup((*prefills, *engines), has_prefill=False)


def _whole(present: list[E]) -> ModelGroup[E]:
    return ModelGroup(tuple(present), is_whole=True)


def _has(engines: Sequence[E], role: Role) -> bool:
    return any(engine.role is role for engine in engines)


def _listings_of(engines: Sequence[SaysModels]) -> list[Listing]:
    """The lists that differ, in the order of the engines."""
    return list({id(engine.listing): engine.listing for engine in engines if engine.listing is not None}.values())
