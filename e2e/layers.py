"""Layers of the images that ``make e2e`` runs, made once for each version of what they are made of.

    base        Debian by debootstrap: Python, and the libraries that vLLM and Mooncake load      (35 s, 185 MB)
    pdcluster   what images/wheel.sh and images/pdcluster.sh add to it, run by chroot as their Dockerfile would
    pause       one static program

No registry can be reached from where this was made, so there is no engine image here: engines run from ``base``, with
this checkout's virtual environment, its interpreter and the model mounted from the node (``pool.py``).
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from e2e.archive import Layer, digest_of
from pdcluster_cli.models.tiny_model import ensure_folder

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = (
    *("protocol", "router", "connector", "operator", "kube", "cli", "images", "pyproject.toml"),
    *("requirements/build.lock", "requirements/control.lock"),
)
FILES_BESIDE: Final = ("README.md", "LICENSE")
"""Of the wheel's own description."""
PACKAGES: Final = (
    *("python3", "python3-venv", "ca-certificates"),
    *("libibverbs1", "librdmacm1", "libnuma1", "libgomp1", "libcurl4"),
    # glibc's own look-up of names, and what people want in a container when something is wrong.
    *("netbase", "procps"),
)
_LIMIT_S: Final = 1200.0
_NUM_LINES: Final = 15
_BUILD: Final = """set -eu
mount -t overlay overlay -o "lowerdir=$BASE,upperdir=$UPPER,workdir=$WORK" "$MERGED"
mkdir -p "$MERGED/src" "$MERGED/wheels"
mount --bind "$SOURCE_TREE" "$MERGED/src"
mount -t tmpfs tmpfs "$MERGED/wheels"
mount -t tmpfs tmpfs "$MERGED/tmp"
mount -t proc proc "$MERGED/proc"
touch "$MERGED/etc/resolv.conf"
for file in /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt; do
    mount --bind "$file" "$MERGED$file"
done
chroot "$MERGED" /src/images/wheel.sh
chroot "$MERGED" /src/images/pdcluster.sh
"""
"""Run in a mount namespace of its own, so nothing stays mounted. Packages come the way that this machine gets them: its
name servers, its authorities."""


class LayerError(Exception):
    """A layer could not be made. Says what the program said that makes it."""


Say = Callable[[str], object]


def base_layer(cache: Path, say: Say) -> Layer:
    """
    Raises:
        LayerError: It cannot be made.
    """
    key = _key([_codename(), *PACKAGES, inspect.getsource(_write_base)])
    return _layer(cache / f"base-{key}", _write_base, say, "a Debian root folder for pods")


def base_root(layer: Layer) -> Path:
    """The folder that the base layer was made of."""
    return layer.tar.with_name("root")


def pdcluster_layer(cache: Path, base: Layer, say: Say) -> Layer:
    """
    Raises:
        LayerError: It cannot be made.
    """
    sources = _tracked(SOURCES)
    key = _key([base.digest, *(f"{name}\0{(ROOT / name).read_bytes().hex()}" for name in sources)])

    def write(folder: Path) -> None:
        _write_pdcluster(folder, base_root(base), [*sources, *FILES_BESIDE])

    return _layer(cache / f"pdcluster-{key}", write, say, "the image of operator and routers, by images/pdcluster.sh")


def pause_layer(cache: Path, say: Say) -> Layer:
    """
    Raises:
        LayerError: It cannot be made.
    """
    source = Path(__file__).with_name("pause.c")
    return _layer(cache / f"pause-{_key([source.read_text()])}", _write_pause, say, "the image that holds a pod")


def _layer(folder: Path, write: Callable[[Path], None], say: Say, what: str) -> Layer:
    def make(making: Path) -> None:
        say(f"pdcluster: making {what} (once)")
        write(making)
        _run(
            ["tar", "--numeric-owner", "--sort=name", "-C", str(making / "root"), "-cf", str(making / "layer.tar"), "."]
        )
        (making / "digest").write_text(digest_of(making / "layer.tar"))

    ensure_folder(folder, make)
    return Layer(folder / "layer.tar", (folder / "digest").read_text())


def _write_base(folder: Path) -> None:
    root = folder / "root"
    _run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", _codename(), str(root)])
    for what in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(root / what, ignore_errors=True)
    # An interpreter from the node may lie below root's home, and pods are not root.
    (root / "root").chmod(0o755)


def _write_pdcluster(folder: Path, base: Path, files: Sequence[str]) -> None:
    """``root`` is what the scripts added. Their sources and wheels are mounted, and so no part of it."""
    tree = folder / "source"
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    places = {"UPPER": folder / "root", "WORK": folder / "work", "MERGED": folder / "merged", "SOURCE_TREE": tree}
    for place in places.values():
        place.mkdir(exist_ok=True)
    env = {**_pip_env(os.environ), "BASE": str(base), **{name: str(place) for name, place in places.items()}}
    _run(["unshare", "--mount", "sh", "-c", _BUILD], env)
    for name in ("WORK", "MERGED", "SOURCE_TREE"):
        shutil.rmtree(places[name])


def _pip_env(environ: Mapping[str, str]) -> dict[str, str]:
    """How pip is set up here, without folders that are not there in the root folder."""
    kept = {name: value for name, value in environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}
    kept.pop("PIP_FIND_LINKS", None)
    return {**kept, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


def _write_pause(folder: Path) -> None:
    root = folder / "root"
    root.mkdir()
    _run(["gcc", "-static", "-Os", "-o", str(root / "pause"), str(Path(__file__).with_name("pause.c"))])


def _tracked(paths: Sequence[str]) -> list[str]:
    """Files of the repository, also new ones that git does not ignore."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return sorted({name for name in listed.split("\0") if name and (ROOT / name).is_file()})


def _codename() -> str:
    """Of this machine's Debian: the environment's libraries are of its C library."""
    told = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return told.get("VERSION_CODENAME", "bookworm").strip('"')


def _key(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Raises: LayerError."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LayerError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_NUM_LINES:])
        raise LayerError(f"{' '.join(command[:3])} ended with {done.returncode}:\n{words}")
