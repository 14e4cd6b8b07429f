"""``python service_names.py FLAGS...`` is ``pdcluster operator FLAGS...`` where every Service's name is this machine.

There is no cluster DNS beside a bare API server, and the operator asks routers by their Services' names. Nothing else
of the operator's process differs.
"""

from __future__ import annotations

import socket
import sys
from typing import Any, Final

from pdcluster_operator.__main__ import main

SUFFIX: Final = ".svc"

_resolve: Final = socket.getaddrinfo


def resolve(host: Any, *rest: Any, **hints: Any) -> Any:
    """As ``socket.getaddrinfo``; names of Services are 127.0.0.1."""
    is_service = isinstance(host, str) and host.endswith(SUFFIX)
    return _resolve("127.0.0.1" if is_service else host, *rest, **hints)


if __name__ == "__main__":
    socket.getaddrinfo = resolve
    sys.exit(main(sys.argv[1:]))
