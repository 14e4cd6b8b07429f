"""Commands ask engines and routers over TLS: what they trust, what they show, what they say, and never in the clear."""

from __future__ import annotations

import argparse
import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from fakes.certificates import FOR_CLIENTS, FOR_SERVERS, Authority, Issued
from fakes.vllm_server import VllmPages, serving
from patience import PATIENCE_S
from pdcluster_cli.cluster.routers import ask_routers
from pdcluster_cli.pod import drain, ready
from pdcluster_cli.tls_flags import TlsFlags, Unusable

NAME = "pool-router-internal.default.svc"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca.crt")


def shown(issued: Issued, folder: Path) -> list[str]:
    files = issued.write(folder)
    return ["--tls-cert", str(files["tls_cert"]), "--tls-key", str(files["tls_key"])]


@contextmanager
def engine(authority: Authority, folder: Path, issued: Issued | None = None) -> Iterator[VllmPages]:
    """An engine that asks for certificates of this authority."""
    certificate = issued or authority.issue(names=(NAME,))
    with serving(VllmPages(), certificate.server(folder / "engine", asks=authority.ca)) as pages:
        yield pages


def probe(pages: VllmPages, *words: str) -> int:
    return ready.main(["--role", "prefill", "--host", "127.0.0.1", "--port", str(pages.port), *words])


def trusting(authority: Authority, folder: Path) -> list[str]:
    """The flags that a good probe has."""
    ours = shown(authority.issue(usage=FOR_CLIENTS), folder / "ours")
    return ["--tls-ca", str(authority.ca), "--tls-name", NAME, *ours]


