"""The settings that a running router takes anew on SIGHUP, and those that need a restart.

SIGHUP --> all settings as at the start --usable--> TAKEN ones hold; others that differ are told
                                          +--not--> nothing changes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.settings.router_settings import FLAGS, Settings, build_settings

TAKEN: Final = frozenset(
    (
        "prefill_urls",
        "decode_urls",
        "policy",
        "unknown_models",
        "model_aliases",
        "trusted_proxies",
        "forwarded_header",
        "request_timeout_s",
        "first_byte_timeout_s",
        "whole_answer_timeout_s",
        "idle_timeout_s",
        "keep_alive_s",
        "prefill_timeout_s",
        "max_prefill_attempts",
        "max_decode_attempts",
        "on_prefill_failure",
        "max_prefill_backlog_tokens",
        "max_queued_requests",
        "queue_timeout_s",
        "reservation_timeout_s",
        "connect_timeout_s",
        "max_engine_connections",
        "engine_idle_s",
        "max_body_bytes",
        "probe_interval_s",
        "probe_timeout_s",
        "engine_gone_s",
        "drain_timeout_s",
        "trace_sample_ratio",
    )
)
"""The rest belongs, whole or in part, to what a router makes once, at its start: sockets, files, threads, processes,
the ports for TLS and PROXY headers (``client_read_timeout_s``, ``client_linger_s``), and the room for engines' calls
(``max_reservation_bytes``)."""


@dataclass(frozen=True, slots=True)
class SettingChanges:
    """The difference between what a router was told and what it is told now."""

    running: Settings
    """All settings, as they hold once they are taken."""
    told: Settings
    """The settings to compare with next time."""
    taken: tuple[str, ...]
    """The flags of the settings that have changed."""
    left: tuple[str, ...]
    """The flags of those that will hold after a restart."""


class SettingReader:
    """Reads a router's settings anew. One owner."""

    def __init__(self, told: Settings, read: Callable[[], Settings]) -> None:
        """``told``: the settings at the start. ``read``: returns those of now, or raises ConfigError."""
        self._told = told
        self._read = read

    def read(self, running: Settings) -> SettingChanges:
        """The changes since the settings were read last. ``running``: those that the router goes by, real ports
        included. Settings that need a restart are told each time.

        Raises:
            ConfigError: A value cannot be used, or what is taken does not fit what is left. Nothing has changed.
        """
        now = self._read()
        names = [name for name in Settings.model_fields if getattr(self._told, name) != getattr(now, name)]
        values = {name: getattr(now, name) for name in names if name in TAKEN}
        left = tuple(FLAGS.of(name) for name in names if name not in TAKEN)
        try:
            build_settings(**{**dict(running), **values})
        except ConfigError as error:
            still = f" (with {', '.join(left)} as before, until a restart)" if left else ""
            raise ConfigError(f"{error}{still}") from error
        return SettingChanges(
            running.model_copy(update=values),
            self._told.model_copy(update=values),
            tuple(map(FLAGS.of, values)),
            left,
        )

    def took(self, changes: SettingChanges) -> None:
        """The router goes by ``changes``. Until then the same changes are read again."""
        self._told = changes.told
