"""The metaserver calls of one transfer: they bring decode's reservation and stay open until the outcome is known.

vLLM may submit a request twice with the same transfer parameters, so several calls can wait for one decision.
"""

from __future__ import annotations

from typing import Protocol

from pdcluster_protocol.metaserver import Outcome, encode_outcome, failed
from pdcluster_protocol.params import Reservation
from pdcluster_router.cycle import HotCycle


class ReservationOwner(Protocol):
    def reservation_lost(self) -> None:
        """Decode has hung up on every call before the outcome was known."""
        ...


class ReservationCalls:
    """One transfer's reservation and who waits for its outcome. Owned by the exchange."""

    __slots__ = ("_outcome", "_owner", "_waiters", "reservation")

    def __init__(self, owner: ReservationOwner) -> None:
        self.reservation: Reservation | None = None
        self._owner = owner
        self._outcome: Outcome | None = None
        self._waiters: list[_Waiter] = []

    def join(self, reservation: Reservation, cycle: HotCycle) -> Outcome | None:
        """The outcome if it is known; None: ``cycle`` waits for it.

        Another reservation than the first is refused: nobody would fill its blocks.
        """
        if self.reservation is not None and reservation != self.reservation:
            return failed("this transfer has another reservation already")
        self.reservation = reservation
        if self._outcome is None:
            self._waiters.append(_Waiter(self, cycle))
        return self._outcome

    def reply(self, outcome: Outcome) -> None:
        """The outcome is known, once and for all; whoever waits gets it."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        waiters, self._waiters = self._waiters, []
        body = encode_outcome(outcome)
        for waiter in waiters:
            waiter.cycle.answer(200, body)

    def gone(self, waiter: _Waiter) -> None:
        """One call was cut off by decode."""
        self._waiters.remove(waiter)
        if not self._waiters and self._outcome is None:
            self._outcome = failed("decode hung up on the metaserver")
            self._owner.reservation_lost()


class _Waiter:
    """One open call."""

    __slots__ = ("_calls", "cycle")

    def __init__(self, calls: ReservationCalls, cycle: HotCycle) -> None:
        self._calls = calls
        self.cycle = cycle
        cycle.owner = self

    def client_gone(self) -> None:
        self._calls.gone(self)

    def pause(self) -> None:
        """An outcome is one small write: there is nothing to hold back."""

    def resume(self) -> None: ...
