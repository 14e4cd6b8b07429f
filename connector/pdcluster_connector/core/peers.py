"""The prefill ranks that have said hello to one decode rank. This module keeps of each only what is still needed.

Every lane of a prefill rank is a peer of its own, and a hello holds the layout of a whole rank (20 KB and more). So

- of a refused peer only the reason is kept, and not for long;
- peers of one prefill rank share the rank's hello;
- a peer is forgotten with its session;
- a peer is forgotten after ``EARLY_S`` of silence if it has no session or its rank has a newer peer, and no receive
  waits for it.

``now`` is running seconds everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, TypeAlias

from pdcluster_connector.core.link import Link, full_coverage, owed_by, plan_link, require_possible
from pdcluster_connector.core.ranges import Spans
from pdcluster_connector.core.tp_mapping import related_ranks
from pdcluster_connector.core.writers import Debt, PeerId, SessionId
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.side_channel import Failed, Hello, Open, Welcome

EARLY_S: Final = 60.0
"""How long idle peers, refused peers and early failures are remembered: longer than any forward pass."""

MAX_PEERS: Final = 16384
"""Peers that are remembered. With one more, the peer that was silent longest is forgotten and must say hello again."""

MAX_REFUSED: Final = 1024
"""Refused peers whose reason is kept, to be told again. With one more, the oldest reason is forgotten."""

_Rank: TypeAlias = tuple[BootId, int]
"""One life of one prefill rank."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """The link of one prefill rank into this decode rank, and all ranks of its engine that must write here.

    ``needed``: the coverage that the links of all ``writers`` must add up to.
    """

    link: Link
    needed: Fraction
    writers: frozenset[int]
    has_draft: bool = False
    """Whether the prefill rank has a draft model's KV too."""

    def debt(self, spans: Spans) -> Debt:
        """The prefill rank's debt for a request of which decode wants ``spans``."""
        return Debt(self.link.owed_bytes(spans), self.link.coverage, self.needed, self.writers, self.has_draft)


def incoming_of(hello: Hello, welcome: Welcome) -> Incoming:
    """The link of the prefill rank that said ``hello`` into the decode rank of ``welcome``.

    Raises:
        ProtocolError: Prefill's layout is impossible, the engines hold a layer differently, or a TP size would split a
            head. Names the engines.
    """
    theirs, ours = hello.layout, welcome.layout
    require_possible(theirs, f"prefill engine {hello.engine_id}")
    stages, mine = range(theirs.num_stages), ours.tp_rank
    try:
        kept = hello.fingerprint
        related = related_ranks(theirs.tp_size, ours.tp_size, kept.all_kv_heads, has_state=bool(kept.state))
        link, needed = plan_link(theirs, ours), full_coverage(owed_by(theirs, ours))
    except (ProtocolError, ValueError, ArithmeticError) as error:
        engines = f"prefill engine {hello.engine_id} and decode engine {welcome.engine_id}"
        raise ProtocolError(f"{engines}: {error}") from error
    writers = frozenset(s * theirs.tp_size + rank for s in stages for rank, decode in related if decode == mine)
    return Incoming(link, needed, writers, theirs.has_draft)


@dataclass(frozen=True, slots=True)
class Greeting:
    """A prefill rank's hello, and the link worked out from it. All peers of the rank share them."""

    hello: Hello
    incoming: Incoming

    @property
    def rank(self) -> _Rank:
        return self.hello.boot_id, self.hello.layout.rank


@dataclass(slots=True)
class Peer:
    """A connection whose hello was accepted. ``session``: None until one is open for its engine."""

    greeting: Greeting
    heard_at: float
    session: SessionId | None = None


@dataclass(frozen=True, slots=True)
class _RefusedRank:
    reason: str
    until: float


@dataclass(slots=True)
class Peers:
    """The peers of one decode rank. Not thread-safe: the receiver thread owns it."""

    _known: dict[PeerId, Peer] = field(default_factory=dict)
    """The peer that was silent longest comes first."""
    _newest: dict[_Rank, PeerId] = field(default_factory=dict)
    """The newest peer of each rank."""
    _refused: dict[PeerId, _RefusedRank] = field(default_factory=dict)

    def get(self, peer: PeerId | None) -> Peer | None:
        """The peer, if its hello was accepted and it is not forgotten."""
        return self._known.get(peer) if peer is not None else None

    def refusal(self, peer: PeerId) -> str:
        """Why ``peer`` was refused; empty: it was not, or the reason is forgotten."""
        refused = self._refused.get(peer)
        return refused.reason if refused else ""

    def add(self, peer: PeerId, hello: Hello, work_out: Callable[[Hello], Incoming], *, now: float) -> None:
        """``peer`` is welcome, and the newest of its rank from now on. ``work_out`` is called unless the rank's last
        peer has said the same hello.

        Raises: As ``work_out``; then nothing has changed.
        """
        rank = hello.boot_id, hello.layout.rank
        older = self.get(self._newest.get(rank))
        greeting = older.greeting if older and older.greeting.hello == hello else Greeting(hello, work_out(hello))
        self.forget(peer)
        if len(self._known) >= MAX_PEERS:
            self.forget(next(iter(self._known)))
        self._known[peer] = Peer(greeting, now)
        self._newest[rank] = peer

    def refuse(self, peer: PeerId, reason: str, *, now: float) -> None:
        """``peer`` is not welcome: its hello is not kept."""
        self.forget(peer)
        if len(self._refused) >= MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[peer] = _RefusedRank(reason, now + EARLY_S)

    def heard(self, peer: PeerId, *, now: float) -> None:
        """A welcome peer has said something."""
        known = self._known[peer] = self._known.pop(peer)
        known.heard_at = now

    def forget(self, peer: PeerId) -> None:
        """``peer`` must say hello again."""
        self._refused.pop(peer, None)
        known = self._known.pop(peer, None)
        if known is not None and self._newest.get(known.greeting.rank) == peer:
            del self._newest[known.greeting.rank]

    def forget_session(self, session: SessionId) -> list[PeerId]:
        """The peers that used ``session``; each must say hello again."""
        gone = [peer for peer, known in self._known.items() if known.session == session]
        for peer in gone:
            self.forget(peer)
        return gone

    def prune(self, awaited: Callable[[], AbstractSet[PeerId]], *, now: float) -> None:
        """Forget old refusals, and idle peers for which no receive waits. ``awaited``: peers that receives wait for."""
        self._refused = {peer: refused for peer, refused in self._refused.items() if now < refused.until}
        idle = {peer for peer, known in self._known.items() if self._is_idle(peer, known, now)}
        for peer in idle - awaited() if idle else ():
            self.forget(peer)

    def _is_idle(self, peer: PeerId, known: Peer, now: float) -> bool:
        is_current = known.session is not None and self._newest.get(known.greeting.rank) == peer
        return not is_current and now - known.heard_at >= EARLY_S


@dataclass(frozen=True, slots=True)
class Parked:
    """An ``Open`` that came before its request was announced."""

    peer: PeerId
    message: Open
    expires_at: float


@dataclass(frozen=True, slots=True)
class EarlyFailure:
    """A prefill rank gave up before the scheduler announced the request."""

    peer: PeerId
    message: Failed
    until: float
