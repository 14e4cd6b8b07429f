"""An engine's pod, from two readable examples: a small one on CPU, and one on Ascend devices."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from fakes.operator_cluster import make_cluster, make_pool
from operator_cases.objects import both
from pdcluster_cli.pod import drain, ready
from pdcluster_connector.settings import parse_settings
from pdcluster_operator.api.engine_args import ON_ONE_NODE, SET_ELSEWHERE
from pdcluster_operator.core.manifests.command import PodPlace, spelled_arg
from pdcluster_operator.core.manifests.engine_pod import engine_template
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import ContentCheck

CPU = {
    "spec.image": "registry.example/engine-cpu:1",
    **both("engineArgs", {"max-model-len": "2048", "enforce-eager": "true", "enable-prefix-caching": "false"}),
    **both("resources", {"requests": {"cpu": 2, "memory": "8Gi"}, "limits": {"cpu": "2500m"}}),
}
ASCEND = {
    "spec.model": {
        "volume": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}, "path": "qwen/32b/"},
        "servedName": "qwen",
    },
    **both("device", {"kind": "ascend", "resourceName": "huawei.com/Ascend910B"}),
    "spec.roles.prefill.parallelism": {"tensor": 4, "pipeline": 2},
    "spec.roles.decode.parallelism": {"tensor": 2, "data": 2},
    "spec.transfer": {"port": 21000, "quarantineSeconds": 9, "onFailure": "fail"},
    "spec.drain.timeoutSeconds": 120,
    "spec.auth.secretRef": {"name": "mine", "key": "token"},
}

NODES = {**both("device", {"kind": "cuda"}), **both("parallelism.tensor", 16), **both("nodesPerInstance", 2)}

SPLIT = both("parallelism", {"tensor": 2, "pipeline": 2, "data": 2})
INSIDE: dict[str, Any] = {"spec.tls": {"secretName": "inside"}}
WRITTEN = [
    *((SPLIT, role, PodPlace.ALONE) for role in Role),
    *((INSIDE, role, PodPlace.ALONE) for role in Role),
    *((NODES, role, place) for role in Role for place in (PodPlace.LEADER, PodPlace.WORKER)),
]


def pod(changes: dict[str, Any], role: Role, place: PodPlace = PodPlace.ALONE) -> dict[str, Any]:
    return engine_template(make_pool(changes), role, "0a1b2c3d", place)


def engine(template: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = template["spec"]["containers"][0]
    return found


def env(template: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in engine(template)["env"]}


def argument(template: dict[str, Any], name: str) -> str | None:
    given = [word.partition("=")[2] for word in engine(template)["args"] if word.partition("=")[0] == f"--{name}"]
    return given[0] if given else None


def transfer(template: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(argument(template, "kv-transfer-config") or "")
    return found


def test_what_the_operator_writes_nobody_else_may_give() -> None:
    """vLLM takes an option that is given twice as it comes last: the user's."""
    pods = [pod({**changes, "spec.model.revision": "v1"}, role, place) for changes, role, place in WRITTEN]
    words = [word for template in pods for word in engine(template)["args"] if word.startswith("--")]
    written = {word.removeprefix("--").partition("=")[0] for word in words}
    assert {"port", "node-rank", "headless", "data-parallel-size", "ssl-cert-reqs"} <= written
    assert written <= {*SET_ELSEWHERE, ON_ONE_NODE}


