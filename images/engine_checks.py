"""Looks at the Python of an image of engines, for ``engine.sh``. Standard library only: nothing else is there yet.

    engine_checks.py base        vLLM is there, and of a version that the connector works with
    engine_checks.py mooncake    prints what is to be done about Mooncake: keep, install, or replace and by which names
    engine_checks.py packages    prints the Debian packages of the libraries that Mooncake needs and that are not here
    engine_checks.py load        Mooncake loads, as an engine loads it

What fails ends with status 1 and one line that says who, both values and the cure. A base image has no driver: it comes
with the node, so a library of the driver's that is missing here proves nothing. Any other one is missing for ever.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

OLDEST_VLLM = "0.23"
NEWEST_VLLM = "0.33"
"""The connector's: any release from the one to the other. Its hooks and KV layouts change with each minor version."""
PROVEN_VLLM = "0.32.0"
"""What all tests run."""
OLDEST_MOONCAKE = "0.3.12.post1"
"""Earlier ones report bytes that have not arrived yet."""
NEEDED = ("vllm", "msgspec", "aiohttp", "numpy", "zmq")
"""vLLM needs all that the connector needs beside it."""
DRIVERS = frozenset({"libcuda.so.1", "libascend_hal.so"})
"""Mounted from the node when the engine starts."""
PACKAGES = {
    "libcurl.so.4": "libcurl4",
    "libibverbs.so.1": "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
}
"""Debian's and Ubuntu's. ibverbs-providers also has what libibverbs opens the cards with."""
WHEELS = {
    "libcudart.so.12": "mooncake-transfer-engine is for CUDA 12",
    "libcudart.so.13": "mooncake-transfer-engine-cuda13 is for CUDA 13",
    "libascendcl.so": "mooncake-transfer-engine-npu needs CANN: put what its set_env.sh sets into ENV of an image of "
    "your own, for an engine is started without a shell",
}
_WITH_TORCH = "import importlib.util as u; u.find_spec('torch') and __import__('torch')"
"""PyTorch brings libraries that Mooncake needs, and engines load it first."""
CURE = "use --build-arg TRANSFER= with the wheel for it (-cuda13: CUDA 13; without a suffix: CUDA 12; -non-cuda: CPUs)"


def check_base() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        fail(
            f"BASE is no image of vLLM for this python3 ({sys.executable}), missing: {', '.join(missing)}: give one, "
            "such as --build-arg BASE=vllm/vllm-openai:TAG"
        )
    found = asked("import vllm; print(vllm.__version__)")
    version = found.stdout.split()[-1] if found.stdout.split() else ""
    if found.returncode or not version:
        fail(f"vLLM of BASE cannot be imported: {last_line(found.stderr)}")
    if not numbers_of(OLDEST_VLLM) <= numbers_of(version)[:2] <= numbers_of(NEWEST_VLLM):
        way = "newer" if numbers_of(version) > numbers_of(NEWEST_VLLM) else "older"
        fail(
            f"BASE has vLLM {version}, which is {way} than this connector works with: take a BASE with vLLM "
            f"{OLDEST_VLLM} to {NEWEST_VLLM}, such as --build-arg BASE=vllm/vllm-openai:v{PROVEN_VLLM}"
        )


def say_what_to_do_about_mooncake() -> None:
    """``keep``: BASE's own is new enough and loads. TRANSFER is then not installed over it: two builds of Mooncake
    share the folder, and the second leaves files of the first behind."""
    transfer = os.environ.get("TRANSFER", "")
    if importlib.util.find_spec("mooncake") is None:
        if not transfer:
            fail("there is no Mooncake in BASE: name its wheel, such as --build-arg "
                 "TRANSFER=mooncake-transfer-engine-cuda13==0.3.14")  # fmt: skip
        print("install")
        return
    names = distributions()
    trouble = version_trouble(names) or load_trouble(frozenset(PACKAGES))
    if not trouble:
        print("keep")
    elif not transfer:
        fail(f"Mooncake of BASE: {trouble}")
    elif not names:
        fail(
            f"Mooncake of BASE: {trouble}; no package of pip's brought it, so it cannot be replaced: take another BASE"
        )
    else:
        print("replace", *names)


