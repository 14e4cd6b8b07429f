"""What is read of a machine, and that all of it is looked at before a rank is made."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from pdcluster_connector.self_test.judging import CANN_LIBRARIES
from pdcluster_connector.self_test.machine import mooncake_builds, read_ascend, read_mooncake, require_machine
from pdcluster_protocol.errors import ConfigError


def test_the_mooncake_that_is_installed_is_found_by_its_name_and_fits_a_cpu() -> None:
    ((name, version),) = mooncake_builds()
    assert name == "mooncake-transfer-engine-non-cuda"
    assert version.startswith("0.3.")
    require_machine("cpu", "tcp")


def install(folder: Path, name: str, version: str) -> None:
    """As pip leaves it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_second_build_in_the_same_python_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "mooncake-transfer-engine-cuda13", "0.3.14")
    install(tmp_path, "mooncake-transfer-engine-non-cuda", "0.3.13.post1")
    monkeypatch.syspath_prepend(tmp_path)
    assert [name for name, _ in mooncake_builds()] == [
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-non-cuda",
    ]
    with pytest.raises(ConfigError, match="are both installed"):
        require_machine("cpu", "tcp")


def test_of_builds_in_two_folders_the_one_that_python_imports_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "mooncake-transfer-engine-cuda13", "0.3.14")
    monkeypatch.syspath_prepend(tmp_path)
    assert mooncake_builds() == (("mooncake-transfer-engine-cuda13", "0.3.14"),)
    require_machine("cpu", "tcp")


def test_what_an_interrupted_uninstall_leaves_is_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = mooncake_builds()
    (tmp_path / "mooncake_transfer_engine_cuda13-0.3.14.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert mooncake_builds() == before


def test_a_build_from_a_file_is_not_judged_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "mooncake-transfer-engine", "0.3.13.post1")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="is for device type cuda, this engine's is npu"):
        require_machine("npu", "tcp")
    (tmp_path / "mooncake_transfer_engine-0.3.13.post1.dist-info" / "direct_url.json").write_text("{}")
    require_machine("npu", "tcp")


def test_a_build_without_cuda_is_refused_on_cuda() -> None:
    with pytest.raises(ConfigError, match="non-cuda is for device type cpu, this engine's is cuda"):
        require_machine("cuda", "tcp")
    assert read_mooncake("cuda").torch_cuda


def test_what_ascend_needs_is_looked_for_only_where_the_protocol_is_ascend() -> None:
    with pytest.raises(ConfigError, match="CANN's environment is not in effect, 7 of 7 libraries"):
        require_machine("cpu", "ascend")
    require_machine("cpu", "rdma")


def test_an_ascend_machine_is_read_whole(tmp_path: Path) -> None:
    conf, asked = tmp_path / "hccn.conf", list[str]()
    conf.write_text("address_0=192.0.2.1\n")
    facts = read_ascend(conf, asked.append)
    assert facts.hccn_conf == ""
    assert facts.not_loaded == ()
    assert asked == list(CANN_LIBRARIES)
    assert (facts.uid, facts.user) == (os.getuid(), pwd.getpwuid(os.getuid()).pw_name)


def test_a_file_that_is_empty_or_not_there_and_libraries_that_do_not_load_are_said(tmp_path: Path) -> None:
    def load(library: str) -> None:
        if library == "libhccl.so":
            raise OSError("cannot open shared object file")

    conf = tmp_path / "hccn.conf"
    assert read_ascend(conf, load).hccn_conf == "No such file or directory"
    conf.write_text("\n")
    facts = read_ascend(conf, load)
    assert facts.hccn_conf == "it is empty"
    assert facts.not_loaded == ("libhccl.so",)
    conf.unlink()
    conf.mkdir()
    assert read_ascend(conf, load).hccn_conf == "Is a directory"
