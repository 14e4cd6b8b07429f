"""One request's share of a backlog: it counts where it is to be prefilled, for as long as it is. Decides nothing."""

from __future__ import annotations

from pdcluster_protocol.labels import Role
from pdcluster_router.services import Services


class BacklogShare:
    """Owned by the exchange. ``move(None)`` gives it back."""

    __slots__ = ("_num_tokens", "_services", "_taken", "role")

    def __init__(self, services: Services, role: Role, num_tokens: int) -> None:
        """The request has entered: it holds its share for ``num_tokens`` on the engines of ``role``."""
        self._services = services
        self._num_tokens = num_tokens
        self.role: Role | None = role
        """The role whose work the request is; None: no role's. ``move`` changes it."""
        self._taken = services.admissions[role].share_of(num_tokens)

    def recount(self, num_tokens: int) -> None:
        """So many tokens are to be prefilled, exactly."""
        self._num_tokens = num_tokens
        if self.role is not None:
            before, self._taken = self._taken, self._services.admissions[self.role].share_of(num_tokens)
            self._services.give_back(self.role, before - self._taken)

    def move(self, role: Role | None) -> None:
        """The request is work for engines of ``role`` from now on."""
        if self.role is not None:
            self._services.give_back(self.role, self._taken)
        self.role = role
        if role is not None:
            admission = self._services.admissions[role]
            self._taken = admission.share_of(self._num_tokens)
            admission.take_again(self._taken)