class TestCpu:
    def test_it_runs_vllm_with_the_models_name_and_the_users_arguments_last(self) -> None:
        args = engine(pod(CPU, Role.PREFILL))["args"]
        assert engine(pod(CPU, Role.PREFILL))["command"] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
        assert args[:4] == ["--model=tiny", "--served-model-name=tiny", "--host=0.0.0.0", "--port=8000"]
        assert args[-3:] == ["--no-enable-prefix-caching", "--enforce-eager", "--max-model-len=2048"]

    def test_one_rank_asks_for_no_split_and_no_devices(self) -> None:
        template = pod(CPU, Role.DECODE)
        assert not [word for word in engine(template)["args"] if "parallel" in word or "nnodes" in word]
        assert engine(template)["resources"] == {
            "requests": {"cpu": "2", "memory": "8Gi"},
            "limits": {"cpu": "2500m"},
        }

    def test_threads_are_those_of_the_limit_and_bound_to_no_core(self) -> None:
        found = env(pod(CPU, Role.PREFILL))
        assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert found["OMP_NUM_THREADS"] == {
            "resourceFieldRef": {"containerName": "engine", "resource": "limits.cpu", "divisor": "1"}
        }
        assert "OMP_NUM_THREADS" not in env(pod({**CPU, **both("parallelism.tensor", 2)}, Role.PREFILL))

    def test_it_has_the_pools_secret_by_reference_and_its_own_address(self) -> None:
        found = env(pod(CPU, Role.PREFILL))
        assert found["PDCLUSTER_SECRET"] == {"secretKeyRef": {"name": "pool-secret", "key": "secret"}}
        assert found["VLLM_HOST_IP"] == {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}

    def test_the_users_variables_win_over_ours(self) -> None:
        changes = {**CPU, **both("env", [{"name": "HOME", "value": "/mine"}, {"name": "X"}])}
        names = [one["name"] for one in engine(pod(changes, Role.PREFILL))["env"]]
        assert env(pod(changes, Role.PREFILL))["HOME"] == "/mine"
        assert len(names) == len(set(names))

    def test_nothing_in_it_may_do_more_than_it_needs(self) -> None:
        template = pod(CPU, Role.PREFILL)
        spec, container = template["spec"], engine(template)
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["serviceAccountName"] == "pool-engine"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }

    def test_the_last_lines_of_its_log_are_kept_when_it_dies(self) -> None:
        assert engine(pod(CPU, Role.PREFILL))["terminationMessagePolicy"] == "FallbackToLogsOnError"

    def test_what_it_has_to_write_to_is_a_folder_of_its_own(self) -> None:
        template = pod(CPU, Role.PREFILL)
        places = {mount["mountPath"]: mount["name"] for mount in engine(template)["volumeMounts"]}
        volumes = {volume["name"]: volume["emptyDir"] for volume in template["spec"]["volumes"]}
        assert places == {"/tmp": "tmp", "/cache": "cache", "/dev/shm": "shm"}
        assert volumes == {"tmp": {}, "cache": {}, "shm": {"medium": "Memory"}}
        assert env(template)["HOME"] == "/cache"

    def test_started_and_alive_means_that_vllm_answers(self) -> None:
        container = engine(pod(CPU, Role.PREFILL))
        health = {"path": "/health", "port": "http"}
        assert container["startupProbe"]["httpGet"] == container["livenessProbe"]["httpGet"] == health

    def test_ready_means_on_decode_that_the_side_channel_answers_too(self) -> None:
        prefill, decode = (engine(pod(CPU, role))["readinessProbe"]["exec"]["command"] for role in Role)
        assert " ".join(prefill) == "pdcluster ready --role prefill --port 8000"
        assert " ".join(decode) == "pdcluster ready --role decode --port 8000 --side-channel-port 12100 --ranks 1"

    @pytest.mark.parametrize("role", Role)
    def test_the_commands_of_probe_and_drain_are_ones_that_pdcluster_takes(self, role: Role) -> None:
        container = engine(pod(ASCEND, role))
        probe = ready.make_parser().parse_args(container["readinessProbe"]["exec"]["command"][2:])
        hook = drain.make_parser().parse_args(container["lifecycle"]["preStop"]["exec"]["command"][2:])
        assert (probe.role, probe.port, hook.port, hook.timeout_s) == (role.value, 8000, 8000, 120)
        assert container["readinessProbe"]["timeoutSeconds"] > probe.timeout_s

    def test_a_slow_start_is_not_cut_off_before_the_longest_progress_deadline_by_default(self) -> None:
        probe = engine(pod(CPU, Role.PREFILL))["startupProbe"]
        deadline_s = make_cluster().spec.rollout.progress_deadline_seconds
        assert probe["periodSeconds"] * probe["failureThreshold"] > deadline_s

    def test_it_drains_before_it_is_stopped_and_the_grace_period_is_longer(self) -> None:
        template = pod({**CPU, "spec.drain.timeoutSeconds": 77}, Role.DECODE)
        assert engine(template)["lifecycle"]["preStop"]["exec"]["command"] == [
            "pdcluster", "drain", "--port", "8000", "--timeout-s", "77",
        ]  # fmt: skip
        assert template["spec"]["terminationGracePeriodSeconds"] == 107


