"""Reads the files of a LoRA adapter: which there are, and what they hold.

The files are those that vLLM reads (0.32 ``lora/peft_helper.py``, ``lora/lora_model.py``): the configuration, and the
first of three files of weights that is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
        weights = next((name for name in WEIGHTS if (Path(folder) / name).is_file()), WEIGHTS[0])
        return Files(folder, tuple(_stamp(folder, name) for name in (CONFIG, weights)))
    except (OSError, ValueError):  # a path that no file can have
        return None


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
    found = os.stat(Path(folder) / name)  # noqa: PTH116  # follows links, as a hub's cache has them
    return FileStamp(name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            yield part
