"""Which files of trust in engines a router takes, and that it goes on with the last good ones whatever is in them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.certificates import FOR_CLIENTS, FOR_SERVERS, Authority
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.engines.trust import EngineTrust, check_engine_files
from pdcluster_router.http.handshakes import Handshakes
from pdcluster_router.settings.router_settings import Settings, build_settings
from pdcluster_router.telemetry.failures import FailureKind, Failures

DAY = timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca.crt")


def given_files(authority: Authority, folder: Path) -> Settings:
    files = authority.issue(usage=FOR_CLIENTS, names=["router"]).write(folder)
    urls = {"prefill_urls": ["https://p:1"], "decode_urls": ["https://d:2"]}
    ours = {"engine_cert": files["tls_cert"], "engine_key": files["tls_key"]}
    return build_settings(**urls, engine_ca=authority.ca, **ours)


def trust_in(told: Settings, count: Callable[[FailureKind], None] = lambda _: None) -> EngineTrust:
    return EngineTrust(told, Handshakes(lambda _: None), Failures(count, lambda: 0.0))


Break = Callable[[Authority, Settings], object]
REFUSED: dict[str, tuple[Break, str]] = {
    "no file of authorities": (
        lambda _, told: path_of(told, "ca").unlink(),
        "--engine-ca CA: No such file or directory: name a file that this process can read",
    ),
    "a key as authorities": (
        lambda _, told: path_of(told, "ca").write_bytes(path_of(told, "key").read_bytes()),
        "--engine-ca CA: it has no certificate in PEM: name the file with the certificates to trust",
    ),
    "half an authority": (
        lambda _, told: path_of(told, "ca").write_bytes(path_of(told, "ca").read_bytes()[:300]),
        "--engine-ca CA: OpenSSL cannot read it: give whole certificates in PEM",
    ),
    "the key of another certificate": (
        lambda authority, told: path_of(told, "key").write_bytes(authority.issue().key_pem()),
        "--engine-cert CERT and --engine-key KEY: the key is not that of the certificate: give two that belong "
        "together",
    ),
    "an expired certificate": (
        lambda authority, told: replace(told, authority, begins=-2 * DAY, ends=-DAY, usage=FOR_CLIENTS),
        "--engine-cert CERT: certificate has expired: give one that engines take today",
    ),
    "a certificate for servers": (
        lambda authority, told: replace(told, authority, usage=FOR_SERVERS),
        "--engine-cert CERT: unsuitable certificate purpose: give one that engines take today",
    ),
}


def path_of(told: Settings, what: str) -> Path:
    path: Path = getattr(told, f"engine_{what}")
    return path


def replace(told: Settings, authority: Authority, **kinds: Any) -> None:
    authority.issue(**kinds).write(path_of(told, "cert").parent)


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_cannot_be_used_are_refused_with_one_line(case: str, authority: Authority, tmp_path: Path) -> None:
    told = given_files(authority, tmp_path / "secret")
    check_engine_files(told)
    break_it, message = REFUSED[case]
    break_it(authority, told)
    with pytest.raises(ConfigError) as error:
        check_engine_files(told)
    for word in ("ca", "cert", "key"):
        message = message.replace(word.upper(), str(path_of(told, word)))
    assert str(error.value) == message


FILES = st.sampled_from(["ca", "cert", "key"])
PIECES = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([b"-----BEGIN CERTIFICATE-----\n", b"-----END CERTIFICATE-----\n", b"PRIVATE KEY-----", b""]),
    st.tuples(FILES, st.integers(0, 2000), st.integers(0, 2000)),
)


@given(which=FILES, pieces=st.lists(PIECES, max_size=4))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_files_hold_the_last_good_ones_serve_or_the_start_is_refused(
    which: str, pieces: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("trust")
    told = given_files(Authority(folder / "ca.crt"), folder / "secret")
    whole = {name: path_of(told, name).read_bytes() for name in ("ca", "cert", "key")}
    trust = trust_in(told)
    before = trust.door("decode-0", "d").context()
    path_of(told, which).write_bytes(
        b"".join(piece if isinstance(piece, bytes) else cut(whole, piece) for piece in pieces)
    )
    assert trust.watch is not None
    trust.watch.reload()
    problem = problem_in(told)
    assert not problem or problem.startswith("--engine-")
    assert "\n" not in problem
    assert (trust.door("decode-0", "d").context() is before) == bool(problem)


def problem_in(told: Settings) -> str:
    """What a start would say; empty: nothing."""
    try:
        check_engine_files(told)
    except ConfigError as error:
        return str(error)
    return ""


def cut(whole: dict[str, bytes], piece: tuple[str, int, int]) -> bytes:
    name, begin, end = piece
    return whole[name][begin:end]


def test_a_reason_is_logged_once_until_there_is_an_agreement(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[FailureKind] = []
    door = trust_in(given_files(authority, tmp_path / "secret"), counted.append).door("decode-0", "d")
    for _ in range(5):
        door.on_refused("expired")
    door.on_refused("foreign")
    door.on_agreed()
    door.on_refused("foreign")
    assert counted == [FailureKind.ENGINE_TLS_REFUSED] * 7
    assert [line.split("reason=")[1] for line in caplog.text.splitlines()] == ["expired", "foreign", "foreign"]


def test_the_name_is_the_hosts_or_the_one_that_was_given(authority: Authority, tmp_path: Path) -> None:
    told = given_files(authority, tmp_path / "secret")
    assert trust_in(told).door("decode-0", "10.1.2.3").name == "10.1.2.3"
    assert trust_in(told.model_copy(update={"engine_tls_name": "e.svc"})).door("decode-0", "10.1.2.3").name == "e.svc"


def test_without_engines_that_have_tls_nothing_is_read() -> None:
    told = build_settings(prefill_urls=["http://p:1"], decode_urls=["http://d:2"])
    trust = trust_in(told)
    assert trust.watch is None
    assert trust._context is None
