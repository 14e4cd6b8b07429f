"""Clients' keys: which ones exist, which one a request shows, and what each may ask for. Pure: ``access.py`` reads the
file.

    # comment
    9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c1b0f00a08  team-a     what sha256sum prints, and a name
    60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752  team-b max_concurrent=8 weight=3 priority=-1
    defaults requests_per_minute=600                                          for each key whose line does not say so

Beside tokens of an identity provider a line ``jwt:NAME`` has what a client of tokens may ask for, and the defaults hold
for each client of tokens that no line names.

A key itself is in no file, log or error: a line holds its SHA-256, and no line is ever quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.apis.openai_errors import JWT_PREFIX
from pdcluster_router.core.clients.fair_queue import MAX_PRIORITY, MAX_WEIGHT, NO_KEY, KeyFlow
from pdcluster_router.core.clients.key_limits import EVERY_TOKEN, MAX_LIMIT, NO_LIMITS, KeyLimits, LimitedBy

MAX_KEYS: Final = 1000
"""Each key costs every request 0.1 us: a shown key is compared with all, so that the time of the check tells
nothing."""

MAX_NAME_CHARS: Final = 128
"""Of a client of tokens. A UUID has 36, a Kubernetes ServiceAccount or a SPIFFE id can have more than 64."""

CURE: Final = "printf %s KEY | sha256sum"
_LINE: Final = re.compile(r"([0-9a-fA-F]{64})(?:\s+(\S+)(?:\s+(\S.*))?)?")
_DEFAULTS: Final = "defaults"
_BOUNDS: Final = {
    **{by.value: (1, MAX_LIMIT) for by in LimitedBy},
    "weight": (1, MAX_WEIGHT),
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
}
"""The words that may stand behind a name, and the least and most of each."""
_SETTING: Final = re.compile(rf"({'|'.join(_BOUNDS)})=(-?[0-9]{{1,10}})")
_LIKE_A_SETTING: Final = re.compile(
    rf"(?:{'|'.join(by.value for by in LimitedBy)})|(?:{'|'.join(_BOUNDS)})=.*|[^=]+=-?[0-9]+"
)
"""A misspelt limit matches too. Taken for a name, it would leave its key without a limit, and no error would say so."""
_TOKEN_NAME: Final = re.compile(rf"{JWT_PREFIX}([!-~]{{1,{MAX_NAME_CHARS}}})")
_COMMENT: Final = re.compile(r"(?:^|\s)#.*")
"""Behind the name of a client of tokens, which may have ``#`` in it."""
_SETTINGS: Final = (
    f"{', '.join(f'{by.value}=N' for by in LimitedBy)} (N from 1 to {MAX_LIMIT}), weight=N (1 to {MAX_WEIGHT}), "
    f"priority=N ({-MAX_PRIORITY} to {MAX_PRIORITY})"
)
_NO_NAME: Final = "-"
"""The name that sha256sum prints for its standard input. As a name, it would give many keys one share of the room."""
_BEARER: Final = b"bearer "
KEY_HEADERS: Final = frozenset((b"authorization", b"x-api-key"))
"""The headers in which a request may show its key."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys that clients may show: the digest of each, and its name for logs."""

    _digests: tuple[tuple[bytes, str], ...] = field(repr=False)
    limits: Mapping[str, KeyLimits] = field(repr=False)
    """By the key's name. Keys without limits are not in it."""
    _flows: Mapping[str, KeyFlow] = field(repr=False)
    limits_of_others: KeyLimits = field(default=NO_LIMITS, repr=False)
    """Of each client of tokens that is not in ``limits``."""
    _others: KeyFlow = field(default=NO_KEY, repr=False)
    has_tokens: bool = field(default=False, repr=False)
    """Whether clients may show tokens in place of keys."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self._digests)

    @property
    def are_several(self) -> bool:
        return self.has_tokens or len(self._digests) > 1

    def flow_of(self, name: str) -> KeyFlow:
        """The flow of the requests with a key, or a token, of this name."""
        return self._flows.get(name) or replace(self._others, name=name)

    def name_of(self, key: bytes) -> str | None:
        """The name of this key; None: it is no client's. Compares with all keys, so that the time tells nothing."""
        shown = sha256(key).digest()
        found = None
        for digest, name in self._digests:
            if compare_digest(digest, shown):
                found = name
        return found


def only_tokens() -> ApiKeys:
    """No keys: clients show tokens, without limits."""
    return ApiKeys((), {}, {}, has_tokens=True)


