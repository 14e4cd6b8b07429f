from __future__ import annotations

import pytest

from control_plane.binaries import read_sources
from control_plane.recipe import (
    API_SERVER,
    ETCD,
    PACKAGES,
    GoVersion,
    build_arguments,
    cache_key,
    go_version,
    kubernetes_version,
    needed_go,
)

GO_MOD = "module m\n\ngo 1.25.0\n\nrequire k8s.io/kubernetes v1.35.4\n"


def test_another_version_source_or_hash_is_another_folder() -> None:
    keys = {cache_key(GO_MOD, "a"), cache_key(GO_MOD.replace("35.4", "35.5"), "a"), cache_key(GO_MOD, "b")}
    assert len(keys) == 3
    assert cache_key(GO_MOD, "a") in keys


def test_what_moves_from_one_file_to_the_other_is_another_folder() -> None:
    assert cache_key(GO_MOD + "x", "y") != cache_key(GO_MOD, "x" + "y")


def test_the_version_is_linked_into_kubernetes_and_not_into_etcd() -> None:
    flags = build_arguments(API_SERVER, GO_MOD)[-1]
    assert "-X k8s.io/component-base/version.gitVersion=v1.35.4" in flags
    assert "-X k8s.io/component-base/version.gitMinor=35" in flags
    assert build_arguments(ETCD, GO_MOD)[-1] == "-s -w"


@pytest.mark.parametrize(
    ("text", "version"),
    [("go1.26.8", (1, 26, 8)), ("1.25", (1, 25)), ("go1.27rc1", (1, 27)), ("devel +abc", ()), ("", ())],
)
def test_a_go_version_is_numbers_that_compare(text: str, version: GoVersion) -> None:
    assert go_version(text) == version


def test_the_kubernetes_version_is_found_in_both_forms_of_go_mod() -> None:
    assert kubernetes_version("require (\n\tk8s.io/kubernetes v1.35.9\n)\n") == "1.35.9"
    assert kubernetes_version(GO_MOD) == "1.35.4"


def test_our_own_go_mod_names_every_program_and_a_go_that_exists() -> None:
    sources = read_sources()
    assert kubernetes_version(sources.go_mod).startswith("1.35.")
    assert needed_go(sources.go_mod) >= (1, 25)
    for package in PACKAGES.values():
        assert f"\t{package}\n" in sources.go_mod, f"go.mod has no tool {package}"


def test_every_source_of_kubernetes_is_of_one_release() -> None:
    """Kubernetes 1.35.4 is released together with modules 0.35.4."""
    sources = read_sources()
    replaced = [line.split() for line in sources.go_mod.splitlines() if " => " in line]
    assert len(replaced) > 20
    assert {line[-1] for line in replaced} == {"v" + kubernetes_version(sources.go_mod).replace("1.", "0.", 1)}
