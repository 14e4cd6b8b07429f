"""An engine's readiness probe: HTTP server and side channel, well, silent or another's; and a real engine's."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from fakes.vllm_server import VllmPages, serving
from integration.harness import Harness, eventually
from integration.ports import fresh_port
from integration.ranks import SECRET
from patience import PATIENCE_S
from pdcluster_cli.__main__ import main
from pdcluster_cli.pod import ready
from pdcluster_cli.processes.engines import PoolRole
from pdcluster_cli.processes.parallelism import ParallelSizes
from pdcluster_connector.side_channel import DecodeChannel, Wakeup
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.side_channel import SIDE_CHANNEL_VERSION, Refusal

SILENT = "does not answer in time"


def probe(role: str, port: int, *more: str) -> tuple[int, float]:
    """Exit status and seconds."""
    began_at = time.monotonic()
    status = main(["ready", "--role", role, "--host", "127.0.0.1", "--port", str(port), *more])
    return status, time.monotonic() - began_at


def two_ports() -> int:
    """The first of two fresh ports, one after the other."""
    first, second = fresh_port(), fresh_port()
    while second != first + 1:
        first, second = second, fresh_port()
    return first


@contextmanager
def side_channel(port: int = 0) -> Iterator[int]:
    """Its port. Strangers are answered as the receiver's thread does."""
    wakeup, is_over = Wakeup(), threading.Event()
    with DecodeChannel("127.0.0.1", port, BootId("b"), SECRET, wakeup) as channel:

        def receive() -> None:
            while not is_over.is_set():
                channel.wait(1.0)
                while (received := channel.receive()) is not None:
                    assert isinstance(received.message, ProtocolError)
                    channel.send(received.peer, Refusal(str(received.message)))

        thread = threading.Thread(target=receive)
        thread.start()
        try:
            yield channel.port
        finally:
            is_over.set()
            wakeup.set()
            thread.join()
    wakeup.close()


@contextmanager
def listening(greeting: bytes) -> Iterator[int]:
    """The port of somebody who says this to everybody, and no more; nothing: he says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(greeting)
                connection.settimeout(PATIENCE_S)
                with suppress(ConnectionError):
                    while connection.recv(1000):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_the_versions_are_the_protocols_own() -> None:
    assert ready.ANSWER_VERSION == SIDE_CHANNEL_VERSION
    assert ready.QUESTION[0] not in (SIDE_CHANNEL_VERSION, SIDE_CHANNEL_VERSION + 1)


def test_a_prefill_engine_is_ready_when_its_server_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(VllmPages()) as pages:
        assert probe("prefill", pages.port)[0] == 0
        assert capsys.readouterr().out == "pdcluster ready: ready\n"
        pages.health = 503
        assert probe("prefill", pages.port)[0] == 1
    assert capsys.readouterr().out == "pdcluster ready: not ready: /health answers 503\n"


def test_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    port = fresh_port()
    assert probe("prefill", port)[0] == 1
    assert capsys.readouterr().out == f"pdcluster ready: not ready: no process listens on port {port}\n"


def test_a_server_that_was_stopped_is_not_waited_for_longer_than_asked() -> None:
    with serving(VllmPages(is_stopped=True)) as pages:
        status, seconds = probe("prefill", pages.port, "--timeout-s", "4")
    assert status == 1
    assert 4 <= seconds < 30  # It is 2 if nothing is asked for, and the server hangs up after a minute.


def test_a_decode_engine_is_ready_when_its_side_channel_answers_too() -> None:
    with serving(VllmPages()) as pages, side_channel() as port:
        for _ in range(20):
            words = ("--side-channel-port", str(port), "--timeout-s", "60")
            status, seconds = probe("decode", pages.port, *words)
            assert status == 0
            assert seconds < 20


OTHER_VERSION = bytes([SIDE_CHANNEL_VERSION + 1])


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (b"", SILENT),
        (b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" * 2, "does not greet as ZeroMQ"),
        (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53), "does not greet as ZeroMQ"),
        (b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53), SILENT),
        (b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53) + b"\x80\x00", "it sent a frame with flags 0x80"),
        (b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53) + b"\x02" + b"\xff" * 8, "it sent a frame with flags 0x2"),
        (b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53) + b"\x00\x01" + OTHER_VERSION, "no side channel of this version"),
    ],
)
def test_what_is_no_side_channel_is_not_taken_for_one(
    greeting: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    timeout_s = 3 if why == SILENT else 60  # It is 2 if nothing is asked for.
    with serving(VllmPages()) as pages, listening(greeting) as port:
        status, seconds = probe("decode", pages.port, "--side-channel-port", str(port), "--timeout-s", str(timeout_s))
    assert status == 1
    assert (seconds >= timeout_s) == (why == SILENT)
    assert seconds < 20
    assert why in capsys.readouterr().out


def test_each_rank_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(VllmPages()) as pages, side_channel(two_ports()) as port:
        words = ("--side-channel-port", str(port), "--ranks", "2", "--timeout-s", "20")
        assert probe("decode", pages.port, *words)[0] == 1
    assert f"the side channel on port {port + 1} cannot be asked" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--role", "router"], [], ["--role", "decode", "--port", "x"]])
def test_words_that_mean_nothing_end_with_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ready", *words])
    assert ended.value.code == 2


@pytest.mark.engines
def test_a_real_decode_engine_with_two_ranks_is_ready(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    first = two_ports()
    plan = harness.plan(PoolRole.DECODE)
    plan = dataclasses.replace(plan, parallelism=ParallelSizes(tensor=2), connector={"side_channel_port": first})
    words = ("--side-channel-port", str(first), "--ranks", "2")
    with harness.start(plan) as (engine,):
        assert eventually(lambda: probe("decode", engine.port, *words)[0] == 0)
        assert "failure kind" not in engine.log_path.read_text()
    assert probe("decode", engine.port, *words)[0] == 1
    assert "no process listens" in capsys.readouterr().out