def test_an_engine_is_ready_whose_certificate_has_the_name(authority: Authority, tmp_path: Path) -> None:
    with engine(authority, tmp_path) as pages:
        assert probe(pages, *trusting(authority, tmp_path)) == 0
        assert pages.asked == ["/health"]


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("--tls-name", "name the host that is asked (--tls-name NAME: another one)"),
        ("--tls-ca", "must be signed by one that this system trusts (or --tls-ca FILE)"),
        ("--tls-cert --tls-key", "it may ask for a certificate: give --tls-cert and --tls-key"),
        ("--tls-cert", "--tls-cert not given and --tls-key"),
    ],
)
def test_one_that_is_not_agreed_with_is_not_ready_and_the_line_has_the_cure(
    left_out: str, said: str, authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = trusting(authority, tmp_path)
    for flag in left_out.split():
        at = words.index(flag)
        del words[at : at + 2]
    with engine(authority, tmp_path) as pages:
        assert probe(pages, *words) == 1
        assert pages.asked == []
    assert said in capsys.readouterr().out


def test_it_is_never_asked_in_the_clear(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(VllmPages()) as plain:
        assert probe(plain, *trusting(authority, tmp_path)) == 1
        assert plain.asked == []
    assert "it may speak plain HTTP" in capsys.readouterr().out


def test_certificates_are_no_reason_to_restart_an_engine(authority: Authority, tmp_path: Path) -> None:
    words = ["--alive", *trusting(authority, tmp_path)]
    expired = authority.issue(names=(NAME,), ends=timedelta(minutes=-1))
    with engine(authority, tmp_path, expired) as pages:
        assert probe(pages, *words) == 0
        assert pages.asked == ["/health"]
        strange = Authority(tmp_path / "other.crt", "other").issue(usage=FOR_CLIENTS)
        assert probe(pages, "--alive", *trusting(authority, tmp_path)[:4], *shown(strange, tmp_path / "strange")) == 0
        assert probe(pages, "--alive", "--tls-name", NAME, "--tls-cert", "/no/file", "--tls-key", "/no/file") == 0
        pages.health = 503
        assert probe(pages, *words) == 1


def test_one_that_hangs_or_is_gone_is_not_alive(authority: Authority, tmp_path: Path) -> None:
    words = ["--alive", "--timeout-s", "0.2", *trusting(authority, tmp_path)]
    with engine(authority, tmp_path) as pages:
        pages.is_stopped = True
        assert probe(pages, *words) == 1
        pages.resumed.set()
    assert probe(pages, *words) == 1


def test_a_drain_asks_over_tls(authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with engine(authority, tmp_path) as pages:
        at = ["--host", "127.0.0.1", "--port", str(pages.port), "--idle-s", "0"]
        assert drain.main([*at, *trusting(authority, tmp_path)]) == 0
        assert "idle for 0 s" in capsys.readouterr().out
        assert drain.main([*at, "--tls-ca", str(authority.ca), "--timeout-s", "0"]) == 0
    assert re.search(r"gave up after [0-9.]+ s: its certificate is not trusted", capsys.readouterr().out)


def test_a_name_that_is_none_is_refused_before_anything_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ready.make_parser().parse_args(["--role", "decode", "--tls-name", ".x"])
    assert "'.x' is no DNS name or address" in capsys.readouterr().err


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("no certificate")
    for flags, said in (
        (TlsFlags(ca=str(nonsense)), f"--tls-ca {nonsense}: "),
        (TlsFlags(ca="/no/file"), "--tls-ca /no/file: No such file or directory: name a file of certificates in PEM"),
        (TlsFlags(cert=str(nonsense), key=str(nonsense)), f"--tls-cert {nonsense} and --tls-key {nonsense}: "),
        (TlsFlags(key="k"), "--tls-cert not given and --tls-key k: give both files, or neither"),
    ):
        with pytest.raises(Unusable) as refused:
            flags.context()
        assert str(refused.value).startswith(said)


@asynccontextmanager
async def router(context: ssl.SSLContext | None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Its port, and the first lines that it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1], asked


async def ask(*urls: str, **flags: str) -> list[bytes | str]:
    files = {f"tls_{name}": flags.get(name, "") for name in ("ca", "cert", "key", "name")}
    given = argparse.Namespace(cluster=None, url=list(urls), **files)
    return list((await asyncio.to_thread(ask_routers, given, "/page", PATIENCE_S)).values())


@pytest.mark.anyio
async def test_a_router_is_asked_over_tls_and_must_be_trusted(authority: Authority, tmp_path: Path) -> None:
    async with router(authority.issue(names=(NAME,)).server(tmp_path / "router")) as (port, asked):
        url = f"https://127.0.0.1:{port}"
        assert await ask(url, f"127.0.0.1:{port}", ca=str(authority.ca), name=NAME) == [b"{}", b"{}"]
        assert len(asked) == 2
        (unknown,), (unnamed,) = await ask(url), await ask(url, ca=str(authority.ca))
        assert "its certificate is not trusted" in str(unknown)
        assert "must be signed by one that this system trusts (or --tls-ca FILE)" in str(unknown)
        assert "name the host that is asked (--tls-name NAME: another one)" in str(unnamed)
        (unread,) = await ask(url, ca="/no/file")
        assert str(unread).startswith("no answer: --tls-ca /no/file: ")
        assert len(asked) == 2


@pytest.mark.anyio
async def test_a_router_that_asks_is_shown_a_certificate(authority: Authority, tmp_path: Path) -> None:
    server = authority.issue(usage=FOR_SERVERS).server(tmp_path / "router", asks=authority.ca)
    ours = authority.issue(usage=FOR_CLIENTS).write(tmp_path / "ours")
    async with router(server) as (port, _):
        url = f"https://127.0.0.1:{port}"
        files = {"cert": str(ours["tls_cert"]), "key": str(ours["tls_key"])}
        assert await ask(url, ca=str(authority.ca), **files) == [b"{}"]
        (refused,) = await ask(url, ca=str(authority.ca))
        assert "it may ask for a certificate: give --tls-cert and --tls-key" in str(refused)


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["https", "HTTPS", " https", "ht\ttps"])
async def test_a_router_is_asked_by_https_however_its_url_spells_it(scheme: str) -> None:
    async with router(None) as (port, asked):
        (said,) = await ask(f"{scheme}://127.0.0.1:{port}")
        assert "it may speak plain HTTP" in str(said)
        assert not [line for line in asked if b"GET" in line]


@pytest.mark.parametrize("flag", ["--tls-ca", "--tls-cert", "--tls-key", "--tls-name"])
def test_an_empty_variable_does_not_turn_tls_off(
    flag: str, authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(authority, tmp_path) as pages:
        with pytest.raises(SystemExit, match="2"):
            probe(pages, flag, "")
        assert pages.asked == []
    assert f"argument {flag}: " in capsys.readouterr().err


@pytest.mark.anyio
async def test_no_router_is_asked_in_the_clear_where_a_flag_of_tls_is_given(authority: Authority) -> None:
    async with router(None) as (port, asked):
        said = await ask(f"http://127.0.0.1:{port}", f"https://127.0.0.1:{port}", ca=str(authority.ca))
        assert "this URL is http, and a flag of TLS is given: write https, or leave the flag out" in str(said[0])
        assert "it may speak plain HTTP" in str(said[1])
        assert not [line for line in asked if b"GET" in line]
