"""All receives of one decode rank, and all prefill ranks that talk to it.

Owns the receives (``receiving.py``), and the peers that said ``Hello`` with their sessions (``peers.py``). Parks an
``Open`` that comes before the scheduler has announced its request. Remembers ended transfers at least until their
deadline, so that a late ``Open`` gets its answer at once. ``now`` is running seconds everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from pdcluster_connector.core import receiving
from pdcluster_connector.core.clock import deadline_after
from pdcluster_connector.core.content import Found
from pdcluster_connector.core.peers import EARLY_S, EarlyFailure, Incoming, Parked, Peer, Peers, incoming_of
from pdcluster_connector.core.ranges import Spans
from pdcluster_connector.core.receiving import CutSession, Receive, ReceiveTimes, Reply, Report
from pdcluster_connector.core.writers import PeerId, Sender, SessionId
from pdcluster_protocol.adapters import AdapterContent, difference
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.fingerprint import KvFingerprint, require_equal
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.secret import Secret
from pdcluster_protocol.side_channel import (
    Denial,
    Done,
    Failed,
    Fenced,
    Hello,
    Open,
    Progress,
    Refusal,
    Settled,
    ToDecode,
    Unneeded,
    Welcome,
)

MAX_PARKED: Final = 4096
"""Most opens that wait until their request is announced: more than any engine runs at once. Further ones are denied."""

PRUNE_EVERY_S: Final = 5.0
"""Seconds between two searches for transfers, peers and sessions to forget. There may be thousands of them."""

SESSION_IDLE_S: Final = 600.0
"""How long a session is kept for a silent prefill engine. Another session, for its next request, takes 1 ms to open."""

_UNKNOWN: Final = "say hello first: this decode rank does not know you (it may have restarted)"
_CUT: Final = "this decode rank has closed your session, for it could not tell whether you still write: say hello again"


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell vLLM, exactly once, that the request's wait is over."""

    request_id: RequestId
    report: Report


@dataclass(frozen=True, slots=True)
class Invite:
    """This peer is welcome: give its engine a session, which may take seconds, then call ``invited``."""

    peer: PeerId
    boot_id: BootId


@dataclass(frozen=True, slots=True)
class Lost:
    """Tell the scheduler, which tells the router, that this attempt will not fill the blocks."""

    request_id: RequestId
    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Compare:
    """Sum up this transfer's content here, then call ``summed_up``. ``has_draft``: also the draft model's content."""

    transfer_id: TransferId
    attempt: Attempt
    has_draft: bool = False


@dataclass(frozen=True, slots=True)
class Differs:
    """Log that the content of this attempt differs from the content that was pushed."""

    request_id: RequestId
    attempt: Attempt
    reason: str


ReceptionCommand: TypeAlias = Reply | Ended | Invite | Lost | CutSession | Compare | Differs
ReceptionCommands: TypeAlias = Iterator[ReceptionCommand]


@dataclass(frozen=True, slots=True)
class Expected:
    """A request that waits for a push. ``spans``: per KV group, the token positions that must come."""

    request_id: RequestId
    transfer_id: TransferId
    deadline: float
    spans: Spans
    wants_sums: bool = False
    may_push_again: bool = True
    adapter: AdapterContent | None = None
    """The LoRA adapter with which the request decodes; None: it has none."""


@dataclass(slots=True)
class _Waiting:
    expected: Expected
    receive: Receive


@dataclass(frozen=True, slots=True)
class _Over:
    is_received: bool
    until: float


