"""``python dns.py ADDRESS API_URL CA_FILE TOKEN_FILE``: the cluster's DNS, as far as the product needs it.

Answers A for ``SERVICE.NAMESPACE.svc.cluster.local`` with the Service's cluster address, and says of every other name
that it does not exist: there is no world outside. CoreDNS' place on real clusters; source of truth for the names:
Kubernetes' "DNS-Based Service Discovery", for the bytes: RFC 1035.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
import struct
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

PORT: Final = 53
SUFFIX: Final = ("svc", "cluster", "local")
LIFE_S: Final = 1
"""A client may keep an answer for so long: names of Services come and go in tests."""
CALL_S: Final = 2.0
_A: Final = 1
_IN: Final = 1
_HEADER: Final = struct.Struct("!6H")
_TAIL: Final = struct.Struct("!HHIH")
_NAME_OF_QUESTION: Final = 0xC00C
"""A pointer to the name right behind the header."""


class Code(Enum):
    """What became of a question (RFC 1035, RCODE)."""

    DONE = 0
    NOT_NOW = 2
    NO_SUCH_NAME = 3


@dataclass(frozen=True, slots=True)
class Question:
    """``raw``: its bytes as they came, for the answer repeats them."""

    number: int
    labels: tuple[str, ...]
    kind: int
    raw: bytes


def parse_question(packet: bytes) -> Question:
    """
    Raises:
        ValueError: It is none that we understand.
    """
    if len(packet) < _HEADER.size:
        raise ValueError("shorter than a header")
    number, _, num_questions, *_ = _HEADER.unpack_from(packet)
    if num_questions != 1:
        raise ValueError(f"{num_questions} questions")
    labels, end = _labels(packet, _HEADER.size)
    kind, _ = struct.unpack_from("!HH", packet, end)
    return Question(number, labels, kind, packet[_HEADER.size : end + 4])


def make_answer(question: Question, address: str | None, code: Code) -> bytes:
    """``address``: IPv4, given only when A was asked for; None: the name exists, or ``code`` says why not."""
    flags = 0x8580 | code.value  # an answer, with authority; recursion wished and had
    records = b""
    if address and question.kind == _A:
        packed = ipaddress.IPv4Address(address).packed
        records = struct.pack("!H", _NAME_OF_QUESTION) + _TAIL.pack(_A, _IN, LIFE_S, len(packed)) + packed
    return _HEADER.pack(question.number, flags, 1, 1 if records else 0, 0, 0) + question.raw + records


def service_of(labels: tuple[str, ...]) -> tuple[str, str] | None:
    """Name and namespace: ``tiny-router.default.svc.cluster.local`` is ("tiny-router", "default")."""
    if len(labels) != 5 or labels[2:] != SUFFIX:
        return None
    return labels[0], labels[1]


def _labels(packet: bytes, at: int) -> tuple[tuple[str, ...], int]:
    labels = []
    while size := packet[at]:
        if size > 63:
            raise ValueError("a compressed name in a question")
        labels.append(packet[at + 1 : at + 1 + size].decode("ascii").lower())
        at += 1 + size
    return tuple(labels), at + 1


@dataclass(frozen=True, slots=True)
class Services:
    """Asks the API server anew each time: a question is rare, and an old answer would be a riddle."""

    url: str
    ca_file: Path
    token: str

    def address(self, name: str, namespace: str) -> str | None:
        """None: there is no such Service, or it has no address of its own.

        Raises:
            OSError: The API server does not answer.
        """
        path = f"{self.url}/api/v1/namespaces/{namespace}/services/{name}"
        request = urllib.request.Request(path, headers={"Authorization": f"Bearer {self.token}"})
        context = ssl.create_default_context(cafile=self.ca_file)
        try:
            with urllib.request.urlopen(request, timeout=CALL_S, context=context) as answer:
                found: Mapping[str, str] = json.load(answer)["spec"]
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        address = found.get("clusterIP", "")
        return address if address not in ("", "None") else None


def reply(packet: bytes, services: Services) -> bytes:
    """
    Raises:
        ValueError: See ``parse_question``.
    """
    question = parse_question(packet)
    service = service_of(question.labels)
    try:
        address = services.address(*service) if service else None
    except OSError:
        return make_answer(question, None, Code.NOT_NOW)
    return make_answer(question, address, Code.DONE if address else Code.NO_SUCH_NAME)


def main(address: str, services: Services) -> None:
    """For ever, one question after the other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, PORT))
        while True:
            packet, client = server.recvfrom(4096)
            try:
                server.sendto(reply(packet, services), client)
            except (ValueError, IndexError, struct.error):
                continue  # A stranger's bytes: he hears nothing.


if __name__ == "__main__":
    main(sys.argv[1], Services(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]).read_text().strip()))
