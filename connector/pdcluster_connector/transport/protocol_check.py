"""Asks a Mooncake engine which protocol it took, as a peer does before its first write.

Mooncake's Python API does not tell the protocol. Peers ask at the engine's port, and choose their transport by the
answer:

    us to it    length u64 | 1 | {}                                    length: of what follows
    it to us    length u64 | 1 | {"protocol": "tcp", "tcp_proto_version": 2, ...}

Source of truth: ``SocketHandShakePlugin`` and ``TransferMetadata::encodeSegmentDesc`` of v0.3.12.post1 and later, and
the answer of mooncake-transfer-engine-non-cuda 0.3.13.post1 (``tests/contract/test_mooncake.py``).
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import sys
import time
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.launch import TransferProtocol

_LOG: Final = logging.getLogger("vllm.pdcluster.transport")
_METADATA: Final = 1
_ACKNOWLEDGES: Final = 2
"""From this version of Mooncake's TCP protocol on, a write is done only when its bytes have arrived."""
_ANSWER_S: Final = 10.0
"""Mooncake answers all peers in one thread, which a silent peer holds for 5 s."""
_MOST_BYTES: Final = 1 << 20
_LENGTH: Final = 8
"""Bytes of the length that an answer begins with."""
_HEAD: Final = struct.Struct("=QB")


def require_taken(protocol: str, host: str, port: int) -> None:
    """The engine at ``port`` took ``protocol``. Waits for the engine's answer (0.2 ms).

    An answer that is missing, or names no protocol, is only logged.

    Raises:
        ConfigError: The engine took another protocol, or TCP without acknowledgements.
    """
    try:
        answer = _ask(host, port)
    except OSError as error:
        _LOG.warning("transport protocol unknown wanted=%s reason=%s", protocol, error)
        return
    if problem := taken_problem(protocol, answer):
        raise ConfigError(problem)


def taken_problem(protocol: str, answer: bytes) -> str:
    """The fault of the protocol that ``answer`` names; empty: it has none, or ``answer`` names no protocol."""
    try:
        said = json.loads(answer[_HEAD.size :])
    except ValueError:
        said = None
    taken = said.get("protocol") if isinstance(said, dict) else None
    if not isinstance(taken, str):
        _LOG.warning("transport protocol unknown wanted=%s", protocol)
        return ""
    if taken != protocol:
        return (
            f"transfer_protocol is {protocol}, and Mooncake took {taken}: install Mooncake's build for this device, or "
            f"use transfer_protocol {taken} on all engines"
        )
    version = said.get("tcp_proto_version", 1)
    if protocol == TransferProtocol.TCP and version < _ACKNOWLEDGES:
        return (
            f"Mooncake speaks version {version} of its TCP protocol, which does not say when bytes have arrived, "
            f"{_ACKNOWLEDGES} is needed: install Mooncake 0.3.12.post1 or later"
        )
    return ""


def _ask(host: str, port: int) -> bytes:
    question = b"{}"
    deadline = time.monotonic() + _ANSWER_S
    with socket.create_connection((host, port), _ANSWER_S) as link:
        link.sendall(_HEAD.pack(1 + len(question), _METADATA) + question)
        answer = b""
        while len(answer) < _MOST_BYTES:
            link.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (piece := link.recv(1 << 16)):
                break
            answer += piece
            if len(answer) >= _LENGTH and len(answer) >= _LENGTH + int.from_bytes(answer[:_LENGTH], sys.byteorder):
                break
    return answer
