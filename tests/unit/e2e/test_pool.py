from __future__ import annotations

import json
from pathlib import Path

from e2e.pool import ENGINE_IMAGE, NodePaths, cpu_pool, node_paths, with_engine_arg, with_replicas

from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.core.manifests.engine_pod import engine_template
from pdcluster_operator.core.manifests.pool import Pool
from pdcluster_protocol.labels import Role

PATHS = NodePaths((Path("/code"), Path("/python")), Path("/code/.venv/bin"), Path("/models/tiny"), Path("/warm"))


def template(role: Role) -> str:
    """As the operator renders it, in one line."""
    spec = PDCluster.from_wire(cpu_pool(PATHS)).spec
    return json.dumps(engine_template(Pool("tiny", "default", "1", spec, "router"), role, "abc"))


def test_the_pool_is_one_that_the_api_takes() -> None:
    spec = PDCluster.from_wire(cpu_pool(PATHS)).spec
    assert (spec.image, spec.model.public_name, spec.router.replicas) == (ENGINE_IMAGE, "tiny", 2)


def test_engines_find_the_environment_and_the_model_where_the_node_has_them() -> None:
    for role in Role:
        text = template(role)
        assert '"mountPath": "/code"' in text
        assert '"hostPath": {"path": "/python"' in text
        assert '"hostPath": {"path": "/models/tiny"' in text
        assert '"value": "/code/.venv/bin:' in text
        assert '"hostPath": {"path": "/warm"' in text
        assert '"mountPath": "/warm", "name"' in text or '"mountPath": "/warm", "readOnly": true' in text


def test_what_lies_in_a_folder_that_is_mounted_is_not_mounted_again() -> None:
    paths = node_paths(Path("/models/tiny"), Path("/warm"))
    for path in paths.code:
        assert not any(path != other and path.is_relative_to(other) for other in paths.code)
        assert not path.is_relative_to("/usr")


def test_a_change_is_of_the_named_roles_only_and_leaves_the_pool_as_it_was() -> None:
    pool = cpu_pool(PATHS)
    before = json.dumps(pool)
    changed = with_engine_arg(with_replicas(pool, decode=2), "block-size", "64", ("decode",))
    decode, prefill = changed["spec"]["roles"]["decode"], changed["spec"]["roles"]["prefill"]
    assert (decode["replicas"], decode["engineArgs"]["block-size"]) == (2, "64")
    assert (prefill["replicas"], prefill["engineArgs"]["block-size"]) == (1, "32")
    assert json.dumps(pool) == before
