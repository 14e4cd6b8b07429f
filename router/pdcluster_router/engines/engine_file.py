"""The engines that a file names, read again when the file changes: ``--discovery file``.

    named --not named any more--> finishing, if its revision keeps no other prefill engine
                             |       +-- no decode engine of that revision is left, or first_byte_timeout_s --> gone
                             +--> gone, once its requests have ended

A file that cannot be used changes no engine. ``core/engines/engine_lines.py`` decides what the lines mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.engine_lines import engines_in, last_prefills
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.telemetry.scrub import scrub
from pdcluster_router.engines.roster import Roster
from pdcluster_router.files.reading import read_file
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.settings.forms import checked_url
from pdcluster_router.settings.router_settings import Settings

logger = logging.getLogger(__name__)

_FLAG: Final = "--engines-file"
_LOOK_S: Final = 1.0
"""Seconds between two looks whether engines that finish have finished."""


class EngineFile:
    """Follows the file. Event loop only."""

    def __init__(self, settings: Callable[[], Settings], roster: Roster, count_failure: Callable[[], None]) -> None:
        """``settings``: returns those that hold now. ``roster`` gets the engines, now and whenever the file was read
        anew.

        Raises:
            ConfigError: The file cannot be used.
        """
        first = settings()
        assert first.engines_file is not None
        self.watch = FileWatch("engines", [first.engines_file], first.engines_file_interval_s, self._read)
        self.reason = ""
        """Why the file as it is now cannot be used; empty: it is in use."""
        self._settings = settings
        self._roster = roster
        self._count_failure = count_failure
        self._named = read_engines(first)
        self._finishing: dict[Member, float] = {}
        """Until when each may still be asked, in the loop's time."""
        self._timer: asyncio.TimerHandle | None = None
        roster.update(self._named)

    @property
    def is_current(self) -> bool:
        """Whether the engines are those of the file as it was seen last."""
        return not self.reason

    def close(self) -> None:
        """No timer is left."""
        if self._timer is not None:
            self._timer.cancel()

    def _read(self) -> None:
        """Raises: ConfigError: The file cannot be used; the engines stay."""
        try:
            members = read_engines(self._settings())
        except ConfigError as error:
            self.reason = scrub(str(error))
            self._count_failure()
            raise
        self.reason = ""
        logger.info("engines file read engines=%d", len(members))
        until = asyncio.get_running_loop().time() + self._settings().first_byte_timeout_s
        still = last_prefills(self._finishing, members)
        self._finishing = {member: self._finishing[member] for member in still}
        self._finishing |= dict.fromkeys(last_prefills(self._named, members), until)
        self._named = members
        self._roster.update((*members, *self._finishing))
        self._look_at_finishing()

    def _look_at_finishing(self) -> None:
        """Lets go of engines that no request can want any more. Looks again in a second if others are left."""
        self.close()
        loop = asyncio.get_running_loop()
        decodes, now = {engine.revision for engine in self._roster.engines[Role.DECODE]}, loop.time()
        left = {each: until for each, until in self._finishing.items() if now < until and each.revision in decodes}
        if left.keys() != self._finishing.keys():
            self._finishing = left
            self._roster.update((*self._named, *left))
        if left:
            self._timer = loop.call_later(_LOOK_S, self._look_at_finishing)


def read_engines(settings: Settings) -> tuple[Member, ...]:
    """The engines of ``settings.engines_file``.

    Raises:
        ConfigError: The file cannot be used.
    """
    path = settings.engines_file
    assert path is not None
    raw = read_file(path, _FLAG)
    try:
        members = engines_in(raw.decode("utf-8-sig"), checked_url)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_FLAG} {path}: it is not text in UTF-8: name the file of engines") from error
    except ConfigError as error:
        raise ConfigError(f"{_FLAG} {path}: {error}") from error
    plain = [member.url for member in members if not member.url.startswith("https://")]
    if plain and (flags := settings.engine_tls_flags):
        told = f"{' and '.join(flags)}: engines are asked by https then, and {plain[0]} is not: write https://"
        raise ConfigError(f"{_FLAG} {path} with {told}")
    return members


def engine_file_of(
    settings: Callable[[], Settings], roster: Roster, count_failure: Callable[[], None]
) -> EngineFile | None:
    """None: the settings name no file."""
    return EngineFile(settings, roster, count_failure) if settings().engines_file is not None else None
