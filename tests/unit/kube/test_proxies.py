"""Which proxy a kubeconfig's API server is asked through: the same as kubectl's, and never one that sees a token."""

from __future__ import annotations

import pytest

from pdcluster_kube.proxies import proxy_to

VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8001", "http://localhost:8001", "https://127.0.0.1:6443", "https://127.9.9.9", "https://[::1]:1",
     "https://localhost:6443"],
)  # fmt: skip
def test_an_api_server_on_this_machine_is_asked_directly(environment: pytest.MonkeyPatch, url: str) -> None:
    environment.setenv("HTTP_PROXY", "http://gate:3128")
    environment.setenv("HTTPS_PROXY", "http://gate:3128")
    assert proxy_to(url, None) is None


@pytest.mark.parametrize(
    ("no_proxy", "expected"),
    [
        ("", "http://gate:3128"),
        ("10.1.2.3", None),
        ("10.0.0.0/8", None),
        (".cluster.local, 192.168.0.0/16,10.1.0.0/16", None),
        ("192.168.0.0/16", "http://gate:3128"),
        ("fd00::/8", "http://gate:3128"),
        ("no/network,10.1.2.9/8", None),
        ("*", None),
    ],
)
def test_no_proxy_names_hosts_and_networks(
    environment: pytest.MonkeyPatch, no_proxy: str, expected: str | None
) -> None:
    environment.setenv("HTTPS_PROXY", "http://gate:3128")
    environment.setenv("NO_PROXY", no_proxy)
    assert proxy_to("https://10.1.2.3:6443", None) == expected


def test_a_name_is_in_no_network(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HTTPS_PROXY", "http://gate:3128")
    environment.setenv("NO_PROXY", "10.0.0.0/8")
    assert proxy_to("https://api", None) == "http://gate:3128"


def test_a_proxy_without_a_scheme_is_one_over_http(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HTTPS_PROXY", "proxy.corp:3128")
    assert proxy_to("https://api", None) == "http://proxy.corp:3128"
    assert proxy_to("https://api", "me:secret@other:3128") == "http://me:secret@other:3128"


def test_the_kubeconfigs_own_proxy_goes_before_the_environments(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HTTPS_PROXY", "http://gate:3128")
    environment.setenv("NO_PROXY", "*")
    assert proxy_to("https://127.0.0.1", "https://own:3128") == "https://own:3128"


def test_a_proxy_that_would_see_the_token_is_refused(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"its proxy-url would see the token that goes to http://127.0.0.1:8001"):
        proxy_to("http://127.0.0.1:8001", "http://gate:3128")


def test_a_proxy_of_another_kind_is_refused_without_its_password(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="its proxy of scheme socks5 cannot be used: name one like") as refused:
        proxy_to("https://api", "socks5://me:secret@gate:1080")
    assert "secret" not in str(refused.value)
