"""What is written at a start is what the started program reads."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from pdcluster_connector.settings import parse_settings as parse_connector
from pdcluster_protocol.labels import Role
from pdcluster_protocol.launch import (
    ENGINE_KEY_VARIABLE,
    HTTP_PORT,
    INTERNAL_PORT,
    MOONCAKE_PORTS,
    SIDE_CHANNEL_PORT,
    ConnectorSettings,
    RouterFlag,
    TransferProtocol,
    kv_transfer_config,
    router_flag,
)
from pdcluster_protocol.params import ContentCheck
from pdcluster_router.__main__ import parse_settings as parse_router

ENGINES = (router_flag("--prefill", "http://p:1"), router_flag("--decode", "http://d:2"))


@pytest.mark.parametrize(("role", "kv_role"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")])
def test_vllm_is_told_in_its_own_words(role: Role, kv_role: str) -> None:
    assert json.loads(json.dumps(kv_transfer_config(role, "e-0", {"host": "h"}, "recompute"))) == {
        "kv_connector": "PDClusterConnector",
        "kv_role": kv_role,
        "engine_id": "e-0",
        "kv_connector_extra_config": {"host": "h"},
        "kv_load_failure_policy": "recompute",
    }


def test_the_connector_reads_each_setting_that_is_written() -> None:
    every = ConnectorSettings(
        host="10.0.0.7",
        side_channel_port=1,
        transfer_protocol="rdma",
        transfer_devices=("mlx5_0",),
        quarantine_s=2.5,
        content_check="full",
        min_push_tokens=64,
        metaserver_ca="/tls/ca.crt",
        metaserver_tls_name="pool.svc",
        trace_file="/t",
    )
    assert every.keys() == ConnectorSettings.__annotations__.keys()
    parsed = parse_connector(every)
    assert {name: getattr(parsed, name) for name in every} == {**every, "content_check": ContentCheck.FULL}


def test_the_router_has_each_flag_by_its_whole_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_router(["--help"])
    known = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert set(get_args(RouterFlag)) <= set(known)


def test_a_router_that_is_told_no_port_listens_where_it_is_looked_for() -> None:
    settings = parse_router(ENGINES)
    assert (settings.port, settings.wanted_internal_port) == (HTTP_PORT, INTERNAL_PORT)


def test_the_router_takes_the_engines_key_from_the_variable_that_engines_have_it_from() -> None:
    assert parse_router(ENGINES, environ={ENGINE_KEY_VARIABLE: "k"}).engine_api_key == "k"


def test_the_side_channels_of_a_pod_are_none_of_mooncakes_ports() -> None:
    assert MOONCAKE_PORTS[0] >= SIDE_CHANNEL_PORT + 1024


def test_transfer_protocols_are_spelled_in_one_place() -> None:
    """A new one is then found by mypy and by the names that are used, not by a search for words."""
    root = Path(__file__).parents[3]
    packages = ("connector", "operator", "cli", "router", "protocol", "kube")
    spelled: dict[str, set[str]] = {}
    for file in (file for package in packages for file in (root / package).rglob("*.py")):
        words = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
        for word in (word for word in TransferProtocol if word in words):
            spelled.setdefault(word.value, set()).add(file.name)
    assert spelled == {"tcp": {"launch.py"}, "rdma": {"launch.py"}, "ascend": {"launch.py", "role.py"}}, (
        "use TransferProtocol; role.py has a kind of device of that name"
    )
