"""Settings that do not fit each other are refused at engine start, with values and cure."""

from __future__ import annotations

from math import inf, nan

import pytest

from pdcluster_connector.core.gathering import MOST_BUFFER_BYTES
from pdcluster_connector.settings import ADAPTER_WAIT_S, CUT_S, parse_settings, require_ipv4
from pdcluster_protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"staging_bytes": 0}, ["staging_bytes is 0", "positive"]),
        (
            {"strip_staging_bytes": MOST_BUFFER_BYTES - 1},
            ["strip_staging_bytes is 1048575", "use 1048576 bytes or more"],
        ),
        ({"strip_staging_bytes": -1}, ["strip_staging_bytes is -1", "0: gather no strips"]),
        (
            {"reshard_timeout_s": 14, "handshake_timeout_s": 1},
            ["reshard_timeout_s is 14 with hold_s 3 and handshake_timeout_s 1", "use 15 or more"],
        ),
        (
            {"handshake_timeout_s": 40},
            ["reshard_timeout_s is 60 with hold_s 3 and handshake_timeout_s 40", "use 84 or more"],
        ),
        ({"reshard_timeout_s": 60, "hold_s": 30}, ["reshard_timeout_s is 60 with hold_s 30", "use 96 or more"]),
        ({"lease_s": 0}, ["lease_s is 0"]),
        ({"lease_s": inf}, ["lease_s is inf", "positive number of seconds"]),
        ({"quarantine_s": nan}, ["quarantine_s is nan", "positive number of seconds"]),
        ({"content_check": "bad"}, ["'bad'", "$.content_check", "use one of off, sampled, full"]),
        ({"sessions": "one"}, ["'one'", "$.sessions", "use one of auto, own, shared"]),
        ({"push": "later"}, ["'later'", "$.push", "use one of layerwise, serial"]),
        (
            {"transfer_devices": ["mlx5_0"]},
            ["transfer_devices is ['mlx5_0'] with transfer_protocol tcp", "or use transfer_protocol rdma"],
        ),
        ({"writes_per_submit": 1025}, ["writes_per_submit is 1025", "use a number in 0..1024"]),
        ({"min_push_tokens": 8193}, ["min_push_tokens is 8193", "use a number in 0..8192", "0: always push"]),
        ({"min_push_tokens": -1}, ["min_push_tokens is -1"]),
        ({"writes_per_submit": -1}, ["writes_per_submit is -1", "use a number in 0..1024"]),
        ({"transfer_protocol": "rdma", "transfer_devices": ["mlx5_0,mlx5_1"]}, ["has 'mlx5_0,mlx5_1'", "use a list"]),
        ({"transfer_protocol": "rdma", "transfer_devices": [""]}, ["has ''", "use a list"]),
        ({"transfer_protocol": "rdma", "transfer_devices": "mlx5_0"}, ["Expected `array`, got `str`", "the keys are"]),
        ({"reshard_timeout": 60}, ["reshard_timeout", "the keys are"]),
    ],
)
def test_what_cannot_work_is_refused(extra: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_settings(extra)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"reshard_timeout_s": 15, "handshake_timeout_s": 5.5},
        {"reshard_timeout_s": 84, "handshake_timeout_s": 40},
        {"reshard_timeout_s": 96, "hold_s": 30},
    ],
)
def test_who_waits_for_staging_memory_waits_longer_than_it_takes_to_win_it_back(extra: dict[str, object]) -> None:
    settings = parse_settings(extra)
    assert settings.staged_s + settings.hold_s + CUT_S <= settings.reshard_wait_s < settings.reshard_timeout_s
    assert settings.handshake_timeout_s + CUT_S <= settings.reshard_wait_s


def test_decode_waits_for_ranks_that_have_not_asked_to_write_longer_than_each_may_take() -> None:
    """A lane shakes hands first, and looks at its adapter then. One that gives up at the end says so itself."""
    settings = parse_settings({"handshake_timeout_s": 7, "lease_s": 2})
    assert settings.ask_s(has_adapters=False) == 7 + 2
    assert settings.ask_s(has_adapters=True) == 7 + ADAPTER_WAIT_S + 2


@pytest.mark.parametrize("host", ["10.1.2.3", "node-7.example", "localhost"])
def test_what_is_no_ipv6_address_is_taken(host: str) -> None:
    require_ipv4(host)


@pytest.mark.parametrize(
    ("extra", "is_gathered"),
    [
        ({}, True),
        ({"strip_staging_bytes": MOST_BUFFER_BYTES}, True),
        ({"strip_staging_bytes": 0}, False),
        ({"transfer_protocol": "rdma"}, False),
        ({"transfer_protocol": "ascend"}, False),
    ],
)
def test_strips_are_gathered_where_that_was_measured(extra: dict[str, object], *, is_gathered: bool) -> None:
    assert parse_settings(extra).gathers_strips is is_gathered
