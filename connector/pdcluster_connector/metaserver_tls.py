"""TLS of decode's calls to the router: the authorities that decode trusts, the certificate that decode shows.

The files are read again when they change. At its start the engine refuses files that cannot be used. Later it keeps the
last good files in use, and tries again at each look: the failure may pass, like a lack of file descriptors. If a file
or a name is set, no call goes in the clear, even if the router's URL says http.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.pem_files import FileState, client_context, no_password, state_of, words_of

_LOG: Final = logging.getLogger("vllm.pdcluster.metaserver")

LOOK_S: Final = 3.0
"""Seconds between two looks at the files. Only a call looks."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; empty: no file. ``name``: the name that the router's certificate must have; empty: the host
    of the router's URL."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    name: str = ""

    @property
    def paths(self) -> list[str]:
        return [path for path in (self.ca, self.cert, self.key) if path]


class MetaserverTls:
    """The TLS of one engine's calls. One thread at a time uses it."""

    def __init__(self, files: TlsFiles, now: Callable[[], float] = time.monotonic) -> None:
        """Raises: ConfigError: A file or the name cannot be used."""
        if bool(files.cert) != bool(files.key):
            told = f"metaserver_cert is {files.cert or 'not given'} and metaserver_key is {files.key or 'not given'}"
            raise ConfigError(f"{told}: give both files, or neither")
        self.name = _checked_name(files.name) if files.name else None
        self._files = files
        self._now = now
        self._problem = ""
        """Why the files could not be used when they were read last; empty: they could."""
        self._looked_at = self._look()
        self._looks_at = now() + LOOK_S
        self._context = _context_of(files) if files.paths else None

    @property
    def is_needed(self) -> bool:
        """Whether a call in the clear would be a mistake."""
        return bool(self._files.paths or self.name)

    def context(self) -> ssl.SSLContext | bool:
        """The context for the next call, from the newest good files. True: no file is set, so the system's authorities
        are trusted."""
        if self._context is None:
            return True
        if self._now() >= self._looks_at:
            self._looks_at = self._now() + LOOK_S
            seen, self._looked_at = self._looked_at, self._look()
            if seen != self._looked_at:
                self._problem = ""  # After each change the reason is logged anew.
                self._read()
            elif self._problem:
                self._read()
        return self._context

    def _read(self) -> None:
        try:
            self._context = _context_of(self._files)
        except ConfigError as error:
            told, self._problem = self._problem, str(error)
            if self._problem != told:
                _LOG.warning("metaserver tls not changed reason=%s", error)
        else:
            self._problem = ""
            _LOG.info("metaserver tls changed")

    def _look(self) -> list[FileState]:
        return list(map(state_of, self._files.paths))


def _checked_name(name: str) -> str:
    """``name``, if ``ssl`` takes it at a connection. Raises: ConfigError: It is no DNS name or address."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=name)
    except ValueError as error:
        raise ConfigError(
            f"metaserver_tls_name {name} is no DNS name or address: name one that the router's certificate has"
        ) from error
    return name


def _context_of(files: TlsFiles) -> ssl.SSLContext:
    context = client_context()
    try:
        if files.ca:
            context.load_verify_locations(files.ca)
        else:
            context.load_default_certs()
    except OSError as error:  # ssl.SSLError is an OSError.
        raise ConfigError(f"metaserver_ca {files.ca}: {words_of(error)}: name a file of certificates in PEM") from error
    try:
        if files.cert:
            context.load_cert_chain(files.cert, files.key, password=no_password)
    except OSError as error:
        both = f"metaserver_cert {files.cert} and metaserver_key {files.key}"
        raise ConfigError(f"{both}: {words_of(error)}: give a certificate and its key in PEM, no password") from error
    return context