def parse_keys(text: str, *, has_tokens: bool = False) -> ApiKeys:
    """The keys that a file names. ``has_tokens``: clients may show tokens too, so the file needs no key.

    Raises:
        ConfigError: A line has no digest, has the digest of another line, or has limits, a weight or a priority that
            cannot be used or differ from those of another line with its name. Or there are two lines with defaults, no
            keys, or more than ``MAX_KEYS``.
    """
    found: dict[bytes, str] = {}
    said_of: dict[str, dict[str, int]] = {}
    lines = list(_lines_of(text))
    defaults = _defaults_in(lines)
    for number, said in lines:
        if _is_of_defaults(said):
            continue
        digest, name, settings = _key_line(number, said, has_tokens=has_tokens)
        if digest in found:
            raise ConfigError(f"line {number} has the key of {found[digest]} again: remove one of the two")
        if digest:
            found[digest] = name
        if said_of.setdefault(name, settings) != settings:
            cure = "write the same in both"
            raise ConfigError(f"line {number} gives {name} other limits than a line before it, or another turn: {cure}")
    num = max(len(found), len(said_of))
    if not (found or (has_tokens and lines)) or num > MAX_KEYS:
        raise ConfigError(f"it has {num} keys: write 1 to {MAX_KEYS} lines, each as `{CURE}` prints it")
    whole = {name: {**defaults, **settings} for name, settings in said_of.items()}
    limits = {name: _limits_of(settings) for name, settings in whole.items()}
    flows = {name: _flow_of(name, settings) for name, settings in whole.items()}
    limited = {name: each for name, each in limits.items() if each != NO_LIMITS}
    others = _limits_of(defaults) if has_tokens else NO_LIMITS
    return ApiKeys(tuple(found.items()), limited, flows, others, _flow_of("", defaults), has_tokens)


def _is_of_defaults(said: str) -> bool:
    return said.split()[0] == _DEFAULTS


def _defaults_in(lines: list[tuple[int, str]]) -> dict[str, int]:
    numbers = [(number, said) for number, said in lines if _is_of_defaults(said)]
    if len(numbers) > 1:
        raise ConfigError(f"line {numbers[1][0]} has defaults again: write one such line")
    return _settings_in(numbers[0][1].removeprefix(_DEFAULTS), numbers[0][0]) if numbers else {}


def _key_line(number: int, said: str, *, has_tokens: bool) -> tuple[bytes, str, dict[str, int]]:
    """The digest, the name and the settings of one key. The digest is empty for a client of tokens."""
    if said.startswith(JWT_PREFIX):
        client, *words = said.split()
        _check_token_name(number, client, has_tokens=has_tokens)
        return b"", client, _settings_in(" ".join(words), number)
    match = _LINE.fullmatch(said)
    if match is None:
        raise ConfigError(f"line {number} is not a SHA-256 in hex and a name: write what `{CURE}` prints")
    name = match[2] or _NO_NAME
    if _LIKE_A_SETTING.fullmatch(name):
        raise ConfigError(f"line {number} has a limit in the place of its name: write a name, or -, before it")
    if has_tokens and name.startswith(JWT_PREFIX):
        raise ConfigError(f"line {number} names its key {JWT_PREFIX}..., as clients of tokens: choose another name")
    settings = _settings_in(match[3] or "", number)
    return bytes.fromhex(match[1]), f"line-{number}" if name == _NO_NAME else name, settings


def _check_token_name(number: int, client: str, *, has_tokens: bool) -> None:
    """Raises: ConfigError: No token can have this name."""
    if not has_tokens:
        cure = "add --jwt-key-set, or take the line out"
        raise ConfigError(f"line {number} names a client of tokens, which this router does not read: {cure}")
    if client == EVERY_TOKEN:
        raise ConfigError(f"line {number} names all clients of tokens: write {_DEFAULTS} in place of {EVERY_TOKEN}")
    match = _TOKEN_NAME.fullmatch(client)
    if match is None or _LIKE_A_SETTING.fullmatch(match[1]):
        want = f"1 to {MAX_NAME_CHARS} visible ASCII characters"
        raise ConfigError(f"line {number} has no name of a client behind {JWT_PREFIX}: write the claim, {want}")


def _lines_of(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, without their comments, each with its number."""
    for number, line in enumerate(text.splitlines(), start=1):
        is_of_token = line.lstrip().startswith(JWT_PREFIX)
        if said := (_COMMENT.sub("", line) if is_of_token else line.partition("#")[0]).strip():
            yield number, said


def _settings_in(text: str, number: int) -> dict[str, int]:
    matches = [_SETTING.fullmatch(word) for word in text.split()]
    given = {match[1]: int(match[2]) for match in matches if match is not None}
    if len(given) < len(matches) or not all(_BOUNDS[word][0] <= n <= _BOUNDS[word][1] for word, n in given.items()):
        cure = f"write each of {_SETTINGS} once at most"
        raise ConfigError(f"line {number} has something else than limits behind its name: {cure}")
    return given


def _limits_of(settings: Mapping[str, int]) -> KeyLimits:
    return KeyLimits(**{by.value: settings[by.value] for by in LimitedBy if by.value in settings})


def _flow_of(name: str, settings: Mapping[str, int]) -> KeyFlow:
    return KeyFlow(name, weight=settings.get("weight", 1), priority=settings.get("priority", 0))


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
