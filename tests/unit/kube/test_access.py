"""What a pod is told of its API server, and which URLs a token may be sent to."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster_kube.access import (
    AuthoritiesError,
    KubeAccess,
    PodFacts,
    checked_api_url,
    checked_header,
    read_pod,
    tls_context,
)


def test_outside_of_a_pod_nothing_is_known(tmp_path: Path) -> None:
    found = read_pod({"KUBERNETES_SERVICE_HOST": ""}, tmp_path / "none")
    assert found == PodFacts()
    assert found.access is None
    assert found.as_settings() == {}


def test_a_pod_without_a_token_still_knows_where_the_api_server_is(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert read_pod(environ, tmp_path).as_settings() == {"kube_api": "https://10.96.0.1:6443"}


def test_a_pod_knows_its_files_and_its_namespace(tmp_path: Path) -> None:
    for name in ("ca.crt", "token", "namespace"):
        (tmp_path / name).write_text(f"{name}\n")
    found = read_pod({"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path)
    assert found.access == KubeAccess("https://[fd00::1]:443", tmp_path / "ca.crt", tmp_path / "token")
    assert found.namespace == "namespace"


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://api:6443/", "https://api:6443"),
        ("https://gate/k8s/clusters/c-1/", "https://gate/k8s/clusters/c-1"),
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("http://[::1]:8001", "http://[::1]:8001"),
    ],
)
def test_a_url_is_kept_without_the_slash_at_its_end(url: str, kept: str) -> None:
    assert checked_api_url(url) == kept


@pytest.mark.parametrize(
    "url",
    [
        "api:6443",
        "ftp://api",
        "https://",
        "https://api?x=1",
        "https://api#x",
        "https://api:99999",
        "https://api:abc",
        "https://a b",
        "https://api:0",
    ],
)
def test_what_is_no_url_of_an_api_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL like https://HOST:PORT"):
        checked_api_url(url)


@pytest.mark.parametrize(
    "url", ["https://me:s3cret@h:6443", "https://u:s3#cret@h:6443", "https://:s3/cret@h", "https://me@h"]
)
def test_a_password_in_a_url_is_refused_and_not_told(url: str) -> None:
    with pytest.raises(ValueError, match="has a user name or password in it: leave it out") as refused:
        checked_api_url(url)
    assert "cret" not in str(refused.value)


def test_a_token_is_never_sent_in_the_clear() -> None:
    with pytest.raises(ValueError, match="would send the token in the clear"):
        checked_api_url("http://10.0.0.1:8080")


def test_a_header_loses_the_final_line_break_of_a_tokens_file() -> None:
    assert checked_header("Bearer abc\n") == "Bearer abc"
    assert checked_header("") == ""


@pytest.mark.parametrize("header", ["Bearer a\nb", "Bearer a\r\nHost: b", "Bearer \0"])
def test_a_header_that_would_end_its_line_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match="its token has a line break") as refused:
        checked_header(header)
    assert header not in str(refused.value)


def test_authorities_that_are_not_there_are_refused_by_the_files_name(tmp_path: Path) -> None:
    with pytest.raises(AuthoritiesError) as refused:
        tls_context(tmp_path / "ca.crt")
    assert str(refused.value) == (
        f"the API server's authorities {tmp_path}/ca.crt cannot be used (No such file or directory): name a file of "
        "certificates in PEM form"
    )


def test_a_file_without_a_certificate_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(AuthoritiesError, match=r"ca.crt cannot be used \(it holds no certificate in PEM form\)"):
        tls_context(tmp_path / "ca.crt")
