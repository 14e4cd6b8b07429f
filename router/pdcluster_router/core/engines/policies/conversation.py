"""Gives each conversation a number: the same for all of its requests, and in every process.

    what the client names   a header or field with a session: the number is of its value alone
    prompt_cache_key        its value, and the conversation's opening
    messages                the opening: how the list begins, and the first message of the user
    prompt                  its first 4 KiB, or its first 1 KiB
    none of these           the number of its adapter, if its model is one: engines keep few adapters ready

An opening stays while a conversation grows, and tells apart conversations that share a system prompt. Bytes are
compared, not tokens: the router has no tokenizer. At most 5 KiB are hashed and 128 KiB looked through.
Names of a person (``user``, ``safety_identifier``) are not used: a gateway gives all its clients the same.
``docs/decisions/0025-affinity.md`` has the sources of the names.
"""

from __future__ import annotations

import re
from typing import Final
from zlib import crc32

from pdcluster_router.core.apis.rewrite import ClientBody
from pdcluster_router.core.engines.placement import RequestFacts

SESSION_HEADERS: Final = frozenset(
    (
        b"x-session-id",
        b"x-claude-code-session-id",
        b"x-claude-code-agent-id",
        b"session-id",
        b"session_id",
        b"thread-id",
        b"x-session-affinity",
        b"x-opencode-session",
    )
)
"""Names that vLLM, Claude Code, Codex, pi and OpenCode give a session, and an agent or thread within one."""
LEAST_BYTES: Final = 1 << 10
"""For a shorter prompt a return to its engine saves too little: some 256 tokens, a few blocks."""
OPENING_BYTES: Final = 4 << 10
"""Bytes hashed of the user's first message, or of a prompt: a thousand tokens. More would tell apart questions about
one document; fewer would not tell apart agents' conversations that begin with one template."""
_HEAD_BYTES: Final = 1 << 10
"""The most bytes hashed of the messages before the user's first message."""
_SEARCHED_BYTES: Final = 128 << 10
"""How far into a body the user's first message is looked for: a system prompt of 32,000 tokens fits. The search takes
half as long as the scan of such a body."""

_MOST_NAME_BYTES: Final = 512
"""Longer values name no session."""
_BACKSLASH: Final = ord("\\")
_EACH_HAS: Final = b"session"
"""The headers of every request that names a session have this word: agents and threads are named beside a session."""
_USER: Final = re.compile(
    rb'"role"\s*:\s*"user"\s*(?:,\s*"name"\s*:\s*"[^"\\]*"\s*)?(?P<content>,\s*"content"\s*:\s*)?'
)
_VALUE: Final = re.compile(
    rb'"(?:[^"\\]++|\\.)*+"|\[(?:[^"\[\]]++|"(?:[^"\\]++|\\.)*+")*+\]',
    re.DOTALL,
)
"""A text, or a list of parts."""


def number_of(request: RequestFacts) -> int | None:
    """The conversation's number, in 32 bits; of a request that belongs to none, its adapter's. None: the request names
    no session and no cache key, is too short to have an opening, and asks for a base model."""
    named = request.body.session_id or _named_by_header(request.headers)  # vLLM too asks the body first.
    if named:
        return crc32(named)
    opening = _opening_of(request.body)
    cache_key = request.body.prompt_cache_key
    if cache_key:
        return crc32(cache_key, opening or 0)
    return request.adapter if opening is None else opening


def _named_by_header(lines: bytes) -> bytes:
    if _EACH_HAS not in lines:
        return b""
    headers = (line.partition(b": ") for line in lines.split(b"\r\n"))
    named = [value for name, _, value in headers if name in SESSION_HEADERS and len(value) <= _MOST_NAME_BYTES]
    return b" ".join(named)


def _opening_of(body: ClientBody) -> int | None:
    messages, prompt = memoryview(body.messages), memoryview(body.prompt)
    if len(messages) >= LEAST_BYTES:
        return _opening_of_messages(messages)
    if len(prompt) >= LEAST_BYTES:
        return crc32(prompt[: OPENING_BYTES if len(prompt) >= OPENING_BYTES else LEAST_BYTES])
    return None


def _opening_of_messages(messages: memoryview) -> int:
    """Hashes nothing that a later request adds: additions come behind the user's first message."""
    user = _USER.search(messages, 0, _SEARCHED_BYTES)
    if user is None:
        return crc32(messages[:OPENING_BYTES])
    head = crc32(messages[: min(_HEAD_BYTES, user.start())])
    if user["content"] is None:  # The content comes first in this message: it lies before the role.
        return crc32(messages[max(0, user.start() - OPENING_BYTES) : user.start()], head)
    return crc32(_first_value(bytes(messages[user.end() : user.end() + OPENING_BYTES])), head)


def _first_value(content: bytes) -> bytes:
    """The text or list that ``content`` begins with, without what follows; all of ``content`` if the value is cut
    off."""
    quote = content.find(b'"', 1)
    if content[:1] == b'"' and quote > 0 and content[quote - 1] != _BACKSLASH:
        return content[: quote + 1]  # Nearly always the case, and six times as fast.
    value = _VALUE.match(content) if quote > 0 else None
    return value[0] if value else content
