"""A lane: the one thread of a prefill rank that serves one decode rank.

It owns the side channel to that rank, the state of every push to it and the writes in flight, so none of them needs a
lock. Other threads only append orders and wake the lane.

    forward thread, resharder --post(order)--> inbox --> lane thread <--> decode rank
                                                             |
                 a request's blocks are not read any more <--+--> on_release(request id, lane)

The lane writes on a transport session, its own or one that lanes share (``outbound.py``). A write that ends badly, or
not at all, costs that session (``_cut``): only closing it makes sure that our memory is not read. The next request gets
a new lane. A push exists from its first order on, so its deadline also holds while the lane connects."""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from pdcluster_connector.core.clock import deadline_after
from pdcluster_connector.core.sending import Push, PushKey
from pdcluster_connector.failures import TransferFailure, log_failure
from pdcluster_connector.reshard import ReshardFailed, StepRead, StripGatherer
from pdcluster_connector.settings import CUT_S
from pdcluster_connector.side_channel import PrefillChannel, Wakeup, start_polling
from pdcluster_connector.steps import PushSlice
from pdcluster_connector.worker.asking import Asker
from pdcluster_connector.worker.content_sums import PushSums
from pdcluster_connector.worker.lane_context import LaneContext
from pdcluster_connector.worker.orders import (
    Close,
    Forget,
    GiveUp,
    LayerSaved,
    Order,
    Quiesce,
    Staged,
    StepBegun,
    StepEnded,
    StepOrder,
    discard,
)
from pdcluster_connector.worker.outbound import Outbound
from pdcluster_connector.worker.pushes import LivePush, PushBook
from pdcluster_connector.worker.route import plan_route
from pdcluster_protocol.errors import ConfigError, PDClusterError, ProtocolError
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.params import SideChannelAddress
from pdcluster_protocol.side_channel import (
    Again,
    Denial,
    Fenced,
    Grant,
    Refusal,
    Revoke,
    Settled,
    ToDecode,
    ToPrefill,
    Unneeded,
    Welcome,
)

_LOG: Final = logging.getLogger("vllm.pdcluster.lane")
_IDLE_S: Final = 1.0
_EXPIRE_EVERY_S: Final = 0.02
"""How late a deadline may be acted on."""


