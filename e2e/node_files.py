"""What the programs of a node are told: command lines and configuration files. Pure.

Everything runs in a box of its own (``box.py``), so addresses and ports are the same for every run.

    pdc0    10.123.0.1       the node: API server, kubelet, DNS        (a bridge: not every kernel has dummy links)
    pdcbr0  10.244.0.1/16    pods: 10.244.0.0/16                       (the CNI plugin makes it)
            10.96.0.0/16     Services, kube-proxy's rules

Where a sandbox forbids a negative ``oom_score_adj`` no pod starts, hence the three settings about it. cgroups of
version 1: the kubelet of Kubernetes 1.35 wants to be told that this is meant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

NODE: Final = "node-1"
NODE_LINK: Final = "pdc0"
NODE_ADDRESS: Final = "10.123.0.1"
POD_RANGE: Final = "10.244.0.0/16"
DOMAIN: Final = "cluster.local"
PAUSE_IMAGE: Final = "e2e.local/pause:1"
CNI_PLUGINS: Final = Path("/usr/lib/cni")
"""Where Debian's containernetworking-plugins has them."""
LOGS_TO_KEEP: Final = "10Mi"


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """Files and folders of one node. ``folder`` holds them all."""

    folder: Path
    kubeconfig: Path
    ca: Path

    @property
    def containerd(self) -> Path:
        return self.folder / "containerd"

    @property
    def socket(self) -> Path:
        """containerd's. In /run, which is the box's own: a socket's path has 107 characters at most."""
        return Path("/run/pdcluster-containerd.sock")

    @property
    def cni(self) -> Path:
        return self.folder / "cni"

    @property
    def kubelet(self) -> Path:
        return self.folder / "kubelet"


def containerd_config(places: NodePlaces) -> str:
    """TOML, version 2."""
    return f"""version = 2
root = "{places.containerd / "root"}"
state = "{places.containerd / "state"}"
[grpc]
address = "{places.socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{places.containerd / "opt"}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "{places.cni}"
"""


def cni_config() -> str:
    """Pods on a bridge. hairpinMode: a pod may reach itself through its Service."""
    bridge = {
        "type": "bridge",
        "bridge": "pdcbr0",
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": POD_RANGE}]], "routes": [{"dst": "0.0.0.0/0"}]},
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return _json({"cniVersion": "0.4.0", "name": "pdcluster", "plugins": [bridge, ports, {"type": "loopback"}]})


def kubelet_config(places: NodePlaces) -> str:
    """JSON is YAML. Nothing is evicted for want of disk: the disk is the machine's, and not ours to judge."""
    return _json(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(places.ca)},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{places.socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "containerLogMaxSize": LOGS_TO_KEEP,
            "podLogsDir": str(places.kubelet / "logs"),
            "volumePluginDir": str(places.kubelet / "plugins"),
            "clusterDNS": [NODE_ADDRESS],
            "clusterDomain": DOMAIN,
            "resolvConf": str(places.folder / "resolv.conf"),
            "registryPullQPS": 0,
        }
    )


def containerd_command(places: NodePlaces) -> list[str]:
    return ["containerd", "--config", str(places.folder / "containerd.toml")]


def scheduler_command(program: Path, places: NodePlaces) -> list[str]:
    return [str(program), f"--kubeconfig={places.kubeconfig}", "--leader-elect=false"]


def kubelet_command(program: Path, places: NodePlaces) -> list[str]:
    return [
        str(program),
        f"--config={places.folder / 'kubelet.json'}",
        f"--kubeconfig={places.kubeconfig}",
        f"--hostname-override={NODE}",
        f"--node-ip={NODE_ADDRESS}",
        f"--root-dir={places.kubelet}",
        f"--cert-dir={places.kubelet / 'pki'}",
    ]


def proxy_command(program: Path, places: NodePlaces) -> list[str]:
    """Connection tracking has limits for the whole machine: not ours to set."""
    return [
        str(program),
        f"--kubeconfig={places.kubeconfig}",
        f"--hostname-override={NODE}",
        f"--cluster-cidr={POD_RANGE}",
        "--proxy-mode=iptables",
        "--conntrack-max-per-core=0",
        "--oom-score-adj=0",
    ]


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1)
