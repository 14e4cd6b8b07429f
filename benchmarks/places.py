"""Where the processes of a benchmark live: this machine, or the two ends of a ``link.py`` link. Waits for nothing.

prefill's place                       decode's place (and the client's)
  loopback, or End.A   ---- link ----   loopback, or End.B
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from benchmarks import raw_socket
from benchmarks.link import End, Link, open_link

LINKS: Final = {"loopback": "loopback", "1gbit": "1 Gbit/s", "2gbit": "2 Gbit/s"}
"""What ``--links`` takes and how tables name it; all but loopback are tc's spelling of a rate."""
_LOOPBACK: Final = "127.0.0.1"

Inside = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where processes live: their address as seen by the other place, what they listen on, how to start them there."""

    host: str
    bind_host: str
    device: str
    """Network device by which the other place is reached."""
    inside: Inside
    """For sockets."""
    starting: Inside
    """For processes."""


LOCAL: Final = Place(_LOOPBACK, _LOOPBACK, "lo", nullcontext, nullcontext)


@dataclass(frozen=True, slots=True)
class Places:
    """Both ends, and the link between them if there is one."""

    prefill: Place
    decode: Place
    link: Link | None

    @property
    def path(self) -> raw_socket.Path:
        """For a plain stream along the way that KV takes."""
        return raw_socket.Path(self.decode.host, self.prefill.inside, self.decode.inside)

    def set_rate(self, name: str) -> None:
        """The link has this rate from now on; loopback has none.

        Raises:
            LinkError: tc refuses.
        """
        if self.link is not None:
            self.link.set_rate(name)


@contextmanager
def open_places(link: str) -> Iterator[Places]:
    """Both places of one of ``LINKS``. At the end the link is gone, with what still runs in it.

    Raises:
        LinkError: We are not root, iproute2 is missing, or the kernel cannot do it.
    """
    if link == "loopback":
        yield Places(LOCAL, LOCAL, None)
        return
    with open_link(link) as slow:
        yield Places(_end(slow, End.A), _end(slow, End.B), slow)


def share_places(links: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Links that can share their processes: those between namespaces differ in their rate only."""
    slow = tuple(link for link in links if link != "loopback")
    if "loopback" in links:
        yield ("loopback",)
    if slow:
        yield slow


def _end(link: Link, end: End) -> Place:
    return Place(end.value, "0.0.0.0", end.device, lambda: link.inside(end), lambda: link.starting(end))
