"""Names, classes and parameters in Python source, by reading it: nothing is imported.

A class is found through the modules that hand it on (``vllm.config`` has that of ``vllm.config.parallel``),
and has what its bases in the same tree have. What a class gets from outside of it, or by ``setattr``, is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

VALUE: Final = "value"
"""What is no method: a field, a property, an attribute that a method sets."""
MISSING: Final = "missing"

Members: TypeAlias = Mapping[str, str]
"""By name: the parameters of a method, or ``VALUE``."""


def look_up(site: Path, module: str, name: str, member: str | None = None) -> str:
    """What ``name`` of ``module`` is, or ``member`` of the class ``name``; ``site``: the folder in which vLLM lies."""
    if (found := _definition(site, module, name)) is None:
        return VALUE if member is None and has_name(site, module, name) else MISSING
    where, node = found
    if member is None:
        return parameters(node.args) if isinstance(node, ast.FunctionDef) else VALUE
    return _members(site, where, node).get(member, MISSING) if isinstance(node, ast.ClassDef) else MISSING


def has_name(site: Path, module: str, name: str) -> bool:
    """Whether ``from module import name`` finds something."""
    if file_of(site, f"{module}.{name}"):
        return True
    path = file_of(site, module)
    return path is not None and name in set(_names(parsed(path)))


def file_of(site: Path, module: str) -> Path | None:
    path = site / module.replace(".", "/")
    files = (path.with_suffix(suffix) for suffix in (".py", ".pyi"))
    folders = (path / f"__init__{suffix}" for suffix in (".py", ".pyi"))
    return next((file for file in (*files, *folders) if file.is_file()), None)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def own_members(node: ast.ClassDef) -> dict[str, str]:
    """What the class itself defines."""
    found = {name: VALUE for method in _methods(node.body) for name in _set_on(method)}
    for statement in _flat(node.body):
        if isinstance(statement, ast.FunctionDef):
            found[statement.name] = VALUE if _is_property(statement) else parameters(statement.args)
        else:
            found |= dict.fromkeys(_assigned(statement), VALUE)
    return found


def parameters(arguments: ast.arguments) -> str:
    """Names as callers see them; ``=`` where there is a default."""
    return ", ".join(_parameters(arguments))


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    first_default = len(names) - len(arguments.defaults)
    yield from (name + "=" * (index >= first_default) for index, name in enumerate(names))
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg + "=" * (default is not None)
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"


def _definition(site: Path, module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef] | None:
    """The module that defines it, and where it does so there."""
    if (path := file_of(site, module)) is None:
        return None
    found = None
    for statement in _flat(parsed(path).body):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == name:
            found = (module, statement)
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    found = _definition(site, _absolute(statement, module, path), alias.name) or found
    return found


def _absolute(statement: ast.ImportFrom, module: str, path: Path) -> str:
    if not statement.level:
        return statement.module or ""
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    kept = package[: len(package) - statement.level + 1]
    return ".".join([*kept, *([statement.module] if statement.module else [])])


def _members(site: Path, module: str, node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(node.bases):
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name) and (known := _definition(site, module, name.id)):
            where, definition = known
            found |= _members(site, where, definition) if isinstance(definition, ast.ClassDef) else {}
    return found | own_members(node)


def _flat(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """With those under ``if`` and ``try``: version files define names so."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _flat(statement.body)
            yield from _flat(statement.orelse)
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _flat(handler.body)


def _methods(body: Iterable[ast.stmt]) -> Iterator[ast.FunctionDef]:
    return (one for one in _flat(body) if isinstance(one, ast.FunctionDef))


def _is_property(method: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in method.decorator_list)


def _set_on(method: ast.FunctionDef) -> Iterator[str]:
    """The attributes that a method sets on ``self``."""
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def _assigned(statement: ast.stmt) -> Iterator[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def _names(tree: ast.Module) -> Iterator[str]:
    """What a module defines or imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
