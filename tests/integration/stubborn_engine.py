"""A process as awkward as an engine can be: ``python -m integration.stubborn_engine PORT PID_FILE``.

Listens on PORT, ignores SIGTERM, forks a child that does so too, and writes both process ids. Not a test.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path


def main(port: int, pid_file: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listening = socket.create_server(("127.0.0.1", port))
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    print("listening\nand waiting", flush=True)
    waiting = pid_file.with_suffix(".tmp")
    waiting.write_text(f"{os.getpid()} {child.pid}")
    waiting.rename(pid_file)
    signal.pause()
    listening.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
