"""A parent with a zygote and one stubborn engine, to be killed: ``zygote_parent.py FOLDER PORT``. Not a test."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from pdcluster_cli.processes.zygote import EngineSpec, Zygote


def main(folder: Path, port: int) -> None:
    zygote = Zygote(["json"], env={}, log_path=folder / "zygote.log")
    argv = (str(port), str(folder / "pids"))
    zygote.start_engine(EngineSpec("stubborn", "integration.stubborn_engine", argv, {}, folder / "stubborn.log"))
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
