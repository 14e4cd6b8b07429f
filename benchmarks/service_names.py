"""``python service_names.py [--router-port=N] FLAGS...`` is ``pdcluster operator FLAGS...`` without cluster DNS.

The operator calls routers by their Services' names, and a bare API server has no DNS. So here every Service's name
leads to this machine, and the routers' internal port to port N. Nothing else of the operator's process differs.
"""

from __future__ import annotations

import socket
import sys
from typing import Any, Final

from pdcluster_operator.__main__ import main
from pdcluster_operator.core.manifests.pool import INTERNAL_PORT

SUFFIX: Final = ".svc"
FLAG: Final = "--router-port="

_resolve: Final = socket.getaddrinfo


def resolver(router_port: int) -> Any:
    """A function like ``socket.getaddrinfo`` that resolves names of Services to 127.0.0.1."""

    def resolve(host: Any, port: Any, *rest: Any, **hints: Any) -> Any:
        if not (isinstance(host, str) and host.endswith(SUFFIX)):
            return _resolve(host, port, *rest, **hints)
        return _resolve("127.0.0.1", router_port if port == INTERNAL_PORT else port, *rest, **hints)

    return resolve


if __name__ == "__main__":
    ports = [int(word.removeprefix(FLAG)) for word in sys.argv if word.startswith(FLAG)]
    socket.getaddrinfo = resolver(*ports or [INTERNAL_PORT])
    sys.exit(main([word for word in sys.argv[1:] if not word.startswith(FLAG)]))
