"""Parses the file that names engines: one a line. ``engines/engine_file.py`` reads it.

# role    URL                        revision, if there are several
prefill   http://10.0.0.5:8100
decode    http://10.0.0.9:8200       revision=b
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import Member

_REVISION: Final = "revision="
_MAX_SHOWN: Final = 200
"""Characters of a line that an error shows: a file of another kind may have very long ones."""
_REVISION_FORM: Final = re.compile(rf"{_REVISION}[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
_FORM: Final = "write prefill or decode, a URL like http://HOST:PORT, and revision=NAME where there are several"
_ROLES: Final = {role.value: role for role in Role}


def engines_in(text: str, checked_url: Callable[[str], str]) -> tuple[Member, ...]:
    """The engines that the lines name, in their order; at least one of each role.

    ``checked_url``: the URL as engines are asked by it; raises ValueError if it is none.

    Raises:
        ConfigError: A line is not understood, an engine is named twice, or a role has no engine. Names the line.
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
    if missing := [name for name, role in _ROLES.items() if all(member.role is not role for member in members)]:
        raise ConfigError(f"it names no {' and no '.join(missing)} engine: name at least one of each role")
    return tuple(members)


def _engine_of(words: list[str], checked_url: Callable[[str], str], number: int) -> Member:
    role, url, revision = (*words, "", "")[:3]
    is_named = len(words) == 2 or (len(words) == 3 and _REVISION_FORM.fullmatch(revision) is not None)
    if role not in _ROLES or not is_named:
        raise ConfigError(f"line {number}: {' '.join(words)[:_MAX_SHOWN]!r} names no engine: {_FORM}")
    try:
        return Member(checked_url(url), _ROLES[role], revision.removeprefix(_REVISION))
    except ValueError as error:
        raise ConfigError(f"line {number}: {error}") from error