def say_packages() -> None:
    print(*sorted(PACKAGES[library] for library in missing_libraries(what_ldd_says()) if library in PACKAGES))


def check_load() -> None:
    trouble = version_trouble(distributions()) or load_trouble(frozenset())
    if trouble:
        fail(f"Mooncake: {trouble}")


def version_trouble(names: list[str]) -> str:
    if not names:
        return f"it has no version (built from source?), and {OLDEST_MOONCAKE} or later is needed: {CURE}"
    version = importlib.metadata.version(names[0])
    if numbers_of(version) < numbers_of(OLDEST_MOONCAKE):
        return f"{names[0]} is {version}, and {OLDEST_MOONCAKE} or later is needed: {CURE}"
    return ""


def load_trouble(coming: frozenset[str]) -> str:
    """Why an engine could not load Mooncake; empty when it could. ``coming``: libraries that are installed later."""
    found = asked(f"{_WITH_TORCH}; from mooncake.engine import TransferEngine")
    if not found.returncode:
        return ""
    told = what_ldd_says()
    if old := old_libraries(told):
        return f"it cannot be loaded, libraries of this image are too old: {', '.join(old)}: take a newer BASE"
    lacks = missing_libraries(told)
    if not lacks:
        return f"it cannot be loaded: {last_line(found.stderr)}"
    lacks = [library for library in lacks if library not in coming]
    hints = [WHEELS[library] for library in lacks if library in WHEELS]
    lack = "; ".join([f"it cannot be loaded, this image lacks {', '.join(lacks)}", *hints, CURE])
    return lack if set(lacks) - DRIVERS else ""


def what_ldd_says() -> str:
    """Of Mooncake's own part, all at once: the loader itself stops at the first trouble, and that may be the driver's
    library, which is never there while an image is built. Empty: there is no such part."""
    spec = importlib.util.find_spec("mooncake")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else ()
    part = next((found for found in (Path(one) / "engine.so" for one in folders) if found.exists()), None)
    if part is None:
        return ""
    command = ["ldd", str(part)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # no shell
    return told.stdout + told.stderr


def old_libraries(told: str) -> list[str]:
    """Libraries that are there without the version that is needed, each with it."""
    found = re.findall(r"(\S+): version `(\S+)' not found", told)
    return sorted({f"{Path(library).name} without {version}" for library, version in found})


def missing_libraries(told: str) -> list[str]:
    """All that Mooncake's own part needs, directly or not, and that is neither here nor loaded by PyTorch."""
    absent = re.findall(r"^\s*(\S+) => not found", told, re.MULTILINE)
    maps = asked(f"{_WITH_TORCH}; print(open('/proc/self/maps').read())").stdout
    loaded = {Path(line.split()[-1]).name for line in maps.splitlines() if "/" in line}
    return [library for library in dict.fromkeys(absent) if library not in loaded]


def distributions() -> list[str]:
    """Names of pip's packages that brought Mooncake."""
    found = {
        one.metadata["Name"]
        for one in importlib.metadata.distributions()
        if any(str(file) in ("mooncake/__init__.py", "mooncake/engine.so") for file in one.files or ())
    }
    return sorted(found)


def numbers_of(version: str) -> tuple[int, ...]:
    """``0.3.12.post1+x`` -> (0, 3, 12, 1); a release candidate counts as its release."""
    public = re.split(r"\+|rc|a|b|\.dev", version)[0]
    return tuple(int(number) for number in re.findall(r"\d+", public))


def asked(program: str) -> subprocess.CompletedProcess[str]:
    """A program in a Python of its own, from the root: nothing of this folder is in its way."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")  # noqa: S603  # no shell


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no word of why"])[-1]


def fail(message: str) -> None:
    sys.exit(f"pdcluster: {message}")


CHECKS: dict[str, Callable[[], None]] = {
    "base": check_base,
    "mooncake": say_what_to_do_about_mooncake,
    "packages": say_packages,
    "load": check_load,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
