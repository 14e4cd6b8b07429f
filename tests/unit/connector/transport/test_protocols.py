"""Mooncake moves bytes by the protocol that was asked for, or the engine does not start."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdcluster_connector.transport.protocols import environment_of, locked_memory_problem, require_rdma_devices
from pdcluster_protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("protocol", "environ", "wanted"),
    [
        ("tcp", {}, {"MC_FORCE_TCP": "1"}),
        ("tcp", {"MC_FORCE_TCP": "true"}, {"MC_FORCE_TCP": "true"}),
        ("rdma", {"HOME": "/"}, {"MC_FORCE_HCA": "1"}),
        ("ascend", {}, {}),
    ],
)
def test_each_protocol_is_forced_by_what_mooncake_obeys(
    protocol: str, environ: dict[str, str], wanted: dict[str, str]
) -> None:
    assert environment_of(protocol, environ) == wanted


@pytest.mark.parametrize(
    ("protocol", "name", "value"),
    [
        ("tcp", "MC_FORCE_HCA", "1"),
        ("tcp", "MC_FORCE_HCA", "0"),
        ("tcp", "MC_INTRANODE_NVLINK", ""),
        ("rdma", "MC_FORCE_TCP", "0"),
        ("rdma", "MC_FORCE_MNNVL", "1"),
        ("rdma", "MC_USE_TENT", "1"),
        ("tcp", "MC_USE_TEV1", "1"),
        ("ascend", "MC_FORCE_TCP", "1"),
    ],
)
def test_a_users_own_contrary_setting_is_refused_with_both_values_and_the_cure(
    protocol: str, name: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=rf"transfer_protocol is {protocol}, but {name}={value} .*unset {name}, or"):
        environment_of(protocol, {name: value})


def test_an_unknown_protocol_and_the_unacknowledged_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"transfer_protocol is 'udp': use one of ascend, rdma, tcp"):
        environment_of("udp", {})
    with pytest.raises(ConfigError, match=r"MC_TCP_PROTO=1 .*: unset it"):
        environment_of("tcp", {"MC_TCP_PROTO": "1"})


@dataclass
class FakeVerbs:
    """As libibverbs: ``can_open`` says of each device whether this process may."""

    can_open: dict[str, bool]
    closed: list[int] = field(default_factory=list)
    num_freed: int = 0

    def ibv_get_device_list(self, number: Any) -> Any:
        ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = len(self.can_open)
        return list(range(1, len(self.can_open) + 1))

    def ibv_get_device_name(self, device: int) -> bytes:
        return list(self.can_open)[device - 1].encode()

    def ibv_open_device(self, device: int) -> int | None:
        return 100 + device if list(self.can_open.values())[device - 1] else None

    def ibv_close_device(self, context: int) -> None:
        self.closed.append(context)

    def ibv_free_device_list(self, devices: Any) -> None:
        assert devices
        self.num_freed += 1


def test_where_none_is_named_one_device_that_opens_is_enough_and_all_is_given_back() -> None:
    verbs = FakeVerbs({"mlx5_0": False, "mlx5_1": True})
    require_rdma_devices((), lambda: verbs)
    assert (verbs.closed, verbs.num_freed) == ([102], 1)


def test_devices_that_are_named_and_open_are_taken() -> None:
    verbs = FakeVerbs({"mlx5_0": True, "mlx5_1": True, "mlx5_2": False})
    require_rdma_devices(("mlx5_1", "mlx5_0"), lambda: verbs)


@pytest.mark.parametrize(
    ("can_open", "names", "told"),
    [
        pytest.param(
            {"mlx5_0": False, "mlx5_1": False},
            (),
            "rdma, but mlx5_0, mlx5_1 cannot be opened: .*/dev/infiniband.*protocol tcp",
            id="a pod sees the node's /sys/class/infiniband, also without /dev/infiniband",
        ),
        pytest.param({}, (), "libibverbs finds no RDMA device: .*use transfer_protocol tcp", id="none at all"),
        pytest.param(
            {"mlx5_0": True, "mlx5_2": False},
            ("mlx5_0", "mlx5_2"),
            "rdma, but mlx5_2 cannot be opened: ",
            id="each that is named must open",
        ),
        pytest.param(
            {"mlx5_0": True},
            ("mlx5_0", "mlx5_7"),
            "transfer_devices names mlx5_7, and libibverbs finds mlx5_0: name devices of this machine",
            id="Mooncake would pass over the name",
        ),
        pytest.param(
            {},
            ("mlx5_7",),
            "transfer_devices names mlx5_7, and libibverbs finds no RDMA device: name devices of this machine",
            id="named where there is none",
        ),
    ],
)
def test_devices_that_are_not_there_or_do_not_open_are_refused_by_name_with_the_cure(
    can_open: dict[str, bool], names: tuple[str, ...], told: str
) -> None:
    verbs = FakeVerbs(can_open)
    with pytest.raises(ConfigError, match=told):
        require_rdma_devices(names, lambda: verbs)
    assert verbs.num_freed == (1 if can_open else 0)


def status(tmp_path: Path, effective: str) -> Path:
    file = tmp_path / "status"
    file.write_text(f"Name:\tpython\nCapPrm:\t{effective}\nCapEff:\t{effective}\n")
    return file


def test_a_small_limit_of_locked_memory_is_told_with_both_values_and_the_cure(tmp_path: Path) -> None:
    told = locked_memory_problem(1 << 30, 65536, status(tmp_path, "0000000000000000"))
    assert "may lock 65536 bytes" in told
    assert "1073741824 bytes of KV" in told
    assert "ulimit -l unlimited" in told


@pytest.mark.parametrize(("limit", "effective"), [(-1, "0"), (1 << 30, "0"), (65536, "0000000000004000")])
def test_a_limit_that_is_large_enough_or_does_not_apply_is_no_problem(
    tmp_path: Path, limit: int, effective: str
) -> None:
    assert locked_memory_problem(1 << 30, limit, status(tmp_path, effective)) == ""
