"""Every way in which a call to the metaserver can end is one outcome, by the deadline."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from patience import PATIENCE_S, until
from pdcluster_connector.metaserver_client import MetaserverClient
from pdcluster_connector.metaserver_tls import MetaserverTls, TlsFiles
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.metaserver import SEAL_HEADER, PrefillOutcome
from pdcluster_protocol.params import Reservation, SideChannelAddress, sealed
from pdcluster_protocol.secret import make_secret

R = RequestId("r")
SECRET = make_secret("the secret of the tests")
OK = b'{"status": "ok", "attempt": 1}'
RESERVATION = Reservation(
    request_id="r",
    remote_block_ids=((1,),),
    remote_block_size=16,
    remote_engine_id=EngineId("d"),
    remote_host="h",
    remote_port=1,
    remote_tp_size=1,
    remote_cached_tokens=0,
    transfer_id=TransferId("t"),
    attempt=Attempt(1),
    deadline_ms=1000,
    remote_boot_id=BootId("b"),
    remote_side_channels=(SideChannelAddress("h", 1, BootId("b")),),
    num_prompt_tokens=9,
    prompt_digest="x",
)


@dataclass
class Bench:
    """A client, and a router that answers with ``status`` and ``body`` once it may."""

    url: str = ""
    status: int = 200
    location: str = ""
    """Another address, for this client to ask instead."""
    body: bytes = OK
    is_cut: bool = False
    asked: bytes = b""
    seal: str = ""
    may_answer: threading.Event = field(default_factory=threading.Event)
    called: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)
    outcomes: deque[tuple[RequestId, PrefillOutcome]] = field(default_factory=deque)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked = handler.rfile.read(int(handler.headers["Content-Length"]))
        self.seal = handler.headers.get(SEAL_HEADER, "")
        self.called.set()
        handler.connection.settimeout(0.02)
        while not self.may_answer.is_set() and not self.gone.is_set():
            try:
                if not handler.connection.recv(1):
                    self.gone.set()
            except TimeoutError:
                continue
        if self.is_cut or self.gone.is_set():
            handler.connection.close()
            return
        handler.send_response(self.status)
        if self.location:
            handler.send_header("Location", self.location)
        handler.send_header("Content-Length", str(len(self.body)))
        handler.end_headers()
        handler.wfile.write(self.body)


@contextmanager
def serving(bench: Bench) -> Iterator[MetaserverClient]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bench.answer(self)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    bench.url = f"http://127.0.0.1:{server.server_address[1]}/v1/metaserver"
    client = MetaserverClient(bench.outcomes, SECRET)
    try:
        yield client
    finally:
        client.close()
        bench.gone.set()
        server.shutdown()
        server.server_close()


def wait_for(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_true()


def outcome_of(bench: Bench, deadline_s: float = 10.0) -> PrefillOutcome:
    """What the client says of one call."""
    with serving(bench) as client:
        client.post(R, bench.url, RESERVATION, deadline=time.monotonic() + deadline_s)
        assert wait_for(lambda: bool(bench.outcomes))
        assert len(bench.outcomes) == 1
    (request_id, outcome) = bench.outcomes[0]
    assert request_id == R
    return outcome


def answering(**fields: object) -> Bench:
    bench = Bench(**fields)  # type: ignore[arg-type]  # its own fields
    bench.may_answer.set()
    return bench


def test_a_reply_is_taken_as_it_is() -> None:
    assert outcome_of(answering()) == PrefillOutcome("ok", attempt=Attempt(1))


def test_a_call_is_sealed_as_it_is_sent() -> None:
    bench = answering()
    outcome_of(bench)
    assert msgspec.json.decode(bench.asked, type=Reservation) == sealed(RESERVATION, SECRET)
    SECRET.check_call(bench.seal.encode(), bench.asked)


@pytest.mark.parametrize(
    ("bench", "words"),
    [
        (answering(status=500), "metaserver answered 500"),
        (answering(status=404), "metaserver answered 404"),
        (answering(status=204, body=b""), "metaserver answered 204"),
        (answering(body=b"{}"), "not an outcome"),
        (answering(body=OK + b" " * (200 << 10)), "larger than 65536 bytes"),
        (answering(is_cut=True), "metaserver unreachable"),
    ],
)
def test_every_other_end_of_a_call_is_a_failure(bench: Bench, words: str) -> None:
    outcome = outcome_of(bench)
    assert outcome.status == "failed"
    assert words in outcome.reason


@pytest.mark.parametrize("status", [302, 307])
def test_no_other_address_is_called_than_the_one_that_the_router_has_given(status: int) -> None:
    """A call is sealed, and names KV memory. Where calls must go by https, the other address may be a plain one."""
    other = answering()
    with serving(other):
        outcome = outcome_of(answering(status=status, location=other.url, body=b""))
    assert f"metaserver answered {status}" in outcome.reason
    assert not other.called.is_set()


def test_a_silent_router_is_left_at_the_deadline() -> None:
    bench = Bench()
    outcome = outcome_of(bench, deadline_s=0.2)
    assert "did not say how prefill ended before the deadline" in outcome.reason


@contextmanager
def host_that_is_gone() -> Iterator[str]:
    """A port on which nothing takes a connection, and nothing refuses one."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        yield f"http://127.0.0.1:{full.getsockname()[1]}/v1/metaserver"