class Lane:
    """Serves one life of one decode rank. ``post`` and ``close`` may be called by any thread."""

    def __init__(
        self,
        address: SideChannelAddress,
        decode_rank: int,
        context: LaneContext,
        on_release: Callable[[tuple[RequestId, Lane]], None],
    ) -> None:
        self.address = address
        self.lost: set[PushKey] = set()
        """Pushes whose source vLLM overwrites. The forward thread adds; the lane looks before it counts a write."""
        self.decode_rank = decode_rank
        """The decode rank's number among all ranks of its engine."""
        self._context = context
        self._inbox: deque[Order] = deque()
        self._wakeup = Wakeup()
        self._sums = PushSums(context.reader, context.device)
        self._book = PushBook(
            self._send,
            lambda request_id: on_release((request_id, self)),
            self._ask_for_cut,
            context.trace,
            self._sums.ask,
        )
        self._asker = Asker(self._book, address.boot_id, context.adapters)
        gatherer = StripGatherer(context.strips) if context.strips else None
        self._out = Outbound(self._book, context.device, self.lost, gatherer)
        self._quiesces: list[Quiesce] = []
        self._failure = self._cut_reason = ""
        self._closing_at: float | None = None
        self._num_faults = context.device.num_faults
        """How many faults of the device the lane knows. At first: those from before the KV that the lane pushes."""
        self._has_ended = False
        """The thread carries out no further order: a caller that posts one now discards it itself."""
        self._next_expiry = 0.0
        self._channel: PrefillChannel | None = None
        self._thread = threading.Thread(target=self._main, name=f"pdcluster-lane-{decode_rank}", daemon=True)
        start_polling(self._thread, self._wakeup)

    @property
    def is_usable(self) -> bool:
        """Whether new pushes may be posted: the thread runs, with no failure or device fault and no closed session."""
        is_up = self._thread.is_alive() and self._num_faults == self._context.device.num_faults
        return is_up and not self._failure and not self._out.is_lost

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended, and its session is closed: nothing reads our memory by it any more."""
        return not self._thread.is_alive() and not self._out.holds_session

    def post(self, order: Order) -> None:
        """Hand the lane an order. Never waits."""
        self._inbox.append(order)
        self._wakeup.set()
        if self._has_ended:
            self._discard_inbox()

    def retire(self) -> None:
        """The thread ends when every push has ended; each push has its own deadline. Does not wait."""
        self.post(Close(math.inf))

    def close(self, timeout_s: float) -> None:
        """Ends the lane and its thread; cuts pushes that last beyond ``timeout_s``. Waits 2 s more at most."""
        self.post(Close(time.monotonic() + timeout_s))
        self._thread.join(max(0.0, timeout_s + CUT_S))
        if self.is_over:
            self._wakeup.close()

    def _discard_inbox(self) -> None:
        """Let go of orders that the thread will not carry out. Any thread, also several at once."""
        while True:
            try:
                discard(self._inbox.popleft())
            except IndexError:
                return

    # Everything below runs in the lane thread.

    def _main(self) -> None:
        identity = f"{self._context.hello.boot_id}:{self._context.hello.layout.rank}:{uuid.uuid4().hex}".encode()
        try:
            with PrefillChannel(self.address, identity, self._context.secret, self._wakeup) as self._channel:
                self._handshake_by = time.monotonic() + self._context.settings.handshake_timeout_s
                self._channel.send(self._context.hello)
                self._serve(self._channel)
                self._end()
        except zmq.ZMQError as error:
            self._failure = f"prefill cannot reach the side channel of decode rank {self.decode_rank}: {error}"
        finally:
            self._channel = None
            self._end()
            self._has_ended = True
            self._discard_inbox()

    def _serve(self, channel: PrefillChannel) -> None:
        try:
            self._context.device.enter_thread()
        except Exception as error:  # noqa: BLE001  # whatever the device's library raises
            self._fail(f"prefill's lane to decode rank {self.decode_rank} cannot use its device: {error}")
        while not self._may_end:
            try:
                self._turn(channel)
            except Exception as error:  # noqa: BLE001  # top of a thread: it must still see writes in flight end
                self._context.device.note(error)
                if not self._failure:  # A broken device raises at each turn from now on.
                    _LOG.exception("lane failed decode_rank=%d", self.decode_rank)
                self._fail(f"prefill's lane to decode rank {self.decode_rank} failed: {error}")
                time.sleep(_EXPIRE_EVERY_S)

    def _end(self) -> None:
        """The thread ends: its session is closed, and the blocks of its pushes and of late orders are released."""
        self._failure = self._failure or "the lane was closed"
        now = time.monotonic()
        while self._inbox:
            self._on_order(self._inbox.popleft(), now)
        self._cut(self._failure)
        for order in self._quiesces:
            order.quiet.set()

    @property
    def _may_end(self) -> bool:
        closing_at = self._closing_at
        return closing_at is not None and (not len(self._book) or time.monotonic() >= closing_at)

    def _turn(self, channel: PrefillChannel) -> None:
        """One round of the lane. Revokes are heard before anything more is written."""
        self._wait(channel)
        now = time.monotonic()
        self._look_for_faults()
        while self._inbox:
            self._on_order(self._inbox.popleft(), now)
        self._receive_all(channel, now)
        try:
            self._enter(now)
            self._advance(now)
        finally:  # Also if that fails at each turn: blocks come back by a cut then.
            self._expire(now)
            if reason := self._cut_reason:
                log_failure(TransferFailure.SESSION_CLOSED, reason=reason)
                self._cut(reason)

    def _look_for_faults(self) -> None:
        """If the device has reported a fault to any thread, no push of this moment can be trusted."""
        if self._num_faults != (num_faults := self._context.device.num_faults):
            self._fail("prefill's device has failed at something: what it computed or copied meanwhile is not known")
            self._num_faults = num_faults

    def _wait(self, channel: PrefillChannel) -> None:
        idle_s = _EXPIRE_EVERY_S if len(self._book) else _IDLE_S
        channel.wait(0 if self._sums.is_busy else min(idle_s, self._out.next_look_s))

    def _on_order(self, order: Order, now: float) -> None:
        match order:
            case StepBegun():
                self._start_pushes(order, now)
                self._on_step(order, now)
            case LayerSaved() | Staged() | ReshardFailed() | StepEnded() | StepRead():
                self._on_step(order, now)
            case GiveUp(key, reason):
                self._book.give_up(key, reason, now)
            case Forget(key):
                self._book.forget(key)
                self.lost.discard(key)
            case Quiesce():
                self._quiesces.append(order)
            case Close(deadline):
                self._closing_at = deadline

    def _start_pushes(self, order: StepBegun, now: float) -> None:
        for part in order.slices:
            key = PushKey(part.transfer_id, part.attempt)
            if self._book.has_ended(key):
                continue
            live = self._book.get(key) or self._start_push(key, part, order, now)
            self._asker.require_same_load(live, order, now)
            if part.is_last:
                live.last_step, live.content = order.step, part.content
                live.push.wants_sums = part.content is not None

    def _start_push(self, key: PushKey, part: PushSlice, order: StepBegun, now: float) -> LivePush:
        deadline = deadline_after(part.target.deadline_ms, now=now)
        push = Push(key, hold_s=self._context.settings.hold_s, deadline=deadline)
        load = order.adapters.get(part.request_id)
        live = LivePush(push, part.request_id, part.attempt_token, part.num_prompt_tokens, order.at, load)
        live.decode_rank = self.decode_rank
        self._book.add(live)
        if self._failure:
            self._book.apply(live, push.give_up(self._failure, now=now))
        elif self._out.is_open:
            self._asker.ask(live, now)
        return live

    def _on_step(self, order: StepOrder, now: float) -> None:
        if isinstance(order, StepEnded):
            self._book.forward_ended(order.step, order.at)
        if self._failure:
            discard(order)
        else:
            self._out.follow(order, now)

    def _receive_all(self, channel: PrefillChannel, now: float) -> None:
        try:
            while (message := channel.receive()) is not None:
                self._on_message(message, now)
        except ProtocolError as error:
            self._fail(str(error))
        if channel.take_loss():
            which = f"decode rank {self.decode_rank}, boot id {self.address.boot_id},"
            self._fail(f"the connection to {which} was lost: has its engine ended?")

    def _on_message(self, message: ToPrefill, now: float) -> None:
        match message:
            case Welcome():
                self._welcome(message)
            case Refusal(reason):
                self._fail(reason)
            case Again():
                self._out.push_again(message, now)
            case Grant() | Unneeded() | Denial() | Revoke() | Settled():
                self._on_reply(message, now)

    def _on_reply(self, message: Grant | Unneeded | Denial | Revoke | Settled, now: float) -> None:
        key = PushKey(message.transfer_id, message.attempt)
        live = self._book.get(key)
        match message:
            case Revoke():
                self._revoked(key, now)
            case Grant(lease_ms=lease_ms) if live and self._out.is_open:
                self._book.apply(live, live.push.grant(lease_ms / 1000, now=now))
                self._out.granted(live)
            case Unneeded() if live:
                self._book.apply(live, live.push.unneeded())
            case Settled() if live:
                self._book.apply(live, live.push.settled())
            case Denial(reason=reason) if live:
                self._book.apply(live, live.push.give_up(f"decode denied the grant: {reason}", now=now))

    def _revoked(self, key: PushKey, now: float) -> None:
        live = self._book.get(key)
        if live is None:
            # The push has ended and is reported, or never began here. After a cut it is not known whether it was clean:
            # its bytes may still be on their way.
            self._send(Fenced(*key, is_clean=not self._out.is_closed))
        else:
            self._book.apply(live, live.push.revoke(now=now))

    def _send(self, message: ToDecode) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _welcome(self, welcome: Welcome) -> None:
        if self._failure or self._out.has_route:
            return
        try:
            context, boot_id = self._context, self.address.boot_id
            can_reshard, can_gather = context.staging is not None, context.strips is not None
            route = plan_route(welcome, boot_id, context.hello, can_reshard=can_reshard, can_gather=can_gather)
            self._sums.decode_layout = welcome.layout
            self._out.open(route, welcome.session, context.sessions, self._wakeup.set)
        except PDClusterError as error:
            self._fail(str(error))

    def _enter(self, now: float) -> None:
        """If the way to the decode rank has opened, each push asks for its grant, and the backlog is followed."""
        try:
            if self._failure or not self._out.enter():
                return
        except ConfigError as error:
            self._fail(f"prefill: {error}")
            return
        for live in self._book:
            self._asker.ask(live, now)
        self._out.follow_backlog(now)

    def _fail(self, reason: str) -> None:
        """The lane is of no further use: every push is given up, and the next request gets a new lane."""
        if not self._failure and len(self._book):
            log_failure(TransferFailure.LANE_FAILED, reason=reason)
        self._failure = self._failure or reason
        self._out.drop_backlog()
        for live in self._book:
            self._book.apply(live, live.push.give_up(reason, now=time.monotonic()))
        self._out.drop_queued()

    def _ask_for_cut(self, reason: str) -> None:
        self._cut_reason = self._cut_reason or reason

    def _cut(self, reason: str) -> None:
        """Close our session, and end every push that used it."""
        self._failure, self._cut_reason = self._failure or reason, ""
        if not self._out.close():
            return  # Memory that our session may still read is never released: the engine ends.
        now = time.monotonic()
        for live in self._book:
            self._book.apply(live, live.push.cut(reason, now=now))

    def _advance(self, now: float) -> None:
        self._out.advance(now)
        if self._out.is_lost:
            self._ask_for_cut("another lane of this prefill rank has closed the session that they share")
        self._sums.advance(self._book, now)
        for order in list(self._quiesces):
            if self._out.is_quiet(order.key):
                self._book.forgo_second_push(order.key)
                order.quiet.set()
                self._quiesces.remove(order)

    def _expire(self, now: float) -> None:
        if now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRE_EVERY_S
        self._asker.ask_late(now)
        if not self._out.has_route and not self._failure and now >= self._handshake_by:
            self._fail(
                f"decode rank {self.decode_rank} did not answer the handshake within "
                f"{self._context.settings.handshake_timeout_s:g} s: is its engine up and its side channel reachable?"
            )
        for live in self._book:
            self._book.apply(live, live.push.expire(now=now))
        if self._context.staging and self._context.staging.is_wanted:
            self._out.expire(now - self._context.settings.staged_s, now)
        self._out.forget_stopped()
