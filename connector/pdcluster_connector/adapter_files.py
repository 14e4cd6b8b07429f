"""Reads the files of a LoRA adapter: which there are, and what they hold.

The files are those that vLLM reads (0.32 ``lora/peft_helper.py``, ``lora/lora_model.py``): the configuration, and the
first of three files of weights that is there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Final

from pdcluster_connector.core.adapters import Files, FileStamp

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order in which vLLM looks for them."""
_READ_BYTES: Final = 1 << 20


class FilesChanged(Exception):
    """The files are not those of the stamp any more."""


def folder_of(path: str) -> str | None:
    """The folder that vLLM reads for ``path``; None: it is a name in a hub."""
    expanded = os.path.expanduser(path)  # noqa: PTH111  # raises nothing, as below
    is_folder = os.path.isabs(expanded) or os.path.exists(expanded)  # noqa: PTH110, PTH117
    return os.path.abspath(expanded) if is_folder else None  # noqa: PTH100


def files_of(folder: str) -> Files | None:
    """The adapter's files as they are now; None: one is missing, or cannot be looked at. A few system calls.

    Raises nothing: an error in the receiver's thread would cost other requests their news.
    """
    try:
        return Files(folder, tuple(_stamp(folder, name) for name in (CONFIG, _weights_in(folder))))
    except (OSError, ValueError):  # a path that no file can have
        return None


def _weights_in(folder: str) -> str:
    return next((name for name in WEIGHTS if (Path(folder) / name).is_file()), WEIGHTS[0])


class OpenFiles:
    """The adapter's files, open. Others may take their names: what these hold stays readable. Linux only."""

    def __init__(self, folder: str) -> None:
        """
        Raises:
            OSError, ValueError: A file is missing, or cannot be opened.
        """
        self._descriptors: dict[str, int] = {}
        for name in (CONFIG, _weights_in(folder)):
            self._descriptors[name] = os.open(Path(folder) / name, os.O_RDONLY | os.O_CLOEXEC)
        self.files = Files(folder, self._stamps())

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was written into them. Their names may be others' by now."""
        try:
            now = self._stamps()
        except OSError:  # as a network's file system may say
            return False
        return [stamp.content for stamp in now] == [stamp.content for stamp in self.files.stamps]

    @contextmanager
    def named(self) -> Iterator[str]:
        """A folder that has them by their names for this process, until the block ends.

        Raises:
            OSError: The folder cannot be made, or a file cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="pdcluster-adapter-", ignore_cleanup_errors=True) as folder:
            for name, descriptor in self._descriptors.items():
                path = Path(folder) / name
                path.symlink_to(f"/proc/self/fd/{descriptor}")
                with path.open("rb") as file:
                    file.read(1)  # here an error ends nothing; vLLM's reading would end the engine
            yield folder

    def _stamps(self) -> tuple[FileStamp, ...]:
        return tuple(_stamped(name, os.fstat(one)) for name, one in self._descriptors.items())


def opened(files: Files) -> OpenFiles | None:
    """The files as ``files`` says, open; None: they are others by now, or cannot be opened. A few system calls."""
    try:
        found = OpenFiles(files.folder)
    except (OSError, ValueError):
        return None
    return found if found.files == files else None


def digest_of(files: Files) -> str:
    """A digest of names and content, equal on all machines. Reads all of the files: a second for each GB.

    Raises:
        FilesChanged: They are not as ``files`` says.
        OSError: A file cannot be read.
    """
    digest = blake2b(digest_size=16)
    for stamp in files.stamps:
        digest.update(f"{stamp.name}\0{stamp.num_bytes}\0".encode())
        for part in _parts(Path(files.folder) / stamp.name):
            digest.update(part)
    if files_of(files.folder) != files:
        raise FilesChanged(f"its files in {files.folder} have changed since vLLM read them: load it again")
    return digest.hexdigest()


def _stamp(folder: str, name: str) -> FileStamp:
    return _stamped(name, os.stat(Path(folder) / name))  # noqa: PTH116  # follows links, as a hub's cache has them


def _stamped(name: str, found: os.stat_result) -> FileStamp:
    return FileStamp(name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            yield part
