"""A Secret as a kubelet mounts it: files are links to a folder that is replaced at once."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Final

from fakes.certificates import Authority, Issued

NAMES: Final = ("tls.crt", "tls.key", "ca.crt")


class MountedSecret:
    """A certificate, its key, and its authority, in ``folder``."""

    def __init__(self, folder: Path, authority: Authority, issued: Issued) -> None:
        self.folder, self._authority, self._numbers = folder, authority, count()
        folder.mkdir()
        self.publish(issued)
        for name in NAMES:
            (folder / name).symlink_to(f"..data/{name}")

    def publish(self, issued: Issued, key: Issued | None = None) -> None:
        """``key``: of another certificate."""
        now, published = self.folder / f"..{next(self._numbers)}", self.folder / "..data"
        before = self.folder / published.readlink() if published.is_symlink() else None
        issued.write(now)
        (now / "tls.key").write_bytes((key or issued).key_pem())
        (now / "ca.crt").write_bytes(self._authority.ca.read_bytes())
        (self.folder / "..new").symlink_to(now.name)
        (self.folder / "..new").rename(published)
        if before:
            shutil.rmtree(before)

    def content(self) -> dict[str, bytes]:
        return {name: (self.folder / name).read_bytes() for name in NAMES}
