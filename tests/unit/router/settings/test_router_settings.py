"""Settings and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.metaserver import Action
from pdcluster_router.__main__ import parse_settings
from pdcluster_router.settings.forms import Discovery
from pdcluster_router.settings.router_settings import build_settings

URLS: dict[str, Any] = {"prefill_urls": ["http://p:1"], "decode_urls": ["http://d:2/"]}
FAR: dict[str, Any] = {"prefill_urls": ["https://p:1"], "decode_urls": ["https://d:2"]}


def test_flags_become_settings() -> None:
    flags = ["--prefill", "http://p:1", "--prefill", "http://p:2", "--decode", "http://d:3/", "--port", "9"]
    settings = parse_settings([*flags, "--request-timeout", "5", "--advertise-url", "http://me:9"])
    assert settings.prefill_urls == ("http://p:1", "http://p:2")
    assert settings.decode_urls == ("http://d:3",)
    assert (settings.port, settings.request_timeout_s) == (9, 5.0)
    assert settings.metaserver_url == "http://me:9/v1/metaserver"


def test_flags_about_failures_become_settings() -> None:
    flags = ["--max-prefill-attempts", "5", "--max-decode-attempts", "1", "--on-prefill-failure", "fail"]
    flags += ["--max-prefill-backlog-tokens", "1000", "--max-queued-requests", "0", "--queue-timeout", "0.5"]
    settings = parse_settings(["--prefill", "http://p:1", "--decode", "http://d:3", *flags, "--prefill-timeout", "9"])
    assert (settings.max_prefill_attempts, settings.max_decode_attempts) == (5, 1)
    assert settings.on_prefill_failure is Action.FAIL
    assert (settings.max_prefill_backlog_tokens, settings.max_queued_requests) == (1000, 0)
    assert (settings.queue_timeout_s, settings.prefill_timeout_s) == (0.5, 9.0)


def test_without_flags_failures_are_tried_again_and_then_recomputed() -> None:
    settings = build_settings(**URLS)
    assert (settings.max_prefill_attempts, settings.max_decode_attempts) == (3, 2)
    assert settings.on_prefill_failure is Action.RECOMPUTE


def test_without_an_advertised_url_it_is_host_and_internal_port() -> None:
    assert build_settings(**URLS).metaserver_url == "http://127.0.0.1:8001/v1/metaserver"
    assert build_settings(**URLS, host="::1").metaserver_url == "http://[::1]:8001/v1/metaserver"
    assert build_settings(**URLS, internal_port=9).metaserver_url == "http://127.0.0.1:9/v1/metaserver"
    tls = build_settings(**URLS, internal_tls_cert="a", internal_tls_key="b")
    assert tls.metaserver_url == "https://127.0.0.1:8001/v1/metaserver"


def test_engines_may_have_tls_one_by_one_or_all_where_a_flag_says_so() -> None:
    mixed = build_settings(prefill_urls=["https://p:1"], decode_urls=["http://d:2"])
    assert (mixed.prefill_urls, mixed.decode_urls) == (("https://p:1",), ("http://d:2",))
    build_settings(prefill_urls=["https://p:1"], decode_urls=["https://d:2"], engine_ca="a")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode_urls": []}, "--decode: name at least one"),
        ({"prefill_urls": [], "decode_urls": []}, "--prefill and --decode: name at least one"),
        ({"decode_urls": ["d:2"]}, "http://HOST:PORT"),
        ({"decode_urls": ["ftp://d:2"]}, "http://HOST:PORT"),
        ({"prefill_urls": ["http://p:1/v1"]}, "http://HOST:PORT only"),
        ({"prefill_urls": ["http://p:x"]}, "--prefill"),
        ({"decode_urls": [f"http://{'d' * 64}.ns.svc:1"]}, "has no host name"),
        ({"decode_urls": ["http://decode..svc:1"]}, "has no host name"),
        ({"request_timeout_s": 0}, "--request-timeout"),
        ({"port": 70000}, "--port"),
        ({"port": 8000, "internal_port": 8000}, "--internal-port 8000 is the clients' port too: choose another one"),
        ({"port": 65535}, "--internal-port: there is none after --port 65535, name one"),
        ({"internal_port": -1}, "--internal-port"),
        ({"engine_api_key": "a b"}, "VLLM_API_KEY"),
        ({"model_aliases": "llama"}, "--model-alias: 'llama' names no alias: write NAME=MODEL"),
        ({"model_aliases": ["=m"]}, "--model-alias: '=m' names no alias"),
        ({"model_aliases": ["a=b", ""]}, "--model-alias: '' names no alias"),
        ({"model_aliases": ["a=b", "a=c"]}, "--model-alias a=b and a=c: leave one of them out"),
        ({"model_aliases": ["a=b", "a=b"]}, "--model-alias a=b and a=b: leave one of them out"),
        ({"model_aliases": ["a=a"]}, "--model-alias a=a and a=a: a is an alias itself: give a the name of a model"),
        ({"model_aliases": ["a=b", "b=c"]}, "--model-alias a=b and b=c: b is an alias itself: give a the name of a m"),
        ({"model_aliases": ["a=b", "b=a"]}, "--model-alias a=b and b=a: b is an alias itself"),
        ({"host": "0.0.0.0"}, "--advertise-url"),
        ({"advertise_url": "http://fd00::7:8000"}, r"--advertise-url: .*'http://fd00::7:8000'.*IPv4 first"),
        ({"max_prefill_attempts": 0}, "--max-prefill-attempts"),
        ({"on_prefill_failure": "perhaps"}, "--on-prefill-failure"),
        ({"max_queued_requests": -1}, "--max-queued-requests"),
        ({"trusted_proxies": "10.0.0.1/8"}, "--trusted-proxies: '10.0.0.1/8' has bits .* write 10.0.0.0/8"),
        ({"trusted_proxies": ["10.0.0.0/8", "::/0"]}, "--trusted-proxies: '::/0' is every address"),
        ({"trusted_proxies": "10.0.0.0/8,"}, "--trusted-proxies: '' is no network"),
        ({"trusted_proxies": 7}, "--trusted-proxies"),
        ({"forwarded_header": "x-real-ip"}, "--forwarded-header"),
        ({"proxy_protocol": "required"}, "--proxy-protocol is required and --trusted-proxies not given"),
        ({"engine_ca": "a"}, "--engine-ca: engines are asked by https then, and http://p:1 is not"),
        (
            {"prefill_urls": ["https://p:1"], "engine_cert": "a", "engine_key": "b", "engine_tls_name": "e.svc"},
            "--engine-cert and --engine-tls-name: engines are asked by https then, and http://d:2 is not",
        ),
        ({**FAR, "engine_tls_name": "engines..svc"}, "--engine-tls-name is '.*': it should match pattern"),
        ({**FAR, "engine_tls_name": "e" * 64}, "--engine-tls-name is '.*': it should match pattern"),
        (
            {**FAR, "engine_tls_name": "e" + ".svc" * 64},
            "--engine-tls-name is '.*': it should have at most 253 characters",
        ),
        ({"engine_cert": "a"}, "--engine-cert is a and --engine-key is not given: give both files, or neither"),
        ({"internal_tls_key": "a"}, "--internal-tls-cert is not given and --internal-tls-key is a: give both"),
        ({"internal_client_ca": "a"}, "--internal-client-ca: it needs --internal-tls-cert and --internal-tls-key"),
        (
            {"internal_tls_cert": "a", "internal_tls_key": "b", "advertise_url": "http://r:8001"},
            "--advertise-url http://r:8001: with --internal-tls-cert it is https",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_flag_and_the_cure(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_settings(**{**URLS, **values})


@pytest.mark.parametrize(
    "flags",
    [
        ["--trusted-proxies=10.0.0.0/8,192.0.2.7", "--trusted-proxies", "2001:db8::/32"],
        ["--trusted-proxies", "10.0.0.0/8, ::ffff:192.0.2.7 , 2001:DB8:0::/32"],
    ],
)
def test_proxies_are_named_with_commas_or_one_by_one(flags: list[str]) -> None:
    named = ["--prefill", "http://p:1", "--decode", "http://d:2"]
    trusted = ("10.0.0.0/8", "192.0.2.7/32", "2001:db8::/32")
    assert parse_settings([*named, *flags]).trusted_proxies == trusted
    environ = {"PDCLUSTER_TRUSTED_PROXIES": "10.0.0.0/8,192.0.2.7,2001:db8::/32"}
    assert parse_settings(named, environ).trusted_proxies == trusted
    assert parse_settings([*named, "--trusted-proxies", "::1"], environ).trusted_proxies == ("::1/128",)


def test_an_ipv6_address_in_brackets_is_one() -> None:
    assert build_settings(**{**URLS, "advertise_url": "http://[fd00::7]:8000"}).advertise_url == "http://[fd00::7]:8000"


FOUND = ["--discovery", "kubernetes", "--cluster", "qwen"]
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def service_account(tmp_path: Path) -> Path:
    for name, text in {"ca.crt": "pem", "token": "t", "namespace": "models\n"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_in_a_pod_only_the_cluster_must_be_named(service_account: Path) -> None:
    settings = parse_settings(FOUND, IN_POD, service_account)
    assert settings.discovery is Discovery.KUBERNETES
    assert (settings.namespace, settings.cluster) == ("models", "qwen")
    assert settings.kube_api == "https://10.96.0.1:443"
    assert (settings.kube_ca_file, settings.kube_token_file) == (service_account / "ca.crt", service_account / "token")


def test_an_api_server_with_an_ipv6_address_is_a_url_too(service_account: Path) -> None:
    settings = parse_settings(FOUND, {**IN_POD, "KUBERNETES_SERVICE_HOST": "fd00::1"}, service_account)
    assert settings.kube_api == "https://[fd00::1]:443"


def test_an_api_server_that_is_named_never_gets_the_pods_own_token(service_account: Path) -> None:
    settings = parse_settings([*FOUND, "--kube-api", "https://elsewhere"], IN_POD, service_account)
    assert (settings.kube_api, settings.namespace) == ("https://elsewhere", "models")
    assert (settings.kube_ca_file, settings.kube_token_file) == (None, None)


def test_flags_win_over_what_the_pod_is_told(service_account: Path) -> None:
    flags = [*FOUND, "--namespace", "other", "--kube-token-file", "/t", "--watch-timeout", "7", "--kube-timeout", "3"]
    settings = parse_settings(flags, IN_POD, service_account)
    assert (settings.namespace, settings.kube_token_file) == ("other", Path("/t"))
    assert (settings.watch_timeout_s, settings.kube_timeout_s) == (7, 3.0)


def test_engines_that_are_named_need_nothing_of_kubernetes(service_account: Path) -> None:
    settings = parse_settings(["--prefill", "http://p:1", "--decode", "http://d:1"], IN_POD, service_account)
    assert (settings.discovery, settings.kube_api, settings.namespace) == (Discovery.STATIC, None, None)


KUBERNETES: dict[str, Any] = {
    "discovery": "kubernetes",
    "namespace": "ns",
    "cluster": "c",
    "kube_api": "https://10.96.0.1",
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cluster": None}, "--cluster: --discovery kubernetes needs it"),
        ({"kube_api": None, "namespace": None}, "--namespace and --kube-api"),
        ({"prefill_urls": ["http://p:1"]}, "--prefill: engines are found, not named"),
        ({"kube_api": "http://10.96.0.1"}, "--kube-api.*in the clear"),
        ({"kube_api": "10.96.0.1:443"}, "--kube-api.*https://HOST:PORT"),
        ({"kube_api": "https://h?x=1"}, "--kube-api.*https://HOST:PORT"),
        ({"cluster": "a,b in (c)"}, "--cluster"),
        ({"namespace": "../x"}, "--namespace"),
        ({"watch_timeout_s": 0}, "--watch-timeout"),
    ],
)
def test_a_discovery_that_cannot_work_is_refused_with_the_flag_and_the_cure(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_settings(**{**KUBERNETES, **values})


def test_plain_http_is_for_loopback() -> None:
    assert build_settings(**{**KUBERNETES, "kube_api": "http://127.0.0.1:8001/"}).kube_api == "http://127.0.0.1:8001"


def test_aliases_come_by_flags_or_by_their_variable() -> None:
    urls = ["--prefill", "http://p:1", "--decode", "http://d:3"]
    flags = ["--model-alias", "gpt-4=llama", "--model-alias", "odd=a=b, c=org/m:v1"]
    assert parse_settings([*urls, *flags]).models_by_alias == {"gpt-4": "llama", "odd": "a=b", "c": "org/m:v1"}
    told = {"PDCLUSTER_MODEL_ALIASES": "gpt-4=llama,fast=qwen"}
    assert parse_settings(urls, told).models_by_alias == {"gpt-4": "llama", "fast": "qwen"}
    assert parse_settings([*urls, *flags], told).models_by_alias["odd"] == "a=b"
    assert parse_settings(urls).models_by_alias == {}