class TestAscend:
    def test_devices_are_as_many_as_ranks_under_the_users_name_for_them(self) -> None:
        assert engine(pod(ASCEND, Role.PREFILL))["resources"]["limits"] == {"huawei.com/Ascend910B": "8"}
        assert engine(pod(ASCEND, Role.DECODE))["resources"]["limits"] == {"huawei.com/Ascend910B": "4"}

    @pytest.mark.parametrize(("kind", "name"), [("ascend", "huawei.com/Ascend910"), ("cuda", "nvidia.com/gpu")])
    def test_each_kind_has_a_resource_by_default_beside_the_users_own(self, kind: str, name: str) -> None:
        changes = {**both("device", {"kind": kind}), **both("resources.limits", {"memory": "64Gi"})}
        assert engine(pod(changes, Role.PREFILL))["resources"]["limits"] == {"memory": "64Gi", name: "1"}

    def test_each_role_is_split_in_its_own_way(self) -> None:
        prefill, decode = pod(ASCEND, Role.PREFILL), pod(ASCEND, Role.DECODE)
        names = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
        assert [argument(prefill, name) for name in names] == ["4", "2", None]
        assert [argument(decode, name) for name in names] == ["2", None, "2"]

    def test_the_model_is_read_from_its_volume(self) -> None:
        template = pod(ASCEND, Role.PREFILL)
        assert argument(template, "model") == "/model/qwen/32b"
        assert argument(template, "served-model-name") == "qwen"
        assert template["spec"]["volumes"][-1] == {"name": "model", "persistentVolumeClaim": {"claimName": "weights"}}
        assert engine(template)["volumeMounts"][-1] == {"name": "model", "mountPath": "/model", "readOnly": True}

    def test_prefill_sends_and_decode_receives_on_the_side_channels_port(self) -> None:
        assert transfer(pod(ASCEND, Role.PREFILL)) == {
            "kv_connector": "PDClusterConnector",
            "kv_role": "kv_producer",
            "engine_id": "$(POD_NAME)",
            "kv_connector_extra_config": {"transfer_protocol": "ascend", "quarantine_s": 9.0},
            "kv_load_failure_policy": "fail",
        }
        decode = transfer(pod(ASCEND, Role.DECODE))
        assert decode["kv_role"] == "kv_consumer"
        assert decode["kv_connector_extra_config"]["side_channel_port"] == 21000

    def test_decode_compares_as_much_of_the_content_as_the_spec_says(self) -> None:
        for check in ContentCheck:
            told = transfer(pod({**ASCEND, "spec.transfer": {"contentCheck": check.value}}, Role.DECODE))
            assert parse_settings(told["kv_connector_extra_config"]).content_check is check

    def test_decode_computes_itself_what_the_spec_says(self) -> None:
        told = transfer(pod({**ASCEND, "spec.transfer": {"minPushTokens": 48}}, Role.DECODE))
        assert parse_settings(told["kv_connector_extra_config"]).min_push_tokens == 48

    def test_prefill_is_not_told_what_only_decode_decides(self) -> None:
        """Its template would change with it, and its engines would be replaced for nothing."""
        told = transfer(pod({**ASCEND, "spec.transfer": {"contentCheck": "full"}}, Role.PREFILL))
        assert "content_check" not in told["kv_connector_extra_config"]
        told = transfer(pod({**CPU, "spec.transfer": {"contentCheck": "off"}}, Role.PREFILL))
        assert "content_check" not in told["kv_connector_extra_config"]
        told = transfer(pod({**CPU, "spec.transfer": {"minPushTokens": 48}}, Role.PREFILL))
        assert "min_push_tokens" not in told["kv_connector_extra_config"]

    def test_prefill_on_a_cpu_compiles_what_finds_all_sums(self) -> None:
        told = transfer(pod({**CPU, "spec.transfer": {"contentCheck": "full"}}, Role.PREFILL))
        assert parse_settings(told["kv_connector_extra_config"]).content_check is ContentCheck.FULL

    @pytest.mark.parametrize("role", Role)
    def test_engines_use_the_rdma_devices_that_are_named(self, role: Role) -> None:
        told = transfer(pod({**ASCEND, "spec.transfer": {"protocol": "rdma", "devices": ["mlx5_0", "mlx5_1"]}}, role))
        assert parse_settings(told["kv_connector_extra_config"]).transfer_devices == ("mlx5_0", "mlx5_1")

    @pytest.mark.parametrize("role", Role)
    def test_the_connector_takes_its_settings(self, role: Role) -> None:
        settings = parse_settings(transfer(pod(ASCEND, role))["kv_connector_extra_config"])
        assert settings.transfer_protocol == "ascend"
        assert settings.quarantine_s == 9

    def test_decode_lists_a_port_for_each_rank_and_prefill_only_http(self) -> None:
        decode = [port["containerPort"] for port in engine(pod(ASCEND, Role.DECODE))["ports"]]
        prefill = [port["containerPort"] for port in engine(pod(ASCEND, Role.PREFILL))["ports"]]
        assert decode == [8000, 21000, 21001, 21002, 21003]
        assert prefill == [8000]

    def test_every_rank_of_decode_is_asked_whether_it_is_ready(self) -> None:
        command = engine(pod(ASCEND, Role.DECODE))["readinessProbe"]["exec"]["command"]
        assert command[-4:] == ["--side-channel-port", "21000", "--ranks", "4"]

    def test_it_is_in_the_group_that_owns_the_devices(self) -> None:
        assert pod(ASCEND, Role.PREFILL)["spec"]["securityContext"]["supplementalGroups"] == [1000]

    def test_the_users_own_secret_is_taken(self) -> None:
        assert env(pod(ASCEND, Role.PREFILL))["PDCLUSTER_SECRET"] == {"secretKeyRef": {"name": "mine", "key": "token"}}


