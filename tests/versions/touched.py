"""What the connector's room for vLLM touches of vLLM's objects: ``stubs/``, to which mypy holds it.

The stubs are written by hand, and hold nothing that is not touched. With them mypy sees types where the project's own
run sees ``Any``: an attribute, a parameter or an import that they do not declare is an error. mypy follows an object
through assignments, loops and calls, which a reader of our own would not, and a list without mypy would be as complete
as its writer's patience.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from versions.sources import VALUE, look_up, own_members, parameters, parsed

ROOT: Final = Path(__file__).resolve().parents[2]
ROOM: Final = ROOT / "connector" / "pdcluster_connector" / "vllm"
STUBS: Final = Path(__file__).with_name("stubs")
_ASKING: Final = ("getattr", "hasattr", "vars", "attrgetter")
"""What touches attributes that mypy does not see."""


@cache
def touched() -> dict[str, str]:
    """Each name that the stubs declare, as ``module:Class.member`` or ``module:function``, and what it is."""
    return dict(item for path in sorted(STUBS.rglob("*.pyi")) for item in _declared(path))


def touched_of(site: Path) -> dict[str, str]:
    """The same names as the vLLM in the folder ``site`` has them."""
    found = {}
    for name in touched():
        module, _, path = name.partition(":")
        owner, _, member = path.partition(".")
        found[name] = look_up(site, module, owner, member or None)
    return found


def mypy_arguments(*paths: Path) -> Sequence[str]:
    """Of the run in which vLLM is what the stubs say; in the repository's root."""
    return ("--config-file", str(STUBS / "mypy.ini"), *map(str, paths))


def asked() -> set[str]:
    """The room's calls that touch an attribute by its name as text."""
    calls = (node for path in _room() for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))
    return {ast.unparse(call) for call in calls if ast.unparse(call.func).rpartition(".")[2] in _ASKING}


def named_in(attribute: str) -> set[str]:
    """The functions of the room that name ``attribute``, on whatever object."""
    return {
        f"{path.stem}.{function.name}"
        for path in _room()
        for function in ast.walk(parsed(path))
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(node, ast.Attribute) and node.attr == attribute for node in ast.walk(function))
    }


def bases() -> set[str]:
    """The classes from which the room derives its own."""
    classes = (node for path in _room() for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef))
    return {ast.unparse(base) for node in classes for base in node.bases}


def words() -> set[str]:
    """Every name in the room: of variables, attributes, parameters given by name, methods, imports, and as text."""
    return {word for path in _room() for node in ast.walk(parsed(path)) for word in _words(node)}


def _room() -> list[Path]:
    return sorted(ROOM.glob("*.py"))


def _words(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute(attr=word) | ast.Name(id=word) | ast.alias(name=word) | ast.FunctionDef(name=word):
            yield word
        case ast.keyword(arg=str(word)) | ast.Constant(value=str(word)):
            yield word


def _declared(path: Path) -> Iterator[tuple[str, str]]:
    parts = path.relative_to(STUBS).with_suffix("").parts
    module = ".".join(part for part in parts if part != "__init__")
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef):
            yield f"{module}:{node.name}", parameters(node.args)
        elif isinstance(node, ast.AnnAssign):
            yield f"{module}:{ast.unparse(node.target)}", VALUE
        elif isinstance(node, ast.ClassDef):
            yield f"{module}:{node.name}", VALUE
            yield from ((f"{module}:{node.name}.{member}", what) for member, what in own_members(node).items())
