"""The headless Services by whose EndpointSlices the routers find engines: one for each role and revision.

Kubernetes copies a Service's labels to its slices, which is how a router learns role and revision. Slices list engines
that are not ready and that terminate too, each marked so; ``publishNotReadyAddresses`` would mark them all ready.
The names of these Services are never resolved.
"""

from __future__ import annotations

from pdcluster_operator.core import names
from pdcluster_operator.core.manifests.pool import (
    HTTP,
    PORT,
    Document,
    Pool,
    engine_selector,
    make_object,
    metadata_of,
    role_labels,
)
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role


def discovery_service(pool: Pool, role: Role, revision: str) -> Document:
    """For all templates of the revision; of an instance on several nodes only the pod that answers HTTP."""
    name = names.discovery_service_name(pool.name, role, revision)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": False,
        "selector": {**engine_selector(pool, role, revision), labels.LEADER: "true"},
        "ports": [{"name": HTTP, "port": PORT, "targetPort": HTTP, "protocol": "TCP"}],
    }
    return make_object("v1", "Service", metadata_of(pool, name, role.value, role_labels(role, revision)), spec=spec)
