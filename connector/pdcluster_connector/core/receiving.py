"""One receive: one decode rank waiting for its part of one prompt's KV.

Rule 1: a request is received only when every expected prefill rank said done, for the current
        attempt, with the byte count that decode worked out from its own block table.
Rule 2: it is reported failed only when no granted rank can write any more: each is done, fenced, or
        past the quarantine. vLLM reuses the blocks at that moment.

    WAITING --open--> (grants) --every rank done--> RECEIVED
       |                 |
       +-- failed, prefill failed, abort, deadline --> STOPPING --every writer fenced, or quarantine--> FAILED
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NewType, TypeAlias

from pdcluster_connector.core.sending import PushKey
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.side_channel import Denial, Done, Failed, Fenced, Grant, Revoke, ToPrefill

PeerId = NewType("PeerId", bytes)
"""One prefill rank's connection to this decode rank."""


class Phase(Enum):
    WAITING = auto()
    STOPPING = auto()
    RECEIVED = auto()
    FAILED = auto()


ENDED: Final = frozenset({Phase.RECEIVED, Phase.FAILED})


@dataclass(frozen=True, slots=True)
class Reply:
    """Tell one prefill rank."""

    peer: PeerId
    message: ToPrefill


@dataclass(frozen=True, slots=True)
class Report:
    """Tell vLLM, exactly once. ``reason`` is empty when the KV is here."""

    is_received: bool
    reason: str = ""


Command: TypeAlias = Reply | Report
Commands: TypeAlias = tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Sender:
    """A prefill rank that asks to write: which engine life, which rank, and what each rank owes us.

    ``expected_bytes``: for every prefill rank of that engine that writes to this decode rank, how many bytes.
    """

    boot_id: BootId
    tp_rank: int
    expected_bytes: Mapping[int, int]


class Writer(Enum):
    """How far one granted prefill rank is."""

    WRITING = auto()
    DONE = auto()
    FENCED = auto()


class Receive:
    """State of one receive. Not thread-safe: the receiver thread owns it."""

    def __init__(self, key: PushKey, *, deadline: float, quarantine_s: float) -> None:
        self.key = key
        self.phase = Phase.WAITING
        self.deadline = deadline
        """When the receive fails by itself; once STOPPING, when the quarantine ends."""
        self.reason = ""
        self.received_bytes = 0
        self._quarantine_s = quarantine_s
        self._boot_id: BootId | None = None
        self._expected: Mapping[int, int] = {}
        self._ranks: dict[PeerId, int] = {}
        self._writers: dict[PeerId, Writer] = {}

    @property
    def is_ended(self) -> bool:
        return self.phase in ENDED

    def open(self, peer: PeerId, sender: Sender) -> Commands:
        """A prefill rank asks to write. Granted once to each rank of one engine life that owes us bytes."""
        if reason := self._refusal_of(peer, sender):
            return (Reply(peer, Denial(*self.key, reason)),)
        self._boot_id, self._expected = sender.boot_id, sender.expected_bytes
        self._ranks[peer] = sender.tp_rank
        self._writers.setdefault(peer, Writer.WRITING)
        return (Reply(peer, Grant(*self.key)),)

    def done(self, peer: PeerId, message: Done, *, now: float) -> Commands:
        """A granted rank has written its part, it says."""
        if self._writers.get(peer) is not Writer.WRITING:
            return ()
        self._writers[peer] = Writer.DONE
        if self.phase is Phase.STOPPING:
            return self._end_if_fenced()
        expected = self._expected[self._ranks[peer]]
        if message.num_bytes != expected:
            return self.fail(
                f"prefill rank {self._ranks[peer]} wrote {message.num_bytes} bytes, decode expects {expected}", now=now
            )
        self.received_bytes += message.num_bytes
        return self._receive_if_complete()

    def failed(self, peer: PeerId, message: Failed, *, now: float) -> Commands:
        """A prefill rank has given up; the attempt is lost."""
        if message.is_fenced and peer in self._writers:
            self._writers[peer] = Writer.FENCED
        return self.fail(f"prefill gave up: {message.reason}", now=now) or self._end_if_fenced()

    def fenced(self, peer: PeerId, _message: Fenced) -> Commands:
        """A granted rank writes no more."""
        if peer in self._writers:
            self._writers[peer] = Writer.FENCED
        return self._end_if_fenced()

    def fail(self, reason: str, *, now: float) -> Commands:
        """The request cannot be received: take every grant back and report once that is safe."""
        if self.phase is not Phase.WAITING:
            return ()
        self.phase, self.reason = Phase.STOPPING, reason
        self.deadline = now + self._quarantine_s
        revokes = tuple(Reply(peer, Revoke(*self.key)) for peer in self._writing())
        return revokes + self._end_if_fenced()

    def expire(self, *, now: float) -> Commands:
        """Act on the passed deadline, or on the end of the quarantine."""
        if self.is_ended or now < self.deadline:
            return ()
        if self.phase is Phase.WAITING:
            return self.fail("deadline passed before the KV was here", now=now)
        return self._end(f"{self.reason} (a writer never answered; blocks were quarantined)")

    def _refusal_of(self, peer: PeerId, sender: Sender) -> str:
        if self.phase is not Phase.WAITING:
            return f"the request has ended on decode: {self.reason or 'received'}"
        if self._boot_id not in (None, sender.boot_id):
            return "another prefill engine holds the grant of this attempt"
        if sender.tp_rank not in sender.expected_bytes:
            return f"prefill rank {sender.tp_rank} holds no KV head of this decode rank"
        if peer not in self._writers and sender.tp_rank in self._ranks.values():
            return f"prefill rank {sender.tp_rank} holds the grant on another connection"
        return ""

    def _writing(self) -> list[PeerId]:
        return [peer for peer, state in self._writers.items() if state is Writer.WRITING]

    def _receive_if_complete(self) -> Commands:
        done = {self._ranks[peer] for peer, state in self._writers.items() if state is Writer.DONE}
        if done != self._expected.keys():
            return ()
        self.phase = Phase.RECEIVED
        return (Report(is_received=True),)

    def _end_if_fenced(self) -> Commands:
        if self.phase is not Phase.STOPPING or self._writing():
            return ()
        return self._end(self.reason)

    def _end(self, reason: str) -> Commands:
        self.phase = Phase.FAILED
        return (Report(is_received=False, reason=reason),)
