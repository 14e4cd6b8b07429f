from __future__ import annotations

from pathlib import Path

from e2e.groups import own_groups


def test_a_process_is_found_in_each_hierarchy_of_version_1() -> None:
    told = "9:name=systemd:/\n4:memory:/user/1\n2:cpu,cpuacct:/\n0::/\n"
    assert own_groups(told) == {
        "systemd": Path("/sys/fs/cgroup/systemd"),
        "memory": Path("/sys/fs/cgroup/memory/user/1"),
        "cpu,cpuacct": Path("/sys/fs/cgroup/cpu,cpuacct"),
    }


def test_a_machine_with_version_2_alone_has_none() -> None:
    assert own_groups("0::/user.slice\n") == {}
