from __future__ import annotations

import json
import tomllib
from pathlib import Path

from e2e.node_files import (
    NODE_ADDRESS,
    PAUSE_IMAGE,
    NodePlaces,
    cni_config,
    containerd_config,
    kubelet_command,
    kubelet_config,
)

PLACES = NodePlaces(Path("/run-folder"), Path("/run-folder/kubeconfig"), Path("/run-folder/ca.crt"))


def test_containerds_configuration_keeps_everything_in_the_runs_folder() -> None:
    told = tomllib.loads(containerd_config(PLACES))
    assert told["root"].startswith("/run-folder/")
    assert told["plugins"]["io.containerd.internal.v1.opt"]["path"].startswith("/run-folder/")
    cri = told["plugins"]["io.containerd.grpc.v1.cri"]
    assert (cri["sandbox_image"], cri["restrict_oom_score_adj"]) == (PAUSE_IMAGE, True)
    assert cri["cni"]["conf_dir"] == str(PLACES.cni)


def test_the_kubelet_is_told_who_may_call_it_and_where_containerd_is() -> None:
    told = json.loads(kubelet_config(PLACES))
    assert told["authentication"]["x509"]["clientCAFile"] == str(PLACES.ca)
    assert told["authentication"]["anonymous"]["enabled"] is False
    assert told["containerRuntimeEndpoint"] == f"unix://{PLACES.socket}"
    assert told["clusterDNS"] == [NODE_ADDRESS]
    assert f"--node-ip={NODE_ADDRESS}" in kubelet_command(Path("kubelet"), PLACES)


def test_a_sockets_path_fits_into_a_sockets_address() -> None:
    assert len(str(PLACES.socket)) <= 107


def test_pods_get_addresses_of_their_range_and_a_way_out_of_it() -> None:
    bridge, ports, loopback = json.loads(cni_config())["plugins"]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.244.0.0/16"}]]
    assert (bridge["isGateway"], ports["type"], loopback["type"]) == (True, "portmap", "loopback")
