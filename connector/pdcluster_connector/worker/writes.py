"""A lane's writes: queued layer by layer, submitted in order, polled until acknowledged.

All requests of a step that go to the same decode rank form one *batch* per region. A batch leaves when
its layer's device event is complete, in *submits*: each has up to as many writes as the transport takes in
one call, of one request or of several. Writes in flight are bounded in number and in bytes: Mooncake refuses more than
its own queue holds, and a write that is not submitted can still be stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from pdcluster_connector.core.pace import LONGEST_LOOK_S, SHORTEST_LOOK_S, WritePace
from pdcluster_connector.core.sending import Push, PushKey, SendingCommands
from pdcluster_connector.device import Device
from pdcluster_connector.reshard import StripGatherer
from pdcluster_connector.settings import MAX_BYTES_IN_FLIGHT, MAX_BYTES_IN_SUBMIT, MAX_WRITES_IN_FLIGHT
from pdcluster_connector.transport.base import Transport, WriteId, WriteRange, WriteStatus
from pdcluster_connector.worker.batches import Batch, Cursor, HeldBuffers, cursors_of
from pdcluster_connector.worker.lane_strips import LaneStrips
from pdcluster_protocol.errors import TransferError

_FULL_POLL_EVERY_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class _Portion:
    """The writes of one part in one submit."""

    cursor: Cursor
    num_bytes: int

    @property
    def push(self) -> Push:
        return self.cursor.part.push


@dataclass(frozen=True, slots=True)
class _InFlight:
    write: WriteId
    portions: list[_Portion]
    num_writes: int

    @property
    def may_write(self) -> bool:
        """Whether a push in this submit goes on writing."""
        return any(portion.push.may_write for portion in self.portions)


@dataclass(slots=True)
class WriteQueue:
    """Not thread-safe: one lane thread owns it. Nothing in it waits."""

    transport: Transport
    device: Device
    session: str
    lost: Container[PushKey]
    """Pushes whose source vLLM overwrites. The forward thread adds to them at any time."""
    gatherer: StripGatherer | None = None
    """The lane's gatherer; None where parts come without gathers."""
    _batches: deque[Batch] = field(default_factory=deque)
    _cursors: deque[Cursor] = field(default_factory=deque)
    _held: dict[Push, list[Cursor]] = field(default_factory=dict)
    _in_flight: deque[_InFlight] = field(default_factory=deque)
    _num_writes_in_flight: int = 0
    _num_bytes_in_flight: int = 0
    _buffers: HeldBuffers = field(default_factory=HeldBuffers)
    _pace: WritePace = field(default_factory=WritePace)
    _layer_pace: WritePace = field(default_factory=WritePace)
    """How fast layers become final: an accelerator computes long after the forward thread has told us of all layers."""
    _awaits_layer: bool = False
    _next_full_poll: float = 0.0
    _strips: LaneStrips = field(init=False)

    def __post_init__(self) -> None:
        self._strips = LaneStrips(self.device, self._buffers, self.gatherer)

    @property
    def is_busy(self) -> bool:
        """Whether polling soon is worthwhile: a write of a live push is in flight, or a part waits to be submitted."""
        is_writing = bool(self._in_flight) and self._in_flight[0].may_write
        return is_writing or bool(self._batches or self._cursors)

    @property
    def next_look_s(self) -> float:
        """Seconds until a write, a copy or the next layer may be over. An earlier look costs CPU and finds nothing."""
        if self._cursors and self._cursors[0].is_copying:
            return SHORTEST_LOOK_S
        of_writes = self._pace.next_look_s(len(self._in_flight)) if self._in_flight else LONGEST_LOOK_S
        of_layers = self._layer_pace.next_look_s(1) if self._batches else LONGEST_LOOK_S
        return min(of_writes, of_layers)

    def add(self, batch: Batch) -> None:
        """Queues one batch."""
        for part in batch.parts:
            self._buffers.add(part)
        self._batches.append(batch)

    def has_work_of(self, push: Push) -> bool:
        """Whether a write or copy that reads the request's blocks is queued, held for its grant, or in flight."""
        queued = (part for batch in self._batches for part in batch.parts if part.buffer is None)
        in_flight = (portion.cursor for flight in self._in_flight for portion in flight.portions)
        submitted = (cursor.part for cursor in (*self._cursors, *in_flight) if cursor.reads_blocks)
        held = (cursor.part for cursor in self._held.get(push, ()) if push.is_waiting and cursor.reads_blocks)
        return any(part.push is push for part in chain(queued, submitted, held))

    def staged_since(self, since: float) -> list[Push]:
        """Pushes that have held resharded KV in staging memory since ``since`` (monotonic seconds) or longer."""
        return self._buffers.held_since(since)

    def close(self) -> None:
        """Releases all staging buffers. The session is closed: nothing of ours is read or written by it any more."""
        self._buffers.release_all()

    def granted(self, push: Push) -> None:
        """Ranges that were held for the grant of ``push`` may leave."""
        self._cursors.extend(self._held.pop(push, ()))

    def drop_queued(self) -> None:
        """Nothing more leaves; writes in flight are still polled. The device, which may be broken, is not queried."""
        while self._batches:
            for part in self._batches.popleft().parts:
                self._cursors.extend(cursors_of(part))
        while self._cursors:
            self._drop(self._cursors.popleft())

    def forget_stopped(self) -> None:
        """Drops writes that were held for a grant that will not come."""
        for push in [push for push in self._held if not push.is_waiting]:
            for cursor in self._held.pop(push):
                self._drop(cursor)

    def advance(self, *, now: float) -> Iterator[tuple[Push, SendingCommands]]:
        """Polls the writes in flight, and submits queued ones that may leave. Yields the commands of each push."""
        num_in_flight = len(self._in_flight)
        yield from self._poll(now)
        self._pace.looked(num_in_flight - len(self._in_flight), now=now)
        self._take_ready_batches(now)
        yield from self._submit(now)

    def _take_ready_batches(self, now: float) -> None:
        num_waiting = len(self._batches)
        if not self._awaits_layer:
            self._layer_pace.began(now=now)
        while self._batches and self.device.is_done(self._batches[0].event):
            for part in self._batches.popleft().parts:
                if part.push.is_waiting:
                    self._held.setdefault(part.push, []).extend(cursors_of(part))
                else:
                    self._cursors.extend(cursors_of(part))
        self._layer_pace.looked(num_waiting - len(self._batches), now=now)
        self._awaits_layer = bool(self._batches)

    def _submit(self, now: float) -> Iterator[tuple[Push, SendingCommands]]:
        most = self.transport.writes_per_submit
        while self._num_writes_in_flight + most <= MAX_WRITES_IN_FLIGHT:
            left = MAX_BYTES_IN_FLIGHT - self._num_bytes_in_flight
            portions, ranges = self._take(most, min(left, MAX_BYTES_IN_SUBMIT))
            if not ranges:
                return
            if reason := self._hand_over(portions, ranges, now):
                yield from self._refused(portions, reason, now)

    def _take(self, most: int, num_bytes: int) -> tuple[list[_Portion], list[WriteRange]]:
        """The next ranges that may leave, ``most`` at most, and none once they are ``num_bytes``."""
        portions: list[_Portion] = []
        ranges: list[WriteRange] = []
        while self._cursors and len(ranges) < most and num_bytes > 0:
            cursor = self._cursors[0]
            if not cursor.may_leave:
                self._drop(self._cursors.popleft())
                continue
            if not self._is_ready(cursor, portions):
                self._strips.look_ahead(self._cursors)
                break
            taken, num_taken = cursor.take(most - len(ranges), num_bytes)
            portions.append(_Portion(cursor, num_taken))
            ranges += taken
            num_bytes -= num_taken
        return portions, ranges

    def _is_ready(self, cursor: Cursor, taken: list[_Portion]) -> bool:
        try:
            return self._strips.is_ready(cursor)
        except Exception:  # whatever the device's library raises
            self._let_go(taken)
            raise

    def _let_go(self, portions: list[_Portion]) -> None:
        """The portions were taken, but will not be submitted."""
        for portion in portions:
            portion.cursor.unended -= 1
            self._drop(portion.cursor)

    def _drop(self, cursor: Cursor) -> None:
        """No further write of this part is submitted."""
        cursor.is_dropped = True
        self._buffers.release_if_over(cursor)

    def _hand_over(self, portions: list[_Portion], ranges: list[WriteRange], now: float) -> str:
        """Submits ``ranges`` together. Returns why the transport refuses; empty: it does not."""
        try:
            write = self.transport.submit_writes(self.session, ranges)
        except TransferError as error:
            return str(error)
        for portion in portions:
            portion.push.submitted()
            record = portion.cursor.part.record
            record.write_begin = record.write_begin or now
        if not self._in_flight:
            self._pace.began(now=now)
        self._in_flight.append(_InFlight(write, portions, len(ranges)))
        self._num_writes_in_flight += len(ranges)
        self._num_bytes_in_flight += sum(portion.num_bytes for portion in portions)
        return ""

    def _refused(self, portions: list[_Portion], reason: str, now: float) -> Iterator[tuple[Push, SendingCommands]]:
        self._let_go(portions)
        for portion in portions:
            yield portion.push, portion.push.give_up(reason, now=now)

    def _poll(self, now: float) -> Iterator[tuple[Push, SendingCommands]]:
        """Looks at submits oldest first and stops at the first that is pending: amortised one look per submit.

        A submit that never ends would hide those behind it. So when the pushes of the oldest one have stopped, the
        whole queue is looked at, but not often: its peer may be silent for minutes.
        """
        while self._in_flight:
            status = self.transport.write_status(self._in_flight[0].write)
            if status is WriteStatus.PENDING:
                break
            yield from self._ended(self._in_flight.popleft(), status, now)
        if self._in_flight and not self._in_flight[0].may_write and now >= self._next_full_poll:
            self._next_full_poll = now + _FULL_POLL_EVERY_S
            yield from self._poll_all(now)

    def _poll_all(self, now: float) -> Iterator[tuple[Push, SendingCommands]]:
        for _ in range(len(self._in_flight)):
            flight = self._in_flight.popleft()
            status = self.transport.write_status(flight.write)
            if status is WriteStatus.PENDING:
                self._in_flight.append(flight)
            else:
                yield from self._ended(flight, status, now)

    def _ended(self, flight: _InFlight, status: WriteStatus, now: float) -> Iterator[tuple[Push, SendingCommands]]:
        self._num_writes_in_flight -= flight.num_writes
        self._num_bytes_in_flight -= sum(portion.num_bytes for portion in flight.portions)
        for portion in flight.portions:
            if status is WriteStatus.DONE:
                yield portion.push, self._written(portion, now)
            else:
                # The failed submit may still read: its parts count as unended until the session is closed.
                reason = f"a submit with {portion.num_bytes} bytes of it failed"
                yield portion.push, portion.push.write_failed(reason, now=now)

    def _written(self, portion: _Portion, now: float) -> SendingCommands:
        push = portion.push
        portion.cursor.unended -= 1
        self._buffers.release_if_over(portion.cursor)
        if push.key in self.lost:
            # ``lost`` is read after the status: a write acknowledged before the overwrite had also read before it.
            return (
                *push.give_up("prefill preempted the request while its blocks were being read", now=now),
                *push.written(portion.num_bytes),
            )
        record = portion.cursor.part.record
        record.unacked_bytes -= portion.num_bytes
        if record.unacked_bytes == 0:
            record.acked_at = now
        return push.written(portion.num_bytes)
