"""Questions between the processes of one router: a Unix socket for each, in a folder of their own.

    LIFE.sock   where the process with this life answers
    LIFE.last   its metrics as it told them last, for when it has ended; no other process writes there
    ended.last  those of several that have ended: their lives, then the sum of their counts

A question is a line of JSON, its answer is the length in eight bytes and then the bytes. A process that does not answer
within ``ANSWER_S`` is left out of a page; its counts are taken as it told them last, so no counter falls.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from pdcluster_router.core.processes.sums import counts_in, summed

logger = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
"""Seconds for the answer of one process: above any stall of its loop, and well below a scrape's time limit of 10 s."""
MAX_LIVES_APART: Final = 16
"""More processes that have ended are added up in one file."""
_LENGTH_BYTES: Final = 8
_MAX_QUESTION_BYTES: Final = 16 << 10
METRICS: Final = "metrics"
_ENDED: Final = "ended.last"

OwnPage: TypeAlias = Callable[[str, str], bytes]
"""The answer of one process to a question: the page's name and its argument."""


class Siblings:
    """The other processes, and the socket at which this one answers them. Event loop only."""

    def __init__(self, folder: Path, life: int, own_page: OwnPage, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._folder = folder
        self._life = life
        self._own_page = own_page
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Answers from now on. Where the folder is gone, no other is asked and none can ask."""
        try:
            self._server = await asyncio.start_unix_server(
                self._answer, self._folder / f"{self._life}.sock", limit=_MAX_QUESTION_BYTES
            )
        except OSError as error:
            logger.warning("pages have this process alone folder=%s reason=%s", self._folder, error)

    async def close(self) -> None:
        """Answers no more. Its counts stay readable."""
        self._tell(METRICS, "")
        (self._folder / f"{self._life}.sock").unlink(missing_ok=True)
        if self._server is not None:
            self._server.close()

    async def ask_all(self, page: str, argument: str = "") -> list[bytes]:
        """The answers of all processes that answer, this one's first."""
        others = await asyncio.gather(*(self._ask(life, page, argument) for life in self._others()))
        return [self._tell(page, argument), *(answer for answer in others if answer is not None)]

    async def metrics(self) -> bytes:
        """The metrics of all processes, and the counts of those that have ended."""
        lives = self._others()
        answers = await asyncio.gather(*(self._ask(life, METRICS, "") for life in lives))
        told = {life: answer for life, answer in zip(lives, answers, strict=True) if answer is not None}
        told[self._life] = self._tell(METRICS, "")
        running, ended = counted_once(self._folder, told)
        return (await asyncio.to_thread(summed, [one.decode() for one in running], ended)).encode()

    def _tell(self, page: str, argument: str) -> bytes:
        """The page of this process. Metrics that it tells stay readable after its end."""
        told = self._own_page(page, argument)
        if page == METRICS:
            with suppress(OSError):  # A full disk, or the keeper was killed and the folder is gone.
                write_whole(self._folder / f"{self._life}.last", told)
        return told

    def _others(self) -> list[int]:
        lives = [int(path.stem) for path in self._folder.glob("*.sock")]
        return sorted(life for life in lives if life != self._life)

    async def _ask(self, life: int, page: str, argument: str) -> bytes | None:
        """None: the process does not answer."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._answer_s):
                reader, writer = await asyncio.open_unix_connection(self._folder / f"{life}.sock")
                writer.write(msgspec.json.encode((page, argument)) + b"\n")
                num_bytes = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
                return await reader.readexactly(num_bytes)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.warning("another process does not answer page=%s life=%d reason=%r", page, life, error)
            return None
        finally:
            if writer is not None:
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._answer_s):
                page, argument = msgspec.json.decode(await reader.readline(), type=tuple[str, str])
                answer = self._tell(page, argument)
                writer.write(len(answer).to_bytes(_LENGTH_BYTES, "big") + answer)
                await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: of msgspec, or of a line that is too long.
            logger.warning("another process was not answered reason=%r", error)
        finally:
            writer.close()


def counted_once(folder: Path, told: Mapping[int, bytes]) -> tuple[list[bytes], list[str]]:
    """The metrics of processes that run, by their lives in ``told``, and the counts of those that have ended or do not
    answer. One that has ended since it told its metrics counts with the sum that has it already."""
    added, counts = _read_ended(folder)
    apart = [path for path in folder.glob("*.last") if path.name != _ENDED]
    left = [path for path in apart if int(path.stem) not in told.keys() | added]
    running = [metrics for life, metrics in told.items() if life not in added]
    return running, [*counts, *(text for path in left if (text := _read(path)))]


def add_up_ended(folder: Path, running: set[int]) -> None:
    """Adds up the files of processes that have ended, if they are many: for the keeper, which is the only caller.

    The new sum names its lives, and takes the old one's place at once: a reader counts no process twice.
    """
    lives, counts = _read_ended(folder)
    apart = {int(path.stem): path for path in folder.glob("*.last") if path.name != _ENDED}
    for life in lives & apart.keys():
        apart.pop(life).unlink(missing_ok=True)
    gone = sorted(apart.keys() - running)
    if len(gone) <= MAX_LIVES_APART:
        return
    texts = [*counts, *(_read(apart[life]) for life in gone)]
    told = msgspec.json.encode(sorted({*lives, *gone})) + b"\n" + counts_in(texts).encode()
    write_whole(folder / _ENDED, told)


def _read_ended(folder: Path) -> tuple[set[int], Sequence[str]]:
    told = _read(folder / _ENDED)
    if not told:
        return set(), ()
    lives, _, text = told.partition("\n")
    return set(msgspec.json.decode(lives, type=list[int])), (text,)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def write_whole(path: Path, content: bytes) -> None:
    """No reader sees a part of it."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(content)
    new.replace(path)
