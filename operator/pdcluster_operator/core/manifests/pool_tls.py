"""TLS inside a pool (``spec.tls``): where pods mount its one Secret, and the words by which each part uses it.

    Secret --> /etc/pdcluster/pool-tls   of routers and engines: flags, decode's calls
                 `--> /run/pdcluster/pool-tls   of engines: ``pdcluster mirror`` copies it for vLLM, probes, drain hooks

All ask for one name, because pods are called by their addresses. Engines ask for certificates too; routers' internal
port does not. ``docs/decisions/0036-tls-inside-by-the-operator.md`` says why. Without ``spec.tls`` each function gives
nothing, so templates and their hashes stay as they were.
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.core.manifests.pool import Document, Pool, internal_name
from pdcluster_protocol import labels
from pdcluster_protocol.launch import ConnectorSettings, router_flag

FOLDER: Final = "/etc/pdcluster/pool-tls"
COPY_FOLDER: Final = "/run/pdcluster/pool-tls"
"""In memory, because the copy has the key."""
CERT: Final = "tls.crt"
KEY: Final = "tls.key"
CA: Final = "ca.crt"
KEYS: Final = (CERT, KEY, CA)
"""Keys of the Secret, as cert-manager writes them."""
_VOLUME: Final = "pool-tls"
_COPY_VOLUME: Final = "pool-tls-copy"
_CERT_REQUIRED: Final = 2
"""vLLM hands this number to Python's ``ssl``."""


def server_name(pool: Pool) -> str:
    """The name that the certificate has. The default is one by which Prometheus can call the routers as well."""
    given = pool.spec.tls.server_name if pool.spec.tls else None
    return given or f"{internal_name(pool)}.{pool.namespace}.svc"


def scheme_of(pool: Pool) -> str:
    """The scheme of the internal port's URLs."""
    return "https" if pool.spec.tls else "http"


def app_protocol(pool: Pool) -> Document:
    """Fields of a Service's port."""
    return {"appProtocol": "https"} if pool.spec.tls else {}


def service_labels(pool: Pool) -> dict[str, str]:
    """Labels of the Services of these ports."""
    return {labels.SCHEME: "https"} if pool.spec.tls else {}


def secret_volumes(pool: Pool) -> list[Document]:
    """The mounted Secret, of routers and engines."""
    if pool.spec.tls is None:
        return []
    items = [{"key": key, "path": key} for key in KEYS]
    return [{"name": _VOLUME, "secret": {"secretName": pool.spec.tls.secret_name, "items": items}}]


def secret_mounts(pool: Pool) -> list[Document]:
    return [{"name": _VOLUME, "mountPath": FOLDER, "readOnly": True}] if pool.spec.tls else []


def engine_volumes(pool: Pool) -> list[Document]:
    """Of an engine that answers HTTP: the mounted Secret, and room for the copy."""
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
    """The command of an engine that answers HTTP, beside a copy of the Secret."""
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
    """The connector's settings of decode, which calls routers."""
    if pool.spec.tls is None:
        return {}
    return {"metaserver_ca": f"{FOLDER}/{CA}", "metaserver_tls_name": server_name(pool)}


def command_flags(pool: Pool, folder: str = COPY_FOLDER) -> list[str]:
    """Words of ``pdcluster ready`` and ``pdcluster drain``, which ask an engine.

    They read the engine's copy, where certificate and key always fit each other. In the Secret, certificate and key may
    not fit for a while. Engines and routers then go on with the last pair that fits, and the probe must not fail.
    """
    if pool.spec.tls is None:
        return []
    files = ["--tls-ca", f"{folder}/{CA}", "--tls-cert", f"{folder}/{CERT}", "--tls-key", f"{folder}/{KEY}"]
    return [*files, "--tls-name", server_name(pool)]
