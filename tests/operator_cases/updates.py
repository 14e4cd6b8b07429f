"""Changes of a PDCluster that the API server refuses, and the message it must show."""

from __future__ import annotations

from typing import Final

from operator_cases.objects import CUDA, Refused

REFUSED_UPDATES: Final = (
    Refused(
        "another served name",
        {"spec.model": {"name": "tiny", "servedName": "b"}},
        "the name that clients ask for cannot change from a to b: keep model.servedName a, "
        "or make another PDCluster and move the clients to it",
        before={"spec.model": {"name": "tiny", "servedName": "a"}},
    ),
    Refused(
        "another model without keeping its name",
        {"spec.model": {"name": "large"}},
        "the name that clients ask for cannot change from tiny to large: keep model.servedName tiny, "
        "or make another PDCluster and move the clients to it",
        before={},
    ),
    Refused(
        "another kind of device",
        CUDA,
        "device.kind cannot change from cpu to cuda: old and new engines could not hand over KV, "
        "so make another PDCluster and move the clients to it",
        before={},
    ),
    Refused(
        "another secret",
        {"spec.auth.secretRef": {"name": "b"}},
        "auth.secretRef cannot change from a/secret to b/secret: make another PDCluster and move the clients to it",
        before={"spec.auth.secretRef": {"name": "a"}},
    ),
    Refused(
        "a secret of one's own too late",
        {"spec.auth.secretRef": {"name": "b"}},
        "auth.secretRef cannot change from the made one to b/secret",
        before={},
    ),
    Refused(
        "no own secret any more",
        {},
        "auth.secretRef cannot change from a/secret to a made one",
        before={"spec.auth.secretRef": {"name": "a"}},
    ),
    Refused(
        "TLS inside too late",
        {"spec.tls": {"secretName": "a"}},
        "tls cannot change from none to secretName a: routers speak one way with all engines, so make another "
        "PDCluster and move the clients to it",
        before={},
    ),
    Refused(
        "no TLS inside any more",
        {},
        "tls cannot change from secretName a and serverName b.c to none",
        before={"spec.tls": {"secretName": "a", "serverName": "b.c"}},
    ),
    Refused(
        "another certificate by name",
        {"spec.tls": {"secretName": "b"}},
        "tls cannot change from secretName a to secretName b",
        before={"spec.tls": {"secretName": "a"}},
    ),
)
