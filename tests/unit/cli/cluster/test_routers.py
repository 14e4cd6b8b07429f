"""Routers are asked all at once, each for so long and so many bytes: what answers at a wrong URL may be anything."""

from __future__ import annotations

import argparse
import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import repeat

import pytest

from patience import PATIENCE_S
from pdcluster_cli.cluster.routers import Answers, ask_routers
from pdcluster_cli.cluster.why import make_parser


def ask(*urls: str, timeout_s: float = PATIENCE_S) -> Answers:
    given = argparse.Namespace(cluster=None, url=list(urls), tls_ca="", tls_cert="", tls_key="", tls_name="")
    return ask_routers(given, "/page", timeout_s)


@asynccontextmanager
async def serving(answer: Iterator[bytes], pause_s: float = 0.0) -> AsyncIterator[str]:
    """A server that sends these pieces as long as they are taken."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for piece in answer:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
        except ConnectionError:
            pass
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def answer_to(answer: Iterator[bytes], timeout_s: float = PATIENCE_S, pause_s: float = 0.0) -> bytes | str:
    async with serving(answer, pause_s) as url:
        (said,) = (await asyncio.to_thread(ask, url, timeout_s=timeout_s)).values()
    return said


@pytest.mark.anyio
@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_one_that_sends_a_byte_now_and_then_is_not_waited_for(begin: bytes) -> None:
    said = await answer_to(iter([begin, *[b"x"] * 100_000]), timeout_s=0.2, pause_s=0.01)
    assert said == "no answer within 0.2 s: is this a router's internal port?"


@pytest.mark.anyio
async def test_one_that_sends_without_end_is_not_read_to_the_end() -> None:
    said = await answer_to(repeat(b"x" * (1 << 20)))
    assert isinstance(said, str)
    assert "it sent more than" in said


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"{}"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"{}"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "it answered 404"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", "no answer: "),
        (b"SSH-2.0-OpenSSH\r\n", "no answer: "),
        (b"", "no answer: "),
    ],
)
async def test_what_is_no_whole_answer_of_a_router_is_told(answer: bytes, said: bytes | str) -> None:
    told = await answer_to(iter([answer]))
    if isinstance(said, bytes):
        assert told == said
    else:
        assert isinstance(told, str)
        assert told.startswith(said)


def test_urls_that_are_none_are_told_beside_each_other() -> None:
    urls = ["https://127.0.0.1:1", "http://127.0.0.1:99999", "::1", "", "http://", "ftp://x", "http://127.0.0.1:1"]
    answers = ask(*urls)
    assert list(answers) == urls
    assert all(isinstance(said, str) and said.startswith("no answer: ") for said in answers.values())
    assert "speaks http or https, not ftp" in str(answers["ftp://x"])


def test_a_name_server_that_is_silent_costs_no_more_than_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [is_over.wait(20)])
    began_at = time.monotonic()
    answers = ask("http://router.example:1", timeout_s=0.2)
    seconds = time.monotonic() - began_at
    is_over.set()
    assert answers == {"http://router.example:1": "no answer within 0.2 s: is this a router's internal port?"}
    assert seconds < 20


@pytest.mark.parametrize("host", ["a..b", "fe80::zz]"])
def test_what_is_no_name_is_one_line(host: str) -> None:
    (answer,) = ask(f"//{host}:1").values()
    assert isinstance(answer, str)
    assert answer.startswith("no answer: ")


@pytest.mark.parametrize("url", ["http://user:pw-1@h:1", "user:pw-1@h:1", "http://pw-1@h:1"])
def test_a_password_in_a_url_is_refused_and_not_printed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A router's internal port asks for none, and what is asked is printed."""
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["req-1", "--url", url])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "a router's internal port asks for no password: leave it out" in told
    assert "pw-1" not in told
