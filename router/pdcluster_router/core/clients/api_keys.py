"""Clients' keys: which there are, whose a request shows, and what each may ask for. Pure: ``access.py`` reads the file.

    # comment
    9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c1b0f00a08  team-a     what sha256sum prints, and a name
    60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752  team-b max_concurrent=8 requests_per_minute=600

A key itself is in no file, log or error: a line holds its SHA-256, and no line is ever quoted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.clients.key_limits import MAX_LIMIT, NO_LIMITS, KeyLimits, LimitedBy

MAX_KEYS: Final = 1000
"""Each key costs every request 0.1 us: the key shown is compared with all, so that the time tells nothing."""

CURE: Final = "printf %s KEY | sha256sum"
_LINE: Final = re.compile(r"([0-9a-fA-F]{64})(?:\s+(\S+)(?:\s+(\S.*))?)?")
_LIMIT: Final = re.compile(rf"({'|'.join(by.value for by in LimitedBy)})=([0-9]{{1,10}})")
_LIKE_A_LIMIT: Final = re.compile(rf"(?:{'|'.join(by.value for by in LimitedBy)})(?:=.*)?|[^=]+=[0-9]+")
"""A misspelt limit matches too. Taken for a name, it would leave its key without a limit, and no error would say so."""
_LIMITS: Final = ", ".join(f"{by.value}=N" for by in LimitedBy)
_NO_NAME: Final = "-"
"""The name that sha256sum prints for its standard input. As a name, it would give many keys one share of the room."""
_BEARER: Final = b"bearer "
KEY_HEADERS: Final = frozenset((b"authorization", b"x-api-key"))
"""Where a request may show its key."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys that clients may show: the digest of each, and its name for logs."""

    _digests: tuple[tuple[bytes, str], ...] = field(repr=False)
    limits: Mapping[str, KeyLimits] = field(repr=False)
    """By the key's name. Keys without limits are not in it."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self._digests)

    @property
    def are_several(self) -> bool:
        return len(self._digests) > 1

    def name_of(self, key: bytes) -> str | None:
        """The name of this key; None: it is no client's. Compares with all keys, so that the time tells nothing."""
        shown = sha256(key).digest()
        found = None
        for digest, name in self._digests:
            if compare_digest(digest, shown):
                found = name
        return found


def parse_keys(text: str) -> ApiKeys:
    """The keys that a file names.

    Raises:
        ConfigError: A line has no digest, has the digest of another line, or has limits that cannot be used or differ
            from those of another line with its name. Or there are no keys, or more than ``MAX_KEYS``.
    """
    found: dict[bytes, str] = {}
    limits: dict[str, KeyLimits] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        said = line.partition("#")[0].strip()
        if not said:
            continue
        match = _LINE.fullmatch(said)
        if match is None:
            raise ConfigError(f"line {number} is not a SHA-256 in hex and a name: write what `{CURE}` prints")
        digest = bytes.fromhex(match[1])
        if digest in found:
            raise ConfigError(f"line {number} has the key of {found[digest]} again: remove one of the two")
        is_named = match[2] not in (None, _NO_NAME)
        name = found[digest] = match[2] if is_named else f"line-{number}"
        said_limits = _limits_in(match[2] or "", match[3] or "", number)
        if limits.setdefault(name, said_limits) != said_limits:
            raise ConfigError(f"line {number} gives {name} other limits than a line before it: write the same in both")
    if not 0 < len(found) <= MAX_KEYS:
        raise ConfigError(f"it has {len(found)} keys: write 1 to {MAX_KEYS} lines, each as `{CURE}` prints it")
    return ApiKeys(tuple(found.items()), {name: each for name, each in limits.items() if each != NO_LIMITS})


def _limits_in(name: str, text: str, number: int) -> KeyLimits:
    if _LIKE_A_LIMIT.fullmatch(name):
        raise ConfigError(f"line {number} has a limit in the place of its name: write a name, or -, before it")
    matches = [_LIMIT.fullmatch(word) for word in text.split()]
    given = {match[1]: int(match[2]) for match in matches if match is not None}
    if len(given) < len(matches) or not all(0 < limit <= MAX_LIMIT for limit in given.values()):
        cure = f"write each of {_LIMITS} once at most, N from 1 to {MAX_LIMIT}"
        raise ConfigError(f"line {number} has something else than limits behind its name: {cure}")
    return KeyLimits(**given)


def key_in(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request shows: ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's clients do.

    None: it shows no key, two different ones, one of these headers twice, or an ``Authorization`` of another scheme.
    The same key in both headers is one key. A header without a key in it shows none: Anthropic's SDKs send one for a
    variable that is set to nothing.
    """
    shown = [(name, value) for name, value in headers if name in KEY_HEADERS]
    keys = {_key_of(name, value) for name, value in shown if not _is_bare(name, value)}
    is_each_once = len({name for name, _ in shown}) == len(shown)
    return (keys.pop() or None) if len(keys) == 1 and is_each_once else None


def _is_bare(name: bytes, value: bytes) -> bool:
    said = value.strip().lower()
    return not said or (name == b"authorization" and said == _BEARER.strip())


def _key_of(name: bytes, value: bytes) -> bytes:
    """The key in one header. Empty: the header is ``Authorization`` with another scheme."""
    if name != b"authorization":
        return value.strip()
    return value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else b""
