"""Reads the facts that ``judging.py`` judges: packages, libraries, files, the process's user. Changes nothing."""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

from pdcluster_connector.self_test.judging import (
    BUILDS,
    CANN_LIBRARIES,
    WHEEL,
    AscendFacts,
    MooncakeFacts,
    ascend_problems,
    mooncake_problem,
)
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.launch import TransferProtocol

HCCN_CONF: Final = Path("/etc/hccn.conf")


def require_machine(device_type: str, protocol: str) -> None:
    """The packages and mounts here fit the device and ``transfer_protocol``. Engine start.

    Raises:
        ConfigError: They do not.
    """
    problems = (
        mooncake_problem(read_mooncake(device_type)),
        *(ascend_problems(read_ascend()) if protocol == TransferProtocol.ASCEND else ()),
    )
    if found := [problem for problem in problems if problem]:
        raise ConfigError("; ".join(found))


def read_mooncake(device_type: str) -> MooncakeFacts:
    """The facts about Mooncake here. Imports PyTorch if the device is CUDA's."""
    cuda = ""
    if device_type == "cuda":
        import torch

        cuda = torch.version.cuda or ""  # None: built for ROCm
    builds = mooncake_builds()
    return MooncakeFacts(builds, device_type, cuda, len(builds) == 1 and _is_from_a_file(builds[0][0]))


def mooncake_builds() -> tuple[tuple[str, str], ...]:
    """Distributions of Mooncake's Transfer Engine with their versions, by name."""
    # First by known names: to read the names of all installed packages takes half a second.
    return tuple(_known_builds()) or tuple(_other_builds())


def _known_builds() -> list[tuple[str, str]]:
    """The builds in the first folder of Python's path that has any: Python imports Mooncake from this folder."""
    found = [one for name in BUILDS for one in _distribution(name)]
    folders = {str(one.locate_file("")) for one in found}
    first = next((folder for folder in sys.path if folder in folders), None)
    return [(_normal(one.name), one.version) for one in found if first in (None, str(one.locate_file("")))]


def _distribution(name: str) -> Iterator[metadata.Distribution]:
    """The distribution ``name``, if it is installed. The remains of an interrupted uninstall are left out: they have
    no name."""
    with suppress(metadata.PackageNotFoundError):
        found = metadata.distribution(name)
        if found.metadata["Name"]:
            yield found


def _is_from_a_file(name: str) -> bool:
    """PEP 610: an installer writes ``direct_url.json`` for a package that came from a file or URL, and for no other."""
    return any(one.read_text("direct_url.json") is not None for one in _distribution(name))


def _other_builds() -> list[tuple[str, str]]:
    named = ((_normal(one.metadata["Name"] or ""), one.version) for one in metadata.distributions())
    return sorted((name, version) for name, version in named if name.startswith(WHEEL))


def read_ascend(hccn_conf: Path = HCCN_CONF, load: Callable[[str], object] = ctypes.CDLL) -> AscendFacts:
    """The facts about this NPU's machine. Loads CANN's libraries, as Mooncake and torch_npu do."""
    not_loaded = tuple(library for library in CANN_LIBRARIES if not _can_load(library, load))
    return AscendFacts(_why_unreadable(hccn_conf), not_loaded, os.getuid(), _user_name(os.getuid()))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _why_unreadable(path: Path) -> str:
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return os.strerror(error.errno or 0)
    return "" if text.strip() else "it is empty"


def _can_load(library: str, load: Callable[[str], object]) -> bool:
    try:
        load(library)
    except OSError:
        return False
    return True


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""
