"""The way from a lane to its decode rank's memory: the session, the steps in progress, the writes in flight.

The orders of steps wait in a backlog until the way is open: the decode rank has said ``Welcome``, and our session is
open. Closing is final: the next request for this decode rank gets a new lane.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container
from typing import Final

from pdcluster_connector.core.sending import PushKey, SendingCommands
from pdcluster_connector.device import Device
from pdcluster_connector.reshard import ReshardFailed, StepRead, StripGatherer
from pdcluster_connector.settings import CLOSE_S
from pdcluster_connector.transport.base import Transport
from pdcluster_connector.transport.sessions import Opening, Sessions, close_within
from pdcluster_connector.worker.batches import Batch
from pdcluster_connector.worker.orders import LayerSaved, Staged, StepBegun, StepEnded, StepOrder, discard
from pdcluster_connector.worker.pushes import LivePush, PushBook
from pdcluster_connector.worker.route import Route, StepPlan
from pdcluster_connector.worker.second_push import plan_again
from pdcluster_connector.worker.writes import WriteQueue
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import Again, Failed

_LEAVE_S: Final = 1.0
"""How long a lane that ends waits for a session that is being opened. A session that opens later is closed then."""


class Outbound:
    """The way of one lane. Lane thread only; only ``close`` waits."""

    def __init__(
        self, book: PushBook, device: Device, lost: Container[PushKey], gatherer: StripGatherer | None = None
    ) -> None:
        """``lost``: pushes whose source vLLM overwrites. ``gatherer``: None where no strips are gathered."""
        self._book = book
        self._device = device
        self._lost = lost
        self._gatherer = gatherer
        self._backlog: deque[StepOrder] = deque()
        self._steps: dict[int, StepPlan] = {}
        self._route: Route | None = None
        self._session = ""
        """Decode's session, to which the bytes go."""
        self._opening: Opening | None = None
        self._transport: Transport | None = None
        self._writes: WriteQueue | None = None
        self.is_closed = False
        """Whether a session that was open was closed: some of its writes may not have been clean."""

    @property
    def is_open(self) -> bool:
        """Whether the decode rank's memory can be written to."""
        return self._writes is not None

    @property
    def is_lost(self) -> bool:
        """Whether another lane of this rank has closed the session that they share. Any thread."""
        transport = self._transport
        return transport is not None and not transport.is_open

    @property
    def holds_session(self) -> bool:
        """Whether a session was opened and is not closed. Any thread."""
        return self._transport is not None

    @property
    def has_route(self) -> bool:
        """Whether the decode rank has said ``Welcome``; it stays true after the way is closed."""
        return self._route is not None

    @property
    def next_look_s(self) -> float:
        """Seconds until another look can find something new; infinite while only orders and messages bring news."""
        return self._writes.next_look_s if self._writes is not None and self._writes.is_busy else math.inf

    def open(self, route: Route, session: str, sessions: Sessions, on_end: Callable[[], None]) -> None:
        """Begins to open the way along ``route`` to ``session``. Another thread calls ``on_end``; then call ``enter``.

        Opening may take seconds. Pushes still end by their deadlines meanwhile.

        Raises:
            ConfigError: No thread can be started.
        """
        self._opening = Opening(sessions, on_end)
        self._route, self._session = route, session

    def enter(self) -> bool:
        """Whether the way has opened since the last call. If so, the caller follows the backlog.

        Raises:
            ConfigError: No transport session can be opened here.
        """
        if self._opening is None or (transport := self._opening.take()) is None:
            return False
        self._opening, self._transport = None, transport
        self._writes = WriteQueue(transport, self._device, self._session, self._lost, self._gatherer)
        return True

    def follow_backlog(self, now: float) -> None:
        """Carries out the orders that came before the way was open."""
        while self._backlog:
            self.follow(self._backlog.popleft(), now)

    def drop_backlog(self) -> None:
        """Discards the backlog: the way will not open."""
        while self._backlog:
            discard(self._backlog.popleft())

    def drop_queued(self) -> None:
        """No further write is submitted, and the device is not queried any more."""
        if self._writes is not None:
            self._writes.drop_queued()

    def follow(self, order: StepOrder, now: float) -> None:
        """Carry out an order of a step, or keep it until the way is open."""
        if self._route is None or self._writes is None:
            self._backlog.append(order)
            return
        match order:
            case StepBegun():
                self._steps[order.step] = self._plan(self._route, order)
            case LayerSaved():
                for batch in self._steps[order.step].batches(self._route, order):
                    self._writes.add(batch)
            case Staged():
                self._take_staged(self._writes, self._route, order)
            case ReshardFailed():
                self._give_up_staging(order, now)
            case StepEnded() | StepRead():
                self._end_step(self._route, order)

    def granted(self, live: LivePush) -> None:
        """Writes that were held for the grant of this push may leave."""
        if self._writes is not None:
            self._writes.granted(live.push)

    def push_again(self, again: Again, now: float) -> None:
        """Writes the content that ``again`` names once more, straight from the request's blocks, or tells decode why
        it cannot."""
        key = PushKey(again.transfer_id, again.attempt)
        live = self._book.get(key)
        if live is None or live.push.is_ended:
            reason = "prefill has let go of what decode wants a second time"
            self._book.send(Failed(*key, reason, is_fenced=not self.is_closed))
        elif live.push.may_push_again and self._route and self._writes:
            self._book.apply(live, _begin_again(self._route, self._writes, live, again, now))

    def advance(self, now: float) -> None:
        """Looks at the writes in flight, and submits those that may leave."""
        if self._writes is None:
            return
        for push, commands in self._writes.advance(now=now):
            if commands and (live := self._book.get(push.key)):
                self._book.apply(live, commands)

    def forget_stopped(self) -> None:
        """Drops writes that were held for grants that will not come."""
        if self._writes is not None:
            self._writes.forget_stopped()

    def expire(self, staged_since: float, now: float) -> None:
        """Give up pushes that have held staging memory since ``staged_since`` (monotonic) or longer: others want it."""
        writing = [push.key for push in self._writes.staged_since(staged_since)] if self._writes else []
        for key in (*writing, *self._discard_backlog(staged_since)):
            if live := self._book.get(key):
                reason = "its bytes lay in prefill's staging memory for too long: decode is slow or does not answer"
                self._book.apply(live, live.push.give_up(reason, now=now))

    def is_quiet(self, key: PushKey) -> bool:
        """Whether no byte of this push's source will be read from now on."""
        live = self._book.get(key)
        if live is None:
            return True
        if self._writes is None:
            return live.push.is_ended
        return not live.push.awaits_sums and not self._writes.has_work_of(live.push)

    def close(self) -> bool:
        """Closes the session. Returns whether nothing reads our memory through it any more; if not, the engine ends.

        Waits for Mooncake, about a second. Where pushes wait for it the engine also ends if it takes ``CLOSE_S``.
        """
        self.drop_backlog()
        writes, self._writes = self._writes, None
        opening, self._opening = self._opening, None
        limit_s = CLOSE_S if len(self._book) else math.inf
        if opening is not None:
            opening.close(_LEAVE_S, limit_s)
        if self._transport is not None:
            self.is_closed = True
            if not close_within(self._transport, limit_s):
                return False
            self._transport = None
        if writes is not None:
            writes.close()
        return True

    def _discard_backlog(self, staged_since: float) -> list[PushKey]:
        """Discards parts that have waited for the way since ``staged_since``. Returns their pushes, some twice."""
        backlog, self._backlog = self._backlog, deque()
        keys: list[PushKey] = []
        for order in backlog:
            if isinstance(order, Staged) and order.at <= staged_since:
                discard(order)
                keys += [write.key for write in order.writes]
            else:
                self._backlog.append(order)
        return keys

    def _take_staged(self, writes: WriteQueue, route: Route, order: Staged) -> None:
        """Queues the parts. Parts of a step that is over are dropped."""
        plan = self._steps.get(order.step)
        if plan is None:
            discard(order)
        else:
            writes.add(plan.staged_batch(route, order))

    def _give_up_staging(self, order: ReshardFailed, now: float) -> None:
        """Gives up the step's pushes from staging memory. A lane without staged regions has none, and gets the order
        too; its step may be over."""
        plan = self._steps.get(order.step)
        for live in plan.staging_pushes if plan else ():
            self._book.apply(live, live.push.give_up(order.reason, now=now))

    def _end_step(self, route: Route, order: StepEnded | StepRead) -> None:
        """Ends the step if ``order`` is its last: ``StepRead`` on a route with staged regions, else ``StepEnded``."""
        if isinstance(order, route.last_order):
            for live, commands in self._steps.pop(order.step).read(route):
                self._book.apply(live, commands)

    def _plan(self, route: Route, order: StepBegun) -> StepPlan:
        plan = StepPlan(order.step)
        for part in order.slices:
            live = self._book.get(PushKey(part.transfer_id, part.attempt))
            if live is not None and not live.push.is_ended:
                self._book.apply(live, plan.add(route, live, part, now=order.at))
        return plan


def _begin_again(route: Route, writes: WriteQueue, live: LivePush, again: Again, now: float) -> SendingCommands:
    try:
        parts = plan_again(route, live, again, now=now)
    except ProtocolError as error:
        return live.push.refuse_again(str(error))
    writes.add(Batch(None, parts))
    return live.push.again(sum(part.ranges.total_bytes for part in parts), now=now)
