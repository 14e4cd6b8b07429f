"""Limits how many parts of divided requests run at once. Like a client's request, each part needs connections to
engines, and one call from decode.

Knows no request and no connection.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 4
"""Parts take a quarter of the places of clients at most: a few large requests leave the others for other clients."""


class PartPlaces:
    """The places that parts have taken. One owner."""

    __slots__ = ("_most", "num_taken")

    def __init__(self, num_clients: int) -> None:
        """``num_clients``: how many places clients have. Parts may take a quarter of them."""
        self._most = num_clients // SHARE
        self.num_taken = 0

    def take(self, num_parts: int) -> bool:
        """Whether there are places for so many parts of a request; if so, they are taken until ``give_back``. One of
        the parts uses its client's place."""
        if self.num_taken + num_parts - 1 > self._most:
            return False
        self.num_taken += num_parts - 1
        return True

    def give_back(self, num_parts: int) -> None:
        """A request of so many parts, which had places, has ended. Call it once."""
        self.num_taken -= num_parts - 1
