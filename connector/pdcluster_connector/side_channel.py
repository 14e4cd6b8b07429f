"""The side channel's sockets: ZeroMQ DEALER on prefill, ROUTER on decode.

One thread uses and closes a socket. Sending never waits: a full queue drops the frame, and the sender learns of it by
its deadline, as with any lost message.
"""

from __future__ import annotations

import math
import os
import threading
import uuid
from dataclasses import dataclass
from typing import Final, Self

import zmq

from pdcluster_connector.core.writers import PeerId
from pdcluster_protocol.errors import ConfigError, ProtocolError
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.params import SideChannelAddress
from pdcluster_protocol.secret import Secret
from pdcluster_protocol.side_channel import (
    MAX_FRAME_BYTES,
    Seal,
    ToDecode,
    ToPrefill,
    encode_frame,
    parse_to_decode,
    parse_to_prefill,
    seal_connection,
)

SILENT_S: Final = 15.0
"""A connection counts as lost if decode answers no heartbeat for so long: far longer than a busy machine's delays, far
shorter than a request's deadline."""
_HEARTBEATS: Final = 3
"""Heartbeats in ``SILENT_S``."""


class Wakeup:
    """Lets any thread wake the one thread that polls ``fd``. ``set`` costs about a microsecond and never waits."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._fd_lock = threading.Lock()
        """Guards ``fd``: another file may get the number of a closed descriptor at once."""

    def set(self) -> None:
        """The polling thread wakes up, now or at its next poll. Does nothing after ``close``."""
        with self._fd_lock:
            if not self._is_closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Forget what was set. Polling thread only."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Free the descriptor, after the polling thread has ended."""
        with self._fd_lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)


def start_polling(thread: threading.Thread, wakeup: Wakeup) -> None:
    """Starts the thread that polls ``wakeup``.

    Raises:
        RuntimeError: The process gets no thread more; ``wakeup`` is closed.
    """
    try:
        thread.start()
    except RuntimeError:
        wakeup.close()
        raise


class _Channel:
    def __init__(self, kind: int, wakeup: Wakeup) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._wakeup = wakeup
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(wakeup.fd, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Return when a frame or a wake-up is there, or after ``timeout_s``, up to a millisecond later."""
        # Rounded up: zmq waits in whole milliseconds, and waits of 0 ms in a row burn a core.
        if any(fd == self._wakeup.fd for fd, _ in self._poller.poll(max(0, math.ceil(timeout_s * 1000)))):
            self._wakeup.clear()

    def _receive(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        """Close the socket; frames already queued have 200 ms to leave."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Received:
    """One peer's frame: a message, or the reason why the frame is no message."""

    peer: PeerId
    message: ToDecode | ProtocolError
    num_bytes: int
    """Of all parts that came, also of a message that was refused."""


class PrefillChannel(_Channel):
    """One prefill rank's connection to one decode rank. Lane thread only.

    ZeroMQ connects again by itself and does not report frames that were lost with a connection, so this class watches
    for lost connections. The kernel shows the loss if decode's process ends, ZMTP's heartbeats if its machine fails.
    Decode's ZeroMQ thread answers heartbeats however busy the engine is, until 1,000 frames of a connection lie unread.
    """

    def __init__(
        self,
        address: SideChannelAddress,
        identity: bytes,
        secret: Secret,
        wakeup: Wakeup,
        *,
        silent_s: float = SILENT_S,
    ) -> None:
        """``silent_s``: how long the other end may leave heartbeats unanswered, at least a millisecond."""
        super().__init__(zmq.DEALER, wakeup)
        self._seal = seal_connection(secret, address.boot_id, identity)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        interval_s = silent_s / _HEARTBEATS
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(interval_s * 1000)))
        # ZeroMQ counts this time from the next heartbeat on, hence less one interval.
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int((silent_s - interval_s) * 1000)))
        self._losses = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED, f"inproc://losses-{uuid.uuid4().hex}")
        self._poller.register(self._losses, zmq.POLLIN)
        self._socket.connect(f"tcp://{address.host}:{address.port}")

    def take_loss(self) -> bool:
        """Whether a connection that stood was lost since the last call: the last messages may not have arrived."""
        is_lost = False
        while self._losses.poll(0):
            self._losses.recv_multipart(zmq.NOBLOCK)
            is_lost = True
        return is_lost

    def close(self) -> None:
        self._socket.disable_monitor()
        self._losses.close(0)
        super().close()

    def send(self, message: ToDecode) -> None:
        """Queue one message."""
        self._send([encode_frame(message, self._seal)])

    def receive(self) -> ToPrefill | None:
        """The next message, or None when there is none now.

        Raises:
            ProtocolError: The next frame is not a message of this decode rank, or not of this cluster.
        """
        frames = self._receive()
        return None if frames is None else parse_to_prefill(frames[-1], self._seal)


class DecodeChannel(_Channel):
    """One decode rank's listening socket. Receiver thread only, but another thread makes it at the start."""

    def __init__(self, host: str, port: int, boot_id: BootId, secret: Secret, wakeup: Wakeup) -> None:
        super().__init__(zmq.ROUTER, wakeup)
        self._boot_id = boot_id
        self._secret = secret
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.port = self._bind(host, port)

    def send(self, peer: PeerId, message: ToPrefill) -> None:
        """Queue one message for ``peer``; dropped when the peer is gone."""
        self._send([peer, encode_frame(message, self._seal(peer))])

    def receive(self) -> Received | None:
        """The next message and its sender, or None when there is none now."""
        frames = self._receive()
        if frames is None:
            return None
        peer, num_bytes = PeerId(frames[0]), sum(map(len, frames))
        try:
            return Received(peer, parse_to_decode(frames[-1], self._seal(peer)), num_bytes)
        except ProtocolError as error:
            return Received(peer, error, num_bytes)

    def _seal(self, peer: PeerId) -> Seal:
        return seal_connection(self._secret, self._boot_id, peer)

    def _bind(self, host: str, port: int) -> int:
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"side channel cannot listen on {host}:{port}: {error.strerror}: choose another side_channel_port"
            ) from error
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rsplit(b":", 1)[1])
