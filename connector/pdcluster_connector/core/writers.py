"""The prefill ranks that write into one decode rank: debt and state of each. ``receiving.py`` changes the state.

WRITING --done--> DONE --again--> WRITING
   +--revoke--> REVOKED --fenced and clean--> FENCED
                   +--fenced but unclean, or quarantine--> CUTTING --cut--> FENCED
DONE --told that it may let its source go--> FENCED
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from fractions import Fraction
from typing import Final, NewType

from pdcluster_protocol.ids import Attempt, BootId
from pdcluster_protocol.side_channel import ContentSums

PeerId = NewType("PeerId", bytes)
"""One prefill rank's connection to this decode rank."""

SessionId = NewType("SessionId", str)
"""The transport session on which a prefill engine writes. With ``sessions: shared`` all engines write on one."""


@dataclass(frozen=True, slots=True)
class Debt:
    """A prefill rank's debt for one request, as decode works it out.

    ``writers``: every rank of its engine that writes to this decode rank. ``coverage``: how many of decode's ``needed``
    heads this rank fills; the coverages of all writers must add up to ``needed``. ``has_draft``: the heads include a
    draft model's.
    """

    num_bytes: int
    coverage: Fraction
    needed: Fraction
    writers: frozenset[int]
    has_draft: bool = False


@dataclass(frozen=True, slots=True)
class Sender:
    """A prefill rank that asks to write: the life of its engine, its rank, its session and its debt."""

    boot_id: BootId
    rank: int
    session: SessionId
    debt: Debt


class WriterState(Enum):
    """The state of one granted prefill rank."""

    WRITING = auto()
    REVOKED = auto()
    CUTTING = auto()
    DONE = auto()
    FENCED = auto()


MAY_WRITE: Final = frozenset({WriterState.WRITING, WriterState.REVOKED, WriterState.CUTTING})


@dataclass(slots=True)
class Writer:
    """One granted prefill rank."""

    attempt: Attempt
    sender: Sender
    until: float
    """WRITING: when its lease lapses. REVOKED: when its quarantine ends."""
    state: WriterState = WriterState.WRITING
    num_pushes: int = 1
    """2 once decode has asked for a second push."""
    sums: ContentSums | None = None
    """The sums of its pushed content, from its ``Done``. With them the rank keeps its source while it is ``DONE``."""

    @property
    def keeps_source(self) -> bool:
        """Whether the rank keeps its source until decode says ``Settled`` or ``Again``."""
        return self.state is WriterState.DONE and self.sums is not None
