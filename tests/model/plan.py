"""What one scope of the walk contains: how many of each party, which faults, and the cores that take part.

A scope's text is printed with its figures, so nobody has to guess what a number of states stands for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Final

from pdcluster_connector.core.link import Link
from pdcluster_connector.core.peers import Incoming
from pdcluster_connector.core.ranges import Spans
from pdcluster_connector.core.reception import Reception
from pdcluster_connector.core.sending import Push
from pdcluster_connector.core.source_hold import SourceHolds
from pdcluster_connector.core.tp_mapping import Sharding, plan_pushes
from pdcluster_connector.core.writers import Debt
from pdcluster_connector.scheduler.decode import DecodeScheduler
from pdcluster_protocol.secret import make_secret
from pdcluster_protocol.side_channel import ContentSums, Hello
from pdcluster_router.core.requests.pairing import Pairing

SECRET: Final = make_secret("of the model only")
DEADLINE_MS: Final = 60_000
BLOCK_TOKENS: Final = 4
TOKEN_BYTES: Final = 16
BLOCK_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES


class EvenPart(Incoming):
    """One of several ranks that owe a decode rank as much each."""

    def debt(self, spans: Spans) -> Debt:
        num_tokens = sum(stop - start for group in spans for start, stop in group)
        return Debt(num_tokens * TOKEN_BYTES, self.link.coverage, self.needed, self.writers)


class AllPairsReception(Reception):
    """Every prefill rank owes every decode rank a part, as when one latent is split by stripes (MLA)."""

    def _incoming(self, hello: Hello) -> Incoming:
        num_ranks = hello.layout.tp_size
        return EvenPart(Link((), (), Fraction(1, num_ranks)), Fraction(1), frozenset(range(num_ranks)))


@dataclass(frozen=True)
class Cores:
    """The classes that the walk drives. Mutants replace one."""

    push: type[Push] = Push
    reception: type[Reception] = Reception
    holds: type[SourceHolds[int]] = SourceHolds
    scheduler: type[DecodeScheduler] = DecodeScheduler
    pairing: type[Pairing] = Pairing
    answers_clean_when_gone: bool = False
    """Mutant of the lane: it answers a revoke of a push that it has forgotten with clean, even after a cut."""


@dataclass(frozen=True)
class Faults:
    """How often each fault may happen in one history."""

    lose: int = 0
    """A side-channel message is lost."""
    repeat: int = 0
    """A side-channel message arrives twice."""
    reorder: int = 0
    """A side-channel message overtakes those before it."""
    write: int = 0
    """A write ends badly; it may still land until decode closes its session."""
    crash_prefill: int = 0
    """A prefill engine dies and starts anew; what it had sent may still land."""
    crash_decode: int = 0
    """The decode engine dies and starts anew."""
    crash_router: int = 0
    """The router dies: every call of its is cut."""
    cut_call: int = 0
    """The connection of decode's calls to the metaserver breaks."""
    prefill_fails: int = 0
    """Prefill answers the router with an error."""
    prefill_late: int = 0
    """The router's prefill timeout passes while prefill still computes."""
    cancel: int = 0
    """The client leaves."""
    idle: int = 0
    """Decode closes a session on which nothing was said for long, though it may be in use."""
    spoil: int = 0
    """What a decode rank holds of an attempt is not what was pushed. Only where content is compared."""
    early: int = 0
    """A timer fires although something else can still happen: lease, quarantine, hold, any deadline."""

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{name} {count}" for name, count in given.items() if count) or "none"


FAULT_NAMES: Final = tuple(f.name for f in fields(Faults))


@dataclass(frozen=True)
class Plan:
    """One scope."""

    name: str
    prefill_ranks: int = 1
    decode_ranks: int = 1
    engines: int = 2
    """Prefill engines, which is the number of attempts too."""
    requests: int = 1
    """Each takes decode's blocks, and prefill's, when the one before has given them back."""
    are_together: bool = False
    """Requests run side by side instead, each in blocks of its own."""
    writes: int = 1
    """For each push."""
    is_lazy: bool = False
    """Each write is submitted in a step of its own; otherwise all are, at the moment of the grant."""
    all_pairs: bool = False
    must_receive: bool = False
    """Every request must get its KV in the end: for faults that another attempt makes good."""
    is_prompt: bool = False
    """Nobody may have to wait for a request's deadline: for faults that leave no message unsent."""
    recomputes: bool = True
    compares: bool = False
    """Content is compared, and pushed again where it differs."""
    shares_session: bool = False
    """All prefill engines write by one session of a decode rank: cutting it cuts them all."""
    faults: Faults = Faults()
    cores: Cores = field(default_factory=Cores)

    @property
    def num_heads(self) -> int:
        return self.prefill_ranks * self.decode_ranks

    @property
    def sums(self) -> ContentSums:
        """Of right content: each rank says nothing but zeros, for each head of a decode rank and for the range."""
        return ContentSums(bytes(8 * len(Sharding(self.decode_ranks, self.num_heads).heads_of(0))), bytes(8))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(prefill rank, decode rank) of each lane of one engine, as the connector plans them."""
        if self.all_pairs:
            return tuple((p, d) for p in range(self.prefill_ranks) for d in range(self.decode_ranks))
        prefill, decode = Sharding(self.prefill_ranks, self.num_heads), Sharding(self.decode_ranks, self.num_heads)
        return tuple((push.prefill_rank, push.decode_rank) for push in plan_pushes(prefill, decode))

    @property
    def reception(self) -> type[Reception]:
        return AllPairsReception if self.all_pairs and self.cores.reception is Reception else self.cores.reception

    def __str__(self) -> str:
        compared = ", content compared" if self.compares else ""
        together = " side by side" if self.are_together else ""
        return (
            f"{self.name}: {self.prefill_ranks} x {self.decode_ranks} ranks{' (all pairs)' if self.all_pairs else ''}, "
            f"{self.engines} attempts, {self.requests} requests{together}, {self.writes} writes a push"
            f"{' in steps of their own' if self.is_lazy else ''}"
            f"{compared}{', KV must come' if self.must_receive else ''}"
            f"{', no wait for a deadline' if self.is_prompt else ''}; "
            f"faults {self.faults}"
        )


class Broken(Exception):
    """A promise does not hold in some state. ``invariant``: I1 ... I5."""

    def __init__(self, invariant: str, why: str) -> None:
        super().__init__(f"{invariant}: {why}")
        self.invariant = invariant
