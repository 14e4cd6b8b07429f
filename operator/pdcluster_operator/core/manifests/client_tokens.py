"""Routers that take clients' tokens of an identity provider (``spec.router.tokens``): flags, the Secret, the way out.

Without ``spec.router.tokens`` no function adds anything. ``docs/decisions/0055-tokens-of-an-identity-provider.md`` has
the reasons.
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.core.manifests.pool import Document, Pool
from pdcluster_protocol.launch import router_flag

FOLDER: Final = "/etc/pdcluster/jwt"
FILE: Final = "jwks.json"
_VOLUME: Final = "jwt"
_HTTPS: Final = "https://"
_HTTPS_PORT: Final = 443


def key_set_secret(pool: Pool) -> tuple[str, str]:
    """The Secret with the key set, and the key in it; both empty: there is none."""
    tokens = pool.spec.router.tokens
    ref = tokens.key_set_secret_ref if tokens else None
    return (ref.name, ref.key) if ref else ("", "")


def router_flags(pool: Pool) -> list[str]:
    tokens = pool.spec.router.tokens
    if tokens is None:
        return []
    return [
        router_flag("--jwt-key-set", tokens.key_set_url or f"{FOLDER}/{FILE}"),
        router_flag("--jwt-issuer", tokens.issuer),
        router_flag("--jwt-audience", tokens.audience),
        router_flag("--jwt-client-claim", tokens.client_claim),
    ]


def secret_volumes(pool: Pool) -> list[Document]:
    name, key = key_set_secret(pool)
    return [{"name": _VOLUME, "secret": {"secretName": name, "items": [{"key": key, "path": FILE}]}}] if name else []


def secret_mounts(pool: Pool) -> list[Document]:
    return [{"name": _VOLUME, "mountPath": FOLDER, "readOnly": True}] if key_set_secret(pool)[0] else []


def key_server_rules(pool: Pool) -> list[Document]:
    """Egress rules that let routers reach the key set's URL. Its addresses may be any."""
    tokens = pool.spec.router.tokens
    if tokens is None or tokens.key_set_url is None:
        return []
    said = tokens.key_set_url.removeprefix(_HTTPS).partition("/")[0].partition(":")[2]
    return [{"ports": [{"protocol": "TCP", "port": int(said or _HTTPS_PORT)}]}]
