"""``python -m tools.device_check.pack``: puts the packages and libraries that a lent machine lacks into ``.device/``.

    python/      msgspec, pyzmq and Mooncake's engine, for that machine's Python
    lib/         libraries of this system that Mooncake links, without those that every Linux with a driver has

Run there: ``PYTHONPATH=.device/python LD_LIBRARY_PATH=.device/lib python -m tools.device_check``.

With ``--engines`` both go into an archive, and vLLM into two more: ``pack_engines.py``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.device_check import pack_engines

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".device"
PACKAGES: Final = ("msgspec", "pyzmq")
"""Packages beside Mooncake that the checks import and a machine with PyTorch may lack."""
PLATFORM: Final = "x86_64-manylinux_2_35"
_RUN: Final = Path(__file__).with_name("lent.sh")
_UV: Final = str(Path(sys.executable).with_name("uv"))
_ENGINE: Final = "mooncake/engine.so"
_EVERYWHERE: Final = (
    "/lib64/ld-",
    "libc.",
    "libm.",
    "libdl.",
    "librt.",
    "libpthread.",
    "libresolv.",
    "libgcc_s.",
    "libstdc++.",
)
_PACKAGE: Final = "ibverbs-providers"
_DEB: Final = "deb"
_DRIVERS: Final = ("libcuda.", "libcudart.")
"""The driver has the first library, and PyTorch the second. So PyTorch must be imported before Mooncake."""


def main() -> int:
    given = _parser().parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        _install(site, given.python, [*_locked(), given.mooncake])
        _unpack(site)
        python = FOLDER / "python"
        python.mkdir(parents=True)
        for path in (*_plain(site), *_mooncake(site)):
            _copy(path, python / path.relative_to(site))
        for path in _system(site):
            _copy(path, FOLDER / "lib" / path.name)
    if given.engines:
        _pack_engines(given.python, given.chip)
    for path in sorted(FOLDER.iterdir()):
        print(f"{path.relative_to(ROOT)}: {sum(map(_size, [path, *path.rglob('*')])) / (1 << 20):.1f} MiB")
    return 0


def _pack_engines(python: str, chip: int) -> None:
    """Pack the connector's part as an archive too, and vLLM."""
    pack_engines.archive(FOLDER / "connector.tar.xz", FOLDER, [one for one in FOLDER.rglob("*") if one.is_file()])
    for part in ("python", "lib"):
        shutil.rmtree(FOLDER / part)
    with tempfile.TemporaryDirectory() as folder:
        pack_engines.pack(Path(folder), FOLDER, pack_engines.Machine(chip, python, PLATFORM, _UV))
    _copy(_RUN, FOLDER / _RUN.name)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _locked() -> list[str]:
    """``PACKAGES`` in the versions of our lock."""
    lines = (ROOT / "requirements" / "dev.lock").read_text().splitlines()
    wanted = [line.split()[0] for line in lines if line.startswith(tuple(f"{name}==" for name in PACKAGES))]
    assert len(wanted) == len(PACKAGES), wanted
    return wanted


def _install(site: Path, python: str, packages: list[str]) -> None:
    where = ("--target", str(site), "--python-version", python, "--python-platform", PLATFORM)
    command = [_UV, "pip", "install", "-q", *where, "--only-binary", ":all:", "--no-deps", *packages]
    subprocess.run(command, check=True)  # noqa: S603 - our own uv


def _unpack(site: Path) -> None:
    """Unpack a library that Mooncake's build for CUDA needs. Its build for CPU, and so ``make install``, does not."""
    apt, dpkg = (shutil.which(name) or name for name in ("apt-get", "dpkg"))
    subprocess.run([apt, "download", "-qq", "-o", "APT::Sandbox::User=root", _PACKAGE], check=True, cwd=site)  # noqa: S603 - a package that we name
    (deb,) = site.glob(f"{_PACKAGE}_*.deb")
    subprocess.run([dpkg, "-x", str(deb), str(site / _DEB)], check=True)  # noqa: S603 - the package just fetched


def _plain(site: Path) -> Iterator[Path]:
    """Files of all packages but Mooncake."""
    for path in site.rglob("*"):
        if path.is_file() and not path.relative_to(site).parts[0].startswith(("mooncake", "bin", _DEB, _PACKAGE)):
            yield path


def _mooncake(site: Path) -> Iterator[Path]:
    """Files of Mooncake's Transfer Engine, and its metadata for ``importlib.metadata``. The other files are 100 MiB."""
    yield from site.glob("mooncake*.dist-info/METADATA")
    yield site / "mooncake" / "__init__.py"
    yield site / _ENGINE
    yield from (path for path in _linked(site) if _is_ours(path, site))


def _system(site: Path) -> Iterator[Path]:
    yield from (path for path in _linked(site) if not _is_ours(path, site))


def _is_ours(path: Path, site: Path) -> bool:
    """Whether the library came with the wheel. The engine looks for such a library there."""
    return path.is_relative_to(site) and not path.is_relative_to(site / _DEB)


def _linked(site: Path) -> Iterator[Path]:
    """Paths on this machine of the libraries that the engine loads."""
    env = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, site.glob(f"{_DEB}/usr/lib/*")))}
    ldd = [shutil.which("ldd") or "ldd", str(site / _ENGINE)]
    done = subprocess.run(ldd, check=True, capture_output=True, text=True, env=env)  # noqa: S603 - a library that we named
    for line in done.stdout.splitlines():
        name, _, place = line.strip().partition(" => ")
        if name.startswith(_EVERYWHERE + _DRIVERS) or not place:
            continue
        if place.startswith("not found"):
            raise SystemExit(f"{name} is not on this machine: `make install` brings Mooncake's libraries")
        yield Path(place.split()[0])


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.device_check.pack", description="What a lent machine lacks, into .device"
    )
    parser.add_argument("--python", default="3.12", help="of the lent machine")
    parser.add_argument(
        "--mooncake", default="mooncake-transfer-engine-cuda13==0.3.14", help="its build for that machine"
    )
    parser.add_argument("--engines", action="store_true", help="vLLM too, all of it as archives")
    parser.add_argument("--chip", type=int, default=90, help="for which vLLM's code is kept: 90 is an H100 or H200")
    return parser


if __name__ == "__main__":
    sys.exit(main())
