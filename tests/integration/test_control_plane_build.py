"""Building the control plane, with a stand-in for Go that writes a program and takes its time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from control_plane.binaries import (
    BuildError,
    NotBuiltError,
    Sources,
    build_binaries,
    cache_folder,
    find_binaries,
    find_go,
    read_sources,
)
from control_plane.recipe import PACKAGES, PLANE

GO_MOD: Final = "module m\n\ngo 1.25.0\n\nrequire k8s.io/kubernetes v1.35.4\n"
GO: Final = """#!/bin/sh
# $1 build: writes the file after -o, one line of its arguments into builds; else its version.
if [ "$1" = env ]; then echo {version}; exit; fi
echo "$*" >> {folder}/builds
[ -e {folder}/broken ] && {{ echo "no such module" >&2; exit 1; }}
while [ "$1" != -o ]; do shift; done
: > "$2"
sleep 0.1
echo "program of $3" > "$2"
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An empty cache, and a Go that says 1.26.0."""
    install_go(tmp_path, "go1.26.0")
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PDCLUSTER_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(tmp_path, GO_MOD, "hashes")


def install_go(folder: Path, version: str) -> None:
    go = folder / "bin" / "go"
    go.parent.mkdir(exist_ok=True)
    go.write_text(GO.format(version=version, folder=folder))
    go.chmod(0o755)


def builds(tmp_path: Path) -> list[str]:
    """The packages that Go was asked for, in order."""
    file = tmp_path / "builds"
    return [line.rpartition(" ")[2] for line in file.read_text().splitlines()] if file.exists() else []


def build(env: Mapping[str, str], sources: Sources) -> str:
    """What it said."""
    said: list[str] = []
    build_binaries(env, said.append, sources)
    return "".join(said)


def test_each_program_is_built_once_and_the_second_time_is_silent(
    env: dict[str, str], sources: Sources, tmp_path: Path
) -> None:
    said = build(env, sources)
    assert (said.count("\n"), said[-6:]) == (1, " done\n")
    assert build(env, sources) == ""
    assert builds(tmp_path) == [PACKAGES[program] for program in PLANE]
    for program, package in ((one, PACKAGES[one]) for one in PLANE):
        assert (cache_folder(env, sources) / program).read_text() == f"program of {package}\n"


def test_builders_that_race_build_once_and_all_wait_for_whole_programs(
    env: dict[str, str], sources: Sources, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        said = [*pool.map(lambda _: build(env, sources), range(4))]
    assert builds(tmp_path) == [PACKAGES[program] for program in PLANE]
    assert sum(1 for text in said if text) == 1


def test_a_builder_that_is_killed_leaves_no_half_program_and_no_lock(
    env: dict[str, str], sources: Sources, tmp_path: Path
) -> None:
    program = (
        "import os, sys; from pathlib import Path; from control_plane.binaries import Sources, build_binaries\n"
        f"build_binaries(os.environ, print, Sources(Path({str(tmp_path)!r}), {GO_MOD!r}, 'hashes'))"
    )
    tests = str(Path(__file__).resolve().parents[1])
    with subprocess.Popen([sys.executable, "-c", program], env={**env, "PYTHONPATH": tests}) as builder:
        deadline = time.monotonic() + 20
        while not builds(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        builder.kill()
    assert [file for file in cache_folder(env, sources).glob("[!.]*") if not file.read_text()] == []
    build(env, sources)
    assert {file.name for file in cache_folder(env, sources).glob("[!.]*")} == {*PLANE}


def test_a_build_that_fails_says_what_go_said_and_leaves_nothing(
    env: dict[str, str], sources: Sources, tmp_path: Path
) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(BuildError, match="etcd could not be built:\nno such module"):
        build(env, sources)
    assert [file.name for file in cache_folder(env, sources).iterdir()] == [".lock"]


def test_an_old_go_of_the_system_gives_way_to_this_environments(env: dict[str, str], tmp_path: Path) -> None:
    """The locked packages have one."""
    install_go(tmp_path, "go1.24.9")
    assert find_go(env, (1, 25, 0)) == Path(sys.executable).with_name("go")
    install_go(tmp_path, "go1.25.0")
    assert find_go(env, (1, 25, 0)) == tmp_path / "bin" / "go"


def test_without_a_go_that_is_new_enough_the_cure_is_named(env: dict[str, str]) -> None:
    with pytest.raises(BuildError, match=r"no Go from 99\.1 on \(.*bin/go is go1\.26\.0; .*\): make install"):
        find_go(env, (99, 1))


def test_programs_of_kubebuilder_come_first_and_only_what_it_lacks_is_built(
    env: dict[str, str], sources: Sources, tmp_path: Path
) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    for program in ("etcd", "kube-apiserver"):
        (assets / program).touch()
    build({**env, "KUBEBUILDER_ASSETS": str(assets)}, sources)
    assert builds(tmp_path) == ["k8s.io/kubernetes/cmd/kube-controller-manager"]


def test_programs_are_found_where_they_were_built_or_given(env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(NotBuiltError, match="etcd, kube-apiserver, kube-controller-manager not built yet: make kube"):
        find_binaries(env)
    build_binaries(env, str, read_sources())
    (tmp_path / "kube-apiserver").touch()
    found = find_binaries({**env, "KUBEBUILDER_ASSETS": str(tmp_path)})
    assert found.api_server == tmp_path / "kube-apiserver"
    assert found.etcd == cache_folder(env, read_sources()) / "etcd"
