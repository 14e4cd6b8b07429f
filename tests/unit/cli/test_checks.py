"""Each check that fails is one line with the cure."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from integration.ports import fresh_port
from pdcluster_cli.checks import (
    SYSTEM_LIBRARIES,
    Finding,
    accelerators,
    check_cache,
    check_device,
    check_machine,
    check_modules,
    check_port,
    check_python,
    check_system_libraries,
    free_bytes,
    problems_of,
)
from pdcluster_cli.processes.engines import LocalDevice
from pdcluster_cli.processes.waiting import held_ports

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 4), (4, 0, 0)])
def test_a_python_that_is_new_enough_is_named(version: tuple[int, ...]) -> None:
    assert check_python(version) == Finding(f"Python {'.'.join(map(str, version))}")


def test_an_old_python_is_named_with_what_to_install() -> None:
    problem = "Python is 3.10.14, 3.11 or newer is needed: install python3.11 and make a new environment"
    assert check_python((3, 10, 14)).problem == problem


def test_system_libraries_that_load_are_no_problem() -> None:
    asked: list[str] = []
    assert check_system_libraries(asked.append).problem is None
    assert asked == list(SYSTEM_LIBRARIES)


def test_missing_system_libraries_are_one_command_to_type() -> None:
    def load(library: str) -> None:
        if library in ("libibverbs.so.1", "libcurl.so.4"):
            raise OSError("cannot open shared object file")

    problem = "system libraries are missing: sudo apt-get install -y libibverbs1 libcurl4"
    assert check_system_libraries(load).problem == problem


def test_make_installs_the_same_system_libraries() -> None:
    script = (ROOT / "tools/bootstrap.sh").read_text()
    assert dict(re.findall(r'"(lib\S+\.so\.\d+)": "(\w+)"', script)) == SYSTEM_LIBRARIES


def test_vllm_and_mooncake_are_found_here() -> None:
    assert check_modules(LocalDevice.CPU) == Finding("vllm and mooncake are installed")


@pytest.mark.parametrize(
    ("device", "cure"),
    [
        ("cpu", "make install, in a clone of pdcluster (vLLM's CPU build asks for a PyTorch that PyPI lacks)"),
        ("cuda", "pip install 'pdcluster[router,connector,cuda]'"),
        ("npu", "pip install 'pdcluster[router,connector,ascend]'"),
    ],
)
def test_what_is_missing_is_installed_for_the_machines_device(
    monkeypatch: pytest.MonkeyPatch, device: str, cure: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert check_modules(LocalDevice(device)).problem == f"vllm and mooncake not installed: {cure}"


def test_mooncake_is_checked_as_an_engine_does_at_its_start() -> None:
    (finding,) = check_machine(LocalDevice.CPU)
    assert finding.what.startswith("mooncake-transfer-engine-non-cuda 0.3.")
    assert finding.problem is None
    (finding,) = check_machine(LocalDevice.CUDA)
    assert finding.problem is not None
    assert "non-cuda is for device type cpu, this engine's is cuda: pip uninstall" in finding.problem


def test_all_that_an_ascend_machine_lacks_is_said_at_once() -> None:
    problems = problems_of(check_machine(LocalDevice.NPU))
    assert [problem.split(" ")[0] for problem in problems[:2]] == ["mooncake-transfer-engine-non-cuda", "CANN's"]


def test_a_free_port_is_no_problem() -> None:
    port = fresh_port()
    assert check_port(port) == Finding(f"port {port} is free")


def test_a_taken_port_is_named_with_the_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem = check_port(port).problem
    cure = "stop what listens there or choose another port (--port N, make run PORT=N)"
    assert problem == f"port {port} on 127.0.0.1 cannot be used (Address already in use): {cure}"


def test_the_default_internal_port_is_taken_too_while_another_pool_that_starts_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with held_ports(1) as (held,):
        assert not check_port(held).problem
        monkeypatch.setattr("pdcluster_cli.checks.INTERNAL_PORT", held)
        assert "cannot be used (Address already in use)" in str(check_port(held).problem)


def test_only_problems_are_shown_in_order() -> None:
    findings = [Finding("a"), Finding("b", "b is wrong"), Finding("c"), Finding("d", "d is wrong")]
    assert problems_of(findings) == ["b is wrong", "d is wrong"]
    assert problems_of([]) == []


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (LocalDevice.CUDA, "the vLLM that is installed computes on CPUs: install vLLM for CUDA, or leave --device out"),
        (LocalDevice.NPU, "torch_npu is not installed: use an image of vLLM-Ascend, or leave --device out"),
    ],
)
def test_a_device_that_the_installed_vllm_cannot_use_is_refused_with_the_cure(device: LocalDevice, said: str) -> None:
    assert check_device(device).problem == said
    assert check_device(LocalDevice.CPU).problem is None


def test_a_device_that_is_not_there_is_named_by_its_file(tmp_path: Path) -> None:
    def check() -> Finding:
        return check_device(LocalDevice.CUDA, tmp_path, lambda _: True)

    lacks = f"this machine has no {tmp_path}/nvidiactl: give it its cuda devices, or leave --device out"
    assert check().problem == lacks
    (tmp_path / "dxg").touch()
    assert check().problem is None


def test_the_cpu_has_no_accelerators() -> None:
    assert accelerators(LocalDevice.CPU, {"CUDA_VISIBLE_DEVICES": "0"}) == ()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, ("0", "1", "2")),
        ("4,5", ("4", "5")),
        ("GPU-1f, MIG-2e", ("GPU-1f", "MIG-2e")),
        ("3,-1,2", ("3",)),
        ("NoDevFiles", ()),
        ("0,0,1", ("0", "1")),
        ("", ()),
    ],
)
def test_accelerators_are_those_that_the_user_has_chosen_or_all(
    tmp_path: Path, given: str | None, found: tuple[str, ...]
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    variables = {} if given is None else {"CUDA_VISIBLE_DEVICES": given, "ASCEND_RT_VISIBLE_DEVICES": "7"}
    assert accelerators(LocalDevice.CUDA, variables, tmp_path) == found


def test_free_memory_is_the_machines_or_the_containers_where_that_is_less(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert free_bytes(meminfo, cgroup) is None
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert free_bytes(meminfo, cgroup) == 4096 << 10
    cgroup.mkdir()
    (cgroup / "memory.current").write_text("1000000\n")
    (cgroup / "memory.stat").write_text("anon 600000\nfile 400000\n")
    (cgroup / "memory.max").write_text("1500000\n")
    assert free_bytes(meminfo, cgroup) == 900_000
    (cgroup / "memory.max").write_text("max\n")
    assert free_bytes(meminfo, cgroup) == 4096 << 10
    assert (free_bytes() or 0) > 1 << 20


def test_a_cache_that_can_be_made_or_is_there_is_no_problem(tmp_path: Path) -> None:
    assert check_cache(tmp_path / "a" / "b").problem is None
    assert check_cache(tmp_path / "a" / "b").problem is None


def test_a_cache_that_cannot_be_made_is_named_with_the_variable_that_moves_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "pdcluster", Path("/proc/pdcluster"), Path("/proc/1")):
        found = check_cache(folder)
        assert found.problem is not None
        assert found.problem.startswith(f"{folder} cannot be written (")
        assert found.problem.endswith("): set PDCLUSTER_CACHE to a folder that can")
