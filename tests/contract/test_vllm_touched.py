"""The attributes and functions of vLLM that the connector touches: all are declared, and there in every version.

``versions/stubs`` declare them, mypy holds the connector to the stubs, and ``surface.json`` says what each version has.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from pdcluster_connector.vllm.versions import release_of
from versions.guards import ASKED, GUARDED, Asked
from versions.sources import MISSING, VALUE, parsed
from versions.surface import recorded
from versions.touched import ROOM, ROOT, STUBS, asked, bases, mypy_arguments, named_in, touched, words

RECORDED: Final = recorded()
UNDECLARED: Final = """
from vllm.config import SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.engine.core import EngineCore

def touches(config: VllmConfig) -> object:
    KVConnectorFactory.register_connector("name", "module", another="X")
    return config.model_config.undeclared
"""


def test_the_connector_touches_what_the_stubs_declare_and_mypy_sees_what_they_do_not(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(UNDECLARED)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), *mypy_arguments(ROOM, planted)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    errors = [line for line in said.splitlines() if ": error: " in line]
    in_connector = [line for line in errors if "planted.py" not in line]
    assert not in_connector, f"declare it in {STUBS}, then python -m tests.versions --read:\n" + "\n".join(in_connector)
    assert [line.rpartition("[")[2] for line in errors] == [
        "attr-defined]",  # SchedulerConfig
        "import-not-found]",  # EngineCore's module
        "call-arg]",
        "attr-defined]",
    ], said


def test_no_stub_hides_what_is_behind_it() -> None:
    """What is read from vLLM has a type: ``Any`` may be given only."""
    shown = [
        node.annotation if isinstance(node, ast.AnnAssign) else node.returns
        for path in STUBS.rglob("*.pyi")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.AnnAssign | ast.FunctionDef)
    ]
    assert shown
    assert not [one for one in shown if one is None or "Any" in ast.unparse(one)]


def test_no_stub_declares_what_is_not_touched() -> None:
    declared = {name for path in touched() for name in path.rpartition(":")[2].split(".")}
    # Classes of objects that are only handed around, and what builds a declared class.
    unnamed = {"CachedRequestData", "CompilationConfig", "DeviceConfig", "GroupCoordinator"}
    unnamed |= {"KVConnectorBlockState", "KVTransferConfig", "MultiModalConfig", "MultiModalFeatureSpec"}
    unnamed |= {"NewRequestData", "PlaceholderRange"}
    assert declared - words() == unnamed


@pytest.mark.parametrize("version", RECORDED)
def test_every_name_was_looked_up(version: str) -> None:
    assert RECORDED[version]["touched"].keys() == touched().keys(), "python -m tests.versions --read"


@pytest.mark.parametrize("version", RECORDED)
def test_what_is_touched_without_a_guard_is_there(version: str) -> None:
    found, allowed = RECORDED[version]["touched"], {*GUARDED, *(name for one in ASKED.values() for name in one.names)}
    missing = {name for name, is_what in found.items() if is_what == MISSING}
    assert not {name for name in missing if not allowed & {name, _class_of(name)}}


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize("name", GUARDED)
def test_where_a_guard_opens_the_name_is_there(name: str, version: str) -> None:
    assert not _opens(GUARDED[name].opens, version) or RECORDED[version]["touched"][name] != MISSING


@pytest.mark.parametrize("name", GUARDED)
def test_a_guarded_name_is_named_behind_its_guard_alone(name: str) -> None:
    assert any(found["touched"][name] == MISSING for found in RECORDED.values()), "it needs no guard"
    assert named_in(name.rpartition(":")[2].rpartition(".")[2]) == GUARDED[name].where


def test_every_attribute_that_is_asked_for_by_name_has_a_reason() -> None:
    assert asked() == ASKED.keys()


@pytest.mark.parametrize(("one", "name"), [(one, name) for one in ASKED.values() for name in one.names])
def test_an_attribute_that_is_asked_for_has_not_been_renamed(one: Asked, name: str) -> None:
    there = {version for version, found in RECORDED.items() if found["touched"][name] != MISSING}
    assert there == {found for found in RECORDED if one.since <= tuple(map(int, found.split(".")[:2])) <= one.until}


@pytest.mark.parametrize("version", RECORDED)
def test_functions_take_what_they_are_given(version: str) -> None:
    found, overridden = RECORDED[version]["touched"], bases()
    wrong = {
        name: (ours, found[name])
        for name, ours in touched().items()
        if found[name] not in (MISSING, ours)
        and (_class_of(name).rpartition(":")[2] in overridden or not _takes(found[name], ours))
    }
    assert not wrong


def test_parameters_that_may_be_left_out_are_no_difference_and_all_others_are() -> None:
    assert _takes("self, a, b=", "self, a")
    assert _takes("self, *, c=, **kwargs", "self")
    assert not _takes("self, a, b", "self, a")
    assert not _takes("self, *, c", "self")
    assert not _takes("self, b", "self, a")
    assert not _takes("self", "self, a")
    assert not _takes(VALUE, "self")
    assert not _takes("self", VALUE)


def _takes(theirs: str, ours: str) -> bool:
    """Whether a function of parameters ``theirs`` can be called as ``ours``, by position or by name."""
    given, rest = ours.split(", "), theirs.split(", ")
    shared, more = rest[: len(given)], rest[len(given) :]
    if VALUE in (ours, theirs):
        return ours == theirs
    return [name.rstrip("=") for name in shared] == given and all(name.startswith("*") or "=" in name for name in more)


def _class_of(name: str) -> str:
    return name.rpartition(".")[0] if "." in name.rpartition(":")[2] else ""


def _opens(guard: str, version: str) -> bool:
    release, is_not = release_of(version), guard.startswith("not ")
    flag = guard.removeprefix("not ")
    return flag in RECORDED[version]["hooks"] if not hasattr(release, flag) else getattr(release, flag) is not is_not
