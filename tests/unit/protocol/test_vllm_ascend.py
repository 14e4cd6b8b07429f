"""What vllm-ascend's decode engine posts is read as it is meant, or refused with the cure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.layerwise import posted
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.vllm_ascend import parse_layerwise_reservation, request_id_in

POSTED = posted("cmpl-1-0")


def parsed(**changes: Any) -> Any:
    return parse_layerwise_reservation(json.dumps({**POSTED, **changes}).encode())


@pytest.mark.parametrize(
    ("changes", "num_tokens"),
    [
        ({}, 48),
        ({"remote_dcp_size": 2}, 96),
        ({"remote_block_ids": [[1, 2, 3], [7]], "remote_block_size": [16, 4096]}, 48),
        ({"remote_block_ids": [[0, 0, 3], [1, 2, 3]], "remote_block_size": [16, 16]}, 48),
        ({"remote_block_ids": []}, 0),
    ],
)
def test_the_length_of_the_prompt_is_known_to_a_block(changes: dict[str, Any], num_tokens: int) -> None:
    assert parsed(**changes).max_prompt_tokens == num_tokens


def test_what_a_later_release_adds_is_no_reason_to_refuse() -> None:
    assert parsed(remote_colour="blue").remote_port == 6000


@pytest.mark.parametrize("name", sorted(POSTED.keys() - {"token_ids"}))
def test_every_name_that_prefill_reads_must_be_there(name: str) -> None:
    call = {key: value for key, value in POSTED.items() if key != name}
    with pytest.raises(ProtocolError, match=name):
        parse_layerwise_reservation(json.dumps(call).encode())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"remote_block_ids": [[-1]]}, "-1"),
        ({"remote_block_ids": [["a"]]}, "int"),
        ({"remote_block_ids": [[1], [2]]}, "2 block tables for 1 block sizes"),
        ({"remote_block_ids": [[]]}, "no block"),
        ({"remote_block_size": [0]}, "remote_block_size"),
        ({"remote_block_size": 16}, "remote_block_size"),
        ({"remote_port": 70_000}, "remote_port is 70000"),
        ({"remote_tp_size": 0}, "remote_tp_size"),
        ({"remote_cached_tokens": -1}, "remote_cached_tokens"),
        ({"remote_engine_id": ""}, "engine id"),
        ({"remote_host": ""}, "host"),
        ({"do_remote_prefill": True}, "do_remote_decode"),
        ({"do_remote_decode": False}, "do_remote_decode"),
    ],
)
def test_what_no_engine_posts_is_refused_and_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        parsed(**changes)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b'{"request_id":1}', b'{"request_id":"\xff"}', b"[" * 9999])
def test_what_names_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="request_id"):
        request_id_in(body)
    with pytest.raises(ProtocolError):
        parse_layerwise_reservation(body)
