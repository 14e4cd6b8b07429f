"""The parallel sizes of one engine, and the words of vLLM's command line for them. Pure.

Source of truth: vLLM 0.32 ``engine/arg_utils.py`` (names) and ``config/parallel.py``: if no executor is asked for, vLLM
takes ``uni`` for one rank and ``mp`` for more. Our words name no executor, so the user's choice stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pdcluster_cli.numbers import is_whole
from pdcluster_protocol.errors import ConfigError

MAX_SIZE: Final = 64
_FLAGS: Final = {
    "tensor": ("--tensor-parallel-size", "-tp"),
    "pipeline": ("--pipeline-parallel-size", "-pp"),
    "data": ("--data-parallel-size", "-dp"),
}
_FIELD_OF: Final = {flag: field for field, flags in _FLAGS.items() for flag in flags}
_EXECUTOR_FLAG: Final = "--distributed-executor-backend"
EXECUTORS: Final = ("mp", "ray", "uni", "external_launcher")
"""Values of vLLM 0.32's ``DistributedExecutorBackend``. A name with a dot is a user's own class."""


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Tensor, pipeline and data parallel size of one engine, each at least 1."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def num_ranks(self) -> int:
        """Worker processes of the engine. Example: TP 2, PP 2, DP 1 → 4."""
        return self.tensor * self.pipeline * self.data

    def argv(self) -> tuple[str, ...]:
        """The options of vLLM's command line that set the sizes above 1."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        return tuple(word for name, size in sizes.items() if size > 1 for word in (_FLAGS[name][0], str(size)))


ONE_RANK: Final = ParallelSizes()


def take_parallelism(words: Sequence[str]) -> tuple[ParallelSizes, tuple[str, ...]]:
    """The sizes that words of vLLM's command line give, and the other words.

    Raises:
        ConfigError: A size is no number in 1..64, or is missing, or its option is shortened.
    """
    found, rest, left = ONE_RANK, [], iter(words)
    for word in left:
        name, has_value, value = word.partition("=")
        name = name.replace("_", "-")
        field = _FIELD_OF.get(name)
        if field is None:
            _require_whole(name)
            rest.append(word)
        else:
            found = replace(found, **{field: checked_size(value if has_value else next(left, ""), name)})
    return found, tuple(rest)


def _require_whole(name: str) -> None:
    """Refuse a shortened option: vLLM would take it, but we would not count it."""
    for field, (flag, _) in _FLAGS.items():
        if flag.startswith(name) and name.startswith(f"--{field}"):
            raise ConfigError(f"{name}: write {flag}")


def checked_size(text: str, name: str) -> int:
    """The size in ``text``.

    Raises:
        ConfigError: It is no number in 1..64.
    """
    if not (is_whole(text) and 1 <= int(text) <= MAX_SIZE):
        raise ConfigError(f"{name} {text or 'without a number'}: use 1 to {MAX_SIZE}")
    return int(text)


def merge(options: ParallelSizes, words: ParallelSizes) -> ParallelSizes:
    """The sizes of our own options together with those in vLLM's words.

    Raises:
        ConfigError: Both give one size, with different values.
    """
    merged = {}
    for field, (flag, _) in _FLAGS.items():
        ours, theirs = getattr(options, field), getattr(words, field)
        if 1 not in (ours, theirs) and ours != theirs:
            raise ConfigError(f"{field} parallel size is both {ours} and {theirs} ({flag}): give it once")
        merged[field] = max(ours, theirs)
    return ParallelSizes(**merged)


def executor_problem(parallelism: ParallelSizes, words: Sequence[str]) -> str | None:
    """Why the executor in ``words`` cannot run so many ranks, or is unknown; None: it can, or ``words`` name none."""
    asked = executor_of(words)
    if asked is not None and asked not in EXECUTORS and "." not in asked:
        return (
            f"{_EXECUTOR_FLAG} {asked or 'without a value'}: vLLM has {', '.join(EXECUTORS[:-1])} and {EXECUTORS[-1]}, "
            "or takes a class by its whole name (module.Class)"
        )
    num_ranks = parallelism.tensor * parallelism.pipeline
    if asked != "uni" or num_ranks == 1:
        return None
    return (
        f"{_EXECUTOR_FLAG} uni runs one rank, and TP {parallelism.tensor} x PP {parallelism.pipeline} are {num_ranks}: "
        "leave it out, or use mp"
    )


def executor_of(words: Sequence[str]) -> str | None:
    """The last executor that ``words`` name; None: they name none."""
    asked = None
    for word, following in zip(words, (*words, "")[1:], strict=True):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") == _EXECUTOR_FLAG:
            asked = value if has_value else following
    return asked
