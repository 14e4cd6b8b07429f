"""Everything one decode rank expects, and every prefill rank that talks to it.

Owns the receives (``receiving.py``), knows the peers that said ``Hello``, parks an ``Open`` that comes
before its request was announced by the scheduler, and remembers ended transfers until their deadline so
that a late ``Open`` gets a denial at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pdcluster_connector.core.deadline import deadline_after
from pdcluster_connector.core.layout import RankPair, bytes_per_block
from pdcluster_connector.core.receiving import PeerId, Receive, Reply, Report, Sender
from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.core.tp_mapping import Sharding, plan_pushes
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.fingerprint import KvFingerprint, require_equal
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.side_channel import (
    Denial,
    Done,
    Failed,
    Fenced,
    Hello,
    Open,
    Refusal,
    ToDecode,
    ToPrefill,
    Welcome,
)

MAX_PARKED: Final = 4096
"""Opens that may wait for their announcement. More than any engine runs at once; beyond it: denied."""

PRUNE_EVERY_S: Final = 5.0
"""How often ended transfers are looked through: there may be thousands, and nothing waits for it."""

EARLY_S: Final = 60.0
"""How long a failure is remembered for a request that was not announced yet: longer than any forward pass."""

MAX_PEERS: Final = 16384
"""Connections that are remembered; the oldest is forgotten beyond it and must say hello again."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell vLLM, exactly once, that the request's wait is over."""

    request_id: RequestId
    report: Report


Command: TypeAlias = Reply | Ended


@dataclass(frozen=True, slots=True)
class Expected:
    """A request that waits for a push. ``num_blocks``: per KV group, how many blocks must come."""

    request_id: RequestId
    key: PushKey
    deadline: float
    num_blocks: tuple[int, ...]


@dataclass(slots=True)
class _Waiting:
    expected: Expected
    receive: Receive


@dataclass(frozen=True, slots=True)
class _Parked:
    peer: PeerId
    message: Open
    expires_at: float


@dataclass(frozen=True, slots=True)
class _EarlyFailure:
    """A prefill rank gave up before the scheduler announced the request."""

    reason: str
    until: float


