"""Checks clients' keys on the client port and what each may still ask for, and chooses the key that engines are shown.

    client keys?  no:  the client's Authorization and x-api-key go to the engines as they are: theirs to judge
                  yes: it ends here; engines are shown the router's own VLLM_API_KEY, or none

The file of keys is read anew when it changes (``files/watch.py``). A file that cannot be used is logged once, and
changes nothing: the keys stay.
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
from pdcluster_router.settings import Settings

logger = logging.getLogger(__name__)

_FLAG: Final = "--api-key-file"


class Access:
    """One per router. Event loop only."""

    def __init__(self, settings: Settings) -> None:
        """Raises: ConfigError: The file of keys cannot be used."""
        self._path = settings.api_key_file
        self.watch = (
            FileWatch("api keys", [self._path], settings.api_key_interval_s, self._read) if self._path else None
        )
        """None: there is no file."""
        self.keys = read_keys(self._path) if self._path else None
        """The keys of now, another object when they have changed; None: clients need no key."""
        self.uses = KeyUses(self.keys.limits if self.keys else {})
        """The uses of the keys that have limits."""
        self.on_change: Callable[[], None] = _does_nothing
        """Called when the keys have changed."""
        key = settings.engine_api_key
        self.engine_line = f"authorization: Bearer {key}\r\n".encode() if key else b""
        """A whole header line for requests that the router makes of its own; empty when engines want no key."""

    def admit(self, headers: Headers) -> str | ApiError:
        """The name of the key that the client has shown, empty where it needs none; or the error that it gets."""
        if self.keys is None:
            return ""
        key = key_in(headers)
        if key is None:
            return no_key()
        name = self.keys.name_of(key)
        return wrong_key() if name is None else name

    def enter(self, client: str, num_tokens: int, now: float) -> KeySlot | ApiError | None:
        """A request of the key ``client`` begins. Returns its slot, whose ``leave`` ends the request; the error of a
        request that is over a limit; or None: the key has no limits.
        """
        use = self.uses.of(client)
        if use is None:
            return None
        refusal = use.enter(num_tokens, now=now)
        return KeySlot(use, num_tokens, now) if refusal is None else _error_of(client, refusal)

    def lines_for(self, client: str, now: float) -> bytes:
        """Header lines for a request of this key that was turned away; empty: it has no rate."""
        use = self.uses.of(client)
        return b"" if use is None else rate_lines(use, now)

    def names(self) -> frozenset[str]:
        """The names of all keys; one empty name where clients need none."""
        return frozenset(("",) if self.keys is None else self.keys.names)

    def flow_of(self, client: str) -> KeyFlow:
        """The flow of a request that has to wait. ``client``: the name of its key; empty where it needs none."""
        return NO_KEY if self.keys is None else self.keys.flow_of(client)

    def line_for_engines(self, headers: Headers) -> bytes:
        """The lines with a key that go to the engines with a request of this client; may be empty."""
        if self.keys is not None:
            return self.engine_line
        return b"".join([b"%b: %b\r\n" % header for header in headers if header[0] in KEY_HEADERS])

    def _read(self) -> None:
        """Takes the keys of the file as it is now. Raises: ConfigError: The keys stay as they are."""
        assert self._path is not None
        self.keys = read_keys(self._path)
        self.uses.follow(self.keys.limits)
        self.on_change()
        logger.info("api keys changed names=%s", ",".join(self.keys.names))


def _does_nothing() -> None:
    """No request waits yet."""


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
        ConfigError: It cannot be read, or its content cannot be used.
    """
    raw = read_file(path, _FLAG)
    try:
        return parse_keys(raw.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_FLAG} {path}: it is not text in UTF-8: name the file of keys") from error
    except ConfigError as error:
        raise ConfigError(f"{_FLAG} {path}: {error}") from error