def test_a_named_model_may_have_a_revision_and_a_folder_needs_nothing_else() -> None:
    named = pod({"spec.model": {"name": "org/m", "revision": "v1"}}, Role.PREFILL)
    folder = pod({"spec.model": {"path": "/models/m", "servedName": "m"}}, Role.PREFILL)
    assert (argument(named, "model"), argument(named, "revision")) == ("org/m", "v1")
    assert (argument(folder, "model"), argument(folder, "revision")) == ("/models/m", None)


def test_a_volume_may_be_the_model_itself() -> None:
    model = {"volume": {"source": {"image": {"reference": "weights:1"}}}, "servedName": "m"}
    assert argument(pod({"spec.model": model}, Role.PREFILL), "model") == "/model"


@pytest.mark.parametrize(
    ("value", "word"), [("true", "--x"), ("false", "--no-x"), ("8", "--x=8"), ("", "--x="), ('{"a":1}', '--x={"a":1}')]
)
def test_an_engine_argument_is_spelled_as_its_page_says(value: str, word: str) -> None:
    assert spelled_arg("x", value) == word


def test_overrides_lie_over_it_but_never_over_our_labels() -> None:
    overrides = {
        "metadata": {"labels": {"pdcluster.dev/role": "decode", "team": "a"}, "annotations": {"x": "y"}},
        "spec": {"nodeSelector": {"npu": "yes"}, "containers": [{"name": "engine", "imagePullPolicy": "Always"}]},
    }
    template = pod({"spec.roles.prefill.podOverrides": overrides}, Role.PREFILL)
    assert template["metadata"]["labels"]["pdcluster.dev/role"] == "prefill"
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["annotations"] == {"x": "y"}
    assert template["spec"]["nodeSelector"] == {"npu": "yes"}
    assert engine(template)["imagePullPolicy"] == "Always"
    assert engine(template)["image"] == "engine:1"


