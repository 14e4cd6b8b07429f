"""``images/engine.sh`` is run as an image's builder runs it, on a Python with stand-ins for vLLM and Mooncake.

vLLM's says a version. Mooncake's can be loaded, or is a real shared library that needs those of some other device.
What the script looks at is looked at on the real packages too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from fakes.elf import library_that_needs
from patience import PATIENCE_S

ROOT: Final = Path(__file__).resolve().parents[2]
NEEDED: Final = ("vllm", "msgspec", "aiohttp", "numpy", "zmq")
COMMAND: Final = "def main():\n    return 0\n"
CHECKED_HASH: Final = 0b11
"""The second word of such a .pyc (PEP 552)."""


VLLM: Final = "0.32.0"
MOONCAKE: Final = "0.3.13.post1"
LOADS: Final[dict[str, str | bytes]] = {"mooncake/engine.py": "class TransferEngine: pass\n"}
OLD_NAME: Final = "mooncake_transfer_engine"
NEW_NAME: Final = "mooncake_transfer_engine_cuda13"
CUDA_12: Final = ("libcudart.so.12", "libcuda.so.1", "libc.so.6")
"""As the wheel for CUDA 12 does; on the machine that builds an image there is no driver either."""


def needs(*libraries: str) -> dict[str, str | bytes]:
    """Files of a Mooncake whose own part needs these."""
    return {"mooncake/engine.so": library_that_needs(libraries)}


def make_wheel(
    folder: Path, name: str, modules: Mapping[str, str | bytes], script: str = "", version: str = "1.0"
) -> Path:
    """A wheel that pip installs without asking anybody."""
    info = f"{name}-{version}.dist-info"
    entry = f"[console_scripts]\n{script}\n" if script else ""
    files = {
        **modules,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry,
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": "".join(f"{one},,\n" for one in files)}.items():
            wheel.writestr(file, text)
    return path


class Image:
    """A Python that stands for an image's, with wheels beside it."""

    def __init__(self, folder: Path, blank: Path) -> None:
        """``blank``: a Python with pip alone; it is copied."""
        shutil.copytree(blank, folder / "python", symlinks=True)
        self.python = folder / "python" / "bin" / "python3"
        (self.modules,) = (folder / "python" / "lib").glob("python3*/site-packages")
        for name in NEEDED:
            (self.modules / name).mkdir()
            (self.modules / name / "__init__.py").write_text("")
        self.say_vllm(VLLM)
        self.folder = folder
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        shutil.copy(ROOT / "images" / "engine_checks.py", self.wheels)
        ours = {f"pdcluster_{part}/__init__.py": COMMAND for part in ("cli", "connector")}
        make_wheel(self.wheels, "pdcluster", ours, "pdcluster = pdcluster_cli:main")
        self.passwd = folder / "passwd"
        self.passwd.write_text("root:x:0:0:root:/root:/bin/bash\n")
        self.transfer = str(self.mooncake(LOADS))

    def say_vllm(self, version: str) -> None:
        (self.modules / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")

    def mooncake(self, files: Mapping[str, str | bytes], version: str = MOONCAKE, name: str = NEW_NAME) -> Path:
        """A wheel of it."""
        return make_wheel(self.folder, name, {"mooncake/__init__.py": "", **files}, version=version)

    def has_its_own(self, wheel: Path) -> None:
        """The base image brings it."""
        install = [str(self.python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
        subprocess.run(install, check=True, timeout=PATIENCE_S)

    def mooncakes(self) -> list[str]:
        """What is installed of it."""
        return sorted(path.name for path in self.modules.glob("mooncake_*.dist-info"))

    def build(self) -> subprocess.CompletedProcess[str]:
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        told = {"WHEELS": str(self.wheels), "TRANSFER": self.transfer, "PYTHON": str(self.python), "PATH": path}
        told["PASSWD"] = str(self.passwd)
        command = [str(ROOT / "images" / "engine.sh")]
        return subprocess.run(
            command, env={**os.environ, **told}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def bytecode_of(self, module: str) -> Path:
        return Path(importlib.util.cache_from_source(str(self.modules / module)))


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blank") / "python"
    venv.create(folder, with_pip=True)
    return folder


@pytest.fixture
def found(tmp_path: Path, blank: Path) -> Image:
    return Image(tmp_path, blank)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory, blank: Path) -> Image:
    found = Image(tmp_path_factory.mktemp("image"), blank)
    (found.modules / "vllm" / "template.py").write_text("def {{ name }}():\n")
    done = found.build()
    assert done.returncode == 0, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("module", ["vllm/__init__.py", "numpy/__init__.py", "pdcluster_connector/__init__.py"])
def test_modules_are_compiled_and_their_bytecode_is_known_by_the_sources_hash(image: Image, module: str) -> None:
    found = image.bytecode_of(module).read_bytes()
    # pip compiles what it installs itself, by time; that is valid, and stays.
    is_pips = module.startswith("pdcluster")
    assert int.from_bytes(found[4:8], "little") == (0 if is_pips else CHECKED_HASH)


def test_a_start_compiles_nothing_and_writes_nothing(image: Image) -> None:
    program = f"import sys; sys.dont_write_bytecode = True; import {', '.join(NEEDED)}, pdcluster_connector"
    done = subprocess.run(
        [image.python, "-v", "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S, cwd="/"
    )
    ours = [line for line in done.stderr.splitlines() if str(image.modules) in line]
    assert len([line for line in ours if "matches" in line]) >= len(NEEDED)
    assert [line for line in ours if "code object from '" in line and ".pyc" not in line] == []


def test_a_module_that_somebody_mounts_over_ours_is_the_one_that_runs(image: Image) -> None:
    module = image.modules / "zmq" / "__init__.py"
    before = module.stat()
    module.write_text("MINE = 1\n")
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        subprocess.run([image.python, "-B", "-c", "import zmq; zmq.MINE"], check=True, timeout=PATIENCE_S)
    finally:
        module.write_text("")


def test_an_image_without_vllm_is_refused_with_the_cure(found: Image) -> None:
    (found.modules / "vllm").rename(found.modules / "something_else")
    done = found.build()
    assert done.returncode == 1
    assert "missing: vllm" in done.stderr
    assert "--build-arg BASE=vllm/vllm-openai:TAG" in done.stderr


@pytest.mark.parametrize(("version", "way"), [("0.22.1+empty", "older"), ("0.9.2", "older"), ("0.34.0", "newer")])
def test_a_vllm_that_the_connector_does_not_know_is_refused_in_both_directions(
    found: Image, version: str, way: str
) -> None:
    found.say_vllm(version)
    done = found.build()
    assert done.returncode == 1
    assert f"BASE has vLLM {version}, which is {way} than this connector works with" in done.stderr
    assert "take a BASE with vLLM 0.23 to 0.33" in done.stderr


def test_the_wheel_for_another_cuda_ends_the_build_and_not_the_engine(found: Image) -> None:
    """The recipe of before: vLLM 0.32 is CUDA 13, and the plain wheel is not."""
    found.transfer = str(found.mooncake(needs(*CUDA_12), name=OLD_NAME))
    done = found.build()
    assert done.returncode == 1
    assert "lacks libcudart.so.12, libcuda.so.1" in done.stderr
    assert "mooncake-transfer-engine is for CUDA 12" in done.stderr
    assert "-cuda13" in done.stderr


def test_the_drivers_library_may_be_absent_where_an_image_is_built(found: Image) -> None:
    found.transfer = str(found.mooncake(needs("libcuda.so.1", "libc.so.6")))
    done = found.build()
    assert done.returncode == 0, done.stderr


def test_a_library_behind_the_drivers_is_missed_all_the_same(found: Image) -> None:
    """The loader stops at the first that it does not find."""
    found.transfer = str(found.mooncake(needs("libcuda.so.1", "libsomething.so.7", "libc.so.6")))
    done = found.build()
    assert done.returncode == 1
    assert "lacks libcuda.so.1, libsomething.so.7" in done.stderr


def test_a_library_that_is_too_old_is_found_also_where_the_driver_is_absent(found: Image) -> None:
    """ldd, as glibc 2.36 tells it of a library that needs more than there is."""
    found.transfer = str(found.mooncake(needs("libcuda.so.1", "libc.so.6")))
    ldd = found.python.parent / "ldd"
    old = "$1: /lib/libibverbs.so.1: version \\`IBVERBS_1.14' not found (required by $1)"
    ldd.write_text(f'#!/bin/sh\necho "{old}" >&2\necho "	libcuda.so.1 => not found"\n')
    ldd.chmod(0o755)
    done = found.build()
    assert done.returncode == 1
    assert "too old: libibverbs.so.1 without IBVERBS_1.14: take a newer BASE" in done.stderr


def test_a_mooncake_of_the_image_that_is_new_enough_stays_whatever_was_given(found: Image) -> None:
    found.has_its_own(found.mooncake(LOADS, "0.3.14"))
    found.transfer = str(found.mooncake(needs(*CUDA_12), name=OLD_NAME))
    done = found.build()
    assert done.returncode == 0, done.stderr
    assert "this image's own Mooncake is kept" in done.stdout
    assert found.mooncakes() == [f"{NEW_NAME}-0.3.14.dist-info"]
    assert not (found.modules / "mooncake" / "engine.so").exists()


@pytest.mark.parametrize(
    ("version", "files"),
    [
        pytest.param("0.3.11.post1", LOADS, id="too old"),
        pytest.param("0.3.9", LOADS, id="too old with a larger digit", marks=pytest.mark.slow),
        pytest.param(MOONCAKE, needs(*CUDA_12), id="for CUDA 12", marks=pytest.mark.slow),
    ],
)
def test_a_mooncake_of_the_image_that_cannot_serve_goes_whole_before_the_other_comes(
    found: Image, version: str, files: Mapping[str, str | bytes]
) -> None:
    found.has_its_own(found.mooncake(files, version, name=OLD_NAME))
    done = found.build()
    assert done.returncode == 0, done.stderr
    assert found.mooncakes() == [f"{NEW_NAME}-{MOONCAKE}.dist-info"]
    assert not (found.modules / "mooncake" / "engine.so").exists()


@pytest.mark.parametrize("is_given", [False, True], ids=["of the image", "that was given"])
def test_a_mooncake_that_is_too_old_is_refused_with_both_versions(found: Image, *, is_given: bool) -> None:
    old = found.mooncake(LOADS, "0.3.11.post1")
    if not is_given:
        found.has_its_own(old)
    found.transfer = str(old) if is_given else ""
    done = found.build()
    assert done.returncode == 1
    assert "is 0.3.11.post1, and 0.3.12.post1 or later is needed" in done.stderr


def test_without_any_mooncake_the_cure_is_a_wheel(found: Image) -> None:
    found.transfer = ""
    done = found.build()
    assert done.returncode == 1
    assert "name its wheel, such as --build-arg TRANSFER=mooncake-transfer-engine-cuda13==" in done.stderr


def test_the_engines_user_has_a_name_once(found: Image) -> None:
    """HCCL does not start for a number without one."""
    for _ in range(2):
        assert found.build().returncode == 0
    assert found.passwd.read_text().splitlines()[1:] == [
        "pdcluster:x:10001:10001:pdcluster engine:/cache:/usr/sbin/nologin"
    ]


def test_a_vllm_that_is_installed_from_its_own_folder_is_compiled_too(found: Image) -> None:
    """As in vLLM-Ascend's images."""
    workspace = found.folder / "workspace"
    workspace.mkdir()
    (found.modules / "vllm").rename(workspace / "vllm")
    (found.modules / "editable.pth").write_text(f"{workspace}\n")
    done = found.build()
    assert done.returncode == 0, done.stderr
    assert list((workspace / "vllm" / "__pycache__").glob("__init__.*.pyc"))


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ("load", ""),
        *(
            pytest.param(check, said, marks=pytest.mark.slow)
            for check, said in (("base", ""), ("mooncake", "keep\n"), ("packages", "\n"))
        ),
    ],
)
def test_the_checks_hold_on_the_real_vllm_and_mooncake(check: str, said: str) -> None:
    command = [sys.executable, str(ROOT / "images" / "engine_checks.py"), check]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
