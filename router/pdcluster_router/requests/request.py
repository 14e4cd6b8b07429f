"""A client's request in parsed form, for all later steps; and its share of a backlog."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from pdcluster_protocol.labels import Role
from pdcluster_router.core.apis.client_apis import ClientApi
from pdcluster_router.core.engines.placement import RequestFacts
from pdcluster_router.core.requests.pairing import Timeouts
from pdcluster_router.core.telemetry.request_trace import SampledTrace
from pdcluster_router.engines.roster import Terms
from pdcluster_router.http.gateway import Gateway
from pdcluster_router.services import Services

_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE
"""Module constants: Python 3.11 takes ten times as long to find a member in its Enum."""
TurnsAhead: TypeAlias = tuple[Role, int, int, str]
"""Turns in the queue for engines of this role: the first turn in its ``TurnLog``, and the turn after the last. Then the
queue's base model; empty: the shared one."""
LARGE_BODY_BYTES: Final = 4 << 10
"""A longer body is forgotten once it will not be sent again. That takes 1 us, and 2 us for its reservation; the scan
of so many bytes took 5 us. A stream forgets a small body too, for it may last: with its reservation 3 KB."""


class ClientRequest(RequestFacts, frozen=True, kw_only=True):
    """A client's request."""

    request_id: str
    client_address: str = ""
    """Empty if the router has no access log."""
    trace_id: str = ""
    """The id in its ``traceparent``, or the one that its spans have; empty: it has neither."""
    api: ClientApi
    """The API of its path."""
    timeouts: Timeouts
    terms: Terms
    has_transfer: bool
    """Whether a prefill engine shall compute the prompt; False: decode computes it."""
    trace: SampledTrace | None = None
    """None: it gets no spans."""
    is_part: bool = False
    """Whether it is a part of a client's request (``fan_out.py``): metrics count the whole, not the part."""
    gateway: Gateway | None = None
    """Carries the bytes of request and answer; None: the router does."""
    received_at: float
    """Monotonic seconds. The request's times count from here, also while it waits to enter."""
    read_s: float | None = None
    """Seconds from its first byte to its last one; None: it came from no client."""
    turn_s: float | None = None
    """Seconds from its last byte until it was received; None: it did not wait for its turn."""

    turns_ahead: TurnsAhead | None = None
    """The requests that entered while it waited in the queue; None: it did not wait."""

    @property
    def prefill_role(self) -> Role:
        """The role of the engines that have to prefill the prompt."""
        return _PREFILL if self.has_transfer else _DECODE

    @property
    def deadline(self) -> float:
        """When the request must have gone to decode at the latest, monotonic seconds."""
        return self.received_at + self.timeouts.enter_s

    def without_body(self) -> ClientRequest:
        """The request without headers and body, for the time when it will not be sent again."""
        return msgspec.structs.replace(self, headers=b"", body=self.body.forgotten())


class BacklogShare:
    """One request's share of the backlog of the role that has to prefill it, until the prefill is over.

    Owned by the exchange. ``move(None)`` gives it back.
    """

    __slots__ = ("_admissions", "_num_tokens", "_services", "_taken", "role")

    def __init__(self, services: Services, request: ClientRequest) -> None:
        """The request has entered: it holds its share on the engines that have to prefill it."""
        self._services = services
        self._admissions = request.terms.admissions
        self._num_tokens = request.body.estimated_prompt_tokens
        self.role: Role | None = request.prefill_role
        """The role that has to prefill the request; None: no role has. ``move`` changes it."""
        self._taken = self._admissions[self.role].share_of(self._num_tokens)

    def recount(self, num_tokens: int) -> None:
        """Exactly ``num_tokens`` are to be prefilled."""
        self._num_tokens = num_tokens
        if self.role is not None:
            admission = self._admissions[self.role]
            before, self._taken = self._taken, admission.share_of(num_tokens)
            if admission.give_back(before - self._taken):
                self._services.make_room()

    def move(self, role: Role | None) -> None:
        """The request is work for engines of ``role`` from now on."""
        if self.role is not None and self._admissions[self.role].give_back(self._taken):
            self._services.make_room()
        self.role = role
        if role is not None:
            admission = self._admissions[role]
            self._taken = admission.share_of(self._num_tokens)
            admission.take_again(self._taken)
