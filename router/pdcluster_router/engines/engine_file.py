"""The engines that a file names, read again when the file changes: ``--discovery file``.

A file that cannot be used changes no engine. ``core/engines/engine_lines.py`` decides what the lines mean.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.engines.engine_lines import engines_in
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.files.reading import read_file
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.setting_forms import checked_url
from pdcluster_router.settings import Settings

logger = logging.getLogger(__name__)

_FLAG: Final = "--engines-file"


class EngineFile:
    """Follows the file. Event loop only."""

    def __init__(
        self, settings: Settings, tell: Callable[[tuple[Member, ...]], None], count_failure: Callable[[], None]
    ) -> None:
        """``tell``: called with all engines, now and whenever the file was read anew.

        Raises:
            ConfigError: The file cannot be used.
        """
        assert settings.engines_file is not None
        self.watch = FileWatch("engines", [settings.engines_file], settings.engines_file_interval_s, self._read)
        self.reason = ""
        """Why the file as it is now cannot be used; empty: it is in use."""
        self._settings = settings
        self._tell = tell
        self._count_failure = count_failure
        tell(read_engines(settings))

    @property
    def is_current(self) -> bool:
        """Whether the engines are those of the file as it was seen last."""
        return not self.reason

    def _read(self) -> None:
        """Raises: ConfigError: The file cannot be used; the engines stay."""
        try:
            members = read_engines(self._settings)
        except ConfigError as error:
            self.reason = str(error)
            self._count_failure()
            raise
        self.reason = ""
        logger.info("engines file read engines=%d", len(members))
        self._tell(members)


def read_engines(settings: Settings) -> tuple[Member, ...]:
    """The engines of ``settings.engines_file``.

    Raises:
        ConfigError: The file cannot be used.
    """
    path = settings.engines_file
    assert path is not None
    raw = read_file(path, _FLAG)
    try:
        members = engines_in(raw.decode(), checked_url)
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_FLAG} {path}: {error}") from error
    plain = [member.url for member in members if not member.url.startswith("https://")]
    if plain and (flags := settings.engine_tls_flags):
        raise ConfigError(
            f"{_FLAG} {path}: with {' and '.join(flags)} engines are asked by https, and {plain[0]} is not"
        )
    return members


def engine_file_of(
    settings: Settings, tell: Callable[[tuple[Member, ...]], None], count_failure: Callable[[], None]
) -> EngineFile | None:
    """None: the settings name no file."""
    return EngineFile(settings, tell, count_failure) if settings.engines_file is not None else None
