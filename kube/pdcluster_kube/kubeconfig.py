"""Access to an API server by a kubeconfig, as kubectl has it on this machine.

The official client reads the file (``kubeconfig_loader.py``). The client is imported only then: pods do not need it.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdcluster_kube.access import show_certificate, tls_context
from pdcluster_protocol.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from pdcluster_kube.kubeconfig_loader import Loaded

LOAD_S: Final = 60.0
"""Seconds for an exec plugin, which may ask its user to log in."""
RENEW_PAUSE_S: Final = 10.0
"""The least seconds between two renewals: while an API server keeps refusing, not every call may cause a log-in."""
_DEFAULT: Final = "~/.kube/config"


class Kubeconfig:
    """One context of a kubeconfig (an ``access.ApiAccess``), and its credentials (``access.Credentials``)."""

    def __init__(self, path: str, context: str | None, loaded: Loaded, timeout_s: float) -> None:
        """Called by ``read_kubeconfig`` only."""
        self._path = path
        self._context = context
        self._loaded = loaded
        self._timeout_s = timeout_s
        self._renewing = asyncio.Lock()
        self._renewed_at = -RENEW_PAUSE_S

    @property
    def url(self) -> str:
        return self._loaded.url

    @property
    def namespace(self) -> str:
        """The namespace that kubectl would use: the context's, or ``default``."""
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
            show_certificate(context, loaded.cert_file, loaded.key_file)
        return context

    def credentials(self) -> Kubeconfig:
        return self

    def header(self) -> str:
        return self._loaded.header

    async def renew(self, sent: str) -> bool:
        """Read the kubeconfig anew and run its exec plugin again, for a token may have run out. Returns whether there
        is another header than ``sent``.

        A plugin's new client certificate is used only by sessions that are opened later.

        Raises:
            Unavailable: The kubeconfig, or its plugin, gives no credentials any more.
        """
        async with self._renewing:
            if self._loaded.header == sent and time.monotonic() - self._renewed_at >= RENEW_PAUSE_S:
                try:
                    self._loaded = await _load(self._path, self._context, self._timeout_s)
                except ConfigError as error:
                    raise Unavailable(str(error)) from error
                finally:
                    self._renewed_at = time.monotonic()
        return self._loaded.header != sent


def has_kubeconfig() -> bool:
    """Whether there is a kubeconfig where kubectl looks by default."""
    return _is_there(_chosen(None))


async def read_kubeconfig(
    path: str | None = None, context: str | None = None, *, timeout_s: float = LOAD_S
) -> Kubeconfig:
    """One context of a kubeconfig. It and each renewal wait for an exec plugin, at most ``timeout_s`` seconds.

    ``path``: one path, or several with ``:`` between; None: ``$KUBECONFIG``, else ``~/.kube/config``. ``context``: None
    for the current one.

    Raises:
        ConfigError: There is no kubeconfig or no such context, its plugin gave nothing, or its use would not be safe.
    """
    found = _chosen(path)
    if not _is_there(found):
        raise ConfigError(f"there is no kubeconfig {found}: name one with --kubeconfig or KUBECONFIG")
    return Kubeconfig(found, context, await _load(found, context, timeout_s), timeout_s)


async def _load(path: str, context: str | None, timeout_s: float) -> Loaded:
    from pdcluster_kube.kubeconfig_loader import load

    return await load(path, context, timeout_s=timeout_s)


def _chosen(path: str | None) -> str:
    return path or os.environ.get("KUBECONFIG") or _DEFAULT


def _is_there(paths: str) -> bool:
    return any(Path(one).expanduser().is_file() for one in paths.split(os.pathsep) if one)
