"""The admissions of one router: one for each role that prefills, and one of each for every base model.

all decode engines list one base model    the shared ones, for all requests
they list several                         those of the request's model: a crowd that wants one model keeps no
                                          request waiting for the engines of another
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Generic, TypeAlias

from pdcluster_protocol.labels import Role
from pdcluster_router.core.clients.admission import Admission
from pdcluster_router.core.clients.fair_queue import Waiter

MAX_MODELS: Final = 256
"""The most models that have their own. They are kept for good, for a request may wait there; engines of further models
share."""

ByRole: TypeAlias = Mapping[Role, Admission[Waiter]]


class ModelAdmissions(Generic[Waiter]):
    """All admissions of one router. One owner."""

    def __init__(self, new: Callable[[], Admission[Waiter]]) -> None:
        """``new``: makes one, with the limits that hold when it is called."""
        self._new = new
        self.shared: dict[Role, Admission[Waiter]] = {role: new() for role in Role}
        self._by_model: dict[str, ByRole[Waiter]] = {}

    def __iter__(self) -> Iterator[Admission[Waiter]]:
        return (admission for pair in (self.shared, *self._by_model.values()) for admission in pair.values())

    def of(self, model: str) -> ByRole[Waiter]:
        """The admissions for requests for this base model, made if it has none; empty: the shared ones."""
        if (found := self.find(model)) is not None:
            return found
        if len(self._by_model) >= MAX_MODELS:
            return self.shared
        pair = self._by_model[model] = {role: self._new() for role in Role}
        return pair

    def find(self, model: str) -> ByRole[Waiter] | None:
        """The same; None: it has none."""
        return self._by_model.get(model) if model else self.shared

    def sum_of(self, role: Role, number: Callable[[Admission[Waiter]], int]) -> int:
        """The sum of a number over all admissions for engines of ``role``."""
        return sum(number(pair[role]) for pair in (self.shared, *self._by_model.values()))

    def set_engines(self, num_all: Mapping[Role, int], num_of: Mapping[str, Mapping[Role, int]]) -> None:
        """Sets the limits for so many usable engines. ``num_of``: of each model that has its own."""
        for role, admission in self.shared.items():
            admission.set_engines(num_all[role])
        for model in num_of:
            self.of(model)
        for model, pair in self._by_model.items():
            for role, admission in pair.items():
                admission.set_engines(num_of.get(model, {}).get(role, 0))
