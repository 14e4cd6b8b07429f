"""Checks clients' API keys and their limits on the client port, and chooses the key that engines get.

    client keys?  no:  engines get the client's Authorization and x-api-key unchanged, and check them
                  yes: the client's key stays here; engines get the router's own VLLM_API_KEY, or none

Clients may show tokens of an identity provider beside keys, or in their place: ``tokens`` checks them, and what is no
token may be a key. The file of keys is read anew when it changes (``files/watch.py``). A file that cannot be used is
logged once, and the old keys stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.apis.openai_errors import (
    ApiError,
    bad_token,
    no_key,
    no_token,
    prompt_over_limit,
    too_many_requests,
    too_many_running,
    too_many_tokens,
    wrong_key,
)
from pdcluster_router.core.apis.request_head import Headers
from pdcluster_router.core.clients.api_keys import KEY_HEADERS, ApiKeys, key_in, only_tokens, parse_keys
from pdcluster_router.core.clients.fair_queue import NO_KEY, KeyFlow
from pdcluster_router.core.clients.key_limits import (
    EVERY_TOKEN,
    NO_LIMITS,
    KeyLimits,
    KeyUses,
    LimitedBy,
    OverLimit,
)
from pdcluster_router.core.clients.key_slot import KeySlot, rate_lines
from pdcluster_router.files.reading import read_file
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.front.tokens.start import token_check_of
from pdcluster_router.settings.router_settings import Settings

logger = logging.getLogger(__name__)

_FLAG: Final = "--api-key-file"


class Access:
    """The API keys and tokens of one router's clients, and their uses. Event loop only."""

    def __init__(self, settings: Settings, unix_now: Callable[[], float] = time.time) -> None:
        """``unix_now``: seconds since 1970.

        Raises:
            ConfigError: A file cannot be used, or a package is missing.
        """
        self.tokens = token_check_of(settings, unix_now)
        """None: clients show keys or nothing."""
        self._path = settings.api_key_file
        watch = FileWatch("api keys", [self._path], settings.api_key_interval_s, self._read) if self._path else None
        of_tokens = None if self.tokens is None else self.tokens.watch
        self.watches = [one for one in (watch, of_tokens) if one is not None]
        """The watches of the files of keys and of tokens' keys."""
        self.keys = self._current()
        """The current keys, a new object after each change, also of tokens' keys; None: clients need neither."""
        self.uses = KeyUses({} if self.keys is None else self.keys.limits, self._limits_of_others())
        """The uses of the keys and clients that have limits."""
        if self.tokens is not None:
            self.tokens.on_change = self._admit_anew
        self.on_change: Callable[[], None] = _does_nothing
        """Called when the keys have changed."""
        key = settings.engine_api_key
        self.engine_line = f"authorization: Bearer {key}\r\n".encode() if key else b""
        """The header line with the router's own key for engines; empty: the router has none."""

    def admit(self, headers: Headers) -> str | ApiError:
        """The name of the client's key or token, empty if clients need none; or the error for the client."""
        if self.keys is None:
            return ""
        key = key_in(headers)
        if key is None:
            return self._none_shown()
        if self.tokens is not None and (admitted := self.tokens.admit(key)) is not None:
            return admitted
        name = self.keys.name_of(key)
        return self._wrong() if name is None else name

    @property
    def problem(self) -> str:
        """Why clients' tokens cannot be checked; empty: they can, or there are none."""
        return "" if self.tokens is None else self.tokens.problem

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
        if self.keys is None:
            return frozenset(("",))
        return frozenset((*self.keys.names, EVERY_TOKEN))

    def flow_of(self, client: str) -> KeyFlow:
        """The flow of a request that has to wait. ``client``: its client's name; empty if clients need none."""
        return NO_KEY if self.keys is None else self.keys.flow_of(client)

    def line_for_engines(self, headers: Headers) -> bytes:
        """The header lines with a key that engines get with this client's request; may be empty."""
        if self.keys is not None:
            return self.engine_line
        return b"".join([b"%b: %b\r\n" % header for header in headers if header[0] in KEY_HEADERS])

    def _read(self) -> None:
        """Reads the file of keys anew. Raises: ConfigError: The file cannot be used; the old keys stay."""
        self.keys = self._current()
        assert self.keys is not None
        self.uses.set_limits(self.keys.limits, self._limits_of_others())
        self.on_change()
        logger.info("api keys changed names=%s", ",".join(self.keys.names))

    def _current(self) -> ApiKeys | None:
        """Raises: ConfigError: The file of keys cannot be used."""
        if self._path is not None:
            return read_keys(self._path, has_tokens=self.tokens is not None)
        return None if self.tokens is None else only_tokens()

    def _limits_of_others(self) -> KeyLimits:
        return NO_LIMITS if self.keys is None else self.keys.limits_of_others

    def _admit_anew(self) -> None:
        """The keys of tokens have changed: requests that have not arrived whole are judged again."""
        assert self.keys is not None
        self.keys = replace(self.keys)

    def _none_shown(self) -> ApiError:
        if self.tokens is None:
            return no_key()
        return no_token(self.tokens.rules.issuer, "" if self._path is None else " or an API key")

    def _wrong(self) -> ApiError:
        """The error for something that is no token, and no key that is known."""
        if self.tokens is None or self._path is not None:
            return wrong_key()
        return bad_token("this is no token (JWT): send one of the identity provider, whole")


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


def read_keys(path: Path, *, has_tokens: bool = False) -> ApiKeys:
    """The keys in this file. ``has_tokens``: as ``parse_keys``.

    Raises:
        ConfigError: The file cannot be read, or its content cannot be used.
    """
    raw = read_file(path, _FLAG)
    try:
        return parse_keys(raw.decode(), has_tokens=has_tokens)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_FLAG} {path}: it is not text in UTF-8: name the file of keys") from error
    except ConfigError as error:
        raise ConfigError(f"{_FLAG} {path}: {error}") from error
