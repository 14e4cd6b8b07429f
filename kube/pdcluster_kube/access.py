"""Where an API server is and who we are: as a pod is told, or as a kubeconfig says (``kubeconfig.py``).

A pod needs two variables and three files, so it is read with the standard library: with the official client a router
takes a third more memory (docs/decisions/0008). Source of truth: Kubernetes' page "Accessing the Kubernetes API from a
Pod".
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from pdcluster_protocol.errors import ConfigError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes tells a pod who it is."""
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class Credentials(Protocol):
    """Our identity, as HTTP says it. Event loop only."""

    def header(self) -> str:
        """Value of ``Authorization``; empty: none is sent.

        Raises:
            OSError: A file with it cannot be read.
        """
        ...

    async def renew(self) -> bool:
        """After a 401: whether another header may be accepted.

        Raises:
            Unavailable: The source of the credentials gave none.
        """
        ...


class ApiAccess(Protocol):
    """One API server. ``KubeAccess`` and ``kubeconfig.Kubeconfig``."""

    @property
    def url(self) -> str:
        """``https://HOST:PORT``, without a slash at the end."""
        ...

    @property
    def server_name(self) -> str | None:
        """The name that the server's certificate must have; None: the URL's host."""
        ...

    @property
    def proxy(self) -> str | None:
        """URL of an HTTP proxy to it."""
        ...

    def tls(self) -> ssl.SSLContext | None:
        """Read anew from its files; None for plain HTTP.

        Raises:
            OSError: A file cannot be read, or is no certificate.
        """
        ...

    def credentials(self) -> Credentials: ...


class AuthoritiesError(ConfigError, OSError):
    """The file by which an API server's certificate is judged cannot be used. The file may come later."""

    def __str__(self) -> str:
        return (
            f"the API server's authorities {self.filename} cannot be used ({self.strerror}): name a file of "
            "certificates in PEM form"
        )


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """As a pod has it, or flags say."""

    url: str
    ca_file: Path | None = None
    """None: the system's own authorities."""
    token_file: Path | None = None
    """None: no token, for an API server, or a proxy to one, that asks for none."""

    @property
    def server_name(self) -> None:
        return None

    @property
    def proxy(self) -> None:
        return None

    def tls(self) -> ssl.SSLContext | None:
        return tls_context(self.ca_file) if urlsplit(self.url).scheme == "https" else None

    def credentials(self) -> Credentials:
        return TokenFile(self.token_file)


class TokenFile:
    """A token that Kubernetes renews every hour: the file is read again when it is another one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._changed_ns = -1
        self._header = ""

    def header(self) -> str:
        if self._path is None:
            return ""
        changed_ns = self._path.stat().st_mtime_ns
        if changed_ns != self._changed_ns:
            self._header, self._changed_ns = f"Bearer {self._path.read_text().strip()}", changed_ns
        return self._header

    async def renew(self) -> bool:
        """No: the newest token has just been sent."""
        return False


def tls_context(ca_file: Path | None, *, is_verified: bool = True) -> ssl.SSLContext:
    """``ca_file``: None for the system's own authorities.

    Raises:
        AuthoritiesError: The file cannot be read, or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise AuthoritiesError(errno.EINVAL, "it holds no certificate in PEM form", str(ca_file)) from error
    except OSError as error:
        raise AuthoritiesError(error.errno, error.strerror, str(ca_file)) from error
    # Since Python 3.13 the default asks for key identifiers, which the authorities of older clusters do not have.
    # The server's identity is still verified.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not is_verified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Facts that Kubernetes gives a pod; None: not known, as outside of one."""

    kube_api: str | None = None
    kube_ca_file: Path | None = None
    kube_token_file: Path | None = None
    namespace: str | None = None

    @property
    def access(self) -> KubeAccess | None:
        return KubeAccess(self.kube_api, self.kube_ca_file, self.kube_token_file) if self.kube_api else None

    def as_settings(self) -> dict[str, object]:
        """By name, only those that are known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_pod(environ: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT) -> PodFacts:
    """Facts that Kubernetes gives this pod."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    ca_file, token_file, namespace_file = (service_account / name for name in ("ca.crt", "token", "namespace"))
    return PodFacts(
        kube_api=f"https://{f'[{host}]' if ':' in host else host}:{port}" if host and port else None,
        kube_ca_file=ca_file if ca_file.is_file() else None,
        kube_token_file=token_file if token_file.is_file() else None,
        namespace=namespace_file.read_text().strip() if namespace_file.is_file() else None,
    )


def checked_api_url(url: str) -> str:
    """A URL that a token may be sent to, without a slash at its end. A path is kept: some clusters are behind one.

    Raises:
        ValueError: It is no such URL, or the token would be readable on the way.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{url!r} is not a URL like https://HOST:PORT")
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise ValueError(f"{url!r} would send the token in the clear: use https, or kubectl proxy on 127.0.0.1")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
