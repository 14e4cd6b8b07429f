"""Plays the routers of all pools: an order to verify is read and judged as a router does, and then it is answered.

The body is parsed as the router parses it and the pass checked with the pool's own secret. The engines that an order
names have to be there and ready, of that revision: else 503, as from a router that does not know them.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from base64 import b64decode
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from control_plane.kube_http import KubeHttp, Object
from operator_on_server.node import is_ready
from patience import PATIENCE_S
from pdcluster_protocol import labels
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.secret import make_secret
from pdcluster_protocol.verify import VERIFY_PATH, VerifyOrder, parse_order

_SECRET_KEY: Final = "secret"
_HANDSHAKE: Final = b"\x16"
"""First byte of a client that speaks TLS."""


class PlayedRouters:
    """One server for every pool's Service. Any thread may read ``orders``; ``close`` joins its own."""

    def __init__(self, admin: KubeHttp) -> None:
        """It answers, on ``port``."""
        self._admin = admin
        self.orders: list[VerifyOrder] = []
        """Those that came with a good pass."""
        self.refusals: list[str] = []
        """Why an order was refused for good: each is a fault of the operator's."""
        self.answer: tuple[int, str] = (200, "")
        """To a good order: status and message."""
        self.tls: ssl.SSLContext | None = None
        """The certificate of pools that have TLS inside; None: connections with TLS are closed."""
        self.schemes: list[str] = []
        """By which scheme each connection came that has come to an agreement."""
        routers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the library's own name
                body = self.rfile.read(int(self.headers["content-length"]))
                status, told = routers.judge(self.path, self.headers["host"], self.headers["authorization"], body)
                raw = json.dumps(told).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: Any) -> None:
                pass

        class Played(ThreadingHTTPServer):
            def finish_request(self, request: Any, client_address: Any) -> None:
                if request.recv(1, socket.MSG_PEEK) != _HANDSHAKE:
                    routers.schemes.append("http")
                    super().finish_request(request, client_address)
                elif routers.tls is not None:
                    with suppress(ssl.SSLError), routers.tls.wrap_socket(request, server_side=True) as agreed:
                        routers.schemes.append("https")
                        super().finish_request(agreed, client_address)

        self._server = Played(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="played routers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)

    def judge(self, path: str, host: str, shown: str, body: bytes) -> tuple[int, Object]:
        """Status and body of the answer. ``host``: ``{cluster}-router-internal.{namespace}.svc:8001``."""
        if path != VERIFY_PATH:
            return self._refuse(404, f"no such page: {path}")
        service, namespace = host.partition(":")[0].split(".")[:2]
        try:
            secret = self._admin.get(
                f"/api/v1/namespaces/{namespace}/secrets/{service.removesuffix('-router-internal')}-secret"
            )
            text = b64decode(secret["data"][_SECRET_KEY]).decode()
            make_secret(text).check_pass(shown.removeprefix("Bearer "), body, now_s=time.time())
            order = parse_order(body)
        except OSError as error:
            return 503, _error(str(error))
        except (ProtocolError, ValueError) as error:
            return self._refuse(401, str(error))
        if not self._are_there(order, namespace):
            return 503, _error("an engine of the revision is missing")
        self.orders.append(order)
        status, message = self.answer
        return status, {"verified": True} if status == 200 else _error(message)

    def _are_there(self, order: VerifyOrder, namespace: str) -> bool:
        """One of the named pods of each role."""
        pods = self._admin.ask("GET", f"/api/v1/namespaces/{namespace}/pods").body.get("items", ())
        told = [pod["metadata"] for pod in pods if is_ready(pod)]
        names = {one["name"] for one in told if one["labels"].get(labels.REVISION) == order.revision}
        return bool(names & set(order.prefill_pods or ())) and bool(names & set(order.decode_pods or ()))

    def _refuse(self, status: int, why: str) -> tuple[int, Object]:
        self.refusals.append(why)
        return status, _error(why)


def _error(message: str) -> Object:
    return {"error": {"message": message}}
