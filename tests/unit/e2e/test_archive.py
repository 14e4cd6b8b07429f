from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from e2e.archive import PATH, Image, Layer, config_of, digest_of, image_settings, write_archive

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    tar = tmp_path / "layer.tar"
    with tarfile.open(tar, "w") as opened:
        info = tarfile.TarInfo("pause")
        info.size = 3
        opened.addfile(info, io.BytesIO(b"abc"))
    return Layer(tar, digest_of(tar))


def test_an_archive_names_its_layers_lowest_first_and_has_them(layer: Layer) -> None:
    out = io.BytesIO()
    upper = Layer(layer.tar, "f" * 64)
    write_archive(Image("e2e.local/pause:1", (layer, upper), command=("/pause",), user="1:1"), out)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        read = {name: file.read() for name, file in files.items() if file}
    (entry,) = json.loads(read["manifest.json"])
    config = json.loads(read[entry["Config"]])
    assert entry["RepoTags"] == ["e2e.local/pause:1"]
    assert entry["Layers"] == [f"{layer.digest}/layer.tar", f"{'f' * 64}/layer.tar"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{layer.digest}", f"sha256:{'f' * 64}"]
    assert (config["config"]["User"], config["config"]["Cmd"]) == ("1:1", ["/pause"])
    assert read[entry["Layers"][0]] == layer.tar.read_bytes()


def test_an_image_has_a_path_unless_it_says_another(layer: Layer) -> None:
    assert config_of(Image("a:1", (layer,)))["config"]["Env"] == [f"PATH={PATH}"]
    assert config_of(Image("a:1", (layer,), env={"PATH": "/x"}))["config"]["Env"] == ["PATH=/x"]


def test_our_own_dockerfile_ends_as_nobody_with_the_command_on_its_path() -> None:
    env, user = image_settings((ROOT / "images" / "pdcluster.Dockerfile").read_text())
    assert env["PATH"].split(":", 1) == ["/opt/pdcluster/bin", PATH]
    assert env["PYTHONUNBUFFERED"] == "1"
    assert user == "10001:10001"


def test_only_a_dockerfiles_last_stage_counts() -> None:
    env, user = image_settings("FROM a\nUSER 1:1\nENV A=1\nFROM b\nENV B=${PATH}/x\n")
    assert (env, user) == ({"PATH": PATH, "B": f"{PATH}/x"}, "")
