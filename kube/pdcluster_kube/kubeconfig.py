"""Where an API server is and who we are, as a kubeconfig says: what kubectl would use on this machine.

The official client reads it (``kubernetes.aio.config``, 37): merged files, contexts, client certificates, exec plugins.
It is imported when the first kubeconfig is read, for it takes half a second and 26 MiB that no pod needs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml

from pdcluster_kube.access import checked_api_url, tls_context
from pdcluster_protocol.errors import ConfigError, Unavailable

_DEFAULT: Final = "~/.kube/config"
_LOAD_S: Final = 60.0
"""For an exec plugin, which may ask its user to log in."""
_CLIENT_LOG: Final = "kubernetes.aio.config.kube_config"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the official client made of one context."""

    header: str
    ca_file: Path | None
    cert_file: str | None
    key_file: str | None
    is_verified: bool
    server_name: str | None
    proxy: str | None
    url: str
    namespace: str


class Kubeconfig:
    """One context of a kubeconfig (an ``access.Access``), and its credentials (``access.Credentials``)."""

    def __init__(self, path: str, context: str | None, loaded: _Loaded) -> None:
        """Of ``read_kubeconfig`` only."""
        self._path = path
        self._context = context
        self._loaded = loaded
        self._renewing = asyncio.Lock()

    @property
    def url(self) -> str:
        return self._loaded.url

    @property
    def namespace(self) -> str:
        """Where kubectl looks when it is not told: the context's, or ``default``."""
        return self._loaded.namespace

    @property
    def server_name(self) -> str | None:
        return self._loaded.server_name

    @property
    def proxy(self) -> str | None:
        return self._loaded.proxy

    def tls(self) -> ssl.SSLContext | None:
        loaded = self._loaded
        if not loaded.url.startswith("https:"):
            return None
        context = tls_context(loaded.ca_file, is_verified=loaded.is_verified)
        if loaded.cert_file:
            context.load_cert_chain(loaded.cert_file, loaded.key_file)
        return context

    def credentials(self) -> Kubeconfig:
        return self

    def header(self) -> str:
        return self._loaded.header

    async def renew(self) -> bool:
        """A token may have run out: everything is read anew, an exec plugin is asked again. Client certificates of a
        plugin stay as they are until the session is opened anew.

        Raises:
            Unavailable: There is no token any more.
        """
        before = self._loaded.header
        async with self._renewing:
            if self._loaded.header == before:
                try:
                    self._loaded = await _load(self._path, self._context)
                except ConfigError as error:
                    raise Unavailable(str(error)) from error
        return self._loaded.header != before


def has_kubeconfig() -> bool:
    """Whether there is one where kubectl looks without being told."""
    return _is_there(_chosen(None))


def _chosen(path: str | None) -> str:
    return path or os.environ.get("KUBECONFIG") or _DEFAULT


def _is_there(paths: str) -> bool:
    return any(Path(one).expanduser().is_file() for one in paths.split(os.pathsep) if one)


async def read_kubeconfig(path: str | None = None, context: str | None = None) -> Kubeconfig:
    """``path``: as ``$KUBECONFIG``, several with ``:`` between; None: that, or ``~/.kube/config``. ``context``: None
    for the current one. Waits for an exec plugin, at most 60 s.

    Raises:
        ConfigError: There is none, it has no such context, its plugin gave nothing, or it would not be safe.
    """
    found = _chosen(path)
    if not _is_there(found):
        raise ConfigError(f"there is no kubeconfig {found}: name one with --kubeconfig or KUBECONFIG")
    return Kubeconfig(found, context, await _load(found, context))


async def _load(path: str, context: str | None) -> _Loaded:
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import ConfigException, load_kube_config

    configuration = Configuration()
    try:
        with _errors_logged() as errors:
            async with asyncio.timeout(_LOAD_S):
                loader = await load_kube_config(  # type: ignore[no-untyped-call]  # has no types
                    path, context, configuration, persist_config=False
                )
        return _loaded(loader, configuration, errors)
    except TimeoutError as error:
        raise ConfigError(f"kubeconfig {path}: its exec plugin gave nothing within {_LOAD_S:.0f} s") from error
    except (ConfigException, OSError, ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
        raise ConfigError(f"kubeconfig {path}: {' '.join(str(error).split()) or type(error).__name__}") from error


def _loaded(loader: Any, configuration: Any, errors: list[str]) -> _Loaded:
    user = loader._user
    token = configuration.api_key.get("BearerToken", "")
    if user and "auth-provider" in user:
        # kubernetes 37.0.2, aio/config/openid.py: without authority data it renews with verification off.
        raise ValueError("its user logs in by an auth-provider: use an exec plugin, for example kubectl oidc-login")
    if user and "exec" in user and not token and not configuration.cert_file:
        said = "; ".join(errors) or "it printed neither a token nor a certificate"
        raise ValueError(f"its exec plugin {user['exec']['command']} gave no credentials: {said}")
    return _Loaded(
        header=token,
        ca_file=Path(configuration.ssl_ca_cert) if configuration.ssl_ca_cert else None,
        cert_file=configuration.cert_file,
        key_file=configuration.key_file,
        is_verified=configuration.verify_ssl,
        server_name=configuration.tls_server_name or None,
        proxy=configuration.proxy or _proxy_of(configuration.host),
        url=checked_api_url(configuration.host),
        namespace=loader.current_context["context"].get("namespace") or "default",
    )


def _proxy_of(url: str) -> str | None:
    """As kubectl takes it from ``HTTPS_PROXY`` and ``NO_PROXY``."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


@contextmanager
def _errors_logged() -> Iterator[list[str]]:
    """What the client logs of a plugin that failed, instead of raising it."""
    found: list[str] = []
    handler = _Keep(found)
    logger = logging.getLogger(_CLIENT_LOG)
    was = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = was


class _Keep(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())
