"""The content of LoRA adapters, as far as it is known: of each load of an adapter, by a digest of its files.

An adapter is a folder of files, which may change while an engine runs. vLLM's workers read them when an API call loads
the adapter, when a request wants one that was evicted, and, after ``load_inplace``, at every step. So content belongs
to a *load*, not to a name. A load is known by the *stamp* of its files: equal stamps on one machine mean equal content.
Digests of the content are equal on all machines. A thread finds them, once for each stamp: ``adapter_loads.py``.

    load --stamp--> known: compared at once
               \\--> unknown --its files are read--> digest, or the reason why there is none
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from pdcluster_protocol.adapters import AdapterContent

_Value = TypeVar("_Value")

MAX_DIGESTS: Final = 4096
"""The most stamps whose digest is kept. A digest that was dropped is found again when it is needed."""


class FileStamp(NamedTuple):
    """One file at one time. A file that is written or replaced gets another stamp."""

    name: str
    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int


class Files(NamedTuple):
    """The files of an adapter that vLLM reads, at one time."""

    folder: str
    stamps: tuple[FileStamp, ...]


class AdapterRequest(msgspec.Struct, frozen=True):
    """The adapter that a request asks for, as vLLM's scheduler hands it to the workers."""

    number: int
    """vLLM's ``lora_int_id``."""
    name: str
    path: str
    use: str
    """The options that decide what the files mean: ``AdapterContent.use``."""
    is_read_each_step: bool = False
    """Whether vLLM reads the files again at each step: it does once an API call has said ``load_inplace``."""
    problem: str = ""
    """Why the content cannot be known; empty: it can."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter as a worker has read it, or would read it now. ``problem``: why its content cannot be known."""

    name: str
    use: str
    files: Files | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class UnknownContent:
    """The content is not known. ``is_final``: waiting does not help."""

    reason: str
    is_final: bool = False


ContentAnswer: TypeAlias = AdapterContent | UnknownContent


def load_of(asked: AdapterRequest, before: Files | None, after: Files | None) -> AdapterLoad:
    """The load that a worker has read for ``asked``. ``before``, ``after``: its files around the reading.

    ``before`` is None for a name in a hub, whose snapshots do not change; ``after`` where no files are found.
    """
    problem = asked.problem
    if not problem and after is None:
        problem = "it is no folder with adapter_config.json and adapter_model.safetensors, .bin or .pt"
    if not problem and before is not None and before != after:
        problem = "its files changed while vLLM read them: load it again"
    return AdapterLoad(asked.name, asked.use, after, problem)


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """Files could not be read. ``may_pass``: another try may go well, as after an error of a network's file system."""

    reason: str
    may_pass: bool = False


@dataclass(slots=True)
class Digests:
    """The digests by stamp. Not thread-safe: ``AdapterLoads`` guards it."""

    _known: dict[Files, str] = field(default_factory=dict)
    _failed: dict[Files, ReadFailure] = field(default_factory=dict)

    def content(self, load: AdapterLoad) -> ContentAnswer:
        """The content of ``load``, or why it is not known."""
        if load.problem or load.files is None:
            return UnknownContent(_said(load, load.problem), is_final=True)
        if digest := self._known.get(load.files):
            return AdapterContent(load.name, digest, load.use)
        if failure := self._failed.get(load.files):
            return UnknownContent(_said(load, failure.reason), is_final=True)
        return UnknownContent(_said(load, "its files are still being read"))

    def is_wanted(self, files: Files) -> bool:
        """Whether the files are still to be read, or once more: this request fails, and the next one may not."""
        failure = self._failed.get(files)
        return files not in self._known and (failure is None or failure.may_pass)

    def found(self, files: Files, digest: str) -> None:
        """The files have this content."""
        self._failed.pop(files, None)
        _keep(self._known, files, digest)

    def failed(self, files: Files, failure: ReadFailure) -> None:
        """The files could not be read as they were."""
        _keep(self._failed, files, failure)

    def loaded_again(self, files: Files) -> None:
        """A worker has read these files just now: if they could not be read before, they are tried again."""
        self._failed.pop(files, None)


def _keep(values: dict[Files, _Value], files: Files, value: _Value) -> None:
    values[files] = value
    if len(values) > MAX_DIGESTS:
        del values[next(iter(values))]


def _said(load: AdapterLoad, reason: str) -> str:
    return f"the content of LoRA adapter {load.name!r} is not known: {reason}"
