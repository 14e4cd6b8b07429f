"""The examples are PDClusters that can work. The API server's own rules are asked in the integration tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
import yaml

from pdcluster_operator.api.cluster import PDCluster, TransferProtocol
from pdcluster_operator.api.engine_args import MUST_AGREE, SET_ELSEWHERE
from pdcluster_operator.api.role import DeviceKind

FOLDER: Final = Path(__file__).resolve().parents[2] / "examples"
KINDS: Final = {"cpu.yaml": DeviceKind.CPU, "nvidia.yaml": DeviceKind.CUDA, "ascend.yaml": DeviceKind.ASCEND}
each = pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)


def read(file: Path) -> PDCluster:
    return PDCluster.from_wire(yaml.safe_load(file.read_text()))


def test_there_is_one_for_each_kind_of_device() -> None:
    assert {file.name: read(file).spec.roles.prefill.device.kind for file in FOLDER.iterdir()} == KINDS


@each
def test_the_roles_agree_on_what_they_must(file: Path) -> None:
    prefill, decode = (read(file).spec.roles.prefill, read(file).spec.roles.decode)
    assert prefill.device.kind == decode.device.kind
    assert (prefill.replicas == 0) == (decode.replicas == 0)
    for name in MUST_AGREE:
        assert prefill.engine_args.get(name) == decode.engine_args.get(name), name


@each
def test_devices_match_parallelism_and_no_option_is_the_operators(file: Path) -> None:
    roles = read(file).spec.roles
    for role in (roles.prefill, roles.decode):
        assert role.ranks % role.nodes_per_instance == 0
        if role.device.kind is not DeviceKind.CPU:
            assert role.devices_per_pod * role.nodes_per_instance == role.ranks
        assert SET_ELSEWHERE.keys().isdisjoint(role.engine_args)


@each
def test_replicas_are_within_their_ratio(file: Path) -> None:
    spec = read(file).spec
    if spec.scaling.ratio is not None:
        ratio = spec.roles.prefill.replicas / spec.roles.decode.replicas
        assert spec.scaling.ratio.min <= ratio <= spec.scaling.ratio.max


@each
def test_the_first_comment_says_what_it_is_for_and_others_say_why(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# A pool on ")
    comments = re.findall(r"^ +# (.*)$", text, re.MULTILINE)
    assert len(comments) >= 5
    assert not re.search(r"(?m)[&*]\w+$", text), "anchors are for programs"


def test_the_one_for_gpus_asks_for_all_that_rdma_needs_and_fits_its_nodes() -> None:
    spec = read(FOLDER / "nvidia.yaml").spec
    assert spec.transfer_protocol is TransferProtocol.RDMA
    for role in (spec.roles.prefill, spec.roles.decode):
        assert [name for name in role.resources.limits if name.startswith("rdma/")]
        assert {"cpu", "memory"} <= role.resources.requests.keys()
        cards = role.devices_per_pod * role.replicas
        assert cards == 8
        assert int(role.resources.requests["cpu"]) * role.replicas <= 192
        assert int(str(role.resources.limits["memory"]).removesuffix("Gi")) * role.replicas <= 2000


@each
def test_the_engines_image_is_one_that_we_build_at_the_charts_version(file: Path) -> None:
    chart = yaml.safe_load((FOLDER.parent / "charts" / "pdcluster" / "Chart.yaml").read_text())
    version = re.escape(chart["appVersion"])
    assert re.fullmatch(rf"localhost/pdcluster/engine-(cpu|cuda|ascend):{version}", read(file).spec.image)
