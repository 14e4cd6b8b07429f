"""What a failed question says of the engine."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fakes.talker import talking
from patience import PATIENCE_S
from pdcluster_cli.pod.engine_http import Answer, NoAnswer, NotThere, ask, nameless


def test_a_name_that_nobody_has_any_more_means_that_the_engine_is_gone() -> None:
    """A worker's drain asks its leader by name: else it would wait its whole time for a leader that has gone."""
    told = nameless("pool-0.pool", socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    assert isinstance(told, NotThere)
    assert str(told) == "the name pool-0.pool does not exist"


def test_a_question_to_a_name_that_nobody_has_is_answered_so() -> None:
    """No name server is asked for a name with colons that is no address."""
    with pytest.raises(NotThere, match="the name fe80::zz does not exist"):
        ask("fe80::zz", 8000, "/health", timeout_s=1)


def test_a_name_server_that_is_away_says_nothing_of_the_engine() -> None:
    told = nameless("pool-0.pool", socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
    assert isinstance(told, NoAnswer)
    assert "pool-0.pool is not known: Temporary failure" in str(told)


def ask_here(port: int, timeout_s: float = PATIENCE_S) -> Answer:
    return ask("127.0.0.1", port, "/metrics", timeout_s=timeout_s)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("head", [HEAD + b"Content-Length: 10000\r\n\r\n", HEAD + b"\r\n", HEAD + b"Server: ", b""])
def test_an_answer_that_drips_is_late_as_a_whole(head: bytes) -> None:
    with (
        talking(head, b"x", every_s=0.05) as port,
        pytest.raises(NoAnswer, match="/metrics does not answer: timed out"),
    ):
        ask_here(port, timeout_s=0.5)


@pytest.mark.parametrize("head", [HEAD + b"\r\n", HEAD + b"Content-Length: 99999999999999999\r\n\r\n"])
def test_an_answer_without_an_end_is_not_read_to_it(head: bytes) -> None:
    with talking(head, bytes(1 << 20)) as port, pytest.raises(NoAnswer, match="it sends more than 16 MiB"):
        ask_here(port)


@pytest.mark.parametrize("head", [b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n"])
def test_what_is_no_answer_is_told_so(head: bytes) -> None:
    with talking(head, b"HTTP/1.1 100 Continue\r\n\r\n" * 1000) as port, pytest.raises(NoAnswer):
        ask_here(port, timeout_s=2)


@pytest.mark.parametrize(
    "body",
    [b"Content-Length: 2\r\n\r\nok", b"Transfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", b"\r\nok"],
    ids=["length", "chunked", "closed"],
)
def test_a_whole_answer_is_read_in_each_framing(body: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as client:
        asked = client.submit(ask_here, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(HEAD + body)
        assert asked.result() == Answer(200, "ok")


def test_an_answer_that_is_cut_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as client:
        asked = client.submit(ask_here, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(HEAD + b"Content-Length: 9\r\n\r\nok")
        with pytest.raises(NoAnswer, match="2 bytes read, 7 more expected"):
            asked.result()


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_what_can_be_no_name_is_told_as_one_that_does_not_exist(host: str) -> None:
    with pytest.raises(NotThere, match=f"^the name {host} does not exist$"):
        ask(host, 8000, "/health", timeout_s=PATIENCE_S)


@pytest.mark.parametrize("timeout_s", [0.2, 0.0])
def test_a_name_server_that_is_silent_costs_no_more_than_the_time_given(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    is_over = threading.Event()

    def look_up(*_: object, flags: int = 0, **__: object) -> list[bool]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "it is a name, and no server has to be asked for that")
        return [is_over.wait(PATIENCE_S)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(NoAnswer, match=r"no name server tells the address of pool-0\.pool: timed out"):
        ask("pool-0.pool", 8000, "/health", timeout_s=timeout_s)
    is_over.set()
