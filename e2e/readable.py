"""What pods read of this machine. They run as another user, and the umask of whoever runs this may leave them nothing.

Modes are set in folders that were made for this alone, and never through a link: it may lead to a program of this
machine, which would then be everybody's or nobody's.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from pdcluster_cli.models.tiny_model import ensure_folder, ensure_tiny_model

UMASK: Final = 0o022
"""Of the whole run: root folders of images, bytecode and caches are read by pods too."""


def ensure_readable_model(cache: Path) -> Path:
    """A copy of the tiny model that everybody may read; the model itself is its owner's, as his umask says."""
    model = ensure_tiny_model()
    return ensure_folder(cache / model.name, lambda folder: copy_readable(model, folder))


def copy_readable(source: Path, folder: Path) -> None:
    """The files of ``source`` are in ``folder``, which is new and ours, and everybody may read them."""
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    let_others_read(folder)


def let_others_read(folder: Path) -> None:
    """All that lies in ``folder``, which we made. A link is passed by, and so is what it leads to."""
    for place, folders, files in os.walk(folder, followlinks=False):
        for name in (*folders, *files):
            path = Path(place, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
