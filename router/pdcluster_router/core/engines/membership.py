"""The engines that a router knows, and which of them may get work: from discovery's words to changes of the roster.

    listed --> STARTING --ready--> SERVING <--ready / not ready--> NOT_READY
                  |                   |                                |
                  +-------------------+-- terminating -----------------+
                                      v
                   FINISHING --serves no more, or not listed any more--> LEAVING --not listed, and idle--> removed

SERVING engines get new work, and NOT_READY ones if the pool has nothing better. From each state, an engine that
discovery lists no longer becomes LEAVING. It is removed when its last request has ended, however long that takes.
Decides from one whole picture at a time; knows no engine object, no API and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from pdcluster_protocol.labels import Role


class EngineState(Enum):
    """The work that an engine may get. The pool's page and the metrics show the values."""

    STARTING = "starting"
    """It is not ready, and this router has not seen it ready yet: no work."""
    SERVING = "serving"
    """New work."""
    NOT_READY = "not_ready"
    """It was ready and is not any more. New work only if no serving engine can take it: on a busy node the kubelet's
    probe may come too late, and then a request that tries is better than one that is refused."""
    FINISHING = "finishing"
    """It terminates, but still answers: no new work. If no other prefill engine of its revision is left, a prefill
    engine may still be asked for the prompt of a request that a decode engine of that revision has already."""
    LEAVING = "leaving"
    """It terminates and answers no more, or no slice lists it: no work at all."""

    @property
    def is_probed(self) -> bool:
        """Whether it is worth asking how it is: it may get work now or later."""
        return self in _PROBED

    @property
    def was_ready(self) -> bool:
        """Whether it is ready, or was until its probe failed. It does not terminate."""
        return self is EngineState.SERVING or self is EngineState.NOT_READY


_PROBED = (EngineState.STARTING, EngineState.SERVING, EngineState.NOT_READY)


@dataclass(frozen=True, slots=True)
class EngineKey:
    """The identity of an engine. Another pod at the same address is another engine."""

    role: Role
    revision: str
    url: str
    uid: str


@dataclass(frozen=True, slots=True)
class Member:
    """One engine as discovery sees it. ``uid``: of its pod, empty where there is none."""

    url: str
    role: Role
    revision: str = ""
    uid: str = ""
    pod: str = ""
    """The pod's name, for people."""
    is_ready: bool = True
    is_serving: bool = True
    """Whether it answers, terminating or not."""
    is_terminating: bool = False

    @property
    def key(self) -> EngineKey:
        return EngineKey(self.role, self.revision, self.url, self.uid)

    @property
    def state(self) -> EngineState:
        """Its state if nothing is known of it from before."""
        if self.is_terminating:
            return EngineState.FINISHING if self.is_serving else EngineState.LEAVING
        return EngineState.SERVING if self.is_ready else EngineState.STARTING


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """One engine that the router has. ``is_busy``: a request of ours is there."""

    state: EngineState
    is_busy: bool


@dataclass(frozen=True, slots=True)
class Add:
    """A new engine; ``member.state`` says what it may get."""

    member: Member


@dataclass(frozen=True, slots=True)
class NewState:
    """This engine gets the work that ``state`` allows. If that is no new work, it finishes what it has, and keeps no
    idle connection."""

    key: EngineKey
    state: EngineState


@dataclass(frozen=True, slots=True)
class Remove:
    """Forget this engine: no slice lists it, and nothing runs there."""

    key: EngineKey


RosterChange: TypeAlias = Add | NewState | Remove


def plan(known: Mapping[EngineKey, KnownEngine], listed: Iterable[Member]) -> list[RosterChange]:
    """The changes that bring ``known`` in line with ``listed``, the whole picture. Empty: it is in line already.

    Call it when the picture changes and when an engine becomes idle. Of members with one key the last one counts.
    """
    members = {member.key: member for member in listed}
    commands: list[RosterChange] = []
    for key, engine in known.items():
        member = members.pop(key, None)
        state = EngineState.LEAVING if member is None else _next_state(engine.state, member)
        if member is None and not engine.is_busy:
            commands.append(Remove(key))
        elif engine.state is not state:
            commands.append(NewState(key, state))
    return commands + [Add(member) for member in members.values()]


def _next_state(now: EngineState, member: Member) -> EngineState:
    is_not_ready_again = member.state is EngineState.STARTING and now.was_ready
    return EngineState.NOT_READY if is_not_ready_again else member.state
