"""Each base model has an admission for each role that prefills.

    all decode engines list one base model    the shared ones, for all requests
    they list several                         those of the request's model: however many requests want one model, they
                                              keep no request waiting for the engines of another

A model that has its own keeps them, also when it is the only one again: what waits there is served in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
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
        self._names: Mapping[str, str] = MappingProxyType({})

    def __iter__(self) -> Iterator[Admission[Waiter]]:
        return (admission for pair in (self.shared, *self._by_model.values()) for admission in pair.values())

    @property
    def models(self) -> frozenset[str]:
        """The base models that have their own."""
        return frozenset(self._by_model)

    def model_of(self, base: str) -> str:
        """The model in whose queue requests for this base model wait; empty: in the shared one. ``base``: any name of
        it."""
        model = self._names.get(base, "")
        return model if model in self._by_model else ""

    def find(self, model: str) -> ByRole[Waiter] | None:
        """The admissions of a model that has its own; empty: the shared ones. None: it has none."""
        return self._by_model.get(model) if model else self.shared

    def lengths(self) -> Iterator[tuple[str, int]]:
        """How many requests wait for each model that has its own."""
        for model, pair in self._by_model.items():
            yield model, sum(admission.num_queued for admission in pair.values())

    def sum_of(self, role: Role, number: Callable[[Admission[Waiter]], int]) -> int:
        """The sum of a number over all admissions for engines of ``role``."""
        return sum(number(pair[role]) for pair in (self.shared, *self._by_model.values()))

    def set_engines(
        self, names: Mapping[str, str], num_all: Mapping[Role, int], num_of: Mapping[str, Mapping[Role, int]]
    ) -> None:
        """The engines have changed. ``names``: for each name of a base model the one that stands for it. ``num_all``:
        how many engines are usable; ``num_of``: for each model that has, or shall have, its own."""
        self._names = names
        for role, admission in self.shared.items():
            admission.set_engines(num_all[role])
        for model, numbers in num_of.items():
            if model not in self._by_model and len(self._by_model) < MAX_MODELS:
                self._by_model[model] = {role: self._new() for role in Role}
            for role, admission in self._by_model.get(model, {}).items():
                admission.set_engines(numbers[role])
