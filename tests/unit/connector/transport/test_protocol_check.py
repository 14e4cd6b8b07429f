"""What a Mooncake's answer says of the protocol that it took."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from patience import PATIENCE_S
from pdcluster_connector.transport.protocol_check import require_taken, taken_problem

HEAD = b"\x09\0\0\0\0\0\0\0\x01"


def answer(**said: object) -> bytes:
    return HEAD + json.dumps({"name": "127.0.0.1:15000", **said}).encode()


@pytest.mark.parametrize(
    ("protocol", "said"),
    [("tcp", {"tcp_proto_version": 2}), ("tcp", {"tcp_proto_version": 3}), ("rdma", {}), ("ascend", {})],
)
def test_the_protocol_that_was_asked_for_is_no_problem(protocol: str, said: dict[str, object]) -> None:
    assert taken_problem(protocol, answer(protocol=protocol, **said)) == ""


@pytest.mark.parametrize(
    ("protocol", "said", "problem"),
    [
        ("rdma", {"protocol": "tcp"}, "transfer_protocol is rdma, and Mooncake took tcp: "),
        ("tcp", {"protocol": "rdma"}, "transfer_protocol is tcp, and Mooncake took rdma: "),
        ("rdma", {"protocol": "barex"}, "transfer_protocol is rdma, and Mooncake took barex: "),
        ("ascend", {"protocol": "ubshmem"}, "transfer_protocol is ascend, and Mooncake took ubshmem: "),
        ("tcp", {"protocol": "tcp", "tcp_proto_version": 1}, "Mooncake speaks version 1 of its TCP protocol"),
        ("tcp", {"protocol": "tcp"}, "Mooncake speaks version 1 of its TCP protocol"),
    ],
)
def test_another_protocol_is_refused_with_both(protocol: str, said: dict[str, object], problem: str) -> None:
    found = taken_problem(protocol, answer(**said))
    assert found.startswith(problem)
    assert "\n" not in found


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + b"{", HEAD + b"[]", HEAD + b"{}", HEAD + b'{"protocol": 7}'])
def test_an_answer_that_says_nothing_is_a_warning(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert taken_problem("rdma", said) == ""
    assert caplog.messages == ["transport protocol unknown wanted=rdma"]


def test_one_that_hangs_up_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        ending = threading.Thread(target=lambda: server.accept()[0].close())
        ending.start()
        require_taken("tcp", host, port)
        ending.join(PATIENCE_S)
    require_taken("tcp", host, port)
    events = [message.partition(" reason=")[0] for message in caplog.messages]
    assert events == ["transport protocol unknown wanted=tcp"] * 2
