"""Starts engines with upstream's connectors on CPU. Both transfer KV after prefill."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from benchmarks.client import BenchmarkError, Server
from benchmarks.fronts import MooncakeFront, NixlFront
from benchmarks.places import Place
from benchmarks.starter import Starter

from pdcluster_cli.processes.engines import PoolRole

_MOONCAKE_ID: Final = "P0"
_SETUP: Final = ".venv/bin/uv pip install --no-deps --require-hashes -r requirements/peers.lock"


def start_mooncake(far: Starter, near: Starter) -> MooncakeFront:
    """Starts one prefill and one decode engine with upstream's MooncakeConnector, over TCP."""
    bootstrap = far.free_port()
    prefill = far.start_peer(
        PoolRole.PREFILL,
        "mooncake-prefill",
        _mooncake("kv_producer", _MOONCAKE_ID),
        {"VLLM_HOST_IP": far.place.host, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap)},
    )
    decode = near.start_peer(
        PoolRole.DECODE, "mooncake-decode", _mooncake("kv_consumer", "D0"), {"VLLM_HOST_IP": near.place.host}
    )
    return MooncakeFront(prefill, decode, _MOONCAKE_ID, Server(far.place.host, bootstrap))


def start_nixl(far: Starter, near: Starter) -> NixlFront:
    """Starts one prefill and one decode engine with upstream's NixlConnector, over UCX's TCP.

    Raises:
        BenchmarkError: NIXL is not installed.
    """
    if find_spec("nixl") is None:
        raise BenchmarkError(f"NIXL is not installed: {_SETUP}, or leave it out with --ways")
    prefill, decode = (
        starter.start_peer(role, name, _NIXL, _nixl_env(starter.place, starter.free_port()))
        for starter, role, name in ((far, PoolRole.PREFILL, "nixl-prefill"), (near, PoolRole.DECODE, "nixl-decode"))
    )
    return NixlFront(prefill, decode)


def _mooncake(kv_role: str, engine_id: str) -> dict[str, object]:
    return {
        "kv_connector": "MooncakeCpuConnector",
        "kv_connector_module_path": "benchmarks.mooncake_peer",
        "kv_role": kv_role,
        "engine_id": engine_id,
        "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 2},
    }


_NIXL: Final[dict[str, object]] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {},
}


def _nixl_env(place: Place, port: int) -> dict[str, str]:
    return {
        "VLLM_HOST_IP": place.host,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": place.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": place.device,
    }
