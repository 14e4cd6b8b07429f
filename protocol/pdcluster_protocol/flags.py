"""A command line made from a settings model: each field is a flag, its docstring is the help. Pure.

Some fields have an environment variable of their own beside their flag or in place of a flag. Help and page name it.
With a ``prefix`` each flag has a variable, and a name in a file.

Router and operator both use this module, and may not import each other. It reads attributes of pydantic's
``FieldInfo`` without importing pydantic. A model with ``use_attribute_docstrings`` has docstrings as descriptions.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Final, Protocol, get_args

from pdcluster_protocol.errors import ConfigError

_BOUNDS: Final = {"gt": "above {}", "ge": "at least {}", "lt": "below {}", "le": "at most {}"}

_SUBJECT: Final = re.compile(r"^[A-Z]\w* should")
"""How pydantic's messages begin."""


class Described(Protocol):
    """A field, as pydantic's ``FieldInfo`` has it."""

    annotation: Any
    default: Any
    description: str | None
    metadata: list[Any]

    def is_required(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of one settings model."""

    fields: Mapping[str, Described]
    named: Mapping[str, str] = field(default_factory=dict)
    """Field to flag, where the rule of ``of`` does not give it."""
    hidden: frozenset[str] = frozenset()
    """Fields without a flag."""
    shown: Mapping[str, str] = field(default_factory=dict)
    """Field to the form of its value in the help, where that is not the last word of its name."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Field to environment variable. The variable counts where the flag is not given."""
    prefix: str = ""
    """The beginning of each flag's variable, and of no other; empty: only ``variables`` count."""

    def of(self, name: str) -> str:
        """The field's flag, or its variable if it has no flag. ``idle_timeout_s`` -> ``--idle-timeout``: the help names
        the unit."""
        if name in self.hidden and name in self.variables:
            return self.variables[name]
        return self.named.get(name) or _flag_of(name)

    def told_by(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Field to the value of the variable of its own, without variables that are missing or empty."""
        return {name: value for name, variable in self.variables.items() if (value := environ.get(variable))}

    def told_by_prefix(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """Field to the value of its variable with the prefix, without empty ones.

        Raises:
            ConfigError: A variable with the prefix is no setting's.
        """
        told = {
            variable: value for variable, value in environ.items() if self.prefix and variable.startswith(self.prefix)
        }
        named = {self._named(variable, self.variable_of): value for variable, value in told.items()}
        return {name: self._split(name, value) for name, value in named.items() if value}

    def told_in(self, text: str) -> dict[str, Any]:
        """Field to its value in a file in TOML: the flags' names without dashes before them, and their values. An empty
        text counts as none.

        Raises:
            ConfigError: It is no TOML, a name is no setting's, or a value is none that a flag could have.
        """
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            said = error if isinstance(error, tomllib.TOMLDecodeError) else "a number or a list has no end"
            raise ConfigError(
                f"it is no TOML: {said}: write a line NAME = VALUE for each, with a flag's name"
            ) from error
        for key, value in table.items():
            if not _is_plain(value):
                raise ConfigError(f"{key} is no text, number or list of texts: write NAME = VALUE as for a flag")
        named = {self._named(key, self.key_of): value for key, value in table.items()}
        return {name: self._split(name, value) for name, value in named.items() if value != ""}

    def variable_of(self, name: str) -> str:
        """``idle_timeout_s`` -> ``PREFIX`` + ``IDLE_TIMEOUT``."""
        return self.prefix + self.key_of(name).replace("-", "_").upper()

    def key_of(self, name: str) -> str:
        """The field's name in a file: ``idle_timeout_s`` -> ``idle-timeout``."""
        return (self.named.get(name) or _flag_of(name)).removeprefix("--")

    def _split(self, name: str, value: Any) -> Any:
        """The parts of a text for a field that has several."""
        is_many = _kind_of(self.fields[name].annotation)[1]
        if not is_many or not isinstance(value, str):
            return value
        return [part for word in value.split(",") if (part := word.strip())]

    def _named(self, given: str, form: Callable[[str], str]) -> str:
        """The field whose name has this ``form``. Raises: ConfigError: None has."""
        names = {form(name): name for name in self.fields}
        name = names.get(given)
        if name is None:
            rests = {one.removeprefix(self.prefix): one for one in names}  # else all variables were alike
            near = get_close_matches(given.removeprefix(self.prefix), rests, n=1)
            cure = f"did you mean {rests[near[0]]}?" if near else "the flags are in --help"
            raise ConfigError(f"{given} is no setting: {cure}")
        if name in self.hidden:
            raise ConfigError(f"{given} is no setting here: {self.variables.get(name, 'nothing')} alone gives it")
        return name

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """``parser`` has a flag for each field that is not hidden, in order. A flag that is not given is None."""
        for name, described in self.fields.items():
            if name not in self.hidden:
                how = _reading(name, described)
                if name in self.shown:
                    how["metavar"] = self.shown[name]
                parser.add_argument(self.of(name), dest=name, help=self._help(name, described), **how)

    def reason(self, described: Described) -> str:
        """The field's docstring in a user's words: with flags in place of the names of fields."""
        text = " ".join((described.description or "").split()).replace("None: ", "Without it: ")
        return re.sub(r"``(\w+)``", lambda word: self.of(word[1]) if word[1] in self.fields else word[0], text)

    def problem(self, error: Mapping[str, Any], sources: Mapping[str, str] = MappingProxyType({})) -> str:
        """One of pydantic's ``ErrorDetails`` in a user's words: the flag, the value that was given, the right one.

        ``sources``: by field, what gave it in place of its flag.
        """
        location, kind = error["loc"], error["type"]
        message = str(error["msg"]).removeprefix("Value error, ")
        if not location:  # Several settings together; the message names them.
            return f"these settings do not fit: {message}"
        flag = sources.get(str(location[0])) or self.of(str(location[0]))
        if kind == "missing":
            return f"{flag} is needed"
        if kind == "value_error" or location[0] in self.hidden:
            return f"{flag}: {message}"
        return f"{flag} is {error['input']!r}: {_SUBJECT.sub('it should', message)}"

    def default_of(self, name: str, described: Described) -> str:
        """The default in a user's words; empty: there is none, or the docstring says what holds without a value."""
        default, variable = default_text(described), self.variables.get(name)
        return f"${variable}, else {default or 'none'}" if variable else default

    def _help(self, name: str, described: Described) -> str:
        default = self.default_of(name, described)
        text = self._told(described).replace("``", "") + (f" (default: {default})" if default else "")
        return text.replace("%", "%%")

    def _told(self, described: Described) -> str:
        return self.reason(described) + (" Repeat it for more." if _kind_of(described.annotation)[1] else "")

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Flag, default, bounds and reason of each field that is not hidden, for a page."""
        return [
            (self.of(name), self.default_of(name, described), bounds_text(described), self._told(described))
            for name, described in self.fields.items()
            if name not in self.hidden
        ]


def _flag_of(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def _is_plain(value: object) -> bool:
    """Whether TOML's value is one that a flag could have."""
    if isinstance(value, list):
        return all(isinstance(part, str) for part in value)
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def default_text(described: Described) -> str:
    """The default as text; empty: there is none, or the docstring says what holds without a value."""
    value = described.default
    if described.is_required() or value is None or value == ():
        return ""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value.value) if isinstance(value, Enum) else f"{value:g}" if isinstance(value, float) else str(value)


def bounds_text(described: Described) -> str:
    """``above 0, at most 60``; empty: none."""
    told = [
        form.format(f"{bound:,}" if isinstance(bound, int) else f"{bound:g}")
        for name, form in _BOUNDS.items()
        for part in described.metadata
        if (bound := getattr(part, name, None)) is not None
    ]
    return ", ".join(told)


def _reading(name: str, described: Described) -> dict[str, Any]:
    """The arguments of ``add_argument`` for this field. The model itself checks paths and URLs."""
    kind, is_many = _kind_of(described.annotation)
    if issubclass(kind, Enum):
        return {"choices": [one.value for one in kind]}
    words = name.removesuffix("_s").split("_")
    how: dict[str, Any] = {"metavar": _one_of(words[-1].upper()) if is_many else words[-1].upper()}
    if issubclass(kind, int | float):
        how = {"type": kind, "metavar": "SECONDS" if name.endswith("_s") else "N"}
    elif issubclass(kind, Path):
        how["metavar"] = "PATH"
    return {**how, "action": "append"} if is_many else how


def _one_of(words: str) -> str:
    """PROXIES -> PROXY."""
    return words.removesuffix("IES") + "Y" if words.endswith("IES") else words.removesuffix("S")


def _kind_of(annotation: Any) -> tuple[type, bool]:
    """``int | None`` -> int, False. ``tuple[Annotated[str, ...], ...]`` -> str, True."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation, False
    inner = [one for one in get_args(annotation) if one not in (NoneType, Ellipsis)]
    return _kind_of(inner[0])[0], getattr(annotation, "__origin__", None) is tuple
