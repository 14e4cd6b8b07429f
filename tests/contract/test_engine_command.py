"""vLLM's own parser takes the command lines that the operator writes, and reads them as they are meant."""

from __future__ import annotations

import argparse
import ssl
from typing import Any, Final

import pytest
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from fakes.operator_cluster import make_pool
from operator_cases.objects import both
from pdcluster_operator.core.manifests.command import PodPlace, engine_argv, engine_command
from pdcluster_protocol.labels import Role

ARGS: Final = {
    "block-size": "32",
    "enforce-eager": "true",
    "enable-prefix-caching": "false",
    "hf-overrides": '{"rope_theta": 10000}',
}
SPLIT: Final = {**both("parallelism", {"tensor": 2, "pipeline": 2, "data": 2}), **both("engineArgs", ARGS)}
NODES: Final = {**both("device", {"kind": "cuda"}), **both("parallelism.tensor", 4), **both("nodesPerInstance", 2)}


def argv(changes: dict[str, Any], role: Role, place: PodPlace) -> list[str]:
    """As Kubernetes hands it over, its variables put in."""
    values = {"POD_NAME": "pool-0", "LWS_LEADER_ADDRESS": "leader.pool", "LWS_WORKER_INDEX": "1"}
    words = engine_argv(make_pool(changes), role, place)
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not [word for word in words if "$(" in word]
    return words


def parsed_by_api_server(words: list[str]) -> argparse.Namespace:
    found: argparse.Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    return found


def parsed_by_serve(words: list[str]) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    found: argparse.Namespace = parser.parse_args(words)
    return found


@pytest.mark.parametrize("role", Role)
def test_an_engine_alone_on_its_pod(role: Role) -> None:
    given = parsed_by_api_server(argv({**SPLIT, "spec.model.revision": "v1"}, role, PodPlace.ALONE))
    assert (given.model, given.served_model_name, given.revision) == ("tiny", ["tiny"], "v1")
    assert (given.host, given.port) == ("0.0.0.0", 8000)
    assert (given.tensor_parallel_size, given.pipeline_parallel_size, given.data_parallel_size) == (2, 2, 2)
    assert (given.block_size, given.enforce_eager, given.enable_prefix_caching) == (32, True, False)
    assert given.hf_overrides == {"rope_theta": 10000}


@pytest.mark.parametrize("role", Role)
def test_an_engine_with_tls_asks_for_certificates(role: Role) -> None:
    given = parsed_by_api_server(argv({"spec.tls": {"secretName": "inside"}}, role, PodPlace.ALONE))
    folder = "/run/pdcluster/pool-tls"
    files = (given.ssl_certfile, given.ssl_keyfile, given.ssl_ca_certs)
    assert files == (f"{folder}/tls.crt", f"{folder}/tls.key", f"{folder}/ca.crt")
    assert (given.ssl_cert_reqs, given.enable_ssl_refresh) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize(("role", "kv_role"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")])
def test_the_connectors_part(role: Role, kv_role: str) -> None:
    found = parsed_by_api_server(argv({}, role, PodPlace.ALONE)).kv_transfer_config
    assert (found.kv_connector, found.kv_role, found.engine_id) == ("PDClusterConnector", kv_role, "pool-0")
    assert found.kv_load_failure_policy == "recompute"


def test_a_leader_and_its_worker_belong_together() -> None:
    leader = parsed_by_api_server(argv(NODES, Role.DECODE, PodPlace.LEADER))
    command = engine_command(make_pool(NODES), PodPlace.WORKER)
    assert command[:-1] == ["python3", "-m", "vllm.entrypoints.cli.main"]
    worker = parsed_by_serve([command[-1], *argv(NODES, Role.DECODE, PodPlace.WORKER)])
    assert (leader.model, worker.model_tag) == ("tiny", "tiny")
    assert (leader.nnodes, leader.node_rank, leader.headless) == (2, 0, False)
    assert (worker.nnodes, worker.node_rank, worker.headless) == (2, 1, True)
    assert leader.master_addr == worker.master_addr == "leader.pool"
    assert leader.kv_transfer_config.engine_id == worker.kv_transfer_config.engine_id == "leader.pool"
