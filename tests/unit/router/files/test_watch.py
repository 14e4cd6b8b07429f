"""Files are read when they change, and again and again while they cannot be used."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes.router import until
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.files.reading import read_file
from pdcluster_router.files.watch import FileWatch

pytestmark = pytest.mark.anyio
INTERVAL_S = 0.001


class Owner:
    """Its files can be used, or not for a reason, each time that they are read; the last answer stays."""

    def __init__(self, path: Path, *answers: str) -> None:
        self._answers: Iterator[str] = iter(answers)
        self._answer = ""
        self.num_read = 0
        self.watch = FileWatch("tls certificate", [path], INTERVAL_S, self._read)

    def _read(self) -> None:
        self.num_read += 1
        self._answer = next(self._answers, self._answer)
        if self._answer:
            raise ConfigError(self._answer)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The reasons that are in the log, in order."""
    begin = "tls certificate not changed reason="
    return lambda: [message.removeprefix(begin) for message in caplog.messages if message.startswith(begin)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tls.crt"
    path.write_text("one")
    return path


async def test_files_that_cannot_be_used_are_read_until_they_can_though_they_stay_the_same(
    path: Path, told: Callable[[], list[str]]
) -> None:
    """A certificate of tomorrow is good tomorrow, and nothing of its file changes then."""
    owner = Owner(path, *["not yet valid"] * 5, "")
    task = asyncio.create_task(owner.watch.run())
    path.write_text("the next one")
    await until(lambda: owner.num_read == 6)
    for _ in range(5):  # Looks at the same good file.
        await asyncio.sleep(INTERVAL_S)
    assert owner.num_read == 6
    assert told() == ["not yet valid"]
    task.cancel()


async def test_each_reason_is_told_once_and_again_where_somebody_asks(
    path: Path, told: Callable[[], list[str]]
) -> None:
    owner = Owner(path, "gone", "gone", "no key", "no key", "gone")
    task = asyncio.create_task(owner.watch.run())
    path.write_text("the next one")
    await until(lambda: owner.num_read > 8)
    assert told() == ["gone", "no key", "gone"]
    owner.watch.reload()
    assert told() == ["gone", "no key", "gone", "gone"]
    task.cancel()


def test_a_pipe_whose_writer_says_nothing_counts_as_empty(tmp_path: Path) -> None:
    pipe = tmp_path / "keys"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    assert read_file(pipe, "--api-key-file") == b""
    os.close(writer)
    os.close(reader)
