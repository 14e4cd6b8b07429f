"""Generated requests with their virtual times: agents, chats and single questions. The seed decides everything.

Each prompt has two forms: a chain of blocks for the modelled caches, and a real body of four bytes a token for the
policies.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.engines.placement import RequestFacts

BLOCK_TOKENS: Final = 128
Block: TypeAlias = tuple[str, int]
"""The session or template whose text it is, and the block's number in that text."""
_BYTES_PER_TOKEN: Final = 4
_HEADERS: Final = b"content-type: application/json\r\naccept: */*\r\n"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``at``: virtual seconds. ``blocks``: its prompt, in order; the answer's blocks follow them."""

    at: float
    request: RequestFacts
    blocks: tuple[Block, ...]
    num_answer_blocks: int
    session: str

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS

    @property
    def with_answer(self) -> tuple[Block, ...]:
        """Blocks of prompt and answer, which decode then has cached. The next turn's prompt begins with them."""
        num_own = sum(whose == self.session for whose, _ in self.blocks)
        return self.blocks + tuple((self.session, num_own + index) for index in range(self.num_answer_blocks))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of sessions. Ranges are the least and the most: sizes in blocks, times in seconds."""

    num_templates: int
    """Number of system prompts (with tools) that the sessions share."""
    template: tuple[int, int]
    turns: tuple[int, int]
    asked: tuple[int, int]
    answered: tuple[int, int]
    pause_s: tuple[float, float]
    """Time between an answer and the next turn, for a tool or a person."""
    is_named: bool
    """Whether its requests name their session in a header."""


AGENTS: Final = Kind(3, (40, 160), (8, 40), (1, 12), (1, 4), (0.5, 6.0), is_named=True)
CHATS: Final = Kind(2, (4, 16), (1, 8), (1, 4), (1, 5), (5.0, 60.0), is_named=False)
ONCE: Final = Kind(1, (1, 1), (1, 1), (2, 60), (1, 3), (0.0, 0.0), is_named=False)


def unnamed(kind: Kind) -> Kind:
    """The same kind, whose requests name no session: only a conversation's beginning identifies it."""
    return Kind(kind.num_templates, kind.template, kind.turns, kind.asked, kind.answered, kind.pause_s, is_named=False)


def _agents(chance: random.Random, num_engines: int) -> list[Asked]:
    return made(chance, [(AGENTS, 16 * num_engines)])


def _unnamed_agents(chance: random.Random, num_engines: int) -> list[Asked]:
    return made(chance, [(unnamed(AGENTS), 16 * num_engines)])


def _chats(chance: random.Random, num_engines: int) -> list[Asked]:
    return made(chance, [(CHATS, 200 * num_engines)])


def _mixed(chance: random.Random, num_engines: int) -> list[Asked]:
    kinds = [(AGENTS, 15 * num_engines), (CHATS, 60 * num_engines), (ONCE, 150 * num_engines)]
    return made(chance, kinds)


def _once(chance: random.Random, num_engines: int) -> list[Asked]:
    return made(chance, [(ONCE, 500 * num_engines)])


TRACES: Final[dict[str, Callable[[random.Random, int], list[Asked]]]] = {
    "agents": _agents,
    "agents-unnamed": _unnamed_agents,
    "chats": _chats,
    "once": _once,
    "mixed": _mixed,
    "black-hole": _mixed,
}
"""By name. ``black-hole``: one engine of each role fails every request immediately."""

DURATION_S: Final = 300.0
"""Time within which all sessions begin."""


def made(chance: random.Random, kinds: list[tuple[Kind, int]]) -> list[Asked]:
    """The requests of all sessions, in the order of their times. ``kinds``: each kind, and its number of sessions."""
    asked: list[Asked] = []
    for number, (kind, num_sessions) in enumerate(kinds):
        templates = [chance.randint(*kind.template) for _ in range(kind.num_templates)]
        for session in range(num_sessions):
            template = chance.randrange(kind.num_templates)
            shared = tuple((f"template {number}.{template}", index) for index in range(templates[template]))
            asked += _session(chance, kind, f"session {number}.{session}", shared)
    return sorted(asked, key=lambda one: one.at)


def _session(chance: random.Random, kind: Kind, name: str, shared: tuple[Block, ...]) -> Iterator[Asked]:
    at = chance.uniform(0.0, DURATION_S)
    num_own = 0
    messages = [{"role": "system", "content": _text(shared[0][0], len(shared))}]
    for turn in range(chance.randint(*kind.turns)):
        num_asked, num_answered = chance.randint(*kind.asked), chance.randint(*kind.answered)
        messages.append({"role": "user", "content": _text(f"{name} {turn}", num_asked)})
        num_own += num_asked
        blocks = shared + tuple((name, index) for index in range(num_own))
        yield Asked(at, _request(kind, name, messages), blocks, num_answered, name)
        messages.append({"role": "assistant", "content": _text(f"answer {name} {turn}", num_answered)})
        num_own += num_answered
        at += num_answered * BLOCK_TOKENS * 0.02 + chance.uniform(*kind.pause_s)


def _request(kind: Kind, name: str, messages: list[dict[str, str]]) -> RequestFacts:
    line = b"x-session-id: %b\r\n" % name.replace(" ", "-").encode() if kind.is_named else b""
    body = json.dumps({"model": "m", "messages": messages, "stream": True}, separators=(",", ":")).encode()
    return RequestFacts(b"/v1/chat/completions", _HEADERS + line, parse_body(body), "")


def _text(begin: str, num_blocks: int) -> str:
    return begin.ljust(num_blocks * BLOCK_TOKENS * _BYTES_PER_TOKEN, ".")
