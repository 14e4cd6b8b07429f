"""EndpointSlices, as the controller makes them from labelled Services."""

from __future__ import annotations

from typing import Any

from pdcluster_protocol import labels

Object = dict[str, Any]


def endpoint(address: str, uid: str = "", **conditions: bool | None) -> Object:
    """One endpoint; conditions that are not given are not there."""
    target = {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}
    return {"addresses": [address], "conditions": conditions, **({"targetRef": target} if uid else {})}


def slice_of(
    name: str,
    role: str,
    *endpoints: Object,
    revision: str | None = "r1",
    cluster: str = "c",
    port: int | None = 8000,
    port_name: str = "http",
    address_type: str = "IPv4",
) -> Object:
    """One EndpointSlice."""
    own = {labels.CLUSTER: cluster, labels.ROLE: role, **({labels.REVISION: revision} if revision is not None else {})}
    return {
        "metadata": {"name": name, "labels": own},
        "addressType": address_type,
        "endpoints": list(endpoints),
        "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
    }
