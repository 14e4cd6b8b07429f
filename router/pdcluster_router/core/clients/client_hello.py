"""How large a client's first message of TLS says it is, before OpenSSL makes room for it (RFC 8446, 4 and 5.1).

    records    22 | version | length | part of the message      22 | version | length | next part      ...
    message    1 | length (3) | the rest

OpenSSL takes memory for a whole message once it knows its length, and a ClientHello may claim 128 KiB. Without a bound,
a client that sent nine bytes and waited would hold that memory. OpenSSL gives all other messages less room, or expects
none of them from a client. A client that is told to try again (HelloRetryRequest) sends a second ClientHello.
"""

from __future__ import annotations

from typing import Final

MAX_HELLO_BYTES: Final = 16 << 10
"""The most bytes that a ClientHello may claim. With key shares that resist quantum computers it has 2 KiB, and some
more with a ticket of an old session. OpenSSL's first buffer has 16 KiB, so a smaller bound would save nothing."""

_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_RECORD_HEADER_BYTES: Final = 5
_MESSAGE_HEADER_BYTES: Final = 4
_RETRY_RANDOM: Final = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
"""The random of a ServerHello that asks for a second ClientHello (RFC 8446, 4.1.3)."""
_RANDOM_AT: Final = 11
"""The index of a ServerHello's random: behind the headers of its record and message, and its version."""


class BadHello(Exception):
    """The ClientHello is refused. The message says why."""


class HelloWatch:
    """Follows the records of one ClientHello to its end. Its connection owns it."""

    __slots__ = ("_message_header", "_num_message_bytes_left", "_num_record_bytes_left", "_record_header", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        """Whether the ClientHello is whole, or the message is another one, which OpenSSL refuses."""
        self._record_header = b""
        """The header of the record that comes, as far as it has come."""
        self._message_header = b""
        self._num_record_bytes_left = 0
        self._num_message_bytes_left = 0

    def feed(self, data: bytes | memoryview) -> int:
        """The number of bytes of ``data`` up to the end of the ClientHello. They may be given to OpenSSL.

        Raises:
            BadHello: The ClientHello claims too many bytes, has an empty record, or has more bytes behind it in its
                last record.
        """
        at = 0
        while at < len(data) and not self.is_over:
            at += self._record_begins(data[at:]) if not self._num_record_bytes_left else self._record_goes_on(data[at:])
        return at

    def _record_begins(self, data: bytes | memoryview) -> int:
        part = bytes(data[: _RECORD_HEADER_BYTES - len(self._record_header)])
        self._record_header += part
        if len(self._record_header) == _RECORD_HEADER_BYTES:
            self._num_record_bytes_left = int.from_bytes(self._record_header[3:])
            if self._is_handshake and not self._num_record_bytes_left:
                raise BadHello("an empty record in its ClientHello")
            if not self._num_record_bytes_left:
                self._record_header = b""
        return len(part)

    @property
    def _is_handshake(self) -> bool:
        """Whether the record is of the handshake. OpenSSL judges all others: it skips some before a second
        ClientHello."""
        return self._record_header[0] == _HANDSHAKE

    def _record_goes_on(self, data: bytes | memoryview) -> int:
        num_bytes = min(len(data), self._num_record_bytes_left)
        if self._is_handshake:
            num_bytes = self._message_goes_on(data[:num_bytes])
        self._num_record_bytes_left -= num_bytes
        if not self._num_record_bytes_left:
            self._record_header = b""
        if len(self._message_header) == _MESSAGE_HEADER_BYTES and not self._num_message_bytes_left:
            self._ends()
        return num_bytes

    def _message_goes_on(self, data: bytes | memoryview) -> int:
        """Returns the number of bytes that were of one kind: of the message's header, or of its rest."""
        if len(self._message_header) == _MESSAGE_HEADER_BYTES:
            num_bytes = min(len(data), self._num_message_bytes_left)
            self._num_message_bytes_left -= num_bytes
            return num_bytes
        part = bytes(data[: _MESSAGE_HEADER_BYTES - len(self._message_header)])
        self._message_header += part
        if len(self._message_header) == _MESSAGE_HEADER_BYTES and self._message_header[0] == _CLIENT_HELLO:
            self._num_message_bytes_left = int.from_bytes(self._message_header[1:])
            if self._num_message_bytes_left > MAX_HELLO_BYTES:
                claimed = self._num_message_bytes_left
                raise BadHello(f"a ClientHello of {claimed} bytes, {MAX_HELLO_BYTES} are allowed")
        return len(part)

    def _ends(self) -> None:
        """The message is whole. Raises: BadHello: Its record has more, perhaps a second ClientHello."""
        if self._num_record_bytes_left and self._message_header[0] == _CLIENT_HELLO:
            raise BadHello("more behind its ClientHello in one record")
        self.is_over = True


def asks_again(records: bytes) -> bool:
    """Whether a server that answers with these records wants a second ClientHello."""
    return records[:1] == bytes([_HANDSHAKE]) and records[_RANDOM_AT:].startswith(_RETRY_RANDOM)
