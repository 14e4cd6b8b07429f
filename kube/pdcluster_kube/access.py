"""Where an API server is, and our credentials for it: from a pod's files, or from a kubeconfig (``kubeconfig.py``).

A pod finds both in two variables and three files. The standard library can read these. So a router does without the
official client, which would take a third more memory (docs/decisions/0008). Source of truth: Kubernetes' page
"Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import SplitResult, urlsplit

from pdcluster_protocol.errors import ConfigError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which a pod finds its credentials."""
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class Credentials(Protocol):
    """Our credentials as an HTTP header. Event loop only."""

    def header(self) -> str:
        """Value of the header ``Authorization``; empty: send no such header.

        Raises:
            OSError: The file with the token cannot be read.
        """
        ...

    async def renew(self, sent: str) -> bool:
        """Get newer credentials after a 401. ``sent``: the header that was refused. Returns whether there is another
        header to try: another request's 401 may have brought it already.

        Raises:
            Unavailable: The source of the credentials gave none.
        """
        ...


class ApiAccess(Protocol):
    """One API server, and our way to it: a ``KubeAccess`` or a ``kubeconfig.Kubeconfig``."""

    @property
    def url(self) -> str:
        """URL such as ``https://HOST:PORT``, without a slash at the end."""
        ...

    @property
    def server_name(self) -> str | None:
        """The name that the server's certificate must have; None: the URL's host."""
        ...

    @property
    def proxy(self) -> str | None:
        """URL of an HTTP proxy to the API server; None: none is used."""
        ...

    def tls(self) -> ssl.SSLContext | None:
        """TLS settings, read anew from their files; None: plain HTTP. A pod's follow its file of authorities.

        Raises:
            OSError: A file cannot be read, or holds no certificate.
        """
        ...

    def credentials(self) -> Credentials: ...


class AuthoritiesError(ConfigError, OSError):
    """The file with an API server's authorities cannot be used. A usable file may come later."""

    def __str__(self) -> str:
        return (
            f"the API server's authorities {self.filename} cannot be used ({self.strerror}): name a file of "
            "certificates in PEM form"
        )


class RenewedContext(ssl.SSLContext):
    """TLS settings of a client that outlives its authorities: each new connection trusts those that the file has now.

    The file is read again when its mtime has changed. A file that cannot be used changes nothing: a usable one may come
    later. asyncio starts every connection by ``wrap_bio``. Event loop only.
    """

    _ca_file: Path
    _changed_ns: int
    _newest: ssl.SSLContext

    @classmethod
    def of(cls, ca_file: Path) -> RenewedContext:
        """Settings that trust the file.

        Raises:
            AuthoritiesError: The file cannot be read, or holds no certificate.
        """
        made = cls(ssl.PROTOCOL_TLS_CLIENT)
        made._ca_file, made._changed_ns, made._newest = ca_file, _mtime_ns(ca_file), tls_context(ca_file)
        return made

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, server_side: bool = False,
        server_hostname: str | bytes | None = None, session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:  # fmt: skip
        changed_ns = _mtime_ns(self._ca_file)
        if changed_ns != self._changed_ns:
            with suppress(AuthoritiesError):
                self._newest, self._changed_ns = tls_context(self._ca_file), changed_ns
        return self._newest.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def _mtime_ns(file: Path) -> int:
    """0 if the file is not there, or may not be asked."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


class ClientCertificateError(ConfigError, OSError):
    """A client certificate or its key cannot be used."""

    def __str__(self) -> str:
        return f"the client certificate's key {self.filename} cannot be used ({self.strerror})"


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """The access that a pod has, or that flags name."""

    url: str
    ca_file: Path | None = None
    """None: the system's own authorities."""
    token_file: Path | None = None
    """None: no token is sent, because the API server or the proxy asks for none."""

    @property
    def server_name(self) -> None:
        return None

    @property
    def proxy(self) -> None:
        return None

    def tls(self) -> ssl.SSLContext | None:
        if urlsplit(self.url).scheme != "https":
            return None
        return RenewedContext.of(self.ca_file) if self.ca_file else tls_context(None)

    def credentials(self) -> Credentials:
        return TokenFile(self.token_file)


