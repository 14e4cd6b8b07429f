"""PROXY headers: bytes make one, or none, and never an error of ours; where they are cut makes no difference."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from fakes.prefaces import block, header, line
from pdcluster_router.core.clients.proxy_protocol import (
    MAX_V1_BYTES,
    MAX_V2_BYTES,
    SIGNATURE,
    BadPreface,
    Origin,
    Preface,
    read_preface,
)

clients = st.ip_addresses().map(str)
ports = st.integers(0, 65535)
headers = st.one_of(
    st.builds(line, clients, ports),
    st.builds(header, clients, ports, st.binary(max_size=300)),
    st.builds(block, st.binary(max_size=300), st.integers(0, 255), st.sampled_from([0x20, 0x21, 0x22, 0x11])),
    st.binary(max_size=150).map(b"PROXY ".__add__),
    st.binary(max_size=150).map(SIGNATURE.__add__),
    st.binary(max_size=30),
)


def result_of(data: bytes) -> Preface | str | None:
    try:
        return read_preface(data)
    except BadPreface as bad:
        return str(bad)


@settings(max_examples=drawn(3000), deadline=None)
@given(clients, ports, st.binary(max_size=50), st.binary(max_size=50))
def test_a_client_is_told_as_it_was_written(client: str, port: int, tlvs: bytes, rest: bytes) -> None:
    for data in (line(client, port), header(client, port, tlvs)):
        assert read_preface(data + rest) == Preface(len(data), Origin.CLIENT, (client, port))


@settings(max_examples=drawn(3000), deadline=None)
@given(headers, st.binary(max_size=50))
def test_once_bytes_have_said_what_they_are_more_of_them_change_nothing(data: bytes, rest: bytes) -> None:
    results = [result_of((data + rest)[:num]) for num in range(len(data) + len(rest) + 1)]
    said = [result for result in results if result is not None]
    assert len(set(said)) <= 1
    assert None not in results[len(results) - len(said) :]


@settings(max_examples=drawn(1000), deadline=None)
@given(headers, st.binary(min_size=1, max_size=20))
def test_no_bytes_are_waited_for_without_end(data: bytes, rest: bytes) -> None:
    assert result_of(data + rest * MAX_V2_BYTES) is not None
    if not data.startswith(SIGNATURE[: len(data)]):
        assert result_of(data + rest * MAX_V1_BYTES) is not None
