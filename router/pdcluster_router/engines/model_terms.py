"""The terms of requests by the model that they name: which engines may serve them, and by which name.

``core/engines/catalog.py`` decides. A name is looked up when a request has it first, and kept until an engine changes,
so that later requests cost one look into a dictionary. A name that is an alias of this router's is that of its model,
whatever engines list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final
from zlib import crc32

import msgspec

from pdcluster_protocol.labels import Role
from pdcluster_router.core.apis.openai_errors import ApiError, alias_not_found, model_not_found, shown_names
from pdcluster_router.core.apis.rewrite import ClientBody
from pdcluster_router.core.clients.model_admissions import ModelAdmissions
from pdcluster_router.core.engines.catalog import (
    ModelGroup,
    base_names,
    base_of,
    engines_of_base,
    group_for,
    group_unpaired,
    is_adapter,
    is_listed,
    lists_that_differ,
    models_of_decodes,
    served_names,
)
from pdcluster_router.core.engines.placement import decode_tiers, unpaired_tiers, usable_prefills
from pdcluster_router.engines.candidates import Candidates
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.roster import Roster, Terms

_MAX_KNOWN: Final = 1024
"""The most names kept. A client may write one name in many ways: when these are all taken, all are forgotten."""
_MAX_NAME_BYTES: Final = 1024
_MAX_LABEL: Final = 256
"""The most characters of a name that has metrics of its own: vLLM's names are paths at most."""


class ModelTerms:
    """The terms for each model of one router's engines. Event loop only."""

    def __init__(
        self,
        roster: Roster,
        terms: Terms,
        admissions: ModelAdmissions[Any],
        *,
        refuses_unknown: bool,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``terms``: for a request that any engine may serve. ``refuses_unknown``: whether a request for a model that
        no engine lists is refused; else ``terms`` hold for it too. ``aliases``: the model of each.
        """
        self.known: dict[bytes, Terms] = {}
        """By the model's name as JSON. For a name that is not in here, call ``find``."""
        self.unpaired: dict[bytes, Terms] = {}
        """The same for requests that need no prefill engine."""
        self.aliases = aliases
        self.aliases_since_unix_s = 0.0
        """Since when they are these; 0: since the router's start."""
        self._roster = roster
        self._terms = terms
        self._admissions = admissions
        self._refuses_unknown = refuses_unknown

    def apply_settings(
        self, terms: Terms, *, refuses_unknown: bool, aliases: Mapping[str, str], now_unix_s: float
    ) -> None:
        """These hold from now on, as for a new one."""
        if aliases != self.aliases:
            self.aliases_since_unix_s = now_unix_s
        self._terms, self._refuses_unknown, self.aliases = terms, refuses_unknown, aliases
        self.forget()

    def forget(self) -> None:
        """Call it when an engine comes, changes or goes."""
        self.known.clear()
        self.unpaired.clear()

    def find(self, body: ClientBody) -> Terms | None:
        """The terms for this request; None: no engine serves its model, and such requests are refused."""
        name = self.aliases.get(body.model, body.model)
        engines_name = self.name_for_engines(body.model)
        find = group_for if body.needs_pair else group_unpaired
        group = find(name, self._roster.all_engines())
        if group is None:
            self._roster.num_unknown += 1
            return None if self._refuses_unknown else self._any_engine(body, engines_name)
        some = self._roster.whole if group.is_whole else self._roster.candidates_of(group.engines)
        queue = self._admissions.model_of(base_of(group.engines))
        terms = Terms(
            some.place_decode if body.needs_pair else some.place_unpaired,
            some.place_prefill,
            self._terms.retries,
            self._admissions.find(queue) or self._admissions.shared,
            queue,
            has_prefill=group.has_prefill and body.needs_pair,
            engines_name=engines_name,
            model=name if len(name) <= _MAX_LABEL and is_listed(name, group.engines) else "",
            adapter=_adapter_number(name, group),
        )
        self._keep(self.known if body.needs_pair else self.unpaired, bytes(body.model_said), terms)
        return terms

    def _any_engine(self, body: ClientBody, engines_name: bytes) -> Terms:
        """The terms for a model that no engine lists, where engines are asked for it all the same."""
        terms = replace(self._terms, engines_name=engines_name) if engines_name else self._terms
        if body.needs_pair:
            return terms
        return replace(terms, place_decode=self._roster.place_unpaired, has_prefill=False)

    def name_for_engines(self, model: str) -> bytes:
        """The name that engines get in place of the client's ``model``, as JSON; empty: ``model`` is no alias."""
        return msgspec.json.encode(self.aliases[model]) if model in self.aliases else b""

    @property
    def are_several(self) -> bool:
        """Whether decode engines serve different models."""
        return len(lists_that_differ(self._roster.all_engines())) > 1

    def candidates(self, name: str) -> Candidates | None:
        """The engines for a question about this model; None: no engine serves it. A question needs no prefill engine,
        but without a name it is for a model that has a pair."""
        engines = self._roster.all_engines()
        group = (group_unpaired if name else group_for)(self.aliases.get(name, name), engines)
        if group is None and self._refuses_unknown:
            return None
        return self._roster.candidates_of(tuple(engines) if group is None else group.engines)

    def not_found(self, name: str) -> ApiError:
        """The error for a client whose model no engine serves. It tells some of the models that are served."""
        served = shown_names(served_names(self._roster.all_engines(), self.aliases))
        if name in self.aliases:
            return alias_not_found(name, served)
        return model_not_found(name, served)

    def _keep(self, known: dict[bytes, Terms], name: bytes, terms: Terms) -> None:
        if len(name) > _MAX_NAME_BYTES:
            return
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[name] = terms


def size_queues(admissions: ModelAdmissions[Any], roster: Roster) -> None:
    """The engines have changed: each model has the limits for those that its requests may be placed among."""
    engines = roster.all_engines()
    names = base_names(engines, admissions.models)
    models = models_of_decodes(engines, names)
    wanted = admissions.models | (models if len(models) > 1 else frozenset())
    num_decodes = roster.num_usable_decodes or _first_of(unpaired_tiers(engines))
    num_all = {Role.PREFILL: len(usable_prefills(engines)), Role.DECODE: num_decodes}
    admissions.set_engines(
        names, num_all, {model: _num_usable(engines_of_base(model, names, engines)) for model in wanted}
    )


def _num_usable(engines: Sequence[Engine]) -> dict[Role, int]:
    """The engines among these, which are those of one model, that new requests are placed among.

    If no decode engine of a pair has told that it serves the model, those that have told it serve it alone.
    """
    paired = decode_tiers(engines)
    num_decodes = _first_of(paired)
    if not paired or all(engine.listing is None for engine in paired[0]):
        num_decodes = _first_of(unpaired_tiers([one for one in engines if one.listing is not None])) or num_decodes
    return {Role.PREFILL: len(usable_prefills(engines)), Role.DECODE: num_decodes}


def _first_of(tiers: Sequence[Sequence[Engine]]) -> int:
    """How many engines the first tier has."""
    return len(tiers[0]) if tiers else 0


def _adapter_number(name: str, group: ModelGroup[Engine]) -> int | None:
    """The number of an adapter: of its own name, so that its aliases have the same."""
    return crc32(name.encode()) if is_adapter(name, group.engines) else None