class TokenFile:
    """A token in a file, which Kubernetes renews every hour. The file is read again when its mtime has changed."""

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

    async def renew(self, sent: str) -> bool:  # noqa: ARG002 - as the protocol has it
        """Always False: the newest token has just been sent."""
        return False


def tls_context(ca_file: Path | None, *, is_verified: bool = True) -> ssl.SSLContext:
    """TLS settings for a client. ``ca_file``: None for the system's own authorities.

    Raises:
        AuthoritiesError: The file cannot be read, or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise AuthoritiesError(errno.EINVAL, "it holds no certificate in PEM form", str(ca_file)) from error
    except OSError as error:
        raise AuthoritiesError(error.errno, error.strerror, str(ca_file)) from error
    # Since Python 3.13 the default demands key identifiers, which the authorities of older clusters do not have. The
    # server's identity is still verified.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not is_verified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def show_certificate(context: ssl.SSLContext, cert_file: str, key_file: str | None) -> None:
    """Make ``context`` show a client certificate. ``key_file``: None where the key is in ``cert_file``.

    Raises:
        ClientCertificateError: A file cannot be read, the two do not fit, or the key is encrypted.
    """
    key = key_file or cert_file
    try:
        context.load_cert_chain(cert_file, key_file, password=lambda: _refuse_encrypted(key))
    except ClientCertificateError:
        raise
    except ssl.SSLError as error:
        why = f"it holds no key in PEM form that fits the certificate {cert_file}"
        raise ClientCertificateError(errno.EINVAL, why, key) from error
    except OSError as error:
        raise ClientCertificateError(error.errno, f"{error.strerror}; its certificate is {cert_file}", key) from error


def _refuse_encrypted(key: str) -> bytes:
    """Raises always. Otherwise OpenSSL would ask for the password at our terminal, and the event loop would wait."""
    cure = f"it is encrypted: decrypt it with `openssl pkey -in {key} -out FILE`, and name FILE as client-key"
    raise ClientCertificateError(errno.EINVAL, cure, key)


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Facts that Kubernetes gives a pod; None: not known, as outside of a pod."""

    kube_api: str | None = None
    kube_ca_file: Path | None = None
    kube_token_file: Path | None = None
    namespace: str | None = None

    @property
    def access(self) -> KubeAccess | None:
        return KubeAccess(self.kube_api, self.kube_ca_file, self.kube_token_file) if self.kube_api else None

    def as_settings(self) -> dict[str, object]:
        """The known facts, by name of the field."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_pod(environ: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT) -> PodFacts:
    """Facts that Kubernetes gives this pod, from its environment and files."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    ca_file, token_file, namespace_file = (service_account / name for name in ("ca.crt", "token", "namespace"))
    return PodFacts(
        kube_api=f"https://{f'[{host}]' if ':' in host else host}:{port}" if host and port else None,
        kube_ca_file=ca_file if ca_file.is_file() else None,
        kube_token_file=token_file if token_file.is_file() else None,
        namespace=namespace_file.read_text().strip() if namespace_file.is_file() else None,
    )


def checked_header(header: str) -> str:
    """``header`` without blanks at its ends, such as the final line break of a token's file.

    Raises:
        ValueError: It has a character that no HTTP header may have.
    """
    clean = header.strip()
    if not clean.isprintable():
        raise ValueError("its token has a line break or another character that no HTTP header may have: write it anew")
    return clean


def checked_api_url(url: str) -> str:
    """``url`` without a slash at its end, if a token may be sent to it. A path is kept: some API servers need one.

    Raises:
        ValueError: ``url`` is no URL of an API server, or a token would go unencrypted to another machine.
    """
    if "@" in url:
        raise ValueError("the API server's URL has a user name or password in it: leave it out, and the @")
    parts = urlsplit(url)
    if not _is_api_url(parts):
        raise ValueError(f"{url!r} is not a URL like https://HOST:PORT")
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise ValueError(f"{url!r} would send the token in the clear: use https, or kubectl proxy on 127.0.0.1")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _is_api_url(parts: SplitResult) -> bool:
    """Whether these are a scheme, a host, perhaps a port and a path, and nothing else."""
    try:
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    is_plain = "@" not in parts.netloc and parts.geturl().isprintable() and " " not in parts.geturl()
    is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
    return has_port and is_plain and is_whole and not parts.query and not parts.fragment
