"""The receiver: the one thread of a decode rank that talks to prefill ranks.

It owns the listening socket and the state of every receive. The forward thread hands it announcements
and takes results; both sides only touch two deques.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from pdcluster_connector.core.deadline import deadline_after
from pdcluster_connector.core.receiving import Reply, Report
from pdcluster_connector.core.reception import Command, Ended, Expected, Reception
from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.side_channel import DecodeChannel, Wakeup
from pdcluster_connector.steps import Cancel, Expect
from pdcluster_connector.trace import Trace
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.side_channel import Refusal, parse_to_decode

_LOG: Final = logging.getLogger("vllm.pdcluster.receiver")
_EXPIRE_EVERY_S: Final = 0.02
"""How late a deadline may be acted on."""
_IDLE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Received:
    """The end of one request's wait. ``reason`` is empty when its KV is here."""

    request_id: RequestId
    report: Report


_Announcement: TypeAlias = tuple[Expect | Cancel, float]


class Receiver:
    """Serves one decode rank. ``announce`` and ``take_results``: forward thread, never wait."""

    def __init__(self, channel: DecodeChannel, wakeup: Wakeup, reception: Reception, trace: Trace) -> None:
        self._channel = channel
        self._wakeup = wakeup
        self._reception = reception
        self._trace = trace
        self._inbox: deque[_Announcement] = deque()
        self._results: deque[Received] = deque()
        self._expected_at: dict[RequestId, tuple[PushKey, float]] = {}
        self._next_expiry = 0.0
        self._is_closing = False
        self._thread = threading.Thread(target=self._main, name="pdcluster-receiver", daemon=True)
        self._thread.start()

    def announce(self, news: Iterable[Expect | Cancel]) -> None:
        """The scheduler reserved blocks, or wants a wait to end."""
        now = time.monotonic()
        self._inbox.extend((item, now) for item in news)
        self._wakeup.set()

    def take_results(self) -> list[Received]:
        """What ended since the last call; each request once."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self, timeout_s: float) -> None:
        """End the thread and close the socket. Waits up to ``timeout_s``."""
        self._is_closing = True
        self._wakeup.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._wakeup.close()

    # Everything below runs in the receiver thread.

    def _main(self) -> None:
        with self._channel:
            while not self._is_closing:
                try:
                    self._turn()
                except Exception:  # noqa: BLE001
                    # Top of a thread. One bad message must not stop the others; its request ends by its deadline.
                    _LOG.exception("receiver failed on one event")

    def _turn(self) -> None:
        self._channel.wait(_EXPIRE_EVERY_S if self._reception.num_waiting else _IDLE_S)
        now = time.monotonic()
        while self._inbox:
            self._heed(*self._inbox.popleft())
        while (frame := self._channel.receive()) is not None:
            try:
                message = parse_to_decode(frame[1])
            except ProtocolError as error:
                self._channel.send(frame[0], Refusal(str(error)))
            else:
                self._do(self._reception.hear(frame[0], message, now=now), now)
        if now >= self._next_expiry:
            self._next_expiry = now + _EXPIRE_EVERY_S
            self._do(self._reception.expire(now=now), now)

    def _heed(self, news: Expect | Cancel, now: float) -> None:
        if isinstance(news, Cancel):
            self._do(self._reception.cancel(news.request_id, news.reason, now=now), now)
            return
        key = PushKey(news.transfer_id, news.attempt)
        self._expected_at[news.request_id] = (key, now)
        expected = Expected(news.request_id, key, deadline_after(news.deadline_ms, now=now), news.num_blocks)
        self._do(self._reception.expect(expected, now=now), now)

    def _do(self, commands: Iterable[Command], now: float) -> None:
        for command in commands:
            match command:
                case Reply(peer, message):
                    self._channel.send(peer, message)
                case Ended(request_id, report):
                    self._results.append(Received(request_id, report))
                    self._report(request_id, report, now)

    def _report(self, request_id: RequestId, report: Report, now: float) -> None:
        key, expected_at = self._expected_at.pop(request_id)
        if not report.is_received:
            _LOG.warning("receive failed request_id=%s transfer_id=%s reason=%r", request_id, key[0], report.reason)
        self._trace.write(
            {
                "event": "receive",
                "transfer_id": key.transfer_id,
                "request_id": request_id,
                "attempt": key.attempt,
                "outcome": "received" if report.is_received else "failed",
                "reason": report.reason,
                "expected_at": expected_at,
                "ended_at": now,
            }
        )
