"""The examples are PDClusters that can work. The API server's own rules are asked in the integration tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import yaml
from vllm.config import CUDAGraphMode, VllmConfig

from pdcluster_connector.settings import Settings
from pdcluster_connector.vllm.options import require_startable
from pdcluster_connector.vllm.versions import release_of
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.api.engine_args import MUST_AGREE, SET_ELSEWHERE
from pdcluster_operator.api.role import DeviceKind, Parallelism, RoleSpec
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role
from pdcluster_protocol.launch import TransferProtocol
from unit.connector.vllm.configs import a_config

FOLDER: Final = Path(__file__).resolve().parents[2] / "examples"
VLLM: Final = {"cpu.yaml": "0.32.0", "nvidia.yaml": "0.32.0", "ascend.yaml": "0.23.0"}
"""Which vLLM the page on images has for the device of each."""
KINDS: Final = {"cpu.yaml": DeviceKind.CPU, "nvidia.yaml": DeviceKind.CUDA, "ascend.yaml": DeviceKind.ASCEND}
JUDGED: Final = frozenset({
    "additional-config", "calculate-kv-scales", "compilation-config", "cudagraph-mode",
    "decode-context-parallel-size", "enable-dbo", "enable-sleep-mode", "prefill-context-parallel-size", "ubatch-size",
})  # fmt: skip
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
@pytest.mark.parametrize("role", Role)
def test_the_connector_takes_the_options_of_each_role_on_its_vllm(file: Path, role: Role) -> None:
    spec = getattr(read(file).spec.roles, role.value)
    require_startable(config_of(spec), role, Settings(), [], release_of(VLLM[file.name]))


def test_what_the_connector_refuses_of_an_example_is_found() -> None:
    """Two stages on decode, and steps that overlap by default: an example had both."""
    spec = read(FOLDER / "ascend.yaml").spec.roles.decode
    for changed in ({"parallelism": Parallelism(tensor=16, pipeline=2)}, {"engine_args": {"quantization": "ascend"}}):
        with pytest.raises(ConfigError, match="runs 2 steps at once on this decode engine"):
            require_startable(
                config_of(spec.model_copy(update=changed)), Role.DECODE, Settings(), [], release_of("0.23.0")
            )


def config_of(spec: RoleSpec) -> Any:
    """What vLLM makes of a role, as far as the connector judges it. An option that is not here has vLLM's default."""
    args, split = spec.engine_args, spec.parallelism
    assert JUDGED.isdisjoint(args), "config_of leaves this option out, and the connector may refuse it"
    speculative = SimpleNamespace(**json.loads(args["speculative-config"])) if "speculative-config" in args else None
    scheduler = SimpleNamespace(async_scheduling=args.get("async-scheduling") != "false")
    config = a_config("", {})
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.speculative_config, config.scheduler_config = speculative, scheduler
    config.parallel_config.pipeline_parallel_size, config.use_v2_model_runner = split.pipeline, False
    config.parallel_config.distributed_executor_backend = args.get("distributed-executor-backend", "mp")
    config.parallel_config.data_parallel_backend = args.get("data-parallel-backend", "mp")
    config.max_concurrent_batches = VllmConfig.max_concurrent_batches.fget(config)
    return config


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
