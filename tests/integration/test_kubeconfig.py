"""A kubeconfig as kubectl would use it, against an API server over TLS: who it is, who we are, and a token's end."""

from __future__ import annotations

import json
import os
import signal
import ssl
from pathlib import Path
from typing import Any, Final

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fakes.api_server import ApiServer, Fault
from fakes.router import until
from integration.authorities import api_behind, make_authority
from pdcluster_kube.access import ClientCertificateError, KubeAccess
from pdcluster_kube.kubeconfig import read_kubeconfig
from pdcluster_kube.reader import ApiStatusError, KubeReader
from pdcluster_kube.session import open_session
from pdcluster_operator.errors import ApiUnavailable
from pdcluster_operator.http_kube import HttpKube
from pdcluster_protocol.errors import ConfigError, Unavailable

pytestmark = pytest.mark.anyio

MANIFEST = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "x", "namespace": "default"}}
LIST = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"


def write(folder: Path, cluster: dict[str, Any], user: dict[str, Any], **context: str) -> str:
    """A kubeconfig of one context ``c``; its path."""
    path = folder / "config"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "k", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", **context}}],
        "current-context": "c",
    }
    path.write_text(json.dumps(document))
    return str(path)


def plugin(folder: Path, script: str) -> dict[str, Any]:
    """A user whose exec plugin is this shell script."""
    program = folder / "plugin"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program)}}


TELLS: Final = """echo '{{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {}}}'"""
"""A plugin's script; the hole is for its status."""


def tells(token_file: Path) -> str:
    return TELLS.format(f"""{{"token": "'$(cat {token_file})'"}}""")


async def listed(path: str) -> bytes:
    return await KubeReader(await read_kubeconfig(path), timeout_s=30).read(LIST)


async def test_authority_client_certificate_and_server_name_are_the_kubeconfigs(tmp_path: Path) -> None:
    ca_file, context = make_authority(tmp_path, "server")
    client_file, _ = make_authority(tmp_path, "client")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(client_file)
    async with api_behind(context) as api:
        url = api.url.replace("127.0.0.1", "localhost")  # the certificate names 127.0.0.1
        cluster = {"server": url, "certificate-authority": ca_file.name, "tls-server-name": "127.0.0.1"}
        user = {"client-certificate": client_file.name, "client-key": "client.key"}
        assert b"10.0.0.1" in await listed(write(tmp_path, cluster, user))
        with pytest.raises(Unavailable):
            await listed(write(tmp_path, cluster, {}))
        del cluster["tls-server-name"]
        with pytest.raises(Unavailable, match="verif"):
            await listed(write(tmp_path, cluster, user))


async def test_a_server_of_another_authority_hears_no_token(tmp_path: Path) -> None:
    theirs, _ = make_authority(tmp_path, "theirs")
    _, context = make_authority(tmp_path, "ours")
    async with api_behind(context) as api:
        path = write(tmp_path, {"server": api.url, "certificate-authority": str(theirs)}, {"token": "secret"})
        with pytest.raises(Unavailable, match="verif"):
            await listed(path)
        assert api.asked == []


