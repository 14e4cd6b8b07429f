"""Decides when a silent stream gets a comment, so that no proxy on the way to the client takes it for dead.

A stream is looked at twice in each ``keep_alive_s``. A comment is due at the second look in a row that finds no new
byte. A look that finds new bytes counts as the first, since they may have come right after the look before it:

    look     .    1    2    3    4    5    6    7
    bytes    |                  |  |
    comment            :         (none)    :         2: nothing since the beginning;  6: nothing since just after 4

So a client waits for ``keep_alive_s`` at most. A first comment comes after exactly ``keep_alive_s``: until then an
error can have a status of its own. Knows no clock and no stream. ``sse.py`` knows where a comment would tear an event.
"""

from __future__ import annotations

from typing import Final

COMMENT: Final = b": keep-alive\n\n"
"""Not an event: its colon makes the line a comment, the blank line ends a block without data (WHATWG HTML, 9.2.6)."""
LOOKS: Final = 2
"""Looks in each ``keep_alive_s``."""


class Silence:
    """How long one stream has been silent, in looks. Owned by the object that looks at the stream."""

    __slots__ = ("_num_bytes", "_num_looks")

    def __init__(self) -> None:
        """The stream begins now."""
        self._num_bytes = 0
        self._num_looks = 0

    def is_comment_due(self, num_bytes: int, *, may_comment: bool) -> bool:
        """One more look: whether to write a comment now. While ``may_comment`` is False, a due comment stays due until
        bytes move.

        ``num_bytes``: the bytes that have gone to the client so far, without comments.
        """
        has_moved = num_bytes != self._num_bytes
        self._num_bytes = num_bytes
        self._num_looks = 1 if has_moved else min(LOOKS, self._num_looks + 1)
        if self._num_looks < LOOKS or not may_comment:
            return False
        self._num_looks = 0
        return True
