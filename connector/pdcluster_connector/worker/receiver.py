"""The receiver: the worker half of a decode engine, and the one thread of a rank that talks to prefill ranks.

It owns the listening socket, the sessions of the prefill engines and the state of every receive. The forward
thread hands it the scheduler's announcements and takes its results; both threads only touch deques. The receiver counts
running time: time while the process was stopped does not count.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.core.adapters import UnknownContent
from pdcluster_connector.core.clock import RunningClock, deadline_after
from pdcluster_connector.core.receiving import CutSession, Reply, Report
from pdcluster_connector.core.reception import (
    Compare,
    Differs,
    Ended,
    Expected,
    Invite,
    Lost,
    Reception,
    ReceptionCommand,
)
from pdcluster_connector.device import Device
from pdcluster_connector.ending import left_s
from pdcluster_connector.failures import RECEIVES_DONE, TransferFailure, count, log_failure
from pdcluster_connector.settings import CLOSE_S, CUT_S
from pdcluster_connector.side_channel import DecodeChannel, Received, Wakeup
from pdcluster_connector.steps import Cancel, DecodeStep, PrefillEnded
from pdcluster_connector.trace import Trace
from pdcluster_connector.worker.content_sums import KvReader, ReceiveSums
from pdcluster_connector.worker.first_steps import FirstStepJudge
from pdcluster_connector.worker.held_news import HeldNews, News, RequestAdapter
from pdcluster_connector.worker.inbound import InboundSessions, Opened
from pdcluster_protocol.errors import ConfigError, ProtocolError
from pdcluster_protocol.ids import RequestId, TransferId
from pdcluster_protocol.side_channel import Refusal
from pdcluster_protocol.trace import ReceiveTrace

_LOG: Final = logging.getLogger("vllm.pdcluster.receiver")
_EXPIRE_EVERY_S: Final = 0.02
"""How late a deadline may be acted on."""
_IDLE_S: Final = 1.0
MAX_WORK_S: Final = 0.25
"""The most running time that is counted for a turn beyond its wait: in a longer turn the process was stopped. The
bound is below a lease: after a stop, the renewals in the socket are heard before a lease can lapse."""
_MAX_FRAMES_PER_TURN: Final = 1000
"""Frames answered before deadlines and announcements are looked at again: a flood delays them by milliseconds."""
_MAX_BYTES_PER_TURN: Final = 8 << 20
"""The same for bytes: a frame is hashed whole before it is refused, 8 MiB in about 16 ms."""


@dataclass(frozen=True, slots=True)
class Receipts:
    """Requests whose wait ended, each named once; ``failed`` is part of ``ended``."""

    ended: set[RequestId] = field(default_factory=set)
    failed: set[RequestId] = field(default_factory=set)


def frames_of_a_turn(receive: Callable[[], Received | None]) -> Iterator[Received]:
    """The frames to answer in one turn of the receiver. Others stay in the socket until the next turn, which does not
    wait."""
    num_bytes = 0
    for _ in range(_MAX_FRAMES_PER_TURN):
        received = receive()
        if received is None:
            return
        yield received
        num_bytes += received.num_bytes
        if num_bytes >= _MAX_BYTES_PER_TURN:
            return


class Receiver:
    """Serves one decode rank. Forward thread only; nothing but ``close`` waits."""

    def __init__(
        self,
        channel: DecodeChannel,
        wakeup: Wakeup,
        reception: Reception,
        sessions: InboundSessions,
        trace: Trace,
        device: Device,
        reader: KvReader | None = None,
        adapters: AdapterLoads | None = None,
    ) -> None:
        """``reader``: of the rank's own KV; None where no content can be compared. ``adapters``: the rank's LoRA
        adapters; None: its engine has none."""
        self._channel = channel
        self._wakeup = wakeup
        self._reception = reception
        self._sessions = sessions
        self._clock = RunningClock(time.monotonic())
        self._trace = trace
        self._device = device
        self._sums = ReceiveSums(reader, device)
        self._inbox: deque[tuple[News, float]] = deque()
        self._held = HeldNews(adapters)
        self._due: deque[tuple[News, float]] = deque()
        self._first_steps = FirstStepJudge(adapters)
        self._results: deque[tuple[Ended, RequestAdapter | None]] = deque()
        self._losses: deque[Lost] = deque()
        self._expected_at: dict[RequestId, tuple[TransferId, float]] = {}
        self._next_expiry = 0.0
        self._has_entered = self._is_warned = False
        """Whether the thread has entered the device, and whether it has logged that it could not."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._main, name="pdcluster-receiver", daemon=True)
        self._thread.start()

    def begin_step(self, step: DecodeStep) -> None:
        """Tells the receiver thread of requests that were reserved or cancelled, and of prefills that have ended."""
        self._first_steps.begin_step(step)
        news: tuple[News, ...] = (*step.expects, *step.ended, *step.cancels)
        if news:
            now = time.monotonic()
            self._inbox.extend((item, now) for item in news)
            self._wakeup.set()

    def receipts(self) -> Receipts:
        """The requests whose wait ended since the last call."""
        receipts = Receipts()
        while self._results:
            end, adapter = self._results.popleft()
            receipts.ended.add(end.request_id)
            if not end.report.is_received:
                receipts.failed.add(end.request_id)
            self._first_steps.ended(end.request_id, adapter, is_received=end.report.is_received)
        return receipts

    def foreign_blocks(self) -> set[int]:
        """A block of each request whose first step, which has just run, read another LoRA adapter than its KV is of."""
        return self._first_steps.take_foreign_blocks()

    def losses(self) -> list[Lost]:
        """Attempts that this rank has given up since the last call."""
        losses = []
        while self._losses:
            losses.append(self._losses.popleft())
        return losses

    def close(self, deadline: float) -> bool:
        """End the thread, close the socket and cut every session. Returns whether no byte can land any more.

        Waits until ``deadline`` (monotonic seconds), of which the last 4 s are for the sessions alone.
        """
        self._is_closing = True
        self._wakeup.set()
        self._thread.join(left_s(deadline - 2 * CUT_S))
        are_closed = self._sessions.close(deadline)
        if self._thread.is_alive():
            return False
        self._wakeup.close()
        return are_closed

    # Everything below runs in the receiver thread.

    def _main(self) -> None:
        with self._channel:
            while not self._is_closing:
                try:
                    self._enter_device()
                    self._turn()
                except Exception:  # noqa: BLE001
                    # Top of a thread. One bad message must not stop the others; its request ends by its deadline.
                    _LOG.exception("receiver failed on one event")

    def _enter_device(self) -> None:
        """Enters the device, or tries again at the next turn. The thread goes on without it: only this thread ends the
        waits of requests."""
        if self._has_entered:
            return
        try:
            self._device.enter_thread()
            self._has_entered = True
        except Exception as error:  # noqa: BLE001  # whatever the device's library raises
            if not self._is_warned:
                _LOG.error("receiver without its device reason=%s", error)
            self._is_warned = True

    def _turn(self) -> None:
        wait_s = _EXPIRE_EVERY_S if self._reception.num_waiting or len(self._held) else _IDLE_S
        self._channel.wait(0 if self._sums.is_busy or self._due else wait_s)
        now = self._clock.read(time.monotonic(), max_step_s=wait_s + MAX_WORK_S)
        self._due.extend(self._held.due(self._take_inbox(), now))
        while self._due:  # An error costs one of them: the next turn goes on with the others.
            self._on_news(*self._due.popleft(), now)
        for opened in self._sessions.take_opened(now=now):
            self._welcome(opened, now)
        for session in self._sessions.take_closed(now=now):
            self._do(self._reception.cut(session, now=now), now)
        self._receive_all(now)
        self._sum_up(now)
        if now >= self._next_expiry:
            self._next_expiry = now + _EXPIRE_EVERY_S
            self._do(self._reception.expire(now=now), now)

    def _take_inbox(self) -> Iterator[tuple[News, float]]:
        while self._inbox:
            yield self._inbox.popleft()

    def _receive_all(self, now: float) -> None:
        for received in frames_of_a_turn(self._channel.receive):
            if isinstance(received.message, ProtocolError):
                self._channel.send(received.peer, Refusal(str(received.message)))
            else:
                self._do(self._reception.hear(received.peer, received.message, now=now), now)

    def _sum_up(self, now: float) -> None:
        transfer = self._sums.next_transfer
        try:
            found = self._sums.advance()
        except Exception as error:  # noqa: BLE001  # whatever the device's library raises; it costs one request
            # The transfer stays the next one until its wait has ended. Its sums are not used.
            assert transfer is not None, "sums of no transfer"
            self._cannot_read(transfer, str(error), now)
        else:
            if found is not None:
                self._do(self._reception.summed_up(*found, now=now), now)

    def _compare(self, compare: Compare, now: float) -> None:
        why = "it has no tensors of it"
        try:
            is_begun = self._sums.start(compare.transfer_id, compare.attempt, has_draft=compare.has_draft)
        except Exception as error:  # noqa: BLE001  # whatever the device's library raises; it costs one request
            is_begun, why = False, str(error)
        if not is_begun:
            self._cannot_read(compare.transfer_id, why, now)

    def _cannot_read(self, transfer: TransferId, why: str, now: float) -> None:
        reason = f"this decode rank cannot read its own KV, so that its content cannot be compared: {why}"
        self._do(self._reception.fail(transfer, reason, now=now), now)

    def _on_news(self, news: News, announced_at: float, now: float) -> None:
        if isinstance(news, Cancel):
            self._do(self._reception.cancel(news.request_id, news.reason, now=now), now)
            return
        if isinstance(news, PrefillEnded):
            self._do(self._reception.prefill_ended(news.request_id, news.attempt, now=now), now)
            return
        self._expected_at[news.request_id] = (news.transfer_id, announced_at)
        deadline = deadline_after(news.deadline_ms, now=now)
        self._sums.expect(news.transfer_id, news.content)
        adapter = self._held.content(news.request_id)
        expected = Expected(
            news.request_id,
            news.transfer_id,
            deadline,
            news.spans,
            wants_sums=news.content is not None,
            may_push_again=not news.is_proof,
            adapter=None if isinstance(adapter, UnknownContent) else adapter,
        )
        self._do(self._reception.expect(expected, now=now), now)
        if isinstance(adapter, UnknownContent):
            self._do(self._reception.cancel(news.request_id, adapter.reason, now=now), now)

    def _do(self, commands: Iterable[ReceptionCommand], now: float) -> None:
        for command in commands:
            match command:
                case Reply(peer, message):
                    self._channel.send(peer, message)
                case Ended():
                    self._report(command)
                case Invite():
                    self._invite(command, now)
                case Compare():
                    self._compare(command, now)
                case Lost() | Differs():
                    self._log_attempt(command)
                case CutSession():
                    self._cut(command, now)

    def _cut(self, cut: CutSession, now: float) -> None:
        if not cut.is_idle:
            log_failure(TransferFailure.SESSION_CUT, reason="a prefill engine could not say that it had stopped")
        is_waited_for = not cut.is_idle or self._sessions.is_shared
        self._sessions.cut(cut.session, close_by=now + CLOSE_S if is_waited_for else math.inf)

    def _invite(self, invite: Invite, now: float) -> None:
        try:
            session = self._sessions.open(invite.boot_id, invite.peer, now=now)
        except ConfigError as error:
            self._channel.send(invite.peer, Refusal(str(error)))
        else:
            if session is not None:
                self._do(self._reception.invited((invite.peer,), session, now=now), now)

    def _welcome(self, opened: Opened, now: float) -> None:
        """Sends a prefill engine's lanes the session for which they have waited, or the reason why there is none."""
        if opened.session is not None:
            self._do(self._reception.invited(opened.peers, opened.session, now=now), now)
            return
        log_failure(TransferFailure.SESSION_REFUSED, reason=opened.reason)
        for peer in opened.peers:
            self._channel.send(peer, Refusal(opened.reason))

    def _log_attempt(self, news: Lost | Differs) -> None:
        kind = TransferFailure.CONTENT_DIFFERS
        if isinstance(news, Lost):
            self._losses.append(news)
            kind = TransferFailure.ATTEMPT_LOST
        transfer_id, _ = self._expected_at[news.request_id]
        log_failure(kind, news.request_id, transfer_id, news.attempt, news.reason)

    def _report(self, end: Ended) -> None:
        adapter = self._held.take(end.request_id)
        end = self._judged(end, adapter)
        self._results.append((end, adapter))
        request_id, report = end.request_id, end.report
        transfer_id, expected_at = self._expected_at.pop(request_id)
        is_compared = self._sums.forget(transfer_id)
        if report.is_received:
            count(RECEIVES_DONE)
        else:
            log_failure(TransferFailure.RECEIVE_FAILED, request_id, transfer_id, reason=report.reason)
        self._trace.write(
            ReceiveTrace(
                transfer_id=transfer_id,
                request_id=request_id,
                outcome="received" if report.is_received else "failed",
                reason=report.reason,
                is_content_compared=is_compared and report.is_received,
                expected_at=expected_at,
                ended_at=time.monotonic(),
            )
        )

    def _judged(self, end: Ended, adapter: RequestAdapter | None) -> Ended:
        """``end``, or a failure: decode's LoRA adapter is not the one any more with which the KV was computed."""
        if adapter is None or not end.report.is_received or not (change := self._held.change(adapter)):
            return end
        return Ended(end.request_id, Report(is_received=False, reason=change))