@pytest.mark.parametrize("role", Role)
def test_variables_of_the_user_reach_the_engine_and_ours_stay(role: Role) -> None:
    """NCCL's and Gloo's devices, say, which only the user of several NICs knows."""
    asked = [{"name": "NCCL_IB_QPS_PER_CONNECTION", "value": "4"}, {"name": "GLOO_SOCKET_IFNAME", "value": "eth0"}]
    overrides = {"spec": {"containers": [{"name": "engine", "env": asked}]}}
    ours = engine(pod(CPU, role))["env"]
    changed = pod({**CPU, f"spec.roles.{role.name.lower()}.podOverrides": overrides}, role)
    seen = engine(changed)["env"]
    assert all(one in seen for one in (*asked, *ours))


class TestOverNodes:
    def test_the_leader_answers_and_the_workers_only_compute(self) -> None:
        leader, worker = (pod(NODES, Role.DECODE, place) for place in (PodPlace.LEADER, PodPlace.WORKER))
        assert argument(leader, "node-rank") == "0"
        assert argument(worker, "node-rank") == "$(LWS_WORKER_INDEX)"
        assert engine(worker)["command"][-1] == "serve"
        assert engine(worker)["args"][0] == "tiny"
        assert "--headless" in engine(worker)["args"]
        assert argument(worker, "port") is None
        assert "readinessProbe" in engine(leader)
        assert not {"readinessProbe", "livenessProbe", "startupProbe"} & engine(worker).keys()

    @pytest.mark.parametrize("role", Role)
    def test_a_worker_that_is_to_go_waits_until_its_leader_has_nothing_to_do(self, role: Role) -> None:
        template = pod({**NODES, "spec.drain.timeoutSeconds": 77}, role, PodPlace.WORKER)
        shell, flag, script = engine(template)["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, flag) == ("sh", "-c")
        env = {"PATH": "", "LWS_LEADER_ADDRESS": "pool-0.pool.default"}
        told = script.replace("exec pdcluster drain", "printf '%s\\n'")
        done = subprocess.run(["/bin/sh", "-c", told], env=env, capture_output=True, text=True, check=True)
        hook = drain.make_parser().parse_args(done.stdout.split())
        assert (hook.host, hook.port, hook.timeout_s) == ("pool-0.pool.default", 8000, 77)
        assert template["spec"]["terminationGracePeriodSeconds"] == 107

    def test_a_leader_asks_itself(self) -> None:
        leader = pod(NODES, Role.DECODE, PodPlace.LEADER)
        assert engine(leader)["lifecycle"] == engine(pod(CPU, Role.DECODE))["lifecycle"]

    def test_only_the_leader_has_the_label_by_which_it_is_found(self) -> None:
        leader, worker = (pod(NODES, Role.DECODE, place) for place in (PodPlace.LEADER, PodPlace.WORKER))
        assert leader["metadata"]["labels"]["pdcluster.dev/leader"] == "true"
        assert "pdcluster.dev/leader" not in worker["metadata"]["labels"]

    def test_all_of_an_instance_have_one_engine_id_and_one_master(self) -> None:
        for place in (PodPlace.LEADER, PodPlace.WORKER):
            template = pod(NODES, Role.DECODE, place)
            assert transfer(template)["engine_id"] == "$(LWS_LEADER_ADDRESS)"
            assert argument(template, "master-addr") == "$(LWS_LEADER_ADDRESS)"
            assert argument(template, "nnodes") == "2"

    def test_the_leader_asks_for_the_ranks_on_its_own_node(self) -> None:
        leader = pod(NODES, Role.DECODE, PodPlace.LEADER)
        assert engine(leader)["readinessProbe"]["exec"]["command"][-2:] == ["--ranks", "8"]

    def test_each_pod_has_its_part_of_the_devices(self) -> None:
        template = pod(NODES, Role.DECODE, PodPlace.WORKER)
        assert engine(template)["resources"]["limits"] == {"nvidia.com/gpu": "8"}