@dataclass(slots=True)
class Reception:
    """One decode rank's receives. Not thread-safe: the receiver thread owns it."""

    welcome: Welcome
    fingerprint: KvFingerprint
    quarantine_s: float
    _peers: dict[PeerId, Hello] = field(default_factory=dict)
    _refused: dict[PeerId, str] = field(default_factory=dict)
    _waiting: dict[PushKey, _Waiting] = field(default_factory=dict)
    _by_request: dict[RequestId, PushKey] = field(default_factory=dict)
    _parked: dict[PushKey, list[_Parked]] = field(default_factory=dict)
    _early: dict[PushKey, _EarlyFailure] = field(default_factory=dict)
    _ended: dict[PushKey, float] = field(default_factory=dict)
    _prune_at: float = 0.0

    @property
    def num_waiting(self) -> int:
        """Receives that vLLM has not been told about."""
        return len(self._waiting)

    def expect(self, expected: Expected, *, now: float) -> Iterator[Command]:
        """The scheduler has reserved blocks for this request; parked opens are answered."""
        if expected.key in self._waiting or expected.key in self._ended:
            yield Ended(expected.request_id, Report(is_received=False, reason="its transfer id was used before"))
            return
        receive = Receive(expected.key, deadline=expected.deadline, quarantine_s=self.quarantine_s)
        self._waiting[expected.key] = _Waiting(expected, receive)
        self._by_request[expected.request_id] = expected.key
        parked = self._parked.pop(expected.key, ())
        if early := self._early.pop(expected.key, None):
            yield from self._commands(expected.key, receive.fail(early.reason, now=now), now)
        for opened in parked:
            yield from self._opened(opened.peer, opened.message, now)

    def cancel(self, request_id: RequestId, reason: str, *, now: float) -> Iterator[Command]:
        """The request shall not be received any more; ``Ended`` follows when its blocks are safe."""
        key = self._by_request.get(request_id)
        if key is not None:
            yield from self._commands(key, self._waiting[key].receive.fail(reason, now=now), now)

    def hear(self, peer: PeerId, message: ToDecode, *, now: float) -> Iterator[Command]:
        """Answer one message of a prefill rank."""
        if isinstance(message, Hello):
            yield Reply(peer, self._greet(peer, message))
        elif peer not in self._peers:
            yield Reply(peer, Refusal("say hello first: this decode rank does not know you (it may have restarted)"))
        else:
            self._peers[peer] = self._peers.pop(peer)  # the one that was silent longest stays first
            yield from self._hear_known(peer, message, now)

    def _hear_known(self, peer: PeerId, message: Open | Done | Failed | Fenced, now: float) -> Iterator[Command]:
        if isinstance(message, Failed):
            # Also from a refused peer: its request need not wait for the deadline.
            yield from self._progress(peer, message, now)
        elif peer in self._refused:
            yield Reply(peer, Refusal(self._refused[peer]))
        elif isinstance(message, Open):
            yield from self._opened(peer, message, now)
        else:
            yield from self._progress(peer, message, now)

    def expire(self, *, now: float) -> Iterator[Command]:
        """Act on every deadline that has passed."""
        for key, waiting in list(self._waiting.items()):
            yield from self._commands(key, waiting.receive.expire(now=now), now)
        for key, parked in list(self._parked.items()):
            self._parked[key] = [p for p in parked if now < p.expires_at]
            if not self._parked[key]:
                del self._parked[key]
            for late in parked:
                if now >= late.expires_at:
                    yield Reply(late.peer, Denial(*key, "decode never reserved blocks for it"))
        if now >= self._prune_at:
            self._prune_at = now + PRUNE_EVERY_S
            self._early = {key: early for key, early in self._early.items() if now < early.until}
            self._ended = {key: until for key, until in self._ended.items() if now < until}

    def _greet(self, peer: PeerId, hello: Hello) -> ToPrefill:
        if len(self._peers) >= MAX_PEERS:
            stalest = next(iter(self._peers))
            del self._peers[stalest]
            self._refused.pop(stalest, None)
        self._peers[peer] = hello
        try:
            require_equal(
                prefill=hello.fingerprint,
                decode=self.fingerprint,
                prefill_id=hello.engine_id,
                decode_id=self.welcome.engine_id,
            )
            self._sender(hello, ())
        except (ProtocolError, ValueError) as error:
            self._refused[peer] = str(error)
            return Refusal(str(error))
        return self.welcome

    def _opened(self, peer: PeerId, message: Open, now: float) -> Iterator[Command]:
        key = PushKey(message.transfer_id, message.attempt)
        if message.decode_boot_id != self.welcome.boot_id:
            yield Reply(peer, Denial(*key, f"decode rank has restarted: its boot id is {self.welcome.boot_id}"))
        elif key in self._waiting:
            yield from self._open(peer, key, now)
        elif key in self._ended:
            yield Reply(peer, Denial(*key, "the request has ended on decode"))
        elif sum(map(len, self._parked.values())) >= MAX_PARKED:
            yield Reply(peer, Denial(*key, f"{MAX_PARKED} opens already wait for their reservation"))
        else:
            parked = _Parked(peer, message, deadline_after(message.deadline_ms, now=now))
            self._parked.setdefault(key, []).append(parked)

    def _open(self, peer: PeerId, key: PushKey, now: float) -> Iterator[Command]:
        waiting = self._waiting[key]
        sender = self._sender(self._peers[peer], waiting.expected.num_blocks)
        yield from self._commands(key, waiting.receive.open(peer, sender), now)

    def _progress(self, peer: PeerId, message: Done | Failed | Fenced, now: float) -> Iterator[Command]:
        key = PushKey(message.transfer_id, message.attempt)
        waiting = self._waiting.get(key)
        if waiting is None:
            if isinstance(message, Failed) and key not in self._ended:
                self._early[key] = _EarlyFailure(f"prefill gave up: {message.reason}", now + EARLY_S)
            return
        match message:
            case Done():
                commands = waiting.receive.done(peer, message, now=now)
            case Failed():
                commands = waiting.receive.failed(peer, message, now=now)
            case Fenced():
                commands = waiting.receive.fenced(peer, message)
        yield from self._commands(key, commands, now)

    def _commands(self, key: PushKey, commands: tuple[Reply | Report, ...], now: float) -> Iterator[Command]:
        for command in commands:
            if isinstance(command, Report):
                yield self._end(key, command, now)
            else:
                yield command

    def _end(self, key: PushKey, report: Report, now: float) -> Ended:
        expected = self._waiting.pop(key).expected
        del self._by_request[expected.request_id]
        self._ended[key] = max(expected.deadline, now + self.quarantine_s)
        return Ended(expected.request_id, report)

    def _sender(self, hello: Hello, num_blocks: tuple[int, ...]) -> Sender:
        """What each rank of that prefill engine owes this decode rank for so many blocks."""
        heads, mine = self.fingerprint.kv_heads, self.welcome.tp_rank
        prefill, decode = Sharding(hello.tp_size, heads), Sharding(self.welcome.tp_size, heads)
        owed = {}
        for push in plan_pushes(prefill, decode):
            if push.decode_rank == mine:
                ranks = RankPair(prefill, decode, push)
                per_group = (bytes_per_block(self.welcome.regions, ranks, group) for group in range(len(num_blocks)))
                owed[push.prefill_rank] = sum(n * b for n, b in zip(num_blocks, per_group, strict=True))
        return Sender(hello.boot_id, hello.tp_rank, owed)
