"""Parses the file that names engines: one a line. ``engines/engine_file.py`` reads it.

    # role    URL                        revision, where there are several
    prefill   http://10.0.0.5:8100       revision=a
    decode    http://10.0.0.9:8200       revision=a

No line is quoted: a file of another kind, named by mistake, may hold secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import Member

_REVISION: Final = "revision="
_REVISION_FORM: Final = re.compile(rf"{_REVISION}[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
_FORM: Final = "write prefill or decode, a URL like http://HOST:PORT, and revision=NAME where there are several"
_MAX_TOLD: Final = 3
_ROLES: Final = {role.value: role for role in Role}


def engines_in(text: str, checked_url: Callable[[str], str]) -> tuple[Member, ...]:
    """The engines that the lines name, in their order; of one revision at least there is one of each role.

    ``checked_url``: the URL as engines are asked by it; raises ValueError if it is none.

    Raises:
        ConfigError: A line is not understood, an engine is named twice, or no revision has both roles.
    """
    lines: dict[tuple[Role, str], int] = {}
    members: list[Member] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        member = _engine_of(words, checked_url, number)
        if (first := lines.setdefault((member.role, member.url), number)) != number:
            raise ConfigError(f"line {number}: {member.url} is named in line {first} already: leave one of them out")
        members.append(member)
    _require_pair(members)
    return tuple(members)


def last_prefills(before: Collection[Member], now: Collection[Member]) -> tuple[Member, ...]:
    """The prefill engines that are named no more, of revisions that keep none of theirs: as engines that finish.

    A decode engine of their revision may have requests that are not prefilled yet, and a new engine may still load.
    An engine whose URL is named in another way now belongs to another revision, and must not serve the old one.
    """
    named = set(now)
    kept = {member.revision for member in before if member.role is Role.PREFILL and member in named}
    urls = {member.url for member in now}
    gone = (each for each in before if each.role is Role.PREFILL and each.revision not in kept and each.url not in urls)
    return tuple(replace(member, is_terminating=True) for member in gone)


def _engine_of(words: list[str], checked_url: Callable[[str], str], number: int) -> Member:
    role, url, revision = (*words, "", "")[:3]
    is_named = len(words) == 2 or (len(words) == 3 and _REVISION_FORM.fullmatch(revision) is not None)
    if role not in _ROLES or not is_named:
        raise ConfigError(f"line {number} names no engine: {_FORM}")
    if "@" in url:
        raise ConfigError(f"line {number}: the URL has a user or a password: give http://HOST:PORT only")
    try:
        return Member(checked_url(url), _ROLES[role], revision.removeprefix(_REVISION))
    except ValueError as error:
        raise ConfigError(f"line {number}: {error}") from error


def _require_pair(members: Sequence[Member]) -> None:
    """Raises: ConfigError: No request could be served."""
    found = {role: {member.revision for member in members if member.role is role} for role in Role}
    if found[Role.PREFILL] & found[Role.DECODE]:
        return
    told = " and ".join(f"{role.value} has {_some(found[role])}" for role in Role)
    raise ConfigError(
        f"no revision has engines of both roles: {told}: name a prefill and a decode engine of one revision"
    )


def _some(revisions: Collection[str]) -> str:
    """The first few of them; ``-`` stands for the one without a name."""
    first = ", ".join(each or "-" for each in sorted(revisions)[:_MAX_TOLD])
    return f"{first} and others" if len(revisions) > _MAX_TOLD else first or "none"