async def test_a_plugin_is_asked_again_when_its_token_has_run_out(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("first")
    api = ApiServer(token="first")
    await api.start()
    try:
        config = await read_kubeconfig(write(tmp_path, {"server": api.url}, plugin(tmp_path, tells(token_file))))
        reader = KubeReader(config, timeout_s=30)
        await reader.read(LIST)
        api.token = "second"
        token_file.write_text("second")
        await reader.read(LIST)
    finally:
        await api.stop()
    assert [one.authorization[7:] for one in api.asked] == ["first", "first", "second"]


async def test_a_server_that_goes_on_refusing_does_not_run_the_plugin_with_each_call(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    token_file = tmp_path / "token"
    token_file.write_text("wrong")
    api = ApiServer(token="right")
    await api.start()
    try:
        user = plugin(tmp_path, f"echo >> {asked}; {tells(token_file)}")
        reader = KubeReader(await read_kubeconfig(write(tmp_path, {"server": api.url}, user)), timeout_s=30)
        for _ in range(3):
            with pytest.raises(ApiStatusError, match="401"):
                await reader.read(LIST)
    finally:
        await api.stop()
    assert asked.read_text().count("\n") == 2


async def test_a_log_in_that_fails_is_not_tried_with_each_call(tmp_path: Path) -> None:
    asked, session_file = tmp_path / "asked", tmp_path / "session"
    session_file.touch()
    api = ApiServer(token="right")
    await api.start()
    try:
        user = plugin(tmp_path, f"""echo >> {asked}; test -f {session_file} && {TELLS.format('{"token": "wrong"}')}""")
        reader = KubeReader(await read_kubeconfig(write(tmp_path, {"server": api.url}, user)), timeout_s=30)
        session_file.unlink()
        for _ in range(3):
            with pytest.raises(Unavailable):
                await reader.read(LIST)
    finally:
        await api.stop()
    assert asked.read_text().count("\n") == 2


async def test_a_write_is_sent_again_whole_with_the_renewed_token(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("first")
    api = ApiServer()
    await api.start()
    try:
        config = await read_kubeconfig(write(tmp_path, {"server": api.url}, plugin(tmp_path, tells(token_file))))
        token_file.write_text("second")
        api.faults.append(Fault(lambda asked: asked.is_write, 401))
        async with open_session(config) as session:
            await HttpKube(session, config.url, timeout_s=30, fence=None).create(MANIFEST)
    finally:
        await api.stop()
    first, second = api.asked
    assert (first.authorization, second.authorization) == ("Bearer first", "Bearer second")
    assert first.body == second.body == MANIFEST


async def test_a_request_whose_401_comes_after_anothers_renewal_is_sent_again(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("first")
    config = await read_kubeconfig(write(tmp_path, {"server": "https://api"}, plugin(tmp_path, tells(token_file))))
    sent = config.header()
    token_file.write_text("second")
    assert [await config.renew(sent), await config.renew(sent)] == [True, True]
    assert config.header() == "Bearer second"
    assert not await config.renew("Bearer second")


async def test_the_final_line_break_of_a_tokens_file_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    api = ApiServer(token="abc")
    await api.start()
    try:
        await listed(write(tmp_path, {"server": api.url}, {"tokenFile": "token"}))
    finally:
        await api.stop()


async def test_a_pods_token_with_a_line_break_within_is_blamed_and_not_the_answer(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a\nb")
    access = KubeAccess("http://127.0.0.1:9", token_file=tmp_path / "token")
    with pytest.raises(Unavailable, match="its token has a line break"):
        await KubeReader(access, timeout_s=30).read(LIST)
    async with open_session(access) as session:
        with pytest.raises(ApiUnavailable, match="its token has a line break"):
            await HttpKube(session, access.url, timeout_s=0.1, fence=None).create(MANIFEST)


async def test_an_encrypted_key_is_refused_without_asking_for_its_password(tmp_path: Path) -> None:
    certificate, _ = make_authority(tmp_path, "client")
    key = load_pem_private_key((tmp_path / "client.key").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    (tmp_path / "locked.key").write_bytes(pem)
    user = {"client-certificate": certificate.name, "client-key": "locked.key"}
    with pytest.raises(Unavailable, match=r"locked.key: it is encrypted: decrypt it with `openssl pkey -in"):
        await listed(write(tmp_path, {"server": "https://127.0.0.1:9"}, user))


@pytest.mark.parametrize("user", [{}, {"client-key": "other.key"}, {"client-key": "config"}])
async def test_a_client_certificate_that_has_no_key_is_named(tmp_path: Path, user: dict[str, str]) -> None:
    certificate, _ = make_authority(tmp_path, "client")
    make_authority(tmp_path, "other")
    config = await read_kubeconfig(
        write(tmp_path, {"server": "https://a"}, {"client-certificate": "client.crt", **user})
    )
    with pytest.raises(ClientCertificateError, match=f"it holds no key in PEM form that fits .* {certificate}"):
        config.tls()


async def test_a_certificate_of_a_plugin_is_shown(tmp_path: Path) -> None:
    ca_file, context = make_authority(tmp_path, "server")
    client_file, _ = make_authority(tmp_path, "client")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(client_file)
    given = {"clientCertificateData": client_file.read_text(), "clientKeyData": (tmp_path / "client.key").read_text()}
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": given}
    (tmp_path / "answer").write_text(json.dumps(answer))
    async with api_behind(context) as api:
        cluster = {"server": api.url, "certificate-authority": str(ca_file)}
        assert b"10.0.0.1" in await listed(write(tmp_path, cluster, plugin(tmp_path, f"cat {tmp_path / 'answer'}")))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no login >&2; exit 3", "ended with status 3: no login"),
        ("echo '{}'", "printed no ExecCredential of client.authentication.k8s.io/v1 with a status"),
        ("echo nonsense", "printed no ExecCredential: Expecting value"),
        (TELLS.format('{"expirationTimestamp": "2026-11-23T10:00:00Z"}'), "gave neither a token nor a certificate"),
    ],
)
async def test_a_plugin_that_gives_nothing_is_named_with_what_it_said(tmp_path: Path, script: str, said: str) -> None:
    path = write(tmp_path, {"server": "https://api"}, plugin(tmp_path, script))
    with pytest.raises(ConfigError, match=said) as caught:
        await read_kubeconfig(path)
    assert str(tmp_path / "plugin") in str(caught.value)


async def test_a_plugin_that_hangs_is_ended(tmp_path: Path) -> None:
    path = write(tmp_path, {"server": "https://api"}, plugin(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600"))
    with pytest.raises(ConfigError, match="its exec plugin gave nothing within 20 s"):
        await read_kubeconfig(path, timeout_s=20)  # Long enough for its first line, also on a busy machine.
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not Path(f"/proc/{pid}").exists())


async def test_what_a_plugin_that_hangs_has_started_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no terminal is, as in a pod: else it could not ask its user."""
    monkeypatch.setattr("pdcluster_kube.exec_plugin._has_terminal", lambda: False)
    path = write(tmp_path, {"server": "https://api"}, plugin(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait"))
    with pytest.raises(ConfigError, match="its exec plugin gave nothing within 20 s"):
        await read_kubeconfig(path, timeout_s=20)  # Long enough for its first line, also on a busy machine.
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not is_running(pid))


async def test_a_helper_that_holds_a_plugins_output_open_does_not_hold_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    user = plugin(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; {tells(tmp_path / 'token')}")
    try:
        config = await read_kubeconfig(write(tmp_path, {"server": "https://api"}, user), timeout_s=60)
        assert config.header() == "Bearer t"
        assert is_running(int((tmp_path / "pid").read_text())), "kubectl leaves helpers too"
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("stream", ["1", "2"])
async def test_a_plugin_that_writes_without_end_is_ended_and_named(tmp_path: Path, stream: str) -> None:
    path = write(
        tmp_path, {"server": "https://api"}, plugin(tmp_path, f"echo $$ > {tmp_path}/pid; exec yes >&{stream}")
    )
    with pytest.raises(ConfigError, match=r"its exec plugin .*/plugin was ended, for it wrote more than 1048576 bytes"):
        await read_kubeconfig(path, timeout_s=60)
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    """A process that nobody has waited for yet has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_plugin_that_is_not_installed_is_named(tmp_path: Path) -> None:
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-login"}}
    with pytest.raises(ConfigError, match="its exec plugin no-such-login cannot be run: No such file or directory"):
        await read_kubeconfig(write(tmp_path, {"server": "https://api"}, user))


@pytest.mark.parametrize(
    ("cluster", "user", "said"),
    [
        ({"server": "http://10.0.0.1"}, {}, "would send the token in the clear"),
        ({}, {}, "is not a URL|localhost"),
        (
            {"server": "https://a"},
            {"auth-provider": {"name": "oidc", "config": {"id-token": "a.e30.c"}}},
            "exec plugin",
        ),
        ({"server": "https://a", "certificate-authority": "gone"}, {}, "gone"),
    ],
)
async def test_what_would_not_be_safe_or_is_not_there_is_refused(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        await read_kubeconfig(write(tmp_path, cluster, user))


async def test_contexts_of_several_files_are_found_and_the_namespace_is_the_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    first = write(tmp_path, {"server": "https://one"}, {}, namespace="team")
    second = Path(write(other, {"server": "https://two"}, {}))
    second.write_text(second.read_text().replace('"name": "c"', '"name": "d"').replace('"name": "k"', '"name": "l"')
                      .replace('"cluster": "k"', '"cluster": "l"'))  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", f"{first}:{second}:{tmp_path / 'none'}")
    current = await read_kubeconfig(context="c")
    assert (current.url, current.namespace) == ("https://one", "team")
    named = await read_kubeconfig(context="d")
    assert (named.url, named.namespace) == ("https://two", "default")
    with pytest.raises(ConfigError, match="nowhere"):
        await read_kubeconfig(context="nowhere")


async def test_without_a_kubeconfig_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no kubeconfig ~/.kube/config: name one with --kubeconfig"):
        await read_kubeconfig()


@pytest.mark.parametrize("text", ["", "[]", "{", "a: b", "clusters: 7\ncontexts: x\ncurrent-context: y"])
async def test_what_is_no_kubeconfig_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigError, match="kubeconfig") as caught:
        await read_kubeconfig(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("no_proxy", "expected"), [("", "http://gate:3128"), ("api", None)])
async def test_the_proxy_is_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: str, expected: str | None
) -> None:
    monkeypatch.setenv("https_proxy", "http://gate:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert (await read_kubeconfig(write(tmp_path, {"server": "https://api"}, {}))).proxy == expected