def test_a_router_whose_host_is_gone_is_given_up_long_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcluster_connector.metaserver_client._CONNECT_S", 0.1)
    outcomes: deque[tuple[RequestId, PrefillOutcome]] = deque()
    client = MetaserverClient(outcomes, SECRET)
    with host_that_is_gone() as url:
        client.post(R, url, RESERVATION, deadline=time.monotonic() + 3600)
        assert wait_for(lambda: bool(outcomes))
        client.close()
    assert outcomes[0][1].status == "failed"
    assert outcomes[0][1].reason.startswith("metaserver unreachable: ")


def test_a_cancelled_call_has_no_outcome_and_the_router_sees_the_cut() -> None:
    bench = Bench()
    with serving(bench) as client:
        client.post(R, bench.url, RESERVATION, deadline=time.monotonic() + 30)
        assert bench.called.wait(PATIENCE_S)
        client.cancel(R)
        assert bench.gone.wait(PATIENCE_S)
        assert not bench.outcomes


def test_one_request_too_many_fails_at_once_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcluster_connector.metaserver_client._MAX_WAITING", 1)
    bench = Bench()
    with serving(bench) as client:
        client.post(R, bench.url, RESERVATION, deadline=time.monotonic() + PATIENCE_S)
        assert bench.called.wait(PATIENCE_S)
        client.post(RequestId("one more"), bench.url, RESERVATION, deadline=time.monotonic() + PATIENCE_S)
        assert until(lambda: bool(bench.outcomes))
        ((name, outcome),) = bench.outcomes
        assert (name, outcome.status) == ("one more", "failed")
        assert "1 requests of this decode engine wait for the router already" in outcome.reason
        bench.may_answer.set()
        assert until(lambda: [name for name, _ in bench.outcomes] == ["one more", R])


class Broken(MetaserverTls):
    def context(self) -> ssl.SSLContext | bool:
        raise RuntimeError("our own bug")


def test_a_bug_of_our_own_fails_the_call_and_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: deque[tuple[RequestId, PrefillOutcome]] = deque()
    client = MetaserverClient(outcomes, SECRET, Broken(TlsFiles()))
    logger = logging.getLogger("vllm.pdcluster.metaserver")
    logger.addHandler(caplog.handler)  # vLLM's loggers hand nothing on.
    try:
        client.post(R, "http://127.0.0.1:1/v1/metaserver", RESERVATION, deadline=time.monotonic() + PATIENCE_S)
        assert wait_for(lambda: bool(outcomes))
    finally:
        logger.removeHandler(caplog.handler)
        client.close()
    assert outcomes[0][1].reason == "metaserver call failed: RuntimeError"
    [record] = {id(record): record for record in caplog.records}.values()
    assert record.getMessage() == "metaserver call failed request_id=r"
    assert record.exc_info is not None


def test_closing_cuts_every_call() -> None:
    bench = Bench()
    with serving(bench) as client:
        client.post(R, bench.url, RESERVATION, deadline=time.monotonic() + 30)
        assert bench.called.wait(PATIENCE_S)
        client.close()
        assert bench.gone.wait(PATIENCE_S)
