"""What a keeper gives each process, and the settings that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.front.start import seated
from pdcluster_router.processes.seat import SEAT_VARIABLE, Seat, internal_ports, read_seat
from pdcluster_router.settings.router_settings import Settings, build_settings

SEAT = Seat(
    number=5,
    life=7,
    num_seats=8,
    folder=Path("/tmp/a folder"),
    client_file=3,
    internal_file=4,
    calls_file=5,
    host="127.0.0.1",
    port=8000,
    internal_port=8001,
    calls_port=40000,
    loads_file=6,
    word_file=7,
    keeper_file=8,
)


def settings(**given: Any) -> Settings:
    return build_settings(prefill_urls=("http://a:1",), decode_urls=("http://b:1",), **given)


def test_a_process_is_told_its_seat_by_a_variable() -> None:
    assert read_seat({SEAT_VARIABLE: SEAT.encoded()}) == SEAT
    assert read_seat({}) is None


@pytest.mark.parametrize("told", ["{", "{}", SEAT.encoded().replace("40000", '"x"')])
def test_a_seat_of_another_release_is_refused(told: str) -> None:
    with pytest.raises(ConfigError, match="start the router anew"):
        read_seat({SEAT_VARIABLE: told})


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "http://127.0.0.1:40000/v1/metaserver"),
        ({"advertise_url": "http://10.0.0.1:8001"}, "http://10.0.0.1:40000/v1/metaserver"),
        ({"advertise_url": "http://[fd00::1]:8001"}, "http://[fd00::1]:40000/v1/metaserver"),
        ({"host": "10.0.0.5"}, "http://127.0.0.1:40000/v1/metaserver"),
    ],
)
def test_engines_call_the_process_itself(given: dict[str, Any], url: str) -> None:
    assert seated(settings(**given), SEAT).metaserver_url == url


def test_a_process_serves_the_ports_that_it_was_given() -> None:
    given = seated(settings(port=0), SEAT)
    assert (given.port, given.internal_port) == (8000, 40000)
    assert internal_ports(given.internal_port, SEAT) == {40000, 8001}
    assert internal_ports(8001, None) == {8001}
