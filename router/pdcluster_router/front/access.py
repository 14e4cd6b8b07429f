"""Checks clients' API keys and their limits on the client port, and chooses the key that engines get.

    client keys?  no:  engines get the client's Authorization and x-api-key unchanged, and check them
                  yes: the client's key stays here; engines get the router's own VLLM_API_KEY, or none

The file of keys is read anew when it changes (``files/watch.py``). A file that cannot be used is logged once, and
the old keys stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.apis.openai_errors import (
    ApiError,
    no_key,
    prompt_over_limit,
    too_many_requests,
    too_many_running,
    too_many_tokens,
    wrong_key,
)
from pdcluster_router.core.apis.request_head import Headers
from pdcluster_router.core.clients.api_keys import KEY_HEADERS, ApiKeys, key_in, parse_keys
from pdcluster_router.core.clients.fair_queue import NO_KEY, KeyFlow
from pdcluster_router.core.clients.key_limits import KeyUses, LimitedBy, OverLimit
from pdcluster_router.core.clients.key_slot import KeySlot, rate_lines
from pdcluster_router.files.reading import read_file
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.settings.router_settings import Settings

logger = logging.getLogger(__name__)

_FLAG: Final = "--api-key-file"


class Access:
    """The API keys of one router's clients, and their uses. Event loop only."""

    def __init__(self, settings: Settings) -> None:
        """Raises: ConfigError: The file of keys cannot be used."""
        self._path = settings.api_key_file
        self.watch = (
            FileWatch("api keys", [self._path], settings.api_key_interval_s, self._read) if self._path else None
        )
        """None: there is no file."""
        self.keys = read_keys(self._path) if self._path else None
        """The current keys, a new object after each change; None: clients need no key."""
        self.uses = KeyUses(self.keys.limits if self.keys else {})
        """The uses of the keys that have limits."""
        self.on_change: Callable[[], None] = _does_nothing
        """Called when the keys have changed."""
        key = settings.engine_api_key
        self.engine_line = f"authorization: Bearer {key}\r\n".encode() if key else b""
        """The header line with the router's own key for engines; empty: the router has none."""

    def admit(self, headers: Headers) -> str | ApiError:
        """The name of the client's key, empty if clients need none; or the error for the client."""
        if self.keys is None:
            return ""
        key = key_in(headers)
        if key is None:
            return no_key()
        name = self.keys.name_of(key)
        return wrong_key() if name is None else name

    def enter(self, client: str, num_tokens: int, now: float) -> KeySlot | ApiError | None:
        """Counts a new request of the key named ``client``. Returns its slot, whose ``leave`` ends the request; the
        error, if the request is over a limit; or None, if the key has no limits.
        """
        use = self.uses.of(client)
        if use is None:
            return None
        refusal = use.enter(num_tokens, now=now)
        return KeySlot(use, num_tokens, now) if refusal is None else _error_of(client, refusal)

    def lines_for(self, client: str, now: float) -> bytes:
        """Header lines with the rates of this key, for the answer to a refused request; empty: the key has no rates."""
        use = self.uses.of(client)
        return b"" if use is None else rate_lines(use, now)

    def names(self) -> frozenset[str]:
        """The names of all keys; only an empty name if clients need no key."""
        return frozenset(("",) if self.keys is None else self.keys.names)

    def flow_of(self, client: str) -> KeyFlow:
        """The flow of a request that has to wait. ``client``: its key's name; empty if clients need none."""
        return NO_KEY if self.keys is None else self.keys.flow_of(client)

    def line_for_engines(self, headers: Headers) -> bytes:
        """The header lines with a key that engines get with this client's request; may be empty."""
        if self.keys is not None:
            return self.engine_line
        return b"".join([b"%b: %b\r\n" % header for header in headers if header[0] in KEY_HEADERS])

    def _read(self) -> None:
        """Reads the file of keys anew. Raises: ConfigError: The file cannot be used; the old keys stay."""
        assert self._path is not None
        self.keys = read_keys(self._path)
        self.uses.set_limits(self.keys.limits)
        self.on_change()
        logger.info("api keys changed names=%s", ",".join(self.keys.names))


def _does_nothing() -> None:
    """The first ``on_change``: no request waits yet."""


def _error_of(client: str, refusal: OverLimit) -> ApiError:
    limit, retry_after_s = refusal.limit, refusal.retry_after_s
    if refusal.by is LimitedBy.MAX_CONCURRENT:
        return too_many_running(client, limit, retry_after_s)
    if refusal.by is LimitedBy.REQUESTS_PER_MINUTE:
        return too_many_requests(client, limit, retry_after_s)
    if retry_after_s is None:
        return prompt_over_limit(client, limit, refusal.wanted)
    return too_many_tokens(client, limit, refusal.wanted, refusal.left, retry_after_s)


def read_keys(path: Path) -> ApiKeys:
    """The keys in this file.

    Raises:
        ConfigError: The file cannot be read, or its content cannot be used.
    """
    raw = read_file(path, _FLAG)
    try:
        return parse_keys(raw.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_FLAG} {path}: it is not text in UTF-8: name the file of keys") from error
    except ConfigError as error:
        raise ConfigError(f"{_FLAG} {path}: {error}") from error
