"""The gRPC server of the picker: moves messages between gateways and ``PickerStream``, and tells probes how it is.

    ExternalProcessor.Process --read--> hear      a task of the stream
                              <--write- replies   gRPC's own task: its end is the stream's

One stream is one request. Services and probes: Gateway API Inference Extension, proposal 004 (``docs/decisions/0050``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any, Final
from urllib.parse import unquote

import grpc
from grpc import aio

from pdcluster_protocol.errors import ConfigError, ProtocolError
from pdcluster_router.core.apis.openai_errors import bad_gateway_mode, internal
from pdcluster_router.engines.health import missing_engines
from pdcluster_router.front.picker.messages import METHOD, SERVICE, ProcessingRequest, ProcessingResponse
from pdcluster_router.front.picker.stream import PickerStream
from pdcluster_router.front.picker.wire import message_in, message_of
from pdcluster_router.front.router import Router
from pdcluster_router.http.grpc_tls import server_credentials

logger = logging.getLogger(__name__)

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
LIVENESS: Final = "liveness"
_ALWAYS: Final = frozenset(("", LIVENESS))
_IF_READY: Final = frozenset(("readiness", SERVICE))
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""``HealthCheckResponse`` with its one field, a number: gRPC's ``health.proto``. Too little for another package."""
_SLACK_BYTES: Final = 64 << 10
"""The bytes of a message besides a body and the headers' values."""
_PING_MS: Final = 30_000
_PONG_MS: Final = 10_000
"""A gateway that has gone without a word is noticed after both, and its requests end."""
_IDLE_MS: Final = 300_000
"""A connection without a stream or a probe for so long is closed, or idle ones would take all descriptors."""
_AGE_MS: Final = 600_000
"""A connection about so old gets no new stream, so that a gateway shows its certificate again. gRPC gives its streams
time without a limit."""
_PROBES: Final = 64
_GRACE_S: Final = 1.0
"""At the end, for replies that are on their way: requests have ended by then."""


class Picker:
    """The picker of one router. Event loop only; ``stop`` ends it."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._server = aio.server(options=_options_of(router), maximum_concurrent_rpcs=_most_of(router))
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(self._check)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {METHOD: process}),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": check}),
            )
        )

    async def start(self) -> None:
        """Gateways may ask from now on. Raises: ConfigError: The port is taken."""
        settings = self._router.settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        where = f"{host}:{settings.picker_port}"
        try:
            self._listen_at(where)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {where}: choose another --picker-port or --host") from error
        await self._server.start()
        logger.info("picker started port=%d", settings.picker_port)

    def _listen_at(self, where: str) -> None:
        certificate = self._router.picker_certificate
        if certificate is None:
            self._server.add_insecure_port(where)
        else:
            self._server.add_secure_port(where, server_credentials(lambda: certificate.grpc_files))

    async def stop(self) -> None:
        """No stream is left. Waits ``_GRACE_S`` at most."""
        await self._server.stop(_GRACE_S)
        del self._server  # Its handlers refer to us, and gRPC ends its thread with its last server.

    async def _process(self, _: Any, context: Any) -> None:
        """One request. However the stream ends, the request has ended after it."""
        stream = PickerStream(self._router, _peer_of(context.peer()))
        reading = asyncio.create_task(_read(stream, context), name="picker: stream")
        try:
            timeout_s = self._router.settings.idle_timeout_s
            while (reply := await stream.next_reply()) is not None:
                async with asyncio.timeout(timeout_s):
                    await context.write(message_of(reply))
        except TimeoutError:
            logger.warning("gateway takes no replies seconds=%.0f", self._router.settings.idle_timeout_s)
            stream.is_broken_off = True
        finally:
            stream.ended()
            reading.cancel()
        if stream.is_broken_off:  # After a good end of the stream the gateway would go on with the request by itself.
            await _break_off(context)

    async def _check(self, asked: bytes, context: Any) -> bytes:
        """Answers a probe. A name that it does not know is NOT_FOUND, as gRPC's health protocol has it."""
        service = asked[2:].decode("utf-8", "replace")  # Field 1: its tag, its length (below 128), its text.
        if service in _ALWAYS:
            return _SERVING
        if service not in _IF_READY:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        is_ready = not self._router.is_draining and not missing_engines(self._router.services.roster)
        return _SERVING if is_ready else _NOT_SERVING


async def _break_off(context: Any) -> None:
    """Ends a stream with an error. A gateway that takes nothing does not take that either: its call is dropped."""
    try:
        async with asyncio.timeout(_GRACE_S):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the router has broken the request off")
    except TimeoutError:
        raise asyncio.CancelledError from None


async def _read(stream: PickerStream, context: Any) -> None:
    """Hands all messages to ``stream``, until the gateway sends no more."""
    try:
        while True:
            await stream.may_read.wait()
            said = await context.read()
            if said is aio.EOF:
                return
            stream.hear(message_in(said))
    except ProtocolError as error:
        stream.fail(bad_gateway_mode(str(error)))
    except Exception:  # The top of a task: a message that cannot be read, or a bug of ours, fails this request alone.
        logger.exception("request of a gateway failed")
        stream.fail(internal())
    finally:
        stream.ended()


def _most_of(router: Router) -> int:
    """The most streams: ``Clients`` ends those beyond twice its limit, and probes must still be answered."""
    return 2 * router.clients.max_connections + _PROBES


def _options_of(router: Router) -> list[tuple[str, int]]:
    settings = router.settings
    return [
        ("grpc.so_reuseport", 0),  # Else two routers could have the same port, and none would know.
        ("grpc.max_receive_message_length", settings.max_body_bytes + settings.max_header_bytes + _SLACK_BYTES),
        ("grpc.max_concurrent_streams", _most_of(router)),
        ("grpc.server_handshake_timeout_ms", math.ceil(settings.client_read_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.max_connection_age_ms", _AGE_MS),
        ("grpc.keepalive_time_ms", _PING_MS),
        ("grpc.keepalive_timeout_ms", _PONG_MS),
    ]


def _peer_of(peer: str) -> tuple[str, int] | None:
    """``ipv4:127.0.0.1:5000`` or ``ipv6:%5B::1%5D:5000`` as address and port; None: it is another kind."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None
