"""The load of each engine in all processes of a router: a file in memory that each of them has mapped.

    head   the next number of a prefill and of a decode engine
    rows   one for each engine: a digest of its key, its number, the tokens of each seat, and whether the seat has it

A process writes its own columns only, without a lock: tokens are an estimate all the same. Rows are taken under a lock
of the file, when engines come. A row that no process has is free. An engine's number is the same in all processes, and
so is its name.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final

from pdcluster_protocol.labels import Role

MAX_ENGINES: Final = 4096
"""Rows. Engines above them are not shared: each process then knows its own load of them alone."""
LOCK_S: Final = 0.02
"""The most that the loop waits for the lock. It is held for a millisecond, unless its holder was stopped just then."""
_WORD_BYTES: Final = 8
_HEAD_WORDS: Final = len(Role)
_ROW_WORDS: Final = 2
"""Digest and number, before the columns."""
_ROLES: Final = list(Role)


class SharedLoads:
    """The table, as one process has it. ``close`` gives back what is left of it."""

    def __init__(self, file: int, num_seats: int, seat: int) -> None:
        """``file``: one that ``make_table`` has made for ``num_seats``; ``close`` closes it. ``seat``: this process's
        column."""
        self._file = file
        self._map = mmap.mmap(self._file, 0)
        self._words = memoryview(self._map).cast("q")
        self._num_seats = num_seats
        self.seat = seat

    def enter(self, role: Role, key: str) -> SharedLoad | None:
        """The row of this engine, which this process has from now on. None: the table is full, or is locked for too
        long. Call ``leave`` at the engine's end."""
        digest = int.from_bytes(blake2b(key.encode(), digest_size=_WORD_BYTES).digest(), "big", signed=True) or 1
        with self._locked() as is_ours:
            row = self._find(digest) if is_ours else None
            if row is None:
                return None
            words = self._words
            if words[row] != digest or not self._is_taken(row):
                number_at = _ROLES.index(role)
                words[row], words[row + 1] = digest, words[number_at]
                words[number_at] += 1
            load = SharedLoad(words, row + _ROW_WORDS, self._num_seats, self.seat, number=words[row + 1])
            load.enter()
            return load

    def forget(self, seat: int) -> bool:
        """The process with ``seat`` has ended, however: it has no tokens, and no rows. Returns False if the table was
        locked for too long: then its rows stay taken until another process with this seat has ended."""
        for row in self._rows():
            self._words[row + _ROW_WORDS + seat] = 0
        with self._locked() as is_ours:
            for row in self._rows() if is_ours else ():
                self._words[row + _ROW_WORDS + self._num_seats + seat] = 0
            return is_ours

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._file)

    def _find(self, digest: int) -> int | None:
        """The engine's row, or a free one."""
        free = None
        for row in self._rows():
            if self._words[row] == digest:
                return row
            if free is None and not self._is_taken(row):
                free = row
        return free

    def _rows(self) -> range:
        return range(_HEAD_WORDS, len(self._words), _ROW_WORDS + 2 * self._num_seats)

    def _is_taken(self, row: int) -> bool:
        has = row + _ROW_WORDS + self._num_seats
        return any(self._words[has : has + self._num_seats])

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether no other process takes or leaves rows meanwhile; False: one has held the lock for too long."""
        is_ours = self._lock()
        try:
            yield is_ours
        finally:
            if is_ours:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(0.0005)
            else:
                return True


class SharedLoad:
    """One engine's row, as one process has it. Event loop only."""

    __slots__ = ("_end", "_has", "_is_left", "_mine", "_start", "_words", "number")

    def __init__(self, words: memoryview[int], start: int, num_seats: int, seat: int, *, number: int) -> None:
        """``start``: the first of the row's columns."""
        self._words = words
        self._start, self._end = start, start + num_seats
        self._mine, self._has = start + seat, start + num_seats + seat
        self._is_left = False
        self.number = number
        """The engine's number among those of its role, the same in all processes."""

    def enter(self) -> None:
        self._words[self._mine], self._words[self._has] = 0, 1

    def tell(self, num_tokens: int) -> None:
        """This process has ``num_tokens`` there. Does nothing after ``leave``: the row may be another engine's."""
        if not self._is_left:
            self._words[self._mine] = num_tokens

    def others(self) -> int:
        """Tokens that the other processes have there."""
        words = self._words
        return sum(words[self._start : self._end]) - words[self._mine]

    def leave(self) -> None:
        """The engine is removed here. Its row is free when no other process has it."""
        self._is_left = True
        self._words[self._mine] = self._words[self._has] = 0


def make_table(num_seats: int, max_engines: int = MAX_ENGINES) -> int:
    """The file of an empty table, in memory."""
    file = os.memfd_create("pdcluster-router-loads")
    os.ftruncate(file, _WORD_BYTES * (_HEAD_WORDS + max_engines * (_ROW_WORDS + 2 * num_seats)))
    return file
