"""Settings and the command line."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.metaserver import Action
from pdcluster_router.__main__ import parse_settings
from pdcluster_router.settings import build_settings

URLS: dict[str, Any] = {"prefill_urls": ["http://p:1"], "decode_urls": ["http://d:2/"]}


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


def test_without_an_advertised_url_it_is_host_and_port() -> None:
    assert build_settings(**URLS).metaserver_url == "http://127.0.0.1:8000/v1/metaserver"
    assert build_settings(**URLS, host="::1").metaserver_url == "http://[::1]:8000/v1/metaserver"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode_urls": []}, "--decode"),
        ({"decode_urls": ["d:2"]}, "http://HOST:PORT"),
        ({"decode_urls": ["https://d:2"]}, "http://HOST:PORT"),
        ({"prefill_urls": ["http://p:1/v1"]}, "http://HOST:PORT only"),
        ({"prefill_urls": ["http://p:x"]}, "--prefill"),
        ({"request_timeout_s": 0}, "--request-timeout"),
        ({"port": 70000}, "--port"),
        ({"host": "0.0.0.0"}, "--advertise-url"),
        ({"max_prefill_attempts": 0}, "--max-prefill-attempts"),
        ({"on_prefill_failure": "perhaps"}, "--on-prefill-failure"),
        ({"max_queued_requests": -1}, "--max-queued-requests"),
    ],
)
def test_what_cannot_work_is_refused_with_the_flag_and_the_cure(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_settings(**{**URLS, **values})