@dataclass(slots=True)
class Reception:
    """One decode rank's receives. Not thread-safe: the receiver thread owns it."""

    welcome: Welcome
    """The message to peers that are welcome. Each gets it with its own session in place of the one here."""
    fingerprint: KvFingerprint
    times: ReceiveTimes
    secret: Secret
    _peers: Peers = field(default_factory=Peers)
    _heard_at: dict[SessionId, float] = field(default_factory=dict)
    _waiting: dict[TransferId, _Waiting] = field(default_factory=dict)
    _by_request: dict[RequestId, TransferId] = field(default_factory=dict)
    _parked: dict[TransferId, list[Parked]] = field(default_factory=dict)
    _early: dict[TransferId, EarlyFailure] = field(default_factory=dict)
    _over: dict[TransferId, _Over] = field(default_factory=dict)
    _prune_at: float = 0.0

    @property
    def num_waiting(self) -> int:
        """Receives that vLLM has not been told about."""
        return len(self._waiting)

    def expect(self, expected: Expected, *, now: float) -> ReceptionCommands:
        """The scheduler has reserved blocks for this request; parked opens are answered."""
        transfer = expected.transfer_id
        if transfer in self._waiting or transfer in self._over:
            yield Ended(expected.request_id, Report(is_received=False, reason="its transfer id was used before"))
            return
        receive = Receive(
            transfer,
            self.times,
            deadline=expected.deadline,
            wants_sums=expected.wants_sums,
            may_push_again=expected.may_push_again,
        )
        self._waiting[transfer] = _Waiting(expected, receive)
        self._by_request[expected.request_id] = transfer
        if early := self._early.pop(transfer, None):
            yield from self._progress(early.peer, early.message, now)
        for opened in self._parked.pop(transfer, ()):
            yield from self._opened(opened.peer, opened.message, now)

    def cancel(self, request_id: RequestId, reason: str, *, now: float) -> ReceptionCommands:
        """The request shall not be received any more. ``Ended`` follows when no writer can reach its blocks."""
        transfer = self._by_request.get(request_id)
        if transfer is not None:
            yield from self._commands(transfer, self._waiting[transfer].receive.fail(reason, now=now), now)

    def fail(self, transfer: TransferId, reason: str, *, now: float) -> ReceptionCommands:
        """No attempt can complete the transfer any more."""
        if waiting := self._waiting.get(transfer):
            yield from self._commands(transfer, waiting.receive.fail(reason, now=now), now)

    def prefill_ended(self, request_id: RequestId, attempt: Attempt, *, now: float) -> ReceptionCommands:
        """The router says that prefill has computed the prompt of ``attempt``."""
        transfer = self._by_request.get(request_id)
        if transfer is not None:
            receive = self._waiting[transfer].receive
            yield from self._commands(transfer, receive.prefill_ended(attempt, now=now), now)

    def hear(self, peer: PeerId, message: ToDecode, *, now: float) -> ReceptionCommands:
        """Answer one message of a prefill rank."""
        known = self._peers.get(peer)
        if isinstance(message, Hello):
            yield self._answer_hello(peer, message, now)
        elif isinstance(message, Failed):
            # Also from a peer that we refused or have forgotten, so that its request need not wait for the deadline.
            # The frame's seal shows that the peer holds the secret.
            yield from self._progress(peer, message, now)
        elif known is None:
            yield Reply(peer, Refusal(self._peers.refusal(peer) or _UNKNOWN))
        else:
            self._peers.heard(peer, now=now)
            yield from self._answer_known(peer, known, message, now)

    def invited(self, peers: Iterable[PeerId], session: SessionId, *, now: float) -> ReceptionCommands:
        """``session`` is open for the engine of ``peers``. It is cut if no peer is heard for ``SESSION_IDLE_S``."""
        self._heard_at[session] = now
        for peer in peers:
            if known := self._peers.get(peer):
                known.session = session
                yield Reply(peer, msgspec.structs.replace(self.welcome, session=session))

    def cut(self, session: SessionId, *, now: float) -> ReceptionCommands:
        """``session`` is closed: no byte lands through it any more."""
        for transfer, waiting in list(self._waiting.items()):
            yield from self._commands(transfer, waiting.receive.cut(session, now=now), now)

    def summed_up(self, transfer: TransferId, attempt: Attempt, found: Found, *, now: float) -> ReceptionCommands:
        """The content of ``transfer`` here has these sums. Does nothing if the transfer has ended meanwhile."""
        if waiting := self._waiting.get(transfer):
            yield from self._commands(transfer, waiting.receive.summed_up(attempt, found, now=now), now)

    def expire(self, *, now: float) -> ReceptionCommands:
        """Act on every deadline that has passed."""
        for transfer, waiting in list(self._waiting.items()):
            yield from self._commands(transfer, waiting.receive.expire(now=now), now)
        for transfer, parked in list(self._parked.items()):
            yield from self._expire_parked(transfer, parked, now)
        if now >= self._prune_at:
            self._prune_at = now + PRUNE_EVERY_S
            yield from self._prune(now)

    def _answer_known(
        self, peer: PeerId, known: Peer, message: Open | Progress | Done | Fenced, now: float
    ) -> ReceptionCommands:
        if known.session is not None:
            self._heard_at[known.session] = now
        if known.session is None:
            yield Reply(peer, Refusal(_UNKNOWN))
        elif isinstance(message, Open):
            yield from self._opened(peer, message, now)
        else:
            yield from self._progress(peer, message, now)

    def _expire_parked(self, transfer: TransferId, parked: list[Parked], now: float) -> ReceptionCommands:
        self._parked[transfer] = [p for p in parked if now < p.expires_at]
        if not self._parked[transfer]:
            del self._parked[transfer]
        for late in parked:
            if now >= late.expires_at:
                attempt = late.message.attempt
                yield Reply(late.peer, Denial(transfer, attempt, "decode never reserved blocks for it"))

    def _prune(self, now: float) -> ReceptionCommands:
        self._early = {key: early for key, early in self._early.items() if now < early.until}
        self._over = {key: over for key, over in self._over.items() if now < over.until}
        self._peers.prune(self._awaited, now=now)
        for session, heard_at in list(self._heard_at.items()):
            if now - heard_at >= SESSION_IDLE_S:
                yield from self._cut_off(CutSession(session, is_idle=True))

    def _awaited(self) -> set[PeerId]:
        """Peers that a receive waits for, or whose open is parked."""
        parked = {opened.peer for opens in self._parked.values() for opened in opens}
        return parked.union(*(waiting.receive.awaited() for waiting in self._waiting.values()))

    def _answer_hello(self, peer: PeerId, hello: Hello, now: float) -> ReceptionCommand:
        try:
            self._require_same_protocol(hello)
            require_equal(
                prefill=hello.fingerprint,
                decode=self.fingerprint,
                prefill_id=hello.engine_id,
                decode_id=self.welcome.engine_id,
            )
            self._peers.add(peer, hello, self._incoming, now=now)
        except ProtocolError as error:
            self._peers.refuse(peer, str(error), now=now)
            return Reply(peer, Refusal(str(error)))
        return Invite(peer, hello.boot_id)

    def _incoming(self, hello: Hello) -> Incoming:
        return incoming_of(hello, self.welcome)

    def _require_same_protocol(self, hello: Hello) -> None:
        """Raises: ProtocolError: Prefill's bytes travel by a protocol to which this rank does not listen."""
        ours = self.welcome
        if hello.transfer_protocol != ours.transfer_protocol:
            raise ProtocolError(
                f"prefill engine {hello.engine_id} moves KV by {hello.transfer_protocol!r}, decode engine "
                f"{ours.engine_id} by {ours.transfer_protocol!r}: give both the same transfer_protocol"
            )

    def _opened(self, peer: PeerId, message: Open, now: float) -> ReceptionCommands:
        transfer, attempt = message.transfer_id, message.attempt
        if reason := self._refusal_of(message):
            yield Reply(peer, Denial(transfer, attempt, reason))
        elif transfer in self._waiting:
            yield from self._open(peer, message, now)
        elif over := self._over.get(transfer):
            denial = Denial(transfer, attempt, "the request has ended on decode")
            yield Reply(peer, Unneeded(transfer, attempt) if over.is_received else denial)
        elif sum(map(len, self._parked.values())) >= MAX_PARKED:
            yield Reply(peer, Denial(transfer, attempt, f"{MAX_PARKED} opens already wait for their reservation"))
        else:
            parked = Parked(peer, message, deadline_after(message.deadline_ms, now=now))
            self._parked.setdefault(transfer, []).append(parked)

    def _refusal_of(self, message: Open) -> str:
        if message.decode_boot_id != self.welcome.boot_id:
            return f"decode rank has restarted: its boot id is {self.welcome.boot_id}"
        try:
            self.secret.check(message.token, message.transfer_id, message.attempt, message.deadline_ms)
        except ProtocolError as error:
            return str(error)
        return ""

    def _other_adapter(self, expected: Expected, message: Open, prefill_id: EngineId) -> str:
        """Why KV of prefill's LoRA adapter is of no use to the request; empty: the engines have the same content."""
        return difference(
            prefill=message.adapter, decode=expected.adapter, prefill_id=prefill_id, decode_id=self.welcome.engine_id
        )

    def _open(self, peer: PeerId, message: Open, now: float) -> ReceptionCommands:
        waiting, known = self._waiting[message.transfer_id], self._peers.get(peer)
        if known is None or known.session is None:
            return  # Its session was cut while its open was parked.
        if reason := self._other_adapter(waiting.expected, message, known.greeting.hello.engine_id):
            yield Reply(peer, Denial(message.transfer_id, message.attempt, reason))
            return
        debt = known.greeting.incoming.debt(waiting.expected.spans)
        sender = Sender(*known.greeting.rank, known.session, debt)
        yield from self._commands(
            message.transfer_id, waiting.receive.open(peer, message.attempt, sender, now=now), now
        )

    def _progress(self, peer: PeerId, message: Progress | Done | Failed | Fenced, now: float) -> ReceptionCommands:
        waiting = self._waiting.get(message.transfer_id)
        if waiting is None:
            if isinstance(message, Failed) and message.transfer_id not in self._over:
                self._early[message.transfer_id] = EarlyFailure(peer, message, now + EARLY_S)
            elif isinstance(message, Done) and message.sums is not None:
                yield Reply(peer, Settled(message.transfer_id, message.attempt))
            return
        receive = waiting.receive
        match message:
            case Progress():
                commands = receive.progress(peer, message, now=now)
            case Done():
                commands = receive.done(peer, message, now=now)
            case Failed():
                commands = receive.failed(peer, message, now=now)
            case Fenced():
                commands = receive.fenced(peer, message, now=now)
        yield from self._commands(message.transfer_id, commands, now)

    def _commands(self, transfer: TransferId, commands: receiving.ReceivingCommands, now: float) -> ReceptionCommands:
        for command in commands:
            match command:
                case Report():
                    yield self._end(transfer, command, now)
                case receiving.AttemptLost(attempt, reason):
                    yield Lost(self._waiting[transfer].expected.request_id, attempt, reason)
                case CutSession():
                    yield from self._cut_off(command)
                case receiving.SumUpReceive(attempt, has_draft):
                    yield Compare(transfer, attempt, has_draft)
                case receiving.Mismatched(attempt, reason):
                    yield Differs(self._waiting[transfer].expected.request_id, attempt, reason)
                case Reply():
                    yield command

    def _cut_off(self, cut: CutSession) -> ReceptionCommands:
        """Closes a session, once. Peers that used it must say hello again."""
        if self._heard_at.pop(cut.session, None) is None:
            return
        yield cut
        for peer in self._peers.forget_session(cut.session):
            yield Reply(peer, Refusal(_CUT))

    def _end(self, transfer: TransferId, report: Report, now: float) -> Ended:
        expected = self._waiting.pop(transfer).expected
        del self._by_request[expected.request_id]
        self._over[transfer] = _Over(report.is_received, max(expected.deadline, now + self.times.quarantine_s))
        return Ended(expected.request_id, report)
