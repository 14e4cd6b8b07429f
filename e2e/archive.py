"""Container images as archives, written from layers on disk: what ``ctr images import`` and ``docker load`` read.

Source of truth: Docker's image specification 1.2 (``manifest.json``, a config, one tar for each layer, lowest first).
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

ARCHITECTURE: Final = "amd64"
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Layer:
    """A tar of files, and its digest: 64 hexadecimal digits."""

    tar: Path
    digest: str


@dataclass(frozen=True, slots=True)
class Image:
    """``name``: with a tag. ``user``: a number, so that Kubernetes sees that it is not root; empty for root."""

    name: str
    layers: tuple[Layer, ...]
    command: tuple[str, ...] = ()
    user: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


def digest_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def config_of(image: Image) -> dict[str, Any]:
    env = {"PATH": PATH, **image.env}
    return {
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": {
            "Cmd": [*image.command],
            "User": image.user,
            "Env": [f"{name}={value}" for name, value in env.items()],
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in image.layers]},
        "history": [],
    }


def write_archive(image: Image, out: IO[bytes]) -> None:
    """The whole archive; ``out`` need not be able to seek."""
    config = json.dumps(config_of(image)).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [image.name], "Layers": [_place(layer) for layer in image.layers]}]
    with tarfile.open(fileobj=out, mode="w|") as archive:
        _add_bytes(archive, name, config)
        for layer in image.layers:
            archive.add(layer.tar, arcname=_place(layer))
        _add_bytes(archive, "manifest.json", json.dumps(manifest).encode())


def image_settings(dockerfile: str) -> tuple[dict[str, str], str]:
    """Environment and user that a Dockerfile's last stage ends with. ``${NAME}`` is what was set before, or our PATH.

    Knows what our Dockerfiles have, ``ENV NAME=VALUE ...`` and ``USER UID:GID`` on one line each, and no more.
    """
    stage = dockerfile[dockerfile.rindex("\nFROM ") :]
    env: dict[str, str] = {"PATH": PATH}
    user = ""
    for words in (line.split() for line in stage.splitlines() if line):
        if words[0] == "USER":
            user = words[1]
        if words[0] == "ENV":
            for name, value in (word.split("=", 1) for word in words[1:]):
                env[name] = _filled(value, env)
    return env, user


def _filled(value: str, env: Mapping[str, str]) -> str:
    for name, known in env.items():
        value = value.replace(f"${{{name}}}", known)
    return value


def _place(layer: Layer) -> str:
    return f"{layer.digest}/layer.tar"


def _add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
