"""Posts reservations and waits for their outcomes: one asyncio thread for thousands of open calls.

Each call that is not cut by ``cancel`` or ``close`` ends in one ``PrefillOutcome``. The outcome in a 200 is taken as it
is; any other status, a lost connection and a passed deadline are failures. The router refuses a call without its seal,
and prefill a reservation without one, so that no caller without the secret can say where KV goes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections import deque
from typing import Any, Final

import aiohttp
import msgspec

from pdcluster_connector.metaserver_tls import MetaserverTls, TlsFiles
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.metaserver import SEAL_HEADER, PrefillOutcome, decode_outcome, failed
from pdcluster_protocol.params import DecodeCall, Reservation, sealed
from pdcluster_protocol.secret import Secret

_LOG: Final = logging.getLogger("vllm.pdcluster.metaserver")

_MAX_REPLY_BYTES: Final = 64 << 10
_CONNECT_S: Final = 5.0
"""How long a connection may take to come up: the router runs in the same cluster."""
CLOSE_S: Final = 2.0
_MAX_WAITING: Final = 16384
"""Most requests with an open call, each with a socket of its own. Far fewer requests use up an engine's blocks."""


_ALERT: Final = re.compile(r"\[SSL: (\w*ALERT\w*)\]")
"""The server's alert in an error. In TLS 1.3 a server refuses our certificate only after our side of the handshake has
ended."""
_OURS: Final = "metaserver_cert and metaserver_key"
_PORT: Final = "start it with --internal-tls-cert and --internal-tls-key"


class MetaserverClient:
    """One and the same thread calls ``post``, ``cancel`` and ``close``. Only ``close`` waits."""

    def __init__(
        self, outcomes: deque[tuple[RequestId, PrefillOutcome]], secret: Secret, tls: MetaserverTls | None = None
    ) -> None:
        """``secret``: the cluster's, by which the router knows that a call is an engine's. ``tls``: for https URLs."""
        self._outcomes = outcomes
        self._secret = secret
        self._tls = tls or MetaserverTls(TlsFiles())
        self._calls: dict[RequestId, set[asyncio.Task[None]]] = {}
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._main, name="pdcluster-metaserver", daemon=True)
        self._thread.start()

    def post(self, request_id: RequestId, url: str, said: DecodeCall, *, deadline: float) -> None:
        """Sends ``said``. The outcome is appended to ``outcomes`` by ``deadline`` (monotonic seconds)."""
        self._loop.call_soon_threadsafe(self._start, request_id, url, said, deadline)

    def cancel(self, request_id: RequestId) -> None:
        """Cut the calls of this request that are still open. Calls that are cut have no outcome."""
        self._loop.call_soon_threadsafe(self._cut, request_id)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Cut every call and end the thread; a second time does nothing. Returns whether the thread has ended.

        Waits up to ``timeout_s`` for that.
        """
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs in the client's own thread.

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._shut())
        self._loop.close()

    async def _shut(self) -> None:
        calls = [call for calls in self._calls.values() for call in calls]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _start(self, request_id: RequestId, url: str, said: DecodeCall, deadline: float) -> None:
        if len(self._calls) >= _MAX_WAITING and request_id not in self._calls:
            full = (
                f"{_MAX_WAITING} requests of this decode engine wait for the router already: start more decode engines"
            )
            self._outcomes.append((request_id, failed(full)))
            return
        call = self._loop.create_task(self._call(request_id, url, said, deadline), name=f"reserve {request_id}")
        self._calls.setdefault(request_id, set()).add(call)
        call.add_done_callback(lambda ended: self._drop(request_id, ended))

    def _cut(self, request_id: RequestId) -> None:
        for call in self._calls.get(request_id, ()):
            call.cancel()

    def _drop(self, request_id: RequestId, call: asyncio.Task[None]) -> None:
        calls = self._calls[request_id]
        calls.discard(call)
        if not calls:
            del self._calls[request_id]

    async def _call(self, request_id: RequestId, url: str, said: DecodeCall, deadline: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                outcome = await self._exchange(url, said)
        except aiohttp.ClientConnectorCertificateError as error:
            outcome = failed(_distrust(error, self._tls.name))
        except aiohttp.ClientConnectorSSLError as error:
            reason = getattr(error.os_error, "reason", "") or "nonsense"
            outcome = failed(f"the router's internal port and this engine do not agree on TLS: {reason}: {_PORT}")
        except aiohttp.ClientError as error:  # Before TimeoutError: the error of a slow connect is of both types.
            outcome = failed(_unreached(error))
        except TimeoutError:
            outcome = failed("the router did not say how prefill ended before the deadline")
        except OSError as error:
            outcome = failed(f"metaserver unreachable: {type(error).__name__}")
        except (ProtocolError, ValueError) as error:
            outcome = failed(str(error))
        except Exception as error:  # noqa: BLE001  # top of a task: every end of a call is an outcome
            _LOG.exception("metaserver call failed request_id=%s", request_id)
            outcome = failed(f"metaserver call failed: {type(error).__name__}")
        self._outcomes.append((request_id, outcome))

    async def _exchange(self, url: str, said: DecodeCall) -> PrefillOutcome:
        body = msgspec.json.encode(sealed(said, self._secret) if isinstance(said, Reservation) else said)
        headers = {"Content-Type": "application/json", SEAL_HEADER: self._secret.seal_call(body)}
        if self._tls.is_needed and not url.startswith("https://"):
            raise ProtocolError(f"this engine calls routers by https, and this one's URL is plain http: {_PORT}")
        how: dict[str, Any] = {"ssl": self._tls.context(), "server_hostname": self._tls.name}
        how["allow_redirects"] = False  # The seal is for this router; another URL may be plain http.
        async with self._own_session().post(url, data=body, headers=headers, **how) as reply:
            content = await reply.content.read(_MAX_REPLY_BYTES)
            if reply.status != 200:
                raise ProtocolError(f"metaserver answered {reply.status}: {content[:200].decode(errors='replace')}")
            while chunk := await reply.content.read(_MAX_REPLY_BYTES):
                content += chunk
                if len(content) > _MAX_REPLY_BYTES:
                    raise ProtocolError(f"metaserver's reply is larger than {_MAX_REPLY_BYTES} bytes")
            return decode_outcome(content)

    def _own_session(self) -> aiohttp.ClientSession:
        """The client's only session, made in the loop that uses it. It limits neither the connections nor the time of
        a call, which has its own deadline."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._session


def _unreached(error: aiohttp.ClientError) -> str:
    if alert := _ALERT.search(str(error)):
        said = alert[1].lower().replace("_", " ")
        what = f"the router refuses this engine's certificate, or there is none ({said})"
        return f"{what}: give one that it trusts as {_OURS}"
    return f"metaserver unreachable: {type(error).__name__}"


def _distrust(error: aiohttp.ClientConnectorCertificateError, name: str | None) -> str:
    """Why the router is not trusted, and the cure."""
    said = getattr(error.certificate_error, "verify_message", "") or type(error.certificate_error).__name__
    expected = f"metaserver_tls_name {name}" if name else "the host of its URL (set metaserver_tls_name for another)"
    return (
        f"the router's certificate is not trusted ({said.rstrip('.')}): it must be signed by one of metaserver_ca, be "
        f"valid now, and have the name that is expected, which is {expected}"
    )
