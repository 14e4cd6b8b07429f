"""The terms of requests by the model that they name: which engines may serve them.

``core/engines/catalog.py`` decides. A name is looked up when a request has it first, and kept until an engine changes,
so that later requests cost one look into a dictionary.
"""

from __future__ import annotations

from typing import Final

from pdcluster_router.core.apis.rewrite import ClientBody
from pdcluster_router.core.engines.catalog import group_for, lists_that_differ, served_names
from pdcluster_router.engines.candidates import Candidates
from pdcluster_router.engines.roster import Roster, Terms

_MAX_KNOWN: Final = 1024
"""The most names kept. A client may write one name in many ways: when these are all taken, all are forgotten."""
_MAX_NAME_BYTES: Final = 1024


class ModelTerms:
    """The terms for each model of one router's engines. Event loop only."""

    def __init__(self, roster: Roster, terms: Terms, *, refuses_unknown: bool) -> None:
        """``terms``: for a request that any engine may serve. ``refuses_unknown``: whether a request for a model that
        no engine lists is refused; else ``terms`` hold for it too."""
        self.known: dict[bytes, Terms] = {}
        """By the model's name as JSON. For a name that is not in here, call ``find``."""
        self._roster = roster
        self._terms = terms
        self._refuses_unknown = refuses_unknown

    def forget(self) -> None:
        """Call it when an engine comes, changes or goes."""
        self.known.clear()

    def find(self, body: ClientBody) -> Terms | None:
        """The terms for this request; None: no engine serves its model, and such requests are refused."""
        group = group_for(body.model, self._roster.all_engines())
        if group is None:
            self._roster.num_unknown += 1
            return None if self._refuses_unknown else self._terms
        some = self._roster.whole if group.is_whole else self._roster.candidates_of(group.engines)
        terms = Terms(some.place_decode, some.place_prefill, self._terms.retries, has_prefill=group.has_prefill)
        self._keep(bytes(body.model_said), terms)
        return terms

    @property
    def are_several(self) -> bool:
        """Whether decode engines serve different models."""
        return len(lists_that_differ(self._roster.all_engines())) > 1

    def candidates(self, name: str) -> Candidates | None:
        """The engines for a question about this model; None: no engine serves it."""
        engines = self._roster.all_engines()
        group = group_for(name, engines)
        if group is None and self._refuses_unknown:
            return None
        return self._roster.candidates_of(tuple(engines) if group is None else group.engines)

    @property
    def names(self) -> str:
        """Some of the models that are served, with commas between them, to tell a client."""
        return ", ".join(served_names(self._roster.all_engines()))

    def _keep(self, name: bytes, terms: Terms) -> None:
        if len(name) > _MAX_NAME_BYTES:
            return
        if len(self.known) >= _MAX_KNOWN:
            self.known.clear()
        self.known[name] = terms
