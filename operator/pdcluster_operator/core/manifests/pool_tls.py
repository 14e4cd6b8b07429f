"""TLS inside a pool (``spec.tls``): where pods mount its one Secret, and the options by which each part uses it.

    Secret --> /etc/pdcluster/pool-tls   of routers and engines: flags, decode's calls
                 `--> /run/pdcluster/pool-tls   of engines: ``pdcluster mirror`` copies it for vLLM, probes, drain hooks

All callers expect one name in the certificate, because they call pods by address. Engines ask their callers for a
certificate too; routers' internal port does not. ``docs/decisions/0036-tls-inside-by-the-operator.md`` says why.
Without ``spec.tls`` no function adds anything to a template, so hashes stay as they were.
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.core.manifests.pool import Document, Pool, internal_name
from pdcluster_protocol import labels
from pdcluster_protocol.launch import ConnectorSettings, router_flag

FOLDER: Final = "/etc/pdcluster/pool-tls"
COPY_FOLDER: Final = "/run/pdcluster/pool-tls"
"""In memory, because the copy has the private key."""
CERT: Final = "tls.crt"
KEY: Final = "tls.key"
CA: Final = "ca.crt"
KEYS: Final = (CERT, KEY, CA)
"""Keys of the Secret, as cert-manager writes them."""
_VOLUME: Final = "pool-tls"
_COPY_VOLUME: Final = "pool-tls-copy"
_CERT_REQUIRED: Final = 2
"""``ssl.CERT_REQUIRED``: vLLM hands the number to Python's ``ssl``."""


def server_name(pool: Pool) -> str:
    """The name that the certificate must have. By the default name Prometheus can call the routers as well."""
    given = pool.spec.tls.server_name if pool.spec.tls else None
    return given or f"{internal_name(pool)}.{pool.namespace}.svc"


def scheme_of(pool: Pool) -> str:
    """The scheme of the internal port's URLs."""
    return "https" if pool.spec.tls else "http"


def app_protocol(pool: Pool) -> Document:
    """Fields that TLS adds to a Service's port."""
    return {"appProtocol": "https"} if pool.spec.tls else {}


def service_labels(pool: Pool) -> dict[str, str]:
    """Labels that TLS adds to the Services of engines and of the internal port."""
    return {labels.SCHEME: "https"} if pool.spec.tls else {}


def secret_volumes(pool: Pool) -> list[Document]:
    """The volume with the Secret, for routers and engines."""
    if pool.spec.tls is None:
        return []
    items = [{"key": key, "path": key} for key in KEYS]
    return [{"name": _VOLUME, "secret": {"secretName": pool.spec.tls.secret_name, "items": items}}]


def secret_mounts(pool: Pool) -> list[Document]:
    return [{"name": _VOLUME, "mountPath": FOLDER, "readOnly": True}] if pool.spec.tls else []


def engine_volumes(pool: Pool) -> list[Document]:
    """Volumes of an engine that answers HTTP: the Secret, and room for its copy."""
    copy = {"name": _COPY_VOLUME, "emptyDir": {"medium": "Memory"}}
    return [*secret_volumes(pool), copy] if pool.spec.tls else []


def engine_mounts(pool: Pool) -> list[Document]:
    return [*secret_mounts(pool), {"name": _COPY_VOLUME, "mountPath": COPY_FOLDER}] if pool.spec.tls else []


def router_flags(pool: Pool) -> list[str]:
    if pool.spec.tls is None:
        return []
    return [
        router_flag("--engine-ca", f"{FOLDER}/{CA}"),
        router_flag("--engine-cert", f"{FOLDER}/{CERT}"),
        router_flag("--engine-key", f"{FOLDER}/{KEY}"),
        router_flag("--engine-tls-name", server_name(pool)),
        router_flag("--internal-tls-cert", f"{FOLDER}/{CERT}"),
        router_flag("--internal-tls-key", f"{FOLDER}/{KEY}"),
    ]


def mirrored(pool: Pool, command: list[str]) -> list[str]:
    """The command of an engine that answers HTTP. ``pdcluster mirror`` runs it, and keeps the copy of the Secret."""
    if pool.spec.tls is None:
        return command
    return ["pdcluster", "mirror", f"--source={FOLDER}", f"--target={COPY_FOLDER}", "--", *command]


def engine_flags(pool: Pool) -> list[str]:
    """Arguments of vLLM 0.32 (``entrypoints/launchers/cli_args.py``) for an engine that answers HTTP."""
    if pool.spec.tls is None:
        return []
    return [
        f"--ssl-certfile={COPY_FOLDER}/{CERT}",
        f"--ssl-keyfile={COPY_FOLDER}/{KEY}",
        f"--ssl-ca-certs={COPY_FOLDER}/{CA}",
        f"--ssl-cert-reqs={_CERT_REQUIRED}",
        "--enable-ssl-refresh",
    ]


def decode_settings(pool: Pool) -> ConnectorSettings:
    """Settings of decode's connector, which calls routers."""
    if pool.spec.tls is None:
        return {}
    return {"metaserver_ca": f"{FOLDER}/{CA}", "metaserver_tls_name": server_name(pool)}


def command_flags(pool: Pool, folder: str = COPY_FOLDER) -> list[str]:
    """Options of ``pdcluster ready`` and ``pdcluster drain``, which ask an engine.

    By default both read the engine's copy, where certificate and key always fit each other. In the Secret, certificate
    and key may not fit for a while. Engines and routers then use the last pair that fits, so the probe must not fail.
    """
    if pool.spec.tls is None:
        return []
    files = ["--tls-ca", f"{folder}/{CA}", "--tls-cert", f"{folder}/{CERT}", "--tls-key", f"{folder}/{KEY}"]
    return [*files, "--tls-name", server_name(pool)]
